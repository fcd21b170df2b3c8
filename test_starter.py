"""The full test suite, in the order of starter.py's sections: make test

It takes about five minutes on two cores, with the real vLLM if it is installed."""
import ast, asyncio, contextlib, copy, errno, functools, importlib.util, io, itertools, json, math
import os, random, re, shutil, signal, socket, subprocess, sys, threading
import time, zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Models so small are as fast on one thread, and threads that wait for each other are slow on a busy
# machine. One test uses two.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM,
                          AutoTokenizer)

import starter
import tiny
from starter import Response, RunFailed, UserError

HERE = Path(starter.__file__).parent

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
has_vllm = importlib.util.find_spec("vllm")


def needs_vllm(test):
    """One process runs all of these: they share an engine."""
    is_missing = pytest.mark.skipif(not has_vllm, reason="needs vLLM")
    return pytest.mark.xdist_group("vllm")(is_missing(test))


# ---- Helpers: models, batches, runs ----------------------------------------------------------

VOCABULARY = 300
CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% if not loop.last or m['role'] != 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
KL = "--use_kl_penalty=True"
# Runs of a second or two. The tests of single options come after these and win.
SMALL = ["--use_vllm=False", "--n_numbers=2", "--rollout_batch_size=16", "--group_size=4",
         "--n_grpo_steps=3", "--n_eval=8", "--eval_every=2", "--save_every=1", "--lr=1e-3",
         "--warmup_steps=2", "--max_tokens=14", "--max_prompt_tokens=16", "--max_number=9"]


@pytest.fixture(autouse=True)
def process_kept():
    """What a run changes in this process is put back."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        # A run belongs to the script that was started. That is not pytest.
        patch.delattr(sys.modules["__main__"], "__file__", raising=False)
        yield
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGTERM, handlers[1])
    # A changed copy of the script has registered its own.
    starter.AttentionInterface.register("packed", starter.packed_attention)


@torch.no_grad()
def randomize(model, seed, scale=0.3):
    """Weights so large that mistakes show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)


def make_config(kind="llama", **changes):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
             "eos_token_id": 256, "pad_token_id": 257, "tie_word_embeddings": kind == "qwen3"}
    return AutoConfig.for_model(kind, **sizes | changes)


def make_policy(kind="llama", seed=0, **changes):
    config = make_config(kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed")
    randomize(model, seed)
    return starter.Policy(model, [256])


def eager_copy(policy):
    """The same weights in transformers' plainest attention, with gradients of its own."""
    config = copy.deepcopy(policy.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(policy.model.state_dict())
    return model


def make_rows(lengths, n_prompt=3, vocabulary=VOCABULARY, seed=0):
    """A batch of rows of these lengths, each with a prompt of its own."""
    rng = random.Random(seed)
    rows = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
    return starter.make_batch([row[:n_prompt] for row in rows],
                              [Response(row[n_prompt:]) for row in rows])


def make_groups(seed=0):
    """Four groups of four responses: some of one token, one row without any, one with a hole, and
    two prompts that differ in their last token."""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(2, VOCABULARY) for _ in range(n)]

    prompts = [draw(7), draw(3), draw(11)]
    prompts.append(prompts[2][:10] + [1])
    lengths = (5, 1, 9, 2, 3, 4, 1, 1, 6, 20, 2, 8, 4, 3, 2, 1)
    responses = [Response(draw(n)) for n in lengths]
    responses[2] = responses[2]._replace(mask=[1, 1, 0, 0, 1, 0, 1, 1, 1])
    responses[10] = responses[10]._replace(mask=[0, 1])
    batch = starter.make_batch(starter.repeat(prompts, 4), responses)
    batch.response_mask[5] = False
    return batch


def plain_log_probs(model, batch, temperature=1.0):
    logits = model(batch.input_ids).logits / temperature
    log_probs = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return torch.where(batch.response_mask, log_probs, 0)


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def relative(got, wanted):
    return float((got - wanted).detach().norm() / wanted.detach().norm())


def settings_of(**changes):
    """The settings that the functions of sections 4 and 5 read."""
    defaults = {"seed": 1, "rollout_batch_size": 24, "inner_epochs": 1, "n_minibatches": 1,
                "gradient_accumulation_steps": 1, "tokens_per_microbatch": 10**6, "group_size": 4,
                "temperature": 1.0, "device": "cpu", "max_grad_norm": 1.0, "warmup_steps": 0,
                "lr": 0.1, "kl_coef": 0.01, "target_kl": 0.1, "use_kl_penalty": True,
                "n_eval": 8, "max_prompt_tokens": 64, "prompt": "{question}=", "task": "file",
                "eval_task": "", "n_numbers": 3, "max_number": 20, "operations": "+-",
                "n_grpo_steps": 10, "max_minutes": 0.0,
                "ref_update_every": 0, "min_tokens": 0, "max_tokens": 12, "use_vllm": True,
                "vllm_sleep": False, "gpu_mem_util": 0.2, "max_turns": 5,
                "reward_truncated": True}
    return SimpleNamespace(**defaults | changes)


def countdown(**changes):
    return settings_of(**{"task": "countdown", "prompt": "{numbers}={target}:"} | changes)


@pytest.fixture(scope="session")
def warm_folder(tmp_path_factory):
    """The tiny model after a short warm start on sums and differences of two numbers."""
    folder = tmp_path_factory.mktemp("models") / "warm"
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()

    def examples(step):
        cfg = countdown(n_numbers=2, max_number=9)
        problems = [starter.make_problem(cfg, 7, 32 * step + i) for i in range(32)]
        return [(p["prompt"], f"<answer>{p['solution']}</answer>") for p in problems]

    tiny.warm_start(model, tokenizer, examples, 60)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_folder(tmp_path_factory):
    """-> function that writes a model folder with random weights and tiny's tokenizer"""
    def save(kind="qwen3", chat_template=CHAT, noise=0.3, **changes):
        folder = tmp_path_factory.mktemp(kind)
        tokenizer = tiny.make_tokenizer()
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config(kind, **changes))
        if noise:
            randomize(model, 0, noise)
        model.save_pretrained(folder)
        return folder
    return save


@pytest.fixture
def run_main(warm_folder, tmp_path):
    """-> function that trains in this process and returns the run folder"""
    def run(*arguments, out="out"):
        starter.main([f"--model_id={warm_folder}", *SMALL, f"--out_dir={tmp_path / out}",
                      *arguments])
        return (tmp_path / out / "latest").resolve()
    return run


# Importing torch takes seconds, so one process imports and forks a child for every run.
SERVER = """
import json, os, resource, sys
import starter
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["folder"])
        exec(request["before"])
        sys.argv = ["starter.py", *request["arguments"]]
        starter.run(starter.main)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Script:
    """starter.py as from a shell: start() it, wait until() it says something, kill it, end()."""

    def __init__(self, folder):
        self.log = folder / "log"
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, folder, *arguments, before=""):
        request = {"log": str(self.log), "folder": str(folder), "before": before,
                   "arguments": [str(argument) for argument in arguments]}
        self.log.unlink(missing_ok=True)
        print(json.dumps(request), file=self.server.stdin, flush=True)
        self.pid = int(self.server.stdout.readline())

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def until(self, words):
        wait_for(lambda: words in self.text() or not Path(f"/proc/{self.pid}").exists(), words)

    def end(self):
        """-> exit code"""
        return int(self.server.stdout.readline())

    def run(self, folder, *arguments, before=""):
        self.start(folder, *arguments, before=before)
        return self.end()


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    script = Script(tmp_path_factory.mktemp("script"))
    yield script
    script.server.stdin.close()
    script.server.wait()


def wait_for(condition, what, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def numbers_of(folder):
    """All metrics that must repeat."""
    return [{name: value for name, value in row.items() if name[:5] not in ("time/", "perf/")}
            for row in rows_of(folder)]


def weights_of(folder):
    path = Path(folder) / "model"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def equal_weights(first, second):
    first, second = weights_of(first), weights_of(second)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(numbers):
    return [{"question": f"{i}+{i % 7}", "answer": i + i % 7} for i in numbers]


# ---- 1. Task ---------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(2, 20, "+-"), (3, 20, "+-"), (4, 50, "+-*/"), (8, 9, "*/")])
def test_made_problems_have_a_solution_and_no_problem_is_in_both_splits(size):
    cfg, made = countdown(**dict(zip(("n_numbers", "max_number", "operations"), size))), {}
    for split in ("train", "held-out"):
        problems = [starter.make_problem(cfg, 5, i, split) for i in range(60)]
        assert problems == [starter.make_problem(cfg, 5, i, split) for i in range(60)]
        assert problems != [starter.make_problem(cfg, 6, i, split) for i in range(60)]
        for problem in problems:
            value = starter.evaluate_expression(problem["solution"], problem["numbers"])
            assert value == problem["target"] and 0 < value < 100
            assert len(problem["numbers"]) == size[0] and max(problem["numbers"]) <= size[1]
            assert set(problem["solution"]) <= set(f"0123456789(){size[2]}")
        made[split] = {(*sorted(p["numbers"]), p["target"]) for p in problems}
    assert not made["train"] & made["held-out"]


def test_held_out_problems_are_as_many_as_asked_for_or_an_error():
    rows, held_out = starter.read_task(countdown(n_eval=50))
    assert rows == [] and len(held_out) == 50
    assert held_out == starter.read_task(countdown(n_eval=50, seed=9))[1], "for every seed the same"
    with pytest.raises(UserError, match="no Countdown problem"):
        starter.read_task(countdown(n_numbers=2, max_number=1, operations="-"))


@pytest.mark.parametrize("text, numbers, value", [
    (" 7 + (3 * 5) ", [3, 5, 7], 22), ("8/3", [3, 8], Fraction(8, 3)), ("-3+5", [3, 5], 2),
    ("3/(8/8-1)", [3, 8, 8, 1], None), ("2**3", [2, 3], None), ("2//3", [2, 3], None),
    ("3+5", [3, 5, 5], None), ("3+5+5", [3, 5], None), ("35", [3, 5], None), ("3 5", [3, 5], None),
    ("3+x", [3], None), ("3+5#", [3, 5], None), ("(3+5", [3, 5], None), ("", [], None),
    ("()", [], None), ("9**9**9", [9, 9, 9], None), ("(" * 150, [], None), ("1" * 201, [1], None),
    ("٣+5", [3, 5], None), ("3\n+5", [3, 5], None), ("1_0+5", [10, 5], None)])
def test_expressions_are_exact_and_use_each_number_once(text, numbers, value):
    assert starter.evaluate_expression(text, numbers) == value


@pytest.mark.parametrize("text, reward", [
    ("<answer>3*5+7</answer>", 1.0), ("so <answer> 7 + 3*5 </answer>, done", 1.0),
    ("<answer>1</answer><answer>7+15</answer><answer>3*5+7</answer>", 1.0),
    ("<answer>3*5+7</answer><answer>3+5+7</answer>", 0.1), ("<answer>22</answer>", 0.1),
    ("<answer></answer>", 0.1), ("<answer>__import__('os')</answer>", 0.1),
    ("3*5+7", 0.0), ("<answer>3*5+7", 0.0), ("3*5+7</answer>", 0.0), ("#### 3*5+7", 0.0), ("",
                                                                                           0.0)])
def test_countdown_reward(text, reward):
    assert starter.reward_fn(text, {"numbers": [3, 5, 7], "target": 22}) == reward


@pytest.mark.parametrize("text, answer", [
    ("so <answer> 42 </answer>.", "42"), ("<answer>1</answer> no: <answer>2</answer>", "2"),
    (r"thus \boxed{7}", "7"), (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
    ("5+7\n#### 1,200", "1,200"), ("#### 18 dollars\nmore", "18 dollars"), ("####7", "7"),
    ("#### 1\n#### 2", "2"), ("#### 18 ####", "18"), ("<answer>42</answer></answer>", "42"),
    (r"\boxed{5} and \boxed{", "5"), (r"<answer>1</answer> \boxed{2} #### 3", "3"),
    (r"<answer>\boxed{5}</answer>", "5"),
    ("#### 3 <answer>1</answer>", "1"), ("<answer>1</answer>\n####\n<answer>2</answer>", "2"),
    ("\\boxed{3}\n#### **Answer:** $\\boxed{18}$", "18"), ("#### So: <answer>\n1\n</answer>", "1"),
    ("<answer>4</answer> No.\n#### Answer: <answer>5</answer>", "5"),
    ("<answer>1</answer> <answer>2", "1"), ("<answer>1<answer>2</answer>", "2"),
    ("<answer>5", None), ("5</answer>", None), (r"\boxed{5", None), ("####", None),
    ("####  \n ", None), ("the answer is 5", None), ("", None)])
def test_final_answer_is_the_last_complete_one(text, answer):
    found = starter.final_answer(text)
    assert (None if found is None else found.strip()) == answer


@pytest.mark.parametrize("given, right", [
    ("1,200.0", "1200"), ("1/2", ".5"), ("$5", "5"), ("50 %", "50"), ("5.", "5"), ("-3", "-3.00"),
    ("$1,200,000.50", "1200000.5"), ("2/4", "1/2"), ("007", "7"), ("-1/2", "-.5"), ("Blue", "blue"),
    ("  new   york ", "New York"), ("Yes.", "yes"), ("18 dollars", "18"), ("10000000000000000",
                                                                           1e16),
    ("0.00001", 0.00001), ("1e3", "1000"), (5, 5.0), ("9" * 30, "9" * 30 + ".0")])
def test_answers_that_mean_the_same_are_equal(given, right):
    assert starter.reward_fn(f"<answer>{given}</answer>", {"prompt": "?", "answer": right}) == 1.0
    assert starter.reward_fn(f"<answer>{given}</answer>", right) == 1.0
    assert starter.reward_fn(f"<answer>{given}</answer>", str(right)) == 1.0


@pytest.mark.parametrize("given, right", [
    ("5", "6"), ("0.5", "0.50001"), ("-5", "5"), ("blue", "red"), ("", "0"), ("1/0", "0"),
    ("٣", "3"), ("½", "1/2"), ("nan", "0"), ("1,2", "12"), ("12,3456", "123456"),
    ("1" * 25, "1" * 24 + "2"), ("9" * 400, "9" * 401), ("a" * 1000 + "x", "a" * 1000 + "y"),
    ("1" * 1000 + "2", "1" * 1000 + "3"), ("18 ####", "19")])
def test_answers_that_differ_are_not_equal(given, right):
    assert starter.reward_fn(f"<answer>{given}</answer>", {"answer": right}) == 0.1


@pytest.mark.parametrize("text", [
    "#### 1" + "." * 120_000 + "x", "9" * 10**6, "{" * 10**6, "," * 10**6, "1," * 10**5,
    "\\boxed{" * 10**5, "\\boxed{{" * 10**5, "####" * 10**5, "#### " * 10**5, "<answer>" * 10**5,
    "</answer>" * 10**5, "<answer>" + "<" * 10**6, "$" * 10**6, " " * 10**6, "1/" + "0" * 10**6,
    "1e" + "9" * 10**6, "1 " + "a " * 10**5, "\0\ud800\u202e", "\n" * 10**6, "####\n" * 10**5],
    ids=range(20))
def test_rewards_take_linear_time_whatever_the_text(text):
    start = time.thread_time()
    for form in ("{}", "<answer>{}</answer>", r"\boxed{{{}}}", "#### {}", "{}x"):
        assert starter.reward_fn(form.format(text), {"answer": "5"}) in (0.0, 0.1)
        assert starter.reward_fn(form.format(text), {"numbers": [1], "target": 1}) in (0.0, 0.1)
    assert time.thread_time() - start < 20, "seconds of this thread for 10 texts of 1e6 characters"


PIECES = ["<answer>", "</answer>", "\\boxed{", "{", "}", "####", "\n", "$", "%", ",", ".", "/", "-",
          "0", "12", "e9", "(", ")"]


@settings(max_examples=500, deadline=None)
@given(strategies.lists(strategies.sampled_from(PIECES) | strategies.text(max_size=8)).map("".join))
def test_no_text_makes_the_reward_fail(text):
    answer = starter.final_answer(text)
    assert answer is None or answer in text
    if answer is not None:
        assert starter.reward_fn(text, {"answer": answer}) == 1.0
    assert starter.reward_fn(text, {"numbers": [12], "target": 12}) in (0.0, 0.1, 1.0)
    assert starter.reward_fn(f"<answer>{text}</answer>", {"answer": "5"}) in (0.0, 0.1, 1.0)


def test_jsonl_rows_are_read_with_prompts_from_the_template(tmp_path):
    path = tmp_path / "task.jsonl"
    lines = ['\ufeff{"question": "2+3", "answer": 5}', "",
             '{"prompt": "7?", "answer": "so\\n#### 7"}',
             '{"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "8?"}], '
             '"answer": 8.5, "source": "book"}',
             '{"prompt": "9?", "answer": "# A\\n#### B\\nb\\n#### C\\nc"}']
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = starter.read_jsonl(path, settings_of())
    assert [row["prompt"] for row in rows] == ["2+3=", "7?", [
        {"role": "system", "content": ""}, {"role": "user", "content": "8?"}], "9?"]
    answers = ["5", "7", "8.5", "# A\n#### B\nb\n#### C\nc"]  # the last has headings
    assert [row["answer"] for row in rows] == answers and rows[2]["source"] == "book"
    problem = starter.make_problem(countdown(n_numbers=2), 0, 0)
    assert problem["prompt"] == "{} {}={}:".format(*problem["numbers"], problem["target"])


GOOD = '{"prompt": "2+3?", "answer": "5"}\n' * 2
BAD_FILES = [
    (None, "No such file"), ("", "no rows"), ("\n \n", "no rows"),
    (GOOD + "{'prompt': 1}", "line 3"), ("prompt,answer\n2+3?,5\n", "A JSONL file has"),
    (GOOD + "\n[1, 2]\n", "line 4"), ("null", "line 1"), (GOOD + "[" * 100_000, "line 3"),
    ('{"prompt": "x"}', "answer"), ('{"prompt": "x", "answer": null}', "answer"),
    ('{"prompt": "x", "answer": true}', "answer"), ('{"prompt": "x", "answer": " "}', "answer"),
    ('{"prompt": "x", "answer": ["5"]}', "answer"), ('{"prompt": "x", "answer": "5 ####"}',
                                                     "answer"),
    ('{"answer": "5"}', "set --prompt"), ('{"prompt": 5, "answer": "5"}', "line 1"),
    ('{"prompt": "", "answer": "5"}', "line 1"),
    ('{"prompt": [], "answer": "5"}', "line 1"),
    ('{"prompt": {"role": "user"}, "answer": "5"}', "line 1"),
    ('{"prompt": [{"role": "user"}], "answer": "5"}', "line 1"),
    ('{"prompt": [{"role": " ", "content": "2+3"}, {"role": "user", "content": "?"}], '
     '"answer": "5"}', "with role and content"),
    ('{"prompt": [{"role": "user", "content": ["x"]}], "answer": "5"}', "line 1"),
    ('{"prompt": "x", "answer": NaN}', "line 1"), ('{"prompt": "\\ud800", "answer": "5"}',
                                                   "line 1"),
    (b'{"prompt": "caf\xe9", "answer": "5"}', "task.jsonl: 'utf-8'"),
    (b"\x80PARQUET\x00\xff", "task.jsonl: 'utf-8'")]


@pytest.mark.parametrize("content, words", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_jsonl_file_is_one_line_and_nothing_is_written(run_main, tmp_path, content, words):
    path = tmp_path / "task.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        run_main(f"--task={path}")
    assert words in str(error.value) and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def make_task(rows, eval_rows=(), **changes):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = CHAT
    return starter.Task(settings_of(**changes), rows, list(eval_rows), tokenizer)


def prompts_of(task, n):
    return [task.problem(i)["rendered"] for i in range(n)]


def question_rows(numbers):
    return [{"prompt": f"{row['question']}=", "answer": row["answer"]} for row in sums(numbers)]


def test_every_epoch_contains_all_problems_in_another_order():
    task = make_task(question_rows(range(30)))
    n = len(task.training)
    epochs = [prompts_of(task, 3 * n)[i * n:(i + 1) * n] for i in range(3)]
    assert n == 24 and all(len(set(epoch)) == n for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert prompts_of(make_task(question_rows(range(30)), seed=2), n) != epochs[0]


def test_many_prompts_are_announced_before_they_are_encoded(capsys):
    make_task(question_rows(range(10)))
    assert capsys.readouterr().out == ""
    make_task([{"prompt": f"{i}=", "answer": "1"} for i in range(10_001)])
    assert capsys.readouterr().out == "encoding 10,001 prompts ...\n"


def test_the_first_step_trains_on_the_first_problems(run_main, tmp_path, monkeypatch):
    """Four prompts per step, 16 problems: four steps are the first epoch."""
    path, seen = write_rows(tmp_path / "task.jsonl", question_rows(range(20))), []
    problem = starter.Task.problem
    monkeypatch.setattr(starter.Task, "problem",
                        lambda task, index: seen.append(index) or problem(task, index))
    run_main(f"--task={path}", "--n_grpo_steps=4", "--n_eval=4")
    assert seen == list(range(16))


def test_no_rendered_prompt_is_on_both_sides_of_the_split():
    rows = question_rows(range(40))
    twins = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    task = make_task(rows + twins)
    held_out = {row["rendered"] for row in task.held_out}
    assert len(task.held_out) == 8 and len(task.training) == 80 - 2 * len(held_out)
    assert not held_out & set(prompts_of(task, len(task.training)))
    other = make_task((rows + twins)[::-1], seed=2)
    assert {row["rendered"] for row in other.held_out} == held_out


def test_held_out_problems_are_different_ones():
    """Copies stand beside each other, since rows are in the order of their hashes."""
    rows = question_rows(range(40))
    task = make_task(rows * 5)
    held_out = {row["rendered"] for row in task.held_out}
    assert len(task.held_out) == len(held_out) == 8 and len(task.training) == 5 * 32
    assert held_out == {row["rendered"] for row in make_task(rows).held_out}


def test_games_with_one_prompt_differ_in_what_they_hide(monkeypatch):
    rows = [{"prompt": "Guess my number.", "answer": str(i)} for i in range(20)]
    with pytest.raises(UserError, match="the prompt of a held-out row are left out"):
        make_task(rows)
    monkeypatch.setattr(starter, "reply", print)
    task = make_task(rows + rows)
    hidden = {row["answer"] for row in task.held_out}
    trained = {row["answer"] for row in task.training}
    assert len(hidden) == 4 and len(trained) == 16 and not hidden & trained


def test_rows_of_eval_task_are_not_trained_on():
    task = make_task(question_rows(range(20)), question_rows(range(15, 25)))
    assert len(task.training) == 15 and len(task.held_out) == 8
    trained = set(prompts_of(task, 15))
    assert not trained & {task.encode(row)["rendered"] for row in question_rows(range(15, 25))}
    with pytest.raises(UserError, match="too few rows: 0 left, 5 held out"):
        make_task(question_rows(range(5)), question_rows(range(5)))
    with pytest.raises(UserError, match="too few rows"):
        make_task(question_rows(range(20)), [], eval_task="empty.jsonl")


def test_long_prompts_are_left_out_and_counted(capsys):
    long = {"prompt": "x" * 100, "answer": "1"}
    task = make_task([*question_rows(range(20)), long])
    length = len(task.encode(long)["prompt_ids"])
    assert len(task.training) == 16
    wanted = ("1 of 21 prompts are longer than max_prompt_tokens=64; for all of them: "
              f"--max_prompt_tokens={length}\n")
    assert wanted in capsys.readouterr().out
    assert len(make_task([*question_rows(range(20)), long],
                         max_prompt_tokens=length).training) == 17
    with pytest.raises(UserError, match="too few rows"):
        make_task([long, long | {"prompt": "y" * 100}])


def test_prompts_are_rendered_as_the_model_was_taught():
    tokenizer = tiny.make_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    assert starter.render_chat("2+3?", tokenizer) == "2+3?"
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    tokenizer.chat_template = None
    assert starter.render_chat(messages, tokenizer) == "Be brief.\n2+3?\n"
    assert starter.render_chat(begun, tokenizer) == "Be brief.\n2+3?\nIt is"
    tokenizer.chat_template = CHAT
    wanted = "<system>Be brief.<|end|><user>2+3?<|end|><assistant>"
    assert starter.render_chat(messages, tokenizer) == wanted
    assert starter.render_chat("2+3?", tokenizer) == "<user>2+3?<|end|><assistant>"
    # A last assistant turn is continued, not closed and opened again.
    assert starter.render_chat(begun, tokenizer) == wanted + "It is"
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        starter.render_chat(messages, tokenizer)


def test_special_answer_tags_survive_decoding_and_end_tokens_do_not():
    tokenizer = tiny.make_tokenizer()
    ids = tokenizer.encode("<answer>5</answer>")
    for ends in ([], [256], [257, 256, 257], [7]):
        assert starter.decode(tokenizer, ids + ends, [256, 7]) == "<answer>5</answer>"
    # Inside a text nothing is hidden: 5<|pad|>6 is not 56.
    inside = [ord("5"), 257, ord("6"), 5000, 5001, ord("7"), 256]
    assert starter.decode(tokenizer, inside, [256]) == "5<|pad|>6\ufffd7"


PROBLEM = {"numbers": [3, 5, 7], "target": 22, "operations": "+-*/"}
HONEST = "<answer>3*5+7</answer>"


@pytest.mark.parametrize("text, most", [
    (HONEST + " and much more text", 1.0), (HONEST * 50, 1.0), (HONEST + "<think>", 1.0),
    (f"<answer>{HONEST}</answer>", 1.0), (f"<answer>3+5+7{HONEST}", 1.0),
    (HONEST + "<answer>3+5+7</answer>", 0.1), (HONEST * 9 + "<answer></answer>", 0.1),
    ("<answer>3+5+7 3*5+7</answer>", 0.1), ("<answer>3*5+7=22</answer>", 0.1),
    ("<ans<answer>wer>3*5+7</answer>", 0.1), ("<answer>22</answer>", 0.1),
    (f"<think>{HONEST}</think>", 0.0), (f"<think>{HONEST}", 0.0), (f"{HONEST}</think> so", 0.0),
    (f"<think>a</think><think>{HONEST}", 0.0), (f"<think>{HONEST}</think>#### 3*5+7", 0.0),
    ("#### 3*5+7", 0.0), (r"\boxed{3*5+7}", 0.0), ("", 0.0), ("<answer>" * 99, 0.0)])
def test_no_text_earns_more_than_an_honest_answer(text, most):
    assert starter.reward_fn(HONEST, PROBLEM) == 1.0
    assert starter.reward_fn(text, PROBLEM) == most


@pytest.mark.parametrize("text, reward", [
    ("<answer>5</answer>\n#### Heading", 1.0), ("#### Heading\n<answer>5</answer>", 1.0),
    ("#### 5\n#### Check", 1.0), ("<answer>5</answer>\n#### 6", 0.1), ("#### Heading", 0.0),
    ("<answer>5</answer>\n#### 2. Check", 1.0), ("#### 5\n#### 1) Steps", 1.0),
    ("#### **5.**", 1.0), (r"#### \$5", 1.0), ("#### \N{MINUS SIGN}5", 0.1), ("#### 5.", 1.0),
    ("<answer>4 or 5</answer>", 0.1), ("<answer>4, 5</answer>", 0.1),
    (r"<answer>5</answer> \boxed{4}", 0.1), (r"<think>\boxed{5}</think>", 0.0),
    ("<think>#### 5", 0.0)])
def test_headings_and_lists_of_guesses_are_no_answers(text, reward):
    assert starter.reward_fn(text, {"answer": "5"}) == reward


@pytest.mark.parametrize("ids, reward", [
    (["<answer>3*5", 257, "+7</answer>", 256], 0.1), (["<answer>3*5", 299, "+7</answer>"], 0.1),
    (["<answer>3*5", 256, "+7</answer>", 256], 0.1), ([HONEST, 257, 256, 257], 1.0),
    ([256], 0.0), ([257, 256, 256], 0.0), ([256, HONEST, 256], 1.0)])
def test_tokens_without_letters_hide_nothing_inside_an_answer(ids, reward):
    tokenizer = tiny.make_tokenizer()
    parts = [tokenizer.encode(x) if isinstance(x, str) else [x] for x in ids]
    text = starter.decode(tokenizer, sum(parts, []), [256])
    assert starter.reward_fn(text, PROBLEM) == reward
    assert not text.endswith(("<|end|>", "<|pad|>"))


@pytest.mark.parametrize("answer, truth, is_equal", [
    ("3 am", "3 pm", False), ("2 thousand", "2 million", False), ("2 thousand", "2", False),
    ("2 thousands", "2", False), ("2 dozens of eggs", "2", False),
    ("100 m", "100 km", False), ("5 is wrong", "5", False), ("5 square m", "5 m", False),
    ("18%", "$18", False), ("5 apples", "5 pears", False), ("5 k", "5", False),
    ("5 s", "5 km", False), ("100 m", "100 ms", False), (r"5\pi", "5", False), ("2i", "2", False),
    (r"\$18", "18", True), (r"18\%", "18", True), (r"18 \text{ dollars}", "$18", True),
    ("**18**", "18", True), ("\N{MINUS SIGN}5", "-5", True), ("18 dollars", "$18", True),
    ("\N{MINUS SIGN} 5", "-5", True), ("-$5", "-5", True), ("5 apples", "5 apple", True),
    ("18", "18 dollars", True), ("$18.00", "18 dollar", True), ("2 thousand", "2 Thousand", True),
    ("18 miles per hour", "18", True), ("100 km", "100 km", True)])
def test_units_may_be_left_out_but_not_exchanged(answer, truth, is_equal):
    assert starter.is_same(answer, truth) == starter.is_same(truth, answer) == is_equal
    for form in (f"<answer>{answer}</answer>", rf"so \boxed{{{answer}}}."):
        assert starter.reward_fn(form, {"answer": truth}) == (1.0 if is_equal else 0.1)


def responses_of(task, problem, *texts, finished=True):
    """Responses to a problem, as roll_out() makes them"""
    responses = []
    for text in texts:
        game = starter.Game(problem | {"prompt_ids": []}, task, PARAMS | {"max_tokens": 99})
        game.play(Response(task.tokenizer.encode(text) + [256]))
        responses.append(Response(game.ids, finished=finished, problem=game.problem))
    return responses


def test_a_reward_may_change_its_problem():
    """Every response has a copy of its own, and the data set stays as it is."""
    rows = [{"prompt": f"{i}?", "answer": "5", "tests": [1, 2]} for i in range(4)]
    task = make_task(rows, [{"prompt": "?", "answer": "1"}])
    problem, seen = task.problem(0), []

    def reward(text, problem):
        seen.append(problem["tests"].pop())
        return 0.0

    starter.grade(responses_of(task, problem, "a", "b"), reward, True, 2)
    assert seen == [2, 2] and task.problem(0)["tests"] == [1, 2]


def test_an_answer_that_the_prompt_began_earns_its_reward():
    prompt = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "<answer>"}]
    task = make_task([{"prompt": prompt, "answer": "5"}] * 2, [{"prompt": "?", "answer": "1"}])
    problem = task.problem(0)
    assert problem["rendered"].endswith("<assistant><answer>")
    responses = responses_of(task, problem, "5</answer>", "6</answer>", "5")
    texts, rewards = starter.grade(responses, starter.reward_fn, False, 3)
    assert texts == ["5</answer>", "6</answer>", "5"] and rewards == [1.0, 0.1, 0.0]
    assert starter.reward_fn("5</answer>", {"answer": "5", "rendered": "2+3?"}) == 0.0
    # Reasoning that the prompt began and nobody ended is no answer.
    thinking = {"answer": "5", "rendered": "2+3?<think>\n"}
    texts = ("<answer>5</answer>", "hm</think><answer>5</answer>")
    assert [starter.reward_fn(text, thinking) for text in texts] == [0.0, 1.0]


def test_only_the_operations_of_the_problem_may_be_used():
    rewards = [starter.reward_fn(HONEST, PROBLEM | {"operations": x}) for x in ("+-", "+*", "*/")]
    assert rewards == [0.1, 1.0, 0.1]
    assert starter.make_problem(countdown(operations="+"), 0, 0)["operations"] == "+"


@pytest.mark.parametrize("row, words", [
    ('{"input": "2+3", "answer": 5}', ["line 1", "input, answer", "KeyError('question')"]),
    ('[{"question": "2+3", "answer": 5}]', ["line 1", "a list, not an object with prompt"]),
    ('{"question": "2+3", "answer": 5, "turns": 3}', ["line 1", "rename the field turns"]),
    ('{"question": null, "answer": 5}', ["line 1", "KeyError('question')"]),
    ('{"question": "2+3", "output": 5}', ["answer must be", "the fields are question, output"]),
    ('{"prompt": 5, "answer": 5}', ["prompt must be a text, or chat messages with role"]),
    ('{"prompt": ["2+3"], "answer": 5}', ["prompt must be a text, or chat messages with role"]),
    (None, ["a task is countdown or a JSONL file", "No such file", "coutdown"])])
def test_errors_in_data_say_what_is_expected(tmp_path, row, words):
    path = tmp_path / "coutdown"
    if row:
        path.write_text(row)
    with pytest.raises(UserError) as error:
        starter.read_jsonl(path, settings_of())
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.fixture
def save_chatml(save_folder):
    """-> function that writes a model folder; its turns are closed by an added token, 260"""
    def save(vocabulary):
        folder = save_folder(chat_template=CHAT.replace("<|end|>", "<|im_end|>"),
                             vocab_size=vocabulary)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
        tokenizer.save_pretrained(folder)
        return folder
    return save


@pytest.mark.parametrize("vocabulary, stop_ids", [(300, [256, 260]), (260, [256])])
def test_the_token_that_closes_a_turn_is_a_stop_id(save_chatml, tmp_path, vocabulary, stop_ids):
    """As in Qwen2.5, where <|im_end|> closes turns and <|endoftext|> is the end of a text"""
    folder = save_chatml(vocabulary)
    policy, tokenizer = starter.init_policy(str(folder))
    assert tokenizer.eos_token_id == 256 and tokenizer.convert_tokens_to_ids("<|im_end|>") == 260
    assert policy.stop_ids == stop_ids, "without those that the model does not have"
    policy.model.generation_config.eos_token_id = [7, 999]
    assert starter.find_stop_ids(policy.model, tokenizer) == [7, *stop_ids]
    starter.save_model(policy, tokenizer, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.generation_config.eos_token_id == stop_ids, "it ends where it was trained to"


@pytest.mark.parametrize("changes", [
    {"do_sample": True, "top_p": 0.8}, {"temperature": 0.7}, {"pad_token_id": -1},
    {"temperature": 0.0}, {"early_stopping": True}, {"repetition_penalty": 1.1}])
def test_a_saved_model_samples_as_in_training(save_folder, tmp_path, changes):
    folder = save_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256} | changes))
    policy, tokenizer = starter.init_policy(str(folder))
    starter.save_model(policy, tokenizer, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = model.generation_config
    assert config.do_sample and config.eos_token_id == [256] and config.top_k == 0
    assert not config.temperature and not config.top_p and not config.repetition_penalty
    model.generate(torch.tensor([[65, 66]]), max_new_tokens=2)


# ---- 2. Policy -------------------------------------------------------------------------------

@pytest.mark.parametrize("chunk", [2**28, 3 * VOCABULARY], ids=["whole", "chunked"])
@pytest.mark.parametrize("rows", ["shared", "unshared"])
@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1})])
def test_packed_log_probs_and_gradients_equal_the_plain_formula(monkeypatch, kind, changes, rows,
                                                                chunk):
    monkeypatch.setattr(starter, "LOGITS_PER_CHUNK", chunk)
    policy = make_policy(kind, **changes)
    # The last row has a prompt and no response token.
    batch = make_groups() if rows == "shared" else make_rows((5, 19, 9, 12, 3))
    weight = torch.randn(batch.labels.shape, generator=torch.Generator().manual_seed(1))
    got = starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                         response_mask=batch.response_mask, temperature=0.7)
    (got * weight).sum().backward()
    model = eager_copy(policy)
    wanted = plain_log_probs(model, batch, 0.7)
    (wanted * weight).sum().backward()
    assert got.dtype == torch.float32 and torch.allclose(got, wanted, atol=3e-5)
    assert relative(gradient(policy), gradient(model)) < 1e-5


def test_a_prompt_shared_by_a_group_is_computed_once():
    batch = make_groups()
    rows, device = (batch.input_ids, batch.labels, batch.response_mask), torch.device("cpu")
    inputs, predictors, targets = starter.pack(*rows, device)
    # Prompts, and responses without their last tokens. A prompt ends before the first token of the
    # mask, so row 10, whose first token is masked, is not shared and lays its prompt down again.
    first, second = 7 + (4 + 0 + 8 + 1), 3 + 2 + 0 + 0
    third, fourth = (11 + 5) + 19 + (11 + 1) + (11 + 7), (11 + 3) + 2 + 1 + 0
    assert inputs["input_ids"].shape == (1, first + second + third + fourth)
    assert len(targets) == batch.response_mask.sum() == len(predictors)
    alone, *_ = starter.pack(*(tensor[:4] for tensor in rows), device)
    assert alone["input_ids"].shape == (1, first)


def test_log_probs_without_mask_with_negative_labels_and_of_any_model():
    policy, batch = make_policy(), make_rows((8, 8))
    model = eager_copy(policy)
    everything = starter.get_response_log_probs(policy, batch.input_ids, batch.labels)
    batch.response_mask[:] = True
    assert torch.allclose(everything, plain_log_probs(model, batch), atol=1e-5)
    labels = batch.labels.clone()
    labels[:, :3] = -100
    for one in (policy, model):
        got = starter.get_response_log_probs(one, batch.input_ids, labels)
        assert torch.allclose(got[:, 3:], everything[:, 3:], atol=1e-5) and (got[:, :3] == 0).all()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that is made, forward and backward."""
    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return result


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_logits_never_exist_whole(monkeypatch, estimator):
    vocabulary, chunk = 4096, 8
    monkeypatch.setattr(starter, "LOGITS_PER_CHUNK", chunk * vocabulary)
    policy, reference = (make_policy(seed=seed, vocab_size=vocabulary) for seed in (0, 1))
    batch, kept = make_rows([3 + chunk] * 8, vocabulary=vocabulary), []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        starter.grpo_microbatch_step(policy, batch.input_ids, batch.labels, batch.response_mask,
                                     torch.ones(8), 1, 0.2, ref_model=reference, kl_coef=0.1,
                                     kl_estimator=estimator)
    assert largest.size <= vocabulary * 32, "the output layer is as large as 4 chunks, of 8"
    assert not [shape for shape in kept if shape[-1:] == (vocabulary,)], "logits kept for backward"


def test_exact_kl_and_entropy_equal_the_plain_formula(monkeypatch):
    monkeypatch.setattr(starter, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    policy, reference, batch = make_policy(), make_policy(seed=1), make_groups()
    _, metadata = starter.grpo_microbatch_step(
        policy, batch.input_ids, batch.labels, batch.response_mask, torch.zeros(16), 1, 0.2, "dapo",
        ref_model=reference, kl_coef=0.5, kl_estimator="exact", temperature=0.8)
    models = eager_copy(policy), eager_copy(reference)
    log_probs, ref = (model(batch.input_ids).logits[batch.response_mask].div(0.8).log_softmax(-1)
                      for model in models)
    kl = (log_probs.exp() * (log_probs - ref)).sum(-1)
    (0.5 * kl.mean()).backward()
    assert metadata["kl_penalty_mean"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert metadata["kl_mean"] == pytest.approx(kl.mean().item(), rel=1e-4)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean().item()
    assert metadata["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert relative(gradient(policy), gradient(models[0])) < 1e-4


def test_exact_kl_and_entropy_where_both_models_ban_a_token():
    logits, ref_logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = ref_logits[:, 3] = -math.inf
    logits.requires_grad_()
    targets = torch.tensor([0, 1, 2, 4, 5])
    log_probs, entropy, _, kl = starter.token_stats(logits, targets, ref_logits)
    (log_probs.sum() + kl.sum()).backward()
    rest = [0, 1, 2, 4, 5, 6, 7, 8]
    policy, ref = logits[:, rest].log_softmax(-1), ref_logits[:, rest].log_softmax(-1)
    assert torch.allclose(kl, (policy.exp() * (policy - ref)).sum(-1), atol=1e-6)
    assert torch.allclose(entropy, -(policy.exp() * policy).sum(-1), atol=1e-6)
    assert torch.isfinite(logits.grad).all()


WINDOW = {"sliding_window": 5, "num_hidden_layers": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "num_local_experts": 4, "shared_expert_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
          "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
          "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
          "num_key_value_heads": 4, "head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
         "mamba_chunk_size": 8, "mamba_expand": 2}
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
          "global_head_dim": 16, "num_kv_shared_layers": 2,
          "layer_types": ["sliding_attention", "full_attention"] * 2}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
            "chunk_size": 8, "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"]}
GPT = {"n_head": 4, "n_embd": 32, "n_layer": 2}
PACKED = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": EXPERTS, "gemma3_text": WINDOW,
    "gemma4_text": WINDOW | GEMMA4 | {"final_logit_softcapping": 5.0}, "smollm3": WINDOW,
    "olmo2": {}, "olmo3": WINDOW, "mistral": WINDOW, "phi3": WINDOW, "phi": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3},
    "cohere2": WINDOW | {"logit_scale": 0.25}, "nanochat": {"final_logit_softcapping": 5.0},
    "gpt2": GPT, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phimoe": EXPERTS | {"sliding_window": None}}  # its routers are noisy in train() mode
PADDED = {
    "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR | EXPERTS, "qwen3_next": LINEAR | EXPERTS,
    "olmo_hybrid": LINEAR, "gemma2": WINDOW | {"attn_logit_softcapping": 5.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "deepseek_v3": LATENT,
    "granitemoehybrid": MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"],
                                           "logits_scaling": 4.0, "shared_intermediate_size": 16},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3}, "nemotron_h": NEMOTRON,
    "gpt_oss": WINDOW | EXPERTS, "bamba": MAMBA | {"attn_layer_indices": [1]},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "nemotron": {}, "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "llama4_text": EXPERTS | {"attention_chunk_size": 8, "num_hidden_layers": 4}, "doge": {},
    "gptj": GPT | {"rotary_dim": 4}, "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
    "recurrent_gemma": {"logits_soft_cap": 5.0, "num_hidden_layers": 3, "attention_window_size": 5},
    "inkling_text": EXPERTS | {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "local_layer_ids": [0], "n_routed_experts": 4, "logits_mup_width_multiplier": 4.0}}


def stats_row_by_row(model, ref, batch, temperature):
    """-> log-probs, entropy, reference log-probs, exact KL [B, T] by each model's own .logits"""
    stats = torch.zeros(4, *batch.labels.shape)
    for b, length in enumerate(batch.lengths):
        ids, labels = batch.input_ids[b:b + 1, :length - 1], batch.labels[b, :length - 1, None]
        policy, reference = (one(ids).logits[0].div(temperature).log_softmax(-1)
                             for one in (model, ref))
        row = [policy.gather(1, labels)[:, 0], -(policy.exp() * policy).sum(1),
               reference.gather(1, labels)[:, 0], (policy.exp() * (policy - reference)).sum(1)]
        stats[:, b, :length - 1] = torch.stack(row)
    return torch.where(batch.response_mask, stats, 0)


def check_kind(folders, layout, batch):
    """Log-probs, entropy, exact KL, gradients: those of the model's own head, each row alone."""
    policy, reference = (starter.init_policy(str(folder))[0] for folder in folders)
    assert policy.layout is layout and policy.training
    plain = [AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
             for folder in folders]
    rows = batch.input_ids, batch.labels, batch.response_mask
    got = starter.response_stats(policy, *rows, 0.7, reference)
    wanted = stats_row_by_row(*plain, batch, 0.7)
    weight = torch.randn(batch.labels.shape, generator=torch.Generator().manual_seed(1))
    for log_probs, _, _, kl in (got, wanted):
        (log_probs * weight + kl).sum().backward()
    for mine, theirs in zip(got, wanted):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert relative(gradient(policy), gradient(plain[0])) < 3e-5
    return policy, rows, wanted[0]


@pytest.mark.parametrize("kind", PACKED)
def test_packed_models_have_the_log_probs_of_their_own_head(save_folder, monkeypatch, kind):
    folders = [save_folder(kind, noise=noise, **PACKED[kind]) for noise in (0.2, 0.196)]
    policy, rows, wanted = check_kind(folders, starter.pack, make_groups())

    def leaky(*arguments):
        inputs, *rest = pack(*arguments)
        ends = torch.tensor([0, inputs["input_ids"].numel()], dtype=torch.int32)
        return inputs | {"query_starts": ends, "key_starts": ends, "longest": int(ends[1]),
                         "key_slots": torch.arange(ends[1])}, *rest

    pack = starter.pack
    monkeypatch.setattr(starter, "pack", leaky)
    assert relative(starter.response_stats(policy, *rows, 0.7)[0], wanted) > 1e-3


@pytest.mark.parametrize("kind", PADDED)
def test_padded_models_have_the_log_probs_of_their_own_head(save_folder, kind):
    folders = [save_folder(kind, noise=noise, **PADDED[kind]) for noise in (0.2, 0.196)]
    policy, rows, wanted = check_kind(folders, starter.pad, make_groups())
    empty = [tensor[:0] for tensor in rows]
    assert starter.response_stats(policy, *empty)[0].shape == (0, rows[0].shape[1])
    # Packed all the same, it is refused or wrong.
    policy.model.config._attn_implementation_internal = "packed"
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError, KeyError):
        assert relative(starter.response_stats(policy, *rows, 0.7)[0], wanted) > 1e-3


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "gemma2", "doge", "granite"])
def test_the_layout_does_not_depend_on_the_size_of_the_weights(save_folder, kind):
    """With fresh weights a leak between rows is smaller than any fixed tolerance."""
    changes = {**PACKED, **PADDED}[kind]
    policy, _ = starter.init_policy(str(save_folder(kind, noise=0, **changes)))
    assert policy.layout is (starter.pack if kind in PACKED else starter.pad)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
          "num_attention_heads": 4, "head_dim": 8}
PATCHES = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
           "out_hidden_size": 32, "num_position_embeddings": 16}


@pytest.mark.parametrize("kind, text_kind, vision", [
    ("qwen3_5", "qwen3_5_text", PATCHES), ("gemma3", "gemma3_text", VISION),
    ("gemma4", "gemma4_text", VISION | {"num_key_value_heads": 4, "global_head_dim": 8}),
    ("mistral3", "mistral", VISION | {"model_type": "pixtral"}),
    ("llama4", "llama4_text", VISION | {"vision_output_dim": 32})])
@pytest.mark.parametrize("is_tied", [True, False])
def test_of_a_multimodal_model_the_text_part_is_trained_and_saved(tmp_path, kind, text_kind, vision,
                                                                  is_tied):
    text = make_config(text_kind, **{**PACKED, **PADDED}[text_kind]).to_dict()
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    config.tie_word_embeddings = is_tied
    whole = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    randomize(whole, 0)
    whole.save_pretrained(tmp_path / "whole")
    tiny.make_tokenizer().save_pretrained(tmp_path / "whole")
    policy, tokenizer = starter.init_policy(str(tmp_path / "whole"))
    assert policy.layout is (starter.pad if text_kind in PADDED else starter.pack)
    starter.save_model(policy, tokenizer, tmp_path / "text")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    batch = make_groups()
    got = starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                         response_mask=batch.response_mask)
    for model in (whole, text):
        assert relative(got, plain_log_probs(model, batch)) < 1e-5
    assert type(text) is type(policy.model) and "ForCausalLM" in type(text).__name__


def test_a_model_is_refused_if_its_log_probs_are_not_its_own(save_folder):
    """This one scales its logits in a way of its own."""
    with pytest.raises(UserError, match="is not supported: its log-probs differ") as error:
        starter.init_policy(str(save_folder("hyperclovax", logits_scaling=0.25)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind, layout", [
    ("qwen2_moe", starter.pad), ("phimoe", starter.pad), ("mistral", starter.pack)])
def test_a_window_longer_than_the_rows_of_the_check_is_kept(save_folder, kind, layout):
    """The first two have it in their mask only."""
    changes = EXPERTS | {"sliding_window": 40, "use_sliding_window": True,
                         "layer_types": ["sliding_attention"] * 2}
    folder = save_folder(kind, noise=0.2, **changes)
    policy, _ = starter.init_policy(str(folder))
    assert policy.layout is layout and policy.model.config.sliding_window == 40
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(2, 250, (2, 61), generator=torch.Generator().manual_seed(0))
    wanted = plain(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    got = starter.get_response_log_probs(policy, ids[:, :-1], ids[:, 1:])
    assert torch.allclose(got, wanted, atol=1e-5)
    assert torch.equal(got, starter.get_response_log_probs(policy, ids[:, :-1], ids[:, 1:]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   ImportError("needs mamba-ssm"), IndexError("no encoder")])
def test_other_errors_of_the_check_are_shown_as_what_they_are(save_folder, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(starter, "response_stats", fail)
    shown = UserError if isinstance(error, IndexError) else type(error)
    with pytest.raises(shown, match=str(error)):
        starter.init_policy(str(save_folder()))


def test_a_model_that_cannot_be_loaded_is_one_line(save_folder, tmp_path):
    folder = save_folder()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    for bad in (folder, tmp_path, "no/such/model"):
        with pytest.raises(UserError, match="cannot load the model"):
            starter.init_policy(str(bad))


@pytest.mark.parametrize("kind, changes", [
    ("gpt2", {"n_head": 4, "n_embd": 32, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
    ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 32})])
def test_dropout_is_off_and_gradient_checkpointing_changes_nothing(save_folder, kind, changes):
    folder = save_folder(kind, **changes)
    batch, gradients = make_groups(), []
    for gradient_checkpointing in (False, True):
        policy, _ = starter.init_policy(str(folder), "cpu", gradient_checkpointing)
        assert policy.training and policy.stop_ids == [256]
        starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                       response_mask=batch.response_mask).sum().backward()
        assert policy.model.is_gradient_checkpointing == gradient_checkpointing
        gradients.append(gradient(policy))
    assert relative(*gradients) < 1e-6


ZAMBA2 = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
          "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
          "chunk_size": 8, "hybrid_layer_ids": [1, 3], "num_key_value_heads": 4,
          "attention_hidden_size": 64, "attention_head_dim": 16,
          "tie_word_embeddings": True}  # the hybrid layers, too, share weights


@pytest.mark.parametrize("kind, changes", [
    ("qwen3", {}), ("qwen3_moe", {}), ("gpt2", {"n_head": 4, "n_embd": 32}), ("zamba2", ZAMBA2)])
def test_lora_reference_is_the_model_without_adapters_and_the_sampler_gets_merged_weights(
        save_folder, kind, changes):
    folder, batch = save_folder(kind, noise=0.2, **changes), make_groups()
    policy, _ = starter.init_policy(str(folder))
    base = copy.deepcopy(policy.model).eval()
    base.set_attn_implementation("eager")
    starter.add_lora(policy, 4, seed=0)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert starter.make_reference(policy, settings_of(lora_rank=4)) is policy

    def log_probs(model):
        return starter.get_response_log_probs(model, batch.input_ids, batch.labels,
                                              response_mask=batch.response_mask)

    assert torch.allclose(log_probs(policy), plain_log_probs(base, batch), atol=3e-5)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    changed = log_probs(policy)
    assert (changed - plain_log_probs(base, batch)).abs().max() > 0.1
    with starter.adapters_off(policy):
        assert torch.allclose(log_probs(policy), plain_log_probs(base, batch), atol=3e-5)
    assert torch.equal(log_probs(policy), changed)
    base.load_state_dict(dict(starter.full_weights(policy)))
    assert torch.allclose(changed, plain_log_probs(base, batch), atol=1e-4)


def test_the_reference_is_a_frozen_copy():
    policy = make_policy()
    reference = starter.make_reference(policy, settings_of(lora_rank=0, compile=False))
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    pairs = list(zip(policy.parameters(), reference.parameters()))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_tiny_is_recognised_by_its_config(warm_folder, save_folder):
    assert starter.is_tiny("tiny") and starter.is_tiny(str(warm_folder))
    assert not starter.is_tiny(str(save_folder())) and not starter.is_tiny("Qwen/Qwen3-1.7B")


# ---- 3. Sampler ------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
# Longer than a block of vLLM's prefix cache.
LONG_PROMPTS = [[2 + (i * j) % 250 for j in range(150)] for i in (7, 11)]
PARAMS = starter.init_sampling_params(settings_of(), 4, [256])


def worst_gap(policy, prompts, responses, temperature=1.0):
    """Largest difference between the sampler's log-probs and the plain formula."""
    n = len(responses) // len(prompts)
    batch = starter.make_batch(starter.repeat(prompts, n), responses)
    with torch.no_grad():
        wanted = plain_log_probs(eager_copy(policy), batch, temperature)
    return float((wanted - batch.rollout_log_probs)[batch.response_mask].abs().max())


def ids_of(responses):
    return [response.ids for response in responses]


def check_sampler(policy, llm):
    """What the torch sampler and vLLM must both do."""
    first = starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 42, 1)
    assert len(first) == 12 and len({tuple(response.ids) for response in first}) > 6
    for response in first:
        assert 1 <= len(response.ids) == len(response.logps) <= 12 and response.mask is None
        assert 256 not in response.ids[:-1] and response.finished == (response.ids[-1] == 256)
        assert response.finished or len(response.ids) == 12
    assert any(r.finished for r in first) and not all(r.finished for r in first)
    assert worst_gap(policy, PROMPTS, first) < 1e-4
    assert starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 42, 1) == first
    for other in ((42, 2), (43, 1), (42, "eval")):
        assert ids_of(starter.rollout_with_vllm(llm, PROMPTS, PARAMS, *other)) != ids_of(first)
    # A second rank, which has the prompts after the first one, samples the same responses.
    rest = starter.rollout_with_vllm(llm, PROMPTS[1:], PARAMS, 42, 1, first=1)
    assert ids_of(rest) == ids_of(first[4:])
    warm = starter.rollout_with_vllm(llm, PROMPTS, PARAMS | {"temperature": 0.7}, 42, 1)
    assert worst_gap(policy, PROMPTS, warm, 0.7) < 1e-4 < worst_gap(policy, PROMPTS, warm)
    long = starter.rollout_with_vllm(llm, PROMPTS, PARAMS | {"min_tokens": 6, "n": 8}, 42, 1)
    assert min(len(response.ids) for response in long) >= 6
    randomize(policy.model, 7)
    assert worst_gap(policy, PROMPTS, starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 42, 1)) > 0.1
    starter.load_policy_into_vllm_instance(policy, llm)
    fresh = starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 42, 1)
    assert worst_gap(policy, PROMPTS, fresh) < 1e-4


def ending_policy(kind):
    """A random model whose responses end now and then."""
    policy = make_policy(kind)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[256] *= 2.5
    return policy


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_torch_sampler(kind):
    policy = ending_policy(kind)
    llm = starter.init_vllm(policy, settings_of(use_vllm=False))
    check_sampler(policy, llm)
    assert policy.training and policy.model.config._attn_implementation == "packed"
    assert starter.rollout_with_vllm(llm, [], PARAMS, 42, 1) == []
    greedy = starter.rollout_with_vllm(llm, PROMPTS[:1], PARAMS | {"temperature": 0.0, "n": 1}, 0,
                                       0)
    with torch.no_grad():
        best = eager_copy(policy)(torch.tensor(PROMPTS[:1])).logits[0, -1].argmax()
    assert greedy[0].ids[0] == best


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "qwen3_5_text", "lfm2", "falcon_h1"])
def test_torch_sampler_remembers_the_states_of_layers_without_attention(save_folder, kind):
    policy, _ = starter.init_policy(str(save_folder(kind, noise=0.2, **PADDED[kind])))
    responses = starter.rollout_with_vllm(starter.TorchSampler(policy), PROMPTS, PARAMS, 42, 1)
    assert worst_gap(policy, PROMPTS, responses) < 1e-3


def test_torch_sampler_samples_from_the_distribution():
    policy = make_policy()
    llm = starter.TorchSampler(policy)
    params = PARAMS | {"max_tokens": 2, "n": 4000, "stop_token_ids": [300]}
    pairs = ids_of(starter.rollout_with_vllm(llm, [[5, 6]], params, 0, 0))

    def check(tokens, prompt):
        with torch.no_grad():
            wanted = eager_copy(policy)(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
        seen = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
        assert np.abs(seen - wanted).max() < 4 * math.sqrt(0.25 / len(tokens))

    check([pair[0] for pair in pairs], [5, 6])
    first = int(np.bincount([pair[0] for pair in pairs]).argmax())
    check([pair[1] for pair in pairs if pair[0] == first], [5, 6, first])


def test_a_model_that_returns_nan_can_be_sampled():
    """The update then says what to do: lower lr."""
    llm = starter.TorchSampler(make_policy())
    llm.model.get_output_embeddings().weight.data.fill_(math.nan)
    assert len(starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 0, 0)) == len(PROMPTS) * PARAMS["n"]


def test_a_large_rollout_is_sampled_in_parts_with_the_same_result(monkeypatch):
    llm = starter.TorchSampler(make_policy())
    whole = starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 0, 0)
    sizes, forward = set(), llm.model.forward

    def watched(ids, **options):
        sizes.add(len(ids))
        return forward(ids, **options)

    monkeypatch.setattr(llm.model, "forward", watched)
    monkeypatch.setattr(starter, "CACHE_LIMIT", 150)
    assert ids_of(starter.rollout_with_vllm(llm, PROMPTS, PARAMS, 0, 0)) == ids_of(whole)
    assert sizes == {1, 4, 2, 8}, "one prompt, then two, each read once; 4 responses of 18 tokens"


@pytest.fixture(scope="module")
def engine():
    """The real vLLM. Its model is tied, which is where a sync can go wrong."""
    policy = ending_policy("qwen3")
    threads = torch.get_num_threads(), torch.get_float32_matmul_precision()
    llm = starter.init_vllm(policy, settings_of(max_prompt_tokens=244))
    assert not isinstance(llm, starter.TorchSampler), "the real vLLM must start here"
    assert threads == (torch.get_num_threads(), torch.get_float32_matmul_precision())
    return policy, llm


@needs_vllm
def test_vllm_agrees_with_the_trainer_before_and_after_a_sync_and_not_without(engine):
    check_sampler(*engine)


@needs_vllm
def test_only_the_stop_ids_end_a_response_of_vllm(engine):
    """Not the end token of config.json, if generation_config.json has another one"""
    policy, llm = engine
    params = PARAMS | {"n": 64, "stop_token_ids": []}
    for sampler in llm, starter.TorchSampler(policy):
        responses = starter.rollout_with_vllm(sampler, PROMPTS, params, 0, 0)
        assert {len(response.ids) for response in responses} == {PARAMS["max_tokens"]}
        assert any(256 in response.ids[:-1] for response in responses)


@needs_vllm
def test_a_model_that_vllm_takes_from_transformers_stays_usable(tmp_path):
    code = """if True:  # in a process of its own: two engines would not get on
        import pathlib, starter, test_starter, tiny
        policy = test_starter.ending_policy("smollm3")
        test_starter.check_sampler(policy, starter.init_vllm(policy, test_starter.settings_of()))
        starter.save_model(policy, tiny.make_tokenizer(), pathlib.Path("model"))"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": str(HERE)})
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()


@needs_vllm
def test_more_prompts_than_fit_into_a_batch_of_vllm_give_the_same_responses(engine):
    policy, llm = engine
    prompts = [row[:200] for row in make_rows([220] * 50).input_ids.tolist()]
    whole = starter.rollout_with_vllm(llm, prompts, PARAMS, 0, 0)
    parts = [starter.rollout_with_vllm(llm, [prompt], PARAMS, 0, 0, i)
             for i, prompt in enumerate(prompts[:20])]
    assert ids_of(sum(parts, [])) == ids_of(whole)[:20 * PARAMS["n"]]
    assert worst_gap(policy, prompts, whole) < 1e-4


@needs_vllm
def test_a_sync_resets_the_prefix_cache(engine, monkeypatch):
    policy, llm = engine

    def gap():
        return worst_gap(policy, LONG_PROMPTS,
                         starter.rollout_with_vllm(llm, LONG_PROMPTS, PARAMS, 0, 0))

    starter.load_policy_into_vllm_instance(policy, llm)
    assert gap() < 1e-4
    randomize(policy.model, 8)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda: True)
        starter.load_policy_into_vllm_instance(policy, llm)
    assert gap() > 0.01, "the cached prefixes were computed with the old weights"
    starter.load_policy_into_vllm_instance(policy, llm)
    assert gap() < 1e-4
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RunFailed, match="prefix cache"):
        starter.load_policy_into_vllm_instance(policy, llm)


def test_prompt_and_response_must_fit_into_the_context():
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4}
    phi = {"rope_parameters": longrope, "original_max_position_embeddings": 128, "head_dim": 8}
    for kind, changes, context in (("llama", {}, 512), ("phi3", phi, 128)):
        policy = make_policy(kind, **changes)
        settings = settings_of(use_vllm=False, max_prompt_tokens=context - 12)
        assert isinstance(starter.init_vllm(policy, settings), starter.TorchSampler)
        settings.max_tokens += 1
        with pytest.raises(UserError, match=f"exceed the context of {context}"):
            starter.init_vllm(policy, settings)


def test_a_prompt_with_less_room_than_others_is_continued_past_the_context():
    """As in games; what is past it is cut off later."""
    llm = starter.TorchSampler(make_policy("gpt2", max_position_embeddings=12))
    params = PARAMS | {"n": 1, "max_tokens": 10, "min_tokens": 10}
    long, short = llm.generate([[5] * 8, [6]], params, [1, 2])
    assert len(long.ids) == len(short.ids) == 10
    alone, = llm.generate([[5] * 8], params | {"max_tokens": 4, "min_tokens": 4}, [1])
    assert long.ids[:4] == alone.ids


@pytest.mark.parametrize("missing", ["vllm", "vllm.entrypoints.llm"])  # or a package of vLLM
def test_without_vllm_one_loud_line_and_the_torch_sampler(monkeypatch, capsys, missing):
    for name in ("vllm.entrypoints", "vllm.entrypoints.llm"):  # of earlier tests
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert isinstance(starter.init_vllm(make_policy(), settings_of()), starter.TorchSampler)
    assert "!!! vLLM cannot be used here" in capsys.readouterr().out


@pytest.mark.parametrize("error, is_missing", [
    (ModuleNotFoundError("No module named 'torchvision'"), False), (ValueError("kind"), False),
    (None, False),  # only when it computes
    (ImportError("libtorch_cuda.so: undefined symbol"), True),
    (AttributeError("'_OpNamespace' '_C' object has no attribute"), True)])
def test_a_model_that_vllm_cannot_run_is_one_line_that_names_the_way_out(monkeypatch, error,
                                                                         is_missing):
    class Engine:
        def generate(self, *arguments, **options):
            raise RuntimeError("no kernel for heads of 16")

    def start_vllm(*arguments):
        if error:
            raise error
        return Engine()

    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.llm"):
        monkeypatch.setitem(sys.modules, name, mock.Mock())
    monkeypatch.setattr(starter, "start_vllm", start_vllm)
    monkeypatch.setattr(starter, "load_policy_into_vllm_instance", lambda *arguments: None)
    if is_missing:
        assert isinstance(starter.init_vllm(make_policy(), settings_of()), starter.TorchSampler)
        return
    with pytest.raises(RunFailed, match="vLLM cannot run Llama.* Set --use_vllm=False") as failure:
        starter.init_vllm(make_policy(), settings_of())
    assert "\n" not in str(failure.value)


# ---- 4. Loss ---------------------------------------------------------------------------------

def number(text, _):
    return float(text)


def test_advantages_by_hand():
    texts = ["1", "0", "0", "1", "0.1", "0.1", "0.1", "0.1", "3", "1", "1", "1"]
    advantages, rewards, metadata = starter.compute_group_normalized_advantages(
        texts, [None] * 12, number, 4, 1e-6, True)
    half, three = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.0 + 1e-6
    wanted = [half, -half, -half, half, 0, 0, 0, 0, 1.5 / three, -0.5 / three, -0.5 / three,
              -0.5 / three]
    assert torch.allclose(advantages, torch.tensor(wanted), atol=1e-6)
    for size in range(2, 12):
        flat = starter.compute_group_normalized_advantages(["0.1"] * size, [0] * size, number, size,
                                                           1e-12, True)[0]
        assert (flat == 0).all(), "exact zeros where all rewards of a group are equal"
    assert rewards.tolist() == pytest.approx([float(text) for text in texts])
    values = np.array([float(text) for text in texts])
    assert metadata == pytest.approx({"mean": values.mean(), "std": values.std(ddof=1), "max": 3.0,
                                      "min": 0.0})
    plain = starter.compute_group_normalized_advantages(texts, [None] * 12, number, 4, 1e-6, False)
    assert plain[0][:4].tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.filterwarnings("error")
def test_a_rank_without_prompts_has_no_advantages():
    advantages, rewards, _ = starter.compute_group_normalized_advantages([], [], number, 4, 0, True)
    assert advantages.shape == rewards.shape == (0,)


@pytest.mark.parametrize("reward", [None, "high", math.nan, math.inf, 1e39, [1.0, 2.0], Exception])
def test_a_bad_reward_stops_the_run_and_shows_the_response(reward):
    def bad(text, _):
        if reward is Exception:
            raise KeyError("no such field")
        return reward

    with pytest.raises(UserError, match="the response 'the text'") as error:
        starter.compute_group_normalized_advantages(["the text"] * 2, [None] * 2, bad, 2, 0, True)
    lines = 'in bad\n    raise KeyError("no such field")' if reward is Exception else ""
    assert error.value.__notes__[0].strip().endswith(lines), "a mistake in reward_fn shows its line"


@pytest.mark.parametrize("reward", [True, 1, np.float32(1.0), torch.tensor(1.0)])
def test_a_reward_may_be_any_number_but_groups_must_fit(reward):
    def good(text, _):
        return reward

    rewards = starter.compute_group_normalized_advantages(["", ""], [0, 0], good, 2, 0, True)[1]
    assert rewards.tolist() == [1, 1]
    for group_size in (1, 0, 3):
        with pytest.raises(UserError, match="group_size"):
            starter.compute_group_normalized_advantages(["", ""], [0, 0], good, group_size, 0, True)
    with pytest.raises(ValueError):
        starter.compute_group_normalized_advantages(["", ""], [0], good, 2, 0, True)


def test_make_batch_shifts_and_masks_by_length():
    """Token 0 is an ordinary token: padding is known from the lengths."""
    responses = [Response([0, 0, 1], [-0.1, -0.2, -0.3]), Response([9], [-0.4]),
                 Response([4, 3], [-0.5, -0.6], [0, 1])]
    batch = starter.make_batch([[0, 5], [7], [8]], responses)
    assert batch.input_ids.tolist() == [[0, 5, 0, 0], [7, 9, 0, 0], [8, 4, 3, 0]]
    assert batch.labels.tolist() == [[5, 0, 0, 1], [9, 0, 0, 0], [4, 3, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    sampled = batch.rollout_log_probs[batch.response_mask].tolist()
    assert sampled == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.6])
    # The sampler's log-probs are no measure where the end token was banned.
    banned = starter.make_batch([[0, 5]], responses[:1], min_tokens=2)
    assert banned.rollout_mask.tolist() == [[False, False, False, True]]
    some = starter.select(batch, [2, 0])
    assert some["labels"].tolist() == [[4, 3, 0, 0], [5, 0, 0, 1]]


@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_minibatches_do_not_depend_on_the_number_of_ranks(n_ranks, monkeypatch):
    cfg = settings_of(inner_epochs=2, n_minibatches=3)
    alone = list(starter.make_minibatches(cfg, 4, 24))
    assert len(alone) == 6
    assert sorted(sum(alone[:3], [])) == sorted(sum(alone[3:], [])) == list(range(24))
    assert alone[:3] != alone[3:] and alone != list(starter.make_minibatches(cfg, 5, 24))
    bounds = [24 * rank // n_ranks for rank in range(n_ranks + 1)]
    counts = [last - first for first, last in itertools.pairwise(bounds)]
    monkeypatch.setattr(starter, "gather", lambda n_rows: counts)
    parts = []
    for rank, count in enumerate(counts):
        monkeypatch.setattr(starter, "RANK", rank)
        parts.append(list(starter.make_minibatches(cfg, 4, count)))
    together = [sorted(first + row for first, rows in zip(bounds, minibatch) for row in rows)
                for minibatch in zip(*parts)]
    assert together == alone


def test_microbatches_keep_to_the_limit_and_count_a_shared_prompt_once():
    def split(batch, rows, cfg):
        return starter.make_microbatches(batch, rows, cfg, starter.pack)

    batch = make_rows([20, 5, 7, 30, 9, 11, 3, 3], n_prompt=2)
    rows = [0, 1, 2, 4, 5, 7]
    assert split(batch, rows, settings_of()) == [rows]
    for limit in (19, 25, 33, 60):
        groups = split(batch, rows, settings_of(tokens_per_microbatch=limit))
        assert sum(groups, []) == rows and all(groups)
        sizes = [sum(batch.lengths[row] for row in group) for group in groups]
        assert max(sizes) <= 1.5 * limit and len(groups) <= 2 * math.ceil(sum(sizes) / limit)
    assert len(split(batch, rows, settings_of(tokens_per_microbatch=1))) == 6
    three = split(batch, rows, settings_of(gradient_accumulation_steps=3))
    assert len(three) == 3 and sum(three, []) == rows
    assert split(batch, [], settings_of()) == []
    shared = starter.make_batch([[5] * 50] * 4, [Response([7] * 11)] * 4)
    limit = settings_of(tokens_per_microbatch=50 + 4 * 11)
    assert split(shared, [0, 1, 2, 3], limit) == [[0, 1, 2, 3]]


def toy(seed=0, size=8):
    """-> logits of a policy, log-probs of a reference, and a direction, over a small vocabulary"""
    generator = torch.Generator().manual_seed(seed)
    logits, ref, shift = torch.randn(3, size, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(0), shift


def kl_loss(log_probs, old, ref, estimator, is_weighted=True, advantages=None, kl_coef=1.0,
            kl_in="loss"):
    """Losses of all tokens of the vocabulary [V]: its mean over `old` is an expected value."""
    exact = (log_probs.exp() * (log_probs - ref)).sum().expand(len(ref), 1)
    advantages = torch.zeros(len(ref)).double() if advantages is None else advantages
    return starter.compute_loss(
        advantages, log_probs[:, None], old[:, None], 1e9, ref[:, None], kl_coef, exact_kl=exact,
        kl_estimator=estimator, kl_importance_weight=is_weighted, kl_in=kl_in)[0][:, 0]


@pytest.mark.parametrize("seed, off_policy", [(0, 0.0), (0, 0.4), (1, 0.0), (1, 0.4)])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_expected_value_and_gradient_of_every_kl_term(estimator, is_weighted, off_policy, seed):
    logits, ref, shift = toy(seed)
    log_probs = logits.log_softmax(0)
    old = (logits + off_policy * shift).log_softmax(0).detach()
    value = (old.exp() * kl_loss(log_probs, old, ref, estimator, is_weighted)).sum()

    def grad(x):
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    kl = (log_probs.exp() * (log_probs - ref)).sum()
    forward_kl = (ref.exp() * (ref - log_probs)).sum()
    k2 = (log_probs.exp() * (log_probs - ref)**2 / 2).sum()
    is_right = is_weighted or estimator == "exact" or (estimator == "k2" and not off_policy)
    if is_right:
        assert relative(grad(value), grad(kl)) < 1e-9
        wanted = k2 if estimator == "k2" else kl
        assert value.item() == pytest.approx(wanted.item(), rel=1e-9)
    else:
        assert relative(grad(value), grad(kl)) > 0.05
    if (estimator, is_weighted) == ("k1", False):
        # Zero on-policy; off-policy it pushes away from the old policy.
        push = -grad((old.exp() * (old - log_probs)).sum())
        assert (grad(value) - push).norm() < 1e-9
    if (estimator, is_weighted, off_policy) == ("k3", False, 0.0):
        assert relative(grad(value), grad(forward_kl)) < 1e-9


@pytest.mark.parametrize("estimator, is_weighted, kl_in, is_right", [
    ("k3", True, "loss", True), ("k1", True, "loss", True), ("k2", True, "loss", True),
    ("k2", False, "loss", True), ("exact", True, "loss", True), ("k1", True, "reward", True),
    ("k1", False, "loss", False), ("k3", False, "loss", False)])
def test_the_closed_form_optimum_has_no_gradient(estimator, is_weighted, kl_in, is_right):
    """E[R] - 0.3 KL(pi || ref) is largest at pi = ref * exp(R / 0.3) / Z."""
    _, ref, reward = toy()
    logits = (ref + reward / 0.3).requires_grad_()
    log_probs = logits.log_softmax(0)
    loss = kl_loss(log_probs, log_probs.detach(), ref, estimator, is_weighted, reward, 0.3, kl_in)
    (log_probs.exp().detach() * loss).sum().backward()
    assert (logits.grad.norm() < 1e-9) == is_right and (is_right or logits.grad.norm() > 1e-2)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_kl_in_the_reward_has_the_gradient_of_the_sequence_kl(kl_in):
    """Every sequence of 3 out of 3 tokens. The term in the loss is right given each prefix, but
    misses how a token changes later prefixes."""
    generator = torch.Generator().manual_seed(3)
    prefixes = [p for n in range(3) for p in itertools.product(range(3), repeat=n)]
    logits = torch.randn(len(prefixes), 3, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    ref_table = torch.randn(len(prefixes), 3, generator=generator, dtype=torch.float64)
    sequences = list(itertools.product(range(3), repeat=3))

    def pick(table):
        rows = [[table[prefixes.index(s[:t]), s[t]] for t in range(3)] for s in sequences]
        return torch.stack([torch.stack(row) for row in rows])  # [27, 3]

    log_probs, ref = pick(logits.log_softmax(-1)), pick(ref_table.log_softmax(-1))
    probability = log_probs.sum(1).exp()
    kl = (probability * (log_probs - ref).sum(1)).sum()
    wanted = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    loss, metadata = starter.compute_loss(
        torch.zeros(27).double(), log_probs, log_probs.detach(), 0.2, ref, 1.0, kl_in=kl_in,
        kl_estimator="k1" if kl_in == "reward" else "k3")
    got = torch.autograd.grad((probability.detach() * loss.sum(1)).sum(), logits)[0]
    error = relative(got, wanted)
    assert error < 1e-9 if kl_in == "reward" else 0.02 < error < 1.0
    assert metadata["kl_mean"] > 0


def test_kl_in_the_reward_uses_the_current_log_probs():
    policy = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    old, ref = torch.tensor([[-1.1, -1.9, -0.6]]), torch.tensor([[-2.0, -1.0, -1.5]])
    loss, metadata = starter.compute_loss(torch.tensor([2.0]), policy, old, 0.5, ref, 0.1,
                                          kl_estimator="k1", kl_in="reward")
    loss.sum().backward()
    cost = (policy - ref).detach()  # 1, -1, 1
    advantages = 2.0 - 0.1 * torch.tensor([[cost.sum(), cost[0, 1:].sum(), cost[0, 2]]])
    ratio = (policy - old).detach().exp()
    assert torch.allclose(loss, -ratio * advantages) and torch.allclose(policy.grad, loss)
    assert metadata["kl_penalty_mean"] == pytest.approx(cost.mean().item())
    with pytest.raises(UserError, match="kl_estimator=k1"):
        starter.compute_loss(torch.tensor([2.0]), policy, old, 0.5, ref, 0.1, kl_in="reward")
    with pytest.raises(UserError, match="kl_in"):
        starter.compute_loss(torch.tensor([2.0]), policy, old, 0.5, ref, 0.1, kl_in="rewards")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_runaway_tokens_keep_a_finite_gradient_towards_the_reference(estimator, is_weighted, dtype):
    for distance in (2, 15, 20, 50, 89, 200, 500, -2, -15, -20, -50, -89, -200, -500):
        policy = torch.tensor([[distance / 2]], dtype=dtype).requires_grad_()
        ref = torch.tensor([[-distance / 2]], dtype=dtype)
        loss, metadata = starter.compute_loss(
            torch.zeros(1), policy, policy.detach(), 0.2, ref, 1.0, kl_estimator=estimator,
            kl_importance_weight=is_weighted)
        loss.sum().backward()
        assert loss.dtype == torch.float32 and torch.isfinite(loss).all()
        clamped = max(-20.0, min(20.0, distance))
        k3 = math.expm1(-clamped) + clamped
        slope = {"k1": clamped + 1 if is_weighted else 1.0, "k2": clamped,
                 "k3": clamped if is_weighted else -math.expm1(-clamped)}[estimator]
        assert float(policy.grad) == pytest.approx(slope, rel=1e-2)
        assert metadata["kl_mean"] == pytest.approx(min(k3, 20.0), rel=1e-4)


def test_kl_mean_is_the_clipped_and_weighted_k3():
    """One token in 1,000 at a log-ratio of -20 has a k3 of 5e8: no mean of it says anything."""
    policy, old, ref = torch.full((3, 1, 1000), -1.0)
    policy[0, 0] = -21.0
    policy[0, 1], old[0, 1] = -0.5, -4.0
    policy[0, 2:500] = -1.2
    metadata = starter.compute_loss(torch.zeros(1), policy, old, 0.2, ref, 0.1)[1]
    log_ratio, rho = (policy - ref).double()[0], (policy - old).double()[0].exp()
    k3 = torch.expm1(-log_ratio) + log_ratio
    wanted = rho.clamp(max=10) * k3.clamp(max=20)
    assert metadata["kl_mean"] == pytest.approx(wanted.mean().item(), rel=1e-4) and k3.mean() > 1e5
    assert metadata["kl_max"] == pytest.approx(wanted.max().item(), rel=1e-4)
    assert metadata["kl_min"] == pytest.approx(0.0, abs=1e-6)
    # The term itself: the weight is capped, the runaway token is pulled back.
    policy.requires_grad_()
    starter.compute_loss(torch.zeros(1), policy, old, 0.2, ref, 1.0)[0].sum().backward()
    assert float(policy.grad[0, 1]) == pytest.approx(10 * 0.5)
    assert float(policy.grad[0, 2]) == pytest.approx(math.exp(-0.2) * -0.2)


def test_kl_divergence_by_name_and_unknown_names():
    policy, ref = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -1.0]])
    wanted = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [math.exp(-0.5) - 0.5, math.e - 2]}
    slopes = {"k1": [1.0, 1.0], "k2": [0.5, -1.0], "k3": [1 - math.exp(-0.5), 1 - math.e]}
    for estimator, values in wanted.items():
        kl = starter.compute_kl_divergence(policy, ref, estimator)
        assert kl[0].tolist() == pytest.approx(values)
        slope = torch.autograd.grad(kl.sum(), policy)[0][0]
        assert slope.tolist() == pytest.approx(slopes[estimator])
    assert starter.compute_kl_divergence(policy, ref)[0].tolist() == pytest.approx(wanted["k1"])
    with pytest.raises(UserError, match="k1, k2, k3, exact"):
        starter.compute_loss(torch.ones(1), policy, policy, 0.2, ref, 0.1, kl_estimator="k4")
    batch = make_rows((5, 6))
    with pytest.raises(UserError, match="loss_type"):
        starter.grpo_microbatch_step(make_policy(), batch.input_ids, batch.labels,
                                     batch.response_mask, torch.ones(2), 1, 0.2, "ppo")


def test_loss_by_hand_in_every_clip_case():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5], dtype=torch.float64)
    for advantage, wanted, slope in (
            (2.0, [1.0, 1.8, 2.0, 2.2, 2.4], [1.0, 1.8, 2.0, 2.2, 0.0]),
            (-2.0, [-1.6, -1.8, -2.0, -2.2, -3.0], [0.0, -1.8, -2.0, -2.2, -3.0])):
        policy = ratio.log()[None].clone().requires_grad_()
        loss, metadata = starter.compute_loss(torch.tensor([advantage]), policy,
                                              torch.zeros(1, 5), 0.2)
        loss.sum().backward()
        assert (-loss[0]).tolist() == pytest.approx(wanted)
        assert (-policy.grad[0]).tolist() == pytest.approx(slope)
        approx_kl = float((ratio - 1 - ratio.log()).mean())
        assert metadata["clip_fraction"] == pytest.approx(0.2)
        assert metadata["ratio_max"] == pytest.approx(1.5)
        assert metadata["ratio_mean"] == pytest.approx(1.0)
        assert metadata["approx_kl"] == pytest.approx(approx_kl)
    high, _ = starter.compute_loss(torch.tensor([2.0]), ratio[None, 4:].log(), torch.zeros(1, 1),
                                   0.2,
                                   clip_range_high=0.28)
    assert high.item() == pytest.approx(-2.56)
    zeros = torch.zeros(2, 2)
    square = starter.compute_loss(torch.tensor([1.0, -1.0]), zeros, zeros, 0.2)[0]
    assert square.tolist() == [[-1, -1], [1, 1]], "advantages are per row, also when B equals T"


def test_the_mismatch_weight_is_capped_and_multiplies_loss_and_kl():
    policy, ref = torch.zeros(1, 4, requires_grad=True), torch.full((1, 4), -0.5)
    sampled = torch.tensor([[0.0, 1.0, -3.0, math.nan]])
    for advantage in (1.0, 0.0):
        plain, _ = starter.compute_loss(torch.tensor([advantage]), policy, policy, 0.2, ref, 0.1)
        got, metadata = starter.compute_loss(
            torch.tensor([advantage]), policy, policy, 0.2, ref, 0.1, rollout_log_probs=sampled,
            rollout_mask=~sampled.isnan())
        weight = torch.tensor([[1.0, math.exp(-1), 2.0, 1.0]])
        assert torch.allclose(got, plain * weight) and (plain != 0).all()
        slopes = [torch.autograd.grad(x.sum(), policy)[0] for x in (got, plain)]
        assert torch.allclose(slopes[0], slopes[1] * weight)
        sampled.requires_grad_()
    assert torch.autograd.grad(got.sum(), sampled, allow_unused=True) == (None,)
    assert metadata["logp_gap_max"] == 3 and metadata["logp_gap_mean"] == pytest.approx(1.0)


def test_kl_keys_are_zero_while_kl_is_off_and_nan_stays_behind_the_mask():
    bad = torch.tensor([[-1.0, math.nan, -math.inf, math.inf]], requires_grad=True)
    other = torch.tensor([[-1.1, math.inf, math.nan, -math.inf]])
    advantages = torch.tensor([[1.0, math.nan, math.nan, math.inf]])
    mask = torch.tensor([[1, 0, 0, 0]])
    for kl_coef in (0.0, 0.1):
        loss, metadata = starter.compute_loss(advantages, bad, other, 0.2, other, kl_coef,
                                              response_mask=mask, rollout_log_probs=other)
        slope = torch.autograd.grad(loss.sum(), bad)[0]
        assert torch.isfinite(loss).all() and torch.isfinite(slope).all() and slope[0, 0] != 0
        assert (slope[0, 1:] == 0).all() and all(math.isfinite(v) for v in metadata.values())
        keys = ("kl_penalty_mean", "kl_mean", "kl_max", "kl_min")
        assert all((metadata[key] != 0) == bool(kl_coef) for key in keys)
    # Off means not evaluated: 0 * NaN is NaN.
    nan = starter.compute_loss(torch.ones(1), torch.zeros(1, 4), torch.zeros(1, 4), 0.2,
                               other * math.nan)
    assert torch.isfinite(nan[0]).all()


def test_an_empty_mask_is_zero_with_zero_gradient_and_bad_numbers_are_not_hidden():
    policy = torch.randn(2, 3, requires_grad=True)
    loss, metadata = starter.compute_loss(torch.ones(2), policy, policy.detach(), 0.2,
                                          policy.detach(),
                                          0.1, response_mask=torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all() and (policy.grad == 0).all() and set(metadata.values()) == {0.0}
    ref = torch.full((2, 3), -1.0)
    ref[1, 2] = -math.inf
    loss, metadata = starter.compute_loss(torch.ones(2), policy, policy, 0.2, ref, 0.1)
    assert torch.isfinite(loss).all() and metadata["kl_max"] == pytest.approx(19)
    first = starter.compute_loss(torch.ones(2), policy, None, 0.2, ref, 0.1)
    assert torch.equal(first[0], loss) and first[1] == metadata, "None: the policy itself"
    bad = torch.zeros(2, 3)
    bad[1, 2] = math.nan
    for kl_coef in (0.0, 0.1):
        loss, _ = starter.compute_loss(torch.ones(2), bad.requires_grad_(), torch.zeros(2, 3), 0.2,
                                       ref, kl_coef)
        slope = torch.autograd.grad(loss.sum(), bad)[0]
        assert loss.isnan().sum() == slope.isnan().sum() == 1, "the update is skipped"


def test_masked_means_by_hand():
    x = torch.tensor([[1.0, 2, 9, 9], [4, math.nan, 9, 9], [9, 9, 9, 9]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert starter.masked_mean(x, mask).item() == pytest.approx((1.5 + 4) / 2)
    assert starter.masked_mean_drgrpo(x, mask, 10).item() == pytest.approx(0.7 / 2)
    assert starter.masked_mean(x, mask * 0) == starter.masked_mean_drgrpo(x, mask * 0, 5) == 0
    starter.masked_mean(x, mask).backward()
    assert x.grad.tolist() == [[0.25, 0.25, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]]
    wanted = {"grpo": 2, "dr_grpo": 20, "dapo": 3}
    for loss_type, divisor in wanted.items():
        assert starter.loss_divisor(mask, loss_type, 10) == divisor


def step_in_parts(policy, batch, advantages, split, loss_type, divisor, **options):
    """-> (loss, gradient) of one optimizer step"""
    policy.zero_grad()
    loss = 0.0
    for rows in split:
        part, _ = starter.grpo_microbatch_step(
            policy, batch.input_ids[rows], batch.labels[rows], batch.response_mask[rows],
            advantages[rows], len(split), 0.2, loss_type, 24, divisor=divisor, **options)
        loss += float(part)
    return loss, gradient(policy)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_the_gradient_does_not_depend_on_the_microbatches(loss_type, estimator):
    policy, reference, batch = make_policy(), make_policy(seed=1), make_groups()
    advantages = torch.randn(16, generator=torch.Generator().manual_seed(0))
    options = {"ref_model": reference, "kl_coef": 0.1, "kl_estimator": estimator}
    divisor = starter.loss_divisor(batch.response_mask, loss_type, 24)
    whole = step_in_parts(policy, batch, advantages, [list(range(16))], loss_type, None, **options)
    splits = [[[0, 1, 2], list(range(3, 16))], [[i] for i in range(16)], [list(range(16)), []]]
    for split in splits:
        loss, grad = step_in_parts(policy, batch, advantages, split, loss_type, divisor, **options)
        assert loss == pytest.approx(whole[0], rel=1e-4) and relative(grad, whole[1]) < 1e-5
    wrong = step_in_parts(policy, batch, advantages, splits[0], loss_type, None, **options)
    assert relative(wrong[1], whole[1]) > 0.05, "a mean per microbatch is not the mean of all"
    # The value by hand.
    with torch.no_grad():
        model, ref = eager_copy(policy), eager_copy(reference)
        log_probs = plain_log_probs(model, batch)
        log_ratio = log_probs - plain_log_probs(ref, batch)
        kl = torch.expm1(-log_ratio) + log_ratio
        if estimator == "exact":
            full, full_ref = (m(batch.input_ids).logits.log_softmax(-1) for m in (model, ref))
            kl = (full.exp() * (full - full_ref)).sum(-1)
        loss = torch.where(batch.response_mask, 0.1 * kl - advantages[:, None], 0)
    n_rows, n_tokens = int(batch.response_mask.any(1).sum()), batch.response_mask.sum(1)
    by_hand = {"grpo": (loss.sum(1) / n_tokens.clamp(min=1)).sum() / n_rows,
               "dr_grpo": loss.sum() / (24 * n_rows), "dapo": loss.sum() / n_tokens.sum()}
    assert whole[0] == pytest.approx(float(by_hand[loss_type]), rel=1e-3)


def test_the_step_takes_old_and_reference_log_probs_as_given():
    policy, batch = make_policy(), make_rows((6, 9))
    with torch.no_grad():
        log_probs = plain_log_probs(eager_copy(policy), batch)
    old = log_probs - 0.1
    arguments = (policy, batch.input_ids, batch.labels, batch.response_mask, torch.ones(2), 1, 0.2,
                 "dapo")
    loss, metadata = starter.grpo_microbatch_step(*arguments, old_log_probs=old)
    assert float(loss) == pytest.approx(-math.exp(0.1), rel=1e-4)
    assert metadata["n_tokens"] == int(batch.response_mask.sum())


def make_state(**changes):
    return SimpleNamespace(**{"step": 1, "skipped": 0, "skips_in_a_row": 0, "lr_factor": 1.0,
                              "kl_factor": 1.0, "kl_smooth": 0.0, "ref_step": 0,
                              "best_reward": 0.0} | changes)


def test_the_exact_kl_needs_the_reference_model():
    ids, log_probs = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2)
    with pytest.raises(UserError, match="reference model"):
        starter.grpo_microbatch_step(make_policy(), ids, ids, ids + 1, torch.ones(1), 1, 0.2,
                                     kl_coef=0.1, kl_estimator="exact", ref_log_probs=log_probs)


def test_updates_are_clipped_warmed_up_and_skipped_when_not_finite(capsys):
    policy = torch.nn.Linear(2, 1, bias=False)
    start = policy.weight.detach().clone()
    optimizer, state = torch.optim.SGD(policy.parameters(), 9.0), make_state(step=2)

    def update(slope, loss=0.0, **changes):
        policy.weight.grad = torch.tensor([slope])
        cfg = settings_of(warmup_steps=4, **changes)
        norm = starter.update_weights(policy, optimizer, loss, cfg, state)
        return norm, (policy.weight.detach() - start)[0].tolist()

    assert update([3.0, 4.0]) == (5.0, pytest.approx([-0.05 * 0.6, -0.05 * 0.8], abs=1e-5))
    start = policy.weight.detach().clone()
    for slope, loss in (([math.nan, 1.0], 0.0), ([1.0, 1.0], math.inf)):
        assert update(slope, loss)[1] == [0, 0]
    assert (state.skipped, state.skips_in_a_row) == (2, 2)
    assert capsys.readouterr().out.count("!!! update skipped") == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005), "what the log says"
    # A tenth of the learning rate, then twice as much each time until it is back.
    state.step = 9
    for factor in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        start = policy.weight.detach().clone()
        moved = update([3.0, 4.0], max_grad_norm=0)[1]
        assert moved == pytest.approx([-0.3 * factor, -0.4 * factor], abs=1e-5)
        assert state.skips_in_a_row == 0 and policy.weight.grad is None, "the memory is free again"
    with pytest.raises(RunFailed, match="5 updates in a row"):
        for _ in range(5):
            update([math.inf, 0.0])


def test_no_gradient_means_no_step_although_there_is_momentum():
    policy = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(policy.parameters(), 0.1, weight_decay=0.0)
    for size in (1.0, 0.0, 1e-9):  # 1e-9: kl_coef=1e-9 measures the KL and must do no more
        before = policy.weight.detach().clone()
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, size)
        starter.update_weights(policy, optimizer, 0.0, settings_of(), make_state())
        assert torch.equal(policy.weight, before) == (size < 1)


def test_the_adaptive_coefficient_follows_the_kl():
    cfg, state = settings_of(), make_state()

    def adapt(*values):
        for value in values:
            starter.adapt_kl_coef(state, value, cfg)
        return state.kl_factor

    assert adapt(0.2) == adapt(0.1) == 1.0, "between half the target and 1.5 times the target"
    assert adapt(0.3) == 1.5 and adapt(0.5, 0.5) > 3
    high = state.kl_factor
    smooth = state.kl_smooth
    assert adapt(math.nan, math.inf, -math.inf) == high and state.kl_smooth == smooth, "held"
    state.kl_smooth = 0.1
    adapt(1e9)
    assert state.kl_smooth == pytest.approx(0.3), "clipped at 5 * target_kl before smoothing"
    assert adapt(*[9.0] * 60) == 100
    assert adapt(*[0.0] * 10) < 100 and adapt(*[0.0] * 100) == 0.1


def test_padded_microbatches_keep_to_the_limit_with_their_padding():
    rng = random.Random(0)
    for limit, n_least in itertools.product((30, 64, 1000), (1, 3, 20)):
        batch = make_rows([rng.randrange(4, 50) for _ in range(40)])
        rows = rng.sample(range(40), 33)
        cfg = settings_of(tokens_per_microbatch=limit, gradient_accumulation_steps=n_least)
        parts = starter.make_microbatches(batch, rows, cfg, starter.pad)
        assert sorted(sum(parts, [])) == sorted(rows) and len(parts) >= n_least
        for part in parts:
            inputs, _, _ = starter.pad(*(x[part] for x in (
                batch.input_ids, batch.labels, batch.response_mask)), torch.device("cpu"))
            assert inputs["input_ids"].numel() <= limit or len(part) == 1
        n_tokens = sum(batch.lengths[row] for row in rows)
        assert len(parts) <= max(33 / (limit // 50 or 1) + 1, 2 * n_tokens / limit + n_least)


def letters(text, problem):
    """A reward that differs among the responses of a group"""
    return zlib.crc32(text.encode()) % 7 / 7


def test_after_a_skipped_update_lr_is_a_tenth_and_doubles(run_main, monkeypatch, tmp_path):
    """Also if the run is resumed meanwhile"""
    group_advantages, calls = starter.group_advantages, []

    def bad(*arguments):
        calls.append(arguments)
        return group_advantages(*arguments) * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(starter, "group_advantages", bad)
    monkeypatch.setattr(starter, "reward_fn", letters)
    arguments = ["--warmup_steps=0", "--reward_truncated", "--eval_every=99"]
    folder = run_main(*arguments, "--n_grpo_steps=4")
    starter.main([f"--resume={folder}", "--n_grpo_steps=8"])
    rows = rows_of(folder)[1:]
    assert [row["train/lr"] for row in rows] == pytest.approx(
        [1e-3, 1e-3, 1e-4, 2e-4, 4e-4, 8e-4, 1e-3, 1e-3])
    assert [row["train/skipped_steps"] for row in rows] == [0] + [1] * 7


# ---- 5. Records ------------------------------------------------------------------------------

def test_evaluation_counts_what_it_says(monkeypatch):
    """Scripted rewards of 3 problems x 2 responses; the weights are random."""
    task = make_task(question_rows(range(20)), question_rows(range(30, 33)))
    llm, rewards = starter.TorchSampler(make_policy()), iter([1.0, 0.0, 0.95, 0.1, 0.1, 0.1] * 2)
    stop_ids = [*range(0, 300, 20)]  # some responses end in time
    params = PARAMS | {"n": 2, "stop_token_ids": stop_ids}
    metrics, rows = starter.evaluate_model(llm, task, params, stop_ids,
                                           lambda text, problem: next(rewards))
    assert metrics["eval/accuracy"] == pytest.approx(2 / 6)
    assert metrics["eval/mean_reward"] == pytest.approx(2.25 / 6)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.95, 0.1, 0.1, 0.1]
    assert [row["answer"] for row in rows[::2]] == [30 + 2, 31 + 3, 32 + 4]
    prompts = [row["prompt_ids"] for row in task.held_out]
    responses = starter.rollout_with_vllm(llm, prompts, params, 0, "eval")
    lengths = [len(response.ids) for response in responses]
    assert metrics["eval/margin"] == pytest.approx(
        1.96 * np.std([row["reward"] >= 0.9 for row in rows]) / len(task.held_out)**0.5)
    assert metrics["eval/avg_output_tokens"] == pytest.approx(np.mean(lengths))
    cut_off = [not response.finished for response in responses]
    assert metrics["eval/truncated_frac"] == pytest.approx(np.mean(cut_off))
    assert 0 < sum(cut_off) < 6
    assert [row["cut_off"] for row in rows] == cut_off
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: next(rewards))
    again = starter.evaluate_model(llm, task, params, stop_ids)
    assert again[1] == rows, "the same seeds every time"
    # Cut off: the lowest reward of all, or 0, unless they keep their own
    for reward, keeps in itertools.product((-1.0, 0.2), (False, True)):
        task.cfg.reward_truncated = keeps
        rows = starter.evaluate_model(llm, task, params, stop_ids, lambda *rest: reward)[1]
        for row in rows:
            is_lost = row["cut_off"] and not keeps
            assert row["reward"] == (min(reward, 0.0) if is_lost else reward)
    # Another rank has a lower one.
    task.cfg.reward_truncated = False
    monkeypatch.setattr(starter, "gather", lambda x: [x, -3.0] if isinstance(x, float) else [x])
    rows = starter.evaluate_model(llm, task, params, stop_ids, lambda *rest: 0.2)[1]
    assert {row["reward"] for row in rows if row["cut_off"]} == {-3.0}


def test_metrics_of_a_step_are_sums_over_tokens_and_rows():
    keys = ("entropy clip_fraction approx_kl ratio_mean ratio_max kl_penalty_mean logp_gap_mean "
            "logp_gap_max kl_mean kl_max kl_min policy_logp_mean "
            "ref_logp_mean").split()
    parts = [dict.fromkeys(keys, 1.0) | {"n_tokens": 30},
             dict.fromkeys(keys, 4.0) | {"n_tokens": 10},
             dict.fromkeys(keys, math.nan) | {"n_tokens": 0}]
    responses = [Response([1] * 4), Response([1] * 2, finished=False), Response([1]), Response([1])]
    texts = ["<answer>1</answer>", "5", "#### 5", ""]
    metrics = starter.step_metrics(parts, torch.tensor([1.0, 0.0, 0.1, 0.1]), responses, texts,
                                   {"rollout": 1, "reward": 3, "train": 2, "sync": 1, "step": 7},
                                   group_size=2, kl_coef=0.1)
    assert metrics["train/entropy"] == metrics["kl/mean"] == pytest.approx((30 + 40) / 40)
    assert metrics["kl/max"] == metrics["rollout/logp_gap_max"] == 4 and metrics["kl/min"] == 1
    assert metrics["train/reward_mean"] == pytest.approx(0.3)
    assert metrics["train/reward_std"] == pytest.approx(np.std([1.0, 0.0, 0.1, 0.1]))
    assert metrics["train/frac_groups_zero_std"] == metrics["train/answer_frac"] == 0.5
    assert metrics["train/truncated_frac"] == 0.25 and metrics["train/avg_output_tokens"] == 2
    times = [metrics[f"time/{name}"] for name in ("rollout", "reward", "train", "sync", "step")]
    assert times == [1, 3, 2, 1, 7] and metrics["perf/tokens_per_s"] == pytest.approx(8 / 7)
    off = starter.step_metrics(parts, torch.zeros(4), responses, texts, {"step": 1}, 2, kl_coef=0.0)
    assert not [name for name in off if name.startswith("kl/")], "it was not measured"


@pytest.mark.parametrize("visible, expected", [(None, "9"), ("2,3,5", "2"), ("4", "4")])
def test_each_rank_sees_a_gpu_of_its_own(visible, expected, monkeypatch):
    for name, value in {"LOCAL_RANK": "9", "RANK": "9", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    exec((HERE / "starter.py").read_text().split("\nimport ast")[0], {"__name__": "starter"})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_sampler_and_trainer_must_agree_and_the_kl_begins_at_zero():
    cfg, fine = settings_of(), [{"kl_mean": 0.0}]
    starter.check_agreement({"rollout/logp_gap_mean": 1e-5}, fine, cfg, 1)
    for use_vllm, end in ((True, r"differently \(--use_vllm=False\)$"), (False, "differently$")):
        with pytest.raises(RunFailed, match=f"the weights did not arrive.* {end}"):
            starter.check_agreement({"rollout/logp_gap_mean": 0.01}, fine,
                                    settings_of(use_vllm=use_vllm), 5)
    gpu = settings_of(device="cuda")
    starter.check_agreement({"rollout/logp_gap_mean": 0.2}, fine, gpu, 2)
    with pytest.raises(RunFailed, match="off by 0.2"):
        starter.check_agreement({"rollout/logp_gap_mean": 0.2}, fine, gpu, 1)
    starter.check_agreement({}, [{"kl_mean": 0.01}], cfg, 2)
    with pytest.raises(RunFailed, match="before any update"):
        starter.check_agreement({}, [{"kl_mean": 0.01}, {"kl_mean": 0.0}], cfg, 1)


def test_missing_responses_are_noticed_in_an_evaluation(monkeypatch):
    monkeypatch.setattr(starter, "roll_out", lambda *arguments: [])
    task = make_task(question_rows(range(9)))
    with pytest.raises(ValueError, match="shorter"):
        starter.evaluate_model(None, task, {"n": 1}, [256])


def test_the_report_names_the_last_evaluation_and_a_better_one(tmp_path, capsys):
    def report(*accuracies, margin=0.1):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        for step, accuracy in enumerate(accuracies):
            row = {"step": step, "eval/accuracy": accuracy, "eval/mean_reward": accuracy,
                   "eval/margin": margin}
            log.append("metrics.jsonl", {"step": step} if accuracy is None else row)
        starter.report(tmp_path, settings_of())
        return capsys.readouterr().out

    log = starter.Log(tmp_path, settings_of())
    text = report(0.25, None, 0.5, None)
    assert "sampled: 25.0% -> 50.0% at step 2\n" in text and "resume" not in text, "nothing saved"
    assert "sampled: 25.0%\n" in report(0.25, None), "one evaluation is not a result"
    assert "-> 50.0% at step 2\n" in report(0.7, 0.65, 0.5), "the start was better: no best/"
    (tmp_path / "best").mkdir()
    text = report(0.25, 0.65, 0.5)
    assert "-> 50.0% at step 2, 65.0% at step 1: use best/\n" in text
    assert f"--model_id={tmp_path}/best\n" in text
    text = report(0.25, 0.55, 0.5)
    assert "use best/" not in text and f"--model_id={tmp_path}/model\n" in text, "in the interval"
    assert "use best/" in report(0.25, 0.55, 0.5, margin=0.03)
    (tmp_path / "checkpoint").mkdir()
    assert f"--resume={tmp_path}\n" in report(0.25, None)
    assert "--resume" not in report(*[0.25] * 11), "the run is finished"
    report(0.25)
    log.append("metrics.jsonl", {"step": 1, "time/minutes": 5})
    for limit, flag in ((0.0, ""), (5.5, ""), (4.5, " --max_minutes=0")):
        starter.report(tmp_path, settings_of(max_minutes=limit))
        assert capsys.readouterr().out.endswith(f"--resume={tmp_path}{flag}\n")
    (tmp_path / "metrics.jsonl").unlink()
    starter.report(tmp_path, settings_of())
    assert "try it" in capsys.readouterr().out, "records that were lost"
    report(0.25, 0.5)
    (tmp_path / "a b").mkdir()
    shutil.copy(tmp_path / "metrics.jsonl", tmp_path / "a b")
    starter.report(tmp_path / "a b", settings_of())
    assert f"--model_id='{tmp_path}/a b'/model\n" in capsys.readouterr().out


def test_model_text_is_escaped_and_warnings_are_given_once(tmp_path, capsys):
    log = starter.Log(tmp_path, settings_of())
    turns = [{"role": "assistant", "content": "<script>"}]
    text = {"prompt": "<b>", "turns": turns, "reward": 0.0, "answer": "5 > 4"}
    starter.log_eval(log, 0, dict.fromkeys(("eval/accuracy", "eval/mean_reward"), 0.0), [text])
    log.writer.flush()
    events = EventAccumulator(str(tmp_path.parent / "tb" / tmp_path.name)).Reload()
    shown = events.Tensors("sample 0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert shown == ("<pre>&lt;b&gt;\nassistant&gt; &lt;script&gt;\n"
                     "reward 0.0, expected: 5 &gt; 4</pre>")
    capsys.readouterr()
    metrics = NOTHING_SEEN | {"train/frac_groups_zero_std": 1.0, "train/truncated_frac": 0.9,
                              "train/kl_penalty": 0.0}
    del metrics["train/entropy"]
    for step in (10, 11, 12):
        starter.log_train(log, step, metrics | {"kl/mean": 0.3 * (step == 10)},
                          settings_of(reward_truncated=False))
    text = capsys.readouterr().out
    assert text.count("Step 1") == 3 and text.count("| KL penalty: 0.0000") == 3
    assert text.count("!!!") == 3, "KL is high, equal rewards, cut off: each once"
    assert text.count("| Entropy: - |") == 3, "without rows to compute there is none"
    log.write(12, {"train/loss": math.nan, "train/entropy": 1.0})
    assert rows_of(tmp_path) == [{"step": 12, "train/entropy": 1.0}]


def test_a_file_or_folder_is_the_old_one_or_the_new_one(tmp_path):
    for name, write in (("file", lambda path, text: path.write_text(text)),
                        ("folder", lambda path, text: path.mkdir() or (path / text).touch())):
        path = tmp_path / name
        for text in ("old", "new"):
            with starter.written_whole(path) as temporary:
                write(temporary, text)
        state = sorted(tmp_path.rglob("*"))
        with pytest.raises(RunFailed, match="Is the disk full"):
            with starter.written_whole(path) as temporary:
                write(temporary, "half")
                raise OSError(errno.ENOSPC, "No space left on device")
        with starter.written_whole(tmp_path / name) as temporary:
            assert not temporary.exists(), "what a failure left is removed"
            write(temporary, "new")
        assert sorted(tmp_path.rglob("*")) == state and (path.is_dir() or path.read_text() == "new")


def test_a_checkpoint_brings_back_weights_moments_reference_and_state(tmp_path, capsys):
    def make(seed):
        policy = make_policy(seed=seed)
        optimizer = torch.optim.AdamW(policy.parameters(), 0.01, fused=True)
        return policy, optimizer, make_policy(seed=seed + 1)

    def step(policy, optimizer):
        batch = make_groups()
        optimizer.zero_grad()
        starter.get_response_log_probs(policy, batch.input_ids, batch.labels).mean().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in policy.parameters()]

    # Saved before any update, AdamW must not count a step.
    fresh, untouched = make(0), make(0)
    starter.save_checkpoint(tmp_path, *fresh, make_state())
    starter.restore(starter.load_checkpoint(tmp_path), *fresh, make_state())
    for got, given in zip(step(*fresh[:2]), step(*untouched[:2])):
        assert torch.equal(got, given)
    policy, optimizer, reference = make(0)
    step(policy, optimizer)
    state = make_state(step=3, ref_step=2, kl_factor=0.5, kl_smooth=0.125, best_reward=0.75)
    for number in (1, 2, 3):
        state.step = number
        starter.save_checkpoint(tmp_path, policy, optimizer, reference, state)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step_00000002.pt", "step_00000003.pt"], "the last two are kept"
    wanted = step(policy, optimizer)
    other, other_optimizer, other_reference = make(5)
    saved, resumed = starter.load_checkpoint(tmp_path), make_state()
    starter.restore(saved, other, other_optimizer, other_reference, resumed)
    assert not saved, "its memory is free"
    assert vars(resumed) == vars(state)
    for got, given in zip(other_reference.parameters(), reference.parameters()):
        assert torch.equal(got, given)
    for got, given in zip(step(other, other_optimizer), wanted):
        assert torch.equal(got, given)
    newest = tmp_path / "checkpoint" / "step_00000003.pt"
    data = bytearray(newest.read_bytes())
    for damage in (data[:len(data) // 2], data[:5000] + b"XXXX" + data[5004:], b""):
        newest.write_bytes(damage)
        assert starter.load_checkpoint(tmp_path)["state"]["step"] == 2
        assert "is damaged" in capsys.readouterr().out
    (tmp_path / "checkpoint" / "step_00000002.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no intact checkpoint"):  # its curves are kept
        starter.load_checkpoint(tmp_path)
    # Begun again, it removes files of later steps first.
    starter.save_checkpoint(tmp_path, policy, optimizer, reference, make_state(step=1))
    assert starter.load_checkpoint(tmp_path)["state"]["step"] == 1


def test_checkpoints_run_no_code(tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "checkpoint").mkdir()
    torch.save({"state": Bomb()}, tmp_path / "checkpoint" / "step_00000001.pt")
    with pytest.raises(UserError, match="no intact checkpoint"):
        starter.load_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_the_first_signal_is_noted_and_a_second_ctrl_c_stops_at_once(capsys):
    received = starter.catch_signals()
    for _ in range(2):  # under torchrun a signal to all processes arrives twice
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert set(received) == {signal.SIGTERM} and "stopping after" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_script_gets_its_signals_back(run_main, monkeypatch):
    def handlers():
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    run_main("--n_grpo_steps=1")
    assert handlers() == (signal.default_int_handler, signal.SIG_DFL)
    monkeypatch.setattr(starter, "reward_fn", lambda *rest: 1 / 0)
    with pytest.raises(UserError):
        run_main("--n_grpo_steps=1")
    assert handlers() == (signal.default_int_handler, signal.SIG_DFL)


def test_the_newest_checkpoints_are_kept_if_the_clock_was_set_back(run_main):
    folder = run_main("--n_grpo_steps=2", "--save_every=1")
    for path in starter.checkpoints(folder):
        os.utime(path, (time.time() + 3600,) * 2)
    starter.main([f"--resume={folder}", "--n_grpo_steps=3"])
    assert [path.stem for path in starter.checkpoints(folder)] == ["step_00000002", "step_00000003"]


def test_a_run_goes_on_without_its_terminal(monkeypatch):
    def hung_up(*words, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr("builtins.print", hung_up)
    starter.print("Step 1")
    assert sys.stdout.name == os.devnull


def test_the_reward_may_change_the_working_folder(warm_folder, tmp_path, monkeypatch):
    def reward_fn(text, problem):
        os.chdir("/")
        return letters(text, problem)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "reward_fn", reward_fn)
    starter.main([f"--model_id={warm_folder}", *SMALL, "--n_grpo_steps=2", "--save_every=1"])
    assert len(rows_of(tmp_path / "out" / "latest")) == 3
    assert (tmp_path / "out" / "latest" / "model").exists()


def test_a_child_of_the_reward_can_be_terminated():
    starter.catch_signals()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"ready")
        time.sleep(20)
        os._exit(0)
    os.read(read, 5)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_reward_may_change_its_problem(run_main, monkeypatch):
    def reward_fn(text, problem):
        problem["solution"] = Fraction(1, 2)
        problem.pop("numbers")
        return len(text) / 99

    monkeypatch.setattr(starter, "reward_fn", reward_fn)
    folder = run_main("--n_grpo_steps=1")
    assert all(type(row["answer"]) is str for row in starter.read_rows(folder / "samples.jsonl"))


def test_a_run_belongs_to_the_script_that_was_started(monkeypatch):
    assert starter.started_script() != "/mine.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/mine.py", raising=False)
    assert starter.started_script() == "/mine.py"


@pytest.mark.parametrize("reward_truncated", [False, True])
def test_cut_off_responses_earn_nothing_unless_asked_for(run_main, monkeypatch, reward_truncated):
    task = make_task(question_rows(range(20)))
    responses = (responses_of(task, {"answer": "5"}, "<answer>5</answer>")
                 + responses_of(task, {"answer": "5"}, "<answer>5</answer>", finished=False))
    rewards = starter.grade(responses, starter.reward_fn, reward_truncated, 2)[1]
    assert rewards == [1.0, float(reward_truncated)]
    rewards = starter.grade(responses, lambda *rest: -1, reward_truncated, 2)[1]
    assert rewards == [-1.0, -1.0], "among negative rewards 0 would be a refuge"
    # A whole run in which all are cut off: in training and in the evaluations
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: 1.0)
    rows = rows_of(run_main(f"--reward_truncated={reward_truncated}", "--max_tokens=2",
                            "--min_tokens=2", "--n_grpo_steps=1", "--save_every=0"))
    assert rows[1]["train/truncated_frac"] > 0.9
    for row, name in ((rows[0], "eval/mean_reward"), (rows[1], "train/reward_mean"),
                      (rows[1], "eval/mean_reward"), (rows[1], "eval/accuracy")):
        assert row[name] == 1.0 if reward_truncated else row[name] < 0.2


NOTHING_SEEN = dict.fromkeys((
    "train/loss train/grad_norm train/reward_mean train/avg_output_tokens time/minutes "
    "perf/tokens_per_s time/rollout time/train time/sync time/step train/truncated_frac "
    "train/frac_groups_zero_std").split(), 0.0) | {"train/entropy": 1.0}


@pytest.mark.parametrize("name, quiet, loud, words", [
    ("train/truncated_frac", [0.2, 0.5], 0.51, "most responses are cut off"),
    ("train/truncated_frac", [0.0, 0.1], 0.11, "cut-off responses have more than tripled"),
    ("train/truncated_frac", [0.14, 0.42], 0.43, "cut-off responses have more than tripled"),
    ("train/entropy", [1.0, 2.0, 0.11], 0.09, "entropy is below a tenth of its start")])
def test_alarms_are_given_once_and_remember_the_start(tmp_path, capsys, name, quiet, loud, words):
    metrics, cfg = NOTHING_SEEN, settings_of(reward_truncated=False)
    log = starter.Log(tmp_path, cfg)
    log.write(0, {"eval/accuracy": 0.5})

    def warnings(values, first):
        for step, value in enumerate(values, first):
            starter.log_train(log, step, metrics | {name: value}, cfg)
            log.write(step, metrics | {name: value})
        return capsys.readouterr().out.count(f"!!! {words}")

    assert warnings(quiet, 1) == 0 and warnings([loud] * 3, 11) == 1
    log.close()
    log = starter.Log(tmp_path, cfg, {"state": {"step": 10}})  # resumed: once again
    assert len(log.history) == len(quiet)
    assert warnings(quiet[-1:], 20) == 0 and warnings([loud] * 3, 30) == 1
    log.close()


def test_with_a_kl_penalty_equal_rewards_have_a_gradient(tmp_path, capsys):
    for kl_coef in (0.0, 0.1):
        metrics = NOTHING_SEEN | {"train/frac_groups_zero_std": 1.0, "train/kl_coef": kl_coef}
        log = starter.Log(tmp_path, settings_of())
        starter.log_train(log, 1, metrics, settings_of())
        log.close()
        assert ("no gradient" in capsys.readouterr().out) == (not kl_coef)


def test_who_rewards_cut_off_responses_is_not_told_that_they_earn_nothing(tmp_path, capsys):
    metrics = NOTHING_SEEN | {"train/truncated_frac": 0.9}
    for is_rewarded in (False, True):
        cfg = settings_of(reward_truncated=is_rewarded)
        log = starter.Log(tmp_path, cfg)
        starter.log_train(log, 1, metrics, cfg)
        log.close()
        assert ("cut off and earn 0" in capsys.readouterr().out) == (not is_rewarded)


def test_half_written_files_are_removed(run_main, monkeypatch):
    folder = run_main("--n_grpo_steps=1")
    for name in ("model.77.tmp/new", "checkpoint/step_00000009.pt.77.tmp"):  # of a killed process
        (folder / name).mkdir(parents=True)
        (folder / name / "half").touch()

    def full_disk(saved, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(RunFailed, match=r"cannot write .*step_00000002.pt .*No space left"):
            starter.main([f"--resume={folder}", "--n_grpo_steps=2"])
    assert not list(folder.rglob("*.tmp"))
    assert os.listdir(folder / "checkpoint") == ["step_00000001.pt"]
    starter.main([f"--resume={folder}", "--n_grpo_steps=2"])
    assert rows_of(folder)[-1]["step"] == 2


@pytest.mark.parametrize("n_calls, step, error", [
    (20, 0, KeyError), (44, 2, asyncio.CancelledError), (60, 2, KeyError)])
def test_an_error_in_the_reward_loses_no_finished_step(run_main, monkeypatch, n_calls, step, error):
    """8 calls in an evaluation, 16 in a step: in step 1, in the evaluation of step 2, in step 3"""
    arguments, calls = ["--reward_truncated", "--save_every=0"], []

    def failing(text, problem):
        calls.append(text)
        if len(calls) == n_calls:
            raise error("answer")
        return letters(text, problem)

    monkeypatch.setattr(starter, "reward_fn", letters)
    whole = run_main(*arguments, out="whole")
    monkeypatch.setattr(starter, "reward_fn", failing)
    with pytest.raises(UserError, match=f"reward_fn: {error.__name__}.* for the response"):
        run_main(*arguments)
    folder = whole.parents[1] / "out" / whole.name
    assert os.listdir(folder / "checkpoint") == [f"step_{step:08d}.pt"]
    assert rows_of(folder)[-1]["step"] == step
    starter.main([f"--resume={folder}", f"--n_grpo_steps={len(rows_of(whole)) - 1}"])
    got, wanted = numbers_of(folder), numbers_of(whole)
    if n_calls == 44:  # the evaluation that failed is not repeated
        for name in EVALUATION:
            wanted[2].pop(name)
    assert got == wanted and equal_weights(folder, whole)


def test_the_minutes_of_a_run_continue_when_it_is_resumed(run_main, monkeypatch):
    folder = run_main("--n_grpo_steps=1")
    # Ten minutes from the start of main() to the first step
    monkeypatch.setattr(starter, "now", lambda: time.perf_counter() + 600)
    for n_steps in (2, 3):
        starter.main([f"--resume={folder}", f"--n_grpo_steps={n_steps}"])
    minutes = [0, *(row["time/minutes"] for row in rows_of(folder)[1:])]
    assert [round(minute, -1) for minute in np.diff(minutes)] == [0, 10, 10]


def test_a_finished_run_that_is_resumed_stays_as_it_is(run_main, capsys):
    folder = run_main("--n_grpo_steps=1")
    before, weights = rows_of(folder), weights_of(folder)
    capsys.readouterr()
    starter.main([f"--resume={folder}"])
    assert re.search(r"\nHeld-out accuracy, sampled: .*% -> .*% at step 1\n  try it .*\n"
                     r"  curves .*\n$", capsys.readouterr().out)
    assert rows_of(folder) == before
    assert all(torch.equal(weights[name], value) for name, value in weights_of(folder).items())


# ---- 6. Settings -----------------------------------------------------------------------------

def hyperparameters():
    """{name: its default as source} of the block in main()."""
    tree = ast.parse((HERE / "starter.py").read_text())
    main = next(node for node in tree.body if getattr(node, "name", "") == "main")
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    block = next(call for call in calls if getattr(call.func, "id", "") == "SimpleNamespace")
    return {keyword.arg: ast.unparse(keyword.value) for keyword in block.keywords}


def test_every_hyperparameter_is_set_by_some_test():
    names, text = hyperparameters(), Path(__file__).read_text()
    assert [name for name in names if f"--{name}=" not in text] == []


BAD_SETTINGS = [
    (["--kl_coeff=0.1"], "kl_coef?"), (["--Seed=1"], "seed?"), (["--learning_rate=1"], "--help"),
    (["lr=1e-5"], "--name=value"), (["--lr"], "--lr=True: expected"), (["-lr=1"], "--name=value"),
    (["--lr=fast"], "--lr=fast: expected"), (["--seed=1.5"], "--seed=1.5: expected"),
    (["--seed=-1"], "seed"),
    (["--use_kl_penalty=yes"], "--use_kl_penalty=yes: expected"), (["--seed=99999999999999999999"],
                                                                   "seed"),
    (["--lr=0"], "lr is out of range"), (["--lr=nan"], "lr is out"),
    (["--kl_coef=inf"], "kl_coef is"),
    (["--group_size=1"], "at least 2"), (["--rollout_batch_size=9"], "divide rollout_batch_size"),
    (["--n_grpo_steps=0"], "n_grpo_steps is out"), (["--temperature=0"], "temperature is out"),
    (["--clip_range=1.5"], "clip_range and"), (["--clip_range_high=-0.1"], "clip_range_high"),
    (["--loss_type=ppo"], "grpo, dr_grpo or dapo"), (["--min_tokens=50"], "min_tokens"),
    (["--gpu_mem_util=1.5"], "gpu_mem_util"), (["--n_numbers=1"], "n_numbers must be 2 to 8"),
    (["--n_numbers=9"], "n_numbers must be 2 to 8"), (["--operations=^"], "some of +-*/"),
    (["--operations="], "some of +-*/"),
    (["--max_prompt_tokens=4"], "longer than max_prompt_tokens=4"), (["--n_eval=-1"], "n_eval"),
    (["--prompt= "], "must not be empty"), (["--prompt={target} \\boxed{}"], "(braces: {{ }})"),
    ([f"--out_dir={__file__}"], "out_dir must be"), (["--out_dir="], "out_dir must be"),
    (["--device=tpu"], "device must be cpu"), (["--vllm_sleep=True", "--device=cpu"], "need a GPU"),
    (["--ref_offload=True", KL, "--device=cpu"], "need a GPU"),
    (["--n_minibatches=0"], "n_minibatches"), (["--kl_estimator=k4", KL], "k1, k2, k3, exact"),
    (["--kl_in=both", KL], "kl_in must be loss"), (["--kl_in=reward", KL], "kl_estimator=k1"),
    (["--kl_adaptive=True"], "KL penalty is off"), (["--ref_update_every=5"], "KL penalty is off"),
    (["--kl_adaptive=True", KL, "--kl_coef=0"], "KL penalty is off"),
    (["--kl_coef=0.5"], "KL penalty is off"), (["--kl_estimator=exact"], "KL penalty is off"),
    (["--target_kl=0.5"], "KL penalty is off"), (["--temperature=2.5"], "at most 2"),
    (["--max_turns=0"], "max_turns is out"), (["--use_kl_penalty", "--lr=x"], "--lr=x"),
    (["--ref_update_every=5", KL, "--lora_rank=2"], "with lora_rank"),
    (["--eval_task=x.jsonl"], "both tasks must be files"),
    (["--task=README.md", "--eval_task=countdown"], "both tasks must be files"),
    (["--task=no/such.jsonl"], "no/such.jsonl"),
    (["--prompt={question}"], "set --prompt"), (["--prompt={numbers"], "set --prompt"),
    (["--model_id=no/such/model"], "cannot load the model"),
    (["--model_id=./no/model"], "there is no folder ./no/model"),
    (["--model_id=no/latest"], "cannot load the model 'no/latest'"),  # may be on the hub
    (["--n_numbers=2", "--max_number=1", "--operations=+"], "no Countdown problem"),  # only 1+1
    (["--__class__=5"], "no hyperparameter __class__"), (["--resume=latest"], "no run to resume"),
    (["--resume=no/such/run"], "no run to resume"), (["--resume="], "no run to resume"),
    (["--resume", "--out_dir=x"], "no run to resume in x/latest")]


@pytest.mark.parametrize("arguments, words", BAD_SETTINGS, ids=lambda x: "".join(x)[:40])
def test_bad_settings_are_one_line(run_main, tmp_path, arguments, words):
    """And nothing is written."""
    with pytest.raises(UserError) as error:
        run_main(*arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_misspelled_names_suggest_the_closest_one_if_any_is_near():
    cfg = SimpleNamespace(lr=0.1, clip_range=0.2, seed=1, compile=False, prompt="")
    for name, wanted in (("clip_rnage", "did you mean clip_range"), ("learning_rate", "--help")):
        with pytest.raises(UserError, match=f"no hyperparameter {name}: {wanted}"):
            starter.override(cfg, {name: "1"})
    assert starter.read_arguments(["--task=~/a"]) == {"task": os.path.expanduser("~/a")}
    given = starter.read_arguments(["--lr", "1e-4", "--compile=true", "--prompt=a=b"])
    starter.override(cfg, given)
    assert (cfg.lr, cfg.compile, cfg.prompt) == (1e-4, True, "a=b")
    with pytest.raises(UserError, match="--seed=0.5: expected something like 1"):
        starter.override(cfg, {"seed": 0.5})  # of config.json


def test_what_needs_the_kl_penalty_can_be_switched_off_with_it():
    starter.main(["--use_kl_penalty=False", "--kl_adaptive=False", "--ref_update_every=0"],
                 only_settings=True)


def test_unweighted_k1_in_the_loss_is_warned_about(run_main, capsys):
    run_main(KL, "--kl_estimator=k1", "--kl_importance_weight=False", "--n_grpo_steps=1")
    assert "unweighted k1 in the loss is no penalty" in capsys.readouterr().out


def test_run_folders_are_numbered_and_named_after_what_was_typed(tmp_path):
    cfg = countdown(out_dir=str(tmp_path / "out"))
    long = {"prompt": "ü" * 100, "out_dir": "x", "task": "/data/my file.jsonl"}
    several = {"inner_epochs": "2", "loss_type": "dapo", "clip_range_high": "0.28"}
    names = []
    most = {"model_id": "a/b c", "rollout_batch_size": "1234567"}  # 4 characters too many
    for given in ({}, {"lr": "1e-4", "out_dir": "x"}, long, several, most):
        folder = starter.make_run_folder(cfg, given)
        starter.Log(folder, cfg).close()
        assert vars(cfg).items() <= json.loads((folder / "config.json").read_text()).items()
        assert (tmp_path / "out" / "latest").resolve() == folder.resolve()
        names.append(folder.name)
    # A value is never cut.
    assert names == ["0001", "0002_lr=1e-4", "0003_task=my-file.jsonl",
                     "0004_inner_epochs=2_loss_type=dapo", "0005_model_id=b-c"]
    (tmp_path / "out" / "9999_x").mkdir()
    assert [starter.make_run_folder(cfg, {}).name for _ in range(2)] == ["10000", "10001"]


def test_a_run_folder_never_takes_the_place_of_other_files(tmp_path):
    folder = tmp_path / "latest" / "model"  # a copy of runs that followed the link
    folder.mkdir(parents=True)
    for out_dir in (tmp_path, tmp_path, "/dev/null/x"):  # twice: the lock is released
        with pytest.raises(RunFailed, match="cannot write .*latest") as error:
            starter.make_run_folder(SimpleNamespace(out_dir=str(out_dir)), {})
        assert "\n" not in str(error.value) and folder.exists()


def test_help_is_immediate_and_lists_every_hyperparameter(tmp_path):
    """Neither torch nor anything else that is slow to import is imported."""
    for name in ("torch", "transformers", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    for script, flag in (("sample", "-h"), ("bench", "--help"), ("kl_sweep", "--help"),
                         ("examples/calculator", "-h"), ("tiny", "-h"), ("starter", "--help"),
                         ("starter", "-h")):
        run = subprocess.run([sys.executable, HERE / f"{script}.py", flag], capture_output=True,
                             text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120)
        assert run.returncode == 0 and run.stderr == "" and f"python {script}.py" in run.stdout
    for name in hyperparameters():
        assert re.search(rf"^ +{name}=.*$", run.stdout, re.MULTILINE), name
    assert "python starter.py --resume=latest" in run.stdout
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    run = subprocess.run([sys.executable, HERE / "starter.py", "--help"], stdout=writer,
                         stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert run.stderr == b""


def test_from_the_shell_bad_settings_are_one_line_and_exit_code_2(script, tmp_path):
    assert script.run(tmp_path, "--lerning_rate=1") == 2
    last = script.text().strip().splitlines()[-1]
    assert last.startswith("error: there is no hyperparameter") and "Traceback" not in script.text()
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_resumed_with_its_own_script(tmp_path, monkeypatch):
    cfg = starter.main([], only_settings=True)
    del cfg.max_turns
    starter.Log(tmp_path, cfg).close()
    resume = functools.partial(starter.main, [f"--resume={tmp_path}", "--max_turns=3"],
                               only_settings=True)
    assert resume().max_turns == 3, "a setting that main() has since"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/mine.py", raising=False)
    with pytest.raises(UserError, match="this run has the reward of .*: resume it with that"):
        resume()


def test_runs_that_start_at_the_same_time_get_folders_of_their_own(tmp_path):
    cfg, folders, barrier = SimpleNamespace(out_dir=str(tmp_path)), [], threading.Barrier(8)

    def start():
        barrier.wait()
        folders.append(starter.make_run_folder(cfg, {}).name)

    threads = [threading.Thread(target=start, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(folders) == [f"{i:04d}" for i in range(1, 9)]


def test_a_flag_without_a_value_is_true():
    cfg = starter.main("--use_kl_penalty --n_grpo_steps=2 --kl_coef 0.2".split(), True)
    assert cfg.use_kl_penalty is True and (cfg.n_grpo_steps, cfg.kl_coef) == (2, 0.2)
    assert starter.main(["--lr", 1e-3, "--use_kl_penalty", True], True).lr == 1e-3, "from Python"


def edited(tmp_path, pattern, text):
    """-> starter.py with another hyperparameter in main()"""
    source, n = re.subn(pattern, text, (HERE / "starter.py").read_text(), count=1)
    assert n == 1
    (tmp_path / "edited.py").write_text(source)
    spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_model_written_into_main_is_taken_without_a_gpu(tmp_path):
    module = edited(tmp_path, 'model_id="Qwen.*', 'model_id="mine",')
    cfg = module.main(["--device=cpu"], only_settings=True)
    assert (cfg.model_id, cfg.device, cfg.compile, cfg.lr) == ("mine", "cpu", False, 2e-6)
    assert starter.main(["--device=cpu"], only_settings=True).model_id == "tiny"


def test_a_hyperparameter_of_ones_own_may_be_anything(tmp_path, warm_folder):
    module = edited(tmp_path, "temperature=1.0,", "temperature=1.0, mine=-0.5, other=None, "
                    "more=[1, 2], place=Path('a'), bonus=0.0,")
    module.main([f"--model_id={warm_folder}", *SMALL, f"--out_dir={tmp_path / 'out'}", "--bonus=2",
                 "--n_grpo_steps=1"])
    cfg = module.main([f"--resume={tmp_path / 'out' / 'latest'}", "--mine=3"], only_settings=True)
    assert (cfg.mine, cfg.other, cfg.more, cfg.place, cfg.bonus) == (3, None, [1, 2], Path("a"), 2)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"script": 1}', "\xff", None])
def test_a_damaged_config_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content, "latin-1")
    with pytest.raises(UserError, match="^no run to resume in [^\n]*$"):
        starter.main([f"--resume={tmp_path}"], only_settings=True)


def test_the_tiny_model_in_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "warm_start", lambda *rest: 1 / 0)  # it is noticed before
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()  # also for root
    with pytest.raises(RunFailed, match=r"^cannot write tiny \(\[Errno 2\][^\n]*$"):
        starter.make_tiny("tiny")


def test_an_error_of_tiny_py_is_one_line_from_the_shell():
    """tiny.py imports starter, which is __main__ then: its errors must be the same classes."""
    run = subprocess.run([sys.executable, HERE / "starter.py", "--use_vllm=False"],
                         cwd="/proc", capture_output=True, text=True)  # not even root can write
    assert run.returncode == 1 and re.fullmatch("error: cannot write tiny [^\n]*\n", run.stderr)


def test_only_the_first_rank_prints_also_in_a_script_of_ones_own(script, tmp_path):
    for rank, printed in enumerate(("training\n", "")):
        before = f"starter.RANK, starter.main = {rank}, lambda: print('training')"
        assert script.run(tmp_path, before=before) == 0 and script.text() == printed


def test_a_closed_output_is_no_failure():
    program = """
import starter, sys
def main():
    for _ in range(3):
        starter.print("x" * 100_000)
    sys.stdout = None
    sys.stderr.write("trained")
starter.run(main)"""
    run = subprocess.Popen([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
    run.stdout.close()  # as Ctrl-C closes tee in `python starter.py | tee log`
    assert (run.stderr.read(), run.wait()) == ("trained", 0)


# ---- 7. Quick tests --------------------------------------------------------------------------

def test_quick_tests_pass_and_notice_broken_functions(monkeypatch, capsys):
    starter.test_functions()
    assert "=== All Tests Passed! ===" in capsys.readouterr().out
    divergence, clipped_loss = starter.compute_kl_divergence, starter.compute_loss
    broken = {
        "compute_kl_divergence":
            lambda *a, **k: divergence(*a, **k).detach() + a[0] - a[0].detach(),
        "compute_loss": lambda *a, **k: (2 * clipped_loss(*a, **k)[0], clipped_loss(*a, **k)[1])}
    for name, wrong in broken.items():
        with monkeypatch.context() as patch:
            patch.setattr(starter, name, wrong)
            with pytest.raises(AssertionError):
                starter.test_functions()
            with pytest.raises(RunFailed, match="^compute_loss.* change test_functions[^\n]*$"):
                starter.test_and_train()


# ---- 8. End to end ---------------------------------------------------------------------------

ALWAYS = {f"train/{name}" for name in (
    "reward_mean reward_std loss grad_norm kl_penalty kl_coef clip_fraction entropy "
    "avg_output_tokens truncated_frac answer_frac frac_groups_zero_std skipped_steps").split()} | {
    "rollout/logp_gap_mean", "rollout/logp_gap_max", "time/rollout", "time/train", "time/sync",
    "time/step", "time/minutes", "perf/tokens_per_s"}
EVALUATION = {"eval/accuracy", "eval/margin", "eval/mean_reward", "eval/avg_output_tokens",
              "eval/truncated_frac"}
WITH_KL = {f"kl/{name}" for name in ("mean", "max", "min", "policy_logp_mean", "ref_logp_mean")}


def check_run(folder, n_steps=3):
    """What every finished run must have."""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(n_steps + 1))
    assert EVALUATION <= set(rows[0]) and EVALUATION <= set(rows[-1])
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/skipped_steps"] == 0
        if row["train/frac_groups_zero_std"] < 1:  # otherwise there was nothing to compute
            assert ALWAYS <= set(row) and row["rollout/logp_gap_mean"] < 1e-4
    settings = json.loads((folder / "config.json").read_text())
    before = AutoModelForCausalLM.from_pretrained(settings["model_id"]).state_dict()
    after = weights_of(folder)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return rows


def test_a_run_with_kl_writes_all_its_records(run_main, tmp_path, capsys):
    folder = run_main(KL, "--lr=3e-3", "--inner_epochs=2")
    rows = check_run(folder)
    assert all(WITH_KL <= set(row) for row in rows[1:])
    assert rows[1]["kl/min"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["kl/mean"] > rows[1]["kl/mean"] > 0
    assert [("eval/accuracy" in row) for row in rows] == [True, False, True, True]
    text = capsys.readouterr().out
    assert re.search(r"Step 3 \| Loss: .* \| Grad norm: .* \| Reward mean: .* \| KL penalty", text)
    # TensorBoard: scalars of every step, samples, hyperparameters.
    events = EventAccumulator(str(tmp_path / "out" / "tb" / folder.name))
    events.Reload()
    tags = events.Tags()
    assert ALWAYS | EVALUATION | WITH_KL <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("kl/mean")[2].value == pytest.approx(rows[3]["kl/mean"])
    texts = " ".join(tags["tensors"])
    assert "sample" in texts
    for sample in rows_of(folder, "samples.jsonl"):
        numbers, target = re.fullmatch(r"(.*)=(\d+):", sample["prompt"]).groups()
        numbers = [int(number) for number in numbers.split()]
        assert starter.evaluate_expression(sample["answer"], numbers) == int(target)
        assert {"step", "response", "reward"} <= set(sample)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == [
        "step_00000002.pt", "step_00000003.pt"]


def test_without_kl_there_are_no_kl_scalars_and_the_model_loads_anywhere(run_main, tmp_path):
    folder = run_main()
    rows = check_run(folder)
    assert not [name for row in rows for name in row if name.startswith("kl/")]
    policy, tokenizer = starter.init_policy(str(folder / "model"))
    saved = torch.load(folder / "checkpoint" / "step_00000003.pt", weights_only=True)
    policy.load_state_dict(saved["weights"])
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    batch = make_groups()
    batch.input_ids, batch.labels = batch.input_ids % 256, batch.labels % 256
    got = starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                         response_mask=batch.response_mask)
    assert torch.allclose(got, plain_log_probs(plain, batch), atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder / "model").encode("5") == tokenizer.encode("5")
    assert starter.is_tiny(str(folder / "model"))


def test_a_run_ends_when_its_minutes_are_over(run_main, capsys):
    folder = run_main("--max_minutes=1e-4", "--save_every=50", "--eval_every=50",
                      "--n_grpo_steps=1000000")
    rows, text = check_run(folder, n_steps=1), capsys.readouterr().out
    assert rows[1]["time/minutes"] > 1e-4 and "ETA 0.0 min" in text and "at step 1\n" in text
    run_main(f"--resume={folder}", "--max_minutes=0", "--n_grpo_steps=2")
    assert check_run(folder, n_steps=2)[1] == rows[1], "it was saved, and can be continued"


def test_a_signal_in_an_evaluation_ends_that_step(run_main, monkeypatch):
    evaluate_model, calls = starter.evaluate_model, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate_model(*arguments)

    monkeypatch.setattr(starter, "evaluate_model", interrupted)
    folder = run_main("--eval_every=2", "--n_grpo_steps=10", "--save_every=0")
    assert rows_of(folder)[-1]["step"] == 2
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["step_00000002.pt"]


def test_training_raises_the_reward(run_main):
    rows = rows_of(run_main("--n_grpo_steps=20", "--rollout_batch_size=64", "--group_size=8",
                            "--lr=5e-4", "--seed=1", "--save_every=0", "--eval_every=100"))
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.08, rewards


def check_updates(rows, folder):
    assert rows[1]["train/clip_fraction"] > 0


def check_lora(rows, folder):
    assert not any("lora" in name for name in weights_of(folder))
    assert rows[3]["kl/mean"] > 0


def check_adaptive(rows, folder):
    assert rows[3]["train/kl_coef"] > 0.01 and rows[1]["kl/mean"] > 1e-5


def check_jsonl(rows, folder):
    samples = rows_of(folder, "samples.jsonl")
    assert {sample["prompt"] for sample in samples} <= {f"<user>{i}+{i % 7} is<|end|><assistant>"
                                                        for i in range(50, 60)}


def check_no_checkpoint(rows, folder):
    assert not (folder / "checkpoint").exists() and rows[1]["train/kl_penalty"] == 0


OPTIONS = [
    (["--inner_epochs=2", "--n_minibatches=2", "--gradient_accumulation_steps=3",
      "--loss_type=dapo",
      "--clip_range=0.001", "--clip_range_high=0.002", "--seed=7"], check_updates),
    (["--tokens_per_microbatch=40", "--loss_type=dr_grpo", "--use_std_normalization=False",
      "--temperature=0.7", "--min_tokens=2", "--max_grad_norm=0",
      "--warmup_steps=0"], None),
    (["--gradient_checkpointing=True", "--compile=True"], None),
    ([KL, "--kl_estimator=exact", "--lora_rank=2", "--inner_epochs=2", "--lr=1e-2"], check_lora),
    ([KL, "--kl_estimator=k1", "--kl_in=reward", "--n_minibatches=2", "--kl_coef=0.05",
      "--reward_truncated=True", "--max_turns=2"], None),
    ([KL, "--kl_importance_weight=False", "--kl_adaptive=True", "--target_kl=1e-7",
      "--kl_estimator=k2", "--ref_update_every=2", "--inner_epochs=2"], check_adaptive),
    (["--task=task.jsonl", "--eval_task=eval.jsonl", "--prompt={question} is", "--model_id=other",
      "--max_prompt_tokens=64"], check_jsonl),
    ([KL, "--kl_coef=0", "--operations=+-*", "--max_number=9", "--n_numbers=3", "--save_every=0",
      "--gpu_mem_util=0.2", "--device=cpu", "--max_prompt_tokens=32"],
     check_no_checkpoint)]


@pytest.mark.parametrize("arguments, check", OPTIONS, ids=range(len(OPTIONS)))
def test_options(run_main, save_folder, tmp_path, monkeypatch, arguments, check):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "task.jsonl", sums(range(60)))
    write_rows(tmp_path / "eval.jsonl", sums(range(50, 60)))
    if "--model_id=other" in arguments:
        shutil.copytree(save_folder(), tmp_path / "other")
        # Random weights answer nothing right, so that the reward is about the letters.
        monkeypatch.setattr(starter, "reward_fn", lambda text, problem: len(set(text)) / 99)
    # The C++ compiler would take half a minute; this traces the same graphs. The GPU tests use it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    folder = run_main(*arguments)
    rows = check_run(folder)
    if check:
        check(rows, folder)


def test_kl_mean_is_near_the_exact_kl_with_several_updates_per_rollout(run_main, monkeypatch):
    """Large steps, 4 epochs x 2 minibatches: the first edition logged 8 for an exact KL of 0.2."""
    exact, step = [], starter.grpo_microbatch_step

    def watched(policy, input_ids, labels, response_mask, ref_model, **options):
        with torch.no_grad():
            kl = starter.response_stats(policy, input_ids, labels, response_mask, 1.0, ref_model)[3]
        exact.append((float(kl.sum()), int(response_mask.sum())))
        return step(policy, input_ids, labels, response_mask, ref_model=ref_model, **options)

    monkeypatch.setattr(starter, "grpo_microbatch_step", watched)
    folder = run_main(KL, "--inner_epochs=4", "--n_minibatches=2", "--lr=6e-4", "--kl_coef=0.001",
                      "--n_grpo_steps=4", "--rollout_batch_size=64")
    rows = check_run(folder, 4)
    assert len(exact) == 32
    for i, row in enumerate(rows[1:]):
        sums_and_counts = exact[8 * i:8 * i + 8]
        wanted = sum(s for s, _ in sums_and_counts) / sum(n for _, n in sums_and_counts)
        assert wanted / 3 < row["kl/mean"] < wanted * 3
    assert wanted > 0.03


def test_old_log_probs_are_those_before_the_update_and_only_of_rows_that_need_them(
        run_main, monkeypatch):
    step, score, before, compared, scored = (
        starter.grpo_microbatch_step, starter.score, {}, [], [])

    def watched(policy, input_ids, labels, response_mask, old_log_probs=None, **options):
        now = {name: weight.clone() for name, weight in policy.state_dict().items()}
        if old_log_probs is None:  # the first minibatch
            before.update(now)
        else:
            policy.load_state_dict(before)
            with torch.no_grad():
                wanted = starter.response_stats(policy, input_ids, labels, response_mask, 1.0)[0]
            policy.load_state_dict(now)
            close = torch.isclose(old_log_probs, wanted, atol=1e-5) | ~response_mask
            compared.append((bool(close.all()), float((old_log_probs * response_mask).sum())))
        return step(policy, input_ids, labels, response_mask, old_log_probs=old_log_probs,
                    **options)

    def watched_score(model, batch, rows, cfg):
        scored.append((len(rows), int((batch.advantages_per_seq != 0).sum())))
        return score(model, batch, rows, cfg)

    monkeypatch.setattr(starter, "grpo_microbatch_step", watched)
    monkeypatch.setattr(starter, "score", watched_score)
    run_main("--n_minibatches=3", "--lr=3e-4", "--n_grpo_steps=4", "--rollout_batch_size=48")
    assert len(compared) >= 6 and all(same and total < 0 for same, total in compared)
    assert scored[0][0] == 32  # step 1 trains all rows
    assert all(n <= min(32, n_trained) for n, n_trained in scored[1:])
    assert sum(n for n, _ in scored[1:]) < 96
    compared.clear()
    scored.clear()
    run_main("--inner_epochs=2", "--lr=3e-4", "--n_grpo_steps=3", "--rollout_batch_size=48")
    assert len(compared) >= 3 and all(same and total < 0 for same, total in compared)
    assert [n for n, _ in scored] == [48, *(n_trained for _, n_trained in scored[1:])]


def test_no_update_is_skipped_because_of_kl(run_main):
    folder = run_main(KL, "--lr=0.1", "--warmup_steps=0", "--inner_epochs=2", "--n_grpo_steps=6")
    rows = rows_of(folder)
    assert len(rows) == 7 and max(row.get("kl/max", 0) for row in rows) >= 20
    assert rows[-1]["train/skipped_steps"] == 0


def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(run_main, monkeypatch,
                                                                         tmp_path):
    advantages, calls = starter.group_advantages, []

    def bad(*arguments):
        calls.append(len(calls))
        return advantages(*arguments) * (math.nan if len(calls) in (2, 4, 5, 6, 7, 8) else 1.0)

    monkeypatch.setattr(starter, "group_advantages", bad)
    with pytest.raises(RunFailed, match="5 updates in a row"):
        run_main("--n_grpo_steps=9")
    rows = rows_of(tmp_path / "out" / "latest")
    assert [row["train/skipped_steps"] for row in rows[1:]] == [0, 1, 1, 2, 3, 4, 5][:len(rows) - 1]
    assert len(rows) >= 7 and "train/loss" not in rows[2]
    saved = starter.load_checkpoint(tmp_path / "out" / "latest")
    assert all(torch.isfinite(tensor).all() for tensor in saved["weights"].values())


def test_weights_that_do_not_arrive_and_another_reference_are_noticed(run_main, monkeypatch):
    with monkeypatch.context() as patch:
        generate = starter.TorchSampler.generate

        def stale(sampler, *arguments):
            sampler.model.load_state_dict = lambda weights: None
            return generate(sampler, *arguments)

        patch.setattr(starter.TorchSampler, "generate", stale)
        with pytest.raises(RunFailed, match="the weights did not arrive"):
            run_main("--lr=1e-2", "--warmup_steps=0")
    reference = starter.make_reference

    def other(policy, cfg):
        model = reference(policy, cfg)
        model.model.lm_head.weight.mul_(1.1)
        return model

    monkeypatch.setattr(starter, "make_reference", other)
    with pytest.raises(RunFailed, match="before any update"):
        run_main(KL)


def test_groups_with_equal_rewards_leave_the_weights_alone_to_the_bit(run_main, warm_folder,
                                                                      monkeypatch):
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: 0.1)
    folder = run_main("--reward_truncated=True")
    after, rows = weights_of(folder), rows_of(folder)[1:]
    assert len(rows) > 1 and all(row["train/entropy"] > 0 for row in rows), "of one response"
    before = AutoModelForCausalLM.from_pretrained(warm_folder).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_without_advantage_count_in_the_divisor(run_main):
    """They are left out of the computation from step 2 on, and the gradient stays the same."""
    norms = []
    for kl_coef in ("1e-30", "0"):
        rows = rows_of(run_main(KL, f"--kl_coef={kl_coef}", "--lr=1e-9", out=f"out{kl_coef}"))
        assert 0 < np.mean([row["train/frac_groups_zero_std"] for row in rows[2:]]) < 1
        norms.append([row["train/grad_norm"] for row in rows[1:]])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_best_is_the_model_of_the_best_evaluation(run_main, monkeypatch):
    scores, evaluate_model = iter([0.5, 0.4, 0.7, 0.6]), starter.evaluate_model

    def scripted(*arguments):
        metrics, rows = evaluate_model(*arguments)
        return metrics | {"eval/mean_reward": next(scores)}, rows

    monkeypatch.setattr(starter, "evaluate_model", scripted)
    folder = run_main("--eval_every=1")
    best = AutoModelForCausalLM.from_pretrained(folder / "best").state_dict()
    saved = torch.load(folder / "checkpoint" / "step_00000002.pt", weights_only=True)
    assert all(torch.equal(best[name.removeprefix("model.")], tensor)
               for name, tensor in saved["weights"].items())
    assert saved["state"]["best_reward"] == 0.7


def test_lora_is_merged_into_the_model_that_is_written(run_main):
    folder = run_main("--lora_rank=2", "--lr=1e-2", "--warmup_steps=0")
    saved = torch.load(folder / "checkpoint" / "step_00000003.pt", weights_only=True)
    assert all("lora_" in name for name in saved["weights"]), "frozen weights are not saved"
    settings = json.loads((folder / "config.json").read_text())
    policy, _ = starter.init_policy(settings["model_id"])
    starter.add_lora(policy, 2, seed=0)
    policy.load_state_dict(saved["weights"], strict=False)
    batch = make_groups()
    batch.input_ids, batch.labels = batch.input_ids % 256, batch.labels % 256
    got = starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                         response_mask=batch.response_mask)
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert torch.allclose(got, plain_log_probs(plain, batch), atol=1e-4)


@contextlib.contextmanager
def busy_processes(n=2):
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_equal_runs_beside_busy_processes_give_equal_numbers(run_main):
    arguments = [KL, "--n_grpo_steps=5", "--rollout_batch_size=32", "--group_size=8", "--lr=2e-3"]
    torch.set_num_threads(2)
    with busy_processes():
        folders = [run_main(*arguments, out=f"out{i}") for i in range(2)]
    torch.set_num_threads(1)
    assert numbers_of(folders[0]) == numbers_of(folders[1]) and equal_weights(*folders)
    assert torch.are_deterministic_algorithms_enabled()


def test_a_model_in_latest_is_still_the_same_when_its_run_is_resumed(run_main, tmp_path):
    """out/latest/model is the model of another run as soon as this one has a folder."""
    first = run_main("--n_grpo_steps=1", "--save_every=0")
    arguments = [f"--model_id={tmp_path}/out/latest/model", KL, "--n_grpo_steps=1"]
    second = run_main(*arguments)
    assert json.loads((second / "config.json").read_text())["model_id"] == str(first / "model")
    starter.main([f"--resume={second}", "--n_grpo_steps=2"])
    assert rows_of(second)[-1]["kl/mean"] > 0, "not the KL to the model of step 1"


def test_a_finished_run_without_a_checkpoint_is_not_overwritten(run_main):
    folder = run_main("--save_every=0", "--n_grpo_steps=1")
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="no intact checkpoint in .*: it cannot continue"):
        starter.main([f"--resume={folder}", "--n_grpo_steps=2"])
    assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("is_refreshed", [True, False])
def test_a_refreshed_reference_is_the_policy(run_main, is_refreshed):
    folder = run_main(KL, f"--ref_update_every={int(is_refreshed)}", "--kl_adaptive=True",
                      "--lr=3e-3", "--n_grpo_steps=3")
    kls = [row["kl/mean"] for row in rows_of(folder)[2:]]
    assert max(kls) < 1e-9 if is_refreshed else min(kls) > 1e-6
    path = folder / "checkpoint" / "step_00000003.pt"
    state = torch.load(path, weights_only=True)["state"]
    assert (state["ref_step"] == 3) == (state["kl_smooth"] == 0) == is_refreshed


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(run_main, monkeypatch):
    folder = run_main("--n_grpo_steps=1")
    monkeypatch.setattr(starter, "start_process_group", print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for flag in ("--device=cpu", f"--resume={folder}"):
        cfg = starter.main([], only_settings=True)
        assert cfg.model_id.startswith("Qwen/") and (cfg.device, cfg.compile) == ("cuda", True)
        assert cfg.kl_coef == 0.005 and not torch.are_deterministic_algorithms_enabled()
        cfg = starter.main([flag], only_settings=True)
        assert not cfg.model_id.startswith("Qwen/") and (cfg.device, cfg.compile) == ("cpu", False)
        assert cfg.kl_coef == 0.1 and torch.are_deterministic_algorithms_enabled()


def test_resuming_takes_over_all_settings_and_says_what_changed(run_main, tmp_path, capsys):
    """Also: a refreshed reference and the adaptive coefficient survive two resumes."""
    arguments = [KL, "--ref_update_every=2", "--kl_adaptive=True", "--target_kl=1e-7",
                 "--n_minibatches=2",
                 "--lr=3e-3", "--n_grpo_steps=7"]
    whole = run_main(*arguments, out="whole")
    run_main(*arguments[:-1], "--n_grpo_steps=3", out="parts")
    path = tmp_path / "parts" / "latest"
    folder = path.resolve()
    capsys.readouterr()
    for n_steps in (5, 7):
        starter.main([f"--resume={folder}", f"--n_grpo_steps={n_steps}"])
    assert "changed on resume: n_grpo_steps 5 -> 7" in capsys.readouterr().out
    starter.main([f"--resume={folder}", "--lr=0.0030", "--seed=042"])  # the same numbers
    assert "changed on resume" not in capsys.readouterr().out
    got, wanted = numbers_of(folder), numbers_of(whole)
    for row in got + wanted:  # steps 3 and 5 were last ones, and so evaluated
        for name in EVALUATION:
            row.pop(name, None)
    assert got == wanted and equal_weights(folder, whole)
    for change in ("--seed=1", "--n_numbers=3", "--lora_rank=2"):
        with pytest.raises(UserError, match="cannot change on resume"):
            starter.main(["--resume=latest", f"--out_dir={tmp_path / 'parts'}", change])
    factor = wanted[-1]["train/kl_coef"] / 0.1
    assert factor > 1
    starter.main([f"--resume={folder}", "--n_grpo_steps=8", "--kl_coef=0.003"])
    change = rows_of(folder)[-1]["train/kl_coef"] / 0.003 / factor  # of one step
    assert min(abs(change - x) for x in (0.75, 1, 1.5)) < 1e-6
    starter.main([f"--resume={folder}", "--n_grpo_steps=9", "--kl_adaptive=False"])
    assert rows_of(folder)[-1]["train/kl_coef"] == 0.003
    # Without the penalty the refreshed reference is not kept.
    lost = "the refreshed reference is gone"
    starter.main([f"--resume={folder}", "--n_grpo_steps=10", "--use_kl_penalty=False",
                  "--ref_update_every=0"])
    assert lost not in capsys.readouterr().out
    starter.main([f"--resume={folder}", "--n_grpo_steps=11", KL])
    assert lost in capsys.readouterr().out


LONG_RUN = [*SMALL, KL, "--n_minibatches=2", "--n_grpo_steps=16", "--save_every=2"]


@pytest.fixture(scope="module")
def whole_run(script, warm_folder, tmp_path_factory):
    """The run that the interrupted ones must repeat."""
    folder = tmp_path_factory.mktemp("whole")
    assert script.run(folder, f"--model_id={warm_folder}", *LONG_RUN) == 0, script.text()
    return folder / "out" / "latest"


@pytest.mark.xdist_group("whole run")
def test_five_kills_at_random_moments_change_nothing(script, whole_run, warm_folder, tmp_path):
    rng = random.Random(time.time_ns())
    for n_lines in (0, 1, 3, 2, 1):  # a step writes a line or two
        is_started = (tmp_path / "out" / "latest" / "config.json").exists()
        start = ["--resume=latest"] if is_started else [f"--model_id={warm_folder}", *LONG_RUN]
        script.start(tmp_path, *start)
        wait_for(lambda: script.text().count("Step ") >= n_lines, f"{n_lines} lines")
        time.sleep(rng.random() * 0.2)
        os.kill(script.pid, signal.SIGKILL)
        assert script.end() == -signal.SIGKILL, script.text()
    assert script.run(tmp_path, "--resume=latest") == 0, script.text()
    folder = (tmp_path / "out" / "latest").resolve()
    assert numbers_of(folder) == numbers_of(whole_run) and equal_weights(folder, whole_run)
    assert not list(folder.rglob("*.tmp")) and not list(folder.rglob("*.old"))


@pytest.mark.xdist_group("whole run")
def test_ctrl_c_saves_and_the_printed_command_continues(script, whole_run, warm_folder, tmp_path):
    script.start(tmp_path, f"--model_id={warm_folder}", *LONG_RUN, "--save_every=0")
    script.until("Step 3 ")
    os.kill(script.pid, signal.SIGINT)
    assert script.end() == 0, script.text()
    command = re.search(r"python \S*starter.py (--resume=\S+)", script.text())[1]
    (checkpoint,) = (tmp_path / "out" / "latest" / "checkpoint").iterdir()
    assert "step_0000000" in checkpoint.name and "stopping after this step" in script.text()
    assert script.run(tmp_path, command) == 0, script.text()
    got, wanted = numbers_of(tmp_path / "out" / "latest"), numbers_of(whole_run)
    assert got == wanted and equal_weights(tmp_path / "out" / "latest", whole_run)


@pytest.mark.xdist_group("whole run")
def test_a_damaged_checkpoint_falls_back_to_the_one_before(script, whole_run, tmp_path):
    folder = tmp_path / "out" / "0001"
    shutil.copytree(whole_run.resolve(), folder)
    (folder / "checkpoint" / "step_00000016.pt").write_bytes(b"PK damaged")
    (folder / "checkpoint" / "step_best.pt").write_bytes(b"a copy of somebody's")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"note": "not of the trainer"}\n{"step": 17, "tr')
    (folder / "notes.tmp").touch()
    assert script.run(tmp_path, "--resume=out/0001") == 0, script.text()
    assert "is damaged" in script.text() and "after step 14" in script.text()
    assert (folder / "notes.tmp").exists()
    assert numbers_of(folder) == numbers_of(whole_run) and equal_weights(folder, whole_run)


@pytest.mark.parametrize("limit", [500, 3000, 12_000, 1_000_000, 8_000_000])
def test_a_full_disk_ends_the_run_in_one_line(script, warm_folder, tmp_path, limit):
    """No file may be larger than the limit: config, log, events, model or checkpoint cannot be
    written. Nothing that can be resumed is lost."""
    before = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    code = script.run(tmp_path, f"--model_id={warm_folder}", *LONG_RUN, "--n_grpo_steps=6",
                      before=before)
    assert code in (1, 2) and script.text().count("error: cannot write") == 1, script.text()
    # TensorBoard's own thread may complain at the same time, until the program ends. When the same
    # error has reached our thread by then, its traceback has our lines, too.
    theirs = r"^Exception in thread .*?(?:^\w*Error: [^\n]*$|\Z)"
    ours = re.sub(theirs, "", script.text(), flags=re.M | re.S)
    assert "starter.py\", line" not in ours


def close(got, wanted):
    """Equal but for rounding."""
    assert [row.keys() for row in got] == [row.keys() for row in wanted]
    for row, other in zip(got, wanted):
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-4), (name, row["step"])


def save_gradients(*folders):
    """Of a row on rank 0; other ranks have none. Sharded gradients are means over ranks."""
    for folder in folders:
        policy, _ = starter.init_policy(str(folder))
        starter.compile_and_shard(policy, settings_of(compile=False))
        ids = torch.arange(2, 14)[None]
        mask = torch.full(ids.shape, starter.RANK == 0)
        starter.get_response_log_probs(policy, ids, ids, response_mask=mask).sum().backward()
        gradients = [torch.zeros(p.shape) if p.grad is None else starter.full(p.grad)
                     for p in policy.parameters()]
        if starter.RANK == 0:
            torch.save(torch.cat([gradient.flatten() for gradient in gradients]),
                       f"{folder}/gradients_of_{starter.WORLD}.pt")


def test_two_ranks_give_the_numbers_of_one(run_main, save_folder, warm_folder, tmp_path):
    """The second run has one prompt: one of the ranks has no share of it, nor of the evaluation.
    The third has an output layer with a bias, which the exact KL needs whole. At the end gradients
    of two more models: layers that share weights, and one that is awkward without rows."""
    runs = {"adapters": [KL, "--kl_estimator=exact", "--lora_rank=2", "--inner_epochs=2",
                         "--n_minibatches=2",
                         "--rollout_batch_size=12", "--lr=1e-2"],
            "share": [KL, "--rollout_batch_size=4", "--n_eval=1", "--n_minibatches=2",
                      "--max_grad_norm=0.1",
                      "--ref_update_every=2", "--loss_type=dapo"],
            "bias": [KL, "--kl_estimator=exact", "--kl_coef=1", f"--model_id={save_folder('phi')}",
                     "--prompt={numbers}={target}:", "--max_prompt_tokens=40"]}
    program = tmp_path / "program.py"
    program.write_text("import json, os, sys, starter, test_starter\n"
                       "for arguments in json.loads(sys.argv[1]):\n    starter.main(arguments)\n"
                       "    starter.start_process_group = print  # once is enough\n"
                       "test_starter.save_gradients(*sys.argv[2:])\n"
                       "os._exit(0)  # as starter.py does\n")
    folders = [save_folder("zamba2", noise=0.1, **ZAMBA2), save_folder("rwkv", noise=0.1)]
    start = [f"--model_id={warm_folder}", *SMALL]
    arguments = [[*start, f"--out_dir={tmp_path / f'two_{name}'}", *options]
                 for name, options in runs.items()]
    arguments.append([f"--resume={tmp_path / 'two_share' / 'latest'}", "--n_grpo_steps=4"])
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2",
                    program, json.dumps(arguments), *folders], check=True, env=environment,
                   timeout=400)
    for folder in folders:
        two = torch.load(folder / "gradients_of_2.pt")
        save_gradients(folder)
        assert relative(2 * two, torch.load(folder / "gradients_of_1.pt")) < 1e-5, folder
    for name, options in runs.items():
        n_steps = 4 if name == "share" else 3
        alone = run_main(*options, f"--n_grpo_steps={n_steps}", out=name)
        got, wanted = numbers_of(tmp_path / f"two_{name}" / "latest"), numbers_of(alone)
        if name == "share":
            # Step 3 was the last one of the first part, and so evaluated.
            for row, key in itertools.product(got + wanted, EVALUATION):
                row.pop(key, None)
        close(got, wanted)
        first, second = weights_of(tmp_path / f"two_{name}" / "latest"), weights_of(alone)
        assert all(torch.allclose(first[key], second[key], atol=2e-4) for key in first)


@needs_vllm
def test_the_script_with_vllm_is_killed_and_repeats_its_numbers(warm_folder, tmp_path):
    def start(*arguments):
        log = open(tmp_path / "log", "w")
        return subprocess.Popen([sys.executable, HERE / "starter.py", *arguments], cwd=tmp_path,
                                stdout=log, stderr=subprocess.STDOUT)

    def text():
        return (tmp_path / "log").read_text()

    process = start(f"--model_id={warm_folder}", *SMALL, "--use_vllm=True", KL, "--n_grpo_steps=50",
                    "--save_every=2")
    wait_for(lambda: "Step 4 " in text() or process.poll() is not None, "step 4")
    process.kill()
    assert process.wait() == -signal.SIGKILL and "torch samples" not in text(), text()
    folder = (tmp_path / "out" / "latest").resolve()
    before = numbers_of(folder)
    for path in (folder / "checkpoint").glob("step_*.pt"):
        if path.name > "step_00000002.pt":
            path.unlink()
    n_steps = max(4, len(before) - 1)
    process = start("--resume=latest", f"--n_grpo_steps={n_steps}")
    assert process.wait(timeout=400) == 0, text()
    assert "resuming" in text() and "after step 2" in text()
    rows = check_run(folder, n_steps)
    assert numbers_of(folder)[:len(before) - 1] == before[:-1] and len(before) >= 4
    assert rows[1]["rollout/logp_gap_max"] < 1e-3


def test_a_padded_model_trains_is_interrupted_and_repeats_its_numbers(run_main, save_folder,
                                                                      monkeypatch):
    calls = []

    def interrupting(text, problem):
        calls.append(text)
        if len(calls) == 40:  # in step 2
            os.kill(os.getpid(), signal.SIGINT)
        return letters(text, problem)

    start = save_folder("lfm2", **PADDED["lfm2"])
    arguments = [f"--model_id={start}", "--prompt={numbers}={target}:", "--max_prompt_tokens=40",
                 "--reward_truncated", "--n_grpo_steps=4", "--save_every=9", KL]
    monkeypatch.setattr(starter, "reward_fn", letters)
    whole = run_main(*arguments, out="whole")
    monkeypatch.setattr(starter, "reward_fn", interrupting)
    folder = run_main(*arguments)
    assert rows_of(folder)[-1]["step"] == 2
    starter.main([f"--resume={folder}"])
    rows = check_run(folder, 4)
    assert numbers_of(folder) == numbers_of(whole) and equal_weights(folder, whole)
    assert min(row["train/grad_norm"] for row in rows[1:]) > 0 and rows[4]["kl/mean"] > 0
    # In plain transformers the log-probs are those of the last checkpoint.
    policy, _ = starter.init_policy(str(start))
    assert policy.layout is starter.pad
    saved = torch.load(folder / "checkpoint" / "step_00000004.pt", weights_only=True)
    policy.load_state_dict(saved["weights"])
    batch = make_groups()
    with torch.no_grad():
        got = starter.get_response_log_probs(policy, batch.input_ids, batch.labels,
                                             response_mask=batch.response_mask)
        plain = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        assert torch.allclose(got, plain_log_probs(plain, batch), atol=1e-4)


def test_two_nodes_without_a_shared_disk_and_one_of_them_without_vllm(warm_folder, tmp_path):
    """All sample with torch, rank 0 writes. Only the first node has the folder to resume."""
    program = ("import os, sys\nif os.environ['RANK'] == '1':\n    sys.modules['vllm'] = None\n"
               "import starter\nstarter.main(sys.argv[1:])\n"
               "starter.run(lambda: starter.main(['--resume=latest']))\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = []
    for rank in "01":  # what torchrun --nnodes=2 sets
        shutil.copytree(warm_folder, tmp_path / rank / "tiny")
        environment = os.environ | {
            "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "PYTHONPATH": str(HERE)}
        nodes.append(subprocess.Popen(
            [sys.executable, "-c", program, *SMALL, "--use_vllm=True", "--n_grpo_steps=1"],
            cwd=tmp_path / rank, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE))
    try:
        texts = [node.communicate(timeout=90) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    words = "!!! vLLM cannot be used here, torch samples: ModuleNotFound"
    assert all(out.count(words) == 1 for out, _ in texts), texts
    for node, (_, errors) in zip(nodes, texts):
        assert re.search("error: no run to resume in out/latest .*\n$", errors)
        assert node.returncode == 2
    assert "at step 1\n" in texts[0][0] and len(rows_of(tmp_path / "0" / "out" / "latest")) == 2
    assert os.listdir(tmp_path / "1") == ["tiny"]


def test_the_last_line_on_the_screen_is_the_result(warm_folder, tmp_path):
    run = subprocess.run(
        [sys.executable, HERE / "starter.py", f"--model_id={warm_folder}", *SMALL,
         "--n_grpo_steps=1"], cwd=tmp_path, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0 and re.search(
        r"^Held-out accuracy, sampled: .*% -> .*% at step 1\n  try it    python sample.py .*\n"
        r"  curves    tensorboard --logdir /.*/out/tb\n\Z", run.stdout, re.M), run.stdout
    assert run.stdout.startswith("=== All Tests Passed! ===\nloading "), "and no warnings before"


# ---- 9. The other files ----------------------------------------------------------------------

def test_the_tokenizer_of_tiny_has_the_ids_of_tiktoken(tmp_path):
    encoding, tokenizer = tiny.make_encoding(), tiny.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    texts = ["3 5 7=22:<answer>3*5+7</answer>", "ü€ 漢字\n\t\x00", "<|end|><|pad|>", "",
             "".join(chr(rng.randrange(32, 0x2000)) for _ in range(500))]
    for text in texts:
        ids = encoding.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == again.encode(text) == ids
        assert again.decode(ids) == text
    assert (again.eos_token_id, again.pad_token_id, again.bos_token_id) == (256, 257, None)


def test_the_warm_start_uses_no_problem_of_training_or_evaluation():
    examples = tiny.countdown_examples(3, n=20)
    for prompt, response in examples:
        numbers, target = prompt[:-1].split("=")
        problem = {"numbers": [int(n) for n in numbers.split()], "target": int(target)}
        assert starter.reward_fn(response, problem) == 1.0
    cfg = countdown(seed=42)
    task = starter.Task(cfg, *starter.read_task(cfg), tiny.make_tokenizer())
    warm = {prompt for step in range(300) for prompt, _ in tiny.countdown_examples(step, n=2)}
    assert not warm & {problem["prompt"] for problem in task.held_out}
    first = starter.make_problem(tiny.PROBLEMS, 42, 10_000_000)
    assert first.items() <= task.problem(0).items(), "far behind the 300 x 128 problems of tiny.py"


def test_sample_measures_pass_at_k_and_talks(warm_folder, monkeypatch, capsys):
    import sample
    assert sample.printable("<b>\x1b[31m\n") == "<b>\\x1b[31m\n"
    assert sample.pass_at_k(8, 0, 4) == 0 and sample.pass_at_k(8, 5, 4) == 1
    pairs = list(itertools.combinations([1, 1, 0, 0, 0], 2))
    assert sample.pass_at_k(5, 2, 2) == pytest.approx(np.mean([max(pair) for pair in pairs]))
    options = [f"--model_id={warm_folder}", "--use_vllm=False", "--n_numbers=2", "--max_number=9"]
    sample.main([*options, "--n_eval=10", "--n_samples=8"])
    text = capsys.readouterr().out
    shares = [float(re.search(rf"pass@{k} +([0-9.]+) ", text)[1]) for k in (1, 4, 8)]
    assert 0.1 < shares[0] < shares[1] < shares[2] <= 1 and "expected: " in text
    assert re.search(r"accuracy, greedy +0\.[0-9]+ +\(95 %: ", text)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 5=8:\n\n"))
    sample.main([*options, "--chat=True", "--temperature=0"])
    assert "model: <answer>" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", None)
    sample.main([*options, "--chat=True"])  # ends at once
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 5=8:\n3 4=7:\n"))
    monkeypatch.setattr(starter, "roll_out", lambda *rest: starter.checked_reward(None, "", {}))
    sample.main([*options, "--chat=True"])
    assert capsys.readouterr().out.count("(reward_fn: TypeError") == 2, "the conversation goes on"


def test_a_mistake_in_the_reward_shows_its_line_once(monkeypatch, capsys):
    def reward_fn(text, problem):
        return problem["nothing"]

    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    starter.run(lambda: starter.checked_reward(reward_fn, "hello", {}))
    errors = capsys.readouterr().err
    assert errors.count('return problem["nothing"]') == 1 and "/starter.py\", line" not in errors
    assert errors.endswith("\nerror: reward_fn: KeyError('nothing') for the response 'hello'\n")
    starter.run(lambda: starter.checked_reward(lambda *rest: exit(3), "", {}))
    assert codes == [2, 2]


def test_sample_measures_problems_that_the_run_held_out(tmp_path):
    import sample
    run = vars(settings_of(task="a.jsonl", eval_task="b.jsonl", prompt="{question}?"))
    model = [f"--model_id={tmp_path / 'model'}"]

    def settings(*arguments, **changes):
        (tmp_path / "config.json").write_text(json.dumps(run | changes))
        cfg = sample.read_settings([*model, *arguments])
        return cfg.task, cfg.eval_task, cfg.prompt, cfg.n_eval

    assert settings("--n_eval=99") == ("a.jsonl", "b.jsonl", "{question}?", 99)
    assert settings("--prompt=hm {question}")[2] == "hm {question}"
    assert settings("--task=c.jsonl")[:3] == ("c.jsonl", "", starter.QUESTION_PROMPT)
    assert settings("--task=countdown")[:3] == ("countdown", "", starter.COUNTDOWN_PROMPT)
    # Without a file for testing, the rows held out depend on these.
    assert settings("--n_eval=99", eval_task="") == ("a.jsonl", "", "{question}?", run["n_eval"])
    for change in ("--prompt=hm {question}", "--max_prompt_tokens=65"):
        assert settings(change, "--eval_task=b.jsonl", eval_task="")[1] == "b.jsonl"
        with pytest.raises(UserError, match="decides which problems are held out"):
            settings(change, eval_task="")
    # The same file by another name
    assert settings("--task=./a.jsonl", eval_task="")[2:] == ("{question}?", run["n_eval"])
    for damaged in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_text(damaged, errors="surrogateescape")
        with pytest.raises(UserError, match="cannot read .*config.json"):
            sample.read_settings(model)
    (tmp_path / "config.json").write_text("{}")
    assert sample.read_settings(model).task == "countdown"


def test_sample_takes_a_run_folder_and_refuses_impossible_numbers(tmp_path, monkeypatch):
    import sample
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no trained model in out/latest: run python starter.py"):
        sample.read_settings([])
    Path("out/latest").mkdir(parents=True)
    Path("out/latest/metrics.jsonl").touch()
    with pytest.raises(UserError, match="not finished: .* Give out/latest/best, if there"):
        sample.read_settings([])
    assert sample.read_settings([f"--model_id={tmp_path}"]).model_id == f"{tmp_path}/model"
    for word in ("temperature=-1", "temperature=nan", "temperature=inf", "n_samples=0",
                 "operations=x", "operations=", "n_numbers=0", "max_number=0", "device=foo",
                 "min_tokens=-3", "min_tokens=9999"):
        with pytest.raises(UserError, match=word.partition("=")[0]):
            sample.read_settings([f"--model_id={tmp_path}", f"--{word}"])
    (tmp_path / "model").rename(tmp_path / "best")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="was not finished.*/best, if there"):
        sample.read_settings([f"--model_id={tmp_path}"])


@pytest.mark.parametrize("name, text, message", [
    ("a.py", "def (", "cannot use the script .*SyntaxError"), ("a.txt", "x", "is no Python file"),
    ("b.py", "import not_there", "cannot use .*No module named"),
    ("c.py", "raise SystemExit", "cannot use the script .*SystemExit"),
    ("gone.py", None, "is gone")])
def test_sample_refuses_a_script_that_it_cannot_use(tmp_path, name, text, message):
    import sample
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        sample.load_script(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_sample_uses_a_script_as_python_does(tmp_path, monkeypatch):
    import sample
    for name in ("reward_fn", "UserError", "RunFailed"):
        monkeypatch.setattr(starter, name, getattr(starter, name))
    (tmp_path / "beside.py").write_text("def grade(text, problem): return 0.25")
    (tmp_path / "json.py").write_text("""
from __future__ import annotations
import dataclasses, beside, starter
@dataclasses.dataclass
class Judge:
    name: str
starter.reward_fn = beside.grade""")
    assert sample.load_script(str(tmp_path / "json.py")).reward_fn("", {}) == 0.25
    assert sys.modules["json"] is json
    # What a script assigns comes before what it imports. It is not run.
    (tmp_path / "own.py").write_text("""
import starter
from starter import reward_fn
starter.reward_fn = lambda text, problem: 0.5
starter.main(["--no_such_setting"])""")
    assert sample.load_script(str(tmp_path / "own.py")).reward_fn("", {}) == 0.5
    # One that assigns its reward in main() has the built-in one when it is imported.
    run = vars(settings_of(task="countdown", prompt="{numbers}")) | {
        "script": str(HERE / "starter.py"), "reward_fn": "mine"}
    (tmp_path / "config.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"trained with mine\(\), but .*starter.py has "):
        sample.main([f"--model_id={tmp_path / 'model'}"])
    # A changed copy of starter.py raises errors of its own.
    shutil.copy(HERE / "starter.py", tmp_path / "mine.py")
    trainer = sample.load_script(str(tmp_path / "mine.py"))
    assert trainer.UserError is starter.UserError is not UserError


def test_sample_has_the_defaults_of_the_trainer(tmp_path):
    import sample
    for model_id in ("tiny", tmp_path):
        flags = [f"--model_id={model_id}"]
        got, wanted = sample.read_settings(flags), starter.main(flags, only_settings=True)
        own = sample.OWN | {"script": None, "reward_fn": None, "n_eval": got.n_eval}
        assert vars(got) == vars(wanted) | own


def test_the_speedrun_ends_with_a_row_for_the_table(warm_folder, tmp_path):
    for name, start in {"train": 0, "test": 50}.items():
        rows = [{"question": f"{i}+1=", "answer": f"so #### {i + 1}"}
                for i in range(start, start + 9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = subprocess.run(
        ["bash", HERE / "speedrun.sh", warm_folder, ".", "--seed=3", "--out_dir", "x",
         "--use_vllm=False", "--rollout_batch_size=16", "--max_tokens=12",
         "--max_prompt_tokens=100", "--n_grpo_steps=1"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHON": sys.executable})
    assert run.returncode == 0, run.stderr
    interval = r"[01]\.[0-9]+ +\(95 %: [01]\.[0-9]+ to [01]\.[0-9]+\)"
    assert re.fullmatch(rf"\| GSM8K \| {warm_folder.name} \| .+ \| [0-9.]+ \| {interval} \| "
                        rf"{interval} \| \w+ \| --seed=3 .*\|", run.stdout.splitlines()[-1])
    assert "4 responses to each of 9 held-out problems" in run.stdout
    assert "8 problems, 1 held out" in run.stdout and "50+1=" in run.stdout
    for words in ([], ["model", ".", "--help"]):
        usage = subprocess.run(["bash", HERE / "speedrun.sh", *words], capture_output=True,
                               text=True, cwd=tmp_path)
        assert usage.returncode == 2 and "speedrun.sh MODEL DATA" in usage.stdout.splitlines()[2]


@pytest.mark.parametrize("flags, limit", [([], 512), (["--max_tokens=12"], 12),
                                          (["--lr=1e-6", "--max_tokens", "700"], 700)])
def test_the_speedrun_tests_with_the_limit_that_is_asked_for(flags, limit, tmp_path):
    (tmp_path / "test.jsonl").write_text("one row\n")
    (tmp_path / "out" / "latest").mkdir(parents=True)
    run = subprocess.run(["bash", HERE / "speedrun.sh", "model", ".", *flags], cwd=tmp_path,
                         capture_output=True, text=True, env=os.environ | {"PYTHON": "echo"})
    train, test = run.stdout.splitlines()[:2]
    assert "starter.py" in train and train.endswith(" ".join(["--compile=False", *flags]))
    assert "sample.py" in test and f"--max_tokens={limit} " in test


@pytest.mark.parametrize("flags, tested", [
    ([], "out/latest"), (["--resume=latest", "--out_dir=a b"], "a b/latest"),
    (["--resume", "a/0001"], "a/0001"), (["--out_dir=~/b"], "HOME/b/latest"),
    (["--resume", "--seed=1"], "out/latest"), (["--seed=1", "--resume"], "out/latest")])
def test_the_speedrun_tests_what_it_trained_and_needs_test_problems_first(flags, tested, tmp_path):
    tested = tested.replace("HOME", str(tmp_path))
    (tmp_path / tested).mkdir(parents=True)
    for problems in ("", "one row\n"):
        (tmp_path / "test.jsonl").write_text(problems)
        run = subprocess.run(["bash", HERE / "speedrun.sh", "model", ".", *flags], cwd=tmp_path,
                             capture_output=True, text=True,
                             env=os.environ | {"PYTHON": "echo", "HOME": str(tmp_path)})
        if problems:
            assert f"--model_id={tested}/model" in run.stdout.splitlines()[1]
            assert (tmp_path / tested / "test.txt").exists()
        else:
            assert (run.returncode, run.stdout) == (2, "") and "no test problems" in run.stderr


def test_the_benchmark_ends_with_its_result(warm_folder, tmp_path):
    run = subprocess.run(
        [sys.executable, HERE / "bench.py", "--size=tiny", f"--model_dir={warm_folder}",
         "--prompts=2", "--group=2", "--sweep=True", "--lengths=4,8", "--steps=1", "--warmup=1",
         "--picture=lengths.png"], capture_output=True, text=True, cwd=tmp_path, timeout=400)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.strip().splitlines()[-1])["sweep"]
    assert [(result["new_tokens"], result["steps"]) for result in results] == [(4, 1), (8, 1)]
    assert all(result["seconds"]["step"] > 0 for result in results)
    assert all(0 < result["logp_gap_mean"] < 1e-3 for result in results), "sampler and trainer"
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.png"], "nothing else is left"


@pytest.mark.parametrize("words, message", [
    (["--sweep=True", "--lengths=4,x"], "lengths"), (["--steps=0"], "steps must be"),
    (["--n_grpo_steps=5"], "not n_grpo_steps"), (["--group_size=4"], "set prompts, group"),
    (["--soak=3"], "at least 5"),
    (["--soak=5", "--nonsense=3"], "nonsense"), (["--picture=no/x.png"], "picture needs"),
    (["--memory=True", "--device=cpu"], "needs a GPU")])
def test_the_benchmark_refuses_bad_options_in_one_line(words, message, monkeypatch):
    import bench
    monkeypatch.setattr(starter.Log, "write", starter.Log.write)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    with pytest.raises(UserError, match=message):
        bench.main()


def test_the_kl_sweep_measures_and_draws(warm_folder, tmp_path, monkeypatch):
    import kl_sweep
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kl_sweep, "make_start", lambda folder, *rest: shutil.copytree(warm_folder,
                                                                                      folder))
    monkeypatch.setattr(kl_sweep, "COEFFICIENTS", (0.0, 0.1))
    monkeypatch.setattr(kl_sweep, "ESTIMATORS", {"exact": kl_sweep.ESTIMATORS["exact"]})
    # Fewer responses and fewer held-out problems.
    main, read_task = starter.main, starter.read_task
    monkeypatch.setattr(starter, "read_task",
                        lambda cfg: setattr(cfg, "n_eval", 20) or read_task(cfg))
    arguments = ["kl_sweep.py", "--seeds=1", "--warm_start_steps=1"]
    less = ["--rollout_batch_size=16", "--max_minutes=1e-9"]  # one step
    monkeypatch.setattr(starter, "main", lambda argv: main([*argv, *less]))
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps=2"])
    with pytest.raises(KeyboardInterrupt):  # a run that ended early is no result
        kl_sweep.main()
    assert not [*tmp_path.glob("out_kl_sweep/*/result.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps=1"])
    kl_sweep.main()
    table = (tmp_path / "assets" / "kl_sweep.md").read_text().splitlines()
    assert len(table) == 2 + 4 and "| start | " in table[2] and "exact" in table[5]
    assert (tmp_path / "assets" / "kl_sweep.png").stat().st_size > 10_000
    # Another coefficient is another run; another folder leaves assets/ alone.
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps=1", "--kl_coef=3", "--out_dir=b"])
    (tmp_path / "out_kl_sweep").rename(tmp_path / "b")
    kl_sweep.main()
    kl = [row["kl"] for name, (row,) in json.loads(
        (tmp_path / "b" / "kl_sweep.json").read_text()).items() if name == "exact at 3"]
    assert len(kl) == 1 and (tmp_path / "assets" / "kl_sweep.md").read_text().splitlines() == table
    for wrong in ("--seeds=0", "--skip=k7"):
        monkeypatch.setattr(sys, "argv", [*arguments, wrong])
        with pytest.raises(UserError, match="--seeds: at least 1; --skip: some of exact"):
            kl_sweep.main()


def test_the_toys_print_what_kl_md_says(monkeypatch, capsys):
    import kl_sweep
    monkeypatch.setattr(sys, "argv", ["kl_sweep.py", "--toys"])
    kl_sweep.main()
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    document = [line.strip() for line in (HERE / "KL.md").read_text().splitlines()]
    assert len(printed) > 15 and [line for line in printed if line not in document] == []


# ---- 10. GPU ---------------------------------------------------------------------------------

@needs_cuda
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_gpu_packed_flash_attention_equals_padded(kind):
    changes = {"sliding_window": 6} if kind == "mistral" else {}
    policy, batch = make_policy(kind, **changes), make_groups()
    randomize(policy.model, 0, 0.1)
    wanted = plain_log_probs(eager_copy(policy), batch)
    wanted.sum().backward()
    model = eager_copy(policy)
    plain_log_probs(model, batch).sum().backward()
    policy = starter.Policy(policy.model.to("cuda", torch.bfloat16), [256])
    ids, labels, mask = (x.cuda() for x in (batch.input_ids, batch.labels, batch.response_mask))
    got = starter.get_response_log_probs(policy, ids, labels, response_mask=mask)
    got.sum().backward()
    assert got.dtype == torch.float32 and (got.cpu() - wanted).abs().max() < 0.1
    assert relative(gradient(policy).float().cpu(), gradient(model)) < 0.05


@needs_cuda
@pytest.mark.parametrize("arguments", [
    ["--compile=True", "--gradient_checkpointing=True", "--gpu_mem_util=0.15"],
    ["--vllm_sleep=True", "--gpu_mem_util=0.15", "--ref_offload=True", "--ref_update_every=2"]])
def test_gpu_script_learns_agrees_with_vllm_and_resumes(warm_folder, tmp_path, arguments):
    def run(*options):
        subprocess.run([sys.executable, HERE / "starter.py", *options], cwd=tmp_path, check=True,
                       timeout=500)

    run(f"--model_id={warm_folder}", *SMALL, "--use_vllm=True", "--device=cuda", KL, *arguments,
        "--rollout_batch_size=256", "--group_size=8", "--n_grpo_steps=20", "--lr=5e-4")
    run("--resume=latest", "--n_grpo_steps=22")
    rows = rows_of(tmp_path / "out" / "latest")
    assert [row["step"] for row in rows] == list(range(23))
    assert all(row["rollout/logp_gap_mean"] < 0.05 for row in rows[1:])
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:2]) + 0.1 and rows[1]["kl/mean"] < 2e-3

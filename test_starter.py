"""The full test suite, in the order of starter.py's sections: make test, about two minutes on two
cores, with the real vLLM if it is installed."""
import ast, contextlib, copy, functools, importlib.util, itertools, json, math, os, random, re
import shutil, signal, subprocess, sys, time, zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Models so small are as fast on one thread, and threads that wait for each other are slow on a busy
# machine. One test uses two.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import countdown
import starter
import tiny
from starter import Response, UserError

HERE = Path(starter.__file__).parent
has_vllm = importlib.util.find_spec("vllm")


def needs_vllm(test):
    """One process runs all of these: they share an engine."""
    is_missing = pytest.mark.skipif(not has_vllm, reason="needs vLLM")
    return pytest.mark.xdist_group("vllm")(is_missing(test))


def needs_cuda(test):
    """In the same process: vLLM does not start while others free memory."""
    is_missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.xdist_group("vllm")(is_missing(test))


def hyperparameters():
    """{name: its default as source} of the block in main()"""
    tree = ast.parse((HERE / "starter.py").read_text())
    main = next(node for node in tree.body if getattr(node, "name", "") == "main")
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    block = next(call for call in calls if getattr(call.func, "id", "") == "SimpleNamespace")
    return {keyword.arg: ast.unparse(keyword.value) for keyword in block.keywords}


def test_sizes():
    """The budgets: so nothing grows back unseen"""
    def text(pattern):
        return "".join(path.read_text() for path in HERE.glob(pattern))

    def lines(*patterns):
        return sum(len(text(pattern).splitlines()) for pattern in patterns)

    budgets = [
        ("starter.py, lines", lines("starter.py"), 1550),
        ("starter.py, bytes", len(text("starter.py").encode()), 75_000),
        ("starter.py, columns", max(map(len, text("starter.py").splitlines())), 100),
        ("hyperparameters", len(hyperparameters()), 44),
        ("tests, lines", lines("test_*.py", "examples/test_*.py"), 2700),
        ("bench.py, lines", lines("bench.py"), 260),
        ("kl_sweep.py, lines", lines("kl_sweep.py"), 260),
        ("sample.py, lines", lines("sample.py"), 150),
        ("speedrun.sh, lines", lines("speedrun.sh"), 25),
        ("README.md, words", len(text("README.md").split()), 1500),
        ("KL.md, words", len(text("KL.md").split()), 1900),
        ("BENCHMARKS.md, words", len(text("BENCHMARKS.md").split()), 2000)]
    assert [budget for budget in budgets if budget[1] > budget[2]] == []


# ---- Helpers: models, batches, runs ----------------------------------------------------------

VOCABULARY = 300
CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% if not loop.last or m['role'] != 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
KL = "--use_kl_penalty=True"
# Runs of a second or two. What a test sets comes after these and wins.
SMALL = ["--use_vllm=False", "--rollout_batch_size=16", "--group_size=4", "--n_grpo_steps=3",
         "--n_eval=8", "--eval_every=2", "--save_every=1", "--lr=1e-3", "--warmup_steps=2",
         "--max_tokens=14", "--max_prompt_tokens=16"]


def small_run(folder):
    """-> arguments that train the model in this folder on the problems beside it"""
    return [f"--model_id={folder}", f"--task={folder}", *SMALL]


@pytest.fixture(autouse=True)
def process_kept():
    """What a run changes in this process is put back."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starter, "SCRIPT", starter.__file__)  # a run copies it; it is not pytest
        yield
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGTERM, handlers[1])
    # A changed copy of the script has registered its own.
    starter.AttentionInterface.register("packed", starter.packed_attention)


@torch.no_grad()
def randomize(model, seed, scale=0.3):
    """Weights so large that mistakes show"""
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
    """The same weights in transformers' plainest attention, with gradients of its own"""
    config = copy.deepcopy(policy.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(policy.model.state_dict())
    return model.eval()


def make_response(prompt_ids, ids, mask=None, log_probs=None, text="", problem=None, **fields):
    """As the sampler makes it"""
    response = Response((problem or {}) | {"prompt_ids": prompt_ids})
    response.problem["turns"].append({"role": "assistant", "content": text})
    values = {"ids": ids, "log_probs": log_probs or [0.0] * len(ids), "finished": True,
              "mask": mask or [True] * len(ids)}
    vars(response).update(values | fields)
    return response


def make_rows(lengths, n_prompt=3, vocabulary=VOCABULARY, seed=0):
    """A batch of rows of these lengths, each with a prompt of its own"""
    rng = random.Random(seed)
    rows = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
    return starter.make_batch([make_response(row[:n_prompt], row[n_prompt:]) for row in rows])


def make_groups(seed=0):
    """Four groups of four responses: some of one token, one row without any, one with a hole, and
    two prompts that differ in their last token"""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(2, VOCABULARY) for _ in range(n)]

    prompts = [draw(7), draw(3), draw(11)]
    prompts.append(prompts[2][:10] + [1])
    lengths = (5, 1, 9, 2, 3, 4, 1, 1, 6, 20, 2, 8, 4, 3, 2, 1)
    responses = [make_response(prompts[i // 4], draw(n)) for i, n in enumerate(lengths)]
    responses[2].mask = [True, True, False, False, True, False, True, True, True]
    responses[10].mask = [False, True]
    batch = starter.make_batch(responses)
    batch.response_mask[5] = False
    return batch


def rows_in(batch):
    return batch.input_ids, batch.labels, batch.response_mask


def log_probs_of(model, batch, temperature=1.0):
    return starter.get_response_log_probs(model, batch.input_ids, batch.labels,
                                          response_mask=batch.response_mask,
                                          temperature=temperature)


def plain_log_probs(model, batch, temperature=1.0):
    logits = model(batch.input_ids).logits / temperature
    log_probs = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return torch.where(batch.response_mask, log_probs, 0)


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def relative(got, wanted):
    return float((got - wanted).detach().norm() / wanted.detach().norm())


def settings_of(**changes):
    """The hyperparameters, those of the tiny model but for these"""
    cfg = starter.main(["--model_id=tiny"], only_settings=True)
    defaults = {"model_id": "none", "seed": 1, "rollout_batch_size": 24, "group_size": 4,
                "max_tokens": 12, "max_prompt_tokens": 64, "n_eval": 8, "task": "file",
                "prompt": "{question}=", "eval_task": "", "warmup_steps": 0, "lr": 0.1,
                "tokens_per_microbatch": 10**6, "reward_truncated": True, "vllm_sleep": False,
                "compile": False, "offload": False, "gradient_checkpointing": False}
    vars(cfg).update(defaults | changes)
    return cfg


@functools.cache
def tokenizer_with(chat_template):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def make_task(rows, held_out=(), stop_ids=(256,), **changes):
    """Its prompts are texts."""
    rows, held_out = ([row | {"prompt": [{"role": "user", "content": row["prompt"]}]}
                       for row in part] for part in (rows, held_out or rows[:1]))
    return starter.Task(settings_of(**changes), rows, held_out, tokenizer_with(CHAT),
                        list(stop_ids))


@pytest.fixture(scope="session")
def warm_folder(tmp_path_factory):
    """The tiny model after a short warm start on sums and differences of two numbers, with problems
    beside it"""
    folder = tmp_path_factory.mktemp("models") / "warm"
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()

    def problems(split, seed, n):
        rng = random.Random(seed)
        options = tiny.PROBLEMS | {"n_numbers": 2, "max_number": 9}
        return [countdown.make_problem(rng, split, **options) for _ in range(n)]

    def examples(step):
        return [(row["prompt"], f"<answer>{row['solution']}</answer>")
                for row in problems("train", step, 32)]

    tiny.warm_start(model, tokenizer, examples, 60)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_rows(folder / "train.jsonl", problems("train", "train", 200))
    write_rows(folder / "test.jsonl", problems("test", "test", 20))
    return folder


@pytest.fixture(scope="session")
def save_folder(tmp_path_factory):
    """-> function that writes a model folder with random weights and tiny's tokenizer"""
    def save(kind="qwen3", chat_template=CHAT, noise=0.3, **changes):
        folder = tmp_path_factory.mktemp(kind)
        tokenizer_with(chat_template).save_pretrained(folder)
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
        # The quick tests would see what a test has replaced.
        with mock.patch.object(starter, "test_functions"):
            starter.main([*small_run(warm_folder), f"--out_dir={tmp_path / out}", *arguments])
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
        starter.run(starter.main)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Script:
    """starter.py as from a shell: start() it, wait until() it says something, kill it, end()"""

    def __init__(self, folder):
        self.log = folder / "log"
        environment = os.environ | {"PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": ""}
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

    def until(self, words, count=1):
        while self.text().count(words) < count and Path(f"/proc/{self.pid}").exists():
            time.sleep(0.02)

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


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def numbers_of(folder):
    """All metrics that must repeat"""
    return [{name: value for name, value in row.items() if not name.startswith("time/")}
            for row in rows_of(folder)]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(folder, name="model"):
    return load(Path(folder) / name).state_dict()


def are_equal(first, second):
    """Weights, to the bit"""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def equal_weights(first, second):
    return are_equal(weights_of(first), weights_of(second))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question_rows(numbers):
    return [{"prompt": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in numbers]


def letters(text, problem):
    """A reward that differs among the responses of a group"""
    return zlib.crc32(text.encode()) % 7 / 7


# ---- 1. Task ---------------------------------------------------------------------------------

@pytest.mark.parametrize("text, numbers, value", [
    (" 7 + (3 * 5) ", [3, 5, 7], 22), ("8/3", [3, 8], Fraction(8, 3)), ("-3+5", [3, 5], 2),
    ("\n3 + 4\n", [3, 4], 7),
    ("3/(8/8-1)", [3, 8, 8, 1], None), ("2**3", [2, 3], None), ("2//3", [2, 3], None),
    ("3+5", [3, 5, 5], None), ("3+5+5", [3, 5], None), ("35", [3, 5], None), ("3 5", [3, 5], None),
    ("3+x", [3], None), ("3+5#", [3, 5], None), ("(3+5", [3, 5], None), ("", [], None),
    ("()", [], None), ("9**9**9", [9, 9, 9], None), ("(" * 150, [], None), ("1" * 201, [1], None),
    ("٣+5", [3, 5], None), ("3\n+5", [3, 5], None), ("1_0+5", [10, 5], None)])
def test_expressions_are_exact_and_use_each_number_once(text, numbers, value):
    assert countdown.evaluate_expression(text, numbers) == value


PROBLEM = {"numbers": [3, 5, 7], "target": 22, "operations": "+-*/"}
HONEST = "<answer>3*5+7</answer>"


@pytest.mark.parametrize("text, reward", [
    (HONEST, 1.0), (HONEST + " and much more", 1.0), (HONEST * 50, 1.0), (HONEST + "<think>", 1.0),
    (f"<answer>{HONEST}</answer>", 1.0), (f"<answer>3+5+7{HONEST}", 1.0),
    (HONEST + "<answer>3+5+7</answer>", 0.1), (HONEST * 9 + "<answer></answer>", 0.1),
    ("<answer>3+5+7 3*5+7</answer>", 0.1), ("<answer>3*5+7=22</answer>", 0.1),
    ("<ans<answer>wer>3*5+7</answer>", 0.1), ("<answer>22</answer>", 0.1),
    ("<answer>__import__('os')</answer>", 0.1), (r"\boxed{3*5+7}", 1.0), ("#### 22", 0.1),
    (f"<think>{HONEST}</think>", 0.0), (f"<think>{HONEST}", 0.0), (f"{HONEST}</think> so", 0.0),
    (f"<think>a</think><think>{HONEST}", 0.0), ("3*5+7", 0.0), ("<answer>3*5+7", 0.0),
    ("3*5+7</answer>", 0.0), ("", 0.0), ("<answer>" * 99, 0.0)])
def test_no_text_earns_more_than_an_honest_answer(text, reward):
    assert starter.reward_fn(text, PROBLEM) == reward
    fewer = starter.reward_fn(text, PROBLEM | {"operations": "+-"})
    assert fewer == min(reward, 0.1), "the problem says which operations may be used"


@pytest.mark.parametrize("text, answer", [
    ("so <answer> 42 </answer>.", "42"), ("<answer>1</answer> no: <answer>2</answer>", "2"),
    (r"thus \boxed{7}", "7"), (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"), ("5+7\n#### 1,200", "1,200"),
    ("#### 15. That is all", "15."), ("#### 18 dollars\nmore", "18"), ("####7", "7"),
    ("#### 1\n#### 2", "2"), ("#### -$3.50", "-$3.50"), ("<answer>42</answer></answer>", "42"),
    (r"\boxed{5} and \boxed{", "5"), (r"<answer>1</answer> \boxed{2} #### 3", "3"),
    ("#### 3 <answer>1</answer>", "1"), ("<answer>1</answer>\n#### Heading", "1"),
    ("#### So: <answer>\n1\n</answer>", "1"), ("<answer>1</answer> <answer>2", "1"),
    ("<answer>1<answer>2</answer>", "2"), ("<think>#### 5</think> 6", None),
    ("<answer>5", None), ("5</answer>", None), (r"\boxed{5", None), ("####", None),
    ("####  \n ", None), ("the answer is 5", None), ("", None)])
def test_final_answer_is_the_last_complete_one(text, answer):
    found = starter.final_answer(text)
    assert (None if found is None else found.strip()) == answer


@pytest.mark.parametrize("first, second", [
    (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\frac12", r"\frac{1}{2}"), ("0.5", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{2}}", "1/2"), ("2 1/2", r"2\dfrac{1}{2}"),
    (r"-\frac{1}{2}", "-.5"), (r"\tfrac{6}{4}", "3/2"), ("1/2", ".5"), ("2/4", "1/2"),
    ("(3,4)", "(3, 4)"), (r"\left(1,2\right)", "(1,2)"), (r"90^\circ", "90"),
    (r"90^{\circ}", "90"), ("10{,}000", "10000"), (r"10\,000", "10000"), ("$1,200.00", "1200"),
    ("$1,200,000.50", "1200000.5"), ("1,200.0", "1200"), (r"\$5", "5"), ("50 %", "50"),
    (r"18\%", "18"), ("5.", "5"), ("15.", "15"), ("-3", "-3.00"), ("007", "7"), ("-$5", "-5"),
    ("\N{MINUS SIGN} 5", "-5"), ("**18**", "18"), ("Blue", "blue"), ("  new   york ", "New York"),
    ("Yes.", "yes"), (r"\text{Yes}", "yes"), (r"\text{(B)}", "(B)"), ("9" * 30, "9" * 30 + ".0")])
def test_answers_that_mean_the_same_are_equal(first, second):
    for given_answer, right in ((first, second), (second, first)):
        for form in (f"<answer>{given_answer}</answer>", rf"so \boxed{{{given_answer}}}."):
            assert starter.reward_fn(form, {"answer": right}) == 1.0


@pytest.mark.parametrize("first, second", [
    ("2", "2a"), ("2", r"2\theta"), ("2", "5t"), ("5", "5t"), ("5 thirds", "5"), ("5 bn", "5"),
    (r"5\times", "5"), (r"5\pi", "5"), ("2i", "2"), ("5", "6"), ("0.5", "0.50001"), ("-5", "5"),
    ("blue", "red"), ("", "0"), ("1/0", "0"), ("٣", "3"), ("½", "1/2"), ("nan", "0"),
    ("1,2", "12"), ("12,3456", "123456"), ("(3,4)", "(4,3)"), ("4 or 5", "5"), ("4, 5", "5"),
    (r"\frac{1}{2}", "12"), (r"2\frac{1}{2}", "1"), ("2 1/2", "21/2"), ("3 am", "3 pm"),
    ("1" * 25, "1" * 24 + "2"),
    ("1" * 1000 + "2", "1" * 1000 + "3"), ("2 thousand", "2"), ("100 m", "100 km")])
def test_answers_that_differ_are_not_equal(first, second):
    assert starter.reward_fn(f"<answer>{first}</answer>", {"answer": second}) == 0.1
    assert starter.normalize(first) != starter.normalize(second)


@pytest.mark.parametrize("text", [
    "#### 1" + "." * 120_000 + "x", "9" * 200_000, "{" * 200_000, "," * 200_000, "1," * 50_000,
    "\\boxed{" * 50_000, "\\boxed{{" * 50_000, "\\boxed{" + "{x}" * 50_000, "####" * 50_000,
    "#### " * 50_000, "<answer>" * 50_000, "</answer>" * 50_000, "<answer>" + "<" * 200_000,
    " " * 200_000, "$" * 200_000, "1/" + "0" * 200_000, "\\frac{" * 50_000, "\\left" * 50_000,
    "\0\ud800\u202e", "<think>" * 50_000], ids=range(20))
def test_rewards_take_linear_time_whatever_the_text(text):
    start = time.thread_time()
    for form in ("{}", "<answer>{}</answer>", r"\boxed{{{}}}", "{}x"):
        assert starter.reward_fn(form.format(text), {"answer": "5"}) in (0.0, 0.1)
        assert starter.reward_fn(form.format(text), PROBLEM) in (0.0, 0.1)
    assert time.thread_time() - start < 6, "seconds of this thread; some 0.5 on a slow machine"


def split(path, rows, **changes):
    """-> rows to train on, held-out rows"""
    return starter.read_task(settings_of(task=str(write_rows(path, rows)), **changes))


def names(rows):
    return [(row["prompt"][-1]["content"], row["answer"]) for row in rows]


def test_jsonl_rows_are_read_with_prompts_from_the_template(tmp_path):
    chat = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "8?"}]
    rows = [{"question": "2+3", "answer": 5}, {"prompt": "7?", "answer": "so\n#### 7"},
            {"prompt": chat, "answer": 8.5, "source": "book"}, {"prompt": "Write a poem."}]
    other = tmp_path / "other.jsonl"
    other.write_text('\ufeff{"question": "ü", "answer": "1"}\n', encoding="utf-8")
    got, held_out = split(tmp_path / "task.jsonl", rows, eval_task=str(other))
    assert [row["prompt"][-1]["content"] for row in got] == ["2+3=", "7?", "8?", "Write a poem."]
    assert [row.get("answer") for row in got] == ["5", "7", "8.5", None]
    assert got[0]["prompt"] == [{"role": "user", "content": "2+3="}] and got[2]["prompt"] == chat
    assert got[2]["source"] == "book" and names(held_out) == [("ü=", "1")]
    boxed, _ = split(tmp_path / "boxed.jsonl", [{"question": "2+3"}, {"question": "4"}],
                     eval_task=str(other), prompt=r"{question} in \boxed{}")
    assert boxed[0]["prompt"][0]["content"] == r"2+3 in \boxed{}"


GOOD = '{"prompt": "2+3?", "answer": "5"}\n' * 2
BAD_FILES = [
    (None, "No such file"), ("", "too few"), (GOOD, "too few"),
    (GOOD + "{'prompt': 1}", "line 3"), ("prompt,answer\n2+3?,5\n", "A line is an object"),
    (GOOD + "[1, 2]\n", "line 3"), ("null", "line 1"),
    ('{"input": "2+3", "answer": "5"}', "line 1: KeyError('question')"),
    ('{"prompt": 5, "answer": "5"}', "line 1"), ('{"prompt": ["x"], "answer": "5"}', "line 1"),
    ('{"prompt": [{"role": "user"}], "answer": "5"}', "KeyError('content')"),
    (b'{"prompt": "caf\xe9", "answer": "5"}', "task.jsonl, line 0: UnicodeDecodeError")]


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


def test_a_fifth_is_held_out_whatever_the_seed_the_order_and_reply(tmp_path, monkeypatch):
    rows = question_rows(range(40))
    path = tmp_path / "task.jsonl"
    training, held_out = map(names, split(path, rows))
    assert len(training) == 32 and len(held_out) == 8 and not set(training) & set(held_out)
    assert len(split(path, rows, n_eval=3)[1]) == 3
    for changed in (rows[::-1], rows * 5):  # copies are one problem
        again = split(path, changed, seed=7)
        assert names(again[1]) == held_out and set(names(again[0])) == set(training)
    monkeypatch.setattr(starter, "reply", lambda problem, text: None)
    assert [*map(names, split(path, rows))] == [training, held_out]
    # Games with the same prompt differ in what they hide.
    games = [{"prompt": "Guess my number.", "answer": str(i)} for i in range(20)]
    training, held_out = map(names, split(path, games))
    assert len(training) == 16 and len(held_out) == 4 and not set(training) & set(held_out)
    # Rows of eval_task are not trained on, nor those that n_eval leaves out, as sample.py has all.
    other = str(write_rows(tmp_path / "other.jsonl", question_rows(range(15, 25))))
    training, held_out = split(path, question_rows(range(20)), eval_task=other, n_eval=3)
    assert len(held_out) == 3 and len(training) == 15


def test_every_epoch_contains_all_problems_in_another_order():
    task = make_task(question_rows(range(24)))  # 6 per step

    def prompts(task, first, n_steps):
        steps = [task.problems(first + 6 * i) for i in range(n_steps)]
        return [problem["rendered"] for problem in sum(steps, [])]

    epochs = [prompts(task, 24 * epoch, 4) for epoch in range(3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert prompts(make_task(question_rows(range(24)), seed=2), 0, 4) != epochs[0]
    assert prompts(task, 21, 1) == epochs[0][21:] + epochs[1][:3], "a step may cross an epoch"


def test_long_prompts_are_left_out_and_counted(capsys):
    rows = [*question_rows(range(20)), {"prompt": "x" * 100, "answer": "1"}]
    assert len(make_task(rows).training) == 20
    length = len("<user><|end|><assistant>") + 100 - len("<|end|>") + 1  # a token per letter
    assert "1 of 21 prompts" in capsys.readouterr().out
    assert len(make_task(rows, max_prompt_tokens=length).training) == 21
    with pytest.raises(UserError, match="too long"):
        make_task(rows[20:])


def test_prompts_are_rendered_as_the_model_was_taught():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    assert starter.render_chat(messages, tokenizer_with(None)) == "Be brief.\n2+3?\n"
    wanted = "<system>Be brief.<|end|><user>2+3?<|end|><assistant>"
    assert starter.render_chat(messages, tokenizer_with(CHAT)) == wanted
    task = make_task([{"prompt": "2+3?"}])
    assert task.training[0]["rendered"] == "<user>2+3?<|end|><assistant>"
    assert task.tokenizer.decode(task.training[0]["prompt_ids"]) == task.training[0]["rendered"]
    assert starter.render_reply("no", task.tokenizer) == "<|end|><user>no<|end|><assistant>"
    with pytest.raises(ValueError):  # this template shows the last turn only
        starter.render_reply("no", tokenizer_with(tiny.ONE_TURN))


@pytest.mark.parametrize("vocabulary, stop_ids", [(300, [256, 260]), (260, [256])])
def test_the_token_that_closes_a_turn_is_a_stop_id(save_folder, tmp_path, vocabulary, stop_ids):
    """As in Qwen2.5, where <|im_end|> closes turns and <|endoftext|> is the end of a text. A saved
    model ends, and samples, as it was trained."""
    folder = save_folder(chat_template=CHAT.replace("<|end|>", "<|im_end|>"), vocab_size=vocabulary)
    (folder / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": 256, "do_sample": True, "top_p": 0.8, "repetition_penalty": 1.1}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    policy, tokenizer = starter.init_policy(str(folder))
    assert tokenizer.eos_token_id == 256 and tokenizer.convert_tokens_to_ids("<|im_end|>") == 260
    assert policy.stop_ids == stop_ids, "without those that the model does not have"
    policy.model.generation_config.eos_token_id = [7, 999]
    assert starter.find_stop_ids(policy.model, tokenizer) == [7, *stop_ids]
    starter.save_model(policy, tokenizer, tmp_path / "model")
    saved = load(tmp_path / "model")
    config = saved.generation_config
    assert config.do_sample and config.eos_token_id == stop_ids and config.top_k == 0
    assert not config.top_p and not config.repetition_penalty
    saved.generate(torch.tensor([[65, 66]]), max_new_tokens=2)


# ---- 2. Advantages, batch, loss, KL, update --------------------------------------------------

def test_advantages_by_hand():
    rewards = torch.tensor([1, 0, 0, 1, 0.1, 0.1, 0.1, 0.1, 3, 1, 1, 1])
    half, three = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.0 + 1e-6
    wanted = [half, -half, -half, half, 0, 0, 0, 0, 1.5 / three, -0.5 / three, -0.5 / three,
              -0.5 / three]
    advantages = starter.group_advantages(rewards, 4, True)
    assert torch.allclose(advantages, torch.tensor(wanted), atol=1e-6)
    plain = starter.group_advantages(rewards, 4, False)
    assert plain[:4].tolist() == [0.5, -0.5, -0.5, 0.5] and plain[8] == 1.5
    for size in range(2, 12):
        flat = starter.group_advantages(torch.full((size,), 0.1), size, True, 1e-12)
        assert (flat == 0).all(), "exact zeros where all rewards of a group are equal"
    assert starter.group_advantages(torch.tensor([]), 4, True).shape == (0,), "a rank without rows"


def test_make_batch_shifts_and_masks_by_length():
    """Token 0 is an ordinary token: padding is known from the lengths."""
    responses = [make_response([0, 5], [0, 0, 1], log_probs=[-0.1, -0.2, -0.3]),
                 make_response([7], [9], log_probs=[-0.4]),
                 make_response([8], [4, 3], [False, True], [-0.5, -0.6])]
    batch = starter.make_batch(responses)
    assert batch.input_ids.tolist() == [[0, 5, 0, 0], [7, 9, 0, 0], [8, 4, 3, 0]]
    assert batch.labels.tolist() == [[5, 0, 0, 1], [9, 0, 0, 0], [4, 3, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    sampled = batch.rollout_log_probs[batch.response_mask].tolist()
    assert sampled == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.6])
    assert batch.lengths == [5, 2, 3] and batch.prompts == [[0, 5], [7], [8]]
    assert starter.make_batch([]).labels.shape == (0, 1)


def test_minibatches_are_drawn_from_the_rows_of_all_ranks(monkeypatch):
    cfg = settings_of(inner_epochs=2, n_minibatches=3)
    alone = starter.make_minibatches(cfg, 4, 24)
    assert len(alone) == 6 and alone[:3] != alone[3:] != starter.make_minibatches(cfg, 5, 24)[3:]
    assert sorted(sum(alone[:3], [])) == sorted(sum(alone[3:], [])) == list(range(24))
    monkeypatch.setattr(starter, "gather", lambda n_rows: [9, 15])
    monkeypatch.setattr(starter, "RANK", 1)
    wanted = [[row - 9 for row in rows if row >= 9] for rows in alone]
    assert starter.make_minibatches(cfg, 4, 15) == wanted


def test_microbatches_keep_to_the_limit(monkeypatch):
    rng = random.Random(0)
    for limit, is_packed in itertools.product((1, 30, 64, 1000), (True, False)):
        batch = make_rows([rng.randrange(4, 50) for _ in range(40)])
        rows = sorted(rng.sample(range(40), 33))
        cfg = settings_of(tokens_per_microbatch=limit)
        parts = starter.make_microbatches(batch, rows, cfg, is_packed)
        assert sorted(sum(parts, [])) == rows and all(parts)
        lay_out = starter.pack if is_packed else starter.pad
        for part in parts:
            inputs, *_ = lay_out(*(x[part] for x in rows_in(batch)), torch.device("cpu"))
            assert inputs["input_ids"].numel() <= limit or len(part) == 1
        most = sum(batch.lengths[row] for row in rows) if is_packed else 33 * 50
        assert len(parts) == 33 if limit == 1 else len(parts) <= 2 * most / limit + 1
    shared = starter.make_batch([make_response([5] * 50, [7] * 11)] * 4)
    cfg = settings_of(tokens_per_microbatch=50 + 4 * 11)
    assert starter.make_microbatches(shared, [0, 1, 2, 3], cfg, True) == [[0, 1, 2, 3]]
    shared_by_six = starter.make_batch([make_response([5] * 50, [7] * 11)] * 6)
    cfg.tokens_per_microbatch = 50 + 2 * 11  # each part brings the prompt
    parts = starter.make_microbatches(shared_by_six, list(range(6)), cfg, True)
    assert parts == [[0, 1], [2, 3], [4, 5]]
    # Another rank has two more: all ranks run the model equally often.
    monkeypatch.setattr(starter, "gather", lambda n: [n, n + 2])
    assert starter.make_microbatches(shared, [0, 1], cfg, True) == [[0, 1], [], []]


def toy(seed=0, size=8):
    """-> logits of a policy, log-probs of a reference, and a direction, over a small vocabulary"""
    generator = torch.Generator().manual_seed(seed)
    logits, ref, shift = torch.randn(3, size, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(0), shift


def kl_loss(log_probs, old, ref, estimator, is_weighted=True, advantages=None, kl_coef=1.0,
            kl_in="loss"):
    """Losses of all tokens of the vocabulary [V]: its mean over `old` is an expected value"""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_runaway_tokens_keep_a_finite_gradient_towards_the_reference(estimator, is_weighted, dtype):
    for distance in (2, 15, 20, 89, 500, -2, -15, -20, -89, -500):
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
    policy.requires_grad_()  # in the term itself only the weight is capped
    starter.compute_loss(torch.zeros(1), policy, old, 0.2, ref, 1.0)[0].sum().backward()
    assert policy.grad[0, 1:3].tolist() == pytest.approx([10 * 0.5, math.exp(-0.2) * -0.2])


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
        assert metadata["clip_fraction"] == pytest.approx(0.2), "binding clips only"
        approx_kl = float((ratio - 1 - ratio.log()).mean())
        assert metadata["approx_kl"] == pytest.approx(approx_kl)
    high, _ = starter.compute_loss(torch.tensor([2.0]), ratio[None, 4:].log(), torch.zeros(1, 1),
                                   0.2, clip_range_high=0.28)
    assert high.item() == pytest.approx(-2.56)
    zeros = torch.zeros(2, 2)
    square = starter.compute_loss(torch.tensor([1.0, -1.0]), zeros, zeros, 0.2)[0]
    assert square.tolist() == [[-1, -1], [1, 1]], "advantages are per row, also when B equals T"


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
    zeros = torch.zeros(1, 4)  # off means not evaluated: 0 * NaN is NaN
    assert torch.isfinite(starter.compute_loss(torch.ones(1), zeros, zeros, 0.2, other)[0]).all()


def test_an_empty_mask_is_zero_with_zero_gradient_and_bad_numbers_are_not_hidden():
    policy, ref = torch.zeros(2, 3, requires_grad=True), torch.full((2, 3), -1.0)
    loss, metadata = starter.compute_loss(torch.ones(2), policy, None, 0.2, ref, 0.1,
                                          response_mask=torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all() and (policy.grad == 0).all() and set(metadata.values()) == {0.0}
    ref[1, 2] = -math.inf
    loss, metadata = starter.compute_loss(torch.ones(2), policy, None, 0.2, ref, 0.1)
    assert torch.isfinite(loss).all() and metadata["kl_max"] == pytest.approx(19)
    bad = torch.zeros(2, 3)
    bad[1, 2] = math.nan
    for kl_coef in (0.0, 0.1):
        loss, _ = starter.compute_loss(torch.ones(2), bad.requires_grad_(), torch.zeros(2, 3), 0.2,
                                       ref, kl_coef)
        slope = torch.autograd.grad(loss.sum(), bad)[0]
        assert loss.isnan().sum() == slope.isnan().sum() == 1, "the update is skipped"


def step_in_parts(policy, batch, advantages, split, loss_type, divisor, **options):
    """-> (loss, gradient) of one optimizer step"""
    policy.zero_grad()
    loss = 0.0
    for rows in split:
        part, _ = starter.grpo_microbatch_step(
            policy, *(x[rows] for x in rows_in(batch)), advantages[rows], len(split), 0.2,
            loss_type, 24, divisor=divisor, **options)
        loss += float(part)
    return loss, gradient(policy)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_the_gradient_does_not_depend_on_the_microbatches(loss_type, estimator):
    policy, reference, batch = make_policy(), make_policy(seed=1), make_groups()
    advantages = torch.randn(16, generator=torch.Generator().manual_seed(0))
    options = {"ref_model": reference, "kl_coef": 0.1, "kl_estimator": estimator}
    divisor = starter.loss_divisor(batch.response_mask, loss_type, 24)
    n_tokens = batch.response_mask.sum(1)
    assert divisor == {"grpo": 15, "dr_grpo": 15 * 24, "dapo": n_tokens.sum()}[loss_type]
    whole = step_in_parts(policy, batch, advantages, [list(range(16))], loss_type, None, **options)
    splits = [[[0, 1, 2], list(range(3, 16))], [[i] for i in range(16)], [list(range(16)), []]]
    for split in splits:
        loss, grad = step_in_parts(policy, batch, advantages, split, loss_type, divisor, **options)
        assert loss == pytest.approx(whole[0], rel=1e-4) and relative(grad, whole[1]) < 1e-5
    wrong = step_in_parts(policy, batch, advantages, splits[0], loss_type, None, **options)
    assert relative(wrong[1], whole[1]) > 0.05, "a mean per microbatch is not the mean of all"
    # The value by hand
    with torch.no_grad():
        model, ref = eager_copy(policy), eager_copy(reference)
        log_probs = plain_log_probs(model, batch)
        log_ratio = log_probs - plain_log_probs(ref, batch)
        kl = torch.expm1(-log_ratio) + log_ratio
        if estimator == "exact":
            full, full_ref = (m(batch.input_ids).logits.log_softmax(-1) for m in (model, ref))
            kl = (full.exp() * (full - full_ref)).sum(-1)
        loss = torch.where(batch.response_mask, 0.1 * kl - advantages[:, None], 0)
    by_hand = {"grpo": (loss.sum(1) / n_tokens.clamp(min=1)).sum() / 15,
               "dr_grpo": loss.sum() / (24 * 15), "dapo": loss.sum() / n_tokens.sum()}
    assert whole[0] == pytest.approx(float(by_hand[loss_type]), rel=1e-3)
    # Old log-probs are taken as given.
    loss, metadata = starter.grpo_microbatch_step(
        policy, *rows_in(batch), torch.ones(16), 1, 0.2, "dapo", old_log_probs=log_probs - 0.1)
    assert float(loss) == pytest.approx(-math.exp(0.1), rel=1e-4)
    assert metadata["n_tokens"] == n_tokens.sum()


def make_state(**changes):
    return SimpleNamespace(**{"step": 1, "skipped": 0, "skips_in_a_row": 0, "lr_factor": 1.0,
                              "kl_factor": 1.0, "kl_smooth": 0.0, "ref_step": 0, "first_gap": 0.0,
                              "best_reward": 0.0} | changes)


def test_updates_are_clipped_and_warmed_up_and_need_a_gradient():
    policy = torch.nn.Linear(2, 1, bias=False)
    other = torch.nn.Parameter(torch.ones(1))  # a group of one's own has the same learning rate
    optimizer = torch.optim.SGD([{"params": policy.parameters()}, {"params": [other]}], 9.0,
                                momentum=1e-9)

    def update(slope, step, **changes):
        start = policy.weight.detach().clone()
        policy.weight.grad = torch.tensor([slope])
        cfg = settings_of(warmup_steps=4, **changes)
        norm = starter.update_weights(policy, optimizer, 0.0, cfg, make_state(step=step))
        assert policy.weight.grad is None, "the memory is free again"
        return norm, (policy.weight.detach() - start)[0].tolist()

    assert update([3.0, 4.0], 2) == (5.0, pytest.approx([-0.05 * 0.6, -0.05 * 0.8], abs=1e-5))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])
    assert update([3.0, 4.0], 9, max_grad_norm=0)[1] == pytest.approx([-0.3, -0.4], abs=1e-5)
    # Momentum alone must not move the weights. 1e-9: kl_coef=1e-9 measures the KL and no more.
    optimizer.param_groups[0]["momentum"] = 0.9
    assert update([0.0, 0.0], 9)[1] == update([1e-9, 0.0], 9)[1] == [0, 0]


def test_the_adaptive_coefficient_follows_the_kl():
    cfg, state = settings_of(target_kl=0.1), make_state()

    def adapt(*values):
        for value in values:
            starter.adapt_kl_coef(state, value, cfg)
        return state.kl_factor

    assert adapt(0.2) == adapt(0.1) == 1.0, "between half the target and 1.5 times the target"
    assert adapt(0.3) == adapt(math.nan) == 1.5, "held if the KL is not finite"
    adapt(1e9)
    assert state.kl_smooth == pytest.approx(0.35), "clipped at 5 * target_kl before smoothing"
    assert adapt(*[9.0] * 60) == 100 and adapt(*[0.0] * 100) == 0.1


# ---- 3. Sampler ------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
# Longer than a block of vLLM's prefix cache
LONG_PROMPTS = [[2 + (i * j) % 250 for j in range(150)] for i in (7, 11)]


def sample(llm, prompts=PROMPTS, n=4, seed=1, first=0, temperature=1.0, stop_ids=(256,), **changes):
    """-> n responses to each prompt"""
    task = make_task([{"prompt": "?"}], stop_ids=stop_ids, temperature=temperature, **changes)
    problems = [{"prompt_ids": prompt, "problem_number": number}
                for number, prompt in enumerate(prompts, first)]
    return starter.rollout_with_vllm(llm, task, problems, n, seed)


def worst_gap(policy, responses, temperature=1.0):
    """Largest difference between the sampler's log-probs and the plain formula"""
    batch = starter.make_batch(responses)
    with torch.no_grad():
        wanted = plain_log_probs(eager_copy(policy), batch, temperature)
    return float((wanted - batch.rollout_log_probs)[batch.response_mask].abs().max())


def ids_of(responses):
    return [response.ids for response in responses]


def check_sampler(policy, llm):
    """What the torch sampler and vLLM must both do"""
    first = sample(llm)
    assert len(first) == 12 and len({tuple(response.ids) for response in first}) > 6
    for response in first:
        assert 1 <= len(response.ids) == len(response.log_probs) <= 12 and all(response.mask)
        assert 256 not in response.ids[:-1] and response.finished == (response.ids[-1] == 256)
        assert response.finished or len(response.ids) == 12
    assert any(r.finished for r in first) and not all(r.finished for r in first)
    assert worst_gap(policy, first) < 1e-4
    assert [vars(x) for x in sample(llm)] == [vars(x) for x in first]
    for other in ({"seed": 43}, {"seed": "eval"}, {"first": 12}):
        assert ids_of(sample(llm, **other)) != ids_of(first)
    # A second rank, which has the prompts after the first one, samples the same responses.
    assert ids_of(sample(llm, PROMPTS[1:], first=1)) == ids_of(first[4:])
    warm = sample(llm, temperature=0.7)
    assert worst_gap(policy, warm, 0.7) < 1e-4 < worst_gap(policy, warm)
    greedy = sample(llm, PROMPTS[:1], n=1, temperature=0.0)
    with torch.no_grad():
        best = eager_copy(policy)(torch.tensor(PROMPTS[:1])).logits[0, -1].argmax()
    assert greedy[0].ids[0] == best
    # Only stop_ids end a response, not the end token of config.json.
    unending = sample(llm, n=16, stop_ids=())
    assert {len(response.ids) for response in unending} == {12}
    assert any(256 in response.ids[:-1] for response in unending)
    randomize(policy.model, 7)
    assert worst_gap(policy, sample(llm)) > 0.1
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm)) < 1e-4


def check_turns(policy, llm, monkeypatch):
    """A text in TURN_ENDS ends a turn; what reply() says has no loss."""
    monkeypatch.setattr(starter, "TURN_ENDS", ("A",))
    monkeypatch.setattr(starter, "reply",
                        lambda problem, text: "BC" if text.endswith("A") else None)
    responses = sample(llm, n=16, max_tokens=40, max_turns=3)
    assert max(len(response.problem["turns"]) for response in responses) >= 3
    for response in responses:
        is_chosen, ids = [], response.ids
        while len(is_chosen) < len(ids):
            is_chosen.append(True)
            if ids[len(is_chosen) - 1] == 65 and len(is_chosen) < len(ids):
                assert ids[len(is_chosen):len(is_chosen) + 2] == [66, 67]
                is_chosen += [False, False]
        assert response.mask == is_chosen and response.finished == (ids[-1] == 256)
    assert worst_gap(policy, responses) < 1e-4
    # The gradient is that of the chosen tokens, by the plain formula.
    batch = starter.make_batch(responses)
    assert batch.response_mask.sum() == sum(sum(response.mask) for response in responses)
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(len(responses)), 1, 0.2,
                                 "dapo")
    model = eager_copy(policy)
    (-plain_log_probs(model, batch).sum() / batch.response_mask.sum()).backward()
    assert relative(gradient(policy), gradient(model)) < 1e-5


def ending_policy(kind):
    """A random model whose responses end now and then, or say A"""
    policy = make_policy(kind, vocab_size=260)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[256] *= 2.5
        policy.model.get_output_embeddings().weight[65] *= 2.0
    return policy


def test_torch_sampler(monkeypatch):
    policy = ending_policy("llama")
    llm = starter.init_vllm(policy, tokenizer_with(CHAT), settings_of(use_vllm=False))
    check_turns(policy, llm, monkeypatch)
    monkeypatch.undo()
    check_sampler(policy, llm)
    assert policy.training and policy.is_packed and sample(llm, []) == []


def test_torch_sampler_samples_from_the_distribution():
    policy = make_policy()
    llm = starter.init_vllm(policy, tokenizer_with(CHAT), settings_of(use_vllm=False))
    pairs = ids_of(sample(llm, [[5, 6]], n=3000, stop_ids=(), max_tokens=2))

    def check(tokens, prompt):
        with torch.no_grad():
            wanted = eager_copy(policy)(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
        seen = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
        assert np.abs(seen - wanted).max() < 4 * math.sqrt(0.25 / len(tokens))

    check([pair[0] for pair in pairs], [5, 6])
    first = int(np.bincount([pair[0] for pair in pairs]).argmax())
    check([pair[1] for pair in pairs if pair[0] == first], [5, 6, first])


@pytest.fixture(scope="module")
def engine():
    """The real vLLM. Its model is tied, which is where a sync can go wrong."""
    policy = ending_policy("qwen3")
    threads = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with mock.patch.object(starter, "TURN_ENDS", ("A",)):
        llm = starter.init_vllm(policy, tokenizer_with(CHAT), settings_of(max_prompt_tokens=244))
    assert not isinstance(llm, starter.TorchSampler), "the real vLLM must start here"
    assert threads == (torch.get_num_threads(), torch.get_float32_matmul_precision())
    return policy, llm


@needs_vllm
def test_vllm_ends_a_turn_after_a_text(engine, monkeypatch):
    check_turns(*engine, monkeypatch)


@needs_vllm
def test_vllm_agrees_with_the_trainer_before_and_after_a_sync_and_not_without(engine):
    check_sampler(*engine)


@needs_vllm
def test_more_prompts_than_fit_into_a_batch_of_vllm_give_the_same_responses(engine):
    policy, llm = engine
    prompts = [row[:200] for row in make_rows([220] * 50, vocabulary=250).input_ids.tolist()]
    whole = sample(llm, prompts)
    parts = [sample(llm, [prompt], first=i) for i, prompt in enumerate(prompts[:10])]
    assert ids_of(sum(parts, [])) == ids_of(whole)[:40]
    assert worst_gap(policy, whole) < 1e-4


@needs_vllm
def test_a_sync_resets_the_prefix_cache(engine, monkeypatch):
    policy, llm = engine
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) < 1e-4
    randomize(policy.model, 8)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda: True)
        starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) > 0.01, "prefixes of the old weights"
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) < 1e-4


def test_without_vllm_torch_samples_and_a_model_that_it_cannot_run_is_one_line(monkeypatch, capsys):
    def start(error):
        monkeypatch.setattr(starter, "start_vllm", mock.Mock(side_effect=error))
        return starter.init_vllm(make_policy(), tokenizer_with(CHAT), settings_of(use_vllm=True))

    assert isinstance(start(ImportError("undefined symbol")), starter.TorchSampler)
    text = "!!! vLLM cannot be used here, torch samples: undefined symbol\n"
    assert text in capsys.readouterr().out
    with pytest.raises(UserError, match="vLLM cannot run [^\n]*--use_vllm=False$"):
        start(ValueError("no kernel for heads of 16"))


def test_cut_off_responses_earn_0_at_most_and_bad_rewards_show_the_response(monkeypatch):
    def rewards(reward, reward_truncated):
        monkeypatch.setattr(starter, "reward_fn", lambda text, problem: reward)
        responses = [make_response([1], [2], text="hi", finished=x) for x in (True, False)]
        starter.grade(responses, reward_truncated)
        return [response.reward for response in responses]

    assert rewards(1, False) == [1.0, 0.0] and rewards(1, True) == [1.0, 1.0]
    assert rewards(-1, False) == [-1.0, -1.0], "among negative rewards 0 would be a refuge"
    assert rewards(np.float32(0.5), True) == rewards(torch.tensor(0.5), True) == [0.5, 0.5]
    for bad in (None, "high", math.nan, math.inf, 1e39):
        with pytest.raises((TypeError, ValueError)) as error:
            rewards(bad, True)
        assert "response 'hi'" in error.value.__notes__[0]


@pytest.mark.parametrize("device, first_gap, step, gap, kl, words", [
    ("cpu", 0.0, 1, 1e-3, 0.0, None), ("cpu", 0.0, 5, 1e-3, 0.1, None),
    ("cpu", 0.0, 5, 3e-3, 0.0, "the weights did not arrive"), ("cpu", 0.0, 1, 0.0, 1e-7, None),
    ("cpu", 0.0, 1, 0.0, 1e-3, "before any update"),
    # In bf16 the limit is relative: stale weights show as a gap that grows.
    ("cuda", 0.0, 1, 0.09, 1e-3, None), ("cuda", 0.0, 1, 0.11, 0.0, "the weights did not arrive"),
    ("cuda", 0.004, 2, 0.029, 0.1, None), ("cuda", 0.004, 2, 0.031, 0.0, "did not arrive"),
    ("cuda", 0.02, 9, 0.079, 0.1, None), ("cuda", 0.02, 9, 0.081, 0.0, "did not arrive"),
    ("cuda", 0.0, 1, 0.0, 0.01, "before any update")])
def test_sampler_and_trainer_must_agree_and_the_kl_begins_at_zero(device, first_gap, step, gap, kl,
                                                                  words):
    state = make_state(step=step, first_gap=first_gap)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        starter.check_agreement({"rollout/logp_gap_mean": gap}, [{"kl_mean": kl}, {"kl_mean": 1.0}],
                                state, torch.device(device))
    assert state.first_gap == (gap if step == 1 else first_gap)



def test_a_prompt_shared_by_a_group_is_computed_once():
    batch = make_groups()
    inputs, predictors, targets = starter.pack(*rows_in(batch), torch.device("cpu"))
    # Prompts, and responses without their last tokens. A prompt ends before the first token of the
    # mask, so row 10, whose first token is masked, is not shared and lays its prompt down again.
    first, second = 7 + (4 + 0 + 8 + 1), 3 + 2 + 0 + 0
    third, fourth = (11 + 5) + 19 + (11 + 1) + (11 + 7), (11 + 3) + 2 + 1 + 0
    assert inputs["input_ids"].shape == (1, first + second + third + fourth)
    assert len(targets) == batch.response_mask.sum() == len(predictors)


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
def test_logits_never_exist_whole(estimator):
    vocabulary, chunk = 4096, 8
    policy, reference = (make_policy(seed=seed, vocab_size=vocabulary) for seed in (0, 1))
    policy.logits_per_chunk = chunk * vocabulary
    batch, kept = make_rows([3 + chunk] * 8, vocabulary=vocabulary), []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(8), 1, 0.2,
                                     ref_model=reference, kl_coef=0.1, kl_estimator=estimator)
    assert largest.size <= vocabulary * 32, "the output layer is as large as 4 chunks, of 8"
    assert not [shape for shape in kept if shape[-1:] == (vocabulary,)], "logits kept for backward"


# One model per mechanism
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "num_local_experts": 4}
WINDOW = {"sliding_window": 5, "num_hidden_layers": 4}
GPT = {"n_head": 4, "n_embd": 32, "n_layer": 2, "attn_pdrop": 0.5, "resid_pdrop": 0.5,
       "embd_pdrop": 0.5}
PACKED = {
    "llama": {}, "qwen3": {}, "qwen3_moe": EXPERTS, "gpt2": GPT,
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3}}
PADDED = {
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "gpt_oss": WINDOW | EXPERTS}


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


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_models_have_the_log_probs_of_their_own_head(save_folder, monkeypatch, kind):
    """And entropy, exact KL, gradients: each row alone, in eager attention"""
    changes = {**PACKED, **PADDED}[kind]
    folders = [save_folder(kind, noise=noise, **changes) for noise in (0.2, 0.196)]
    batch = make_groups()
    policy, reference = (starter.init_policy(str(folder))[0] for folder in folders)
    policy.logits_per_chunk = 3 * VOCABULARY
    assert policy.is_packed == (kind in PACKED) and policy.training
    plain = [AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
             for folder in folders]
    got = starter.response_stats(policy, *rows_in(batch), 0.7, reference)
    wanted = stats_row_by_row(*plain, batch, 0.7)
    weight = torch.randn(batch.labels.shape, generator=torch.Generator().manual_seed(1))
    for log_probs, _, _, kl in (got, wanted):
        (log_probs * weight + kl).sum().backward()
    for mine, theirs in zip(got, wanted):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert relative(gradient(policy), gradient(plain[0])) < 3e-5
    empty = [tensor[:0] for tensor in rows_in(batch)]
    assert starter.response_stats(policy, *empty)[0].shape == (0, batch.labels.shape[1])
    # With fresh weights a leak between rows is smaller than any fixed tolerance.
    fresh, _ = starter.init_policy(str(save_folder(kind, noise=0, **changes)))
    assert fresh.is_packed == policy.is_packed


def test_rows_longer_than_a_window_are_padded(save_folder):
    folder = save_folder("mistral", noise=0.2, sliding_window=40)
    for length in (39, 61):
        policy, _ = starter.init_policy(str(folder), longest_row=length)
        assert policy.is_packed == (length < 40)
        batch = make_rows([length] * 2)
        with torch.no_grad():
            wanted = plain_log_probs(load(folder), batch)
            assert relative(log_probs_of(policy, batch), wanted) < 1e-5


def test_a_model_that_is_not_supported_or_cannot_be_loaded_is_one_line(save_folder, tmp_path):
    folder = save_folder()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    scaled = save_folder("hyperclovax", logits_scaling=0.25)  # its logits, in a way of its own
    for bad, words in ((folder, "cannot load"), (tmp_path, "cannot load"),
                       ("no/such/model", "cannot load"), (scaled, "is not supported")):
        with pytest.raises(UserError, match=words) as error:
            starter.init_policy(str(bad))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_lora_reference_is_the_model_without_adapters_and_the_sampler_gets_merged_weights(
        save_folder, kind):
    batch, cfg = make_groups(), settings_of(lora_rank=4)
    policy, _ = starter.init_policy(str(save_folder(kind, noise=0.2, **PACKED[kind])))
    base = copy.deepcopy(policy.model).eval()
    base.set_attn_implementation("eager")
    starter.add_lora(policy, 4, seed=0)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    reference = copy.deepcopy(policy).eval()
    starter.compile_and_shard(policy, cfg, "cpu")
    with torch.no_grad():
        assert torch.allclose(log_probs_of(policy, batch), plain_log_probs(base, batch), atol=3e-5)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        changed = log_probs_of(policy, batch)
        assert (changed - plain_log_probs(base, batch)).abs().max() > 0.1
        stats = starter.response_stats(policy, *rows_in(batch), 1.0, reference)
        assert torch.equal(stats[0], changed)
        assert torch.allclose(stats[2], plain_log_probs(base, batch), atol=3e-5)
        assert torch.equal(log_probs_of(policy, batch), changed), "they are on again"
        base.load_state_dict(dict(starter.full_weights(policy)))
        assert torch.allclose(changed, plain_log_probs(base, batch), atol=1e-4)


@pytest.mark.parametrize("gigabytes, lora_rank, tokens, offload, sleep", [
    (141, 0, 20480, False, False), (80, 0, 20480, False, False), (24, 0, 8192, True, False),
    (16, 0, 8192, True, True), (24, 32, 8192, False, False)])
def test_what_does_not_fit_is_offloaded_or_sleeps(monkeypatch, capsys, gigabytes, lora_rank,
                                                  tokens, offload, sleep):
    """A model of 1.5 B parameters"""
    policy = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 1.54e9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0.97 * gigabytes * 2**30,
                                                             gigabytes * 2**30))
    cfg = settings_of(offload="auto", vllm_sleep="auto", lora_rank=lora_rank, gpu_mem_util=0.4,
                      tokens_per_microbatch=0)
    starter.plan_memory(policy, cfg, "cuda")
    assert cfg.tokens_per_microbatch == tokens
    assert (cfg.offload, cfg.vllm_sleep, cfg.gradient_checkpointing) == (offload, sleep, offload)
    text = capsys.readouterr().out
    assert ("host memory" in text) == offload and ("vllm_sleep=True" in text) == sleep
    for offload in (False, True):
        cfg, policy.logits_per_chunk = settings_of(offload=offload, vllm_sleep=True), 2**28
        starter.plan_memory(policy, cfg, "cuda")
        assert (cfg.offload, cfg.vllm_sleep) == (offload, True), "what was asked for"
        assert policy.logits_per_chunk == (2**26 if offload else 2**28)



def test_evaluation_counts_what_it_says(monkeypatch):
    """Scripted rewards of 3 problems x 2 responses; the weights are random."""
    task = make_task(question_rows(range(20)), question_rows(range(30, 33)),
                     stop_ids=range(0, 300, 8))  # some responses end in time
    llm = starter.init_vllm(make_policy(), task.tokenizer, settings_of(use_vllm=False))
    script = [1.0, 0.0, 0.95, 0.1, 0.1, 0.1]
    rewards = iter(script)
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: next(rewards))
    metrics, responses = starter.evaluate_model(llm, task, 2)
    assert [response.reward for response in responses] == script
    assert [response.problem["answer"] for response in responses[::2]] == ["32", "34", "36"]
    cut_off = [not response.finished for response in responses]
    assert 0 < sum(cut_off) < 6
    assert metrics == pytest.approx({"eval/accuracy": 2 / 6, "eval/mean_reward": 2.25 / 6})
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: problem.pop("answer") == 0)
    task.cfg.temperature = 0.0
    greedy = starter.evaluate_model(llm, task, 2)[1]
    assert greedy[0].ids == greedy[1].ids and "answer" in task.held_out[0], "a copy of each row"


def test_metrics_of_a_step_are_means_over_tokens_and_rows():
    parts = [dict.fromkeys(starter.TOKEN_METRICS, value) | {"n_tokens": n}
             for value, n in ((1.0, 30), (4.0, 10), (math.nan, 0))]
    responses = [make_response([1], [1] * 7, [1, 1, 1, 0, 0, 0, 1], reward=1.0),  # several turns
                 make_response([1], [1] * 2, finished=False),
                 make_response([1], [1], reward=0.1), make_response([1], [1], reward=0.1)]
    wanted = {"train/entropy": 70 / 40, "kl/mean": 70 / 40, "kl/max": 4, "kl/min": 1,
              "rollout/logp_gap_mean": 70 / 40, "train/reward_mean": 0.3,
              "train/frac_groups_zero_std": 0.5,
              "train/truncated_frac": 0.25, "train/avg_output_tokens": 2}
    metrics = starter.step_metrics(responses, parts, 2, 0.1)
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert not [name for name in starter.step_metrics(responses, parts, 2, 0.0) if "kl/" in name]
    assert "train/entropy" not in starter.step_metrics(responses, [], 2, 0.0)


def test_the_old_is_not_removed_before_the_new_is_in_place(tmp_path, monkeypatch):
    """A kill or a full disk at any moment leaves a whole folder: the old or the new one."""
    path, moments = tmp_path / "best", []

    def write(folder, text):
        folder.mkdir()
        for name in "ab":
            (folder / name).write_text(text)

    def contents():
        """-> {name: text} of the folders that are whole"""
        texts = {x.name: [file.read_text() for file in x.iterdir()] for x in tmp_path.iterdir()}
        return {name: x[0] for name, x in texts.items() if len(x) == 2 and x[0] == x[1]}

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments, **options):
            moments.append(contents())
            result = original(*arguments, **options)
            moments.append(contents())
            return result

        monkeypatch.setattr(owner, name, watched)

    with starter.written_whole(path) as temporary:
        write(temporary, "old")
    with pytest.raises(UserError, match="cannot write .*Is the disk full"):
        with starter.written_whole(path) as temporary:
            temporary.mkdir()
            raise OSError("No space left on device")
    assert contents() == {"best": "old"}
    for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
        watch(owner, name)
    with starter.written_whole(path) as temporary:
        write(temporary, "new")
    monkeypatch.undo()
    assert contents() == {"best": "new"} and len(moments) >= 4
    assert all("old" in x.values() or x.get("best") == "new" for x in moments), moments
    path.rename(tmp_path / "best.old")  # killed between two renames
    with starter.written_whole(path) as temporary:
        write(temporary, "newer")
    assert (path / "a").read_text() == "newer"


def test_a_checkpoint_keeps_numbers_of_ones_own_and_runs_no_code(run_main, tmp_path):
    def make(seed):
        policy = make_policy(seed=seed)
        return policy, torch.optim.AdamW(policy.parameters(), 0.01, fused=True), None

    def step(policy, optimizer, reference):
        log_probs_of(policy, make_groups()).mean().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in policy.parameters()]

    # Saved before any update, AdamW must not count a step.
    fresh, restored, resumed = make(0), make(5), make_state()
    state = make_state(step=3, kl_smooth=np.float64(0.125), mine=np.mean([6, 8]))
    starter.save_checkpoint(tmp_path, *fresh, state)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    starter.restore(saved, *restored, resumed)
    assert vars(resumed) == vars(state) and resumed.mine == 7
    for parts in (fresh, restored):
        assert all(map(torch.equal, step(*parts), step(*make(0))))

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    folder = run_main()
    torch.save({"state": Bomb()}, folder / "checkpoint.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        starter.main([f"--resume={folder}", "--n_grpo_steps=4"])
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(TypeError):  # when it is saved, not when it is loaded
        starter.save_checkpoint(tmp_path, *fresh, make_state(mine=torch.ones(1)))


def test_the_first_signal_is_noted_and_a_second_ctrl_c_stops_at_once(capsys):
    received = starter.catch_signals()
    for _ in range(2):  # under torchrun a signal to all processes arrives twice
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert set(received) == {signal.SIGTERM} and "stopping after" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.parametrize("visible, expected", [("", "9"), ("2,3,5,7", "3"), ("4", "4")])
def test_each_rank_sees_a_gpu_of_its_own(visible, expected, monkeypatch):
    for name, value in {"LOCAL_RANK": "9", "RANK": "9", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not visible:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    head, _ = (HERE / "starter.py").read_text().split("\nimport contextlib")
    exec(head, {"__file__": starter.__file__})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


# ---- 6. Settings -----------------------------------------------------------------------------

def test_every_hyperparameter_is_set_by_some_test():
    text = Path(__file__).read_text()
    assert [name for name in hyperparameters() if f"--{name}=" not in text] == []


BAD_SETTINGS = [
    (["--kl_coeff=0.1"], "did you mean kl_coef?"), (["--xyzzy=1"], "--help"),
    (["lr=1e-5"], "--name=value"), (["--lr"], "--lr=True: expected"),
    (["--seed=1.5"], "--seed=1.5: expected"), (["--use_kl_penalty=yes"], "=yes: expected"),
    (["--use_kl_penalty=auto"], "=auto: expected"), (["--offload=maybe"], "=maybe: expected"),
    (["--temperature=0"], "above 0"), (["--lr=-1"], "--lr=-1.0: expected"), (["--seed=-1"], "--seed=-1: expected"),
    (["--group_size=1"], "at least 2"), (["--rollout_batch_size=9"], "divide rollout_batch_size"),
    (["--loss_type=ppo"], "grpo, dr_grpo or dapo"),
    (["--kl_estimator=k4", KL], "k3"), (["--kl_in=reward", KL], "kl_estimator=k1"),
    (["--kl_coef=0.5"], "set use_kl_penalty"), (["--target_kl=0.1"], "set use_kl_penalty"),
    (["--task=no/such.jsonl"], "no/such.jsonl"), (["--max_prompt_tokens=1"], "too long"),
    (["--model_id=./no/model"], "./no/model"), (["--resume=no/such/run"], "no run to resume"),
    (["--resume=latest", "--out_dir=x"], "no run to resume in x/latest")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may offload and sleep")
@pytest.mark.parametrize("arguments, words", BAD_SETTINGS, ids=lambda x: "".join(x)[:40])
def test_bad_settings_are_one_line(run_main, tmp_path, arguments, words):
    """And nothing is written."""
    with pytest.raises(UserError) as error:
        run_main(*arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_settings_come_from_main_tiny_the_script_and_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = functools.partial(starter.main, only_settings=True)
    cfg = settings([])
    assert cfg.model_id == "tiny" and not cfg.compile and cfg.temperature == 1.0
    assert {name: getattr(cfg, name) for name in tiny.SETTINGS} == tiny.SETTINGS
    cfg = settings(["--model_id=mine"])
    assert (cfg.lr, cfg.task, cfg.group_size) == (1.5e-6, "countdown", 16)
    cfg = settings(["--lr=1e-5", KL, "--prompt=a=b"], model_id="mine", lr=1.0, seed=7)
    assert (cfg.lr, cfg.seed, cfg.use_kl_penalty, cfg.prompt) == (1e-5, 7, True, "a=b")
    cfg = settings(["--task=mine.jsonl"])
    assert (cfg.task, cfg.eval_task) == ("mine.jsonl", ""), "tiny's test problems are not of it"
    with pytest.raises(UserError, match="learning_rate"):
        settings([], learning_rate=1.0)  # of a script that imports starter
    for flag, is_warned in (("--kl_importance_weight=False", True), ("--kl_in=reward", False)):
        settings([KL, "--kl_estimator=k1", flag])
        assert ("plain k1" in capsys.readouterr().out) == is_warned


def test_run_folders_are_numbered_and_named_after_what_was_typed(tmp_path):
    cfg = settings_of(out_dir=str(tmp_path / "out"))
    found = []
    for typed in ({}, {"lr": "1e-4"}, {"task": "/data/my file.jsonl"}, {"prompt": "ü " * 200}):
        folder = starter.make_run_folder(cfg, typed)
        assert (tmp_path / "out" / "latest").resolve() == folder.resolve()
        assert (folder / "starter.py").read_bytes() == (HERE / "starter.py").read_bytes()
        found.append(folder.name)
    assert found[:3] == ["0001", "0002_lr=1e-4", "0003_task=my-file.jsonl"]
    assert found[3].startswith("0004_prompt=----") and len(found[3].encode()) < 250


def test_help_is_immediate_and_lists_every_hyperparameter(tmp_path):
    """Neither torch nor anything else that is slow to import is imported."""
    for name in ("torch", "transformers", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    for flag in ("--help", "-h"):
        run = subprocess.run([sys.executable, HERE / "starter.py", flag], capture_output=True,
                             text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120)
        assert run.returncode == 0 and run.stderr == ""
        assert "python starter.py --resume=latest" in run.stdout
        for name in hyperparameters():
            assert re.search(rf"^ +{name}=.*$", run.stdout, re.MULTILINE), name


def test_what_a_shell_sees(script, tmp_path):
    """Exit codes; one line for a person to act on, a traceback for the rest; rank 0 prints."""
    assert script.run(tmp_path, "--lerning_rate=1") == 2
    assert re.fullmatch("error: there is no hyperparameter lerning_rate.*\n", script.text())
    assert list(tmp_path.iterdir()) == []
    change = "def main(**options):\n    {}\nstarter.main = main"
    for line, code, words in (
            ("raise starter.UserError('do this')", 2, "error: do this\n"),
            ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
            ("print('trained')", 0, "trained\n")):
        assert script.run(tmp_path, before=change.format(line)) == code
        assert script.text().endswith(words) and ("Traceback" in script.text()) == (code == 1)
    other_rank = "starter.RANK = 1\n" + change.format("print('trained')")
    assert script.run(tmp_path, before=other_rank) == 0 and script.text() == ""


def edited(tmp_path, pattern, text):
    """-> starter.py with another hyperparameter in main()"""
    source, n = re.subn(pattern, text, (HERE / "starter.py").read_text(), count=1)
    assert n == 1
    (tmp_path / "edited.py").write_text(source)
    spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_main_may_be_edited_and_tiny_says_what_it_sets(tmp_path, warm_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(warm_folder, tmp_path / "tiny")
    module = edited(tmp_path, " lr=1.5e-6,", " lr=5e-3, mine=-0.5, bonus=0.0,")
    monkeypatch.setattr(module, "SCRIPT", module.__file__)
    arguments = ["--model_id=tiny", *SMALL, "--bonus=2", "--n_grpo_steps=1"]
    arguments.remove("--lr=1e-3")
    module.main(arguments, out_dir="mine")
    (line,) = re.findall("^tiny.py sets .*$", capsys.readouterr().out, re.MULTILINE)
    assert f"'lr': {tiny.SETTINGS['lr']}" in line and "'task': 'tiny'" in line
    folder = tmp_path / "mine" / "latest"
    assert rows_of(folder)[1]["train/lr"] == pytest.approx(tiny.SETTINGS["lr"] / 2)
    assert (folder / "edited.py").read_text() == (tmp_path / "edited.py").read_text()
    assert folder.resolve().name.startswith("0001_model_id=tiny_") and "lr=" not in folder.name
    for typed, changed in ((["--resume=latest"], {}), ([], {"resume": "latest"})):
        cfg = module.main([*typed, "--mine=3"], True, out_dir="mine", **changed)
        assert (cfg.mine, cfg.bonus) == (3, 2) and "!!!" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no hyperparameter mine"):
        starter.main([f"--resume={folder}"], only_settings=True)
    assert "!!! edited.py started this run" in capsys.readouterr().out
    assert module.main(["--model_id=mine"], only_settings=True).lr == 5e-3


# ---- 7. Quick tests --------------------------------------------------------------------------

@pytest.mark.parametrize("right, wrong", [
    ("-torch.minimum(plain, clipped)", "-torch.maximum(plain, clipped)"),
    ("1 + (clip_range_high or clip_range)", "1 + clip_range"),
    ("loss + kl_coef * penalty", "loss + kl_coef**2 * penalty"),
    ("log_pi - upcast(ref_log_probs)", "upcast(ref_log_probs) - log_pi"),
    ("penalty.flip(1).cumsum(1).flip(1)", "penalty.cumsum(1)"),
    ("l + 1 if is_weighted", "l if is_weighted"),
    ("mask.sum(-1, keepdim=True).clamp(min=1)", "mask.shape[1]"),
    ("n_rows * max_tokens", "n_rows"),
    ("loss = loss * sampler_weight", "pass")])
def test_quick_tests_notice_mutations(right, wrong, capsys):
    source = (HERE / "starter.py").read_text()
    assert source.count(right) == 1
    for text, is_right in ((source, True), (source.replace(right, wrong), False)):
        names = {"__name__": "mutant", "__file__": str(HERE / "starter.py")}
        exec(compile(text, "mutant", "exec"), names)
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError):
            names["test_functions"]()
    assert capsys.readouterr().out.count("=== All Tests Passed! ===") == 1


# ---- 8. End to end ---------------------------------------------------------------------------

ALWAYS = {f"train/{name}" for name in (
    "reward_mean loss grad_norm lr kl_penalty kl_coef clip_fraction approx_kl entropy "
    "avg_output_tokens truncated_frac frac_groups_zero_std skipped_steps").split()} | {
    "rollout/logp_gap_mean", "time/rollout", "time/train", "time/sync", "time/step",
    "time/minutes"}
EVALUATION = {"eval/accuracy", "eval/mean_reward"}
WITH_KL = {f"kl/{name}" for name in ("mean", "max", "min")}
LAST_LINES = (r"\nStep 3 \| Held-out accuracy, sampled: .*% \(at step 0: .*%\).*\n(.*\n)*  try it    "
              r"python sample.py --model_id=.*/model'\n  curves    tensorboard --logdir .*/out/tb'\n")


def check_run(folder, n_steps=3):
    """What every finished run must have"""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(n_steps + 1))
    assert EVALUATION <= set(rows[0]) and EVALUATION <= set(rows[-1])
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/skipped_steps"] == 0
        if row["train/frac_groups_zero_std"] < 1:  # otherwise there was nothing to compute
            assert ALWAYS <= set(row) and row["rollout/logp_gap_mean"] < 1e-4
    settings = json.loads((folder / "config.json").read_text())
    before, after = load(settings["model_id"]).state_dict(), weights_of(folder)
    assert before.keys() == after.keys() and not are_equal(before, after)
    return rows


def test_a_run_with_kl_writes_all_its_records(run_main, warm_folder, tmp_path, capsys):
    folder = run_main(KL, "--lr=3e-3", "--inner_epochs=2", "--kl_warmup_steps=4", "--kl_coef=0.2")
    rows = check_run(folder)
    assert all(WITH_KL <= set(row) for row in rows[1:])
    assert rows[1]["kl/min"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["kl/mean"] > rows[1]["kl/mean"] > 0
    assert [row["train/kl_coef"] for row in rows[1:]] == pytest.approx([0.05, 0.1, 0.15])
    assert [("eval/accuracy" in row) for row in rows] == [True, False, True, True]
    text = capsys.readouterr().out
    assert re.search(r"\nStep 3 \| Loss: .* \| Grad norm: .* \| Cut off: .*KL penalty", text)
    assert re.search(LAST_LINES, text)
    # TensorBoard: scalars of every step, samples, hyperparameters
    events = EventAccumulator(str(tmp_path / "out" / "tb" / folder.name)).Reload()
    tags = events.Tags()
    assert ALWAYS | EVALUATION | WITH_KL <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("kl/mean")[2].value == pytest.approx(rows[3]["kl/mean"])
    texts = str([events.Tensors(tag)[0].tensor_proto for tag in tags["tensors"] if "sample" in tag])
    assert "&lt;answer&gt;" in texts and "<answer>" not in texts, "text of a model is escaped"
    # Samples, of training too
    samples = rows_of(folder, "samples.jsonl")
    training, held_out = ({row["prompt"] for row in rows_of(warm_folder, f"{name}.jsonl")}
                          for name in ("train", "test"))
    assert {sample["step"] for sample in samples} == {0, 2, 3}
    for sample in samples:
        assert {"prompt", "turns", "reward"} <= set(sample)
        assert sample["prompt"] in (training | held_out if sample["step"] else held_out)
    assert any(sample["prompt"] in training for sample in samples)
    # The model loads anywhere, with the weights of the checkpoint.
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    policy, tokenizer = starter.init_policy(str(folder / "model"))
    assert are_equal({name: policy.state_dict()[name] for name in saved["weights"]},
                     dict(saved["weights"])) and tokenizer.encode("5") == [53]
    # Resumed, a finished run says so and stays as it is.
    with pytest.raises(UserError, match="it has finished"):
        starter.main([f"--resume={folder}"])
    assert rows_of(folder) == rows


def test_training_raises_the_reward(run_main):
    rows = rows_of(run_main("--n_grpo_steps=20", "--rollout_batch_size=128", "--group_size=8",
                            "--lr=5e-4", "--seed=1", "--save_every=0", "--eval_every=0"))
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.08, rewards
    assert not [name for row in rows for name in row if name.startswith(("eval/", "kl/"))]


OPTIONS = {
    "updates": ["--inner_epochs=2", "--n_minibatches=2", "--loss_type=dapo", "--clip_range=0.001",
                "--clip_range_high=0.002", "--seed=7", "--max_minutes=60"],
    "tokens": ["--tokens_per_microbatch=40", "--loss_type=dr_grpo", "--use_std_normalization=False",
               "--temperature=0.7", "--max_grad_norm=0", "--warmup_steps=0", "--gpu_mem_util=0.2"],
    "compile": ["--gradient_checkpointing=True", "--compile=True", "--max_prompt_tokens=40"],
    "lora": [KL, "--kl_estimator=exact", "--lora_rank=2", "--inner_epochs=2", "--lr=1e-2"],
    "reward": [KL, "--kl_estimator=k1", "--kl_in=reward", "--n_minibatches=2",
               "--reward_truncated=True", "--max_turns=2"],
    "adaptive": [KL, "--kl_importance_weight=False", "--target_kl=1e-7", "--kl_estimator=k2",
                 "--inner_epochs=2", "--kl_coef=0.1"],
    "coefficient 0": [KL, "--kl_coef=0", "--target_kl=0.1", "--ref_update_every=2"],
    "padded": ["--task=task.jsonl", "--eval_task=", "--prompt={question} is",
               "--max_prompt_tokens=64", KL, "--save_every=0"]}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(run_main, save_folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    # The C++ compiler would take half a minute; this traces the same graphs. The GPU tests use it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    arguments = OPTIONS[name]
    if name == "compile":
        arguments = [*arguments, f"--model_id={save_folder('llama', num_hidden_layers=1)}"]
    if name == "padded":  # a model without packing, rows without answers, a reward of one's own
        write_rows(tmp_path / "task.jsonl", [{"question": f"{i}+1"} for i in range(20)])
        arguments = [*arguments, f"--model_id={save_folder('lfm2', **PADDED['lfm2'])}"]
    if name in ("compile", "padded"):
        monkeypatch.setattr(starter, "reward_fn", letters)
        arguments.append("--reward_truncated")
    folder = run_main(*arguments)
    rows = check_run(folder)
    if name == "updates":
        assert rows[1]["train/clip_fraction"] > 0
    if name == "lora":
        assert rows[3]["kl/mean"] > 0
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        assert all("lora_" in name for name in saved["weights"]), "frozen weights are not saved"
    if name == "adaptive":
        assert rows[3]["train/kl_coef"] > 0.1 and rows[1]["kl/mean"] > 1e-5
    if name == "padded":
        assert not (folder / "checkpoint.pt").exists() and rows[3]["kl/mean"] > 0
        with pytest.raises(FileNotFoundError):  # otherwise model/ would be lost
            starter.main([f"--resume={folder}", "--n_grpo_steps=4"])
        assert min(row["train/grad_norm"] for row in rows[1:]) > 0


def test_nothing_is_compiled_anew_when_sizes_that_were_equal_differ(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    policy = make_policy()
    starter.compile_and_shard(policy, settings_of(compile=True), "cpu")
    log_probs_of(policy, make_rows([9, 12, 7]))  # no shared prompts: as many slots as tokens
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    log_probs_of(policy, make_groups())


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_old_and_reference_log_probs_are_those_of_the_models_that_they_are_named_after(
        run_main, warm_folder, monkeypatch, lora_rank):
    """Old: the policy before the update; reference: the starting model, without adapters"""
    step, before, kls = starter.grpo_microbatch_step, {}, []
    base = starter.init_policy(str(warm_folder))[0]
    n_compared = 0

    def watched(policy, input_ids, labels, mask, *rest, old_log_probs, ref_log_probs, **options):
        nonlocal n_compared
        rows = input_ids, labels, mask
        weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
        with torch.no_grad():
            wanted = starter.response_stats(base, *rows)[0]
            assert torch.allclose(ref_log_probs * mask, wanted, atol=1e-5)
            kl = starter.response_stats(policy, *rows, 1.0, base)[3]
            kls.append((float(kl.sum()), int(mask.sum())))
            if n_compared % 4 == 0:  # the first minibatch of a step
                before.update(weights)
            policy.load_state_dict(before)
            wanted = starter.response_stats(policy, *rows)[0]
            policy.load_state_dict(weights)
            assert torch.allclose(old_log_probs * mask, wanted, atol=1e-5)
            n_compared += 1
        return step(policy, *rows, *rest, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs,
                    **options)

    monkeypatch.setattr(starter, "grpo_microbatch_step", watched)
    folder = run_main(KL, "--inner_epochs=2", "--n_minibatches=2", f"--lora_rank={lora_rank}",
                      f"--lr={1e-2 if lora_rank else 1e-3}", "--kl_coef=0.001", "--n_grpo_steps=4",
                      "--rollout_batch_size=64")
    assert n_compared == 4 * 4
    for i, row in enumerate(rows_of(folder)[1:]):
        sums, counts = zip(*kls[4 * i:4 * i + 4])
        exact = sum(sums) / sum(counts)
        assert exact / 3 < row["kl/mean"] < exact * 3, "near the exact KL, also off-policy"
    assert exact > 0.01


def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(run_main, monkeypatch,
                                                                         tmp_path):
    advantages, calls = starter.group_advantages, []

    def bad(*arguments):
        calls.append(len(calls))
        return advantages(*arguments) * (math.nan if len(calls) in (2, 6, 7, 8, 9, 10) else 1.0)

    monkeypatch.setattr(starter, "group_advantages", bad)
    monkeypatch.setattr(starter, "reward_fn", letters)
    with pytest.raises(UserError, match="5 updates in a row"):
        run_main("--n_grpo_steps=12", "--warmup_steps=0", "--reward_truncated", "--eval_every=0")
    rows = rows_of(tmp_path / "out" / "latest")[1:]
    assert [row["train/skipped_steps"] for row in rows] == [0, 1, 1, 1, 1, 2, 3, 4, 5]
    rates = [1e-3, 1e-3, 1e-4, 2e-4, 4e-4, 8e-4, 1e-4, 1e-4, 1e-4]
    assert [row["train/lr"] for row in rows] == pytest.approx(rates) and "train/loss" not in rows[1]
    saved = torch.load(tmp_path / "out" / "latest" / "checkpoint.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in saved["weights"].values())


def test_a_sync_that_does_nothing_and_another_reference_end_the_run(run_main, monkeypatch):
    with monkeypatch.context() as patch:
        sync, calls = starter.load_policy_into_vllm_instance, []
        patch.setattr(starter, "load_policy_into_vllm_instance",
                      lambda *arguments: calls.append(sync) or len(calls) > 1 or sync(*arguments))
        with pytest.raises(UserError, match="the weights did not arrive"):
            run_main("--lr=1e-2", "--warmup_steps=0")
    shard = starter.compile_and_shard

    def other(policy, *arguments):
        shard(policy, *arguments)
        if not policy.training:  # the reference
            policy.model.lm_head.weight.data.mul_(1.1)

    monkeypatch.setattr(starter, "compile_and_shard", other)
    with pytest.raises(UserError, match="before any update"):
        run_main(KL)


def test_groups_with_equal_rewards_leave_the_weights_alone_to_the_bit(run_main, warm_folder,
                                                                      monkeypatch):
    numbers = []
    monkeypatch.setattr(starter, "reward_fn",
                        lambda text, problem: numbers.append(problem["problem_number"]) or 0.1)
    folder = run_main("--reward_truncated=True", "--eval_every=0")
    assert numbers == [i // 4 for i in range(48)], "four other problems in every step"
    assert are_equal(weights_of(folder), load(warm_folder).state_dict())


def test_rows_without_advantage_count_in_the_divisor(run_main):
    """They are left out of the computation from step 2 on, and the gradient stays the same."""
    norms = []
    for kl_coef in ("1e-30", "0"):
        rows = rows_of(run_main(KL, f"--kl_coef={kl_coef}", "--lr=1e-9", out=f"out{kl_coef}"))
        assert 0 < np.mean([row["train/frac_groups_zero_std"] for row in rows[2:]]) < 1
        norms.append([row["train/grad_norm"] for row in rows[1:]])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_best_is_the_model_of_the_best_evaluation(run_main, warm_folder, monkeypatch):
    folder = run_main("--n_grpo_steps=2", "--eval_every=0", out="two")
    calls = []

    def scripted(text, problem):
        if problem["turns"] and problem["rendered"] in held_out:
            calls.append(text)
            return float((len(calls) - 1) % 8 < (3, 2, 5, 4)[(len(calls) - 1) // 8])
        return reward_fn(text, problem)

    reward_fn = starter.reward_fn
    held_out = {row["prompt"] for row in rows_of(warm_folder, "test.jsonl")}
    monkeypatch.setattr(starter, "reward_fn", scripted)
    best = run_main("--eval_every=1")
    assert len(calls) == 32 and are_equal(weights_of(best, "best"), weights_of(folder))
    assert not are_equal(weights_of(best, "best"), weights_of(best))


def test_resuming_takes_over_all_settings(run_main, tmp_path):
    """Also a refreshed reference and the adaptive coefficient, twice"""
    arguments = [KL, "--ref_update_every=2", "--target_kl=1e-7", "--n_minibatches=2", "--lr=3e-3",
                 "--n_grpo_steps=7", "--eval_every=0"]
    whole = run_main(*arguments, out="whole")
    folder = run_main(*arguments, "--n_grpo_steps=3", out="parts")
    for n_steps in (5, 7):
        starter.main([f"--resume={folder}", f"--n_grpo_steps={n_steps}"])
        settings = json.loads((folder / "config.json").read_text())
        assert settings["n_grpo_steps"] == n_steps and settings["lr"] == 3e-3, "for the next resume"
    assert numbers_of(folder) == numbers_of(whole) and equal_weights(folder, whole)
    rows = rows_of(folder)
    assert rows[4]["kl/mean"] > rows[3]["kl/mean"], "refreshed after step 2"
    assert rows[7]["train/kl_coef"] != rows[1]["train/kl_coef"]


def test_max_minutes_end_a_run_which_can_be_resumed(run_main, capsys):
    folder = run_main("--max_minutes=1e-9")
    assert "ETA -" in capsys.readouterr().out, "minutes left, not steps left"
    assert len(rows_of(folder)) == 2 and (folder / "model").exists()
    starter.main([f"--resume={folder}", "--max_minutes=1000"])
    assert len(rows_of(folder)) == 4


@pytest.mark.parametrize("call", [60, 45])
def test_an_error_in_the_reward_loses_no_finished_step(call, run_main, monkeypatch):
    """8 calls in an evaluation, 16 in a step: in step 3; in the evaluation before"""
    arguments, calls = ["--reward_truncated", "--save_every=0"], []

    def failing(text, problem):
        calls.append(text)
        if len(calls) == call:
            raise KeyError("answer")
        return letters(text, problem)

    monkeypatch.setattr(starter, "reward_fn", letters)
    whole = run_main(*arguments, out="whole")
    monkeypatch.setattr(starter, "reward_fn", failing)
    with pytest.raises(KeyError) as error:
        run_main(*arguments)
    assert error.value.__notes__ == [f"reward_fn got the response {calls[-1]!r}"]
    folder = whole.parents[1] / "out" / "latest"
    assert torch.load(folder / "checkpoint.pt")["state"]["step"] == 2
    starter.main([f"--resume={folder}"])
    wanted = numbers_of(whole)
    if call == 45:  # it is not repeated
        del wanted[2]["eval/accuracy"], wanted[2]["eval/mean_reward"]
    assert equal_weights(folder, whole) and numbers_of(folder) == wanted


LONG_RUN = [KL, "--n_minibatches=2", "--n_grpo_steps=12", "--save_every=2"]


def test_a_kill_and_ctrl_c_at_random_moments_change_nothing(script, warm_folder, tmp_path):
    """To the bit"""
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder in folders:
        folder.mkdir()
    start = [*small_run(warm_folder), *LONG_RUN]
    assert script.run(folders[0], *start) == 0, script.text()
    assert "%|" not in script.text(), "no progress bars"
    rng = random.Random(time.time_ns())
    script.start(folders[1], *start)
    script.until("run folder:")
    script.until("Step ", rng.randrange(9))  # a step writes a line or two
    time.sleep(rng.random() * 0.2)
    os.kill(script.pid, signal.SIGKILL)
    assert script.end() == -signal.SIGKILL, script.text()
    script.start(folders[1], "--resume=latest")
    script.until("Step ")
    os.kill(script.pid, signal.SIGINT)
    assert script.end() == 0 and "stopping after this step" in script.text(), script.text()
    assert re.search(r"stopped after step \d+: --resume='.*/out/0001.*' continues", script.text())
    assert script.run(folders[1], "--resume=latest") == 0, script.text()
    whole, parts = (folder / "out" / "latest" for folder in folders)
    assert numbers_of(parts) == numbers_of(whole) and equal_weights(parts, whole)
    assert not [path for path in parts.resolve().iterdir() if path.suffix in (".new", ".old")]


def test_a_full_disk_ends_the_run_in_one_line_and_the_last_checkpoint_is_good(
        script, warm_folder, tmp_path):
    """No file may be larger than the limit: a model fits, a checkpoint does not."""
    assert script.run(tmp_path, *small_run(warm_folder), "--n_grpo_steps=1") == 0, script.text()
    before = "resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, 8_000_000))"
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=3", before=before) == 2
    (line,) = re.findall("^error: .*$", script.text(), re.MULTILINE)
    assert "checkpoint.pt" in line and "Is the disk full?" in line
    assert "Traceback" not in script.text()
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=2") == 0, script.text()
    assert "after step 1" in script.text()
    check_run((tmp_path / "out" / "latest").resolve(), 2)


def close(got, wanted):
    """Equal but for rounding"""
    assert [row.keys() for row in got] == [row.keys() for row in wanted]
    for row, other in zip(got, wanted):
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-4), (name, row["step"])


def half_flat(text, problem):
    """A reward that is equal for all responses to about half of the problems"""
    return 0.1 if zlib.crc32(problem["rendered"].encode()) % 2 else letters(text, problem)


def test_two_ranks_give_the_numbers_of_one(run_main, save_folder, warm_folder, tmp_path,
                                           monkeypatch):
    """The second run has one prompt: one of the ranks has no share of it, nor of the evaluation;
    its output layer has a bias, which the exact KL needs whole. In the third, a rank has no row
    with an advantage."""
    runs = {"adapters": [KL, "--lora_rank=2", "--inner_epochs=2", "--n_minibatches=2",
                         "--rollout_batch_size=12", "--lr=1e-2"],
            "share": [KL, "--kl_estimator=exact", "--kl_coef=1", "--rollout_batch_size=4",
                      "--n_eval=1", f"--model_id={save_folder('phi')}", "--max_prompt_tokens=40",
                      "--max_grad_norm=0.1", "--ref_update_every=2", "--loss_type=dapo"],
            "flat": ["--rollout_batch_size=8", "--n_grpo_steps=5", "--eval_every=0"]}
    program = tmp_path / "program.py"
    program.write_text("import json, os, sys, starter, test_starter\n"
                       "starter.reward_fn = test_starter.half_flat\n"
                       "for arguments in json.loads(sys.argv[1]):\n    starter.main(arguments)\n"
                       "os._exit(0)  # as starter.py does\n")
    options = [*small_run(warm_folder), "--reward_truncated"]
    arguments = [[*options, f"--out_dir={tmp_path}/two_{name}", *runs[name]] for name in runs]
    arguments.append([f"--resume={tmp_path}/two_flat/latest", "--n_grpo_steps=6"])
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2", program, json.dumps(arguments)], check=True, timeout=400,
                   env=os.environ | {"PYTHONPATH": str(HERE)})
    monkeypatch.setattr(starter, "reward_fn", half_flat)
    runs["flat"].append("--n_grpo_steps=6")
    for name, options in runs.items():
        alone = run_main("--reward_truncated", *options, out=name)
        two = tmp_path / f"two_{name}" / "latest"
        close(numbers_of(two), numbers_of(alone))
        first, second = weights_of(two), weights_of(alone)
        assert all(torch.allclose(first[key], second[key], atol=2e-4) for key in first)
    flat = [row["train/frac_groups_zero_std"] for row in rows_of(alone)[2:]]
    assert 0.5 in flat, "of two groups, one on each rank"


@needs_vllm
def test_the_script_with_vllm(warm_folder, tmp_path):
    """From the shell: nothing but its own lines on the screen"""
    run = subprocess.run(
        [sys.executable, HERE / "starter.py", *small_run(warm_folder), "--use_vllm=True", KL],
        cwd=tmp_path, text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0 and "torch samples" not in run.stdout, run.stdout
    assert run.stdout.startswith("=== All Tests Passed! ===\n")
    assert "starting vLLM ..." in run.stdout, run.stdout
    assert re.search(LAST_LINES, run.stdout), run.stdout
    rows = check_run((tmp_path / "out" / "latest").resolve())
    assert rows[1]["rollout/logp_gap_mean"] < 1e-4 and rows[3]["kl/mean"] > 0


# ---- 9. GPU ----------------------------------------------------------------------------------

@needs_cuda
@pytest.mark.parametrize("arguments", [
    ["--compile=True", "--gradient_checkpointing=True"],
    ["--vllm_sleep=True", "--offload=True", "--ref_update_every=2", "--compile=False"]])
def test_gpu_script_learns_agrees_with_vllm_and_resumes(warm_folder, tmp_path, arguments):
    def run(*options):
        subprocess.run([sys.executable, HERE / "starter.py", *options], cwd=tmp_path, check=True,
                       timeout=500)

    run(*small_run(warm_folder), "--use_vllm=True", KL, *arguments, "--gpu_mem_util=0.15",
        "--rollout_batch_size=256", "--group_size=8", "--n_grpo_steps=20", "--lr=5e-4")
    run("--resume=latest", "--n_grpo_steps=22")
    rows = rows_of(tmp_path / "out" / "latest")
    assert [row["step"] for row in rows] == list(range(23))
    assert all(row["rollout/logp_gap_mean"] < 0.05 for row in rows[1:])
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:2]) + 0.1 and rows[1]["kl/mean"] < 2e-3


@needs_cuda
@pytest.mark.parametrize("gib, sleeps", [(24, False), (16, True)])
def test_gpu_that_is_small_trains_the_default_size_offloaded(gib, sleeps):
    output = subprocess.check_output(
        [sys.executable, HERE / "bench.py", f"--gpu_gib={gib}", "--prompts=8", "--steps=1",
         "--warmup=1", "--compile=False"], text=True, timeout=500)
    result = json.loads(output.splitlines()[-1])
    assert result["offload"] and result["vllm_sleep"] == sleeps and 0 < result["gap"] < 0.05
    assert result["peak_gib"] < gib

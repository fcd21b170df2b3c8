"""Tests of the functions of starter.py, in the order of its sections: seconds, without vLLM.

    python -m pytest test_starter.py

plain_grpo_step() in section 2 is one step of the algorithm in its plainest form: read it first.
What starts whole runs, vLLM or a GPU is in tests/.
"""
import ast, contextlib, copy, functools, itertools, json, math, os, random, re, shutil
import signal, subprocess, sys, tempfile, time, zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# Models so small are as fast on one thread, and threads that wait for each other are slow on a busy
# machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import starter
from starter import Response, UserError

HERE = Path(starter.__file__).resolve().parent
tiny, countdown = map(starter.load_task_file, ("tiny", "countdown"))

# ---- 0. Budgets ----------------------------------------------------------------------------------

def functions_of(path):
    """-> {name: node of the syntax tree}"""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def lines_of_code(path):
    """-> how many lines are left without comments, docstrings and blank lines"""
    text = path.read_text("utf-8")
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(node):
                first = node.body[0]
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    n_lines = 0
    for number, line in enumerate(text.splitlines(), 1):
        is_code = line.strip() and not line.strip().startswith("#") and number not in docstrings
        n_lines += bool(is_code)
    return n_lines


def test_sizes():
    """A reader's time is the budget: what grows beyond it is noticed."""
    path = HERE / "starter.py"
    lines = path.read_text("utf-8").splitlines()
    functions = functions_of(path)
    calls = [node for node in ast.walk(functions["main"]) if isinstance(node, ast.Call)]
    block = next(call for call in calls if getattr(call.func, "id", "") == "SimpleNamespace")
    budgets = {
        "lines of code": (lines_of_code(path), 1300), "lines": (len(lines), 1650),
        "columns": (max(map(len, lines)), 100),
        "lines before compute_loss": (functions["compute_loss"].lineno - 1, 599),
        "hyperparameters": (len(block.keywords), 47)}
    for name in ("main", "train"):
        budgets[f"lines of {name}()"] = (
            functions[name].end_lineno - functions[name].lineno + 1, 120)
    for name, budget in {"bench.py": 270, "kl_sweep.py": 300, "sample.py": 150,
                         "record.py": 145, "verify.py": 80, "speedrun.sh": 25}.items():
        budgets[f"lines of {name}"] = len((HERE / name).read_text("utf-8").splitlines()), budget
    for name, budget in {"README.md": 1800, "KL.md": 2200, "BENCHMARKS.md": 1800}.items():
        budgets[f"words of {name}"] = len((HERE / name).read_text("utf-8").split()), budget
    assert {name: pair for name, pair in budgets.items() if pair[0] > pair[1]} == {}


# ---- Helpers -------------------------------------------------------------------------------------

VOCABULARY = 300
CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% if not loop.last or m['role'] != 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
CPU = torch.device("cpu")


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


def make_policy(kind="llama", seed=0, scale=0.3, **changes):
    config = make_config(kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed").eval()
    randomize(model, seed, scale)
    policy = starter.Policy(model, [256])
    policy.is_packed = True
    return policy


def eager_copy(policy):
    """The same weights in transformers' plainest attention, with gradients of its own"""
    config = copy.deepcopy(policy.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager",
                                             dtype=policy.model.dtype)
    model.load_state_dict(policy.model.state_dict())
    return model.eval()


@torch.no_grad()
def reference_near(policy):
    """-> a Policy whose distributions differ a little"""
    reference = copy.deepcopy(policy).requires_grad_(False)
    for parameter in reference.parameters():
        parameter *= 0.97
    return reference


def make_response(prompt_ids, ids, mask=None, log_probs=None, text="", problem=None, **fields):
    """As the sampler makes it"""
    response = Response((problem or {}) | {"prompt_ids": prompt_ids})
    response.problem["turns"].append({"role": "assistant", "content": text})
    values = {"ids": ids, "log_probs": log_probs or [0.0] * len(ids), "finished": True,
              "mask": mask or [True] * len(ids), "scores": {}}
    vars(response).update(values | fields)
    return response


def make_rows(lengths, n_prompt=3, vocabulary=VOCABULARY, seed=0):
    """A batch of rows of these lengths, each with a prompt of its own"""
    rng = random.Random(seed)
    rows = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
    return starter.make_batch([make_response(row[:n_prompt], row[n_prompt:]) for row in rows])


def make_group_responses(lengths, n_prompts, vocabulary=VOCABULARY, seed=0):
    """Groups of responses of these lengths; the last two prompts differ in their last token only"""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(2, vocabulary) for _ in range(n)]

    prompts = [draw(n) for n in (7, 3, 11)[:n_prompts - 1]]
    prompts.append(prompts[-1][:-1] + [1])
    size = len(lengths) // n_prompts
    return [make_response(prompts[i // size], draw(n)) for i, n in enumerate(lengths)]


def make_groups(seed=0):
    """Four groups of four responses: some of one token, one row without any, one with a hole, and
    two prompts that differ in their last token"""
    lengths = (5, 1, 9, 2, 3, 4, 1, 1, 6, 20, 2, 8, 4, 3, 2, 1)
    responses = make_group_responses(lengths, 4, seed=seed)
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
    """The hyperparameters of small tests, the same on every machine"""
    with mock.patch("torch.cuda.is_available", return_value=False):
        cfg = starter.main(["--task=none"], only_settings=True)
    defaults = {"model_id": "none", "seed": 1, "rollout_batch_size": 24, "group_size": 4,
                "max_tokens": 12, "max_prompt_tokens": 64, "n_eval": 8, "prompt": "{question}=",
                "warmup_steps": 0, "lr": 0.1, "tokens_per_microbatch": 10**6,
                "reward_truncated": True, "vllm_sleep": False, "offload": False}
    vars(cfg).update(defaults | changes)
    return cfg


@functools.cache
def tokenizer_with(chat_template):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def make_task(rows, held_out=(), stop_ids=(256,), chat_template=CHAT, **changes):
    """A task of these rows, by way of JSONL files"""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder, "train.jsonl"), rows)
        write_rows(Path(folder, "test.jsonl"), held_out or [{"prompt": "held out"}])
        task = starter.Task(settings_of(task=folder, **changes))
    task.encode(tokenizer_with(chat_template), list(stop_ids))
    return task


@pytest.fixture(scope="session")
def save_folder(tmp_path_factory):
    """-> function that writes a model folder with random weights and tiny's tokenizer"""
    def save(kind="qwen3", chat_template=CHAT, **changes):
        folder = tmp_path_factory.mktemp(kind)
        tokenizer_with(chat_template).save_pretrained(folder)
        make_policy(kind, **changes).model.save_pretrained(folder)
        return folder
    return save


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question_rows(numbers):
    return [{"prompt": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in numbers]


def letters(text, problem):
    """A reward that differs among the responses of a group"""
    return zlib.crc32(text.encode()) % 7 / 7


def make_state(**changes):
    return SimpleNamespace(**{
        "step": 1, "next_problem": 0, "skipped": 0, "skips_in_a_row": 0, "lr_factor": 1.0,
        "best_reward": 0.0, "first_gap": 0.0, "kl_factor": 1.0, "kl_smooth": 0.0,
        "kl_was_high": False, "ref_step": 0} | changes)


# ---- 1. Task: rows, prompts, answers, reward -----------------------------------------------------

HONEST = "<answer>22</answer>"
PROBLEM = {"numbers": [3, 5, 7], "target": 22, "operations": "+-*/"}  # of Countdown


@pytest.mark.parametrize("text, reward", [
    (HONEST, 1.0), (HONEST + " and much more", 1.0), (HONEST * 50, 1.0), (HONEST + "<think>", 1.0),
    (f"<answer>{HONEST}</answer>", 1.0), (f"<answer>23{HONEST}", 1.0), (r"\boxed{22}", 1.0),
    (HONEST + "<answer>23</answer>", 0.1), (HONEST * 9 + "<answer></answer>", 0.1),
    ("<answer>22 23</answer>", 0.1), ("<answer>22=22</answer>", 0.1),
    ("<answer>__import__('os')</answer>", 0.1), ("#### 23", 0.1),
    (f"<think>{HONEST}</think>", 0.0), (f"<think>{HONEST}", 0.0), (f"{HONEST}</think> so", 0.0),
    (f"<think>a</think><think>{HONEST}", 0.0), ("22", 0.0), ("<answer>22", 0.0),
    ("22</answer>", 0.0), ("", 0.0), ("<answer>" * 99, 0.0)])
def test_no_text_earns_more_than_an_honest_answer(text, reward):
    assert starter.reward_fn(text, {"answer": "22"}) == reward


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
    "#### 1" + "." * 40_000 + "x", "9" * 60_000, "{" * 60_000, "," * 60_000, "1," * 20_000,
    "\\boxed{" * 15_000, "\\boxed{{" * 15_000, "\\boxed{" + "{x}" * 15_000, "####" * 15_000,
    "#### " * 15_000, "<answer>" * 15_000, "</answer>" * 15_000, "<answer>" + "<" * 60_000,
    " " * 60_000, "$" * 60_000, "1/" + "0" * 60_000, "\\frac{" * 15_000, "\\left" * 15_000,
    "\0\ud800\u202e", "<think>" * 15_000], ids=range(20))
def test_rewards_take_linear_time_whatever_the_text(text):
    start = time.thread_time()
    for form in ("{}", "<answer>{}</answer>", r"\boxed{{{}}}", "{}x"):
        assert starter.reward_fn(form.format(text), {"answer": "5"}) in (0.0, 0.1)
        assert countdown.reward_fn(form.format(text), PROBLEM) in (0.0, 0.1)
    assert time.thread_time() - start < 2, "seconds of this thread; some 0.1 on a slow machine"


def split(path, rows, **changes):
    """-> rows to train on, held-out rows"""
    return starter.read_task(settings_of(task=str(write_rows(path, rows)), **changes))


def names(rows):
    return [(row["prompt"][-1]["content"], row.get("answer")) for row in rows]


def test_jsonl_rows_get_prompts_from_the_template_and_keep_their_answers(tmp_path):
    chat = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "8?"}]
    rows = [{"question": "2+3", "answer": 5}, {"prompt": "7?", "answer": "so\n#### 7"},
            {"prompt": chat, "answer": 8.5, "source": "book"}, {"prompt": "Write a poem."}]
    got, held_out = split(tmp_path / "task.jsonl", rows, eval_every=0)
    assert names(got) == [("2+3=", 5), ("7?", "7"), ("8?", 8.5), ("Write a poem.", None)]
    assert got[0]["prompt"] == [{"role": "user", "content": "2+3="}] and got[2]["prompt"] == chat
    assert got[2]["source"] == "book" and held_out == [], "no fifth of four rows"
    rows = [{"question": "2+3"}, {"question": "4"}]
    boxed, _ = split(tmp_path / "boxed.jsonl", rows, eval_every=0, prompt=r"{question} in \boxed{}")
    assert names(boxed) == [(r"2+3 in \boxed{}", None), (r"4 in \boxed{}", None)]


def test_jsonl_files_may_begin_with_a_byte_order_mark_and_are_utf_8(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text('\ufeff{"question": "ü", "answer": "1"}\n', encoding="utf-8")
    rows, _ = starter.read_task(settings_of(task=str(path), eval_every=0))
    assert names(rows) == [("ü=", "1")]


def test_blank_lines_of_a_jsonl_file_are_skipped(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text('\n{"question": "2+3", "answer": 5}\n\n  \n{"question": "4"}\n\n')
    rows, _ = starter.read_task(settings_of(task=str(path), eval_every=0))
    assert names(rows) == [("2+3=", 5), ("4=", None)]


GOOD = '{"prompt": "2+3?", "answer": "5"}\n' * 2
BAD_FILES = [
    (None, "no task .*task.jsonl here"), (GOOD + "{'prompt': 1}", "row 3"),
    ("prompt,answer\n2+3?,5\n", "row 1: JSONDecodeError"), (GOOD + "[1, 2]\n", "row 3"),
    ("null", "row 1"), ('{"input": "2+3", "answer": "5"}', "row 1: KeyError 'question'"),
    ('{"prompt": 5, "answer": "5"}', "row 1"), ('{"prompt": ["x"], "answer": "5"}', "row 1"),
    (GOOD + '{"prompt": "2?", "answer": null}', "row 3: ValueError the answer is null"),
    ('{"prompt": [{"role": "user"}], "answer": "5"}', "KeyError 'content'"),
    ('{"prompt": [{"role": "user", "content": [{"type": "text", "text": "5?"}]}]}',
     "row 1: TypeError .*prompt is a text or a list of messages"),
    (GOOD.encode() + b'{"prompt": "caf\xe9"}' * 999, "task.jsonl, row 1: UnicodeDecodeError")]


@pytest.mark.parametrize("content, words", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_jsonl_file_is_one_line_that_names_the_row(tmp_path, content, words):
    path = tmp_path / "task.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        starter.Task(settings_of(task=str(path)))
    assert re.search(words, str(error.value)) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300, "it is cut"


def test_a_dataset_of_the_hub_is_no_task_and_the_error_says_what_to_do():
    with pytest.raises(UserError, match=r"no task openai/gsm8k .*load_dataset\(NAME"):
        starter.Task(settings_of(task="openai/gsm8k"))


def test_the_same_fifth_is_held_out_whatever_the_settings_and_the_order(tmp_path):
    rows = question_rows(range(40))
    path = tmp_path / "task.jsonl"
    training, held_out = map(names, split(path, rows))
    assert len(training) == 32 and len(held_out) == 8 and not set(training) & set(held_out)
    for changes in ({"n_eval": 3}, {"n_eval": 1000}, {"seed": 7}, {"eval_every": 0}):
        assert [*map(names, split(path, rows, **changes))] == [training, held_out]
    for changed in (rows[::-1], rows * 5):  # copies are one problem
        again = split(path, changed)
        assert names(again[1]) == held_out and set(names(again[0])) == set(training)


def test_at_most_1000_rows_are_held_out_and_the_first_n_eval_are_evaluated(tmp_path):
    path = write_rows(tmp_path / "task.jsonl", question_rows(range(5500)))
    task = starter.Task(settings_of(task=str(path), n_eval=3))
    assert (len(task.train_rows), len(task.held_out_rows)) == (4500, 1000)
    del task.train_rows[9:]
    task.encode(tokenizer_with(CHAT), [256])
    assert names(task.held_out) == names(task.held_out_rows[:3])


def test_games_with_the_same_prompt_are_different_rows(tmp_path):
    games = [{"prompt": "Guess my number.", "answer": str(i)} for i in range(20)]
    training, held_out = map(names, split(tmp_path / "task.jsonl", games))
    assert len(training) == 16 and len(held_out) == 4 and not set(training) & set(held_out)


def test_rows_of_eval_task_are_held_out_and_never_trained_on(tmp_path):
    """Also those that n_eval leaves out, because sample.py may measure them."""
    other = write_rows(tmp_path / "other.jsonl", question_rows(range(15, 25)))
    path = tmp_path / "task.jsonl"
    training, held_out = split(path, question_rows(range(20)), eval_task=str(other), n_eval=3)
    assert len(held_out) == 10 and names(training) == names(starter.complete_rows(
        "", question_rows(range(15)), ""))


@pytest.mark.parametrize("value, first", [("(rows[:9], rows[9:])", 9), ("rows", 0)])
def test_eval_task_may_be_a_task_file(tmp_path, value, first):
    """Its held-out rows are taken; all of its rows if it has no others."""
    file = tmp_path / "other.py"
    file.write_text("rows = [{'prompt': f'{i}?', 'answer': i} for i in range(12)]\n"
                    f"rows = (lambda value: lambda: value)({value})\n")
    _, held_out = split(tmp_path / "task.jsonl", question_rows(range(9)), eval_task=str(file))
    assert names(held_out) == [(f"{i}?", i) for i in range(first, 12)]


@pytest.mark.parametrize("n_rows, n_eval_rows", [(0, None), (4, None), (3, 3), (3, 0)])
def test_too_few_rows_are_an_error_that_says_what_to_do(tmp_path, capsys, n_rows, n_eval_rows):
    """A fifth of four rows is none; all rows may be held out by eval_task; which may be empty."""
    other = ""
    if n_eval_rows is not None:
        other = str(write_rows(tmp_path / "other.jsonl", question_rows(range(n_eval_rows))))
    words = "^too few rows .*: give more, --eval_task or --eval_every=0$"
    with pytest.raises(UserError, match=words):
        split(tmp_path / "task.jsonl", question_rows(range(n_rows)), eval_task=other)
    n_left = 0 if n_eval_rows == 3 else n_rows
    counts = f"task.jsonl: {n_left} rows to train on, {n_eval_rows or 0} held out\n"
    assert counts in capsys.readouterr().out


def test_one_row_is_enough_without_evaluations(tmp_path):
    training, held_out = split(tmp_path / "task.jsonl", question_rows([3]), eval_every=0)
    assert (names(training), held_out) == ([("3+3=", "6")], [])


TASK_FILE = """
from starter import final_answer

def rows():
    for i in range(10):
        yield {"question": i, "answer": i}
"""


def test_a_task_file_needs_rows_only(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(TASK_FILE)
    task = starter.Task(settings_of(task=str(file)))
    assert task.reward_fn is starter.reward_fn and task.reply is None and task.turn_ends == ()
    assert (len(task.train_rows), len(task.held_out_rows)) == (8, 2)
    assert starter.load_task_file(str(file)).final_answer is starter.final_answer


@pytest.mark.parametrize("turn_ends, wanted", [
    ("'</calc>'", ("</calc>",)), ("['</a>', '</b>']", ("</a>", "</b>"))])
def test_a_task_file_brings_its_own_reward_reply_and_turn_ends(tmp_path, turn_ends, wanted):
    file = tmp_path / "full.py"
    file.write_text(TASK_FILE + f"TURN_ENDS = {turn_ends}\n"
                    "def reward_fn(text, row):\n    return 0.5\n"
                    "def reply(problem, text):\n    return 'go on'\n")
    task = starter.Task(settings_of(task=str(file)))
    assert task.turn_ends == wanted
    assert (task.reward_fn("", {}), task.reply({}, "")) == (0.5, "go on")
    assert starter.reward_fn("", {"answer": "1"}) == 0.0, "that of starter.py stays"


@pytest.mark.parametrize("text, words", [
    ("def rows():\n    return [{'answer': 5}]", "row 1: KeyError 'question'"),
    ("def rows():\n    yield {'prompt': 'a'}\n    1 / 0", "row 2: ZeroDivisionError")])
def test_a_broken_task_file_is_one_line(tmp_path, text, words):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        starter.Task(settings_of(task=str(file)))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, numbers, value", [
    (" 7 + (3 * 5) ", [3, 5, 7], 22), ("8/3", [3, 8], Fraction(8, 3)), ("-3+5", [3, 5], 2),
    ("\n3 + 4\n", [3, 4], 7),
    ("3/(8/8-1)", [3, 8, 8, 1], None), ("2**3", [2, 3], None), ("2//3", [2, 3], None),
    ("3+5", [3, 5, 5], None), ("3+5+5", [3, 5], None), ("35", [3, 5], None), ("3 5", [3, 5], None),
    ("3+x", [3], None), ("3+5#", [3, 5], None), ("(3+5", [3, 5], None), ("", [], None),
    ("()", [], None), ("9**9**9", [9, 9, 9], None), ("(" * 150, [], None), ("1" * 201, [1], None),
    ("٣+5", [3, 5], None), ("3\n+5", [3, 5], None), ("1_0+5", [10, 5], None)])
def test_expressions_of_countdown_are_exact_and_use_each_number_once(text, numbers, value):
    assert countdown.evaluate_expression(text, numbers) == value


@pytest.mark.parametrize("text, reward", [
    ("<answer>3*5+7</answer>", 1.0), (r"\boxed{3*5+7}", 1.0), ("<answer>3*5+7</answer> and", 1.0),
    ("<answer>3+5+7</answer>", 0.1), ("<answer>3+5+7 3*5+7</answer>", 0.1),
    ("<answer>3*5+7=22</answer>", 0.1), ("<ans<answer>wer>3*5+7</answer>", 0.1),
    ("<answer>22</answer>", 0.1), ("#### 22", 0.1), ("<answer>__import__('os')</answer>", 0.1),
    ("<answer>" + "1/" * 9000 + "</answer>", 0.1), ("<think><answer>3*5+7</answer>", 0.0),
    ("3*5+7", 0.0), ("", 0.0)], ids=range(14))
def test_no_text_earns_more_in_countdown_than_a_solution(text, reward):
    assert countdown.reward_fn(text, PROBLEM) == reward
    fewer = countdown.reward_fn(text, PROBLEM | {"operations": "+-"})
    assert fewer == min(reward, 0.1), "the problem says which operations may be used"


def test_every_epoch_has_all_problems_in_another_order():
    def prompts(task, first, n_steps):
        steps = [task.problems(first + 6 * i) for i in range(n_steps)]  # 6 per step
        return [problem["rendered"] for problem in sum(steps, [])]

    task = make_task(question_rows(range(24)))
    epochs = [prompts(task, 24 * epoch, 4) for epoch in range(3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert prompts(make_task(question_rows(range(24)), seed=2), 0, 4) != epochs[0]
    assert prompts(task, 21, 1) == epochs[0][21:] + epochs[1][:3], "a step may cross an epoch"
    numbers = [problem["problem_number"] for problem in task.problems(21)]
    assert numbers == list(range(21, 27)), "numbers of a run, for the seeds"


def test_long_prompts_are_left_out_and_counted(capsys):
    rows = [*question_rows(range(20)), {"prompt": "x" * 100, "answer": "1"}]
    assert len(make_task(rows).training) == 20
    length = len("<user><|end|><assistant>") + 100 - len("<|end|>") + 1  # a token per letter
    assert "1 of 21 prompts" in capsys.readouterr().out
    assert len(make_task(rows, max_prompt_tokens=length).training) == 21
    assert len(make_task(rows, max_prompt_tokens=length - 1).training) == 20
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


@pytest.mark.parametrize("thinking, wanted", [(True, "<think>"), (False, "<think></think>")])
def test_the_chat_template_is_told_whether_to_think(thinking, wanted):
    """In the prompt, and before each further turn of the model"""
    template = CHAT.replace("<assistant>{% endif %}", "<assistant>{% if enable_thinking %}<think>"
                            "{% else %}<think></think>{% endif %}{% endif %}")
    task = make_task([{"prompt": "2?"}], chat_template=template, thinking=thinking, max_tokens=90)
    assert task.training[0]["rendered"] == f"<user>2?<|end|><assistant>{wanted}"
    task.reply = lambda problem, text: "go on"
    response = Response({"prompt_ids": [5]})
    starter.play_turn(response, [65, 256], [0.0, 0.0], task, False)
    text = task.tokenizer.decode(response.ids)
    assert text == f"A<|end|><user>go on<|end|><assistant>{wanted}"


@pytest.mark.parametrize("said", ["no", "", "MODELS_TURN", "?MODELS_TURN<|end|>MODELS_TURN"])
def test_a_reply_may_be_any_text(said):
    rendered = starter.render_reply(said, tokenizer_with(CHAT))
    assert rendered == f"<|end|><user>{said}<|end|><assistant>"


def test_a_chat_template_that_hides_earlier_turns_is_one_clear_error():
    """It matters only if there are turns of a chat."""
    assert played("CD", (65, 66), chat_template=tiny.ONE_TURN).mask == [True, True, False, False]
    with pytest.raises(UserError, match="a chat template that shows earlier turns"):
        played("CD", (65, 256), chat_template=tiny.ONE_TURN)


@pytest.mark.parametrize("vocabulary, stop_ids", [(300, [256, 260]), (260, [256])])
def test_the_token_that_closes_a_turn_is_a_stop_id(save_folder, vocabulary, stop_ids):
    """As in Qwen2.5, where <|im_end|> closes turns and <|endoftext|> is the end of a text"""
    folder = save_folder(chat_template=CHAT.replace("<|end|>", "<|im_end|>"), vocab_size=vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    policy, tokenizer = starter.init_policy(str(folder))
    assert tokenizer.eos_token_id == 256 and tokenizer.convert_tokens_to_ids("<|im_end|>") == 260
    assert policy.stop_ids == stop_ids, "without those that the model does not have"
    policy.model.generation_config.eos_token_id = [7, 999]
    assert starter.find_stop_ids(policy.model, tokenizer) == [7, *stop_ids]


# ---- 2. Advantages, batch, loss, KL, update ------------------------------------------------------

# ---- The plainest GRPO step: read this first

def plain_grpo_step(model, ref_model, optimizer, responses, minibatches, cfg):
    """One step of GRPO with a KL penalty, without anything that makes it fast: one response after
    another, the logits of the whole vocabulary, and every gradient left to autograd.

    A response is better than others if its reward is above the mean of its group, which are the
    responses to the same prompt. This difference, divided by the group's standard deviation, is its
    advantage. A loss of -advantage * log-prob makes better responses more likely and worse ones
    less likely; plain_loss() is that loss, made safe for several updates in a row.

    model: of transformers; ref_model: the model before training; responses: with prompt_ids, ids,
    mask (False: a token that the model did not choose), log_probs (of the sampler) and reward;
    minibatches: lists of numbers of responses. starter.py computes the same weights."""
    rewards = torch.tensor([response.reward for response in responses], dtype=torch.float64)
    groups = rewards.view(-1, cfg.group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if cfg.advantage_scale == "std":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
    elif cfg.advantage_scale == "mean":  # MaxRL; of rewards that are not negative
        advantages = advantages / groups.mean(1, keepdim=True)
    advantages = advantages.flatten().tolist()
    # The old policy is the model before the first update of this step.
    with torch.no_grad():
        old_log_probs = [of_tokens(all_log_probs(model, response, cfg), response.ids)
                         for response in responses]
    for rows in minibatches:
        optimizer.zero_grad()
        loss = plain_loss(
            model, ref_model, [responses[row] for row in rows], [advantages[row] for row in rows],
            [old_log_probs[row] for row in rows], cfg)
        loss.backward()
        optimizer.step()


def plain_loss(model, ref_model, responses, advantages, old_log_probs, cfg):
    """The policy's loss + kl_coef * KL(model || reference) of one minibatch"""
    losses, lengths = [], []
    for response, advantage, old in zip(responses, advantages, old_log_probs):
        mask = torch.tensor(response.mask)  # [T]
        vocabulary = all_log_probs(model, response, cfg)  # [T, V]
        log_pi = of_tokens(vocabulary, response.ids)  # [T]
        loss = -plain_gain(log_pi, old, mask, advantage, cfg)
        exact_kl = 0.0
        if cfg.kl_coef:
            with torch.no_grad():
                ref_vocabulary = all_log_probs(ref_model, response, cfg)
            if cfg.kl_estimator == "exact":
                exact_kl = (vocabulary.exp() * (vocabulary - ref_vocabulary)).sum(-1)
            else:
                log_ref = of_tokens(ref_vocabulary, response.ids)
                loss = loss + cfg.kl_coef * plain_kl(log_pi, log_ref, old, mask, cfg)
        # The sampler drew the tokens, from probabilities that differ a little from the old ones.
        loss = loss * (old - torch.tensor(response.log_probs)).exp().clamp(max=2)
        # The exact KL is not an estimate from the token that was sampled.
        loss = loss + cfg.kl_coef * exact_kl
        losses.append(loss[mask].sum())
        lengths.append(int(mask.sum()))
    if cfg.loss_type == "grpo":  # the mean over responses of the mean over tokens
        return sum(loss / length for loss, length in zip(losses, lengths)) / len(losses)
    if cfg.loss_type == "dapo":  # the mean over tokens
        return sum(losses) / sum(lengths)
    # dr_grpo: the sum over tokens, divided by a number that does not depend on their lengths
    return sum(losses) / (len(losses) * cfg.max_tokens)


def plain_gain(log_pi, old, mask, advantage, cfg):
    """-> what the tokens of a response gain, [T], as in the papers. log_pi, old: log-probs [T]"""
    ratio = (log_pi - old).exp()
    low, high = cfg.clip_range, cfg.clip_range_high or cfg.clip_range
    if cfg.policy_loss == "cispo":
        # 2506.13585: REINFORCE, where the weight of a token is a number, and not too large
        return ratio.detach().clamp(max=1 + high) * advantage * log_pi
    if cfg.policy_loss == "dppo":
        # 2602.04879: a token has no gradient if its probability has changed by more than the limit
        # and would change further.
        change = (log_pi.exp() - old.exp()).detach()
        has_gone_far = change > high if advantage > 0 else change < -low
        return torch.where(has_gone_far, 0.0, ratio * advantage)
    if cfg.policy_loss == "gspo":
        # 2507.18071: the ratio of the response, to the power of 1 / length, takes the place of that
        # of each token. (Its gradient is the mean of theirs, so each token has its own.)
        mean_ratio = (log_pi - old)[mask].mean().exp()
        ratio = mean_ratio.detach() * ratio / ratio.detach()
    # PPO: a ratio that has left 1 +- clip_range in the direction of the advantage has gone far
    # enough. It has no gradient.
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def plain_kl(log_pi, log_ref, old, mask, cfg):
    """-> estimates of KL(model || reference), [T], from the log-probs of a response's tokens"""
    difference = log_pi - log_ref
    estimate = {"k1": difference, "k2": difference**2 / 2,
                "k3": (-difference).exp() - 1 + difference}[cfg.kl_estimator]
    # The tokens came from the old policy. Weighted by model/old, the mean of k1 and of k3 is the KL
    # of the model as it is now, and with the derivative of the weight the mean gradient is that of
    # the KL. The gradient of k2 alone already is, so its weight is a number.
    ratio = (log_pi - old).exp()
    if cfg.kl_in == "reward":
        # The KL of the whole response: the difference at a token counts by the ratio of the
        # response up to there. Each token, for which REINFORCE is used, pays for all that follow.
        cost = torch.where(mask, difference, 0.0)
        weight = torch.where(mask, ratio, 1.0).cumprod(0).clamp(max=10)
        payment = (weight * cost).detach().flip(0).cumsum(0).flip(0)
        return payment * (1 + log_pi - log_pi.detach())
    if not cfg.kl_importance_weight:
        return estimate
    return (ratio.detach() if cfg.kl_estimator == "k2" else ratio) * estimate


def all_log_probs(model, response, cfg):
    """-> log-probs of the whole vocabulary in place of each token of a response [T, V]"""
    row = torch.tensor([response.prompt_ids + response.ids])
    logits = model(row).logits[0] / cfg.temperature
    first = len(response.prompt_ids) - 1  # the last token of the prompt predicts the first one
    return logits[first:-1].log_softmax(-1)


def of_tokens(values, ids):
    """-> the entries of these tokens: [T, V] -> [T]"""
    return values.gather(1, torch.tensor(ids)[:, None])[:, 0]


# ---- starter.py against the plainest step

POLICY_LOSSES = ("ppo", "cispo", "dppo", "gspo")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo")
PENALTIES = [("k1", True, "loss"), ("k2", True, "loss"), ("k3", True, "loss"),
             ("exact", True, "loss"), ("k1", False, "loss"), ("k2", False, "loss"),
             ("k3", False, "loss"), ("k1", True, "reward"), (None, True, "loss")]


# How far a ratio may go down and up. DPPO's limits are of probabilities, which are small here.
CLIP_RANGES = {"ppo": (0.1, 0.15), "cispo": (0.1, 0.15), "dppo": (1e-3, 2e-3), "gspo": (0.02, 0.4)}
# Every KL term with PPO's clip, some with the other policy losses
LOSSES = [("ppo", penalty) for penalty in PENALTIES] + [
    (name, penalty) for name in ("cispo", "dppo", "gspo") for penalty in (
        ("k3", True, "loss"), ("k1", True, "reward"), (None, True, "loss"))]


def penalty_settings(estimator=None, is_weighted=True, kl_in="loss", policy_loss="ppo", **changes):
    low, high = CLIP_RANGES[policy_loss]
    return settings_of(
        kl_coef=0.3 if estimator else 0.0, kl_estimator=estimator or "k3", kl_in=kl_in,
        kl_importance_weight=is_weighted, policy_loss=policy_loss, temperature=0.8, clip_range=low,
        clip_range_high=high, group_size=3, **changes)


def make_groups_with_rewards(policy):
    """-> 2 groups of 3 responses, one with equal rewards. The sampler differs from the policy, for
    some tokens by more than a factor of 2. Two responses have tokens that are not the model's."""
    responses = make_group_responses((5, 1, 9, 2, 6, 3), 2)
    rewards = 1.0, 0.0, 0.1, 0.1, 0.1, 0.1
    responses[2].mask[3] = responses[4].mask[4] = False
    model = eager_copy(policy)
    generator = torch.Generator().manual_seed(1)
    for response, reward in zip(responses, rewards):
        with torch.no_grad():
            log_probs = of_tokens(all_log_probs(model, response, penalty_settings()), response.ids)
        noise = torch.randn(log_probs.shape, generator=generator)
        # Multiples of 1/64 are exact in float32, too.
        response.log_probs = (torch.round(64 * (log_probs + 0.5 * noise)) / 64).tolist()
        response.reward = reward
    return responses


@functools.cache
def doubles():
    """-> policy, reference, their plain copies, and responses, all in float64. GPT-2 is one of the
    models that never use float32."""
    policy = make_policy("gpt2", scale=0.2, num_hidden_layers=1).double()
    reference = reference_near(policy)
    plain = [eager_copy(one) for one in (policy, reference)]
    return policy, reference, *plain, make_groups_with_rewards(policy)


def step_in_halves(cfg, advantages, old):
    """-> (loss, shares of blocked tokens) of starter.py for the responses of doubles(), of which
    two have equal rewards. The gradient is then that of the policy."""
    policy, reference, _, _, responses = doubles()
    batch = starter.make_batch(responses)
    policy.zero_grad()
    loss, blocked = 0.0, []
    for rows in ([0, 1, 2, 3], [4, 5]):
        part, metadata = starter.grpo_microbatch_step(
            policy, *(x[rows] for x in rows_in(batch)), advantages[rows], clip_range=cfg.clip_range,
            clip_range_high=cfg.clip_range_high, loss_type=cfg.loss_type, ref_model=reference,
            policy_loss=cfg.policy_loss, old_log_probs=None if old is None else old[rows],
            kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator, kl_in=cfg.kl_in,
            kl_importance_weight=cfg.kl_importance_weight, temperature=cfg.temperature,
            divisor=starter.loss_divisor(batch.response_mask, cfg.loss_type, cfg.max_tokens),
            rollout_log_probs=batch.rollout_log_probs[rows])
        loss += part.item()
        blocked.append(metadata["clip_fraction"])
    return loss, blocked


# Off-policy with every loss type, on-policy with one
CASES = [(*loss, loss_type, True) for loss in LOSSES for loss_type in LOSS_TYPES]
CASES += [(*loss, LOSS_TYPES[number % 3], False) for number, loss in enumerate(LOSSES)]


@pytest.mark.parametrize("policy_loss, penalty, loss_type, is_off_policy", CASES, ids=str)
def test_the_gradient_is_that_of_the_plainest_step(policy_loss, penalty, loss_type, is_off_policy):
    """Off-policy (after an update) policy, old policy, sampler and reference differ. In float64"""
    cfg = penalty_settings(*penalty, policy_loss=policy_loss, loss_type=loss_type)
    policy, _, model, ref_model, responses = doubles()
    generator = torch.Generator().manual_seed(0)
    old = log_probs_of(policy, starter.make_batch(responses), 0.8).detach()
    old += is_off_policy * 0.3 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    olds = [row[len(r.prompt_ids) - 1:][:len(r.ids)] for row, r in zip(old, responses)]
    model.zero_grad()
    wanted = plain_loss(model, ref_model, responses, advantages, olds, cfg)
    wanted.backward()
    loss, blocked = step_in_halves(cfg, advantages, old if is_off_policy else None)
    assert loss == pytest.approx(wanted.item(), rel=1e-9)
    assert relative(gradient(policy), gradient(model)) < 1e-9
    assert 0 < blocked[0] < 1 if is_off_policy else blocked == [0, 0]


def test_without_an_earlier_update_every_policy_loss_has_the_gradient_of_ppo():
    advantages = torch.linspace(-1, 1, 6, dtype=torch.float64)
    gradients = []
    for policy_loss in POLICY_LOSSES:
        cfg = penalty_settings("k3", policy_loss=policy_loss, loss_type="grpo")
        step_in_halves(cfg, advantages, None)
        gradients.append(gradient(doubles()[0]))
    assert all(relative(other, gradients[0]) < 1e-12 for other in gradients[1:])


def all_weights(module):
    """-> all weights in one vector"""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def train_on(policy, reference, responses, cfg, monkeypatch, folder):
    """Call train() with these responses instead of sampled ones in every step."""
    monkeypatch.setattr(starter, "rollout_with_vllm", lambda *arguments: responses)
    for name in ("grade", "catch_signals", "check_agreement", "log_train", "save_model"):
        monkeypatch.setattr(starter, name, lambda *arguments: [])
    cfg.rollout_batch_size, cfg.eval_every, cfg.save_every = len(responses), 0, 0
    rows = []
    log = SimpleNamespace(folder=folder, write=lambda step, metrics: rows.append(metrics))
    starter.train(policy, starter.TorchSampler(policy), cfg, log, reference, cfg.kl_coef,
                  task=make_task(question_rows(range(9))))
    return rows[1:]


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[f"{loss}" for loss in LOSSES])
def test_train_takes_the_plainest_steps(number, monkeypatch, tmp_path):
    """Two steps of two minibatches with AdamW, and a KL warm-up. All responses are trained in step
    1; later those of equal rewards only if there is a KL penalty."""
    policy_loss, penalty = LOSSES[number]
    cfg = penalty_settings(
        *penalty, policy_loss=policy_loss, loss_type=LOSS_TYPES[number % 3], n_minibatches=2,
        advantage_scale=("std", "none", "mean")[number // 3 % 3], n_grpo_steps=2, lr=2e-3,
        max_grad_norm=0.0, kl_warmup_steps=2, tokens_per_microbatch=24)
    policy = make_policy(scale=0.2, num_hidden_layers=1)
    reference = reference_near(policy) if cfg.kl_coef else None
    responses = make_groups_with_rewards(policy)
    model, start = eager_copy(policy).double(), all_weights(policy)
    ref_model = reference and eager_copy(reference).double()
    rows = train_on(policy, reference, responses, cfg, monkeypatch, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, (0.9, 0.95), weight_decay=0.0)
    for step in (1, 2):
        plain = copy.copy(cfg)
        plain.kl_coef = cfg.kl_coef * step / 2
        minibatches = starter.make_minibatches(cfg, step, 6)
        plain_grpo_step(model, ref_model, optimizer, responses, minibatches, plain)
    moved = all_weights(policy) - start
    assert relative(moved, all_weights(model) - start) < 2e-3
    assert [row["train/kl_coef"] for row in rows] == pytest.approx([cfg.kl_coef / 2, cfg.kl_coef])


def test_train_adapts_the_coefficient_and_refreshes_the_reference(monkeypatch, tmp_path):
    """The KL is above its target in step 1; after step 2 the reference is the policy."""
    cfg = penalty_settings("k3", n_grpo_steps=3, lr=3e-3, target_kl=1e-3, ref_update_every=2)
    policy = make_policy(scale=0.2, num_hidden_layers=1)
    responses = make_groups_with_rewards(policy)
    reference = reference_near(policy)
    rows = train_on(policy, reference, responses, cfg, monkeypatch, tmp_path)
    coefficients = [row["train/kl_coef"] for row in rows]
    assert coefficients == pytest.approx([0.3, 0.3 * 1.5, 0.3 * 1.5**2])
    assert rows[1]["kl/mean"] > 1e-3 and 0.0 <= rows[2]["kl/mean"] < 1e-6


def test_train_holds_the_coefficient_if_the_kl_is_not_a_number(monkeypatch, tmp_path):
    step_metrics = starter.step_metrics
    monkeypatch.setattr(starter, "step_metrics", lambda *arguments: step_metrics(*arguments) | {
        "kl/mean": math.nan})
    cfg = penalty_settings("k3", n_grpo_steps=3, target_kl=1e-3)
    policy = make_policy(scale=0.2, num_hidden_layers=1)
    rows = train_on(policy, reference_near(policy), make_groups_with_rewards(policy), cfg,
                    monkeypatch, tmp_path)
    assert [row["train/kl_coef"] for row in rows] == [0.3, 0.3, 0.3]


def test_the_published_numbers_are_those_of_the_plainest_loss():
    numbers = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    log_pi = (torch.sin(numbers) - 1.5).requires_grad_()
    old, log_ref, sampled = (torch.sin(angle) - 1.5
                             for angle in (numbers + 0.3, 2 * numbers, numbers + 0.4))
    mask = numbers % 5 < 4
    losses = []
    for name in POLICY_LOSSES:
        cfg = settings_of(policy_loss=name)
        loss = 0.0
        for b, advantage in enumerate((1.0, -1.0, 0.5)):
            row = 0.3 * plain_kl(log_pi[b], log_ref[b], old[b], mask[b], cfg)
            row = row - plain_gain(log_pi[b], old[b], mask[b], advantage, cfg)
            loss += (row * (old[b] - sampled[b]).exp())[mask[b]].sum()
        losses.append(loss)
    sum(losses).backward()
    wanted = [number.item() for number in (*losses, log_pi.grad.norm())]
    assert starter.test_functions() and starter.PUBLISHED == pytest.approx(wanted, abs=1e-4)


# ---- Advantages, rows, minibatches, microbatches

def test_advantages_by_hand():
    rewards = torch.tensor([1, 0, 0, 1, 0.1, 0.1, 0.1, 0.1, 3, 1, 1, 1])
    half, three = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.0 + 1e-6
    wanted = [half, -half, -half, half, 0, 0, 0, 0, 1.5 / three, -0.5 / three, -0.5 / three,
              -0.5 / three]
    advantages = starter.group_advantages(rewards, 4, True)
    assert torch.allclose(advantages, torch.tensor(wanted), atol=1e-6)
    plain = starter.group_advantages(rewards, 4, False)
    assert plain[:4].tolist() == [0.5, -0.5, -0.5, 0.5] and plain[8] == 1.5
    assert starter.group_advantages(torch.tensor([]), 4, True).shape == (0,), "a rank without rows"


def test_advantages_divided_by_the_mean_by_hand():
    """MaxRL. With negative rewards the divisor is the mean of absolute values, so that a reward
    above the mean always has an advantage above 0."""
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, -1, -3, -1, -3, 2, -2, 0, 0, 4, 0, 0, 0])
    wanted = [1.0, -1, -1, 1, 0, 0, 0, 0, 0.5, -0.5, 0.5, -0.5, 2, -2, 0, 0, 3, -1, -1, -1]
    assert starter.group_advantages(rewards, 4, "mean").tolist() == wanted


def test_names_of_advantage_scales():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.4])
    for name, flag in (("std", True), ("none", False)):
        by_name, by_flag = (starter.group_advantages(rewards, 4, x) for x in (name, flag))
        assert torch.equal(by_name, by_flag)
    with pytest.raises(KeyError, match="median"):
        starter.group_advantages(rewards, 4, "median")


def test_advantages_that_are_not_divided_are_leave_one_out_up_to_a_factor():
    """RLOO's baseline is the mean of the other responses."""
    advantages = starter.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.4]), 4, "none")
    wanted = [1 - 0.4 / 3, -1.4 / 3, -1.4 / 3, 0.4 - 1 / 3]
    assert (advantages * 4 / 3).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("size", range(2, 12))
def test_equal_rewards_give_advantages_of_exactly_zero(size):
    advantages = starter.group_advantages(torch.full((size,), 0.1), size, True, 1e-12)
    assert (advantages == 0).all(), "a rounding error divided by a tiny deviation would be large"


@pytest.mark.parametrize("kl_coef, step, wanted", [
    (0.0, 1, [0, 1, 2, 3]), (0.0, 2, [0, 3]), (0.1, 1, [0, 1, 2, 3]), (0.1, 2, [0, 1, 2, 3])])
def test_rows_have_a_gradient_if_they_have_an_advantage_or_a_kl_penalty(kl_coef, step, wanted):
    """And in step 1, so that check_agreement() sees every response"""
    advantages = torch.tensor([0.5, 0.0, 0.0, -0.5])
    assert starter.rows_with_a_gradient(advantages, kl_coef, step) == wanted
    flat = torch.zeros(4)
    assert starter.rows_with_a_gradient(flat, kl_coef, step) == (wanted if len(wanted) == 4 else [])
    assert torch.equal(flat, torch.zeros(4)), "the advantages stay as they are"


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
    assert starter.make_minibatches(settings_of(n_minibatches=3, seed=2), 4, 24) != alone[:3]
    monkeypatch.setattr(starter, "gather", lambda n_rows: [9, 15])
    monkeypatch.setattr(starter, "RANK", 1)
    wanted = [[row - 9 for row in rows if row >= 9] for rows in alone]
    assert starter.make_minibatches(cfg, 4, 15) == wanted


@pytest.mark.parametrize("limit", [1, 30, 64, 1000])
@pytest.mark.parametrize("is_packed", [True, False])
def test_microbatches_keep_to_the_limit(limit, is_packed):
    rng = random.Random(0)
    batch = make_rows([rng.randrange(4, 50) for _ in range(40)])
    rows = sorted(rng.sample(range(40), 33))
    microbatches = starter.make_microbatches(
        batch, rows, settings_of(tokens_per_microbatch=limit), is_packed)
    assert sorted(sum(microbatches, [])) == rows and all(microbatches)
    lay_out = starter.pack if is_packed else starter.pad
    for micro in microbatches:
        inputs, *_ = lay_out(*(x[micro] for x in rows_in(batch)), CPU)
        assert inputs["input_ids"].numel() <= limit or len(micro) == 1
    n_tokens = sum(batch.lengths[row] for row in rows) if is_packed else 33 * 50
    assert len(microbatches) == 33 if limit == 1 else len(microbatches) <= 2 * n_tokens / limit + 1


def test_microbatches_count_a_shared_prompt_once():
    shared = starter.make_batch([make_response([5] * 50, [7] * 11)] * 6)
    cfg = settings_of(tokens_per_microbatch=50 + 6 * 11)
    assert starter.make_microbatches(shared, list(range(6)), cfg, True) == [[0, 1, 2, 3, 4, 5]]
    cfg.tokens_per_microbatch = 50 + 2 * 11  # each part brings the prompt
    parts = starter.make_microbatches(shared, list(range(6)), cfg, True)
    assert parts == [[0, 1], [2, 3], [4, 5]]


def test_every_rank_has_as_many_microbatches(monkeypatch):
    """All ranks run the model equally often. What a rank lacks are empty lists, each its own."""
    shared = starter.make_batch([make_response([5] * 50, [7] * 11)] * 2)
    monkeypatch.setattr(starter, "gather", lambda n: [n, n + 2])
    parts = starter.make_microbatches(shared, [0, 1], settings_of(), True)
    assert parts == [[0, 1], [], []]
    parts[1].append(7)
    assert parts == [[0, 1], [7], []]


# ---- KL

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


@functools.cache
def three_words():
    """-> log-probs of every response of 3 out of 3 words, [27, 3]: of pi, of an old policy, of a
    reference; and the logits of pi, one row for each of the 13 prefixes"""
    generator = torch.Generator().manual_seed(3)
    words = torch.cartesian_prod(*[torch.arange(3)] * 3)  # [27, 3]
    first, second, _ = words.T
    # Rows of a table: no word yet, one word (1 to 3), two words (4 to 12)
    prefixes = torch.stack([0 * first, 1 + first, 4 + 3 * first + second], 1)
    logits, shift, ref = torch.randn(3, 13, 3, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    tables = logits, (logits + 0.5 * shift).detach(), ref
    return *(table.log_softmax(-1)[prefixes, words] for table in tables), logits


@pytest.mark.parametrize("is_off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_kl_in_the_reward_has_the_gradient_of_the_sequence_kl(kl_in, is_off_policy):
    """By enumeration. The term in the loss is right given each prefix, but misses how a token
    changes later prefixes."""
    log_probs, old, ref, logits = three_words()
    old = old if is_off_policy else log_probs.detach()
    assert (log_probs - old).cumsum(1).exp().max() < starter.WEIGHT_CAP
    kl = (log_probs.sum(1).exp() * (log_probs - ref).sum(1)).sum()
    wanted, = torch.autograd.grad(kl, logits, retain_graph=True)
    loss, metadata = starter.compute_loss(
        torch.zeros(27).double(), log_probs, old, 0.2, ref, 1.0, kl_in=kl_in,
        kl_estimator="k1" if kl_in == "reward" else "k3")
    mean = (old.sum(1).exp() * loss.sum(1)).sum()
    got, = torch.autograd.grad(mean, logits, retain_graph=True)
    error = relative(got, wanted)
    assert error < 1e-9 if kl_in == "reward" else 0.02 < error < 1.0
    assert metadata["kl_mean"] > 0


def test_on_policy_kl_in_the_reward_lowers_the_advantage_of_each_token():
    """By its own k1 and those of all later tokens"""
    log_probs, _, ref, logits = three_words()
    advantages = torch.randn(27, 1, generator=torch.Generator().manual_seed(4)).double()
    loss, _ = starter.compute_loss(advantages, log_probs, None, 0.2, ref, 0.3, kl_in="reward",
                                   kl_estimator="k1")
    later = [(log_probs - ref).detach()[:, t:].sum(1) for t in range(3)]
    lowered = advantages - 0.3 * torch.stack(later, 1)
    plain, _ = starter.compute_loss(lowered, log_probs, None, 0.2)
    assert torch.allclose(loss, plain, rtol=1e-12)
    got, wanted = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0]
                   for x in (loss, plain))
    assert relative(got, wanted) < 1e-12


def test_kl_in_the_reward_is_not_clipped_and_its_weight_is_capped():
    """A token whose ratio is beyond the clip still pays. Weights: of the response up to there"""
    log_pi = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old, ref = torch.tensor([[-2.0, -1.5, -9.0], [-1.0, -1.2, -1.5]])[:, None]
    loss, _ = starter.compute_loss(torch.ones(1), log_pi, old, 0.2, ref, 1.0, kl_in="reward",
                                   kl_estimator="k1")
    costs = [0.0, 0.2 * math.exp(1.5), 0.5 * 10]
    slope, = torch.autograd.grad(loss.sum(), log_pi)
    assert slope[0].tolist() == pytest.approx([sum(costs[t:]) for t in range(3)], rel=1e-5)


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


def test_kl_divergence_alone_is_the_documented_formula():
    log_pi, log_ref = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -2.5]])
    l = log_pi - log_ref
    for estimator, wanted in {"k1": l, "k2": l**2 / 2, "k3": (-l).exp() - 1 + l}.items():
        assert torch.allclose(starter.compute_kl_divergence(log_pi, log_ref, estimator), wanted)
        weighted = starter.compute_kl_divergence(log_pi, log_ref, estimator, torch.tensor(3.0))
        assert torch.allclose(weighted, 3 * wanted)
    assert torch.equal(starter.compute_kl_divergence(log_pi, log_ref), l), "k1 is the default"
    with pytest.raises(KeyError, match="k4"):
        starter.compute_kl_divergence(log_pi, log_ref, "k4")


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


@pytest.mark.parametrize("estimator, factor", [("k1", 2), ("k2", 2), ("k3", 2), ("exact", 1)])
def test_the_exact_kl_is_not_weighted_by_the_sampler(estimator, factor):
    """It is a sum over the vocabulary. Estimates are made of a token that the sampler drew."""
    policy, ref = torch.full((1, 3), -1.0), torch.full((1, 3), -1.3)
    losses = []
    for sampled in (policy, policy - math.log(2)):  # half as likely for the sampler
        loss, metadata = starter.compute_loss(
            torch.zeros(1), policy, None, 0.2, ref, 0.5, kl_estimator=estimator,
            exact_kl=torch.full((1, 3), 0.7), rollout_log_probs=sampled)
        losses.append(loss)
    assert torch.allclose(losses[1], factor * losses[0]) and (losses[0] > 0).all()
    if estimator == "exact":
        assert losses[0].tolist() == [pytest.approx([0.5 * 0.7] * 3)]
        assert metadata["kl_mean"] == metadata["kl_max"] == pytest.approx(0.7), "it is logged, too"


# ---- Loss

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


# Old and new probabilities, and their ratios
OLD_PROBS, PROBS = [0.5, 0.5, 0.5, 0.01, 0.5], [0.1, 0.45, 0.5, 0.03, 0.9]
RATIOS = [0.2, 0.9, 1.0, 3.0, 1.8]
MEAN_RATIO = math.prod(RATIOS)**(1 / 5)  # 0.994


@pytest.mark.parametrize("policy_loss, clip, slopes_up, slopes_down", [
    ("ppo", 0.2, [0.2, 0.9, 1, None, None], [None, 0.9, 1, 3, 1.8]),
    ("dppo", 0.2, [0.2, 0.9, 1, 3, None], [None, 0.9, 1, 3, 1.8]),
    ("cispo", 0.2, [0.2, 0.9, 1, 1.2, 1.2], [0.2, 0.9, 1, 1.2, 1.2]),
    ("gspo", 0.001, [MEAN_RATIO] * 5, [None] * 5)])
def test_what_each_policy_loss_blocks_by_hand(policy_loss, clip, slopes_up, slopes_down):
    """up, down: for a positive and a negative advantage; None: blocked. CISPO counts the tokens
    whose weight it cuts, which keep their gradient."""
    for advantage, slopes in ((2.0, slopes_up), (-2.0, slopes_down)):
        log_pi = torch.tensor([PROBS], dtype=torch.float64).log().requires_grad_()
        old = torch.tensor([OLD_PROBS], dtype=torch.float64).log()
        loss, metadata = starter.compute_loss(
            torch.tensor([advantage]), log_pi, old, clip, policy_loss=policy_loss)
        slope, = torch.autograd.grad(loss.sum(), log_pi)
        assert slope[0].tolist() == pytest.approx([-advantage * (x or 0.0) for x in slopes])
        n_blocked = slopes.count(1.2 if policy_loss == "cispo" else None)
        assert metadata["clip_fraction"] == n_blocked / 5


def test_dppo_may_have_a_higher_limit_above():
    """Without an advantage there is nothing to block."""
    log_pi, old = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    for advantage, blocked in ((1.0, [0.0, 0.5]), (-1.0, [0.5, 0.5]), (0.0, [0.0, 0.0])):
        got = [starter.compute_loss(torch.tensor([advantage]), log_pi, old, 0.2, policy_loss="dppo",
                                    clip_range_high=high)[1]["clip_fraction"] for high in (0.3, 0)]
        assert got == blocked


def test_gspo_has_the_gradient_of_the_ratio_of_the_response():
    """(pi/old of the response)^(1/length), by autograd, without the tokens of the environment"""
    generator = torch.Generator().manual_seed(0)
    log_pi, old = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    log_pi.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss, _ = starter.compute_loss(advantages, log_pi, old, 1.0, response_mask=mask,
                                   policy_loss="gspo", clip_range_high=9.0)
    got, = torch.autograd.grad((loss.sum(1) / mask.sum(1)).sum(), log_pi)
    ratios = [(log_pi[b] - old[b])[mask[b]].mean().exp() for b in range(3)]
    wanted, = torch.autograd.grad(-sum(r * a for r, a in zip(ratios, advantages)), log_pi)
    assert torch.allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("estimator, kl_in", [("k3", "loss"), ("k1", "reward")])
def test_the_kl_term_does_not_depend_on_the_policy_loss(estimator, kl_in):
    """It keeps the ratio of each token."""
    log_pi, old, ref = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    log_pi.requires_grad_()
    slopes = []
    for policy_loss in POLICY_LOSSES:
        loss, _ = starter.compute_loss(torch.zeros(2), log_pi, old, 1e-3, ref, 1.0, kl_in=kl_in,
                                       kl_estimator=estimator, policy_loss=policy_loss)
        slopes += torch.autograd.grad(loss.sum(), log_pi)
    assert slopes[0].norm() > 0.1 and all(torch.equal(slopes[0], other) for other in slopes)


def test_the_clip_may_be_higher_above_and_an_advantage_belongs_to_a_row():
    policy = torch.tensor([[0.4, -0.4]])
    loss, _ = starter.compute_loss(torch.tensor([2.0]), policy, torch.zeros(1, 2), 0.2,
                                   clip_range_high=0.28)
    assert loss[0, 0] == pytest.approx(-2 * 1.28)
    loss, _ = starter.compute_loss(torch.tensor([-2.0]), policy, torch.zeros(1, 2), 0.2,
                                   clip_range_high=0.28)
    assert loss[0, 1] == pytest.approx(2 * 0.8)
    zeros = torch.zeros(2, 2)
    square = starter.compute_loss(torch.tensor([1.0, -1.0]), zeros, zeros, 0.2)[0]
    assert square.tolist() == [[-1, -1], [1, 1]], "also when B equals T"
    each = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(starter.compute_loss(each, zeros, zeros, 0.2)[0], -each), "or to a token"


def test_without_old_log_probs_the_policy_is_its_own_old_policy():
    """A number: with its gradient the ratio would have none."""
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = starter.compute_loss(torch.tensor([3.0]), policy, None, 0.2)
    slope, = torch.autograd.grad(loss.sum(), policy)
    assert loss.tolist() == [[-3, -3]] and slope.tolist() == [[-3, -3]]
    sampled = torch.full((1, 2), -1.5)  # its weight is a number, too
    loss, metadata = starter.compute_loss(torch.tensor([3.0]), policy, None, 0.2,
                                          rollout_log_probs=sampled)
    slope, = torch.autograd.grad(loss.sum(), policy)
    weights = [math.exp(0.5), math.exp(-0.5)]
    assert slope[0].tolist() == pytest.approx([-3 * weight for weight in weights])
    assert metadata["logp_gap"] == pytest.approx(0.5)


@pytest.mark.parametrize("gap, weight", [(0.5, math.exp(0.5)), (0.8, 2.0), (50.0, 2.0),
                                         (-3.0, math.exp(-3.0))])
def test_the_weight_of_the_sampler_is_at_most_2(gap, weight):
    policy = torch.full((1, 1), -1.0)
    loss, _ = starter.compute_loss(torch.tensor([1.0]), policy, None, 0.2,
                                   rollout_log_probs=policy - gap)
    assert -loss.item() == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_a_token_that_ran_away_from_the_old_policy_does_not_overflow(policy_loss):
    policy = torch.tensor([[400.0, -400.0]], requires_grad=True)
    for advantage in (1.0, -1.0):
        loss, metadata = starter.compute_loss(torch.tensor([advantage]), policy,
                                              torch.zeros(1, 2), 0.2, policy_loss=policy_loss)
        slope, = torch.autograd.grad(loss.sum(), policy)
        assert torch.isfinite(loss).all() and torch.isfinite(slope).all()
        assert all(math.isfinite(value) for value in metadata.values())


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_nan_stays_behind_the_mask(kl_coef, policy_loss):
    bad = torch.tensor([[-1.0, math.nan, -math.inf, math.inf]], requires_grad=True)
    other = torch.tensor([[-1.1, math.inf, math.nan, -math.inf]])
    advantages = torch.tensor([[1.0, math.nan, math.nan, math.inf]])
    mask = torch.tensor([[1, 0, 0, 0]])
    loss, metadata = starter.compute_loss(advantages, bad, other, 0.2, other, kl_coef,
                                          response_mask=mask, rollout_log_probs=other,
                                          policy_loss=policy_loss)
    slope = torch.autograd.grad(loss.sum(), bad)[0]
    assert torch.isfinite(loss).all() and torch.isfinite(slope).all() and slope[0, 0] != 0
    assert (slope[0, 1:] == 0).all() and all(math.isfinite(v) for v in metadata.values())
    keys = ("kl_penalty_mean", "kl_mean", "kl_max", "kl_min")
    assert all((metadata[key] != 0) == bool(kl_coef) for key in keys)


def test_a_kl_that_is_off_is_not_evaluated():
    """0 * NaN would be NaN."""
    zeros, bad = torch.zeros(1, 4), torch.full((1, 4), math.nan)
    assert torch.isfinite(starter.compute_loss(torch.ones(1), zeros, zeros, 0.2, bad)[0]).all()


def test_an_empty_mask_has_no_loss_and_no_gradient():
    policy, ref = torch.zeros(2, 3, requires_grad=True), torch.full((2, 3), -1.0)
    loss, metadata = starter.compute_loss(torch.ones(2), policy, None, 0.2, ref, 0.1,
                                          response_mask=torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all() and (policy.grad == 0).all() and set(metadata.values()) == {0.0}


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_bad_numbers_of_the_policy_reach_the_gradient_and_those_of_the_reference_do_not(
        policy_loss):
    """An update whose gradient is not finite is skipped."""
    policy, ref = torch.zeros(2, 3), torch.full((2, 3), -1.0)
    ref[1, 2] = -math.inf
    loss, metadata = starter.compute_loss(torch.ones(2), policy, None, 0.2, ref, 0.1)
    assert torch.isfinite(loss).all() and metadata["kl_max"] == pytest.approx(19)
    policy[1, 2] = math.nan
    n_bad = 3 if policy_loss == "gspo" else 1  # the response, or the token
    for kl_coef in (0.0, 0.1):
        loss, _ = starter.compute_loss(torch.ones(2), policy.requires_grad_(), torch.zeros(2, 3),
                                       0.2, ref, kl_coef, policy_loss=policy_loss)
        slope = torch.autograd.grad(loss.sum(), policy)[0]
        assert loss.isnan().sum() == slope.isnan().sum() == n_bad


# ---- One step in parts

@functools.cache
def pair():
    """-> policy, reference, and the advantages of make_groups()"""
    policy = make_policy()
    advantages = torch.randn(16, generator=torch.Generator().manual_seed(0))
    return policy, reference_near(policy), advantages


def step_in_parts(microbatches, loss_type, divisor, **options):
    """-> (loss, gradient) of one optimizer step"""
    policy, reference, advantages = pair()
    batch = make_groups()
    policy.zero_grad()
    loss = 0.0
    for rows in microbatches:
        part, _ = starter.grpo_microbatch_step(
            policy, *(x[rows] for x in rows_in(batch)), advantages[rows], len(microbatches), 0.2,
            loss_type, 24, reference, 0.1, divisor=divisor, **options)
        loss += float(part)
    return loss, gradient(policy)


@pytest.mark.parametrize("loss_type, estimator", [("grpo", "k3"), ("dapo", "exact")])
def test_the_gradient_does_not_depend_on_the_microbatches(loss_type, estimator):
    divisor = starter.loss_divisor(make_groups().response_mask, loss_type, 24)
    whole = step_in_parts([list(range(16))], loss_type, None, kl_estimator=estimator)
    splits = [[[0, 1, 2], list(range(3, 16))], [list(range(16)), []]]
    for split in splits:
        loss, grad = step_in_parts(split, loss_type, divisor, kl_estimator=estimator)
        assert loss == pytest.approx(whole[0], rel=1e-4) and relative(grad, whole[1]) < 1e-5
    wrong = step_in_parts(splits[0], loss_type, None, kl_estimator=estimator)
    assert relative(wrong[1], whole[1]) > 0.05, "a mean per microbatch is not the mean of all"


def test_the_divisor_counts_rows_or_tokens():
    mask = make_groups().response_mask
    assert int(mask.any(1).sum()) == 15, "one of 16 rows is empty"
    divisors = [starter.loss_divisor(mask, loss_type, 24) for loss_type in LOSS_TYPES]
    assert divisors == [15, 15 * 24, int(mask.sum())]


def test_without_a_divisor_a_part_is_one_of_equal_parts():
    whole = step_in_parts([list(range(16))], "dapo", None)
    halves = step_in_parts([list(range(16)), list(range(16))], "dapo", None)
    assert halves[0] == pytest.approx(whole[0]) and relative(halves[1], whole[1]) < 1e-5


def test_reference_log_probs_may_be_given_or_computed():
    _, reference, _ = pair()
    batch = make_groups()
    given = log_probs_of(reference, batch)
    rows = list(range(16))
    computed = step_in_parts([rows], "grpo", None)
    assert step_in_parts([rows], "grpo", None, ref_log_probs=given)[0] == pytest.approx(computed[0])
    shifted = step_in_parts([rows], "grpo", None, ref_log_probs=given - 0.5)
    assert abs(shifted[0] - computed[0]) > 1e-3, "what is given is taken"


def test_metadata_of_a_step_counts_its_tokens_and_its_entropy():
    policy, _, _ = pair()
    batch = make_groups()
    _, metadata = starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(16), 1, 0.2)
    logits = eager_copy(policy)(batch.input_ids).logits.detach()[batch.response_mask]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert metadata["n_tokens"] == batch.response_mask.sum()
    assert metadata["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert metadata["loss"] == pytest.approx(-1), "the mean of 15 rows; without old log-probs"


def test_negative_labels_are_left_out_of_a_step():
    policy, _, _ = pair()
    batch = make_groups()
    losses = []
    for labels in (batch.labels, torch.where(batch.response_mask, batch.labels, -100)):
        mask = batch.response_mask if labels is batch.labels else torch.ones_like(labels)
        losses.append(starter.grpo_microbatch_step(
            policy, batch.input_ids, labels, mask, torch.arange(16.0), 1, 0.2, "dapo"))
    assert losses[0][0] == losses[1][0] and losses[0][1] == losses[1][1]


@pytest.mark.parametrize("tokens_per_microbatch", [10**6, 20])
def test_score_has_the_log_probs_of_the_chosen_rows(tokens_per_microbatch):
    policy, _, _ = pair()
    batch = make_groups()
    cfg = settings_of(temperature=0.7, tokens_per_microbatch=tokens_per_microbatch)
    log_probs = starter.score(policy, batch, [1, 2, 9], cfg)
    wanted = plain_log_probs(eager_copy(policy), batch, 0.7).detach()
    assert torch.allclose(log_probs[[1, 2, 9]], wanted[[1, 2, 9]], atol=2e-5)
    assert not log_probs.requires_grad and (log_probs[[0, *range(3, 9), 10]] == 0).all()


# ---- Update

def make_update():
    """-> function that gives a policy of two layers a gradient and updates it. The optimizer has
    the first layer only, in two groups. -> (norm, how the weights of that layer moved)"""
    policy = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    groups = [{"params": [policy[0].weight]}, {"params": [policy[0].bias]}]
    optimizer = torch.optim.SGD(groups, 9.0, momentum=1e-9)

    def update(slope, state, loss=0.0, **changes):
        start = policy[0].weight.detach().clone()
        policy[0].weight.grad = torch.tensor([slope])
        norm = starter.update_weights(policy, optimizer, loss, settings_of(**changes), state)
        assert policy[0].weight.grad is None, "the memory is free again"
        return norm, (policy[0].weight.detach() - start)[0].tolist()

    return update, policy, optimizer


def test_updates_are_clipped_and_warmed_up():
    update, _, optimizer = make_update()
    moved = update([3.0, 4.0], make_state(step=2), warmup_steps=4)
    assert moved == (5.0, pytest.approx([-0.05 * 0.6, -0.05 * 0.8], abs=1e-5))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])
    moved = update([3.0, 4.0], make_state(step=9), warmup_steps=4, max_grad_norm=0)
    assert moved == (5.0, pytest.approx([-0.3, -0.4], abs=1e-5))


def test_without_a_gradient_momentum_does_not_move_the_weights():
    """kl_coef=1e-9 measures the KL and no more."""
    update, _, optimizer = make_update()
    update([3.0, 4.0], make_state())
    optimizer.param_groups[0]["momentum"] = 0.9
    assert update([0.0, 0.0], make_state())[1] == update([1e-9, 0.0], make_state())[1] == [0, 0]
    assert update([1e-3, 0.0], make_state())[1][1] != 0, "with a gradient it does"


def test_gradients_of_weights_outside_the_optimizer_do_not_add_up():
    """Otherwise they would grow and throttle the clipping."""
    update, policy, _ = make_update()
    for _ in range(3):
        policy[1](torch.tensor([6.0, 8.0])).backward()  # norm: of (6, 8) and the bias
        norm, _ = update([0.0, 0.0], make_state())
        assert norm == pytest.approx(math.sqrt(101))
        assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("slope, loss", [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan),
                                         (1.0, math.inf)])
def test_updates_that_are_not_finite_are_skipped_and_the_rate_recovers(slope, loss):
    update, _, optimizer = make_update()
    state = make_state()
    assert update([slope, 1.0], state, loss)[1] == [0.0, 0.0]
    assert (state.skipped, state.skips_in_a_row, state.lr_factor) == (1, 1, 0.1)
    rates = []
    for _ in range(5):
        assert update([1.0, 1.0], state)[1][0] < 0
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.1])
    assert (state.skipped, state.skips_in_a_row, state.lr_factor) == (1, 0, 1.0)


def test_five_skipped_updates_in_a_row_end_the_run():
    update, _, _ = make_update()
    state = make_state()
    for slope in (math.nan,) * 4 + (1.0,) + (math.nan,) * 4:
        update([slope, 1.0], state)
    with pytest.raises(UserError, match="5 updates in a row"):
        update([math.nan, 1.0], state)
    assert state.skipped == 9


def adapt(state, *values):
    for value in values:
        starter.adapt_kl_coef(state, value, settings_of(target_kl=0.1))
    return state.kl_factor


def test_the_adaptive_coefficient_follows_the_kl():
    state = make_state()
    assert adapt(state, 0.2) == adapt(state, 0.1) == 1.0, "near the target"
    assert adapt(state, 0.3) == 1.5
    adapt(state, 1e9)
    assert state.kl_smooth == pytest.approx(0.35), "clipped at 5 * target_kl before smoothing"
    assert adapt(state, *[9.0] * 60) == 100 and adapt(state, *[0.0] * 100) == 0.1


def test_the_adaptive_coefficient_is_not_lowered_before_the_kl_has_passed_the_target():
    """The KL starts at 0. A coefficient that fell meanwhile would be missing when it has risen."""
    state = make_state()
    assert adapt(state, *[0.0] * 20, *[0.04] * 20, *[0.09] * 20) == 1.0
    assert not state.kl_was_high
    assert adapt(state, 0.12, 0.12, 0.12, 0.12) == 1.0 and state.kl_was_high
    assert adapt(state, 0.0, 0.0) == 0.75


def test_a_refreshed_reference_is_the_policy_and_the_kl_begins_anew():
    policy, batch = make_policy(seed=1), make_groups()
    reference = reference_near(policy)
    state = make_state(step=7, kl_factor=3.0, kl_smooth=0.4, kl_was_high=True)

    def kl():
        return starter.response_stats(policy, *rows_in(batch), 1.0, reference)[3].abs().max()

    assert kl() > 1e-3
    starter.refresh_reference(reference, policy, state)
    assert kl() < 1e-6 and not any(p.requires_grad for p in reference.parameters())
    assert (state.ref_step, state.kl_smooth, state.kl_was_high) == (7, 0.0, False)
    assert adapt(state, 0.0, 0.0, 0.0) == 3.0, "it is not lowered while the KL rises again"


# ---- 3. Sampler: turns, vLLM, the stand-in -------------------------------------------------------

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]


def sample(llm, prompts=PROMPTS, n=4, seed=1, first=0, stop_ids=(256,), reply=None, turn_ends=(),
           **changes):
    """-> n responses to each prompt"""
    task = make_task([{"prompt": "?"}], stop_ids=stop_ids, **changes)
    task.reply, task.turn_ends = reply, turn_ends
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


def ending_policy(kind):
    """A random model whose responses end now and then, or say A"""
    policy = make_policy(kind, vocab_size=260)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[256] *= 2.5
        policy.model.get_output_embeddings().weight[65] *= 2.0
    return policy


# What the torch sampler and vLLM must both do: the tests of vLLM call these, too.

def check_ends(policy, llm):
    responses = sample(llm)
    assert len(responses) == 12 and len({tuple(response.ids) for response in responses}) > 6
    for response in responses:
        assert 1 <= len(response.ids) == len(response.log_probs) <= 12 and all(response.mask)
        assert 256 not in response.ids[:-1] and response.finished == (response.ids[-1] == 256)
        assert response.finished or len(response.ids) == 12
    assert {response.finished for response in responses} == {True, False}
    # Only stop_ids end a response, not the end token of config.json.
    unending = sample(llm, n=16, stop_ids=())
    assert {len(response.ids) for response in unending} == {12}
    assert any(256 in response.ids[:-1] for response in unending)


def check_seeds(policy, llm):
    first = sample(llm)
    assert [vars(x) for x in sample(llm)] == [vars(x) for x in first]
    for other in ({"seed": 43}, {"seed": "eval"}, {"first": 12}):
        assert ids_of(sample(llm, **other)) != ids_of(first)
    # A second rank, which has the prompts after the first one, samples the same responses.
    assert ids_of(sample(llm, PROMPTS[1:], first=1)) == ids_of(first[4:])


def check_temperature(policy, llm):
    warm = sample(llm, temperature=0.7)
    assert worst_gap(policy, warm, 0.7) < 1e-4 < worst_gap(policy, warm)
    greedy = sample(llm, PROMPTS[:1], n=1, temperature=0.0)
    with torch.no_grad():
        best = eager_copy(policy)(torch.tensor(PROMPTS[:1])).logits[0, -1].argmax()
    assert greedy[0].ids[0] == best


def check_sync(policy, llm):
    weights = copy.deepcopy(policy.state_dict())
    assert worst_gap(policy, sample(llm)) < 1e-4
    randomize(policy.model, 7)
    assert worst_gap(policy, sample(llm)) > 0.1
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm)) < 1e-4
    policy.load_state_dict(weights)
    starter.load_policy_into_vllm_instance(policy, llm)


def check_turns(policy, llm):
    """A text in turn_ends ends a turn; what reply() says has no loss."""
    responses = sample(llm, n=16, max_tokens=40, max_turns=3, turn_ends=("A",),
                       reply=lambda problem, text: "BC" if text.endswith("A") else None)
    assert max(len(response.problem["turns"]) for response in responses) >= 3
    assert max(map(len, ids_of(responses))) == 40, "of all turns together"
    for response in responses:
        is_chosen, ids = [], response.ids
        while len(is_chosen) < len(ids):
            is_chosen.append(True)
            if ids[len(is_chosen) - 1] == 65 and len(is_chosen) < len(ids):
                assert ids[len(is_chosen):len(is_chosen) + 2] == [66, 67]
                is_chosen += [False, False]
        assert response.mask == is_chosen and response.finished == (ids[-1] == 256)
    assert worst_gap(policy, responses) < 1e-4
    batch = starter.make_batch(responses)
    assert batch.response_mask.sum() == sum(sum(response.mask) for response in responses)
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(48), 1, 0.2, "dapo")
    model = eager_copy(policy)
    (-plain_log_probs(model, batch).sum() / batch.response_mask.sum()).backward()
    assert relative(gradient(policy), gradient(model)) < 1e-5


SAMPLER_CHECKS = check_ends, check_seeds, check_temperature, check_sync, check_turns


@pytest.fixture(scope="module")
def torch_sampler():
    policy = ending_policy("llama")
    return policy, starter.init_vllm(policy, tokenizer_with(CHAT), settings_of(use_vllm=False))


@pytest.mark.parametrize("check", SAMPLER_CHECKS, ids=lambda check: check.__name__)
def test_the_torch_sampler_is_right_and_repeatable(torch_sampler, check):
    policy, llm = torch_sampler
    check(policy, llm)
    assert isinstance(llm, starter.TorchSampler) and policy.is_packed and sample(llm, []) == []


def test_the_torch_sampler_counts_positions_from_the_first_token_of_a_prompt():
    """Prompts are padded on the left. GPT-2 has absolute positions."""
    policy = make_policy("gpt2")
    assert worst_gap(policy, sample(starter.init_vllm(
        policy, tokenizer_with(CHAT), settings_of(use_vllm=False)))) < 1e-4


def test_the_torch_sampler_samples_from_the_distribution():
    policy = make_policy()
    llm = starter.init_vllm(policy, tokenizer_with(CHAT), settings_of(use_vllm=False))
    pairs = ids_of(sample(llm, [[5, 6]], n=2000, stop_ids=(), max_tokens=2))

    def check(tokens, prompt):
        with torch.no_grad():
            wanted = eager_copy(policy)(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
        seen = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
        assert np.abs(seen - wanted).max() < 4 * math.sqrt(0.25 / len(tokens))

    check([pair[0] for pair in pairs], [5, 6])
    first = int(np.bincount([pair[0] for pair in pairs]).argmax())
    check([pair[1] for pair in pairs if pair[0] == first], [5, 6, first])


def test_without_vllm_torch_samples_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(starter, "start_vllm", mock.Mock(side_effect=ImportError("no symbol")))
    cfg = settings_of(use_vllm=True, vllm_sleep=True)
    llm = starter.init_vllm(make_policy(), tokenizer_with(CHAT), cfg)
    assert isinstance(llm, starter.TorchSampler) and not cfg.vllm_sleep
    assert "!!! vLLM cannot be used here, torch samples: no symbol\n" in capsys.readouterr().out


def test_a_model_that_vllm_cannot_run_is_one_line(monkeypatch):
    monkeypatch.setattr(starter, "start_vllm", mock.Mock(side_effect=ValueError("no kernel")))
    with pytest.raises(UserError, match=r"^vLLM: [^\n]*no kernel.*--use_vllm=False\?\)$"):
        starter.init_vllm(make_policy(), tokenizer_with(CHAT), settings_of(use_vllm=True))


def test_the_responses_to_a_problem_share_no_state(monkeypatch):
    """reply() may keep its state in the problem, also in a list of it."""
    def reply(problem, text):
        problem["seen"].append(text)
        return None

    task = make_task([{"prompt": "?"}])
    task.reply = reply
    monkeypatch.setattr(starter, "generate", lambda llm, task, responses: [
        ([65 + i, 256], [0.0, 0.0]) for i in range(len(responses))])
    problem = {"prompt_ids": [5], "problem_number": 0, "seen": []}
    responses = starter.rollout_with_vllm(None, task, [problem], 3, 1)
    assert [response.problem["seen"] for response in responses] == [["A"], ["B"], ["C"]]
    assert problem["seen"] == [] and "turns" not in problem


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_conversation_that_is_not_over_after_max_turns_is_cut_off(monkeypatch, max_turns):
    task = make_task([{"prompt": "?"}], max_turns=max_turns, max_tokens=100)
    task.reply, task.turn_ends = lambda problem, text: "go on", ("A",)
    monkeypatch.setattr(starter, "generate", lambda *arguments: [([65], [0.0])])
    problem = {"prompt_ids": [5], "problem_number": 0}
    response, = starter.rollout_with_vllm(None, task, [problem], 1, 1)
    assert response.finished is False
    assert [turn["content"] for turn in response.problem["turns"]] == (
        ["A", "go on"] * max_turns)[:-1]


def played(said, ids=(65, 66), is_last=False, turn_ends=("B",), **changes):
    """-> a response after one turn of the model and what reply() says to it"""
    task = make_task([{"prompt": "?"}], **changes)
    task.reply = lambda problem, text: said
    task.turn_ends = turn_ends
    response = Response({"prompt_ids": [5]})
    starter.play_turn(response, list(ids), [-1.0] * len(ids), task, is_last)
    return response


@pytest.mark.parametrize("max_tokens, finished, ids", [
    (6, None, [65, 66, 67, 68]), (5, None, [65, 66, 67, 68]), (4, False, [65, 66]),
    (3, False, [65, 66])])
def test_a_reply_that_leaves_no_token_for_the_model_is_cut_off(max_tokens, finished, ids):
    response = played("CD", max_tokens=max_tokens)
    assert (response.finished, response.ids) == (finished, ids)
    assert len(response.problem["turns"]) == (1 if finished is False else 2)


def test_a_reply_has_no_loss_and_is_one_of_the_turns():
    response = played("CD")
    assert response.mask == [True, True, False, False]
    assert response.log_probs == [-1.0, -1.0, 0.0, 0.0]
    assert response.problem["turns"] == [{"role": "assistant", "content": "AB"},
                                         {"role": "environment", "content": "CD"}]
    assert response.text() == "AB", "the reward gets what the model wrote"


@pytest.mark.parametrize("said, ids, is_last, finished, text", [
    (None, (65, 66), False, True, "AB"), (None, (65, 256), True, True, "A"),
    ("CD", (65, 66), True, False, "AB"), ("CD", (65, 256), True, False, "A"),
    ("CD", (65, 67), False, False, "AC")])
def test_a_response_has_finished_if_nothing_is_left_to_say(said, ids, is_last, finished, text):
    """Over at the last turn is over; a turn that is cut off gets no reply."""
    response = played(said, ids, is_last)
    assert (response.finished, response.text()) == (finished, text)
    assert response.ids == list(ids)


def test_a_reply_to_a_message_is_the_next_message_of_the_user():
    for chat_template in (CHAT, CHAT.replace("<|end|>", " <|end|>")):
        task = make_task([{"prompt": "?"}], chat_template=chat_template, max_tokens=60)
        task.reply = lambda problem, text: "MODELS_TURN"
        response = Response({"prompt_ids": [5]})
        starter.play_turn(response, [65, 256], [0.0, 0.0], task, False)
        text = task.tokenizer.decode(response.ids)
        end = "<|end|>" if chat_template == CHAT else " <|end|>"
        assert text == f"A<|end|><user>MODELS_TURN{end}<assistant>", "its end token is not doubled"


def test_no_two_turns_share_a_seed():
    seeds = set()
    for name, n_ids in itertools.product(("1/0/0", "1/0/1", "2/0/0", "eval/0/0"), (0, 1, 7)):
        response = Response({"prompt_ids": [5]}, name)
        response.ids = [9] * n_ids
        seeds.add(response.seed())
    assert len(seeds) == 12 and max(seeds) < 2**63, "vLLM wants 64 bits"


def rewards_of(reward, reward_truncated=False):
    """-> rewards of a response that has finished and of one that is cut off"""
    task = make_task([{"prompt": "?"}], reward_truncated=reward_truncated)
    task.reward_fn = lambda text, problem: reward
    responses = [make_response([1], [2], text="hi", finished=is_over) for is_over in (True, False)]
    starter.grade(task, responses)
    return [response.reward for response in responses]


def test_a_response_that_is_cut_off_earns_0_at_most():
    assert rewards_of(1) == [1.0, 0.0] and rewards_of(1, True) == [1.0, 1.0]
    assert rewards_of(-1) == [-1.0, -1.0], "among negative rewards 0 would be a refuge"


def test_a_reward_is_a_finite_number_of_any_type():
    assert rewards_of(np.float32(0.5)) == rewards_of(torch.tensor(0.5)) == [0.5, 0.0]
    for bad in (None, "high", math.nan, math.inf, 1e39):
        with pytest.raises((TypeError, ValueError)) as error:
            rewards_of(bad)
        assert "response 'hi'" in error.value.__notes__[0]


def graded(*scores, **changes):
    """-> responses, one for each of these values of reward_fn"""
    task = make_task([{"prompt": "?"}], **changes)
    script = iter(scores)
    task.reward_fn = lambda text, problem: next(script)
    responses = [make_response([1], [2], text="hi", finished=i < 3) for i in range(len(scores))]
    starter.grade(task, responses)
    return responses


def test_a_reward_may_be_a_dict_whose_other_entries_are_logged():
    """A response may lack some. What starter.py measures itself is not replaced."""
    scores = [{"reward": 1, "format": True, "reward_mean": 9}, {"reward": 0.5, "format": 0.0},
              {"reward": np.float32(0.5), "length": 7}, {"reward": 1, "format": 0.5}]
    responses = graded(*scores, reward_truncated=False)
    assert [response.reward for response in responses] == [1, 0.5, 0.5, 0], "the last is cut off"
    assert "reward" not in responses[0].scores
    metrics = starter.step_metrics(responses, [], 2, 0.0)
    assert (metrics["train/format"], metrics["train/length"]) == (0.5, 7.0)
    assert metrics["train/reward_mean"] == 0.5 and "train/reward" not in metrics
    assert starter.mean_scores("eval", graded(0.5, 1)) == {}


@pytest.mark.parametrize("score", [{"reward": "high"}, {"reward": 1, "format": "good"}, {},
                                   {"format": 1}, {"reward": math.nan}, {"reward": [1, 2]}])
def test_an_entry_of_a_reward_that_is_not_a_number_is_an_error(score):
    with pytest.raises((TypeError, ValueError, KeyError)) as error:
        graded(score)
    assert "response 'hi'" in error.value.__notes__[0]


@pytest.mark.parametrize("device, first_gap, step, gap, kl, words", [
    ("cpu", 0.0, 1, 1e-3, 0.0, None), ("cpu", 0.0, 5, 1e-3, 0.1, None),
    ("cpu", 0.0, 5, 3e-3, 0.0, "stale weights"), ("cpu", 0.0, 1, 0.0, 1e-7, None),
    ("cpu", 0.0, 1, 0.0, 1e-3, "before any update"),
    # In bf16 the limit is relative: stale weights show as a gap that grows.
    ("cuda", 0.0, 1, 0.09, 1e-3, None), ("cuda", 0.0, 1, 0.11, 0.0, "stale weights"),
    ("cuda", 0.004, 2, 0.029, 0.1, None), ("cuda", 0.004, 2, 0.031, 0.0, "stale weights"),
    ("cuda", 0.02, 9, 0.079, 0.1, None), ("cuda", 0.02, 9, 0.081, 0.0, "stale weights"),
    ("cuda", 0.0, 1, 0.0, 0.01, "before any update")])
def test_sampler_and_trainer_must_agree_and_the_kl_begins_at_zero(device, first_gap, step, gap, kl,
                                                                  words):
    state = make_state(step=step, first_gap=first_gap)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        starter.check_agreement({"rollout/logp_gap_mean": gap}, [{"kl_mean": kl}, {"kl_mean": 1.0}],
                                state, torch.device(device))
    assert state.first_gap == (gap if step == 1 else first_gap)


# ---- 4. Policy: loading, memory, LoRA, sharding, log-probs ---------------------------------------

# One model per mechanism
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "num_local_experts": 4}
WINDOW = {"sliding_window": 5, "num_hidden_layers": 4}
PACKED = {
    "llama": {}, "qwen3": {}, "qwen3_moe": EXPERTS,
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3}}
PADDED = {
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "gpt_oss": WINDOW | EXPERTS}


def laid_out(kind, scale=0.2):
    """-> a Policy with random weights and the layout that choose_layout() takes"""
    policy = make_policy(kind, scale=scale, **{**PACKED, **PADDED}[kind])
    starter.choose_layout(policy, math.inf)
    policy.logits_per_chunk = 3 * VOCABULARY
    return policy


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
def test_models_have_the_log_probs_of_their_own_head(kind):
    """And entropy, exact KL, gradients: each row alone, in eager attention"""
    policy = laid_out(kind)
    reference = reference_near(policy)
    assert policy.is_packed == (kind in PACKED)
    responses = make_group_responses((5, 1, 7, 2), 2)
    responses[2].mask[2:4] = False, False
    batch = starter.make_batch(responses)
    plain = [eager_copy(one) for one in (policy, reference)]
    got = starter.response_stats(policy, *rows_in(batch), 0.7, reference)
    wanted = stats_row_by_row(*plain, batch, 0.7)
    weight = torch.randn(batch.labels.shape, generator=torch.Generator().manual_seed(1))
    for log_probs, _, _, kl in (got, wanted):
        (log_probs * weight + kl).sum().backward()
    for mine, theirs in zip(got, wanted):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=2e-5)
    assert relative(gradient(policy), gradient(plain[0])) < 3e-5


@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_the_layout_does_not_depend_on_the_weights(kind):
    """With fresh weights a leak between rows is smaller than any fixed tolerance."""
    fresh, trained = (laid_out(kind, scale) for scale in (0.02, 0.2))
    assert fresh.is_packed == (kind in PACKED)
    assert fresh.model.config._attn_implementation == trained.model.config._attn_implementation


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_rank_without_rows_runs_the_model_too(kind):
    empty = [tensor[:0] for tensor in rows_in(make_groups())]
    stats = starter.response_stats(laid_out(kind), *empty)
    assert [x.shape for x in stats] == [empty[1].shape] * 2
    stats[0].sum().backward()


@pytest.mark.parametrize("length", [39, 61])
def test_rows_longer_than_a_window_are_padded(save_folder, length):
    folder = save_folder("mistral", scale=0.2, sliding_window=40)
    policy, _ = starter.init_policy(str(folder), longest_row=length)
    assert policy.is_packed == (length < 40)
    batch = make_rows([length] * 2)
    with torch.no_grad():
        wanted = plain_log_probs(eager_copy(policy), batch)
        assert relative(log_probs_of(policy, batch), wanted) < 1e-5


def test_a_loaded_policy_is_float32_in_evaluation_mode(save_folder):
    policy, tokenizer = starter.init_policy(str(save_folder()))
    assert not policy.model.training and policy.is_packed and tokenizer.encode("5") == [53]
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


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


def lora_policy(kind):
    """-> policy with adapters, its reference, and the model without adapters"""
    policy = laid_out(kind)
    base = eager_copy(policy)
    starter.add_lora(policy, 4, seed=0)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    starter.compile_and_shard(policy, settings_of(lora_rank=4), "cpu")
    return policy, reference, base


@torch.no_grad()
def train_adapters(policy):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1, generator=generator)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_lora_begins_as_the_model_and_trains_its_adapters_alone(kind):
    policy, _, base = lora_policy(kind)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert not [name for name in trained if "lm_head" in name]
    batch = make_groups()
    with torch.no_grad():
        assert torch.allclose(log_probs_of(policy, batch), plain_log_probs(base, batch), atol=3e-5)


def test_adapters_depend_on_the_seed_alone():
    def adapters(seed):
        policy = make_policy()
        starter.add_lora(policy, 4, seed)
        return torch.cat([p.flatten() for p in policy.parameters() if p.requires_grad])

    assert torch.equal(adapters(0), adapters(0)) and not torch.equal(adapters(0), adapters(1))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_reference_has_no_adapters_and_the_sampler_gets_merged_weights(kind):
    policy, reference, base = lora_policy(kind)
    train_adapters(policy)
    batch = make_groups()
    with torch.no_grad():
        changed = log_probs_of(policy, batch)
        assert (changed - plain_log_probs(base, batch)).abs().max() > 0.1
        stats = starter.response_stats(policy, *rows_in(batch), 1.0, reference)
        assert torch.equal(stats[0], changed)
        assert torch.allclose(stats[2], plain_log_probs(base, batch), atol=3e-5)
        base.load_state_dict(dict(starter.full_weights(policy)))
        assert torch.allclose(changed, plain_log_probs(base, batch), atol=1e-4)


def test_recomputing_activations_keeps_fewer_tensors_and_changes_no_gradient():
    policy, batch = make_policy(), make_groups()
    again = copy.deepcopy(policy)
    starter.compile_and_shard(again, settings_of(gradient_checkpointing=True), "cpu")
    n_kept = []
    for one in (policy, again):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(0) or x, lambda x: x):
            log_probs = log_probs_of(one, batch)
        log_probs.sum().backward()
        n_kept.append(len(kept))
    assert n_kept[1] < n_kept[0] / 2 and not again.model.training
    assert torch.equal(gradient(policy), gradient(again))


def test_the_layers_are_the_list_with_the_most_parameters():
    policy = make_policy()
    assert starter.transformer_layers(policy) is policy.model.model.layers
    policy.adapters = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(5)])
    assert starter.transformer_layers(policy) is policy.model.model.layers


def test_a_reference_is_frozen_and_in_the_precision_of_the_device():
    policy = make_policy().requires_grad_(False)
    policy.double()
    starter.compile_and_shard(policy, settings_of(), "cpu")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert policy.compute_dtype == torch.float32 and policy.device == CPU


def plan(monkeypatch, room, world=1, n_parameters=2**30, other_rank=math.inf, **changes):
    """-> (settings, largest logits) of a GPU that has `room` GiB beside vLLM's share. A parameter
    of one byte needs a GiB in all."""
    policy = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: n_parameters),
                             logits_per_chunk=2**28)
    monkeypatch.setattr(torch.cuda, "mem_get_info",
                        lambda: (int((room + 30) * 2**30), 100 * 2**30))
    monkeypatch.setattr(starter, "WORLD", world)
    monkeypatch.setattr(starter, "gather", lambda value: [value, (other_rank + 30) * 2**30])
    cfg = settings_of(**{"offload": "auto", "vllm_sleep": "auto", "gpu_mem_util": 0.3,
                         "tokens_per_microbatch": 0} | changes)
    starter.plan_memory(policy, cfg, "cuda")
    return cfg, policy.logits_per_chunk


@pytest.mark.parametrize("n_bytes, n_offloaded, changes", [
    (18, 6, {}), (20, 6, {"use_kl_penalty": True}), (4, 2, {"lora_rank": 8}),
    (6, 2, {"lora_rank": 8, "use_kl_penalty": True})])
def test_memory_is_planned_by_bytes_per_parameter(monkeypatch, n_bytes, n_offloaded, changes):
    """A card just below and just above each threshold: what does not fit uses smaller
    microbatches, then host memory, then the share of vLLM."""
    def planned(room):
        cfg, _ = plan(monkeypatch, room, **changes)
        assert cfg.gradient_checkpointing == cfg.offload
        return cfg.tokens_per_microbatch, cfg.offload, cfg.vllm_sleep

    assert planned(n_bytes + 8.51) == (20480, False, False)
    assert planned(n_bytes + 8.49) == planned(n_bytes + 3.51) == (8192, False, False)
    assert planned(n_bytes + 3.49) == planned(n_offloaded + 3.51) == (8192, True, False)
    assert planned(n_offloaded + 3.49) == (8192, True, True)


def test_memory_is_shared_by_the_ranks_and_the_fullest_gpu_decides(monkeypatch):
    for room, offload in ((21.51, False), (21.49, True)):
        assert plan(monkeypatch, room, 2, 2 * 2**30)[0].offload == offload
        assert plan(monkeypatch, 90, 2, 2 * 2**30, other_rank=room)[0].offload == offload


def test_what_was_asked_for_is_not_planned(monkeypatch):
    for offload, sleep in itertools.product((False, True), (False, True)):
        asked = {"offload": offload, "vllm_sleep": sleep, "tokens_per_microbatch": 16000}
        for room in (1, 90):
            cfg, logits = plan(monkeypatch, room, **asked)
            assert {name: getattr(cfg, name) for name in asked} == asked
            assert not cfg.gradient_checkpointing and logits == (2**26 if offload else 2**28)
    assert plan(monkeypatch, 90, tokens_per_microbatch=8192)[1] == 2**26, "memory is short"
    assert plan(monkeypatch, 25)[1] == 2**26, "a small microbatch"


@pytest.mark.parametrize("gigabytes, lora_rank, tokens, offload, sleep", [
    (141, 0, 20480, False, False), (80, 0, 20480, False, False), (24, 0, 8192, True, False),
    (16, 0, 8192, True, True), (24, 32, 8192, False, False)])
def test_a_model_of_1_5_b_fits_on_known_cards(monkeypatch, capsys, gigabytes, lora_rank, tokens,
                                              offload, sleep):
    cfg, _ = plan(monkeypatch, 0.97 * gigabytes - 30, n_parameters=1.54e9, lora_rank=lora_rank,
                  gpu_mem_util=0.4 * gigabytes / 100)
    assert cfg.tokens_per_microbatch == tokens
    assert (cfg.offload, cfg.vllm_sleep) == (offload, sleep)
    text = capsys.readouterr().out
    assert ("host memory" in text) == offload and ("vllm_sleep=True" in text) == sleep


def test_on_a_cpu_nothing_is_offloaded():
    cfg = settings_of(offload="auto", vllm_sleep="auto", tokens_per_microbatch=0)
    starter.plan_memory(make_policy(), cfg, "cpu")
    assert (cfg.tokens_per_microbatch, cfg.offload, cfg.vllm_sleep) == (20480, False, False)


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
    vocabulary, chunk = 4096, 40
    policy, reference = (make_policy(seed=seed, vocab_size=vocabulary) for seed in (0, 1))
    policy.logits_per_chunk = chunk * vocabulary
    batch, kept = make_rows([3 + chunk] * 4, vocabulary=vocabulary), []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(4), 1, 0.2,
                                     ref_model=reference, kl_coef=0.1, kl_estimator=estimator)
    assert largest.size <= chunk * vocabulary, "the output layer is smaller"
    assert not [shape for shape in kept if shape[-1:] == (vocabulary,)], "logits kept for backward"


def test_a_banned_token_adds_nothing_to_entropy_and_exact_kl():
    logits = torch.tensor([[0.5, 1.5, -math.inf]], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([[1.0, 1.0, -math.inf]], dtype=torch.float64)
    log_probs, entropy, ref_log_probs, kl = starter.token_stats(
        logits, torch.tensor([1]), ref_logits)
    p = 1 / (1 + math.exp(-1))
    assert log_probs.item() == pytest.approx(math.log(p))
    assert ref_log_probs.item() == pytest.approx(math.log(0.5))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert kl.item() == pytest.approx(math.log(2) - entropy.item())
    slope, = torch.autograd.grad((kl + log_probs).sum(), logits)
    assert torch.isfinite(slope).all() and slope[0, 2] == 0


def test_the_exact_kl_of_a_model_that_ran_away_is_limited_and_has_a_gradient():
    """Each log-ratio counts as 20 at most. The gradient at logit j is p_j (l_j - KL)."""
    logits = torch.tensor([[0.5, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([[0.0, -60.0, 1.0]], dtype=torch.float64)
    kl = starter.token_stats(logits, torch.tensor([0]), ref_logits)[3]
    p = logits.detach().softmax(-1)
    limited = (p.log() - ref_logits.log_softmax(-1)).clamp(-20, 20)
    wanted = (p * limited).sum()
    assert limited[0, 1] == 20 and kl.item() == pytest.approx(wanted.item())
    slope, = torch.autograd.grad(kl.sum(), logits)
    assert torch.allclose(slope, p * (limited - wanted))


def test_log_probs_of_labels_that_are_not_wanted_are_0():
    policy, batch = make_policy(), make_groups()
    labels = torch.where(batch.response_mask, batch.labels, -100)
    for model in (policy, eager_copy(policy)):
        got = starter.get_response_log_probs(model, batch.input_ids, labels)
        assert torch.allclose(got, log_probs_of(policy, batch), atol=1e-4)
        assert (got[~batch.response_mask] == 0).all()


# ---- 5. Packing (an optimization: skip it on a first reading) ------------------------------------

def test_the_picture_over_pack_is_what_it_does():
    """P P a b, P P c and Q d: a prompt that neighbours share is laid down once."""
    p, q, a, b, c, d = 5, 6, 1, 2, 3, 4
    batch = starter.make_batch([make_response([p, p], [a, b, 9]), make_response([p, p], [c, 9]),
                                make_response([q], [d, 9])])
    inputs, predictors, targets = starter.pack(*rows_in(batch), CPU)
    assert inputs["input_ids"].tolist() == [[p, p, a, b, c, q, d]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert inputs["key_slots"].tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert inputs["key_starts"].tolist() == [0, 4, 7, 9] and inputs["longest"] == 4
    assert inputs["query_starts"].tolist() == [0, 4, 5, 7]
    assert predictors.tolist() == [1, 2, 3, 1, 4, 5, 6]
    assert targets.tolist() == [a, b, 9, c, 9, d, 9]


def test_a_prompt_shared_by_a_group_is_computed_once():
    batch = make_groups()
    inputs, predictors, targets = starter.pack(*rows_in(batch), CPU)
    # Prompts, and responses without their last tokens. A prompt ends before the first token of the
    # mask, so row 10, whose first token is masked, is not shared and lays its prompt down again.
    first, second = 7 + (4 + 0 + 8 + 1), 3 + 2 + 0 + 0
    third, fourth = (11 + 5) + 19 + (11 + 1) + (11 + 7), (11 + 3) + 2 + 1 + 0
    assert inputs["input_ids"].shape == (1, first + second + third + fourth)
    assert len(targets) == batch.response_mask.sum() == len(predictors)


def test_packed_rows_do_not_see_each_other():
    """Any other order of the rows, and each row alone, give the same log-probs."""
    policy, batch = make_policy(), make_groups()
    whole = log_probs_of(policy, batch).detach()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    mixed = starter.response_stats(policy, *(x[order] for x in rows_in(batch)))[0]
    assert torch.allclose(mixed, whole[order], atol=1e-4)
    for row in (0, 2, 9, 12):
        alone = starter.response_stats(policy, *(x[row:row + 1] for x in rows_in(batch)))[0]
        assert torch.allclose(alone[0], whole[row], atol=1e-4)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"s_aux": 1.0}, {"head_mask": 1.0}])
def test_packed_attention_refuses_what_would_change_the_result(options):
    x = torch.zeros(1, 2, 3, 4)
    layout = {"key_slots": torch.arange(3), "query_starts": torch.tensor([0, 3]),
              "key_starts": torch.tensor([0, 3]), "longest": 3}
    starter.packed_attention(None, x, x, x, None, **layout, dropout=0.0)
    with pytest.raises(NotImplementedError):
        starter.packed_attention(None, x, x, x, None, **layout, **options)


# ---- 6. Evaluation, log, checkpoints -------------------------------------------------------------

def evaluate(rewards, n=2, **changes):
    """-> (task, metrics, responses) of 3 held-out problems; the weights are random"""
    task = make_task(question_rows(range(20)), question_rows(range(30, 33)),
                     stop_ids=range(0, 300, 8), **changes)  # some responses end in time
    llm = starter.init_vllm(make_policy(), task.tokenizer, settings_of(use_vllm=False))
    script = iter(rewards)
    task.reward_fn = lambda text, problem: problem.pop("answer") and next(script)
    return task, *starter.evaluate_model(llm, task, n)


def test_an_evaluation_counts_what_it_says():
    script = [1.0, 0.0, 0.95, 0.1, 0.1, 0.1]
    task, metrics, responses = evaluate(script)
    assert [response.reward for response in responses] == script
    numbers = [response.problem["problem_number"] for response in responses]
    assert numbers == [0, 0, 1, 1, 2, 2]
    assert {response.finished for response in responses} == {True, False}
    assert metrics == pytest.approx({"eval/accuracy": 2 / 6, "eval/mean_reward": 2.25 / 6})
    assert "answer" in task.held_out[0], "a reward gets a copy of the row"
    again = evaluate(script)[2]
    assert ids_of(again) == ids_of(responses), "its seeds are the same every time"


def test_an_evaluation_has_the_entries_of_dict_rewards():
    script = [{"reward": 1, "format": 1}, 0.0, {"reward": 1, "accuracy": 9}, 0.0, 0.0, 0.0]
    _, metrics, _ = evaluate(script)
    assert metrics == pytest.approx({"eval/format": 1, "eval/accuracy": 2 / 6,
                                     "eval/mean_reward": 2 / 6})


@pytest.mark.parametrize("correct_reward, accuracy", [
    (0.9, 3 / 6), (0.95, 2 / 6), (0.1, 5 / 6), (-1.0, 1.0)])
def test_accuracy_is_the_share_of_rewards_of_at_least_correct_reward(correct_reward, accuracy):
    _, metrics, _ = evaluate([1.0, 0.0, 0.95, 0.9, 0.1, 0.1], correct_reward=correct_reward)
    assert metrics["eval/accuracy"] == pytest.approx(accuracy)


def test_a_greedy_evaluation_repeats_itself():
    _, _, responses = evaluate([0.0] * 6, temperature=0.0)
    assert all(x.ids == y.ids for x, y in zip(responses[::2], responses[1::2]))


def test_metrics_of_a_step_are_means_over_tokens_and_rows():
    parts = [dict.fromkeys(starter.TOKEN_METRICS, value) | {"n_tokens": n}
             for value, n in ((1.0, 30), (4.0, 10), (math.nan, 0))]
    responses = [make_response([1], [1] * 7, [1, 1, 1, 0, 0, 0, 1], reward=1.0),  # several turns
                 make_response([1], [1] * 2, finished=False),
                 *[make_response([1], [1], reward=reward) for reward in (0.1, 0.1, 0.5, 0.7)]]
    wanted = {"train/entropy": 70 / 40, "kl/mean": 70 / 40, "kl/max": 4, "kl/min": 1,
              "rollout/logp_gap_mean": 70 / 40, "train/reward_mean": 0.4,
              "train/frac_groups_zero_std": 1 / 3,
              "train/truncated_frac": 1 / 6, "train/avg_output_tokens": 10 / 6}
    metrics = starter.step_metrics(responses, parts, 2, 0.1)
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert not [name for name in starter.step_metrics(responses, parts, 2, 0.0) if "kl/" in name]
    assert "train/entropy" not in starter.step_metrics(responses, [], 2, 0.0)


def test_the_line_of_an_evaluation_names_its_metrics_and_has_no_minus_zero(capsys):
    metrics = {"eval/format": 0.25, "eval/accuracy": 0.125, "eval/mean_reward": -1e-9}
    response = make_response([1], [2], text="a\nb", reward=0.5, problem={"rendered": "2?"})
    starter.log_eval(mock.Mock(), make_state(step=3), metrics, [response])
    sample, line = capsys.readouterr().out.splitlines()
    assert sample == r"  'a\nb' has reward 0.5"
    assert line == ("Step 3 | Held-out accuracy, sampled: 12.5% | format: 0.250 | "
                    "mean_reward: 0.000")


def test_what_is_added_to_the_stats_of_the_loss_is_logged(monkeypatch):
    monkeypatch.setattr(starter, "TOKEN_METRICS", dict(starter.TOKEN_METRICS))
    values, mask = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[True, True, False]])
    part = starter.mean_stats({"mine": values, "kl_max": values}, mask)
    assert part["mine"] == 1.5 and part["kl_max"] == 2.0
    responses = [make_response([1], [2]), make_response([1], [2])]
    assert starter.step_metrics(responses, [part], 2, 0.0)["train/mine"] == 1.5


def console_line(capsys, step=12, cfg=None, **changes):
    """-> what is printed after a step"""
    metrics = {"train/loss": 0.1234, "train/grad_norm": 0.567, "train/reward_mean": 0.4321,
               "train/avg_output_tokens": 102.4, "train/truncated_frac": 0.021,
               "train/entropy": 0.456, "time/step": 12.34}
    metrics |= {name.replace("__", "/"): value for name, value in changes.items()}
    with mock.patch.object(starter, "minutes_running", lambda: 9.01):
        starter.log_train(step, metrics, cfg or settings_of(n_grpo_steps=100))
    line, = capsys.readouterr().out.splitlines()
    assert len(line) <= 120 and not re.search(r" -0(\.0+)? ", f"{line} "), line
    return line


def test_the_line_of_a_step_has_the_names_of_the_specification(capsys):
    start = (r"Step 12 \| Loss: 0.123 \| Grad norm: 0.5(7|67) \| Reward mean: 0.432 \| "
             r"102 tok, 2% cut \| 12(\.3)? s, 18 min \| ")
    assert re.fullmatch(start + "Entropy: 0.46", console_line(capsys))
    line = console_line(capsys, kl__mean=0.02, train__kl_penalty=0.0123)
    assert re.fullmatch(start + "KL penalty: 0.0123", line)
    assert console_line(capsys, train__entropy=math.nan).endswith("Entropy: nan")
    line = console_line(capsys, cfg=settings_of(n_grpo_steps=100, max_minutes=12.0))
    assert " s, 3 min |" in line, "the time left, if that is less"


WITH_KL = {"kl__mean": 0.1, "train__kl_penalty": 0.1234}


@pytest.mark.parametrize("changes", [
    {"train__loss": -1e-9}, {"train__reward_mean": -1e-9}, WITH_KL | {"train__kl_penalty": -1e-9},
    {"cfg": settings_of(max_minutes=9.0)}, {"cfg": settings_of(max_minutes=2.0)}],
    ids=["loss", "reward", "KL", "no minute left", "late"])
def test_the_line_of_a_step_has_no_minus_zero(capsys, changes):
    line = console_line(capsys, **changes)
    assert "cfg" not in changes or " s, 0 min |" in line


@pytest.mark.parametrize("changes", [WITH_KL, {}], ids=["with KL", "without"])
def test_the_line_of_a_long_run_fits_120_columns(capsys, changes):
    console_line(capsys, step=999, cfg=settings_of(n_grpo_steps=1400), train__loss=-0.0123,
                 train__grad_norm=123.456, train__reward_mean=0.4321, time__step=123.45,
                 train__avg_output_tokens=4096.0, train__truncated_frac=1.0, **changes)


def write_folder(folder, text):
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(text)


def whole_folders(parent):
    """-> {name: text} of the folders that write_folder() has finished"""
    texts = {x.name: [file.read_text() for file in x.iterdir()] for x in parent.iterdir()}
    return {name: x[0] for name, x in texts.items() if len(x) == 2 and x[0] == x[1]}


def test_at_every_moment_the_old_folder_is_whole_or_the_new_one(tmp_path, monkeypatch):
    path, moments = tmp_path / "best", []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments, **options):
            moments.append(whole_folders(tmp_path))
            result = original(*arguments, **options)
            moments.append(whole_folders(tmp_path))
            return result

        monkeypatch.setattr(owner, name, watched)

    with starter.atomic_write(path) as temporary:
        write_folder(temporary, "old")
    for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
        watch(owner, name)
    with starter.atomic_write(path) as temporary:
        write_folder(temporary, "new")
    monkeypatch.undo()
    assert whole_folders(tmp_path) == {"best": "new"} and len(moments) >= 4
    # A folder cannot replace another: for a moment the new one, whole, is beside its place.
    assert all(x.get("best") == "old" or "new" in x.values() for x in moments), moments


def test_a_write_that_fails_leaves_the_old_and_asks_about_the_disk(tmp_path):
    path = tmp_path / "best"
    write_folder(path, "old")
    with pytest.raises(UserError, match="cannot write .*Is the disk full"):
        with starter.atomic_write(path) as temporary:
            temporary.mkdir()
            raise OSError("No space left on device")
    assert whole_folders(tmp_path) == {"best": "old"}
    (tmp_path / "best.new").mkdir(exist_ok=True)  # killed before it was whole
    with starter.atomic_write(path) as temporary:
        write_folder(temporary, "newer")
    assert whole_folders(tmp_path) == {"best": "newer"}


def make_checkpoint(folder, seed=0, kind="llama", **state):
    policy = make_policy(kind, seed=seed, **PACKED[kind])
    optimizer = torch.optim.AdamW(policy.parameters(), 0.01, fused=True)
    return starter.Checkpoint(folder / "checkpoint.pt", policy, optimizer, None,
                              make_state(**state))


def update_once(checkpoint):
    """-> the weights after one step"""
    checkpoint.optimizer.zero_grad()
    log_probs_of(checkpoint.policy, make_groups()).mean().backward()
    checkpoint.optimizer.step()
    return [parameter.detach().clone() for parameter in checkpoint.policy.parameters()]


@pytest.mark.parametrize("n_updates", [0, 2])
def test_a_restored_run_goes_on_to_the_bit(tmp_path, n_updates):
    """So does the one that was saved: before any update AdamW must not count a step."""
    whole, saved = make_checkpoint(tmp_path), make_checkpoint(tmp_path)
    for _ in range(n_updates):
        update_once(whole)
        update_once(saved)
    saved.save()
    restored = make_checkpoint(tmp_path, seed=5)
    restored.restore(torch.load(saved.path, weights_only=True))
    for _ in range(2):
        wanted = update_once(whole)
        assert all(map(torch.equal, update_once(restored), wanted))
        assert all(map(torch.equal, update_once(saved), wanted))


def test_a_checkpoint_keeps_plain_numbers_of_ones_own(tmp_path):
    saved = make_checkpoint(tmp_path, step=3, kl_smooth=np.float64(0.125), mine=np.mean([6, 8]))
    saved.save()
    restored = make_checkpoint(tmp_path)
    restored.restore(torch.load(saved.path, weights_only=True))
    assert vars(restored.state) == vars(saved.state) and restored.state.mine == 7
    saved.state.mine = torch.ones(1)
    with pytest.raises(TypeError):  # when it is saved, not when it is loaded
        saved.save()


def test_a_checkpoint_has_the_reference_once_it_was_refreshed(tmp_path):
    saved, restored = make_checkpoint(tmp_path), make_checkpoint(tmp_path)
    saved.ref_model, restored.ref_model = make_policy(seed=2), make_policy(seed=3)
    saved.save()
    assert "ref" not in torch.load(saved.path, weights_only=True), "it is the starting model"
    saved.state.ref_step = 4
    saved.save()
    restored.restore(torch.load(saved.path, weights_only=True))
    for mine, theirs in zip(restored.ref_model.parameters(), saved.ref_model.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("world, is_saved", [(1, True), (2, False)])
def test_an_error_of_the_reward_saves_the_steps_before_it(tmp_path, monkeypatch, world, is_saved):
    """With several ranks the others would wait for this one."""
    checkpoint = make_checkpoint(tmp_path)
    monkeypatch.setattr(starter, "WORLD", world)
    with pytest.raises(KeyError):
        with checkpoint.saved_on_error():
            raise KeyError("answer")
    assert checkpoint.path.exists() == is_saved


def test_a_checkpoint_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    torch.save({"state": Bomb()}, tmp_path / "checkpoint.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        starter.read_checkpoint(settings_of(resume=str(tmp_path)))
    assert not (tmp_path / "exploded").exists()


def test_a_run_without_a_checkpoint_begins_anew_unless_it_has_a_model(tmp_path, capsys):
    assert starter.read_checkpoint(settings_of()) is None and capsys.readouterr().out == ""
    cfg = settings_of(resume=str(tmp_path))
    assert starter.read_checkpoint(cfg) is None, "killed before its first checkpoint"
    assert capsys.readouterr().out == f"{tmp_path} has no checkpoint yet: it starts over\n"
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="no checkpoint"):
        starter.read_checkpoint(cfg)


def test_a_finished_run_says_so(tmp_path):
    make_checkpoint(tmp_path, step=5).save()
    cfg = settings_of(resume=str(tmp_path), n_grpo_steps=6)
    assert starter.read_checkpoint(cfg)["state"]["step"] == 5
    cfg.n_grpo_steps = 5
    with pytest.raises(UserError, match="it has finished: raise --n_grpo_steps"):
        starter.read_checkpoint(cfg)


def test_a_saved_model_ends_and_samples_as_it_was_trained(save_folder, tmp_path):
    folder = save_folder()
    (folder / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": 256, "do_sample": True, "top_p": 0.8, "repetition_penalty": 1.1}))
    policy, tokenizer = starter.init_policy(str(folder))
    policy.stop_ids = [256, 260]
    starter.save_model(policy, tokenizer, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    config = saved.generation_config
    assert config.do_sample and config.eos_token_id == [256, 260] and config.top_k == 0
    assert not config.top_p and not config.repetition_penalty
    saved.generate(torch.tensor([[65, 66]]), max_new_tokens=2)
    for mine, theirs in zip(policy.model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def kept_signals():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGTERM, handlers[1])


def test_the_first_signal_is_noted_and_a_second_ctrl_c_stops_at_once(kept_signals, capsys):
    received = starter.catch_signals()
    for _ in range(2):  # under torchrun a signal to all processes arrives twice
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2 and "stopping after" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


# ---- 7. Settings, task files, run folder ---------------------------------------------------------

settings = functools.partial(starter.main, only_settings=True)


@pytest.mark.parametrize("words, wanted", [
    ("", {}), ("--n_grpo_steps=3", {"n_grpo_steps": "3"}),
    ("--n-grpo-steps=3", {"n_grpo_steps": "3"}), ("--n_grpo_steps 3", {"n_grpo_steps": "3"}),
    ("--n-grpo-steps 3 --lr 1e-4", {"n_grpo_steps": "3", "lr": "1e-4"}),
    ("--compile", {"compile": "True"}), ("--compile --lr=1", {"compile": "True", "lr": "1"}),
    ("--lr -1", {"lr": "-1"}), ("--prompt=a=b--c", {"prompt": "a=b--c"}),
    ("--eval_task= --lr=1", {"eval_task": "", "lr": "1"}), ("--lr=1 --lr=2", {"lr": "2"})])
def test_arguments_have_their_usual_forms(words, wanted):
    assert starter.read_arguments(words.split()) == wanted


def test_an_argument_may_have_spaces_and_lines():
    argv = ["--prompt={question}\nThink, then --answer.", "--task", "my file.jsonl"]
    assert starter.read_arguments(argv) == {"prompt": "{question}\nThink, then --answer.",
                                            "task": "my file.jsonl"}


@pytest.mark.parametrize("words", ["lr=1e-5", "-lr=1", "--", "--=3", "5", "--lr=1 2", "--lr 1 2"])
def test_what_is_not_an_argument_is_an_error(words):
    with pytest.raises(UserError, match="--name=value"):
        starter.read_arguments(words.split())


@pytest.mark.parametrize("name, right", [
    ("learning_rate", "lr"), ("beta", "kl_coef"), ("num_generations", "group_size"),
    ("max_completion_length", "max_tokens"), ("num_iterations", "inner_epochs"),
    ("use_std_normalization", "advantage_scale"), ("epsilon", "clip_range"),
    ("max_steps", "n_grpo_steps"), ("model_name_or_path", "model_id"),
    ("kl_coeff", "kl_coef"), ("Temperature", "temperature"), ("group-sise", "group_size")])
def test_a_name_of_other_trainers_or_a_misspelled_one_gets_the_right_one(name, right):
    with pytest.raises(UserError, match=rf"did you mean {right}\?"):
        settings([f"--{name}=1"])


KL = "--use_kl_penalty=True"
BAD_SETTINGS = [
    ("--xyzzy=1", "--help"), ("--lr", "--lr=True: expected something like"),
    ("--seed=1.5", "--seed=1.5: expected something like 42"), ("--lr=high", "--lr=high: expected"),
    (f"{KL[:-4]}yes", "=yes: expected"), (f"{KL[:-4]}auto", "=auto: expected"),
    ("--offload=maybe", "=maybe: expected something like auto"),
    ("--lr=-1", "--lr=-1.0: expected"), ("--seed=-1", "--seed=-1: expected"),
    *[(f"--{name}={value}", f"--{name}={value}: expected") for value in ("nan", "inf", "-inf")
      for name in ("lr", "kl_coef", "max_grad_norm", "target_kl")],
    *[(f"--{name}=0", f"{name} must be above 0") for name in (
        "max_tokens", "n_minibatches", "inner_epochs", "n_grpo_steps", "n_eval", "max_turns",
        "temperature")],
    ("--group_size=1", "at least 2"),
    ("--group_size=0", "at least 2"), ("--rollout_batch_size=9", "divide rollout_batch_size"),
    ("--rollout_batch_size=0", "rollout_batch_size"), ("--loss_type=ppo", "grpo, dr_grpo, dapo"),
    ("--policy_loss=trpo", "policy_loss must be one of ppo, cispo, dppo, gspo"),
    ("--advantage_scale=False", "advantage_scale must be one of std, none, mean"),
    ("--use_std_normalization=False", "did you mean advantage_scale?"),
    (f"{KL} --kl_coef=0", "kl_coef=0 is no penalty: leave out use_kl_penalty"),
    (f"--kl_estimator=k4 {KL}", "k3"), (f"--kl_in=reward {KL}", "kl_estimator=k1"),
    (f"--kl_in=both {KL}", "kl_in must be"),
    *[(f"--{name}=1", f"{name}: set use_kl_penalty") for name in (
        "kl_coef", "target_kl", "ref_update_every", "kl_warmup_steps")],
    ("--resume=no/such/run", "no run to resume in no/such/run"),
    ("--resume=latest --out_dir=x", "no run to resume in x/latest")]


@pytest.mark.parametrize("words, message", BAD_SETTINGS, ids=[words for words, _ in BAD_SETTINGS])
def test_a_bad_setting_is_one_line(words, message, tmp_path, monkeypatch):
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        settings(words.split())
    assert message.replace("-1.0", "-1") in str(error.value).replace("-1.0", "-1")
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_every_value_gets_the_type_of_its_default():
    cfg = settings(["--lr=1e-5", KL, "--prompt=a=b", "--seed=7", "--compile", "--offload=False",
                    "--vllm_sleep=auto", "--use_vllm=false", "--max_minutes=3"])
    got = (cfg.lr, cfg.use_kl_penalty, cfg.prompt, cfg.seed, cfg.compile, cfg.offload,
           cfg.vllm_sleep, cfg.use_vllm, cfg.max_minutes)
    assert got == (1e-5, True, "a=b", 7, True, False, "auto", False, 3.0)
    assert type(cfg.max_minutes) is float and type(cfg.seed) is int


def test_plain_k1_in_the_loss_is_warned_about(capsys):
    for flag, is_warned in (("--kl_importance_weight=False", True), ("--kl_in=reward", False)):
        settings([KL, "--kl_estimator=k1", flag])
        assert ("plain k1" in capsys.readouterr().out) == is_warned


def test_without_a_gpu_the_defaults_suit_the_tiny_model(monkeypatch):
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        cfg = settings([])
        assert (cfg.task, cfg.model_id == "tiny") == (("countdown", False) if has_gpu else
                                                      ("tiny", True))
        assert cfg.compile == cfg.gradient_checkpointing == has_gpu
        assert cfg.lr == (1.5e-6 if has_gpu else 2e-4)
        assert cfg.temperature == 1.0 and cfg.kl_importance_weight and not cfg.use_kl_penalty


def test_what_is_typed_wins_over_the_run_over_the_task_file_over_the_block(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("SETTINGS = {'lr': 1.0, 'seed': 1, 'max_turns': 1, 'n_eval': 5}\n")
    fresh = settings([f"--task={file}", "--lr=3.0"])
    assert (fresh.lr, fresh.seed, fresh.max_turns, fresh.group_size) == (
        3.0, 1, 1, settings([]).group_size)
    assert f"{file} sets seed=1\n" in capsys.readouterr().out, "what is replaced is said"
    saved = vars(fresh) | {"lr": 2.0, "seed": 2, "model_id": "of the run"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    resumed = settings([f"--resume={tmp_path}", "--lr=4.0"])
    assert (resumed.lr, resumed.seed, resumed.max_turns) == (4.0, 2, 1)
    assert (resumed.model_id, resumed.task) == ("of the run", str(file))
    assert resumed.resume == str(tmp_path) and "sets" not in capsys.readouterr().out


def test_a_bad_value_in_settings_of_a_task_file_is_one_line(tmp_path):
    file = tmp_path / "mine.py"
    for number, (text, words) in enumerate((("{'learning_rate': 1}", "did you mean lr"),
                                            ("{'lr': 'high'}", "--lr=high"))):
        file = tmp_path / f"mine{number}.py"
        file.write_text(f"SETTINGS = {text}\n")
        with pytest.raises(UserError, match=words):
            settings([f"--task={file}"])


@pytest.mark.parametrize("flag, words", [
    ("--model_id=other", "keeps its model_id"), ("--lora_rank=4", "keeps its lora_rank"),
    ("--model_id=tiny", None), ("--lora_rank=0", None)])
def test_a_resumed_run_keeps_its_model(tmp_path, flag, words):
    saved = vars(settings_of(model_id="tiny", task="none"))
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        settings([f"--resume={tmp_path}", flag])


def test_a_run_of_another_version_can_be_resumed(tmp_path):
    saved = vars(settings_of(model_id="tiny", lr=0.25)) | {"version": "0.4.9"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    cfg = settings([f"--resume={tmp_path}"])
    assert cfg.lr == 0.25 and not hasattr(cfg, "version")


@pytest.fixture
def model_of_a_run(tmp_path):
    """-> the best/ of a run folder"""
    saved = vars(settings_of(task="a.jsonl", eval_task="b.jsonl", prompt="{x}?", lr=0.25, seed=7))
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (tmp_path / "best").mkdir()
    return tmp_path / "best"


@pytest.mark.parametrize("typed, prompt", [([], "{x}?"), (["--prompt={y}"], "{y}")])
def test_a_model_of_a_run_brings_task_and_prompt_of_that_run(model_of_a_run, capsys, typed, prompt):
    cfg = settings([f"--model_id={model_of_a_run}", *typed])
    assert (cfg.task, cfg.eval_task, cfg.prompt) == ("a.jsonl", "b.jsonl", prompt)
    assert (cfg.lr, cfg.seed) == (settings([]).lr, 42), "the rest is new"
    line = f"task and prompt are those of {model_of_a_run.parent}, unless typed\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("case", ["another task", "another config.json", "no such model"])
def test_another_model_or_task_brings_nothing(model_of_a_run, capsys, case):
    typed = ["--task=c.jsonl"] if case == "another task" else []
    if case == "another config.json":
        (model_of_a_run.parent / "config.json").write_text(json.dumps({"task": "a", "prompt": ""}))
    if case == "no such model":
        model_of_a_run.rmdir()
    cfg, plain = settings([f"--model_id={model_of_a_run}", *typed]), settings(typed)
    assert (cfg.task, cfg.eval_task, cfg.prompt) == (plain.task, plain.eval_task, plain.prompt)
    assert "unless typed" not in capsys.readouterr().out


def test_a_resumed_run_decides_anew_what_is_auto(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(vars(settings_of(offload="auto"))))
    assert settings([f"--resume={tmp_path}"]).offload == "auto"


def test_a_name_is_a_task_file_beside_starter():
    assert starter.load_task_file("tiny") is tiny and starter.load_task_file("none") is None
    assert starter.load_task_file("data.jsonl") is None
    assert starter.load_task_file(f"{HERE}/tasks/tiny.py") is tiny, "imported once"


def test_prepare_runs_for_the_model_and_the_tasks_on_the_first_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "TASKS", tmp_path)
    calls = []
    monkeypatch.setattr(sys.modules["builtins"], "note", calls.append, raising=False)
    for name in ("model", "task", "eval"):
        (tmp_path / f"{name}.py").write_text(f"def prepare():\n    note('{name}')\n")
    cfg = settings_of(model_id="model", task="task", eval_task="eval")
    starter.prepare(cfg)
    assert sorted(calls) == ["eval", "model", "task"]
    monkeypatch.setattr(starter, "LOCAL_RANK", 1)
    starter.prepare(cfg)
    starter.prepare(settings_of(model_id="no/model", task="none"))
    assert len(calls) == 3


def test_run_folders_are_numbered_and_named_after_what_was_typed(tmp_path):
    cfg = settings_of(out_dir=str(tmp_path / "out"), task="tiny")
    found = []
    for typed in ({}, {"lr": "1e-4"}, {"task": "/data/my file.jsonl"}, {"prompt": "ü " * 200}):
        folder = starter.make_run_folder(cfg, typed)
        assert (tmp_path / "out" / "latest").resolve() == folder.resolve()
        assert (folder / "starter.py").read_bytes() == (HERE / "starter.py").read_bytes()
        assert (folder / "tiny.py").exists(), "and its task file"
        found.append(folder.name)
    assert found[:3] == ["0001", "0002_lr=1e-4", "0003_task=my-file.jsonl"]
    assert found[3].startswith("0004_prompt=----") and len(found[3].encode()) < 250


def run_before_imports(tmp_path, *flags, **environment):
    """Run starter.py where importing numpy prints its GPU and ends the program."""
    (tmp_path / "numpy.py").write_text(
        "import os, sys\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'))\nsys.exit(3)")
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
    return subprocess.run([sys.executable, HERE / "starter.py", *flags], capture_output=True,
                          text=True, env=kept | {"PYTHONPATH": str(tmp_path)} | environment)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_immediate_and_lists_every_hyperparameter(tmp_path, flag):
    """Neither torch nor anything else that is slow to import is imported."""
    run = run_before_imports(tmp_path, flag)
    assert run.returncode == 0 and run.stderr == ""
    assert "python starter.py --resume=latest" in run.stdout
    for name in vars(settings([])):
        assert re.search(rf"^ +{name}=.*$", run.stdout, re.MULTILINE), name


@pytest.mark.parametrize("visible, expected", [(None, "9"), ("2,3,5,7", "3"), ("4", "4")])
def test_each_rank_sees_a_gpu_of_its_own(visible, expected, tmp_path):
    environment = {"LOCAL_RANK": "9", "RANK": "9", "WORLD_SIZE": "16"}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert run_before_imports(tmp_path, **environment).stdout == f"{expected}\n"
    alone = run_before_imports(tmp_path, **{"CUDA_VISIBLE_DEVICES": visible or "0,1"})
    assert alone.stdout == f"{visible or '0,1'}\n", "without torchrun nothing is changed"


# ---- 8. Quick tests ------------------------------------------------------------------------------

def reversed_kl(log_pi, log_ref, *rest):
    return starter_functions["compute_kl_divergence"](2 * log_pi.detach() - log_pi, log_ref, *rest)


def unweighted_kl(log_pi, log_ref, estimator="k1", rho=None):
    return starter_functions["compute_kl_divergence"](log_pi, log_ref, estimator)


def loss_with(**changes):
    def compute_loss(*arguments, **options):
        return starter_functions["compute_loss"](*arguments, **options | changes)
    return compute_loss


def loss_of_negative_advantages(advantages, *rest, **options):
    return starter_functions["compute_loss"](-advantages, *rest, **options)


def loss_without_the_old_policy(advantages, log_pi, old, *rest, **options):
    return starter_functions["compute_loss"](advantages, log_pi, None, *rest, **options)


starter_functions = dict(vars(starter))
MUTATIONS = {
    "the cap of pi/old": ("WEIGHT_CAP", 1.0), "the cap of old/sampler": ("MISMATCH_CAP", 1.0),
    "the limit of log-ratios": ("LIMIT", 0.5),
    "the sign of the KL's slope": ("compute_kl_divergence", reversed_kl),
    "the weight of the KL": ("compute_kl_divergence", unweighted_kl),
    "the sign of the advantages": ("compute_loss", loss_of_negative_advantages),
    "the upper clip": ("compute_loss", loss_with(clip_range_high=0.1)),
    "the weight of the sampler": ("compute_loss", loss_with(rollout_log_probs=None)),
    "the estimator": ("compute_loss", loss_with(kl_estimator="k1")),
    "where the KL is": ("compute_loss", loss_with(kl_in="reward", kl_estimator="k1")),
    "the mask": ("compute_loss", loss_with(response_mask=None)),
    "the old policy": ("compute_loss", loss_without_the_old_policy),
    "the policy loss": ("compute_loss", loss_with(policy_loss="ppo"))}


def test_the_published_numbers_are_those_of_starter(capsys):
    assert starter.test_functions() is True
    assert capsys.readouterr().out == "=== All Tests Passed! ===\n"


@pytest.mark.parametrize("name", MUTATIONS)
def test_quick_tests_notice_a_changed_loss_and_print_numbers_to_paste(name, monkeypatch, capsys):
    monkeypatch.setattr(starter, *MUTATIONS[name])
    assert starter.test_functions() is False, "it goes on"
    text = capsys.readouterr().out
    assert text.startswith("!!! the loss is not the published one") and text.count("\n") == 1
    pasted = ast.literal_eval(text.rpartition("PUBLISHED is now ")[2])
    monkeypatch.setattr(starter, "PUBLISHED", pasted)
    assert starter.test_functions() is True


def test_quick_tests_notice_a_nan(monkeypatch, capsys):
    monkeypatch.setattr(starter, "compute_kl_divergence", lambda *arguments: math.nan * arguments[0])
    assert starter.test_functions() is False
    assert "Passed" not in capsys.readouterr().out

"""Tasks: task files and their settings, several turns, and the tasks of tasks/"""
import contextlib, http.server, importlib.util, itertools, json, os, re, subprocess, sys, threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import sample
import starter
from conftest import (KL, ROOT, SMALL, repeatable, rows_of, settings_in, small_run,
                      write_script)
from starter import UserError
from test_starter import CHAT, make_policy, make_task, settings_of, write_rows

# ---- Task files ----------------------------------------------------------------------------------

TEN_LINES = """
    from starter import final_answer

    def rows():
        return ({"prompt": f"{i}+{i % 7}=", "answer": i + i % 7} for i in range(60))

    def reward_fn(text, row):
        answer = final_answer(text)
        if answer is None or not answer.isdecimal():
            return -10.0
        return -abs(int(answer) - int(row["answer"])) / 10
    """
# A reward such that the plain one of starter.py would be noticed
MINUS_LENGTH = """
    def reward_fn(text, row):
        return -float(len(text))
    """


@pytest.fixture
def run_task(world, script, tmp_path):
    """-> function that runs starter.py in a folder of its own; returns the run folder"""
    def run(*arguments, **options):
        code = script.run(tmp_path, *small_run(world), *arguments, **options)
        assert code == 0, script.text()
        return (tmp_path / "out" / "latest").resolve()
    return run


def test_a_task_file_of_ten_lines_trains(run_task, tmp_path):
    path = write_script(tmp_path / "mine.py", TEN_LINES)
    assert len(path.read_text().split("\n")) <= 11
    rows = rows_of(run_task(f"--task={path}", "--group_size=8"))
    assert len(rows) == 4 and max(row["train/grad_norm"] for row in rows[1:]) > 0
    assert all(row["train/reward_mean"] < 0 for row in rows[1:]), "its own reward"


ROWS = {
    "a list": "return [{'prompt': f'{i}+1=', 'answer': i + 1} for i in range(20)]",
    "a generator": "for i in range(20): yield {'prompt': f'{i}+1=', 'answer': i + 1}",
    "two parts": """return [{'prompt': f'{i}+1=', 'answer': i + 1} for i in range(20)], iter(
            [{'prompt': f'{i}+2=', 'answer': i + 2} for i in range(7)])""",
    "fields of the template": "return [{'a': i, 'b': 1, 'answer': i + 1} for i in range(20)]"}
if importlib.util.find_spec("datasets"):
    ROWS["a dataset"] = """import datasets; return datasets.Dataset.from_list(
            [{'prompt': f'{i}+1=', 'answer': i + 1} for i in range(20)])"""


@pytest.mark.parametrize("name", ROWS)
def test_rows_may_be_any_iterable_of_dicts(tmp_path, name):
    path = write_script(tmp_path / "mine.py", f"def rows():\n    {ROWS[name]}\n")
    task = starter.Task(settings_of(task=str(path), prompt="{a}+{b}="))
    sizes = (20, 7) if name == "two parts" else (16, 4)
    assert (len(task.train_rows), len(task.held_out_rows)) == sizes
    for row in task.train_rows + task.held_out_rows:
        a, b = row["prompt"][0]["content"].removesuffix("=").split("+")
        assert row["answer"] == int(a) + int(b) and task.reward_fn("#### 0", row) == 0.1


@pytest.fixture
def tasks_of_every_kind(tmp_path):
    """-> {kind: name for --task}, in a folder with a copy of starter.py"""
    (tmp_path / "starter.py").write_bytes((ROOT / "starter.py").read_bytes())
    (tmp_path / "tasks").mkdir()
    (tmp_path / "folder").mkdir()
    for file in ("tasks/named.py", "file.py"):
        write_script(tmp_path / file, TEN_LINES)
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(20)]
    for file in ("file.jsonl", "folder/train.jsonl"):
        write_rows(tmp_path / file, rows)
    write_rows(tmp_path / "folder/test.jsonl", [{"prompt": "2+2=", "answer": 4}])
    return {"name": "named", "task file": "file.py", "JSONL file": "file.jsonl", "folder": "folder"}


def test_a_task_is_a_name_a_task_file_a_jsonl_file_or_a_folder(tasks_of_every_kind, run_task,
                                                               tmp_path):
    for kind, name in tasks_of_every_kind.items():
        folder = run_task(f"--task={name}", "--n_grpo_steps=1", script=tmp_path / "starter.py")
        assert settings_in(folder)["task"] == name
        is_own_reward = rows_of(folder)[1]["train/reward_mean"] < 0
        assert is_own_reward == (kind in ("name", "task file")), kind


def test_starter_alone_in_a_folder_trains_on_a_jsonl_file(run_task, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "starter.py").write_bytes((ROOT / "starter.py").read_bytes())
    rows = [{"question": f"{i}+1", "answer": i + 1} for i in range(20)]
    task = write_rows(home / "data.jsonl", rows)
    folder = run_task(f"--task={task}", "--prompt={question}=", script=home / "starter.py")
    assert len(rows_of(folder)) == 4


def test_a_task_file_imports_the_running_script_as_starter(world, tmp_path):
    """From a shell in another folder, by a copy of starter.py with another name"""
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_grpo.py").write_bytes((ROOT / "starter.py").read_bytes())
    write_script(home / "mine.py", f"""
        import sys
        import starter
        from starter import final_answer, normalize
        assert starter is sys.modules["__main__"] and final_answer is starter.final_answer
        assert starter.__file__ == {str(home / "my_grpo.py")!r}
        """, TEN_LINES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, home / "my_grpo.py", *small_run(world), f"--task={home}/mine.py",
         "--n_grpo_steps=1"], cwd=tmp_path, text=True, timeout=300, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith("=== All Tests Passed! ===\n")
    assert len(rows_of(tmp_path / "out" / "latest")) == 2


def test_the_run_folder_has_copies_of_the_script_and_the_task_file(run_task, tmp_path):
    path = write_script(tmp_path / "mine.py", TEN_LINES)
    copy = tmp_path / "my_grpo.py"
    copy.write_bytes((ROOT / "starter.py").read_bytes() + b"# mine\n")
    folder = run_task(f"--task={path}", "--n_grpo_steps=1", script=copy)
    assert (folder / "my_grpo.py").read_bytes() == copy.read_bytes()
    assert (folder / "mine.py").read_text() == path.read_text()


BAD_TASKS = {
    "no row": ("def rows():\n    return []", "error: too few rows"),
    "no dicts": ("def rows():\n    return [1]", "mine.py, row 1"),
    "no field": ("def rows():\n    return [{'prompt': 'a', 'answer': 1}, {'a': 1}]",
                 "mine.py, row 2: KeyError 'question'"),
    "no such setting": ("SETTINGS = {'lrr': 1}\ndef rows():\n    return []", "did you mean lr?"),
    "no prompt fits": ("def rows():\n    return [{'prompt': 30 * str(i)} for i in range(10, 20)]",
                       "Raise --max_prompt_tokens")}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_mistake_in_a_task_file_is_one_line_and_exit_code_2(world, script, tmp_path, name):
    text, words = BAD_TASKS[name]
    write_script(tmp_path / "mine.py", text)
    assert script.run(tmp_path, *small_run(world), "--task=mine.py") == 2, script.text()
    last_line = script.text().splitlines()[-1]
    assert last_line.startswith("error: ") and words in last_line
    assert script.text().count("error: ") == 1 and "Traceback" not in script.text()
    # A missing answer is found when the first response is rewarded.
    assert name == "no answer" or not (tmp_path / "out").exists()


def test_a_name_that_is_no_task_says_what_a_task_is(script, tmp_path):
    assert script.run(tmp_path, "--task=nothing", "--model_id=nothing") == 2
    line = script.text().splitlines()[-1]
    assert line.startswith("error: no task nothing here ") and str(ROOT / "tasks") in line


def test_prepare_runs_once_before_the_rows_and_the_model_are_read(world, script, tmp_path):
    write_script(tmp_path / "mine.py", f"""
        import shutil

        calls = []
        SETTINGS = {{"model_id": "made"}}

        def prepare():
            calls.append("prepare")
            shutil.copytree({str(world / "model")!r}, "made")

        def rows():
            calls.append("rows")
            return [{{"prompt": f"{{i}}+1=", "answer": i + 1}} for i in range(20)]

        def reward_fn(text, row):
            assert calls == ["prepare", "rows"]
            return float(len(text))
        """)
    code = script.run(tmp_path, *SMALL, "--task=mine.py", "--n_grpo_steps=1")
    assert code == 0, script.text()
    assert len(rows_of(tmp_path / "out" / "latest")) == 2


# ---- Their settings ------------------------------------------------------------------------------

def test_settings_of_a_task_file_are_printed_and_give_way_to_what_is_typed(world, script, tmp_path):
    settings = {"lr": 5e-4, "n_eval": 3, "max_tokens": 9, "prompt": "{a}+1="}
    path = write_script(tmp_path / "mine.py", f"SETTINGS = {settings}",
                        "def rows():\n    return [{'a': i} for i in range(20)]", MINUS_LENGTH)
    assert script.run(tmp_path, f"--model_id={world}/model", "--task=mine.py", "--max_tokens=12",
                      "--use_vllm=False", "--rollout_batch_size=8", "--n_grpo_steps=1") == 0
    said = re.findall(r"^mine.py sets (\w+)=(.*)$", script.text(), re.MULTILINE)
    assert said == [("lr", "0.0005"), ("n_eval", "3"), ("prompt", "{a}+1=")], "a line for each"
    folder = tmp_path / "out" / "latest"
    used = settings_in(folder)
    assert [used[name] for name in settings] == [5e-4, 3, 12, "{a}+1="]
    # A resumed run keeps them, though the file has changed.
    path.write_text(path.read_text().replace("0.0005", "0.1"))
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=2") == 0, script.text()
    assert settings_in(folder)["lr"] == 5e-4 and "mine.py sets" not in script.text()
    assert rows_of(folder)[2]["train/lr"] == pytest.approx(5e-4 * 2 / 10), "in the warm-up"


def test_a_resumed_run_and_sample_use_the_reward_and_replies_of_the_task_file(run_task, tmp_path,
                                                                              script):
    write_script(tmp_path / "mine.py", """
        TURN_ENDS = "</answer>"

        def rows():
            return [{"prompt": f"{i}+1=", "answer": 7} for i in range(20)]

        def reply(problem, text):
            is_first = len(problem["turns"]) == 1
            return "!" if is_first and text.endswith("</answer>") else None
        """, MINUS_LENGTH)
    folder = run_task("--task=mine.py", "--n_grpo_steps=1", "--max_tokens=40")
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=2") == 0, script.text()
    assert rows_of(folder)[2]["train/reward_mean"] < 0
    assert script.run(tmp_path, "--n_samples=4", script=ROOT / "sample.py") == 0, script.text()
    assert re.search(r"mean reward -[0-9]", script.text()) and "environment> !" in script.text()


def block_of_the_readme(words):
    """-> the Python code in README.md that contains these words"""
    blocks = re.findall("```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    block, = [block for block in blocks if words in block]
    return block


def test_the_task_file_of_the_readme_trains(run_task, tmp_path):
    """Only the download has a stand-in, in a module beside the task file."""
    write_script(tmp_path / "datasets.py", """
        def load_dataset(path, name):
            rows = [{"question": f"{i}+1", "answer": f"so\\n#### {i + 1}"} for i in range(30)]
            return {"train": rows}
        """)
    path = write_script(tmp_path / "my_task.py", block_of_the_readme("load_dataset"))
    folder = run_task(f"--task={path}", "--prompt={question}=")
    assert 0 < max(row["train/reward_mean"] for row in rows_of(folder)[1:]) <= 1
    rewards = {sample["reward"] for sample in rows_of(folder, "samples.jsonl")}
    assert rewards <= {0.0, 1.0}, "not 0.1, as of starter.py"


def test_the_judge_is_asked_for_every_reward(run_task, tmp_path):
    write_rows(tmp_path / "data.jsonl", [{"prompt": f"{i}+1="} for i in range(20)])
    asked = []

    def judge(request):
        body = request.rfile.read(int(request.headers["Content-Length"]))
        asked.append(json.loads(body))
        return str(len(asked[-1]["response"]) % 3 / 2).encode()

    with local_server(judge) as url:
        folder = run_task("--task=judge", "--reward_truncated", JUDGE_URL=url)
    assert len(asked) == 3 * 16 + 3 * 4 and asked[0].keys() == {"response", "problem"}
    means = [row["train/reward_mean"] for row in rows_of(folder)[1:]]
    assert [mean * 32 % 1 for mean in means] == [0, 0, 0], "answers are 0, 0.5 and 1"


@contextlib.contextmanager
def local_server(answer):
    """-> address of an HTTP server that answers each request with answer(request)"""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            data = answer(self)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(getattr(data, "announced", len(data or b""))))
            self.end_headers()
            self.wfile.write(data or b"")

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# ---- Turns of a random model ---------------------------------------------------------------------

END = 256  # <|end|>
GAME_TOKENS = ["</calc>", "</calc>="]  # the ids 260 and 261
GAME_LIMIT = 70  # tokens of a game
# What a turn of the model is, without and with TURN_ENDS
GAME_TURNS = {(): r"((?!<\|end).)*<\|end\|>", ("</calc>",): r"((?!</calc>).)*(</calc>=?|<\|end\|>)"}


def make_game_tokenizer(chat_template=CHAT):
    tokenizer = load_tiny().make_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(GAME_TOKENS)
    return tokenizer


def load_tiny():
    return starter.load_task_file("tiny")


def make_game_policy(kind):
    """A random model whose turns end now and then"""
    policy = make_policy(kind, vocab_size=262)
    with torch.no_grad():
        weight = policy.model.get_output_embeddings().weight
        weight[[END, 260, 261]] *= 1.8
    return policy


def start_torch_sampler(policy):
    return starter.init_vllm(policy, make_game_tokenizer(), settings_of(use_vllm=False))


def play_games(llm, turn_ends):
    """-> task, responses of games with as many turns as the answer says, of which 3 are allowed"""
    def reply(problem, text):
        is_over = len(problem["turns"]) >= 2 * int(problem["answer"]) - 1
        return None if is_over else f" {len(text)} letters"

    rows = [{"prompt": f"{i}?", "answer": i} for i in range(6)]
    task = make_task(rows[5:], rows[:5], max_tokens=GAME_LIMIT, max_turns=3, max_prompt_tokens=40)
    task.reply = reply
    task.turn_ends = turn_ends
    task.encode(make_game_tokenizer(), [END])
    return task, starter.rollout_with_vllm(llm, task, task.held_out, 6, 1)


def parts_of(tokenizer, response):
    """-> [(did the model choose them, text of these tokens), ...]"""
    runs = itertools.groupby(zip(response.ids, response.mask), lambda pair: pair[1])
    return [(is_chosen, tokenizer.decode([token for token, _ in run])) for is_chosen, run in runs]


def check_turns(task, responses):
    """The model's turns end where they should, and replies are what the mask leaves out."""
    for response in responses:
        turns = response.problem["turns"]
        parts = parts_of(task.tokenizer, response)
        assert len(parts) == len(turns) <= 5 and len(turns) % 2, "the last turn is the model's"
        for i in range(0, len(turns), 2):
            is_chosen, text = parts[i]
            assert is_chosen and text.removesuffix("<|end|>") == turns[i]["content"]
            if i + 1 < len(turns):
                assert re.fullmatch(GAME_TURNS[task.turn_ends], text, re.DOTALL)
                said = turns[i + 1]["content"]
                if text.endswith("<|end|>"):
                    said = f"<user>{said}<|end|><assistant>"
                assert parts[i + 1] == (False, said)
        if not response.finished:
            assert len(turns) == 5 or GAME_LIMIT - 30 < len(response.ids) <= GAME_LIMIT
    assert {response.finished for response in responses} == {True, False}


def check_log_probs(policy, responses):
    """Those of the sampler, also after replies, are those of the model."""
    n_after_replies = 0
    for response in responses:
        row = torch.tensor([response.prompt_ids + response.ids])
        log_probs = starter.get_response_log_probs(policy, row[:, :-1], row[:, 1:])
        wanted = log_probs[0, -len(response.ids):] * torch.tensor(response.mask)
        assert torch.allclose(torch.tensor(response.log_probs), wanted, atol=1e-4)
        if False in response.mask:
            n_after_replies += sum(response.mask[response.mask.index(False):])
    assert n_after_replies > 20


@pytest.fixture(params=GAME_TURNS, ids=["chat", "inside one response"])
def games(request):
    """-> policy, task, responses"""
    policy = make_game_policy("llama")
    return policy, *play_games(start_torch_sampler(policy), request.param)


def test_turns_end_where_they_should(games):
    policy, task, responses = games
    check_turns(task, responses)


def test_log_probs_know_the_replies(games):
    policy, task, responses = games
    check_log_probs(policy, responses)


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_replies_have_no_loss_and_no_kl(games, estimator):
    policy, task, responses = games
    batch = starter.make_batch(responses)
    chosen = [token for response in responses
              for token, is_chosen in zip(response.ids, response.mask) if is_chosen]
    assert batch.labels[batch.response_mask].tolist() == chosen
    logits, ref_logits = torch.randn(2, *batch.labels.shape, len(task.tokenizer))
    logits.requires_grad_()
    _, metadata = starter.grpo_microbatch_step(
        lambda ids: SimpleNamespace(logits=logits), batch.input_ids, batch.labels,
        batch.response_mask, torch.randn(len(responses)), 1, 0.2, kl_coef=0.1,
        ref_model=lambda ids: SimpleNamespace(logits=ref_logits), kl_estimator=estimator)
    assert torch.equal(logits.grad.abs().sum(-1) > 0, batch.response_mask)
    assert metadata["n_tokens"] == len(chosen) and metadata["kl_mean"] > 0


# ---- Turns of given texts ------------------------------------------------------------------------

@pytest.fixture
def play(monkeypatch):
    """-> function that plays texts, one for each problem: (responses, what was written, with the
    replies in [], seeds)"""
    def play(texts, reply, turn_ends=("</calc>",), reward_fn=None, seed=3, chat_template=CHAT,
             **changes):
        rows = [{"prompt": f"{i}?", "answer": i} for i in range(8)]
        sizes = {"max_tokens": 100, "max_prompt_tokens": 40}
        task = make_task(rows[4:], rows[:4], **sizes | {"reward_truncated": False} | changes)
        task.reply = reply
        task.turn_ends = turn_ends
        task.reward_fn = reward_fn or task.reward_fn
        tokenizer = make_game_tokenizer(chat_template)
        task.encode(tokenizer, [END])
        left = {i: tokenizer.encode(text) for i, text in enumerate(texts)}
        seeds = []

        def generate(llm, task, responses):
            parts = []
            for response in responses:
                seeds.append(response.seed())
                tokens = left[int(response.problem["answer"])]
                limit = task.cfg.max_tokens - len(response.ids)
                ids = []
                while len(ids) < limit and not {END, 260} & set(ids):
                    ids.append(tokens.pop(0))
                parts.append((ids, [0.0] * len(ids)))
            return parts

        monkeypatch.setattr(starter, "generate", generate)
        responses = starter.rollout_with_vllm(None, task, task.held_out[:len(texts)], 1, seed)
        written = ["".join(text if is_chosen else f"[{text}]" for is_chosen, text
                           in parts_of(tokenizer, response)) for response in responses]
        starter.grade(task, responses)
        return responses, written, seeds
    return play


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_a_response_without_an_end_is_cut_off_and_earns_nothing(play, reward):
    """A reply that is too long, a turn that does not end, one more turn than allowed"""
    reply = mock.Mock(side_effect=lambda problem, text: "x" * 200 if "long" in text else "ok")
    texts = ["long</calc>", "y" * 200, "1</calc>2</calc>3</calc>4</calc>"]
    responses, written, _ = play(texts, reply, reward_fn=lambda text, problem: reward,
                                 max_turns=3, max_tokens=50)
    assert written == ["long</calc>", "y" * 50, "1</calc>[ok]2</calc>[ok]3</calc>"]
    assert [response.reward for response in responses] == [min(0.0, reward)] * 3
    assert reply.call_count == 4, "not for a turn that has not ended"


@pytest.mark.parametrize("changes", [{"max_turns": 4}, {"max_tokens": 8}])
def test_a_response_that_ends_at_the_last_turn_or_token_has_ended(play, changes):
    responses, _, _ = play(["1</calc>2</calc>3</calc>4</calc>"],
                           lambda problem, text: None if "4" in text else "",
                           reward_fn=lambda *rest: 1.0, **changes)
    assert responses[0].reward == 1.0


def test_replies_may_be_empty_or_have_special_tokens_and_turns_may_be_empty(play):
    answers = {"a": "", "b": "<|end|><|pad|>", "": "once more", "c": None}
    responses, written, _ = play(
        ["a</calc>b</calc></calc>c</calc>", "<|end|>c<|end|>", "c<|end|>"],
        lambda problem, text: answers[text.removesuffix("</calc>")])
    assert written == ["a</calc>b</calc>[<|end|><|pad|>]</calc>[once more]c</calc>",
                       "<|end|>[<user>once more<|end|><assistant>]c<|end|>", "c<|end|>"]
    assert [turn["content"] for turn in responses[0].problem["turns"]] == [
        "a</calc>", "", "b</calc>", "<|end|><|pad|>", "</calc>", "once more", "c</calc>"]
    assert all(response.finished for response in responses)


def test_an_end_token_after_white_space_in_the_template_is_not_doubled(play):
    answers = {"": "once more", "c": None}
    _, written, _ = play(["<|end|>c<|end|>"], lambda problem, text: answers[text],
                         chat_template=CHAT.replace("<|end|>", " <|end|>"))
    assert written == ["<|end|>[<user>once more <|end|><assistant>]c<|end|>"]


def test_a_reply_may_keep_state_in_its_copy_of_the_problem(play):
    def reply(problem, text):
        problem["n_calls"] = problem.get("n_calls", 0) + 1
        problem.setdefault("said", []).append(text)
        return None if "z" in text else "go on"

    def reward_fn(text, problem):
        return problem["n_calls"] + len(problem["turns"]) + len(problem["said"])

    texts = ["a<|end|>z<|end|>"] * 4
    responses, _, seeds = play(texts, reply, reward_fn=reward_fn)
    assert [response.reward for response in responses] == [2.0 + 3 + 2] * 4
    _, _, others = play(texts, reply, reward_fn=reward_fn, seed=4)
    assert len({*seeds, *others}) == 16, "no two turns share a seed"


def test_a_template_that_hides_earlier_turns_is_refused(world, script, tmp_path):
    """The tiny model's template shows the last message only."""
    write_script(tmp_path / "mine.py", TEN_LINES, "def reply(problem, text):\n    return '?'")
    assert script.run(tmp_path, *small_run(world), "--task=mine.py") == 2
    last_line = script.text().splitlines()[-1]
    assert last_line.startswith("error: reply() needs a chat template")
    assert "Traceback" not in script.text()


# ---- The tasks of tasks/ -------------------------------------------------------------------------

@pytest.mark.parametrize("text, result", [
    ("<calc>347*582+914</calc>", "= 202868"), ("so <calc> (1+2) * 3 </calc>\n", "= 9"),
    ("<calc>1/3-1</calc>", "= -2/3"), ("<calc>2+2</calc>=", " 4"), ("<calc>2</calc> = ", " 2"),
    ("<calc></calc>", "= error"), ("<calc>1/0</calc>=", " error"), ("<calc>2**9</calc>", "= error"),
    (f"<calc>{'9' * 5000}</calc>", "= error"), ("1+1</calc>", "= error"), ("<calc>1+1", None)])
def test_the_calculator_is_exact_or_says_error(text, result):
    assert starter.load_task_file("calculator").reply({}, text) == result


@pytest.mark.parametrize("text, said", [
    ("7", None), ("I say 7.", None), ("6", "higher:"), ("12, no, 8", "lower:"), ("", "a number:"),
    ("9" * 5000, "lower:")])
def test_the_game_says_higher_or_lower(text, said):
    guess = starter.load_task_file("guess")
    assert guess.reply({"answer": "7"}, text) == said
    problem = {"answer": "7", "turns": [{"role": "assistant", "content": text}]}
    assert guess.reward_fn("7", problem) == float(said is None)


@pytest.fixture(params=["calculator", "guess"])
def game_task(request, monkeypatch, tmp_path):
    """-> name of a task with turns, with easy problems and a shorter warm start"""
    module = starter.load_task_file(request.param)
    easy = [{"question": f"{a + b}-{b}", "answer": str(a)} for a in (1, 2, 3) for b in range(1, 14)]
    if request.param == "calculator":
        monkeypatch.setattr(module, "make_problem", lambda rng: rng.choice(easy))
    write_model = module.tiny.write_model
    monkeypatch.setattr(module.tiny, "write_model", lambda folder, examples, steps, **options:
                        write_model(folder, lambda step: examples(step)[:20], 25, **options))
    monkeypatch.setattr(starter, "test_functions", lambda: True)
    monkeypatch.chdir(tmp_path)
    return request.param


def test_a_task_with_turns_trains_resumes_to_the_bit_and_is_measured(game_task, capsys):
    settings = ["--use_vllm=False", "--rollout_batch_size=16", "--group_size=4", "--n_eval=12",
                "--eval_every=2", KL, "--lr=1e-3", "--warmup_steps=1", f"--task={game_task}"]
    starter.main([*settings, "--n_grpo_steps=4"])
    rows = rows_of("out/latest")
    assert len(rows) == 5 and max(row["train/grad_norm"] for row in rows[1:]) > 1e-3
    assert max(row["rollout/logp_gap_mean"] for row in rows[1:]) < 1e-4
    assert f"{game_task} sets max_tokens=" in capsys.readouterr().out
    starter.main([*settings, "--n_grpo_steps=2", "--out_dir=parts"])
    starter.main(["--resume=latest", "--out_dir=parts", "--n_grpo_steps=4"])
    assert repeatable("parts/latest")[3:] == repeatable("out/latest")[3:]
    capsys.readouterr()
    sample.main(["--n_samples=1", "--n_eval=12"])
    assert f"pass@1   {rows[-1]['eval/accuracy']:.3f} " in capsys.readouterr().out, "as in the run"
    samples = rows_of("out/latest", "samples.jsonl")
    assert max(len(row["turns"]) for row in samples) > 2, "there were replies"


# The others have tests of their own.
OTHER_TASKS = {path.stem for path in (ROOT / "tasks").glob("*.py")} - {
    "calculator", "guess", "gsm8k", "judge", "tiny"}


@pytest.mark.parametrize("name", sorted(OTHER_TASKS))
def test_every_other_task_trains(run_main, name):
    folder = run_main(f"--task={name}", "--n_grpo_steps=1", "--rollout_batch_size=8",
                      "--n_eval=4", "--max_tokens=30", "--max_prompt_tokens=600")
    assert [row["step"] for row in rows_of(folder)] == [0, 1]


def test_the_default_makes_the_tiny_model_once(monkeypatch, tmp_path):
    tiny = load_tiny()
    warm_start = mock.Mock(wraps=tiny.warm_start)
    monkeypatch.setattr(tiny, "warm_start", lambda model, tokenizer, examples, steps:
                        warm_start(model, tokenizer, lambda step: examples(step)[:8], 2))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        starter.main(["--use_vllm=False", "--rollout_batch_size=8", "--n_grpo_steps=1",
                      "--n_eval=4"])
    assert warm_start.call_count == 1
    assert len(rows_of("out/latest")) == 2 and Path("tiny/config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "tiny"}


class Announced(bytes):
    """A part of a file whose length is announced as if it were whole"""
    announced = 10**6


@pytest.fixture
def gsm8k(monkeypatch, tmp_path):
    """-> (the task, {path: what the server answers}, paths that were asked for)"""
    rows = [{"question": f"{i}+1", "answer": f"because\n#### {i + 1}"} for i in range(30)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {f"/{name}.jsonl": data for name in ("train", "test")}
    asked = []
    module = starter.load_task_file("gsm8k")
    monkeypatch.chdir(tmp_path)

    def answer(request):
        asked.append(request.path)
        return files.get(request.path)

    with local_server(answer) as url:
        monkeypatch.setattr(module, "URL", url)
        yield module, files, asked


def test_gsm8k_is_downloaded_once(gsm8k):
    module, _, asked = gsm8k
    for _ in range(2):
        module.prepare()
    assert asked == ["/train.jsonl", "/test.jsonl"]
    assert list(module.rows())[3] == {"question": "3+1", "answer": "because\n#### 4"}
    assert not [path for path in Path("gsm8k").iterdir() if path.suffix != ".jsonl"]


@pytest.mark.parametrize("answer", [None, Announced(b'{"question": "1+1", ')],
                         ids=["not there", "the connection is lost"])
def test_gsm8k_is_downloaded_whole_or_not_at_all(gsm8k, answer):
    module, files, asked = gsm8k
    whole = files["/test.jsonl"]
    files["/test.jsonl"] = answer
    with pytest.raises(UserError, match="cannot download .*/test.jsonl"):
        module.prepare()
    assert [path.name for path in Path("gsm8k").iterdir()] == ["train.jsonl"]
    files["/test.jsonl"] = whole
    module.prepare()
    assert asked == ["/train.jsonl", "/test.jsonl", "/test.jsonl"]
    assert Path("gsm8k/test.jsonl").read_bytes() == whole


def test_gsm8k_says_what_to_do_without_a_network(script, tmp_path):
    code = script.run(tmp_path, "--task=gsm8k", "--model_id=none", GSM8K_URL="http://127.0.0.1:9")
    assert code == 2 and script.text().count("error: ") == 1
    last_line = script.text().splitlines()[-1]
    assert last_line.startswith("error: cannot download http://127.0.0.1:9/train.jsonl (")
    assert "github.com/openai/grade-school-math" in last_line
    assert last_line.endswith(f"{tmp_path}/gsm8k"), "where to put the files"


def test_gsm8k_trains_on_its_training_rows(gsm8k, run_main):
    module, _, _ = gsm8k
    folder = run_main("--task=gsm8k", "--prompt={question}=", "--n_grpo_steps=1")
    assert len(rows_of(folder)) == 2
    samples = rows_of(folder, "samples.jsonl")
    assert all(re.fullmatch(r"\d+\+1=", sample["prompt"]) for sample in samples)

"""Tests of turns and of the examples, a minute on two cores: python -m pytest examples"""
import importlib.util, itertools, json, os, re, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

import starter
import sample
import tiny

DEFAULTS = {name: getattr(starter, name) for name in ("reply", "reward_fn", "TURN_ENDS")}
import calculator
import guess
vars(starter).update(DEFAULTS)  # each example has put its own there

END = 256  # <|end|>
CLOSE = 260  # </calc>, the first new token
LIMIT = 70  # tokens of a game with a random model
CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture
def use(monkeypatch):
    """-> function that sets reply(), TURN_ENDS and the reward; all is put back"""
    def use(reply, *turn_ends, reward_fn=starter.reward_fn):
        monkeypatch.setattr(starter, "reply", reply)
        monkeypatch.setattr(starter, "TURN_ENDS", turn_ends)
        monkeypatch.setattr(starter, "reward_fn", reward_fn)

    use(None)
    monkeypatch.setattr(starter, "catch_signals", list)
    return use


def make_tokenizer(new_tokens, chat_template=CHAT):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(new_tokens)
    return tokenizer


def make_task(folder, tokenizer, **changes):
    """Its held-out problems are 0?, 1?, 2?, 3? with the answers 0, 1, 2, 3."""
    for name, first in {"train": 4, "test": 0}.items():
        rows = [{"prompt": f"{i}?", "answer": i} for i in range(first, first + 4)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"task": str(folder / "train.jsonl"), "eval_task": str(folder / "test.jsonl"),
                "model_id": "random", "max_tokens": 100, "max_prompt_tokens": 30}
    cfg = starter.main([], only_settings=True, **settings | changes)
    return starter.Task(cfg, *starter.read_task(cfg), tokenizer, [END])


def parts_of(tokenizer, response):
    """-> [(did the model choose them, text of these tokens), ...]"""
    runs = itertools.groupby(zip(response.ids, response.mask), lambda pair: pair[1])
    return [(is_chosen, tokenizer.decode([token for token, _ in run])) for is_chosen, run in runs]


# ---- The examples

@pytest.mark.parametrize("text, result", [
    ("<calc>347*582+914</calc>", "= 202868"), ("so <calc> (1+2) * 3 </calc>\n", "= 9"),
    ("<calc>1/3-1</calc>", "= -2/3"), ("<calc>2+2</calc>=", " 4"), ("<calc>2</calc> = ", " 2"),
    ("<calc></calc>", "= error"), ("<calc>1/0</calc>=", " error"), ("<calc>2**9</calc>", "= error"),
    (f"<calc>{'9' * 5000}</calc>", "= error"), ("1+1</calc>", "= error"), ("<calc>1+1", None)])
def test_the_calculator_is_exact_or_says_error(text, result):
    assert calculator.reply({}, text) == result


@pytest.mark.parametrize("text, said", [
    ("7", None), ("I say 7.", None), ("6", "higher:"), ("12, no, 8", "lower:"), ("", "a number:"),
    ("9" * 5000, "lower:")])
def test_the_game_says_higher_or_lower(text, said):
    assert guess.reply({"answer": "7"}, text) == said
    problem = {"answer": "7", "turns": [{"role": "assistant", "content": text}]}
    assert guess.reward_fn("7", problem) == float(said is None)


SMALL = ["--use_vllm=False", "--rollout_batch_size=16", "--group_size=4", "--n_eval=12",
         "--eval_every=2", "--use_kl_penalty=True", "--lr=1e-3", "--warmup_steps=1"]


@pytest.fixture(params=[calculator, guess], ids=["calculator", "guess"])
def example(request, use, monkeypatch, tmp_path):
    """With few, easy problems and a shorter warm start"""
    module = request.param
    use(module.reply, *(["</calc>"] if module is calculator else []), reward_fn=module.reward_fn)
    easy = [{"question": f"{a + b}-{b}", "answer": str(a)} for a in (1, 2, 3) for b in range(1, 14)]
    monkeypatch.setattr(calculator, "make_problem", lambda rng: rng.choice(easy))
    make_tiny = tiny.main
    monkeypatch.setattr(tiny, "main", lambda folder, examples, steps, **options: make_tiny(
        folder, lambda step: examples(step)[:20], 25, **options))
    monkeypatch.chdir(tmp_path)
    return module


def read(name, folder="out"):
    return [json.loads(line) for line in open(f"{folder}/latest/{name}")]


def test_an_example_trains_resumes_and_is_measured(example, monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["example.py", *flags])
        example.main()

    with pytest.raises(starter.UserError, match="lrr"):
        run("--lrr=1")
    assert not Path("out").exists(), "a misspelled setting is noticed before a model is made"
    run(*SMALL, "--n_grpo_steps=4")
    rows = read("metrics.jsonl")
    assert len(rows) == 5 and max(row["train/grad_norm"] for row in rows[1:]) > 1e-3
    assert max(row["rollout/logp_gap_mean"] for row in rows[1:]) < 1e-4
    # In two parts: the settings of the run come before those of the script.
    run(*SMALL, "--n_grpo_steps=2", "--out_dir=parts")
    run("--resume=latest", "--out_dir=parts", "--n_grpo_steps=4")
    parts = read("metrics.jsonl", "parts")
    for name in rows[4]:
        assert name.startswith("time/") or parts[4][name] == rows[4][name]
    capsys.readouterr()
    sample.main(["--n_samples=1", f"--script={example.__file__}"])
    assert f"pass@1   {rows[-1]['eval/accuracy']:.3f} " in capsys.readouterr().out, "as in the run"
    assert max(len(row["turns"]) for row in read("samples.jsonl")) > 2, "there were replies"


def test_the_environment_of_the_readme(use, tmp_path, monkeypatch):
    blocks = re.findall("```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    game = SimpleNamespace()
    exec(next(block for block in blocks if "def reply(" in block), vars(game))
    problem = {"answer": "37", "turns": [{"role": "assistant", "content": "37"}]}
    assert game.reply(problem, "37") is None and game.reward_fn("", problem) == 1.0
    said = [game.reply(problem, text) for text in ("36", "$1,000", "hm")]
    assert ["higher" in said[0], "lower" in said[1], "number" in said[2]] == [True] * 3
    rows = [{"prompt": f"{i}: Guess.", "answer": i % 3} for i in range(9)]
    (tmp_path / "games.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    tiny.main("model", lambda step: [("1:", "1")], 2, chat_template=guess.CHAT)
    starter.main(["--model_id=model", "--task=games.jsonl", "--max_turns=3", "--n_grpo_steps=1",
                  "--max_tokens=40", *SMALL])
    assert len(read("metrics.jsonl")) == 2


# ---- Turns of a random model

@pytest.fixture(params=["inside one response", "chat", pytest.param("vLLM", marks=[
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")])])
def world(request, use, tmp_path):
    """-> policy, tokenizer, responses of games with as many turns as the answer says, at most 3"""
    turn_ends = () if request.param == "chat" else ("</calc>",)
    tokenizer = make_tokenizer(["</calc>", "</calc>="])
    model = tiny.make_model()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.set_attn_implementation("packed")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        # Turns end now and then.
        model.get_output_embeddings().weight[[CLOSE, CLOSE + 1] if turn_ends else [END]] *= 2
    policy = starter.Policy(model, [END])

    def reply(problem, text):
        is_over = len(problem["turns"]) >= 2 * int(problem["answer"]) - 1
        return None if is_over else f" {len(text)} letters"

    use(reply, *turn_ends)
    task = make_task(tmp_path, tokenizer, max_tokens=LIMIT, max_turns=3,
                     use_vllm=request.param == "vLLM")
    llm = starter.init_vllm(policy, tokenizer, task.cfg)
    assert isinstance(llm, starter.TorchSampler) != task.cfg.use_vllm
    responses = starter.rollout_with_vllm(llm, task, task.held_out, 6, 1)
    turn = r"((?!</calc>).)*(</calc>=?|<\|end\|>)" if turn_ends else r"((?!<\|end).)*<\|end\|>"
    return SimpleNamespace(policy=policy, tokenizer=tokenizer, responses=responses, turn=turn)


def test_turns_end_where_they_should_and_log_probs_know_the_replies(world):
    n_after_replies = 0
    for response in world.responses:
        turns = response.problem["turns"]
        parts = parts_of(world.tokenizer, response)
        assert len(parts) == len(turns) <= 5 and len(turns) % 2, "the last turn is the model's"
        for i in range(0, len(turns), 2):
            is_chosen, text = parts[i]
            assert is_chosen and text.removesuffix("<|end|>") == turns[i]["content"]
            if i + 1 < len(turns):
                assert re.fullmatch(world.turn, text, re.DOTALL)
                said = turns[i + 1]["content"]
                if text.endswith("<|end|>"):
                    said = f"<user>{said}<|end|><assistant>"
                assert parts[i + 1] == (False, said)
                n_after_replies += len(parts[i + 2][1])
        if not response.finished:
            assert len(turns) == 5 or LIMIT - 30 < len(response.ids) <= LIMIT
        row = torch.tensor([response.prompt_ids + response.ids])
        log_probs = starter.get_response_log_probs(world.policy, row[:, :-1], row[:, 1:])
        wanted = log_probs[0, -len(response.ids):] * torch.tensor(response.mask)
        assert torch.allclose(torch.tensor(response.log_probs), wanted, atol=1e-4)
    assert n_after_replies > 50
    assert {response.finished for response in world.responses} == {True, False}


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
@pytest.mark.parametrize("world", ["inside one response", "chat"], indirect=True)
def test_replies_have_no_loss_and_no_kl(world, estimator):
    batch = starter.make_batch(world.responses)
    chosen = [token for response in world.responses
              for token, is_chosen in zip(response.ids, response.mask) if is_chosen]
    assert batch.labels[batch.response_mask].tolist() == chosen
    logits, ref_logits = torch.randn(2, *batch.labels.shape, len(world.tokenizer))
    logits.requires_grad_()
    _, metadata = starter.grpo_microbatch_step(
        lambda ids: SimpleNamespace(logits=logits), batch.input_ids, batch.labels,
        batch.response_mask, torch.randn(len(world.responses)), 1, 0.2, kl_coef=0.1,
        ref_model=lambda ids: SimpleNamespace(logits=ref_logits), kl_estimator=estimator)
    assert torch.equal(logits.grad.abs().sum(-1) > 0, batch.response_mask)
    assert metadata["n_tokens"] == len(chosen) and metadata["kl_mean"] > 0


# ---- Turns of given texts

@pytest.fixture
def play(tmp_path, monkeypatch):
    """-> function that plays texts: (responses, what was written with the replies in [], seeds)"""
    def play(texts, seed=3, chat_template=CHAT, **changes):
        tokenizer = make_tokenizer(["</calc>"], chat_template)
        task = make_task(tmp_path, tokenizer, **changes)
        left = [tokenizer.encode(text) for text in texts]
        all_seeds = []

        def generate(llm, task, responses):
            parts = []
            for response in responses:
                all_seeds.append(response.seed())
                number = int(re.search("[0-9]", tokenizer.decode(response.prompt_ids))[0])
                limit = task.cfg.max_tokens - len(response.ids)
                ids = []
                while len(ids) < limit and not {END, CLOSE} & set(ids):
                    ids.append(left[number].pop(0))
                parts.append((ids, [0.0] * len(ids)))
            return parts

        monkeypatch.setattr(starter, "generate", generate)
        responses = starter.rollout_with_vllm(None, task, task.held_out[:len(texts)], 1, seed)
        shown = ["".join(text if is_chosen else f"[{text}]" for is_chosen, text
                         in parts_of(tokenizer, response)) for response in responses]
        starter.grade(responses, task.cfg.reward_truncated)
        return responses, shown, all_seeds
    return play


def test_a_response_without_an_end_is_cut_off_and_earns_nothing(use, play):
    """A reply that is too long, a turn that does not end, one more turn than allowed"""
    reply = mock.Mock(side_effect=lambda problem, text: "x" * 200 if "long" in text else "ok")
    texts = ["long</calc>", "y" * 200, "1</calc>2</calc>3</calc>4</calc>"]
    for reward in (1.0, -1.0):
        use(reply, "</calc>", reward_fn=lambda text, problem: reward)
        responses, shown, _ = play(texts, max_turns=3, max_tokens=50)
        assert shown == ["long</calc>", "y" * 50, "1</calc>[ok]2</calc>[ok]3</calc>"]
        assert [response.reward for response in responses] == [min(0.0, reward)] * 3
    assert reply.call_count == 2 * 4, "not for a turn that has not ended"
    # Over at the last turn or token is over.
    use(lambda problem, text: None if "4" in text else "", "</calc>", reward_fn=lambda *rest: 1.0)
    for changes in ({"max_turns": 4}, {"max_tokens": 8}):
        assert play(texts[2:], **changes)[0][0].reward == 1.0


def test_replies_may_be_empty_or_have_special_tokens_and_turns_may_be_empty(use, play):
    answers = {"a": "", "b": "<|end|><|pad|>", "": "once more", "c": None}
    use(lambda problem, text: answers[text.removesuffix("</calc>")], "</calc>")
    responses, shown, _ = play(["a</calc>b</calc></calc>c</calc>", "<|end|>c<|end|>", "c<|end|>"])
    assert shown == ["a</calc>b</calc>[<|end|><|pad|>]</calc>[once more]c</calc>",
                     "<|end|>[<user>once more<|end|><assistant>]c<|end|>", "c<|end|>"]
    assert [turn["content"] for turn in responses[0].problem["turns"]] == [
        "a</calc>", "", "b</calc>", "<|end|><|pad|>", "</calc>", "once more", "c</calc>"]
    assert all(response.finished for response in responses)
    # An end token after white space in the template is not doubled.
    shown = play(["<|end|>c<|end|>"], chat_template=CHAT.replace("<|end|>", " <|end|>"))[1]
    assert shown == ["<|end|>[<user>once more <|end|><assistant>]c<|end|>"]


def test_a_reply_may_keep_state(use, play):
    def reply(problem, text):
        problem["n_calls"] = problem.get("n_calls", 0) + 1
        return None if "z" in text else "go on"

    use(reply, reward_fn=lambda text, problem: problem["n_calls"] + len(problem["turns"]))
    responses, _, seeds = play(["a<|end|>z<|end|>"] * 4)
    assert [response.reward for response in responses] == [2.0 + 3] * 4
    others = play(["a<|end|>z<|end|>"] * 4, seed=4)[2]
    assert len({*seeds, *others}) == 16, "no two turns share a seed"

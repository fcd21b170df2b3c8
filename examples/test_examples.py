"""Tests of turns and of the examples, a minute on two cores: python -m pytest examples"""
import copy, itertools, os, re, signal, subprocess, sys, threading
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"

import pytest, torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
import starter, tiny
from starter import Response, UserError

OWN = {name: getattr(starter, name) for name in ("reply", "reward_fn", "TURN_ENDS")}
import calculator, guess  # each puts its own into starter
vars(starter).update(OWN)

from test_starter import (
    CHAT, HERE, close, eager_copy, equal_weights, gradient, make_policy, needs_vllm, numbers_of,
    process_kept, relative, rows_of, script, settings_of, write_rows)

END, CLOSE, LIMIT = 256, 261, 70  # <|end|>, </calc>, tokens of a game with a random model


def make_tokenizer(*new_tokens, chat_template=CHAT):
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.add_tokens(list(new_tokens))
    return tokenizer


def make_task(tokenizer, **changes):
    """Its problems are 1?, 2?, 3?, 4? with the answers 1, 2, 3, 4, all held out but the last."""
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(1, 5)]
    settings = settings_of(**{"reward_truncated": False, "max_tokens": 100} | changes)
    return starter.Task(settings, rows[3:], rows[:3], tokenizer)


def split(tokenizer, response):
    """-> [(did the model choose them, text of these tokens), ...]"""
    runs = itertools.groupby(zip(response.ids, response.mask), lambda pair: pair[1])
    return [(is_chosen, tokenizer.decode([token for token, _ in run])) for is_chosen, run in runs]


@pytest.fixture
def use(monkeypatch):  # -> function that sets reply() and TURN_ENDS
    return lambda reply, *turn_ends: [monkeypatch.setattr(starter, "reply", reply),
                                      monkeypatch.setattr(starter, "TURN_ENDS", turn_ends)]


# ---- The examples ----------------------------------------------------------------------------

@pytest.mark.parametrize("text, result", [
    ("<calc>347*582+914</calc>", "= 202868"), ("so <calc> (1+2) * 3 </calc>\n", "= 9"),
    ("<calc>1/3-1</calc>", "= -2/3"), ("<calc>6/3</calc>", "= 2"), ("<calc>2+2</calc>=", " 4"),
    ("<calc>2</calc> = ", " 2"), ("<calc>2</calc>, ", "= 2"), ("<calc><calc>3</calc>", "= 3"),
    (f"<calc>{'9*' * 99}9</calc>", f"= {9**100}"), ("<calc></calc>", "= error"),
    ("<calc>1/0</calc>=", " error"), ("<calc>2**9</calc>", "= error"),
    (f"<calc>{'9' * 5000}</calc>", "= error"), ("<calc>١+١</calc>", "= error"),
    ("1+1</calc>", "= error"), ("<calc>1+1", None), ("<answer>5</answer>", None), ("", None)])
def test_the_calculator_is_exact_or_says_error_and_answers_calls_only(text, result):
    assert calculator.reply({}, text) == result


@pytest.mark.parametrize("text, said", [
    ("7", None), ("I say 7.", None), ("6", "higher:"), ("12, no, 8", "lower:"), ("", "a number:"),
    ("9" * 5000, "lower:"), ("٧", "a number:")])
def test_the_game_says_higher_or_lower(text, said):
    assert guess.reply({"answer": "7"}, text) == said
    problem = {"answer": "7", "turns": [{"role": "assistant", "content": text}]}
    assert guess.reward_fn("7", problem) == float(said is None)


def arguments_of(example):  # that its main() passes on
    with (mock.patch.object(tiny, "train_example") as function,
          mock.patch("sys.argv", ["example.py"])):  # not pytest's own
        example.main()
    return *function.call_args.args, function.call_args.kwargs


def test_the_warm_starts_are_in_the_format_of_their_tasks():
    for prompt, text in calculator.warm_start_examples(0):
        call, end, rest = text.partition("</calc>")
        result = calculator.reply({}, call + end) or ""
        reward = calculator.reward_fn(rest[len(result):], {"answer": eval(prompt[:-1])})
        assert rest.startswith(result) and (reward == 1.0 or not end)
    for _, text in guess.warm_start_examples(0):
        turns = re.findall(r"([0-9]+)(?:<\|end\|>)?((?:higher|lower):)?", text)
        assert "".join(map("<|end|>".join, turns)).removesuffix("<|end|>") == text
        assert any(all(guess.reply({"answer": number}, said) == (answer or None)
                       for said, answer in turns) for number in range(1, 16)), "no such number"
    for example in (calculator, guess):
        _, rows, _, settings, examples, *_ = arguments_of(example)
        prompt = starter.read_row(rows[0], settings["prompt"])["prompt"]
        prompts = {re.sub("[0-9]+", "1", x) for x, _ in [*examples(0), (prompt, "")]}
        assert len(prompts) == 1 and examples(0) == examples(0) != examples(1)
    assert starter.render_reply("up", make_tokenizer(chat_template=guess.CHAT)) == "<|end|>up"


# Few problems with few answers: after a warm start of seconds some must be right.
EASY = [{"question": f"{a + b}-{b}", "answer": str(a)} for a in (1, 2, 3) for b in range(1, 7)]
FORM = "{question}:", "<calc>{question}</calc>= {answer}<answer>{answer}</answer>"
RUN = ["--use_vllm=False", "--rollout_batch_size=16", "--group_size=4", "--n_grpo_steps=4",
       "--n_eval=12", "--eval_every=3", "--save_every=2", "--use_kl_penalty=True", "--lr=1e-3",
       "--warmup_steps=1"]


class Example:
    """An example in a folder with a model after a short warm start: its own takes a minute."""

    def __init__(self, example, folder, script=None):
        self.folder, self.script = folder, script
        name, *_, examples, _, options = arguments_of(example)
        self.file, self.arguments = f"examples/{name}.py", RUN
        if example is calculator:
            write_rows(folder / "easy.jsonl", EASY)
            self.arguments = [*RUN, "--task=easy.jsonl", "--n_eval=4"]
            examples = lambda step: [[part.format(**row) for part in FORM] for row in EASY]
        tiny.main(folder / "out" / f"tiny_{name}", lambda step: examples(step)[:18], 25, **options)

    def start(self, file, *arguments, stdin=""):
        argv = [str(HERE / file), *arguments]
        self.script.start(self.folder, before=(
            f"import io, runpy\nsys.argv, sys.stdin = {argv!r}, io.StringIO({stdin!r})\n"
            f"runpy.run_path({argv[0]!r}, run_name='__main__')"))

    def run(self, *words, **options):
        self.start(*words, **options)
        assert self.script.end() == 0, self.script.text()
        return self.script.text()


@pytest.mark.parametrize("example, lines", [
    pytest.param(calculator, ["4-2:", "7-6:", "5-4:", "5-2:"], id="calculator"),
    pytest.param(guess, ["17:", "higher:", "lower:"], id="guess")])
def test_an_example_trains_resumes_and_is_measured(example, lines, script, tmp_path):
    place = Example(example, tmp_path, script)
    place.run(place.file, *place.arguments)
    whole, again, two = (tmp_path / name / "latest" for name in ("out", "again", "two"))
    rows, samples, n_replies = rows_of(whole), rows_of(whole, "samples.jsonl"), 0
    assert len(rows) == 5 and max(row["train/grad_norm"] for row in rows[1:3]) > 1e-3
    assert max(row["rollout/logp_gap_max"] for row in rows[1:]) < 1e-3
    for sample in samples:
        for turn, answer in zip(sample["turns"][::2], sample["turns"][1::2]):
            assert (turn["role"], answer["role"]) == ("assistant", "environment")
            assert answer["content"] == example.reply(sample, turn["content"])
            n_replies += 1
        assert sample["reward"] in (0.0, example.reward_fn(sample["response"], sample))
    assert n_replies > 3
    place.start(place.file, *place.arguments, "--out_dir=again")
    script.until("Step 3 ")
    os.kill(script.pid, signal.SIGKILL)
    assert script.end() == -signal.SIGKILL, script.text()
    assert "after step 2" in place.run(place.file, "--resume=latest", "--out_dir=again")
    assert numbers_of(again) == numbers_of(whole) and equal_weights(again, whole)
    text = place.run("sample.py", "--n_samples=1")
    assert f"accuracy, pass@1   {rows[-1]['eval/accuracy']:.3f} " in text, "as in the run"
    assert "environment> " in text and "accuracy, greedy" in text
    text = place.run("sample.py", "--chat", stdin="\n".join([*lines, "", lines[0], ""]))
    assert text.count("model: ") == len(lines) + 1 and "this is a new conversation" in text
    if example is calculator:
        assert re.search(r"</calc>= ([-0-9/]+|error)", text), "it may call the calculator"
        return
    assert not re.search("model: .*(higher|lower):", text), "here the user is the game"
    # Two ranks play the games of one.
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2", HERE / place.file, *RUN, "--out_dir=two"], check=True,
                   cwd=tmp_path, timeout=300)
    close(numbers_of(two), numbers_of(whole))
    assert rows_of(two, "samples.jsonl") == samples


@needs_vllm
@pytest.mark.xdist_group("vllm")
def test_an_example_with_vllm(tmp_path):
    place = Example(calculator, tmp_path)
    arguments = [*place.arguments, "--use_vllm=True", "--n_grpo_steps=2"]
    text = subprocess.check_output([sys.executable, HERE / place.file, *arguments], cwd=tmp_path,
                                   timeout=300, text=True)
    rows, samples = (rows_of(tmp_path / "out/latest", f"{x}.jsonl") for x in ("metrics", "samples"))
    assert max(row["rollout/logp_gap_max"] for row in rows[1:]) < 1e-3
    assert max(len(sample["turns"]) for sample in samples) > 2 and "torch samples" not in text


# ---- Turns of a random model -----------------------------------------------------------------

class World:
    """A random model and an environment. A game has as many turns as the answer says, at most 3."""

    def __init__(self, is_chat):
        self.is_chat, tokenizer = is_chat, make_tokenizer("<calc>", "</calc>", "</calc>=")
        self.turn_ends = () if is_chat else ("</calc>",)
        self.task = make_task(tokenizer, max_tokens=LIMIT, max_turns=3)
        self.problems = self.task.held_out + self.task.training
        self.policy = make_policy(vocab_size=len(tokenizer))
        with torch.no_grad():  # turns end now and then
            weight = self.policy.model.get_output_embeddings().weight
            weight[END if is_chat else CLOSE] = 2 * weight[END]
        self.llm = starter.TorchSampler(self.policy)
        self.params = starter.init_sampling_params(self.task.cfg, 2, [END])

    def reply(self, problem, text):
        is_over = len(problem["turns"]) >= 2 * int(problem["answer"]) - 1
        is_over |= not self.is_chat and "</calc>" not in text
        return None if is_over else f" {len(text)} letters"

    def play(self, problems, first=0, seed=1, step=1):
        return starter.roll_out(self.llm, self.task, problems, self.params, seed, step, first)


@pytest.fixture(params=[False, True], ids=["inside one response", "chat"])
def world(request, use):
    world = World(request.param)
    use(world.reply, *world.turn_ends)
    return world


def test_an_error_in_one_reply_does_not_wait_for_the_others(world, use):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def reply(problem, text):
        if problem["answer"] == "1":
            assert begun.wait(5)
            raise ValueError("no server")
        begun.set()
        may_end.wait(5)
        ended.append(text)

    use(reply, *world.turn_ends)
    with pytest.raises(UserError, match="no server"):
        world.play(world.problems)
    n_ended = len(ended)
    may_end.set()
    assert n_ended == 0


def test_the_mask_has_the_models_tokens_and_their_log_probs_know_the_replies(world):
    responses, plain, n_after = world.play(world.problems), eager_copy(world.policy), 0
    prompts = starter.repeat([problem["prompt_ids"] for problem in world.problems], 2)
    for prompt, response in zip(prompts, responses):
        ids, logps, mask, finished, problem = response
        n_turns, parts = len(problem["turns"]), split(world.task.tokenizer, response)
        # A reply that does not fit is no turn: the last one is the model's.
        assert len(parts) - (not mask[-1]) == n_turns <= 5 and len(ids) == len(mask) <= LIMIT
        assert problem["turns"][-1]["role"] == "assistant"
        for i, (turn, (is_chosen, text)) in enumerate(zip(problem["turns"], parts), 1):
            wanted = turn["content"]
            if is_chosen:
                text = re.sub(r"(<\|(end|pad)\|>)+$", "", text)
            elif world.is_chat:
                wanted = f"<user>{wanted}<|end|><assistant>"
            is_cut_off = i == n_turns and len(ids) == LIMIT
            assert text == (wanted[:len(text)] if is_cut_off else wanted)
            assert is_chosen == (i % 2 == 1) == (turn["role"] == "assistant")
        is_over = n_turns == 2 * int(problem["answer"]) - 1 or parts[-1][1].endswith("<|end|>")
        assert mask[-1] and is_over if finished else len(ids) == LIMIT or n_turns == 5
        with torch.no_grad():  # one pass over the whole row
            logits = plain(torch.tensor([prompt + ids])).logits[0, -1 - len(ids):-1]
        wanted = logits.log_softmax(-1)[range(len(ids)), ids] * torch.tensor(mask)
        assert torch.allclose(torch.tensor(logps), wanted, atol=1e-4)
        n_after += sum(mask[mask.index(False):]) if False in mask else 0
    assert n_after > 30 and {response.finished for response in responses} == {True, False}


def plain_loss(model, ref, prompts, responses, advantages, loss_type, estimator):
    """The loss of the chosen tokens, all gradients left to autograd -> (loss, metrics)"""
    rows, entropies, kls = [], [], []
    for prompt, response, advantage in zip(prompts, responses, advantages):
        tokens = torch.tensor([prompt + response.ids])
        before = [len(prompt) + i - 1 for i, is_chosen in enumerate(response.mask) if is_chosen]
        log_pi, log_ref = (x(tokens).logits[0, before].log_softmax(-1) for x in (model, ref))
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
        here, there = (x[range(len(x)), tokens[0, 1:][before]] for x in (log_pi, log_ref))
        ratio, l = (here - here.detach()).exp(), here - there
        kls.append(ratio * ((-l).exp() - 1 + l) if estimator == "k3"
                   else (log_pi.exp() * (log_pi - log_ref)).sum(-1))
        rows.append(0.1 * kls[-1] - ratio * advantage)
    tokens, entropy, kl = map(torch.cat, (rows, entropies, kls))
    loss = {"grpo": sum(row.mean() for row in rows) / 8, "dr_grpo": tokens.sum() / 8 / LIMIT,
            "dapo": tokens.mean()}[loss_type]
    return loss, {"n_tokens": len(kl), "entropy": entropy.mean().item(),
                  "kl_mean": kl.mean().item()}


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_replies_have_no_loss_no_kl_no_entropy_and_no_share_in_a_divisor(world, estimator):
    responses, policy = world.play(world.problems), world.policy
    ref, plain = copy.deepcopy(policy), eager_copy(policy)
    prompts = starter.repeat([problem["prompt_ids"] for problem in world.problems], 2)
    torch.manual_seed(0)
    for parameter in ref.requires_grad_(False).parameters():
        parameter += 0.03 * torch.randn_like(parameter)
    batch = starter.make_batch(prompts, responses)
    batch.advantages_per_seq = torch.randn(8)
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        policy.zero_grad()
        loss, metadata = starter.grpo_microbatch_step(
            policy, **starter.select(batch, range(8)), gradient_accumulation_steps=1,
            clip_range=0.2, loss_type=loss_type, max_completion_length=LIMIT, ref_model=ref,
            kl_coef=0.1, kl_estimator=estimator)
        plain.zero_grad()
        wanted, metrics = plain_loss(plain, eager_copy(ref), prompts, responses,
                                     batch.advantages_per_seq, loss_type, estimator)
        wanted.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-3, abs=1e-6)
        assert relative(gradient(policy), gradient(plain)) < 1e-3
        assert {name: metadata[name] for name in metrics} == pytest.approx(metrics, rel=1e-3)


def test_a_game_does_not_depend_on_other_games_ranks_or_the_limit_of_turns(world):
    def games(*arguments, **changes):
        return [response._replace(logps=None) for response in world.play(*arguments, **changes)]

    problems, wanted = world.problems, games(world.problems)
    ids = [game.ids for game in wanted]
    assert games(problems[:1]) + games(problems[1:], first=1) == wanted, "on two ranks"
    assert games(problems[3:], first=3) == wanted[6:] and games([]) == [], "alone"
    for change in ({"seed": 2}, {"step": 2}, {"first": 1}):
        assert [game.ids for game in games(problems, **change)] != ids
    world.task.cfg.max_turns = 2
    shorter = [game.ids for game in games(problems)]
    assert shorter != ids and shorter == [y[:len(x)] for x, y in zip(shorter, ids)]


def test_the_reward_sees_who_said_what_and_what_reply_kept(world, use):
    def reply(problem, text):
        problem["n_calls"] = problem.get("n_calls", 0) + 1
        return world.reply(problem, text)

    def reward_fn(text, problem):
        chosen = [turn["content"] for turn in problem["turns"] if turn["role"] == "assistant"]
        assert text == "\n".join(chosen) and problem["n_calls"] == len(chosen)
        return len(problem["turns"])

    use(reply, *world.turn_ends)
    kept, responses = copy.deepcopy(world.problems), world.play(world.problems)
    rewards = starter.grade(responses, reward_fn, reward_truncated=False, group_size=2)[1]
    assert rewards == [len(r.problem["turns"]) if r.finished else 0.0 for r in responses]
    assert len({*rewards}) > 2 and world.problems == kept, "nothing is left for the next step"
    # An evaluation plays such games, too.
    _, rows = starter.evaluate_model(world.llm, world.task, world.params, [END], reward_fn)
    games = world.play(world.task.held_out, seed=0, step="eval")
    assert [row["turns"] for row in rows] == [game.problem["turns"] for game in games]


def test_a_list_in_a_problem_is_not_shared_by_its_responses(world, use):
    use(lambda problem, text: problem["board"].append(text), *world.turn_ends)
    games = world.play([world.problems[0] | {"board": []}])
    assert [len(game.problem["board"]) for game in games] == [1, 1]


# ---- Turns of given texts --------------------------------------------------------------------

class Scripted(starter.TorchSampler):
    """Writes given texts; the first token of a prompt says which."""

    def __init__(self, tokenizer, texts):
        self.left, self.seeds = [tokenizer.encode(text) for text in texts], []

    def generate(self, prompts, params, seeds):
        self.seeds.append(seeds)
        responses = [Response([], [0.0] * params["max_tokens"]) for _ in prompts]
        for prompt, (ids, *_) in zip(prompts, responses):
            while len(ids) < params["max_tokens"] and not {*ids} & {*params["stop_token_ids"]}:
                ids.append(self.left[prompt[0]].pop(0))
        return responses


def play(texts, tokenizer=None, step=3, **changes):
    """-> (responses, what was written with the replies in [], rewards, seeds of each turn)"""
    tokenizer = tokenizer or make_tokenizer("</calc>")
    task, llm = make_task(tokenizer, **changes), Scripted(tokenizer, texts)
    params = starter.init_sampling_params(task.cfg, 1, [END])
    problems = [{"prompt_ids": [i]} for i in range(len(texts))]
    responses = starter.roll_out(llm, task, problems, params, 7, step)
    shown = ["".join(text if is_chosen else f"[{text}]" for is_chosen, text
                     in split(tokenizer, response)) for response in responses]
    rewards = starter.grade(responses, lambda *rest: 1.0, task.cfg.reward_truncated, 1)[1]
    return responses, shown, rewards, llm.seeds


def test_a_misspelled_setting_is_noticed_before_a_model_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["guess.py", "--lrr=1"])
    with pytest.raises(UserError, match="no hyperparameter lrr"):
        tiny.train_example("guess", [], {}, {}, None, 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tiny").touch()
    with pytest.raises(UserError, match="tiny is a file"):
        tiny.main()


@pytest.mark.parametrize("new_tokens, end, result", [
    ([], "</calc>", "= 6"), (["</calc>="], "</calc>=", " 6"), ([">=", "=>"], "</calc>=", " 6"),
    (["c>= "], "</calc>= ", " 6"), ([">,"], "</calc>,", "= 6"), (["3</calc>"], "</calc>", "= 6")])
def test_a_turn_may_end_inside_a_token(use, new_tokens, end, result):
    use(calculator.reply, "</calc>")
    tokenizer, text = make_tokenizer(*new_tokens), f"2>1 => <calc>2*3{end}"
    ends = {tokenizer.decode([token]) for token in make_task(tokenizer).turn_end_ids}
    assert ends == {">", *new_tokens} - {"=>"}
    (response,), shown, _, _ = play([f"{text}6!<|end|>"], tokenizer)
    assert shown == [f"{text}[{result}]6!<|end|>"]
    assert [turn["content"] for turn in response.problem["turns"]] == [text, result, "6!"]


def test_turn_ends_are_ascii_texts(use):
    use(calculator.reply)
    # In the first, a comma was forgotten. The last could be written in other tokens.
    for wrong in ("</calc>", (5,), ("",), ("\N{RIGHTWARDS ARROW}",)):
        starter.TURN_ENDS = wrong
        with pytest.raises(starter.UserError, match=r"write ASCII texts, such as \('</call>',\)"):
            make_task(make_tokenizer()).turn_end_ids
    starter.TURN_ENDS = ("</calc>",)
    few = Tokenizer(models.BPE({"1": 0, "?": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=few)
    with pytest.raises(starter.UserError, match="no token of the model ends a text of TURN_ENDS"):
        make_task(tokenizer).turn_end_ids


def test_an_end_token_after_white_space_in_the_template_is_not_doubled(use):
    use(lambda problem, text: None if text == "b" else "more")
    tokenizer = make_tokenizer(chat_template=CHAT.replace("<|end|>", " <|end|>"))
    _, shown, _, _ = play(["a<|end|>b<|end|>"], tokenizer)
    assert shown == ["a<|end|>[<user>more <|end|><assistant>]b<|end|>"]


def test_replies_may_be_empty_or_have_special_tokens_and_turns_may_be_empty(use):
    answers = {"a": "", "b": "<|end|><|pad|><|end|>", "": "once more", "c": None}
    use(lambda problem, text: answers[text.removesuffix("</calc>")], "</calc>")
    responses, shown, rewards, _ = play([
        "a</calc>b</calc></calc>c</calc>", "b</calc>c<|end|>", "<|end|>c<|end|>", "c<|end|>"])
    assert shown == ["a</calc>b</calc>[<|end|><|pad|><|end|>]</calc>[once more]c</calc>",
                     "b</calc>[<|end|><|pad|><|end|>]c<|end|>",
                     "<|end|>[<user>once more<|end|><assistant>]c<|end|>", "c<|end|>"]
    assert [turn["content"] for turn in responses[0].problem["turns"]] == [
        "a</calc>", "", "b</calc>", answers["b"], "</calc>", "once more", "c</calc>"]
    assert rewards == [1.0] * 4


def test_a_response_without_an_end_is_cut_off_and_earns_nothing(use):
    """A reply that is too long, a turn that does not end, one more turn than allowed"""
    asked, limits = [], {"max_turns": 3, "max_tokens": 50}
    use(lambda problem, text: asked.append(text) or "x" * 200 * ("long" in text), "</calc>")
    texts = ["long</calc>", "y" * 200, "1</calc>2</calc>3</calc>4</calc>"]
    responses, shown, rewards, _ = play(texts, **limits)
    assert shown == [f"long</calc>[{'x' * 45}]", "y" * 50, "1</calc>2</calc>3</calc>"]
    assert [len(response.problem["turns"]) for response in responses] == [1, 1, 5]
    assert sorted(asked) == ["1</calc>", "2</calc>", "3</calc>", "long</calc>"]
    assert rewards == [0.0] * 3 and play(texts, **limits, reward_truncated=True)[2] == [1.0] * 3
    # Over at the last turn or token is over.
    use(lambda problem, text: None if "4" in text else "", "</calc>")
    assert play(texts[2:], max_turns=4)[2] == play(texts[2:], max_tokens=8)[2] == [1.0]
    # What reply() does to the list of turns does not change their number.
    use(lambda problem, text: problem["turns"].clear() or "", "</calc>")
    assert play(texts[2:], max_turns=3)[1] == ["1</calc>2</calc>3</calc>"]


@pytest.mark.parametrize("answer, words", [
    (lambda text: 1 / 0, "ZeroDivisionError"), (lambda text: 0, "int.* has no attribute"),
    (lambda text: "\udcff", "surrogates not allowed"), (lambda text: exit(), "SystemExit")])
def test_a_mistake_in_reply_is_one_error_that_shows_the_text(use, answer, words, capsys):
    use(lambda problem, text: answer(text) if text == "bad" else "go on")
    with pytest.raises(UserError) as error:
        play(["good<|end|>bad<|end|>", "good<|end|>good<|end|>bad<|end|>"])
    assert re.match(rf"reply: .*{words}.* for the response 'bad'$", str(error.value))
    assert capsys.readouterr().err == "", "a line for each thread"


def test_no_two_turns_share_a_seed_and_no_turn_is_cut_short_by_another_game(use):
    use(lambda problem, text: None if "z" in text else "go on")
    long = "y" * 60  # more than the room that the first game has then
    texts = [f"{long}<|end|>b<|end|>z<|end|>", "z<|end|>", f"a<|end|>{long}z<|end|>"]
    seeds, other = play(texts, max_tokens=140)[3], play(texts, max_tokens=140, step=4)[3]
    assert [len(row) for row in seeds] == [3, 2, 1] and len({*sum(seeds + other, [])}) == 12


def test_replies_run_side_by_side(use):
    barrier = threading.Barrier(24)  # each waits until all are there
    use(lambda problem, text: [barrier.wait(timeout=20), None if "z" in text else "go on"][1])
    assert play(["a<|end|>z<|end|>"] * 24)[2] == [1.0] * 24

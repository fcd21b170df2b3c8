"""The real vLLM: it samples what the trainer scores, before and after a sync. One process runs all
of these tests, because they share an engine."""
import copy, importlib.util, re, subprocess, sys

import pytest
import torch

import starter
from conftest import KL, ROOT, small_run
from test_runs import LAST_LINES, check_run
from test_starter import (eager_copy, gradient, ids_of, make_rows, plain_log_probs, randomize,
                          relative, rows_in, sample, settings_of, worst_gap)
from test_tasks import (GAME_TURNS, check_log_probs, check_turns, make_game_policy,
                        make_game_tokenizer, play_games)

pytestmark = [pytest.mark.xdist_group("vllm"),
              pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")]


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
# Longer than a block of vLLM's prefix cache
LONG_PROMPTS = [[2 + (i * j) % 250 for j in range(150)] for i in (7, 11)]


@pytest.fixture(scope="module")
def started():
    """-> policy, vLLM. The model is tied, which is where a sync can go wrong."""
    policy = make_game_policy("qwen3")
    tokenizer = make_game_tokenizer()
    threads = torch.get_num_threads(), torch.get_float32_matmul_precision()
    llm = starter.init_vllm(policy, tokenizer, settings_of(max_prompt_tokens=244), ("</calc>",))
    assert not isinstance(llm, starter.TorchSampler), "the real vLLM must start here"
    assert threads == (torch.get_num_threads(), torch.get_float32_matmul_precision())
    return policy, llm


@pytest.fixture
def engine(started):
    """-> policy, vLLM. A test may change the weights."""
    policy, llm = started
    weights = copy.deepcopy(policy.state_dict())
    yield policy, llm
    policy.load_state_dict(weights)
    starter.load_policy_into_vllm_instance(policy, llm)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_vllm_are_those_of_the_model(engine, temperature):
    policy, llm = engine
    responses = sample(llm, PROMPTS, temperature=temperature)
    assert worst_gap(policy, responses, temperature) < 1e-4
    assert (worst_gap(policy, responses, 1.0) < 1e-4) == (temperature == 1.0)


def test_responses_end_at_a_stop_id_or_are_cut_off(engine):
    responses = sample(engine[1], PROMPTS)
    assert len(responses) == 12 and len({tuple(ids) for ids in ids_of(responses)}) > 6
    for response in responses:
        assert 1 <= len(response.ids) == len(response.log_probs) <= 12 and all(response.mask)
        assert 256 not in response.ids[:-1] and response.finished == (response.ids[-1] == 256)
        assert response.finished or len(response.ids) == 12
    assert {response.finished for response in responses} == {True, False}


def test_only_stop_ids_end_a_response_not_the_end_token_of_the_model(engine):
    unending = sample(engine[1], PROMPTS, n=16, stop_ids=())
    assert {len(response.ids) for response in unending} == {12}
    assert any(256 in response.ids[:-1] for response in unending)


def test_responses_repeat_and_depend_on_their_seed_only(engine):
    _, llm = engine
    first = sample(llm, PROMPTS)
    assert [*map(vars, sample(llm, PROMPTS))] == [*map(vars, first)]
    for other in ({"seed": 43}, {"seed": "eval"}, {"first": 12}):
        assert ids_of(sample(llm, PROMPTS, **other)) != ids_of(first)
    # A second rank, which has the prompts after the first one, samples the same responses.
    assert ids_of(sample(llm, PROMPTS[1:], first=1)) == ids_of(first[4:])


def test_temperature_0_takes_the_most_probable_token(engine):
    policy, llm = engine
    greedy = sample(llm, PROMPTS[:1], n=1, temperature=0.0)
    with torch.no_grad():
        best = eager_copy(policy)(torch.tensor(PROMPTS[:1])).logits[0, -1].argmax()
    assert greedy[0].ids[0] == best


def test_more_prompts_than_fit_into_a_batch_give_the_same_responses(engine):
    policy, llm = engine
    prompts = [row[:200] for row in make_rows([220] * 50, vocabulary=250).input_ids.tolist()]
    whole = sample(llm, prompts)
    parts = [sample(llm, [prompt], first=i) for i, prompt in enumerate(prompts[:10])]
    assert ids_of(sum(parts, [])) == ids_of(whole)[:40]
    assert worst_gap(policy, whole) < 1e-4


def test_a_sync_brings_the_new_weights(engine):
    policy, llm = engine
    randomize(policy.model, 7)
    assert worst_gap(policy, sample(llm, PROMPTS)) > 0.1
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, PROMPTS)) < 1e-4


def test_a_sync_forgets_prefixes_that_the_old_weights_computed(engine, monkeypatch):
    policy, llm = engine
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) < 1e-4
    randomize(policy.model, 8)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda: True)
        starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) > 0.01
    starter.load_policy_into_vllm_instance(policy, llm)
    assert worst_gap(policy, sample(llm, LONG_PROMPTS)) < 1e-4


def test_prefixes_that_vllm_cannot_forget_end_the_run(engine, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="old weights"):
        patch.setattr(engine[1], "reset_prefix_cache", lambda: False)
        starter.load_policy_into_vllm_instance(*engine)


@pytest.mark.parametrize("turn_ends", GAME_TURNS, ids=["chat", "inside one response"])
def test_turns_of_vllm_end_where_they_should_and_log_probs_know_the_replies(engine, turn_ends):
    policy, llm = engine
    task, responses = play_games(llm, turn_ends)
    check_turns(task, responses)
    check_log_probs(policy, responses)


def test_the_gradient_of_several_turns_is_that_of_the_tokens_of_the_model(engine):
    policy, llm = engine
    _, responses = play_games(llm, ("</calc>",))
    batch = starter.make_batch(responses)
    assert batch.response_mask.sum() == sum(sum(response.mask) for response in responses)
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, *rows_in(batch), torch.ones(len(responses)), 1, 0.2,
                                 "dapo")
    model = eager_copy(policy)
    (-plain_log_probs(model, batch).sum() / batch.response_mask.sum()).backward()
    assert relative(gradient(policy), gradient(model)) < 1e-5


# ---- Whole runs ----------------------------------------------------------------------------------

def test_a_shell_sees_nothing_but_the_lines_of_the_script(world, tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "starter.py", *small_run(world), "--use_vllm=True", KL],
        cwd=tmp_path, text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0 and "torch samples" not in run.stdout, run.stdout
    assert run.stdout.startswith("=== All Tests Passed! ===\n")
    assert "starting vLLM ..." in run.stdout, run.stdout
    assert re.search(LAST_LINES, run.stdout), run.stdout
    max_gap = 0.05 if torch.cuda.is_available() else 1e-4  # in bf16 or float32
    rows = check_run((tmp_path / "out" / "latest").resolve(), max_gap=max_gap)
    assert "rollout/logp_gap_mean" in rows[1] and rows[3]["kl/mean"] > 0

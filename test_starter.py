"""The full test suite: python -m pytest test_starter.py (about eight minutes on two cores, with the real vLLM)."""
import copy, itertools, json, math, os, random, re, signal, subprocess, sys, time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

import starter as s

HERE = Path(__file__).parent
F64 = torch.float64
try:
    import vllm
except ImportError:
    vllm = None


# --------------------------------------------------------------------------------------------- quick tests and the task

def test_quick_tests_pass_and_are_quick(capsys):
    start = time.time()
    s.test_functions()
    out = capsys.readouterr().out
    assert out.startswith("=== Running Quick Tests ===") and "=== All Tests Passed! ===" in out and out.count("✅") >= 7
    assert time.time() - start < 3      # the promise is about the user's patience, not about speed


@pytest.mark.parametrize("name, broken", [
    ("masked_mean", lambda x, m: (x * m).sum() / m.sum()),
    ("kl_value_and_slope", lambda l, e, w=False: (l, torch.ones_like(l))),
    ("loss_divisor", lambda mask, *_: 1 + int(mask.any(-1).sum())),
    ("reward_fn", lambda text, truth: 1.0),
    ("LIMIT", 1e9),
])
def test_quick_tests_notice_broken_functions(monkeypatch, name, broken):
    monkeypatch.setattr(s, name, broken)
    with pytest.raises(Exception):
        s.test_functions() if name != "loss_divisor" else s.grpo_microbatch_step(*[None] * 7)


SIZES = [dict(n_numbers=3, max_number=20, operations="+-"), dict(n_numbers=4, max_number=50, operations="+-*/"),
         dict(n_numbers=2, max_number=9, operations="*")]


@pytest.mark.parametrize("size", SIZES)
def test_problems_are_solvable_repeatable_and_disjoint(size):
    key = lambda p: (tuple(sorted(p["numbers"])), p["target"])
    train = [s.make_problem(7, i, "train", **size) for i in range(300)]
    held = [s.make_problem(seed, i, "held-out", **size) for seed in (0, 7) for i in range(150)]
    assert train == [s.make_problem(7, i, "train", **size) for i in range(300)]
    assert train != [s.make_problem(8, i, "train", **size) for i in range(300)]
    assert not set(map(key, train)) & set(map(key, held))
    for p in train + held:
        assert len(p["numbers"]) == size["n_numbers"] and max(p["numbers"]) <= size["max_number"]
        assert s.reward_fn(f"<answer>{p['solution']}</answer>", p) == 1.0


def test_held_out_problems_are_different_from_each_other_and_bounded():
    size = SIZES[0]
    problems = s.held_out_problems(500, **size)
    assert len({(tuple(sorted(p["numbers"])), p["target"]) for p in problems}) == 500
    with pytest.raises(s.UserError, match="n_eval"):
        s.held_out_problems(500, n_numbers=2, max_number=3, operations="+")


TRUTH = {"numbers": [3, 5, 7], "target": 22}


@pytest.mark.parametrize("text, reward", [
    ("<answer>3*5+7</answer>", 1.0), ("<answer> (3 * 5) + 7 </answer> done", 1.0), ("<answer>7--3*5</answer>", 1.0),
    ("<answer>1</answer> no: <answer>7+3*5</answer>", 1.0), ("<answer>3*5+7</answer><answer>3+5+7</answer>", 0.1),
    ("<answer>3*5+7</answer><answer>3*", 1.0), ("3*5+7", 0.0), ("", 0.0), ("<answer>3*5+7", 0.0), ("</answer><answer>", 0.0),
    ("<answer></answer>", 0.1), ("<answer>22</answer>", 0.1), ("<answer>3*5+7=22</answer>", 0.1), ("<answer>3*5+5</answer>", 0.1),
    ("<answer>3*5+7*7/7</answer>", 0.1), ("<answer>35-7</answer>", 0.1), ("<answer>3 5*7</answer>", 0.1), ("<answer>3*(5+7</answer>", 0.1),
    ("<answer>9**9**9</answer>", 0.1), ("<answer>3**5+7</answer>", 0.1), ("<answer>3//5+7</answer>", 0.1), ("<answer>7/(5-5)+3</answer>", 0.1),
    ("<answer>" + "(" * 10**6 + "</answer>", 0.1), ("<answer>" + "9" * 10**6 + "</answer>", 0.1), ("<answer>" + "-" * 99 + "3</answer>", 0.1),
    ("<answer>__import__('os').system('true')</answer>", 0.1), ("<answer>３*５+７</answer>", 0.1), ("<answer>٣*5+7</answer>", 0.1),
    ("<answer>" * 10**5, 0.0), ("<answer>3*5+7\0</answer>", 0.1), ("<answer>3.0*5+7</answer>", 0.1), ("<answer>3e0*5+7</answer>", 0.1),
])
def test_reward(text, reward):
    start = time.time()
    assert s.reward_fn(text, TRUTH) == reward
    assert time.time() - start < 0.5


def test_the_evaluator_never_calls_eval():
    source = (HERE / "starter.py").read_text()
    assert not re.search(r"(?<![\w.])(eval|exec)\(", source) and "trust_remote_code=True" not in source and "pickle" not in re.sub(r"#.*|\".*?\"", "", source)


@settings(max_examples=4000, deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=40) | st.text(max_size=60))
def test_evaluator_fuzz(text):
    """Never raises, and agrees with exact rational arithmetic wherever Python's own grammar agrees that it is an expression."""
    numbers = [int(n) for n in re.findall(r"[0-9]+", text) if len(n) < 9]
    start = time.time()
    value = s.evaluate_expression(text, numbers)
    assert time.time() - start < 0.05
    if value is not None:
        exact = re.sub(r"[0-9]+", lambda m: f"Fraction({int(m.group())})", " ".join(text.split()))
        assert value == eval(exact, {"Fraction": Fraction})       # the text was just shown to be an expression


# --------------------------------------------------------------------------------------------- advantages, means, loss

def test_advantages_by_hand():
    rewards = [1.0, 0.0, 0.1, 0.1, 1.0, 1.0, 0.1, 0.1]
    it = iter(rewards)
    adv, raw, meta = s.compute_group_normalized_advantages(["x"] * 8, [None] * 8, lambda *_: next(it), 4, 1e-6, True)
    g = np.array(rewards).reshape(2, 4)
    want = (g - g.mean(1, keepdims=True)) / (g.std(1, ddof=1, keepdims=True) + 1e-6)
    assert np.allclose(adv, want.flatten(), atol=1e-6) and np.allclose(raw, rewards)
    assert meta["mean"] == pytest.approx(np.mean(rewards)) and meta["max"] == 1.0 and meta["min"] == 0.0
    assert meta["std"] == pytest.approx(np.std(rewards, ddof=1), abs=1e-6)
    it = iter(rewards)
    adv, *_ = s.compute_group_normalized_advantages(["x"] * 8, [None] * 8, lambda *_: next(it), 4, 1e-6, False)
    assert np.allclose(adv, (g - g.mean(1, keepdims=True)).flatten(), atol=1e-6)


def test_equal_rewards_give_exact_zeros():
    adv, _, meta = s.compute_group_normalized_advantages(["x"] * 6, [None] * 6, lambda *_: 0.1, 3, 1e-12, True)
    assert (adv == 0).all() and meta["frac_groups_zero_std"] == 1.0


@pytest.mark.parametrize("group_size", [1, 0, 3])
def test_impossible_groups_are_refused(group_size):
    with pytest.raises(s.UserError, match="group_size"):
        s.compute_group_normalized_advantages(["x"] * 4, [None] * 4, lambda *_: 0.0, group_size, 1e-6, True)


@pytest.mark.parametrize("bad", [None, "1", math.nan, math.inf, True, [1.0]])
def test_a_reward_that_is_no_number_is_named(bad):
    with pytest.raises(s.UserError, match="the response 'hello'"):
        s.compute_group_normalized_advantages(["hello"] * 2, [None] * 2, lambda *_: bad, 2, 1e-6, True)


def test_masked_means():
    x = torch.tensor([[1.0, 2, 3], [4, 5, math.nan], [7, 7, 7]], requires_grad=True)
    m = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert s.masked_mean(x, m).item() == 2.75 and s.masked_mean_drgrpo(x, m, 10).item() == pytest.approx(0.35)
    s.masked_mean(x, m).backward()
    assert torch.equal(x.grad, torch.tensor([[0.25, 0.25, 0], [0.5, 0, 0], [0, 0, 0]]))
    x.grad = None
    empty = s.masked_mean(x, m * 0) + s.masked_mean_drgrpo(x, m * 0, 10)
    empty.backward()
    assert empty.item() == 0 and (x.grad == 0).all()


def test_loss_by_hand_in_every_clip_case():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5], dtype=F64)
    for adv, want, grad in ((2.0, [1.0, 1.8, 2.0, 2.2, 2.4], [1.0, 1.8, 2.0, 2.2, 0.0]),
                            (-2.0, [-1.6, -1.8, -2.0, -2.2, -3.0], [0.0, -1.8, -2.0, -2.2, -3.0])):
        logp = ratio.log()[None].clone().requires_grad_()
        loss, meta = s.compute_loss(torch.tensor([adv], dtype=F64), logp, torch.zeros(1, 5, dtype=F64), 0.2)
        loss.sum().backward()
        assert torch.allclose(-loss[0], torch.tensor(want, dtype=F64)) and torch.allclose(-logp.grad[0], torch.tensor(grad, dtype=F64))
        assert meta["clip_fraction"] == 0.2 and meta["ratio_max"] == pytest.approx(1.5) and meta["ratio_mean"] == pytest.approx(1.0)
        assert meta["approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    high, _ = s.compute_loss(torch.tensor([2.0]), torch.tensor([1.5]).log()[None], torch.zeros(1, 1), 0.2, clip_range_high=0.28)
    assert high.item() == pytest.approx(-2.56)


def test_advantages_are_per_row_also_when_b_equals_t():
    logp = torch.zeros(2, 2)
    loss, _ = s.compute_loss(torch.tensor([1.0, -1.0]), logp, logp, 0.2)
    assert loss.tolist() == [[-1, -1], [1, 1]]


def test_mismatch_weight_is_capped_and_multiplies_everything():
    logp, old, mu = torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[0.0, 1.0, -3.0]])
    ref = torch.full((1, 3), -0.5)
    plain, _ = s.compute_loss(torch.ones(1), logp, old, 0.2, ref, 0.1)
    got, meta = s.compute_loss(torch.ones(1), logp, old, 0.2, ref, 0.1, rollout_log_probs=mu)
    assert torch.allclose(got, plain * torch.tensor([[1.0, math.exp(-1), 2.0]]))
    assert meta["logp_gap_max"] == 3 and meta["logp_gap_mean"] == pytest.approx(4 / 3)


KL_META = ("kl_penalty_mean", "kl_mean", "kl_max", "kl_min")


def test_kl_metadata_on_and_off():
    logp, ref = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.5, -1.0, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    off = s.compute_loss(torch.ones(1), logp, logp, 0.2, response_mask=mask)[1]
    nan = s.compute_loss(torch.ones(1), logp, logp, 0.2, ref * math.nan, 0.0, response_mask=mask)     # not evaluated at all
    assert all(off[k] == 0.0 for k in KL_META) and all(nan[1][k] == 0.0 for k in KL_META) and torch.isfinite(nan[0]).all()
    on = s.compute_loss(torch.ones(1), logp, logp, 0.2, ref, 0.1, response_mask=mask, kl_estimator="k1")[1]
    k3 = [math.exp(-0.5) - 0.5, math.e - 2]
    assert on["kl_penalty_mean"] == pytest.approx(-0.25) and on["kl_mean"] == pytest.approx(sum(k3) / 2, abs=1e-6)
    assert on["kl_max"] == pytest.approx(k3[1], abs=1e-6) and on["kl_min"] == pytest.approx(k3[0], abs=1e-6)


# ------------------------------------------------------------------------------------------------- KL, by enumeration

def toy(seed=0, vocab=8):
    g = torch.Generator().manual_seed(seed)
    logits, ref, shift = torch.randn(3, vocab, generator=g, dtype=F64)
    return logits.requires_grad_(), ref.log_softmax(0), shift


def kl_case(estimator, weighted, off, seed=0):
    """-> (expected value of the term, its expected gradient), both summed over every token of the vocabulary."""
    logits, ref, shift = toy(seed)
    logp = logits.log_softmax(0)
    old = (logits + (0.4 if off else 0.0) * shift).log_softmax(0).detach()
    exact = (logp.exp() * (logp - ref)).sum().expand(1, len(ref)) if estimator == "exact" else None
    term = s.compute_loss(torch.zeros(1, dtype=F64), logp[None], old[None], 0.2, ref[None], 1.0, kl_estimator=estimator,
                          kl_importance_weight=weighted, exact_kl=exact)[0][0]
    mean = (old.exp() * term).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def truth(seed=0):
    logits, ref, shift = toy(seed)
    logp = logits.log_softmax(0)
    grad = lambda x: torch.autograd.grad(x, logits, retain_graph=True)[0]
    rkl = (logp.exp() * (logp - ref)).sum()
    old = (logits + 0.4 * shift).log_softmax(0).detach()
    return SimpleNamespace(rkl=rkl.item(), d_rkl=grad(rkl), d_fkl=grad((ref.exp() * (ref - logp)).sum()),
                           k2=(logp.exp() * (logp - ref) ** 2 / 2).sum().item(), d_old=grad((old.exp() * (old - logp)).sum()))


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("estimator, weighted", [*itertools.product(("k1", "k2", "k3", "exact"), (True, False))])
def test_kl_value_and_expected_gradient(estimator, weighted, off, seed):
    value, grad = kl_case(estimator, weighted, off, seed)
    t = truth(seed)
    right = weighted or estimator == "exact" or (estimator == "k2" and not off)
    if right: assert relative(grad, t.d_rkl) < 1e-9
    else: assert relative(grad, t.d_rkl) > 0.05
    if estimator in ("k1", "k3") and (weighted or not off) or estimator == "exact": assert value == pytest.approx(t.rkl, rel=1e-9)
    if estimator == "k2" and (weighted or not off): assert value == pytest.approx(t.k2, rel=1e-9)
    if (estimator, weighted) == ("k1", False): assert (grad.norm() < 1e-12) if not off else relative(grad, -t.d_old) < 1e-9
    if (estimator, weighted, off) == ("k3", False, False): assert relative(grad, t.d_fkl) < 1e-9


def sequence_kl(weight_of_the_future):
    """3-token sequences over 3 tokens, every one enumerated: (gradient of what the trainer does, gradient of the sequence KL)."""
    g = torch.Generator().manual_seed(3)
    V, prefixes = 3, [p for n in range(3) for p in itertools.product(range(3), repeat=n)]
    logits = torch.randn(len(prefixes), V, generator=g, dtype=F64).requires_grad_()
    ref = torch.randn(len(prefixes), V, generator=g, dtype=F64).log_softmax(-1)
    row = {p: i for i, p in enumerate(prefixes)}
    sequences = list(itertools.product(range(V), repeat=3))
    pick = lambda table: torch.stack([torch.stack([table[row[q[:t]], q[t]] for t in range(3)]) for q in sequences])      # [27, 3]
    logp, ref_logp = pick(logits.log_softmax(-1)), pick(ref)
    prob = logp.sum(1).exp()
    true = torch.autograd.grad((prob * (logp - ref_logp).sum(1)).sum(), logits, retain_graph=True)[0]
    if weight_of_the_future:
        to_go, _ = s.kl_to_go(logp.detach(), ref_logp, torch.ones(27, 3, dtype=torch.bool))
        loss, _ = s.compute_loss(-to_go, logp, logp.detach(), 0.2)
    else:
        loss, _ = s.compute_loss(torch.zeros(27, dtype=F64), logp, logp.detach(), 0.2, ref_logp, 1.0)
    return torch.autograd.grad((prob.detach() * loss.sum(1)).sum(), logits)[0], true


def test_kl_in_reward_is_the_gradient_of_the_sequence_kl():
    got, true = sequence_kl(True)
    assert relative(got, true) < 1e-9


def test_kl_in_the_loss_misses_how_a_token_changes_later_prefixes():
    got, true = sequence_kl(False)
    assert 0.02 < relative(got, true) < 1.0


@pytest.mark.parametrize("estimator, weighted, right", [("k3", True, True), ("k1", True, True), ("k2", True, True), ("k2", False, True),
                                                       ("exact", True, True), ("k1", False, False), ("k3", False, False)])
def test_maximising_reward_minus_kl_reaches_the_closed_form_optimum(estimator, weighted, right):
    logits, ref, shift = toy()
    reward, beta = shift.abs(), 0.3
    best = beta * (ref + reward / beta).logsumexp(0)              # J* of pi* = ref exp(R / beta) / Z
    x = logits.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([x], 0.05)
    for _ in range(1500):
        logp = x.log_softmax(0)
        exact = (logp.exp() * (logp - ref)).sum().expand(1, len(ref)) if estimator == "exact" else None
        loss, _ = s.compute_loss(reward[None], logp[None], logp[None].detach(), 0.2, ref[None], beta, kl_estimator=estimator,
                                 kl_importance_weight=weighted, exact_kl=exact)
        optimizer.zero_grad()
        (logp.exp().detach() * loss[0]).sum().backward()          # the exact expectation: no sampling noise
        optimizer.step()
    logp = x.detach().log_softmax(0)
    got = (logp.exp() * (reward - beta * (logp - ref))).sum()
    assert (best - got < 1e-6) if right else (best - got > 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator, weighted", [*itertools.product(("k1", "k2", "k3"), (True, False))])
def test_runaway_log_ratios(estimator, weighted, dtype):
    for size in (1, 5, 15, 20, 50, 89, 200, 500):
        for l in (size, -size):
            logp = torch.tensor([[l / 2]], dtype=dtype).requires_grad_()         # halves: exact in bf16
            loss, meta = s.compute_loss(torch.zeros(1), logp, logp.detach(), 0.2, torch.tensor([[-l / 2]], dtype=dtype), 1.0,
                                        kl_estimator=estimator, kl_importance_weight=weighted)
            assert loss.dtype == torch.float32 and torch.isfinite(loss).all()
            loss.sum().backward()
            grad = float(logp.grad)
            assert math.isfinite(grad)
            if estimator != "k1" or (weighted and size > 1): assert math.copysign(1, grad) == math.copysign(1, l)       # back towards the reference
            assert meta["kl_clamped_frac"] == float(size > 20)


def test_off_policy_runaways_are_capped_and_never_lose_their_gradient():
    logp = torch.tensor([[-1.0, -60.0]], requires_grad=True)
    loss, meta = s.compute_loss(torch.tensor([-1.0]), logp, torch.tensor([[-60.0, -1.0]]), 0.2, torch.full((1, 2), -3.0), 1.0)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all() and logp.grad[0, 0] > 0 and meta["kl_clamped_frac"] == 1.0


def test_masked_garbage_changes_nothing():
    logp = torch.tensor([[-1.0, math.nan, -math.inf, math.inf]], requires_grad=True)
    junk = torch.tensor([[-1.2, math.inf, math.nan, -math.inf]])
    mask = torch.tensor([[True, False, False, False]])
    adv = torch.tensor([[1.0, math.nan, math.nan, math.inf]])
    loss, meta = s.compute_loss(adv, logp, junk, 0.2, junk, 0.1, response_mask=mask, rollout_log_probs=junk)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.equal(logp.grad[0, 1:], torch.zeros(3)) and logp.grad[0, 0] != 0
    assert all(math.isfinite(v) for v in meta.values())


def test_empty_mask_is_zero_with_zero_gradient():
    logp = torch.randn(2, 3, requires_grad=True)
    loss, meta = s.compute_loss(torch.ones(2), logp, logp.detach(), 0.2, logp.detach(), 0.1, response_mask=torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all() and (logp.grad == 0).all() and all(v == 0 for v in meta.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["policy", "old", "ref"])
def test_unmasked_bad_log_probs_are_named(which, value):
    tensors = {k: torch.full((2, 3), -1.0) for k in ("policy", "old", "ref")}
    tensors[which][1, 2] = value
    call = lambda: s.compute_loss(torch.ones(2), tensors["policy"], tensors["old"], 0.2, tensors["ref"], 0.1)
    if which == "ref" and value == -math.inf:                      # the reference rules the token out: clamped and counted
        loss, meta = call()
        assert torch.isfinite(loss).all() and meta["kl_clamped_frac"] == pytest.approx(1 / 6)
    else:
        with pytest.raises(s.BadNumbers, match="row 1, position 2"): call()


def test_unknown_estimator_and_loss_type():
    x = torch.zeros(1, 1)
    with pytest.raises(s.UserError, match="k1, k2, k3, exact"): s.compute_loss(torch.ones(1), x, x, 0.2, x, 0.1, kl_estimator="k4")
    with pytest.raises(s.UserError, match="loss_type"): s.grpo_microbatch_step(None, x.long(), x.long(), x, x, 1, 0.2, "ppo")


def test_plain_autograd_of_rho_k3_is_what_the_explicit_gradient_replaces():
    """The reason for setting the gradient by hand: in float32 the textbook expression is wrong or NaN for a runaway token."""
    wrong = []
    for delta in (5.0, 25.0, 95.0):
        logp = torch.tensor([-delta - 1.0], requires_grad=True)
        ref, old = torch.tensor([-1.0]), logp.detach()
        ((logp - old).exp() * ((ref - logp).exp() - 1 - (ref - logp))).sum().backward()
        wrong.append(float(logp.grad))
        ours = torch.tensor([[-delta - 1.0]], requires_grad=True)
        s.compute_loss(torch.zeros(1), ours, ours.detach(), 0.2, ref[None], 1.0)[0].sum().backward()
        assert float(ours.grad) == pytest.approx(-min(delta, 20.0))
    assert wrong[0] == pytest.approx(-5, rel=1e-3) and wrong[1] == 0 and math.isnan(wrong[2])


def adaptive(rule, kls, target=0.05, coef=0.01):
    cfg = SimpleNamespace(kl_adaptive_rule=rule, target_kl=target)
    for kl in kls: coef = s.adapt_kl_coef(coef, kl, cfg)
    return coef


def test_adaptive_coefficient():
    assert adaptive("threshold", [0.08]) == pytest.approx(0.015) and adaptive("threshold", [0.02]) == pytest.approx(0.0075)
    assert adaptive("threshold", [0.05, 0.07, 0.03]) == 0.01
    assert adaptive("proportional", [0.055]) == pytest.approx(0.01 * 1.01) and adaptive("proportional", [5.0]) == pytest.approx(0.01 * 1.02)
    for rule in ("threshold", "proportional"):
        assert adaptive(rule, [math.nan, math.inf]) == 0.01
        assert adaptive(rule, [9.0] * 2000) == s.KL_COEF_BOUNDS[1] and adaptive(rule, [0.0] * 2000) == s.KL_COEF_BOUNDS[0]

"""The full test suite: python -m pytest test_starter.py (about eight minutes on two cores, with the real vLLM)."""
import ast, copy, itertools, json, math, os, random, re, shutil, signal, subprocess, sys, tempfile, time
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
    ("<answer>3*5+7</answer><answer>3*", 1.0), ("3*5+7", 0.0), ("", 0.0), ("<answer>3*5+7", 0.0),
    ("</answer><answer>", 0.0), ("<answer></answer>", 0.1), ("<answer>22</answer>", 0.1),
    ("<answer>3*5+7=22</answer>", 0.1), ("<answer>3*5+5</answer>", 0.1), ("<answer>3*5+7*7/7</answer>", 0.1),
    ("<answer>35-7</answer>", 0.1), ("<answer>3 5*7</answer>", 0.1), ("<answer>3*(5+7</answer>", 0.1),
    ("<answer>9**9**9</answer>", 0.1), ("<answer>3**5+7</answer>", 0.1), ("<answer>3//5+7</answer>", 0.1),
    ("<answer>7/(5-5)+3</answer>", 0.1), ("<answer>" + "(" * 10**6 + "</answer>", 0.1),
    ("<answer>" + "9" * 10**6 + "</answer>", 0.1), ("<answer>" + "-" * 99 + "3</answer>", 0.1),
    ("<answer>__import__('os').system('true')</answer>", 0.1), ("<answer>３*５+７</answer>", 0.1),
    ("<answer>٣*5+7</answer>", 0.1), ("<answer>" * 10**5, 0.0), ("<answer>3*5+7\0</answer>", 0.1),
    ("<answer>3.0*5+7</answer>", 0.1), ("<answer>3e0*5+7</answer>", 0.1),
])
def test_reward(text, reward):
    start = time.thread_time()
    assert s.reward_fn(text, TRUTH) == reward
    assert time.thread_time() - start < 1


def test_model_text_is_never_evaluated_and_nothing_foreign_is_trusted():
    tree = ast.parse((HERE / "starter.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert not [n for n in calls if isinstance(n.func, ast.Name)
                and n.func.id in ("eval", "exec", "compile", "__import__")]
    keywords = {(k.arg, getattr(k.value, "value", None)) for n in calls for k in n.keywords}
    assert (("trust_remote_code", True) not in keywords and ("weights_only", False) not in keywords
            and ("weights_only", True) in keywords)
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and "pickle" in ast.dump(n)]


@settings(max_examples=20000, deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=40) | st.text(max_size=60))
def test_evaluator_fuzz(text):
    """Never raises, never takes long, and agrees with exact rational arithmetic wherever it finds an expression."""
    numbers = [int(n) for n in re.findall(r"[0-9]+", text) if len(n) < 9]
    seconds = []
    while not seconds or (seconds[-1] >= 0.05 and len(seconds) < 3):      # again: the garbage collector may have been at work
        start = time.thread_time()
        value = s.evaluate_expression(text, numbers)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05
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
    noise = 0
    for group_size, reward in itertools.product(range(2, 12), (0.1, 0.3, 0.7, 1 / 3)):
        adv, _, meta = s.compute_group_normalized_advantages(["x"] * group_size, [None] * group_size,
                                                             lambda *_: reward, group_size, 1e-12, True)
        assert (adv == 0).all() and meta["frac_groups_zero_std"] == 1.0
        same = torch.tensor([reward] * group_size)
        noise += int((same != same.mean()).any())
    assert noise, "in some of these the mean of equal numbers is another number: an advantage out of nothing"


@pytest.mark.parametrize("group_size", [1, 0, 3])
def test_impossible_groups_are_refused(group_size):
    with pytest.raises(s.UserError, match="group_size"):
        s.compute_group_normalized_advantages(["x"] * 4, [None] * 4, lambda *_: 0.0, group_size, 1e-6, True)


@pytest.mark.parametrize("bad", [None, "1", math.nan, math.inf, [1.0, 2.0], ZeroDivisionError])
def test_a_reward_that_is_no_number_is_named(bad):
    def reward(*_):
        if bad is ZeroDivisionError: 1 / 0
        return bad
    with pytest.raises(s.UserError, match="the response 'hello'"):
        s.compute_group_normalized_advantages(["hello"] * 2, [None] * 2, reward, 2, 1e-6, True)


@pytest.mark.parametrize("good", [True, 1, np.float32(1.0), torch.tensor(1.0)])
def test_a_reward_may_be_any_kind_of_number(good):
    assert s.compute_group_normalized_advantages(["x"] * 2, [None] * 2, lambda *_: good, 2, 1e-6, True)[1].tolist() == [1.0, 1.0]


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
        assert (torch.allclose(-loss[0], torch.tensor(want, dtype=F64))
                and torch.allclose(-logp.grad[0], torch.tensor(grad, dtype=F64)))
        assert (meta["clip_fraction"] == 0.2 and meta["ratio_max"] == pytest.approx(1.5)
                and meta["ratio_mean"] == pytest.approx(1.0))
        assert meta["approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    high, _ = s.compute_loss(torch.tensor([2.0]), torch.tensor([1.5]).log()[None], torch.zeros(1, 1), 0.2,
                             clip_range_high=0.28)
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
    nan = s.compute_loss(torch.ones(1), logp, logp, 0.2, ref * math.nan, 0.0, response_mask=mask)     # not evaluated
    assert (all(off[k] == 0.0 for k in KL_META) and all(nan[1][k] == 0.0 for k in KL_META)
            and torch.isfinite(nan[0]).all())
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
                           k2=(logp.exp() * (logp - ref) ** 2 / 2).sum().item(),
                           d_old=grad((old.exp() * (old - logp)).sum()))


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
    if estimator in ("k1", "k3") and (weighted or not off) or estimator == "exact":
        assert value == pytest.approx(t.rkl, rel=1e-9)
    if estimator == "k2" and (weighted or not off): assert value == pytest.approx(t.k2, rel=1e-9)
    if (estimator, weighted) == ("k1", False):
        assert (grad.norm() < 1e-12) if not off else relative(grad, -t.d_old) < 1e-9
    if (estimator, weighted, off) == ("k3", False, False): assert relative(grad, t.d_fkl) < 1e-9


def sequence_kl(weight_of_the_future):
    """3-token sequences over 3 tokens, every one enumerated: (gradient of what the trainer does, gradient of the
    sequence KL)."""
    g = torch.Generator().manual_seed(3)
    V, prefixes = 3, [p for n in range(3) for p in itertools.product(range(3), repeat=n)]
    logits = torch.randn(len(prefixes), V, generator=g, dtype=F64).requires_grad_()
    ref = torch.randn(len(prefixes), V, generator=g, dtype=F64).log_softmax(-1)
    row = {p: i for i, p in enumerate(prefixes)}
    sequences = list(itertools.product(range(V), repeat=3))
    pick = lambda table: torch.stack([torch.stack([table[row[q[:t]], q[t]] for t in range(3)])
                                      for q in sequences])      # [27, 3]
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


@pytest.mark.parametrize("estimator, weighted, right", [
    ("k3", True, True), ("k1", True, True), ("k2", True, True), ("k2", False, True), ("exact", True, True),
    ("k1", False, False), ("k3", False, False)])
def test_maximising_reward_minus_kl_reaches_the_closed_form_optimum(estimator, weighted, right):
    logits, ref, shift = toy()
    reward, beta = shift.abs(), 0.3
    best = beta * (ref + reward / beta).logsumexp(0)              # J* of pi* = ref exp(R / beta) / Z
    x = logits.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([x], 0.05)
    for _ in range(1500):
        logp = x.log_softmax(0)
        exact = (logp.exp() * (logp - ref)).sum().expand(1, len(ref)) if estimator == "exact" else None
        loss, _ = s.compute_loss(reward[None], logp[None], logp[None].detach(), 0.2, ref[None], beta,
                                 kl_estimator=estimator, kl_importance_weight=weighted, exact_kl=exact)
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
            loss, meta = s.compute_loss(torch.zeros(1), logp, logp.detach(), 0.2, torch.tensor([[-l / 2]], dtype=dtype),
                                        1.0, kl_estimator=estimator, kl_importance_weight=weighted)
            assert loss.dtype == torch.float32 and torch.isfinite(loss).all()
            loss.sum().backward()
            grad = float(logp.grad)
            assert math.isfinite(grad)
            if estimator != "k1" or (weighted and size > 1):
                assert math.copysign(1, grad) == math.copysign(1, l)       # back towards the reference
            assert meta["kl_clamped_frac"] == float(size > 20)


def test_off_policy_runaways_are_capped_and_never_lose_their_gradient():
    for advantage in (-1.0, 0.0):
        logp = torch.tensor([[-1.0, -60.0]], requires_grad=True)
        loss, meta = s.compute_loss(torch.tensor([advantage]), logp, torch.tensor([[-60.0, -1.0]]), 0.2,
                                    torch.full((1, 2), -3.0), 1.0)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all() and logp.grad[0, 0] > 0
        assert meta["kl_clamped_frac"] == 1.0
    assert float(logp.grad[0, 0]) == pytest.approx(s.WEIGHT_CAP * 2)      # cap * log(pi/ref), not e^20 * log(pi/ref)


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
    loss, meta = s.compute_loss(torch.ones(2), logp, logp.detach(), 0.2, logp.detach(), 0.1,
                                response_mask=torch.zeros(2, 3))
    loss.sum().backward()
    assert (loss == 0).all() and (logp.grad == 0).all() and all(v == 0 for v in meta.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["policy", "old", "ref"])
def test_unmasked_bad_log_probs_are_named(which, value):
    tensors = {k: torch.full((2, 3), -1.0) for k in ("policy", "old", "ref")}
    tensors[which][1, 2] = value
    call = lambda: s.compute_loss(torch.ones(2), tensors["policy"], tensors["old"], 0.2, tensors["ref"], 0.1)
    if which == "ref" and value == -math.inf:                  # the reference rules the token out: clamped and counted
        loss, meta = call()
        assert torch.isfinite(loss).all() and meta["kl_clamped_frac"] == pytest.approx(1 / 6)
    else:
        with pytest.raises(s.BadNumbers, match="row 1, position 2"): call()


def test_unknown_estimator_and_loss_type():
    x = torch.zeros(1, 1)
    with pytest.raises(s.UserError, match="k1, k2, k3, exact"):
        s.compute_loss(torch.ones(1), x, x, 0.2, x, 0.1, kl_estimator="k4")
    with pytest.raises(s.UserError, match="loss_type"):
        s.grpo_microbatch_step(None, x.long(), x.long(), x, x, 1, 0.2, "ppo")


def test_plain_autograd_of_rho_k3_is_what_the_explicit_gradient_replaces():
    """The reason for setting the gradient by hand: in float32 the textbook expression is wrong or NaN for a
    runaway token."""
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
    cfg = SimpleNamespace(kl_adaptive_rule=rule, target_kl=target, kl_coef=coef)
    for kl in kls: coef = s.adapt_kl_coef(coef, kl, cfg)
    return coef


def test_warnings_are_given_once(capsys):
    s.warn_once.__defaults__[0].clear()
    cfg, state = SimpleNamespace(kl_adaptive=False, ref_update_every=0), SimpleNamespace(step=11)
    calm = {"kl/mean": 0.05, "train/frac_groups_zero_std": 0.2, "train/truncated_frac": 0.0}
    s.follow_kl(calm, state, cfg, True)
    assert capsys.readouterr().out == ""
    for change, words in (({"kl/mean": 0.3}, "above 0.2"), ({"kl/mean": 0.0}, "nothing moves"),
                          ({"train/frac_groups_zero_std": 1.0}, "equal rewards"), ({"train/truncated_frac": 0.9}, "cut off")):
        s.follow_kl(calm | change, state, cfg, True), s.follow_kl(calm | change, state, cfg, True)
        assert capsys.readouterr().out.count(words) == 1


def test_adaptive_coefficient():
    assert (adaptive("threshold", [0.08]) == pytest.approx(0.015)
            and adaptive("threshold", [0.02]) == pytest.approx(0.0075))
    assert adaptive("threshold", [0.05, 0.07, 0.03]) == 0.01
    assert (adaptive("proportional", [0.055]) == pytest.approx(0.01 * 1.01)
            and adaptive("proportional", [5.0]) == pytest.approx(0.01 * 1.02))
    for rule in ("threshold", "proportional"):
        assert adaptive(rule, [math.nan, math.inf]) == 0.01
        assert (adaptive(rule, [9.0] * 2000) == 1.0
                and adaptive(rule, [0.0] * 2000) == pytest.approx(0.001))


# ------------------------------------------------------------------------------------------------ models and log-probs

CHAT = ("{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}")


def make_model(arch="qwen3", tied=True, seed=0, scale=0.15, **kw):
    """A tiny real model, its weights large enough that mistakes show."""
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[arch](
        **dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=1,
               pad_token_id=0, tie_word_embeddings=tied) | kw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed").float()
    randomize(model, seed, scale)
    return model


@torch.no_grad()
def randomize(model, seed, scale=0.15):
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        x = torch.randn(p.shape, generator=g)
        p.copy_(1 + 0.1 * x if "norm" in name else scale * x)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Hugging Face folder made on the spot: random weights and a real byte-level BPE tokenizer with a
    chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(arch, tied, eos="<|end|>"):
        folder = tmp_path_factory.mktemp(f"{arch}-{tied}")
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        bpe.train_from_iterator(["<answer> the numbers make an expression </answer>"], trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<pad>", "<|end|>", "<|user|>", "<|bot|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        hf = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, pad_token="<pad>")
        hf.chat_template = CHAT
        hf.save_pretrained(folder)
        make_model(arch, tied, scale=0.02).save_pretrained(folder)
        return folder
    return make


def batch_of(lengths, vocab=320, prompt=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, vocab, (n,), generator=g).tolist() for n in lengths]
    return s.make_batch([r[:prompt] for r in rows], [r[prompt:] for r in rows])


def plain_log_probs(model, b, temperature=1.0):
    logp = (model(b.input_ids).logits / temperature).log_softmax(-1).gather(-1, b.labels[..., None])[..., 0]
    return torch.where(b.mask, logp, 0)


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_make_batch_masks_by_length_and_shifts():
    b = s.make_batch([[0, 5], [7]], [[0, 0, 1], [9]], [[-0.1, -0.2, -0.3], [-0.4]])     # token 0 is an ordinary token
    assert b.input_ids.tolist() == [[0, 5, 0, 0], [7, 0, 0, 0]] and b.labels.tolist() == [[5, 0, 0, 1], [9, 0, 0, 0]]
    assert b.mask.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert torch.allclose(b.rollout_log_probs, torch.tensor([[0, -0.1, -0.2, -0.3], [-0.4, 0, 0, 0]]))


@pytest.mark.parametrize("arch, tied", [("qwen3", True), ("llama", False)])
@pytest.mark.parametrize("chunk", [2**28, 320 * 3])
@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_and_gradients_equal_the_plain_formula(monkeypatch, arch, tied, chunk, packed):
    monkeypatch.setattr(s, "LOGITS_PER_CHUNK", chunk)
    model, b = make_model(arch, tied), batch_of((5, 19, 9, 3, 12))        # one row of prompt alone: no response token
    weight = torch.randn(b.labels.shape, generator=torch.Generator().manual_seed(1))
    got = s.get_response_log_probs(model, b.input_ids, b.labels, response_mask=b.mask, temperature=0.7, packed=packed)
    (got * weight).sum().backward()
    ours = grads(model)
    model.zero_grad()
    want = plain_log_probs(model, b, 0.7)
    (want * weight).sum().backward()
    assert got.dtype == torch.float32 and torch.allclose(got, want, atol=2e-5) and relative(ours, grads(model)) < 1e-5


def test_log_probs_without_a_mask_and_with_negative_labels():
    model, b = make_model(), batch_of((8, 8))
    everything = s.get_response_log_probs(model, b.input_ids, b.labels)
    assert torch.allclose(everything, model(b.input_ids).logits.log_softmax(-1).gather(-1, b.labels[..., None])[..., 0],
                          atol=1e-5)
    labels = torch.where(b.mask, b.labels, -100)
    assert torch.allclose(s.get_response_log_probs(model, b.input_ids, labels), torch.where(b.mask, everything, 0),
                          atol=1e-6)


def test_a_model_with_scaled_logits_takes_the_plain_path():
    class Capped(torch.nn.Module):
        def __init__(self): super().__init__(); self.inner = make_model()
        def forward(self, ids): return SimpleNamespace(logits=30 * torch.tanh(self.inner(ids).logits / 30))
    model, b = Capped(), batch_of((8, 5))
    assert torch.allclose(s.get_response_log_probs(model, b.input_ids, b.labels, response_mask=b.mask),
                          plain_log_probs(model, b), atol=1e-5)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor made, forward and backward."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor): Largest.numel = max(Largest.numel, x.numel())
        return out


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_logits_never_exist_whole_and_memory_is_flat_in_the_number_of_chunks(monkeypatch, estimator):
    vocab, chunk = 4096, 8
    monkeypatch.setattr(s, "LOGITS_PER_CHUNK", chunk * vocab)
    model, ref = make_model(vocab_size=vocab), make_model(seed=1, vocab_size=vocab)
    largest, saved = {}, {}
    for n_chunks in (2, 8):
        b, kept = batch_of([3 + chunk] * n_chunks, vocab), []
        Largest.numel = 0
        with Largest(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
            s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.ones(n_chunks), 1, 0.2, ref_model=ref,
                                   kl_coef=0.1, kl_estimator=estimator)
        largest[n_chunks], saved[n_chunks] = Largest.numel, [x for x in kept if x[-1:] == (vocab,)]
    weights = vocab * 64
    # 64 tokens x 4096 would be as large as the weights
    assert largest[2] == largest[8] <= max(weights, 2 * chunk * vocab)
    assert not saved[2] and not saved[8], "no chunk's logits are kept for the backward"


def test_exact_kl_equals_the_plain_formula_in_value_and_gradient(monkeypatch):
    monkeypatch.setattr(s, "LOGITS_PER_CHUNK", 320 * 4)
    model, ref, b = make_model(), make_model(seed=1), batch_of((9, 14, 6))
    _, meta = s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.zeros(3), 1, 0.2, "dapo",
                                     ref_model=ref, kl_coef=0.5, kl_estimator="exact", temperature=0.8)
    ours = grads(model)
    model.zero_grad()
    p, q = ((m(b.input_ids).logits / 0.8).log_softmax(-1)[b.mask] for m in (model, ref))
    kl = (p.exp() * (p - q)).sum(-1)
    (0.5 * kl.mean()).backward()
    assert meta["kl_penalty_mean"] == pytest.approx(kl.mean().item(), rel=1e-5) and relative(ours, grads(model)) < 1e-5


# --------------------------------------------------------------------------------------------------------- the step

def whole_step(model, b, adv, split, loss_type, divisor=True, **kw):
    model.zero_grad()
    loss = 0.0
    for i in split:
        part = {k: v[i] for k, v in kw.items() if torch.is_tensor(v)}
        rest = {k: v for k, v in kw.items() if not torch.is_tensor(v)}
        loss += s.grpo_microbatch_step(model, b.input_ids[i], b.labels[i], b.mask[i], adv[i], len(split), 0.2,
                                       loss_type, 24, **rest, **part,
                                       divisor=s.loss_divisor(b.mask, loss_type, 24) if divisor else None)[0]
    return float(loss), grads(model)


SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [1], [2, 3, 4]], [[i] for i in range(6)]]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_gradient_does_not_depend_on_the_microbatches(loss_type):
    model, ref, b = make_model(), make_model(seed=1, scale=0.14), batch_of((5, 19, 9, 4, 12, 7))
    adv = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3, 0.1])
    old = plain_log_probs(model, b).detach() + 0.1
    results = [whole_step(model, b, adv, split, loss_type, ref_model=ref, kl_coef=0.1, old_log_probs=old)
               for split in SPLITS]
    for loss, grad in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5) and relative(grad, results[0][1]) < 1e-5
    wrong = whole_step(model, b, adv, SPLITS[2], loss_type, divisor=False, ref_model=ref, kl_coef=0.1,
                       old_log_probs=old)[1]
    assert relative(wrong, results[0][1]) > 0.05        # the mean of microbatch means, which the divisor replaces


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_loss_types_by_hand(loss_type):
    model, b, adv = make_model(), batch_of((5, 19, 9)), torch.tensor([1.0, -1.0, 0.5])
    loss, meta = s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, adv, 2, 0.2, loss_type, 24)
    ours = grads(model)
    model.zero_grad()
    logp, m = plain_log_probs(model, b), b.mask.float()
    rows = (-adv[:, None] * (logp - logp.detach()).exp() * m)
    want = {"grpo": (rows.sum(1) / m.sum(1)).mean(), "dr_grpo": rows.sum() / 3 / 24,
            "dapo": rows.sum() / m.sum()}[loss_type] / 2
    want.backward()
    assert (float(loss) == pytest.approx(want.item(), abs=1e-6) and relative(ours, grads(model)) < 1e-5
            and meta["n_tokens"] == int(m.sum()))


def test_a_microbatch_without_response_tokens_does_nothing():
    model, b = make_model(), batch_of((5, 6))
    loss, meta = s.grpo_microbatch_step(model, b.input_ids, b.labels, torch.zeros_like(b.mask), torch.ones(2), 1, 0.2)
    assert float(loss) == 0 and all(p.grad is None for p in model.parameters())


def test_microbatches_by_tokens():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))]
        least, budget = rng.randint(1, 5), rng.randint(60, 300)
        groups = s.make_microbatches(lengths, least, budget)
        assert sorted(r for g in groups for r in g) == list(range(len(lengths)))
        sizes = [sum(lengths[r] for r in g) for g in groups]
        assert len(groups) >= min(least, len(lengths)) and (max(sizes) <= budget or len(groups) == len(lengths))
        assert max(sizes) - min(sizes) <= max(lengths)       # evenly filled


def test_metadata_of_microbatches_merges_into_that_of_the_batch():
    model, ref, b, adv = make_model(), make_model(seed=1), batch_of((5, 19, 9, 4)), torch.tensor([1.0, -1.0, 0.5, 2.0])
    run = lambda i: s.grpo_microbatch_step(model, b.input_ids[i], b.labels[i], b.mask[i], adv[i], 1, 0.2, divisor=4,
                                           ref_model=ref, kl_coef=0.1)[1]
    whole, merged = run([0, 1, 2, 3]), s.merge_metadata([run([0, 1]), run([2]), run([3])])
    assert set(whole) == set(merged)
    for key in whole: assert merged[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_bf16_weights_take_small_steps_through_float32_masters():
    """Ten steps of 1e-6: the masters follow a float32 run; weights that are bf16 alone do not move at all."""
    def train(dtype, masters):
        model = make_model().to(dtype)
        optimizer = s.Optimizer(model, 1e-6) if masters else torch.optim.AdamW(
            model.parameters(), 1e-6, betas=(0.9, 0.95), weight_decay=0.0)
        b = batch_of((9, 14, 6))
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(10):
            optimizer.zero_grad()
            s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.tensor([1.0, -1.0, 0.5]), 1, 0.2)
            optimizer.step()
        final = optimizer.masters if masters else list(model.parameters())
        return torch.cat([(a.detach().float() - b.float()).flatten() for a, b in zip(final, start)])
    want = train(torch.float32, True)
    got, pure = train(torch.bfloat16, True), train(torch.bfloat16, False)
    cosine = lambda a: float(torch.nn.functional.cosine_similarity(a, want, dim=0))
    assert cosine(got) > 0.9 and abs(got.norm() / want.norm() - 1) < 0.1
    assert (pure == 0).float().mean() > 0.9


def test_float32_weights_are_their_own_masters_and_gradients_add_up_in_float32():
    model = make_model()
    assert all(p is m for p, m in zip(s.Optimizer(model, 1e-3).params, s.Optimizer(model, 1e-3).masters))
    model = make_model().to(torch.bfloat16)
    optimizer, b = s.Optimizer(model, 1e-3), batch_of((9, 14))
    step = lambda: s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.ones(2), 3, 0.2)
    step()
    once = [m.grad.clone() for m in optimizer.masters]
    step(), step()
    assert all(torch.allclose(m.grad, 3 * g, rtol=1e-5) for m, g in zip(optimizer.masters, once))
    assert (all(m.grad.dtype == torch.float32 for m in optimizer.masters)
            and all(p.grad is None for p in model.parameters()))


# -------------------------------------------------------------------------------------------- tokenizers, model folders

def test_tiny_tokenizer_and_its_saved_copy_agree(tmp_path):
    tiny = s.Tokenizer()
    tiny.save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("3 5 7=22:", "<answer>3*5+7</answer>", "é😀\n\t\0 <answer", "".join(map(chr, range(300)))):
        assert tiny.encode(text) == hf.encode(text, add_special_tokens=False) and tiny.decode(tiny.encode(text)) == text
    assert hf.eos_token_id == tiny.end_id == 256 and hf.pad_token_id == 257 and len(hf) == 260
    assert hf.apply_chat_template([{"role": "user", "content": "1 2=3:"}], tokenize=False) == "1 2=3:"
    again = s.Tokenizer(hf, short_prompts=True)
    assert again.decode(again.encode("<answer>1</answer>") + [256]) == "<answer>1</answer>"


def test_chat_prompt_of_a_hugging_face_tokenizer(model_folder):
    policy, tokenizer = s.init_policy(str(model_folder("qwen3", True)))
    text = s.prompt_text({"numbers": [3, 5, 7], "target": 22}, tokenizer, "+-*/")
    assert (text.startswith("<|user|>Using the numbers [3, 5, 7]") and text.endswith("<|bot|>") and "22" in text
            and "<think>" in text and "+ - * /" in text)
    assert tokenizer.stop_ids == [1] and tokenizer.encode(text)[-1] == tokenizer.hf.convert_tokens_to_ids("<|bot|>")


def test_dropout_is_off():
    policy, _ = s.init_policy("tiny")
    assert (policy.training and all(m.p == 0 for m in policy.modules() if isinstance(m, torch.nn.Dropout))
            and sum(p.numel() for p in policy.parameters()) < 2e6)


def lora_policy():
    model = make_model("llama", False)
    s.add_lora(model, 4, seed=0)
    return model


def test_lora_reference_is_the_model_without_its_adapters_and_vllm_gets_merged_weights():
    model, b = lora_policy(), batch_of((9, 14))
    before = plain_log_probs(make_model("llama", False), b)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name: p.copy_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    assert (plain_log_probs(model, b) - before).abs().max() > 0.01
    assert torch.allclose(s.score(model, b, [[0, 1]], 1.0, policy=model), before, atol=1e-5)          # adapters off
    assert (s.score(model, b, [[0, 1]], 1.0) - before).abs().max() > 0.01                             # on
    merged = make_model("llama", False)
    merged.load_state_dict(dict(s.vllm_weights(model)))
    assert torch.allclose(plain_log_probs(merged, b), plain_log_probs(model, b), atol=1e-4)
    _, meta = s.grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.ones(2), 1, 0.2, ref_model=model,
                                     kl_coef=0.1)
    assert meta["kl_mean"] > 0 and all((p.grad is not None) == ("lora_" in n) for n, p in model.named_parameters())


# ----------------------------------------------------------------------------------------------------------- rollouts

PARAMS = dict(temperature=1.0, min_tokens=0, max_tokens=12, n=4, stop_ids=[1])
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
LONG = [[int(t) for t in np.random.RandomState(i).randint(2, 320, 150)] for i in range(2)]      # > a cache block (128)


def worst_gap(model, prompts, responses, temperature=1.0):
    """Largest difference between the sampler's log-probs and the plain formula."""
    n = len(responses) // len(prompts)
    b = s.make_batch([p for p in prompts for _ in range(n)], [r[0] for r in responses], [r[1] for r in responses])
    with torch.no_grad(): want = plain_log_probs(model, b, temperature)
    return float((want - b.rollout_log_probs)[b.mask].abs().max())


def check_responses(responses, n, max_tokens, stop=1):
    assert len(responses) == n
    for ids, logps, finished in responses:
        assert 1 <= len(ids) == len(logps) <= max_tokens and stop not in ids[:-1] and finished == (ids[-1] == stop)
        assert finished or len(ids) == max_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_torch_sampler(temperature):
    model = make_model(scale=0.3)
    llm, params = s.TorchSampler(model), s.init_sampling_params(**PARAMS | {"temperature": temperature})
    a = s.rollout_with_vllm(llm, PROMPTS, params, 42, 1)
    check_responses(a, 12, 12)
    assert worst_gap(model, PROMPTS, a, temperature) < 1e-4
    assert (a == s.rollout_with_vllm(llm, PROMPTS, params, 42, 1)
            and a != s.rollout_with_vllm(llm, PROMPTS, params, 42, 2))
    alone = s.rollout_with_vllm(llm, PROMPTS[:1], params, 42, 1)
    assert [r[0] for r in alone] == [r[0] for r in a[:4]]         # a request's tokens do not depend on its neighbours
    assert len({tuple(r[0]) for r in a[:4]}) > 1 and model.training


def test_torch_sampler_samples_from_the_distribution():
    model = make_model(scale=0.3)
    params = s.init_sampling_params(1.0, 0, 1, 4000, [1])
    counts = np.bincount([r[0][0] for r in s.rollout_with_vllm(s.TorchSampler(model), [[5, 6]], params, 0, 0)],
                         minlength=320) / 4000
    with torch.no_grad(): p = model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).numpy()
    assert np.abs(counts - p).max() < 4 * math.sqrt(0.25 / 4000)
    pairs = [r[0] for r in s.rollout_with_vllm(s.TorchSampler(model), [[5, 6]], params | {"max_tokens": 2}, 0, 0)]
    first = int(np.bincount([p[0] for p in pairs]).argmax())
    second = [p[1] for p in pairs if p[0] == first and len(p) == 2]       # must be independent of how the first was drawn
    with torch.no_grad(): q = model(torch.tensor([[5, 6, first]])).logits[0, -1].softmax(-1).numpy()
    assert np.abs(np.bincount(second, minlength=320) / len(second) - q).max() < 4 * math.sqrt(0.25 / len(second))
    banned = s.rollout_with_vllm(s.TorchSampler(model), [[5]], s.init_sampling_params(1.0, 3, 6, 200, list(range(100))),
                                 0, 0)
    assert all(not set(r[0][:3]) & set(range(100)) for r in banned)
    greedy = s.rollout_with_vllm(s.TorchSampler(model), [[5, 6]], s.init_sampling_params(0.0, 0, 1, 1, [1]), 0, 0)
    assert greedy[0][0] == [int(p.argmax())]


def test_request_seeds_depend_on_everything():
    seeds = [s.request_seed(*args) for args in itertools.product((1, 2), (3, 4, "eval"), (5, 6))]
    assert (len(set(seeds)) == 12 and all(0 <= x < 2**48 for x in seeds)
            and s.request_seed(1, 2, 3) == s.request_seed(1, 2, 3))


needs_vllm = pytest.mark.skipif(vllm is None, reason="vLLM is not installed here (make test installs it)")


@pytest.fixture(scope="module", params=[("qwen3", True), ("llama", False)], ids=["qwen3-tied", "llama-untied"])
def engine(request):
    model = make_model(*request.param, scale=0.3)
    torch.manual_seed(123)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads, dict(os.environ)
    llm = s.init_vllm(model, 256, 64)
    assert not isinstance(llm, s.TorchSampler), "the real vLLM must start here"
    assert (torch.equal(before[0], torch.get_rng_state())
            and before[1:3] == (torch.get_num_threads(), torch.set_num_threads))
    return model, llm


@needs_vllm
def test_vllm_and_trainer_agree_before_and_after_a_sync_and_not_without(engine):
    model, llm = engine
    params = s.init_sampling_params(**PARAMS)
    sample = lambda: s.rollout_with_vllm(llm, PROMPTS, params, 42, 1)
    a = sample()
    check_responses(a, 12, 12)
    assert worst_gap(model, PROMPTS, a) < 1e-4 and a == sample()
    assert [r[0] for r in a] != [r[0] for r in s.rollout_with_vllm(llm, PROMPTS, params, 42, 2)]
    warm = s.rollout_with_vllm(llm, PROMPTS, params | {"temperature": 0.7}, 42, 1)
    assert worst_gap(model, PROMPTS, warm, 0.7) < 1e-4
    randomize(model, 7, 0.3)
    stale = worst_gap(model, PROMPTS, sample())
    assert stale > 0.1
    with pytest.raises(RuntimeError, match="did not arrive"): s.check_gap(stale, model)
    s.load_policy_into_vllm_instance(model, llm)
    fresh = worst_gap(model, PROMPTS, sample())
    assert fresh < 1e-4
    s.check_gap(fresh, model)


@needs_vllm
def test_a_stale_prefix_cache_matters_and_is_reset_by_the_sync(engine, monkeypatch):
    model, llm = engine
    params = s.init_sampling_params(**PARAMS | {"n": 2})
    s.load_policy_into_vllm_instance(model, llm)
    s.rollout_with_vllm(llm, LONG, params, 0, 0)                     # fills the cache
    randomize(model, 8, 0.3)
    with monkeypatch.context() as m:
        m.setattr(llm, "reset_prefix_cache", lambda *a, **k: True)
        s.load_policy_into_vllm_instance(model, llm)
    assert worst_gap(model, LONG, s.rollout_with_vllm(llm, LONG, params, 0, 1)) > 0.1
    s.load_policy_into_vllm_instance(model, llm)
    assert worst_gap(model, LONG, s.rollout_with_vllm(llm, LONG, params, 0, 1)) < 1e-4


@needs_vllm
def test_vllm_errors_are_not_swallowed(engine, monkeypatch):
    model, llm = engine
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda *a, **k: False)
    with pytest.raises(RuntimeError, match="prefix cache"): s.load_policy_into_vllm_instance(model, llm)
    monkeypatch.setattr(llm, "generate", lambda *a, **k: [])
    with pytest.raises(RuntimeError, match="returned 0 responses"):
        s.rollout_with_vllm(llm, PROMPTS, s.init_sampling_params(**PARAMS), 0, 0)


def test_without_vllm_one_loud_line_and_the_torch_sampler(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)                   # what `import vllm` sees when it is not installed
    assert isinstance(s.init_vllm(make_model(), 64, 8), s.TorchSampler)
    assert "!!! vLLM cannot be used here" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ the real script, end to end

SMALL = ["--model_id=tiny", "--device=cpu", "--n_grpo_steps=2", "--rollout_batch_size=8", "--group_size=4",
         "--n_eval=8", "--warm_start_steps=60", "--eval_every=2", "--save_every=2", "--max_tokens=12"]
SCALARS = """train/reward_mean, train/reward_std, train/loss, train/grad_norm, train/kl_penalty, train/kl_coef, \
train/clip_fraction,
train/entropy, train/avg_output_tokens, train/truncated_frac, train/answer_frac, train/frac_groups_zero_std, \
train/skipped_steps,
kl/mean, kl/max, kl/min, kl/policy_logp_mean, kl/ref_logp_mean, rollout/logp_gap_mean, rollout/logp_gap_max, \
time/rollout,
time/train, time/sync, time/step, perf/tokens_per_s""".replace("\n", " ").split(", ")
EVAL = ["eval/accuracy", "eval/mean_reward", "eval/avg_output_tokens"]


def rows_of(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def numbers_of(out):
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows_of(out)]


WARM = Path(tempfile.mkdtemp())


def put_warm_start(out):
    """The tiny model after a short warm start, made once per test session; the program checks by itself that it fits
    the settings."""
    if not (WARM / "warm_start").exists():
        s.main([*SMALL, "--use_vllm=False", f"--out_dir={WARM}"])
    shutil.copytree(WARM / "warm_start", Path(out) / "warm_start", dirs_exist_ok=True)


def run_main(out, *args):
    put_warm_start(out)
    s.main([*SMALL, "--use_vllm=False", f"--out_dir={out}", *args])
    return rows_of(out)


def script(out, *args, **kw):
    put_warm_start(out)
    return subprocess.run([sys.executable, str(HERE / "starter.py"), *SMALL, f"--out_dir={out}", *args],
                          capture_output=True, text=True, timeout=300, **kw)


@needs_vllm
def test_the_script_with_vllm_and_kl(tmp_path):
    run = script(tmp_path / "out", "--use_kl_penalty=True", "--kl_coef=0.05", "--n_grpo_steps=4")
    assert run.returncode == 0, run.stderr
    assert "!!!" not in run.stdout and "=== All Tests Passed! ===" in run.stdout
    assert re.search(r"^Step 4 \| Loss: -?\d+\.\d{4} \| Grad norm: \d+\.\d{4} "
                     r"\| Reward mean: \d\.\d+ .* \| KL penalty: -?\d+\.\d{4}$", run.stdout, re.M)
    for word in ("Done: held-out accuracy", "/model", "tensorboard --logdir", "samples"): assert word in run.stdout
    rows = rows_of(tmp_path / "out")
    assert ([r["step"] for r in rows] == [0, 1, 2, 3, 4] and all(set(SCALARS) <= set(r) for r in rows[1:])
            and all(set(EVAL) <= set(rows[i]) for i in (0, 2, 4)))
    assert all(r["rollout/logp_gap_max"] < 1e-4 for r in rows[1:]), "vLLM must have this step's weights"
    assert rows[1]["kl/mean"] < 1e-6 < rows[4]["kl/mean"] and rows[4]["train/kl_coef"] == 0.05
    check_outputs(tmp_path / "out")


def check_outputs(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    config = json.loads((out / "config.json").read_text())
    assert config["group_size"] == 4 and config["lr"] == 2e-4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "model"), AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("3 5 7=15:", return_tensors="pt", add_special_tokens=False)["input_ids"]
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert text.shape[1] > ids.shape[1]
    events = EventAccumulator(str(out / "tb")).Reload()
    assert (set(SCALARS + EVAL) <= set(events.Tags()["scalars"])
            and [e.step for e in events.Scalars("train/loss")] == [r["step"] for r in rows_of(out)][1:])
    assert {"config/text_summary", "samples/text_summary"} <= set(events.Tags()["tensors"])
    samples = [json.loads(l) for l in (out / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "response", "reward"} <= set(samples[0])


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_script_with_the_torch_sampler(tmp_path, capsys, loss_type, kl):
    rows = run_main(tmp_path / "out", f"--loss_type={loss_type}", f"--use_kl_penalty={kl}")
    assert [r["step"] for r in rows] == [0, 1, 2] and ("KL penalty" in capsys.readouterr().out) == kl
    assert (rows[2]["kl/mean"] > 0) == kl and all(v is not None for r in rows for v in r.values())


KL_ON = "--use_kl_penalty=True"
OPTIONS = [
    ["--inner_epochs=2", "--n_minibatches=2", "--lr=3e-3"], ["--gradient_accumulation_steps=3"],
    ["--tokens_per_microbatch=40"], ["--clip_range=0.1", "--clip_range_high=0.28"],
    ["--use_std_normalization=False", "--advantage_eps=1e-4"], ["--temperature=0.7"], ["--min_tokens=2"],
    ["--mismatch_cap=1.0"], ["--weight_decay=0.1", "--max_grad_norm=0"], ["--warmup_steps=0"],
    ["--gradient_checkpointing=True"], ["--seed=7"], ["--n_numbers=2", "--max_number=30", "--operations=+-*"],
    ["--max_prompt_tokens=64"], ["--save_every=0", "--keep=1"], ["--lora_rank=2"], ["--lora_rank=2", KL_ON],
    [KL_ON, "--kl_estimator=k1"], [KL_ON, "--kl_estimator=k2"], [KL_ON, "--kl_estimator=exact"],
    [KL_ON, "--kl_estimator=k3", "--kl_importance_weight=False"], [KL_ON, "--kl_in=reward", "--kl_estimator=k1"],
    [KL_ON, "--kl_adaptive=True", "--target_kl=1e-5"], [KL_ON, "--kl_adaptive=True", "--kl_adaptive_rule=proportional"],
    [KL_ON, "--kl_warmup_steps=2"], [KL_ON, "--ref_update_every=1"], [KL_ON, "--ref_offload=True"],
    [KL_ON, "--max_kl=5", "--max_consecutive_skips=2"], [KL_ON, "--kl_coef=0"],
]


@pytest.mark.parametrize("args", OPTIONS, ids=lambda a: " ".join(x.lstrip("-") for x in a))
def test_every_option_runs(tmp_path, args):
    rows = run_main(tmp_path / "out", *args, "--n_grpo_steps=3")
    assert (len(rows) == 4 and all(v is not None and math.isfinite(v) for r in rows for v in r.values())
            and rows[-1]["train/skipped_steps"] == 0)
    last = rows[-1]
    if "--inner_epochs=2" in args:
        assert any(r["train/clip_fraction"] > 0 for r in rows[1:]) and last["train/approx_kl"] > 0
    if "--kl_coef=0" in args: assert last["kl/mean"] == 0
    elif KL_ON in args:
        assert last["kl/policy_logp_mean"] < 0 and (last["kl/mean"] > 0 or "--ref_update_every=1" in args)
    if "--ref_update_every=1" in args: assert all(r["kl/mean"] < 1e-9 for r in rows[1:])
    if "--kl_warmup_steps=2" in args: assert [r["train/kl_coef"] for r in rows[1:]] == [0.0, 0.005, 0.01]
    if "--kl_in=reward" in args: assert "train/penalised_reward" in last
    if "--target_kl=1e-5" in args: assert last["train/kl_coef"] > 0.01


@pytest.mark.parametrize("arch, tied", [("qwen3", True), ("llama", False)])
def test_a_hugging_face_folder_end_to_end(tmp_path, model_folder, arch, tied):
    rows = run_main(tmp_path / "out", f"--model_id={model_folder(arch, tied)}", "--max_prompt_tokens=400",
                    "--max_tokens=8", "--lr=1e-3", KL_ON)
    assert [r["step"] for r in rows] == [0, 1, 2]
    # what was saved is a model folder again, tokenizer and chat template included
    again = s.init_policy(str(tmp_path / "out" / "model"))
    assert again[1].hf.chat_template == CHAT and again[0].config.tie_word_embeddings == tied


def test_single_batch(monkeypatch, tmp_path, capsys):
    """Two prompts, groups of two, one step: every part of the cycle, seen from outside."""
    policy, tokenizer = s.init_policy("tiny", seed=1)
    size = dict(n_numbers=3, max_number=20, operations="+-")
    problems = [s.make_problem(1, i, **size) for i in range(2)]
    prompts = [tokenizer.encode(s.prompt_text(p, tokenizer)) for p in problems]
    responses = s.rollout_with_vllm(s.TorchSampler(policy), prompts,
                                    s.init_sampling_params(1.0, 0, 10, 2, tokenizer.stop_ids), 1, 1)
    check_responses(responses, 4, 10, tokenizer.end_id)
    rewards = iter([1.0, 0.0, 0.1, 0.1])
    adv, raw, meta = s.compute_group_normalized_advantages([tokenizer.decode(r[0]) for r in responses],
                                                           [p for p in problems for _ in range(2)],
                                                           lambda *_: next(rewards), 2, 1e-6, True)
    b = s.make_batch([p for p in prompts for _ in range(2)], [r[0] for r in responses], [r[1] for r in responses])
    assert (b.input_ids.shape == b.labels.shape == b.mask.shape == b.rollout_log_probs.shape
            and b.mask.sum(1).tolist() == [len(r[0]) for r in responses])
    for row, (p, r) in enumerate(zip([p for p in prompts for _ in range(2)], responses)):
        assert b.labels[row][b.mask[row]].tolist() == r[0] and b.input_ids[row, :len(p)].tolist() == p
    optimizer, before = s.Optimizer(policy, 1e-3), copy.deepcopy(policy.state_dict())
    first = plain_log_probs(policy, b).detach()
    cfg = config()
    state = SimpleNamespace(lr_scale=1.0, skipped=0, consecutive_skips=0)
    s.update_policy(policy, optimizer, b, adv, cfg, 100, state)
    assert any(not torch.equal(a, b_) for a, b_ in zip(before.values(), policy.state_dict().values()))
    change = (plain_log_probs(policy, b) - first).sum(1)
    assert change[0] > change[1], "the better response became likelier"
    after = copy.deepcopy(policy.state_dict())
    b.rollout_log_probs = plain_log_probs(policy, b).detach()
    for bad in (math.nan, math.inf):                                    # a NaN never reaches the weights
        s.update_policy(policy, optimizer, b, torch.tensor([bad, 0, 0, 0]), cfg, 101, state)
        assert all(torch.equal(a, b_) for a, b_ in zip(after.values(), policy.state_dict().values()))
    assert state.skipped == 2 and state.lr_scale == 0.5 and "update skipped" in capsys.readouterr().out


def config(**kw):
    base = dict(loss_type="grpo", max_tokens=10, temperature=1.0, clip_range=0.2, clip_range_high=0.0, mismatch_cap=2.0,
                kl_estimator="k3", kl_importance_weight=True, kl_in="loss", ref_offload=False, inner_epochs=1,
                n_minibatches=1, gradient_accumulation_steps=1, tokens_per_microbatch=4096, seed=0, max_grad_norm=1.0,
                max_kl=10.0, warmup_steps=0, max_consecutive_skips=5)
    return SimpleNamespace(**base | kw)


# ----------------------------------------------------------------------------------------- interruption, resume, faults

def weights_of(out):
    return {k: v for k, v in AutoModelForCausalLM.from_pretrained(Path(out) / "model").state_dict().items()}


def same_run(a, b):
    assert numbers_of(a) == numbers_of(b)
    for (name, x), y in zip(weights_of(a).items(), weights_of(b).values()): assert torch.equal(x, y), name


RESUME = [KL_ON, "--kl_adaptive=True", "--target_kl=0.001", "--save_every=1", "--n_grpo_steps=6"]


@pytest.mark.parametrize("args", [RESUME, ["--lora_rank=2", "--save_every=1", "--n_grpo_steps=6"],
                                  [KL_ON, "--ref_update_every=2", "--save_every=1", "--n_grpo_steps=6"]],
                         ids=["kl-adaptive", "lora", "ref-update"])
def test_resume_gives_the_same_numbers_and_weights(tmp_path, monkeypatch, capsys, args):
    run_main(tmp_path / "straight", *args)
    step = s.update_policy

    def interrupted_at_3(*a, **kw):
        if a[5] == 3: raise KeyboardInterrupt          # as hard as a crash: nothing of step 3 is kept
        return step(*a, **kw)
    monkeypatch.setattr(s, "update_policy", interrupted_at_3)
    with pytest.raises(KeyboardInterrupt): run_main(tmp_path / "broken", *args)
    monkeypatch.setattr(s, "update_policy", step)
    run_main(tmp_path / "broken", *args)               # the same command again
    assert "resuming the run" in capsys.readouterr().out
    same_run(tmp_path / "straight", tmp_path / "broken")


@needs_vllm
def test_sigkill_with_vllm_and_resume_gives_the_same_numbers(tmp_path):
    assert script(tmp_path / "straight", *RESUME).returncode == 0
    put_warm_start(tmp_path / "killed")
    process = subprocess.Popen([sys.executable, str(HERE / "starter.py"), *SMALL, f"--out_dir={tmp_path / 'killed'}",
                                *RESUME], stdout=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3) and process.poll() is None:
        time.sleep(0.02)
    process.kill(), process.wait()
    assert len(rows_of(tmp_path / "killed")) < 7, "it was killed on the way"
    run = script(tmp_path / "killed", *RESUME)
    assert run.returncode == 0 and "resuming the run" in run.stdout, run.stderr
    same_run(tmp_path / "straight", tmp_path / "killed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "killed" / "tb")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path):
    args = ["--use_vllm=False", "--n_grpo_steps=300", "--save_every=0", "--eval_every=1000"]
    put_warm_start(tmp_path)
    process = subprocess.Popen([sys.executable, str(HERE / "starter.py"), *SMALL, f"--out_dir={tmp_path}", *args],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("Step 3 |"): process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    stopped = len(rows_of(tmp_path)) - 1
    assert 3 <= stopped < 300 and (tmp_path / "checkpoint" / f"step_{stopped:08d}").is_dir()
    rows = run_main(tmp_path, *args, f"--n_grpo_steps={stopped + 2}", "--resume=True")
    assert [r["step"] for r in rows] == list(range(stopped + 3))


def test_broken_checkpoints_fall_back_to_the_one_before(tmp_path, capsys):
    args = ["--save_every=1", "--keep=3", "--n_grpo_steps=4"]
    run_main(tmp_path / "a", *args)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    newest, second = (tmp_path / "b" / "checkpoint" / f"step_0000000{i}" for i in (4, 3))
    data = bytearray((newest / "state.pt").read_bytes())
    data[len(data) // 2] ^= 255
    (newest / "state.pt").write_bytes(data)                                                  # one flipped byte
    (second / "state.pt").write_bytes((second / "state.pt").read_bytes()[:1000])           # truncated
    run_main(tmp_path / "b", *args, "--resume=True")
    out = capsys.readouterr().out
    assert out.count("cannot be used") == 2 and "after step 2" in out
    same_run(tmp_path / "a", tmp_path / "b")


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path, monkeypatch, capsys):
    save, calls = torch.save, []

    def full(*args):
        calls.append(1)
        if len(calls) > 1: raise OSError(28, "No space left on device")
        return save(*args)
    monkeypatch.setattr(torch, "save", full)
    run_main(tmp_path, "--save_every=1", "--n_grpo_steps=3")
    assert ("No space left" in capsys.readouterr().out
            and [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["step_00000001"])
    assert (tmp_path / "model" / "config.json").exists()


def test_a_sync_that_does_nothing_is_noticed_within_a_step(tmp_path, monkeypatch):
    policy = {}

    class Stale(s.TorchSampler):                       # samples from the weights of the start, whatever is synced
        def __init__(self, p): super().__init__(copy.deepcopy(p))
    monkeypatch.setattr(s, "TorchSampler", Stale)
    with pytest.raises(RuntimeError, match="the weights did not arrive"):
        run_main(tmp_path, "--n_grpo_steps=5", "--lr=1e-3", "--warmup_steps=0")
    assert len(rows_of(tmp_path)) == 2                 # step 1 is right, step 2 is stopped before its update


@pytest.mark.parametrize("where", ["advantages", "reference"])
def test_bad_numbers_are_skipped_counted_and_stop_the_run(tmp_path, monkeypatch, capsys, where):
    if where == "advantages":
        real = s.compute_group_normalized_advantages
        monkeypatch.setattr(s, "compute_group_normalized_advantages",
                            lambda *a: (real(*a)[0] * math.nan, *real(*a)[1:]))
    else:
        real_score = s.score
        monkeypatch.setattr(s, "score", lambda *a, **k: real_score(*a, **k) * (
            math.nan if len(a) > 4 and a[3] == 1.0 and a[1].labels.shape[0] > 4 else 1))
        monkeypatch.setattr(s, "check_reference", lambda *a: None)
    with pytest.raises(RuntimeError, match="3 updates in a row were skipped"):
        run_main(tmp_path, KL_ON, "--max_consecutive_skips=3", "--n_grpo_steps=9")
    rows = rows_of(tmp_path)
    assert [r["train/skipped_steps"] for r in rows[1:]] == [1, 2] and "learning rate halved" in capsys.readouterr().out


def test_an_exploding_kl_is_skipped(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="above max_kl"):
        run_main(tmp_path, KL_ON, "--max_kl=1e-9", "--n_grpo_steps=9", "--lr=1e-2", "--max_consecutive_skips=2",
                 "--warmup_steps=0")
    assert "update skipped" in capsys.readouterr().out


def test_kl_that_is_not_zero_at_the_start_stops_the_run(tmp_path, monkeypatch):
    real = copy.deepcopy

    def other(model, *memo):
        twin = real(model, *memo)
        if type(twin).__name__ == "LlamaForCausalLM":
            with torch.no_grad(): twin.lm_head.weight.mul_(1.5)
        return twin
    monkeypatch.setattr(s.copy, "deepcopy", other)
    with pytest.raises(RuntimeError, match="KL is not 0 before the first update.*dropout"): run_main(tmp_path, KL_ON)


def test_out_of_memory_halves_the_microbatch(tmp_path, monkeypatch, capsys):
    real, failed = s.grpo_microbatch_step, []

    def step(policy, input_ids, *a, **k):
        if input_ids.shape[0] > 4 and not failed.append(1) and len(failed) < 3:
            raise torch.OutOfMemoryError("simulated")
        return real(policy, input_ids, *a, **k)
    monkeypatch.setattr(s, "grpo_microbatch_step", step)
    run_main(tmp_path, "--tokens_per_microbatch=400")
    assert "tokens_per_microbatch=200" in capsys.readouterr().out


def test_samples_are_escaped():
    assert (s.escape("<script>alert('x')</script>\x1b[31m\n")
            == "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;\\x1b[31m\n")


# ------------------------------------------------------------------------------------------------------------ bad input

BAD = [
    (["--learning_rate=1e-5"], "did you mean"), (["--kl_coeff=0.1"], "did you mean 'kl_coef'"),
    (["--Seed=1"], "did you mean 'seed'"), (["lr=1e-5"], "--name=value"), (["--lr"], "--name=value"),
    (["-lr=1"], "--name=value"), (["--lr=fast"], "expected a number"), (["--seed=1.5"], "whole number"),
    (["--use_kl_penalty=yes"], "True or False"), (["--group_size=x"], "whole number"),
    (["--lr=0"], "lr must be above 0"), (["--lr=-1e-5"], "lr must be above 0"), (["--lr=nan"], "finite"),
    (["--kl_coef=inf"], "finite"), (["--group_size=1"], "group_size must be at least 2"),
    (["--rollout_batch_size=9"], "multiple of group_size"), (["--rollout_batch_size=0"], "at least 1"),
    (["--n_grpo_steps=0"], "at least 1"), (["--temperature=0"], "temperature must be above 0"),
    (["--clip_range=0"], "between 0 and 1"), (["--clip_range=1.5"], "between 0 and 1"),
    (["--clip_range_high=-0.1"], "not be negative"), (["--loss_type=ppo"], "grpo, dr_grpo, dapo"),
    (["--max_tokens=0"], "at least 1"), (["--min_tokens=50"], "below max_tokens"),
    (["--gpu_mem_util=1.5"], "between 0 and 1"), (["--n_numbers=1"], "between 2 and 8"),
    (["--operations=^"], "some of"), (["--operations="], "some of"),
    (["--n_numbers=2", "--max_number=1", "--operations=-"], "no Countdown problem"),
    (["--max_prompt_tokens=4"], "raise it"), (["--max_tokens=600"], "context"),
    (["--n_eval=100000", "--max_number=3"], "n_eval"), (["--device=tpu"], "cpu or cuda"),
    (["--vllm_sleep=True"], "needs a GPU"), (["--inner_epochs=0"], "at least 1"),
    (["--n_minibatches=100"], "n_minibatches"), (["--kl_estimator=k4", KL_ON], "k1, k2, k3, exact"),
    (["--kl_in=both", KL_ON], "loss, reward"), (["--kl_in=reward", KL_ON], "k1 alone"),
    (["--kl_adaptive=True"], "use_kl_penalty=True"), (["--ref_update_every=5"], "use_kl_penalty=True"),
    (["--kl_warmup_steps=5"], "use_kl_penalty=True"),
    (["--kl_adaptive=True", KL_ON, "--kl_coef=0"], "kl_adaptive needs"),
    (["--kl_adaptive_rule=magic"], "threshold, proportional"), (["--target_kl=0"], "above 0"),
    (["--ref_update_every=5", KL_ON, "--lora_rank=2"], "cannot be used with lora_rank"),
    (["--ref_offload=True", KL_ON, "--lora_rank=2"], "cannot be used with lora_rank"),
    (["--model_id=no/such/model"], "Two ways out"), (["--resume=True"], "no checkpoint"),
    (["--resume=True", "--overwrite=True"], "choose one"), (["--keep=0"], "at least 1"),
]


@pytest.mark.parametrize("args, words", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, monkeypatch, args, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(s.UserError) as error:
        s.main([*SMALL, "--use_vllm=False", f"--out_dir={tmp_path / 'out'}", *args])
    assert words in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_where_there_is_none(tmp_path):
    with pytest.raises(s.UserError, match="--device=cpu"):
        s.main([*SMALL, f"--out_dir={tmp_path / 'out'}", "--device=cuda"])


def test_bad_input_from_the_shell_exits_with_2_and_no_traceback(tmp_path):
    run = subprocess.run([sys.executable, str(HERE / "starter.py"), "--lerning_rate=1"], capture_output=True, text=True,
                         cwd=tmp_path)
    assert (run.returncode == 2 and "Traceback" not in run.stderr and len(run.stderr.strip().splitlines()) == 1
            and not list(tmp_path.iterdir()))


def test_other_peoples_folders_and_other_runs_are_left_alone(tmp_path, model_folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    with pytest.raises(s.UserError, match="files of something else"): s.main([*SMALL, f"--out_dir={tmp_path / 'mine'}"])
    (tmp_path / "file").write_text("")
    with pytest.raises(s.UserError, match="cannot write"): s.main([*SMALL, f"--out_dir={tmp_path / 'file'}"])
    for args, words in ((["--seed=3"], "holds another run"), (["--lr=1e-3"], "unfinished run with other settings"),
                        (["--resume=True", "--seed=3"], "holds another run")):
        out = tmp_path / "out"
        if not out.exists():
            run_main(out, "--n_grpo_steps=2")
            config = json.loads((out / "config.json").read_text())
            (out / "config.json").write_text(json.dumps(config | {"n_grpo_steps": 5}))    # as if it had been stopped
        before = sorted(p.name for p in out.rglob("*"))
        with pytest.raises(s.UserError, match=words):
            s.main([*SMALL, "--use_vllm=False", f"--out_dir={out}", "--n_grpo_steps=5", *args])
        assert sorted(p.name for p in out.rglob("*")) == before


def test_a_finished_run_is_moved_aside_and_overwrite_starts_anew(tmp_path, capsys):
    first = run_main(tmp_path)
    run_main(tmp_path)
    assert (rows_of(tmp_path / "previous-1") == first and (tmp_path / "previous-1" / "model").is_dir()
            and "warm start taken from" in capsys.readouterr().out)
    run_main(tmp_path, "--n_grpo_steps=4", "--resume=True")
    assert len(rows_of(tmp_path)) == 5
    run_main(tmp_path, "--lr=1e-3", "--overwrite=True")
    assert len(rows_of(tmp_path)) == 3


def test_a_tokenizer_without_an_end_token(tmp_path, model_folder):
    with pytest.raises(s.UserError, match="end token"):
        s.main([*SMALL, f"--model_id={model_folder('qwen3', True, eos=None)}", f"--out_dir={tmp_path / 'out'}"])


def test_a_model_folder_without_weights(tmp_path, model_folder):
    folder = model_folder("qwen3", True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(s.UserError, match="cannot load the model"):
        s.main([*SMALL, f"--model_id={folder}", f"--out_dir={tmp_path / 'out'}"])


def test_lora_output_is_a_complete_model(tmp_path):
    run_main(tmp_path, "--lora_rank=2", "--lr=1e-2")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "warm_start")
    assert (tmp_path / "model" / "adapter" / "adapter_config.json").exists()
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, base.model.layers[0].self_attn.q_proj.weight)


# --------------------------------------------------------------------------------------------------------- on a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_cuda
@pytest.mark.parametrize("arch, tied", [("qwen3", True), ("llama", False)])
def test_gpu_packed_flash_attention_equals_padded(arch, tied):
    model, b = make_model(arch, tied).to("cuda", torch.bfloat16), batch_of((5, 19, 90, 3, 40))
    reference = copy.deepcopy(model).float()
    b = SimpleNamespace(**{k: v.cuda() for k, v in vars(b).items() if v is not None})
    results = {}
    for name, m, packed in (("packed", model, True), ("padded", model, False), ("float32", reference, False)):
        m.zero_grad()
        logp = s.get_response_log_probs(m, b.input_ids, b.labels, response_mask=b.mask, packed=packed)
        logp.sum().backward()
        results[name] = logp.detach(), grads(m).float()
    for name in ("packed", "padded"):
        assert ((results[name][0] - results["float32"][0]).abs().max() < 0.15
                and relative(results[name][1], results["float32"][1]) < 0.05)


@needs_cuda
@pytest.mark.parametrize("args", [["--compile=True", "--gradient_checkpointing=True", "--gpu_mem_util=0.15"],
                                  ["--vllm_sleep=True", "--enforce_eager=True", "--gpu_mem_util=0.15"]])
def test_gpu_script_learns_agrees_and_resumes(tmp_path, args):
    gpu = ["--device=cuda", "--use_kl_penalty=True", "--ref_offload=True", *args]
    run = script(tmp_path / "out", *gpu, "--n_grpo_steps=4")
    assert run.returncode == 0, run.stderr
    again = script(tmp_path / "out", *gpu, "--n_grpo_steps=6", "--resume=True")
    assert again.returncode == 0 and "resuming the run" in again.stdout, again.stderr
    rows = rows_of(tmp_path / "out")
    assert [r["step"] for r in rows] == list(range(7)) and all(r["rollout/logp_gap_mean"] < 0.1 for r in rows[1:])
    assert rows[1]["kl/mean"] < 1e-3

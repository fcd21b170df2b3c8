"""Each diff of edits/ applies with git, trains, and has its effect. So does a script that replaces
a function."""
import importlib.util, math, re, shutil, subprocess

import pytest
import torch

import starter
from conftest import KL, ROOT, rows_of, small_run, write_script


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
    shutil.copy(ROOT / "starter.py", folder)
    subprocess.run(["git", "apply", ROOT / "edits" / f"{name}.diff"], cwd=folder, check=True)


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


def test_gspo_trains(run_edited):
    rows = run_edited("gspo", "--inner_epochs=2", KL)
    assert rows[1]["train/approx_kl"] > 0 and len(rows) == 3


def load_copy(path):
    """-> the module of a copy of starter.py"""
    spec = importlib.util.spec_from_file_location("edited_starter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    starter.AttentionInterface.register("packed", starter.packed_attention)  # not that of the copy
    return module


@pytest.fixture
def gspo(tmp_path):
    """-> the edited module"""
    apply_edit("gspo", tmp_path)
    return load_copy(tmp_path / "starter.py")


def test_gspo_uses_the_mean_ratio_of_the_response(gspo):
    log_pi = torch.tensor([[0.1, 0.3]], requires_grad=True)
    loss, _ = gspo.compute_loss(torch.ones(1), log_pi, torch.zeros(1, 2), 0.5)
    slope, = torch.autograd.grad(loss.sum(), log_pi)
    assert loss.tolist() == slope.tolist() == [[pytest.approx(-math.exp(0.2))] * 2]


def test_gspo_leaves_the_kl_term_of_each_token_as_it_is(gspo):
    log_pi = torch.tensor([[0.1, 0.3]])
    plain, edited = (module.compute_loss(torch.zeros(1), log_pi, torch.zeros(1, 2), 0.5,
                                         torch.ones(1, 2), 1.0)[0] for module in (starter, gspo))
    assert torch.equal(plain, edited)


def test_leave_one_out_is_the_edit_that_the_readme_says(tmp_path):
    """The baseline is the mean of the other responses (RLOO)."""
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "RLOO" in line)
    row = r"\| in `(\w+)\(\)`, replace `(.+?)` by `(.+?)` \|"
    function, old, new = re.match(row, line).groups()
    text = (ROOT / "starter.py").read_text()
    assert text.count(old) == 1 and function == "group_advantages"
    (tmp_path / "starter.py").write_text(text.replace(old, new))
    changed = load_copy(tmp_path / "starter.py")
    advantages = changed.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.4]), 4, False)
    wanted = [1 - 0.4 / 3, -1.4 / 3, -1.4 / 3, 0.4 - 1 / 3]
    assert advantages.tolist() == pytest.approx(wanted)


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

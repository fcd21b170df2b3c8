"""The code in README.md: each edit is applied with git, trained with, and has its effect; the
environment is a script that trains."""
import contextlib, http.server, json, math, os, shutil, subprocess, sys, threading, types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_starter import (HERE, SMALL, process_kept, rows_of, run_main, save_folder, warm_folder,
                          write_rows)


@contextlib.contextmanager
def judge(monkeypatch):
    """-> the list of what was asked"""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(len(asked[-1]["response"]) % 3 / 2).encode())

        def log_message(self, *arguments):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # 5 would reset some of 32 connections at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()


@pytest.fixture
def run_edit(warm_folder, tmp_path):
    """-> function that applies an edit with the README's command and trains with it"""
    def run(name, *arguments):
        command = f"git apply examples/{name}.diff"
        assert command in (HERE / "README.md").read_text()
        shutil.copy(HERE / "starter.py", tmp_path)
        shutil.copytree(HERE / "examples", tmp_path / "examples", dirs_exist_ok=True)
        subprocess.run(command.split(), cwd=tmp_path, check=True)
        changed = types.ModuleType("changed")
        changed.__file__ = str(tmp_path / "starter.py")
        exec(compile((tmp_path / "starter.py").read_text(), changed.__file__, "exec"),
             changed.__dict__)
        changed.test_functions()
        changed.main([f"--model_id={warm_folder}", *SMALL, f"--out_dir={tmp_path}", *arguments])
        return changed, rows_of(tmp_path / "latest")[1:]
    return run


def test_edit_judge(run_edit, monkeypatch):
    with judge(monkeypatch) as asked:
        _, rows = run_edit("judge", "--reward_truncated=True")
    assert len(asked) == 3 * 16 + 3 * 8 and asked[0].keys() == {"response", "problem"}
    assert {row["train/reward_mean"] * 32 % 1 for row in rows} == {0}, "answers are 0, 0.5 and 1"


def test_edit_leave_one_out(run_edit):
    changed, _ = run_edit("leave_one_out")
    advantages = changed.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.4]), 4, False)
    assert advantages.tolist() == pytest.approx([1 - 0.4 / 3, -1.4 / 3, -1.4 / 3, 0.4 - 1 / 3])


def test_edit_dynamic_sampling(run_edit, run_main):
    arguments = ["--rollout_batch_size=32", "--lr=1e-9"]
    plain = rows_of(run_main(*arguments))[1:]
    _, rows = run_edit("dynamic_sampling", *arguments)
    share = "train/frac_groups_zero_std"
    assert sum(row[share] for row in rows) < sum(row[share] for row in plain)
    assert rows[0]["train/entropy"] > 0 and len(rows) == 3


def test_edit_entropy_bonus(run_edit, run_main):
    arguments = ["--lr=1e-9", "--loss_type=dapo", "--inner_epochs=1"]
    plain = rows_of(run_main(*arguments))[1:]
    _, rows = run_edit("entropy_bonus", *arguments)
    for row, other in zip(rows, plain, strict=True):  # rows without advantage have it, too
        bonus = other["train/loss"] - row["train/loss"]
        assert bonus == pytest.approx(0.01 * row["train/entropy"], rel=0.3)


def test_edit_gspo(run_edit):
    changed, rows = run_edit("gspo", "--inner_epochs=2")
    log_pi = torch.tensor([[0.1, 0.3]], requires_grad=True)
    loss, _ = changed.compute_loss(torch.ones(1), log_pi, torch.zeros(1, 2), 0.5)
    slope, = torch.autograd.grad(loss.sum(), log_pi)
    assert loss.tolist() == slope.tolist() == [[pytest.approx(-math.exp(0.2))] * 2]
    assert rows[1]["train/approx_kl"] > 0


def test_the_environment_in_the_readme_trains(save_folder, tmp_path):
    script = (HERE / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "game.py").write_text(script)
    write_rows(tmp_path / "games.jsonl", [{"prompt": f"Game {i}.", "answer": i} for i in range(20)])
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    run = subprocess.run(
        [sys.executable, "game.py", "--task=games.jsonl", f"--model_id={save_folder()}", *SMALL,
         "--max_tokens=60", "--max_prompt_tokens=99", "--min_tokens=1", "--n_grpo_steps=1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    turns = rows_of(tmp_path / "out" / "latest", "samples.jsonl")[0]["turns"]
    assert turns[0]["role"] == turns[-1]["role"] == "assistant"
    # sample.py imports the script, and must not train with it even if it has no guard.
    text = (tmp_path / "game.py").read_text()
    (tmp_path / "game.py").write_text(text.replace('if __name__ == "__main__":', "if True:"))
    sample = subprocess.run([sys.executable, HERE / "sample.py", "--n_eval=4", "--n_samples=2"],
                            cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "accuracy, greedy" in sample.stdout and "Step" not in sample.stdout, sample.stderr

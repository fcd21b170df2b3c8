"""Each edit of README.md is applied with git, trained with, and has its effect."""
import contextlib, http.server, json, math, shutil, subprocess, sys, threading, types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import starter
from test_starter import HERE, process_kept, rows_of, run_main, small_run, warm_folder


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
        if name != "gspo":
            changed.test_functions()
        changed.main([*small_run(warm_folder), f"--out_dir={tmp_path}", *arguments])
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


def test_edit_gspo(run_edit):
    changed, rows = run_edit("gspo", "--inner_epochs=2")
    log_pi = torch.tensor([[0.1, 0.3]], requires_grad=True)
    loss, _ = changed.compute_loss(torch.ones(1), log_pi, torch.zeros(1, 2), 0.5)
    slope, = torch.autograd.grad(loss.sum(), log_pi)
    assert loss.tolist() == slope.tolist() == [[pytest.approx(-math.exp(0.2))] * 2]
    assert rows[1]["train/approx_kl"] > 0
    # The weight of the KL term stays that of the token.
    one, many = (module.compute_loss(torch.zeros(1), log_pi, torch.zeros(1, 2), 0.5,
                                     torch.ones(1, 2), 1.0)[0] for module in (starter, changed))
    assert torch.equal(one, many)

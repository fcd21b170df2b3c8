"""On a GPU: training with the real vLLM in bf16, and with little memory"""
import json, subprocess, sys

import numpy as np
import pytest
import torch

from conftest import KL, ROOT, rows_of, small_run

# In the process of the tests of vLLM: it does not start while others free memory.
pytestmark = [pytest.mark.xdist_group("vllm"),
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("arguments", [
    ["--compile=True", "--gradient_checkpointing=True"],
    ["--vllm_sleep=True", "--offload=True", "--ref_update_every=2", "--compile=False"]])
def test_a_run_learns_agrees_with_vllm_and_resumes(world, tmp_path, arguments):
    def run(*options):
        subprocess.run([sys.executable, ROOT / "starter.py", *options], cwd=tmp_path, check=True,
                       timeout=500)

    run(*small_run(world), "--use_vllm=True", KL, *arguments, "--gpu_mem_util=0.15",
        "--rollout_batch_size=256", "--group_size=8", "--n_grpo_steps=20", "--lr=5e-4")
    run("--resume=latest", "--n_grpo_steps=22")
    rows = rows_of(tmp_path / "out" / "latest")
    assert [row["step"] for row in rows] == list(range(23))
    assert all(row["rollout/logp_gap_mean"] < 0.05 for row in rows[1:])
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:2]) + 0.1 and rows[1]["kl/mean"] < 2e-3


@pytest.mark.parametrize("gib, sleeps", [(24, False), (16, True)])
def test_a_small_gpu_trains_the_default_size_offloaded(gib, sleeps):
    output = subprocess.check_output(
        [sys.executable, ROOT / "bench.py", f"--gpu_gib={gib}", "--prompts=8", "--steps=1",
         "--warmup=1", "--compile=False"], text=True, timeout=500)
    result = json.loads(output.splitlines()[-1])
    assert result["offload"] and result["vllm_sleep"] == sleeps and 0 < result["gap"] < 0.05
    assert result["peak_gib"] < gib

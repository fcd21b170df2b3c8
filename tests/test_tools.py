"""The tools beside starter.py: sample.py, speedrun.sh, bench.py, kl_sweep.py"""
import itertools, json, os, re, shutil, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import sample
import starter
from conftest import ROOT, rows_of, small_run
from starter import UserError
from test_starter import write_rows
from test_tasks import local_server

# ---- sample.py -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run_folder(world, script, tmp_path_factory):
    """-> a run after a step that changes little"""
    folder = tmp_path_factory.mktemp("run")
    assert script.run(folder, *small_run(world), "--n_grpo_steps=1", "--lr=1e-9") == 0
    return (folder / "out" / "latest").resolve()


def test_sample_measures_the_model_of_a_run(run_folder, capsys):
    sample.main([f"--model_id={run_folder}"])
    text = capsys.readouterr().out
    shares = re.findall(r"accuracy, (\S+) +([0-9.]+)  \(95 %: ", text)
    assert [name for name, _ in shares] == ["pass@1", "pass@4", "pass@8", "greedy"]
    one, four, eight, greedy = (float(share) for _, share in shares)
    assert 0.05 < one < four < eight <= 1 and one < greedy and "assistant> <answer>" in text
    assert "8 responses to each of 20 held-out problems" in text


def test_sample_talks(run_folder, monkeypatch, capsys):
    lines = mock.Mock(side_effect=["3+5=", "", "4+1=", EOFError])
    monkeypatch.setattr("builtins.input", lines)
    sample.main([f"--model_id={run_folder}", "--chat"])
    assert capsys.readouterr().out.count("model: <answer>") == 2


def test_sample_measures_any_model_with_given_settings(world, run_folder, capsys, tmp_path,
                                                       monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample.main([f"--model_id={world}/model", f"--task={world}", "--use_vllm=False",
                 "--max_tokens=14", "--n_samples=1", "--n_eval=5"])
    assert "1 responses to each of 5 held-out problems" in capsys.readouterr().out


def test_pass_at_k_is_the_mean_over_all_choices():
    pairs = itertools.combinations([1, 1, 0, 0, 0], 2)
    assert sample.pass_at_k(5, 2, 2) == pytest.approx(np.mean([max(pair) for pair in pairs]))
    assert sample.pass_at_k(8, 0, 4) == 0 and sample.pass_at_k(8, 5, 4) == 1


def test_a_share_is_printed_with_its_interval(capsys):
    sample.print_share("none", [0.0] * 20)
    sample.print_share("half", [0.0, 1.0] * 200)
    assert capsys.readouterr().out.split("\n") == [
        "none               0.000  (95 %: 0.000 to 0.194)",
        "half               0.500  (95 %: 0.451 to 0.549)", ""]


def test_no_control_character_of_a_model_reaches_the_terminal():
    assert sample.printable("<b>é\x1b[31m\u202e\n") == "<b>é\\x1b[31m\\u202e\n"


@pytest.fixture
def write_config(tmp_path):
    """-> function that makes tmp_path a run folder with these settings"""
    def write(*arguments):
        cfg = starter.main([*arguments, "--gpu_mem_util=0.85"], only_settings=True)
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "config.json").write_text(json.dumps(vars(cfg)))
        return cfg
    return write


@pytest.mark.parametrize("flags", [
    [], ["--n_eval=999"], ["--task=TASK", "--n_eval=999"], ["--max_prompt_tokens=20"],
    ["--eval_task=OTHER"], ["--task=OTHER", "--prompt={question}?"]])
def test_sample_never_measures_problems_that_the_run_was_trained_on(tmp_path, write_config, flags):
    for number, name in enumerate(("TASK", "OTHER")):
        rows = [{"question": f"{1000 * number + i}", "answer": i} for i in range(200)]
        write_rows(tmp_path / name, rows)
    flags = [re.sub("TASK|OTHER", rf"{tmp_path}/\g<0>", flag) for flag in flags]
    run = write_config("--model_id=none", f"--task={tmp_path / 'TASK'}", "--n_eval=30")
    given = starter.read_arguments(flags)
    cfg = sample.read_settings(given, *sample.find_model(str(tmp_path / "model")))
    trained = {row["question"] for row in starter.Task(run).train_rows}
    measured = {row["question"] for row in starter.Task(cfg).held_out_rows}
    assert measured and not measured & trained and cfg.gpu_mem_util == 0.85


@pytest.mark.parametrize("flag, of_run", [("prompt={question}?", ""), ("eval_task=", "test.jsonl")])
def test_sample_refuses_what_would_change_the_held_out_problems(tmp_path, write_config, flag,
                                                                of_run):
    write_config("--task=train.jsonl", f"--eval_task={of_run}")
    with pytest.raises(UserError, match="decide which problems are held out"):
        sample.main([f"--model_id={tmp_path}", f"--{flag}", "--task=./train.jsonl"])


def test_sample_says_what_is_missing(tmp_path, write_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no finished run in out/latest: run"):
        sample.main([])
    write_config("--task=none.jsonl")
    with pytest.raises(UserError, match="no task none.jsonl"):
        sample.main([f"--model_id={tmp_path}"])


# ---- speedrun.sh ---------------------------------------------------------------------------------

@pytest.fixture
def speedrun(world, tmp_path):
    """-> function that runs it on a small model, with the problems of this address"""
    def run(url):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", ROOT / "speedrun.sh", world / "model", "--seed=3", "--n_eval=1",
             "--use_vllm=False", "--n_grpo_steps=1", "--group_size=4", "--rollout_batch_size=8",
             "--prompt={question}="], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PATH": path, "GSM8K_URL": url})
    return run


def test_the_speedrun_ends_with_a_row_for_the_table(speedrun):
    rows = [{"question": f"{i}+1", "answer": f"so #### {i + 1}"} for i in range(9)]
    data = "\n".join(map(json.dumps, rows))
    with local_server(lambda request: data.replace("+1", request.path[1:5]).encode()) as url:
        run = speedrun(url)
    assert run.returncode == 0, run.stderr
    *_, row, steps, finding = run.stdout.splitlines()
    assert re.fullmatch(r"\| \[record\]\(records/record\) \| [0-9.]+ \| [0-9.]+ % \| [0-9.]+ % "
                        r"\([0-9.]+ to [0-9.]+\) \| [0-9.]+ % \| [0-9.]+ % \| [0-9a-f]{12} \| "
                        r"COMMIT \| .*\|", row)
    assert steps == "1 steps" and finding.startswith("record: graded, but not in BENCHMARKS.md")
    assert "4 responses to each of 9 held-out problems" in run.stdout and "0test=" in run.stdout


def test_the_speedrun_stops_at_the_first_error(speedrun):
    run = speedrun("http://127.0.0.1:9")
    assert run.returncode == 2 and "error: cannot download" in run.stderr
    assert "| GSM8K |" not in run.stdout


# ---- bench.py ------------------------------------------------------------------------------------

SMALL_BENCH = ["bench.py", "--size=tiny", "--prompts=2", "--group=2", "--new_tokens=4", "--steps=1",
               "--warmup=1"]


@pytest.fixture
def restored_starter(monkeypatch):
    """What a tool replaces in starter is put back."""
    functions = dict(vars(starter))
    monkeypatch.setattr(starter.Checkpoint, "save", starter.Checkpoint.save)
    yield
    vars(starter).update(functions)


def test_the_benchmark_ends_with_its_result(tmp_path):
    run = subprocess.run([sys.executable, ROOT / SMALL_BENCH[0], *SMALL_BENCH[1:],
                          "--use_kl_penalty"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    seconds = result["seconds"]
    assert {"step", "rollout", "sync"} < seconds.keys() and seconds["ref_log_probs"] > 0
    assert seconds["train"] == pytest.approx(sum(
        seconds[phase] for phase in ("forward_backward", "optimizer", "ref_log_probs")))
    assert result["n_steps"] == 1 and 0 < result["gap"] < 1e-3, "sampler and trainer agree"
    assert result["peak_gib"] == result["peak_without_engine_gib"] == 0
    assert (result["offload"], result["vllm_sleep"]) == (False, False), "decided"
    assert result["tokens_per_microbatch"] > 0 and not [*tmp_path.iterdir()], "nothing is left"


def test_the_benchmark_of_the_update_needs_no_sampler(tmp_path, restored_starter, capsys,
                                                      monkeypatch):
    import bench
    monkeypatch.setattr(sys, "argv", [*SMALL_BENCH, "--rollout=False", "--n_minibatches=2",
                                      f"--model_dir={tmp_path}/model"])
    monkeypatch.setattr(starter, "start_vllm", None)
    monkeypatch.setattr(starter.TorchSampler, "__init__", None)
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seconds"]["forward_backward"] > 0 and result["seconds"]["generate"] == 0
    assert result["gap"] is None and (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize("word, message", [
    ("--steps=0", "at least 1"), ("--n_grpo_steps=5", "n_grpo_steps: set prompts"),
    ("--group_size=4", "group_size: set prompts"), ("--group=1", "at least 2"),
    ("--nonsense=3", "nonsense"), ("--new_tokens=x", "new_tokens=x"), ("--size=9b", "size must"),
    ("--gpu_gib=24", "needs a GPU"), ("--peer=verl", "must be trl"),
    ("--temperature=0", "above 0")])
def test_the_benchmark_refuses_bad_options_in_one_line(word, message, restored_starter,
                                                       monkeypatch):
    import bench
    monkeypatch.setattr(bench, "make_model_folder", None)  # it is found before that
    monkeypatch.setattr(sys, "argv", ["bench.py", word])
    with pytest.raises(UserError, match=message) as error:
        bench.main()
    assert "\n" not in str(error.value)


def test_the_benchmark_imitates_a_smaller_gpu(tmp_path, restored_starter, monkeypatch):
    import bench
    options = SimpleNamespace(gpu_gib=24, prompts=1, steps=1, warmup=1, prompt_tokens=8, rollout=1)
    cfg = SimpleNamespace(gpu_mem_util=0.5, task=tmp_path)
    monkeypatch.setattr(bench, "HOLD", "print('held', flush=True); open(0).read()")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 2**30, 96 * 2**30))
    monkeypatch.setattr(starter, "main", mock.Mock())
    monkeypatch.setattr(bench.Bench, "result", lambda self: self)
    bench.measure(options, cfg, ["--gpu_mem_util=0.5", "--lr=1"])
    (argv,), _ = starter.main.call_args
    assert argv == ["--gpu_mem_util=0.5", "--lr=1", "--gpu_mem_util=0.125"], "half of 24 GiB"
    with bench.hold_memory(24) as child:  # closes its input and waits
        assert child.poll() is None
    monkeypatch.setattr(bench, "HOLD", "")
    with pytest.raises(UserError, match="gpu_gib must be below"):
        bench.hold_memory(24)


# ---- kl_sweep.py ---------------------------------------------------------------------------------

class ThisProcess:
    """Instead of a pool of processes"""
    def __init__(self, jobs, maxtasksperchild):
        assert maxtasksperchild == 1, "a run must not see what another one has replaced"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    imap_unordered = staticmethod(map)


@pytest.fixture
def run_kl_sweep(world, tmp_path, restored_starter, monkeypatch):
    """-> function that runs it on the model of the small world, in an empty folder"""
    import kl_sweep
    tiny = starter.load_task_file("tiny")
    monkeypatch.setattr(tiny, "prepare", lambda: None)
    monkeypatch.setattr(starter, "test_functions", lambda: True)
    monkeypatch.setattr(starter.TorchSampler, "generate", starter.TorchSampler.generate)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(kl_sweep, "SETTINGS", f"{kl_sweep.SETTINGS} {' '.join(small_run(world))} "
                        "--use_kl_penalty --kl_coef=1e-9")
    monkeypatch.setattr(kl_sweep.multiprocessing, "get_context",
                        lambda method: SimpleNamespace(Pool=ThisProcess))
    monkeypatch.chdir(tmp_path)

    def run(*words, **experiments):
        for name, runs in experiments.items():
            settings = kl_sweep.EXPERIMENTS[name] | {"all": "--n_grpo_steps=2", "runs": runs}
            monkeypatch.setitem(kl_sweep.EXPERIMENTS, name, settings)
        monkeypatch.setattr(sys, "argv", ["kl_sweep.py", *words])
        kl_sweep.main()
    return run


def made_up(judge, truth, seed=1):
    return {"steps": [0, 10], "kl_coef": 0.3, "judge": [0.2, judge], "truth": [0.2, truth],
            "kl": [0.0, 0.1 * seed], "entropy": [1.0, 2.0]}


def test_the_kl_sweep_keeps_finished_runs_and_draws(run_kl_sweep, tmp_path, monkeypatch, capsys):
    import kl_sweep
    words = ("--collapse", "--minibatches", "--seeds=2", "--out_dir=runs")
    runs = {"collapse": {"none": "", "plain k1 0.3, sampler = policy": "--kl_coef=0.3"},
            "minibatches": {"none": "", "rho·k3 0.1": "--kl_coef=0.1 --n_minibatches=2"}}
    run_kl_sweep(*words, **runs)
    tables = capsys.readouterr().out.split("8 runs are finished")[1]
    lines = (tmp_path / "runs" / "kl_runs.jsonl").read_text().splitlines()
    job, result = json.loads(lines[-1])
    assert len(lines) == 8 and job == ["minibatches", "rho·k3 0.1", 2]
    assert result["steps"] == [0, 2] and len(result["kl"]) == 2 and result["kl_coef"] == 0.1
    assert result["truth"] == result["judge"] and len(result["truth"]) == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "kl_runs.jsonl", "kl_collapse.png"}
    monkeypatch.setattr(kl_sweep, "run", None)  # nothing is run again
    run_kl_sweep(*words)
    assert capsys.readouterr().out.strip() == tables.split("\n", 1)[1].strip()


def test_one_run_of_the_kl_sweep_is_that_of_the_trainer(run_kl_sweep, run_main, tmp_path):
    runs = {"none": "", "rho·k3 0.1": "--kl_coef=0.1"}
    run_kl_sweep("--minibatches", "--seeds=1", minibatches=runs)
    job, result = json.loads((tmp_path / "out_kl_sweep/kl_runs.jsonl").read_text().splitlines()[1])
    folder = run_main("--n_grpo_steps=2", "--seed=1", "--use_kl_penalty", "--kl_coef=0.1",
                      "--eval_every=2")
    assert result["kl"] == [round(row["kl/mean"], 4) for row in rows_of(folder)[1:]]


def test_the_table_of_the_kl_sweep_has_intervals_and_paired_differences():
    import kl_sweep
    # Differences by seed are 10, 20, 30 points, though the seeds themselves differ more.
    runs = {"none": [made_up(1, truth) for truth in (0.1, 0.5, 0.9)],
            "other": [made_up(0.5, truth, seed) for seed, truth in ((1, 0.2), (2, 0.7), (3, 1.2))]}
    head, none, other = kl_sweep.make_table(runs, ("judge", "truth", "kl"), "none").splitlines()
    assert head.startswith("3 seeds ") and head.endswith(" difference") and "+" not in none
    # The half width for three seeds is 4.30 * 10 / sqrt(3).
    assert other.split() == "other 50.0 ± 0.0 70.0 ± 124.1 0.200 ± 0.248 +20.0 ± 24.8".split()
    runs |= {"honest, none": runs["other"], "honest, other": runs["other"]}
    table = kl_sweep.make_table(runs, ["entropy"], "none").splitlines()
    assert table[3].split() == "honest, none 2.00 ± 0.00".split()
    assert table[4].endswith("2.00 ± 0.00      +0.0 ± 0.0")


def test_the_kl_sweep_draws_the_loophole(tmp_path):
    import kl_sweep
    names = ("none", "rho·k3 0.03", "rho·k3 0.3", "rho·k3 1")
    runs = {name: [made_up(0.9, 0.1), made_up(0.8, 0.2)] for name in names}
    kl_sweep.draw_hackable(runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_kl_sweep_needs_to_know_what_to_do(run_kl_sweep):
    with pytest.raises(UserError, match="choose --toys, --hackable, --collapse, --minibatches"):
        run_kl_sweep("--seeds=1")


def test_the_toys_print_the_tables_of_kl_md(run_kl_sweep, capsys):
    run_kl_sweep("--toys")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    document = [line.strip() for line in (ROOT / "KL.md").read_text().splitlines()]
    assert len(printed) > 12 and [line for line in printed if line not in document] == []


def test_the_tables_of_kl_md_are_those_of_its_runs(run_kl_sweep, tmp_path, monkeypatch, capsys):
    import kl_sweep
    shutil.copy(ROOT / "assets" / "kl_runs.jsonl", tmp_path)
    monkeypatch.setattr(kl_sweep, "run", None)
    run_kl_sweep("--hackable", "--collapse", "--minibatches", f"--out_dir={tmp_path}")
    printed = capsys.readouterr().out.splitlines()
    names = tuple(f"    {name} " for settings in kl_sweep.EXPERIMENTS.values()
                  for name in settings["runs"])
    rows = [line[4:] for line in (ROOT / "KL.md").read_text().splitlines()
            if line.startswith(names) and "±" in line]
    assert len(rows) > 11 and [row for row in rows if row not in printed] == []
    row, = (line for line in printed if line.startswith("k1 in the reward 0.1 "))
    assert f"{row[-12:].strip()} points" in " ".join((ROOT / "KL.md").read_text().split())
    for name in ("kl_hackable.png", "kl_collapse.png"):
        assert (tmp_path / name).exists() and (ROOT / "assets" / name).exists()

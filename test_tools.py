"""Tests of the tools beside starter.py: sample.py, speedrun.sh, bench.py, kl_sweep.py"""
import itertools, json, os, random, re, shutil, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # as fast for models so small

import numpy as np
import pytest
import torch

import starter
import countdown, sample, tiny

HERE = Path(starter.__file__).parent


# ---- sample.py, speedrun.sh

EASY = {"n_numbers": 2, "max_number": 9, "operations": "+-", "prompt": "{numbers}={target}:"}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run whose model knows sums and differences of two numbers"""
    folder = tmp_path_factory.mktemp("run")

    def examples(step):
        rng = random.Random(step)
        problems = [countdown.make_problem(rng, "train", **EASY) for _ in range(32)]
        return [(x["prompt"], f"<answer>{x['solution']}</answer>") for x in problems]

    tiny.main(folder / "model", examples, 60)
    countdown.write(folder, 1, 200, **EASY)
    flags = [f"--task={folder}/train.jsonl", "--use_vllm=False", "--max_tokens=14", "--n_eval=12"]
    write_config(folder, **vars(starter.main(flags, only_settings=True)))
    return folder


def write_config(folder, **settings):
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.fixture
def clean(monkeypatch):
    """What a script puts into starter is taken back."""
    for name in ("reply", "reward_fn", "TURN_ENDS", "UserError"):
        monkeypatch.setattr(starter, name, getattr(starter, name))


def test_sample_measures_and_talks(run_folder, clean, monkeypatch, capsys):
    sample.main([f"--model_id={run_folder}"])
    text = capsys.readouterr().out
    shares = re.findall(r"accuracy, (\S+) +([0-9.]+)  \(95 %: ", text)
    assert [name for name, _ in shares] == ["pass@1", "pass@4", "pass@8", "greedy"]
    one, four, eight, greedy = (float(share) for _, share in shares)
    assert 0.1 < one < four < eight <= 1 and one < greedy and "assistant> <answer>" in text
    assert "to each of 12 held-out problems" in text, "the run was trained on the others"
    lines = mock.Mock(side_effect=["3 5=8:", "", "4 1=5:", EOFError])
    monkeypatch.setattr("builtins.input", lines)
    sample.main([f"--model_id={run_folder}", "--chat"])
    assert capsys.readouterr().out.count("model: ") == 2


def test_the_shares_and_their_intervals(capsys):
    pairs = itertools.combinations([1, 1, 0, 0, 0], 2)
    assert sample.pass_at_k(5, 2, 2) == pytest.approx(np.mean([max(pair) for pair in pairs]))
    assert sample.pass_at_k(8, 0, 4) == 0 and sample.pass_at_k(8, 5, 4) == 1
    sample.print_share("none", [0.0] * 20)
    sample.print_share("half", [0.0, 1.0] * 200)
    assert capsys.readouterr().out.split("\n") == [
        "none               0.000  (95 %: 0.000 to 0.194)",
        "half               0.500  (95 %: 0.451 to 0.549)", ""]
    assert sample.printable("<b>é\x1b[31m\u202e\n") == "<b>é\\x1b[31m\\u202e\n"


@pytest.mark.parametrize("flags", [
    [], ["--n_eval=999"], ["--task=TASK", "--n_eval=999"], ["--max_prompt_tokens=20"],
    ["--eval_task=OTHER"], ["--task=OTHER", "--prompt={question}?"]])
def test_sample_never_measures_problems_that_the_run_was_trained_on(tmp_path, flags):
    for number, name in enumerate(("TASK", "OTHER")):
        rows = [{"question": f"{1000 * number + i}", "answer": i} for i in range(200)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    flags = [re.sub("TASK|OTHER", rf"{tmp_path}/\g<0>", flag) for flag in flags]
    run = starter.main(["--model_id=none", f"--task={tmp_path / 'TASK'}", "--n_eval=30"], True)
    write_config(tmp_path, **vars(run) | {"gpu_mem_util": 0.85})
    model_id, settings = sample.find_model(str(tmp_path / "model"))
    cfg = sample.read_settings(starter, starter.read_arguments(flags), model_id, settings)
    trained = {row["question"] for row in starter.read_task(run)[0]}
    measured = {row["question"] for row in starter.read_task(cfg)[1]}
    assert measured and not measured & trained and cfg.gpu_mem_util == 0.85


def test_sample_refuses_what_would_change_the_held_out_problems(tmp_path):
    (tmp_path / "model").mkdir()
    for flag, of_run in {"prompt={question}?": "", "eval_task=": "test.jsonl"}.items():
        write_config(tmp_path, **vars(starter.main(
            ["--task=train.jsonl", f"--eval_task={of_run}"], only_settings=True)))
        with pytest.raises(starter.UserError, match="decide which problems are held out"):
            sample.main([f"--model_id={tmp_path}", f"--{flag}", "--task=./train.jsonl"])


def test_sample_asks_for_what_it_needs(tmp_path, monkeypatch, clean):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(starter.UserError, match="no finished run in out/latest: run"):
        sample.main([])
    (tmp_path / "model").mkdir()
    settings = vars(starter.main(["--task=none.jsonl"], only_settings=True))
    write_config(tmp_path, **settings)
    (tmp_path / "mine.py").write_text("import starter\nstarter.reward_fn = max")
    with pytest.raises(starter.UserError, match=f"of mine.py: .* --script={tmp_path}/mine.py"):
        sample.main([f"--model_id={tmp_path}"])
    with pytest.raises(starter.UserError, match="none.jsonl, line 0"):
        sample.main([f"--model_id={tmp_path}", "--script=mine.py"])
    assert starter.reward_fn is max
    # A changed copy of starter.py is the trainer, with an error class of its own.
    text = (HERE / "starter.py").read_text()
    (tmp_path / "mine.py").write_text(text + "\ndef read_task(cfg):\n    raise UserError('mine')")
    with pytest.raises(Exception, match="^mine$") as error:
        sample.main([f"--model_id={tmp_path}", "--script=mine.py"])
    assert error.type is starter.UserError
    starter.AttentionInterface.register("packed", starter.packed_attention)  # not the copy's


def test_the_speedrun_ends_with_a_row_for_the_table(run_folder, tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", HERE / "speedrun.sh", run_folder / "model", ".", "--seed=3", "--n_eval=1",
             "--use_vllm=False", "--n_grpo_steps=1", "--group_size=4", "--rollout_batch_size=8",
             "--prompt={question}="]
    missing = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert missing.returncode == 2 and not missing.stdout and "test.jsonl" in missing.stderr
    for name in ("train", "test"):
        rows = [{"question": f"{name} {i}", "answer": f"so #### {i}"} for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    share = r"[01]\.[0-9]+ +\(95 %: [01]\.[0-9]+ to [01]\.[0-9]+\)"
    assert re.fullmatch(rf"\| GSM8K \| model \| .+ \| [0-9.]+ \| {share} \| {share} \| \w+ \| "
                        r"--seed=3 .*\|", run.stdout.splitlines()[-1])
    assert "4 responses to each of 9 held-out problems" in run.stdout and "test 1=" in run.stdout


# ---- bench.py, kl_sweep.py

SMALL_BENCH = ["bench.py", "--size=tiny", "--prompts=2", "--group=2", "--new_tokens=4", "--steps=1",
               "--warmup=1"]


@pytest.fixture
def on_a_cpu(monkeypatch):
    """What a tool changes in starter and in this process is put back."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    functions = dict(vars(starter))
    yield
    vars(starter).update(functions)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_benchmark_ends_with_its_result(tmp_path, on_a_cpu):
    run = subprocess.run([sys.executable, HERE / SMALL_BENCH[0], *SMALL_BENCH[1:],
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


def test_the_benchmark_of_the_update_alone(tmp_path, on_a_cpu, capsys, monkeypatch):
    import bench
    monkeypatch.setattr(sys, "argv", [*SMALL_BENCH, "--rollout=False", "--n_minibatches=2",
                                      f"--model_dir={tmp_path}/model"])
    monkeypatch.setattr(starter, "TorchSampler", None)  # there is no sampler
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seconds"]["forward_backward"] > 0 and result["seconds"]["generate"] == 0
    assert result["gap"] is None and (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize("word, message", [
    ("--steps=0", "at least 1"), ("--n_grpo_steps=5", "n_grpo_steps: set prompts"),
    ("--group_size=4", "group_size: set prompts"), ("--group=1", "at least 2"),
    ("--nonsense=3", "nonsense"), ("--new_tokens=x", "new_tokens=x"), ("--size=9b", "size must"),
    ("--gpu_gib=24", "needs a GPU"), ("--peer=verl", "must be trl"), ("--temperature=0", "above 0")])
def test_the_benchmark_refuses_bad_options_in_one_line(word, message, on_a_cpu, monkeypatch):
    import bench
    monkeypatch.setattr(bench, "make_model_folder", None)  # it is found before that
    monkeypatch.setattr(sys, "argv", ["bench.py", word])
    with pytest.raises(starter.UserError, match=message) as error:
        bench.main()
    assert "\n" not in str(error.value)


def test_the_benchmark_imitates_a_smaller_gpu(tmp_path, on_a_cpu, monkeypatch):
    import bench
    options = SimpleNamespace(gpu_gib=24, prompts=1, steps=1, warmup=1, prompt_tokens=8, rollout=1)
    cfg = SimpleNamespace(gpu_mem_util=0.5, task=tmp_path / "task.jsonl")
    monkeypatch.setattr(bench, "HOLD", "print('held', flush=True); open(0).read()")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 2**30, 96 * 2**30))
    monkeypatch.setattr(starter, "main", mock.Mock())
    monkeypatch.setattr(bench.Bench, "result", lambda self: self)
    bench.measure(options, cfg, ["--gpu_mem_util=0.5"], {"lr": 1.0})
    (argv,), work = starter.main.call_args
    assert argv[-1] == "--gpu_mem_util=0.125" and work == {"lr": 1.0}, "half of 24 GiB"
    with bench.hold_memory(24) as child:  # closes its input and waits
        assert child.poll() is None
    monkeypatch.setattr(bench, "HOLD", "")
    with pytest.raises(starter.UserError, match="gpu_gib must be below"):
        bench.hold_memory(24)


@pytest.fixture
def run_kl_sweep(tmp_path, on_a_cpu, monkeypatch):
    """-> function that runs it with few problems in an empty folder"""
    import kl_sweep
    write = countdown.write
    monkeypatch.setattr(countdown, "write", lambda folder, seed, **options: write(
        folder, seed, 100, **options))
    for name, value in {"n_eval": 20, "rollout_batch_size": 16, "lr": 1e-2}.items():
        monkeypatch.setitem(kl_sweep.SETTINGS, name, value)
    monkeypatch.setattr(starter, "reward_fn", lambda text, problem: len(text) % 9 / 10)
    (tmp_path / "assets").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kl_sweep.py", *words])
        kl_sweep.main()
    return run


def test_the_kl_sweep_measures_and_draws(run_kl_sweep, tmp_path, monkeypatch, capsys):
    import kl_sweep
    out = tmp_path / "out_kl_sweep_quick"
    with monkeypatch.context() as patch:
        patch.setitem(kl_sweep.SETTINGS, "max_minutes", 1e-9)  # ends after a step
        with pytest.raises(KeyboardInterrupt):
            run_kl_sweep("--quick", "--steps=2", "--warm_start_steps=2")
    assert not [*out.glob("*/result.json")], "a run that ended early is no result"
    for _ in range(2):
        run_kl_sweep("--quick", "--steps=1", "--warm_start_steps=2")
        monkeypatch.setattr(kl_sweep.tiny, "main", None)
        monkeypatch.setitem(kl_sweep.RUNS, "kl_coef 0", None)  # finished runs are not repeated
    table = (out / "kl_sweep.md").read_text().splitlines()
    assert len(table) == 2 + 4 and "| start | " in table[2] and table[5] in capsys.readouterr().out
    results = json.loads((out / "kl_sweep.json").read_text())
    assert abs(results["start"][0]["kl"]) < 1e-6 < results["kl_coef 0.1"][0]["kl"]
    assert (out / "kl_sweep.png").stat().st_size > 10_000 and not [*(tmp_path / "assets").iterdir()]


def test_the_toys_figure_and_differences_of_kl_md(run_kl_sweep, tmp_path, capsys):
    run_kl_sweep("--toys")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    document = [line.strip() for line in (HERE / "KL.md").read_text().splitlines()]
    assert len(printed) > 15 and [line for line in printed if line not in document] == []
    run_kl_sweep("--figure")
    assert (tmp_path / "assets" / "kl_estimators.png").stat().st_size > 10_000
    shutil.copy(HERE / "assets" / "kl_sweep.json", tmp_path / "assets")
    run_kl_sweep("--against=kl_coef 0.1")
    difference = capsys.readouterr().out.split("| k3, unweighted | -")[1].split(" |")[0]
    assert f"plain k3 ends {difference.replace('%', '')} points below" in " ".join(document)
    with pytest.raises(starter.UserError, match="--against: one of start; kl_coef 0;"):
        run_kl_sweep("--against=nothing")

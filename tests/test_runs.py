"""Whole runs of the trainer: records, options, errors, resuming, kills, a full disk, ranks."""
import copy, functools, json, math, os, random, re, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import starter
from conftest import (KL, ROOT, are_equal, assert_same_run, load, repeatable, rows_of,
                      save_model_folder, saved_step, settings_in, small_run, weights_of,
                      write_script)
from starter import UserError
from test_starter import (letters, log_probs_of, make_groups, make_policy, make_response, make_rows,
                          question_rows, settings_of, write_rows)

# What is slow to set up is shared by the tests of one process.
in_one_process = pytest.mark.xdist_group

# ---- The records of a run ------------------------------------------------------------------------

TRAINING = {f"train/{name}" for name in (
    "reward_mean loss grad_norm lr kl_penalty kl_coef clip_fraction approx_kl entropy "
    "avg_output_tokens truncated_frac frac_groups_zero_std skipped_steps").split()} | {
    "rollout/logp_gap_mean", "time/rollout", "time/train", "time/sync", "time/step",
    "time/minutes"}
EVALUATION = {"eval/accuracy", "eval/mean_reward"}
WITH_KL = {"kl/mean", "kl/max", "kl/min"}
LAST_LINES = (r"\nStep 3 \| Held-out accuracy, sampled: .*% \| mean_reward: [0-9.]+\n(.*\n)*"
              r"  try it    python sample.py --model_id=.*/model'\n"
              r"  curves    tensorboard --logdir .*/out/tb'\n")


def check_run(folder, n_steps=3, max_gap=1e-4):
    """What every finished run must have -> its metrics"""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(n_steps + 1))
    assert EVALUATION <= set(rows[0]) and EVALUATION <= set(rows[-1])
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/skipped_steps"] == 0
        if row["train/frac_groups_zero_std"] < 1:  # otherwise there was nothing to compute
            assert TRAINING <= set(row) and row["rollout/logp_gap_mean"] < max_gap
    before = load(settings_in(folder)["model_id"]).state_dict()
    after = weights_of(folder)
    assert before.keys() == after.keys() and not are_equal(before, after)
    return rows


@pytest.fixture(scope="module")
def kl_run(world, script, tmp_path_factory):
    """-> a finished run with a KL penalty: its folder, and what it printed"""
    folder = tmp_path_factory.mktemp("kl")
    code = script.run(folder, *small_run(world), KL, "--lr=3e-3", "--inner_epochs=2",
                      "--kl_warmup_steps=4", "--kl_coef=0.2")
    assert code == 0, script.text()
    return SimpleNamespace(folder=(folder / "out" / "latest").resolve(), text=script.text())


def test_a_run_writes_a_row_of_metrics_per_step(kl_run):
    rows = check_run(kl_run.folder)
    assert all(WITH_KL <= set(row) for row in rows[1:])
    assert [("eval/accuracy" in row) for row in rows] == [True, False, True, True]


def test_the_kl_starts_at_zero_and_its_coefficient_rises_during_the_warmup(kl_run):
    rows = rows_of(kl_run.folder)
    assert rows[1]["kl/min"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["kl/mean"] > rows[1]["kl/mean"] > 0
    assert [row["train/kl_coef"] for row in rows[1:]] == pytest.approx([0.05, 0.1, 0.15])


def test_a_run_prints_a_line_per_step_and_ends_with_what_to_do_next(kl_run):
    step = r"\nStep 3 \| Loss: .* \| Grad norm: .* \| Reward.*: .* tok, .*cut \| .*KL penalty: "
    assert re.search(step, kl_run.text) and re.search(LAST_LINES, kl_run.text)
    assert "%|" not in kl_run.text, "no progress bars"


def events_of(folder):
    return EventAccumulator(str(folder.parent / "tb" / folder.name)).Reload()


def text_of(events, tag):
    """-> the texts of a tag in TensorBoard, in the order of their steps"""
    return [event.tensor_proto.string_val[0].decode()
            for event in events.Tensors(f"{tag}/text_summary")]


def test_tensorboard_shows_the_same_numbers(kl_run):
    events = events_of(kl_run.folder)
    assert TRAINING | EVALUATION | WITH_KL <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    wanted = rows_of(kl_run.folder)[3]["kl/mean"]
    assert events.Scalars("kl/mean")[2].value == pytest.approx(wanted)


def test_tensorboard_shows_samples_of_each_evaluation(kl_run):
    events = events_of(kl_run.folder)
    steps = {tag.removesuffix("/text_summary"): [event.step for event in events.Tensors(tag)]
             for tag in events.Tags()["tensors"]}
    best, worst = "training/best of a group", "training/worst of a group"
    assert steps == {"held-out/1": [0, 2, 3], "held-out/2": [0, 2, 3], best: [2, 3], worst: [2, 3],
                     "settings": [0]}
    rewards = [[float(re.search("<h4>reward</h4><p>(.*?)</p>", text)[1])
                for text in text_of(events, tag)] for tag in (worst, best)]
    assert all(low <= high for low, high in zip(*rewards))
    wanted = [sample["reward"] for sample in rows_of(kl_run.folder, "samples.jsonl")]
    assert [wanted[i] for i in (4, 8)] == rewards[1] and [wanted[i] for i in (5, 9)] == rewards[0]


def test_a_single_held_out_sample_does_not_shift_the_tags(run_main, monkeypatch):
    monkeypatch.setattr(starter, "reward_fn", letters)
    folder = run_main("--n_eval=1", "--n_grpo_steps=2", "--reward_truncated")
    events = events_of(folder)
    samples = [sample for sample in rows_of(folder, "samples.jsonl") if sample["step"] == 2]
    best, worst = samples[-2:]
    assert best["reward"] > worst["reward"] and best["prompt"] == worst["prompt"]
    for tag, sample in (("best", best), ("worst", worst)):
        text, = text_of(events, f"training/{tag} of a group")
        assert f"<p>{sample['prompt']}</p>" in text
        assert f"<h4>reward</h4><p>{sample['reward']:g}</p>" in text


@pytest.fixture
def log(tmp_path):
    """-> a log in a folder of its own"""
    folder = tmp_path / "out" / "0001"
    folder.mkdir(parents=True)
    return starter.Log(folder, {"lr": 1e-4, "prompt": "<b>{question}\n| Think", "seed": 7})


def test_tensorboard_has_the_settings_as_a_table_and_shows_what_the_model_wrote(log):
    """With its line breaks and without any markup of its own"""
    hostile = "<script>alert(1)</script>\n**bold** | a\n\n```\n<h4>reward</h4>"
    problem = {"rendered": "2+3?\n", "answer": "<b>5"}
    response = make_response([5], [6], text=hostile, problem=problem, reward=0.25)
    response.problem["turns"].append({"role": "environment", "content": "a < b"})
    metrics = {"eval/accuracy": 0.5, "eval/mean_reward": 0.5}
    starter.log_eval(log, SimpleNamespace(step=3), metrics, [response])
    log.writer.flush()
    events = events_of(log.folder)
    assert text_of(events, "held-out/1") == [
        "<h4>prompt</h4><p>2+3?<br></p><h4>assistant</h4><p>&lt;script&gt;alert(1)&lt;/script&gt;"
        "<br>**bold** | a<br><br>```<br>&lt;h4&gt;reward&lt;/h4&gt;</p><h4>environment</h4>"
        "<p>a &lt; b</p><h4>reward</h4><p>0.25</p><h4>answer</h4><p>&lt;b&gt;5</p>"]
    table, = text_of(events, "settings")
    header, line, *rows = table.splitlines()
    assert (header, line) == ("| setting | value |", "|---|---|") and "| lr | 0.0001 |" in rows
    assert len(rows) == 3 and all(row.count("|") == 3 for row in rows) and "<b>" not in table


def test_samples_show_held_out_problems_and_after_a_step_training_problems_too(kl_run, world):
    samples = rows_of(kl_run.folder, "samples.jsonl")
    training, held_out = ({row["prompt"] for row in rows_of(world, f"{name}.jsonl")}
                          for name in ("train", "test"))
    assert {sample["step"] for sample in samples} == {0, 2, 3}
    for sample in samples:
        assert {"prompt", "turns", "reward"} <= set(sample)
        assert sample["prompt"] in (training | held_out if sample["step"] else held_out)
    assert any(sample["prompt"] in training for sample in samples)


def test_the_saved_model_has_the_weights_of_the_checkpoint(kl_run):
    saved = torch.load(kl_run.folder / "checkpoint.pt", weights_only=True)
    policy, tokenizer = starter.init_policy(str(kl_run.folder / "model"))
    weights = {name: policy.state_dict()[name] for name in saved["weights"]}
    assert are_equal(weights, dict(saved["weights"])) and tokenizer.encode("5") == [53]


def test_a_finished_run_says_so_and_stays_as_it_is(kl_run, script, tmp_path):
    rows = rows_of(kl_run.folder)
    assert script.run(tmp_path, f"--resume={kl_run.folder}") == 2
    assert "error: it has finished: raise --n_grpo_steps\n" in script.text()
    assert rows_of(kl_run.folder) == rows


def test_a_run_says_which_version_made_it(kl_run):
    assert settings_in(kl_run.folder)["version"] == starter.__version__ == "0.5.0"


def test_entries_of_dict_rewards_are_metrics_of_the_run(run_main, monkeypatch, capsys):
    monkeypatch.setattr(starter, "reward_fn", lambda text, row: {
        "reward": letters(text, row), "sevenths": round(7 * letters(text, row))})
    rows = rows_of(run_main("--reward_truncated", "--n_grpo_steps=2", "--eval_every=1"))
    for kind, reward in (("train", "train/reward_mean"), ("eval", "eval/mean_reward")):
        assert all(row[f"{kind}/sevenths"] == pytest.approx(7 * row[reward]) for row in rows[1:])
    assert f"| sevenths: {rows[2]['eval/sevenths']:.3f}" in capsys.readouterr().out


def test_a_model_of_a_run_is_trained_on_the_task_of_that_run(run_main, world, tmp_path):
    first = run_main("--n_grpo_steps=1", "--prompt={question}")
    words = [word for word in small_run(world) if not re.match("--(task|model_id)=", word)]
    starter.main([*words, f"--model_id={first}/model", f"--out_dir={tmp_path}/second"])
    second = tmp_path / "second" / "latest"
    assert settings_in(second)["task"] == str(world) and len(rows_of(second)) == 4
    assert settings_in(second)["prompt"] == "{question}"


@pytest.mark.parametrize("reward, n_lines", [(0.1, 3), (None, 0)], ids=["equal", "different"])
def test_a_run_that_cannot_learn_says_so_in_its_first_three_steps(run_main, monkeypatch, capsys,
                                                                  reward, n_lines):
    monkeypatch.setattr(starter, "reward_fn", lambda text, row: reward or letters(text, row))
    folder = run_main("--reward_truncated", "--n_grpo_steps=5", "--eval_every=0")
    lines = re.findall("^!!! all rewards are equal: check prompt.*$", capsys.readouterr().out, re.M)
    assert len(lines) == n_lines and len(rows_of(folder)) == 6
    for line in lines:
        assert re.search(r"reward_fn: '\d+\+\d+=' -> '.*<", line), "with a prompt and a response"


def test_a_run_whose_responses_are_all_cut_off_says_so(run_main, monkeypatch, capsys):
    monkeypatch.setattr(starter, "reward_fn", letters)
    run_main("--reward_truncated", "--max_tokens=2", "--n_grpo_steps=1", "--eval_every=0")
    assert "\n!!! most responses are cut off: check prompt" in capsys.readouterr().out


def test_training_raises_the_reward(run_main):
    rows = rows_of(run_main("--n_grpo_steps=20", "--rollout_batch_size=128", "--group_size=8",
                            "--lr=5e-4", "--seed=1", "--save_every=0", "--eval_every=0"))
    rewards = [row["train/reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.08, rewards
    assert not [name for row in rows for name in row if name.startswith(("eval/", "kl/"))]


def test_the_best_model_is_that_of_the_best_evaluation(run_main, world, monkeypatch):
    n_right = iter([3, 2, 5, 4, 3, 4, 6])  # of the 8 responses of each evaluation
    evaluate = starter.evaluate_model

    def scripted(llm, task, n=1):
        _, responses = evaluate(llm, task, n)
        right = next(n_right)
        return {"eval/accuracy": right / 8, "eval/mean_reward": right / 8}, responses

    two_steps = run_main("--n_grpo_steps=2", "--eval_every=0", out="two")
    monkeypatch.setattr(starter, "evaluate_model", scripted)
    folder = run_main("--eval_every=1")
    assert are_equal(weights_of(folder, "best"), weights_of(two_steps))
    assert not are_equal(weights_of(folder, "best"), weights_of(folder))
    folder = run_main("--eval_every=1", "--n_grpo_steps=2")
    assert are_equal(weights_of(folder, "best"), weights_of(folder)), "the last one is the best"


# ---- Settings ------------------------------------------------------------------------------------

def test_every_hyperparameter_is_set_by_some_test():
    files = [ROOT / "test_starter.py", *Path(__file__).parent.glob("*.py")]
    text = "".join(file.read_text() for file in files)
    names = vars(starter.main([], only_settings=True))
    assert [name for name in names if not re.search(rf"--{name}\b", text)] == []


# What is edited in main(), as Python writes it
EDITED = {
    "model_id": "'model'", "task": "'edited_task.py'", "lr": "0.0005", "group_size": "2",
    "rollout_batch_size": "6", "n_eval": "3", "max_tokens": "6", "seed": "7", "n_grpo_steps": "2",
    "prompt": "'{a} and {b}: '", "use_kl_penalty": "True", "out_dir": "'runs'"}
# A task that writes down what it is asked to reward
EDITED_TASK = """
    import json

    def rows():
        return [{"a": i, "b": i + 1} for i in range(40)]

    def reward_fn(text, row):
        with open("rewarded.jsonl", "a") as file:
            file.write(json.dumps([row["rendered"], text]) + "\\n")
        return -len(text) - row["a"] % 2
    """
NOT_EDITED = ["--use_vllm=False", "--warmup_steps=0", "--eval_every=2"]


def edit_main(path, edits):
    """Write a copy of starter.py with other defaults in the block of main()."""
    text = (ROOT / "starter.py").read_text()
    for name, value in edits.items():
        default = rf"(?m)^        {name}=.*?,(?=  #|$)"  # the first such line is in the block
        text, n = re.subn(default, f"        {name}={value},", text, count=1)
        assert n == 1, name
    path.write_text(text)


@pytest.fixture(scope="module")
def edited(world, script, tmp_path_factory):
    """-> run folder of an edited copy, in whose folder it was started without these settings"""
    folder = tmp_path_factory.mktemp("edited")
    (folder / "model").symlink_to(world / "model")
    write_script(folder / "edited_task.py", EDITED_TASK)
    edit_main(folder / "my_grpo.py", EDITED)
    code = script.run(folder, *NOT_EDITED, script=folder / "my_grpo.py")
    assert code == 0, script.text()
    return (folder / "runs" / "latest").resolve()


@pytest.mark.parametrize("name", EDITED)
def test_what_is_edited_in_main_is_in_config_json(edited, name):
    assert repr(settings_in(edited)[name]) == EDITED[name]


def test_what_is_edited_in_main_acts(edited):
    rows = rows_of(edited)
    assert [row["step"] for row in rows] == [0, 1, 2], "n_grpo_steps"
    assert {row.get("train/lr") for row in rows} == {None, 0.0005} and "kl/mean" in rows[1]
    assert [row["train/avg_output_tokens"] <= 6 for row in rows[1:]] == [True, True], "max_tokens"
    rewarded = rows_of(edited.parent.parent, "rewarded.jsonl")
    assert len(rewarded) == 3 + 6 + 6 + 3, "n_eval, rollout_batch_size"
    prompts = [prompt for prompt, _ in rewarded]
    assert prompts[3:9:2] == prompts[4:9:2] and len({*prompts[3:9]}) == 3, "group_size"
    assert all(re.fullmatch(r"\d+ and \d+: ", prompt) for prompt in prompts)
    assert (edited / "my_grpo.py").read_bytes() == (edited / "../../my_grpo.py").read_bytes()


def test_what_is_edited_in_main_acts_like_what_is_typed(edited, script):
    folder = edited.parent.parent
    typed = [f"--{name}={value.strip(chr(39))}" for name, value in EDITED.items()]
    assert script.run(folder, *NOT_EDITED, *typed, "--out_dir=typed") == 0, script.text()
    assert_same_run(folder / "typed" / "latest", edited)
    assert script.run(folder, *NOT_EDITED, *typed, "--out_dir=other", "--seed=8") == 0
    assert repeatable(folder / "other" / "latest") != repeatable(edited), "seed"


def test_a_resumed_run_keeps_its_settings_though_main_has_changed(world, script, tmp_path):
    edit_main(tmp_path / "mine.py", {"lr": "2e-4", "clip_range": "0.3"})
    words = [word for word in small_run(world) if not word.startswith("--lr=")]
    assert script.run(tmp_path, *words, script=tmp_path / "mine.py") == 0, script.text()
    edit_main(tmp_path / "mine.py", {"lr": "5e-4", "clip_range": "0.1"})
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=4", "--clip_range=0.4",
                      script=tmp_path / "mine.py") == 0, script.text()
    folder = tmp_path / "out" / "latest"
    assert (settings_in(folder)["lr"], settings_in(folder)["clip_range"]) == (2e-4, 0.4)
    assert rows_of(folder)[4]["train/lr"] == pytest.approx(2e-4)


def test_config_json_keeps_auto_for_the_gpu_of_a_resumed_run(run_main):
    settings = settings_in(run_main("--n_grpo_steps=1"))
    assert settings["offload"] == settings["vllm_sleep"] == "auto"
    assert settings["tokens_per_microbatch"] == 0, "decided anew, too"


@pytest.mark.parametrize("arguments, words", [
    (["--kl_coeff=0.1"], "did you mean kl_coef?"), (["--task=no/such.jsonl"], "no/such.jsonl"),
    (["--max_prompt_tokens=1"], "too long"), (["--model_id=./no/model"], "./no/model"),
    (["--resume=no/such/run"], "no run to resume"), (["--inner_epochs=0"], "above 0"),
    (["--resume=latest", "--out_dir=x"], "no run to resume in x/latest")])
def test_a_mistake_is_one_line_and_nothing_is_written(run_main, tmp_path, monkeypatch, arguments,
                                                      words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run_main(*arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


# ---- What a shell sees ---------------------------------------------------------------------------

def test_a_misspelled_setting_is_one_line_and_exit_code_2(script, tmp_path):
    assert script.run(tmp_path, "--lerning_rate=1") == 2
    assert re.fullmatch("error: there is no hyperparameter lerning_rate.*\n", script.text())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line, rank, code, ending", [
    ("raise starter.UserError('do this')", 0, 2, "error: do this\n"),
    ("1 / 0", 0, 1, "ZeroDivisionError: division by zero\n"),
    ("raise torch.OutOfMemoryError('CUDA out of memory')", 0, 1, "--lora_rank=32\n"),
    ("print('trained')", 0, 0, "trained\n"), ("print('trained')", 1, 0, "")],
    ids=["UserError", "any error", "memory", "rank 0", "rank 1"])
def test_the_exit_code_says_how_it_went_and_rank_0_prints(script, tmp_path, line, rank, code,
                                                          ending):
    program = write_script(tmp_path / "program.py", f"""
        import sys, torch
        sys.path.append({str(ROOT)!r})
        import starter

        def main():
            {line}

        starter.run(main)
        """)
    assert script.run(tmp_path, script=program, RANK=str(rank)) == code
    text = script.text()
    assert text.endswith(ending) and (text or not ending)
    assert ("Traceback" in text) == ("1 / 0" in line)


def test_a_terminal_without_the_letters_of_a_sample_does_not_end_the_run(script, world, tmp_path):
    model = save_model_folder(tmp_path / "model")  # of random weights, which writes any bytes
    before = "sys.stdout.reconfigure(encoding='ascii', errors='strict')  # PYTHONIOENCODING=ascii"
    assert script.run(tmp_path, *small_run(world), f"--model_id={model}", "--n_grpo_steps=1",
                      "--max_prompt_tokens=40", before=before) == 0, script.text()
    assert "\\ufffd" in script.text() or "\\x" in script.text(), "there were such letters"
    assert (tmp_path / "out" / "latest" / "model").exists()


# ---- Options -------------------------------------------------------------------------------------

@pytest.fixture
def eager_compiler(monkeypatch):
    """The C++ compiler would take half a minute. This traces the same graphs; the GPU tests use
    the real one."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_several_updates_per_step_reach_the_clip(run_main):
    rows = check_run(run_main(
        "--inner_epochs=2", "--n_minibatches=2", "--loss_type=dapo", "--clip_range=0.001",
        "--clip_range_high=0.002", "--seed=7", "--max_minutes=60"))
    assert rows[1]["train/clip_fraction"] > 0


def test_dr_grpo_trains_in_small_microbatches(run_main):
    rows = check_run(run_main(
        "--tokens_per_microbatch=40", "--loss_type=dr_grpo", "--advantage_scale=none",
        "--temperature=0.7", "--max_grad_norm=0", "--warmup_steps=0", "--gpu_mem_util=0.2",
        "--thinking=True"))
    assert rows[1]["train/lr"] == 1e-3, "no warm-up"


@in_one_process("compiler")
def test_a_compiled_model_with_gradient_checkpointing_trains(run_main, tmp_path, monkeypatch,
                                                             eager_compiler):
    monkeypatch.setattr(starter, "reward_fn", letters)
    model = save_model_folder(tmp_path / "model", num_hidden_layers=1)
    check_run(run_main(f"--model_id={model}", "--gradient_checkpointing=True", "--compile=True",
                       "--max_prompt_tokens=40", "--reward_truncated"))


@in_one_process("compiler")
def test_nothing_is_compiled_anew_when_sizes_that_were_equal_differ(monkeypatch, eager_compiler):
    torch._dynamo.reset()
    policy = make_policy(num_hidden_layers=1)
    starter.compile_and_shard(policy, settings_of(compile=True), "cpu")
    log_probs_of(policy, make_rows([9, 12, 7]))  # no shared prompts: as many slots as tokens
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    log_probs_of(policy, make_groups())


def test_lora_trains_with_the_exact_kl_and_saves_adapters_only(run_main):
    folder = run_main(KL, "--kl_estimator=exact", "--lora_rank=2", "--inner_epochs=2", "--lr=1e-2")
    assert check_run(folder)[3]["kl/mean"] > 0
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert all("lora_" in name for name in saved["weights"])


def test_the_kl_may_be_a_part_of_the_reward(run_main):
    rows = check_run(run_main(KL, "--kl_estimator=k1", "--kl_in=reward", "--n_minibatches=2",
                              "--reward_truncated=True", "--max_turns=2"))
    assert rows[3]["kl/mean"] > 0


def test_the_coefficient_rises_while_the_kl_is_above_its_target(run_main):
    rows = check_run(run_main(KL, "--kl_importance_weight=False", "--target_kl=1e-7",
                              "--kl_estimator=k2", "--inner_epochs=2", "--kl_coef=0.1"))
    assert rows[3]["train/kl_coef"] > 0.1 and rows[1]["kl/mean"] > 1e-5


def test_a_model_that_cannot_be_packed_is_padded(run_main, tmp_path, monkeypatch, capsys):
    """With rows that have no answers, and a reward that does not need any"""
    monkeypatch.setattr(starter, "reward_fn", letters)
    task = write_rows(tmp_path / "task.jsonl", [{"question": f"{i}+1"} for i in range(20)])
    model = save_model_folder(tmp_path / "model", "lfm2", layer_types=["conv", "full_attention"])
    rows = check_run(run_main(f"--model_id={model}", f"--task={task}", "--prompt={question} is",
                              "--max_prompt_tokens=64", KL, "--reward_truncated"))
    assert "rows padded (slower)" in capsys.readouterr().out and rows[3]["kl/mean"] > 0
    assert min(row["train/grad_norm"] for row in rows[1:]) > 0


def methods_of_the_readme():
    """-> [(paper, flags), ...] of the table whose header has the word flags"""
    methods, in_table = [], False
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|") or len(cells) < 2:
            in_table = False
        elif "flags" in cells[1]:
            in_table = True
        elif in_table and not set(cells[0]) <= set("-: "):
            name = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cells[0])
            methods.append((name, " ".join(re.findall("`(.*?)`", cells[1])).split()))
    return methods


METHODS = methods_of_the_readme()


def test_the_readme_has_a_table_of_methods():
    text = str(METHODS)
    assert len(METHODS) >= 8
    for name in ("GRPO", "DAPO", "RLOO", "GSPO", "CISPO", "DPPO", "MaxRL", "KL in the reward"):
        assert name in text


@pytest.mark.parametrize("flags", [flags for _, flags in METHODS],
                         ids=[name for name, _ in METHODS])
def test_a_method_of_the_readme_trains(run_main, monkeypatch, flags):
    monkeypatch.setattr(starter, "reward_fn", letters)
    folder = run_main("--reward_truncated", "--n_grpo_steps=2", *flags)
    rows = check_run(folder, 2)
    assert min(row["train/grad_norm"] for row in rows[1:]) > 0
    settings = settings_in(folder)
    typed = starter.read_arguments(flags)
    assert typed and typed.keys() <= settings.keys()
    for name, value in typed.items():
        assert value == str(settings[name]) or float(value) == settings[name]


# ---- The steps of a run, compared with plainer forms ---------------------------------------------

@pytest.fixture(params=[0, 2], ids=["all weights", "LoRA"])
def microbatches(request, run_main, world, monkeypatch):
    """-> (what the microbatches of 4 steps were given and should be given, rows of metrics)"""
    step = starter.grpo_microbatch_step
    start, _ = starter.init_policy(f"{world}/model")
    seen = []

    def watched(policy, input_ids, labels, mask, *rest, **options):
        rows = input_ids, labels, mask
        # The policy before the first of the 4 minibatches of a step
        before = copy.deepcopy(policy) if len(seen) % 4 == 0 else seen[-1].before
        with torch.no_grad():
            wanted_old, _ = starter.response_stats(before, *rows)
            _, _, wanted_ref, exact_kl = starter.response_stats(policy, *rows, 1.0, start)
        seen.append(SimpleNamespace(
            before=before, old=options["old_log_probs"] * mask, wanted_old=wanted_old,
            ref=options["ref_log_probs"] * mask, wanted_ref=wanted_ref, exact_kl=exact_kl[mask]))
        return step(policy, *rows, *rest, **options)

    monkeypatch.setattr(starter, "grpo_microbatch_step", watched)
    folder = run_main(
        KL, "--inner_epochs=2", "--n_minibatches=2", "--kl_coef=0.001", "--n_grpo_steps=4",
        "--rollout_batch_size=64", f"--lora_rank={request.param}", "--eval_every=0",
        f"--lr={5e-3 if request.param else 5e-4}")
    return seen, rows_of(folder)


def test_old_and_reference_log_probs_come_from_the_right_models(microbatches):
    """Old: the policy before the step. Reference: the starting model, without adapters."""
    seen, rows = microbatches
    assert len(seen) == 4 * 4
    for micro in seen:
        assert torch.allclose(micro.old, micro.wanted_old, atol=1e-5)
        assert torch.allclose(micro.ref, micro.wanted_ref, atol=1e-5)
    for step, row in enumerate(rows[1:]):
        exact = torch.cat([micro.exact_kl for micro in seen[4 * step:4 * step + 4]]).mean().item()
        assert exact / 3 < row["kl/mean"] < exact * 3, "near the exact KL, also off-policy"
    assert exact > 0.01


def test_steps_are_those_of_a_plain_adamw(run_main, monkeypatch):
    """betas 0.9 and 0.95, no weight decay: by the formula"""
    update = starter.update_weights
    rows = []

    def watched(policy, *rest):
        before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        slopes = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        norm = update(policy, *rest)
        after = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        rows.append((before.double(), slopes.double(), after.double()))
        return norm

    monkeypatch.setattr(starter, "update_weights", watched)
    monkeypatch.setattr(starter, "reward_fn", letters)
    run_main("--lr=1e-2", "--warmup_steps=0", "--max_grad_norm=0", "--eval_every=0")
    mean = square = 0
    for step, (before, slopes, after) in enumerate(rows, 1):
        mean = 0.9 * mean + 0.1 * slopes
        square = 0.95 * square + 0.05 * slopes**2
        move = (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        assert torch.allclose(after, before - 1e-2 * move, rtol=0, atol=2e-6)
    assert len(rows) == 3


def test_the_kl_is_0_right_after_a_refresh_of_the_reference(run_main, monkeypatch):
    monkeypatch.setattr(starter, "reward_fn", letters)
    rows = rows_of(run_main(KL, "--ref_update_every=2", "--lr=3e-3", "--n_grpo_steps=5",
                            "--eval_every=0", "--reward_truncated"))
    kl = [row["kl/mean"] for row in rows[1:]]
    assert [abs(value) < 1e-7 for value in kl] == [True, False, True, False, True]


def test_accuracy_counts_rewards_of_at_least_correct_reward(run_main, monkeypatch):
    rewards = []
    monkeypatch.setattr(starter, "reward_fn", lambda *words: rewards.append(letters(*words))
                        or rewards[-1])
    rows = rows_of(run_main("--correct_reward=0.4", "--reward_truncated", "--n_eval=20"))
    assert 0 < rows[0]["eval/accuracy"] == np.mean(np.array(rewards[:20]) >= 0.4) < 1


def test_groups_with_equal_rewards_leave_the_weights_alone_to_the_bit(run_main, world, monkeypatch):
    numbers = []
    monkeypatch.setattr(starter, "reward_fn",
                        lambda text, problem: numbers.append(problem["problem_number"]) or 0.1)
    folder = run_main("--reward_truncated=True", "--eval_every=0")
    assert numbers == [i // 4 for i in range(48)], "four other problems in every step"
    assert are_equal(weights_of(folder), weights_of(world))


def test_rows_without_advantage_count_in_the_divisor(run_main):
    """They are left out of the computation from step 2 on, and the gradient stays the same."""
    norms = []
    for number, penalty in enumerate(([KL, "--kl_coef=1e-30"], [])):
        rows = rows_of(run_main(*penalty, "--lr=1e-9", out=f"out{number}"))
        assert 0 < np.mean([row["train/frac_groups_zero_std"] for row in rows[2:]]) < 1
        norms.append([row["train/grad_norm"] for row in rows[1:]])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


# ---- Errors within a run -------------------------------------------------------------------------

def test_updates_that_are_not_finite_are_skipped_and_counted_and_five_end_the_run(
        run_main, monkeypatch, tmp_path):
    advantages = starter.group_advantages
    calls = []

    def bad(*arguments):
        calls.append(len(calls))
        return advantages(*arguments) * (math.nan if len(calls) in (2, 6, 7, 8, 9, 10) else 1.0)

    monkeypatch.setattr(starter, "group_advantages", bad)
    monkeypatch.setattr(starter, "reward_fn", letters)
    with pytest.raises(UserError, match="5 updates in a row"):
        run_main("--n_grpo_steps=12", "--warmup_steps=0", "--reward_truncated", "--eval_every=0")
    rows = rows_of(tmp_path / "out" / "latest")[1:]
    assert [row["train/skipped_steps"] for row in rows] == [0, 1, 1, 1, 1, 2, 3, 4, 5]
    rates = [1e-3, 1e-3, 1e-4, 2e-4, 4e-4, 8e-4, 1e-4, 1e-4, 1e-4]
    assert [row["train/lr"] for row in rows] == pytest.approx(rates) and "train/loss" not in rows[1]
    saved = torch.load(tmp_path / "out" / "latest" / "checkpoint.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in saved["weights"].values())


def test_a_sync_that_does_nothing_ends_the_run_with_its_row_and_a_checkpoint(
        run_main, monkeypatch, tmp_path):
    sync = starter.load_policy_into_vllm_instance
    arguments = ["--lr=1e-2", "--warmup_steps=0", "--save_every=0", "--reward_truncated"]
    monkeypatch.setattr(starter, "reward_fn", letters)
    whole = run_main(*arguments, out="whole")
    with monkeypatch.context() as patch:
        calls = []
        patch.setattr(starter, "load_policy_into_vllm_instance",
                      lambda *parts: calls.append(sync) or len(calls) > 1 or sync(*parts))
        with pytest.raises(UserError, match="stale weights"):
            run_main(*arguments)
    folder = tmp_path / "out" / "latest"
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2] and saved_step(folder) == 2
    assert rows_of(folder)[2]["rollout/logp_gap_mean"] > 2e-3
    # Step 2 has its update: what follows is as if the run had gone on.
    starter.main([f"--resume={folder}"])
    assert saved_step(folder) == 2 and len(rows_of(folder)) == len(rows_of(whole)) == 4


def test_another_reference_ends_the_run(run_main, monkeypatch):
    shard = starter.compile_and_shard

    def other(policy, *arguments):
        shard(policy, *arguments)
        if not policy.training:  # the reference
            policy.model.lm_head.weight.data.mul_(1.1)

    monkeypatch.setattr(starter, "compile_and_shard", other)
    with pytest.raises(UserError, match="before any update"):
        run_main(KL)


@pytest.mark.parametrize("call, step", [(60, 2), (45, 2), (67, 3)],
                         ids=["in step 3", "in the evaluation before", "in the last evaluation"])
def test_an_error_in_the_reward_loses_no_finished_step(call, step, run_main, monkeypatch):
    """8 calls in an evaluation, 16 in a step"""
    arguments = ["--reward_truncated", "--save_every=0"]
    calls = []

    def failing(text, problem):
        calls.append(text)
        if len(calls) == call:
            raise KeyError("answer")
        return letters(text, problem)

    monkeypatch.setattr(starter, "reward_fn", letters)
    whole = run_main(*arguments, out="whole")
    monkeypatch.setattr(starter, "reward_fn", failing)
    with pytest.raises(KeyError) as error:
        run_main(*arguments)
    assert error.value.__notes__ == [f"reward_fn got the response {calls[-1]!r}"]
    folder = whole.parents[1] / "out" / "latest"
    assert saved_step(folder) == step and rows_of(folder)[-1]["step"] == step
    wanted = repeatable(whole)
    if step == 2:
        starter.main([f"--resume={folder}"])
    if call != 60:  # an evaluation is not repeated
        del wanted[step]["eval/accuracy"], wanted[step]["eval/mean_reward"]
    assert are_equal(weights_of(folder), weights_of(whole)) and repeatable(folder) == wanted


# ---- Resuming ------------------------------------------------------------------------------------

def test_a_resumed_run_takes_over_all_settings_and_states(run_main):
    """Also a refreshed reference and the adaptive coefficient, twice"""
    arguments = [KL, "--ref_update_every=2", "--target_kl=1e-7", "--n_minibatches=2", "--lr=3e-3",
                 "--n_grpo_steps=7", "--eval_every=0"]
    whole = run_main(*arguments, out="whole")
    folder = run_main(*arguments, "--n_grpo_steps=3", out="parts")
    for n_steps in (5, 7):
        starter.main([f"--resume={folder}", f"--n_grpo_steps={n_steps}"])
        settings = settings_in(folder)
        assert settings["n_grpo_steps"] == n_steps and settings["lr"] == 3e-3, "for the next resume"
    assert_same_run(folder, whole)
    rows = rows_of(folder)
    assert rows[4]["kl/mean"] > rows[3]["kl/mean"], "refreshed after step 2"
    assert rows[7]["train/kl_coef"] != rows[1]["train/kl_coef"]


@pytest.mark.parametrize("setting", ["lora_rank=4", "model_id=another"])
def test_another_model_or_lora_rank_cannot_be_resumed(run_main, setting):
    folder = run_main("--lora_rank=2", "--n_grpo_steps=1")
    rows = rows_of(folder)
    with pytest.raises(UserError, match=f"keeps its {setting.split('=')[0]}"):
        starter.main([f"--resume={folder}", "--n_grpo_steps=2", f"--{setting}"])
    assert rows_of(folder) == rows
    # The same value is no other value.
    starter.main([f"--resume={folder}", "--n_grpo_steps=2", "--lora_rank=2"])
    assert len(rows_of(folder)) == 3


def test_a_resumed_run_never_evaluates_rows_that_it_was_trained_on(run_main, tmp_path, monkeypatch):
    prompts = {"trained": set(), "evaluated": set()}
    rollout = starter.rollout_with_vllm

    def watched(llm, task, problems, n, seed):
        kind = "evaluated" if seed == "eval" else "trained"
        prompts[kind] |= {problem["rendered"] for problem in problems}
        return rollout(llm, task, problems, n, seed)

    monkeypatch.setattr(starter, "rollout_with_vllm", watched)
    task = write_rows(tmp_path / "task.jsonl", question_rows(range(50)))
    folder = run_main(f"--task={task}", "--n_eval=2", "--group_size=2", "--n_grpo_steps=5")
    assert [len(part) for part in prompts.values()] == [40, 2], "every row that may be trained on"
    starter.main([f"--resume={folder}", "--n_grpo_steps=6", "--n_eval=1000"])
    assert len(prompts["evaluated"]) == 10 and not prompts["evaluated"] & prompts["trained"]


def test_a_run_without_a_checkpoint_cannot_be_resumed_and_keeps_its_model(run_main):
    folder = run_main("--save_every=0", "--n_grpo_steps=1")
    weights = weights_of(folder)
    with pytest.raises(UserError, match="no checkpoint: start from --model_id=.*/model$") as error:
        starter.main([f"--resume={folder}", "--n_grpo_steps=4"])
    assert "\n" not in str(error.value)
    assert are_equal(weights_of(folder), weights) and len(rows_of(folder)) == 2


def test_max_minutes_end_a_run_which_can_be_resumed(run_main, capsys):
    folder = run_main("--max_minutes=1e-9")
    minutes = [row["time/minutes"] for row in rows_of(folder)]
    assert 0 < minutes[0] < minutes[1] < starter.minutes_running()
    assert " s, 0 min" in capsys.readouterr().out, "minutes left, not steps left"
    assert len(rows_of(folder)) == 2 and (folder / "model").exists()
    starter.main([f"--resume={folder}", "--max_minutes=1000"])
    resumed = [row["time/minutes"] for row in rows_of(folder)]
    assert len(resumed) == 4 and resumed[:2] == minutes, "those before are kept, and counted"
    assert resumed[3] == pytest.approx(minutes[1] + starter.minutes_running(), abs=0.2)


def test_a_checkpoint_runs_no_code(run_main, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    folder = run_main("--n_grpo_steps=1")
    torch.save({"state": Bomb()}, folder / "checkpoint.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        starter.main([f"--resume={folder}", "--n_grpo_steps=4"])
    assert not (tmp_path / "exploded").exists()


# ---- Kills and a full disk -----------------------------------------------------------------------

LONG_RUN = [KL, "--n_minibatches=2", "--n_grpo_steps=12", "--save_every=2"]


def test_a_kill_and_ctrl_c_at_random_moments_change_nothing(script, world, tmp_path):
    """To the bit"""
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder in folders:
        folder.mkdir()
    start = [*small_run(world), *LONG_RUN]
    assert script.run(folders[0], *start) == 0, script.text()
    rng = random.Random(time.time_ns())
    script.start(folders[1], *start)
    script.until("run folder:")
    script.until("Step ", rng.randrange(9))  # a step writes a line or two
    time.sleep(rng.random() * 0.2)
    os.kill(script.pid, signal.SIGKILL)
    assert script.end() == -signal.SIGKILL, script.text()
    script.start(folders[1], "--resume=latest")
    script.until("Step ")
    os.kill(script.pid, signal.SIGINT)
    assert script.end() == 0 and "stopping after this step" in script.text(), script.text()
    assert re.search(r"stopped after step \d+: --resume='.*/out/0001.*' continues", script.text())
    assert script.run(folders[1], "--resume=latest") == 0, script.text()
    whole, parts = (folder / "out" / "latest" for folder in folders)
    assert_same_run(parts, whole)
    assert not [path for path in parts.resolve().iterdir() if path.suffix in (".new", ".old")]


@pytest.mark.parametrize("n_steps, is_early", [(3, True), (1, False)])
def test_ctrl_c_stops_after_the_step_with_a_model_and_a_checkpoint(run_main, monkeypatch, capsys,
                                                                   n_steps, is_early):
    """In the last step it has nothing to stop."""
    def reward_fn(text, row):
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(signal, "raise_signal", lambda number: None)  # once
        return 0.1

    monkeypatch.setattr(starter, "reward_fn", reward_fn)
    folder = run_main(f"--n_grpo_steps={n_steps}", "--eval_every=0", "--save_every=0")
    text, errors = capsys.readouterr()
    assert len(rows_of(folder)) == 2 and saved_step(folder) == 1 and (folder / "model").exists()
    assert errors.count("stopping after this step") == 1 and "stopping" not in text
    assert (f"stopped after step 1: --resume='{folder}' continues" in text) == is_early


def test_a_second_ctrl_c_ends_the_run_at_once_in_one_line(script, world, tmp_path):
    write_script(tmp_path / "slow.py", """
        import time

        def rows():
            return [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(20)]

        def reward_fn(text, row):
            print("rewarding", flush=True)
            time.sleep(30)
        """)
    script.start(tmp_path, *small_run(world), "--task=slow.py", "--eval_every=0")
    script.until("rewarding")
    os.kill(script.pid, signal.SIGINT)
    script.until("Ctrl-C again to quit without saving")
    os.kill(script.pid, signal.SIGINT)
    assert script.end() == 1
    _, _, last = script.text().partition("to quit without saving\n")
    assert last.count("\n") == 1 and last.startswith("KeyboardInterrupt"), script.text()


def test_a_run_whose_output_nobody_reads_any_more_goes_on(script, world, tmp_path):
    """Ctrl-C also ends the tee of `python starter.py | tee log`."""
    before = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
    assert script.run(tmp_path, *small_run(world), before=before) == 0, script.text()
    assert len(rows_of(tmp_path / "out" / "latest")) == 4


def test_a_run_killed_before_its_first_checkpoint_starts_over(script, world, tmp_path):
    arguments = [*small_run(world), "--save_every=20", "--n_grpo_steps=4"]
    script.start(tmp_path, *arguments)
    script.until("Step 1 |")
    os.kill(script.pid, signal.SIGKILL)
    script.end()
    folder = tmp_path / "out" / "latest"
    assert rows_of(folder) and not (folder / "checkpoint.pt").exists(), script.text()
    assert script.run(tmp_path, "--resume=latest") == 0, script.text()
    assert script.run(tmp_path, *arguments, "--out_dir=whole") == 0, script.text()
    assert_same_run(folder, tmp_path / "whole" / "latest")


def test_a_full_disk_ends_the_run_in_one_line_and_the_last_checkpoint_is_good(script, world,
                                                                              tmp_path):
    """No file may be larger than the limit: a model fits, a checkpoint does not."""
    assert script.run(tmp_path, *small_run(world), "--n_grpo_steps=1") == 0, script.text()
    before = "resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, 8_000_000))"
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=3", before=before) == 2
    (line,) = re.findall("^error: .*$", script.text(), re.MULTILINE)
    assert "checkpoint.pt" in line and "Is the disk full?" in line
    assert "Traceback" not in script.text()
    assert script.run(tmp_path, "--resume=latest", "--n_grpo_steps=2") == 0, script.text()
    assert "after step 1" in script.text()
    check_run((tmp_path / "out" / "latest").resolve(), 2)


# ---- Ranks ---------------------------------------------------------------------------------------

# Rewards that are equal for all responses to about half of the problems
HALF_FLAT = """
    import json, zlib

    FOLDER = {world!r}

    def rows():
        return tuple([json.loads(line) for line in open(f"{{FOLDER}}/{{name}}.jsonl")]
                     for name in ("train", "test"))

    def reward_fn(text, row):
        is_flat = zlib.crc32(row["rendered"].encode()) % 2
        return 0.1 if is_flat else zlib.crc32(text.encode()) % 7 / 7

    def prepare():
        with open(f"{{__file__}}.prepared", "a") as file:
            file.write("once ")
    """
RANKS = """
    import json, os, sys
    sys.path.append({root!r})
    import starter

    for arguments in json.loads(sys.argv[1]):
        starter.main(arguments)
    os._exit(0)  # as starter.py does
    """


@pytest.fixture(scope="module")
def two_ranks(world, script, tmp_path_factory):
    """-> a folder with the same runs on one and on two ranks"""
    folder = tmp_path_factory.mktemp("ranks")
    task = write_script(folder / "half_flat.py", HALF_FLAT.format(world=str(world)))
    phi = save_model_folder(folder / "phi", "phi")  # its output layer has a bias
    runs = {"adapters": [KL, "--lora_rank=2", "--inner_epochs=2", "--n_minibatches=2",
                         "--rollout_batch_size=12", "--lr=1e-2"],
            "share": [KL, "--kl_estimator=exact", "--kl_coef=1", "--rollout_batch_size=4",
                      "--n_eval=1", f"--model_id={phi}", "--max_prompt_tokens=40",
                      "--max_grad_norm=0.1", "--ref_update_every=2", "--loss_type=dapo"],
            "flat": ["--rollout_batch_size=8", "--n_grpo_steps=5", "--eval_every=0"]}
    program = write_script(folder / "program.py", RANKS.format(root=str(ROOT)))

    def arguments(n):
        common = [*small_run(world), "--reward_truncated", f"--task={task}"]
        parts = [[*common, f"--out_dir={folder}/{n}_{name}", *runs[name]] for name in runs]
        return json.dumps([*parts, [f"--resume={folder}/{n}_flat/latest", "--n_grpo_steps=6"]])

    assert script.run(folder, arguments(1), script=program) == 0, script.text()
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node=2", program, arguments(2)], check=True, timeout=400,
                   env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return folder


@in_one_process("ranks")
@pytest.mark.parametrize("name", ["adapters", "share", "flat"])
def test_two_ranks_give_the_numbers_of_one(two_ranks, name):
    """share: there is one prompt, so one rank has no share of it, nor of the evaluation, and the
    exact KL needs a bias whole. flat: a rank has no row with an advantage; the run was resumed."""
    one, two = (two_ranks / f"{n}_{name}" / "latest" for n in (1, 2))
    for row, other in zip(repeatable(one), repeatable(two), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)
    first, second = weights_of(one), weights_of(two)
    assert all(torch.allclose(first[key], second[key], atol=2e-4) for key in first)
    if name == "flat":
        flat = [row["train/frac_groups_zero_std"] for row in rows_of(two)[2:]]
        assert 0.5 in flat and len(flat) == 5, "of two groups, one on each rank"


@in_one_process("ranks")
def test_one_rank_of_a_machine_prepares_the_task(two_ranks):
    n_runs = 2 * 4
    assert (two_ranks / "half_flat.py.prepared").read_text() == "once " * n_runs

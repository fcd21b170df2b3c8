"""A record: a run and all answers of its model. sample.py --save writes it, verify.py checks it.

    config.json, metrics.jsonl    of the run
    starter.py, NAME.py           copies of the trainer and of the task file, made by the run
    test.jsonl                    the problems, if they came from a file with --eval_task
    answers.jsonl.gz              how answers were sampled, then a line with those to each problem
"""
import starter  # first: it answers --help before the slow imports
import gzip, hashlib, json, re, shlex, shutil, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch


def write(folder, config, cfg, sampled, greedy):
    """config: that of the run. cfg: settings of the measurement. sampled: Responses, equally many
    to each problem. greedy: one to each."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (config, config.with_name("metrics.jsonl"), *config.parent.glob("*.py")):
        shutil.copy(path, folder)
    if Path(cfg.eval_task).is_file():
        shutil.copy(cfg.eval_task, folder / "test.jsonl")
    n = len(sampled) // len(greedy)
    lines = [{"n_samples": n, "n_eval": cfg.n_eval, "max_tokens": cfg.max_tokens,
              "temperature": cfg.temperature}]
    for number, response in enumerate(greedy):
        lines.append({
            "problem": response.problem["problem_number"],  # among all held-out rows
            "sampled": [answer(other) for other in sampled[n * number:n * (number + 1)]],
            "greedy": answer(response)})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # Without the time of writing: equal answers give an equal file.
    (folder / "answers.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def answer(response):
    """-> (what the model wrote in each turn, False if it was cut off)"""
    turns = response.problem["turns"]
    return [turn["content"] for turn in turns if turn["role"] == "assistant"], response.finished


def share(values):
    """-> a mean over problems, its 95 % interval. Responses to one problem are not independent, so
    problems are counted; four made-up ones keep the interval of 0 in 20 from being empty."""
    padded = np.array([*values, 0, 0, 1, 1])
    half = 1.96 * padded.std() / len(padded) ** 0.5
    low, high = np.clip([padded.mean() - half, padded.mean() + half], 0, 1)
    return np.mean(values), low, high


# ---- Checking: `then` is the starter.py of the record --------------------------------------------

def read(folder, command):
    """-> (numbers of its row in BENCHMARKS.md, steps, settings that its command does not give).
    Afterwards this process has the scripts of the record in place of today's."""
    then = load_starter(folder)
    config = json.loads((folder / "config.json").read_text())
    # The defaults depend on whether the run had a GPU. It had one if that fits better.
    has_gpu = min((True, False), key=lambda guess: len(misfits(then, config, command, guess)))
    wrong_settings = misfits(then, config, command, has_gpu)
    is_right, is_cut_off, greedy_is_right = grade_all(then, folder, config)
    mean, low, high = share(np.mean(is_right, axis=1))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    answers = gzip.decompress((folder / "answers.jsonl.gz").read_bytes())
    numbers = [
        f"{last['time/minutes']:.1f}",
        percent(first["eval/accuracy"]) if "eval/accuracy" in first else "",
        f"{percent(mean)} ({100 * low:.1f} to {100 * high:.1f})",
        percent(np.mean(greedy_is_right)), percent(np.mean(is_cut_off)),
        hashlib.sha256(answers).hexdigest()[:12]]  # one answer of 5,000 may change no percentage
    return numbers, last["step"], wrong_settings


def percent(value):
    return f"{100 * value:.1f} %"


def load_starter(folder):
    """Task files import this one from here on, and from tasks/ what the record has no copy of."""
    for path in [*starter.TASKS.glob("*.py"), *folder.glob("*.py")]:
        sys.modules.pop(path.stem, None)  # it may be that of another record
    sys.modules["starter"] = starter.import_file(folder / "starter.py")
    sys.modules["starter"].TASKS = folder
    return sys.modules["starter"]


def misfits(then, config, command, has_gpu):
    """-> what differs between config.json and the settings by the command. Paths may differ."""
    torch.cuda.is_available = lambda: has_gpu
    then.import_file.cache_clear()  # a task file may ask for a GPU, too
    words = shlex.split(re.sub('ARGS="(.*?)"', r"\1", command.partition("sample.py")[0]))
    flags = [word for word in words if re.match(r"--[\w-]+(=|$)", word)]
    try:
        wanted = vars(then.main(flags, only_settings=True))
    except then.UserError as error:
        return [f"its command: {error}"]
    return [f"{name} is {config.get(name)!r}, by its command {value!r}"
            for name, value in wanted.items()
            if config.get(name) != value and name not in ("model_id", "out_dir", "resume")]


def grade_all(then, folder, config):
    """-> for each problem: are its sampled answers right?, were they cut off?, is the greedy one
    right?"""
    cfg = SimpleNamespace(**config | {"task": Path(config["task"]).stem})
    test = folder / "test.jsonl"
    if test.exists():
        # Without rows() of the task file, which may read a file that is not here
        rows = then.complete_rows(test.name, test, cfg.prompt)
        then.read_task = mock.Mock(return_value=([], rows))
    task = then.Task(cfg)
    with gzip.open(folder / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        measured, *lines = map(json.loads, file)
    shape = [(line["problem"], len(line["sampled"])) for line in lines]
    n_problems = min(measured["n_eval"], len(task.held_out_rows))
    if shape != [(number, measured["n_samples"]) for number in range(n_problems)]:
        raise starter.UserError("there are not n_samples answers to each of n_eval problems")
    is_right, is_cut_off, greedy_is_right = [], [], []
    for row, line in zip(task.held_out_rows, lines):
        is_right.append([grade(then, task, row, answer) for answer in line["sampled"]])
        is_cut_off.append([not finished for _, finished in line["sampled"]])
        greedy_is_right.append(grade(then, task, row, line["greedy"]))
    return is_right, is_cut_off, greedy_is_right


def grade(then, task, row, answer):
    """-> is it right, with the reward of the record and after the same replies?"""
    turns, finished = answer
    response = then.Response(row | {"prompt_ids": []})
    response.finished = finished
    for number, text in enumerate(turns, 1):
        response.problem["turns"].append({"role": "assistant", "content": text})
        # There was no reply to a turn that was cut off.
        if task.reply and (finished or number < len(turns)):
            said = task.reply(response.problem, text)
            if said is not None:
                response.problem["turns"].append({"role": "environment", "content": said})
    then.grade(task, [response])
    return response.reward >= task.cfg.correct_reward

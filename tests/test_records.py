"""Records: sample.py --save, verify.py and records/plot.py"""
import gzip, hashlib, json, re, runpy, shutil, subprocess

import matplotlib.figure
import pytest
import torch

import sample
import starter
from conftest import ROOT, rows_of, settings_in, small_run, write_script
from starter import UserError
from test_starter import write_rows

# After the first answer comes another sum. The state that reply() keeps counts, too.
GAME = """
import helper
import torch
from starter import final_answer, normalize

SETTINGS = {"max_turns": 4 if torch.cuda.is_available() else 3}
TURN_ENDS = ("</answer>",)

def rows():
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    return rows[40:], rows[:40]

def reply(problem, text):
    problem["n_replies"] = problem.get("n_replies", 0) + 1
    return helper.SUM if "</answer>" in text and problem["n_replies"] == 1 else None

def reward_fn(text, problem):
    said = [turn["content"] for turn in problem["turns"]]
    is_right = normalize(final_answer(said[0])) == normalize(problem["answer"])
    is_whole = len(said) == 3 and said[1] == "2+3=" and problem["n_replies"] == 2
    return {"reward": float(is_right and is_whole), "other": 1.0}
"""


@pytest.fixture(scope="module")
def original(world, script, tmp_path_factory):
    """-> a small repository: scripts, a commit of them, the documents, and two records, sums (of a
    data file) and game (of a task file)"""
    root = tmp_path_factory.mktemp("root")
    for name in ("starter.py", "sample.py", "record.py", "verify.py"):
        shutil.copy(ROOT / name, root)
    (root / "tasks").mkdir()
    write_script(root / "tasks" / "game.py", GAME)
    write_script(root / "tasks" / "helper.py", 'SUM = "2+3="')
    git = ["git", "-C", root, "-c", "user.name=test", "-c", "user.email=test"]
    for words in ("init -q", "add .", "commit -q -m scripts"):
        subprocess.run([*git, *words.split()], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    lines = [f"test.jsonl: {hashlib.sha256((world / 'test.jsonl').read_bytes()).hexdigest()}"]
    runs = {"sums": [f"--eval_task={world}/test.jsonl"],
            "game": ["--task=game", "--max_tokens=10", "--reward_truncated"]}
    for name, flags in runs.items():
        flags = [*small_run(world), "--n_grpo_steps=1", "--lr=1e-9", *flags]
        assert script.run(root, *flags, script=root / "starter.py") == 0, script.text()
        assert script.run(root, "--n_samples=5", "--n_eval=40", f"--save=records/{name}",
                          script=root / "sample.py") == 0, script.text()
        # A run of seconds that changed nothing, as if it had taken minutes and changed something
        rows = [row | {"time/minutes": 1.26 + row["step"]} for row in rows_of(root / "out/latest")]
        rows[-1]["eval/accuracy"] = 0.99
        write_rows(root / "records" / name / "metrics.jsonl", rows)
        lines.append(expected_row(root, name, script.text(), commit, flags))
    (root / "BENCHMARKS.md").write_text("\n".join(lines))
    (root / "README.md").write_text("Nothing\n")
    (root / "speedrun.sh").write_text("")
    return root


def expected_row(root, name, printed, commit, flags):
    """-> what must stand in BENCHMARKS.md by what sample.py has printed"""
    shares = re.findall(r"accuracy, (\S+) +([0-9.]+)  \(95 %: ([0-9.]+) to ([0-9.]+)\)", printed)
    shares = {kind: [f"{100 * float(x):.1f}" for x in numbers] for kind, *numbers in shares}
    sampled, low, high = shares["pass@1"]
    assert 5 < float(sampled) < 95 and sampled != shares["greedy"][0]
    cut_off = re.search("([0-9.]+)% cut off", printed)[1]
    first, *_, last = rows_of(root / "records" / name)
    answers = gzip.decompress((root / "records" / name / "answers.jsonl.gz").read_bytes())
    sha = hashlib.sha256(answers).hexdigest()[:12]
    return (f"| [{name}](records/{name}) | {last['time/minutes']:.1f} | "
            f"{100 * first['eval/accuracy']:.1f} % | {sampled} % ({low} to {high}) | "
            f"{shares['greedy'][0]} % | {cut_off} % | {sha} | {commit} | "
            f"`python starter.py {' '.join(flags)}` |")


@pytest.fixture
def root(original, tmp_path):
    """-> a copy of the small repository, without the runs"""
    return shutil.copytree(original, tmp_path / "root", ignore=shutil.ignore_patterns("out"))


@pytest.fixture
def verify(root, script):
    """-> function that checks these records, or all -> (exit code, what was printed)"""
    def run(*names):
        folders = [f"records/{name}" for name in names]
        return script.run(root, *folders, script=root / "verify.py"), script.text()
    return run


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def read_lines(folder):
    with gzip.open(folder / "answers.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def write_lines(folder, lines):
    with gzip.open(folder / "answers.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))


def row_of(root, name):
    row, = (line for line in (root / "BENCHMARKS.md").read_text().splitlines()
            if line.startswith(f"| [{name}]"))
    return row


# ---- A record that fits --------------------------------------------------------------------------

def test_records_fit(root, verify):
    code, text = verify()
    assert code == 0, text
    assert text.splitlines() == [row_of(root, "game"), "1 steps", "game: fits",
                                 row_of(root, "sums"), "1 steps", "sums: fits"]
    assert float(row_of(root, "game").split("|")[6].strip(" %")) > 10, "some are cut off"


def test_a_record_has_what_it_takes_to_check_it(root, world):
    sums, game = root / "records" / "sums", root / "records" / "game"
    files = {"answers.jsonl.gz", "config.json", "metrics.jsonl", "starter.py"}
    assert {path.name for path in sums.iterdir()} == files | {"test.jsonl"}
    assert {path.name for path in game.iterdir()} == files | {"game.py"}
    assert (sums / "test.jsonl").read_bytes() == (world / "test.jsonl").read_bytes()
    measured, *lines = read_lines(game)
    assert measured == {"n_samples": 5, "n_eval": 40, "max_tokens": 10, "temperature": 1.0}
    assert [line["problem"] for line in lines] == list(range(40))
    for line in lines:
        assert len(line["sampled"]) == 5
        for turns, finished in [*line["sampled"], line["greedy"]]:
            assert 1 <= len(turns) <= 2 and "2+3=" not in turns[0] and finished in (True, False)


def test_equal_answers_are_an_equal_file(original, tmp_path):
    run, = original.glob("out/0001*")
    files = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        sample.main([f"--model_id={run}", "--n_samples=2", "--n_eval=3", f"--save={folder}"])
        assert len(read_lines(folder)) == 4
        files.append((folder / "answers.jsonl.gz").read_bytes())
    assert files[0] == files[1] and files[0][4:8] == bytes(4), "there is no time in it"


@pytest.mark.parametrize("flag", ["--model_id=MODEL", "--task=other.jsonl", "--prompt={question}",
                                  "--max_turns=2"])
def test_only_a_run_and_its_task_can_be_saved(original, world, flag):
    run, = original.glob("out/0001*")
    with pytest.raises(UserError, match="--save needs a model of a run"):
        sample.main([f"--model_id={run}", flag.replace("MODEL", f"{world}/model"), "--save=record"])


@pytest.mark.parametrize("command", [
    "python starter.py FLAGS && python sample.py --n_samples=5", 'make train ARGS="FLAGS"',
    "bash speedrun.sh MODEL --lr=1e-9"])
def test_a_command_may_have_several_forms(root, verify, command):
    flags = row_of(root, "sums").split("`")[1].removeprefix("python starter.py ")
    (root / "speedrun.sh").write_text(
        f"# python sample.py\nrm -f --x\npython \"$here/starter.py\" --model_id=\"$model\" \\\n"
        f"    {flags} \\\n    --lr=1 \"$@\" --out_dir=out\npython sample.py --n_samples=5\n")
    change(root / "BENCHMARKS.md", f"python starter.py {flags}", command.replace("FLAGS", flags))
    assert verify("sums")[1].endswith("\nsums: fits\n")


@pytest.mark.parametrize("name, max_turns", [("sums", 10), ("game", 4)])
def test_the_defaults_are_those_of_the_machine_of_the_run(root, verify, monkeypatch, name,
                                                          max_turns):
    flags = row_of(root, name).split("`")[1].split()[2:]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(starter, "TASKS", root / "tasks")
    cfg = starter.main(flags, only_settings=True)
    assert cfg.compile and cfg.max_turns == max_turns
    (root / "records" / name / "config.json").write_text(json.dumps(vars(cfg)))
    assert verify(name)[1].endswith(f"\n{name}: fits\n")


# ---- What does not fit ---------------------------------------------------------------------------

NUMBERS = "its row in BENCHMARKS.md does not have the numbers above"


@pytest.fixture
def findings(root, verify):
    """-> function that makes a copy of the record sums, and of its row, for every edit and checks
    them all. edit(folder, row) changes the folder, or returns another row."""
    def run(edits):
        names = [f"copy{number}" for number in range(len(edits))]
        rows = []
        for name, edit in zip(names, edits):
            folder = shutil.copytree(root / "records" / "sums", root / "records" / name)
            row = row_of(root, "sums").replace("[sums](records/sums)", f"[{name}](records/{name})")
            rows.append(edit(folder, row) or row)
        with open(root / "BENCHMARKS.md", "a") as file:
            file.write("\n".join(["", *rows]))
        code, text = verify(*names)
        assert code == 1
        return [re.findall(f"^{name}: (.*)", text, re.MULTILINE) for name in names]
    return run


def in_the_row(cell, pattern, new):
    def edit(folder, row):
        cells = row.split("|")
        cells[cell], n_changes = re.subn(pattern, new, cells[cell], count=1)
        assert n_changes == 1
        return "|".join(cells)
    return edit


def in_the_settings(old, new):
    def edit(folder, row):
        change(folder / "config.json", old, new)
    return edit


def in_the_answers(edit_lines):
    def edit(folder, row):
        lines = read_lines(folder)
        edit_lines(lines)
        write_lines(folder, lines)
    return edit


def test_the_numbers_of_the_row_must_fit(findings):
    places = [(2, "[0-9.]+"), (3, "[0-9.]+"), (4, "[0-9.]+"), (4, "[0-9.]+(?= to)"),
              (4, r"[0-9.]+(?=\))"), (5, "[0-9.]+"), (6, "[0-9.]+"), (7, "[0-9a-f]+")]
    found = findings([in_the_row(cell, pattern, "99.9") for cell, pattern in places])
    assert found == len(places) * [[NUMBERS]]


def test_command_and_settings_must_fit(findings):
    assert findings([
        in_the_row(9, "--lr=1e-9", ""), in_the_row(9, "--n_eval=8", "--n_eval=9"),
        in_the_row(9, "starter.py", "starter.py --seed=7"),
        in_the_row(9, "starter.py", "starter.py --use_kl_penalty"),
        in_the_row(9, "starter.py", "starter.py --lr_=7"),
        in_the_settings('"lr": 1e-09', '"lr": 1e-08'), in_the_settings('"seed": 42', '"seed": 1'),
        in_the_settings('"correct_reward": 0.9', '"correct_reward": 0.3'),
        in_the_settings('"max_turns": 10,', "")]) == [
            ["lr is 1e-09, by its command 0.001"], ["n_eval is 8, by its command 9"],
            ["seed is 42, by its command 7"], ["use_kl_penalty is False, by its command True"],
            ["its command: there is no hyperparameter lr_: did you mean lr?"],
            ["lr is 1e-08, by its command 1e-09"], ["seed is 1, by its command 42"],
            ["correct_reward is 0.3, by its command 0.9"], ["max_turns is None, by its command 10"]]


def test_answers_must_be_complete(findings):
    found = findings([
        in_the_answers(lambda lines: lines[7]["sampled"].pop()),
        in_the_answers(lambda lines: lines.pop()), in_the_answers(lambda lines: lines.pop(1)),
        in_the_answers(lambda lines: lines.insert(1, lines.pop(2)))])
    assert len(found) == 4 and all("not n_samples answers to each" in text for text, in found)


def test_one_wrong_answer_is_noticed(findings):
    def edit(folder, row):
        measured, *lines = read_lines(folder)
        problems = rows_of(folder, "test.jsonl")
        answer = next(answer for problem, line in zip(problems, lines) for answer in line["sampled"]
                      if answer == [[f"<answer>{problem['answer']}</answer>"], True])
        answer[0][0] = "<answer>0</answer>"
        write_lines(folder, [measured, *lines])
    assert findings([edit]) == [[NUMBERS]]


def test_another_right_answer_is_noticed_too(findings):
    """It changes no percentage."""
    def add_a_blank(lines):
        lines[1]["greedy"][0][0] += " "
    assert findings([in_the_answers(add_a_blank)]) == [[NUMBERS]]


def test_the_settings_of_the_speedrun_must_fit(root, verify):
    flags = row_of(root, "sums").split("`")[1].removeprefix("python starter.py ")
    change(root / "BENCHMARKS.md", f"python starter.py {flags}", "bash speedrun.sh")
    script = f'set -e\npython "$here/starter.py" {flags} --seed=5\npython "$here/sample.py"\n'
    (root / "speedrun.sh").write_text(script)
    code, text = verify("sums")
    assert code == 1 and text.endswith("sums: seed is 42, by its command 5\n")


def test_a_task_file_has_settings_that_no_flag_gives(root, verify):
    config = root / "records" / "game" / "config.json"
    change(config, '"max_turns": 3', '"max_turns": 10')
    assert "max_turns is 10, by its command 3" in verify("game")[1]


def test_a_damaged_file_is_noticed(root, verify):
    path = root / "records" / "game" / "answers.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    code, text = verify()
    assert code == 1 and text.startswith("game: EOFError") and text.endswith("sums: fits\n")


def test_other_lines_must_have_the_numbers(root, verify):
    _, _, minutes, _, sampled, *_ = (cell.strip() for cell in row_of(root, "sums").split("|"))
    accuracy = sampled.partition(" (")[0]
    link = "[sums](records/sums)"
    (root / "README.md").write_text(f"{link}: {accuracy} in {minutes} minutes\n")
    assert verify("sums")[1].endswith("\nsums: fits\n")
    (root / "README.md").write_text(f"{link}: {accuracy} in 1{minutes} minutes\n")
    code, text = verify("sums")
    assert code == 1 and f"sums: {minutes} is missing in: {link}" in text
    (root / "README.md").write_text("\n")
    change(root / "BENCHMARKS.md", "test.jsonl:", f"{link}: 1{accuracy} in {minutes} minutes, ")
    code, text = verify("sums")
    assert code == 1 and f"sums: {accuracy} is missing in: {link}" in text


def test_a_record_without_a_row_is_noticed(root, verify):
    row = row_of(root, "sums")
    change(root / "BENCHMARKS.md", row, "")
    code, text = verify("sums")
    *numbers, _, _, _ = row.split("|")
    assert code == 1 and text.splitlines() == [
        f"{'|'.join(numbers)}| COMMIT | `COMMAND` |", "1 steps",
        "sums: graded, but not in BENCHMARKS.md: add the row above, with commit and command"]


def test_changed_scripts_and_problems_are_noticed(root, verify):
    commit = row_of(root, "sums").split("|")[8].strip()
    change(root / "records" / "sums" / "starter.py", "GRPO", "GRPo")
    change(root / "records" / "sums" / "test.jsonl", "\n", "\n\n")
    change(root / "records" / "game" / "game.py", "1.0", "2.0")
    code, text = verify()
    assert code == 1 and re.findall("^[a-z]+: .+", text, re.MULTILINE) == [
        f"game: game.py is not that of {commit}",
        "sums: the sha256 of its test.jsonl is not in BENCHMARKS.md",
        f"sums: starter.py is not that of {commit}"]


def test_without_the_commit_scripts_are_not_checked(root, verify):
    commit = row_of(root, "sums").split("|")[8].strip()
    shutil.rmtree(root / ".git")
    code, text = verify("sums")
    assert code == 0 and text.splitlines()[2:] == [
        f"sums: scripts not checked, because git does not have {commit} here", "sums: fits"]


def test_without_a_commit_in_the_row_scripts_are_not_checked(root, verify):
    cells = row_of(root, "sums").split("|")
    cells[8] = ""  # git would take that for the files that are to be committed next
    change(root / "BENCHMARKS.md", row_of(root, "sums"), "|".join(cells))
    assert "sums: scripts not checked" in verify("sums")[1]


# ---- Grading -------------------------------------------------------------------------------------

@pytest.fixture
def graded(root, verify):
    """-> function that grades these answers to the first problem of a record
    -> (sampled accuracy, greedy accuracy, share cut off)"""
    def run(name, *sampled, greedy):
        lines = [{"n_samples": len(sampled), "n_eval": 1},
                 {"problem": 0, "sampled": sampled, "greedy": greedy}]
        write_lines(root / "records" / name, lines)
        text = verify(name)[1]
        assert "\x1b" not in text, "nothing that a model wrote is printed"
        cells = [cell.strip() for cell in text.splitlines()[0].split("|")]
        return cells[4].partition(" (")[0], cells[5], cells[6]
    return run


def test_turns_are_graded_after_the_same_replies(graded):
    right = [["<answer>2</answer>", "\x1b[31m"], True]  # 1+1=, and then the sum of helper.py
    wrong = [["<answer>3</answer>", "<answer>2</answer>"], True]
    cut_off = [["<answer>2</answer>", "<answer>2"], False]
    too_short = [["<answer>2</answer>"], True]
    numbers = graded("game", right, wrong, cut_off, too_short, [["\x1b"], False], greedy=right)
    assert numbers == ("20.0 %", "100.0 %", "40.0 %")


@pytest.mark.parametrize("is_rewarded, accuracy", [(False, "50.0 %"), (True, "100.0 %")])
def test_what_is_cut_off_is_wrong_unless_it_is_rewarded(root, graded, is_rewarded, accuracy):
    folder = root / "records" / "sums"
    settings = settings_in(folder) | {"reward_truncated": is_rewarded}
    (folder / "config.json").write_text(json.dumps(settings))
    text = f"<answer>{rows_of(folder, 'test.jsonl')[0]['answer']}</answer>"
    numbers = graded("sums", [[text], True], [[text], False], greedy=[[text], False])
    assert numbers == (accuracy, "100.0 %" if is_rewarded else "0.0 %", "50.0 %")


def test_a_reward_is_right_from_correct_reward_on(root, graded):
    config = root / "records" / "sums" / "config.json"
    wrong = [["<answer>-1</answer>"], True]  # 0.1
    assert graded("sums", wrong, greedy=wrong)[:2] == ("0.0 %", "0.0 %")
    change(config, '"correct_reward": 0.9', '"correct_reward": 0.1')
    assert graded("sums", wrong, greedy=wrong)[:2] == ("100.0 %", "100.0 %")


def test_a_record_with_its_problems_needs_no_other_rows(root, verify):
    folder = root / "records" / "game"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    write_rows(folder / "test.jsonl", rows[:40])
    change(folder / "game.py", "    rows = [{", "    open('no file')\n    rows = [{")
    change(folder / "config.json", '"task": "game"', '"task": "/another/machine/game.py"')
    text = verify("game")[1]
    assert text.splitlines()[0] == row_of(root, "game") and "game: game.py is not that" in text


def test_every_record_has_its_own_scripts(root, verify):
    for name in ("first", "second"):
        shutil.copytree(root / "records" / "game", root / "records" / name)
    write_script(root / "records" / "first" / "helper.py", "SUM = '9+9='")
    code, text = verify("first", "second")
    first, second = (line.split("|") for line in text.splitlines() if line.startswith("|"))
    assert first[4].startswith(" 0.0 %"), "the answers belong to another sum"
    assert second[2:8] == row_of(root, "game").split("|")[2:8], "here that of tasks/ was imported"


def test_the_records_of_this_repository_fit(script):
    assert script.run(ROOT, script=ROOT / "verify.py") == 0, script.text()


# ---- records/plot.py -----------------------------------------------------------------------------

def test_the_plot_has_a_curve_and_a_name_for_every_record(tmp_path):
    names = ("gsm8k_seed1", "gsm8k_seed42", "countdown", "tiny_seed1", "guess_seed1")
    for name in names:
        (tmp_path / name).mkdir()
        rows = [{"step": 0, "time/minutes": 0.5, "eval/accuracy": 0.4},
                {"step": 1, "time/minutes": 0.7, "train/reward_mean": 0.5},
                {"step": 2, "time/minutes": 0.9, "train/reward_mean": 0.6, "eval/accuracy": 0.7}]
        write_rows(tmp_path / name / "metrics.jsonl", rows)
    plot = runpy.run_path(str(ROOT / "records" / "plot.py"))
    plot["main"](tmp_path, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    panel = matplotlib.figure.Figure().subplots()
    plot["draw"](panel, [tmp_path / name for name in names[:3]])
    curves = [line for line in panel.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in curves] == 3 * [[40, 70]]
    assert len(panel.lines) == 6 and len({line.get_color() for line in curves}) == 3
    heights = {text.get_text(): text.get_position()[1] for text in panel.texts}
    assert heights.keys() == set(names[:3])
    first, second, third = sorted(heights.values())
    assert first + 4 <= second and second + 4 <= third, "names do not overlap"

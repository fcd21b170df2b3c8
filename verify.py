"""Check records, without a GPU or a model: python verify.py [records/NAME ...]

The answers of a record are graded again, and its row of BENCHMARKS.md is computed. What the
documents say of it must fit: numbers, test problems, command (settings) and commit (scripts).
"""
import record  # first: it answers --help before the slow imports
import hashlib, re, shutil, subprocess, sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main(folders):
    """-> exit code"""
    folders = folders or sorted(path.parent for path in ROOT.glob("records/*/answers.jsonl.gz"))
    code = 0
    for folder in folders:
        folder = Path(folder).resolve()
        try:
            findings = check(folder)
        except Exception as error:  # this one cannot be read, but others can
            findings = [f"{error!r:.500}"]
        for finding in findings or ["fits"]:
            print(f"{folder.name}: {finding}")
        code |= bool(findings)
    return code


def check(folder):
    """Print the row. -> findings"""
    benchmarks = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    link = f"(records/{folder.name})"
    start = f"| [{folder.name}]{link} |"
    listed = [line for line in benchmarks.splitlines() if line.startswith(start)]
    commit, command = "COMMIT", "COMMAND"  # to be filled in
    if listed:
        _, _, *cells, commit, command, _ = (cell.strip(" `") for cell in listed[0].split("|"))
    script = ""
    if "speedrun.sh" in command:  # the first program that it starts is starter.py
        script = (ROOT / "speedrun.sh").read_text().split("\npython ")[1]
    with redirect_stdout(None):  # what the scripts of the record print
        numbers, n_steps, findings = record.read(folder, f"{script} {command}")
    print(f"{start} {' | '.join(numbers)} | {commit} | `{command}` |\n{n_steps} steps")
    if not listed:
        return ["graded, but not in BENCHMARKS.md: add the row above, with commit and command"]
    # The numbers, in the table and wherever else a line links to the record
    if cells != numbers:
        findings.append("its row in BENCHMARKS.md does not have the numbers above")
    minutes, _, sampled, *_ = numbers
    for line in f"{benchmarks}\n{readme}".splitlines():
        for number in (minutes, sampled.partition(" (")[0]):
            is_there = re.search(rf"(?<![0-9.]){re.escape(number)}(?![0-9])", line)
            if link in line and line != listed[0] and not is_there:
                findings.append(f"{number} is missing in: {line}")
    # Problems and scripts
    test = folder / "test.jsonl"
    if test.exists() and hashlib.sha256(test.read_bytes()).hexdigest() not in benchmarks:
        findings.append("the sha256 of its test.jsonl is not in BENCHMARKS.md")
    if in_commit(commit, "starter.py") is None:
        print(f"{folder.name}: scripts not checked, because git does not have {commit} here")
        return findings
    for path in folder.glob("*.py"):
        place = "starter.py" if path.stem == "starter" else f"tasks/{path.name}"
        if path.read_bytes() != in_commit(commit, place):
            findings.append(f"{path.name} is not that of {commit}")
    return findings


def in_commit(commit, place):
    """-> the bytes of a file in a commit; None if git does not have it here"""
    if commit and shutil.which("git"):
        git = ["git", "-C", ROOT, "show", f"{commit}:{place}"]
        shown = subprocess.run(git, capture_output=True)
        return None if shown.returncode else shown.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What these tests share: a small warm-started model with a task, runs of the trainer in this
process (run_main) and in others (script), and what they read from run folders."""
import json, os, random, signal, subprocess, sys, textwrap, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Importing test_starter also sets OMP_NUM_THREADS and HF_HUB_OFFLINE, so it comes before torch.
from test_starter import CHAT, make_config, randomize, tokenizer_with, write_rows

import pytest
import torch
from transformers import AutoModelForCausalLM

import starter

KL = "--use_kl_penalty=True"
# Runs of a second or two. What a test adds comes after these and wins.
SMALL = ["--use_vllm=False", "--rollout_batch_size=16", "--group_size=4", "--n_grpo_steps=3",
         "--n_eval=8", "--eval_every=2", "--save_every=1", "--lr=1e-3", "--warmup_steps=2",
         "--max_tokens=14", "--max_prompt_tokens=16"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """-> a folder with model/, which was warm-started on sums, and with the sums as a task"""
    folder = tmp_path_factory.mktemp("world")
    tiny = starter.load_task_file("tiny")
    model = tiny.make_model()
    tokenizer = tiny.make_tokenizer()
    sums = [(f"{a}+{b}=", a + b) for a in range(1, 13) for b in range(1, 13)]
    random.Random(0).shuffle(sums)
    training, held_out = sums[20:], sums[:20]

    def examples(step):
        chosen = random.Random(step).sample(training, 32)
        return [(prompt, f"<answer>{answer}</answer>") for prompt, answer in chosen]

    tiny.warm_start(model, tokenizer, examples, 60)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, part in {"train": training, "test": held_out}.items():
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in part]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def small_run(world):
    """-> arguments that train the model of the small world on its sums"""
    return [f"--model_id={world}/model", f"--task={world}", *SMALL]


@pytest.fixture(autouse=True)
def on_a_cpu(request, monkeypatch):
    """Numbers repeat to the bit on a CPU only, so that is where tests run, with the exception of
    those that need vLLM or a GPU."""
    group = request.node.get_closest_marker("xdist_group")
    if group is None or group.args != ("vllm",):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def restored_process(monkeypatch):
    """What a run changes in this process is put back."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run_main(world, tmp_path, monkeypatch):
    """-> function that trains in this process and returns the run folder"""
    # The quick tests would see what a test has replaced.
    monkeypatch.setattr(starter, "test_functions", lambda: True)

    def run(*arguments, out="out"):
        starter.main([*small_run(world), f"--out_dir={tmp_path / out}", *map(str, arguments)])
        return (tmp_path / out / "latest").resolve()
    return run


# Importing torch takes seconds. So one process imports what starter.py needs, forgets starter.py
# itself, and forks a child for every run. Child after child runs the file as a script.
SERVER = """
import json, os, resource, runpy, signal, sys
from pathlib import Path
import starter, torch.utils.tensorboard
del sys.modules["starter"]
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        sys.path[0] = str(Path(request["script"]).parent)
        sys.argv = [request["script"], *request["arguments"]]
        exec(request["before"])
        runpy.run_path(request["script"], run_name="__main__")
        os._exit(99)  # starter.run() has ended this process
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Script:
    """starter.py, or a copy of it, as from a shell: start() it, wait until() it prints something,
    kill it, end() -> exit code. run() is start() and end()."""

    def __init__(self, folder):
        self.log = folder / "log"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, folder, *arguments, script=ROOT / "starter.py", before="", **environment):
        """before: code that runs in the new process before the script"""
        request = {"log": str(self.log), "folder": str(folder), "script": str(script),
                   "arguments": [str(argument) for argument in arguments],
                   "before": textwrap.dedent(before), "environment": environment}
        self.log.unlink(missing_ok=True)
        print(json.dumps(request), file=self.server.stdin, flush=True)
        self.pid = int(self.server.stdout.readline())

    def text(self):
        """-> all that it has printed so far, errors included"""
        return self.log.read_text() if self.log.exists() else ""

    def until(self, words, count=1):
        while self.text().count(words) < count and Path(f"/proc/{self.pid}").exists():
            time.sleep(0.02)

    def end(self):
        return int(self.server.stdout.readline())

    def run(self, *arguments, **options):
        self.start(*arguments, **options)
        return self.end()


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    script = Script(tmp_path_factory.mktemp("script"))
    yield script
    script.server.stdin.close()
    script.server.wait()


def write_script(path, *parts):
    """-> path of a new file with these parts of Python code, such as a task file"""
    path.write_text("\n\n".join(textwrap.dedent(part).strip() for part in parts) + "\n")
    return path


def save_model_folder(folder, kind="qwen3", **changes):
    """-> a new folder with a small model of random weights and a byte tokenizer"""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(kind, **changes))
    randomize(model, 0)
    model.save_pretrained(folder)
    tokenizer_with(CHAT).save_pretrained(folder)
    return folder


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def settings_in(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def repeatable(folder):
    """-> all metrics but the times"""
    return [{name: value for name, value in row.items() if not name.startswith("time/")}
            for row in rows_of(folder)]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights_of(folder, name="model"):
    return load(Path(folder) / name).state_dict()


def are_equal(first, second):
    """Are these weights equal to the bit?"""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def saved_step(folder):
    """-> the step of the checkpoint"""
    saved = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)
    return saved["state"]["step"]


def assert_same_run(first, second):
    """To the bit"""
    assert repeatable(first) == repeatable(second)
    assert are_equal(weights_of(first), weights_of(second))

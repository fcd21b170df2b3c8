"""Look at a trained model: how often it is right, or a conversation with it.

    python sample.py                    accuracy, sampled and greedy, and pass@k of out/latest/model
    python sample.py --model_id=tiny    the same for any model, here the one before training
    python sample.py --n_samples=32     more responses to each held-out problem; --n_eval: problems
    python sample.py --chat             talk to it (tiny expects problems such as 3 5 18=16:)
    python sample.py --script=examples/guess.py    with the reward_fn and reply() of this script

Settings of starter.py that are not given are those of the run (config.json above the model).
"""
import starter  # first: it answers --help before the slow imports
import contextlib, importlib.util, itertools, json, math, os, sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

AS_IN_THE_RUN = ("task eval_task prompt use_vllm gpu_mem_util temperature max_tokens "
                 "max_prompt_tokens max_turns reward_truncated").split()


def find_model(model_id):
    """-> (model folder or hub name, settings of the run that made it, or {})"""
    if Path(model_id, "model").is_dir():  # a run folder
        model_id = f"{model_id}/model"
    elif model_id == "out/latest" or Path(model_id, "metrics.jsonl").exists():
        raise starter.UserError(f"no finished run in {model_id}: run python starter.py, or give a "
                                "model, such as best/ of a run, with --model_id")
    path = Path(model_id).resolve().parent / "config.json"
    run = json.loads(path.read_text()) if path.exists() else {}
    return model_id, run if "n_grpo_steps" in run else {}


def load_script(path):
    """-> the trainer: a changed copy of starter.py, or starter with the reward_fn and reply() that
    a script such as examples/guess.py puts into it"""
    sys.path.insert(0, str(Path(path).resolve().parent))  # for what it imports
    spec = importlib.util.spec_from_file_location("script_of_the_run", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "init_policy"):
        return starter
    starter.UserError = module.UserError  # for starter.run()
    return module


def read_settings(trainer, given, model_id, run):
    """-> the trainer's settings, as in the run. No problem is one that the run was trained on."""
    given = {"n_eval": "200", "vllm_sleep": "False"} | given | {"model_id": model_id}
    taken = {name: run[name] for name in AS_IN_THE_RUN if run}
    task = given.get("task", run.get("task"))
    is_same_task = bool(run) and os.path.realpath(task) == os.path.realpath(run["task"])
    cfg = trainer.main([f"--{name}={value}" for name, value in given.items()], True, **taken)
    if is_same_task and not cfg.eval_task:
        cfg.n_eval = min(cfg.n_eval, run["n_eval"])
        if (cfg.prompt, cfg.eval_task) != (run["prompt"], run["eval_task"]):
            raise starter.UserError("prompt and eval_task decide which problems are held out: leave"
                                    " them as in the run, or give a file with --eval_task")
    return cfg


def pass_at_k(n, n_right, k):
    """Probability that at least one of k responses, drawn from the n sampled ones, is right"""
    return 1 - math.comb(n - n_right, k) / math.comb(n, k)


def print_share(name, values):
    """A mean over problems and its 95 % interval. Responses to one problem are not independent, so
    problems are counted; four made-up ones keep the interval of 0 in 20 from being empty."""
    padded = np.array([*values, 0, 0, 1, 1])
    half = 1.96 * padded.std() / len(padded) ** 0.5
    low, high = np.clip([padded.mean() - half, padded.mean() + half], 0, 1)
    print(f"{name:18} {np.mean(values):.3f}  (95 %: {low:.3f} to {high:.3f})")


def printable(text):
    """Treat model output as untrusted: no control characters reach the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1]
                   for letter in text)


def evaluate(trainer, llm, task, n):
    print(f"sampling {n} responses to each of {len(task.held_out)} held-out problems ...")
    _, responses = trainer.evaluate_model(llm, task, n)
    for response in responses[:2 * n:n]:
        print(f"\nreward {response.reward:g}: {printable(response.problem['rendered'])}")
        for turn in response.problem["turns"]:
            print(printable(f"{turn['role']}> {turn['content']}"))
    rewards = np.array([response.reward for response in responses]).reshape(-1, n)
    cut_off = np.mean([not response.finished for response in responses])
    length = np.mean([len(response.ids) for response in responses])
    print(f"\nmean reward {rewards.mean():.3f}, {cut_off:.1%} cut off, {length:.1f} tokens")
    n_right = (rewards >= 0.9).sum(1).tolist()
    for k in (1, 4, 8, 16, 32, 64):
        if k <= n:
            print_share(f"accuracy, pass@{k}", [pass_at_k(n, right, k) for right in n_right])
    task.cfg.temperature = 0.0
    _, responses = trainer.evaluate_model(llm, task)
    print_share("accuracy, greedy", [response.reward >= 0.9 for response in responses])


def chat(trainer, llm, task):
    print("An empty line starts a new conversation, Ctrl-D ends.")
    task.cfg.max_prompt_tokens = 4096  # of the whole conversation
    if not trainer.TURN_ENDS:
        trainer.reply = None  # the user replies; a tool still works
    messages = []
    for number in itertools.count():
        line = input("\nyou: ")
        if not line.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": line})
        problem = task.encode([{"prompt": messages}])[0]
        response = trainer.rollout_with_vllm(llm, task, [problem], 1, f"chat/{number}")[0]
        text = "".join(turn["content"] for turn in response.problem["turns"])
        messages.append({"role": "assistant", "content": text})
        print(f"model: {printable(text)}")


def main(argv=None):
    given = starter.read_arguments(sys.argv[1:] if argv is None else argv)
    own = SimpleNamespace(n_samples=8, chat=False, script="")
    starter.override(own, {name: given.pop(name) for name in vars(own) if name in given})
    model_id, run = find_model(given.get("model_id", "out/latest"))
    for copy in Path(model_id).resolve().parent.glob("*.py") if run and not own.script else ():
        if copy.name != "starter.py":
            raise starter.UserError(f"this run has the reward of {copy.name}: give that script, or"
                                    f" its copy --script={copy}")
    trainer = load_script(own.script) if own.script else starter
    cfg = read_settings(trainer, given, model_id, run)
    rows = trainer.read_task(cfg)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy, tokenizer = trainer.init_policy(cfg.model_id)
    policy.device = torch.device(device)  # that of the sampler, which has its own weights
    cfg.use_vllm = cfg.use_vllm and not own.chat  # torch will do for one response at a time
    llm = trainer.init_vllm(policy, tokenizer, cfg)
    task = trainer.Task(cfg, *rows, tokenizer, policy.stop_ids)
    if own.chat:
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            chat(trainer, llm, task)
    else:
        evaluate(trainer, llm, task, own.n_samples)


if __name__ == "__main__":
    starter.run(main)

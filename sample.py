"""Look at a trained model: how often it is right, or a conversation with it.

    python sample.py                    accuracy, sampled and greedy, and pass@k of out/latest/model
    python sample.py --model_id=tiny    the same for any model, here the one before training
    python sample.py --n_samples=32     more responses to each held-out problem; --n_eval: problems
    python sample.py --save=records/me  also keep the run and all answers, which verify.py checks
    python sample.py --chat             talk to it (tiny expects problems such as 3 5 18=16:)

A model of a run, model/ or best/, is measured with the task and the settings of that run. Settings
of starter.py that are given win.
"""
import starter  # first: it answers --help before the slow imports
import contextlib, itertools, json, math, os, sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import record


def find_model(model_id):
    """-> (model folder or hub name, config.json of the run that made it, or None)"""
    if Path(model_id, "model").is_dir():  # a run folder
        model_id = f"{model_id}/model"
    elif model_id == "out/latest" or Path(model_id, "metrics.jsonl").exists():
        raise starter.UserError(f"no finished run in {model_id}: run python starter.py, or give a "
                                "model, such as best/ of a run, with --model_id")
    path = Path(model_id).resolve().parent / "config.json"
    is_run = path.exists() and "n_grpo_steps" in json.loads(path.read_text())
    return model_id, path if is_run else None


def read_settings(given, model_id, config):
    """-> cfg, with the settings of the run if there is one. What is given wins."""
    given = {"n_eval": "200", "vllm_sleep": "False"} | given
    # A run that is resumed takes its settings from config.json.
    given |= {"resume": config.parent} if config else {"model_id": model_id}
    cfg = starter.main([f"--{name}={value}" for name, value in given.items()], only_settings=True)
    cfg.model_id = model_id
    if config is None:
        return cfg
    run = SimpleNamespace(**json.loads(config.read_text()))
    # The same rows are held out in every run of a task, as long as the prompts are the same.
    now, then = (starter.load_task_file(name) or os.path.realpath(name)
                 for name in (cfg.task, run.task))  # a task may have several names
    if now == then and not cfg.eval_task and (cfg.prompt, "") != (run.prompt, run.eval_task):
        raise starter.UserError("prompt and eval_task decide which problems are held out: leave "
                                "them as in the run, or give other problems with --eval_task")
    return cfg


def pass_at_k(n, n_right, k):
    """Probability that at least one of k responses, drawn from the n sampled ones, is right"""
    return 1 - math.comb(n - n_right, k) / math.comb(n, k)


def print_share(name, values):
    mean, low, high = record.share(values)
    print(f"{name:18} {mean:.3f}  (95 %: {low:.3f} to {high:.3f})")


def printable(text):
    """Treat model output as untrusted: no control characters reach the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1]
                   for letter in text)


def evaluate(llm, task, n):
    """-> n sampled Responses to each held-out problem, a greedy one to each"""
    print(f"sampling {n} responses to each of {len(task.held_out)} held-out problems ...")
    _, sampled = starter.evaluate_model(llm, task, n)
    for response in sampled[:2 * n:n]:
        print(f"\nreward {response.reward:g}: {printable(response.problem['rendered'])}")
        for turn in response.problem["turns"]:
            print(printable(f"{turn['role']}> {turn['content']}"))
    rewards = np.array([response.reward for response in sampled]).reshape(-1, n)
    cut_off = np.mean([not response.finished for response in sampled])
    length = np.mean([len(response.ids) for response in sampled])
    print(f"\nmean reward {rewards.mean():.3f}, {cut_off:.1%} cut off, {length:.1f} tokens")
    n_right = (rewards >= task.cfg.correct_reward).sum(1).tolist()
    for k in (1, 4, 8, 16, 32, 64):
        if k <= n:
            print_share(f"accuracy, pass@{k}", [pass_at_k(n, right, k) for right in n_right])
    task.cfg = SimpleNamespace(**vars(task.cfg) | {"temperature": 0.0})
    _, greedy = starter.evaluate_model(llm, task)
    is_right = [response.reward >= task.cfg.correct_reward for response in greedy]
    print_share("accuracy, greedy", is_right)
    return sampled, greedy


def chat(llm, task):
    print("An empty line starts a new conversation, Ctrl-D ends.")
    task.cfg.max_prompt_tokens = 4096  # of the whole conversation
    if not task.turn_ends:
        task.reply = None  # the user replies; a tool still works
    messages = []
    for number in itertools.count():
        line = input("\nyou: ")
        if not line.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": line})
        problem = task.encode_rows([{"prompt": messages}])[0]
        response = starter.rollout_with_vllm(llm, task, [problem], 1, f"chat/{number}")[0]
        text = "".join(turn["content"] for turn in response.problem["turns"])
        messages.append({"role": "assistant", "content": text})
        print(f"model: {printable(text)}")


def main(argv=None):
    given = starter.read_arguments(sys.argv[1:] if argv is None else argv)
    own = SimpleNamespace(n_samples=8, chat=False, save="")
    starter.override(own, {name: given.pop(name) for name in vars(own) if name in given})
    model_id, config = find_model(given.pop("model_id", "out/latest"))
    if own.save and (config is None or {"task", "prompt", "thinking", "max_turns"} & given.keys()):
        raise starter.UserError("--save needs a model of a run, with task and chat of that run")
    cfg = read_settings(given, model_id, config)
    starter.prepare(cfg)
    task = starter.Task(cfg)
    if not (task.held_out_rows or own.chat):
        raise starter.UserError("no rows are held out: give problems with --eval_task")
    policy, tokenizer = starter.init_policy(cfg.model_id)
    # The policy stays in host memory: the sampler has weights of its own on this device.
    policy.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg.use_vllm = cfg.use_vllm and not own.chat  # torch will do for one response at a time
    task.encode(tokenizer, policy.stop_ids)
    llm = starter.init_vllm(policy, tokenizer, cfg, task.turn_ends)
    if own.chat:
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            chat(llm, task)
        return
    sampled, greedy = evaluate(llm, task, own.n_samples)
    if own.save:
        record.write(Path(own.save), config, cfg, sampled, greedy)


if __name__ == "__main__":
    starter.run(main)

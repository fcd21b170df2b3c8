"""Look at a trained model: how often it is right, or a conversation with it.

    python sample.py                    accuracy, sampled and greedy, and pass@k of out/latest/model
    python sample.py --model_id=tiny    the same for any model, here the one before training
    python sample.py --n_samples=32     more responses to each held-out problem; --n_eval: problems
    python sample.py --chat=True        talk to it (tiny expects problems such as 3 5 7=15:)

Task, prompt, lengths, temperature and sampler are those of the run that made the model
(config.json in the folder above it). Any of them can be set as --name=value.
"""
import itertools, json, math, sys
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):    # before the slow imports
    print(__doc__)
    sys.exit()

import numpy as np
import starter
import torch


def read_settings(argv):
    given = starter.read_arguments(argv)
    if "model_id" in given and Path(given["model_id"], "model").is_dir():    # a run folder
        given["model_id"] += "/model"
    model_id = given.get("model_id", "out/latest/model")
    if "model_id" not in given and not Path(model_id).exists():
        raise starter.UserError(f"there is no trained model in {model_id}: run python starter.py "
                                "first, or give --model_id a folder or a hub name")
    tiny = starter.is_tiny(model_id)
    countdown = starter.SHORT_PROMPT if tiny else starter.LONG_PROMPT
    prompt = countdown if given.get("task", "countdown") == "countdown" else starter.QUESTION_PROMPT
    cfg = SimpleNamespace(
        task="countdown", eval_task="", prompt=prompt, n_numbers=3, temperature=1.0, min_tokens=0,
        max_number=20 if tiny else 10, operations="+-" if tiny else "+-*/", use_vllm=True,
        max_tokens=24 if tiny else 512, max_prompt_tokens=32 if tiny else 256)
    path = Path(model_id).resolve().parent / "config.json"
    run = json.loads(path.read_text()) if path.is_file() else {}
    if "n_grpo_steps" in run:
        is_other = given.get("task", run["task"]) != run["task"]
        starter.override(cfg, {name: run[name] for name in vars(cfg)
                               if not (is_other and name in ("task", "eval_task", "prompt"))})
    vars(cfg).update(model_id=model_id, device="cuda" if torch.cuda.is_available() else "cpu",
                     gpu_mem_util=0.4, vllm_sleep=False, enforce_eager=False, n_samples=8,
                     n_eval=200, chat=False)
    starter.override(cfg, given)
    counts = ("n_samples", "n_eval", "max_tokens", "max_prompt_tokens", "max_number")
    rules = {f"{name} must be at least 1": getattr(cfg, name) >= 1 for name in counts} | {
        "min_tokens must be 0 to max_tokens": 0 <= cfg.min_tokens <= cfg.max_tokens,
        "temperature must be 0 (greedy) or more": 0 <= cfg.temperature < math.inf,
        "n_numbers must be 2 to 8": 2 <= cfg.n_numbers <= 8,
        "operations must be some of +-*/": cfg.operations and not cfg.operations.strip("+-*/"),
        "device is cpu, or cuda with a GPU":
            cfg.device == "cpu" or (cfg.device == "cuda" and torch.cuda.is_available())}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise starter.UserError(rule)
    if cfg.task == run.get("task") != "countdown" and not cfg.eval_task:
        # Otherwise some problems would be problems that the run was trained on.
        cfg.n_eval = min(cfg.n_eval, run["n_eval"])
        for name in ("prompt", "max_prompt_tokens"):
            if getattr(cfg, name) != run[name]:
                raise starter.UserError(f"{name} decides which problems are held out: leave it as "
                                        "in the run, or set --eval_task")
    if cfg.temperature == 0 or cfg.chat:
        cfg.n_samples = 1    # without randomness all responses to a prompt are the same
    return cfg


def pass_at_k(n, n_right, k):
    """Probability that at least one of k responses, drawn from the n sampled ones, is right."""
    return 1 - math.comb(n - n_right, k) / math.comb(n, k)


def show(name, values, extra=()):
    """A mean over problems and its 95 % interval. Responses to one problem are not independent, so
    problems are counted. For shares, `extra` keeps the interval of 0 in 20 from being empty."""
    padded = np.array([*values, *extra])
    half = 1.96 * padded.std() / len(padded)**0.5
    low, high = padded.mean() - half, padded.mean() + half
    if extra:
        low, high = max(0.0, low), min(1.0, high)
    print(f"{name:18} {np.mean(values):.3f}  (95 %: {low:.3f} to {high:.3f})", flush=True)


def printable(text):
    """Treat model output as untrusted: no control characters reach the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1]
                   for letter in text)


def evaluate(llm, task, params, stop_ids):
    n, n_problems = params["n"], len(task.held_out)
    print(f"sampling {n} responses to each of {n_problems} held-out problems ...", flush=True)
    metrics, rows = starter.evaluate_model(llm, task, params, stop_ids)
    rewards = np.array([row["reward"] for row in rows]).reshape(-1, n)
    sample_format = "\n{prompt}\n--> {response}\nreward {reward}, right: {answer}"
    for sample in rows[:2 * n:n]:
        print(printable(sample_format.format(**sample)))
    print(f"\n{'mean tokens':18} {metrics['eval/avg_output_tokens']:.1f}")
    show("mean reward", rewards.mean(1))
    n_right = (rewards >= 0.9).sum(1).tolist()
    for k in (1, 4, 8, 16, 32, 64):
        if k <= n:
            name = "accuracy, pass@1" if k == 1 else f"pass@{k}"
            show(name, [pass_at_k(n, right, k) for right in n_right], extra=(0, 0, 1, 1))
    if params["temperature"] > 0:
        _, rows = starter.evaluate_model(llm, task, params | {"n": 1, "temperature": 0.0}, stop_ids)
        show("accuracy, greedy", [row["reward"] >= 0.9 for row in rows], extra=(0, 0, 1, 1))


def chat(llm, tokenizer, params, stop_ids, max_prompt_tokens):
    print("An empty line starts a new conversation, Ctrl-D ends.")
    messages = []
    for turn in itertools.count():
        try:
            # Bytes that are not text would stop the tokenizer.
            line = input("\nyou: ").encode(errors="replace").decode()
        except (EOFError, KeyboardInterrupt):
            break
        messages.append({"role": "user", "content": line})
        ids = []
        if line.strip():
            prompt = starter.render_chat(messages, tokenizer)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
        if not ids or len(ids) > max_prompt_tokens:
            print(f"({'too long: ' if line else ''}this is a new conversation)")
            messages = []
            continue
        response = starter.rollout_with_vllm(llm, [ids], params, "chat", turn)[0]
        text = starter.decode(tokenizer, response.ids, stop_ids)
        messages.append({"role": "assistant", "content": text})
        print(f"model: {printable(text)}", flush=True)


def main(argv=None):
    cfg = read_settings(sys.argv[1:] if argv is None else argv)
    starter.make_tiny(cfg.model_id)
    policy, tokenizer = starter.init_policy(cfg.model_id, cfg.device)
    params = starter.init_sampling_params(cfg, cfg.n_samples, policy.stop_ids)
    if cfg.chat:
        # For one response at a time plain torch is fast enough.
        llm, context = starter.TorchSampler(policy), policy.model.config.max_position_embeddings
        chat(llm, tokenizer, params, policy.stop_ids, min(4096, context - cfg.max_tokens))
    else:
        task = starter.Task(cfg, *starter.read_task(cfg), tokenizer)
        cfg.rollout_batch_size = len(task.held_out) * cfg.n_samples
        llm = starter.init_vllm(policy, cfg)
        evaluate(llm, task, params, policy.stop_ids)


if __name__ == "__main__":
    sys.exit(starter.run(main))

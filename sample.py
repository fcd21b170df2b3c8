"""Look at a trained model: how often it is right, or a conversation with it.

    python sample.py                    accuracy, sampled and greedy, and pass@k of out/latest/model
    python sample.py --model_id=tiny    the same for any model, here the one before training
    python sample.py --n_samples=32     more responses to each held-out problem; --n_eval: problems
    python sample.py --chat             talk to it (tiny expects problems such as 3 5 7=15:)

Task, prompt, lengths, temperature, sampler, reward and reply() are those of the run that made the
model (config.json in the folder above it). Any setting of starter.py can be given; --script names
another file with reward_fn and reply().
"""
import starter  # first: it answers --help before the slow imports
import importlib.util, itertools, json, math, os, sys
from pathlib import Path

import numpy as np

OWN = {"n_samples": 8, "n_eval": 200, "chat": False, "script": ""}
# What is taken over from the run
TAKEN = ("task eval_task prompt n_numbers max_number operations temperature min_tokens max_tokens "
         "max_prompt_tokens max_turns reward_truncated use_vllm").split()


def read_settings(argv):
    """-> the trainer's settings, as in the run, with those of OWN"""
    given = starter.read_arguments(argv)
    model_id = given.get("model_id", "out/latest")
    if Path(model_id, "model").is_dir():  # a run folder
        model_id += "/model"
    elif Path(model_id, "metrics.jsonl").is_file():
        raise starter.UserError(f"the run in {model_id} was not finished: it has no model/. Give "
                                f"{model_id}/best, if there, or finish it with --resume")
    if "model_id" not in given and not Path(model_id).exists():
        raise starter.UserError(f"there is no trained model in {model_id}: run python starter.py "
                                "first, or give --model_id a folder or a hub name")
    path = Path(model_id).resolve().parent / "config.json"
    run = {}
    if path.is_file():
        try:
            run = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise starter.UserError(f"cannot read {path}: {error!r:.150}") from None
    if not {"n_grpo_steps", "task", "prompt", "n_eval"} <= run.keys():
        run = {}  # a folder of something else
    taken = {name: run[name] for name in TAKEN if name in run}
    task = given.get("task", run.get("task"))
    is_same_task = bool(run) and os.path.realpath(task) == os.path.realpath(run["task"])
    if not is_same_task:
        for name in ("task", "eval_task", "prompt"):
            taken.pop(name, None)
    own = starter.SimpleNamespace(**OWN)
    starter.override(own, {name: given.pop(name) for name in OWN if name in given})
    settings = taken | given | {"model_id": model_id}
    is_greedy = str(settings.get("temperature")) in ("0", "0.0")
    if is_greedy:
        del settings["temperature"]
    flags = [f"--{name}={value}" for name, value in settings.items()]
    cfg = starter.main([*flags, f"--n_eval={own.n_eval}"], only_settings=True)
    vars(cfg).update(chat=own.chat, n_samples=own.n_samples, script=own.script or run.get("script"),
                     reward_fn=None if own.script else run.get("reward_fn"))
    if own.n_samples < 1:
        raise starter.UserError("n_samples must be at least 1")
    if is_greedy or own.chat:
        cfg.n_samples = 1  # without randomness all responses to a prompt are the same
    cfg.temperature = 0.0 if is_greedy else cfg.temperature
    if is_same_task and cfg.task != "countdown" and not cfg.eval_task:
        # Otherwise some problems would be problems that the run was trained on.
        cfg.n_eval = min(cfg.n_eval, run["n_eval"])
        for name in ("prompt", "max_prompt_tokens"):
            if getattr(cfg, name) != run[name]:
                raise starter.UserError(f"{name} decides which problems are held out: leave it as "
                                        "in the run, or set --eval_task")
    return cfg


def load_script(path):
    """-> the trainer with the reward_fn and reply() of a script: a changed copy of starter.py, or a
    file such as examples/guess.py"""
    if not path or (os.path.exists(path) and os.path.samefile(path, starter.__file__)):
        return starter
    spec = importlib.util.spec_from_file_location("script_of_the_run", path)
    if spec is None:
        raise starter.UserError(f"{path} is no Python file: set --script")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # for what stands beside it
    names = ("reward_fn", "reply", "TURN_ENDS")
    before = {name: getattr(starter, name) for name in names}
    run, main = starter.run, starter.main
    # A script without `if __name__` must not train now.
    starter.run = starter.main = lambda *arguments, **options: None
    try:
        spec.loader.exec_module(module)
    except OSError as error:
        raise starter.UserError(f"the run's reward is gone ({error}): set --script") from None
    except (Exception, SystemExit) as error:
        raise starter.UserError(f"cannot use the script {path}: {error!r:.150}") from None
    finally:
        starter.run, starter.main = run, main
    if hasattr(module, "init_policy"):
        starter.UserError, starter.RunFailed = module.UserError, module.RunFailed  # for run()
        return module
    for name in names:
        if hasattr(module, name) and getattr(starter, name) is before[name]:  # else the script did
            setattr(starter, name, getattr(module, name))
    return starter


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


def evaluate(trainer, llm, task, params, stop_ids):
    n, n_problems = params["n"], len(task.held_out)
    print(f"sampling {n} responses to each of {n_problems} held-out problems ...", flush=True)
    metrics, rows = trainer.evaluate_model(llm, task, params, stop_ids, trainer.reward_fn)
    rewards = np.array([row["reward"] for row in rows]).reshape(-1, n)
    for sample in rows[:2 * n:n]:
        print("\n" + printable(trainer.show(sample)))
    print(f"\n{'mean tokens':18} {metrics['eval/avg_output_tokens']:.1f}")
    print(f"{'cut off':18} {metrics['eval/truncated_frac']:.3f}")
    show("mean reward", rewards.mean(1))
    n_right = (rewards >= 0.9).sum(1).tolist()
    for k in (1, 4, 8, 16, 32, 64):
        if k <= n:
            name = "accuracy, pass@1" if k == 1 else f"pass@{k}"
            show(name, [pass_at_k(n, right, k) for right in n_right], extra=(0, 0, 1, 1))
    if params["temperature"] > 0:
        _, rows = trainer.evaluate_model(llm, task, params | {"n": 1, "temperature": 0.0}, stop_ids,
                                         trainer.reward_fn)
        show("accuracy, greedy", [row["reward"] >= 0.9 for row in rows], extra=(0, 0, 1, 1))


def chat(trainer, llm, task, params, max_prompt_tokens):
    print("An empty line starts a new conversation, Ctrl-D ends.")
    messages, answer = [], trainer.reply

    def only_tools(problem, text):
        """After an end token the turn is the user's, not the environment's."""
        is_call = any(end in text for end in trainer.TURN_ENDS)
        return answer(problem, text) if is_call else None

    if answer:
        trainer.reply = only_tools
    for turn in itertools.count():
        try:
            # Bytes that are not text would stop the tokenizer.
            line = input("\nyou: ").encode(errors="replace").decode()
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: stdin is closed
            break
        messages.append({"role": "user", "content": line})
        problem = {"prompt_ids": []}
        if line.strip():
            problem = task.encode({"prompt": messages})
        if not problem["prompt_ids"] or len(problem["prompt_ids"]) > max_prompt_tokens:
            print(f"({'too long: ' if line else ''}this is a new conversation)")
            messages = []
            continue
        try:
            response = trainer.roll_out(llm, task, [problem], params, "chat", turn)[0]
        except starter.UserError as error:  # in reply()
            print(f"({error})")
            messages = []
            continue
        text = trainer.decode(task.tokenizer, response.ids, params["stop_token_ids"])
        messages.append({"role": "assistant", "content": text})
        print(f"model: {printable(text)}", flush=True)


def main(argv=None):
    cfg = read_settings(sys.argv[1:] if argv is None else argv)
    trainer = load_script(cfg.script)
    found = getattr(trainer.reward_fn, "__qualname__", "")
    if cfg.reward_fn not in (None, found):
        raise starter.UserError(f"the run was trained with {cfg.reward_fn}(), but {cfg.script} has "
                                f"{found}(): set it outside main(), or give --script")
    trainer.make_tiny(cfg.model_id)
    problems = trainer.read_task(cfg)
    policy, tokenizer = trainer.init_policy(cfg.model_id, cfg.device)
    task = trainer.Task(cfg, *problems, tokenizer)
    params = trainer.init_sampling_params(cfg, cfg.n_samples, policy.stop_ids)
    if cfg.chat:
        # For one response at a time plain torch is fast enough.
        context = trainer.context_of(policy.model.config)
        chat(trainer, trainer.TorchSampler(policy), task, params,
             min(4096, context - cfg.max_tokens))
    else:
        cfg.rollout_batch_size = len(task.held_out) * cfg.n_samples
        evaluate(trainer, trainer.init_vllm(policy, cfg), task, params, policy.stop_ids)


if __name__ == "__main__":
    if sys.stdout:  # show what the terminal can
        sys.stdout.reconfigure(errors="replace")
    starter.run(main)

"""GRPO for language models in one file. Read it from top to bottom, edit main(), run it.

    python starter.py                  train: a 1.5 B model on a GPU, a tiny one on a CPU
    python starter.py --lr=1e-5        set any hyperparameter; --help lists them
    python starter.py --resume=latest  continue an interrupted run
    torchrun --nproc_per_node=8 starter.py
    tensorboard --logdir out/tb        watch the curves, read samples
    python sample.py                   measure the trained model, or chat with it

One step: sample a group of responses to each prompt and reward them. Make those above the mean of
their group more likely, the others less. PPO clipping limits further updates on the same
responses; a KL penalty, off by default, keeps the model near its start (KL.md).
"""
import os, signal, sys
from pathlib import Path

if {"-h", "--help"} & set(sys.argv[1:]):  # before slow imports, also for scripts that import this
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
    print(sys.modules["__main__"].__doc__ or "python starter.py --help lists the settings")
    if __name__ == "__main__":
        print(Path(__file__).read_text("utf-8").split("\n    # ----")[1])
    sys.exit()

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine in this process
for setting in ("VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 TRANSFORMERS_VERBOSITY=error "
                "TORCH_CPP_LOG_LEVEL=ERROR TOKENIZERS_PARALLELISM=false VLLM_HOST_IP=127.0.0.1 "
                "TORCH_LOGS=-all HF_HUB_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1").split():
    os.environ.setdefault(*setting.split("="))
# torchrun starts a process (rank) per GPU. Each sees only its own GPU.
IS_LAUNCHED = "LOCAL_RANK" in os.environ
RANK, WORLD, LOCAL_RANK = 0, 1, 0
if IS_LAUNCHED:
    RANK, WORLD, LOCAL_RANK = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", str(LOCAL_RANK)).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[LOCAL_RANK % len(gpus)]

import ast, builtins, contextlib, copy, dataclasses, difflib, functools, gc, html, importlib
import itertools, json, logging, math, operator, random, re, shlex, shutil, tempfile, time
import traceback, warnings, zipfile, zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM,
                          AutoModelForMultimodalLM, AutoTokenizer, DynamicCache,
                          GenerationConfig)
from transformers.core_model_loading import revert_weight_conversion

warnings.filterwarnings("ignore", category=FutureWarning)
# vLLM's own setting does not hold while it is imported.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


def print(*words, **options):
    """At once. If nobody reads any more (Ctrl-C also ends `| tee log`; a terminal is closed), the
    run goes on."""
    try:
        builtins.print(*words, **options, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


class UserError(ValueError):
    """The user can fix it: one line, exit code 2."""


class RunFailed(RuntimeError):
    """The run cannot continue: one line, exit code 1."""


def gather(value):
    """-> [value on rank 0, on rank 1, ...]"""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def share(items):
    """-> (this rank's part, number of items before it)"""
    first = len(items) * RANK // WORLD
    return items[first:len(items) * (RANK + 1) // WORLD], first


def on_all_ranks(function, *arguments):
    """Call it. An error of one rank is raised on all: none waits for ever."""
    result = error = None
    try:
        result = function(*arguments)
    except (UserError, RunFailed, ImportError) as caught:
        error = caught
    for error in gather(error):
        if error:
            raise error
    return result


def main(argv=None, only_settings=False):
    began = time.perf_counter()
    # typed: on the command line; given: with the settings of the run to resume
    typed = read_arguments(sys.argv[1:] if argv is None else argv)
    has_gpu = torch.cuda.is_available() and typed.get("device") != "cpu"
    start_process_group("cuda" if has_gpu else "cpu")
    given = on_all_ranks(settings_of_run, typed) if "resume" in typed else typed
    # ---- hyperparameters
    cfg = SimpleNamespace(
        # model; "tiny" has some values of its own, below
        model_id="Qwen/Qwen2.5-Coder-1.5B-Instruct" if has_gpu else "tiny",  # a folder or hub name
        device="cuda" if has_gpu else "cpu",
        lora_rank=0,  # above 0: train adapters only; they need about 10 x lr
        gradient_checkpointing=True,  # half the memory, a quarter more time
        compile=has_gpu,
        # run
        seed=42,
        out_dir="out",  # the run gets a folder in it
        resume="",  # a run folder, or "latest"
        n_grpo_steps=100,
        max_minutes=0.0,  # 0: no limit
        eval_every=20,  # steps
        n_eval=400,  # held-out problems
        save_every=50,  # steps between checkpoints; 0: only on Ctrl-C or an error in reward_fn
        # task
        task="countdown",  # or a JSONL file
        eval_task="",  # another JSONL file; else rows of task are held out
        prompt="",  # a template such as "{question}"; "": that of the task
        n_numbers=3,  # of a Countdown problem
        max_number=10,
        operations="+-*/",
        # rollout
        use_vllm=True,  # False: plain torch
        rollout_batch_size=512,  # responses per step
        group_size=16,  # responses per prompt
        temperature=1.0,
        min_tokens=0,
        max_tokens=512,
        max_prompt_tokens=256,
        max_turns=10,  # of the model, if there is a reply()
        reward_truncated=False,  # False: a response that is cut off earns 0, or its group's lowest
        gpu_mem_util=0.4,  # vLLM's share of GPU memory
        vllm_sleep=False,  # free it during the update
        # update
        lr=2e-6,
        warmup_steps=10,  # lr rises linearly
        max_grad_norm=1.0,  # 0: no clipping
        inner_epochs=1,  # passes over each batch
        n_minibatches=1,  # optimizer steps per pass
        gradient_accumulation_steps=1,  # microbatches, at least
        tokens_per_microbatch=20480,  # at most, roughly
        # loss
        loss_type="grpo",  # mean per response; "dr_grpo": sum / max_tokens; "dapo": mean per token
        clip_range=0.2,
        clip_range_high=0.0,  # upper limit (DAPO: 0.28); 0: clip_range
        use_std_normalization=True,  # of the advantages of a group
        # KL penalty towards the starting model (KL.md)
        use_kl_penalty=False,
        kl_coef=0.005,  # for some 250 tokens per response; longer ones need less
        kl_estimator="k3",  # or "k1", "k2", "exact" (over the vocabulary)
        kl_importance_weight=True,  # False: the estimator's own gradient (KL.md)
        kl_in="loss",  # or "reward", with k1
        kl_adaptive=False,  # steer the KL to target_kl
        target_kl=0.1,  # nats per token
        ref_update_every=0,  # steps between refreshes of the reference; 0: none
        ref_offload=False,  # in host memory
    )
    if is_tiny(given.get("model_id", cfg.model_id)):  # made on first use
        vars(cfg).update(
            gradient_checkpointing=False, compile=False, n_eval=1000, save_every=20, max_number=20,
            operations="+-", rollout_batch_size=256, group_size=8, lr=2e-4, kl_coef=0.1)
        if given.get("task", cfg.task) == "countdown":
            vars(cfg).update(prompt="{numbers}={target}:", max_tokens=24, max_prompt_tokens=32)
    # ----
    override(cfg, given)
    if not cfg.prompt:
        cfg.prompt = COUNTDOWN_PROMPT if cfg.task == "countdown" else QUESTION_PROMPT
    if "latest" in Path(cfg.model_id).parts and Path(cfg.model_id).is_dir():
        cfg.model_id = os.path.realpath(cfg.model_id)  # the link will move
    check_settings(cfg, typed)
    # Parallel sums on a CPU differ from run to run.
    torch.use_deterministic_algorithms(cfg.device == "cpu")
    if only_settings:
        return cfg
    rows, eval_rows = on_all_ranks(read_task, cfg)
    saved = on_all_ranks(load_checkpoint, cfg.resume) if cfg.resume else None
    on_all_ranks(make_tiny, cfg.model_id)
    print(f"loading {cfg.model_id} ...")
    policy, tokenizer = on_all_ranks(init_policy, cfg.model_id, cfg.device,
                                     cfg.gradient_checkpointing)
    task = Task(cfg, rows, eval_rows, tokenizer)
    kl_coef = cfg.kl_coef if cfg.use_kl_penalty else 0.0
    layout = "packed" if policy.layout is pack else "padded (slower)"
    print(f"{policy.model.num_parameters():,} parameters on {WORLD} x {cfg.device}, rows {layout}")
    print(f"{len(task.training) or 'random'} problems, {len(task.held_out)} held out; "
          f"KL penalty {kl_coef or 'off'}")
    if cfg.lora_rank:
        add_lora(policy, cfg.lora_rank, cfg.seed)
    ref_model = make_reference(policy, cfg) if kl_coef else None
    compile_and_shard(policy, cfg)
    llm = init_vllm(policy, cfg)
    folder = Path(cfg.resume or gather(on_all_ranks(make_run_folder, cfg, given))[0]).absolute()
    log = on_all_ranks(Log, folder, cfg, saved)
    try:
        train(policy, llm, cfg, log, ref_model, kl_coef, task=task, saved=saved, began=began)
        save_model(policy, tokenizer, folder / "model")
    finally:
        log.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script or notebook may go on
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report(folder, cfg)


def train(policy, llm, cfg, log, ref_model=None, kl_coef=0.0, *, task, saved=None, began=None):
    """saved: a checkpoint to start from; began: when the minutes of this process did"""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], cfg.lr,
                                  betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    state = SimpleNamespace(step=0, next_problem=0, minutes=0.0, skipped=0, skips_in_a_row=0,
                            lr_factor=1.0, best_reward=-math.inf, ref_step=0, kl_factor=1.0,
                            kl_smooth=0.0)
    checkpoint_parts = log.folder, policy, optimizer, ref_model, state
    params = init_sampling_params(cfg, cfg.group_size, policy.stop_ids)
    loss_settings = {
        "clip_range": cfg.clip_range, "clip_range_high": cfg.clip_range_high,
        "loss_type": cfg.loss_type, "max_completion_length": cfg.max_tokens,
        "temperature": cfg.temperature, "kl_estimator": cfg.kl_estimator,
        "kl_importance_weight": cfg.kl_importance_weight, "kl_in": cfg.kl_in}
    signals = catch_signals()
    if cfg.device == "cuda":
        torch.set_num_threads(1)  # host tensors are small
    if saved:
        restore(saved, policy, optimizer, ref_model, state)
        load_policy_into_vllm_instance(policy, llm)
    else:
        log.write(0, evaluate_and_keep_best(policy, llm, task, params, log, state))
    minutes_before, began = state.minutes, began or now()

    while state.step < cfg.n_grpo_steps:
        step = state.step + 1
        started, seconds = now(), {}

        # Rollout, reward, advantage; problems are one per response
        with saved_if_it_fails(checkpoint_parts):
            problems, responses, texts, rewards = collect(llm, task, params, cfg, state, seconds)
        prompts = [problem["prompt_ids"] for problem in problems]
        batch = make_batch(prompts, responses, cfg.min_tokens)
        batch.advantages_per_seq = group_advantages(rewards, cfg.group_size,
                                                    cfg.use_std_normalization)
        state.step = step  # from here on a checkpoint belongs to this step

        update_started = now()
        if cfg.vllm_sleep:
            llm.sleep(level=2)
        kl_now = kl_coef * (state.kl_factor if cfg.kl_adaptive else 1.0)
        minibatches = [*make_minibatches(cfg, step, len(responses))]
        # Rows without advantage have no gradient. Step 1 keeps them for check_agreement.
        to_train = {row for row, advantage in enumerate(batch.advantages_per_seq)
                    if step == 1 or kl_now or advantage.any()}
        to_train = to_train or {*range(len(responses))[:1]}  # for the metrics

        # Log-probs before the update. In its first minibatch old is the policy itself.
        old_log_probs = None
        if len(minibatches) > 1:
            later = to_train & {row for rows in minibatches[1:] for row in rows}
            old_log_probs = score(policy, batch, sorted(later), cfg)
        if kl_now and cfg.kl_estimator != "exact":
            with adapters_off(ref_model):
                batch.ref_log_probs = score(ref_model, batch, sorted(to_train), cfg)

        # Update: an optimizer step per minibatch, in microbatches
        details, losses, grad_norms = [], [], []
        for rows in minibatches:
            # A mean over ranks, not a sum: fully_shard averages gradients over them as well.
            divisor = np.mean(gather(loss_divisor(
                batch.response_mask[rows], cfg.loss_type, cfg.max_tokens)))
            rows = [row for row in rows if row in to_train]
            microbatches = make_microbatches(batch, rows, cfg, policy.layout)
            loss = 0.0
            for i, micro_rows in enumerate(microbatches, 1):
                if WORLD == 1 and cfg.device == "cuda":  # keep the bf16 weights until the last
                    policy.set_reshard_after_backward(i == len(microbatches))
                # select() also passes the sampler's log-probs: tokens are weighted by old/sampler.
                _, metadata = grpo_microbatch_step(
                    policy, **select(batch, micro_rows), **loss_settings, divisor=divisor,
                    gradient_accumulation_steps=len(microbatches), ref_model=ref_model,
                    kl_coef=kl_now)
                loss += metadata["loss"]
                details.append(metadata)
            losses.append(np.mean(gather(loss)))
            grad_norms.append(update_weights(policy, optimizer, losses[-1], cfg, state))
            batch.old_log_probs = old_log_probs  # from the second minibatch on
        sync_started = now()

        if cfg.vllm_sleep:
            llm.wake_up(tags=["weights"])
        load_policy_into_vllm_instance(policy, llm)
        if cfg.vllm_sleep:
            llm.wake_up(tags=["kv_cache"])
        ended = now()
        seconds |= {"train": sync_started - update_started, "sync": ended - sync_started,
                    "step": ended - started}
        state.minutes = minutes_before + (ended - began) / 60

        # Log, evaluate, save
        metrics = step_metrics(details, rewards, responses, texts, seconds, cfg.group_size, kl_now)
        metrics |= {"train/loss": np.mean(losses), "train/grad_norm": np.mean(grad_norms),
                    "train/lr": optimizer.param_groups[0]["lr"], "train/kl_coef": kl_now,
                    "train/skipped_steps": state.skipped, "time/minutes": state.minutes}
        on_all_ranks(check_agreement, metrics, details, cfg, step)
        log_train(log, step, metrics, cfg)
        if cfg.kl_adaptive:
            adapt_kl_coef(state, metrics["kl/mean"], cfg)
        if cfg.ref_update_every and step % cfg.ref_update_every == 0:
            ref_model.load_state_dict(policy.state_dict())
            state.ref_step, state.kl_smooth = step, 0.0  # the average begins again
        is_late = 0 < cfg.max_minutes < state.minutes
        is_last = any(gather(is_late or step == cfg.n_grpo_steps))
        try:
            if step % cfg.eval_every == 0 or is_last:
                with saved_if_it_fails(checkpoint_parts):
                    metrics |= evaluate_and_keep_best(policy, llm, task, params, log, state)
        finally:
            log.write(step, metrics)
        is_interrupted = any(gather(len(signals)))
        if is_interrupted or (cfg.save_every and (step % cfg.save_every == 0 or is_last)):
            save_checkpoint(*checkpoint_parts)
        if is_interrupted or is_last:
            break


# ---- 1. Task: problems, prompts, answers, reward

QUESTION_PROMPT = "{question} Think step by step, then give the answer as <answer>...</answer>."
COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with the operations {operations} and parentheses. Try several inside <think> "
    "</think> tags, then give one inside <answer> </answer> tags. For example, 9 from 5 2 3:\n"
    "<think>5+2+3=10, 5*2-3=7, 5*3-2=13, (5-2)*3=9</think>\n<answer>(5-2)*3</answer>")

# For several turns write reply(problem, text): what the environment says after a turn of the model,
# or None if the response has ended. After an end token it is a user message; after a text in
# TURN_ENDS it continues the response. problem["turns"] is what was said so far, for reward_fn, too:
# [{"role": "assistant" or "environment", "content": ...}, ...].
reply = None
TURN_ENDS = ()


def reward_fn(generated_text, ground_truth):
    """1.0 for a correct answer, 0.1 for a wrong one, 0.0 for none. Replace it with your own:
    ground_truth is the problem, a dict. A reward of at least 0.9 counts as correct."""
    truth = ground_truth if isinstance(ground_truth, dict) else {"answer": ground_truth}
    for tag in ("<answer>", "<think>"):
        if truth.get("rendered", "").rstrip().endswith(tag):  # begun by the prompt
            generated_text = tag + generated_text
    answer = final_answer(generated_text, ANSWERS if "answer" in truth else TAGS)
    if answer is None:
        return 0.0
    if "answer" in truth:
        is_right = is_same(answer, truth["answer"])
    else:
        operations = truth.get("operations", "+-*/")
        is_right = evaluate_expression(answer, truth["numbers"], operations) == truth["target"]
    return 1.0 if is_right else 0.1


# All patterns take linear time, whatever the text.
TAGS = r"<answer>((?:(?!</?answer>).)*)</answer>"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
# A number, not a heading such as "#### 2. Check"
HASHES = r"####[ *]*(?![0-9]{1,2}[.)] )([-\N{MINUS SIGN}+$.\\]{0,3}[0-9][^\n<#\\]*)"
ANSWERS = f"{TAGS}|{BOX}|{HASHES}"
NUMBER = r"(\$?) ?([-+./0-9]{1,64}(?:e[-+]?[0-9]{1,2})?)"
UNIT = r"(%|(?:square |cubic )?([a-z]+)(?: (?:per|of) [a-z]+)?)"
# Words that change the number before them
NO_UNITS = set("dozen hundred thousand k million billion trillion squared cubed factorial pi i e "
               "x y z n".split())


def final_answer(text, pattern=ANSWERS):
    r"""-> the last of <answer>...</answer>, \boxed{...}, `#### 5` after the reasoning, or None"""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer = None
    for match in re.finditer(pattern, text, re.DOTALL):
        answer = match[match.lastindex].strip()
    inner = final_answer(answer, pattern) if answer else None  # <answer>\boxed{5}</answer>
    return answer if inner is None else inner


def is_same(answer, truth):
    """$1,200.00 = 1200, 1/2 = .5, 18 dollars = 18, Paris = paris. But 3 am is not 3 pm."""
    (number, unit, text), (true_number, true_unit, true_text) = map(parse_number, (answer, truth))
    if number is None or true_number is None:
        return text == true_text
    return number == true_number and (unit == true_unit or not (unit and true_unit))


def parse_number(answer):
    """-> (Fraction or None, unit, text)"""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1", str(answer).lower())
    text = text.replace("\\", "").replace("\N{MINUS SIGN}", "-").strip("* ")
    text = " ".join(text.split()).replace("- ", "-").replace("-$", "$-").rstrip(". $")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    match = re.fullmatch(f"{NUMBER}(?: ?{UNIT})?", text)
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if match:
            unit, word = (re.sub("(?<=[a-z]{2})s$", "", found or "")  # dollars, but not s or ms
                          for found in (match[3], match[4]))
            if word not in NO_UNITS:
                return Fraction(match[2]), "dollar" if match[1] else unit, text
    return None, "", text


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate_expression(text, numbers, operations="+-*/"):
    """-> the exact value of an expression that uses each of `numbers` once, or None"""
    is_allowed = re.fullmatch(rf"[{re.escape(operations)}() 0-9]{{1,200}}", text)
    if is_allowed and sorted(map(int, re.findall("[0-9]+", text))) == sorted(numbers):
        with contextlib.suppress(Exception):  # no expression, or divides by 0
            return exact_value(ast.parse(text.strip(), mode="eval").body)  # parsed, never run


def exact_value(node):
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(exact_value, parts))


def checked_reward(reward_fn, text, problem, is_cut_off=False):
    if is_cut_off:
        return 0.0
    with errors_shown("reward_fn", text):
        reward = float(reward_fn(text, problem))
        if not abs(reward) < 1e38:
            raise ValueError(f"{reward} is not finite")
    return reward


@contextlib.contextmanager
def errors_shown(name, text):
    """A mistake in the user's function stops the run and shows its line and the text."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also exit() in code that it runs
        wrong = UserError(f"{name}: {error!r} for the response {text[:300]!r}")
        wrong.add_note("".join(traceback.format_tb(error.__traceback__)[2:]))
        raise wrong from error


def make_problem(cfg, seed, index, split="train"):
    """A solvable Countdown problem. Its hash decides the split."""
    rng = random.Random(f"{seed}/{split}/{index}")
    for _ in range(100_000):
        numbers = [rng.randint(1, cfg.max_number) for _ in range(cfg.n_numbers)]
        solution, target = random_expression(rng, numbers, cfg.operations)
        hashed = zlib.crc32(f"{sorted(numbers)}={target}".encode())
        if 0 < target < 100 and split == ("train" if hashed % 5 else "held-out"):
            break
    else:
        raise UserError("n_numbers, max_number and operations allow no Countdown problem")
    problem = {"numbers": numbers, "target": target, "operations": cfg.operations,
               "solution": solution}
    return problem | {"prompt": fill(cfg.prompt, problem | {
        "numbers": " ".join(map(str, numbers)), "operations": " ".join(cfg.operations)})}


def fill(template, fields):
    try:
        return template.format(**fields)
    except Exception as error:
        raise UserError(f"set --prompt to a template of {', '.join(fields)} (braces: {{{{ }}}}): "
                        f"{template!r:.60} raised {error!r}") from None


def random_expression(rng, numbers, operations):
    """Join random parts until one is left. -> (text, value), or ("", 0)"""
    # Binding: 1 of + and -, 2 of * and /, 3 of a number; parts that bind less get parentheses.
    parts = [(str(n), n, 3) for n in numbers]  # (text, value, binding)
    while len(parts) > 1:
        left, x, left_binding = parts.pop(rng.randrange(len(parts)))
        right, y, right_binding = parts.pop(rng.randrange(len(parts)))
        operation = rng.choice(operations)
        if operation == "/" and (y == 0 or x % y):
            return "", 0
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // (y or 1)}[operation]
        binding, right_needs = {"+": (1, 1), "-": (1, 2), "*": (2, 2), "/": (2, 3)}[operation]
        left = f"({left})" if left_binding < binding else left
        right = f"({right})" if right_binding < right_needs else right
        parts.append((left + operation + right, value, binding))
    return parts[0][:2]


def read_task(cfg):
    """-> (rows of task, rows of eval_task); for Countdown (none, held-out problems)"""
    if cfg.task == "countdown":
        make_problem(cfg, 0, 0)  # is there any?
        return [], [make_problem(cfg, 0, index, "held-out") for index in range(cfg.n_eval)]
    return read_jsonl(cfg.task, cfg), read_jsonl(cfg.eval_task, cfg) if cfg.eval_task else []


def read_jsonl(path, cfg):
    """-> [{"prompt": text or chat messages, "answer": text, ...}, ...]"""
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"a task is countdown or a JSONL file. {path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(read_row(json.loads(line), cfg.prompt))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: {error.msg}. A JSONL file has an object in "
                            "each line") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def read_row(row, template):
    """-> the row with its prompt and answer"""
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object with prompt and answer")
    for name in {"turns", "rendered", "prompt_ids"} & row.keys():
        raise ValueError(f"rename the field {name}: the trainer uses this name")
    json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # raises on NaN
    answer = str(row.get("answer")).strip()
    last = answer.rpartition("####")[2].strip()
    answer = answer if "\n" in last else last  # GSM8K's last line, not a heading
    if not answer or type(row.get("answer")) not in (str, int, float):
        raise ValueError(f"answer must be a text or a number; the fields are {', '.join(row)}")
    fields = {name: value for name, value in row.items() if value is not None}
    prompt = row["prompt"] if "prompt" in row else fill(template, fields)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    with contextlib.suppress(TypeError, KeyError):
        texts = ["".join(turn["content"] for turn in turns), *(turn["role"] for turn in turns)]
        if all(map(str.strip, texts)):
            return row | {"prompt": prompt, "answer": answer}
    raise ValueError("prompt must be a text, or chat messages with role and content")


class Task:
    """problem(i) is the i-th training problem; held_out are for evaluation."""

    def __init__(self, cfg, rows, eval_rows, tokenizer):
        self.cfg, self.tokenizer = cfg, tokenizer
        if len(rows) > 10_000:
            print(f"encoding {len(rows):,} prompts ...")
        rows, held_out = self.encode_rows(rows), self.encode_rows(eval_rows)
        if not (eval_rows or cfg.eval_task):
            rows.sort(key=lambda row: zlib.crc32(identity(row).encode()))  # same for all seeds
            different = list({identity(row): row for row in rows}.values())
            held_out = different[:max(1, len(different) // 5)][:cfg.n_eval]
        # No problem is on both sides.
        seen = {identity(row) for row in held_out}
        self.training = [row for row in rows if identity(row) not in seen]
        self.held_out = held_out[:cfg.n_eval]
        if not self.held_out or not (self.training or cfg.task == "countdown"):
            raise UserError(f"too few rows: {len(self.training)} left, {len(held_out)} held out "
                            "(those with the prompt of a held-out row are left out)")

    def encode_rows(self, rows):
        """-> those that are not too long"""
        rows, limit = [self.encode(row) for row in rows], self.cfg.max_prompt_tokens
        short = [row for row in rows if len(row["prompt_ids"]) <= limit]
        if len(short) < len(rows):
            longest = max(len(row["prompt_ids"]) for row in rows)
            text = (f"{len(rows) - len(short)} of {len(rows)} prompts are longer than "
                    f"max_prompt_tokens={limit}; for all of them: --max_prompt_tokens={longest}")
            if self.cfg.task == "countdown":
                raise UserError(text)
            print(f"!!! left out: {text}")
        return short

    def encode(self, problem):
        rendered = render_chat(problem["prompt"], self.tokenizer)
        ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        return problem | {"rendered": rendered, "prompt_ids": ids}

    def problem(self, index):
        if self.cfg.task == "countdown":
            # The first 10,000,000 are for tiny.py.
            return self.encode(make_problem(self.cfg, self.cfg.seed, 10_000_000 + index))
        epoch, position = divmod(index, len(self.training))
        return self.training[self.order(epoch)[position]]

    @functools.lru_cache(2)  # a step may cross an epoch
    def order(self, epoch):
        return np.random.default_rng([self.cfg.seed, epoch]).permutation(len(self.training))

    @functools.cached_property
    def turn_end_ids(self):
        """Tokens in which a text of TURN_ENDS may end: they contain it, or begin with its end"""
        ids = []
        if isinstance(TURN_ENDS, str) or not all(
                isinstance(x, str) and x and x.isascii() for x in TURN_ENDS):
            raise UserError(f"TURN_ENDS={TURN_ENDS!r}: write ASCII texts, such as ('</call>',)")
        for token in range(len(self.tokenizer) if TURN_ENDS else 0):
            text = self.tokenizer.decode([token])
            starts = tuple(text[:i] for i in range(1, len(text) + 1))
            if any(end in text or end.endswith(starts) for end in TURN_ENDS):
                ids.append(token)
        if TURN_ENDS and not ids:
            raise UserError(f"no token of the model ends a text of TURN_ENDS={TURN_ENDS}")
        return ids


def identity(row):
    """Rows with the same prompt are the same problem; games may hide different answers."""
    return row["rendered"] + (str(row.get("answer")) if reply else "")


def render_chat(prompt, tokenizer):
    """-> the text that the model continues"""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    is_open = messages[-1]["role"] == "assistant"  # for the model to continue
    if tokenizer.chat_template is None:
        text = "\n".join(turn["content"] for turn in messages)
        return (tokenizer.bos_token or "") + text + ("" if is_open else "\n")
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_open,
            continue_final_message=is_open, enable_thinking=False)
    except Exception as error:
        raise UserError(f"the chat template refuses {messages!s:.200} ({error})") from None


def render_reply(said, tokenizer):
    """-> what the chat template puts between a turn of the model and its next one"""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "MODELS_TURN"},
                {"role": "user", "content": said}]
    _, is_shown, text = render_chat(messages, tokenizer).partition("MODELS_TURN")
    if not is_shown:
        raise UserError("reply() needs a chat template that shows earlier turns")
    return text


def find_stop_ids(model, tokenizer):
    """End tokens, and the one that closes a turn in the chat template"""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()}
    with contextlib.suppress(UserError):
        closing = tokenizer.encode(render_reply("?", tokenizer).lstrip(), add_special_tokens=False)
        ends |= set(closing[:1]) & tokenizer.added_tokens_decoder.keys()
    return sorted(end for end in ends - {None} if end < model.config.vocab_size)


def decode(tokenizer, ids, stop_ids):
    """Without end tokens. Special tokens such as <answer> stay; unknown ones become U+FFFD."""
    ends = {*stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    ids, n_known = list(ids), len(tokenizer)
    while ids and ids[-1] in ends:
        ids.pop()
    parts = itertools.groupby(ids, lambda token: token < n_known)
    return "".join(tokenizer.decode(list(x)) if is_known else "\ufffd" for is_known, x in parts)


# ---- 2. Policy: loading, LoRA, sharding, log-probs of rows

def is_tiny(model_id):
    """The model of tiny.py, or one trained from it?"""
    path = Path(model_id, "config.json")
    return model_id == "tiny" or (path.is_file() and b'"is_tiny"' in path.read_bytes())


def make_tiny(model_id):
    if model_id == "tiny" and LOCAL_RANK == 0 and not Path("tiny").exists():
        sys.modules.setdefault("starter", sys.modules[__name__])  # tiny.py imports it
        try:
            import tiny
        except ImportError as error:
            raise UserError(f"{error}: set --model_id") from None
        tiny.main()


def init_policy(model_id, device="cpu", gradient_checkpointing=False):
    """-> (policy with float32 weights, tokenizer)"""
    if model_id.startswith(("/", ".")) and not Path(model_id).exists():
        raise UserError(f"there is no folder {model_id}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
        model = load_model(model_id)
    except Exception as error:
        raise UserError(f"cannot load the model {model_id!r}: {error!r:.200}") from None
    for module in model.modules():  # no dropout, even in train() mode
        for key, value in [*vars(module).items()]:
            if (key == "p" or "drop" in key) and isinstance(value, int | float):
                setattr(module, key, 0.0)
    policy = Policy(model.to(device), find_stop_ids(model, tokenizer))
    # Some models have their window in a mask only, which packing ignores: a short one shows that.
    windows = [(part, part.sliding_window) for part in (model.config, *model.modules())
               if isinstance(getattr(part, "sliding_window", None), int)]
    for part, _ in windows:
        part.sliding_window = 8
    choose_layout(policy)
    for part, window in windows:
        part.sliding_window = window
    if gradient_checkpointing and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return policy, tokenizer


def load_model(model_id):
    """-> a causal language model; of a multimodal model its text part"""
    options = {"dtype": torch.float32, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(model_id, trust_remote_code=False)
    text_config = config.get_text_config(decoder=True)
    if text_config is config:
        return AutoModelForCausalLM.from_pretrained(model_id, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config)  # raises if there is no such class
    whole = AutoModelForMultimodalLM.from_pretrained(model_id, **options)
    body, head = whole.get_decoder(), whole.get_output_embeddings()
    if body.get_output_embeddings() is not None:
        model = body  # Llama 4: a causal language model already
    else:
        setattr(model, model.base_model_prefix, body)
        model.set_output_embeddings(head)
        model.config = body.config
        model.config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    model.generation_config = whole.generation_config
    return model


@torch.no_grad()
def choose_layout(policy):
    """Pack rows if that leaves their log-probs as they are, otherwise pad them."""
    model, attentions = policy.model, ["packed", "sdpa", "eager"]
    layer_types = getattr(model.config, "layer_types", None) or ()
    if not {"full_attention", "sliding_attention"}.issuperset(layer_types):
        attentions.remove("packed")  # convolutions, state spaces, linear attention
    if getattr(model.config, "attn_logit_softcapping", None):
        attentions = ["eager"]  # the others would ignore it
    ids = torch.arange(2, 66, device=policy.device).view(2, 32) % model.config.vocab_size
    ids[:, 0] = 1  # a prompt that both rows share
    labels = ids.clone()
    labels[0, 20:] = -100  # the first row is shorter
    model.eval().set_attn_implementation("eager")
    rows = ids[:1, :20], ids[1:]
    try:
        # Any labels will do.
        wanted = torch.cat([get_response_log_probs(model, row, row)[0] for row in rows])
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{type(model).__name__} is not supported: {error!r:.150}") from error
    policy.train()  # gradient checkpointing needs it
    for module in model.modules():
        if any("jitter" in name for name in vars(module)):
            module.eval()  # no noise in a router
    for attention in attentions:
        try:
            model.set_attn_implementation(attention)
            log_probs = get_response_log_probs(policy, ids, labels)[labels >= 0]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model does not have this attention
            continue
        if (log_probs - wanted).abs().max() < 1e-3:
            return
    raise UserError(f"{type(model).__name__} is not supported: its log-probs differ from those of "
                    "its own output layer")


def add_lora(policy, rank, seed):
    """Freeze the weights; train adapters beside the linear layers."""
    from peft import LoraConfig, inject_adapter_in_model
    torch.manual_seed(seed)
    skipped = {policy.model.get_output_embeddings()}
    for module in policy.modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):  # Mamba: kernels read its weights
            skipped.update(module.children())
    linear = {name: layer for name, layer in policy.named_modules()
              if type(layer).__name__ in ("Linear", "Conv1D") and layer not in skipped}
    n_users = Counter(id(layer.weight) for layer in linear.values())  # 2: layers that share it
    names = [name for name, layer in linear.items() if n_users[id(layer.weight)] == 1]
    if not names:
        raise UserError("lora_rank: the model has no linear layer that can have an adapter")
    # Not into policy.model: peft would replace these names by those of fused experts.
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), policy)


@contextlib.contextmanager
def adapters_off(model):
    """Run the model without them. peft's own switch would freeze them."""
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


def make_reference(policy, cfg):
    """A frozen copy; with LoRA the policy itself"""
    if cfg.lora_rank:
        return policy
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    compile_and_shard(reference, cfg, is_reference=True)
    return reference


def compile_and_shard(policy, cfg, is_reference=False):
    """Compile the layers, then shard: each GPU keeps a part of the weights, float32 if trained, and
    computes in bf16."""
    for parameter in policy.parameters():
        if not parameter.requires_grad:  # buffers (positions) stay float32
            parameter.data = parameter.data.to(policy.compute_dtype)
    lists = [module for module in policy.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    if cfg.compile:
        torch._dynamo.config.specialize_float = True  # a dynamic temperature compiles slowly
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        policy.chunk_stats = torch.compile(chunk_stats, dynamic=True)
    if cfg.device == "cpu" and WORLD == 1:
        return
    options = {"mesh": dist.init_device_mesh(cfg.device, (WORLD,)),
               "reshard_after_forward": is_reference or WORLD > 1,
               "mp_policy": MixedPrecisionPolicy(policy.compute_dtype, reduce_dtype=torch.float32)}
    if is_reference and cfg.ref_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    weights = [weight for layer in layers for weight in layer.parameters()]
    if len(weights) > len(set(weights)):
        layers = ()  # they share weights, as in Zamba: one shard for all
    for module in (*layers, policy):
        fully_shard(module, **options)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_weights(policy):
    """-> (name, tensor) of the whole model, LoRA merged"""
    weights = policy.model.state_dict()
    for name in [name for name in weights if ".lora_" not in name]:
        weight = full(weights[name])
        layer, _, suffix = name.partition(".base_layer")
        if suffix == ".weight":
            a, b = (full(weights[f"{layer}.lora_{x}.default.weight"]) for x in "AB")
            change = (b @ a).T if policy.model.get_submodule(layer).fan_in_fan_out else b @ a
            weight = weight.float() + 2 * change  # lora_alpha / rank is 2
        yield layer + suffix, weight


class Policy(torch.nn.Module):
    """Rows -> statistics of their targets. Sharded weights are whole only in forward()."""

    def __init__(self, model, stop_ids=()):
        super().__init__()
        self.model, self.device = model, model.device
        self.stop_ids = stop_ids  # for the sampler
        self.chunk_stats = chunk_stats  # or compiled
        self.compute_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def layout(self):
        return pack if self.model.config._attn_implementation == "packed" else pad

    def forward(self, rows, temperature=1.0, ref_hidden=None, ref_head=None, only_hidden=False):
        """rows: from layout() -> token_stats of the M targets. The logits never exist whole."""
        inputs, predictors, targets = rows
        # Without the output layer; base_model of Llama 4 would have it.
        body = getattr(self.model, "model", self.model.base_model)
        hidden = body(**inputs, use_cache=False).last_hidden_state  # [B, L, H]
        hidden = hidden.flatten(0, 1).index_select(0, predictors)  # [M, H]
        if only_hidden:
            return hidden
        head, chunks = Head.of(self.model, self.device), []
        size = max(1, LOGITS_PER_CHUNK // len(head.weight))
        for start in range(0, max(1, len(hidden)), size):
            part = slice(start, start + size)
            ref_part = None if ref_hidden is None else ref_hidden[part]
            chunks.append(recompute_in_backward(
                self.chunk_stats, hidden[part], targets[part], head, temperature, ref_part,
                ref_head, use_reentrant=False))
        return [torch.cat(pieces) for pieces in zip(*chunks)]


LIMIT = 20.0  # largest log-ratio, and logged k3
LOGITS_PER_CHUNK = 2**28  # 1 GiB of float32


class Head(NamedTuple):
    """An output layer"""
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor  # [V], or None
    scale: float  # Cohere, Granite, Falcon-H1
    cap: float  # Gemma, nanochat; 0: none

    @classmethod
    def of(cls, model, device):
        """Whole, on this device: that of a reference may be sharded, or in host memory."""
        config, layer = model.config, model.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1.0  # None: MPT
        scale *= getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
        scale /= getattr(config, "logits_mup_width_multiplier", 1.0)  # Inkling
        cap = (getattr(config, "final_logit_softcapping", None)
               or getattr(config, "logits_soft_cap", 0.0))  # RecurrentGemma
        bias = getattr(layer, "bias", None)
        if bias is not None:
            bias = full(bias.to(device))
        return cls(full(layer.weight.to(device)), bias, scale, cap)

    def logits(self, hidden):
        logits = upcast(F.linear(hidden, self.weight, self.bias)) * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def chunk_stats(hidden, targets, head, temperature, ref_hidden=None, ref_head=None):
    ref_logits = None if ref_hidden is None else ref_head.logits(ref_hidden) / temperature
    return token_stats(head.logits(hidden) / temperature, targets, ref_logits)


def token_stats(logits, targets, ref_logits=None):
    """float32 logits [M, V] -> log-probs of the targets, entropy; with a reference also its
    log-probs, exact KL: each [M]. Tokens with logit -inf add 0."""
    norm = logits.logsumexp(-1, keepdim=True)
    log_probs = (logits.gather(-1, targets[:, None]) - norm)[:, 0]
    with torch.no_grad():
        probs = logits.softmax(-1)
        entropy = norm[:, 0] - torch.where(probs > 0, probs * logits, 0).sum(-1)
    if ref_logits is None:
        return log_probs, entropy
    log_pi, log_ref = logits - norm, ref_logits.log_softmax(-1)
    log_ratio = torch.where(probs > 0, log_pi - log_ref, 0).detach().clamp(-LIMIT, LIMIT)
    # Detached: its gradient would only add E[grad log pi], which is 0.
    exact_kl = (log_pi.exp() * log_ratio).sum(-1)
    return log_probs, entropy, log_ref.gather(-1, targets[:, None])[:, 0], exact_kl


def upcast(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def response_stats(model, input_ids, labels, mask, temperature=1.0, ref_model=None):
    """token_stats of the tokens in the mask: each [B, T], 0 elsewhere"""
    if isinstance(model, Policy):
        rows = model.layout(input_ids, labels, mask, model.device)
        ref_hidden = ref_head = None
        if ref_model is not None:
            with torch.no_grad(), adapters_off(ref_model):
                ref_hidden = ref_model(rows, only_hidden=True)
                ref_head = Head.of(ref_model.model, model.device)
        stats = model(rows, temperature, ref_hidden, ref_head)
    else:
        ref_logits = None
        if ref_model is not None:
            ref_logits = upcast(ref_model(input_ids).logits[mask].detach()) / temperature
        logits = upcast(model(input_ids).logits[mask]) / temperature
        stats = token_stats(logits, labels[mask], ref_logits)
    mask = to_device(mask, stats[0].device)
    return [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in stats]


def get_response_log_probs(model, input_ids, labels, *, response_mask=None, temperature=1.0):
    """log pi(labels[b, t] | input_ids[b, :t + 1]) -> [B, T], 0 outside the mask"""
    mask = labels >= 0
    if response_mask is not None:
        mask = mask & response_mask.bool()
    return response_stats(model, input_ids, labels, mask, temperature)[0]


def to_device(tensor, device):
    """From pinned memory: the copy does not wait for the GPU."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(input_ids, labels, mask, device):
    """Lay rows end to end; a prompt shared by neighbours only once. -> (model inputs,
    predictors [M]: slot before each target, targets [M]: response tokens)"""
    ids = []  # [N], all tokens
    positions = []  # [N], of each token in its row
    predictors = []  # [M]
    key_slots = []  # [K], of each row's tokens, the shared prompt included
    n_keys = []  # [R], tokens of each row
    n_queries = []  # [R], without the shared prompt
    prompt = None
    for row, is_target in zip(input_ids.tolist(), mask.cpu().numpy()):
        places = np.flatnonzero(is_target)
        if len(places) == 0:
            continue
        prompt_length, end = places[0] + 1, places[-1] + 1
        if row[:prompt_length] != prompt:
            prompt, shared = row[:prompt_length], []
        begin = len(shared)
        slots = [*shared, *range(len(ids), len(ids) + end - begin)]
        shared = slots[:prompt_length]
        predictors += [slots[place] for place in places]
        if begin < end:  # otherwise the shared prompt predicts the only target
            ids += row[begin:end]
            positions += range(begin, end)
            key_slots += slots
            n_keys.append(end)
            n_queries.append(end - begin)
    if not ids:
        # Every rank must run the model: without rows, on a dummy token.
        ids, positions, key_slots, n_keys, n_queries = [0], [0], [0], [1], [1]
    numbers = {"input_ids": [ids], "position_ids": [positions], "key_slots": key_slots,
               "key_starts": np.cumsum([0, *n_keys]), "query_starts": np.cumsum([0, *n_queries]),
               "predictors": predictors}
    inputs = {name: to_device(torch.tensor(values, dtype=torch.int32), device)
              for name, values in numbers.items()}
    predictors = inputs.pop("predictors")
    return inputs | {"longest": int(max(n_keys))}, predictors, to_device(labels[mask], device)


def pad(input_ids, labels, mask, device):
    """Rows with targets, cut to the longest: as every layer is causal, no mask is needed.
    -> as pack()"""
    is_used, columns = mask.any(1), mask.any(0).nonzero()
    if len(columns):
        ids = input_ids[is_used, :columns.max() + 1]
    else:
        ids = torch.zeros(1, 2, dtype=torch.long)  # as in pack(); with one token RWKV stops short
    predictors = mask[is_used, :ids.shape[1]].flatten().nonzero()[:, 0]
    ids, predictors, targets = (to_device(x, device) for x in (ids, predictors, labels[mask]))
    return {"input_ids": ids}, predictors, targets


# torch 2.11 has no enable_gqa argument, and needs none.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__code__.co_varnames else {}
PLAIN_OPTIONS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions"}


def packed_attention(module, query, key, value, attention_mask, *, key_slots, query_starts,
                     key_starts, longest, scaling=None, sliding_window=None, **options):
    """Causal attention; the queries of a row are its last tokens. query: [1, heads, N, d]"""
    given = {name for name, option in options.items() if option is not None}
    is_plain = given <= PLAIN_OPTIONS and attention_mask is None
    if not (is_plain and query.shape[-1] == value.shape[-1] <= 256):
        raise NotImplementedError("choose_layout() then pads")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, d]
    if q.is_cuda and q.dtype == torch.bfloat16:
        window = (sliding_window or 0) - 1  # tokens before; -1: all
        out = varlen_attn(q, k[key_slots], v[key_slots], query_starts, key_starts, longest, longest,
                          scale=scaling, window_size=(window, 0), **GROUPED_HEADS)
        return out[None], None
    # No flash attention: whole rows, padded at the end
    n_keys, n_queries = key_starts.diff()[:, None], query_starts.diff()[:, None]  # [R, 1]
    place = torch.arange(longest, device=q.device)  # [L]
    is_key = place < n_keys  # [R, L]
    is_query = is_key & (place >= n_keys - n_queries)  # [R, L]
    slots = key_slots.new_zeros(is_key.shape).masked_scatter(is_key, key_slots)
    q, k, v = (x[slots].transpose(1, 2) for x in (q, k, v))  # [R, heads, L, d]
    distance = place[:, None] - place  # [L, L]
    sees = (distance >= 0) & (distance < (sliding_window or math.inf))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[is_query][None], None


AttentionInterface.register("packed", packed_attention)


# ---- 3. Sampler: vLLM in this process, or plain torch; turns

class Response(NamedTuple):
    ids: list  # the end token included
    logps: list = ()  # the sampler's log-prob of each
    mask: list = None  # which tokens the model chose; None: all
    finished: bool = True  # False: cut off at max_tokens or max_turns
    problem: dict = None  # a copy for this response, with its turns


def context_of(config):
    """-> tokens that a prompt and its response may have"""
    context = getattr(config, "max_position_embeddings", 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this, one long row changes all others
        return rope.get("original_max_position_embeddings", context)
    return context


def init_vllm(policy, cfg):
    """-> vLLM with the policy's weights; TorchSampler if vLLM is not installed or not wanted"""
    context = context_of(policy.model.config)
    if cfg.max_prompt_tokens + cfg.max_tokens > context:
        raise UserError(f"max_prompt_tokens + max_tokens exceed the context of {context}")
    if cfg.use_vllm:
        print("starting vLLM ...")
        vllm = None
        try:
            # Ranks start it together. Not "vllm", which imports LLM later.
            vllm = on_all_ranks(importlib.import_module, "vllm.entrypoints.llm")
            llm = start_vllm(vllm.LLM, policy, cfg)
            load_policy_into_vllm_instance(policy, llm)
            params = init_sampling_params(cfg, 1, []) | {"max_tokens": 1, "min_tokens": 0}
            rollout_with_vllm(llm, [[0]], params, 0, 0)  # does it work?
            gc.freeze()  # collecting vLLM's objects is slow
            return llm
        except Exception as error:
            failure = " ".join(repr(error).split())[:400]
            is_missing = vllm is None or type(error) in (ImportError, OSError)
            if not is_missing and "'_C'" not in failure:  # _C: built for another torch
                raise RunFailed(f"vLLM cannot run {type(policy.model).__name__} here: {failure}. "
                                "Set --use_vllm=False, or change gpu_mem_util if it is about "
                                "memory") from error
            print(f"!!! vLLM cannot be used here, torch samples: {failure:.150}")
    cfg.vllm_sleep = False
    return TorchSampler(policy)


def start_vllm(llm_class, policy, cfg):
    length = cfg.max_prompt_tokens + cfg.max_tokens
    if cfg.device == "cuda":
        options = {"dtype": "bfloat16", "gpu_memory_utilization": cfg.gpu_mem_util,
                   "enable_sleep_mode": cfg.vllm_sleep,
                   # Starts in seconds, as fast as compiled
                   "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    else:
        # Chunked prefill breaks seeds on a CPU. Without it a prompt must fit into a batch, and only
        # attention can have a prefix cache.
        options = {"dtype": "float32", "kv_cache_memory_bytes": 2**30, "enforce_eager": True,
                   "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, length),
                   "enable_prefix_caching": policy.layout is pack}
    model_class = type(policy.model.base_model)
    init = model_class.__init__
    with tempfile.TemporaryDirectory() as folder:
        policy.model.config.architectures = [type(policy.model).__name__]
        policy.model.config.save_pretrained(folder)
        # CUDA graphs end at 512 sequences.
        llm = llm_class(folder, **options, load_format="dummy", skip_tokenizer_init=True,
                        max_model_len=length, logprobs_mode="processed_logprobs",
                        max_num_seqs=min(512, max(64, cfg.rollout_batch_size // WORLD)))
    # Undo vLLM's patches of the policy's class.
    model_class.__init__, model_class.__call__ = init, torch.nn.Module.__call__
    return llm


@torch.no_grad()
def load_policy_into_vllm_instance(policy, llm):
    """Copy the weights; drop what vLLM cached with the old ones."""
    if isinstance(llm, TorchSampler):
        llm.model.load_state_dict(dict(full_weights(policy)))
        return
    # vLLM knows the names of checkpoints, where for example each expert is apart. It wants a tied
    # output layer, too, but Gemma 2 has none there.
    has_head = llm.apply_model(lambda model: hasattr(model, "lm_head"))[0]
    weights = (item for name, weight in full_weights(policy) if has_head or name != "lm_head.weight"
               for item in revert_weight_conversion(policy.model, {name: weight}).items())
    if policy.device.type == "cuda":
        llm.apply_model(lambda model: bool(model.load_weights(weights)))
    else:  # the CPU backend repacks its weights
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if not llm.reset_prefix_cache():
        raise RunFailed("vLLM kept its prefix cache")


def check_agreement(metrics, details, cfg, step):
    """Sampler and trainer must agree; reference and policy before any update."""
    max_gap, max_kl = 2e-3, 1e-6
    if cfg.device == "cuda":  # bf16
        max_gap, max_kl = 0.1 if step == 1 else 0.3, 2e-3
    gap = metrics.get("rollout/logp_gap_mean", 0.0)
    if gap > max_gap:
        hint = " (--use_vllm=False)" if cfg.use_vllm else ""
        raise RunFailed(f"the sampler's log-probs are off by {gap:.3g}: the weights did not arrive,"
                        f" or it computes this model differently{hint}")
    kl = details[0]["kl_mean"] if step == 1 else 0.0
    if kl > max_kl:
        raise RunFailed(f"KL {kl:.3g} before any update: temperature, labels or weights differ")


def init_sampling_params(cfg, n, stop_ids):
    """-> arguments of vllm.SamplingParams. logprobs=0: of the sampled token only"""
    return {"n": n, "temperature": cfg.temperature, "min_tokens": cfg.min_tokens,
            "max_tokens": cfg.max_tokens, "stop_token_ids": stop_ids, "logprobs": 0,
            "flat_logprobs": True, "detokenize": False,
            "ignore_eos": True}  # stop_ids has all that end a response


def collect(llm, task, params, cfg, state, seconds):
    """Sample and grade this rank's share of a step -> problem, Response, text, reward of each"""
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    indices, first = share(range(state.next_problem, state.next_problem + n_prompts))
    problems = [task.problem(index) for index in indices]
    started = now()
    responses = on_all_ranks(roll_out, llm, task, problems, params, cfg.seed, state.step + 1, first)
    sampled = now()
    texts, rewards = on_all_ranks(grade, responses, reward_fn, cfg.reward_truncated, params["n"])
    seconds |= {"rollout": sampled - started, "reward": now() - sampled}
    state.next_problem += n_prompts  # last: after an error the step is repeated
    return repeat(problems, cfg.group_size), responses, texts, torch.tensor(rewards)


def repeat(items, n):
    return [item for item in items for _ in range(n)]


def grade(responses, reward_fn, reward_truncated, group_size):
    """-> (what the model said in each response, rewards)"""
    texts, problems, cut_off = [], [], []
    for response in responses:
        turns = response.problem["turns"]
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        texts.append("\n".join(said))
        problems.append(response.problem)
        cut_off.append(not (response.finished or reward_truncated))
    rewards = [checked_reward(reward_fn, *item) for item in zip(texts, problems, cut_off)]
    # Cut off: 0, or the lowest of the group. Among negative rewards 0 would be a refuge.
    lowest = np.reshape(rewards, (-1, group_size)).min(1).repeat(group_size)
    return texts, np.where(cut_off, lowest, rewards).tolist()


def roll_out(llm, task, problems, params, seed, step, first=0):
    """-> n Responses to each problem, in turns if there is a reply()"""
    prompts, n = [problem["prompt_ids"] for problem in problems], params["n"]
    games = [Game(problem, task, params) for problem in repeat(problems, n)]
    active = dict(enumerate(games, first * n))
    params = params | {"stop_token_ids": params["stop_token_ids"] + task.turn_end_ids}
    parts = rollout_with_vllm(llm, prompts, params, seed, step, first)
    for turn in itertools.count(2):
        pool = ThreadPoolExecutor(32)  # a reply may take time
        try:
            list(pool.map(Game.play, active.values(), parts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a second Ctrl-C does not wait for it
        active = {i: game for i, game in active.items() if not game.is_over()}
        if not active:
            return [Response(x.ids, x.logps, x.mask, x.finished, x.problem) for x in games]
        params |= {"n": 1, "min_tokens": 0, "max_tokens": max(x.room for x in active.values())}
        prompts = [game.prompt_ids + game.ids for game in active.values()]
        names = [f"{i}/{turn}" for i in active]
        parts = rollout_with_vllm(llm, prompts, params, seed, step, names=names)


class Game:
    """A response: turns of the model, and between them what reply() says"""

    def __init__(self, problem, task, params):
        self.task, self.stop_ids, self.room = task, params["stop_token_ids"], params["max_tokens"]
        self.prompt_ids = problem["prompt_ids"]
        # A copy that reward_fn and reply() may change; deepcopy is slow for long lists.
        self.problem = copy.deepcopy(problem | {"prompt_ids": None, "turns": []})
        self.problem["prompt_ids"] = list(self.prompt_ids)
        self.ids, self.logps, self.mask, self.turn_start, self.n_turns = [], [], [], 0, 0
        self.finished = False

    def is_over(self):
        return self.finished or self.room == 0 or self.n_turns == self.task.cfg.max_turns

    def extend(self, ids, logps, is_chosen):
        ids = ids[:self.room]
        self.ids += ids
        self.logps += logps[:len(ids)]
        self.mask += [is_chosen] * len(ids)
        self.room -= len(ids)

    def play(self, part):
        """Add what the model wrote; if that ends its turn, what reply() says."""
        turns, tokenizer = self.problem["turns"], self.task.tokenizer
        self.extend(part.ids, list(part.logps), True)
        text = decode(tokenizer, self.ids[self.turn_start:], self.stop_ids)
        is_message = self.ids[-1] in self.stop_ids
        has_ended = is_message or any(end in text for end in TURN_ENDS)
        if has_ended or self.room == 0:
            turns.append({"role": "assistant", "content": text})
        if not has_ended:
            return
        said = None
        if reply:
            with errors_shown("reply", text):
                said = reply(self.problem, text)
                if said is not None:
                    said.encode()  # raises if it is no text that tokenizers can read
        self.finished = said is None
        self.n_turns += 1
        if self.is_over():
            return
        rendered = said
        if is_message:
            rendered, end = render_reply(said, tokenizer), tokenizer.decode(self.ids[-1:])
            if rendered.lstrip().startswith(end):  # it is there already
                rendered = rendered.lstrip().removeprefix(end)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        self.extend(ids, [0.0] * len(ids), False)
        self.turn_start = len(self.ids)
        if self.room:  # so the last turn is always the model's
            turns.append({"role": "environment", "content": said})


def rollout_with_vllm(llm, prompts, params, seed, step, first=0, names=None):
    """-> n Responses to each prompt, in one turn. A prompt's seed is made of its name, by default
    its number, counted from `first`; its i-th response gets seed + i."""
    if not prompts:
        return []
    names = names or range(first, first + len(prompts))
    seeds = [random.Random(f"{seed}/{step}/{name}").getrandbits(48) for name in names]
    if isinstance(llm, TorchSampler):
        return llm.generate(prompts, params, seeds)
    from vllm import SamplingParams
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts],
                           [SamplingParams(**params, seed=seed) for seed in seeds], use_tqdm=False)
    return [Response(list(x.token_ids), x.logprobs.logprobs, None, x.finish_reason == "stop")
            for output in outputs for x in output.outputs]


CACHE_LIMIT = 2**17  # tokens in a batch


class TorchSampler:
    """A copy of the model with a cache, for where there is no vLLM"""

    def __init__(self, policy):
        config = copy.deepcopy(policy.model.config)
        attention = "sdpa" if policy.layout is pack else config._attn_implementation
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=policy.compute_dtype)
        self.model.to(policy.device).eval()
        self.is_mamba = "cache_params" in self.model.forward.__code__.co_varnames
        for weight in [w for w in self.model.parameters() if w.dim() == 2]:
            weight.data = weight.data.T.contiguous().T  # by columns: faster on a CPU
        load_policy_into_vllm_instance(policy, self)

    @torch.no_grad()
    def generate(self, prompts, params, seeds):
        n, limit, stop_ids = params["n"], params["max_tokens"], params["stop_token_ids"]
        width, half, device = max(map(len, prompts)), len(prompts) // 2, self.model.device
        context = context_of(self.model.config)
        if half and len(prompts) * n * (width + limit) > CACHE_LIMIT:
            return (self.generate(prompts[:half], params, seeds[:half])
                    + self.generate(prompts[half:], params, seeds[half:]))
        draws = [np.random.default_rng(seed + i).random(limit) for seed in seeds for i in range(n)]
        uniform = torch.tensor(np.array(draws), device=device)  # [P * n, limit]
        ids = torch.tensor([[-1] * (width - len(p)) + p for p in prompts], device=device)  # [P, W]
        mask, ids = (ids >= 0).long(), ids.clamp(min=0)
        tokens, logps, cache = [], [], DynamicCache(config=self.model.config)
        caches = {"cache_params" if self.is_mamba else "past_key_values": cache}
        is_done = torch.tensor(False, device=device)
        while len(tokens) < limit and not is_done.all():
            new = slice(-ids.shape[1], None)
            # A game may run past the context, as all have one max_tokens here. It is cut later.
            positions = (mask.cumsum(1) - 1).clamp(0, context - 1)[:, new]
            seen = mask[:, new] if self.is_mamba else mask  # Mamba's is of the new tokens only
            logits = self.model(ids, attention_mask=seen, position_ids=positions, use_cache=True,
                                logits_to_keep=1, **caches).logits[:, -1].float()
            if not tokens:  # a prompt is read once
                copies = torch.arange(len(ids), device=device).repeat_interleave(n)
                cache.reorder_cache(copies)
                logits, mask = logits[copies], mask[copies]
            if len(tokens) < params["min_tokens"]:
                logits[:, stop_ids] = -torch.inf
            log_probs = (logits / max(params["temperature"], 1e-6)).log_softmax(-1)  # 0: greedy
            cdf = log_probs.double().exp().cumsum(-1)
            threshold = uniform[:, len(tokens), None] * cdf[:, -1:]  # [P * n, 1]
            ids = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[1] - 1)
            tokens.append(ids)
            logps.append(log_probs.gather(1, ids))
            mask = F.pad(mask, (0, 1), value=1)
            is_done = is_done | torch.isin(ids, torch.tensor(stop_ids, device=device))
        responses = []
        for row, logp in zip(torch.cat(tokens, 1).tolist(), torch.cat(logps, 1).tolist()):
            end = next((i for i, token in enumerate(row, 1) if token in stop_ids), len(row))
            responses.append(Response(row[:end], logp[:end], None, row[end - 1] in stop_ids))
        return responses


# ---- 4. Batch, advantages, KL, loss, update

def group_advantages(rewards, group_size, normalize_by_std, eps=1e-6):
    """-> [N]: (reward - mean) / standard deviation within each group of neighbours"""
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_by_std and len(groups):  # torch warns about the deviation of nothing
        advantages /= groups.std(1, keepdim=True) + eps
    # Equal rewards: exactly 0, without rounding errors
    is_flat = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(is_flat, 0.0, advantages).flatten()


def compute_group_normalized_advantages(rollout_responses, repeated_ground_truths, reward_fn,
                                        group_size, advantage_eps, normalize_by_std):
    """-> (advantages [N], rewards [N], metadata). train() does not call this."""
    if group_size < 2 or len(rollout_responses) % group_size:
        raise UserError(f"group_size={group_size}: at least 2, a divisor of the responses")
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([checked_reward(reward_fn, *pair) for pair in pairs])
    advantages = group_advantages(rewards, group_size, normalize_by_std, advantage_eps)
    metadata = {key: getattr(rewards, key)().item() for key in ("mean", "std", "max", "min")
                if len(rewards)}
    return advantages, rewards, metadata


def make_batch(prompts, responses, min_tokens=0):
    """-> [B, T] tensors in host memory, padded on the right. Labels are the next input_ids."""
    lengths = [len(p) + len(r.ids) for p, r in zip(prompts, responses, strict=True)]
    # In numpy, which reads lists faster
    tokens = np.zeros((len(prompts), max(lengths, default=2)), np.int64)
    mask = np.zeros(tokens.shape, bool)  # tokens that the model chose
    sampled = np.zeros(tokens.shape, np.float32)  # the sampler's log-probs
    is_known = np.zeros(tokens.shape, bool)
    for b, (prompt, response, end) in enumerate(zip(prompts, responses, lengths)):
        start = len(prompt)
        tokens[b, :end] = prompt + response.ids
        mask[b, start:end] = True if response.mask is None else response.mask
        if len(response.logps):
            sampled[b, start:end] = response.logps
            # EOS is banned before min_tokens: the log-probs there are not the policy's.
            is_known[b, start + min_tokens:end] = True
    tokens, mask, sampled, is_known = map(torch.from_numpy, (tokens, mask, sampled, is_known))
    return SimpleNamespace(
        input_ids=tokens[:, :-1], labels=tokens[:, 1:], response_mask=mask[:, 1:],
        rollout_log_probs=sampled[:, 1:], rollout_mask=is_known[:, 1:], prompts=prompts,
        lengths=lengths)


def select(batch, rows):
    """-> {name: tensor} for grpo_microbatch_step"""
    return {name: value[rows] for name, value in vars(batch).items() if torch.is_tensor(value)}


def make_minibatches(cfg, step, n_rows):
    """This rank's rows of each optimizer step"""
    counts = gather(n_rows)
    first = sum(counts[:RANK])  # rows on lower ranks
    for epoch in range(cfg.inner_epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(sum(counts))
        for rows in np.array_split(order - first, cfg.n_minibatches):
            yield sorted(rows[(0 <= rows) & (rows < n_rows)].tolist())


def make_microbatches(batch, rows, cfg, layout):
    """-> lists of rows, at most about tokens_per_microbatch each; equally many on all ranks"""
    split = split_padded if layout is pad else split_packed
    parts = split(batch, rows, cfg.tokens_per_microbatch, cfg.gradient_accumulation_steps)
    return parts + [[]] * (max(gather(len(parts))) - len(parts))


def split_packed(batch, rows, limit, n_least):
    """Neighbouring rows, similar in tokens"""
    sizes = [batch.lengths[row] for row in rows]
    for i in range(1, len(rows)):
        if batch.prompts[rows[i]] == batch.prompts[rows[i - 1]]:  # counted once
            sizes[i] -= len(batch.prompts[rows[i]])
    total, parts = sum(sizes), {}
    n_parts = max(math.ceil(total / limit), n_least)
    for row, size, end in zip(rows, sizes, np.cumsum(sizes)):
        part = int((end - size / 2) / total * n_parts)  # by the middle of the row
        parts.setdefault(part, []).append(row)
    return [*parts.values()]


def split_padded(batch, rows, limit, n_least):
    """Longest first; a part is padded to its first row."""
    rows, parts = sorted(rows, key=lambda row: -batch.lengths[row]), []
    while rows:
        n_most = math.ceil(len(rows) / max(1, n_least - len(parts)))
        n = min(n_most, max(1, limit // batch.lengths[rows[0]]))
        parts.append(rows[:n])
        rows = rows[n:]
    return parts


@torch.no_grad()
def score(model, batch, rows, cfg):
    """-> log-probs [B, T] of these rows, 0 in the others"""
    log_probs = torch.zeros(batch.labels.shape, device=model.device)
    for micro_rows in make_microbatches(batch, rows, cfg, model.layout):
        inputs = (x[micro_rows] for x in (batch.input_ids, batch.labels, batch.response_mask))
        log_probs[micro_rows] = response_stats(model, *inputs, cfg.temperature)[0]
    return log_probs


def grpo_microbatch_step(
        policy, input_ids, labels, response_mask, advantages_per_seq, gradient_accumulation_steps,
        clip_range, loss_type="grpo", max_completion_length=256, ref_model=None, kl_coef=0.0, *,
        old_log_probs=None, ref_log_probs=None, divisor=None, temperature=1.0, kl_estimator="k3",
        **loss_options):
    """Forward, loss, backward -> (part of the step's loss, metadata). divisor: of the step; by
    default that of this part * gradient_accumulation_steps. loss_options: of compute_loss"""
    mask = response_mask.bool() & (labels >= 0)
    if divisor is None:
        divisor = loss_divisor(mask, loss_type, max_completion_length) * gradient_accumulation_steps
    needs_reference = kl_coef and (ref_log_probs is None or kl_estimator == "exact")
    log_probs, entropy, *ref_stats = response_stats(
        policy, input_ids, labels, mask, temperature, ref_model if needs_reference else None)
    ref_log_probs, exact_kl = ref_stats or (ref_log_probs, None)
    mask = to_device(mask, log_probs.device)
    loss, metadata = compute_loss(
        advantages_per_seq, log_probs, old_log_probs, clip_range, ref_log_probs, kl_coef,
        response_mask=mask, kl_estimator=kl_estimator, exact_kl=exact_kl, **loss_options)
    if loss_type == "grpo":
        loss = loss / mask.sum(-1, keepdim=True).clamp(min=1)
    loss = loss.sum() / max(divisor, 1e-9)
    # Read before backward(): it waits for the forward pass only.
    metadata["loss"] = loss.item()
    metadata["entropy"] = entropy.sum().item() / max(1, metadata["n_tokens"])
    loss.backward()
    return loss.detach(), metadata


WEIGHT_CAP = 10.0  # of the importance weight pi/old of a KL term
MISMATCH_CAP = 2.0  # of the importance weight old/sampler of a token


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, *, response_mask=None, kl_estimator="k3", kl_importance_weight=True,
                 kl_in="loss", clip_range_high=None, rollout_log_probs=None, rollout_mask=None,
                 exact_kl=None):
    """PPO's clipped loss + kl_coef * KL -> (loss [B, T], metadata). advantages: [B] or [B, T]"""
    if response_mask is None:
        response_mask = torch.ones_like(policy_log_probs)
    if old_log_probs is None:  # the first update: the ratio is 1
        old_log_probs = policy_log_probs
    mask = response_mask.bool()
    log_pi, log_old = masked(policy_log_probs, mask), masked(old_log_probs, mask).detach()
    advantages = masked(advantages[:, None] if advantages.dim() == 1 else advantages, mask)
    log_ratio = log_pi - log_old
    # exp() must not overflow, and a NaN must reach the gradient; clamp() would stop it.
    log_ratio = torch.where(log_ratio > LIMIT, LIMIT, log_ratio)
    ratio = log_ratio.exp()
    weight = ratio.detach().clamp(max=WEIGHT_CAP)
    stats = {"approx_kl": torch.expm1(log_ratio) - log_ratio, "ratio_mean": ratio,
             "ratio_max": ratio}

    kl = 0.0
    if kl_coef and ref_log_probs is not None:
        log_ref = masked(ref_log_probs, mask)
        # The KL that is logged: k3 weighted by pi/old, both capped so that no token dominates.
        kl_seen = weight * compute_kl_divergence(log_pi, log_ref, "k3").clamp(max=LIMIT)
        if kl_in != "loss":
            if (kl_in, kl_estimator) != ("reward", "k1"):
                raise UserError("kl_in: loss, or reward with kl_estimator=k1")
            # A token pays for its own k1 and that of all tokens after it, under the policy of now.
            kl = compute_kl_divergence(log_pi, log_ref, "k1").detach()
            advantages = advantages - kl_coef * kl.flip(1).cumsum(1).flip(1)
        elif kl_estimator == "exact" and exact_kl is not None:
            kl = kl_seen = masked(exact_kl, mask)
        elif kl_importance_weight:
            kl = weight * compute_kl_divergence(log_pi, log_ref, kl_estimator, is_weighted=True)
        else:
            kl = compute_kl_divergence(log_pi, log_ref, kl_estimator)
        stats |= {"kl_penalty_mean": kl, "kl_mean": kl_seen, "kl_max": kl_seen, "kl_min": kl_seen,
                  "policy_logp_mean": log_pi, "ref_logp_mean": log_ref.clamp(min=-1e4)}

    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range_high or clip_range)) * advantages
    stats["clip_fraction"] = clipped < plain
    loss = -torch.minimum(plain, clipped)
    if kl_in == "loss":
        loss = loss + kl_coef * kl
    if rollout_log_probs is not None:
        gap = log_old - masked(rollout_log_probs, mask).detach()
        if rollout_mask is not None:
            gap = torch.where(to_device(rollout_mask, gap.device), gap, 0)
        # Truncated importance sampling: the tokens came from the sampler, not from `old`.
        loss = loss * gap.exp().clamp(max=MISMATCH_CAP)
        stats["logp_gap_mean"] = stats["logp_gap_max"] = gap.abs()
    return torch.where(mask, loss, 0), summarize(stats, mask)


def masked(tensor, mask):
    """0 outside the mask. For inputs: a NaN there must not reach a gradient."""
    return torch.where(mask, upcast(to_device(tensor, mask.device)), 0)


ESTIMATORS = ("k1", "k2", "k3", "exact")


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1", is_weighted=False):
    """Per sampled token, where l = log pi - log ref, within +-LIMIT. is_weighted: the caller
    multiplies by rho = pi/old, detached. The slope then includes that of rho: d rho = rho dlog pi.

        estimator  value          slope     slope if weighted
        k1         l              1         l + 1
        k2         l^2 / 2        l         l (d rho left out)
        k3         e^-l - 1 + l   1 - e^-l  l
    """
    log_pi, log_ref = upcast(policy_log_probs), upcast(ref_log_probs)
    l = (log_pi - log_ref).detach().clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        value = l
        slope = l + 1 if is_weighted else torch.ones_like(l)
    elif estimator == "k2":
        value = l**2 / 2
        slope = l
    elif estimator == "k3":
        value = torch.expm1(-l) + l
        slope = l if is_weighted else -torch.expm1(-l)
    else:
        raise UserError(f"kl_estimator: one of {', '.join(ESTIMATORS)} (needs the reference model)")
    # Explicit: autograd would overflow, or be 0 beyond the clamp.
    return value + slope * (log_pi - log_pi.detach())


# Key in the metadata of a microbatch: (fold over its tokens, name in the log)
TOKEN_METRICS = {
    "entropy": ("mean", "train/entropy"), "clip_fraction": ("mean", "train/clip_fraction"),
    "approx_kl": ("mean", "train/approx_kl"), "kl_penalty_mean": ("mean", "train/kl_penalty"),
    "logp_gap_mean": ("mean", "rollout/logp_gap_mean"),
    "logp_gap_max": ("max", "rollout/logp_gap_max"),
    "kl_mean": ("mean", "kl/mean"), "kl_max": ("max", "kl/max"), "kl_min": ("min", "kl/min"),
    "policy_logp_mean": ("mean", "kl/policy_logp_mean"),
    "ref_logp_mean": ("mean", "kl/ref_logp_mean"),
    "ratio_mean": ("mean", None), "ratio_max": ("max", None)}


@torch.no_grad()
def summarize(stats, mask):
    """{name: [B, T]} -> {name: number over the mask}; 0 for those that are missing"""
    summary = dict.fromkeys(TOKEN_METRICS, 0.0)
    table = torch.stack([*stats.values()])[:, mask].double()  # [names, tokens]
    if table.numel():
        values = [getattr(row, TOKEN_METRICS[name][0])() for name, row in zip(stats, table)]
        summary |= zip(stats, torch.stack(values).tolist())
    summary["n_tokens"] = table.shape[1]
    return summary


def masked_mean(tensor, mask):
    """Mean over rows of their masked means, without empty rows. train() does not call this."""
    return masked_mean_drgrpo(tensor / mask.sum(-1, keepdim=True).clamp(min=1), mask, 1)


def masked_mean_drgrpo(tensor, mask, num_tokens):
    """Mean over rows of masked sum / num_tokens. Nor this."""
    return torch.where(mask.bool(), tensor, 0).sum() / num_tokens / mask.any(-1).sum().clamp(min=1)


def loss_divisor(mask, loss_type, max_tokens):
    """What the summed loss of a step is divided by"""
    n_rows = int(mask.any(-1).sum())
    divisors = {"grpo": n_rows, "dr_grpo": n_rows * max_tokens, "dapo": int(mask.sum())}
    if loss_type not in divisors:
        raise UserError(f"loss_type: one of {', '.join(divisors)}")
    return divisors[loss_type]


def update_weights(policy, optimizer, loss, cfg, state):
    """Step if loss and gradient are finite. -> gradient norm before clipping"""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or math.inf)
    norm = float(full(norm))
    warmup = min(1.0, state.step / max(1, cfg.warmup_steps))
    optimizer.param_groups[0]["lr"] = cfg.lr * warmup * state.lr_factor
    if not math.isfinite(norm + loss):
        print(f"!!! update skipped: loss {loss:g}, gradient norm {norm:g}; a tenth of lr for now")
        state.skipped += 1
        state.skips_in_a_row += 1
        state.lr_factor = 0.1  # doubles with every good update
        if state.skips_in_a_row == 5:
            raise RunFailed("5 updates in a row were not finite: lower lr")
    elif norm > 1e-8:  # without a gradient, momentum must not move the weights
        optimizer.step()
        state.lr_factor = min(1.0, 2 * state.lr_factor)
        state.skips_in_a_row = 0
    optimizer.zero_grad()  # frees the gradients: vLLM needs the room
    return norm


def adapt_kl_coef(state, kl, cfg):
    """Steer the KL to target_kl with 0.1 to 100 times kl_coef."""
    if not math.isfinite(kl):
        return
    state.kl_smooth = (state.kl_smooth + min(5 * cfg.target_kl, kl)) / 2  # of a spike only a part
    if state.kl_smooth > 1.5 * cfg.target_kl:
        state.kl_factor = min(1.5 * state.kl_factor, 100.0)
    elif state.kl_smooth < 0.5 * cfg.target_kl:
        state.kl_factor = max(0.75 * state.kl_factor, 0.1)


# ---- 5. Records: evaluation, metrics, log, checkpoints

def evaluate_model(llm, task, params, stop_ids, reward_fn=None):
    """-> (metrics, a dict per response) on held-out problems, with fixed seeds"""
    problems, first = share(task.held_out)
    params = params | {"stop_token_ids": stop_ids}
    responses = on_all_ranks(roll_out, llm, task, problems, params, 0, "eval", first)
    texts, rewards = on_all_ranks(grade, responses, reward_fn or globals()["reward_fn"],
                                  task.cfg.reward_truncated, params["n"])
    lowest = min(gather(min(rewards, default=0.0)))  # of all: a group may be one response
    rows = [{"prompt": problem["rendered"], "response": text, "turns": response.problem["turns"],
             "reward": reward if response.finished or task.cfg.reward_truncated else lowest,
             "answer": problem.get("answer") or problem["solution"], "tokens": len(response.ids),
             "cut_off": not response.finished}
            for problem, text, reward, response in zip(
                repeat(problems, params["n"]), texts, rewards, responses, strict=True)]
    rows = sum(gather(rows), [])
    rewards = np.array([row["reward"] for row in rows])
    accuracy = (rewards >= 0.9).mean()
    return {"eval/accuracy": accuracy, "eval/mean_reward": rewards.mean(),
            "eval/margin": 1.96 * (accuracy * (1 - accuracy) / len(task.held_out)) ** 0.5,
            "eval/avg_output_tokens": np.mean([row["tokens"] for row in rows]),
            "eval/truncated_frac": np.mean([row["cut_off"] for row in rows])}, rows


def evaluate_and_keep_best(policy, llm, task, params, log, state):
    """One response per problem -> metrics"""
    metrics, rows = evaluate_model(llm, task, params | {"n": 1}, policy.stop_ids, reward_fn)
    log_eval(log, state.step, metrics, rows[:4])
    reward = float(metrics["eval/mean_reward"])
    if state.step and reward > state.best_reward:
        save_model(policy, task.tokenizer, log.folder / "best")
    state.best_reward = max(reward, state.best_reward)
    return metrics


def now():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def step_metrics(details, rewards, responses, texts, seconds, group_size, kl_coef):
    """-> {name: number} over all ranks"""
    rows = [(reward, len(response.ids), final_answer(text) is not None, not response.finished)
            for reward, response, text in zip(rewards.tolist(), responses, texts)]
    rewards, lengths, answered, truncated = np.array(sum(gather(rows), [])).T
    spread = np.ptp(rewards.reshape(-1, group_size), axis=1)
    metrics = {
        "train/reward_mean": rewards.mean(), "train/reward_std": rewards.std(),
        "train/frac_groups_zero_std": (spread == 0).mean(), "train/answer_frac": answered.mean(),
        "train/truncated_frac": truncated.mean(), "train/avg_output_tokens": lengths.mean(),
        "perf/tokens_per_s": lengths.sum() / seconds["step"]}
    metrics |= {f"time/{phase}": duration for phase, duration in seconds.items()}
    details = [detail for detail in sum(gather(details), []) if detail["n_tokens"]]
    average = functools.partial(np.average, weights=[detail["n_tokens"] for detail in details])
    folds = {"mean": average, "max": max, "min": min}
    for key, (fold, name) in TOKEN_METRICS.items():
        if details and name and (kl_coef or not name.startswith("kl/")):
            metrics[name] = float(folds[fold]([detail[key] for detail in details]))
    return metrics


class Log:
    """A run's records, written by rank 0"""

    def __init__(self, folder, cfg, saved=None):
        self.folder, self.warned = Path(folder), set()
        if RANK:
            return
        for leftover in self.folder.rglob("*.[0-9]*.tmp"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
        with written_whole(self.folder / "config.json") as temporary:
            reward = getattr(reward_fn, "__qualname__", "")  # a partial() has none
            settings = vars(cfg) | {"script": started_script(), "reward_fn": reward}
            temporary.write_text(json.dumps(settings, indent=1, default=str))
        step = saved["state"]["step"] if saved else -1
        for name in ("samples.jsonl", "metrics.jsonl"):
            rows = [row for row in read_rows(self.folder / name) if row["step"] <= step]
            with written_whole(self.folder / name) as temporary:  # later steps are repeated
                temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.history = read_rows(self.folder / "metrics.jsonl")[1:]  # without step 0
        from torch.utils.tensorboard import SummaryWriter, summary
        events = self.folder.parent / "tb" / self.folder.name
        self.writer = SummaryWriter(events, purge_step=step + 1)
        settings = {name: value if isinstance(value, str | int | float) else str(value)
                    for name, value in vars(cfg).items()}
        self.writer.file_writer.add_summary(summary.hparams(settings, {})[1])

    def append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def write(self, step, metrics):
        if RANK:
            return
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.append("metrics.jsonl", {"step": step} | metrics)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self):
        if RANK == 0:
            self.writer.close()


def read_rows(path):
    """-> rows of metrics.jsonl or samples.jsonl, up to one that is damaged"""
    rows = []
    with contextlib.suppress(OSError, ValueError, TypeError):
        for line in open(path, "rb"):
            rows.append(dict(json.loads(line)))
    return [row for row in rows if "step" in row]


def report(folder, cfg):
    """The last lines of a run"""
    if RANK:
        return
    rows = read_rows(folder / "metrics.jsonl")
    first, *later = [row for row in rows if "eval/accuracy" in row] or [None]
    line, model = "", "model"
    if first:
        line = f"Held-out accuracy, sampled: {first['eval/accuracy']:.1%}"
    if later:
        last, best = later[-1], max(later, key=lambda row: row["eval/mean_reward"])
        line += f" -> {last['eval/accuracy']:.1%} at step {last['step']}"
        is_better = best["eval/accuracy"] > last["eval/accuracy"] + last["eval/margin"]
        if is_better and (folder / "best").exists():
            line += f", {best['eval/accuracy']:.1%} at step {best['step']}: use best/"
            model = "best"
    name = shlex.quote(str(folder))
    print(f"\n{line}\n  try it    python sample.py --model_id={name}/{model}\n"
          f"  curves    tensorboard --logdir {shlex.quote(str(folder.parent))}/tb")
    if rows and rows[-1]["step"] < cfg.n_grpo_steps and (folder / "checkpoint").exists():
        is_late = 0 < cfg.max_minutes < rows[-1].get("time/minutes", 0.0)
        flag = " --max_minutes=0" if is_late else ""
        print(f"  continue  python {shlex.quote(sys.argv[0])} --resume={name}{flag}")


def log_train(log, step, metrics, cfg):
    eta = min((cfg.n_grpo_steps - step) * metrics["time/step"] / 60,
              max(0.0, (cfg.max_minutes or math.inf) - metrics["time/minutes"]))
    line = ("Step {step} | Loss: {train/loss:.4f} | Grad norm: {train/grad_norm:.4f} | "
            "Reward mean: {train/reward_mean:.3f} | Entropy: {train/entropy:.3} | "
            "Tokens: {train/avg_output_tokens:.1f} | {perf/tokens_per_s:.0f} tok/s | rollout "
            "{time/rollout:.2f} train {time/train:.2f} sync {time/sync:.2f} s | ETA {eta:.1f} min")
    if "kl/mean" in metrics:
        line += " | KL: {kl/mean:.4f} | KL penalty: {train/kl_penalty:.4f}"
    print(line.format(**{"step": step, "eta": eta, "train/entropy": "-"} | metrics))
    if RANK:
        return
    log.history.append(metrics)
    cut_off = [row["train/truncated_frac"] for row in log.history]
    entropy = [row["train/entropy"] for row in log.history if "train/entropy" in row]
    alarms = {
        "KL above 0.2 (KL.md)": metrics.get("kl/mean", 0.0) > 0.2,
        "equal rewards in all groups: no gradient":
            metrics["train/frac_groups_zero_std"] == 1 and not metrics.get("train/kl_coef"),
        "most responses are cut off and earn 0: raise max_tokens (or max_turns), or set "
        "reward_truncated":
            cut_off[-1] > 0.5 and not cfg.reward_truncated,
        "cut-off responses have more than tripled: lower lr; best/, if there, is the best model":
            cut_off[-1] > max(0.1, 3 * min(cut_off)),
        "entropy is below a tenth of its start: lower lr; best/, if there, is the best model":
            entropy and entropy[-1] < entropy[0] / 10}
    for text, is_on in alarms.items():
        if is_on and text not in log.warned:
            log.warned.add(text)
            print(f"!!! {text}")


def log_eval(log, step, metrics, samples):
    line = "Held-out accuracy, sampled: {eval/accuracy:.1%} | Mean reward: {eval/mean_reward:.3f}"
    print(f"Step {step} | {line.format(**metrics)}")
    for i, sample in enumerate(samples if RANK == 0 else []):
        log.append("samples.jsonl", {"step": step} | sample)
        log.writer.add_text(f"sample {i}", f"<pre>{html.escape(show(sample))}</pre>", step)


def show(sample):
    """-> prompt, who said what, reward"""
    turns = [f"{turn['role']}> {turn['content']}" for turn in sample["turns"]]
    return "\n".join([sample["prompt"], *turns, f"reward {sample['reward']}, "
                      f"expected: {sample['answer']}"])


@contextlib.contextmanager
def written_whole(path):
    """A temporary path that becomes `path` at the end, never half written."""
    folder = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True)
        yield folder / "new"
        if path.is_dir():
            path.rename(folder / "old")
        (folder / "new").replace(path)
    except Exception as error:
        raise RunFailed(f"cannot write {path} ({error}). Is the disk full?") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_model(policy, tokenizer, folder):
    """For transformers and vLLM, LoRA merged"""
    config, dtype = copy.deepcopy(policy.model.config), policy.compute_dtype
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shell.generation_config = GenerationConfig(  # samples, and ends, as in training
        do_sample=True, top_k=0, eos_token_id=policy.stop_ids or None)
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    # All ranks go through the loop: full_weights() gathers.
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in full_weights(policy)
               if RANK == 0 and name != tied}
    if RANK == 0:
        with written_whole(folder) as temporary:
            shell.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)


WHOLE = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = dataclasses.replace(WHOLE, ignore_frozen_params=True, strict=False)


def save_checkpoint(folder, policy, optimizer, ref_model, state):
    """What a resumed run needs. The last two are kept."""
    saved = {"weights": state_dicts.get_model_state_dict(policy, options=TRAINED), "moments": None,
             "ref": None, "state": vars(state)}
    if optimizer.state:  # torch would fill an empty one by a step
        saved["moments"] = state_dicts.get_optimizer_state_dict(policy, optimizer, options=TRAINED)
    if state.ref_step and ref_model:
        saved["ref"] = state_dicts.get_model_state_dict(ref_model, options=WHOLE)
    if RANK == 0:
        newest = folder / f"checkpoint/step_{state.step:08d}.pt"
        with written_whole(newest) as path:
            torch.save(saved, path)
        paths = checkpoints(folder)
        kept = [path for path in paths if path <= newest][-2:]
        for path in set(paths) - set(kept):  # later ones could not be read
            path.unlink()


def checkpoints(folder):
    """-> paths, in the order of their steps"""
    return sorted(Path(folder).glob("checkpoint/step_[0-9]*.pt"))


@contextlib.contextmanager
def saved_if_it_fails(checkpoint_parts):
    """An error in reward_fn or reply(), raised on all ranks, loses no finished step."""
    try:
        yield
    except UserError:
        save_checkpoint(*checkpoint_parts)
        raise


def load_checkpoint(folder):
    """-> the newest intact checkpoint; None if nothing was saved. No code in it is run."""
    for path in reversed(checkpoints(folder)):
        try:
            if zipfile.ZipFile(path).testzip():
                raise ValueError("wrong checksum")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            print(f"resuming {folder} after step {saved['state']['step']}")
            return saved
        except Exception as error:
            print(f"!!! {path} is damaged ({error!s:.100})")
    if checkpoints(folder) or Path(folder, "model").exists():
        raise UserError(f"no intact checkpoint in {folder}: it cannot continue")
    print(f"no checkpoint in {folder}: starting at step 0")


def restore(saved, policy, optimizer, ref_model, state):
    state_dicts.set_model_state_dict(policy, saved["weights"], options=TRAINED)
    if saved["moments"]:
        state_dicts.set_optimizer_state_dict(policy, optimizer, saved["moments"], options=TRAINED)
    if saved["ref"] and ref_model:
        state_dicts.set_model_state_dict(ref_model, saved["ref"], options=WHOLE)
    vars(state).update(saved["state"])
    if state.ref_step and ref_model and not saved["ref"]:  # the penalty was off for a while
        print("!!! the refreshed reference is gone: the KL is that to the starting model")
        state.ref_step = 0
    saved.clear()


def catch_signals():
    """Ctrl-C and SIGTERM end the run after its step, a second Ctrl-C at once. -> those received"""
    received = []

    def handler(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again quits unsaved")

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    # A child of reward_fn can be terminated.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return received


# ---- 6. Settings: command line, checks, run folder

# These cannot change on resume.
FIXED = ("model_id lora_rank seed task eval_task prompt n_eval max_prompt_tokens n_numbers "
         "max_number operations").split()


def read_arguments(argv):
    """["--lr=1e-5", "--seed", "1", "--compile"] -> {"lr": "1e-5", "seed": "1", "compile": "True"}
    """
    given, words = {}, list(map(str, argv))
    while words:
        name, has_value, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise UserError(f"cannot read {name!r}: write --name=value (see --help)")
        if not has_value:
            value = words.pop(0) if words and not words[0].startswith("--") else "True"
        given[name[2:]] = os.path.expanduser(value)
    return given


def settings_of_run(typed):
    """-> the settings of the run to resume, with what was typed"""
    is_latest = typed["resume"] in ("latest", "True")  # also for a bare --resume
    folder = Path(typed.get("out_dir", "out"), "latest") if is_latest else Path(typed["resume"])
    try:
        saved = dict(json.loads((folder / "config.json").read_text()))
        script = Path(saved.pop("script"))
        del saved["reward_fn"]  # is for sample.py
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"no run to resume in {folder} ({error!r})") from None
    if script.name != Path(started_script()).name:
        raise UserError(f"this run has the reward of {script}: resume it with that")
    changed = SimpleNamespace(**saved)
    names = typed.keys() & saved.keys() - {"resume", "out_dir"}
    override(changed, {name: typed[name] for name in names})
    for name, value in vars(changed).items():
        if value != saved[name]:
            if name in FIXED:
                raise UserError(f"{name} cannot change on resume: it is {saved[name]}")
            print(f"changed on resume: {name} {saved[name]} -> {value}")
    return saved | typed | {"resume": str(folder.resolve())}


def started_script():
    """-> the file that has the reward; in a notebook this one"""
    return os.path.abspath(getattr(sys.modules["__main__"], "__file__", __file__))


def override(cfg, given):
    for name, value in given.items():
        if name not in vars(cfg):
            near = difflib.get_close_matches(name, vars(cfg), 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them"
            raise UserError(f"there is no hyperparameter {name}: {hint}")
        default = getattr(cfg, name)
        try:
            if isinstance(default, bool):
                value = {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
            elif type(value) is not type(default):
                value = type(default)(str(value))  # int("0.5") raises, int(0.5) would be 0
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--{name}={value}: expected something like {default}") from None
        setattr(cfg, name, value)


MAY_BE_ZERO = ("seed lora_rank save_every min_tokens warmup_steps max_grad_norm kl_coef "
               "clip_range_high max_minutes ref_update_every").split()
ABOVE_ZERO = ("n_grpo_steps eval_every n_eval n_numbers max_number rollout_batch_size group_size "
              "temperature max_tokens max_prompt_tokens max_turns gpu_mem_util lr inner_epochs "
              "n_minibatches gradient_accumulation_steps tokens_per_microbatch clip_range "
              "target_kl").split()


def check_settings(cfg, typed):
    for name in MAY_BE_ZERO + ABOVE_ZERO:
        lowest, value = 0 if name in MAY_BE_ZERO else 1e-30, getattr(cfg, name)
        if not lowest <= value < 2**62:
            raise UserError(f"{name} is out of range: {value}")
    has_gpu = cfg.device == "cuda" and torch.cuda.is_available()
    has_kl = cfg.use_kl_penalty and cfg.kl_coef
    needs_kl = cfg.kl_adaptive or cfg.ref_update_every or cfg.ref_offload
    if not cfg.use_kl_penalty:
        named = {name for name in typed if name.startswith(("kl_", "target_kl"))}
        needs_kl = needs_kl or named - {"kl_adaptive"}
    rules = {
        "device must be cpu, or cuda with a GPU": cfg.device == "cpu" or has_gpu,
        "vllm_sleep and ref_offload need a GPU": has_gpu or not (cfg.vllm_sleep or cfg.ref_offload),
        "loss_type must be grpo, dr_grpo or dapo": cfg.loss_type in ("grpo", "dr_grpo", "dapo"),
        f"kl_estimator must be one of {', '.join(ESTIMATORS)}": cfg.kl_estimator in ESTIMATORS,
        "kl_in must be loss, or reward with kl_estimator=k1":
            cfg.kl_in == "loss" or (cfg.kl_in, cfg.kl_estimator) == ("reward", "k1"),
        "the KL penalty is off: set use_kl_penalty and kl_coef": has_kl or not needs_kl,
        "no ref_update_every or ref_offload with lora_rank":
            not (cfg.lora_rank and (cfg.ref_update_every or cfg.ref_offload)),
        "group_size must be at least 2 and divide rollout_batch_size":
            cfg.group_size > 1 and cfg.rollout_batch_size % cfg.group_size == 0,
        "clip_range and gpu_mem_util must be below 1": max(cfg.clip_range, cfg.gpu_mem_util) < 1,
        "temperature must be at most 2": cfg.temperature <= 2,
        "prompt must not be empty": cfg.prompt.strip(),
        "out_dir must be a folder": cfg.out_dir and not Path(cfg.out_dir).is_file(),
        "min_tokens must be at most max_tokens": cfg.min_tokens <= cfg.max_tokens,
        "n_numbers must be 2 to 8": 2 <= cfg.n_numbers <= 8,
        "operations must be some of +-*/": cfg.operations and not cfg.operations.strip("+-*/"),
        "with eval_task, both tasks must be files":
            not cfg.eval_task or "countdown" not in (cfg.task, cfg.eval_task)}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(rule)
    if has_kl and (cfg.kl_in, cfg.kl_estimator, cfg.kl_importance_weight) == ("loss", "k1", False):
        print("!!! unweighted k1 in the loss is no penalty (KL.md)")


def start_process_group(device):
    if (IS_LAUNCHED or device == "cuda") and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = None if IS_LAUNCHED else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD)


def make_run_folder(cfg, given):
    """Rank 0 -> a new folder such as out/0003_lr=1e-4, also called out/latest"""
    if RANK:
        return None
    out, label = Path(cfg.out_dir), ""
    for name, value in given.items():
        word = re.sub(r"[^\w=.+-]", "-", f"_{name}={value.rpartition('/')[2]}", flags=re.ASCII)
        if name not in ("out_dir", "device") and len(label + word) <= 36:
            label += word
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_made = False
        while not is_made:
            paths = out.glob("[0-9][0-9][0-9][0-9]*")
            numbers = [int(re.match("[0-9]+", path.name)[0]) for path in paths]
            folder = out / f"{max(numbers, default=0) + 1:04d}{label}"
            with contextlib.suppress(FileExistsError):  # another run starts at the same time
                folder.mkdir()
                is_made = True
        (folder / "latest").symlink_to(folder.name)
        (folder / "latest").replace(out / "latest")
    except OSError as error:
        raise RunFailed(f"cannot write {out}/latest ({error})") from error
    print(f"run folder: {folder}")
    return folder


# ---- 7. Quick tests before every run

def test_functions():
    """The clipped loss by hand; the KL term has the gradient of KL(pi || ref)."""
    expect = torch.testing.assert_close
    # Ratios 1, 1.65, 1 and 0.61: the second and the last are clipped.
    log_pi = torch.tensor([[0.0], [0.5], [0.0], [-0.5]], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, _ = compute_loss(advantages, log_pi, torch.zeros(4, 1), 0.2)
    expect(loss, torch.tensor([[-1.0], [-1.2], [1.0], [0.8]]))
    slope, = torch.autograd.grad(loss.sum(), log_pi)
    expect(slope, torch.tensor([[-1.0], [0.0], [1.0], [0.0]]))

    # Six tokens, sampled from an older policy: the mean of the KL term has the gradient of the KL.
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits, shift = torch.randn(3, 6, generator=generator).double()
    log_pi = logits.requires_grad_().log_softmax(0)
    log_ref = ref_logits.log_softmax(0)
    log_old = (logits + 0.3 * shift).log_softmax(0).detach()
    loss, _ = compute_loss(torch.zeros(6), log_pi[:, None], log_old[:, None], 0.2,
                           log_ref[:, None], kl_coef=1.0)
    mean_term = (log_old.exp() * loss[:, 0]).sum()
    kl = (log_pi.exp() * (log_pi - log_ref)).sum()
    got, = torch.autograd.grad(mean_term, logits, retain_graph=True)
    wanted, = torch.autograd.grad(kl, logits)
    expect(got, wanted)
    print("=== All Tests Passed! ===")


def run(main):
    """Errors to act on are one line. Ends the process."""
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    message, code = "", 0
    try:
        main()
    except UserError as error:
        message, code = error, 2
    except RunFailed as error:
        message, code = error, 1
    except OSError as error:
        message, code = f"cannot write or read: {error}", 1
    except torch.OutOfMemoryError:
        message, code = "out of GPU memory: lower tokens_per_microbatch or gpu_mem_util", 1
    except KeyboardInterrupt:
        message, code = "stopped at once", 130
    if code:
        notes = getattr(message, "__notes__", []) if RANK == 0 else []
        print(*notes, f"error: {message}", sep="", file=sys.stderr)
    with contextlib.suppress(Exception):  # it may be closed
        sys.stdout.flush()
    os._exit(code)  # a plain exit may hang, or print what libraries did not free


def test_and_train():
    try:
        test_functions()
    except AssertionError as error:
        raise RunFailed("compute_loss() is no longer PPO's clipped loss with a KL penalty. If you "
                        "want that, change test_functions(), too") from error
    main()


if __name__ == "__main__":
    run(test_and_train)

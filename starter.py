"""GRPO for language models in one file. Read it from top to bottom, edit main(), run it.

    python starter.py                  train: a 1.5 B model on a GPU, a tiny one on a CPU
    python starter.py --lr=1e-5        set any hyperparameter; --help lists them
    python starter.py --resume=latest  continue an interrupted run
    torchrun --nproc_per_node=8 --shutdown-timeout=600 starter.py

One step: sample a group of responses to each prompt and reward them. Make those above the mean of
their group more likely, the others less. A KL penalty can keep the model near its start (KL.md).
"""
import os, signal, sys, time
from pathlib import Path

if {"-h", "--help"} & set(sys.argv[1:]):  # before the slow imports
    print(sys.modules["__main__"].__doc__)
    print(Path(__file__).read_text("utf-8").split("\n    # ----")[1])
    sys.exit()

STARTED = time.perf_counter()
SCRIPT = getattr(sys.modules["__main__"], "__file__", __file__)  # this or its importer
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR",
         "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "TORCH_LOGS": "-torch._library"}
os.environ.update(QUIET | dict(os.environ))
# torchrun starts a process (rank) per GPU, which sees only its own.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
if "LOCAL_RANK" in os.environ:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", str(LOCAL_RANK)).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[LOCAL_RANK % len(gpus)]

import contextlib, copy, dataclasses, difflib, functools, gc, html, importlib, json
import math, random, re, shutil, tempfile, traceback, warnings, zlib
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

warnings.filterwarnings("ignore", category=FutureWarning)

class UserError(Exception):
    """One line instead of a traceback"""

def join_ranks(has_gpu):
    if not dist.is_initialized():
        store = dist.HashStore() if WORLD == 1 else None  # None: that of torchrun
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        dist.init_process_group(backend, rank=RANK, world_size=WORLD, store=store)

def gather(value):
    """-> [value on rank 0, on rank 1, ...]"""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values

def share(items):
    """-> this rank's part"""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]

def main(argv=None, only_settings=False, **defaults):
    """defaults: those of a script that imports this"""
    typed = read_arguments(sys.argv[1:] if argv is None else argv)
    has_gpu = torch.cuda.is_available()
    # ---- hyperparameters
    cfg = SimpleNamespace(
        # model; for "tiny", tiny.py replaces some values below
        model_id="Qwen/Qwen2.5-Coder-1.5B-Instruct" if has_gpu else "tiny",  # a folder or hub name
        lora_rank=0,  # above 0: train adapters, with about 10 x lr
        gradient_checkpointing=has_gpu,  # half the memory, a quarter more time
        compile=has_gpu,
        offload="auto",  # weights and optimizer in host memory; auto: if they do not fit
        # run
        seed=42,
        out_dir="out",  # the run gets a folder in it
        resume="",  # a run folder, or "latest"
        n_grpo_steps=100,
        max_minutes=0.0,  # of this process; 0: no limit
        eval_every=20,  # steps; 0: no evaluation
        n_eval=400,  # held-out problems
        save_every=50,  # steps between checkpoints; 0: only on Ctrl-C
        # task
        task="countdown",  # a JSONL file, or a folder with train.jsonl and test.jsonl
        eval_task="",  # another JSONL file; "": rows of task are held out
        prompt="{question} Think step by step, then give the answer as <answer>...</answer>.",
        # rollout
        use_vllm=True,  # False: plain torch, slow
        rollout_batch_size=512,  # responses per step
        group_size=16,  # responses per prompt
        temperature=1.0,
        max_tokens=512,  # of a response
        max_prompt_tokens=256,
        max_turns=10,  # of the model, if there is a reply()
        reward_truncated=False,  # False: a response that is cut off earns 0 at most
        gpu_mem_util=0.4,  # vLLM's share of GPU memory
        vllm_sleep="auto",  # free it during the update; auto: if nothing else fits
        # update
        lr=1.5e-6,
        warmup_steps=10,  # lr rises linearly
        max_grad_norm=1.0,  # 0: no clipping
        inner_epochs=1,  # passes over a batch
        n_minibatches=1,  # optimizer steps per pass
        tokens_per_microbatch=0,  # 0: 20480, or 8192 on a small GPU
        # loss
        loss_type="grpo",  # mean per response; "dr_grpo": sum / max_tokens; "dapo": mean per token
        clip_range=0.2,
        clip_range_high=0.0,  # upper limit (DAPO: 0.28); 0: clip_range
        use_std_normalization=True,  # of a group's advantages; Dr. GRPO: False
        # KL penalty towards the starting model (KL.md)
        use_kl_penalty=False,
        kl_coef=0.005,  # for 250 tokens per response; longer ones need less
        kl_estimator="k3",  # or "k1", "k2", "exact" (over the vocabulary)
        kl_importance_weight=True,  # False: the plain formula (KL.md)
        kl_in="loss",  # or "reward", with k1
        kl_warmup_steps=0,  # kl_coef rises linearly
        target_kl=0.0,  # nats per token; above 0: kl_coef is adapted to reach it
        ref_update_every=0,  # steps; 0: never
    )
    # ----
    override(cfg, defaults | typed)
    given = settings_of_run(cfg, typed) if cfg.resume else typed
    if given.get("model_id", cfg.model_id) == "tiny":
        from tiny import SETTINGS
        vars(cfg).update(SETTINGS)
        print("tiny.py sets", SETTINGS)
    override(cfg, given)
    check_settings(cfg, typed)
    if only_settings:
        return cfg
    test_functions()
    device = "cuda" if has_gpu else "cpu"
    join_ranks(has_gpu)
    torch.use_deterministic_algorithms(not has_gpu)  # parallel sums on a CPU differ otherwise
    rows = read_task(cfg)
    saved = None
    path = Path(cfg.resume, "checkpoint.pt")
    if cfg.resume and (path.exists() or Path(cfg.resume, "model").exists()):  # else start over
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        print(f"resuming {cfg.resume} after step {saved['state']['step']}")
        if saved["state"]["step"] >= cfg.n_grpo_steps:
            raise UserError("it has finished: raise --n_grpo_steps")
    policy, tokenizer = init_policy(cfg.model_id, cfg.max_prompt_tokens + cfg.max_tokens)
    task = Task(cfg, *rows, tokenizer, policy.stop_ids)
    plan_memory(policy, cfg, device)
    if cfg.lora_rank:
        add_lora(policy, cfg.lora_rank, cfg.seed)
    kl_coef = cfg.kl_coef if cfg.use_kl_penalty else 0.0
    ref_model = None
    if kl_coef:
        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)
        compile_and_shard(ref_model, cfg, device)
    compile_and_shard(policy, cfg, device)
    print(f"{policy.model.num_parameters():,} parameters on {WORLD} x {device}, rows "
          f"{'packed' if policy.is_packed else 'padded (slower)'}, KL penalty {kl_coef or 'off'}")
    llm = init_vllm(policy, tokenizer, cfg)
    folder = Path(gather(cfg.resume or make_run_folder(cfg, given))[0])
    log = Log(folder, cfg, saved)
    train(policy, llm, cfg, log, ref_model, kl_coef, task=task, saved=saved)
    print(f"\n  try it    python sample.py --model_id='{folder}/model'\n"
          f"  curves    tensorboard --logdir '{folder.parent}/tb'")

def train(policy, llm, cfg, log, ref_model=None, kl_coef=0.0, *, task, saved=None):
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    # update_weights() sets the learning rate.
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # Numbers in a checkpoint; add your own
    state = SimpleNamespace(
        step=0, next_problem=0, skipped=0, skips_in_a_row=0, lr_factor=1.0, first_accuracy=0.0,
        best_reward=-math.inf, first_gap=0.0, ref_step=0, kl_factor=1.0, kl_smooth=0.0)
    parts = log.folder, policy, optimizer, ref_model, state
    signals = catch_signals()
    if saved:
        restore(saved, policy, optimizer, ref_model, state)
        load_policy_into_vllm_instance(policy, llm)
    else:
        log.write(0, evaluate(policy, llm, task, log, state) if cfg.eval_every else {})

    for step in range(state.step + 1, cfg.n_grpo_steps + 1):
        # Rollout: group_size responses to each prompt; reward each
        started = now()
        problems = task.problems(state.next_problem)
        with steps_kept(*parts):
            responses = rollout_with_vllm(llm, task, share(problems), cfg.group_size, cfg.seed)
            grade(responses, cfg.reward_truncated)
        state.next_problem += len(problems)
        state.step = step

        update_started = now()
        if cfg.vllm_sleep:
            llm.sleep(level=2)
        batch = make_batch(responses)
        rewards = torch.tensor([x.reward for x in responses])
        advantages = group_advantages(rewards, cfg.group_size, cfg.use_std_normalization)  # [B]
        kl_now = kl_coef * state.kl_factor * min(1.0, step / max(1, cfg.kl_warmup_steps))
        # Rows without advantage or KL have no gradient. Step 1 has all, for check_agreement().
        trained = [row for row in range(len(responses))
                   if step == 1 or kl_now or advantages[row] != 0]
        minibatches = make_minibatches(cfg, step, len(responses))

        # Log-probs that stay fixed
        fixed = {"rollout_log_probs": batch.rollout_log_probs}
        if len(minibatches) > 1:  # with one, old and new are equal
            fixed["old_log_probs"] = score(policy, batch, trained, cfg)
        if kl_now and cfg.kl_estimator != "exact":
            fixed["ref_log_probs"] = score(ref_model, batch, trained, cfg)

        # Update: one optimizer step per minibatch
        details, losses, grad_norms = [], [], []
        for rows in minibatches:
            # Of all rows. Mean: fully_shard averages over ranks.
            divisor = np.mean(gather(loss_divisor(
                batch.response_mask[rows], cfg.loss_type, cfg.max_tokens)))
            trained_rows = sorted(set(rows) & set(trained))
            microbatches = make_microbatches(batch, trained_rows, cfg, policy.is_packed)
            loss = 0.0
            for micro in microbatches:
                before_backward(policy, micro is microbatches[-1], cfg)
                # divisor replaces len(microbatches) and max_tokens.
                _, metadata = grpo_microbatch_step(
                    policy, batch.input_ids[micro], batch.labels[micro],
                    batch.response_mask[micro], advantages[micro], len(microbatches),
                    cfg.clip_range, cfg.loss_type, cfg.max_tokens, ref_model, kl_now,
                    divisor=divisor, temperature=cfg.temperature, kl_estimator=cfg.kl_estimator,
                    kl_importance_weight=cfg.kl_importance_weight, kl_in=cfg.kl_in,
                    clip_range_high=cfg.clip_range_high,
                    **{name: log_probs[micro] for name, log_probs in fixed.items()})
                loss += metadata["loss"]
                details.append(metadata)
            losses.append(np.mean(gather(loss)))
            grad_norms.append(update_weights(policy, optimizer, losses[-1], cfg, state))
        sync_started = now()

        if cfg.vllm_sleep:
            llm.wake_up()
        load_policy_into_vllm_instance(policy, llm)
        ended = now()
        minutes = (ended - STARTED) / 60

        # Log, evaluate, save
        metrics = step_metrics(responses, details, cfg.group_size, kl_now) | {
            "train/loss": np.mean(losses), "train/grad_norm": np.mean(grad_norms),
            "train/lr": optimizer.param_groups[0]["lr"], "train/kl_coef": kl_now,
            "train/skipped_steps": state.skipped, "time/rollout": update_started - started,
            "time/train": sync_started - update_started, "time/sync": ended - sync_started,
            "time/step": ended - started, "time/minutes": minutes}
        check_agreement(metrics, details, state, policy.device)
        log_train(step, metrics, cfg)
        if kl_now and cfg.target_kl:
            adapt_kl_coef(state, metrics["kl/mean"], cfg)
        if kl_now and cfg.ref_update_every and step % cfg.ref_update_every == 0:
            ref_model.load_state_dict(policy.state_dict())
            state.ref_step = step
            state.kl_smooth = 0.0
        is_last = step == cfg.n_grpo_steps or any(gather(0 < cfg.max_minutes < minutes))
        try:
            if cfg.eval_every and (step % cfg.eval_every == 0 or is_last):
                with steps_kept(*parts):
                    metrics |= evaluate(policy, llm, task, log, state, responses)
        finally:
            log.write(step, metrics)
        is_stopped = any(gather(len(signals)))
        if is_stopped or is_last:
            save_model(policy, task.tokenizer, log.folder / "model")
        if is_stopped or (cfg.save_every and (step % cfg.save_every == 0 or is_last)):
            save_checkpoint(*parts)
        if is_stopped:
            print(f"stopped after step {step}: --resume='{log.folder}' continues")
        if is_stopped or is_last:
            break

# ---- 1. Task: prompts, answers, reward, rows

# For several turns write reply(problem, text): what the environment says after a turn of the model,
# or None at the end. A text in TURN_ENDS also ends a turn; the reply then continues the response.
reply = None
TURN_ENDS = ()

def reward_fn(generated_text, ground_truth):
    """1.0 for a correct answer, 0.1 for a wrong one, 0.0 for none. Replace it with your own:
    ground_truth is the row of the task, a dict. A reward of at least 0.9 counts as correct."""
    answer = final_answer(generated_text)
    if answer is None:
        return 0.0
    if {"numbers", "target"} <= ground_truth.keys():  # Countdown
        from countdown import is_solution
        is_right = is_solution(answer, ground_truth)
    else:
        is_right = normalize(answer) == normalize(ground_truth["answer"])
    return 1.0 if is_right else 0.1

# Linear time, whatever the text
TAGS = r"<answer>((?:(?!</?answer>).)*)</answer>"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
HASHES = r"#### *([-+$]{0,2}\.?[0-9][0-9.,/]*)"

def final_answer(text):
    r"""-> the last <answer>...</answer>, \boxed{...} or `#### 5` after the reasoning, or None"""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer = None
    for match in re.finditer(f"{TAGS}|{BOX}|{HASHES}", text, re.DOTALL):
        answer = match[match.lastindex]
    return answer

def normalize(answer):
    r"""-> a Fraction or a text: $1,200.00 = 1200, \dfrac{1}{2} = .5, 90^\circ = 90"""
    text = str(answer).lower().replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9])|(?<=[0-9])\s*(?=\\[dt]?frac)", "+", text)  # not 21/2
    text = re.sub(r"\\left|\\right|\^\\circ|\^\{\\circ\}|\\[,!; ]|\\?[$%]|\s", "", text)
    text = re.sub(r"\\[dt]?frac(?:([0-9])([0-9])|\{(-?[0-9]+)\}\{([0-9]+)\})", r"\1\3/\2\4", text)
    text = re.sub(r"\\(?:boxed|text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).strip("*").rstrip(".")
    if re.fullmatch("[-+./0-9]{1,64}", text):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            return Fraction(text)
    return text

def read_task(cfg):
    """-> (rows to train on, held-out rows: of eval_task, or up to a fifth of the file)"""
    for name in {"tiny", "countdown"} & {cfg.model_id, cfg.task}:
        if LOCAL_RANK == 0 and not Path(name).exists():
            importlib.import_module(name).main()
    gather("wait")
    path, eval_path = cfg.task, cfg.eval_task
    if Path(path).is_dir():
        path, eval_path = f"{path}/train.jsonl", eval_path or f"{path}/test.jsonl"
    problems = read_problems(path, cfg.prompt)
    if eval_path:
        held_out = read_problems(eval_path, cfg.prompt)
    else:  # by a hash: the same for all seeds
        different = sorted(dict(problems).items(), key=lambda item: zlib.crc32(item[0].encode()))
        held_out = different[:min(cfg.n_eval, len(different) // 5)]
    names = {name for name, _ in held_out}
    training = [row for name, row in problems if name not in names]
    print(f"{path}: {len(training)} rows to train on, {len(held_out)} held out")
    return training, [row for _, row in held_out[:cfg.n_eval]]

def read_problems(path, template):
    """A JSONL file -> [(prompt and answer, row), ...]"""
    problems = []
    number = 0
    try:
        for number, line in enumerate(open(path, encoding="utf-8-sig"), 1):
            row = json.loads(line)
            if "prompt" not in row:
                row["prompt"] = re.sub(r"\{(\w+)\}", lambda name: str(row[name[1]]), template)
            if isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            if "answer" in row:
                row["answer"] = str(row["answer"]).rpartition("####")[2].strip()  # as in GSM8K
            texts = [turn["role"] + turn["content"] for turn in row["prompt"]]
            problems.append((f"{texts} {row.get('answer')}", row))
    except Exception as error:
        raise UserError(f"{path}, line {number}: {error!r}. A line is an object with prompt (or "
                        "the fields of --prompt) and answer") from None
    return problems

class Task:
    def __init__(self, cfg, training, held_out, tokenizer, stop_ids):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.training = self.encode(training)
        self.held_out = self.encode(held_out)

    def encode(self, rows):
        """-> those that are not too long"""
        encoded = []
        for number, row in enumerate(rows):
            rendered = render_chat(row["prompt"], self.tokenizer)
            ids = self.tokenizer.encode(rendered, add_special_tokens=False)
            if len(ids) <= self.cfg.max_prompt_tokens:
                encoded.append(
                    row | {"rendered": rendered, "prompt_ids": ids, "problem_number": number})
        if len(encoded) < len(rows):
            print(f"!!! max_prompt_tokens: {len(rows) - len(encoded)} of {len(rows)} prompts are "
                  "longer: left out")
        if not encoded:
            raise UserError("no prompts are left: too few or too long")
        return encoded

    def problems(self, first):
        """-> those of a step; another order in every epoch"""
        problems = []
        for number in range(first, first + self.cfg.rollout_batch_size // self.cfg.group_size):
            epoch, position = divmod(number, len(self.training))
            order = np.random.default_rng([self.cfg.seed, epoch]).permutation(len(self.training))
            problems.append(self.training[order[position]] | {"problem_number": number})
        return problems

def render_chat(messages, tokenizer):
    """-> the text that the model continues"""
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + "".join(turn["content"] + "\n" for turn in messages)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                         enable_thinking=False)

def render_reply(said, tokenizer):
    """-> what the chat template puts between two turns of the model"""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "MODELS_TURN"},
                {"role": "user", "content": said}]
    _, after = render_chat(messages, tokenizer).split("MODELS_TURN")  # must show earlier turns
    return after

def find_stop_ids(model, tokenizer):
    """End tokens, and the one that closes a turn in the chat template"""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()}
    with contextlib.suppress(Exception):  # the template may refuse a second turn
        closing = tokenizer.encode(render_reply("?", tokenizer).lstrip(), add_special_tokens=False)
        ends |= set(closing[:1]) & tokenizer.added_tokens_decoder.keys()
    return sorted(end for end in ends - {None} if end < model.config.vocab_size)

# ---- 2. Advantages, batch, loss, KL, update

def group_advantages(rewards, group_size, normalize_by_std, eps=1e-6):
    """-> [N]: (reward - mean) / standard deviation within each group"""
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_by_std:
        advantages /= groups.std(1, keepdim=True) + eps
    is_flat = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return torch.where(is_flat, 0.0, advantages).flatten()  # without rounding errors

def make_batch(responses):
    """-> [B, T] tensors, padded on the right. Labels are the next input_ids."""
    lengths = [len(response.prompt_ids) + len(response.ids) for response in responses]
    tokens = torch.zeros(len(responses), max(lengths, default=2), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)  # tokens that the model chose
    sampled = torch.zeros(tokens.shape)  # the sampler's log-probs
    for b, response in enumerate(responses):
        tail = slice(len(response.prompt_ids), lengths[b])
        tokens[b, :lengths[b]] = torch.tensor(response.prompt_ids + response.ids)
        mask[b, tail] = torch.tensor(response.mask)
        sampled[b, tail] = torch.tensor(response.log_probs)
    return SimpleNamespace(
        input_ids=tokens[:, :-1], labels=tokens[:, 1:], response_mask=mask[:, 1:],
        rollout_log_probs=sampled[:, 1:], lengths=lengths,
        prompts=[response.prompt_ids for response in responses])

def make_minibatches(cfg, step, n_rows):
    """-> this rank's rows of each optimizer step, drawn from the rows of all ranks"""
    counts = gather(n_rows)
    first = sum(counts[:RANK])  # rows on lower ranks
    minibatches = []
    for epoch in range(cfg.inner_epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(sum(counts))
        for numbers in np.array_split(order, cfg.n_minibatches):
            local = [n - first for n in numbers.tolist() if first <= n < first + n_rows]
            minibatches.append(sorted(local))
    return minibatches

def make_microbatches(batch, rows, cfg, is_packed):
    """-> lists of rows, filled up to tokens_per_microbatch; equally many on all ranks"""
    if not is_packed:
        rows = sorted(rows, key=lambda row: -batch.lengths[row])
    parts = []
    n_tokens = 0
    for row in rows:
        size = batch.lengths[row]
        if parts and not is_packed:
            size = batch.lengths[parts[-1][0]]  # padded to the longest
        elif parts and batch.prompts[row] == batch.prompts[parts[-1][-1]]:
            size -= len(batch.prompts[row])  # computed once
        if not parts or n_tokens + size > cfg.tokens_per_microbatch:
            parts.append([])
            n_tokens = 0
            size = batch.lengths[row]
        parts[-1].append(row)
        n_tokens += size
    return parts + [[]] * (max(gather(len(parts))) - len(parts))

@torch.no_grad()
def score(model, batch, rows, cfg):
    """-> log-probs [B, T] of these rows, 0 in the others"""
    log_probs = torch.zeros(batch.labels.shape, device=model.device)
    for micro in make_microbatches(batch, rows, cfg, model.is_packed):
        log_probs[micro] = response_stats(model, batch.input_ids[micro], batch.labels[micro],
                                          batch.response_mask[micro], cfg.temperature)[0]
    return log_probs

def grpo_microbatch_step(
        policy, input_ids, labels, response_mask, advantages_per_seq, gradient_accumulation_steps,
        clip_range, loss_type="grpo", max_completion_length=256, ref_model=None, kl_coef=0.0, *,
        old_log_probs=None, ref_log_probs=None, divisor=None, temperature=1.0, kl_estimator="k3",
        **loss_options):
    """Forward, loss, backward -> (part of the step's loss, metadata). divisor: of the whole step;
    by default that of this part * gradient_accumulation_steps"""
    mask = response_mask.bool() & (labels >= 0)
    if divisor is None:
        divisor = loss_divisor(mask, loss_type, max_completion_length) * gradient_accumulation_steps
    exact_kl = None
    if kl_coef and (ref_log_probs is None or kl_estimator == "exact"):
        log_probs, entropy, ref_log_probs, exact_kl = response_stats(
            policy, input_ids, labels, mask, temperature, ref_model)  # each [B, T]
    else:
        log_probs, entropy = response_stats(policy, input_ids, labels, mask, temperature)
    mask = to_device(mask, log_probs.device)
    loss, metadata = compute_loss(
        advantages_per_seq, log_probs, old_log_probs, clip_range, ref_log_probs, kl_coef,
        response_mask=mask, kl_estimator=kl_estimator, exact_kl=exact_kl, **loss_options)
    if loss_type == "grpo":
        loss = loss / mask.sum(-1, keepdim=True).clamp(min=1)
    loss = loss.sum() / max(divisor, 1e-9)
    # Before backward(), so as not to wait for it
    metadata["loss"] = loss.item()
    metadata["entropy"] = entropy.sum().item() / max(1, metadata["n_tokens"])
    loss.backward()
    return loss.detach(), metadata

def loss_divisor(mask, loss_type, max_tokens):
    """What the summed loss of a step is divided by"""
    n_rows = int(mask.any(-1).sum())
    return {"grpo": n_rows, "dr_grpo": n_rows * max_tokens, "dapo": int(mask.sum())}[loss_type]

LIMIT = 20.0  # largest log-ratio, and logged k3
WEIGHT_CAP = 10.0  # of the importance weight pi/old of a KL term
MISMATCH_CAP = 2.0  # of the importance weight old/sampler of a token

def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, *, response_mask=None, kl_estimator="k3", kl_importance_weight=True,
                 kl_in="loss", clip_range_high=None, rollout_log_probs=None, exact_kl=None):
    """PPO's clipped loss + kl_coef * KL -> (loss [B, T], metadata). advantages: [B] or [B, T]"""
    if response_mask is None:
        response_mask = torch.ones_like(policy_log_probs)
    if old_log_probs is None:  # the first update: the ratio is 1
        old_log_probs = policy_log_probs
    mask = response_mask.bool()
    log_pi = masked(policy_log_probs, mask)
    log_old = masked(old_log_probs, mask).detach()
    advantages = masked(advantages[:, None] if advantages.dim() == 1 else advantages, mask)
    log_ratio = log_pi - log_old
    # exp() must not overflow; a NaN must reach the gradient, which clamp() would stop.
    log_ratio = torch.where(log_ratio > LIMIT, LIMIT, log_ratio)
    ratio = log_ratio.exp()
    stats = {"approx_kl": torch.expm1(log_ratio) - log_ratio}

    penalty = 0.0
    if kl_coef and ref_log_probs is not None:
        log_ref = masked(ref_log_probs, mask)
        kl_weight = log_ratio.detach().exp().clamp(max=WEIGHT_CAP)
        # Logged: k3 weighted by pi/old, both capped.
        logged_kl = kl_weight * compute_kl_divergence(log_pi, log_ref, "k3").clamp(max=LIMIT)
        if kl_in == "reward":
            # A token pays for its k1 and that of all later tokens.
            penalty = compute_kl_divergence(log_pi, log_ref, "k1").detach()
            advantages = advantages - kl_coef * penalty.flip(1).cumsum(1).flip(1)
        elif kl_estimator == "exact":
            penalty = logged_kl = masked(exact_kl, mask)
        elif kl_importance_weight:
            penalty = kl_weight * compute_kl_divergence(log_pi, log_ref, kl_estimator, True)
        else:
            penalty = compute_kl_divergence(log_pi, log_ref, kl_estimator)
        stats |= {"kl_penalty_mean": penalty, "kl_mean": logged_kl, "kl_max": logged_kl,
                  "kl_min": logged_kl}

    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range_high or clip_range)) * advantages
    stats["clip_fraction"] = clipped < plain
    loss = -torch.minimum(plain, clipped)
    if kl_in == "loss":
        loss = loss + kl_coef * penalty
    if rollout_log_probs is not None:
        # Truncated importance sampling: the tokens came from the sampler
        gap = log_old - masked(rollout_log_probs, mask).detach()
        sampler_weight = gap.exp().clamp(max=MISMATCH_CAP)
        loss = loss * sampler_weight
        stats["logp_gap"] = gap.abs()
    return torch.where(mask, loss, 0), summarize(stats, mask)

def masked(tensor, mask):
    """0 outside the mask, where a NaN must not reach a gradient"""
    return torch.where(mask, upcast(to_device(tensor, mask.device)), 0)

def upcast(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()

def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1", is_weighted=False):
    """Per sampled token, where l = log pi - log ref, within +-LIMIT. is_weighted: the caller
    multiplies by rho = pi/old, detached. The slope then includes that of rho: d rho = rho dlog pi.

        estimator  value          slope     slope if weighted
        k1         l              1         l + 1
        k2         l^2 / 2        l         l (d rho left out)
        k3         e^-l - 1 + l   1 - e^-l  l
    """
    log_pi = upcast(policy_log_probs)
    l = (log_pi - upcast(ref_log_probs)).detach().clamp(-LIMIT, LIMIT)
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
        raise UserError(f"{estimator} is not one of k1, k2, k3")
    # The gradient is written out: autograd would overflow, or be 0 beyond the clamp.
    zero = log_pi - log_pi.detach()  # with a gradient of 1
    return value + slope * zero

# Name in the metadata: name in the log. Means over tokens, but for EXTREMES.
TOKEN_METRICS = {
    "entropy": "train/entropy", "clip_fraction": "train/clip_fraction",
    "approx_kl": "train/approx_kl", "kl_penalty_mean": "train/kl_penalty",
    "logp_gap": "rollout/logp_gap_mean", "kl_mean": "kl/mean", "kl_max": "kl/max",
    "kl_min": "kl/min"}
EXTREMES = {"kl_max": np.max, "kl_min": np.min}

@torch.no_grad()
def summarize(stats, mask):
    """{name: [B, T]} -> {name: number over the mask}; 0 for missing ones"""
    summary = dict.fromkeys(TOKEN_METRICS, 0.0) | {"n_tokens": int(mask.sum())}
    if summary["n_tokens"]:
        for name, values in stats.items():
            fold = EXTREMES.get(name, np.mean)
            summary[name] = float(fold(values[mask].double().numpy(force=True)))
    return summary

def update_weights(policy, optimizer, loss, cfg, state):
    """Step if loss and gradient are finite. -> gradient norm before clipping"""
    limit = cfg.max_grad_norm or math.inf
    norm = float(full(torch.nn.utils.clip_grad_norm_(policy.parameters(), limit)))
    warmup = min(1.0, state.step / max(1, cfg.warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * warmup * state.lr_factor
    if not math.isfinite(norm + loss):
        print(f"!!! update skipped: loss {loss:g}, gradient norm {norm:g}; lr / 10")
        state.skipped += 1
        state.skips_in_a_row += 1
        state.lr_factor = 0.1  # doubles with every good update
        if state.skips_in_a_row == 5:
            raise UserError("5 updates in a row were not finite: lower lr")
    elif norm > 1e-8:  # momentum alone must not move the weights
        optimizer.step()
        state.lr_factor = min(1.0, 2 * state.lr_factor)
        state.skips_in_a_row = 0
    optimizer.zero_grad()  # frees memory for vLLM
    return norm

def adapt_kl_coef(state, kl, cfg):
    """Steer the KL to target_kl with 0.1 to 100 times kl_coef."""
    if not math.isfinite(kl):
        return
    state.kl_smooth = (state.kl_smooth + min(5 * cfg.target_kl, kl)) / 2
    if state.kl_smooth > 1.5 * cfg.target_kl:
        state.kl_factor = min(1.5 * state.kl_factor, 100.0)
    elif state.kl_smooth < 0.5 * cfg.target_kl:
        state.kl_factor = max(0.75 * state.kl_factor, 0.1)

# ---- 3. Sampler: turns, vLLM, the stand-in

class Response:  # filled turn by turn, then graded
    def __init__(self, problem, name=""):
        self.problem = copy.deepcopy(problem) | {"turns": []}  # reply() may change it
        self.name = name  # for the seed
        self.prompt_ids = problem["prompt_ids"]
        self.ids = []  # after the prompt, end tokens included
        self.log_probs = []  # the sampler's
        self.mask = []  # did the model choose this token?
        self.finished = None  # True: ended; False: cut off at max_tokens or max_turns
        self.reward = 0.0

    def seed(self):
        return random.Random(f"{self.name}/{len(self.ids)}").getrandbits(48)

    def add(self, ids, log_probs, is_chosen):
        self.ids += ids
        self.log_probs += log_probs
        self.mask += [is_chosen] * len(ids)

    def text(self):  # of the model
        return "\n".join(turn["content"] for turn in self.problem["turns"]
                         if turn["role"] == "assistant")

def rollout_with_vllm(llm, task, problems, n, seed):
    """-> n Responses to each problem, the same on any number of ranks"""
    responses = [Response(problem, f"{seed}/{problem['problem_number']}/{i}")
                 for problem in problems for i in range(n)]
    n_turns = task.cfg.max_turns if reply else 1
    for turn in range(1, n_turns + 1):
        active = [response for response in responses if response.finished is None]
        if not active:
            break
        parts = generate(llm, task, active)
        for response, (ids, log_probs) in zip(active, parts):
            play_turn(response, ids, log_probs, task, is_last=turn == n_turns)
    return responses

def play_turn(response, ids, log_probs, task, is_last):
    """Add what the model wrote and what reply() says."""
    response.add(ids, log_probs, is_chosen=True)
    is_message = ids[-1] in task.stop_ids
    text = task.tokenizer.decode(ids[:-1] if is_message else ids)
    turns = response.problem["turns"]
    turns.append({"role": "assistant", "content": text})
    if not is_message and not any(end in text for end in TURN_ENDS):
        response.finished = False  # cut off at max_tokens
        return
    said = reply(response.problem, text) if reply else None
    if said is None or is_last:
        response.finished = said is None
        return
    rendered = said
    if is_message:
        end = task.tokenizer.decode(ids[-1:])  # it is there already
        rendered = render_reply(said, task.tokenizer).lstrip().removeprefix(end)
    reply_ids = task.tokenizer.encode(rendered, add_special_tokens=False)
    if len(response.ids) + len(reply_ids) >= task.cfg.max_tokens:
        response.finished = False
        return
    response.add(reply_ids, [0.0] * len(reply_ids), is_chosen=False)
    turns.append({"role": "environment", "content": said})

def grade(responses, reward_truncated):
    """Set the rewards. A response that is cut off earns 0 at most."""
    for response in responses:
        text = response.text()
        try:
            response.reward = float(reward_fn(text, response.problem))
            if not abs(response.reward) < 1e38:
                raise ValueError(f"the reward is {response.reward}")
        except Exception as error:
            error.add_note(f"reward_fn got the response {text!r:.1000}")
            raise
        if not (response.finished or reward_truncated):
            response.reward = min(0.0, response.reward)

def generate(llm, task, responses):
    """-> (new ids, log-probs) of each, up to max_tokens, an end token or one of TURN_ENDS"""
    if isinstance(llm, TorchSampler):
        return llm.generate(task, responses)
    from vllm import SamplingParams
    requests, params = [], []
    for response in responses:
        requests.append({"prompt_token_ids": response.prompt_ids + response.ids})
        params.append(SamplingParams(
            seed=response.seed(), max_tokens=task.cfg.max_tokens - len(response.ids),
            temperature=task.cfg.temperature, logprobs=0, flat_logprobs=True,
            stop_token_ids=task.stop_ids, ignore_eos=True,  # stop_ids has all that end a response
            stop=list(TURN_ENDS), include_stop_str_in_output=True, detokenize=bool(TURN_ENDS),
            skip_special_tokens=False))
    outputs = [request.outputs[0] for request in llm.generate(requests, params, use_tqdm=False)]
    return [(list(output.token_ids), list(output.logprobs.logprobs)) for output in outputs]

def init_vllm(policy, tokenizer, cfg):
    """-> vLLM; TorchSampler if vLLM is not installed or not wanted"""
    try:
        llm = start_vllm(policy, tokenizer, cfg) if cfg.use_vllm else TorchSampler(policy)
    except ImportError as error:
        print(f"!!! vLLM cannot be used here, torch samples: {error!s:.150}")
        llm = TorchSampler(policy)
    except Exception as error:
        raise UserError(f"vLLM cannot run this model: {error!r:.400}. Memory? Change "
                        "--gpu_mem_util; or --use_vllm=False") from error
    cfg.vllm_sleep = cfg.vllm_sleep and not isinstance(llm, TorchSampler)
    load_policy_into_vllm_instance(policy, llm)
    gc.freeze()  # collecting vLLM's objects is slow
    if policy.device.type == "cuda":  # more threads help only Adam
        torch.set_num_threads(os.cpu_count() if cfg.offload else 1)
    return llm

def start_vllm(policy, tokenizer, cfg):
    print("starting vLLM ...")
    from vllm.entrypoints.llm import LLM
    length = cfg.max_prompt_tokens + cfg.max_tokens
    if policy.device.type == "cuda":  # decoding graphs: fast start
        options = {"dtype": "bfloat16", "gpu_memory_utilization": cfg.gpu_mem_util,
                   "enable_sleep_mode": cfg.vllm_sleep,
                   "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    else:  # chunked prefill would break seeds; without it a prompt must fit into a batch
        options = {"dtype": "float32", "kv_cache_memory_bytes": 2**30, "enforce_eager": True,
                   "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, length),
                   "enable_prefix_caching": policy.is_packed}
    model_class = type(policy.model.base_model)
    init = model_class.__init__
    with tempfile.TemporaryDirectory() as folder:
        policy.model.config.architectures = [type(policy.model).__name__]
        policy.model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        llm = LLM(folder, **options, load_format="dummy", max_model_len=length,
                  skip_tokenizer_init=not TURN_ENDS, logprobs_mode="processed_logprobs",
                  max_num_seqs=min(512, max(64, cfg.rollout_batch_size // WORLD)))
    # Undo vLLM's patches if it lacks this model.
    model_class.__init__ = init
    model_class.__call__ = torch.nn.Module.__call__
    return llm

@torch.no_grad()
def load_policy_into_vllm_instance(policy, llm):
    """Copy the weights; drop what vLLM cached with the old ones."""
    if isinstance(llm, TorchSampler):
        llm.model.load_state_dict(dict(full_weights(policy)))
        return
    # In vLLM tied models have an output layer; Gemma 2 has none.
    has_head = llm.apply_model(lambda model: hasattr(model, "lm_head"))[0]
    weights = checkpoint_weights(policy, has_head)
    if policy.device.type == "cuda":
        llm.apply_model(lambda model: bool(model.load_weights(weights)))
    else:  # the CPU backend repacks its weights
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    assert llm.reset_prefix_cache()

def checkpoint_weights(policy, has_head):
    """-> (name, tensor) as in a checkpoint, where each expert is apart"""
    for name, weight in full_weights(policy):
        if has_head or name != "lm_head.weight":
            yield from revert_weight_conversion(policy.model, {name: weight}).items()

def check_agreement(metrics, details, state, device):
    """Sampler and trainer must agree; reference and policy before any update."""
    gap = metrics.get("rollout/logp_gap_mean", 0.0)
    max_gap, max_kl = 2e-3, 1e-6
    if device.type == "cuda":  # bf16; with stale weights the gap grows
        max_gap, max_kl = max(0.03, 4 * state.first_gap), 2e-3
    if state.step == 1:
        state.first_gap = gap
        max_gap *= 3
        if details and details[0]["kl_mean"] > max_kl:
            raise UserError("KL before any update: policy and reference differ")
    if gap > max_gap:
        raise UserError(f"the sampler's log-probs are off by {gap:.3g}: the weights did not arrive,"
                        " or it computes this model differently")

class TorchSampler:
    """A copy of the model where there is no vLLM: right, not fast"""

    def __init__(self, policy):
        self.model = AutoModelForCausalLM.from_config(
            copy.deepcopy(policy.model.config), attn_implementation="eager",
            dtype=policy.compute_dtype).to(policy.device).eval()

    @torch.no_grad()
    def generate(self, task, responses):
        prompts = [response.prompt_ids + response.ids for response in responses]
        width = max(map(len, prompts))
        rows = [[-1] * (width - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor(rows, device=self.model.device)  # [B, W], padded on the left
        mask = (ids >= 0).long()
        ids = ids.clamp(min=0)
        cache = None
        draws = [np.random.default_rng(response.seed()).random(task.cfg.max_tokens)
                 for response in responses]
        draws = torch.tensor(np.array(draws), device=ids.device)  # [B, max_tokens]
        temperature = max(task.cfg.temperature, 1e-6)  # 0: greedy
        parts = [([], []) for _ in prompts]
        active = set(range(len(prompts)))
        while active:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            output = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache, logits_to_keep=1)
            cache = output.past_key_values
            log_probs = (output.logits[:, -1].float() / temperature).log_softmax(-1)
            cdf = log_probs.double().exp().cumsum(-1)
            draw = draws[:, mask.shape[1] - width, None] * cdf[:, -1:]
            ids = torch.searchsorted(cdf, draw, right=True)  # [B, 1]
            mask = F.pad(mask, (0, 1), value=1)
            tokens = ids[:, 0].tolist()
            chosen = log_probs.gather(1, ids)[:, 0].tolist()
            for row in list(active):
                row_ids, row_log_probs = parts[row]
                row_ids.append(tokens[row])
                row_log_probs.append(chosen[row])
                n_left = task.cfg.max_tokens - len(responses[row].ids) - len(row_ids)
                tail = task.tokenizer.decode(row_ids[-32:]) if TURN_ENDS else ""
                is_turn_over = any(end in tail for end in TURN_ENDS)
                if n_left <= 0 or is_turn_over or row_ids[-1] in task.stop_ids:
                    active.remove(row)
        return parts

# ---- 4. Policy: loading, memory, LoRA, sharding, log-probs

def init_policy(model_id, longest_row=math.inf):
    """-> (policy, float32 in host memory; tokenizer). longest_row: in tokens"""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32,
                                                     trust_remote_code=False)
    except Exception as error:
        raise UserError(f"cannot load the model {model_id!r}: {error!r:.200}") from None
    policy = Policy(model, find_stop_ids(model, tokenizer))
    choose_layout(policy, longest_row)
    return policy, tokenizer

@torch.no_grad()
def choose_layout(policy, longest_row):
    """Pack rows if their log-probs stay the same, otherwise pad them"""
    model = policy.model
    attentions = ["packed", "sdpa", "eager"]
    kinds = set(getattr(model.config, "layer_types", None) or ())
    window = getattr(model.config, "sliding_window", None) or math.inf
    if window < longest_row or kinds - {"full_attention", "sliding_attention"}:
        attentions.remove("packed")
    if getattr(model.config, "attn_logit_softcapping", None):
        attentions = ["eager"]  # the others would ignore it
    ids = torch.arange(2, 66).view(2, 32) % model.config.vocab_size
    ids[:, 0] = 1  # a prompt that both rows share
    labels = ids.clone()
    labels[0, 20:] = -100  # the first row is shorter
    model.set_attn_implementation("eager")
    wanted = get_response_log_probs(model, ids, labels)  # of the model's own output layer
    for attention in attentions:
        with contextlib.suppress(Exception):  # the model may not have this attention
            model.set_attn_implementation(attention)
            if (get_response_log_probs(policy, ids, labels) - wanted).abs().max() < 1e-3:
                return
    raise UserError(f"{type(model).__name__} is not supported: its log-probs differ")

def plan_memory(policy, cfg, device):
    """Decide what is "auto": does it fit on the GPU?"""
    free, total = torch.cuda.mem_get_info() if device == "cuda" else (math.inf, 0)
    free = min(gather(free))
    room = (free - cfg.gpu_mem_util * total) / 2**30  # GiB beside vLLM
    size = policy.model.num_parameters() / WORLD / 2**30
    # float32 weights, gradients and two moments, bf16 weights. LoRA: bf16 weights, twice
    needed = (4 if cfg.lora_rank else 18) + 2 * cfg.use_kl_penalty
    spare = room - needed * size
    # A microbatch of 20,480 tokens and its chunks of logits need up to 8.5 GiB, of 8,192 3.5 GiB.
    if cfg.tokens_per_microbatch == 0:
        cfg.tokens_per_microbatch = 8192 if spare < 8.5 else 20480
    if cfg.offload == "auto":
        cfg.offload = spare < 3.5
        cfg.gradient_checkpointing |= cfg.offload
    if cfg.vllm_sleep == "auto":
        # Offloaded bf16 weights and gradients are on the GPU during the update.
        cfg.vllm_sleep = cfg.offload and room - (2 if cfg.lora_rank else 6) * size < 3.5
    if cfg.offload or cfg.tokens_per_microbatch <= 8192:  # memory is short
        policy.logits_per_chunk = 2**26
    if cfg.offload:
        print(f"{free / 2**30:.1f} GiB of GPU memory free: weights and optimizer in host memory, "
              f"vllm_sleep={cfg.vllm_sleep}")

def add_lora(policy, rank, seed):
    """Freeze the weights; train adapters beside the linear layers."""
    from peft import LoraConfig, inject_adapter_in_model
    torch.manual_seed(seed)
    head = policy.model.get_output_embeddings()
    names = [name for name, layer in policy.named_modules()
             if type(layer) is torch.nn.Linear and layer is not head]
    # Not into policy.model: peft would replace these names by those of fused experts.
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), policy)

def compile_and_shard(policy, cfg, device):
    """Each GPU keeps a part of the weights and computes in bf16."""
    policy.device = torch.device(device)
    for parameter in policy.parameters():
        if not parameter.requires_grad:  # buffers (positions) stay float32
            parameter.data = parameter.data.to(policy.compute_dtype)
    policy.to("cpu" if cfg.offload else device)
    lists = [module for module in policy.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    if cfg.compile:
        torch._dynamo.config.specialize_float = True  # a dynamic temperature is slow
        torch.fx.experimental._config.use_duck_shape = False  # equal sizes may differ later
        policy.chunk_stats = torch.compile(chunk_stats, dynamic=True)
    for layer in layers:
        if cfg.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if cfg.gradient_checkpointing:
            layer.forward = functools.partial(recompute_in_backward, layer.forward,
                                              use_reentrant=False)
    if device == "cpu" and WORLD == 1:
        return
    options = {"mesh": dist.init_device_mesh(device, (WORLD,)),
               "reshard_after_forward": not policy.training or WORLD > 1 or cfg.vllm_sleep,
               "mp_policy": MixedPrecisionPolicy(policy.compute_dtype, reduce_dtype=torch.float32)}
    if cfg.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for module in (*layers, policy):
        fully_shard(module, **options)
    for buffer in policy.buffers():
        buffer.data = buffer.data.to(device)

def before_backward(policy, is_last, cfg):
    """Until the last microbatch, keep bf16 weights and sum offloaded gradients."""
    if WORLD == 1 and policy.device.type == "cuda":
        policy.set_reshard_after_backward(is_last or cfg.vllm_sleep)
        policy.set_requires_gradient_sync(is_last or not cfg.offload)

def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def full_weights(policy):
    """-> (name, tensor) of the model, LoRA merged"""
    weights = policy.model.state_dict()
    for name in [name for name in weights if ".lora_" not in name]:
        weight = full(weights[name].to(policy.device))
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            a, b = (full(weights[f"{layer}.lora_{part}.default.weight"].to(policy.device))
                    for part in "AB")
            weight = weight.float() + 2 * b @ a  # lora_alpha / rank is 2
        yield name.replace(".base_layer", ""), weight

class Policy(torch.nn.Module):
    """Rows -> statistics of their targets. Sharded weights are whole only in forward()."""

    def __init__(self, model, stop_ids=()):
        super().__init__()
        self.model = model
        self.device = model.device  # where rows are computed
        self.stop_ids = stop_ids
        self.chunk_stats = chunk_stats  # or compiled
        self.logits_per_chunk = 2**28  # 1 GiB of float32

    @property
    def compute_dtype(self):
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def is_packed(self):
        return self.model.config._attn_implementation == "packed"

    def forward(self, inputs, predictors, targets=None, temperature=1.0, ref_model=None):
        """-> token_stats of the M targets; without targets, hidden states"""
        # Without the output layer; base_model of Llama 4 would have it.
        body = getattr(self.model, "model", self.model.base_model)
        hidden = body(**inputs, use_cache=False).last_hidden_state  # [B, L, H]
        hidden = hidden.flatten(0, 1).index_select(0, predictors)  # [M, H]
        if targets is None:
            return hidden
        states = [hidden]
        heads = [output_layer(self.model, self.device)]
        if ref_model is not None:
            with torch.no_grad():
                states.append(ref_model(inputs, predictors))
            heads.append(output_layer(ref_model.model, self.device))
        # The logits never exist whole. Equal chunks: a rest would be compiled anew.
        n_chunks = len(hidden) * len(heads[0][0]) // self.logits_per_chunk + 1
        chunks = []
        for parts in zip(*(tensor.tensor_split(n_chunks) for tensor in (targets, *states))):
            chunks.append(recompute_in_backward(self.chunk_stats, heads, temperature, *parts,
                                                use_reentrant=False))
        return [torch.cat(pieces) for pieces in zip(*chunks)]

def output_layer(model, device):
    """-> (weight [V, H], bias, scale, cap), whole: that of a reference may be sharded"""
    config = model.config
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias = full(bias.to(device))
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere, Granite, Falcon-H1
    scale *= getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return full(layer.weight.to(device)), bias, scale, cap

def chunk_stats(heads, temperature, targets, *states):
    """-> token_stats. states: hidden [m, H] of the policy and of the reference"""
    logits = []
    for hidden, (weight, bias, scale, cap) in zip(states, heads):
        x = upcast(F.linear(hidden, weight, bias))  # [m, V]
        if cap:
            x = torch.tanh(x * (scale / cap))
            scale = cap
        logits.append(x * (scale / temperature))
    return token_stats(logits[0], targets, *logits[1:])

def token_stats(logits, targets, ref_logits=None):
    """float32 logits [M, V] -> log-probs of the targets, entropy; with a reference also its
    log-probs, exact KL: each [M]. Tokens with logit -inf add 0."""
    norm = logits.logsumexp(-1, keepdim=True)
    log_probs = (logits.gather(-1, targets[:, None]) - norm)[:, 0]
    with torch.no_grad():  # for the log: no gradient
        probs = logits.softmax(-1)
        entropy = norm[:, 0] - torch.where(probs > 0, probs * logits, 0).sum(-1)
    if ref_logits is None:
        return log_probs, entropy
    log_pi = logits - norm
    log_ref = ref_logits.log_softmax(-1)
    log_ratio = torch.where(probs > 0, log_pi - log_ref, 0).detach().clamp(-LIMIT, LIMIT)
    # Detached: its gradient would only add E[grad log pi], which is 0.
    exact_kl = (log_pi.exp() * log_ratio).sum(-1)
    return log_probs, entropy, log_ref.gather(-1, targets[:, None])[:, 0], exact_kl

def response_stats(model, input_ids, labels, mask, temperature=1.0, ref_model=None):
    """token_stats of the tokens in the mask: each [B, T], 0 elsewhere"""
    if isinstance(model, Policy):
        lay_out = pack if model.is_packed else pad
        stats = model(*lay_out(input_ids, labels, mask, model.device), temperature, ref_model)
    else:
        ref_logits = None
        if ref_model is not None:
            ref_logits = upcast(ref_model(input_ids).logits[mask].detach()) / temperature
        logits = upcast(model(input_ids).logits[mask]) / temperature
        stats = token_stats(logits, labels[mask], ref_logits)
    mask = to_device(mask, stats[0].device)
    return [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in stats]  # [M] -> [B, T]

def get_response_log_probs(model, input_ids, labels, *, response_mask=None, temperature=1.0):
    """log pi(labels[b, t] | input_ids[b, :t + 1]) -> [B, T], 0 outside the mask"""
    mask = labels >= 0
    if response_mask is not None:
        mask = mask & response_mask.bool()
    return response_stats(model, input_ids, labels, mask, temperature)[0]

def to_device(tensor, device):
    """Without waiting for the GPU"""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

def pack(input_ids, labels, mask, device):
    """Lay rows end to end; a prompt shared by neighbours only once. -> (model inputs,
    predictors [M]: slot before each target, targets [M]: response tokens)

        rows      P P a b | P P c | Q d
        ids       P P a b   c       Q d
        slots     0 1 2 3   4       5 6        key_slots  0 1 2 3 | 0 1 4 | 5 6
    """
    ids, positions, predictors = [], [], []
    key_slots = []  # of each row's tokens, the shared prompt included
    n_keys, n_queries = [], []  # tokens of each row, and without the shared prompt
    prompt = None
    for row, is_target in zip(input_ids.tolist(), mask.cpu().numpy()):
        places = np.flatnonzero(is_target)
        if len(places) == 0:
            continue
        prompt_length = places[0] + 1
        end = places[-1] + 1
        if row[:prompt_length] != prompt:
            prompt = row[:prompt_length]
            shared = []  # slots of the prompt
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
    if not ids:  # every rank must run the model: on a dummy token
        ids, positions, key_slots, n_keys, n_queries = [0], [0], [0], [1], [1]
    numbers = {"input_ids": [ids], "position_ids": [positions], "key_slots": key_slots,
               "key_starts": np.cumsum([0, *n_keys]), "query_starts": np.cumsum([0, *n_queries]),
               "predictors": predictors}
    inputs = {name: to_device(torch.tensor(values, dtype=torch.int32), device)
              for name, values in numbers.items()}
    predictors = inputs.pop("predictors")
    return inputs | {"longest": int(max(n_keys))}, predictors, to_device(labels[mask], device)

def pad(input_ids, labels, mask, device):
    """-> as pack(). As every layer is causal, no mask is needed."""
    length = int(mask.any(0).nonzero().amax()) + 1 if mask.any() else 0
    ids = input_ids[:, :length]
    if length == 0:
        ids = torch.zeros(1, 2, dtype=torch.long)  # as in pack()
    predictors = mask[:, :length].flatten().nonzero()[:, 0]
    ids, predictors, targets = (to_device(x, device) for x in (ids, predictors, labels[mask]))
    return {"input_ids": ids}, predictors, targets

def packed_attention(module, query, key, value, attention_mask, *, key_slots, query_starts,
                     key_starts, longest, scaling=None, **options):
    """Causal attention; the queries of a row are its last tokens. query: [1, heads, N, d]"""
    # No row is longer than a sliding window.
    is_plain = options.keys() <= {"dropout", "position_ids", "use_cache", "sliding_window"}
    if not (is_plain and attention_mask is None and query.shape[-1] == value.shape[-1] <= 256):
        raise NotImplementedError("choose_layout() then pads")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, d]
    if q.is_cuda and q.dtype == torch.bfloat16:
        out = varlen_attn(q, k[key_slots], v[key_slots], query_starts, key_starts, longest, longest,
                          scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None
    # No flash attention: whole rows, padded at the end
    n_keys = key_starts.diff()[:, None]  # [R, 1]
    place = torch.arange(longest, device=q.device)  # [L]
    is_key = place < n_keys  # [R, L]
    is_query = is_key & (place >= n_keys - query_starts.diff()[:, None])
    slots = key_slots.new_zeros(is_key.shape).masked_scatter(is_key, key_slots)
    q, k, v = (x[slots].transpose(1, 2) for x in (q, k, v))  # [R, heads, L, d]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[is_query][None], None

AttentionInterface.register("packed", packed_attention)

# ---- 5. Evaluation, log, checkpoints

def evaluate_model(llm, task, n=1):
    """-> (metrics, n Responses to each held-out problem); seeds are fixed"""
    responses = rollout_with_vllm(llm, task, share(task.held_out), n, "eval")
    grade(responses, task.cfg.reward_truncated)
    responses = sum(gather(responses), [])
    rewards = np.array([response.reward for response in responses])
    metrics = {"eval/accuracy": (rewards >= 0.9).mean(), "eval/mean_reward": rewards.mean()}
    return metrics, responses

def evaluate(policy, llm, task, log, state, rollout=()):
    """-> metrics. Keeps best/. rollout: responses of which a group is shown"""
    metrics, responses = evaluate_model(llm, task)
    if state.step == 0:
        state.first_accuracy = metrics["eval/accuracy"]
    elif metrics["eval/mean_reward"] > state.best_reward:
        save_model(policy, task.tokenizer, log.folder / "best")
    state.best_reward = max(metrics["eval/mean_reward"], state.best_reward)
    group = sorted(rollout[:task.cfg.group_size], key=lambda response: response.reward)
    log_eval(log, state, metrics, responses[:2] + group[-1:] + group[:1])
    return metrics

def now():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()

def step_metrics(responses, details, group_size, kl_coef):
    """-> {name: number} over all ranks"""
    rows = [(x.reward, sum(x.mask), not x.finished) for x in responses]
    rewards, lengths, truncated = np.array(sum(gather(rows), [])).T
    spread = np.ptp(rewards.reshape(-1, group_size), axis=1)
    metrics = {
        "train/reward_mean": rewards.mean(), "train/frac_groups_zero_std": (spread == 0).mean(),
        "train/truncated_frac": truncated.mean(), "train/avg_output_tokens": lengths.mean()}
    details = [detail for detail in sum(gather(details), []) if detail["n_tokens"]]
    weights = [detail["n_tokens"] for detail in details]
    for key, name in TOKEN_METRICS.items():
        if details and (kl_coef or not name.startswith("kl/")):
            values = [detail[key] for detail in details]
            fold = EXTREMES.get(key)
            metrics[name] = float(fold(values) if fold else np.average(values, weights=weights))
    return metrics

class Log:  # the records of a run, written by rank 0
    def __init__(self, folder, cfg, saved=None):
        self.folder = folder
        if RANK:
            return
        with written_whole(folder / "config.json") as temporary:
            temporary.write_text(json.dumps(vars(cfg), indent=1))
        step = saved["state"]["step"] if saved else -1
        path = folder / "metrics.jsonl"
        if path.exists():  # steps after the checkpoint repeat
            lines = path.read_bytes().splitlines(True)
            os.truncate(path, sum(map(len, lines[:step + 1])))
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder.parent / "tb" / folder.name, purge_step=step + 1)

    def append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def write(self, step, metrics):
        if RANK:
            return
        metrics = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.append("metrics.jsonl", {"step": step} | metrics)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

def log_train(step, metrics, cfg):
    line = ("Step {step} | Loss: {train/loss:.4f} | Grad norm: {train/grad_norm:.4f} | "
            "Reward mean: {train/reward_mean:.3f} | Entropy: {train/entropy:.3} | "
            "Tokens: {train/avg_output_tokens:.1f} | Cut off: {train/truncated_frac:.1%} | "
            "rollout {time/rollout:.2f} train {time/train:.2f} sync {time/sync:.2f} s | "
            "ETA {minutes_left:.1f} min")
    if "kl/mean" in metrics:
        line += " | KL: {kl/mean:.4f} | KL penalty: {train/kl_penalty:.4f}"
    minutes_left = min((cfg.n_grpo_steps - step) * metrics["time/step"] / 60,
                       (cfg.max_minutes or math.inf) - metrics["time/minutes"])
    print(line.format(**{"train/entropy": "-"} | metrics, step=step, minutes_left=minutes_left))

def log_eval(log, state, metrics, responses):
    """One response goes to the console, all to TensorBoard and samples.jsonl."""
    print(f"  {responses[0].text()!r:.300} has reward {responses[0].reward:g}")
    print(f"Step {state.step} | Held-out accuracy, sampled: {metrics['eval/accuracy']:.1%} "
          f"(at step 0: {state.first_accuracy:.1%}) | "
          f"Mean reward: {metrics['eval/mean_reward']:.3f}")
    if RANK:
        return
    for i, response in enumerate(responses):
        sample = {"step": state.step, "prompt": response.problem["rendered"],
                  "turns": response.problem["turns"], "reward": response.reward}
        log.append("samples.jsonl", sample)
        text = html.escape(json.dumps(sample, indent=1, ensure_ascii=False))
        log.writer.add_text(f"sample {i}", f"<pre>{text}</pre>", state.step)

@contextlib.contextmanager
def written_whole(path):
    """A temporary path that becomes `path`; after a kill, the old or the new one is whole."""
    new = path.with_name(f"{path.name}.new")
    old = path.with_name(f"{path.name}.old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        yield new
        shutil.rmtree(old, ignore_errors=True)
        if path.is_dir():
            path.rename(old)
        new.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        raise UserError(f"cannot write {path} ({error}). Is the disk full?") from error

def save_model(policy, tokenizer, folder):
    """For transformers and vLLM, LoRA merged"""
    config = policy.model.config
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=policy.compute_dtype)
    shell.generation_config.update(  # ends as in training, no top-k
        do_sample=True, top_k=0, eos_token_id=policy.stop_ids or None)
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    weights = {}
    for name, weight in full_weights(policy):  # on all ranks: it gathers
        if RANK == 0 and name != tied:
            weights[name] = weight.detach().to("cpu", policy.compute_dtype)
    if RANK == 0:
        with written_whole(folder) as temporary:
            shell.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)

WHOLE = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = dataclasses.replace(WHOLE, ignore_frozen_params=True, strict=False)

def save_checkpoint(folder, policy, optimizer, ref_model, state):
    saved = {"state": json.loads(json.dumps(vars(state))),  # plain numbers only
             "weights": state_dicts.get_model_state_dict(policy, options=TRAINED)}
    if optimizer.state:  # torch fills an empty one with a step()
        saved["moments"] = state_dicts.get_optimizer_state_dict(policy, optimizer, options=TRAINED)
    if ref_model and state.ref_step:
        saved["ref"] = state_dicts.get_model_state_dict(ref_model, options=WHOLE)
    if RANK == 0:
        with written_whole(folder / "checkpoint.pt") as temporary:
            torch.save(saved, temporary)

@contextlib.contextmanager
def steps_kept(*parts):
    """Save a checkpoint if reward_fn or reply fails."""
    try:
        yield
    except Exception:
        if WORLD == 1:
            save_checkpoint(*parts)
        raise

def restore(saved, policy, optimizer, ref_model, state):
    state_dicts.set_model_state_dict(policy, saved["weights"], options=TRAINED)
    if "moments" in saved:
        state_dicts.set_optimizer_state_dict(policy, optimizer, saved["moments"], options=TRAINED)
    if "ref" in saved and ref_model:
        state_dicts.set_model_state_dict(ref_model, saved["ref"], options=WHOLE)
    vars(state).update(saved["state"])
    saved.clear()  # frees its memory

def catch_signals():
    """Ctrl-C and SIGTERM end the run after its step, a second Ctrl-C at once."""
    received = []

    def handler(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again quits without saving")

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    # Processes of reward_fn can still be terminated.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return received

# ---- 6. Settings, run folder

def read_arguments(argv):
    """["--lr=1e-5", "--compile"] -> {"lr": "1e-5", "compile": "True"}"""
    given = {}
    for word in argv:
        match = re.fullmatch("--([a-z_]+)(=.*)?", word, re.DOTALL)
        if not match:
            raise UserError(f"cannot read {word!r}: write --name=value")
        given[match[1]] = (match[2] or "=True")[1:]
    return given

def settings_of_run(cfg, typed):
    """-> the settings of the run to resume; what is typed wins"""
    folder = Path(cfg.resume)
    if cfg.resume == "latest":
        folder = Path(cfg.out_dir, "latest")
    if not (folder / "config.json").exists():
        raise UserError(f"no run to resume in {folder}")
    for script in folder.glob("*.py"):
        if script.name not in (Path(__file__).name, Path(SCRIPT).name):
            print(f"!!! {script.name} started this run: its reward is not used")
    saved = json.loads((folder / "config.json").read_text())
    return saved | typed | {"resume": str(folder.resolve())}

def override(cfg, given):
    """Each value gets the type of the default."""
    flags = {"true": True, "false": False}
    for name, value in given.items():
        if name not in vars(cfg):
            near = difflib.get_close_matches(name, vars(cfg), 1) or ["--help"]
            raise UserError(f"there is no hyperparameter {name}: did you mean {near[0]}?")
        default = getattr(cfg, name)
        try:
            if default == "auto":
                value = (flags | {"auto": "auto"})[str(value).lower()]
            elif isinstance(default, bool):
                value = flags[str(value).lower()]
            else:
                value = type(default)(str(value))  # int("0.5") raises
            if not isinstance(value, str) and value < 0 <= default:
                raise ValueError
        except (ValueError, KeyError):
            raise UserError(f"--{name}={value}: expected something like {default}") from None
        setattr(cfg, name, value)

def check_settings(cfg, typed):
    needs_kl = [name for name in typed if name.startswith(("kl_", "target_kl", "ref_update"))]
    rules = {
        "temperature must be above 0": cfg.temperature > 0,
        "loss_type must be grpo, dr_grpo or dapo": cfg.loss_type in ("grpo", "dr_grpo", "dapo"),
        "kl_estimator must be k1, k2, k3 or exact": cfg.kl_estimator in ("k1", "k2", "k3", "exact"),
        "kl_in must be loss, or reward with kl_estimator=k1":
            cfg.kl_in == "loss" or (cfg.kl_in, cfg.kl_estimator) == ("reward", "k1"),
        f"{', '.join(needs_kl)}: set use_kl_penalty, too": cfg.use_kl_penalty or not needs_kl,
        "group_size must be at least 2 and divide rollout_batch_size":
            cfg.group_size > 1 and cfg.rollout_batch_size % cfg.group_size == 0}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(rule)
    if (cfg.kl_in, cfg.kl_estimator, cfg.kl_importance_weight) == ("loss", "k1", False):
        print("!!! plain k1 is no penalty: its mean gradient is 0")

def make_run_folder(cfg, given):
    """-> a new folder like out/0003_lr=1e-4, also out/latest"""
    if RANK:
        return None
    out = Path(cfg.out_dir).absolute()
    words = [f"_{name}={value.rpartition('/')[2]}" for name, value in given.items()]
    label = re.sub(r"(?a)[^\w=.+-]", "-", "".join(words))[:200]
    numbers = [int(path.name[:4]) for path in out.glob("[0-9][0-9][0-9][0-9]*")]
    folder = out / f"{max(numbers, default=0) + 1:04d}{label}"
    folder.mkdir(parents=True)
    for script in {__file__, SCRIPT}:
        shutil.copy(script, folder)
    (folder / "latest").symlink_to(folder.name)
    (folder / "latest").replace(out / "latest")
    print(f"run folder: {folder}")
    return folder

# ---- 7. Quick tests

def test_functions():
    """A worked batch, computed by a plain formula"""
    numbers = torch.arange(16.0).view(4, 4)
    table = (1.5 * torch.sin(numbers)).requires_grad_()
    ref_table = table.detach() + 0.8 * torch.sin(3 * numbers)
    policy, ref_model = (lambda ids, x=x: SimpleNamespace(logits=x[ids])
                         for x in (table, ref_table))
    tokens = torch.tensor([[0, 1, 2, 3], [0, 3, 1, 0], [2, 1, 0, 2], [2, 2, 3, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 0]])
    sampled = -torch.tensor([[1.0, 2.0, 0.5], [0.4, 1.5, 0.0], [4.0, 0.0, 1.1], [0.9, 1.6, 0.0]])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]) / 2**0.5
    for loss_type, estimator, is_weighted, kl_in, *wanted in (
            ("grpo", "k3", True, "loss", 0.32489, 0.35687, 0.70573),
            ("dapo", "k1", True, "loss", -0.51414, 0.03079, 0.08365),
            ("dapo", "k2", False, "loss", 0.07218, -0.04137, 0.23087),
            ("dapo", "k1", False, "reward", -0.28645, -0.01982, 0.09626),
            ("dr_grpo", "exact", True, "loss", -0.00650, 0.01892, 0.07827)):
        loss, _ = grpo_microbatch_step(
            policy, tokens[:, :-1], tokens[:, 1:], mask, advantages, 1, 0.2, loss_type, 5,
            ref_model, 0.3, old_log_probs=0.8 * sampled, clip_range_high=0.28, temperature=0.7,
            rollout_log_probs=sampled, kl_estimator=estimator, kl_importance_weight=is_weighted,
            kl_in=kl_in)
        gradient, table.grad = table.grad, None
        got = torch.stack([loss, (gradient * torch.cos(numbers)).sum(), gradient.norm()])
        error = (got - torch.tensor(wanted)).abs().max()
        assert error < 2e-5, f"if you meant to change the loss: its numbers are now {got.tolist()}"
    print("=== All Tests Passed! ===")

def run(main):
    sys.stdout.reconfigure(line_buffering=True)
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    code = 1
    try:
        main()
        code = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError as error:
        print(f"error: {error!s:.150} ... Try in order: --offload=True, --vllm_sleep=True, "
              "a smaller --tokens_per_microbatch, another --gpu_mem_util, --lora_rank=32",
              file=sys.stderr)
    except BaseException:  # also a second Ctrl-C
        traceback.print_exc()
    os._exit(code)  # a plain exit may hang

if __name__ == "__main__":
    run(main)

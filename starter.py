"""GRPO for language models in one file. Read it from top to bottom, edit main(), run it.

    python starter.py                    train: a 1.5 B model on a GPU, a tiny one on a CPU
    python starter.py --lr=1e-5          set any hyperparameter; --help lists them
    python starter.py --task=my_task.py  train on rows and a reward of your own (section 1)
    python starter.py --resume=latest    continue an interrupted run
    torchrun --nproc_per_node=8 --shutdown-timeout=600 starter.py

One step: sample a group of responses to each prompt, reward them, and raise the probability of
those that scored above their group's mean. Where this differs from the GRPO paper, and why:
1. The KL penalty is off by default, and its gradient is that of KL(policy || start). See KL.md.
2. vLLM samples and torch trains. Their log-probs differ a little, so the loss of each token is
   weighted by the ratio of the two (truncated importance sampling).
3. The loss is divided once per optimizer step, so the gradient does not depend on the number of
   microbatches or GPUs.
4. A response that is cut off earns at most 0. Otherwise models learn never to stop.

main() and train() are the program, sections 1 and 2 are the algorithm. Section 5 only makes it
fast: skip it on a first reading. test_starter.py has one whole step in its plainest form.
"""
import os, signal, sys, time
from pathlib import Path

# Answered before the slow imports. A tool that imports this file shows its own docstring first.
if {"-h", "--help"} & set(sys.argv[1:]):
    print(sys.modules["__main__"].__doc__ or __doc__)
    print(Path(__file__).read_text("utf-8").split("\n    # ----")[1])
    sys.exit()

STARTED = time.perf_counter()
__version__ = "0.5.0"
# vLLM's engine lives in this process, where it can read the policy's weights directly.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Libraries are quiet, unless you have set these variables yourself.
for variable in ("VLLM_LOGGING_LEVEL=ERROR", "VLLM_HOST_IP=127.0.0.1", "TQDM_DISABLE=1",
                 "TORCH_CPP_LOG_LEVEL=ERROR", "TORCH_LOGS=-torch._library",
                 "TRANSFORMERS_VERBOSITY=error"):
    os.environ.setdefault(*variable.split("="))
# torchrun starts one process per GPU. Its number is the rank, and it sees only its own GPU.
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
IS_MAIN = RANK == 0  # the process that prints and writes files
if "LOCAL_RANK" in os.environ:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", str(LOCAL_RANK)).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[LOCAL_RANK % len(gpus)]

import contextlib, copy, dataclasses, difflib, fractions, functools, html, importlib.util, json
import math, random, re, shutil, tempfile, traceback, warnings, zlib
from types import SimpleNamespace
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint as recompute  # in backward()
from tqdm import tqdm
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
warnings.filterwarnings("ignore", category=FutureWarning)

class UserError(Exception):
    """A mistake that a person can mend: run() prints one line instead of a traceback."""

def gather(value):
    """-> [value on rank 0, on rank 1, ...]. Every rank must call it, and waits for the others."""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values

def this_ranks_part(items):
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]

def main(argv=None, only_settings=False):
    has_gpu = torch.cuda.is_available()
    # ---- hyperparameters. Without a GPU their defaults suit the tiny model.
    cfg = SimpleNamespace(
        # model
        model_id="Qwen/Qwen2.5-Coder-1.5B-Instruct" if has_gpu else "tiny",  # folder or hub name
        lora_rank=0,  # above 0: train adapters, with about 10 x lr
        gradient_checkpointing=has_gpu,  # half the memory, a quarter more time
        compile=has_gpu,  # the update takes 40 % less time, the first steps longer
        offload="auto",  # weights and optimizer in host memory; auto: if they do not fit
        # run
        seed=42,
        out_dir="out",  # every run gets a folder in it
        resume="",  # a run folder, or "latest"
        n_grpo_steps=100,
        max_minutes=0.0,  # of this process; 0: no limit
        eval_every=20,  # steps; 0: no evaluation
        n_eval=400 if has_gpu else 1000,  # how many of the held-out problems are evaluated
        correct_reward=0.9,  # accuracy is the share of responses with at least this reward
        save_every=50 if has_gpu else 20,  # steps between checkpoints; 0: only on Ctrl-C
        # task
        task="countdown" if has_gpu else "tiny",  # in tasks/; or a task file, JSONL file or folder
        eval_task="",  # another one, for its held-out rows only; "": some rows of task are held out
        prompt="{question} Think step by step, then give the answer as <answer>...</answer>.",
        thinking=False,  # what a chat template with enable_thinking is told
        # rollout
        use_vllm=True,  # False: sample with plain torch, slowly
        rollout_batch_size=512 if has_gpu else 256,  # responses per step
        group_size=16 if has_gpu else 8,  # responses per prompt
        temperature=1.0,
        max_tokens=512 if has_gpu else 24,  # of a response
        max_prompt_tokens=256 if has_gpu else 32,  # longer prompts are left out
        max_turns=10,  # of the model, if the task has a reply()
        reward_truncated=False,  # False: a response that is cut off earns 0 at most
        gpu_mem_util=0.4,  # vLLM's share of GPU memory
        vllm_sleep="auto",  # free that share during the update; auto: if nothing else fits
        # update
        lr=1.5e-6 if has_gpu else 2e-4,
        warmup_steps=10,  # lr rises linearly
        max_grad_norm=1.0,  # 0: no clipping
        inner_epochs=1,  # passes over the responses of a step
        n_minibatches=1,  # optimizer steps per pass
        tokens_per_microbatch=0,  # 0: 20480, or 8192 on a small GPU
        # loss
        policy_loss="ppo",  # or "cispo", "dppo", "gspo": see compute_loss()
        clip_range=0.2,  # of the ratio; gspo: about 3e-4; dppo: of the probability
        clip_range_high=0.0,  # upper limit (DAPO: 0.28); 0: clip_range
        loss_type="grpo",  # mean per response; "dr_grpo": sum / max_tokens; "dapo": mean per token
        advantage_scale="std",  # of rewards in a group; or "none"; "mean" (MaxRL, rewards 0 or 1)
        # KL penalty towards the starting model (KL.md)
        use_kl_penalty=False,
        kl_coef=0.005 if has_gpu else 0.1,  # 0.5 / (tokens of a response x deviation of rewards)
        kl_estimator="k3",  # or "k1", "k2", "exact" (over the vocabulary)
        kl_importance_weight=True,  # False: the plain formula (KL.md)
        kl_in="loss",  # or "reward", with k1: the KL of the whole response
        kl_warmup_steps=0,  # kl_coef rises linearly
        target_kl=0.0,  # nats per token; above 0: kl_coef is adapted to reach it
        ref_update_every=0,  # steps until the policy becomes the new reference; 0: never
    )
    # ----
    typed = read_settings(cfg, sys.argv[1:] if argv is None else argv)
    if only_settings:
        return cfg
    test_functions()
    device = "cuda" if has_gpu else "cpu"
    # On a CPU a run repeats to the bit. On a GPU this mode would be slow.
    torch.use_deterministic_algorithms(not has_gpu)
    # A single process joins a group, too (of its own), so that any number of GPUs runs this code.
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", rank=RANK,
                                world_size=WORLD, store=dist.HashStore() if WORLD == 1 else None)
    # Data and checkpoint come before the model, so that a mistake in them shows within seconds.
    prepare(cfg)
    task = Task(cfg)
    saved = read_checkpoint(cfg)
    policy, tokenizer = init_policy(cfg.model_id, cfg.max_prompt_tokens + cfg.max_tokens)
    task.encode(tokenizer, policy.stop_ids)
    # config.json keeps "auto" as it is: a resumed run may have another GPU and decides anew.
    settings = vars(cfg) | {"version": __version__}
    plan_memory(policy, cfg, device)
    if cfg.lora_rank:
        add_lora(policy, cfg.lora_rank, cfg.seed)
    ref_model = None
    if cfg.use_kl_penalty:
        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)
        compile_and_shard(ref_model, cfg, device)
    compile_and_shard(policy, cfg, device)
    print(f"{policy.model.num_parameters():,} parameters, {WORLD} x {device}, "
          f"rows {'packed' if policy.is_packed else 'padded (slower)'}")
    llm = init_vllm(policy, tokenizer, cfg, task.turn_ends)
    folder = gather(cfg.resume or (IS_MAIN and make_run_folder(cfg, typed)))[0]
    log = Log(Path(folder), settings, saved)
    train(policy, llm, cfg, log, ref_model, cfg.kl_coef if ref_model else 0.0, task=task,
          saved=saved)
    print(f"\n  try it    python sample.py --model_id='{log.folder}/model'\n"
          f"  curves    tensorboard --logdir '{log.folder.parent}/tb'")

def train(policy, llm, cfg, log, ref_model=None, kl_coef=0.0, *, task, saved=None):
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    # update_weights() sets the learning rate: a scheduler of torch would change only the log.
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # The numbers that a resumed run needs. What you add here is saved and restored, too: numbers,
    # texts, lists.
    state = SimpleNamespace(
        step=0, next_problem=0,  # train(): steps done, problems used
        skipped=0, skips_in_a_row=0, lr_factor=1.0,  # update_weights()
        best_reward=-math.inf,  # evaluate_and_keep_best()
        first_gap=0.0,  # check_agreement()
        kl_factor=1.0, kl_smooth=0.0, kl_was_high=False, ref_step=0)  # target_kl, ref_update_every
    checkpoint = Checkpoint(log.folder / "checkpoint.pt", policy, optimizer, ref_model, state)
    signals = catch_signals()
    if saved:
        checkpoint.restore(saved)
        load_policy_into_vllm_instance(policy, llm)
    else:
        metrics = evaluate_and_keep_best(policy, llm, task, log, state) if cfg.eval_every else {}
        log.write(0, metrics)
    for step in range(state.step + 1, cfg.n_grpo_steps + 1):
        # Rollout: sample group_size responses to each prompt and reward each of them.
        started = synced_time()
        problems = task.problems(state.next_problem)
        with checkpoint.saved_on_error():
            responses = rollout_with_vllm(
                llm, task, this_ranks_part(problems), cfg.group_size, cfg.seed)
            grade(task, responses)
        state.next_problem += len(problems)
        state.step = step

        # Batch: B responses of at most T tokens, with one advantage each.
        update_started = synced_time()
        if cfg.vllm_sleep:
            llm.sleep(level=2)
        batch = make_batch(responses)
        rewards = torch.tensor([response.reward for response in responses])
        advantages = group_advantages(rewards, cfg.group_size, cfg.advantage_scale)  # [B]
        kl_now = kl_coef * state.kl_factor * min(1.0, step / max(1, cfg.kl_warmup_steps))
        trained_rows = rows_with_a_gradient(advantages, kl_now, step)
        minibatches = make_minibatches(cfg, step, len(responses))

        # Log-probs that stay fixed during the update, each [B, T].
        fixed_log_probs = {"rollout_log_probs": batch.rollout_log_probs}
        if len(minibatches) > 1:  # with a single one old and new are equal
            fixed_log_probs["old_log_probs"] = score(policy, batch, trained_rows, cfg)
        if kl_now and cfg.kl_estimator != "exact":  # the exact KL needs logits instead
            fixed_log_probs["ref_log_probs"] = score(ref_model, batch, trained_rows, cfg)

        # Update: one optimizer step per minibatch. Microbatches are what fits into memory at once.
        microbatch_stats, losses, grad_norms = [], [], []
        for minibatch in minibatches:
            # The divisor counts all rows of the minibatch, also those without a gradient.
            # fully_shard averages gradients over ranks, so every rank divides by the mean of the
            # divisors, not by their sum.
            divisor = np.mean(gather(loss_divisor(
                batch.response_mask[minibatch], cfg.loss_type, cfg.max_tokens)))
            rows = sorted(set(minibatch) & set(trained_rows))
            microbatches = make_microbatches(batch, rows, cfg, policy.is_packed)
            loss = 0.0
            for number, micro in enumerate(microbatches, 1):
                defer_gradient_sync(policy, cfg, is_last=number == len(microbatches))
                _, metadata = grpo_microbatch_step(
                    policy, batch.input_ids[micro], batch.labels[micro], batch.response_mask[micro],
                    advantages[micro], divisor=divisor, loss_type=cfg.loss_type,
                    policy_loss=cfg.policy_loss, clip_range=cfg.clip_range,
                    clip_range_high=cfg.clip_range_high, temperature=cfg.temperature,
                    ref_model=ref_model, kl_coef=kl_now, kl_estimator=cfg.kl_estimator,
                    kl_in=cfg.kl_in, kl_importance_weight=cfg.kl_importance_weight,
                    **{name: values[micro] for name, values in fixed_log_probs.items()})
                loss += metadata["loss"]
                microbatch_stats.append(metadata)
            losses.append(np.mean(gather(loss)))
            grad_norms.append(update_weights(policy, optimizer, losses[-1], cfg, state))

        # Sync: vLLM gets the new weights.
        sync_started = synced_time()
        if cfg.vllm_sleep:
            llm.wake_up()
        load_policy_into_vllm_instance(policy, llm)
        ended = synced_time()
        metrics = step_metrics(responses, microbatch_stats, cfg.group_size, kl_now) | {
            "train/loss": np.mean(losses), "train/grad_norm": np.mean(grad_norms),
            "train/lr": optimizer.param_groups[0]["lr"], "train/kl_coef": kl_now,
            "train/skipped_steps": state.skipped, "time/rollout": update_started - started,
            "time/train": sync_started - update_started, "time/sync": ended - sync_started,
            "time/step": ended - started}
        log_train(step, metrics, cfg)
        is_cut_off = metrics["train/truncated_frac"] > 0.9
        if responses and step <= 3 and (is_cut_off or metrics["train/frac_groups_zero_std"] == 1):
            print(f"!!! {'most responses are cut off' if is_cut_off else 'all rewards are equal'}: "
                  "check prompt, chat template, max_tokens, reward_fn: "
                  f"{responses[0].problem['rendered']!r:.500} -> {responses[0].text()!r:.500}")
        if kl_now and cfg.target_kl and math.isfinite(metrics["kl/mean"]):
            adapt_kl_coef(state, metrics["kl/mean"], cfg)
        if kl_now and cfg.ref_update_every and step % cfg.ref_update_every == 0:
            refresh_reference(ref_model, policy, state)

        # Evaluate, save. The step is complete. In a single process no error loses it from here on,
        # and the last model is written first.
        is_stopped = any(gather(len(signals)))
        is_last = step == cfg.n_grpo_steps or any(gather(0 < cfg.max_minutes < minutes_running()))
        if is_last or is_stopped:
            save_model(policy, task.tokenizer, log.folder / "model")
        try:
            with checkpoint.saved_on_error():
                check_agreement(metrics, microbatch_stats, state, policy.device)
                if cfg.eval_every and (step % cfg.eval_every == 0 or is_last):
                    metrics |= evaluate_and_keep_best(policy, llm, task, log, state, responses)
        finally:
            # Also if one of them raises: Log takes row n of metrics.jsonl for step n.
            log.write(step, metrics)
        if is_stopped or (cfg.save_every and (step % cfg.save_every == 0 or is_last)):
            checkpoint.save()
        if is_stopped and step < cfg.n_grpo_steps:
            print(f"stopped after step {step}: --resume='{log.folder}' continues")
        if is_stopped or is_last:
            break

# ---- 1. Task: rows, prompts, answers, reward -----------------------------------------------------
# A task is a file. A JSONL file has rows such as {"prompt": "2+3?", "answer": "5"}, and reward_fn
# below rewards the responses. A Python file has a function rows() that returns such dicts. It may
# also have a reward_fn, reply() for several turns, TURN_ENDS, SETTINGS and prepare(): see tasks/.

def reward_fn(generated_text, ground_truth):
    """1.0 for a correct answer, 0.1 for a wrong one, 0.0 for none. ground_truth: the row of the
    task. Edit this function, or write one with the same arguments in a task file."""
    answer = final_answer(generated_text)
    if answer is None:
        return 0.0
    return 1.0 if normalize(answer) == normalize(ground_truth["answer"]) else 0.1

# <answer>42</answer>, \boxed{\frac{1}{2}} and `#### 42`. The patterns take linear time, whatever a
# model writes. A box may contain two levels of braces.
TAGS = r"<answer>((?:(?!</?answer>).)*)</answer>"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
HASHES = r"#### *([-+$]{0,2}\.?[0-9][0-9.,/]*)"

def final_answer(text):
    """-> the last answer after the reasoning, or None"""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    answer = None
    for match in re.finditer(f"{TAGS}|{BOX}|{HASHES}", text, re.DOTALL):
        answer = match[match.lastindex]
    return answer

def normalize(answer):
    """-> a Fraction if the answer is a number, otherwise a text. Equal means: the same answer."""
    # A minus sign is not a hyphen; LaTeX writes 10{,}000.
    text = str(answer).lower().replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    # "2 1/2" and "2\frac{1}{2}" become "2+1/2". Without the plus they would be 21/2.
    text = re.sub(r"(?<=[0-9])\s+(?=[0-9])|(?<=[0-9])\s*(?=\\[dt]?frac)", "+", text)
    # "\left(3,\;4\right)" -> "(3,4)", "90^\circ" -> "90", "\$5", "50 %" -> "5", "50"
    text = re.sub(r"\\left|\\right|\^\\circ|\^\{\\circ\}|\\[,!; ]|\\?[$%]|\s", "", text)
    # "\frac12" and "\dfrac{1}{2}" -> "1/2"
    text = re.sub(r"\\[dt]?frac(?:([0-9])([0-9])|\{(-?[0-9]+)\}\{([0-9]+)\})", r"\1\3/\2\4", text)
    text = re.sub(r"\\(?:boxed|text|mathrm)\{([^{}]*)\}", r"\1", text)  # "\text{yes}" -> "yes"
    # "1,200" -> "1200", but "(3,4)" stays; "**18.**" -> "18"
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).strip("*").rstrip(".")
    if re.fullmatch("[-+./0-9]{1,64}", text):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            return fractions.Fraction(text)
    return text

class Task:
    """Rows, reward and replies of cfg.task. The tokenizer comes later, with encode()."""
    def __init__(self, cfg):
        self.cfg = cfg
        task_file = load_task_file(cfg.task)
        self.reward_fn = getattr(task_file, "reward_fn", reward_fn)
        # reply(problem, text) says what the environment answers to a turn of the model, or None at
        # the end. A text in TURN_ENDS also ends a turn; the reply then continues the response.
        self.reply = getattr(task_file, "reply", None)
        turn_ends = getattr(task_file, "TURN_ENDS", ())
        self.turn_ends = (turn_ends,) if isinstance(turn_ends, str) else tuple(turn_ends)
        self.train_rows, self.held_out_rows = read_task(cfg)

    def encode(self, tokenizer, stop_ids):
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self.training = self.encode_rows(self.train_rows)
        self.held_out = self.encode_rows(self.held_out_rows[:self.cfg.n_eval])

    def encode_rows(self, rows):
        encoded = []
        for number, row in enumerate(rows):
            rendered = render_chat(row["prompt"], self.tokenizer, self.cfg.thinking)
            ids = self.tokenizer.encode(rendered, add_special_tokens=False)
            if len(ids) <= self.cfg.max_prompt_tokens:
                encoded.append(
                    row | {"rendered": rendered, "prompt_ids": ids, "problem_number": number})
        if len(encoded) < len(rows):
            print(f"!!! {len(rows) - len(encoded)} of {len(rows)} prompts exceed max_prompt_tokens")
        if rows and not encoded:
            raise UserError("no prompts are left: all are too long. Raise --max_prompt_tokens")
        return encoded

    def problems(self, first):
        """-> the problems of a step, from number `first` on. Every epoch has another order."""
        problems = []
        for number in range(first, first + self.cfg.rollout_batch_size // self.cfg.group_size):
            epoch, position = divmod(number, len(self.training))
            order = np.random.default_rng([self.cfg.seed, epoch]).permutation(len(self.training))
            # From here problem_number counts the draws, so that a repeated row gets new seeds.
            problems.append(self.training[order[position]] | {"problem_number": number})
        return problems

def render_chat(messages, tokenizer, thinking=False):
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + "".join(turn["content"] + "\n" for turn in messages)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                         enable_thinking=thinking)

def render_reply(said, tokenizer, thinking=False):
    """-> what the chat template puts between two turns of the model"""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "MODELS_TURN"},
                {"role": "user", "content": said}]
    _, turn, after = render_chat(messages, tokenizer, thinking).partition("MODELS_TURN")
    if not turn:
        raise UserError("reply() needs a chat template that shows earlier turns of the model")
    return after.lstrip()

def find_stop_ids(model, tokenizer):
    """-> ids that end a response: the end tokens, and the one that closes a turn of a chat"""
    ends = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id).tolist()}
    with contextlib.suppress(Exception):  # the template may refuse a second turn
        closing = tokenizer.encode(render_reply("?", tokenizer), add_special_tokens=False)
        ends |= set(closing[:1]) & tokenizer.added_tokens_decoder.keys()
    return sorted(end for end in ends - {None} if end < model.config.vocab_size)

# ---- 2. Advantages, batch, loss, KL, update ------------------------------------------------------
def group_advantages(rewards, group_size, normalize_by_std, eps=1e-6):
    """-> [N]: reward - mean of its group. normalize_by_std: divided by the group's standard
    deviation ("std" or True), its mean ("mean": MaxRL, arXiv 2602.02710), or not ("none", False)"""
    groups = rewards.view(-1, group_size)
    deviation = groups.std(1, keepdim=True) + eps
    # Of absolute values: a mean around 0 would blow up advantages, one below 0 turn their sign.
    mean = groups.abs().mean(1, keepdim=True)
    divisors = {"std": deviation, True: deviation, "mean": mean, "none": 1.0, False: 1.0}
    advantages = (groups - groups.mean(1, keepdim=True)) / divisors[normalize_by_std]
    # Equal rewards give exactly 0. Rounding errors divided by a tiny deviation would not.
    is_flat = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return torch.where(is_flat, 0.0, advantages).flatten()

def rows_with_a_gradient(advantages, kl_coef, step):
    """-> rows that are computed; the others are skipped, which saves time. A row has a gradient if
    it has an advantage or a KL penalty. If you add another term to the loss, such as an entropy
    bonus, return all rows. Step 1 has all, so that check_agreement() sees every response."""
    if step == 1 or kl_coef:
        return list(range(len(advantages)))
    return advantages.nonzero()[:, 0].tolist()

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
        input_ids=tokens[:, :-1], labels=tokens[:, 1:], response_mask=mask[:, 1:], lengths=lengths,
        rollout_log_probs=sampled[:, 1:], prompts=[response.prompt_ids for response in responses])

def make_minibatches(cfg, step, n_rows):
    """-> this rank's rows of each optimizer step, which is the same on any number of ranks"""
    rows_per_rank = gather(n_rows)
    first = sum(rows_per_rank[:RANK])  # the number of this rank's first row among those of all
    minibatches = []
    for epoch in range(cfg.inner_epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(sum(rows_per_rank))
        # Counted from this rank's first row, the rows of other ranks are out of range.
        for minibatch in np.array_split(order - first, cfg.n_minibatches):
            minibatches.append(sorted(row for row in minibatch.tolist() if 0 <= row < n_rows))
    return minibatches

def make_microbatches(batch, rows, cfg, is_packed):
    """-> lists of rows with at most tokens_per_microbatch tokens, as many lists on every rank"""
    if not is_packed:  # rows of similar length need little padding
        rows = sorted(rows, key=lambda row: -batch.lengths[row])
    microbatches, n_tokens = [], 0
    for row in rows:
        size = batch.lengths[row]
        if microbatches and not is_packed:
            size = batch.lengths[microbatches[-1][0]]  # padded to the longest
        elif microbatches and batch.prompts[row] == batch.prompts[microbatches[-1][-1]]:
            size -= len(batch.prompts[row])  # a shared prompt is computed once
        if not microbatches or n_tokens + size > cfg.tokens_per_microbatch:
            microbatches.append([])
            n_tokens, size = 0, batch.lengths[row]
        microbatches[-1].append(row)
        n_tokens += size
    # Sharded weights are gathered by all ranks together, so each runs the model equally often.
    n_missing = max(gather(len(microbatches))) - len(microbatches)
    return microbatches + [[] for _ in range(n_missing)]

@torch.no_grad()
def score(model, batch, rows, cfg):
    """-> log-probs [B, T] of these rows, 0 in the others"""
    log_probs = torch.zeros(batch.labels.shape, device=model.device)
    for micro in make_microbatches(batch, rows, cfg, model.is_packed):
        log_probs[micro] = response_stats(model, batch.input_ids[micro], batch.labels[micro],
                                          batch.response_mask[micro], cfg.temperature)[0]
    return log_probs

def grpo_microbatch_step(policy, input_ids, labels, response_mask, advantages_per_seq,
        gradient_accumulation_steps=1, clip_range=0.2, loss_type="grpo", max_completion_length=256,
        ref_model=None, kl_coef=0.0, *, old_log_probs=None, ref_log_probs=None, divisor=None,
        temperature=1.0, kl_estimator="k3", **loss_options):
    """Forward, loss, backward -> (this part's share of the step's loss, metadata). The divisor, of
    the whole step's loss, is given by train(); without it, this part is taken as one of
    gradient_accumulation_steps equal ones, and only then max_completion_length is used. Without
    ref_log_probs, ref_model computes them. loss_options: see compute_loss()."""
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
    if loss_type == "grpo":  # the mean of each response
        loss = loss / mask.sum(-1, keepdim=True).clamp(min=1)
    loss = loss.sum() / max(divisor, 1e-9)
    # item() waits for the GPU: here for the forward pass only, and backward() runs on meanwhile.
    metadata["loss"] = loss.item()
    metadata["entropy"] = entropy.sum().item() / max(1, metadata["n_tokens"])
    loss.backward()
    return loss.detach(), metadata

def loss_divisor(mask, loss_type, max_tokens):
    n_rows = int(mask.any(-1).sum())
    return {"grpo": n_rows, "dr_grpo": n_rows * max_tokens, "dapo": int(mask.sum())}[loss_type]

LIMIT = 20.0  # log pi/ref is kept within +-LIMIT, log pi/old and the logged k3 below it
WEIGHT_CAP = 10.0  # largest importance weight pi/old of a KL term
MISMATCH_CAP = 2.0  # largest importance weight old/sampler of a token

def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, *, response_mask=None, kl_estimator="k3", kl_importance_weight=True,
                 kl_in="loss", policy_loss="ppo", clip_range_high=None, rollout_log_probs=None,
                 exact_kl=None):
    """The policy loss + kl_coef * KL -> (loss [B, T], metadata). advantages: [B] or [B, T].
    Log-probs: of the policy, of that before the update (None: the same), reference, sampler."""
    mask = (torch.ones_like(policy_log_probs) if response_mask is None else response_mask).bool()
    log_pi = masked(policy_log_probs, mask)
    log_old = (log_pi if old_log_probs is None else masked(old_log_probs, mask)).detach()
    advantages = masked(advantages[:, None] if advantages.dim() == 1 else advantages, mask)
    log_ratio = log_pi - log_old
    # exp() must not overflow. Not clamp(): it would stop a NaN, which must reach the gradient.
    log_ratio = torch.where(log_ratio > LIMIT, LIMIT, log_ratio)
    stats = {"approx_kl": torch.expm1(log_ratio) - log_ratio}  # of old and policy
    token_penalty = exact_penalty = 0.0
    if kl_coef and ref_log_probs is not None:
        log_ref = masked(ref_log_probs, mask)
        rho = log_ratio.detach().exp().clamp(max=WEIGHT_CAP)  # pi/old of each token
        logged_kl = rho * compute_kl_divergence(log_pi, log_ref, "k3").clamp(max=LIMIT)
        if kl_in == "reward":
            # A token pays for its own k1 and for that of all later tokens. Off-policy, each cost
            # counts by the ratio pi/old of the response up to there: so the gradient is that of the
            # KL of the whole response. flip, cumsum, flip is the sum over all later tokens. The
            # factor in brackets is 1, with the gradient of log pi.
            penalty = compute_kl_divergence(log_pi, log_ref, "k1").detach()
            cost = penalty * log_ratio.detach().cumsum(1).exp().clamp(max=WEIGHT_CAP)
            token_penalty = cost.flip(1).cumsum(1).flip(1) * (1 + log_pi - log_pi.detach())
        elif kl_estimator == "exact":
            penalty = logged_kl = exact_penalty = masked(exact_kl, mask)
        else:
            penalty = token_penalty = compute_kl_divergence(
                log_pi, log_ref, kl_estimator, rho if kl_importance_weight else None)
        stats |= {"kl_penalty_mean": penalty, "kl_mean": logged_kl, "kl_max": logged_kl,
                  "kl_min": logged_kl}

    if policy_loss == "gspo":
        # arXiv 2507.18071: the mean ratio of the response, with the slope of each token. The KL
        # term above keeps the ratio of the token.
        mean_log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean_log_ratio.detach() + log_pi - log_pi.detach()
    ratio = log_ratio.exp()
    highest = clip_range_high or clip_range
    gain = ratio * advantages
    if policy_loss == "cispo":
        # arXiv 2506.13585: only the weight is clipped, so every token keeps its gradient.
        is_blocked = ratio > 1 + highest  # for the log: its weight is clipped
        gain = ratio.clamp(max=1 + highest).detach() * advantages * log_pi
    elif policy_loss == "dppo":
        # arXiv 2602.04879: a token is blocked if its probability, not its ratio, has moved too far
        # and the update would move it further. (The paper measures from the sampler. Here that gap
        # has a weight of its own, below.)
        moved = ((log_pi.exp() - log_old.exp()) * (advantages != 0)).detach()
        is_blocked = torch.where(advantages > 0, moved > highest, moved < -clip_range)
        gain = torch.where(is_blocked, 0, gain)
    else:  # PPO's clip
        clipped = ratio.clamp(1 - clip_range, 1 + highest) * advantages
        is_blocked = clipped < gain
        gain = torch.minimum(gain, clipped)
    stats["clip_fraction"] = is_blocked
    loss = kl_coef * token_penalty - gain
    if rollout_log_probs is not None:
        # The sampler drew the tokens, from probabilities that differ a little from the trainer's.
        gap = log_old - masked(rollout_log_probs, mask).detach()
        loss = loss * gap.exp().clamp(max=MISMATCH_CAP)
        stats["logp_gap"] = gap.abs()
    # The exact KL is a sum over the vocabulary: there is no sampled token to weight.
    loss = loss + kl_coef * exact_penalty
    return torch.where(mask, loss, 0), mean_stats(stats, mask)

def masked(tensor, mask):
    """0 outside the mask, where a NaN must not reach a gradient"""
    return torch.where(mask, upcast(to_device(tensor, mask.device)), 0)

def upcast(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()

def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1", rho=None):
    """-> an estimate of KL(pi || ref) for each sampled token, or rho times it, where l = log pi -
    log ref is kept within +-LIMIT. rho = pi/old is a number without a gradient. The slope has its
    gradient instead: d(rho value) = rho (value + slope) dlog pi. So k1 and k3 get value + slope in
    the last column. k2 keeps its slope, because rho l is already the gradient of the KL.
        estimator  value          slope     slope if weighted by rho
        k1         l              1         l + 1
        k2         l^2 / 2        l         l
        k3         e^-l - 1 + l   1 - e^-l  l"""
    log_pi = upcast(policy_log_probs)
    l = (log_pi - upcast(ref_log_probs)).detach().clamp(-LIMIT, LIMIT)
    value, slope = {
        "k1": (l, torch.ones_like(l) if rho is None else l + 1),
        "k2": (l**2 / 2, l),
        "k3": (torch.expm1(-l) + l, -torch.expm1(-l) if rho is None else l)}[estimator]
    # The gradient is written out: autograd would overflow, or be 0 beyond the clamp. This zero has
    # the gradient of log pi, so slope * zero adds nothing to the value.
    zero = log_pi - log_pi.detach()
    estimate = value + slope * zero
    return estimate if rho is None else rho * estimate

TOKEN_METRICS = {  # metadata of compute_loss: name in the log, how the tokens are combined
    "entropy": ("train/entropy", np.mean), "clip_fraction": ("train/clip_fraction", np.mean),
    "approx_kl": ("train/approx_kl", np.mean), "kl_penalty_mean": ("train/kl_penalty", np.mean),
    "logp_gap": ("rollout/logp_gap_mean", np.mean), "kl_mean": ("kl/mean", np.mean),
    "kl_max": ("kl/max", np.max), "kl_min": ("kl/min", np.min)}

@torch.no_grad()
def mean_stats(stats, mask):
    """{name: [B, T]} -> {name: number over the tokens of the mask}; 0 for what was not computed"""
    summary = dict.fromkeys(TOKEN_METRICS, 0.0) | {"n_tokens": int(mask.sum())}
    if summary["n_tokens"]:
        for name, values in stats.items():
            # What you add to the stats of compute_loss() is logged as a mean over tokens, too.
            _, combine = TOKEN_METRICS.setdefault(name, (f"train/{name}", np.mean))
            summary[name] = float(combine(values[mask].double().numpy(force=True)))
    return summary

def update_weights(policy, optimizer, loss, cfg, state):
    """One optimizer step if loss and gradient are finite. -> gradient norm before clipping"""
    limit = cfg.max_grad_norm or math.inf
    norm = float(unshard(torch.nn.utils.clip_grad_norm_(policy.parameters(), limit)))
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
    elif norm > 1e-8:
        # Without a gradient (all rewards are equal) Adam's momentum would still move the weights.
        optimizer.step()
        state.lr_factor = min(1.0, 2 * state.lr_factor)
        state.skips_in_a_row = 0
    # Also of weights that your optimizer leaves out. It frees memory for vLLM.
    policy.zero_grad()
    return norm

def adapt_kl_coef(state, kl, cfg):
    """Steer the KL to target_kl with 0.1 to 100 times kl_coef."""
    state.kl_smooth = (state.kl_smooth + min(5 * cfg.target_kl, kl)) / 2
    # The KL starts at 0. A coefficient that fell meanwhile would be missing when it has risen.
    state.kl_was_high |= state.kl_smooth > cfg.target_kl
    if state.kl_smooth > 1.5 * cfg.target_kl:
        state.kl_factor = min(1.5 * state.kl_factor, 100.0)
    elif state.kl_smooth < 0.5 * cfg.target_kl and state.kl_was_high:
        state.kl_factor = max(0.75 * state.kl_factor, 0.1)

def refresh_reference(ref_model, policy, state):
    ref_model.load_state_dict(policy.state_dict())
    state.ref_step = state.step
    state.kl_smooth, state.kl_was_high = 0.0, False  # the KL is 0 again

# ---- 3. Sampler: turns, vLLM, the stand-in -------------------------------------------------------
class Response:
    def __init__(self, problem, name=""):
        self.problem = copy.deepcopy(problem) | {"turns": []}  # reply() may keep its state in it
        self.name = name  # for the seed
        self.prompt_ids = problem["prompt_ids"]
        # For each token after the prompt. mask: did the model choose it, or the environment?
        self.ids, self.log_probs, self.mask = [], [], []
        self.finished = None  # True: ended; False: cut off at max_tokens or max_turns
        self.reward = 0.0

    def seed(self):
        return random.Random(f"{self.name}/{len(self.ids)}").getrandbits(48)

    def add(self, ids, log_probs, is_chosen):
        self.ids += ids
        self.log_probs += log_probs
        self.mask += [is_chosen] * len(ids)

    def text(self):
        return "\n".join(x["content"] for x in self.problem["turns"] if x["role"] == "assistant")

def rollout_with_vllm(llm, task, problems, n, seed):
    """-> n Responses to each problem, the same on any number of ranks"""
    responses = [Response(problem, f"{seed}/{problem['problem_number']}/{i}")
                 for problem in problems for i in range(n)]
    n_turns = task.cfg.max_turns if task.reply else 1
    for turn in range(1, n_turns + 1):
        active = [response for response in responses if response.finished is None]
        if not active:
            break
        for response, (ids, log_probs) in zip(active, generate(llm, task, active)):
            play_turn(response, ids, log_probs, task, is_last=turn == n_turns)
    return responses

def play_turn(response, ids, log_probs, task, is_last):
    """Add what the model wrote and what reply() says."""
    response.add(ids, log_probs, is_chosen=True)
    is_message = ids[-1] in task.stop_ids  # otherwise it ended with one of turn_ends, or not at all
    text = task.tokenizer.decode(ids[:-1] if is_message else ids)
    turns = response.problem["turns"]
    turns.append({"role": "assistant", "content": text})
    is_cut_off = not (is_message or any(end in text for end in task.turn_ends))  # at max_tokens
    said = task.reply(response.problem, text) if task.reply and not is_cut_off else None
    if said is None or is_last:
        response.finished = said is None and not is_cut_off
        return
    rendered = said
    if is_message:
        # The reply is the next message of the user. The model has written its end token already.
        end = task.tokenizer.decode(ids[-1:])
        rendered = render_reply(said, task.tokenizer, task.cfg.thinking).removeprefix(end)
    reply_ids = task.tokenizer.encode(rendered, add_special_tokens=False)
    if len(response.ids) + len(reply_ids) >= task.cfg.max_tokens:
        response.finished = False
        return
    response.add(reply_ids, [0.0] * len(reply_ids), is_chosen=False)
    turns.append({"role": "environment", "content": said})

def grade(task, responses):
    """Set the rewards. A response that is cut off earns 0 at most."""
    for response in responses:
        text = response.text()
        try:
            scores = task.reward_fn(text, response.problem)
            scores = scores if isinstance(scores, dict) else {"reward": scores}
            response.scores = {name: float(score) for name, score in scores.items()}
            response.reward = response.scores.pop("reward")
            if not abs(response.reward) < 1e38:
                raise ValueError(f"the reward is {response.reward}")
        except Exception as error:
            error.add_note(f"reward_fn got the response {text!r:.1000}")
            raise
        if not (response.finished or task.cfg.reward_truncated):
            response.reward = min(0.0, response.reward)

def generate(llm, task, responses):
    """-> (new ids, log-probs) of each, up to max_tokens, an end token or one of turn_ends"""
    if isinstance(llm, TorchSampler):
        return llm.generate(task, responses)
    from vllm import SamplingParams
    requests, params = [], []
    for response in responses:
        requests.append({"prompt_token_ids": response.prompt_ids + response.ids})
        # stop_ids has all tokens that end a response, so vLLM's own end token is ignored.
        params.append(SamplingParams(
            seed=response.seed(), max_tokens=task.cfg.max_tokens - len(response.ids),
            temperature=task.cfg.temperature, logprobs=0, flat_logprobs=True, ignore_eos=True,
            stop_token_ids=task.stop_ids, stop=list(task.turn_ends), skip_special_tokens=False,
            include_stop_str_in_output=True, detokenize=bool(task.turn_ends)))
    # On a terminal a progress bar, which disappears at the end
    bar = sys.stderr.isatty() and functools.partial(tqdm, disable=False, leave=False)
    outputs = [request.outputs[0] for request in llm.generate(requests, params, use_tqdm=bar)]
    return [(list(output.token_ids), list(output.logprobs.logprobs)) for output in outputs]

def init_vllm(policy, tokenizer, cfg, turn_ends=()):
    llm = None
    try:
        llm = cfg.use_vllm and start_vllm(policy, tokenizer, cfg, turn_ends)
    except ImportError as error:
        print(f"!!! vLLM cannot be used here, torch samples: {error!s:.150}")
    except Exception as error:
        raise UserError(f"vLLM: {error!r:.400} (--gpu_mem_util? --use_vllm=False?)") from error
    cfg.vllm_sleep = bool(cfg.vllm_sleep and llm and policy.device.type == "cuda")
    llm = llm or TorchSampler(policy)
    load_policy_into_vllm_instance(policy, llm)
    if policy.device.type == "cuda":
        # Only Adam in host memory gains from threads. Elsewhere they disturb vLLM's one thread.
        torch.set_num_threads(os.cpu_count() if cfg.offload else 1)
    return llm

def start_vllm(policy, tokenizer, cfg, turn_ends):
    print("starting vLLM ...")
    import vllm
    length = cfg.max_prompt_tokens + cfg.max_tokens
    if policy.device.type == "cuda":  # graphs of decoding steps only: they are captured in seconds
        options = {"dtype": "bfloat16", "gpu_memory_utilization": cfg.gpu_mem_util,
                   "enable_sleep_mode": cfg.vllm_sleep,
                   "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    else:  # chunked prefill would break seeds; without it a prompt must fit into a batch
        options = {"dtype": "float32", "kv_cache_memory_bytes": 2**30, "enforce_eager": True,
                   "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, length),
                   "enable_prefix_caching": policy.is_packed}
    try:  # a faster scheduler, if it is beside this file and was written for this vLLM
        from rollout_scheduler import RolloutScheduler
        options["scheduler_cls"] = RolloutScheduler
    except ImportError as error:
        print(f"vLLM's own scheduler is used: {error}")
    # vLLM reads the configuration only. The weights come with the first sync.
    with tempfile.TemporaryDirectory() as folder:
        policy.model.config.architectures = [type(policy.model).__name__]
        policy.model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return vllm.LLM(folder, **options, load_format="dummy", max_model_len=length,
                        skip_tokenizer_init=not turn_ends, logprobs_mode="processed_logprobs",
                        max_num_seqs=min(512, max(64, cfg.rollout_batch_size // WORLD)))

@torch.no_grad()
def load_policy_into_vllm_instance(policy, llm):
    """Copy the weights; drop what vLLM cached with the old ones."""
    if isinstance(llm, TorchSampler):
        llm.model.load_state_dict(dict(full_weights(policy)))
        return
    # In vLLM tied models have an output layer; Gemma 2 has none.
    weights = checkpoint_weights(policy, llm.apply_model(lambda net: hasattr(net, "lm_head"))[0])
    if policy.device.type == "cuda":
        llm.apply_model(lambda model: bool(model.load_weights(weights)))
    else:  # the CPU backend repacks its weights
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept prefixes that were computed with the old weights")

def checkpoint_weights(policy, has_head):
    """-> (name, tensor) as in a checkpoint of the model, where each expert is apart"""
    for name, weight in full_weights(policy):
        if has_head or name != "lm_head.weight":
            yield from revert_weight_conversion(policy.model, {name: weight}).items()

def check_agreement(metrics, microbatch_stats, state, device):
    """Sampler and trainer must agree, and before any update policy and reference, too."""
    gap = metrics.get("rollout/logp_gap_mean", 0.0)
    max_gap, max_kl = 2e-3, 1e-6
    if device.type == "cuda":  # in bf16 they differ a little; with stale weights the gap grows
        max_gap, max_kl = max(0.03, 4 * state.first_gap), 2e-3
    if state.step == 1:
        state.first_gap = gap
        max_gap *= 3
        if microbatch_stats and microbatch_stats[0]["kl_mean"] > max_kl:
            raise UserError("KL before any update: policy and reference differ")
    if gap > max_gap:
        raise UserError(f"the sampler's log-probs are off by {gap:.3g}: stale weights, or a bug")

class TorchSampler:
    """A copy of the model where there is no vLLM: right and repeatable, not fast"""
    def __init__(self, policy):
        self.model = AutoModelForCausalLM.from_config(
            copy.deepcopy(policy.model.config), attn_implementation="eager",
            dtype=policy.compute_dtype).to(policy.device).eval()

    @torch.no_grad()
    def generate(self, task, responses):
        prompts = [torch.tensor(response.prompt_ids + response.ids) for response in responses]
        ids = torch.nn.utils.rnn.pad_sequence(prompts, True, -1, "left").to(self.model.device)
        mask, ids = (ids >= 0).long(), ids.clamp(min=0)  # [B, W], padded on the left
        # Each response has random numbers of its own, so it does not depend on the others.
        draws = [np.random.default_rng(x.seed()).random(task.cfg.max_tokens) for x in responses]
        draws = torch.tensor(np.array(draws), device=ids.device)[..., None]  # [B, max_tokens, 1]
        outputs = [([], []) for _ in prompts]
        active = set(range(len(prompts)))
        cache = None
        for draw in draws.unbind(1):  # [B, 1]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            output = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache, logits_to_keep=1)
            cache = output.past_key_values
            temperature = max(task.cfg.temperature, 1e-6)  # 0: greedy
            log_probs = (output.logits[:, -1].float() / temperature).log_softmax(-1)
            # The first token whose cumulative probability exceeds the random number
            cdf = log_probs.double().exp().cumsum(-1)
            ids = torch.searchsorted(cdf, draw * cdf[:, -1:], right=True)  # [B, 1]
            mask = F.pad(mask, (0, 1), value=1)
            tokens = ids[:, 0].tolist()
            chosen = log_probs.gather(1, ids)[:, 0].tolist()
            for row in list(active):
                row_ids, row_log_probs = outputs[row]
                row_ids.append(tokens[row])
                row_log_probs.append(chosen[row])
                n_left = task.cfg.max_tokens - len(responses[row].ids) - len(row_ids)
                has_end = any(end in task.tokenizer.decode(row_ids[-32:]) for end in task.turn_ends)
                if n_left <= 0 or has_end or row_ids[-1] in task.stop_ids:
                    active.remove(row)
            if not active:
                break
        return outputs

# ---- 4. Policy: loading, memory, LoRA, sharding, log-probs ---------------------------------------
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
    """Pack rows if their log-probs stay the same, otherwise pad them. Tried on the model itself"""
    model = policy.model
    attentions = ["packed", "sdpa", "eager"]
    kinds = set(getattr(model.config, "layer_types", None) or ())
    window = getattr(model.config, "sliding_window", None) or math.inf
    if window < longest_row or kinds - {"full_attention", "sliding_attention"}:
        attentions.remove("packed")
    if getattr(model.config, "attn_logit_softcapping", None):
        attentions = ["eager"]  # the others would ignore it
    ids = torch.arange(2, 66).view(2, 32) % model.config.vocab_size
    ids[:, 0] = 1  # the rows share their first token
    labels = ids.clone()
    labels[0, 20:] = -100  # and differ in length
    model.set_attn_implementation("eager")
    wanted = get_response_log_probs(model, ids, labels)  # of the model's own output layer
    for attention in attentions:
        policy.is_packed = attention == "packed"
        with contextlib.suppress(Exception):  # the model may not have this attention
            model.set_attn_implementation(attention)
            if (get_response_log_probs(policy, ids, labels) - wanted).abs().max() < 1e-3:
                return
    raise UserError(f"{type(model).__name__} is not supported: its log-probs differ")

def plan_memory(policy, cfg, device):
    """Decide what is "auto" from the memory that is free beside vLLM's share."""
    free, total = torch.cuda.mem_get_info() if device == "cuda" else (math.inf, 0)
    room = (min(gather(free)) - cfg.gpu_mem_util * total) / 2**30  # GiB
    size = policy.model.num_parameters() / WORLD / 2**30  # GiB if a parameter had one byte
    # Bytes per parameter: float32 weight 4, gradient 4, moments of Adam 8, and the bf16 copy that
    # fully_shard computes with 2. LoRA: a frozen bf16 weight 2, and its copy 2. KL: a reference 2
    bytes_on_gpu = (4 if cfg.lora_rank else 18) + 2 * cfg.use_kl_penalty
    # The same if the optimizer is in host memory: bf16 weights and float32 gradients remain.
    bytes_if_offloaded = 2 if cfg.lora_rank else 6
    # Besides, a microbatch of 20,480 tokens needs up to 8.5 GiB, one of 8,192 tokens 3.5 GiB.
    spare = room - bytes_on_gpu * size
    cfg.tokens_per_microbatch = cfg.tokens_per_microbatch or (8192 if spare < 8.5 else 20480)
    if cfg.offload == "auto":
        cfg.offload = spare < 3.5
        cfg.gradient_checkpointing |= cfg.offload
    if cfg.vllm_sleep == "auto":
        cfg.vllm_sleep = cfg.offload and room - bytes_if_offloaded * size < 3.5
    if cfg.offload or cfg.tokens_per_microbatch <= 8192:  # memory is short
        policy.logits_per_chunk = 2**26
    if cfg.offload:
        print(f"{room:.1f} GiB beside vLLM: offload to host memory, vllm_sleep={cfg.vllm_sleep}")

def add_lora(policy, rank, seed):
    from peft import LoraConfig, inject_adapter_in_model
    torch.manual_seed(seed)
    head = policy.model.get_output_embeddings()
    names = [name for name, layer in policy.named_modules()
             if type(layer) is torch.nn.Linear and layer is not head]
    # Not into policy.model: peft would replace these names by those of fused experts.
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), policy)

def transformer_layers(policy):
    """-> the list of modules with the most parameters, whatever the model calls it"""
    lists = [module for module in policy.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))

def compile_and_shard(policy, cfg, device):
    """Each GPU keeps a part of the float32 weights and computes in bf16, layer by layer."""
    policy.device = torch.device(device)
    is_reference = not any(parameter.requires_grad for parameter in policy.parameters())
    for parameter in policy.parameters():
        if not parameter.requires_grad:  # frozen: bf16 is enough. Buffers (positions) stay float32
            parameter.data = parameter.data.to(policy.compute_dtype)
    policy.to("cpu" if cfg.offload else device)
    layers = transformer_layers(policy)
    if cfg.compile:
        torch._dynamo.config.specialize_float = True  # a temperature that may change is slow
        torch.fx.experimental._config.use_duck_shape = False  # equal sizes may differ later
        policy.chunk_stats = torch.compile(chunk_stats, dynamic=True)
    for layer in layers:
        if cfg.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        # Not the checkpointing of transformers: it needs train(), with dropout and router noise.
        if cfg.gradient_checkpointing:
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    if device == "cpu" and WORLD == 1:
        return
    # On one GPU, too, fully_shard keeps float32 weights for Adam and computes with bf16 copies.
    # A copy of a layer is dropped after its forward pass where that saves memory.
    options = {"mesh": dist.init_device_mesh(device, (WORLD,)),
               "reshard_after_forward": is_reference or WORLD > 1 or cfg.vllm_sleep,
               "mp_policy": MixedPrecisionPolicy(policy.compute_dtype, reduce_dtype=torch.float32)}
    options |= {"offload_policy": CPUOffloadPolicy()} if cfg.offload else {}
    for module in (*layers, policy):
        fully_shard(module, **options)
    for buffer in policy.buffers():
        buffer.data = buffer.data.to(device)

def defer_gradient_sync(policy, cfg, is_last):
    """Until the last microbatch keep the bf16 weights, and sum offloaded gradients on the GPU."""
    if WORLD == 1 and policy.device.type == "cuda":
        policy.set_reshard_after_backward(is_last or cfg.vllm_sleep)
        policy.set_requires_gradient_sync(is_last or not cfg.offload)

def unshard(tensor):
    """A sharded tensor -> the whole one; all ranks must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def full_weights(policy):
    """-> (name, tensor) of the model, LoRA merged"""
    weights = policy.model.state_dict()
    for name in [name for name in weights if ".lora_" not in name]:
        weight = unshard(weights[name].to(policy.device))
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            a, b = (unshard(weights[f"{layer}.lora_{part}.default.weight"].to(policy.device))
                    for part in "AB")
            weight = weight.float() + 2 * b @ a  # lora_alpha / rank is 2
        yield name.replace(".base_layer", ""), weight

class Policy(torch.nn.Module):
    """A model that computes statistics of chosen tokens. fully_shard gathers the weights when
    forward() is called, so everything that touches them happens there."""
    def __init__(self, model, stop_ids=()):
        super().__init__()
        self.model, self.stop_ids = model, stop_ids
        self.device = model.device  # where rows are computed; weights may be in host memory
        self.is_packed = False  # choose_layout() decides
        self.chunk_stats = chunk_stats  # or compiled
        self.logits_per_chunk = 2**28  # 1 GiB of float32

    @property
    def compute_dtype(self):
        """float32 until compile_and_shard() sets a GPU as the device"""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def forward(self, inputs, predictors, targets=None, temperature=1.0, ref_model=None):
        """inputs: of the model; predictors [M]: positions before each target; targets [M]
        -> token_stats() of the targets. Without targets: hidden states [M, H], for a reference"""
        # The model without its output layer. Llama 4's base_model would have it, its .model not.
        body = getattr(self.model, "model", self.model.base_model)
        hidden = body(**inputs, use_cache=False).last_hidden_state  # [B, L, H]
        hidden = hidden.flatten(0, 1).index_select(0, predictors)  # [M, H]
        if targets is None:
            return hidden
        states, heads = [hidden], [output_layer(self.model, self.device)]
        if ref_model is not None:
            with torch.no_grad():
                states.append(ref_model(inputs, predictors))
            heads.append(output_layer(ref_model.model, self.device))
        # All logits [M, V] at once would not fit into memory, so they are made chunk by chunk, and
        # again in backward(). The chunks are of equal size: another size would be compiled anew.
        weight, *_ = heads[0]  # [V, H]
        n_chunks = len(hidden) * len(weight) // self.logits_per_chunk + 1
        columns = [tensor.tensor_split(n_chunks) for tensor in (targets, *states)]
        chunks = [recompute(self.chunk_stats, heads, temperature, *chunk, use_reentrant=False)
                  for chunk in zip(*columns)]
        return [torch.cat(values) for values in zip(*chunks)]

def output_layer(model, device):
    """-> (weight [V, H], bias, scale, cap), whole: that of a reference may be sharded"""
    config = model.config
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    bias = None if bias is None else unshard(bias.to(device))
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere, Granite, Falcon-H1
    scale *= getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return unshard(layer.weight.to(device)), bias, scale, cap

def chunk_stats(heads, temperature, targets, *states):
    """-> token_stats(). states: hidden [m, H] of the policy and of the reference"""
    logits = []
    for hidden, (weight, bias, scale, cap) in zip(states, heads):
        x = upcast(F.linear(hidden, weight, bias))  # [m, V]
        if cap:
            x, scale = torch.tanh(x * (scale / cap)), cap
        logits.append(x * (scale / temperature))
    return token_stats(logits[0], targets, *logits[1:])

def token_stats(logits, targets, ref_logits=None):
    """float32 logits [M, V] -> log-probs of the targets, entropy; with a reference also its
    log-probs and the exact KL: each [M]. A banned token (logit -inf) adds 0 to sums."""
    norm = logits.logsumexp(-1, keepdim=True)
    log_probs = (logits.gather(-1, targets[:, None]) - norm)[:, 0]
    with torch.no_grad():  # the entropy is only logged: it has no gradient
        probs = logits.softmax(-1)
        entropy = norm[:, 0] - torch.where(probs > 0, probs * logits, 0).sum(-1)
    if ref_logits is None:
        return log_probs, entropy
    log_pi, log_ref = logits - norm, ref_logits.log_softmax(-1)
    log_ratio = torch.where(probs > 0, log_pi - log_ref, 0).detach().clamp(-LIMIT, LIMIT)
    # Detached: its gradient would only add E[grad log pi], which is 0.
    exact_kl = (log_pi.exp() * log_ratio).sum(-1)
    return log_probs, entropy, log_ref.gather(-1, targets[:, None])[:, 0], exact_kl

def response_stats(model, input_ids, labels, mask, temperature=1.0, ref_model=None):
    """token_stats() of the tokens in the mask: each [B, T], 0 elsewhere. Instead of a Policy
    anything will do whose model(input_ids).logits are logits: that is how a Policy is checked."""
    if isinstance(model, Policy):
        lay_out = pack if model.is_packed else pad
        stats = model(*lay_out(input_ids, labels, mask, model.device), temperature, ref_model)
    else:
        models = [model] if ref_model is None else [model, ref_model]
        logits = [upcast(model(input_ids).logits[mask]) / temperature for model in models]
        stats = token_stats(logits[0], labels[mask], *(x.detach() for x in logits[1:]))
    mask = to_device(mask, stats[0].device)
    return [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in stats]  # [M] -> [B, T]

def get_response_log_probs(model, input_ids, labels, *, response_mask=None, temperature=1.0):
    """log pi(labels[b, t] | input_ids[b, :t + 1]) -> [B, T], 0 outside the mask"""
    mask = (labels >= 0) & (True if response_mask is None else response_mask.bool())
    return response_stats(model, input_ids, labels, mask, temperature)[0]

def to_device(tensor, device):
    """Without waiting for the GPU"""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

# ---- 5. Packing (an optimization: skip it on a first reading) ------------------------------------
def pack(input_ids, labels, mask, device):
    """Lay rows end to end; a prompt shared by neighbours only once. -> (model inputs,
    predictors [M]: slot before each target, targets [M]: response tokens)
        rows      P P a b | P P c | Q d
        ids       P P a b   c       Q d
        slots     0 1 2 3   4       5 6        key_slots  0 1 2 3 | 0 1 4 | 5 6"""
    ids, positions, predictors, key_slots = [], [], [], []
    n_keys, n_queries = [], []  # tokens of each row, and without the shared prompt
    prompt = None
    for row, is_target in zip(input_ids.tolist(), mask.cpu().numpy()):
        places = np.flatnonzero(is_target)
        if len(places) == 0:
            continue
        # The last target is predicted, not read: the row ends before it.
        length = places[-1] + 1
        # The token at a place predicts the target there: so the prompt ends at the first place.
        row_prompt = row[:places[0] + 1]
        if row_prompt != prompt:  # the first row of a group
            prompt, prompt_slots = row_prompt, []
        n_shared = len(prompt_slots)
        new_ids = row[n_shared:length]
        slots = prompt_slots + list(range(len(ids), len(ids) + len(new_ids)))
        prompt_slots = slots[:len(prompt)]
        predictors += [slots[place] for place in places]
        if new_ids:  # otherwise the shared prompt predicts the only target
            ids += new_ids
            positions += range(n_shared, length)
            key_slots += slots
            n_keys.append(length)
            n_queries.append(len(new_ids))
    if not ids:  # every rank must run the model, if only on a dummy token
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
    ids = input_ids[:, :length] if length else torch.zeros(1, 2, dtype=torch.long)  # or a dummy
    predictors = mask[:, :length].flatten().nonzero()[:, 0]
    ids, predictors, targets = (to_device(x, device) for x in (ids, predictors, labels[mask]))
    return {"input_ids": ids}, predictors, targets

def packed_attention(module, query, key, value, attention_mask, *, key_slots, query_starts,
                     key_starts, longest, scaling=None, **options):
    """Causal attention; the queries of a row are its last tokens. query: [1, heads, N, d]"""
    # Options that change the result are refused. No row is longer than a sliding window.
    is_plain = options.keys() <= {"dropout", "position_ids", "use_cache", "sliding_window"}
    if not (is_plain and attention_mask is None and query.shape[-1] == value.shape[-1] <= 256):
        raise NotImplementedError("choose_layout() then pads")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, d]
    if q.is_cuda and q.dtype == torch.bfloat16:
        out = varlen_attn(q, k[key_slots], v[key_slots], query_starts, key_starts, longest, longest,
                          scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out[None], None
    # Without flash attention: whole rows, padded at the end
    n_keys = key_starts.diff()[:, None]  # [R, 1]
    place = torch.arange(longest, device=q.device)  # [L]
    is_key = place < n_keys  # [R, L]
    is_query = is_key & (place >= n_keys - query_starts.diff()[:, None])
    slots = key_slots.new_zeros(is_key.shape).masked_scatter(is_key, key_slots)
    q, k, v = (x[slots].transpose(1, 2) for x in (q, k, v))  # [R, heads, L, d]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[is_query][None], None
AttentionInterface.register("packed", packed_attention)

# ---- 6. Evaluation, log, checkpoints -------------------------------------------------------------
def evaluate_model(llm, task, n=1):
    """-> (metrics, n Responses to each held-out problem). Seeds are the same every time."""
    responses = rollout_with_vllm(llm, task, this_ranks_part(task.held_out), n, "eval")
    grade(task, responses)
    responses = sum(gather(responses), [])
    rewards = np.array([response.reward for response in responses])
    accuracy = (rewards >= task.cfg.correct_reward).mean()
    metrics = {"eval/accuracy": accuracy, "eval/mean_reward": rewards.mean()}
    return mean_scores("eval", responses) | metrics, responses

def mean_scores(prefix, responses):
    """-> metrics of what reward_fn returned beside the reward, if that was a dict"""
    names = dict.fromkeys(name for response in responses for name in response.scores)
    return {f"{prefix}/{name}": np.mean([x.scores[name] for x in responses if name in x.scores])
            for name in names}

def evaluate_and_keep_best(policy, llm, task, log, state, rollout=()):
    """-> metrics of an evaluation. A trained model that is better than all before goes to best/.
    rollout: responses of this step; the best and the worst one of a group are shown, too."""
    metrics, responses = evaluate_model(llm, task)
    if state.step and metrics["eval/mean_reward"] > state.best_reward:
        save_model(policy, task.tokenizer, log.folder / "best")
    state.best_reward = max(metrics["eval/mean_reward"], state.best_reward)
    group = sorted(rollout[:task.cfg.group_size], key=lambda response: response.reward)
    log_eval(log, state, metrics, (2 * responses)[:2] + group[-1:] + group[:1])
    return metrics

def log_eval(log, state, metrics, responses):
    """One response goes to the console, all of them to TensorBoard and samples.jsonl."""
    print(f"  {responses[0].text()!r:.300} has reward {responses[0].reward:g}")
    print(f"Step {state.step} | Held-out accuracy, sampled: {metrics['eval/accuracy']:.1%}",
          *(f"{name.removeprefix('eval/')}: {value:z.3f}" for name, value in metrics.items()
            if name != "eval/accuracy"), sep=" | ")
    tags = ("held-out/1", "held-out/2", "training/best of a group", "training/worst of a group")
    for tag, response in zip(tags, responses if IS_MAIN else ()):
        problem = response.problem
        log.append("samples.jsonl", {"step": state.step, "prompt": problem["rendered"],
                                     "turns": problem["turns"], "reward": response.reward})
        parts = [("prompt", problem["rendered"]), *(turn.values() for turn in problem["turns"]),
                 ("reward", f"{response.reward:g}"), ("answer", str(problem.get("answer", "?")))]
        # As HTML, since TensorBoard would read the text of a model as Markdown
        text = "".join(f"<h4>{role}</h4><p>{html.escape(content)}</p>" for role, content in parts)
        log.writer.add_text(tag, text.replace("\n", "<br>"), state.step)

def synced_time():
    """Seconds, when the GPU has done what it was given"""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()

def minutes_running():
    return (time.perf_counter() - STARTED) / 60

def step_metrics(responses, microbatch_stats, group_size, kl_coef):
    responses = sum(gather(responses), [])
    rewards = np.array([response.reward for response in responses])
    is_flat = np.ptp(rewards.reshape(-1, group_size), axis=1) == 0
    metrics = mean_scores("train", responses) | {
        "train/reward_mean": rewards.mean(), "train/frac_groups_zero_std": is_flat.mean(),
        "train/truncated_frac": np.mean([not response.finished for response in responses]),
        "train/avg_output_tokens": np.mean([sum(response.mask) for response in responses])}
    parts = [part for part in sum(gather(microbatch_stats), []) if part["n_tokens"]]
    weights = [part["n_tokens"] for part in parts]
    for key, (name, combine) in TOKEN_METRICS.items():
        if parts and (kl_coef or not name.startswith("kl/")):  # otherwise it was not computed
            values = [part[key] for part in parts]
            if combine is np.mean:
                values = [np.average(values, weights=weights)]
            metrics[name] = float(combine(values))
    return metrics

class Log:
    def __init__(self, folder, settings, saved=None):
        self.folder = folder
        if not IS_MAIN:
            return
        with atomic_write(folder / "config.json") as temporary:
            temporary.write_text(json.dumps(settings, indent=1))
        step = saved["state"]["step"] if saved else -1
        path = folder / "metrics.jsonl"
        self.minutes_before = 0.0  # of the run that is resumed
        if path.exists():  # the steps after the checkpoint are repeated: remove their rows
            rows = path.read_bytes().splitlines(True)[:step + 1]
            os.truncate(path, sum(map(len, rows)))
            self.minutes_before = json.loads(rows[-1])["time/minutes"] if rows else 0.0
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder.parent / "tb" / folder.name, purge_step=step + 1)
        table = "".join(f"| {name} | {html.escape(repr(value)).replace('|', '&#124;')} |\n"
                        for name, value in settings.items())
        self.writer.add_text("settings", "| setting | value |\n|---|---|\n" + table)

    def append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def write(self, step, metrics):
        if not IS_MAIN:
            return
        metrics = metrics | {"time/minutes": self.minutes_before + minutes_running()}
        metrics = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.append("metrics.jsonl", {"step": step} | metrics)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

def log_train(step, metrics, cfg):
    minutes_left = max(0.0, min((cfg.n_grpo_steps - step) * metrics["time/step"] / 60,
                                (cfg.max_minutes or math.inf) - minutes_running()))
    # z: no minus before a zero. nan: not computed, because all rewards are equal
    print(f"Step {step} | Loss: {metrics['train/loss']:z.3f} | "
          f"Grad norm: {metrics['train/grad_norm']:.3g} | "
          f"Reward mean: {metrics['train/reward_mean']:z.3f} | "
          f"{metrics['train/avg_output_tokens']:.0f} tok, {metrics['train/truncated_frac']:.0%} cut"
          f" | {metrics['time/step']:.3g} s, {minutes_left:.0f} min | ",
          f"KL penalty: {metrics['train/kl_penalty']:z.4f}" if "kl/mean" in metrics else
          f"Entropy: {metrics.get('train/entropy', math.nan):.2f}", sep="")

@contextlib.contextmanager
def atomic_write(path):
    """Write to a temporary path that then becomes `path`. After a kill at any moment the old file
    is whole, or the new one. (A folder cannot replace another in one rename: for a moment there is
    only the new one, as NAME.new.)"""
    new = path.with_name(f"{path.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        yield new
        if path.is_dir():
            shutil.rmtree(path)
        new.replace(path)
    except Exception as error:
        raise UserError(f"cannot write {path} ({error}). Is the disk full?") from error

def save_model(policy, tokenizer, folder):
    """For transformers and vLLM, LoRA merged"""
    config = policy.model.config
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=policy.compute_dtype)
    # As in training: every token may be sampled, and the same tokens end a response.
    shell.generation_config.update(do_sample=True, top_k=0, eos_token_id=policy.stop_ids or None)
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    weights = {name: weight.detach().to("cpu", policy.compute_dtype)  # on all ranks: it gathers
               for name, weight in full_weights(policy) if IS_MAIN and name != tied}
    if IS_MAIN:
        with atomic_write(folder) as temporary:
            shell.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)

# Sharded weights are saved whole, those of LoRA without the frozen ones.
FULL_STATE = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED_STATE = dataclasses.replace(FULL_STATE, ignore_frozen_params=True, strict=False)

class Checkpoint:
    def __init__(self, path, policy, optimizer, ref_model, state):
        self.path, self.state = path, state
        self.policy, self.optimizer, self.ref_model = policy, optimizer, ref_model

    def save(self):
        saved = {"state": json.loads(json.dumps(vars(self.state))),  # plain numbers only
                 "weights": state_dicts.get_model_state_dict(self.policy, options=TRAINED_STATE)}
        if self.optimizer.state:  # torch would fill an empty one by taking a step
            saved["moments"] = state_dicts.get_optimizer_state_dict(
                self.policy, self.optimizer, options=TRAINED_STATE)
        if self.ref_model and self.state.ref_step:  # otherwise it is the starting model
            saved["ref"] = state_dicts.get_model_state_dict(self.ref_model, options=FULL_STATE)
        if IS_MAIN:
            with atomic_write(self.path) as temporary:
                torch.save(saved, temporary)

    def restore(self, saved):
        state_dicts.set_model_state_dict(self.policy, saved["weights"], options=TRAINED_STATE)
        if "moments" in saved:
            state_dicts.set_optimizer_state_dict(
                self.policy, self.optimizer, saved["moments"], options=TRAINED_STATE)
        if "ref" in saved and self.ref_model:
            state_dicts.set_model_state_dict(self.ref_model, saved["ref"], options=FULL_STATE)
        vars(self.state).update(saved["state"])
        saved.clear()  # frees its memory

    @contextlib.contextmanager
    def saved_on_error(self):
        """reward_fn or reply may raise: keep earlier steps. Not with several ranks: those that
        have no error would wait for ever."""
        try:
            yield
        except Exception:
            if WORLD == 1:
                self.save()
            raise

def read_checkpoint(cfg):
    """-> what Checkpoint.save() wrote; None: begin at the start"""
    path = Path(cfg.resume, "checkpoint.pt")
    if cfg.resume and not path.exists() and Path(cfg.resume, "model").exists():
        raise UserError(f"{cfg.resume} has no checkpoint: start from --model_id={cfg.resume}/model")
    if cfg.resume and not path.exists():
        print(f"{cfg.resume} has no checkpoint yet: it starts over")
    if not cfg.resume or not path.exists():
        return None
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    print(f"resuming {cfg.resume} after step {saved['state']['step']}")
    if saved["state"]["step"] >= cfg.n_grpo_steps:
        raise UserError("it has finished: raise --n_grpo_steps")
    return saved

def catch_signals():
    """Ctrl-C and SIGTERM end the run after its step, a second Ctrl-C at once."""
    received = []
    def handler(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again to quit without saving", file=sys.stderr)
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    # Processes that reward_fn starts must still end when they are terminated.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return received

# ---- 7. Settings, task files, run folder ---------------------------------------------------------
OTHER_NAMES = {  # what other trainers call some of the settings
    "learning_rate": "lr", "beta": "kl_coef", "num_generations": "group_size", "n": "group_size",
    "max_completion_length": "max_tokens", "max_response_length": "max_tokens",
    "max_steps": "n_grpo_steps", "epsilon": "clip_range", "num_iterations": "inner_epochs",
    "model_name_or_path": "model_id", "use_std_normalization": "advantage_scale"}

def read_arguments(argv):
    """["--lr=1", "--n-eval", "8", "--compile"] -> {"lr": "1", "n_eval": "8", "compile": "True"}"""
    given, name = {}, ""  # the name of a flag that a value may follow
    for word in argv:
        match = re.fullmatch(r"--([A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
        if match:
            name = match[1].replace("-", "_")
            given[name] = (match[2] or "=True")[1:]
        elif name and given[name] == "True":
            given[name] = word
        else:
            raise UserError(f"cannot read {word!r}: write --name=value")
    return given

def read_settings(cfg, argv):
    """Change cfg. -> what was typed. Weakest to strongest: the block in main(), SETTINGS of the
    task file, the run that is resumed (or that made the model: task and prompt), what is typed."""
    typed = read_arguments(argv)
    override(cfg, typed)  # first: resume and model_id say where other settings come from
    given = settings_of_run(cfg, typed) if cfg.resume else settings_of_model(cfg, typed) | typed
    override(cfg, given)
    for name, value in getattr(load_task_file(cfg.task), "SETTINGS", {}).items():
        if name not in given:
            print(f"{cfg.task} sets {name}={value}")
            override(cfg, {name: value})
    check_settings(cfg, typed)
    return typed

def settings_of_run(cfg, typed):
    folder = Path(cfg.out_dir, "latest") if cfg.resume == "latest" else Path(cfg.resume)
    if not (folder / "config.json").exists():
        raise UserError(f"no run to resume in {folder}")
    saved = json.loads((folder / "config.json").read_text())
    for name in ("model_id", "lora_rank"):
        if name in typed and typed[name] != str(saved[name]):
            raise UserError(f"a resumed run keeps its {name} ({saved[name]}): start a new run")
    saved.pop("version", None)
    return saved | typed | {"resume": str(folder.resolve())}

def settings_of_model(cfg, typed):
    """A model that a run has made, model/ or best/, brings task and prompt of that run."""
    path = Path(cfg.model_id).resolve().parent / "config.json"
    saved = json.loads(path.read_text()) if Path(cfg.model_id).is_dir() and path.exists() else {}
    if "n_grpo_steps" not in saved or "task" in typed:  # not a run, or a run of another task
        return {}
    print(f"task and prompt are those of {path.parent}, unless typed")
    return {name: saved[name] for name in ("task", "eval_task", "prompt")}

def override(cfg, given):
    """Set cfg from {name: text or value}. Each value gets the type of the default."""
    for name, value in given.items():
        if name not in vars(cfg):
            near = difflib.get_close_matches(name, vars(cfg), 1) or ["--help"]
            right = OTHER_NAMES.get(name, near[0])
            raise UserError(f"there is no hyperparameter {name}: did you mean {right}?")
        default = getattr(cfg, name)
        words = {"true": True, "false": False} | ({"auto": "auto"} if default == "auto" else {})
        try:
            if isinstance(default, bool) or default == "auto":
                value = words[str(value).lower()]
            else:
                value = type(default)(str(value))  # int("0.5") raises
            if not isinstance(default, str) and not 0 <= value < math.inf:
                raise ValueError
        except (ValueError, KeyError):
            raise UserError(f"--{name}={value}: expected something like {default}") from None
        setattr(cfg, name, value)

def check_settings(cfg, typed):
    needs_kl = [name for name in typed if name.startswith(("kl_", "target_kl", "ref_update"))]
    positive = ("max_tokens", "n_minibatches", "inner_epochs", "n_grpo_steps", "n_eval",
                "max_turns", "rollout_batch_size", "temperature")
    choices = {
        "policy_loss": ("ppo", "cispo", "dppo", "gspo"), "loss_type": ("grpo", "dr_grpo", "dapo"),
        "advantage_scale": ("std", "none", "mean"), "kl_estimator": ("k1", "k2", "k3", "exact"),
        "kl_in": ("loss", "reward")}
    rules = {f"{name} must be one of {', '.join(words)}": getattr(cfg, name) in words
             for name, words in choices.items()}
    rules |= {f"{name} must be above 0": getattr(cfg, name) > 0 for name in positive}
    rules |= {
        "kl_in=reward needs kl_estimator=k1": cfg.kl_in == "loss" or cfg.kl_estimator == "k1",
        "kl_coef=0 is no penalty: leave out use_kl_penalty": cfg.kl_coef or not cfg.use_kl_penalty,
        f"{', '.join(needs_kl)}: set use_kl_penalty, too": cfg.use_kl_penalty or not needs_kl,
        "group_size must be at least 2 and divide rollout_batch_size":
            cfg.group_size > 1 and cfg.rollout_batch_size % cfg.group_size == 0}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(rule)
    if (cfg.kl_in, cfg.kl_estimator, cfg.kl_importance_weight) == ("loss", "k1", False):
        print("!!! plain k1 is no penalty: its mean gradient is 0")

TASKS = Path(__file__).resolve().parent / "tasks"
def load_task_file(name):
    """-> the module of "my_task.py", or of tasks/gsm8k.py for "gsm8k"; None for other names"""
    path = Path(name) if name.endswith(".py") else TASKS / f"{name}.py"
    return import_file(path.resolve()) if path.is_file() else None

@functools.cache
def import_file(path):
    sys.path[:0] = [str(path.parent), str(TASKS)]  # for what it imports
    spec = importlib.util.spec_from_file_location(f"task_file_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def prepare(cfg):
    """Call prepare() of the task file (it may download data) and of a model such as "tiny"."""
    for name in (cfg.model_id, cfg.task, cfg.eval_task):
        if LOCAL_RANK == 0 and hasattr(load_task_file(name), "prepare"):
            load_task_file(name).prepare()
    gather(None)  # all ranks wait for the first one of their machine

def read_rows(name, template):
    """-> (training rows, held-out rows or None) of a task file, a JSONL file or a folder of two"""
    task_file = load_task_file(name)
    if task_file:
        rows = task_file.rows()
    elif Path(name).is_dir():
        rows = Path(name, "train.jsonl"), Path(name, "test.jsonl")
    elif Path(name).exists():
        rows = Path(name)
    else:
        raise UserError(f"no task {name} here or in {TASKS}. Data of the hub: a task file with "
                        "import datasets; rows = lambda: datasets.load_dataset(NAME)['train']")
    train_rows, held_out = rows if isinstance(rows, tuple) else (rows, None)
    held_out = held_out and complete_rows(name, held_out, template)
    return complete_rows(name, train_rows, template), held_out

def complete_rows(name, rows, template):
    """Dicts, or the path of a JSONL file -> rows whose prompt is a list of messages"""
    completed = []
    try:
        if isinstance(rows, Path):
            rows = filter(str.strip, open(rows, encoding="utf-8-sig"))
        for row in rows:
            row = json.loads(row) if isinstance(row, str) else dict(row)
            if "prompt" not in row:
                row["prompt"] = re.sub(r"\{(\w+)\}", lambda field: str(row[field[1]]), template)
            if isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            if row.get("answer", "") is None:
                raise ValueError("the answer is null")
            if isinstance(row.get("answer"), str):  # GSM8K's: a calculation and then "#### 42"
                row["answer"] = row["answer"].rpartition("####")[2].strip()
            row_key(row)  # raises if a message lacks its role or content
            completed.append(row)
    except Exception as error:
        what = f"{type(error).__name__} {error!s:.200}. prompt is a text or a list of messages"
        raise UserError(f"{name}, row {len(completed) + 1}: {what}") from error
    return completed

def row_key(row):
    """Rows with equal keys are the same problem. Games may differ in the answer only."""
    texts = [turn["role"] + turn["content"] for turn in row["prompt"]]
    return f"{texts} {row.get('answer')}"

def read_task(cfg):
    """-> (rows to train on, held-out rows). The same rows are held out in every run of a task, so
    that neither a resumed run nor sample.py measures rows that a model was trained on."""
    train_rows, held_out = read_rows(cfg.task, cfg.prompt)
    if cfg.eval_task:
        rows, held_out = read_rows(cfg.eval_task, cfg.prompt)
        held_out = held_out or rows
    if held_out is None:
        # A fifth of the different rows, at most 1,000. A hash decides, not their order.
        different = {row_key(row): row for row in train_rows}
        keys = sorted(different, key=lambda key: zlib.crc32(key.encode()))
        held_out = [different[key] for key in keys[:min(1000, len(keys) // 5)]]
    held_out_keys = {row_key(row) for row in held_out}
    train_rows = [row for row in train_rows if row_key(row) not in held_out_keys]
    print(f"{cfg.task}: {len(train_rows)} rows to train on, {len(held_out)} held out")
    if not train_rows or (cfg.eval_every and not held_out):
        raise UserError("too few rows to hold some out: give more, --eval_task or --eval_every=0")
    return train_rows, held_out

def make_run_folder(cfg, typed):
    """-> a new folder like out/0003_lr=1e-4, which is also out/latest"""
    out = Path(cfg.out_dir).absolute()
    words = [f"_{name}={value.rpartition('/')[2]}" for name, value in typed.items()]
    label = re.sub(r"(?a)[^\w=.+-]", "-", "".join(words))[:200]
    numbers = [int(path.name[:4]) for path in out.glob("[0-9][0-9][0-9][0-9]*")]
    folder = out / f"{max(numbers, default=0) + 1:04d}{label}"
    folder.mkdir(parents=True)
    for file in {__file__, getattr(load_task_file(cfg.task), "__file__", __file__)}:
        shutil.copy(file, folder)  # what made this run
    (folder / "latest").symlink_to(folder.name)
    (folder / "latest").replace(out / "latest")
    print(f"run folder: {folder}")
    return folder

# ---- 8. Quick tests ------------------------------------------------------------------------------
# The four losses, and the norm of the gradient of their sum
PUBLISHED = [-1.9394, 4.4995, -2.1809, -1.9885, 9.2725]

def test_functions():
    """-> do the losses of a worked example, with a KL penalty, have the published values?"""
    numbers = torch.arange(12.0).view(3, 4)
    log_pi = (torch.sin(numbers) - 1.5).requires_grad_()
    losses = []
    for policy_loss in ("ppo", "cispo", "dppo", "gspo"):
        loss, _ = compute_loss(
            torch.tensor([1.0, -1.0, 0.5]), log_pi, torch.sin(numbers + 0.3) - 1.5, 0.2,
            torch.sin(2 * numbers) - 1.5, 0.3, response_mask=numbers % 5 < 4,
            policy_loss=policy_loss, rollout_log_probs=torch.sin(numbers + 0.4) - 1.5)
        losses.append(loss.sum())
    sum(losses).backward()
    got = [round(number.item(), 4) for number in (*losses, log_pi.grad.norm())]
    is_published = np.allclose(got, PUBLISHED, 0, 2e-4)
    print("=== All Tests Passed! ===" if is_published else
          f"!!! the loss is not the published one (fine if you changed it). PUBLISHED is now {got}")
    return is_published

def run(main):
    # Lines reach a pipe at once. A terminal may lack letters that a model writes.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    write = sys.stdout.write
    def write_if_read(text):  # `| tee log` ends with the same Ctrl-C, but the run is still saved
        with contextlib.suppress(BrokenPipeError):
            write(text)
    sys.stdout.write = write_if_read
    if not IS_MAIN:
        sys.stdout = open(os.devnull, "w")
    code = 1
    try:
        main()
        code = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError as error:
        print(f"error: {error!s:.150} ... Try in order: --offload=True, --vllm_sleep=True, less "
              "tokens_per_microbatch, another gpu_mem_util, --lora_rank=32", file=sys.stderr)
    except BaseException as error:  # a second Ctrl-C, which ends at once, has no traceback
        traceback.print_exc(limit=0 if isinstance(error, KeyboardInterrupt) else None)
    # Not sys.exit(): vLLM's threads and the process group can keep a finished process alive.
    os._exit(code)

if __name__ == "__main__":
    sys.modules["starter"] = sys.modules["__main__"]  # what a task file imports from
    run(main)

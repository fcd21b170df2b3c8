"""GRPO for language models in one file. Read it from top to bottom, edit main(), run it.

    python starter.py                      train: Qwen3-1.7B on a GPU, a tiny model on a CPU
    python starter.py --lr=1e-5 --seed=1   set any hyperparameter; --help lists them
    python starter.py --resume=latest      continue an interrupted run
    torchrun --nproc_per_node=8 starter.py
    tensorboard --logdir out/tb            watch the curves, read samples
    python sample.py                       measure the trained model, or chat with it

One step: sample a group of responses to each prompt and reward them. Raise the probability of
responses that beat the mean of their group and lower that of the others, in small steps (PPO
clipping) and not far from the start (KL penalty, see KL.md).

The hyperparameters and the training loop come first, then its parts: 1 task, 2 policy, 3 sampler,
4 loss, 5 records, 6 settings, 7 quick tests.
"""
import os
import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before the slow imports
    with open(__file__, encoding="utf-8") as file:
        block = file.read().partition("\n    # ---- hyperparameters")[2]
    print(f"{__doc__}\nHyperparameters and their defaults:\n", block.partition("\n    # ----")[0])
    sys.exit()

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
for setting in ("VLLM_LOGGING_LEVEL=ERROR", "TORCH_CPP_LOG_LEVEL=ERROR", "TORCH_LOGS=-all",
                "TRANSFORMERS_VERBOSITY=error", "TOKENIZERS_PARALLELISM=false",
                "VLLM_NO_USAGE_STATS=1", "VLLM_HOST_IP=127.0.0.1"):
    os.environ.setdefault(*setting.split("="))
# torchrun starts one process, a rank, per GPU. Each is shown its own GPU only.
IS_LAUNCHED, RANK, WORLD = "LOCAL_RANK" in os.environ, 0, 1
if IS_LAUNCHED:
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"]) % len(gpus)]

import ast, contextlib, copy, difflib, functools, gc, hashlib, html, json, math, operator, random
import re, shutil, signal, tempfile, time, warnings, zipfile, zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

warnings.filterwarnings("ignore", category=FutureWarning)
disable_progress_bar()
print = functools.partial(print, flush=True)


class UserError(ValueError):
    """The user can put it right: one line, exit code 2."""


class RunFailed(RuntimeError):
    """The run cannot continue: one line, exit code 1."""


def gather(value):
    """-> [value on rank 0, value on rank 1, ...]"""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def share(items):
    """-> (this rank's part of a list, number of items before it)"""
    first = len(items) * RANK // WORLD
    return items[first:len(items) * (RANK + 1) // WORLD], first


def main(argv=None):
    given = read_arguments(sys.argv[1:] if argv is None else argv)
    gpu = torch.cuda.is_available()
    model_id = given.get("model_id", "Qwen/Qwen3-1.7B" if gpu else "tiny")
    task = given.get("task", "countdown")
    tiny = is_tiny(model_id)
    short = tiny and task == "countdown"
    # ---- hyperparameters: any of them can be set as --name=value ----
    cfg = SimpleNamespace(
        # model
        model_id=model_id,  # a folder or a hub name; "tiny" is made on first use
        device="cuda" if gpu else "cpu",
        lora_rank=0,  # above 0: train adapters of this rank, not all weights
        gradient_checkpointing=not tiny,  # half the memory, a quarter more time
        compile=gpu and not tiny,
        # run
        seed=42,
        out_dir="out",  # each run has a folder here: out/0001, ...
        resume="",  # the folder of a run to continue, or "latest"
        n_grpo_steps=100 if tiny else 200,
        eval_every=20,  # steps
        n_eval=500 if tiny else 200,  # held-out problems
        save_every=20 if tiny else 50,  # steps between checkpoints; 0: only on Ctrl-C
        # task
        task=task,  # "countdown", or a JSONL file of problems
        eval_task="",  # a JSONL file to evaluate on; else rows of task are held out
        prompt=SHORT_PROMPT if short else LONG_PROMPT if task == "countdown" else QUESTION_PROMPT,
        n_numbers=3,  # of a Countdown problem
        max_number=20 if tiny else 50,
        operations="+-" if tiny else "+-*/",
        # rollout
        use_vllm=True,  # False: sample with plain torch
        rollout_batch_size=256 if tiny else 128,  # responses per step
        group_size=8,  # responses per prompt
        temperature=1.0,
        min_tokens=0,
        max_tokens=24 if short else 512,  # per response
        max_prompt_tokens=32 if short else 256,
        gpu_mem_util=0.4,  # vLLM's share of the GPU's memory
        vllm_sleep=False,  # free that memory during the update
        enforce_eager=False,  # True: vLLM starts faster and samples slower
        # update
        lr=2e-4 if tiny else 1e-6,
        warmup_steps=10,  # of the learning rate
        max_grad_norm=1.0,  # 0: no clipping
        inner_epochs=1,  # passes over each rollout batch
        n_minibatches=1,  # optimizer steps per pass
        gradient_accumulation_steps=1,  # microbatches per optimizer step; more if one would
        tokens_per_microbatch=20480,  # have more than about this many tokens
        # loss
        loss_type="grpo",  # mean over each response, then over responses;
        # "dr_grpo": sum / max_tokens; "dapo": mean over all tokens
        clip_range=0.2,
        clip_range_high=0.0,  # upper clip range (DAPO: 0.28); 0: the same as clip_range
        use_std_normalization=True,  # divide advantages by the group's standard deviation
        advantage_eps=1e-6,
        # KL penalty towards the starting model: KL.md
        use_kl_penalty=False,
        kl_coef=0.01,
        kl_estimator="k3",  # "k1", "k2", "k3", or "exact" (over the whole vocabulary)
        kl_importance_weight=True,  # False: the plain formula, which has another gradient
        kl_in="loss",  # or "reward", with k1
        kl_adaptive=False,  # adjust kl_coef to keep the KL near target_kl
        target_kl=0.1,  # nats per token
        kl_warmup_steps=0,  # of kl_coef
        ref_update_every=0,  # above 0: steps between refreshes of the reference
        ref_offload=False,  # keep the reference in host memory
    )
    # ---- end of the hyperparameters ----
    override(cfg, given)
    check_settings(cfg)
    start_process_group(cfg.device)
    rows, eval_rows = read_task(cfg)
    make_tiny(cfg.model_id)
    policy, tokenizer = init_policy(cfg.model_id, cfg.device, cfg.gradient_checkpointing)
    task = Task(cfg, rows, eval_rows, tokenizer)
    saved = load_checkpoint(cfg.resume) if cfg.resume else None

    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    print(f"{cfg.model_id}: {millions:.2f} M parameters on {WORLD} x {cfg.device}")
    if cfg.lora_rank:
        add_lora(policy, cfg.lora_rank, cfg.seed)
    ref_model = make_reference(policy, cfg) if cfg.use_kl_penalty and cfg.kl_coef else None
    compile_and_shard(policy, cfg)
    llm = init_vllm(policy, cfg)

    folder = cfg.resume or make_run_folder(cfg, given)
    log = Log(folder, cfg, saved["state"]["step"] if saved else -1)
    kl_coef = cfg.kl_coef if ref_model else 0.0
    step = train(policy, llm, tokenizer, cfg, log, ref_model, kl_coef, task=task, saved=saved)
    save_model(policy, tokenizer, log.folder / "model")
    log.report(step, cfg)


def train(policy, llm, tokenizer, cfg, log, ref_model=None, kl_coef=0.0, *, task, saved=None):
    """GRPO from the given weights, or from a checkpoint. -> the last step taken"""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], cfg.lr,
                                  betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    state = SimpleNamespace(step=0, skipped=0, skips_in_a_row=0, best_reward=-math.inf, ref_step=0,
                            kl_coef=kl_coef, kl_coef_set=kl_coef, kl_smooth=0.0)
    params = init_sampling_params(cfg, cfg.group_size, policy.stop_ids)
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    signals = catch_signals()
    if saved:
        restore(saved, policy, optimizer, ref_model, state)
        load_policy_into_vllm_instance(policy, llm)
    else:
        log.write(0, evaluate(policy, llm, task, params, log, state))

    while state.step < cfg.n_grpo_steps:
        step = state.step = state.step + 1
        times = [now(cfg.device)]

        # Rollout
        indices, first = share(range((step - 1) * n_prompts, step * n_prompts))
        problems = [task.problem(index) for index in indices]
        prompts = [problem["prompt_ids"] for problem in problems]
        responses = rollout_with_vllm(llm, prompts, params, cfg.seed, step, first)
        texts = [decode(tokenizer, response.ids, policy.stop_ids) for response in responses]

        # Reward: an advantage is how much better a response is than the mean of its group
        advantages, rewards, _ = compute_group_normalized_advantages(
            texts, repeat(problems, cfg.group_size), reward_fn, cfg.group_size, cfg.advantage_eps,
            cfg.use_std_normalization)
        batch = make_batch(repeat(prompts, cfg.group_size), responses, cfg.min_tokens)
        batch.advantages = advantages
        times.append(now(cfg.device))

        if cfg.vllm_sleep:
            llm.sleep(level=2)
        kl_now = state.kl_coef * min(1.0, step / max(1, cfg.kl_warmup_steps))
        # Log-probs that stay fixed during the update
        if cfg.inner_epochs * cfg.n_minibatches > 1:
            batch.old_log_probs = score(policy, batch, cfg)
        if kl_now and cfg.kl_estimator != "exact":
            with adapters_off(ref_model):
                batch.ref_log_probs = score(ref_model, batch, cfg)

        # Update: an optimizer step per minibatch, whose gradient adds up over microbatches
        metadata, losses, grad_norms = [], [], []
        for rows in make_minibatches(cfg, step, first * cfg.group_size, len(responses)):
            divisor = sum(gather(loss_divisor(batch.mask[rows], cfg.loss_type, cfg.max_tokens)))
            if step > 1 and not kl_now:
                # Without advantage there is no gradient. (An entropy bonus would need these rows.)
                rows = [row for row in rows if advantages[row] != 0]
            microbatches = make_microbatches(batch, rows, cfg)
            optimizer.zero_grad()
            loss = 0.0
            for i, micro_rows in enumerate(microbatches):
                if WORLD == 1 and cfg.device == "cuda":  # keep the bf16 weights until the last
                    policy.set_reshard_after_backward(i + 1 == len(microbatches))
                micro = select(batch, micro_rows)
                _, micro_metadata = grpo_microbatch_step(
                    policy, micro.input_ids, micro.labels, micro.mask, micro.advantages,
                    len(microbatches), cfg.clip_range, cfg.loss_type, cfg.max_tokens, ref_model,
                    kl_now, divisor=divisor / WORLD,  # fully_shard averages over the ranks
                    old_log_probs=micro.old_log_probs, ref_log_probs=micro.ref_log_probs,
                    rollout_log_probs=micro.rollout_log_probs, temperature=cfg.temperature,
                    clip_range_high=cfg.clip_range_high, kl_estimator=cfg.kl_estimator,
                    kl_importance_weight=cfg.kl_importance_weight, kl_in=cfg.kl_in)
                loss += micro_metadata["loss"]
                metadata.append(micro_metadata)
            losses.append(sum(gather(loss)) / WORLD)
            grad_norms.append(update_weights(policy, optimizer, losses[-1], cfg, state))
        times.append(now(cfg.device))

        # Sync
        if cfg.vllm_sleep:
            llm.wake_up(tags=["weights"])
        load_policy_into_vllm_instance(policy, llm)
        if cfg.vllm_sleep:
            llm.wake_up(tags=["kv_cache"])
        times.append(now(cfg.device))

        # Log, evaluate, save
        metrics, response_kl = step_metrics(metadata, rewards, responses, texts, times, cfg)
        metrics |= {"train/loss": np.mean(losses), "train/grad_norm": np.mean(grad_norms),
                    "train/kl_coef": kl_now, "train/skipped_steps": state.skipped}
        check_agreement(metrics, metadata, cfg, step)
        log_train(log, step, metrics, cfg)
        if cfg.kl_adaptive and kl_now:
            adapt_kl_coef(state, metrics["kl/mean"], cfg)
        if cfg.ref_update_every and step % cfg.ref_update_every == 0:
            refresh_reference(ref_model, policy, state)
        is_last, is_interrupted = step == cfg.n_grpo_steps, any(gather(len(signals)))
        if step % cfg.eval_every == 0 or is_last:
            metrics |= evaluate(policy, llm, task, params, log, state)
        log.write(step, metrics, response_kl)
        if is_interrupted or (cfg.save_every and (step % cfg.save_every == 0 or is_last)):
            save_checkpoint(log.folder, policy, optimizer, ref_model, state)
        if is_interrupted:
            break
    return state.step


# ---- 1. Task: problems, prompts, answers, reward ----

SHORT_PROMPT = "{numbers}={target}:"
QUESTION_PROMPT = "{question} Think step by step, then give the answer as <answer>...</answer>."
LONG_PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with the operations {operations} and parentheses. Think step by step inside "
    "<think> </think> tags, briefly, then give only the expression inside <answer> </answer> tags, "
    "for example <answer>(1 + 2) * 3</answer>.")

# No pattern takes more than linear time, whatever the text.
TAGS = r"<answer>((?:(?!</?answer>).)*)</answer>"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
HASHES = r"####\s*((?!####)\S(?:(?!####)[^\n])*)"
ANSWERS = f"{TAGS}|{BOX}|{HASHES}"

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}


def reward_fn(generated_text, ground_truth):
    """1.0 for a correct answer, 0.1 for a wrong one, 0.0 for none. Replace it with your own:
    ground_truth is the problem, a dict. A reward of at least 0.9 counts as correct."""
    truth = {"answer": ground_truth} if isinstance(ground_truth, str) else ground_truth
    answer = final_answer(generated_text, ANSWERS if "answer" in truth else TAGS)
    if answer is None:
        return 0.0
    if "answer" in truth:
        return 1.0 if normalize(answer) == normalize(truth["answer"]) else 0.1
    return 1.0 if evaluate_expression(answer, truth["numbers"]) == truth["target"] else 0.1


def final_answer(text, pattern=ANSWERS):
    r"""-> the last of <answer>...</answer>, \boxed{...} and `#### ...`, or None"""
    answer = None
    while matches := list(re.finditer(pattern, text, re.DOTALL)):  # again for <answer>\boxed{5}
        answer = text = matches[-1][matches[-1].lastindex].strip()
    return answer


def normalize(answer):
    """$1,200.00 = 1200, 1/2 = .5, 18 dollars = 18, Paris = paris"""
    text = " ".join(str(answer).lower().replace("$", "").split()).rstrip(". ")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    number = re.fullmatch(r"([-+./0-9]{1,64}(?:e[-+]?[0-9]{1,2})?)(?: ?%| [a-z][a-z .]*)?", text)
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return Fraction(number[1] if number else "")
    return text


def evaluate_expression(text, numbers):
    """-> the exact value of an expression that uses each of `numbers` once, or None"""
    is_plain = re.fullmatch(r"[-+*/() 0-9]{1,200}", text)
    if is_plain and sorted(map(int, re.findall("[0-9]+", text))) == sorted(numbers):
        with contextlib.suppress(Exception):  # it is not an expression, or divides by 0
            return exact_value(ast.parse(text.strip(), mode="eval").body)  # parsed, never run


def exact_value(node):
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(exact_value, parts))


def make_problem(cfg, seed, index, split="train"):
    """A solvable Countdown problem. Its hash decides the split."""
    rng = random.Random(f"{seed}/{split}/{index}")
    for _ in range(100_000):
        numbers = [rng.randint(1, cfg.max_number) for _ in range(cfg.n_numbers)]
        solution, target = random_expression(rng, numbers, cfg.operations)
        is_held_out = zlib.crc32(f"{sorted(numbers)}={target}".encode()) % 5 == 0
        if 0 < target < 100 and is_held_out == (split != "train"):
            problem = {"numbers": numbers, "target": target, "solution": solution,
                       "operations": " ".join(cfg.operations)}
            return problem | {"prompt": fill_template(cfg.prompt, problem)}
    raise UserError("these n_numbers, max_number and operations give no Countdown problem")


def random_expression(rng, numbers, operations):
    """Join random parts until one is left. -> (text, value), or ("", 0)"""
    parts = [(str(n), n, 3) for n in numbers]  # (text, value, how tightly it binds)
    while len(parts) > 1:
        left, x, left_binding = parts.pop(rng.randrange(len(parts)))
        right, y, right_binding = parts.pop(rng.randrange(len(parts)))
        operation = rng.choice(operations)
        if operation == "/" and (y == 0 or x % y):
            return "", 0
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // (y or 1)}[operation]
        binding, needed = {"+": (1, 1), "-": (1, 2), "*": (2, 2), "/": (2, 3)}[operation]
        if left_binding < binding:
            left = f"({left})"
        if right_binding < needed:
            right = f"({right})"
        parts.append((left + operation + right, value, binding))
    return parts[0][:2]


def fill_template(template, problem):
    fields = dict(problem)
    if isinstance(fields.get("numbers"), list):
        fields["numbers"] = " ".join(map(str, fields["numbers"]))
    try:
        return template.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"set --prompt to fit the fields {', '.join(problem)}: {error!r}") from None


def read_task(cfg):
    """-> (rows of task, rows of eval_task); for Countdown (none, held-out problems)"""
    if cfg.task == "countdown":
        return [], [make_problem(cfg, 0, index, "held-out") for index in range(cfg.n_eval)]
    return read_jsonl(cfg.task, cfg), read_jsonl(cfg.eval_task, cfg) if cfg.eval_task else []


def read_jsonl(path, cfg):
    """-> [{"prompt": text or chat messages, "answer": text, ...}, ...]"""
    rows, number = [], 0
    try:
        for number, line in enumerate(Path(path).read_text("utf-8-sig").split("\n"), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # no NaN, bad unicode
            prompt = row.get("prompt") or fill_template(cfg.prompt, row)
            answer = str(row["answer"]).rpartition("####")[2].strip()
            texts = [answer, prompt] if isinstance(prompt, str) else [
                answer, *(message[key] for message in prompt for key in ("role", "content"))]
            if not all(map(str.strip, texts)) or type(row["answer"]) not in (str, int, float):
                raise ValueError("prompt or answer is missing")
            rows.append(row | {"prompt": prompt, "answer": answer})
    except Exception as error:  # a file may contain anything
        raise UserError(f"{path}, line {number}: {error!r}. A task is countdown, or a JSONL file "
                        'of {"prompt": text or chat messages, "answer": ...}') from None
    return rows


class Task:
    """problem(i) is the i-th training problem, held_out the problems to evaluate on."""

    def __init__(self, cfg, rows, eval_rows, tokenizer):
        self.cfg, self.tokenizer = cfg, tokenizer
        rows, held_out = self.fitting(rows), self.fitting(eval_rows)
        if not eval_rows:
            # An order that does not depend on the seed
            rows.sort(key=lambda row: hashlib.sha256(row["rendered"].encode()).digest())
            held_out = rows[:min(cfg.n_eval, max(1, len(rows) // 5))]
        # No prompt, as the model sees it, is on both sides.
        prompts = {row["rendered"] for row in held_out}
        self.training = [row for row in rows if row["rendered"] not in prompts]
        self.held_out = held_out[:cfg.n_eval]
        if not self.held_out or not (self.training or cfg.task == "countdown"):
            raise UserError("too few problems to train on some and hold out others")

    def fitting(self, rows):
        """-> encoded rows, without those that are too long"""
        rows = [self.encode(row) for row in rows]
        kept = [row for row in rows if len(row["prompt_ids"]) <= self.cfg.max_prompt_tokens]
        if len(kept) < len(rows):
            longest = max(len(row["prompt_ids"]) for row in rows)
            print(f"!!! {len(rows) - len(kept)} of {len(rows)} prompts are left out as too long; "
                  f"--max_prompt_tokens={longest} keeps all")
        return kept

    def encode(self, problem):
        rendered = render_chat(problem["prompt"], self.tokenizer)
        ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        return problem | {"rendered": rendered, "prompt_ids": ids}

    def problem(self, index):
        if self.cfg.task == "countdown":
            # tiny.py trains on the problems before number 10,000,000.
            return self.encode(make_problem(self.cfg, self.cfg.seed, 10_000_000 + index))
        epoch, position = divmod(index, len(self.training))
        return self.training[self.order(epoch)[position]]

    @functools.lru_cache(2)  # the same for all problems of a step
    def order(self, epoch):
        return np.random.default_rng([self.cfg.seed, epoch]).permutation(len(self.training))


def render_chat(prompt, tokenizer):
    """-> the prompt as the model sees it"""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + "".join(turn["content"] + "\n" for turn in messages)
    is_open = messages[-1]["role"] == "assistant"  # a turn for the model to continue
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_open,
            continue_final_message=is_open, enable_thinking=False)  # no Qwen3 thinking mode
    except Exception as error:  # templates raise anything
        raise UserError(f"the chat template refuses {str(messages)[:200]} ({error})") from None


def decode(tokenizer, ids, stop_ids):
    """Special tokens such as <answer> stay in the text."""
    dropped = {*stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    return tokenizer.decode([token for token in ids if token not in dropped])


# ---- 2. Policy: loading, LoRA, sharding; packed rows and their log-probs ----

def is_tiny(model_id):
    """The model of tiny.py, or one trained from it?"""
    path = Path(model_id, "config.json")
    return model_id == "tiny" or (path.is_file() and b'"is_tiny"' in path.read_bytes())


def make_tiny(model_id):
    if model_id == "tiny" and RANK == 0 and not Path("tiny").exists():
        try:
            import tiny
        except ImportError:
            raise UserError("tiny.py is missing: set --model_id") from None
        tiny.main()
    gather(None)  # the other ranks wait


def init_policy(model_id, device="cpu", gradient_checkpointing=False):
    """-> (policy with float32 weights, tokenizer)"""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            model_id, dtype=torch.float32, attn_implementation="packed", trust_remote_code=False)
    except Exception as error:  # loaders raise anything
        reason = (str(error).strip() or repr(error)).splitlines()[0][:200]
        raise UserError(f"cannot load the model {model_id!r}: {reason}") from None
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # policy and reference must agree
            module.p = 0.0
    ends = np.ravel(model.generation_config.eos_token_id).tolist()  # one, several or None
    policy = Policy(model.to(device), sorted({tokenizer.eos_token_id, *ends} - {None}))
    # Packed rows with a common prompt must get the log-probs of the model's own attention.
    ids = torch.arange(2, 66, device=device).view(2, 32) % model.config.vocab_size
    ids[:, 0], error = 1, math.inf
    with torch.no_grad(), contextlib.suppress(Exception):  # models raise anything
        packed = get_response_log_probs(policy, ids, ids)
        model.set_attn_implementation("eager")
        error = (packed - get_response_log_probs(model, ids, ids)).abs().max()
        model.set_attn_implementation("packed")
    if not error < 1e-2 or hasattr(model.config, "attention_chunk_size"):
        raise UserError(f"the model {model_id!r} is not supported: it must be a decoder with plain "
                        "attention and output layer, such as Llama or Qwen3")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train(), tokenizer


def add_lora(policy, rank, seed):
    """Freeze the weights; train adapters beside them."""
    from peft import LoraConfig
    torch.manual_seed(seed)
    policy.model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


@contextlib.contextmanager
def adapters_off(model):
    """With LoRA the reference is the policy without its adapters."""
    layers = [layer for layer in getattr(model, "modules", list)() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


def make_reference(policy, cfg):
    """The frozen starting model; with LoRA the policy itself."""
    if cfg.lora_rank:
        return policy
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    compile_and_shard(reference, cfg, is_reference=True)
    return reference


def refresh_reference(reference, policy, state):
    reference.load_state_dict(policy.state_dict())
    state.ref_step, state.kl_smooth = state.step, 0.0  # the average starts again


def compile_and_shard(policy, cfg, is_reference=False):
    """A GPU computes in bf16 with its part of the weights; trained weights are float32."""
    global chunk_stats
    for parameter in policy.parameters():
        if not parameter.requires_grad:  # buffers stay float32: they encode positions
            parameter.data = parameter.data.to(policy.compute_dtype)
    layers = max((m for m in policy.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    if cfg.compile:
        # A dynamic temperature would compile a CPU kernel, which takes a minute.
        torch._dynamo.config.specialize_float = True
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if not hasattr(chunk_stats, "__wrapped__"):
            chunk_stats = torch.compile(chunk_stats, dynamic=True)
    if cfg.device == "cpu" and WORLD == 1:
        return
    options = {"mesh": dist.init_device_mesh(cfg.device, (WORLD,)),
               "reshard_after_forward": is_reference or WORLD > 1,
               "mp_policy": MixedPrecisionPolicy(policy.compute_dtype, reduce_dtype=torch.float32)}
    if is_reference and cfg.ref_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for module in (*layers, policy):
        fully_shard(module, **options)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_weights(policy):
    """-> (name, tensor) of the whole model, LoRA merged"""
    weights = policy.model.state_dict()
    for name in [name for name in weights if ".lora_" not in name]:
        weight, layer = full(weights[name]), name.removesuffix(".base_layer.weight")
        if layer != name:
            a, b = (full(weights[f"{layer}.lora_{x}.default.weight"]) for x in "AB")
            weight = weight.float() + 2 * (b @ a)  # lora_alpha / rank is 2
        yield name.replace(".base_layer", ""), weight


class Policy(torch.nn.Module):
    """Turns packed rows into log-probs. Sharded weights can be read only in forward()."""

    def __init__(self, model, stop_ids):
        super().__init__()
        self.model, self.stop_ids, self.device = model, stop_ids, model.device
        self.compute_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def forward(self, packed, temperature=1.0, ref_hidden=None, ref_head=None, only_hidden=False):
        """-> chunk_stats of the M targets. The logits never exist whole."""
        inputs, predictors, targets = packed
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0]  # [N, H]
        hidden = hidden.index_select(0, predictors)  # [M, H]
        if only_hidden:
            return hidden
        head = self.model.get_output_embeddings().weight  # [V, H]
        size = max(1, LOGITS_PER_CHUNK // len(head))
        parts = zip(*(x.split(size) for x in (hidden, targets, ref_hidden) if x is not None))
        # The backward pass computes the logits again: they are not kept.
        chunks = [checkpoint(chunk_stats, head, ref_head, temperature, *part, use_reentrant=False)
                  for part in parts]
        return [torch.cat(pieces) for pieces in zip(*chunks)]


LOGITS_PER_CHUNK = 2**28  # 1 GiB of float32


def chunk_stats(head, ref_head, temperature, hidden, targets, ref_hidden=None):
    """-> log-prob of each target, entropy; with a reference also its log-prob and the exact KL:
    each [M]. Without a head, hidden are logits. Tokens with logit -inf add 0."""
    logits = at_least_float32(hidden if head is None else hidden @ head.T) / temperature  # [M, V]
    norm = logits.logsumexp(-1, keepdim=True)
    log_probs = (logits.gather(-1, targets[:, None]) - norm)[:, 0]
    with torch.no_grad():
        probs = logits.softmax(-1)
        entropy = norm[:, 0] - torch.where(probs > 0, probs * logits, 0).sum(-1)
    if ref_hidden is None:
        return log_probs, entropy
    ref_logits = at_least_float32(ref_hidden if ref_head is None else ref_hidden @ ref_head.T)
    policy, ref = logits - norm, (ref_logits / temperature).log_softmax(-1)
    log_ratio = torch.where(probs > 0, policy - ref, 0).detach().clamp(-LIMIT, LIMIT)
    # log_ratio is constant here: E[grad log pi] is 0, so this has the gradient of the KL.
    exact_kl = (policy.exp() * log_ratio).sum(-1)
    return log_probs, entropy, ref.gather(-1, targets[:, None])[:, 0], exact_kl


def at_least_float32(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def response_stats(model, input_ids, labels, mask, temperature=1.0, ref_model=None):
    """chunk_stats of the tokens in the mask, of any model with logits: each [B, T], 0 elsewhere"""
    if isinstance(model, Policy):
        packed, reference = pack(input_ids, labels, mask, model.device), ()
        if ref_model is not None:
            with torch.no_grad(), adapters_off(ref_model):
                head = full(ref_model.model.get_output_embeddings().weight.to(model.device))
                reference = ref_model(packed, only_hidden=True), head
        stats = model(packed, temperature, *reference)
    else:
        ref_logits = None if ref_model is None else ref_model(input_ids).logits[mask].detach()
        logits = model(input_ids).logits[mask]
        stats = chunk_stats(None, None, temperature, logits, labels[mask], ref_logits)
    mask = to_device(mask, stats[0].device)
    return [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in stats]


def get_response_log_probs(model, input_ids, labels, *, response_mask=None, temperature=1.0):
    """log pi(labels[b, t] | input_ids[b, :t + 1]) -> [B, T], 0 outside the mask"""
    mask = (labels >= 0) & (True if response_mask is None else response_mask.bool())
    return response_stats(model, input_ids, labels, mask, temperature)[0]


def to_device(tensor, device):
    """From pinned memory: the copy does not wait for the GPU."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(input_ids, labels, mask, device):
    """Lay rows end to end; neighbours share a common prompt. -> (model inputs,
    predictors [M]: tokens before response tokens, targets [M]: response tokens)"""
    ids, positions, predictors, prompt = [], [], [], None
    query_starts, key_starts, key_slots = [0], [0], []
    for row, places in zip(input_ids.tolist(), map(np.flatnonzero, mask.cpu().numpy())):
        if len(places) == 0:
            continue
        first, end = places[0] + 1, places[-1] + 1  # of the response, of the row
        if row[:first] != prompt:
            prompt, shared = row[:first], []
        begin = len(shared)
        slots = [*shared, *range(len(ids), len(ids) + end - begin)]
        shared = slots[:first]
        predictors += [slots[place] for place in places]
        if begin < end:  # one token after a shared prompt adds nothing
            ids += row[begin:end]
            positions += range(begin, end)
            key_slots += slots
            query_starts.append(len(ids))
            key_starts.append(len(key_slots))
    if not ids:
        # Sharded ranks compute together: one without rows has a dummy token.
        ids, positions, key_slots, query_starts, key_starts = [0], [0], [0], [0, 1], [0, 1]
    inputs = {"input_ids": [ids], "position_ids": [positions],  # [1, N]
              "key_slots": key_slots,  # [K], the tokens of each row, prompt included
              "query_starts": query_starts, "key_starts": key_starts, "predictors": predictors}
    for name, numbers in inputs.items():
        inputs[name] = to_device(torch.tensor(numbers, dtype=torch.int32), device)
    inputs["longest"] = int(np.diff(key_starts).max())
    return inputs, inputs.pop("predictors"), to_device(labels[mask], device)


def packed_attention(module, query, key, value, attention_mask, *, key_slots, query_starts,
                     key_starts, longest, scaling=None, sliding_window=None, **options):
    """Causal attention; the queries of a row are its last tokens. query: [1, heads, N, d]"""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, d]
    if q.is_cuda and q.dtype == torch.bfloat16:
        window = (sliding_window - 1 if sliding_window else -1, 0)
        out = varlen_attn(q, k[key_slots], v[key_slots], query_starts, key_starts, longest, longest,
                          scale=scaling, window_size=window, **GROUPED_HEADS)
        return out[None], None
    # Without flash attention: whole rows, padded at the end
    n_keys, n_own = key_starts.diff()[:, None], query_starts.diff()[:, None]  # [R, 1]
    place = torch.arange(longest, device=q.device)  # [L]
    is_key = place < n_keys  # [R, L]
    slots = key_slots.new_zeros(is_key.shape).masked_scatter(is_key, key_slots)
    q, k, v = (x[slots].transpose(1, 2) for x in (q, k, v))  # [R, heads, L, d]
    distance = place[:, None] - place  # [L, L]
    sees = (distance >= 0) & (distance < (sliding_window or math.inf))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[None, is_key & (place >= n_keys - n_own)], None


AttentionInterface.register("packed", packed_attention)
# torch 2.11 has no enable_gqa argument.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__code__.co_varnames else {}


# ---- 3. Sampler: vLLM in this process, or plain torch where it is missing ----

class Response(NamedTuple):
    ids: list  # token ids, the end token included
    logps: list = ()  # the sampler's log-prob of each
    mask: list = None  # which tokens the model chose; None: all of them
    finished: bool = True  # False: cut off at max_tokens


def init_vllm(policy, cfg):
    config, llm = copy.deepcopy(policy.model.config), None
    config.architectures = [type(policy.model).__name__]
    length = cfg.max_prompt_tokens + cfg.max_tokens
    context = getattr(config, "max_position_embeddings", math.inf)
    if length > context:
        raise UserError(f"max_prompt_tokens + max_tokens is {length}, the context {context}")
    if cfg.device == "cuda":
        options = {"dtype": "bfloat16", "gpu_memory_utilization": cfg.gpu_mem_util,
                   "enable_sleep_mode": cfg.vllm_sleep, "enforce_eager": cfg.enforce_eager}
    else:
        # Chunked prefill breaks seeded requests on a CPU, so a prompt must fit into a batch.
        options = {"dtype": "float32", "kv_cache_memory_bytes": 2**30, "enforce_eager": True,
                   "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, length)}
    try:
        if cfg.use_vllm:
            print("starting vLLM ...")
            from vllm import LLM
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                # More than 512 sequences have no CUDA graphs and are slower. A tied output layer
                # can go stale in a sync.
                llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, seed=0,
                          max_model_len=length, logprobs_mode="processed_logprobs",
                          max_num_seqs=min(512, max(64, cfg.rollout_batch_size // WORLD)),
                          hf_overrides={"tie_word_embeddings": False}, **options)
    except (ImportError, AttributeError, OSError) as error:
        print(f"!!! vLLM cannot be used here ({error!r:.150}): sampling with torch")
    except (ValueError, RuntimeError) as error:
        raise RunFailed(f"vLLM cannot start ({str(error)[:400]}): try another gpu_mem_util or "
                        "max_tokens, or --use_vllm=False") from error
    if llm is None:
        llm, cfg.vllm_sleep = TorchSampler(policy), False
    load_policy_into_vllm_instance(policy, llm)
    gc.freeze()  # vLLM's objects are many: without them garbage collection is cheap
    return llm


@torch.no_grad()
def load_policy_into_vllm_instance(policy, llm):
    """Copy the weights into the running sampler, and drop what it cached with the old ones."""
    weights = full_weights(policy)
    if isinstance(llm, TorchSampler):
        llm.model.load_state_dict(dict(weights))
        return
    if policy.device.type == "cuda":
        llm.apply_model(lambda model: bool(model.load_weights(weights)))
    else:  # the CPU backend repacks its weights after loading
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if not llm.reset_prefix_cache():
        raise RunFailed("vLLM did not reset its prefix cache")


def init_sampling_params(cfg, n, stop_ids):
    """Arguments of vllm.SamplingParams. logprobs=0: of the sampled token alone."""
    return {"n": n, "temperature": cfg.temperature, "min_tokens": cfg.min_tokens,
            "max_tokens": cfg.max_tokens, "stop_token_ids": list(stop_ids), "logprobs": 0,
            "flat_logprobs": True, "detokenize": False}


def rollout_with_vllm(llm, prompts, params, seed, step, first=0):
    """-> params["n"] Responses to each prompt of token ids; `first` prompts are on lower ranks"""
    # Of the first response to each prompt; the next ones have + 1, + 2, ...
    seeds = [random.Random(f"{seed}/{step}/{first + i}").getrandbits(48)
             for i in range(len(prompts))]
    if not prompts or isinstance(llm, TorchSampler):
        return llm.generate(prompts, params, seeds) if prompts else []
    from vllm import SamplingParams
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts],
                           [SamplingParams(**params, seed=seed) for seed in seeds], use_tqdm=False)
    responses = [Response(list(o.token_ids), o.logprobs.logprobs, None, o.finish_reason == "stop")
                 for output in outputs for o in output.outputs]
    if len(responses) != len(prompts) * params["n"] or not all(r.ids for r in responses):
        raise RunFailed(f"vLLM returned {len(responses)} responses, or an empty one")
    return responses


class TorchSampler:
    """Stands in for vLLM: a copy of the model and left-padded prompts."""

    def __init__(self, policy):
        config = copy.deepcopy(policy.model.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa",
                                                 dtype=policy.compute_dtype)
        self.model = model.to(policy.device).eval()
        load_policy_into_vllm_instance(policy, self)

    @torch.no_grad()
    def generate(self, prompts, params, seeds):
        n, device, stop_ids = params["n"], self.model.device, params["stop_token_ids"]
        width, half = max(map(len, prompts)), len(prompts) // 2
        if half and len(prompts) * n * (width + params["max_tokens"]) > MOST_CACHED_TOKENS:
            return (self.generate(prompts[:half], params, seeds[:half])
                    + self.generate(prompts[half:], params, seeds[half:]))
        # Every response has its own random numbers, whatever else is in the batch.
        uniform = np.stack([np.random.default_rng(seed + i).random(params["max_tokens"])
                            for seed in seeds for i in range(n)])  # [P * n, max_tokens]
        uniform = torch.tensor(uniform, device=device)
        ids = torch.tensor([[-1] * (width - len(p)) + p for p in repeat(prompts, n)], device=device)
        mask, ids = (ids >= 0).long(), ids.clamp(min=0)
        tokens, logps, cache = [], [], DynamicCache(config=self.model.config)
        is_done = torch.zeros(len(ids), dtype=torch.bool, device=device)
        while len(tokens) < params["max_tokens"] and not is_done.all():
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
            if len(tokens) < params["min_tokens"]:
                logits[:, stop_ids] = -torch.inf
            log_probs = (logits / max(params["temperature"], 1e-6)).log_softmax(-1)  # 0: greedy
            total = log_probs.double().exp().cumsum(-1)
            threshold = uniform[:, len(tokens), None] * total[:, -1:]
            ids = torch.searchsorted(total, threshold, right=True)
            mask = F.pad(mask, (0, 1), value=1)
            tokens.append(ids[:, 0])
            logps.append(log_probs.gather(1, ids)[:, 0])
            is_done |= torch.isin(ids[:, 0], torch.tensor(stop_ids, device=device))
        responses = []
        for ids, logp in zip(torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist()):
            length = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
            finished = ids[length - 1] in stop_ids
            responses.append(Response(ids[:length], logp[:length], None, finished))
        return responses


MOST_CACHED_TOKENS = 2**17  # in one batch of the torch sampler


# ---- 4. Batch, advantages, KL, loss, update ----

def repeat(items, n):
    return [item for item in items for _ in range(n)]


def checked_reward(reward_fn, response, truth):
    try:
        reward = float(reward_fn(response, truth))
        if not abs(reward) < 1e38:
            raise ValueError(f"{reward} is not finite")
        return reward
    except Exception as error:  # show the response that caused it
        raise UserError(f"reward_fn: {error!r} for the response {response[:300]!r}") from error


def compute_group_normalized_advantages(rollout_responses, repeated_ground_truths, reward_fn,
                                        group_size, advantage_eps, normalize_by_std):
    """-> (advantages [N], rewards [N], metadata). The responses to a prompt stand together."""
    if group_size < 2 or len(rollout_responses) % group_size:
        raise UserError(f"group_size={group_size} must be above 1 and divide the responses")
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([checked_reward(reward_fn, *pair) for pair in pairs])
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_by_std:
        advantages = advantages / (groups.std(1, keepdim=True) + advantage_eps)
    # Exact zeros: rounding noise over a tiny standard deviation would be a full advantage.
    is_flat = (groups == groups[:, :1]).all(1, keepdim=True)
    metadata = {"frac_groups_zero_std": is_flat.float().mean().item()}
    if len(rewards):
        metadata |= {"mean": rewards.mean().item(), "std": rewards.std().item(),
                     "max": rewards.max().item(), "min": rewards.min().item()}
    return torch.where(is_flat, 0.0, advantages).flatten(), rewards, metadata


def make_batch(prompts, responses, min_tokens=0):
    """-> [B, T] tensors in host memory, padded on the right: labels[b, t] is the token after
    input_ids[b, t], and mask[b, t] says whether the model chose it"""
    lengths = [len(p) + len(r.ids) for p, r in zip(prompts, responses, strict=True)]
    shape = (len(prompts), max(lengths, default=2))
    tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    sampled = torch.full(shape, math.nan)
    for b, (prompt, response, end) in enumerate(zip(prompts, responses, lengths)):
        tokens[b, :end] = torch.tensor(prompt + response.ids)
        mask[b, len(prompt):end] = torch.tensor(response.mask or True)
        if len(response.logps):
            # EOS is banned before min_tokens: the log-probs there are not the policy's.
            sampled[b, len(prompt) + min_tokens:end] = torch.tensor(response.logps[min_tokens:])
    return SimpleNamespace(
        input_ids=tokens[:, :-1], labels=tokens[:, 1:], mask=mask[:, 1:], lengths=lengths,
        rollout_log_probs=sampled[:, 1:], old_log_probs=None, ref_log_probs=None, prompts=prompts)


def select(batch, rows):
    return SimpleNamespace(**{name: value[rows] if torch.is_tensor(value) else None
                              for name, value in vars(batch).items()})


def make_minibatches(cfg, step, first, n_rows):
    """This rank's rows of each optimizer step; `first` rows are on lower ranks."""
    for epoch in range(cfg.inner_epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(cfg.rollout_batch_size)
        for rows in np.array_split(order - first, cfg.n_minibatches):
            yield sorted(rows[(0 <= rows) & (rows < n_rows)].tolist())


def make_microbatches(batch, rows, cfg):
    """Cut rows into groups of similar size, equally many on all ranks."""
    sizes = [batch.lengths[row] for row in rows]
    for i in range(1, len(rows)):
        if batch.prompts[rows[i]] == batch.prompts[rows[i - 1]]:  # it is computed once
            sizes[i] -= len(batch.prompts[rows[i]])
    n_groups = math.ceil(sum(sizes) / cfg.tokens_per_microbatch)
    n_groups = max(n_groups, cfg.gradient_accumulation_steps)
    groups = {}
    for row, size, end in zip(rows, sizes, np.cumsum(sizes)):
        # A row belongs to the group that its middle falls into.
        group = int((end - size / 2) / sum(sizes) * n_groups)
        groups.setdefault(group, []).append(row)
    return [*groups.values()] + [[]] * (max(gather(len(groups))) - len(groups))


@torch.no_grad()
def score(model, batch, cfg):
    """-> log-probs of the batch [B, T]"""
    log_probs = torch.zeros(batch.mask.shape, device=model.device)
    for rows in make_microbatches(batch, range(len(batch.lengths)), cfg):
        inputs = (tensor[rows] for tensor in (batch.input_ids, batch.labels, batch.mask))
        log_probs[rows] = response_stats(model, *inputs, cfg.temperature)[0]
    return log_probs


LIMIT = 20.0  # log-ratios are clamped to +-20: e^20 is 5e8
WEIGHT_CAP = 10.0  # largest weight pi/old of a KL term
MISMATCH_CAP = 2.0  # largest weight old/sampler of a token
ESTIMATORS = ("k1", "k2", "k3", "exact")


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1", is_weighted=False):
    """Per sampled token: k1 = l, k2 = l^2 / 2, k3 = e^-l - 1 + l, where l = log pi - log ref.
    is_weighted: the caller multiplies by rho = pi/old, whose derivative adds the value to the
    slope. For k3 the exponentials then cancel. (k2 is right already: its rho stays constant.)"""
    policy, ref = at_least_float32(policy_log_probs), at_least_float32(ref_log_probs)
    log_ratio = (policy - ref).detach().clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        value = log_ratio
        slope = log_ratio + 1 if is_weighted else torch.ones_like(log_ratio)
    elif estimator == "k2":
        value = log_ratio**2 / 2
        slope = log_ratio
    elif estimator == "k3":
        value = torch.expm1(-log_ratio) + log_ratio
        slope = log_ratio if is_weighted else -torch.expm1(-log_ratio)
    else:
        raise UserError(f"kl_estimator: one of {', '.join(ESTIMATORS)} (needs the reference model)")
    # The slope is written out, not left to autograd: nothing overflows or is cut to 0.
    return value + slope * (policy - policy.detach())


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None,
                 kl_coef=0.0, *, response_mask=None, kl_estimator="k3", kl_importance_weight=True,
                 kl_in="loss", clip_range_high=None, rollout_log_probs=None, exact_kl=None):
    """PPO's clipped loss + kl_coef * KL -> (loss [B, T], metadata). advantages: [B] or [B, T]. With
    the sampler's rollout_log_probs each token is weighted by old/sampler."""
    mask = (torch.ones_like(policy_log_probs) if response_mask is None else response_mask).bool()
    policy, old = masked(policy_log_probs, mask), masked(old_log_probs, mask).detach()
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # [B] would broadcast along T
    log_ratio = (policy - old).detach().clamp(-LIMIT, LIMIT)
    rho = log_ratio.exp()
    stats = {"approx_kl": torch.expm1(log_ratio) - log_ratio, "ratio_mean": rho, "ratio_max": rho}

    kl_term = 0.0
    if kl_coef and ref_log_probs is not None:
        ref = masked(ref_log_probs, mask).detach()
        if kl_estimator == "exact" and exact_kl is not None:
            kl_term = kl_seen = masked(exact_kl, mask)
        else:
            weight = rho.clamp(max=WEIGHT_CAP)
            kl_term = compute_kl_divergence(policy, ref, kl_estimator, kl_importance_weight)
            kl_term = kl_term * (weight if kl_importance_weight else 1.0)
            # Logged. Without weight and caps its mean off-policy would be meaningless.
            kl_seen = weight * compute_kl_divergence(policy, ref, "k3").clamp(max=LIMIT)
        if kl_in == "reward":
            if kl_estimator != "k1":
                raise UserError("KL in the reward needs kl_estimator=k1")
            # A token pays for its own k1 and for that of all tokens after it.
            kl_term = compute_kl_divergence(policy, ref, "k1").detach()
            advantages = advantages - kl_coef * kl_term.flip(1).cumsum(1).flip(1)
        stats |= {
            "kl_penalty_mean": kl_term, "kl_mean": kl_seen, "kl_max": kl_seen, "kl_min": kl_seen,
            "kl_clamped_frac": ((policy - ref).abs() > LIMIT) | (rho > WEIGHT_CAP),
            "policy_logp_mean": policy, "ref_logp_mean": ref.clamp(min=-1e4)}

    low, high = 1 - clip_range, 1 + (clip_range_high or clip_range)
    # policy - policy.detach() is 0, with the gradient of log pi.
    ratio = rho * (1 + (policy - policy.detach()))
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    stats["clip_fraction"] = ((advantages > 0) & (rho > high)) | ((advantages < 0) & (rho < low))
    if kl_in == "loss":
        loss = loss + kl_coef * kl_term
    if rollout_log_probs is not None:
        sampler = masked(rollout_log_probs, mask)
        gap = torch.where(sampler.isnan(), 0, old - sampler)
        loss = loss * gap.clamp(-LIMIT, LIMIT).exp().clamp(max=MISMATCH_CAP)
        stats |= {"logp_gap_mean": gap.abs(), "logp_gap_max": gap.abs()}
    return torch.where(mask, loss, 0), summarize(stats, mask)


def masked(tensor, mask):
    """0 outside the mask. Applied to the inputs: a NaN there must not reach any gradient."""
    return torch.where(mask, at_least_float32(to_device(tensor, mask.device)), 0)


@torch.no_grad()
def summarize(stats, mask):
    """Maxima, minima or means over the mask, as the names say; 0 for what was not computed"""
    summary = dict.fromkeys((*SCALARS.values(), *stats), 0.0)
    table = torch.stack([*stats.values()])[:, mask].double()  # [names, tokens]
    if table.numel():
        folds = {"max": torch.max, "min": torch.min}
        values = [folds.get(name[-3:], torch.mean)(row) for name, row in zip(stats, table)]
        summary |= zip(stats, torch.stack(values).tolist())
    return summary | {"n_tokens": table.shape[1]}


def masked_mean(tensor, mask):
    """Mean over rows of their masked means; empty rows do not count"""
    return masked_mean_drgrpo(tensor / mask.sum(-1, keepdim=True).clamp(min=1), mask, 1)


def masked_mean_drgrpo(tensor, mask, num_tokens):
    """Mean over rows of masked sum / num_tokens: no length is favoured"""
    return torch.where(mask.bool(), tensor, 0).sum() / num_tokens / mask.any(-1).sum().clamp(min=1)


def loss_divisor(mask, loss_type, max_completion_length):
    """What the loss of an optimizer step, a sum, is divided by"""
    n_rows = int(mask.any(-1).sum())
    divisors = {"grpo": n_rows, "dr_grpo": n_rows * max_completion_length, "dapo": int(mask.sum())}
    if loss_type not in divisors:
        raise UserError(f"loss_type={loss_type}: it must be one of {', '.join(divisors)}")
    return divisors[loss_type]


def grpo_microbatch_step(
        policy, input_ids, labels, response_mask, advantages_per_seq, gradient_accumulation_steps,
        clip_range, loss_type="grpo", max_completion_length=256, ref_model=None, kl_coef=0.0, *,
        old_log_probs=None, ref_log_probs=None, divisor=None, temperature=1.0, kl_estimator="k3",
        **loss_options):
    """Forward, loss, backward -> (part of the step's loss, metadata). divisor is loss_divisor() of
    the whole step; None: all microbatches are as large as this one."""
    mask = response_mask.bool() & (labels >= 0)
    if divisor is None:
        divisor = loss_divisor(mask, loss_type, max_completion_length) * gradient_accumulation_steps
    needs_model = kl_coef and (kl_estimator == "exact" or ref_log_probs is None)
    log_probs, entropy, *ref_stats = response_stats(
        policy, input_ids, labels, mask, temperature, ref_model if needs_model else None)
    ref_log_probs, loss_options["exact_kl"] = ref_stats or (ref_log_probs, None)
    mask = to_device(mask, log_probs.device)
    loss, metadata = compute_loss(
        to_device(advantages_per_seq, mask.device), log_probs,
        log_probs if old_log_probs is None else old_log_probs, clip_range, ref_log_probs, kl_coef,
        response_mask=mask, kl_estimator=kl_estimator, **loss_options)
    if loss_type == "grpo":
        loss = loss / mask.sum(-1, keepdim=True).clamp(min=1)
    total = loss.sum() / max(divisor, 1e-9)
    # Read before the backward pass, not to wait for the GPU after it
    metadata["loss"] = total.item()
    metadata["entropy"] = entropy.sum().item() / max(1, metadata["n_tokens"])
    if kl_coef and ref_log_probs is not None:
        metadata["response_kl"] = masked(log_probs.detach() - ref_log_probs, mask).sum(1).tolist()
    total.backward()
    return total.detach(), metadata


def update_weights(policy, optimizer, loss, cfg, state):
    """Step the optimizer if loss and gradient are finite. -> gradient norm before clipping"""
    limit = cfg.max_grad_norm or math.inf
    grad_norm = float(full(torch.nn.utils.clip_grad_norm_(policy.parameters(), limit)))
    if not math.isfinite(grad_norm + loss):
        print(f"!!! update skipped: loss {loss:g}, gradient norm {grad_norm:g}")
        state.skipped += 1
        state.skips_in_a_row += 1
        if state.skips_in_a_row == 5:
            raise RunFailed("5 updates in a row were not finite: lower lr")
    elif grad_norm > 0:  # without a gradient, momentum must not move the weights
        warmup = min(1.0, state.step / max(1, cfg.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * warmup * 0.5**state.skips_in_a_row
        optimizer.step()
        state.skips_in_a_row = 0
    return grad_norm


def adapt_kl_coef(state, kl, cfg):
    """Steer the KL to target_kl, with kl_coef at a tenth to a hundred times its setting."""
    if not math.isfinite(kl):
        return
    # Clipped, so that one wild batch does not count for long
    state.kl_smooth = (state.kl_smooth + min(kl, 5 * cfg.target_kl)) / 2
    if state.kl_smooth > 1.5 * cfg.target_kl:
        state.kl_coef = min(1.5 * state.kl_coef, 100 * cfg.kl_coef)
    elif state.kl_smooth < 0.5 * cfg.target_kl:
        state.kl_coef = max(0.75 * state.kl_coef, 0.1 * cfg.kl_coef)


# ---- 5. Records: evaluation, metrics, log, checkpoints ----

def evaluate_model(llm, task, params, stop_ids, reward_fn=reward_fn):
    """-> (metrics, responses as dicts) on the held-out problems, with fixed seeds"""
    problems, first = share(task.held_out)
    prompts, rows = [problem["prompt_ids"] for problem in problems], []
    responses = rollout_with_vllm(llm, prompts, params, 0, "eval", first)
    for problem, response in zip(repeat(problems, params["n"]), responses):
        text = decode(task.tokenizer, response.ids, stop_ids)
        rows.append({"prompt": problem["rendered"], "response": text, "tokens": len(response.ids),
                     "answer": problem.get("answer") or problem["solution"],
                     "reward": checked_reward(reward_fn, text, problem)})
    rows = sum(gather(rows), [])
    rewards = np.array([row["reward"] for row in rows])
    return {"eval/accuracy": (rewards >= 0.9).mean(), "eval/mean_reward": rewards.mean(),
            "eval/avg_output_tokens": np.mean([row["tokens"] for row in rows])}, rows


def evaluate(policy, llm, task, params, log, state):
    """Evaluate with one response per problem; keep the model if it is the best so far."""
    metrics, rows = evaluate_model(llm, task, params | {"n": 1}, policy.stop_ids, reward_fn)
    log_eval(log, state.step, metrics, rows[:4])
    reward = float(metrics["eval/mean_reward"])
    if state.step and reward > state.best_reward:
        save_model(policy, task.tokenizer, log.folder / "best")
    state.best_reward = max(reward, state.best_reward)
    return metrics


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


SCALARS = {"train/entropy": "entropy", "train/clip_fraction": "clip_fraction",
           "train/approx_kl": "approx_kl", "train/kl_penalty": "kl_penalty_mean",
           "rollout/logp_gap_mean": "logp_gap_mean", "rollout/logp_gap_max": "logp_gap_max",
           "kl/mean": "kl_mean", "kl/max": "kl_max", "kl/min": "kl_min",
           "kl/clamped_frac": "kl_clamped_frac", "kl/policy_logp_mean": "policy_logp_mean",
           "kl/ref_logp_mean": "ref_logp_mean"}


def step_metrics(metadata, rewards, responses, texts, times, cfg):
    """-> (metrics of one step over all ranks, KL of each response)"""
    rows = [(reward, len(response.ids), final_answer(text) is not None, not response.finished)
            for reward, response, text in zip(rewards.tolist(), responses, texts)]
    rewards, lengths, answered, truncated = np.array(sum(gather(rows), [])).T
    groups, seconds = rewards.reshape(-1, cfg.group_size), times[3] - times[0]
    metrics = {
        "train/reward_mean": rewards.mean(), "train/reward_std": rewards.std(),
        "train/frac_groups_zero_std": (groups.max(1) == groups.min(1)).mean(),
        "train/answer_frac": answered.mean(), "train/truncated_frac": truncated.mean(),
        "train/avg_output_tokens": lengths.mean(), "time/step": seconds,
        "perf/tokens_per_s": lengths.sum() / seconds}
    metrics |= zip(("time/rollout", "time/train", "time/sync"), np.diff(times))
    parts = [part for part in sum(gather(metadata), []) if part["n_tokens"]]
    average = functools.partial(np.average, weights=[part["n_tokens"] for part in parts])
    for name, key in SCALARS.items():
        if parts and (cfg.use_kl_penalty or not name.startswith("kl/")):
            combine = {"max": max, "min": min}.get(key[-3:], average)
            metrics[name] = float(combine([part[key] for part in parts]))
    return metrics, sum((part.get("response_kl", []) for part in parts), [])


def check_agreement(metrics, metadata, cfg, step):
    """Sampler and trainer must agree on the tokens just sampled; reference and policy at first."""
    gap, cpu = metrics.get("rollout/logp_gap_mean", 0.0), cfg.device == "cpu"
    if gap > (2e-3 if cpu else 0.1 if step == 1 else 0.3):
        raise RunFailed(f"log-probs of sampler and trainer differ by {gap:.3g}: the weights did "
                        "not arrive, or vLLM computes them differently (try --use_vllm=False)")
    if step == 1 and metadata[0]["kl_mean"] > (1e-6 if cpu else 2e-3):
        raise RunFailed(f"the KL is {metadata[0]['kl_mean']:.3g} before the first update, not 0: "
                        "dropout, another temperature, shifted labels or other weights")


class Log:
    """config.json, metrics.jsonl, samples.jsonl and TensorBoard events of a run. Rank 0 writes."""

    def __init__(self, folder, cfg, last_step=-1):
        folder = self.folder = Path(folder)
        self.first_step, self.started, self.warned = max(0, last_step), time.time(), set()
        if RANK:
            return
        from torch.utils.tensorboard import SummaryWriter, summary
        texts = {"config.json": json.dumps(vars(cfg) | {"resume": ""}, indent=1)}
        for name in ("metrics.jsonl", "samples.jsonl"):
            (folder / name).touch()
            # A resumed run repeats the steps after its checkpoint. The last line may be cut off.
            lines = (folder / name).read_text().split("\n")[:-1]
            lines = [line + "\n" for line in lines if json.loads(line)["step"] <= last_step]
            texts[name] = "".join(lines)
        for name, text in texts.items():
            with written_whole(folder / name) as path:
                path.write_text(text)
        events = folder.parent / "tb" / folder.name
        self.tensorboard = SummaryWriter(events, purge_step=last_step + 1)
        if last_step < 0:
            self.tensorboard.add_text("config", f"<pre>{escape(texts['config.json'])}</pre>")
            self.tensorboard.file_writer.add_summary(summary.hparams(vars(cfg), {})[1])

    def append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def write(self, step, metrics, response_kl=()):
        if RANK:
            return
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.append("metrics.jsonl", {"step": step} | metrics)
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step)
        if response_kl:
            self.tensorboard.add_histogram("kl/per_response", np.array(response_kl), step)
        self.tensorboard.flush()

    def report(self, last_step, cfg):
        if RANK:
            return
        self.tensorboard.close()
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        print(f"\nHeld-out accuracy {accuracy[0]:.1%} -> {accuracy[-1]:.1%} in {last_step} steps")
        if last_step < cfg.n_grpo_steps:
            print(f"  continue  python starter.py --resume={self.folder}")
        print(f"  try it    python sample.py --model_id={self.folder}/model\n"
              f"  curves    tensorboard --logdir {self.folder.parent}/tb")


def log_train(log, step, metrics, cfg):
    seconds = (time.time() - log.started) / (step - log.first_step) * (cfg.n_grpo_steps - step)
    line = ("Step {step} | Loss: {train/loss:.4f} | Grad norm: {train/grad_norm:.4f} | "
            "Reward mean: {train/reward_mean:.3f} | Answered: {train/answer_frac:.2f} | "
            "Entropy: {train/entropy:.3f} | Tokens: {train/avg_output_tokens:.1f} | "
            "{perf/tokens_per_s:.0f} tok/s | rollout {time/rollout:.2f} train {time/train:.2f} "
            "sync {time/sync:.2f} s | ETA {eta:.1f} min")
    if "kl/mean" in metrics:
        line += " | KL: {kl/mean:.4f} | KL penalty: {train/kl_penalty:.4f}"
    print(line.format(**{"step": step, "eta": seconds / 60, "train/entropy": math.nan} | metrics))
    kl = metrics.get("kl/mean", 0.1)
    alarms = {
        "KL above 0.2: far from the reference (KL.md)": kl > 0.2,
        "KL is still 0 (KL.md)": kl < 1e-9 and step > 10 and not cfg.ref_update_every,
        "all groups have equal rewards: no gradient": metrics["train/frac_groups_zero_std"] == 1,
        "most responses are cut off: raise max_tokens": metrics["train/truncated_frac"] > 0.5}
    for text in alarms:
        if alarms[text] and text not in log.warned:
            print(f"!!! {text}")
            log.warned.add(text)


def log_eval(log, step, metrics, samples):
    print(f"Step {step} | Held-out accuracy: {metrics['eval/accuracy']:.1%} | "
          f"Mean reward: {metrics['eval/mean_reward']:.3f}")
    for i, sample in enumerate(samples if RANK == 0 else []):
        log.append("samples.jsonl", {"step": step} | sample)
        text = "{prompt}\n--> {response}\nreward {reward}, expected: {answer}".format(**sample)
        log.tensorboard.add_text(f"sample {i}", f"<pre>{escape(text)}</pre>", step)


def escape(text):
    """Treat model output as untrusted: no control characters, no HTML."""
    return html.escape("".join(letter if letter.isprintable() or letter == "\n"
                               else repr(letter)[1:-1] for letter in text))


@contextlib.contextmanager
def written_whole(path):
    """A temporary path for a file or folder, renamed afterwards: `path` is never half written."""
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    try:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
            leftover.unlink(missing_ok=True)
        yield temporary
        if path.is_dir() and not path.is_symlink():
            path.rename(old)
        temporary.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # torch and safetensors have their own for a full disk
        raise RunFailed(f"cannot write {path} ({error}). Is the disk full?") from error


def save_model(policy, tokenizer, folder):
    """Write the model as transformers and vLLM load it, LoRA merged."""
    config, dtype = copy.deepcopy(policy.model.config), policy.compute_dtype
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    weights = {name: weight.detach().to("cpu", dtype) for name, weight in full_weights(policy)
               if RANK == 0 and name != tied}
    if RANK:
        return
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shell.generation_config = policy.model.generation_config
    shell.generation_config.do_sample = True  # a temperature without it cannot be saved
    with written_whole(folder) as temporary:
        shell.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)


WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True,
                               strict=False)


def save_checkpoint(folder, policy, optimizer, ref_model, state):
    """All that a resumed run needs to repeat the numbers. The last two are kept."""
    weights, moments = dcp.get_state_dict(policy, optimizer, options=TRAINED)
    ref = None
    if state.ref_step and ref_model:
        ref = dcp.get_model_state_dict(ref_model, options=WHOLE)
    if RANK:
        return
    folder = folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    with written_whole(folder / f"step_{state.step:08d}.pt") as path:
        torch.save({"weights": weights, "moments": moments, "ref": ref, "state": vars(state)}, path)
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def load_checkpoint(folder):
    """-> the newest intact checkpoint, or None. Only tensors and plain values are loaded."""
    for path in sorted(Path(folder, "checkpoint").glob("step_*.pt"), reverse=True):
        try:
            if zipfile.ZipFile(path).testzip():
                raise ValueError("wrong checksum")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            print(f"resuming {folder} after step {saved['state']['step']}")
            return saved
        except Exception as error:  # a damaged file raises anything
            print(f"!!! {path} is damaged ({error!s:.100}): trying the one before")
    print(f"{folder} has no checkpoint: starting at step 0")


def restore(saved, policy, optimizer, ref_model, state):
    dcp.set_state_dict(policy, optimizer, model_state_dict=saved["weights"],
                       optim_state_dict=saved["moments"], options=TRAINED)
    if saved["ref"] and ref_model is not None:
        dcp.set_model_state_dict(ref_model, saved["ref"], options=WHOLE)
    kl_coef = state.kl_coef
    vars(state).update(saved["state"])
    if kl_coef != state.kl_coef_set:  # changed on resume
        state.kl_coef = state.kl_coef_set = kl_coef


def catch_signals():
    """Ctrl-C or SIGTERM: finish the step, save, stop. The second one stops at once."""
    received = []

    def handler(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)
        print("\nstopping after this step; press Ctrl-C again to quit without saving")

    with contextlib.suppress(ValueError):  # signals need the main thread
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)
    return received


# ---- 6. Settings: command line, checks, run folder ----

FIXED_ON_RESUME = ("model_id lora_rank seed task eval_task prompt n_eval max_prompt_tokens "
                   "n_numbers max_number operations").split()


def read_arguments(argv):
    """["--lr=1e-5", "--seed", "1"] -> {"lr": "1e-5", "seed": "1"}, over those of a resumed run"""
    given, words = {}, list(argv)
    while words:
        name, has_value, value = words.pop(0).partition("=")
        if not name.startswith("--") or not (has_value or words):
            raise UserError(f"cannot read {name!r}: write --name=value (see --help)")
        given[name[2:]] = value if has_value else words.pop(0)
    if not given.get("resume"):
        return given
    folder = Path(given["resume"])
    if given["resume"] == "latest":
        folder = Path(given.get("out_dir", "out"), "latest")
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"no run to resume in {str(folder)!r} ({error})") from None
    for name in given.keys() & saved.keys() - {"resume", "out_dir"}:
        if str(saved[name]) != given[name]:
            if name in FIXED_ON_RESUME:
                raise UserError(f"{name} cannot change on resume: it is {saved[name]}")
            print(f"changed on resume: {name} {saved[name]} -> {given[name]}")
    return saved | given | {"resume": str(folder.resolve())}


def override(cfg, given):
    for name, value in given.items():
        if not hasattr(cfg, name):
            near = difflib.get_close_matches(name, vars(cfg), 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them"
            raise UserError(f"there is no hyperparameter {name}: {hint}")
        default = getattr(cfg, name)
        try:
            if isinstance(default, bool):
                value = {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
            setattr(cfg, name, type(default)(value))
        except (ValueError, KeyError):
            raise UserError(f"--{name}={value}: expected something like {default}") from None


def check_settings(cfg):
    may_be_zero = ("seed lora_rank save_every min_tokens warmup_steps max_grad_norm kl_coef "
                   "clip_range_high advantage_eps kl_warmup_steps ref_update_every").split()
    for name, value in vars(cfg).items():
        lowest = 0 if name in may_be_zero else 1e-30
        if type(value) in (int, float) and not lowest <= value < 2**62:
            raise UserError(f"{name} is out of range: {value}")
    gpu = cfg.device == "cuda" and torch.cuda.is_available()
    kl, ref_options = cfg.use_kl_penalty and cfg.kl_coef, cfg.ref_update_every or cfg.ref_offload
    rules = {
        "device is cpu, or cuda with a GPU": cfg.device == "cpu" or gpu,
        "vllm_sleep and ref_offload need a GPU": gpu or not (cfg.vllm_sleep or cfg.ref_offload),
        "loss_type is grpo, dr_grpo or dapo": cfg.loss_type in ("grpo", "dr_grpo", "dapo"),
        f"kl_estimator is one of {', '.join(ESTIMATORS)}": cfg.kl_estimator in ESTIMATORS,
        "kl_in is loss, or reward with kl_estimator=k1":
            cfg.kl_in == "loss" or (cfg.kl_in, cfg.kl_estimator) == ("reward", "k1"),
        "the KL penalty is off: add --use_kl_penalty=True":
            kl or not (cfg.kl_adaptive or cfg.kl_warmup_steps or ref_options),
        "no ref_update_every or ref_offload with lora_rank": not (cfg.lora_rank and ref_options),
        "rollout_batch_size is a multiple of group_size, which is at least 2":
            cfg.group_size > 1 and cfg.rollout_batch_size % cfg.group_size == 0,
        "clip_range and gpu_mem_util are below 1": max(cfg.clip_range, cfg.gpu_mem_util) < 1,
        "min_tokens is at most max_tokens": cfg.min_tokens <= cfg.max_tokens,
        "n_numbers is 2 to 8": 2 <= cfg.n_numbers <= 8,
        "operations are some of +-*/": cfg.operations and not cfg.operations.strip("+-*/"),
        "eval_task needs a task from a file": cfg.task != "countdown" or not cfg.eval_task}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(rule)
    if kl and cfg.kl_in == "loss" and cfg.kl_estimator == "k1" and not cfg.kl_importance_weight:
        print("!!! unweighted k1 in the loss has an expected gradient of zero (KL.md)")


def start_process_group(device):
    # On a CPU, the parallel sums of backward passes may otherwise differ from run to run.
    torch.use_deterministic_algorithms(device == "cpu")
    if (IS_LAUNCHED or device == "cuda") and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = None if IS_LAUNCHED else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD)


def make_run_folder(cfg, given):
    """-> out/0003_lr=1e-4, a new folder; out/latest points to it"""
    out = Path(cfg.out_dir)
    label = ",".join(f"{key}={value}" for key, value in given.items() if key != "out_dir")
    label = re.sub(r"[^\w=.,+-]", "-", label[:39], flags=re.ASCII)
    numbers = [int(path.name[:4]) for path in out.glob("[0-9][0-9][0-9][0-9]*")]
    name = gather(f"{max(numbers, default=0) + 1:04d}_{label}".rstrip("_"))[0]
    try:
        if RANK == 0:
            (out / name).mkdir(parents=True)
            with written_whole(out / "latest") as temporary:
                temporary.symlink_to(name)
    except (OSError, RunFailed) as error:
        raise UserError(f"cannot write to out_dir {cfg.out_dir!r} ({error})") from None
    print(f"run folder: {out / name} (after an interruption: --resume={out / name})")
    return out / name


# ---- 7. Quick tests, run before every training. The full tests are in test_starter.py ----

def test_functions():
    """KL terms and the clipped loss by hand; our KL gradient is that of KL(pi || ref)."""
    expect = torch.testing.assert_close
    policy, ref = torch.tensor([[0.0, 0.5], [0.0, -0.5]], requires_grad=True), torch.zeros(2, 2)
    k3 = compute_kl_divergence(policy, ref, "k3")
    expect(k3[:, 1], torch.tensor([math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]))
    loss, _ = compute_loss(torch.tensor([1.0, -1.0]), policy, ref, 0.2)
    expect(loss, torch.tensor([[-1.0, -1.2], [1.0, 0.8]]))
    expect(torch.autograd.grad(loss.sum(), policy)[0], torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))

    logits, ref, shift = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    policy, ref = logits.requires_grad_().log_softmax(0), ref.log_softmax(0)
    old = (logits + 0.3 * shift).log_softmax(0).detach()
    loss, _ = compute_loss(torch.zeros(1), policy[None], old[None], 0.2, ref[None], 1.0)
    terms = (old.exp() * loss[0]).sum(), (policy.exp() * (policy - ref)).sum()
    expect(*(torch.autograd.grad(term, logits, retain_graph=True)[0] for term in terms))
    print("=== All Tests Passed! ===")


def run(main):
    """-> exit code. What a person can act on is one line; anything else keeps its traceback."""
    try:
        main()
        return 0
    except (UserError, RunFailed) as error:
        message, code = error, 2 if isinstance(error, UserError) else 1
    except OSError as error:
        message, code = f"cannot write or read: {error}", 1
    except torch.OutOfMemoryError:
        message, code = "out of GPU memory: try --vllm_sleep=True, --lora_rank=32 (README)", 1
    except KeyboardInterrupt:
        message, code = "stopped at once", 130
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    test_functions()
    exit_code = run(main)
    if exit_code or IS_LAUNCHED:
        sys.stdout.flush()
        os._exit(exit_code)  # an orderly exit could wait for a dead rank

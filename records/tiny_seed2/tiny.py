"""Countdown with + and - alone, and a tiny model that can learn it on a laptop.

    python starter.py --task=tiny --model_id=tiny        the default without a GPU

The model is a byte-level Llama of 0.85 M parameters. It is made once, in about a minute on two
cores, and tiny/ is an ordinary model folder, for transformers and vLLM, too. A short warm start on
solved problems teaches the form of an answer and a little arithmetic. The rest is for GRPO.
"""
import math, random, shutil, time
from pathlib import Path

import countdown
import tiktoken
import torch
import torch.nn.functional as F
from countdown import reward_fn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

PROBLEMS = {"max_number": 20, "operations": "+-", "prompt": "{numbers}={target}:"}
ANY = r"[\s\S]"  # one letter at a time
SPECIAL = ["<|end|>", "<|pad|>", "<answer>", "</answer>"]  # ids 256 to 259, after the bytes
ONE_TURN = "{{ messages[-1]['content'] }}"  # a chat template that shows the last message only


def rows():
    """-> (10,000 rows to train on, 1,000 held-out rows)"""
    return countdown.make_rows(seed=42, **PROBLEMS)


def prepare():
    """Make the model, once."""
    if not Path("tiny").exists():
        write_model("tiny")


def write_model(folder, examples=None, steps=300, new_tokens=(), seed=42, chat_template=ONE_TURN):
    """Write a tiny model. It is warm-started on the (prompt, response) pairs of examples(step):
    those of Countdown if there are none."""
    print(f"making the tiny model in {folder}/ (once, about a minute)")
    folder = Path(folder)
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    # The same weights every time: parallel sums on a CPU differ otherwise.
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    model = make_model(seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    if new_tokens:  # a token for each word: easier to learn than letters
        tokenizer.add_tokens(list(new_tokens))
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    warm_start(model, tokenizer, examples or countdown_examples, steps)
    torch.use_deterministic_algorithms(was_deterministic)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def make_model(seed=42):
    """-> the model with random weights"""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260, hidden_size=128, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=256, pad_token_id=257, tie_word_embeddings=False,
        initializer_range=0.08)
    return AutoModelForCausalLM.from_config(config)


def make_tokenizer():
    """-> a tokenizer in which every byte is a token, as in a tiktoken encoding"""
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=ANY, mergeable_ranks=ranks,
                                 special_tokens={name: 256 + i for i, name in enumerate(SPECIAL)})
    converter = TikTokenConverter(pattern=ANY, extra_special_tokens=SPECIAL)
    converter.load_tiktoken_bpe = lambda _: ranks
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted(),
                                        eos_token=SPECIAL[0], pad_token=SPECIAL[1])
    tokenizer.chat_template = ONE_TURN
    probe = "3 5 7=22:<answer>3*5+7</answer> ü€\n\x00<|end|>"
    if tokenizer.encode(probe) != encoding.encode(probe, allowed_special="all"):
        raise RuntimeError("the tokenizer does not give the ids of the tiktoken encoding")
    return tokenizer


def countdown_examples(step, n=128):
    """-> [(prompt, response), ...] for one step of the warm start. None is a held-out problem."""
    rng = random.Random(f"warm start/{step}")
    problems = [countdown.make_problem(rng, "train", **PROBLEMS) for _ in range(n)]
    return [(problem["prompt"], f"<answer>{problem['solution']}</answer>") for problem in problems]


def warm_start(model, tokenizer, examples, steps, lr=4e-3):
    """Supervised training on solved problems"""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.time()
    for step in range(steps):
        ids = []
        labels = []
        for prompt, response in examples(step):
            prompt_ids = tokenizer.encode(prompt)
            response_ids = tokenizer.encode(response) + [tokenizer.eos_token_id]
            ids.append(torch.tensor(prompt_ids + response_ids))
            labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
        ids = torch.nn.utils.rnn.pad_sequence(ids, True)  # [B, T + 1]
        labels = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        logits = model(ids[:, :-1]).logits  # [B, T, V]
        # Label smoothing keeps the model unsure: GRPO needs responses that differ.
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(),
                               label_smoothing=0.07)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A short linear rise, then a cosine down to a tenth
        schedule = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule
        optimizer.step()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"warm start {step + 1:4d}/{steps} | Loss: {loss.item():.3f} | "
                  f"{time.time() - started:.0f} s")

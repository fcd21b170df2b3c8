"""Make the tiny model and its problems: a byte-level Llama of 0.85 M parameters.

    python tiny.py        writes the folder tiny/ (about a minute on two cores)

It is an ordinary model folder, for transformers, vLLM and `python starter.py --model_id=tiny`, with
train.jsonl and test.jsonl beside the weights. A short warm start on solved problems teaches the form
of an answer and a little arithmetic. The rest is for GRPO.
"""
import math, random, shutil, time
from pathlib import Path

import countdown
import tiktoken
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# What starter.py uses for it instead of the values in main()
SETTINGS = {
    "task": "tiny", "n_eval": 1000, "save_every": 20,
    "rollout_batch_size": 256, "group_size": 8, "max_tokens": 24, "max_prompt_tokens": 32,
    "lr": 2e-4, "kl_coef": 0.1}
PROBLEMS = {"max_number": 20, "operations": "+-", "prompt": "{numbers}={target}:"}
ANY = r"[\s\S]"  # one letter at a time
SPECIAL = ["<|end|>", "<|pad|>", "<answer>", "</answer>"]  # ids 256 to 259, after the bytes
ONE_TURN = "{{ messages[-1]['content'] }}"


def make_tokenizer():
    """Every byte is a token, as in a tiktoken encoding."""
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


def make_model(seed=42):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260, hidden_size=128, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=256, pad_token_id=257, tie_word_embeddings=False,
        initializer_range=0.08)
    return AutoModelForCausalLM.from_config(config)


def countdown_examples(step, n=128):
    """-> [(prompt, response), ...] for one step of the warm start, none of them of the test"""
    rng = random.Random(f"warm start/{step}")
    problems = [countdown.make_problem(rng, "train", **PROBLEMS) for _ in range(n)]
    return [(problem["prompt"], f"<answer>{problem['solution']}</answer>") for problem in problems]


def warm_start(model, tokenizer, examples, steps, lr=4e-3):
    """Supervised training on solved problems"""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.time()
    for step in range(steps):
        rows = []
        labels = []
        for prompt, response in examples(step):
            prompt_ids = tokenizer.encode(prompt)
            response_ids = tokenizer.encode(response) + [tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt_ids + response_ids))
            labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
        rows = torch.nn.utils.rnn.pad_sequence(rows, True)  # [B, T + 1]
        labels = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        logits = model(rows[:, :-1]).logits
        # Label smoothing keeps the model unsure: GRPO needs variety.
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(),
                               label_smoothing=0.07)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A short linear rise, then a cosine down to a tenth.
        schedule = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule
        optimizer.step()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"warm start {step + 1:4d}/{steps} | Loss: {loss.item():.3f} | "
                  f"{time.time() - started:.0f} s", flush=True)


def main(folder="tiny", examples=countdown_examples, steps=300, new_tokens=(), seed=42,
         chat_template=ONE_TURN):
    """Write a tiny model that was warm-started on examples(step)."""
    print(f"making the tiny model in {folder}/ (once, about a minute)", flush=True)
    torch.use_deterministic_algorithms(True)
    unfinished = Path(f"{folder}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = make_model(seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    if new_tokens:  # a token for each word: easier to learn than letters
        tokenizer.add_tokens(list(new_tokens))
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    warm_start(model, tokenizer, examples, steps)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    countdown.write(unfinished, seed, **PROBLEMS)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()

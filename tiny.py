"""Make the tiny model: a byte-level Llama of 0.85 M parameters that has seen solved problems.

    python tiny.py        writes the folder tiny/ (about two minutes on two cores)

It is an ordinary model folder, for transformers, vLLM and `python starter.py --model_id=tiny`. The
warm start teaches the form of an answer and some arithmetic; about one sampled answer in four is
right. The rest is for GRPO. Its problems come before those of starter.py and are never held-out
ones.
"""
import json, math, sys, time
from pathlib import Path
from types import SimpleNamespace

import starter  # first: it answers --help before the slow imports
import tiktoken
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

PROBLEMS = SimpleNamespace(n_numbers=3, max_number=20, operations="+-",
                           prompt="{numbers}={target}:")
ANY = r"[\s\S]"  # one letter at a time
SPECIAL = ["<|end|>", "<|pad|>", "<answer>", "</answer>"]  # ids 256 to 259, after the bytes
ONE_TURN = "{{ messages[-1]['content'] }}"


def make_encoding():
    """Every byte is a token. tiktoken is where the ids are defined."""
    return tiktoken.Encoding("bytes", pat_str=ANY,
                             mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={name: 256 + i for i, name in enumerate(SPECIAL)})


def make_tokenizer():
    """The same encoding as a transformers tokenizer."""
    encoding = make_encoding()
    converter = TikTokenConverter(pattern=ANY, extra_special_tokens=SPECIAL)
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks
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
        initializer_range=0.08, is_tiny=True)
    return AutoModelForCausalLM.from_config(config)


def countdown_examples(step, seed=42, n=128):
    """-> [(prompt, response), ...] for one step of the warm start"""
    problems = [starter.make_problem(PROBLEMS, seed, step * n + i) for i in range(n)]
    return [(problem["prompt"], f"<answer>{problem['solution']}</answer>") for problem in problems]


def warm_start(model, tokenizer, examples, steps, lr=4e-3):
    """Supervised training on solved problems."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.time()
    for step in range(steps):
        prompts, answers = zip(*examples(step))
        responses = [starter.Response(tokenizer.encode(answer) + [tokenizer.eos_token_id])
                     for answer in answers]
        batch = starter.make_batch([tokenizer.encode(p) for p in prompts], responses)
        mask = batch.response_mask
        logits = model(batch.input_ids).logits[mask]
        # Label smoothing keeps the model unsure: GRPO needs variety.
        loss = F.cross_entropy(logits, batch.labels[mask], label_smoothing=0.07)
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
    model.zero_grad()


def main(folder="tiny", examples=countdown_examples, steps=300, new_tokens=(), seed=42,
         chat_template=ONE_TURN):
    """Write a tiny model that was warm-started on examples(step)."""
    if Path(folder).is_file():
        raise starter.UserError(f"{folder} is a file: a folder of this name is to be made")
    print(f"making the tiny model in {folder}/ (once, about two minutes)", flush=True)
    torch.use_deterministic_algorithms(True)
    with starter.written_whole(Path(folder)) as temporary:  # first: can it be written?
        model, tokenizer = make_model(seed), make_tokenizer()
        tokenizer.chat_template = chat_template
        if new_tokens := list(new_tokens):  # a token for each word: easier to learn than letters
            tokenizer.add_tokens(new_tokens)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        warm_start(model, tokenizer, examples, steps)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def has_gpu():
    given = starter.read_arguments(sys.argv[1:])
    return torch.cuda.is_available() and given.get("device") != "cpu"


def train_example(name, rows, settings, tiny_settings, examples, steps, **options):
    """Train on these rows: a real model on a GPU, otherwise one of main(), made on first use."""
    given = starter.read_arguments(sys.argv[1:])
    device = [f"--device={given['device']}"] if "device" in given else []
    starter.override(starter.main(device, only_settings=True), given)  # is one misspelled?
    data, model_id = Path(f"out/{name}.jsonl"), f"out/tiny_{name}"
    with starter.written_whole(data) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not has_gpu():
        settings = {"model_id": model_id} | tiny_settings
        is_used = given.get("model_id", model_id) == model_id and "resume" not in given
        if is_used and not Path(model_id).exists():
            main(model_id, examples, steps, **options)
    if "resume" not in given:  # what was typed comes first in the name of the run folder
        given |= {name: value for name, value in ({"task": data} | settings).items()
                  if name not in given}
    starter.main([f"--{name}={value}" for name, value in given.items()])


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("error: tiny.py takes no arguments; it writes the folder tiny/")
    starter.run(main)

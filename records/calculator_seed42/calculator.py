"""A tool inside a response: the model calls a calculator, reads the result and goes on.

    python starter.py --task=calculator    train: a 1.5 B model on a GPU, a tiny model on a CPU
    python sample.py                       measure the trained model

In <calc>347*582+914</calc>= 202868<answer>202868</answer> the calculator wrote "= 202868".
"""
import random, re
from pathlib import Path

import countdown
import tiny
import torch
from starter import final_answer, normalize

PROMPT = """Compute {question}.
For a calculator write <calc>expression</calc>: the result follows, as in <calc>12*34+5</calc>= 413.
Then give only the final number inside <answer> </answer> tags, as in <answer>413</answer>."""
TINY_MODEL = "out/tiny_calculator"

TURN_ENDS = ("</calc>",)
SETTINGS = {"prompt": PROMPT}
# A task file may choose a model, too. Here it does so only without a GPU: a tiny one, made by
# prepare().
if not torch.cuda.is_available():
    SETTINGS = {"model_id": TINY_MODEL, "prompt": "{question}:", "max_tokens": 64, "lr": 4e-4,
                "n_grpo_steps": 25}


def rows():
    rng = random.Random(0)
    return [make_problem(rng) for _ in range(4000)]


def make_problem(rng):
    a, b, c = (rng.randint(100, 999) for _ in range(3))
    return {"question": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def reply(problem, text):
    """-> the result of a call, "= 413" or "= error"; None if the response has ended"""
    if "</calc>" not in text:
        return None
    call = re.search(r"<calc>([^<]*)</calc>([^\w<]*)$", text)
    if call is None:
        return "= error"
    numbers = [int(digits) for digits in re.findall("[0-9]+", call[1][:200])]
    value = countdown.evaluate_expression(call[1], numbers)  # exact; parsed, never run
    result = "error" if value is None else value
    # A token may hold more than the end of the tag, such as ">=": then the "=" is there already.
    return f" {result}" if "=" in call[2] else f"= {result}"


def reward_fn(text, row):
    answer = final_answer(text)
    return float(normalize(answer) == normalize(row["answer"]))


def prepare():
    """Without a GPU: make the tiny model, once."""
    if SETTINGS.get("model_id") == TINY_MODEL and not Path(TINY_MODEL).exists():
        tiny.write_model(TINY_MODEL, warm_start_examples, 120, new_tokens=["<calc>", "</calc>"])


def warm_start_examples(step):
    """Three of four call the calculator, the others guess. GRPO finds out what is better."""
    rng = random.Random(f"warm start/{step}")
    examples = []
    for i in range(64):
        problem = make_problem(rng)
        response = "<calc>{question}</calc>= {answer}<answer>{answer}</answer>"
        if i % 4 == 0:
            response = f"<answer>{rng.randint(10_000, 999_999)}</answer>"
        examples.append((f"{problem['question']}:", response.format(**problem)))
    return examples

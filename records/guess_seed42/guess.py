"""Chat turns: the model guesses a number, the game says higher or lower.

    python starter.py --task=guess    train: a 1.5 B model on a GPU, a tiny model on a CPU
    python sample.py                  how often the trained model finds the number

What reply() says is the next user message. A game that is not over after max_turns is cut off.
"""
import random, re
from pathlib import Path

import tiny
import torch

PROMPT = """Game {game}. I have chosen a whole number from 1 to 100. Find it in at most 7 guesses.
After each guess I say higher or lower. Answer with a number only."""
CHAT = ("{% for turn in messages %}{{ turn['content'] }}"
        "{% if turn['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}")
TINY_MODEL = "out/tiny_guess"

HIGHEST = 100
SETTINGS = {"prompt": PROMPT, "max_turns": 7, "max_tokens": 256}
# A task file may choose a model, too. Here it does so only without a GPU: a tiny one, made by
# prepare(), for numbers up to 15.
if not torch.cuda.is_available():
    HIGHEST = 15
    SETTINGS = {"model_id": TINY_MODEL, "prompt": "{game}:", "max_turns": 4, "max_tokens": 32,
                "lr": 4e-4, "n_grpo_steps": 120}


def rows():
    rng = random.Random(0)
    return [{"game": i, "answer": rng.randint(1, HIGHEST)} for i in range(4000)]


def read_guess(text):
    """-> the last number in the text, or None"""
    numbers = re.findall("[0-9]{1,9}", text)
    return int(numbers[-1]) if numbers else None


def reply(problem, text):
    """-> what the game says to a guess; None if it is over"""
    guess = read_guess(text)
    number = int(problem["answer"])
    if guess is None:
        return "a number:"
    if guess == number:
        return None
    return "higher:" if guess < number else "lower:"


def reward_fn(text, problem):
    """1.0 if the last guess was right. problem is the row, with the turns of the game so far."""
    return float(read_guess(problem["turns"][-1]["content"]) == int(problem["answer"]))


def prepare():
    """Without a GPU: make the tiny model, once."""
    if SETTINGS.get("model_id") == TINY_MODEL and not Path(TINY_MODEL).exists():
        words = [*map(str, range(10, 16)), "higher:", "lower:"]
        tiny.write_model(TINY_MODEL, warm_start_examples, 150, new_tokens=words,
                         chat_template=CHAT)


def warm_start_examples(step):
    """Games up to 15 of a careless player: one guess in three ignores what the game said."""
    rng = random.Random(f"warm start/{step}")
    examples = []
    for _ in range(64):
        problem = {"answer": rng.randint(1, 15)}
        low, high = 1, 15
        text = ""
        for _ in range(4):
            is_careless = rng.random() < 0.33
            guess = rng.randint(1, 15) if is_careless else rng.randint(low, high)
            said = reply(problem, str(guess))
            text += f"{guess}<|end|>{said or ''}"
            if said is None:
                break
            if said == "higher:":
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
        examples.append((f"{rng.randint(0, 9999)}:", text.removesuffix("<|end|>")))
    return examples

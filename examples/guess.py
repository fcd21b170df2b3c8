"""Chat turns: the model guesses a number, the game says higher or lower.

    python examples/guess.py           train: a 1.5 B model on a GPU, a tiny model on a CPU
    python examples/guess.py --seed=1  all settings of starter.py work
    python sample.py                   measure the trained model: how often it finds the number

What reply() says is the next user message. A game that is not over after max_turns is cut off.
"""
import random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import starter, tiny

PROMPT = """Game {game}. I have chosen a whole number from 1 to 100. Find it in at most 7 guesses.
After each guess I say higher or lower. Answer with a number only."""
CHAT = ("{% for turn in messages %}{{ turn['content'] }}"
        "{% if turn['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}")


def read_guess(text):
    numbers = re.findall("[0-9]{1,9}", text)
    return int(numbers[-1]) if numbers else None


def reply(problem, text):
    guess, number = read_guess(text), int(problem["answer"])
    if guess is None:
        return "a number:"
    if guess == number:
        return None  # the game is over
    return "higher:" if guess < number else "lower:"


def reward_fn(text, problem):
    return float(read_guess(problem["turns"][-1]["content"]) == int(problem["answer"]))


starter.reply, starter.reward_fn = reply, reward_fn


def warm_start_examples(step):
    """Games to 15 of a careless player: one guess in three forgets what was said."""
    rng, examples = random.Random(f"warm start/{step}"), []
    for _ in range(64):
        problem, low, high, text = {"answer": rng.randint(1, 15)}, 1, 15, ""
        for _ in range(4):
            guess = rng.randint(1, 15) if rng.random() < 0.33 else rng.randint(low, high)
            said = reply(problem, str(guess))
            text += f"{guess}<|end|>{said or ''}"
            if said is None:
                break
            low = max(low, guess + 1) if said == "higher:" else low
            high = min(high, guess - 1) if said == "lower:" else high
        examples.append((f"{rng.randint(0, 9999)}:", text.removesuffix("<|end|>")))
    return examples


def main():
    rng, highest = random.Random(0), 100 if tiny.has_gpu() else 15
    tiny.train_example(
        "guess", [{"game": i, "answer": rng.randint(1, highest)} for i in range(4000)],
        {"prompt": PROMPT, "max_turns": 7, "max_tokens": 256},
        {"prompt": "{game}:", "max_turns": 4, "max_tokens": 32, "lr": 4e-4, "n_grpo_steps": 120},
        warm_start_examples, 150, chat_template=CHAT,
        new_tokens=[*map(str, range(10, 16)), "higher:", "lower:"])


if __name__ == "__main__":
    starter.run(main)

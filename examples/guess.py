"""Chat turns: the model guesses a number, the game says higher or lower.

    python examples/guess.py           train: a 1.5 B model on a GPU, a tiny model on a CPU
    python examples/guess.py --seed=1  all settings of starter.py work
    python sample.py --script=examples/guess.py    how often the trained model finds the number

What reply() says is the next user message. A game that is not over after max_turns is cut off.
"""
import json, random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import starter
import tiny

PROMPT = """Game {game}. I have chosen a whole number from 1 to 100. Find it in at most 7 guesses.
After each guess I say higher or lower. Answer with a number only."""
CHAT = ("{% for turn in messages %}{{ turn['content'] }}"
        "{% if turn['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}")


def read_guess(text):
    numbers = re.findall("[0-9]{1,9}", text)
    return int(numbers[-1]) if numbers else None


def reply(problem, text):
    guess = read_guess(text)
    number = int(problem["answer"])
    if guess is None:
        return "a number:"
    if guess == number:
        return None  # the game is over
    return "higher:" if guess < number else "lower:"


def reward_fn(text, problem):
    return float(read_guess(problem["turns"][-1]["content"]) == int(problem["answer"]))


starter.reply = reply
starter.reward_fn = reward_fn


def warm_start_examples(step):
    """Games to 15 of a careless player: one guess in three forgets what was said."""
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


def main():
    highest = 100
    settings = {"task": "out/guess.jsonl", "prompt": PROMPT, "max_turns": 7, "max_tokens": 256}
    if not starter.torch.cuda.is_available():
        highest = 15
        settings = tiny.SETTINGS | settings | {
            "model_id": "out/tiny_guess", "eval_task": "", "prompt": "{game}:", "max_turns": 4,
            "max_tokens": 32, "lr": 4e-4, "n_grpo_steps": 120}
    cfg = starter.main(only_settings=True, **settings)  # a misspelled flag is said first
    if starter.LOCAL_RANK == 0:
        Path("out").mkdir(exist_ok=True)
        rng = random.Random(0)
        rows = [{"game": i, "answer": rng.randint(1, highest)} for i in range(4000)]
        Path("out/guess.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if cfg.model_id == "out/tiny_guess" and not Path(cfg.model_id).exists():
            words = [*map(str, range(10, 16)), "higher:", "lower:"]
            tiny.main(cfg.model_id, warm_start_examples, 150, new_tokens=words, chat_template=CHAT)
    starter.main(**settings)


if __name__ == "__main__":
    starter.run(main)

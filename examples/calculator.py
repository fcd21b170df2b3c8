"""Turns inside one response: the model calls a calculator, reads the result and goes on.

    python examples/calculator.py           train: a 1.5 B model on a GPU, a tiny model on a CPU
    python examples/calculator.py --seed=1  all settings of starter.py work
    python sample.py                        measure the trained model, with the calculator

In <calc>347*582+914</calc>= 202868<answer>202868</answer> the calculator wrote "= 202868".
"""
import random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import starter, tiny

PROMPT = """Compute {question}.
For a calculator write <calc>expression</calc>: the result follows, as in <calc>12*34+5</calc>= 413.
Then give only the final number inside <answer> </answer> tags, as in <answer>413</answer>."""
CALL = re.compile(r"<calc>((?:(?!</?calc>).)*)</calc>([^\w<>]*)$", re.DOTALL)


def reply(problem, text):
    """The result of a call, "= 413" or "= error"; None: the response has ended."""
    if "</calc>" not in text:
        return None
    call = CALL.search(text)
    value = None
    if call:
        numbers = [int(digits) for digits in re.findall("[0-9]+", call[1][:200])]
        value = starter.evaluate_expression(call[1], numbers)  # exact; parsed, never run
    is_begun = call and "=" in call[2]  # the model has written "</calc>="
    return f"{'' if is_begun else '='} {'error' if value is None else value}"


def reward_fn(text, problem):
    answer = starter.final_answer(text)
    return float(answer is not None and starter.is_same(answer, problem["answer"]))


starter.reply, starter.reward_fn, starter.TURN_ENDS = reply, reward_fn, ("</calc>",)


def make_problem(rng):
    a, b, c = (rng.randint(100, 999) for _ in range(3))
    return {"question": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def warm_start_examples(step):
    """Three of four call the calculator, the others guess. GRPO finds out what is better."""
    rng, examples = random.Random(f"warm start/{step}"), []
    for i in range(64):
        problem = make_problem(rng)
        response = "<calc>{question}</calc>= {answer}<answer>{answer}</answer>"
        if i % 4 == 0:
            response = f"<answer>{rng.randint(10_000, 999_999)}</answer>"
        examples.append(("{question}:".format(**problem), response.format(**problem)))
    return examples


def main():
    rng = random.Random(0)
    tiny.train_example(
        "calculator", [make_problem(rng) for _ in range(4000)], {"prompt": PROMPT},
        {"prompt": "{question}:", "lr": 4e-4, "n_grpo_steps": 25, "max_tokens": 64},
        warm_start_examples, 120, new_tokens=["<calc>", "</calc>"])


if __name__ == "__main__":
    starter.run(main)

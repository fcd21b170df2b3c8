"""Turns inside one response: the model calls a calculator, reads the result and goes on.

    python examples/calculator.py           train: a 1.5 B model on a GPU, a tiny model on a CPU
    python examples/calculator.py --seed=1  all settings of starter.py work
    python sample.py --script=examples/calculator.py    measure the trained model

In <calc>347*582+914</calc>= 202868<answer>202868</answer> the calculator wrote "= 202868".
"""
import json, random, re, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import countdown
import starter
import tiny

PROMPT = """Compute {question}.
For a calculator write <calc>expression</calc>: the result follows, as in <calc>12*34+5</calc>= 413.
Then give only the final number inside <answer> </answer> tags, as in <answer>413</answer>."""


def reply(problem, text):
    """The result of a call, "= 413" or "= error"; None: the response has ended."""
    if "</calc>" not in text:
        return None
    call = re.search(r"<calc>([^<]*)</calc>([^\w<]*)$", text)
    if call is None:
        return "= error"
    numbers = [int(digits) for digits in re.findall("[0-9]+", call[1][:200])]
    value = countdown.evaluate_expression(call[1], numbers)  # exact; parsed, never run
    result = "error" if value is None else value
    # A token such as ">=" ends a turn behind the "=".
    return f" {result}" if "=" in call[2] else f"= {result}"


def reward_fn(text, problem):
    answer = starter.final_answer(text)
    return float(starter.normalize(answer) == starter.normalize(problem["answer"]))


starter.reply = reply
starter.reward_fn = reward_fn
starter.TURN_ENDS = ("</calc>",)


def make_problem(rng):
    a, b, c = (rng.randint(100, 999) for _ in range(3))
    return {"question": f"{a}*{b}+{c}", "answer": str(a * b + c)}


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


def main():
    settings = {"task": "out/calculator.jsonl", "prompt": PROMPT}
    if not starter.torch.cuda.is_available():
        settings = tiny.SETTINGS | settings | {
            "model_id": "out/tiny_calculator", "eval_task": "", "prompt": "{question}:",
            "max_tokens": 64, "lr": 4e-4, "n_grpo_steps": 25}
    cfg = starter.main(only_settings=True, **settings)  # a misspelled flag is said first
    if starter.LOCAL_RANK == 0:
        Path("out").mkdir(exist_ok=True)
        rng = random.Random(0)
        rows = [json.dumps(make_problem(rng)) for _ in range(4000)]
        Path("out/calculator.jsonl").write_text("\n".join(rows))
        if cfg.model_id == "out/tiny_calculator" and not Path(cfg.model_id).exists():
            tiny.main(cfg.model_id, warm_start_examples, 120, new_tokens=["<calc>", "</calc>"])
    starter.main(**settings)


if __name__ == "__main__":
    starter.run(main)

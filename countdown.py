"""Countdown: make a target from three numbers with + - * /. Problems, and whether they are solved.

    python countdown.py        writes countdown/train.jsonl and countdown/test.jsonl (seconds)

starter.py calls it on first use. A hash of the numbers and the target decides the file, so the same
problem in another order is never in both. Edit PROMPT or the calls below for other problems.
"""
import ast, contextlib, json, operator, random, re, zlib
from fractions import Fraction
from pathlib import Path

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with the operations {operations} and parentheses. Try several inside <think> "
    "</think> tags, then give one inside <answer> </answer> tags. For example, 9 from 5 2 3:\n"
    "<think>5+2+3=10, 5*2-3=7, 5*3-2=13, (5-2)*3=9</think>\n<answer>(5-2)*3</answer>")


def random_expression(rng, numbers, operations):
    """Join random parts until one is left. -> (text, value), or ("", 0) if a quotient is not whole"""
    parts = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        left, x = parts.pop(rng.randrange(len(parts)))
        right, y = parts.pop(rng.randrange(len(parts)))
        operation = rng.choice(operations)
        if operation == "/" and (y == 0 or x % y):
            return "", 0
        values = {"+": x + y, "-": x - y, "*": x * y, "/": x // (y or 1)}
        parts.append((f"({left}{operation}{right})", values[operation]))
    text, value = parts[0]
    return text[1:-1], value


def make_problem(rng, split, max_number=10, operations="+-*/", prompt=PROMPT, n_numbers=3):
    """-> a row of the task, with a solution"""
    while True:
        numbers = [rng.randint(1, max_number) for _ in range(n_numbers)]
        solution, target = random_expression(rng, numbers, operations)
        is_test = zlib.crc32(f"{sorted(numbers)}={target}".encode()) % 5 == 0
        if 0 < target < 100 and is_test == (split == "test"):
            text = prompt.format(numbers=" ".join(map(str, numbers)), target=target,
                                 operations=" ".join(operations))
            return {"numbers": numbers, "target": target, "operations": operations,
                    "prompt": text, "solution": solution}


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}


def is_solution(text, problem):
    """The text is data: parsed, never run."""
    operations = problem.get("operations", "+-*/")
    return evaluate_expression(text, problem["numbers"], operations) == problem["target"]


def evaluate_expression(text, numbers, operations="+-*/"):
    """-> the exact value of an expression that uses each of `numbers` once, or None"""
    text = text.strip()
    is_allowed = re.fullmatch(rf"[{re.escape(operations)}() 0-9]{{1,200}}", text)
    if is_allowed and sorted(map(int, re.findall("[0-9]+", text))) == sorted(numbers):
        with contextlib.suppress(Exception):  # no expression, or divides by 0
            return exact_value(ast.parse(text, mode="eval").body)


def exact_value(node):
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(exact_value, parts))


def write(folder, seed=0, n_train=10_000, **options):
    """Problems to train on, and a tenth as many to test"""
    for split, n in {"train": n_train, "test": n_train // 10}.items():
        rng = random.Random(f"{split}/{seed}")
        rows = [make_problem(rng, split, **options) for _ in range(n)]
        Path(folder, f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    unfinished = Path("countdown.new")
    unfinished.mkdir(exist_ok=True)
    write(unfinished)
    unfinished.rename("countdown")


if __name__ == "__main__":
    main()

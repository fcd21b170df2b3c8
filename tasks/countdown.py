"""Countdown: combine three numbers with + - * / to reach a target.

    python starter.py --task=countdown        the default with a GPU

A hash of the numbers and the target decides whether a problem is trained on or held out, so that a
problem and the same one with its numbers in another order are never on both sides. For other
problems edit PROMPT, or give make_rows() other options, such as operations="+-".
"""
import ast, contextlib, operator, random, re, zlib
from fractions import Fraction

from starter import final_answer

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, with the operations {operations} and parentheses. Try several inside <think> "
    "</think> tags, then give one inside <answer> </answer> tags. For example, 9 from 5 2 3:\n"
    "<think>5+2+3=10, 5*2-3=7, 5*3-2=13, (5-2)*3=9</think>\n<answer>(5-2)*3</answer>")


def rows():
    """-> (10,000 rows to train on, 1,000 held-out rows)"""
    return make_rows(seed=0)


def reward_fn(text, row):
    """1.0 for a solution, 0.1 for another answer, 0.0 for none"""
    answer = final_answer(text)
    if answer is None:
        return 0.0
    return 1.0 if is_solution(answer, row) else 0.1


def make_rows(seed, n_train=10_000, **options):
    """-> (rows to train on, a tenth as many held-out rows). options: those of make_problem"""
    parts = []
    for split, n in {"train": n_train, "test": n_train // 10}.items():
        rng = random.Random(f"{split}/{seed}")
        parts.append([make_problem(rng, split, **options) for _ in range(n)])
    return tuple(parts)


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


def random_expression(rng, numbers, operations):
    """Join two random parts until one is left.
    -> (text, value), or ("", 0) if a quotient is not a whole number"""
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


def is_solution(text, row):
    """Does this expression of the model reach the target?"""
    operations = row.get("operations", "+-*/")
    return evaluate_expression(text, row["numbers"], operations) == row["target"]


def evaluate_expression(text, numbers, operations="+-*/"):
    """-> the exact value of an expression that uses each of `numbers` once, or None.
    Model output is untrusted: it is parsed, never run."""
    text = text.strip()
    is_allowed = re.fullmatch(rf"[{re.escape(operations)}() 0-9]{{1,200}}", text)
    if is_allowed and sorted(map(int, re.findall("[0-9]+", text))) == sorted(numbers):
        with contextlib.suppress(Exception):  # not an expression, or a division by 0
            return exact_value(ast.parse(text, mode="eval").body)


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}


def exact_value(node):
    """-> the Fraction that a node of Python's syntax tree stands for"""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(exact_value, parts))

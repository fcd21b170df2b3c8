"""GSM8K: 8,792 word problems of grade-school mathematics (github.com/openai/grade-school-math).

    python starter.py --task=gsm8k                    downloads the problems (5 MB, once)
    python sample.py --eval_task=gsm8k/test.jsonl     the 1,319 test problems, never trained on

The reward is that of starter.py: the number behind "####" is the right answer.
"""
import http.client, json, os, urllib.request
from pathlib import Path

from starter import UserError, atomic_write

GITHUB = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
URL = os.environ.get("GSM8K_URL", GITHUB)  # or another address that has both files
FOLDER = Path("gsm8k")
SETTINGS = {
    "prompt": "{question}\nReason step by step, and put your final answer within \\boxed{}.",
    "max_prompt_tokens": 400, "max_tokens": 400}


def rows():
    with open(FOLDER / "train.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def prepare():
    """Download what is missing."""
    FOLDER.mkdir(exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        path = FOLDER / name
        if path.exists():
            continue
        print(f"downloading {URL}/{name}")
        try:
            with urllib.request.urlopen(f"{URL}/{name}", timeout=30) as response:
                data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"cannot download {URL}/{name} ({error}): put train.jsonl and test.jsonl of "
                "github.com/openai/grade-school-math (in grade_school_math/data) into "
                f"{FOLDER.absolute()}") from None
        with atomic_write(path) as temporary:
            temporary.write_bytes(data)

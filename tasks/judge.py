"""A server gives the reward: JUDGE_URL=http://... python starter.py --task=judge --reward_truncated

It is sent {"problem": messages, "response": text} and answers with a number. Rows: data.jsonl
"""
import json, os, urllib.request


def rows():
    with open("data.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def reward_fn(text, row):
    question = json.dumps({"problem": row["prompt"], "response": text}).encode()
    with urllib.request.urlopen(os.environ["JUDGE_URL"], question, timeout=60) as answer:
        return float(answer.read())

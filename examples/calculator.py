"""Several turns: the model calls a calculator inside its response, reads the result and goes on.

    python examples/calculator.py      train: Qwen2.5-Coder-1.5B on a GPU, a tiny model on a CPU
    python examples/calculator.py --lr=1e-5 --seed=1              all settings of starter.py work

In <calc>347*582+914</calc>= 202868<answer>202868</answer> the model did not choose "= 202868".
The mask of the Response says so: these tokens have no loss, no KL and no entropy. Only max_tokens
counts them. The rest is as in starter.py.
"""
import json, os, random, re, sys
from pathlib import Path
if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):    # before the slow imports
    print(__doc__)
    sys.exit()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import starter, tiny, torch

OPEN, CLOSE = "<calc>", "</calc>"
CALL = re.compile(r"<calc>((?:(?!</?calc>).)*)</calc>([^\w<>]*)$", re.DOTALL)
MAX_CALLS = 3     # later calls get no result
MAX_TURNS = 12    # a call takes up to two, one for each tag; the last turn has no calls
MODEL, TINY_MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "out/tiny_calculator"
DATA, TINY_PROMPT = "out/calculator.jsonl", "{question}:"
PROMPT = """Compute {question}.
For a calculator write <calc>expression</calc>: the result follows, as in <calc>12*34+5</calc>= 413.
Then give only the final number inside <answer> </answer> tags, as in <answer>413</answer>."""
# main() replaces these in starter.
sample_turn, graded_reward = starter.rollout_with_vllm, starter.reward_fn


def tool_result(call):
    """-> "= 413", "= -3/2" or "= error", without the "=" if the model has written it"""
    numbers = [int(digits) for digits in re.findall("[0-9]+", call[1][:200])]
    value = starter.evaluate_expression(call[1], numbers)    # exact; parsed, never run
    return f"{'' if '=' in call[2] else '='} {'error' if value is None else value}"


class Calculator:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        # vLLM knows only token ids. A turn ends where a call may: at ">", ">," or ">=", not "=>".
        self.closing_ids = [token for text, token in tokenizer.get_vocab().items()
                            if ">" in text and CLOSE.endswith(text[:text.index(">") + 1])]

    def rollout(self, llm, prompts, params, seed, step, first=0):
        """rollout_with_vllm in turns: each continues all responses that have not ended."""
        n, stop_ids, max_tokens = params["n"], params["stop_token_ids"], params["max_tokens"]
        prompts = [prompt for prompt in prompts for _ in range(n)]
        ids, logps, masks = ([[] for _ in prompts] for _ in range(3))
        n_calls, active = [0] * len(prompts), range(len(prompts))
        for turn in range(MAX_TURNS):
            # The largest room of all responses: those with less are cut below.
            room = max_tokens - min((len(ids[i]) for i in active), default=0)
            ends = stop_ids + self.closing_ids if turn < MAX_TURNS - 1 else stop_ids
            params = params | {"n": 1, "max_tokens": room, "stop_token_ids": ends}
            contexts = [prompts[i] + ids[i] for i in active]
            parts = sample_turn(llm, contexts, params, seed, f"{step}/{turn}", first * n)
            params = params | {"min_tokens": 0}    # nothing ends before it: the first turn has them
            for i, part in zip(active, parts):
                text = self.tokenizer.decode((ids[i] + part.ids)[:max_tokens])
                call, result = CALL.search(text), []
                if call and n_calls[i] < MAX_CALLS:
                    n_calls[i] += 1
                    result = self.tokenizer.encode(tool_result(call), add_special_tokens=False)
                ids[i] = (ids[i] + part.ids + result)[:max_tokens]
                logps[i] = [*logps[i], *part.logps, *[0.0] * len(result)][:max_tokens]
                masks[i] = (masks[i] + [True] * len(part.ids) + [False] * len(result))[:max_tokens]
            active = [i for i in active if len(ids[i]) < max_tokens and ids[i][-1] not in stop_ids]
        if step == "eval" and prompts:
            print(f"Calls per response: {sum(n_calls) / len(prompts):.2f}")
        return [starter.Response(*row, row[0][-1] in stop_ids) for row in zip(ids, logps, masks)]


def right_or_wrong(text, truth):
    return float(graded_reward(text, truth) == 1.0)


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
        examples.append((TINY_PROMPT.format(**problem), response.format(**problem)))
    return examples


def make_tiny_model():
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
    tokenizer.add_tokens([OPEN, CLOSE])    # a token each is easier to learn than letters
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tiny.warm_start(model, tokenizer, warm_start_examples, 120)
    for part in (tokenizer, model):
        part.save_pretrained(TINY_MODEL)


def main():
    given = starter.read_arguments(sys.argv[1:])    # with --resume all settings of that run
    model_id = given.get("model_id", MODEL if torch.cuda.is_available() else TINY_MODEL)
    rng, temporary = random.Random(0), Path(f"{DATA}.{os.getpid()}")    # every rank writes it
    temporary.parent.mkdir(exist_ok=True)
    temporary.write_text("".join(json.dumps(make_problem(rng)) + "\n" for _ in range(4000)))
    temporary.replace(DATA)
    if model_id == TINY_MODEL and not Path(TINY_MODEL, "model.safetensors").exists():
        make_tiny_model()
    defaults = {"model_id": model_id, "task": DATA, "prompt": PROMPT}
    if starter.is_tiny(model_id):
        defaults |= {"prompt": TINY_PROMPT, "n_grpo_steps": 25, "lr": 4e-4, "max_tokens": 64}
    try:
        tokenizer = starter.AutoTokenizer.from_pretrained(model_id, trust_remote_code=False)
    except Exception as error:    # loaders raise anything
        raise starter.UserError(f"cannot load the model {model_id!r}: {error!r:.200}") from None
    starter.rollout_with_vllm, starter.reward_fn = Calculator(tokenizer).rollout, right_or_wrong
    missing = [f"--{name}={value}" for name, value in defaults.items() if name not in given]
    starter.main(sys.argv[1:] + missing)
    print("sample.py has no calculator: there the model makes results up.")


if __name__ == "__main__":
    sys.exit(starter.run(main))

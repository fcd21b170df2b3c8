"""What the KL penalty does, measured: the tiny model over coefficients and estimators.

    python kl_sweep.py               the table and the picture of KL.md (20 minutes on two cores)
    python kl_sweep.py --quick=True  a small version, to see it work (about 3 minutes)

The warm start teaches the model two skills: Countdown, and adding up three numbers. GRPO then
trains Countdown alone. For every run: held-out Countdown accuracy (sampled), the exact KL to the
start per token, and how much of the second skill is left (greedy: what it knows, not how surely).
Runs that are done are not run again. Writes assets/kl_sweep.md, .png and .json."""
import contextlib, io, json, random, statistics, sys, zlib
from pathlib import Path
from types import SimpleNamespace

import starter
import tiny
import torch

COEFFICIENTS = (0.0, 0.001, 0.01, 0.1, 1.0)
ESTIMATORS = {    # name in the table -> flags, at one coefficient
    "k1, weighted": ["--kl_estimator=k1"], "k2, weighted": ["--kl_estimator=k2"],
    "exact": ["--kl_estimator=exact"], "k1 in the reward": ["--kl_estimator=k1", "--kl_in=reward"],
    "k3, unweighted": ["--kl_importance_weight=False"],
    "k1, unweighted": ["--kl_estimator=k1", "--kl_importance_weight=False"]}


def second_skill(seed, index):
    """Add up three numbers. A hash of the numbers decides which are for testing."""
    rng = random.Random(f"sum/{seed}/{index}")
    while True:
        numbers = [rng.randint(1, 20) for _ in range(3)]
        if (zlib.crc32(str(sorted(numbers)).encode()) % 5 == 0) == (seed == "test"):
            return f"sum {' '.join(map(str, numbers))}:", f"<answer>{sum(numbers)}</answer>"


def make_start(folder, seed, steps):
    """The tiny model, warm-started on both skills, as a model folder."""
    model, tokenizer = tiny.make_model(seed), tiny.make_tokenizer()
    tiny.warm_start(model, tokenizer, lambda step: tiny.countdown_examples(step, seed, 96)
                    + [second_skill(seed, step * 64 + i) for i in range(64)], steps)
    with starter.written_whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@torch.no_grad()
def measure(folder, start):
    policy, tokenizer = starter.init_policy(str(folder))
    ref, _ = starter.init_policy(str(start))
    sampler = starter.TorchSampler(policy)
    cfg = SimpleNamespace(task="countdown", n_eval=500, max_prompt_tokens=32, temperature=1.0,
                          min_tokens=0, max_tokens=24, **vars(tiny.PROBLEMS))
    task = starter.Task(cfg, *starter.read_task(cfg), tokenizer)
    params = starter.init_sampling_params(cfg, 1, policy.stop_ids)
    metrics, _ = starter.evaluate_model(sampler, task, params, policy.stop_ids)
    prompts = [problem["prompt_ids"] for problem in task.held_out]
    responses = starter.rollout_with_vllm(sampler, prompts, params, 1, "kl")
    batch = starter.make_batch(prompts, responses)
    stats = starter.response_stats(policy, batch.input_ids, batch.labels, batch.mask, 1.0, ref)
    questions, answers = zip(*(second_skill("test", i) for i in range(300)))
    responses = starter.rollout_with_vllm(sampler, [tokenizer.encode(q) for q in questions],
                                          params | {"temperature": 0.0}, 0, "second skill")
    texts = [starter.decode(tokenizer, response.ids, policy.stop_ids) for response in responses]
    return {"accuracy": metrics["eval/accuracy"], "kl": stats[3][batch.mask].mean().item(),
            "second_skill": sum(map(str.__eq__, texts, answers)) / len(answers)}


def run(out, name, start, seed, steps, flags):
    folder = out / f"{name}-{steps}steps-{start.name}".replace(" ", "_").replace(",", "")
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        starter.main([f"--model_id={start}", "--device=cpu", "--use_vllm=False", f"--seed={seed}",
                      f"--out_dir={folder}", f"--n_grpo_steps={steps}", "--lr=4e-4", "--n_eval=50",
                      f"--eval_every={steps}", "--save_every=0", "--use_kl_penalty=True", *flags])
    result = measure(folder / "latest" / "model", start)
    done.write_text(json.dumps(result))
    print(f"{name}, {start.name}: {result}", flush=True)
    return result


def main():
    options = SimpleNamespace(quick=False, out_dir="out_kl_sweep", seeds=2, steps=60, kl_coef=0.1,
                              warm_start_steps=300)
    starter.override(options, starter.read_arguments(sys.argv[1:]))
    coefficients, estimators = COEFFICIENTS, ESTIMATORS
    if options.quick:
        options.seeds, options.steps, options.warm_start_steps = 1, 15, 150
        coefficients, estimators = (0.0, 0.1), {"k1, unweighted": ESTIMATORS["k1, unweighted"]}
    out = Path(options.out_dir + ("_quick" if options.quick else ""))
    flags = {f"kl_coef {value:g}": [f"--kl_coef={value}"] for value in coefficients}
    flags |= {name: [f"--kl_coef={options.kl_coef}", *estimators[name]] for name in estimators}
    results = {name: [] for name in ("start", *flags)}
    for seed in range(1, options.seeds + 1):
        start = out / f"seed{seed}-warm{options.warm_start_steps}"
        if not start.exists():
            make_start(start, seed, options.warm_start_steps)
        results["start"].append(measure(start, start))
        for name in flags:
            results[name].append(run(out, name, start, seed, options.steps, flags[name]))
    lines = [f"| run ({options.seeds} seeds, {options.steps} steps) | held-out accuracy | "
             "KL to the start, per token | second skill kept |", "|---|---|---|---|"]
    mean = {name: {} for name in results}
    for name, rows in results.items():
        for key in ("accuracy", "kl", "second_skill"):
            values = [row[key] for row in rows]
            mean[name][key] = statistics.mean(values), (max(values) - min(values)) / 2
        label = f"{name}, kl_coef {options.kl_coef:g}" if name in estimators else name
        lines.append("| {} | {:.1%} ± {:.1%} | {:.4f} ± {:.4f} | {:.1%} ± {:.1%} |".format(
            label, *sum(mean[name].values(), ())))
    text = "\n".join(lines) + "\n"
    assets = out if options.quick else Path("assets")
    assets.mkdir(exist_ok=True)
    (assets / "kl_sweep.md").write_text(text)
    (assets / "kl_sweep.json").write_text(json.dumps(mean, indent=1))
    draw(mean, coefficients, options.kl_coef, estimators, assets / "kl_sweep.png")
    print(f"{text}\nwritten: {assets}/kl_sweep.md, .json, .png")


def draw(mean, coefficients, coefficient, estimators, path):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout="tight")
    left, right = figure.subplots(1, 2)
    names = [f"kl_coef {c:g}" for c in coefficients]
    for key, label in (("accuracy", "Countdown accuracy"), ("second_skill", "second skill kept")):
        values, spreads = zip(*(mean[name][key] for name in names))
        left.errorbar(range(len(names)), values, spreads, marker="o", capsize=3, label=label)
    left.axhline(mean["start"]["accuracy"][0], ls=":", color="C0", label="accuracy at the start")
    left.set(xticks=range(len(names)), xticklabels=coefficients, xlabel="kl_coef", ylim=(0, 1.02))
    left.legend()
    names = [f"kl_coef {coefficient:g}", *estimators, "kl_coef 0"]
    values, spreads = zip(*(mean[name]["kl"] for name in names))
    right.barh(["k3 (default)", *estimators, "no penalty"], values, xerr=spreads, capsize=3)
    right.set(xlabel=f"exact KL to the start, per token, at kl_coef {coefficient:g}")
    right.invert_yaxis()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(starter.run(main))

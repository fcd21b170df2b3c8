"""What the KL penalty does, measured on the tiny model: KL.md explains the results.

    python kl_sweep.py                the table of KL.md (more than an hour)
    python kl_sweep.py --skip="exact, k1 in the reward"    without these estimators
    python kl_sweep.py --quick=True   a small version, to see it work (seven minutes)
    python kl_sweep.py --figure=True  only assets/kl_estimators.png, in seconds

The warm start teaches the model two skills: Countdown, and adding up three numbers. GRPO then
trains Countdown alone. Finished runs are kept in out_kl_sweep/ and not repeated."""
import starter  # first: it answers --help before the slow imports
import contextlib, io, json, math, random, statistics, sys, zlib
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import tiny
import torch

COEFFICIENTS = (0.0, 0.01, 0.1, 1.0)
ESTIMATORS = {  # name in the table -> flags, at one coefficient
    "exact": ["--kl_estimator=exact"],
    "k1 in the reward": ["--kl_estimator=k1", "--kl_in=reward"],
    "k3, unweighted": ["--kl_importance_weight=False"],
    "k1, unweighted": ["--kl_estimator=k1", "--kl_importance_weight=False"]}
STUDENT_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 1 to 10 seeds


def second_skill(seed, index):
    """Add up three numbers. A hash of the numbers decides which are for testing."""
    rng = random.Random(f"sum/{seed}/{index}")
    while True:
        numbers = [rng.randint(1, 20) for _ in range(3)]
        if (zlib.crc32(str(sorted(numbers)).encode()) % 5 == 0) == (seed == "test"):
            return f"sum {' '.join(map(str, numbers))}:", f"<answer>{sum(numbers)}</answer>"


def make_start(folder, seed, steps):
    """The tiny model, warm-started on both skills, as a model folder."""
    def examples(step):
        return tiny.countdown_examples(step, seed, 96) + [
            second_skill(seed, step * 64 + i) for i in range(64)]

    tiny.main(folder, examples, steps, seed=seed)


@torch.no_grad()
def measure(folder, start):
    policy, tokenizer = starter.init_policy(str(folder))
    ref, _ = starter.init_policy(str(start))
    sampler = starter.TorchSampler(policy)
    cfg = SimpleNamespace(task="countdown", n_eval=500, max_prompt_tokens=32, temperature=1.0,
                          min_tokens=0, max_tokens=24, reward_truncated=False, eval_task="",
                          **vars(tiny.PROBLEMS))
    task = starter.Task(cfg, *starter.read_task(cfg), tokenizer)
    params = starter.init_sampling_params(cfg, 1, policy.stop_ids)
    metrics, _ = starter.evaluate_model(sampler, task, params, policy.stop_ids)
    prompts = [problem["prompt_ids"] for problem in task.held_out]
    responses = starter.rollout_with_vllm(sampler, prompts, params, 1, "kl")
    batch = starter.make_batch(prompts, responses)
    mask = batch.response_mask
    stats = starter.response_stats(policy, batch.input_ids, batch.labels, mask, 1.0, ref)
    questions, answers = zip(*(second_skill("test", i) for i in range(300)))
    responses = starter.rollout_with_vllm(sampler, [tokenizer.encode(q) for q in questions],
                                          params | {"temperature": 0.0}, 0, "second skill")
    texts = [starter.decode(tokenizer, response.ids, policy.stop_ids) for response in responses]
    return {"accuracy": float(metrics["eval/accuracy"]), "kl": stats[3][mask].mean().item(),
            "second_skill": sum(map(str.__eq__, texts, answers)) / len(answers)}


def run(out, name, start, seed, steps, flags):
    folder = out / f"{name}-{steps}steps-{start.name}".replace(" ", "_").replace(",", "")
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        starter.main([f"--model_id={start}", "--device=cpu", "--use_vllm=False", f"--seed={seed}",
                      f"--out_dir={folder}", f"--n_grpo_steps={steps}", "--lr=4e-4", "--n_eval=50",
                      f"--eval_every={steps}", "--save_every=0", "--rollout_batch_size=128",
                      "--use_kl_penalty=True", *flags])
    last = (folder / "latest" / "metrics.jsonl").read_text().splitlines()[-1]
    if json.loads(last)["step"] < steps:  # Ctrl-C ended it early
        raise KeyboardInterrupt
    result = measure(folder / "latest" / "model", start)
    done.write_text(json.dumps(result))
    print(f"{name}, {start.name}: {result}", flush=True)
    return result


def main():
    options = SimpleNamespace(quick=False, figure=False, out_dir="out_kl_sweep", seeds=5, steps=60,
                              kl_coef=0.1, warm_start_steps=300, skip="")
    starter.override(options, starter.read_arguments(sys.argv[1:]))
    if options.figure:
        return draw_estimators("assets/kl_estimators.png")
    coefficients = COEFFICIENTS
    estimators = {name: ESTIMATORS[name] for name in ESTIMATORS if name not in options.skip}
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
    lines = [f"| run ({options.seeds} seeds, {options.steps} steps) | accuracy | against kl_coef 0 "
             "| KL to the start, per token | second skill |", "|---|---|---|---|---|"]
    for name in results:
        cells = interval(results, name, "accuracy") + interval(results, name, "accuracy", True)
        cells += interval(results, name, "kl") + interval(results, name, "second_skill")
        lines.append("| {} | {:.1%} ± {:.1%} | {:+.1%} ± {:.1%} | {:.4f} ± {:.4f} | "
                     "{:.1%} ± {:.1%} |".format(name, *cells))
    text = "\n".join(lines) + "\n"
    assets = out if options.quick else Path("assets")
    assets.mkdir(exist_ok=True)
    (assets / "kl_sweep.md").write_text(text)
    (assets / "kl_sweep.json").write_text(json.dumps(results, indent=1))
    draw(results, assets / "kl_sweep.png")
    print(f"{text}\nwritten: {assets}/kl_sweep.md, .json, .png")


def interval(results, name, key, is_difference=False):
    """-> mean over the seeds, half width of its 95 % interval. Differences are within a seed."""
    values = [row[key] for row in results[name]]
    if is_difference:
        values = [value - row[key] for value, row in zip(values, results["kl_coef 0"])]
    n = len(values)
    spread = statistics.stdev(values) if n > 1 else math.nan
    return statistics.mean(values), STUDENT_T[min(n, 10) - 1] * spread / n**0.5


def draw(results, path):
    matplotlib.rc("font", size=13)
    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="tight")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, key, label in zip(panels, ("accuracy", "kl", "second_skill"), (
            "Countdown accuracy (trained)", "KL to the start, nats per token",
            "sums accuracy (not trained)")):
        means, halves = zip(*(interval(results, name, key) for name in results))
        panel.barh(list(results), means, xerr=halves, capsize=4, color="C0", alpha=0.6)
        panel.set_xlabel(label)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def usual(log_ratio, estimator, is_weighted):
    """The formula as it is usually written, in float32, with autograd -> value, slope"""
    log_policy = log_ratio.clone().requires_grad_()  # log ref is 0
    value = {"k1": log_policy, "k2": log_policy**2 / 2,
             "k3": torch.exp(-log_policy) - 1 + log_policy}[estimator]
    weight = (log_policy - log_policy.detach()).exp() if is_weighted else 1.0
    return value.detach(), torch.autograd.grad((weight * value).sum(), log_policy)[0]


def draw_estimators(path):
    matplotlib.rc("font", size=14)
    figure = matplotlib.figure.Figure(figsize=(11, 6), layout="tight")
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-100, 40, 14001)
    for color, width, label, *estimator in (
            ("C3", 7, "k3 × importance weight", "k3", True), ("C2", 3, "k3", "k3", False),
            ("C1", 3, "k2", "k2", False), ("C0", 3, "k1", "k1", False)):
        log_policy = x.clone().requires_grad_()  # log ref is 0
        value = starter.compute_kl_divergence(log_policy, torch.zeros_like(x), *estimator)
        slope, = torch.autograd.grad(value.sum(), log_policy)
        left.plot(x, value.detach(), color, lw=width)
        right.plot(x, slope, color, lw=width, label=label)
        value, slope = usual(x, *estimator)
        left.plot(x, value, color, ls="--")
        right.plot(x, slope, color, ls="--")
    right.plot([], "k", lw=3, label="here: clamped at ±20")
    right.plot([], "k--", label="plain autograd, float32")
    value, slope = usual(x, "k3", True)
    for panel, is_broken, text, y, *text_at in (
            (left, value > 1e5, "k3 above 100,000\nfrom {:.1f}", 1e5, -95, 2e5),
            (left, value.isinf(), "k3 infinite\nfrom {:.1f}", 1e12, -95, 3e9),
            (right, (slope - x).abs() > -0.01 * x, "1 % off from {:.1f}", -15.3, -98, -31),
            (right, slope == 0, "0 from {:.1f}", 0, -55, 4),
            (right, slope.isnan(), "NaN from {:.1f}", 0, -98, -9)):
        where = x[is_broken & (x < -1)].max().item()
        panel.plot(where, y, "ko", ms=9, clip_on=False)
        panel.annotate(text.format(where), (where, y), text_at, arrowprops={"arrowstyle": "-"})
    left.set_yscale("symlog")
    left.set(ylim=(-1e3, 1e12), yticks=(-100, -1, 1, 100, 1e4, 1e6, 1e8, 1e10, 1e12), title="value")
    right.set(ylim=(-45, 65), title="slope (factor on grad log policy)")
    right.legend(fontsize=12, loc="upper left")
    figure.supxlabel("log policy − log reference of a token, nats")
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


if __name__ == "__main__":
    starter.run(main)

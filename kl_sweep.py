"""The measurements of KL.md: what the KL penalty does to the tiny model, and toys by enumeration.

    python kl_sweep.py --toys         expected values and gradients of each KL term, in seconds
    python kl_sweep.py                the table of appendix A (more than an hour)
    python kl_sweep.py --skip="exact, k1 in the reward"    without these estimators
    python kl_sweep.py --quick        a small version, to see it work (seven minutes)
    python kl_sweep.py --against="kl_coef 0.1"    differences from that run, of the last full sweep
    python kl_sweep.py --figure       only assets/kl_estimators.png, in seconds

The warm start teaches the model two skills: Countdown, and adding up three numbers. GRPO then
trains Countdown alone. Finished runs are kept in out_kl_sweep/ and not repeated.
"""
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
    """-> accuracy on Countdown, exact KL to the start per token, accuracy of the second skill"""
    policy, tokenizer = starter.init_policy(str(folder))
    ref, _ = starter.init_policy(str(start))
    sampler = starter.TorchSampler(policy)
    cfg = SimpleNamespace(task="countdown", n_eval=500, max_prompt_tokens=32, temperature=1.0,
                          min_tokens=0, max_tokens=24, max_turns=1, reward_truncated=True,
                          eval_task="", **vars(tiny.PROBLEMS))
    task = starter.Task(cfg, *starter.read_task(cfg), tokenizer)
    params = starter.init_sampling_params(cfg, 1, policy.stop_ids)
    metrics, _ = starter.evaluate_model(sampler, task, params, policy.stop_ids,
                                        starter.reward_fn)
    prompts = [problem["prompt_ids"] for problem in task.held_out]
    responses = starter.rollout_with_vllm(sampler, prompts, params, 1, "kl")
    batch = starter.make_batch(prompts, responses)
    mask = batch.response_mask
    stats = starter.response_stats(policy, batch.input_ids, batch.labels, mask, 1.0, ref)
    exact_kl = stats[3]
    sums = [second_skill("test", index) for index in range(300)]
    questions = [tokenizer.encode(question) for question, _ in sums]
    responses = starter.rollout_with_vllm(sampler, questions, params | {"temperature": 0.0}, 0,
                                          "second skill")
    n_right = 0
    for response, (_, answer) in zip(responses, sums):
        n_right += starter.decode(tokenizer, response.ids, policy.stop_ids) == answer
    return {"accuracy": float(metrics["eval/accuracy"]), "kl": exact_kl[mask].mean().item(),
            "second_skill": n_right / len(sums)}


def run(out, name, start, seed, steps, flags):
    """Train, measure -> the result, which is also kept in the folder of the run"""
    folder = out / f"{name}-{steps}steps-{start.name}".replace(" ", "_").replace(",", "")
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        starter.main([f"--model_id={start}", "--device=cpu", "--use_vllm=False", f"--seed={seed}",
                      f"--out_dir={folder}", f"--n_grpo_steps={steps}", "--lr=4e-4", "--n_eval=50",
                      f"--eval_every={steps}", "--save_every=0", "--rollout_batch_size=128",
                      "--reward_truncated=True", "--use_kl_penalty=True", *flags])
    last = (folder / "latest" / "metrics.jsonl").read_text().splitlines()[-1]
    if json.loads(last)["step"] < steps:  # Ctrl-C ended it early
        raise KeyboardInterrupt
    result = measure(folder / "latest" / "model", start)
    done.write_text(json.dumps(result))
    print(f"{name}, {start.name}: {result}", flush=True)
    return result


def main():
    options = SimpleNamespace(toys=False, quick=False, against="", figure=False, seeds=5, steps=60,
                              kl_coef=0.1, warm_start_steps=300, skip="", out_dir="out_kl_sweep")
    starter.override(options, starter.read_arguments(sys.argv[1:]))
    if options.toys:
        one_token_toy()
        three_token_toy()
    elif options.figure:
        draw_estimators("assets/kl_estimators.png")
    elif options.against:
        compare(json.loads(Path("assets/kl_sweep.json").read_text()), options.against)
    else:
        sweep(options)


def sweep(options):
    coefficients = COEFFICIENTS
    estimators = {name: ESTIMATORS[name] for name in ESTIMATORS if name not in options.skip}
    if options.seeds < 1 or (options.skip and len(estimators) == len(ESTIMATORS)):
        raise starter.UserError(f"--seeds: at least 1; --skip: some of {', '.join(ESTIMATORS)}")
    out = Path(options.out_dir)
    assets = Path("assets") if options.out_dir == "out_kl_sweep" else out
    if options.quick:
        options.seeds = 1
        options.steps = 15
        options.warm_start_steps = 150
        coefficients = (0.0, 0.1)
        estimators = {"k1, unweighted": ESTIMATORS["k1, unweighted"]}
        out = assets = Path(options.out_dir + "_quick")
    flags = {f"kl_coef {value:g}": [f"--kl_coef={value}"] for value in coefficients}
    at = "" if options.kl_coef == 0.1 else f" at {options.kl_coef:g}"
    for name in estimators:
        flags[name + at] = [f"--kl_coef={options.kl_coef}", *estimators[name]]
    results = {name: [] for name in ("start", *flags)}
    for seed in range(1, options.seeds + 1):
        start = out / f"seed{seed}-warm{options.warm_start_steps}"
        if not start.exists():
            make_start(start, seed, options.warm_start_steps)
        results["start"].append(measure(start, start))
        for name in flags:
            results[name].append(run(out, name, start, seed, options.steps, flags[name]))
    text = make_table(results, options)
    assets.mkdir(exist_ok=True)
    (assets / "kl_sweep.md").write_text(text)
    (assets / "kl_sweep.json").write_text(json.dumps(results, indent=1))
    draw(results, assets / "kl_sweep.png")
    print(f"{text}\nwritten: {assets}/kl_sweep.md, .json, .png")


def make_table(results, options):
    lines = [f"| run ({options.seeds} seeds, {options.steps} steps) | accuracy | against kl_coef 0 "
             "| KL to the start, per token | second skill |", "|---|---|---|---|---|"]
    for name in results:
        cells = interval(results, name, "accuracy")
        cells += interval(results, name, "accuracy", "kl_coef 0")
        cells += interval(results, name, "kl")
        cells += interval(results, name, "second_skill")
        lines.append("| {} | {:.1%} ± {:.1%} | {:+.1%} ± {:.1%} | {:.4f} ± {:.4f} | "
                     "{:.1%} ± {:.1%} |".format(name, *cells))
    return "\n".join(lines) + "\n"


def compare(results, other):
    """Print the differences of all runs from another one."""
    if other not in results:
        raise starter.UserError(f"--against: one of {'; '.join(results)}")
    print(f"| against {other}, within a seed | accuracy | KL, per token | second skill |")
    print("|---|---|---|---|")
    for name in results:
        if name != other:
            cells = interval(results, name, "accuracy", other)
            cells += interval(results, name, "kl", other)
            cells += interval(results, name, "second_skill", other)
            print("| {} | {:+.1%} ± {:.1%} | {:+.3f} ± {:.3f} | {:+.1%} ± {:.1%} |".format(
                name, *cells))


def interval(results, name, key, other=""):
    """-> mean over the seeds, half width of its 95 % interval. other: a run to subtract, by seed"""
    values = [row[key] for row in results[name]]
    if other:
        values = [value - row[key] for value, row in zip(values, results[other])]
    n = len(values)
    spread = statistics.stdev(values) if n > 1 else math.nan
    return statistics.mean(values), STUDENT_T[min(n, 10) - 1] * spread / n**0.5


def draw(results, path):
    matplotlib.rc("font", size=13)
    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="tight")
    panels = figure.subplots(1, 3, sharey=True)
    labels = {"accuracy": "Countdown accuracy (trained)", "kl": "KL to the start, nats per token",
              "second_skill": "sums accuracy (not trained)"}
    for panel, (key, label) in zip(panels, labels.items()):
        means, halves = zip(*(interval(results, name, key) for name in results))
        panel.barh(list(results), means, xerr=halves, capsize=4, color="C0", alpha=0.6)
        panel.set_xlabel(label)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def kl_divergence(p, q):
    return (p * (p / q).log()).sum()


def one_token_toy():
    """Print value and gradient of each term in the worked example of KL.md: the mean over the
    sampled word, of the trainer's own loss. The gradient is that of the first word's logit."""
    pi, ref, older = torch.tensor([[.6, .3, .1], [.3, .3, .4], [.4, .3, .3]], dtype=torch.float64)
    terms = {"k1": ("k1", False), "k2": ("k2", False), "k3 (GRPO's paper)": ("k3", False),
             "rho·k1": ("k1", True), "rho·k2": ("k2", True),
             "rho·k3 (default)": ("k3", True), "exact": ("exact", True)}
    header = f"  {'value':>7}  {'gradient':<14}  {'that of':<11}"
    print(f"{'':18}  {'on-policy':<36}  off-policy")
    print(f"{'':18}{header}{header}".rstrip())
    for name, (estimator, is_weighted) in terms.items():
        line = f"{name:<18}"
        for old in (pi, older):
            value, gradients = loss_of_each_word(pi, ref, old, estimator, is_weighted)
            mean = old @ gradients
            spread = (old @ (gradients - mean)**2).sqrt()
            mean[mean.abs() < 1e-9] = 0.0  # rounding errors would print as -0.0000
            line += f"  {old @ value:7.4f}  {mean[0]:7.4f} ± {spread[0]:.2f}"
            line += f"  {name_of_gradient(mean, pi, ref, old):<11}"
        print(line.rstrip())


def loss_of_each_word(pi, ref, old, estimator, is_weighted):
    """-> loss [words] if that word was sampled, its gradient [words, logits]"""
    logits = pi.log().requires_grad_()
    log_pi = logits.log_softmax(0)
    exact_kl = kl_divergence(log_pi.exp(), ref).expand(3, 1)
    # Three responses of one token: [3, 1]
    loss, _ = starter.compute_loss(
        torch.zeros(3), log_pi[:, None], old.log()[:, None], 0.2, ref.log()[:, None], kl_coef=1.0,
        kl_estimator=estimator, kl_importance_weight=is_weighted, exact_kl=exact_kl)
    gradients = [torch.autograd.grad(term, logits, retain_graph=True)[0] for term in loss[:, 0]]
    return loss[:, 0].detach(), torch.stack(gradients)


def name_of_gradient(gradient, pi, ref, old):
    """-> the KL that has this gradient"""
    if gradient.norm() == 0:
        return "nothing"
    logits = pi.log().requires_grad_()
    policy = logits.softmax(0)
    known = {"KL(pi‖ref)": kl_divergence(policy, ref), "KL(ref‖pi)": kl_divergence(ref, policy),
             "-KL(old‖pi)": -kl_divergence(old, policy)}
    for name, kl in known.items():
        wanted, = torch.autograd.grad(kl, logits, retain_graph=True)
        if (gradient - wanted).norm() < 1e-9:
            return name
    return "neither KL"


def three_token_toy():
    """Print how far the gradient of a KL term is from that of the KL of the whole response: all
    responses of three tokens over three words, medians over 60 random policies."""
    print("\nKL(pi‖ref)  KL(old‖pi)  error of rho·k3 in the loss  of k1 in the reward")
    for distance, shift in ((.1, 0), (.3, 0), (.5, 0), (1, 0), (.5, .1), (.5, .2), (.5, .3)):
        rows = [errors_of_gradients(distance, shift, seed) for seed in range(60)]
        medians = [statistics.median(column) for column in zip(*rows)]
        print("{:10.4f}  {:10.4f}  {:27.1%}  {:19.1%}".format(*medians))


def errors_of_gradients(distance, shift, seed):
    """distance, shift: how far the logits of ref and old are from those of pi
    -> KL(pi‖ref), KL(old‖pi), relative error of the gradient in the loss, in the reward"""
    words = torch.cartesian_prod(*[torch.arange(3)] * 3)  # [27 responses, 3 tokens]
    first, second, _ = words.T
    # 13 prefixes: none, one word (1 to 3), two words (4 to 12)
    prefixes = torch.stack([0 * first, 1 + first, 4 + 3 * first + second], 1)

    def log_probs(logits):  # [13 prefixes, 3 words] -> [27, 3]
        return logits.log_softmax(-1)[prefixes, words]

    generator = torch.Generator().manual_seed(seed)
    ref_logits, to_pi, to_old = torch.randn(3, 13, 3, generator=generator, dtype=torch.float64)
    logits = (ref_logits + distance * to_pi).requires_grad_()
    log_pi = log_probs(logits)
    log_old = log_probs(logits + shift * to_old).detach()
    log_ref = log_probs(ref_logits)
    kl = (log_pi.sum(1).exp() * (log_pi - log_ref).sum(1)).sum()
    moved = (log_old.sum(1).exp() * (log_old - log_pi).sum(1)).sum()
    wanted, = torch.autograd.grad(kl, logits, retain_graph=True)
    results = [kl.item() / 3, moved.item() / 3]
    for estimator, kl_in in (("k3", "loss"), ("k1", "reward")):
        loss, _ = starter.compute_loss(torch.zeros(27), log_pi, log_old, 0.2, log_ref, kl_coef=1.0,
                                       kl_estimator=estimator, kl_in=kl_in)
        mean = (log_old.sum(1).exp() * loss.sum(1)).sum()
        got, = torch.autograd.grad(mean, logits, retain_graph=True)
        results.append(((got - wanted).norm() / wanted.norm()).item())
    return results


def plain_autograd(log_ratio, estimator, is_weighted):
    """The formula as it is usually written, in float32, with autograd -> value, slope"""
    log_pi = log_ratio.clone().requires_grad_()  # log ref is 0
    if estimator == "k1":
        value = log_pi
    elif estimator == "k2":
        value = log_pi**2 / 2
    else:
        value = torch.exp(-log_pi) - 1 + log_pi
    weight = (log_pi - log_pi.detach()).exp() if is_weighted else 1.0
    return value.detach(), torch.autograd.grad((weight * value).sum(), log_pi)[0]


def draw_estimators(path):
    matplotlib.rc("font", size=14)
    figure = matplotlib.figure.Figure(figsize=(11, 6), layout="tight")
    left, right = figure.subplots(1, 2)
    log_ratio = torch.linspace(-100, 40, 14001)
    for color, width, label, estimator, is_weighted in (
            ("C3", 7, "k3 × importance weight", "k3", True), ("C2", 3, "k3", "k3", False),
            ("C1", 3, "k2", "k2", False), ("C0", 3, "k1", "k1", False)):
        log_pi = log_ratio.clone().requires_grad_()  # log ref is 0
        log_ref = torch.zeros_like(log_ratio)
        value = starter.compute_kl_divergence(log_pi, log_ref, estimator, is_weighted)
        slope, = torch.autograd.grad(value.sum(), log_pi)
        left.plot(log_ratio, value.detach(), color, lw=width)
        right.plot(log_ratio, slope, color, lw=width, label=label)
        value, slope = plain_autograd(log_ratio, estimator, is_weighted)
        left.plot(log_ratio, value, color, ls="--")
        right.plot(log_ratio, slope, color, ls="--")
    right.plot([], "k", lw=3, label="here: clamped at ±20")
    right.plot([], "k--", label="plain autograd, float32")
    mark_failures(left, right, log_ratio)
    left.set_yscale("symlog")
    left.set(ylim=(-1e3, 1e12), yticks=(-100, -1, 1, 100, 1e4, 1e6, 1e8, 1e10, 1e12), title="value")
    right.set(ylim=(-45, 65), title="slope (factor on grad log policy)")
    right.legend(fontsize=12, loc="upper left")
    figure.supxlabel("log policy − log reference of a token, nats")
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def mark_failures(left, right, log_ratio):
    """A dot and a label where plain autograd of the weighted k3 begins to fail"""
    value, slope = plain_autograd(log_ratio, "k3", True)
    is_off = (slope - log_ratio).abs() > -0.01 * log_ratio  # the right slope is the log-ratio
    for panel, is_failure, text, y, text_at in (
            (left, value > 1e5, "k3 above 100,000\nfrom {:.1f}", 1e5, (-95, 2e5)),
            (left, value.isinf(), "k3 infinite\nfrom {:.1f}", 1e12, (-95, 3e9)),
            (right, is_off, "1 % off from {:.1f}", -15.3, (-98, -31)),
            (right, slope == 0, "0 from {:.1f}", 0, (-55, 4)),
            (right, slope.isnan(), "NaN from {:.1f}", 0, (-98, -9))):
        x = log_ratio[is_failure & (log_ratio < -1)].max().item()
        panel.plot(x, y, "ko", ms=9, clip_on=False)
        panel.annotate(text.format(x), (x, y), text_at, arrowprops={"arrowstyle": "-"})


if __name__ == "__main__":
    starter.run(main)

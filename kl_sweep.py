"""The measurements of KL.md: what the KL penalty does to the tiny model, and toys by enumeration.

    python kl_sweep.py --toys         value and gradient of each KL term (seconds)
    python kl_sweep.py                the table of appendix A (half an hour)
    python kl_sweep.py --quick        a small version of it (minutes)
    python kl_sweep.py --against="kl_coef 0.1"    differences from that run, of the last full sweep
    python kl_sweep.py --figure       only assets/kl_estimators.png (seconds)

The warm start teaches Countdown and sums, GRPO trains Countdown alone. Finished runs are kept."""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is as fast on a CPU
import starter  # it answers --help before the slow imports
import contextlib, functools, io, json, math, random, statistics, sys, zlib
from pathlib import Path
from types import SimpleNamespace
import matplotlib.figure
import torch

matplotlib.rc("font", size=14)
tiny = starter.load_task_file("tiny")
SETTINGS = {
    "max_tokens": 24, "max_prompt_tokens": 32, "rollout_batch_size": 128, "group_size": 8,
    "lr": 4e-4, "use_vllm": False, "n_eval": 500, "eval_every": 0, "save_every": 0,
    "reward_truncated": True, "use_kl_penalty": True, "kl_coef": 0.1}
RUNS = {  # name in the table -> flags
    "kl_coef 0": "--kl_coef=0", "kl_coef 0.01": "--kl_coef=0.01", "kl_coef 0.1": "--kl_coef=0.1",
    "kl_coef 1": "--kl_coef=1", "exact": "--kl_estimator=exact",
    "k1 in the reward": "--kl_estimator=k1 --kl_in=reward",
    "k3, unweighted": "--kl_importance_weight=False",
    "k1, unweighted": "--kl_estimator=k1 --kl_importance_weight=False"}
MEASURED = {  # key of a result -> label, format
    "accuracy": ("Countdown accuracy", ".1%"), "kl": ("KL to the start, per token", ".4f"),
    "second_skill": ("accuracy on sums, not trained", ".1%")}
STUDENT_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 1 to 10 seeds


def main():
    options = SimpleNamespace(toys=False, figure=False, against="", quick=False, seeds=5, steps=60,
                              warm_start_steps=300, out_dir="out_kl_sweep")
    given = starter.read_arguments(sys.argv[1:])
    if "quick" in given:
        vars(options).update(seeds=1, steps=15, warm_start_steps=150, out_dir="out_kl_sweep_quick")
    starter.override(options, given)
    if options.toys:
        one_token_toy()
        three_token_toy()
    elif options.figure:
        draw_estimators("assets/kl_estimators.png")
    elif options.against:
        results = json.loads(Path("assets/kl_sweep.json").read_text())
        if options.against not in results:
            raise starter.UserError(f"--against: one of {'; '.join(results)}")
        print(make_table(results, f"against {options.against}, within a seed", options.against))
    else:
        sweep(options)


def sweep(options):
    starter.reward_fn = reward_fn
    names = ("kl_coef 0", "kl_coef 0.1", "k1, unweighted") if options.quick else tuple(RUNS)
    results = {name: [] for name in ("start", *names)}
    for seed in range(1, options.seeds + 1):
        start = Path(options.out_dir, f"seed{seed}-warm{options.warm_start_steps}")
        if not start.exists():
            make_start(start, seed, options.warm_start_steps)
        results["start"].append(measure(start, start))
        for name in names:
            results[name].append(run(name, start, seed, options.steps))
    text = make_table(results, f"run ({options.seeds} seeds, {options.steps} steps)")
    assets = Path("assets" if options.out_dir == "out_kl_sweep" else options.out_dir)
    (assets / "kl_sweep.md").write_text(text)
    (assets / "kl_sweep.json").write_text(json.dumps(results, indent=1))
    draw(results, assets / "kl_sweep.png")
    print(f"{text}\nwritten: {assets}/kl_sweep.md, .json, .png")


def make_start(folder, seed, steps):
    """Write the warm-started model, and the problems of both skills as JSONL files."""
    tiny.write_model(folder, functools.partial(both_skills, seed), steps, seed=seed)
    training, test = tiny.countdown.make_rows(seed, **tiny.PROBLEMS)
    sums = [second_skill("test", index) for index in range(300)]
    for name, rows in {"train": training, "test": test, "sums": sums}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def both_skills(seed, step):
    """-> [(prompt, response), ...] for a step of the warm start"""
    sums = [second_skill(seed, step * 64 + i) for i in range(64)]
    return tiny.countdown_examples(step, 96) + [
        (row["prompt"], f"<answer>{row['answer']}</answer>") for row in sums]


def second_skill(seed, index):
    """Add up three numbers. A hash of the numbers decides which are for testing."""
    rng = random.Random(f"sum/{seed}/{index}")
    while True:
        numbers = [rng.randint(1, 20) for _ in range(3)]
        if (zlib.crc32(str(sorted(numbers)).encode()) % 5 == 0) == (seed == "test"):
            return {"prompt": f"sum {' '.join(map(str, numbers))}:", "answer": str(sum(numbers))}


original_reward_fn = starter.reward_fn


def reward_fn(text, row):
    """That of starter.py for the sums, which have an answer, otherwise that of Countdown"""
    if "answer" in row:
        return original_reward_fn(text, row)
    return tiny.reward_fn(text, row)


def flags(settings):
    """{"lr": 1e-5} -> ["--lr=1e-05"]"""
    return [f"--{name}={value}" for name, value in settings.items()]


def run(name, start, seed, steps):
    """Train, measure -> the result, which is also kept in the folder of the run"""
    folder = start.parent / f"{name}-{steps}steps-{start.name}".replace(" ", "_")
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    settings = SETTINGS | {
        "model_id": str(start), "task": f"{start}/train.jsonl", "eval_task": f"{start}/test.jsonl",
        "out_dir": str(folder), "n_grpo_steps": steps, "seed": seed}
    with contextlib.redirect_stdout(io.StringIO()):
        starter.main(flags(settings) + RUNS[name].split())
    last_row = (folder / "latest" / "metrics.jsonl").read_text().splitlines()[-1]
    if json.loads(last_row)["step"] < steps:
        raise KeyboardInterrupt  # Ctrl-C ended it early
    result = measure(folder / "latest" / "model", start)
    done.write_text(json.dumps(result))
    print(f"{name}, {start.name}: {result}")
    return result


@torch.no_grad()
def measure(folder, start):
    """-> accuracy on Countdown, exact KL to the start per token, accuracy of the second skill"""
    policy, tokenizer = starter.init_policy(str(folder))
    reference, _ = starter.init_policy(str(start))
    settings = SETTINGS | {"model_id": folder, "task": start / "train.jsonl"}
    cfg = starter.main(flags(settings), only_settings=True)
    sampler = starter.init_vllm(policy, tokenizer, cfg)
    accuracies = {}
    for name, cfg.temperature in {"sums": 0.0, "test": 1.0}.items():
        cfg.eval_task = str(start / f"{name}.jsonl")
        with contextlib.redirect_stdout(io.StringIO()):
            task = starter.Task(cfg)
            task.encode(tokenizer, policy.stop_ids)
        metrics, responses = starter.evaluate_model(sampler, task)
        accuracies[name] = metrics["eval/accuracy"].item()
    batch = starter.make_batch(responses)  # of Countdown
    mask = batch.response_mask
    kl = starter.response_stats(policy, batch.input_ids, batch.labels, mask, 1.0, reference)[3]
    return {"accuracy": accuracies["test"], "kl": kl[mask].mean().item(),
            "second_skill": accuracies["sums"]}


def interval(results, name, key, other=""):
    """-> mean over the seeds, half width of its 95 % interval. other: a run to subtract, by seed"""
    values = [row[key] for row in results[name]]
    if other:
        values = [value - row[key] for value, row in zip(values, results[other])]
    error = statistics.stdev(values) / len(values)**0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), STUDENT_T[min(len(values), 10) - 1] * error


def make_table(results, title, other=""):
    labels = [label for label, _ in MEASURED.values()]
    text = f"| {title} | {' | '.join(labels)} |\n|---|---|---|---|\n"
    sign = "+" if other else ""
    for name in results:
        text += f"| {name} |"
        for key, (_, form) in MEASURED.items():
            mean, half = interval(results, name, key, other)
            text += f" {mean:{sign}{form}} ± {half:{form}} |"
        text += "\n"
    return text


def draw(results, path):
    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="tight")
    for panel, key in zip(figure.subplots(1, 3, sharey=True), MEASURED):
        means, halves = zip(*(interval(results, name, key) for name in results))
        panel.barh(list(results), means, xerr=halves, capsize=4, color="C0", alpha=0.6)
        panel.set_xlabel(MEASURED[key][0])
    panel.invert_yaxis()  # of all panels
    figure.savefig(path, dpi=110)


def one_token_toy():
    """Print value and gradient of each term in the worked example of KL.md: the mean over the
    sampled word, of the trainer's own loss. The gradient is that of the first word's logit."""
    pi, ref, older = torch.tensor([[.6, .3, .1], [.3, .3, .4], [.4, .3, .3]], dtype=torch.float64)
    terms = {"k1": ("k1", False), "k2": ("k2", False), "k3 (GRPO's paper)": ("k3", False),
             "rho·k1": ("k1", True), "rho·k2": ("k2", True),
             "rho·k3 (default)": ("k3", True), "exact": ("exact", True)}
    print(" " * 19, "on-policy                             off-policy")
    print(" " * 21, "value  gradient        that of        value  gradient        that of")
    log_ratio = (pi / ref).log()
    for name, (estimator, is_weighted) in terms.items():
        line = f"{name:<18}"
        for old in (pi, older):
            logits = pi.log().requires_grad_()
            log_pi = logits.log_softmax(0)
            exact_kl = (log_pi.exp() * (log_pi - ref.log())).sum().expand(3, 1)
            loss, _ = starter.compute_loss(  # [3 words, 1]
                torch.zeros(3), log_pi[:, None], old.log()[:, None], 0.2, ref.log()[:, None], 1.0,
                kl_estimator=estimator, kl_importance_weight=is_weighted, exact_kl=exact_kl)
            gradients = torch.stack([torch.autograd.grad(term, logits, retain_graph=True)[0]
                                     for term in loss[:, 0]])  # [3 words, 3 logits]
            mean = (old @ gradients).round(decimals=9) + 0.0  # otherwise -0.0000 is printed
            spread = (old @ (gradients - mean)**2).sqrt()
            line += f"  {old @ loss[:, 0]:7.4f}  {mean[0]:7.4f} ± {spread[0]:.2f}"
            known = {"nothing": 0 * pi, "KL(pi‖ref)": pi * (log_ratio - pi @ log_ratio),
                     "KL(ref‖pi)": pi - ref, "-KL(old‖pi)": old - pi}  # their gradients
            names = [name for name, wanted in known.items() if (mean - wanted).norm() < 1e-8]
            line += f"  {names[0] if names else 'neither KL':<11}"
        print(line.rstrip())


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
    generator = torch.Generator().manual_seed(seed)
    ref_logits, to_pi, to_old = torch.randn(3, 13, 3, generator=generator, dtype=torch.float64)
    logits = (ref_logits + distance * to_pi).requires_grad_()
    old_logits = (logits + shift * to_old).detach()
    log_ref, log_pi, log_old = (table.log_softmax(-1)[prefixes, words]  # [27, 3]
                                for table in (ref_logits, logits, old_logits))
    kl = (log_pi.sum(1).exp() * (log_pi - log_ref).sum(1)).sum()
    moved = (log_old.sum(1).exp() * (log_old - log_pi).sum(1)).sum()
    wanted, = torch.autograd.grad(kl, logits, retain_graph=True)
    results = [kl.item() / 3, moved.item() / 3]
    for estimator, kl_in in (("k3", "loss"), ("k1", "reward")):
        loss, _ = starter.compute_loss(torch.zeros(27), log_pi, log_old, 0.2, log_ref, 1.0,
                                       kl_estimator=estimator, kl_in=kl_in)
        mean = (log_old.sum(1).exp() * loss.sum(1)).sum()
        got, = torch.autograd.grad(mean, logits, retain_graph=True)
        results.append(((got - wanted).norm() / wanted.norm()).item())
    return results


def draw_estimators(path):
    figure = matplotlib.figure.Figure(figsize=(11, 6), layout="tight")
    left, right = figure.subplots(1, 2)
    log_pi = torch.linspace(-100, 40, 14001, requires_grad=True)
    k3 = torch.exp(-log_pi) - 1 + log_pi
    rho = (log_pi - log_pi.detach()).exp()  # the importance weight pi/old on-policy: 1
    for color, width, label, estimator, weight, usual in (
            ("C3", 7, "k3 × importance weight", "k3", rho.detach(), rho * k3),
            ("C2", 3, "k3", "k3", None, k3),
            ("C1", 3, "k2", "k2", None, log_pi**2 / 2),
            ("C0", 3, "k1", "k1", None, log_pi)):
        ours = starter.compute_kl_divergence(log_pi, 0 * log_pi, estimator, weight)
        for value, style in (ours, {"lw": width, "label": label}), (usual, {"ls": "--"}):
            slope, = torch.autograd.grad(value.sum(), log_pi, retain_graph=True)
            left.plot(log_pi.detach(), value.detach(), color, **style)
            right.plot(log_pi.detach(), slope, color, **style)
    right.plot([], "k", lw=3, label="here: clamped at ±20")
    right.plot([], "k--", label="plain autograd, float32")
    left.set(yscale="symlog", ylim=(-1e3, 1e12), yticks=(-100, 1, 1e4, 1e8, 1e12), title="value")
    right.set(ylim=(-45, 65), title="slope (factor on grad log policy)")
    right.legend(fontsize=12, loc="upper left")
    figure.supxlabel("log policy − log reference of a token, nats")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    starter.run(main)

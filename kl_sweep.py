"""The measurements of KL.md: what the KL penalty does to the tiny model, and toys by enumeration.

    python kl_sweep.py --toys          value and gradient of each KL term (seconds)
    python kl_sweep.py --hackable      a judge with a loophole: which penalty saves the run?
    python kl_sweep.py --collapse      plain k1, and a sampler that is not the policy
    python kl_sweep.py --minibatches   8 updates per rollout: KL in the loss and in the reward

A run takes one core for one to three minutes, and --hackable has 90. --jobs=8 does eight at once,
--seeds=1 is a quick look. Finished runs are kept in kl_runs.jsonl in --out_dir, so an interrupted
sweep goes on. With --out_dir=assets these are the runs of KL.md.
"""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so small a model is as fast on a CPU
import starter  # it answers --help before the slow imports
import contextlib, json, math, multiprocessing, shutil, statistics, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
import torch

# What the runs have in common. kl_coef=1e-9 only measures the KL.
SETTINGS = ("--use_vllm=False --use_kl_penalty --kl_coef=1e-9 --eval_every=10 --n_eval=400 "
            "--save_every=0")
PLAIN = "--kl_importance_weight=False"
K1_REWARD = "--kl_estimator=k1 --kl_in=reward"
EXPERIMENTS = {  # all: settings of all runs; against: the run that others are compared with
    "hackable": {"all": "--task=hackable --n_grpo_steps=60", "columns": ("judge", "truth", "kl"),
                 "against": "rho·k3 0.3", "runs": {
        "none": "",
        **{f"rho·k3 {value}": f"--kl_coef={value}" for value in (0.03, 0.1, 0.3, 1, 3)},
        "exact 0.3": "--kl_coef=0.3 --kl_estimator=exact",
        "k1 in the reward 0.3": f"--kl_coef=0.3 {K1_REWARD}",
        "plain k1 0.3": f"--kl_coef=0.3 --kl_estimator=k1 {PLAIN}",
        "plain k3 0.3": f"--kl_coef=0.3 {PLAIN}",
        "target_kl 0.1": "--kl_coef=0.1 --target_kl=0.1",
        **{f"not divided by std, {value}": f"--kl_coef={value} --advantage_scale=none"
           for value in (0.04, 0.12, 0.4)},
        "honest, none": "--task=tiny",
        "honest, rho·k3 0.1": "--task=tiny --kl_coef=0.1",
        "honest, rho·k3 0.3": "--task=tiny --kl_coef=0.3",
        "honest, target_kl 0.1": "--task=tiny --kl_coef=0.1 --target_kl=0.1"}},
    "collapse": {"all": "--task=tiny --n_grpo_steps=40", "columns": ("truth", "entropy"),
                 "against": "none", "runs": {
        "none": "",
        "plain k1 0.3": f"--kl_coef=0.3 --kl_estimator=k1 {PLAIN}",
        "rho·k3 0.3": "--kl_coef=0.3",
        "plain k1 0.3, sampler = policy": f"--kl_coef=0.3 --kl_estimator=k1 {PLAIN}"}},
    "minibatches": {"all": "--task=tiny --n_grpo_steps=60 --n_minibatches=4 --inner_epochs=2",
                    "columns": ("truth", "kl"), "against": "rho·k3 0.1", "runs": {
        "none": "",
        "rho·k3 0.1": "--kl_coef=0.1",
        "k1 in the reward 0.1": f"--kl_coef=0.1 {K1_REWARD}",
        "rho·k3 0.3": "--kl_coef=0.3",
        "k1 in the reward 0.3": f"--kl_coef=0.3 {K1_REWARD}"}}}
COLUMNS = {  # name in a result -> metric, heading of the table, factor, digits
    "judge": ("eval/accuracy", "judge likes, %", 100, 1),
    "truth": ("eval/true_accuracy", "truly right, %", 100, 1),
    "kl": ("kl/mean", "kl/mean", 1, 3), "entropy": ("train/entropy", "entropy", 1, 2)}
STUDENT_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 1 to 10 seeds


def main():
    options = SimpleNamespace(toys=False, hackable=False, collapse=False, minibatches=False,
                              seeds=5, jobs=2, out_dir="out_kl_sweep")
    starter.override(options, starter.read_arguments(sys.argv[1:]))
    chosen = [name for name in EXPERIMENTS if getattr(options, name)]
    if options.toys:
        one_token_toy()
        three_token_toy()
    elif chosen:
        sweep(chosen, options)
    else:
        raise starter.UserError("choose --toys, --" + ", --".join(EXPERIMENTS))


def sweep(chosen, options):
    """Do the runs that have no result yet, then print the tables and draw the figures."""
    folder = Path(options.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "kl_runs.jsonl", "a+") as file:
        file.seek(0)
        results = {tuple(job): result for job, result in map(json.loads, file)}
        # All runs of a seed come before the next seed, so an interrupted sweep has whole seeds.
        jobs = [(experiment, name, seed) for seed in range(1, options.seeds + 1)
                for experiment in chosen for name in EXPERIMENTS[experiment]["runs"]]
        todo = [(job, folder) for job in jobs if job not in results]
        if todo:
            starter.load_task_file("tiny").prepare()
            os.environ["OMP_NUM_THREADS"] = "1"  # of each process
            context = multiprocessing.get_context("spawn")
            with context.Pool(options.jobs, maxtasksperchild=1) as pool:
                for job, result in pool.imap_unordered(run, todo):
                    results[job] = result
                    print(json.dumps([job, result]), file=file, flush=True)
                    print(f"{len(results)} runs are finished, the last is {job}")
    for experiment in chosen:
        settings = EXPERIMENTS[experiment]
        runs = {name: [results[job] for job in jobs if job[:2] == (experiment, name)]
                for name in settings["runs"]}
        print(f"\n{make_table(runs, settings['columns'], settings['against'])}")
        draw = {"hackable": draw_hackable, "collapse": draw_collapse}.get(experiment)
        if draw:
            draw(runs, folder / f"kl_{experiment}.png")


def run(job_and_folder):
    """In a process of its own: train, keep some metrics, delete the rest. -> job, result"""
    job, folder = job_and_folder
    experiment, name, seed = job
    settings = EXPERIMENTS[experiment]
    if experiment == "collapse" and "sampler = policy" not in name:
        starter.TorchSampler.generate = generate_narrowly
    sys.modules["torch.utils.tensorboard"] = mock.Mock()  # its files would be deleted below
    folder /= f"{experiment} {name} {seed}"
    # A setting that is given twice has its last value.
    words = f"{SETTINGS} {settings['all']} {settings['runs'][name]} --seed={seed}".split()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        starter.main([*words, f"--out_dir={folder}"])
    rows = [json.loads(line) for line in open(folder / "latest" / "metrics.jsonl")]
    shutil.rmtree(folder)
    # judge and truth: at these steps; kl and entropy: at every step from 1 on
    result = {"steps": [row["step"] for row in rows if "eval/accuracy" in row],
              "kl_coef": rows[-1]["train/kl_coef"]}
    for key, (metric, *_) in COLUMNS.items():
        result[key] = [round(row[metric], 4) for row in rows if metric in row]
    result["truth"] = result["truth"] or result["judge"]  # the same with an honest reward
    return job, result


original_generate = starter.TorchSampler.generate


def generate_narrowly(sampler, task, responses):
    """Sample at temperature 0.8 and top-p 0.9, but return the log-probs at temperature 1, as a
    trainer does that scores the responses itself and takes this for what the sampler did. So the
    loss scores at temperature 1, and its weight for the sampler's log-probs is 1."""
    plain = []  # log-probs [B, V] for each token of the responses

    def narrow(model, inputs, output):
        logits = output.logits[:, -1].float()  # [B, V]
        plain.append(logits.log_softmax(-1))
        probs, order = (logits / 0.8).softmax(-1).sort(descending=True)
        # A token is kept if those before it have less than 0.9 in all.
        is_kept = probs.cumsum(-1) - probs < 0.9
        is_kept = torch.zeros_like(is_kept).scatter(1, order, is_kept)
        output.logits = torch.where(is_kept, logits / 0.8, -torch.inf)[:, None]

    hook = sampler.model.register_forward_hook(narrow)
    outputs = original_generate(sampler, task, responses)
    hook.remove()
    return [(ids, [plain[t][row, token].item() for t, token in enumerate(ids)])
            for row, (ids, _) in enumerate(outputs)]


# ---- tables and figures --------------------------------------------------------------------------

def interval(values):
    """-> mean, half width of its 95 % interval"""
    error = statistics.stdev(values) / len(values)**0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), STUDENT_T[min(len(values), 10) - 1] * error


def make_table(runs, columns, against):
    """At the end of the runs: means and 95 % intervals over the seeds. difference: of the truth,
    seed by seed, from the run `against`, or from "honest, none"."""
    headings = [COLUMNS[key][1] for key in columns] + ["difference"]
    lines = [f"{len(runs['none'])} seeds".ljust(30) + "".join(f"{x:>16}" for x in headings)]
    for name, seeds in runs.items():
        line = f"{name:<30}"
        for key in columns:
            _, _, factor, digits = COLUMNS[key]
            mean, half = interval([factor * result[key][-1] for result in seeds])
            line += f"{mean:.{digits}f} ± {half:.{digits}f}".rjust(16)
        base = "honest, none" if name.startswith("honest") else against
        if name != base:
            mean, half = interval([100 * (result["truth"][-1] - other["truth"][-1])
                                   for result, other in zip(seeds, runs[base])])
            line += f"{mean:+.1f} ± {half:.1f}".rjust(16)
        lines.append(line)
    return "\n".join(lines)


def new_figure(width, height):
    import matplotlib.figure  # here, since only figures need it
    matplotlib.rc("font", size=14)
    return matplotlib.figure.Figure(figsize=(width, height), layout="tight")


def draw_curves(panel, seeds, key, label, **style):
    """A thin line for each seed, a thick one for the mean"""
    curves = [[COLUMNS[key][2] * value for value in result[key]] for result in seeds]
    steps = range(1, len(curves[0]) + 1) if key == "entropy" else seeds[0]["steps"]
    for curve in curves:
        panel.plot(steps, curve, lw=0.6, **style)
    panel.plot(steps, [statistics.mean(column) for column in zip(*curves)], lw=3, label=label,
               **style)


def draw_hackable(runs, path):
    figure = new_figure(13, 5)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, words, color in (("none", "no penalty", "C3"), ("rho·k3 0.3", "kl_coef 0.3", "C0")):
        draw_curves(left, runs[name], "judge", f"judge likes, {words}", color=color, ls="--")
        draw_curves(left, runs[name], "truth", f"truly right, {words}", color=color)
    names = [name for name in runs if name == "none" or name.startswith("rho")]
    for key, label, style in ("judge", "judge likes", "C7--"), ("truth", "truly right", "C0-"):
        means, halves = zip(*(interval([100 * result[key][-1] for result in runs[name]])
                              for name in names))
        right.errorbar(range(len(names)), means, halves, fmt=f"o{style}", capsize=4, label=label)
    right.axhline(100 * runs["none"][0]["truth"][0], color="k", ls=":", label="right at the start")
    left.set(xlabel="step", ylabel="% of the answers to held-out problems", ylim=(0, 100))
    right.set_xticks(range(len(names)), ["0", *(name.split()[1] for name in names[1:])])
    right.set_xlabel("kl_coef, after the last step")
    for panel in (left, right):
        panel.legend(fontsize=11)
    figure.savefig(path, dpi=110)


def draw_collapse(runs, path):
    figure = new_figure(13, 5)
    left, right = figure.subplots(1, 2)
    for (name, seeds), color in zip(runs.items(), ("C7", "C3", "C0", "C1")):
        draw_curves(left, seeds, "entropy", name, color=color)
        draw_curves(right, seeds, "truth", name, color=color)
    left.axhline(math.log(260), color="k", ls=":")
    left.set(xlabel="step", ylabel="entropy, nats (dotted: its maximum, ln 260)", ylim=(0, 6))
    right.set(xlabel="step", ylabel="% of the answers to held-out problems", ylim=(0, 100))
    right.legend(fontsize=11, loc="upper right")
    figure.savefig(path, dpi=110)


def one_token_toy():
    """Print value and gradient of each term in the worked example of KL.md: the mean over the
    sampled word, of the trainer's own loss. The gradient is that of the first word's logit."""
    pi, ref, older = torch.tensor([[.6, .3, .1], [.3, .3, .4], [.4, .3, .3]], dtype=torch.float64)
    terms = {"k1": ("k1", False), "k2": ("k2", False), "k3 (GRPO's paper)": ("k3", False),
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
    for distance, shift in ((.3, 0), (.5, 0), (1, 0), (.5, .1), (.5, .3), (.5, 1), (.5, 1.5)):
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


if __name__ == "__main__":
    starter.run(main)

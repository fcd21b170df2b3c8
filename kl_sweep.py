"""What the KL penalty does, measured: the tiny model over coefficients and estimators.

    python kl_sweep.py              the table and the picture of KL.md (about 20 minutes on two cores)
    python kl_sweep.py --quick=True a small version, to see it work (about 3 minutes)

The warm start teaches the model two skills: Countdown, and adding up three numbers. GRPO then trains Countdown alone.
For every run: held-out Countdown accuracy (sampled), the exact KL to the start per token, and how much of the second
skill is left (greedy, so that it measures what the model knows, not how sure it is). Runs that are done are not run
again.
Writes assets/kl_sweep.md, .png and .json."""
import contextlib, io, json, random, statistics, sys, time, zlib
from pathlib import Path
from types import SimpleNamespace

import starter as s
import torch

SIZE = dict(n_numbers=3, max_number=20, operations="+-")
COEFFICIENTS = (0.0, 0.001, 0.01, 0.1, 1.0)
ESTIMATORS = {      # name in the table -> flags, at one coefficient
    "k1, weighted": ["--kl_estimator=k1"], "k2, weighted": ["--kl_estimator=k2"], "exact": ["--kl_estimator=exact"],
    "k1 in the reward": ["--kl_estimator=k1", "--kl_in=reward"], "k3, unweighted": ["--kl_importance_weight=False"],
    "k1, unweighted": ["--kl_estimator=k1", "--kl_importance_weight=False"]}


def second_skill(seed, index):
    """Add up three numbers. Which are for testing is a hash of the numbers."""
    rng = random.Random(f"sum/{seed}/{index}")
    while True:
        numbers = [rng.randint(1, 20) for _ in range(3)]
        if (zlib.crc32(str(sorted(numbers)).encode()) % 5 == 0) == (seed == "test"):
            return f"sum {' '.join(map(str, numbers))}:", f"<answer>{sum(numbers)}</answer>"


def make_start(folder, seed, steps):
    """The tiny model, warm-started on both skills, as a model folder."""
    if (folder / "config.json").exists(): return
    policy, tokenizer = s.init_policy("tiny", seed=seed)

    def examples(step):
        problems = [s.make_problem(seed, step * 96 + i, "train", **SIZE) for i in range(96)]
        return ([(s.prompt_text(p, tokenizer), f"<answer>{p['solution']}</answer>") for p in problems]
                + [second_skill(seed, step * 64 + i) for i in range(64)])
    s.warm_start(policy, tokenizer, examples, steps)
    s.publish(policy, tokenizer, folder)


@torch.no_grad()
def measure(folder, start, n=500):
    policy, tokenizer = s.init_policy(str(folder))
    ref, _ = s.init_policy(str(start))
    sampler = s.TorchSampler(policy)
    held_out = s.held_out_problems(n, **SIZE)
    params = s.init_sampling_params(1.0, 0, 24, 1, tokenizer.stop_ids)
    metrics, _ = s.evaluate_model(sampler, tokenizer, held_out, params, operations="+-")
    prompts = [tokenizer.encode(s.prompt_text(p, tokenizer)) for p in held_out]
    responses = s.rollout_with_vllm(sampler, prompts, params, 1, "kl")
    b = s.make_batch(prompts, [r[0] for r in responses])
    kl = s.token_stats(policy, b.input_ids, b.labels, b.mask, ref_model=ref)[3][b.mask].mean().item()
    questions = [second_skill("test", i) for i in range(300)]
    answers = s.rollout_with_vllm(sampler, [tokenizer.encode(q) for q, _ in questions], params | {"temperature": 0.0},
                                  0, "eval")
    kept = sum(tokenizer.decode(ids) == want for (ids, *_), (_, want) in zip(answers, questions)) / len(questions)
    return {"accuracy": metrics["eval/accuracy"], "kl": kl, "second_skill": kept}


def run(out, name, start, seed, steps, flags):
    folder = out / f"{name}-{steps}steps-{start.name}".replace(" ", "_").replace(",", "")
    done = folder / "result.json"
    if done.exists(): return json.loads(done.read_text())
    begin = time.time()
    with contextlib.redirect_stdout(io.StringIO()):
        s.main(["--model_id=" + str(start), "--device=cpu", "--use_vllm=False", f"--seed={seed}", f"--out_dir={folder}",
                "--overwrite=True", f"--n_grpo_steps={steps}", "--rollout_batch_size=256", "--group_size=8",
                "--lr=4e-4", "--max_tokens=24", "--max_prompt_tokens=32", "--n_eval=50", f"--eval_every={steps}",
                "--save_every=0", "--n_numbers=3", "--max_number=20", "--operations=+-",
                "--gradient_checkpointing=False", "--max_kl=1e9", *flags])
    result = measure(folder / "model", start) | {"minutes": (time.time() - begin) / 60}
    done.write_text(json.dumps(result))
    print(f"{name}, {start.name}: accuracy {result['accuracy']:.1%}, KL {result['kl']:.4f}, "
          f"second skill {result['second_skill']:.1%} ({result['minutes']:.1f} min)", flush=True)
    return result


def main():
    o = SimpleNamespace(quick=False, out_dir="out_kl_sweep", seeds=2, steps=60, kl_coef=0.1, warm_start_steps=300)
    s.override(o, s.parse_arguments(sys.argv[1:]))
    coefficients, estimators = COEFFICIENTS, ESTIMATORS
    if o.quick:
        o.seeds, o.steps, o.warm_start_steps, o.out_dir = 1, 15, 150, o.out_dir + "_quick"
        coefficients, estimators = (0.0, 0.1), {k: ESTIMATORS[k] for k in ("k1, unweighted",)}
    out, table = Path(o.out_dir), []
    for seed in range(1, o.seeds + 1):
        start = out / f"seed{seed}-warm{o.warm_start_steps}"
        make_start(start, seed, o.warm_start_steps)
        runs = {"start": None}
        runs |= {f"kl_coef {c:g}": ["--use_kl_penalty=True", f"--kl_coef={c}"] if c else [] for c in coefficients}
        runs |= {name: ["--use_kl_penalty=True", f"--kl_coef={o.kl_coef}", *flags]
                 for name, flags in estimators.items()}
        for name, flags in runs.items():
            table.append((name, measure(start, start) if flags is None
                          else run(out, name, start, seed, o.steps, flags)))
    names = list(dict.fromkeys(name for name, _ in table))
    mean = {name: {k: (statistics.mean(v), (max(v) - min(v)) / 2) for k in ("accuracy", "kl", "second_skill")
                   if (v := [r[k] for n, r in table if n == name])} for name in names}
    lines = [f"| run ({o.seeds} seeds, {o.steps} steps) | held-out accuracy | KL to the start, per token | "
             "second skill kept |", "|---|---|---|---|"]
    lines += [f"| {n}{'' if n.startswith(('start', 'kl_coef')) else f', kl_coef {o.kl_coef:g}'} | "
              f"{m['accuracy'][0]:.1%} ± {m['accuracy'][1]:.1%} | {m['kl'][0]:.4f} ± {m['kl'][1]:.4f} | "
              f"{m['second_skill'][0]:.1%} ± {m['second_skill'][1]:.1%} |" for n, m in mean.items()]
    text = "\n".join(lines) + "\n"
    assets = out if o.quick else Path("assets")
    assets.mkdir(exist_ok=True)
    (assets / "kl_sweep.md").write_text(text)
    (assets / "kl_sweep.json").write_text(json.dumps(mean, indent=1))
    draw(mean, coefficients, o.kl_coef, estimators, assets / "kl_sweep.png")
    print(text + f"\nwritten: {assets}/kl_sweep.md, .json, .png")


def draw(mean, coefficients, coefficient, estimators, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(11, 4))
    names = [f"kl_coef {c:g}" for c in coefficients]
    for key, label in (("accuracy", "Countdown accuracy"), ("second_skill", "second skill kept")):
        axes[0].errorbar(range(len(names)), [mean[n][key][0] for n in names], [mean[n][key][1] for n in names],
                         marker="o", capsize=3, label=label)
    axes[0].set_xticks(range(len(names)), [n.split()[1] for n in names])
    axes[0].axhline(mean["start"]["accuracy"][0], ls=":", color="C0", label="accuracy at the start")
    axes[0].set_xlabel("kl_coef"), axes[0].set_ylim(0, 1.02), axes[0].legend(), axes[0].set_title("the coefficient")
    twin = [f"kl_coef {coefficient:g}", *estimators, "kl_coef 0"]
    axes[1].barh(range(len(twin)), [mean[n]["kl"][0] for n in twin], xerr=[mean[n]["kl"][1] for n in twin], capsize=3)
    axes[1].set_yticks(range(len(twin)), ["k3, weighted (default)", *estimators, "no penalty"])
    (axes[1].invert_yaxis(), axes[1].set_xlabel("exact KL to the start, per token"),
     axes[1].set_title("the estimator, same coefficient"))
    fig.tight_layout(), fig.savefig(path, dpi=110)


if __name__ == "__main__":
    try: main()
    except s.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

"""Draw assets/accuracy.png from all records: python records/plot.py"""
import json
from pathlib import Path

import matplotlib.figure
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ON_A_CPU = ("tiny", "calculator", "guess")  # how the names of such records begin
COLORS = ("Blues", "Oranges", "Greens", "Purples", "Reds", "Greys")  # one for the seeds of a task


def main(records=ROOT / "records", picture=ROOT / "assets" / "accuracy.png"):
    folders = sorted(path.parent for path in records.glob("*/metrics.jsonl"))
    # What the judge of hackable likes is no accuracy. KL.md has a picture of it.
    folders = [folder for folder in folders if not folder.name.startswith("hackable")]
    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="tight")
    gpu, cpu = figure.subplots(1, 2, sharey=True)
    draw(gpu, [folder for folder in folders if not folder.name.startswith(ON_A_CPU)])
    draw(cpu, [folder for folder in folders if folder.name.startswith(ON_A_CPU)])
    gpu.set(xlabel="minutes, GPU", ylabel="accuracy on held-out problems, %", ylim=(0, 100))
    cpu.set(xlabel="minutes, CPU (thin: reward in training x 100, mean of 5 steps)")
    figure.savefig(picture, dpi=120)


def draw(panel, folders):
    names = [folder.name.partition("_seed")[0] for folder in folders]
    ends = []
    for number, (folder, name) in enumerate(zip(folders, names)):
        shade = 0.9 - 0.15 * (names[:number].count(name) % 4)
        color = matplotlib.colormaps[COLORS[sorted(set(names)).index(name) % len(COLORS)]](shade)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for key, marker, weight in ("train/reward_mean", "", 0.3), ("eval/accuracy", "o", 1):
            points = [(row["time/minutes"], 100 * row[key]) for row in rows if key in row]
            if not marker:
                points = [np.mean(points[max(0, i - 4):i + 1], axis=0) for i in range(len(points))]
            panel.plot(*zip(*points), color=color, marker=marker, lw=2 * weight, alpha=weight)
        ends.append((*points[-1], folder.name, color))
    right = max((end[0] for end in ends), default=1)
    height = 0
    for minutes, accuracy, name, color in sorted(ends, key=lambda end: end[1]):
        height = max(accuracy, height + 4)  # names stand in a column and do not overlap
        panel.annotate(name, (minutes, accuracy), (1.07 * right, height), color=color, va="center",
                       arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "ls": ":"})
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(0, 1.5 * right)


if __name__ == "__main__":
    main()

"""Draw the losses of the main job: of the uninterrupted run, of the legs of the other, and how far they are apart.

    python examples/losses.py lightning_logs/main_job losses.svg

Needs matplotlib: pip install -e '.[bench]'.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from main_job import LEGS, Job

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's blue, vermilion and green
WHOLE, INK, FAINT, LINE = "#C4C4C4", "#222222", "#666666", "#DDDDDD"
UNIT = 1e-7


def draw(folder: Path, picture: Path) -> None:
    """Write the picture of the job in a folder."""
    job = Job(folder, steps_per_epoch=0)
    whole = job.losses(LEGS[0].name)
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 10, "text.color": INK})
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(9, 4.6), height_ratios=(3, 1), layout="constrained"
    )
    above.plot([step + 1 for step in whole], list(whole.values()), color=WHOLE, linewidth=4, label="uninterrupted")
    for leg, color in zip(LEGS[1:], COLORS, strict=True):
        losses = job.losses(leg.name)
        steps = [step + 1 for step in losses]
        above.plot(steps, list(losses.values()), color=color, linewidth=1.1)
        below.plot(
            steps,
            [abs(loss - whole[step]) / UNIT for step, loss in losses.items()],
            linestyle="none",
            marker="o",
            markersize=2.5,
            color=color,
            clip_on=False,
        )
        middle = (steps[0] + steps[-1]) / 2
        label = f"{leg.name} leg\n" + leg.topology.replace(": ", ":\n")
        above.text(middle, 0.94, label, transform=above.get_xaxis_transform(), ha="center", va="top", color=color)
        for axes in (above, below):
            axes.axvline(steps[-1] + 0.5, color=LINE, linewidth=1, zorder=0)
    above.set(ylabel="nats per byte", xlim=(1, len(whole)))
    above.legend(loc="lower left", frameon=False, labelcolor=FAINT)
    below.set(ylabel="difference, 1e-7", xlabel="step", ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(colors=FAINT, length=2)
        axes.yaxis.label.set_color(FAINT)
        axes.xaxis.label.set_color(FAINT)
    figure.savefig(picture, dpi=150, facecolor="white", metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/losses.py FOLDER PICTURE")
    draw(Path(sys.argv[1]), Path(sys.argv[2]))

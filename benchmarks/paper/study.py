"""What the figures have in common: options, means over seeds with intervals, the table, the picture and the JSON."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import runs

from trl_ulorl.cli.inputs import count

FIGURES = runs.ROOT / "outputs" / "paper"
SEEDS = 3

# Student's t at 97.5 %, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Arm:
    """One curve: a name and what it changes in the shared setting.

    Args:
        label: Name in legend and table.
        overrides: See `runs.setting`.
        row: Row of the picture, where a figure has several; arms of a row are compared with its first.
    """

    label: str
    overrides: dict[str, Any] = field(default_factory=dict)
    row: str = ""

    @property
    def name(self) -> str:
        return f"{self.row}, {self.label}" if self.row else self.label


@dataclass(frozen=True)
class Panel:
    """One plot of a row.

    Args:
        metric: Column of the runs' history.
        label: Of the vertical axis.
        line: Height of a horizontal line by row, or for all rows, such as the target entropy.
        x: Column of the horizontal axis.
        x_label: What the horizontal axis says.
    """

    metric: str
    label: str
    line: dict[str, float] | float | None = None
    x: str = "step"
    x_label: str = "optimizer step"

    @property
    def key(self) -> str:
        return self.metric if self.x == "step" else f"{self.metric} by {self.x}"


ENTROPY = Panel("entropy", "mean token entropy (nats)")
ACCURACY = Panel("accuracy", "completed rollouts that are right")

Run = dict[str, Any]


def entropy_at_end(run: Run) -> float:
    """Mean entropy over the last quarter of the steps."""
    entropies = [entry["entropy"] for entry in run["history"]]
    return float(np.mean(entropies[-math.ceil(len(entropies) / 4) :]))


FINALS: dict[str, Callable[[Run], float]] = {
    "accuracy": lambda run: run["accuracy"],
    "entropy at the end": entropy_at_end,
    "CPU seconds": lambda run: run["cpu_seconds"],
}
"""Columns of the table; accuracy is avg@k on held-out problems after training."""


# -------------------------------------------------------------------------------------------------------------- options


def options(
    doc: str | None, add: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    """Parse the options that every script has, and those that `add` adds; without any it makes the documented figure."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, help="optimizer steps of every run (default: the figure's own)")
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"runs of every arm (default: {SEEDS})")
    parser.add_argument("--problems", type=count, help="held-out problems (default: the demo's 256)")
    parser.add_argument("--jobs", type=count, default=2, help="runs at once, one thread each (default: 2)")
    parser.add_argument(
        "--output", type=Path, default=FIGURES, help="folder for JSON and PNG (default: outputs/paper)"
    )
    add(parser)
    chosen = parser.parse_args()
    if chosen.seeds > len(_T) + 1:
        parser.error(f"--seeds ({chosen.seeds}) must be at most {len(_T) + 1}: the interval is tabulated up to there")
    return chosen


def make_runs(arms: Sequence[Arm], chosen: argparse.Namespace) -> dict[str, list[Run]]:
    """Return every arm's runs, one per seed, by the arm's name."""
    reduced = {
        name: value
        for name, value in {"max_steps": chosen.steps, "eval_problems": chosen.problems}.items()
        if value is not None
    }
    seeds = range(1, chosen.seeds + 1)
    # Seed by seed: a study that is stopped early has whole comparisons.
    settings = [runs.setting({**arm.overrides, **reduced}, seed) for seed in seeds for arm in arms]
    done = runs.complete(settings, jobs=chosen.jobs)
    return {arm.name: done[index :: len(arms)] for index, arm in enumerate(arms)}


# ------------------------------------------------------------------------------------------------------- means and intervals


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the seeds' values and the bounds of its 95 % interval by Student's t; with one seed, no bounds."""
    mean = float(np.mean(values))
    half = None
    if len(values) > 1:
        half = _T[len(values) - 2] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    bounds = {"low": None, "high": None} if half is None else {"low": _short(mean - half), "high": _short(mean + half)}
    return {"mean": _short(mean), **bounds, "each": [_short(value) for value in values]}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def curve(done: Sequence[Run], metric: str, x: str = "step") -> dict[str, list[float]] | None:
    """Return a metric along the runs: the mean over the seeds of each run's running mean, with its interval.

    A step has few groups, so a run's curve is its mean over the last eighth of the run. None if a run has no such metric.
    """
    series = [[entry.get(metric, math.nan) for entry in run["history"]] for run in done]
    if any(all(map(math.isnan, each)) for each in series):
        return None
    values = np.array([running_mean(each) for each in series])
    points = [interval(column.tolist()) for column in values.T]
    along = np.mean([[entry[x] for entry in run["history"]] for run in done], axis=0)
    result = {"x": [_short(value) for value in along], "mean": [point["mean"] for point in points]}
    if len(done) > 1:
        result |= {bound: [point[bound] for point in points] for bound in ("low", "high")}
    return result


def running_mean(values: Sequence[float]) -> list[float]:
    """Average each value with those before it, an eighth of the series in all; a NaN, where nothing was logged, is left out."""
    width = max(1, len(values) // 8)
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if not math.isnan(value)]
        means.append(float(np.mean(window)) if window else means[-1] if means else math.nan)
    return means


# ---------------------------------------------------------------------------------------------------------------- figures


def summary(
    arms: Sequence[Arm],
    done: dict[str, list[Run]],
    panels: Sequence[Panel],
    finals: dict[str, Callable[[Run], float]] = FINALS,
) -> dict[str, Any]:
    """Return what the JSON file holds of the arms: settings, curves, final figures, and differences from the row's first.

    Differences are taken seed by seed: runs of a seed draw the same problems.
    """
    first = {arm.row: arm.name for arm in reversed(arms)}
    result = {}
    for arm in arms:
        each, base = done[arm.name], done[first[arm.row]]
        result[arm.name] = {
            "row": arm.row,
            "label": arm.label,
            "overrides": arm.overrides,
            "finals": {name: interval([final(run) for run in each]) for name, final in finals.items()},
            "standard_error": _short(float(np.mean([run["standard_error"] for run in each]))),
            "curves": {panel.key: curve(each, panel.metric, panel.x) for panel in panels},
        }
        if base is not each:
            result[arm.name]["differences"] = {
                name: interval([final(a) - final(b) for a, b in zip(each, base, strict=True)])
                for name, final in finals.items()
            }
    return result


def save(name: str, content: dict[str, Any], chosen: argparse.Namespace, draw: Callable[[Path], None]) -> None:
    """Write `<name>.json` and the picture beside it."""
    from trl_ulorl.records import write_json

    chosen.output.mkdir(parents=True, exist_ok=True)
    reduced = {key: getattr(chosen, key) for key in ("steps", "seeds", "problems")}
    path = chosen.output / f"{name}.json"
    write_json(path, {"figure": name, "options": reduced, **content})
    draw(chosen.output / f"{name}.png")
    print(f"Saved to {path} and .png")


def draw_curves(arms: Sequence[Arm], content: dict[str, Any], panels: Sequence[Panel]) -> Callable[[Path], None]:
    """Return what draws a row of plots per row of the arms, with a line per arm and its interval as a band."""

    def draw(path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = list(dict.fromkeys(arm.row for arm in arms))
        size = (5 * len(panels), 3.6 * len(rows))
        figure, grid = plt.subplots(len(rows), len(panels), figsize=size, layout="constrained", squeeze=False)
        for row, line_of_axes in zip(rows, grid, strict=True):
            for panel, axes in zip(panels, line_of_axes, strict=True):
                for index, arm in enumerate(arm for arm in arms if arm.row == row):
                    draw_line(axes, content[arm.name]["curves"][panel.key], arm.label, f"C{index}")
                height = panel.line.get(row) if isinstance(panel.line, dict) else panel.line
                if height is not None:
                    axes.axhline(height, color="black", linestyle="--", label=f"sigma = {height:g}")
                axes.set(xlabel=panel.x_label, ylabel=panel.label, title=row)
                axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
            line_of_axes[0].legend(fontsize="small")
        figure.savefig(path, dpi=80)
        plt.close(figure)

    return draw


def draw_line(axes: Any, points: dict[str, list[float]] | None, label: str, color: str) -> None:
    if points is None:
        return
    axes.plot(points["x"], points["mean"], label=label, color=color, marker="o" if len(points["x"]) < 5 else "")
    if "low" in points:
        axes.fill_between(points["x"], points["low"], points["high"], color=color, alpha=0.15, linewidth=0)


def table(arms: dict[str, Any]) -> str:
    """Return the final figures as a Markdown table: mean and half-width of the interval, and the difference in accuracy."""
    names = list(next(iter(arms.values()))["finals"])
    lines = ["| arm | " + " | ".join(names) + " | accuracy - first arm's |", "|---" * (len(names) + 2) + "|"]
    for name, arm in arms.items():
        cells = [cell(value) for value in arm["finals"].values()]
        cells.append(cell(arm["differences"]["accuracy"]) if "differences" in arm else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(value: dict[str, Any]) -> str:
    digits = 0 if abs(value["mean"]) >= 10 else 3
    text = f"{value['mean']:.{digits}f}"
    return text if value["high"] is None else f"{text} ± {value['high'] - value['mean']:.{digits}f}"


def figure(
    name: str,
    doc: str | None,
    arms: Sequence[Arm],
    panels: Sequence[Panel],
    finals: dict[str, Callable[[Run], float]] = FINALS,
) -> None:
    """Make a figure of curves from the command line's options: the runs, the table, the JSON and the picture."""
    labels = list(dict.fromkeys(arm.label for arm in arms))

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--arms", nargs="+", choices=labels, metavar="ARM", help=f"some of {labels} (default: all)"
        )

    chosen = options(doc, add)
    arms = [arm for arm in arms if arm.label in (chosen.arms or labels)]
    content = summary(arms, make_runs(arms, chosen), panels, finals)
    print(table(content))
    save(name, {"arms": content}, chosen, draw_curves(arms, content, panels))

"""Pictures of a run, from the trainer's log history and `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no screen is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

_MAX_ROLLOUTS = 240  # rows that a timeline can show


def rollout_lengths(records: Sequence[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the completion tokens of every rollout in the records."""
    return np.array([_length(r) for record in records for r in record["rollouts"]], dtype=np.int64)


def _length(rollout: dict[str, Any]) -> int:
    return sum(length for _, length in rollout["segments"])


def save_plots(history: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], folder: str | Path) -> list[Path]:
    """Draw accuracy, entropy, masked share, output lengths and the timeline of rollouts.

    Args:
        history: `trainer.state.log_history`.
        records: Records of `rollouts.jsonl`.
        folder: Where the PNG files go.

    Returns:
        The files.
    """
    drawings: dict[str, Callable[[Axes], None]] = {
        "accuracy.png": lambda axes: _draw_curve(
            axes, history, "accuracy", "share of completed rollouts that are right"
        ),
        "entropy.png": lambda axes: _draw_entropy(axes, history),
        "masked.png": lambda axes: _draw_curve(
            axes, history, "dmmpts/masked_frac", "share of tokens masked by DMMPTs"
        ),
        "lengths.png": lambda axes: _draw_lengths(axes, records),
        "timeline.png": lambda axes: _draw_timeline(axes, records),
    }
    paths = []
    for name, draw in drawings.items():
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        draw(axes)
        paths.append(Path(folder) / name)
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _series(history: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[name]) for entry in history if entry.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_curve(axes: Axes, history: Sequence[dict[str, Any]], name: str, label: str) -> None:
    steps, values = _series(history, name)
    marker = "o" if len(values) < 5 else ""
    axes.plot(steps, values, marker=marker, color="tab:blue", alpha=0.35, label="each step")
    if len(values) >= 10:  # each step has few groups, so the curve is read from its running mean
        width = max(3, len(values) // 10)
        means = [float(np.mean(values[max(0, i - width + 1) : i + 1])) for i in range(len(values))]
        axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {width} steps")
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_entropy(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    _draw_curve(axes, history, "entropy", "mean token entropy (nats)")
    _, sigmas = _series(history, "dmmpts/sigma")
    if sigmas:
        axes.axhline(sigmas[-1], color="tab:red", linestyle="--", label=f"target sigma = {sigmas[-1]:g}")
        axes.legend()


def _draw_lengths(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    by_outcome = {
        outcome: rollout_lengths([record for record in records if record["outcome"] == outcome])
        for outcome in ("trained", "filtered", "set_aside")
    }
    by_outcome = {outcome: lengths for outcome, lengths in by_outcome.items() if lengths.size}
    if by_outcome:
        top = max(int(lengths.max()) for lengths in by_outcome.values())
        names = [f"{name.replace('_', ' ')} ({lengths.size})" for name, lengths in by_outcome.items()]
        axes.hist(list(by_outcome.values()), bins=np.linspace(0, top + 1, 40).tolist(), stacked=True, label=names)
        lengths = np.concatenate(list(by_outcome.values()))
        for percent, style in ((50, "-"), (99, "--")):
            value = np.percentile(lengths, percent)
            axes.axvline(value, color="black", linestyle=style, label=f"p{percent} = {value:.0f}")
        axes.legend()
    axes.set(xlabel="completion tokens", ylabel="rollouts", yscale="log")


def _draw_timeline(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """One row per rollout, one bar per segment: as long as its tokens, from the left, coloured by its policy version.

    Shown are the trained groups of the middle of the run, in order of admission.
    """
    trained = sorted((r for r in records if r["outcome"] == "trained"), key=lambda record: record["group"])
    if not trained:
        axes.set_title("no group was trained on")
        return
    per_group = len(trained[0]["rollouts"])
    count = max(1, _MAX_ROLLOUTS // per_group)
    middle = max(0, (len(trained) - count) // 2)
    shown = trained[middle : middle + count]
    bars, versions, row = [], [], 0
    for record in shown:
        for rollout in record["rollouts"]:
            start = 0
            for version, length in rollout["segments"]:
                bars.append([(start, row), (start + length, row)])
                versions.append(version)
                start += length
            row += 1
    colors = Normalize(min(versions), max(versions) if max(versions) > min(versions) else min(versions) + 1)
    lines = LineCollection(bars, array=np.array(versions), cmap="viridis", norm=colors, linewidths=1.4)
    axes.add_collection(lines)
    axes.set(xlim=(0, 1.02 * max(bar[1][0] for bar in bars)), ylim=(row, -1))
    axes.set(xlabel="completion tokens", ylabel=f"rollouts, {per_group} per prompt, in order of admission")
    axes.set_title(f"{len(shown)} trained groups from the middle of the run: a bar per rollout, a colour per policy")
    label = "policy version that sampled the segment"
    axes.figure.colorbar(ScalarMappable(colors, "viridis"), ax=axes, label=label, ticks=MaxNLocator(integer=True))

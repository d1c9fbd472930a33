"""What a training run came to: `summary.json`, plots, and a few lines for the terminal."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from shutil import which
from typing import Any, cast

import numpy as np

from ..config import DMMPTsConfig
from ..evaluation import EvaluationCallback, EvaluationResult
from ..plots import rollout_lengths, save_plots
from ..records import ROLLOUTS, read_lines, write_json
from ..report.statistics import phase_seconds
from ..trainer import UloRLTrainer


def finish(trainer: UloRLTrainer, evaluation: EvaluationCallback | None) -> None:
    """Write summary.json and the plots, and print what the run came to."""
    before, after = (evaluation.before, evaluation.after) if evaluation else (None, None)
    folder = Path(cast(str, trainer.args.output_dir))
    history = trainer.state.log_history
    log = folder / ROLLOUTS
    records = read_lines(log) if log.exists() else []
    lengths = rollout_lengths(records)
    entropies = [entry["entropy"] for entry in history if entry.get("entropy") is not None]
    third = max(1, len(entropies) // 3)  # as in the report
    batches_per_step = trainer.args.gradient_accumulation_steps / trainer.args.micro_steps_per_batch
    times = phase_seconds(history, batches_per_step)
    summary: dict[str, Any] = {
        "steps": trainer.state.global_step,
        "train_seconds": sum(times.values()),  # of a run that was resumed, of all its parts
        "phase_seconds": times,
        "sigma": trainer.args.dmmpts.sigma if isinstance(trainer.args.dmmpts, DMMPTsConfig) else None,
        "entropy_first_third": _mean(entropies[:third]),
        "entropy_last_third": _mean(entropies[-third:]),
        "lengths": {
            "p50": float(np.percentile(lengths, 50)),
            "p99": float(np.percentile(lengths, 99)),
            "max": int(lengths.max()),
        }
        if lengths.size
        else None,
        "ledger": trainer.ledger(),
    }
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            summary[f"accuracy_{name}"] = result.accuracy
            summary[f"standard_error_{name}"] = result.standard_error
            summary[f"truncated_{name}"] = result.truncated_fraction
            summary[f"length_mean_{name}"] = float(result.lengths.mean())
    write_json(folder / "summary.json", summary)
    plots = save_plots(history, records, folder)

    lines = [""]
    if evaluation is not None and after is not None:
        lines += _table(before, after, evaluation.k)
    lines += _ledger(summary["ledger"])
    lines.append("Where the time went: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items()))
    if summary["lengths"] and entropies:
        sigma = "off" if summary["sigma"] is None else f"{summary['sigma']:g}"
        lines.append(
            f"Output lengths: median {summary['lengths']['p50']:.0f}, p99 {summary['lengths']['p99']:.0f} tokens. "
            f"Entropy in the last third of the steps: {summary['entropy_last_third']:.3f} nats (sigma {sigma})."
        )
    lines.append(f"Saved to {folder}: the model, summary.json, {', '.join(path.name for path in plots)}")
    lines.append(f"All of it in one page: {_command()} report {folder}")
    sys.stdout.write("\n".join(lines) + "\n")


def _command() -> str:
    """Return how to call the command line here: it may be in an environment that is not on the path."""
    return "trl-ulorl" if which("trl-ulorl") else os.path.relpath(Path(sys.executable).with_name("trl-ulorl"))


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _table(before: EvaluationResult | None, after: EvaluationResult, k: int) -> list[str]:
    lines = [
        f"Held-out problems: {len(after.is_correct)}, {k} answers each",
        f"            avg@{k:<3} standard error   truncated   mean length",
    ]
    for name, result in (("before", before), ("after", after)):
        if result is None:
            continue
        lines.append(
            f"  {name:8}  {100 * result.accuracy:5.1f} %  {_points(result.standard_error):>12}   "
            f"{result.truncated_fraction:8.1%}   {result.lengths.mean():8.1f}"
        )
    if before is not None:
        lines.append(f"  gain      {100 * (after.accuracy - before.accuracy):+5.1f} points")
    return lines


def _points(error: float) -> str:
    return "-" if math.isnan(error) else f"{100 * error:.1f}"


def _ledger(ledger: dict[str, dict[str, int]]) -> list[str]:
    lines = ["Ledger, in which the first number is the sum of the others:"]
    for part, entries in ledger.items():
        (first, total), *rest = entries.items()
        lines.append(f"  {part}: {total} {first} = " + " + ".join(f"{n} {name.replace('_', ' ')}" for name, n in rest))
    return lines

"""The charts of what the trainer logged, of the ledger, the times and the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..records import finite
from . import statistics
from .charts import LIGHT, NO_LOG, PERCENT, STEP, Chart, Line, chart_of_lines, make_figure, plain_label
from .run import Run
from .statistics import Series


def curves(run: Run) -> list[Chart]:
    """Return the charts of what the trainer logged about the policy."""
    return [draw(run) for draw in (_accuracy, _entropy, _masked, _lengths, _truncated, _optimisation)]


def _accuracy(run: Run) -> Chart:
    evaluations = [entry for entry in run.history or () if "eval_avg_at_k" in entry]
    extra = []
    if evaluations:
        extra.append(
            go.Scatter(
                x=[entry["step"] for entry in evaluations],
                y=[entry["eval_avg_at_k"] for entry in evaluations],
                error_y={"type": "data", "array": finite([entry["eval_standard_error"] for entry in evaluations])},
                name="held-out problems",
                mode="markers",
                marker={"color": LIGHT["vermilion"], "symbol": "diamond", "size": 9},
            )
        )
    return chart_of_lines(
        run,
        "accuracy",
        "Accuracy",
        "Share of right completions among the groups completed in a step, before any is filtered; held-out problems as avg@k "
        "with one standard error.",
        [Line("accuracy", "completed groups", "blue")],
        "share right",
        extra=extra,
        y_axis=PERCENT,
    )


def _entropy(run: Run) -> Chart:
    sigma = statistics.series(run.history or (), "dmmpts/sigma")
    if len(sigma) and (sigma.values == sigma.values[0]).all():
        sigma = Series(sigma.steps[[0, -1]], sigma.values[[0, -1]])  # a straight line
    shown = sigma.thinned()
    line = {"color": LIGHT["vermilion"], "dash": "dash"}
    extra = (
        [go.Scatter(x=shown.steps, y=shown.values, name="target sigma", mode="lines", line=line)] if len(sigma) else []
    )
    return chart_of_lines(
        run,
        "entropy",
        "Entropy against sigma",
        "Mean token entropy of the trained completions. Below sigma DMMPTs stop pushing mastered tokens up; sigma is no set point.",
        [Line("entropy", "token entropy", "blue")],
        "nats per token",
        extra=extra,
    )


def _masked(run: Run) -> Chart:
    return chart_of_lines(
        run,
        "masked",
        "Masked share",
        "Tokens that DMMPTs left out of the update, and responses whose entropy was below sigma.",
        [
            Line("dmmpts/masked_frac", "masked tokens", "blue"),
            Line("dmmpts/low_entropy_frac", "responses below sigma", "orange"),
        ],
        "share",
        y_axis=PERCENT,
    )


def _lengths(run: Run) -> Chart:
    return chart_of_lines(
        run,
        "lengths",
        "Completion lengths",
        "Mean of the groups completed in a step and of the batch that was trained on. The first steps train on shorter "
        "completions, as the long ones are still held.",
        [
            Line("rollout/completed_length_mean", "completed, mean", "blue"),
            Line("completions/mean_length", "trained, mean", "orange"),
            Line("completions/max_length", "trained, longest", "grey"),
            Line("eval_mean_length", "held-out, mean", "vermilion"),
        ],
        "tokens",
    )


def _truncated(run: Run) -> Chart:
    return chart_of_lines(
        run,
        "truncated",
        "Truncation",
        "Completions that reached the length limit without an end.",
        [
            Line("rollout/truncated_frac", "completed", "blue"),
            Line("completions/clipped_ratio", "trained", "orange"),
            Line("eval_truncated_fraction", "held-out", "vermilion"),
        ],
        "share truncated",
        y_axis=PERCENT,
    )


def _optimisation(run: Run) -> Chart:
    return chart_of_lines(
        run,
        "gradient",
        "Gradient norm",
        "Before clipping. Spikes that grow are the first sign of a run that will be lost.",
        [Line("grad_norm", "gradient norm", "blue")],
        "norm",
    )


def drift(run: Run) -> list[Chart]:
    """Return the charts of the pools and of the drift of stale tokens."""
    return [draw(run) for draw in (_pools, _importance, _kl_by_age)]


def _pools(run: Run) -> Chart:
    return chart_of_lines(
        run,
        "pools",
        "Pools",
        "Groups that are held after each step, and the age of the oldest unfinished one.",
        [
            Line("rollout/unfinished_groups", "unfinished groups", "blue"),
            Line("rollout/ready_groups", "ready groups", "orange"),
            Line("rollout/oldest_group_age", "oldest group, versions", "grey"),
        ],
        "groups, versions",
    )


def _importance(run: Run) -> Chart:
    lines = [
        Line("importance/stale_kl", "KL per token", "blue"),
        Line("importance/stale_clip_frac", "share that SAIS would clip", "orange"),
    ]
    return chart_of_lines(
        run,
        "importance",
        "Drift of stale tokens",
        "How far the policy has moved since the batch's tokens of age above 0 were sampled. POIS assumes that it is zero.",
        lines,
        "nats; share",
    )


def _kl_by_age(run: Run) -> Chart:
    kl, ess = statistics.by_age(run.history or (), "kl"), statistics.by_age(run.history or (), "ess")
    figure = None
    if kl:
        hover = [
            f"age {age}: KL {kl[age]:.2g} nats, effective sample size {ess.get(age, float('nan')):.3f}" for age in kl
        ]
        bars = go.Bar(
            x=list(kl), y=list(kl.values()), hovertext=hover, hoverinfo="text", marker={"color": LIGHT["blue"]}
        )
        figure = make_figure([bars], "age in policy versions", "KL in nats per token", x_axis={"type": "category"})
    return Chart(
        "kl-by-age",
        "Drift by age",
        "KL between the sampling policy and the current one, mean of the last third of the steps. Age 0 is what decoding "
        "and training disagree on.",
        figure,
        NO_LOG if run.history is None else "No `importance/kl_age_…` is in the run's log.",
    )


def ledger(balance: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Draw groups and tokens of a ledger as two bars of parts."""
    colours = {
        "trained": "blue",
        "filtered": "orange",
        "set_aside": "vermilion",
        "ready": "green",
        "unfinished": "grey",
        "held": "grey",
    }
    patterns = {"filtered": "/", "set_aside": "x", "ready": ".", "unfinished": "\\", "held": "\\"}
    traces = []
    for name, colour in colours.items():
        counts = [balance[part].get(name, 0) for part in ("tokens", "groups")]
        if not any(counts):
            continue
        totals = [max(1, next(iter(balance[part].values()))) for part in ("tokens", "groups")]
        traces.append(
            go.Bar(
                y=["tokens", "groups"],
                x=[count / total for count, total in zip(counts, totals, strict=True)],
                orientation="h",
                name=name.replace("_", " "),
                marker={"color": LIGHT[colour], "pattern": {"shape": patterns.get(name, "")}},
                hovertext=[
                    f"{count:,} {part} {name}" for count, part in zip(counts, ("tokens", "groups"), strict=True)
                ],
                hoverinfo="text",
            )
        )
    return make_figure(
        traces,
        "share",
        "",
        x_axis={**PERCENT, "range": [0, 1]},
        barmode="stack",
        height=210,
        legend={"traceorder": "normal"},
    )


def times(run: Run) -> Chart:
    """Draw the seconds of the steps by phase."""
    steps, parts = statistics.phase_series(run.history or (), run.batches_per_step)
    figure = None
    if len(steps):
        labels = {
            "decode": "decoding",
            "score": "waiting for rewards",
            "exchange": "waiting for ranks",
            "update": "update",
        }
        colours = {"decode": "blue", "score": "vermilion", "exchange": "purple", "update": "orange"}
        traces = []
        for name, seconds in parts.items():
            shown = Series(steps, seconds).thinned()
            if np.any(seconds > 0):
                traces.append(
                    go.Scatter(
                        x=shown.steps,
                        y=np.maximum(shown.values, 0.0),
                        name=labels[name],
                        mode="lines",
                        stackgroup="time",
                        line={"color": LIGHT[colours[name]], "width": 1},
                    )
                )
        figure = make_figure(traces, STEP, "seconds per step", hovermode="x unified", legend={"traceorder": "normal"})
    missing = NO_LOG if run.history is None else "No `step_time` is in the run's log."
    return Chart("times", "Time by phase", "Seconds of each step on the main process.", figure, missing)


def stages(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw the verifier's stages as bars of right, wrong and undecided."""
    shown = list(reversed(rows))
    traces = []
    for name, colour, pattern in (("right", "green", ""), ("wrong", "vermilion", "/"), ("undecided", "grey", ".")):
        if any(row[name] for row in rows):
            traces.append(
                go.Bar(
                    y=[plain_label(row["stage"]) for row in shown],
                    x=[row[name] for row in shown],
                    name=name,
                    orientation="h",
                    marker={"color": LIGHT[colour], "pattern": {"shape": pattern}},
                )
            )
    return make_figure(
        traces,
        "rollouts",
        "",
        y_axis={"automargin": True},
        barmode="stack",
        height=120 + 34 * len(rows),
        legend={"traceorder": "normal"},
    )

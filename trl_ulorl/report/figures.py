"""The report's charts as plotly figures, in JSON values. Colours are those of the light page; the page's script changes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from . import statistics
from .run import Ints, Run
from .statistics import Series

# Okabe and Ito's colours, which people with any colour vision tell apart; the second of each pair is for a dark page.
COLOURS = {
    "blue": ("#0072b2", "#6db9f0"),
    "vermilion": ("#d55e00", "#f58f4a"),
    "green": ("#009e73", "#3fcf9f"),
    "orange": ("#c98500", "#f2c14e"),
    "purple": ("#a8508a", "#e3a3c7"),
    "grey": ("#6b7280", "#9aa3af"),
}
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}
# Viridis without its darkest part, which a dark page would swallow.
_VERSIONS = [[0.0, "#3b528b"], [0.33, "#21918c"], [0.67, "#5ec962"], [1.0, "#fde725"]]
_DASHES = ("solid", "dash", "dot", "dashdot")
_STEP = "optimizer step"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, or why there is none.

    Args:
        name: Id in the page.
        title: Heading.
        note: What is seen, in a sentence or two.
        figure: `data` and `layout`; None where it was not recorded.
        missing: What to do so that it is recorded.
        is_wide: Whether it takes the page's width.
    """

    name: str
    title: str
    note: str
    figure: dict[str, Any] | None
    missing: str = ""
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    metric: str
    label: str
    colour: str


def _figure(
    traces: Sequence[Any],
    x: str,
    y: str,
    *,
    x_axis: dict[str, Any] | None = None,
    y_axis: dict[str, Any] | None = None,
    **layout: Any,
) -> dict[str, Any]:
    figure = go.Figure(
        data=list(traces),
        layout={
            "xaxis": {"title": {"text": x}, **(x_axis or {})},
            "yaxis": {"title": {"text": y}, "rangemode": "tozero", **(y_axis or {})},
            **layout,
        },
    )
    values: dict[str, Any] = json.loads(figure.to_json())
    values["layout"].pop("template", None)  # plotly's own; the page has one for each scheme
    return values


def _curves(values: Series, label: str, colour: str, dash: str = "solid") -> list[Any]:
    """Draw what was logged faintly and its running mean strongly, or the logged values alone where they are few."""
    mean = values.running_mean()
    shown = values.thinned()
    if mean is None:
        line = {"color": _LIGHT[colour], "dash": dash}
        return [go.Scatter(x=shown.steps, y=shown.values, name=label, mode="lines+markers", line=line)]
    averaged = mean.thinned()
    return [
        go.Scatter(
            x=shown.steps,
            y=shown.values,
            name=label,
            mode="lines",
            line={"color": _LIGHT[colour], "width": 1},
            opacity=0.35,
            showlegend=False,
            hoverinfo="skip",
            legendgroup=label,
        ),
        go.Scatter(
            x=averaged.steps,
            y=averaged.values,
            name=label,
            mode="lines",
            legendgroup=label,
            line={"color": _LIGHT[colour], "width": 2.2, "dash": dash},
        ),
    ]


def _chart_of_lines(
    run: Run,
    name: str,
    title: str,
    note: str,
    lines: Sequence[_Line],
    y: str,
    *,
    extra: Sequence[Any] = (),
    **layout: Any,
) -> Chart:
    history = run.history or ()
    traces = list(extra)
    for line, dash in zip(lines, _DASHES, strict=False):
        values = statistics.series(history, line.metric)
        if len(values):
            traces += _curves(values, line.label, line.colour, dash)
    figure = _figure(traces, _STEP, y, hovermode="x unified", **layout) if traces else None
    missing = f"None of {', '.join(f'`{line.metric}`' for line in lines)} is in the run's log."
    return Chart(name, title, note, figure, _NO_LOG if run.history is None else missing)


_NO_LOG = (
    "The run left no log. `UloRLTrainer` writes `metrics.jsonl` as it trains, and every checkpoint holds a "
    "`trainer_state.json`: train again, or keep a checkpoint."
)
_NO_ROLLOUTS = "The run left no `rollouts.jsonl`. It is written unless `log_rollouts` is False: leave that at True."
_PERCENT = {"tickformat": ".0%"}


# ----------------------------------------------------------------------------------------------------------- the curves


def _accuracy(run: Run) -> Chart:
    evaluations = [entry for entry in run.history or () if "eval_avg_at_k" in entry]
    extra = []
    if evaluations:
        extra.append(
            go.Scatter(
                x=[entry["step"] for entry in evaluations],
                y=[entry["eval_avg_at_k"] for entry in evaluations],
                error_y={"type": "data", "array": [entry["eval_standard_error"] for entry in evaluations]},
                name="held-out problems",
                mode="markers",
                marker={"color": _LIGHT["vermilion"], "symbol": "diamond", "size": 9},
            )
        )
    return _chart_of_lines(
        run,
        "accuracy",
        "Accuracy",
        "Share of right completions among the groups completed in a step, before any is filtered; held-out problems as avg@k "
        "with one standard error.",
        [_Line("accuracy", "completed groups", "blue")],
        "share right",
        extra=extra,
        y_axis=_PERCENT,
    )


def _entropy(run: Run) -> Chart:
    sigma = statistics.series(run.history or (), "dmmpts/sigma")
    extra = []
    if len(sigma):
        ends = sigma.thinned(2) if len(set(sigma.values)) == 1 and len(sigma) > 1 else sigma.thinned()
        steps = [sigma.steps[0], sigma.steps[-1]] if len(set(sigma.values)) == 1 else ends.steps
        values = [sigma.values[0], sigma.values[-1]] if len(set(sigma.values)) == 1 else ends.values
        line = {"color": _LIGHT["vermilion"], "dash": "dash"}
        extra.append(go.Scatter(x=steps, y=values, name="target sigma", mode="lines", line=line))
    return _chart_of_lines(
        run,
        "entropy",
        "Entropy against sigma",
        "Mean token entropy of the trained completions. Below sigma DMMPTs stop pushing mastered tokens up; sigma is no set point.",
        [_Line("entropy", "token entropy", "blue")],
        "nats per token",
        extra=extra,
    )


def _masked(run: Run) -> Chart:
    return _chart_of_lines(
        run,
        "masked",
        "Masked share",
        "Tokens that DMMPTs left out of the update, and responses whose entropy was below sigma.",
        [
            _Line("dmmpts/masked_frac", "masked tokens", "blue"),
            _Line("dmmpts/low_entropy_frac", "responses below sigma", "orange"),
        ],
        "share",
        y_axis=_PERCENT,
    )


def _lengths(run: Run) -> Chart:
    return _chart_of_lines(
        run,
        "lengths",
        "Completion lengths",
        "Mean of the groups completed in a step and of the batch that was trained on. The first steps train on shorter "
        "completions, as the long ones are still held.",
        [
            _Line("rollout/completed_length_mean", "completed, mean", "blue"),
            _Line("completions/mean_length", "trained, mean", "orange"),
            _Line("completions/max_length", "trained, longest", "grey"),
            _Line("eval_mean_length", "held-out, mean", "vermilion"),
        ],
        "tokens",
    )


def _truncated(run: Run) -> Chart:
    return _chart_of_lines(
        run,
        "truncated",
        "Truncation",
        "Completions that reached the length limit without an end.",
        [
            _Line("rollout/truncated_frac", "completed", "blue"),
            _Line("completions/clipped_ratio", "trained", "orange"),
            _Line("eval_truncated_fraction", "held-out", "vermilion"),
        ],
        "share truncated",
        y_axis=_PERCENT,
    )


def _optimisation(run: Run) -> Chart:
    return _chart_of_lines(
        run,
        "gradient",
        "Gradient norm",
        "Before clipping. Spikes that grow are the first sign of a run that will be lost.",
        [_Line("grad_norm", "gradient norm", "blue")],
        "norm",
    )


# --------------------------------------------------------------------------------------------------------- the rollouts


def _timeline(run: Run, place: str, records: Sequence[dict[str, Any]]) -> Chart:
    """One row per rollout; a bar per segment, from the left, as long as its tokens and coloured by its version."""
    starts, lengths, rows, versions, texts = [], [], [], [], []
    ends: list[tuple[int, bool]] = []
    for record in records:
        for index, rollout in enumerate(record["rollouts"]):
            start, row = 0, len(ends)
            for number, (version, length) in enumerate(rollout["segments"], 1):
                starts.append(start)
                lengths.append(length)
                rows.append(row)
                versions.append(version)
                texts.append(
                    f"group {record['group']}, rollout {index + 1}, segment {number}: {length} tokens by version "
                    f"{version}, trained in step {record['left'] + 1}"
                )
                start += length
            ends.append((start, rollout["finish"] == "length"))
    low, high = min(versions), max(max(versions), min(versions) + 1)
    # plotly warns on the console about each bar whose colour is a number, so the scale belongs to a point that isn't seen.
    colours = sample_colorscale(_VERSIONS, [(version - low) / (high - low) for version in versions])
    bars = go.Bar(
        base=starts,
        x=lengths,
        y=rows,
        orientation="h",
        hovertext=texts,
        hoverinfo="text",
        showlegend=False,
        marker={"color": colours, "line": {"width": 0}},
    )
    scale = go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker={
            "color": [low],
            "cmin": low,
            "cmax": high,
            "colorscale": _VERSIONS,
            "showscale": True,
            "colorbar": {
                "title": {"text": "policy version", "side": "top", "font": {"size": 13}},
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.0,
                "yanchor": "bottom",
                "thickness": 10,
                "len": 1,
                "outlinewidth": 0,
                "tickvals": sorted({round(each) for each in np.linspace(low, max(versions), 5)}),
            },
        },
    )
    cut = [(end, row) for row, (end, is_cut) in enumerate(ends) if is_cut]
    marks = go.Scatter(
        x=[end for end, _ in cut],
        y=[row for _, row in cut],
        mode="markers",
        name="truncated",
        hoverinfo="skip",
        marker={"symbol": "line-ns", "size": 5, "line": {"width": 2, "color": _LIGHT["vermilion"]}},
    )
    per_group = len(records[0]["rollouts"])
    figure = _figure(
        [bars, scale, *([marks] if cut else [])],
        "completion tokens",
        f"rollouts, {per_group} per prompt",
        y_axis={
            "autorange": "reversed",
            "showticklabels": False,
            "rangemode": "normal",
            "showgrid": False,
            "zeroline": False,
        },
        bargap=0.15,
        barmode="overlay",
        height=430,
    )
    steps = [record["left"] + 1 for record in records]
    when = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    titles = {"all": "All groups", "start": "Start of the run", "middle": "Middle", "end": "End"}
    return Chart(f"timeline-{place}", titles[place], f"{len(records)} groups trained in {when}.", figure)


def timelines(run: Run) -> list[Chart]:
    """Return the timelines of the rollouts, or one that says why there are none."""
    windows = statistics.timeline_windows(run.records or ())
    if windows:
        return [_timeline(run, place, records) for place, records in windows.items()]
    missing = _NO_ROLLOUTS if run.records is None else "No group was trained on."
    return [Chart("timeline", "Rollouts", "", None, missing)]


def _length_axis(edges: Ints) -> dict[str, Any]:
    """Return a logarithmic axis with a label at 1, 2 and 5 of each power of ten."""
    ticks = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]
    shown = [tick for tick in ticks if edges[0] <= tick <= edges[-1]]
    return {
        "type": "log",
        "tickvals": shown,
        "ticktext": [f"{tick // 1000}k" if tick >= 1000 else str(tick) for tick in shown],
    }


def _length_shares(run: Run) -> Chart:
    figure = None
    if run.rollouts is not None:
        bins = statistics.length_bins(run.rollouts)
        edges = bins.edges.astype(float)
        traces = []
        for label, counts, colour, fill in (
            ("finished", bins.finished, "grey", "tozeroy"),
            ("trained", bins.trained, "blue", None),
        ):
            shares = counts / max(1, counts.sum())
            hover = [
                f"{low} to {high - 1} tokens: {count} {label}"
                for low, high, count in zip(bins.edges, bins.edges[1:], counts, strict=False)
            ]
            traces.append(
                go.Scatter(
                    x=edges,
                    y=[*shares, shares[-1]],
                    mode="lines",
                    name=f"{label} ({counts.sum():,})",
                    fill=fill,
                    hovertext=[*hover, hover[-1]],
                    hoverinfo="text",
                    line={"shape": "hv", "color": _LIGHT[colour], "width": 1 if fill else 2.2},
                )
            )
        figure = _figure(
            traces,
            "completion tokens (logarithmic)",
            "share of rollouts",
            x_axis=_length_axis(bins.edges),
            y_axis=_PERCENT,
        )
    return Chart(
        "length-shares",
        "Lengths: finished against trained",
        "Shares of all rollouts whose groups have left the pools, and of those that were trained on. Where the lines part, "
        "lengths are over- or under-represented in the updates.",
        figure,
        _NO_ROLLOUTS,
    )


def _trained_by_length(run: Run) -> Chart:
    figure = None
    if run.rollouts is not None:
        bins = statistics.length_bins(run.rollouts)
        is_filled = bins.finished > 0
        shares = bins.trained[is_filled] / bins.finished[is_filled]
        lows, highs = bins.edges[:-1][is_filled], bins.edges[1:][is_filled] - 1
        overall = bins.trained.sum() / bins.finished.sum()
        centres = np.sqrt(lows * np.maximum(highs, 1.0))
        hover = [
            f"{low} to {high} tokens: {trained} of {finished} trained"
            for low, high, trained, finished in zip(
                lows, highs, bins.trained[is_filled], bins.finished[is_filled], strict=True
            )
        ]
        error = np.sqrt(np.maximum(shares * (1 - shares), 1e-12) / bins.finished[is_filled])
        traces = [
            go.Scatter(
                x=centres,
                y=shares,
                mode="markers",
                name="trained on",
                hovertext=hover,
                hoverinfo="text",
                error_y={"type": "data", "array": error, "thickness": 1},
                marker={"color": _LIGHT["blue"]},
            ),
            go.Scatter(
                x=[centres[0], centres[-1]],
                y=[overall, overall],
                mode="lines",
                name="all lengths",
                hoverinfo="skip",
                line={"color": _LIGHT["vermilion"], "dash": "dash"},
            ),
        ]
        figure = _figure(
            traces,
            "completion tokens (logarithmic)",
            "share of the finished",
            x_axis=_length_axis(bins.edges),
            y_axis=_PERCENT,
        )
    return Chart(
        "trained-by-length",
        "Share trained on, by length",
        "Of the finished rollouts of a length, those that were trained on, with one standard error. Groups of equal rewards "
        "are filtered: those of easy prompts, with short answers, and those of the hardest, with long ones that are all wrong. "
        "A fall with the length beyond that is a bias against long answers.",
        figure,
        _NO_ROLLOUTS,
    )


def _ages(run: Run) -> Chart:
    figure = None
    if run.rollouts is not None:
        counts = statistics.token_ages(run.rollouts)
        traces = []
        for label, tokens, colour, pattern in zip(
            ("finished", "trained"), counts, ("grey", "blue"), ("/", ""), strict=True
        ):
            total = int(tokens.sum())
            traces.append(
                go.Bar(
                    x=np.arange(len(tokens)),
                    y=tokens / max(1, total),
                    name=f"{label} ({total:,} tokens)",
                    marker={"color": _LIGHT[colour], "pattern": {"shape": pattern}},
                    hovertext=[f"age {age}: {count:,} tokens {label}" for age, count in enumerate(tokens)],
                    hoverinfo="text",
                )
            )
        figure = _figure(
            traces,
            "age in policy versions",
            "share of tokens",
            x_axis={"tickformat": "d"},
            y_axis=_PERCENT,
            barmode="group",
        )
    return Chart(
        "ages",
        "Token ages: finished against trained",
        "Versions from a token's sampling to when its group left the pools, by filtering or with its last update. Age 0 is "
        "on-policy.",
        figure,
        _NO_ROLLOUTS,
    )


def _pools(run: Run) -> Chart:
    return _chart_of_lines(
        run,
        "pools",
        "Pools",
        "Groups that are held after each step, and the age of the oldest unfinished one.",
        [
            _Line("rollout/unfinished_groups", "unfinished groups", "blue"),
            _Line("rollout/ready_groups", "ready groups", "orange"),
            _Line("rollout/oldest_group_age", "oldest group, versions", "grey"),
        ],
        "groups, versions",
    )


def _importance(run: Run) -> Chart:
    lines = [
        _Line("importance/stale_kl", "KL per token", "blue"),
        _Line("importance/stale_clip_frac", "share that SAIS would clip", "orange"),
    ]
    return _chart_of_lines(
        run,
        "importance",
        "Drift of stale tokens",
        "How far the policy has moved since the batch's tokens of age above 0 were sampled. POIS takes it for nothing.",
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
            x=list(kl), y=list(kl.values()), hovertext=hover, hoverinfo="text", marker={"color": _LIGHT["blue"]}
        )
        figure = _figure([bars], "age in policy versions", "KL in nats per token", x_axis={"type": "category"})
    return Chart(
        "kl-by-age",
        "Drift by age",
        "KL between the sampling policy and the current one, mean of the last third of the steps. Age 0 is what decoding "
        "and training disagree on.",
        figure,
        _NO_LOG if run.history is None else "No `importance/kl_age_…` is in the run's log.",
    )


# ------------------------------------------------------------------------------------------------------ ledger and time


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
                marker={"color": _LIGHT[colour], "pattern": {"shape": patterns.get(name, "")}},
                hovertext=[
                    f"{count:,} {part} {name}" for count, part in zip(counts, ("tokens", "groups"), strict=True)
                ],
                hoverinfo="text",
            )
        )
    return _figure(
        traces,
        "share",
        "",
        x_axis={**_PERCENT, "range": [0, 1]},
        barmode="stack",
        height=210,
        legend={"traceorder": "normal"},
    )


def _times(run: Run) -> Chart:
    steps, parts = statistics.phase_series(run.history or (), run.description.get("batches_per_step", 1.0))
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
                        line={"color": _LIGHT[colours[name]], "width": 1},
                    )
                )
        figure = _figure(traces, _STEP, "seconds per step", hovermode="x unified", legend={"traceorder": "normal"})
    missing = _NO_LOG if run.history is None else "No `step_time` is in the run's log."
    return Chart("times", "Time by phase", "Seconds of each step on the main process.", figure, missing)


def stages(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw the verifier's stages as bars of right, wrong and undecided."""
    shown = list(reversed(rows))
    traces = []
    for name, colour, pattern in (("right", "green", ""), ("wrong", "vermilion", "/"), ("undecided", "grey", ".")):
        if any(row[name] for row in rows):
            traces.append(
                go.Bar(
                    y=[_plain(row["stage"]) for row in shown],
                    x=[row[name] for row in shown],
                    name=name,
                    orientation="h",
                    marker={"color": _LIGHT[colour], "pattern": {"shape": pattern}},
                )
            )
    return _figure(
        traces,
        "rollouts",
        "",
        y_axis={"automargin": True},
        barmode="stack",
        height=120 + 34 * len(rows),
        legend={"traceorder": "normal"},
    )


def _plain(text: str, limit: int = 40) -> str:
    """Return a label that plotly, which reads some tags in text, shows as it is."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def curves(run: Run) -> list[Chart]:
    """Return the charts of what the trainer logged about the policy."""
    return [draw(run) for draw in (_accuracy, _entropy, _masked, _lengths, _truncated, _optimisation)]


def rollout_charts(run: Run) -> list[Chart]:
    """Return the charts of lengths, ages, pools and drift."""
    return [draw(run) for draw in (_length_shares, _trained_by_length, _ages, _pools, _importance, _kl_by_age)]


def times(run: Run) -> Chart:
    """Return the chart of the phases."""
    return _times(run)


def templates() -> dict[str, Any]:
    """Return plotly's template for the light and the dark page."""
    axis = {"automargin": True, "exponentformat": "power", "title": {"standoff": 6, "font": {"size": 13}}}
    return {
        scheme: {
            "layout": {
                "paper_bgcolor": "rgba(0,0,0,0)",
                "plot_bgcolor": "rgba(0,0,0,0)",
                "font": {"color": ink, "size": 13, "family": "system-ui, sans-serif"},
                "margin": {"l": 58, "r": 12, "t": 4, "b": 36},
                "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
                "hoverlabel": {"bgcolor": card, "bordercolor": grid, "font": {"color": ink}},
                "xaxis": axis | {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid},
                "yaxis": axis | {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid},
            }
        }
        for scheme, ink, grid, card in (
            ("light", "#1f2933", "#dfe3e8", "#ffffff"),
            ("dark", "#e4e7eb", "#3a414b", "#1d2229"),
        )
    }

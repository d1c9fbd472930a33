"""The charts of the rollouts: the timeline, and lengths and ages of what finished against what was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from . import statistics
from .charts import LIGHT, NO_ROLLOUTS, PERCENT, Chart, make_figure
from .run import Ints, Run

# Viridis without its darkest part, which a dark page would swallow.
_VERSIONS = [[0.0, "#3b528b"], [0.33, "#21918c"], [0.67, "#5ec962"], [1.0, "#fde725"]]


def _timeline(place: str, records: Sequence[dict[str, Any]]) -> Chart:
    """One row per rollout; a bar per segment, from the left, as long as its tokens and coloured by its version."""
    bars: dict[str, list[Any]] = {"base": [], "x": [], "y": [], "hovertext": []}
    versions, cut, row = [], [], 0
    for record in records:
        for index, rollout in enumerate(record["rollouts"], 1):
            start = 0
            for number, (version, length) in enumerate(rollout["segments"], 1):
                text = (
                    f"group {record['group']}, rollout {index}, segment {number}: {length} tokens by version {version}, "
                    f"trained in step {record['left'] + 1}"
                )
                for name, value in zip(bars, (start, length, row, text), strict=True):
                    bars[name].append(value)
                versions.append(version)
                start += length
            if rollout["finish"] == "length":
                cut.append((start, row))
            row += 1
    colours, scale = _version_colours(versions)
    traces = [
        go.Bar(
            **bars,
            orientation="h",
            hoverinfo="text",
            showlegend=False,
            marker={"color": colours, "line": {"width": 0}},
        ),
        scale,
    ]
    if cut:
        tick = {"symbol": "line-ns", "size": 5, "line": {"width": 2, "color": LIGHT["vermilion"]}}
        ends, rows = zip(*cut, strict=True)
        traces.append(go.Scatter(x=ends, y=rows, mode="markers", name="truncated", hoverinfo="skip", marker=tick))
    rows_axis = {
        "autorange": "reversed",
        "showticklabels": False,
        "rangemode": "normal",
        "showgrid": False,
        "zeroline": False,
    }
    figure = make_figure(
        traces,
        "completion tokens",
        f"rollouts, {len(records[0]['rollouts'])} per prompt",
        y_axis=rows_axis,
        bargap=0.15,
        barmode="overlay",
        height=430,
        legend={"y": -0.14, "yanchor": "top"},  # the colours' scale is above
    )
    steps = [record["left"] + 1 for record in records]
    when = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    titles = {"all": "All groups", "start": "Start of the run", "middle": "Middle", "end": "End"}
    return Chart(f"timeline-{place}", titles[place], f"{len(records)} groups trained in {when}.", figure)


def _version_colours(versions: Sequence[int]) -> tuple[list[str], go.Scatter]:
    """Return the colour of each version, and a trace that shows nothing but their scale.

    plotly would colour bars by numbers itself, but then complains of each bar on the console.
    """
    low, high = min(versions), max(max(versions), min(versions) + 1)
    colours = sample_colorscale(_VERSIONS, [(version - low) / (high - low) for version in versions])
    bar = {
        "title": {"text": "policy version", "side": "top", "font": {"size": 13}},
        "tickvals": sorted({round(each) for each in np.linspace(low, max(versions), 5)}),
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "bottom",
        "thickness": 10,
        "len": 1,
        "outlinewidth": 0,
    }
    marker = {"color": [low], "cmin": low, "cmax": high, "colorscale": _VERSIONS, "showscale": True, "colorbar": bar}
    return colours, go.Scatter(x=[None], y=[None], mode="markers", showlegend=False, hoverinfo="skip", marker=marker)


def timelines(run: Run) -> list[Chart]:
    """Return the timelines of the rollouts, or one that says why there are none."""
    windows = statistics.timeline_windows(run.records or ())
    if windows:
        return [_timeline(place, records) for place, records in windows.items()]
    missing = NO_ROLLOUTS if run.records is None else "No group was trained on."
    return [Chart("timeline", "Rollouts", "", None, missing)]


def fairness(run: Run) -> list[Chart]:
    """Return the charts of lengths and ages."""
    return [draw(run) for draw in (_length_shares, _trained_by_length, _ages)]


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
                    line={"shape": "hv", "color": LIGHT[colour], "width": 1 if fill else 2.2},
                )
            )
        figure = make_figure(
            traces,
            "completion tokens (logarithmic)",
            "share of rollouts",
            x_axis=_length_axis(bins.edges),
            y_axis=PERCENT,
        )
    return Chart(
        "length-shares",
        "Lengths: finished against trained",
        "Shares of all rollouts whose groups have left the pools, and of those that were trained on. Where the lines part, "
        "lengths are over- or under-represented in the updates.",
        figure,
        NO_ROLLOUTS,
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
                marker={"color": LIGHT["blue"]},
            ),
            go.Scatter(
                x=[centres[0], centres[-1]],
                y=[overall, overall],
                mode="lines",
                name="all lengths",
                hoverinfo="skip",
                line={"color": LIGHT["vermilion"], "dash": "dash"},
            ),
        ]
        figure = make_figure(
            traces,
            "completion tokens (logarithmic)",
            "share of the finished",
            x_axis=_length_axis(bins.edges),
            y_axis=PERCENT,
        )
    return Chart(
        "trained-by-length",
        "Share trained on, by length",
        "Of the finished rollouts of a length, those that were trained on, with one standard error. Groups of equal rewards "
        "are filtered: those of easy prompts, with short answers, and those of the hardest, with long ones that are all wrong. "
        "A fall with the length beyond that is a bias against long answers.",
        figure,
        NO_ROLLOUTS,
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
                    marker={"color": LIGHT[colour], "pattern": {"shape": pattern}},
                    hovertext=[f"age {age}: {count:,} tokens {label}" for age, count in enumerate(tokens)],
                    hoverinfo="text",
                )
            )
        figure = make_figure(
            traces,
            "age in policy versions",
            "share of tokens",
            x_axis={"tickformat": "d"},
            y_axis=PERCENT,
            barmode="group",
        )
    return Chart(
        "ages",
        "Token ages: finished against trained",
        "Versions from a token's sampling to when its group left the pools, by filtering or with its last update. Age 0 is "
        "on-policy.",
        figure,
        NO_ROLLOUTS,
    )

"""What the report's charts share: colours, the making of a plotly figure in JSON values, and lines over the steps.

Colours are those of the light page; the page's script changes them on a dark one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from . import statistics
from .run import Run
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
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
STEP = "optimizer step"
PERCENT = {"tickformat": ".0%"}
NO_LOG = (
    "The run left no log. `UloRLTrainer` writes `metrics.jsonl` as it trains, and every checkpoint holds a "
    "`trainer_state.json`: train again, or keep a checkpoint."
)
NO_ROLLOUTS = "The run left no `rollouts.jsonl`. It is written unless `log_rollouts` is False: leave that at True."
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, or why there is none.

    Args:
        name: Id in the page.
        title: Heading.
        note: What is seen, in a sentence or two.
        figure: `data` and `layout`; None where it was not recorded.
        missing: What to do so that it is recorded.
    """

    name: str
    title: str
    note: str
    figure: dict[str, Any] | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A logged figure in a chart: its name in the log, its label and its colour."""

    metric: str
    label: str
    colour: str


def make_figure(
    traces: Sequence[Any],
    x: str,
    y: str,
    *,
    x_axis: dict[str, Any] | None = None,
    y_axis: dict[str, Any] | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """Make a figure with titles at its axes, in JSON values."""
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
        line = {"color": LIGHT[colour], "dash": dash}
        return [go.Scatter(x=shown.steps, y=shown.values, name=label, mode="lines+markers", line=line)]
    averaged = mean.thinned()
    return [
        go.Scatter(
            x=shown.steps,
            y=shown.values,
            name=label,
            mode="lines",
            line={"color": LIGHT[colour], "width": 1},
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
            line={"color": LIGHT[colour], "width": 2.2, "dash": dash},
        ),
    ]


def chart_of_lines(
    run: Run,
    name: str,
    title: str,
    note: str,
    lines: Sequence[Line],
    y: str,
    *,
    extra: Sequence[Any] = (),
    **layout: Any,
) -> Chart:
    """Draw logged figures over the steps; the ones that were not logged are left out."""
    history = run.history or ()
    traces = list(extra)
    for line, dash in zip(lines, _DASHES, strict=False):
        values = statistics.series(history, line.metric)
        if len(values):
            traces += _curves(values, line.label, line.colour, dash)
    figure = make_figure(traces, STEP, y, hovermode="x unified", **layout) if traces else None
    missing = f"None of {', '.join(f'`{line.metric}`' for line in lines)} is in the run's log."
    return Chart(name, title, note, figure, NO_LOG if run.history is None else missing)


def plain_label(text: str, limit: int = 40) -> str:
    """Return a label that plotly, which reads some tags in text, shows as it is."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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

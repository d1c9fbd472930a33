"""The report as one HTML file: what stands in it, and its making. Completions are untrusted text and never become markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from ..diagnostics import Alarms
from ..records import KEY_SETTINGS, share_with_error
from . import charts, figures, rollout_charts, statistics
from .run import Run

MAX_SHOWN_SAMPLES = 16
MAX_DISAGREEMENTS = 50
_HERE = Path(__file__).parent
# Characters that would act instead of being seen: control characters, and those that turn the direction of text.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)}
_VISIBLE |= {
    code: f"[U+{code:04X}]"
    for code in (0x7F, 0x061C, *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def render(run: Run) -> str:
    """Return the report of a run as HTML that needs no other file."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, share=share, seconds=seconds, setting=setting, json=_inlined)
    parts = {
        "curves": figures.curves(run),
        "timelines": rollout_charts.timelines(run),
        "rollouts": [*rollout_charts.fairness(run), *figures.drift(run)],
        "times": [figures.times(run)],
    }
    plotted = {chart.name: chart.figure for part in parts.values() for chart in part if chart.figure is not None}
    balance = run.ledger
    if balance is not None:
        plotted["ledger"] = figures.ledger(balance[0])
    stages = [] if run.rollouts is None else statistics.stage_table(run.rollouts)
    if stages:
        plotted["stages"] = figures.stages(stages)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    plotly = get_plotlyjs()
    return environment.get_template("page.html").render(
        run=run,
        name=run.folder.resolve().name,
        model=model_name(run.description.get("model")),
        tiles=tiles(run),
        findings=findings(run),
        charts=parts,
        plotted={"charts": plotted, "themes": charts.templates(), "colours": list(charts.COLOURS.values())},
        balance=balance,
        phases=statistics.phase_seconds(run.history or (), run.batches_per_step),
        lengths=[] if run.rollouts is None else statistics.length_table(run.rollouts),
        stages=stages,
        samples=evenly(run.samples or (), MAX_SHOWN_SAMPLES),
        disagreements=(run.disagreements or ())[-MAX_DISAGREEMENTS:],
        key_settings={
            name: run.settings[name] for name in (*KEY_SETTINGS, "dmmpts", "use_vllm") if name in run.settings
        },
        thinning=_thinning(run),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        plotly=plotly,
        # Nothing may be loaded, and no script runs but these two, even if text found a way to become markup.
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src "
        + " ".join(f"'sha256-{_digest(text)}'" for text in (plotly, script)),
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inlined(value: Any) -> str:
    """Return JSON that may stand in a script element: nothing in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ------------------------------------------------------------------------------------------------------- what is written


def tiles(run: Run) -> list[dict[str, str]]:
    """Return the run's headline: label, figure and remark of each tile."""
    history = run.history or ()
    shown = [_held_out(run), _training_accuracy(run)]
    entropy, sigma = statistics.series(history, "entropy"), statistics.series(history, "dmmpts/sigma")
    if (mean := entropy.last_third()) is not None:
        target = f"sigma {sigma.values[-1]:g}" if len(sigma) else "DMMPTs off"
        shown.append({"label": "Token entropy", "figure": f"{mean:.3f} nats", "remark": f"last third; {target}"})
    for label, metric, form in (
        ("Completion length", "rollout/completed_length_mean", "{:,.0f} tokens"),
        ("Truncated", "rollout/truncated_frac", "{:.1%}"),
        ("Token age", "rollout/age_mean", "{:.2f} versions"),
    ):
        if (mean := statistics.series(history, metric).last_third()) is not None:
            shown.append(
                {"label": label, "figure": form.format(mean), "remark": "mean of the last third of the steps"}
            )
    total = sum(statistics.phase_seconds(history, run.batches_per_step).values())
    if total > 0:
        remark = "in training steps, without evaluations"
        shown.append({"label": "Time", "figure": seconds(total), "remark": remark})
    if run.ledger is not None:
        tokens = run.ledger[0]["tokens"]
        figure, trained = f"{tokens['generated']:,}", tokens["trained"] / max(1, tokens["generated"])
        shown.append({"label": "Tokens generated", "figure": figure, "remark": f"{trained:.0%} of them trained on"})
    return [tile for tile in shown if tile is not None]


def _held_out(run: Run) -> dict[str, str] | None:
    points = [
        (entry["step"], entry["eval_avg_at_k"], entry["eval_standard_error"])
        for entry in run.history or ()
        if "eval_avg_at_k" in entry
    ]
    if not points and {"accuracy_before", "accuracy_after"} <= run.summary.keys():
        points = [
            (step, run.summary[f"accuracy_{name}"], run.summary[f"standard_error_{name}"])
            for name, step in (("before", 0), ("after", run.summary.get("steps", 0)))
        ]
    if not points:
        return None
    (first_step, first, _), (last_step, last, error) = points[0], points[-1]
    figure = share_with_error(last, error)
    if len(points) == 1:
        return {"label": "Held-out accuracy", "figure": figure, "remark": f"avg@k, step {last_step}"}
    remark = f"avg@k in step {last_step}, from {first:.1%} in step {first_step}"
    return {"label": "Held-out accuracy", "figure": figure, "remark": remark}


def _training_accuracy(run: Run) -> dict[str, str] | None:
    values = statistics.series(run.history or (), "accuracy")
    if not len(values):
        return None
    first = float(values.values[: max(1, len(values) // 3)].mean())
    remark = f"completed groups, last third; {first:.1%} in the first"
    return {"label": "Training accuracy", "figure": f"{values.last_third():.1%}", "remark": remark}


def findings(run: Run) -> list[str]:
    """Return what deserves a look: the trainer's alarms on the logged figures, and what was not finite or not done."""
    history, found = run.history or (), []
    last, planned = run.last_step, run.description.get("max_steps")
    if last is not None and planned and last < planned:
        found.append(f"The run has come to step {last} of {planned}: it goes on, or it was stopped.")
    for name in ("loss", "grad_norm"):
        if count := statistics.missing_values(history, name):
            found.append(f"`{name}` was not finite in {count} log entries.")
    settings = run.settings
    max_age = 2 * settings.get("num_segments", 1) * run.description.get("updates_per_batch", 1)
    alarms = Alarms(watch_importance=True, max_group_age=max_age if settings else 1 << 62)
    for entry in history:
        if "rollout/rounds" in entry:
            numbers = {name: value for name, value in entry.items() if isinstance(value, int | float)}
            found += [f"Step {entry['step']}: {text}" for text in alarms.check(numbers)]
    filled = statistics.series(history, "rollout/filled_groups")
    if len(filled) and filled.values.any():
        found.append(
            f"Batches were filled with groups without a gradient in {int((filled.values > 0).sum())} of {len(filled)} log "
            "entries: the data are too easy or too hard for the policy, or rewards fail."
        )
    undecided = statistics.series(history, "verifier/undecided_frac").last_third()
    if undecided is not None and undecided > 0.05:
        found.append(f"{undecided:.0%} of the completions in the last third of the steps got no reward at all.")
    failed = statistics.series(history, "verifier/failed")
    if len(failed) and failed.values.max() > 0:
        found.append(f"Reward functions failed on {int(failed.values.max())} completions.")
    return found


def _thinning(run: Run) -> list[str]:
    """Return where the page shows less than was recorded, and how it was chosen."""
    notes = []
    longest = max(
        (len(statistics.series(run.history or (), name)) for name in ("loss", "accuracy", "entropy")), default=0
    )
    if longest > statistics.MAX_POINTS:
        per_point = -(-longest // statistics.MAX_POINTS)
        notes.append(f"Curves: each point is the mean of {per_point} successive log entries, {longest:,} in all.")
    notes.append(
        "Strong lines are running means over a tenth of the log entries, three at least; faint ones are the entries."
    )
    if run.history and "batches_per_step" not in run.description:
        notes.append("Times: without a `run.json`, one batch per optimizer step is taken for granted.")
    if run.records is not None:
        notes.append(
            f"Histograms, tables and shares count all {sum(len(r['rollouts']) for r in run.records):,} recorded rollouts. "
            f"The timelines show about {statistics.WINDOW_ROLLOUTS} of them each."
        )
    if run.samples and len(run.samples) > MAX_SHOWN_SAMPLES:
        notes.append(f"Samples: {MAX_SHOWN_SAMPLES} of the {len(run.samples)} recorded, evenly spread.")
    if run.disagreements and len(run.disagreements) > MAX_DISAGREEMENTS:
        notes.append(f"Disagreements: the last {MAX_DISAGREEMENTS} of {len(run.disagreements):,}.")
    return notes


def model_name(name: str | None) -> str:
    """Return a model's name on the Hub, or the last part of its path: a report may go to people who don't have it."""
    name = name or "a model that has no name"
    return Path(name).name if name.count("/") != 1 or name.startswith(("/", ".", "~")) else name


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return so many items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


# --------------------------------------------------------------------------------------------------------------- filters


def visible(text: Any) -> str:
    """Return a text in which control characters, which a browser hides or obeys, are seen."""
    return str(text).translate(_VISIBLE)


def number(value: float) -> str:
    """Return a number with separators, whole or with one decimal."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.1f}"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{value:.1%}"


def seconds(value: float) -> str:
    """Return a time in the largest unit that leaves more than one of it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"


def setting(value: Any) -> str:
    """Return a setting as a user would write it."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

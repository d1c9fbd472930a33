"""What `trl-ulorl plan` prints of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def report(plan: dict[str, Any]) -> str:
    """Return the parameters, the tables of speed and price, and the recommendation."""
    arms: dict[str, dict[str, Any]] = plan["arms"]
    lines = ["Parameters"]
    for name, value in plan["parameters"].items():
        if value is not None:
            lines.append(f"  {name:26} {_shown(value)}")
    lines += [
        "",
        "Speed, in multiples of trl's: completions with a gradient per second of rollout, and of the whole step",
    ]
    lines += _table(arms, _SPEED_COLUMNS)
    lines += ["", "Price"]
    lines += _table(arms, _PRICE_COLUMNS)
    return "\n".join([*lines, "", _recommendation(plan)]) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_SPEED_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rollout s": lambda arm: f"{arm['rollout_seconds']:.4g}",
    "update s": lambda arm: f"{arm['update_seconds']:.4g}",
    "step s": lambda arm: f"{arm['step_seconds']:.4g}",
    "x rollout": lambda arm: f"{arm['speedup_rollout']:.2f}",
    "x step": lambda arm: f"{arm['speedup_step']:.2f}",
    "completions/s": lambda arm: f"{arm['completions_per_second_step']:.4g}",
    "with gradient": lambda arm: f"{arm['gradient_frac']:.0%}",
    "slots busy": lambda arm: f"{arm['occupancy']:.0%}",
    "prefill s": lambda arm: f"{arm['prefill_seconds']:.3g}",
}
_PRICE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "groups held": lambda arm: f"{arm['groups_held_mean']:.0f} / {arm['groups_held_max']}",
    "age": lambda arm: f"{arm['age_mean']:.1f} / {arm['age_max']:.0f}",
    "on-policy": lambda arm: f"{arm['on_policy_frac']:.0%}",
    "recomputed": lambda arm: f"{arm['prefilled_tokens_per_trained_token']:.2f}",
    "pools GB": lambda arm: f"{arm['pool_bytes_max'] / 1e9:.3g}",
    "KV Mtokens": lambda arm: f"{arm['kv_tokens_max'] / 1e6:.3g}",
    "KV GiB": lambda arm: "-" if arm["kv_gib"] is None else f"{arm['kv_gib']:.4g}",
    "fits": lambda arm: {None: "-", True: "yes", False: "NO"}[arm["is_within_kv_limit"]],
}


def _table(arms: dict[str, dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> list[str]:
    rows = [["setting", *columns], *([name, *(show(arm) for show in columns.values())] for name, arm in arms.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _recommendation(plan: dict[str, Any]) -> str:
    name, arms = plan["recommendation"], plan["arms"]
    if name is None:
        least = min(arms, key=lambda other: arms[other]["kv_tokens_max"])
        return (
            f"Recommended: none. No setting fits {plan['parameters']['kv_gib']:g} GiB of key-value cache; the smallest, "
            f"{least}, needs {arms[least]['kv_gib']:.4g}. Use more engines or fewer groups per batch."
        )
    arm = arms[name]
    fitting = [other for other in arms if arms[other]["is_within_kv_limit"] is not False]
    fastest = max(fitting, key=lambda other: arms[other]["speedup_step"])
    reason = f"{arm['speedup_step']:.2f} times trl's speed at a mean age of {arm['age_mean']:.1f} steps"
    if fastest == name:
        reason += ", the fastest"
    else:
        reason += (
            f"; {fastest} is the fastest, {arms[fastest]['speedup_step']:.2f} times at {arms[fastest]['age_mean']:.1f}"
        )
    if len(fitting) < len(arms):
        reason += f" of those that fit {plan['parameters']['kv_gib']:g} GiB of key-value cache"
    return f"Recommended: {name} ({_options(arm)})\n  {reason}."


def _options(arm: dict[str, Any]) -> str:
    if arm["arm"] == "continuous":
        return (
            f'rollout_schedule="continuous", rollout_slots={arm["num_slots"]}, '
            f"max_inflight_groups={arm['max_inflight_groups']}; needs vLLM"
        )
    return "GRPOTrainer" if arm["arm"] == "trl" else f"num_segments={arm['arm'].removeprefix('segments_')}"

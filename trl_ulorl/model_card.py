"""What a model card says about an UloRL run, beside what TRL's own card says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .config import DMMPTsConfig, UloRLConfig
from .records import KEY_SETTINGS, share_with_error

# The last value that was logged of each: its name in the log, what a reader calls it, and its form.
_FIGURES = (
    ("accuracy", "accuracy of the groups completed in a step", "{:.3f}"),
    ("entropy", "token entropy, nats", "{:.3f}"),
    ("completions/mean_length", "completion length, mean of a step, tokens", "{:.0f}"),
    ("completions/max_length", "completion length, longest of a step, tokens", "{:.0f}"),
    ("completions/clipped_ratio", "truncated completions of a step", "{:.1%}"),
    ("dmmpts/masked_frac", "tokens masked by DMMPTs", "{:.1%}"),
    ("rollout/age_mean", "age of the trained tokens, policy versions", "{:.2f}"),
)
_FRAMEWORKS = "### Framework versions"


def add_run(
    path: Path,
    args: UloRLConfig,
    *,
    steps: int,
    history: Sequence[Mapping[str, Any]],
    ledger: Mapping[str, Mapping[str, int]],
) -> None:
    """Add a run's method, settings, figures and ledger to the card that TRL wrote.

    Args:
        path: The card.
        args: The run's configuration.
        steps: Optimizer steps taken.
        history: The trainer's log.
        ledger: What became of groups and tokens.
    """
    card = ModelCard.load(path)
    before, marker, after = card.text.partition(_FRAMEWORKS)
    run = "\n\n".join([_method(args), _settings(args), _figures(steps, history), _ledger(ledger)])
    # TRL's template takes it that the model came from the Hub and goes there.
    before = before.replace("[None](https://huggingface.co/None)", "a model that is not on the Hub")
    before = before.replace('model="None"', f'model="{args.output_dir}"')
    card.text = f"{before.rstrip()}\n\n{run}\n\n{marker}{after}"
    card.save(path)


def _method(args: UloRLConfig) -> str:
    lines = ["### Method", ""]
    if args.num_segments > 1:
        lines.append(
            f"- **Segment rollout**: outputs of up to {args.max_completion_length} tokens, in segments of "
            f"{args.segment_length}; unfinished ones go on under the newer policy (schedule `{args.rollout_schedule}`)."
        )
        mode = (
            "pseudo on-policy: the current policy stands for those that sampled the older segments"
            if args.importance_mode == "pois"
            else "segment-aware: each segment is weighed by the policy that sampled it"
        )
        lines.append(f"- **{args.importance_mode.upper()}** importance sampling, {mode}.")
    else:
        lines.append(f"- **On-policy rollout** (TOIS) of up to {args.max_completion_length} tokens.")
    dmmpts = args.dmmpts
    if isinstance(dmmpts, DMMPTsConfig):
        when = f"in responses whose entropy is below {dmmpts.sigma:g} nats" if dmmpts.dynamic else "in all responses"
        lines.append(f"- **DMMPTs**: positive tokens of a probability above {dmmpts.tau:g} are masked {when}.")
    else:
        lines.append("- No masking of well-mastered positive tokens (DMMPTs).")
    if args.dynamic_sampling:
        lines.append("- **Dynamic sampling**: groups with equal rewards are left out.")
    overlong = {"wrong": "count as wrong", "mask": "are left out of the loss", "soft": "are punished softly"}
    lines.append(f"- Truncated outputs {overlong[args.overlong]}.")
    return "\n".join(lines)


def _settings(args: UloRLConfig) -> str:
    rows = [f"| `{name}` | {_shown(getattr(args, name))} |" for name in KEY_SETTINGS]
    return "\n".join(["### Settings", "", "| field | value |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def _figures(steps: int, history: Sequence[Mapping[str, Any]]) -> str:
    lines = ["### Figures", "", f"After {steps} optimizer steps, as they were last logged:", "", "| figure | value |"]
    lines.append("|---|---|")
    for name, label, form in _FIGURES:
        values = [entry[name] for entry in history if entry.get(name) is not None]
        if values:
            lines.append(f"| {label} | {form.format(values[-1])} |")
    evaluations = [entry for entry in history if "eval_avg_at_k" in entry]
    if evaluations:
        lines += ["", "Held-out problems, with standard errors over problems:", ""]
        lines += ["| step | avg@k | pass@k | maj@k | truncated | mean length |", "|---|---|---|---|---|---|"]
        lines += [_evaluation(entry) for entry in evaluations]
    return "\n".join(lines)


def _evaluation(entry: Mapping[str, Any]) -> str:
    return (
        f"| {entry['step']} | {share_with_error(entry['eval_avg_at_k'], entry['eval_standard_error'])} | "
        f"{entry['eval_pass_at_k']:.1%} | {entry['eval_maj_at_k']:.1%} | {entry['eval_truncated_fraction']:.1%} | "
        f"{entry['eval_mean_length']:.0f} |"
    )


def _ledger(ledger: Mapping[str, Mapping[str, int]]) -> str:
    lines = [
        "### Ledger",
        "",
        "Where every group and every generated token went; the first is the sum of the others.",
        "",
    ]
    lines += ["| | total | |", "|---|---|---|"]
    for part, entries in ledger.items():
        (first, total), *rest = entries.items()
        parts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rest)
        lines.append(f"| {part} | {total} {first} | {parts} |")
    return "\n".join(lines)

"""A progress display for segment rollout, in the place of transformers' own."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_COLUMNS = "    step  accuracy  entropy / sigma  masked  unfinished  ready  age mean / max  seconds"


class RolloutProgress(TrainerCallback):
    """Shows a bar with the latest figures, and a line of them every few steps.

    Use it instead of `ProgressCallback`: `trainer.remove_callback(ProgressCallback)`, then
    `trainer.add_callback(RolloutProgress())`.

    Args:
        num_lines: Lines that a run prints in all.
    """

    def __init__(self, num_lines: int = 25) -> None:
        self._num_lines = num_lines
        self._bar: Any = None
        self._last: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", unit="step")
            if state.global_step:
                is_done = state.global_step >= state.max_steps
                rest = (
                    f"nothing is left of {state.max_steps} steps" if is_done else "with the rollouts of its checkpoint"
                )
                self._bar.write(f"Goes on after step {state.global_step}, {rest}.")
            self._bar.write(_COLUMNS)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the figures of a step."""
        if self._bar is None or logs is None or "rollout/rounds" not in logs:
            return
        # A step that found its batch in the pool completed no group, so the last accuracy still stands.
        self._last.update({name: value for name, value in logs.items() if value is not None})
        self._bar.set_postfix_str(_short(self._last))
        every = max(1, state.max_steps // self._num_lines)
        if state.global_step % every == 0 or state.global_step in (1, state.max_steps):
            self._bar.write(_line(state.global_step, self._last))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(logs: dict[str, float]) -> str:
    accuracy = f"accuracy {logs['accuracy']:.2f}, " if "accuracy" in logs else ""
    return f"{accuracy}entropy {logs['entropy']:.3f}"


def _line(step: int, logs: dict[str, float]) -> str:
    sigma = logs.get("dmmpts/sigma")
    entropy = f"{logs['entropy']:.3f} / " + ("off" if sigma is None else f"{sigma:.3f}")
    age = f"{logs['rollout/age_mean']:.1f} / {logs['rollout/age_max']:.0f}"
    accuracy = f"{logs['accuracy']:.3f}" if "accuracy" in logs else "-"  # no group has become complete yet
    return (
        f"{step:8d}  {accuracy:>8}  {entropy:>15}  "
        f"{logs.get('dmmpts/masked_frac', 0.0):6.1%}  {logs['rollout/unfinished_groups']:10.0f}  "
        f"{logs['rollout/ready_groups']:5.0f}  {age:>14}  {logs.get('step_time', float('nan')):7.1f}"
    )

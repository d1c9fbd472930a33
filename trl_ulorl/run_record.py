"""What a run is and what it logs, on disk while it goes on: `run.json` and `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .records import METRICS, RUN, finite, write_json, write_text

_PACKAGES = ("trl-ulorl", "trl", "transformers", "torch", "accelerate", "vllm", "deepspeed", "peft")
_SECRET = re.compile(r"(token|key|password|secret)$", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")


class RunRecord(TrainerCallback):
    """Writes what the run is when training begins, and a line whenever the trainer logs.

    `run.json` is replaced as a whole; `metrics.jsonl` starts with the log that a resumed checkpoint holds and is then
    appended to, so that it equals `trainer.state.log_history`. Figures that are not finite become null.

    Args:
        folder: The output folder.
        describe: Returns what the run is, as JSON values.
        ledger: Returns the ledger, which is added when training ends.
    """

    def __init__(
        self, folder: Path, describe: Callable[[], dict[str, Any]], ledger: Callable[[], dict[str, dict[str, int]]]
    ) -> None:
        self._folder = folder
        self._describe = describe
        self._ledger = ledger
        self._is_begun = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write both files anew."""
        if not state.is_world_process_zero:
            return
        write_json(self._folder / RUN, {**self._describe(), "begun_at_step": state.global_step})
        write_text(self._folder / METRICS, "".join(map(_line, state.log_history)))
        self._is_begun = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Append the newest entry of the log."""
        if self._is_begun and state.log_history:
            with (self._folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the ledger."""
        if self._is_begun:
            content = json.loads((self._folder / RUN).read_text(encoding="utf-8"))
            end = {"ended_at_step": state.global_step, "ledger": self._ledger()}
            write_json(self._folder / RUN, {**content, **end})


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), default=str) + "\n"


def public_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values, without what only the run's owner may know.

    Values whose names end in token, key, password or secret are left out at any depth, and so are the users in URLs.
    """
    return {
        name: "<left out>" if value is not None and _SECRET.search(name) else _public(value)
        for name, value in sorted(settings.items())
    }


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return public_settings({str(name): each for name, each in value.items()})
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _USER_OF_URL.sub("", str(value))


def installed_versions() -> dict[str, str]:
    """Return the releases of the interpreter and of the packages that a run rests on, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions

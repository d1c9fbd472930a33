"""Stop at the next moment at which a run can be saved, when SIGTERM or Ctrl-C asks for it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes that this process was asked to stop.

    Attributes:
        signal_number: The signal that asked; 0 for none.
        is_granted: Whether the run is ended for it.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.is_granted = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def listening(self, *, is_enabled: bool = True) -> Iterator[None]:
        """Take note of SIGTERM and SIGINT while inside; afterwards the previous handlers are back.

        A second Ctrl-C acts as it would without this; a second SIGTERM changes nothing, since launchers and schedulers
        send several. Outside the main thread, where Python allows no handlers, nothing happens.
        """
        self.signal_number, self.is_granted = 0, False
        if not is_enabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, previous in self._previous.items():
                # None stands for a handler that was not set from Python and can't be set from there.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def grant(self, signal_number: int) -> None:
        """Note that all ranks end the run for this signal."""
        self.signal_number, self.is_granted = signal_number, True

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.signal_number
        self.signal_number = self.signal_number or number
        if number == signal.SIGINT:
            previous = self._previous[number]
            signal.signal(number, signal.default_int_handler if previous is None else previous)
        if is_first:
            again = " Press Ctrl-C again to end at once, without saving." if number == signal.SIGINT else ""
            logger.warning(
                "%s: the run stops once the engine call under way is done, and is saved.%s",
                signal.Signals(number).name,
                again,
            )


class StopCallback(TrainerCallback):
    """Saves and ends the training at the end of an optimizer step, if any rank was asked to stop.

    Args:
        request: This process's.
        most_of: Returns the largest of the ranks' numbers: a collective operation.
    """

    def __init__(self, request: StopRequest, most_of: Callable[[int], int]) -> None:
        self._request = request
        self._most_of = most_of

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask all ranks, and set the trainer's flags."""
        signal_number = self._most_of(self._request.signal_number)
        if signal_number:
            self._request.grant(signal_number)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
            # With a limit of 1 the parent would delete what is saved now, if another checkpoint is the best one.
            args.save_total_limit = None

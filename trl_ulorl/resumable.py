"""How a trainer saves its rollouts in progress, goes on with them, and stops at a signal.

Parent methods are wrapped, as in `trainer`: `_save_checkpoint`, `_save_rng_state` and `_load_optimizer_and_scheduler` save
and load the rollout's state with a checkpoint, which is whole or not there.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from . import checkpoints
from .config import UloRLConfig
from .records import RolloutLog
from .rollout.checkpoint import load_rollout, save_rollout
from .rollout.collector import ExperienceCollector
from .rollout.restore import StepPosition
from .rollout.state import Ranks, StateError
from .samples import SampleLog
from .stop import StopRequest

logger = logging.getLogger(__name__)


class ResumableTrainer(GRPOTrainer):
    """The part of `UloRLTrainer` that a checkpoint and a signal concern; what it works on is set there."""

    args: UloRLConfig
    _collector: ExperienceCollector
    _ranks: Ranks
    _stop: StopRequest
    _log_file: RolloutLog
    _samples: SampleLog
    _saved_step: int  # the step of the last checkpoint of this run
    _sampler_state: dict[str, Tensor]  # to go on from, where a step was stopped while it decoded
    _window_start: int  # `_step` at the start of the update in progress
    _dealt: tuple[int, list[list[tuple[int, int]]]] | None  # a window's first `_step`, and its rows
    if TYPE_CHECKING:  # wider in the parent than they are here
        model: PreTrainedModel
        _buffered_inputs: Any

    # ------------------------------------------------------------------------------------------------------ checkpoints

    @property
    def _window(self) -> dict[str, int]:
        """What the micro-batches of a batch depend on."""
        names = (
            "per_device_train_batch_size",
            "steps_per_generation",
            "num_iterations",
            "gradient_accumulation_steps",
        )
        return {"num_ranks": self._ranks.num_ranks, **{name: getattr(self.args, name) for name in names}}

    def _checkpoint_folder(self) -> str:
        return str(Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as the parent does, so that a checkpoint of the same step is not whole meanwhile; then rotate."""
        folder = self._checkpoint_folder()
        if self.args.should_save:
            checkpoints.withdraw(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._saved_step = self.state.global_step
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            checkpoints.rotate(self._get_output_dir(trial=trial), limit=limit, newest=folder, best=best)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the rollout's state on every rank, before `trainer_state.json` marks the checkpoint as whole."""
        super()._save_rng_state(output_dir)
        self._save_rollout(output_dir)

    def _save_rollout(self, output_dir: str) -> None:
        # Inside the window of a batch that feeds several updates the rest of the batch is part of the state.
        is_inside = self._step % self.args.micro_steps_per_batch != 0
        position = StepPosition(
            self.state.global_step,
            step=self._step if is_inside else 0,
            log_bytes=self._log_file.num_bytes,
            buffered=self._buffered_inputs if is_inside else [],
            sampler=self._sampler_state,
        )
        save_rollout(self._collector, output_dir, self._ranks, position, self._window)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the rollout's state too; called on every backend, on every rank."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        position = load_rollout(
            self._collector,
            checkpoint,
            self._ranks,
            version=self.state.global_step,
            window=self._window,
            vocab_size=self.model.config.get_text_config().vocab_size,
            discards=self.args.resume_rollout == "discard",
        )
        self._dealt = None
        self._step = self._window_start = position.step  # checkpoints are written between updates
        device = self.accelerator.device
        self._buffered_inputs = [{k: v.to(device) for k, v in batch.items()} for batch in position.buffered] or None
        self._sampler_state = position.sampler
        self._log_file.go_back_to(position.log_bytes)
        self._samples.go_back_to(self.state.global_step)
        if Path(checkpoint).resolve() == Path(self._checkpoint_folder()).resolve():
            self._saved_step = self.state.global_step  # weights and optimizer are those that it holds

    def _newest_checkpoint(self) -> str:
        """Return the newest whole checkpoint: the main process looks for it."""
        output_dir, discards = cast(str, self.args.output_dir), self.args.resume_rollout == "discard"
        found = self._ranks.gather(
            lambda: checkpoints.newest_whole_checkpoint(output_dir, discards=discards) if self._ranks.is_main else ""
        )
        return found[0]

    def _check_committed(self, checkpoint: str) -> None:
        if not Path(checkpoint).is_dir():
            raise StateError(
                f"There is no folder {checkpoint!r} to resume from. Pass that of a checkpoint, or "
                "`resume_from_checkpoint=True` for the newest whole one."
            )
        if not checkpoints.is_committed(checkpoint):
            raise StateError(
                f"{checkpoint} has no whole `{checkpoints.COMMIT_MARK}`: it was not saved to its end. Resume from another "
                "checkpoint, or pass `resume_from_checkpoint=True` for the newest whole one."
            )

    def _warn_of_checkpoints(self) -> None:
        """Say that a new run starts beside checkpoints of another one."""
        output_dir = cast(str, self.args.output_dir)
        step = checkpoints.newest_step(output_dir) if self._ranks.is_main else None
        if step is not None:
            logger.warning(
                "%s holds checkpoints of an earlier run, up to step %d. This one starts anew beside them: its logs replace the "
                "earlier ones, and `resume_from_checkpoint=True` takes the highest step, whichever run's it is. Pass another "
                "`output_dir` to keep them apart.",
                output_dir,
                step,
            )

    # ---------------------------------------------------------------------------------------------- stopping by a signal

    def _most_of(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        if self._ranks.num_ranks == 1:
            return number
        return max(int(payload["number"]) for payload in self._ranks.exchange({"number": number}))

    def _save_stopped_step(self) -> None:
        """Save in the middle of a rollout step, at the end of a round: the weights are those of the last update."""
        self._stop.grant(self._most_of(self._stop.signal_number))
        self._sampler_state = {"cpu": torch.get_rng_state()}
        if self.accelerator.device.type == "cuda":
            self._sampler_state["cuda"] = torch.cuda.get_rng_state()
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
        elif not self.args.save_only_model:
            # Of the checkpoint of the last update only this folder is replaced, at once: it stays whole whatever happens.
            self._save_rollout(self._checkpoint_folder())

    def _restore_sampler(self) -> None:
        """Go on sampling where a stopped step was saved."""
        state, self._sampler_state = self._sampler_state, {}
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
        if "cuda" in state and self.accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"])

    def _exit(self) -> None:
        number = self._stop.signal_number
        folder = self._checkpoint_folder()
        way_on = (
            "Resume with `trainer.train(resume_from_checkpoint=True)`, on the command line with "
            f"`--resume_from_checkpoint True`, or with {folder!r} in the place of True."
        )
        if self.args.save_only_model:
            way_on = f"With `save_only_model=True` it can't be resumed: start anew with `model={folder!r}`."
        message = f"{signal.Signals(number).name} stopped the run at step {self.state.global_step}, saved in {folder}. {way_on}"
        if self._ranks.is_main:
            logger.warning(message)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + number)

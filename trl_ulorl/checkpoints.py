"""Checkpoints of a trainer on disk: which are whole, which one to resume from, and which to delete."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from .rollout.state import StateError, StateFormatError, check_whole

logger = logging.getLogger(__name__)

COMMIT_MARK = "trainer_state.json"  # Trainer writes it last


def is_committed(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was saved to its end: its last file is there, and not half of it."""
    try:
        return isinstance(json.loads((Path(checkpoint) / COMMIT_MARK).read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def newest_whole_checkpoint(output_dir: str | Path, *, discards: bool) -> str:
    """Return the checkpoint with the highest step that a run can be resumed from, and say what was skipped.

    Args:
        output_dir: Where `checkpoint-<step>` folders are.
        discards: Whether the rollout's state in it may be missing or damaged.

    Raises:
        StateError: If there is none, or the newest one is of another format.
    """
    skipped: list[str] = []
    for checkpoint in reversed(_sorted(output_dir)):
        try:
            if not is_committed(checkpoint):
                raise StateError(f"{checkpoint} has no whole `{COMMIT_MARK}`: it was not saved to its end.")
            if not discards:
                check_whole(checkpoint)
        except StateFormatError:
            raise  # older ones will hardly be of another
        except StateError as error:
            skipped.append(str(error))
            continue
        for reason in skipped:
            logger.warning("Not resuming from a newer checkpoint. %s", reason)
        if skipped:
            logger.warning("Resuming from %s, the newest whole checkpoint.", checkpoint)
        return checkpoint
    raise StateError(
        f"`resume_from_checkpoint=True`, but {output_dir} has no whole checkpoint. "
        + (" ".join(skipped) or "It has no `checkpoint-<step>` folder at all: start without it.")
    )


def newest_step(output_dir: str | Path) -> int | None:
    """Return the highest step of a checkpoint in a folder, whole or not; None if there is none."""
    found = Path(output_dir).glob("checkpoint-*")
    steps = [int(number) for path in found if (number := path.name.removeprefix("checkpoint-")).isdecimal()]
    return max(steps, default=None)


def _sorted(output_dir: str | Path, *, use_mtime: bool = False) -> list[str]:
    # Here, as transformers takes seconds to load: a report asks only whether a checkpoint is whole.
    from transformers.trainer_utils import sort_checkpoints

    return sort_checkpoints(str(output_dir), use_mtime=use_mtime)


def withdraw(checkpoint: str | Path) -> None:
    """Take away the commit mark of a checkpoint that is about to be written anew: until then it is not whole."""
    (Path(checkpoint) / COMMIT_MARK).unlink(missing_ok=True)


def rotate(output_dir: str | Path, *, limit: int | None, newest: str, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`, never the one just saved nor the best one.

    Unlike Trainer's own rotation it counts whole checkpoints only: what a killed run left half-written takes no whole
    one's place, and is deleted.

    Args:
        output_dir: Where `checkpoint-<step>` folders are.
        limit: Most to keep; None or 0 for all.
        newest: The checkpoint just saved.
        best: The best one, if that is tracked.
    """
    if not limit or limit < 0:
        return
    protected = {Path(newest).resolve(), *([Path(best).resolve()] if best else [])}
    checkpoints = [Path(path) for path in _sorted(output_dir, use_mtime=True)]
    whole = [path for path in checkpoints if is_committed(path)]
    surplus = [path for path in whole if path.resolve() not in protected]
    del surplus[max(0, len(whole) - max(limit, len(protected))) :]
    for path in surplus + [path for path in checkpoints if path not in whole]:
        if path.resolve() not in protected:
            shutil.rmtree(path, ignore_errors=True)

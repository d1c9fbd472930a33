"""Save the rollouts in progress with a checkpoint, and take them up again on any number of ranks.

What a checkpoint holds belongs to a moment at which no weight is about to change: the end of an optimizer step, or of a
round of decoding. Inside the window of a batch that feeds several updates, the rest of that batch is part of it, and
then only as many ranks can go on. Anywhere else the unfinished groups are dealt anew when the number of engines differs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .collector import ExperienceCollector
from .packing import pack_groups
from .pool import Ledger, is_count
from .restore import Reader, StepPosition
from .state import Ranks, StateError, read_ledger, write_state

logger = logging.getLogger(__name__)


def save_rollout(
    collector: ExperienceCollector,
    checkpoint: str | Path,
    ranks: Ranks,
    position: StepPosition,
    window: Mapping[str, int],
) -> None:
    """Write the rollouts in progress into a checkpoint; every rank calls it.

    Args:
        collector: Holds them.
        checkpoint: The checkpoint's folder.
        ranks: The processes.
        position: Where the run is.
        window: What the micro-batches of a batch depend on.

    Raises:
        OSError: If it can't be written.
    """
    own = pack_groups(collector.unfinished.groups if ranks.speaks else [])
    of_all = ranks.gather(lambda: (own.records, own.notes))
    complete = {"ready": pack_groups(collector.ready.groups), "training": pack_groups(collector.training)}
    records = {f"rank{rank}": of_rank for rank, (of_rank, _) in enumerate(of_all)}
    records |= {section: packed.records for section, packed in complete.items()}
    content = {
        "version": position.version,
        "step": position.step,
        "rollout_log_bytes": position.log_bytes,
        "ranks_per_engine": ranks.ranks_per_engine,
        "window": {**window, "num_batches": len(position.buffered)},
        **collector.state_dict(),
        "notes": {
            **{f"rank{rank}": notes for rank, (_, notes) in enumerate(of_all)},
            **{section: packed.notes for section, packed in complete.items()},
        },
    }
    buffered = {f"buffered.{i}.{name}": t for i, batch in enumerate(position.buffered) for name, t in batch.items()}
    write_state(
        checkpoint,
        ranks,
        content=content,
        ledger=collector.ledger_balance(),
        groups={f"{section}.{name}": array for section, each in records.items() for name, array in each.items()},
        shared={
            f"{section}.{name}": parts for section, each in complete.items() for name, parts in each.tokens.items()
        },
        own={**own.tokens, **buffered, **{f"sampler.{name}": state for name, state in position.sampler.items()}},
    )


def load_rollout(
    collector: ExperienceCollector,
    checkpoint: str | Path,
    ranks: Ranks,
    *,
    version: int,
    window: Mapping[str, int],
    vocab_size: int | None = None,
    discards: bool = False,
) -> StepPosition:
    """Take up the rollouts that a checkpoint holds; every rank calls it, and all come to the same decision.

    Args:
        collector: Takes them up; fresh.
        checkpoint: The checkpoint's folder.
        ranks: The processes; fewer or more than saved it, except inside a window.
        version: The optimizer step that the checkpoint's other parts are at.
        window: As in `save_rollout`.
        vocab_size: Token ids must be below it.
        discards: Whether groups that can't be taken up are booked as set aside, in the place of an error.

    Returns:
        Where the run goes on.

    Raises:
        StateError: If the state is damaged or does not fit this run.
    """
    reader = Reader(collector, Path(checkpoint), ranks, version, window, vocab_size)
    try:
        ranks.agree(reader.read)
        lost = reader.read_tokens()
        if lost and not discards:
            raise StateError(next(iter(lost.values())))
        return ranks.agree(lambda: reader.take_up(lost))
    except StateError as error:
        if not discards:
            raise
        _start_without(collector, checkpoint, ranks, str(error))
        return StepPosition(version, log_bytes=-1)


def _start_without(collector: ExperienceCollector, checkpoint: str | Path, ranks: Ranks, reason: str) -> None:
    """Book all that a checkpoint held as set aside, as far as its ledger can still be read."""
    collector.ledger = ledger = Ledger()
    balance = read_ledger(checkpoint)
    is_known = balance is not None and _is_balance(balance)
    num_groups = num_tokens = 0
    if balance is not None and is_known:
        num_groups = balance["groups"]["ready"] + balance["groups"]["unfinished"]
        num_tokens = balance["tokens"]["held"]
        ledger.groups = {name: balance["groups"][name] for name in ledger.groups}
        ledger.tokens = {name: balance["tokens"][name] for name in ledger.tokens}
    ledger.discard(num_groups, num_tokens, reason)
    collector.prompts.go_to(ledger.groups["admitted"])
    collector.take_up(
        unfinished=[],
        ready=[],
        training=[],
        tickets={},
        open_by_owner=[0] * ranks.num_owners,
        unfinished_tokens=0,
    )
    logger.warning(
        "Going on without the rollouts in progress of %s, as `resume_rollout='discard'` allows. %s The reason: %s",
        checkpoint,
        f"{num_groups} groups with {num_tokens} tokens are booked as set aside."
        if is_known
        else "Its ledger can't be read either: what was held is not known, and the ledger and the prompts start anew.",
        reason,
    )


def _is_balance(balance: Any) -> bool:
    ledger = Ledger()
    names = {"groups": {*ledger.groups, "ready", "unfinished"}, "tokens": {*ledger.tokens, "held"}}
    if balance.keys() != names.keys():
        return False
    for part, first in (("groups", "admitted"), ("tokens", "generated")):
        entries = balance[part]
        if not isinstance(entries, dict) or entries.keys() != names[part] or not all(map(is_count, entries.values())):
            return False
        if entries[first] * 2 != sum(entries.values()):
            return False
    return True

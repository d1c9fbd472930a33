"""Read the rollouts in progress from a checkpoint: check what is there, deal it to the ranks, and take it up."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .collector import ON_POLICY, ExperienceCollector, Ticket
from .packing import (
    RECORD_TYPES,
    TOKEN_TYPES,
    RecordBounds,
    Records,
    check_records,
    check_tokens,
    num_held_tokens,
    rollout_tokens,
    unpack_groups,
)
from .pool import Ledger, RolloutGroup, is_count
from .prompts import OtherPromptsError
from .schedule import dealt_owners, expected_remaining
from .state import GROUPS, SHARED, STATE, WAY_ON, Ranks, StateError, damaged, read_state

logger = logging.getLogger(__name__)

COMPLETE = ("ready", "training")  # sections of groups that all ranks hold
_BUFFERED_NAME = re.compile(r"buffered\.(\d+)\.(\w+)")
_BUFFERED_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where between two updates a run is.

    Args:
        version: Policy version, the optimizer step.
        step: Backward passes so far; 0 outside a window, since all that follows from it repeats with each.
        log_bytes: Bytes of `rollouts.jsonl`.
        buffered: Inside a window the micro-batches of its batch, else nothing.
        sampler: State of the generators that sample, where they have gone on since the last update.
    """

    version: int
    step: int = 0
    log_bytes: int = 0
    buffered: list[dict[str, Tensor]] = field(default_factory=list)
    sampler: dict[str, Tensor] = field(default_factory=dict)


class Reader:
    """One checkpoint's way into a collector."""

    def __init__(
        self,
        collector: ExperienceCollector,
        checkpoint: Path,
        ranks: Ranks,
        version: int,
        window: Mapping[str, int],
        vocab_size: int | None,
    ) -> None:
        self._collector = collector
        self._checkpoint = checkpoint
        self._ranks = ranks
        self._version = version
        self._window = dict(window)
        self._vocab_size = vocab_size
        self._tensors: dict[str, dict[str, Tensor]] = {}

    # ------------------------------------------------------------------------------------- what all ranks read alike

    def read(self) -> None:
        """Read and check the state's small parts, and deal the unfinished groups."""
        self._saved = saved = read_state(self._checkpoint)
        content = saved.content
        for name in ("version", "step", "rollout_log_bytes", "ranks_per_engine"):
            if not is_count(content.get(name)):
                raise self._wrong(f"`{name}` is {content.get(name)!r}")
        if content["version"] != self._version:
            raise self._wrong(
                f"it belongs to step {content['version']}, but the checkpoint is of step {self._version}"
            )
        self._check_settings(content.get("settings"))
        ledger, prompts = Ledger(), self._collector.prompts
        try:
            ledger.load_state_dict(content.get("ledger"))
            prompts.load_state_dict(content.get("prompts"))  # type: ignore[arg-type]
        except OtherPromptsError as error:
            raise StateError(f"{self._saved.folder / STATE}: {error} {WAY_ON}") from error
        except ValueError as error:
            raise self._wrong(str(error).rstrip(".")) from error
        self._ledger = ledger
        self._read_owners()
        self._records = {section: self._records_of(section) for section in (*self._old, *COMPLETE)}
        self._check_groups()
        self._check_window()
        self._notes = self._checked_notes()
        self._deal()

    def _wrong(self, reason: str, name: str = STATE) -> StateError:
        return damaged(self._saved.folder, name, reason)

    def _check_settings(self, settings: Any) -> None:
        mine = self._collector.fixed_settings
        if not isinstance(settings, dict) or settings.keys() != mine.keys():
            raise self._wrong("it holds no settings")
        for name, value in mine.items():
            if settings[name] != value:
                saved, here = f"`{name}` {settings[name]}", str(value)
                if name == ON_POLICY:
                    saved, here = ("one segment" if each else "several segments" for each in (settings[name], value))
                raise StateError(
                    f"{self._saved.folder / STATE} was saved with {saved}, but this run has {here}: its "
                    f"groups in progress could not be trained on. Resume with the same value. {WAY_ON}"
                )

    def _read_owners(self) -> None:
        """Name the sections of unfinished groups, one for each engine of the run that saved them."""
        num_ranks, per_engine = self._saved.num_ranks, self._saved.content["ranks_per_engine"]
        if per_engine < 1 or num_ranks % per_engine:
            raise self._wrong(f"`ranks_per_engine` is {per_engine} with {num_ranks} ranks")
        self._old = [f"rank{rank}" for rank in range(0, num_ranks, per_engine)]

    def _records_of(self, section: str) -> Records:
        start = f"{section}."
        records = {name[len(start) :]: array for name, array in self._saved.groups.items() if name.startswith(start)}
        settings = self._collector.fixed_settings
        bounds = RecordBounds(
            num_generations=settings["num_generations"],
            num_rewards=settings["number of reward functions"],
            num_rows=self._saved.content["prompts"]["num_rows"],
            max_completion_length=settings["max_completion_length"],
            version=self._version,
            num_admitted=self._ledger.groups["admitted"],
        )
        try:
            check_records(records, bounds, is_complete=section in COMPLETE)
        except ValueError as error:
            raise self._wrong(f"{error} (in `{section}`)", GROUPS) from error
        return {name: records[name] for name in RECORD_TYPES}

    def _check_groups(self) -> None:
        ids = np.concatenate([records["group_id"] for records in self._records.values()])
        if len(np.unique(ids)) != len(ids):
            raise self._wrong("a group is held twice", GROUPS)
        unfinished = [self._records[section] for section in self._old]
        try:
            self._ledger.balance(
                ready=sum(len(self._records[section]["group_id"]) for section in COMPLETE),
                unfinished=sum(len(records["group_id"]) for records in unfinished),
                held_tokens=sum(num_held_tokens(records) for records in self._records.values()),
            )
        except RuntimeError as error:
            raise self._wrong(str(error).split(". ")[0], GROUPS) from error

    def _check_window(self) -> None:
        """Find out whether the run goes on inside a batch, and whether this one can."""
        step, saved = self._saved.content["step"], self._saved.content.get("window")
        if not isinstance(saved, dict) or not all(is_count(value) for value in saved.values()):
            raise self._wrong("it does not say how many micro-batches a batch has")
        num_batches = saved.get("num_batches")
        if saved.keys() != {*self._window, "num_batches"} or bool(step) != bool(num_batches):
            raise self._wrong(f"it is at micro-batch {step} with {num_batches} in hand")
        is_training = len(self._records["training"]["group_id"]) > 0
        if is_training != bool(step):
            raise self._wrong(
                f"it is at micro-batch {step}, but a batch is {'' if is_training else 'not '}in training"
            )
        self._num_batches = int(num_batches or 0)
        changed = [name for name, value in self._window.items() if saved[name] != value]
        if step and changed:
            raise StateError(
                f"{self._saved.folder} was saved inside a batch, between two updates on it, with "
                f"{', '.join(f'{name} {saved[name]}' for name in changed)}, but this run has "
                f"{', '.join(f'{name} {self._window[name]}' for name in changed)}: what is left of the batch is cut for "
                "those. Resume with the same values, or from a checkpoint at the end of a batch (`save_steps` a multiple "
                f"of the updates that a batch feeds). {WAY_ON}"
            )

    def _checked_notes(self) -> dict[str, list[list[Any]]]:
        notes, sections = self._saved.content.get("notes"), set(self._records)
        of_ranks = {f"rank{rank}" for rank in range(self._saved.num_ranks)}
        if not isinstance(notes, dict) or notes.keys() != sections | of_ranks:
            raise self._wrong("its notes are not those of its groups")
        num_generations = self._collector.fixed_settings["num_generations"]
        for section, each in notes.items():
            ids = set(self._records[section]["group_id"].tolist()) if section in sections else set()
            if not isinstance(each, list) or not all(_is_note(note, ids, num_generations) for note in each):
                raise self._wrong(f"the notes of `{section}` are not those of its groups")
        return notes

    def _deal(self) -> None:
        """Give every unfinished group its engine: the one it had, or with another number of them the least busy one."""
        num_generations = self._collector.fixed_settings["num_generations"]
        groups: list[tuple[int, int, int, int, float, int]] = []
        for number, section in enumerate(self._old):
            records = self._records[section]
            lengths = rollout_tokens(records).reshape(-1, num_generations)
            is_open = (records["finish"] == 0).reshape(-1, num_generations)
            for place in range(len(records["group_id"])):
                limit = int(records["max_length"][place])
                work = sum(
                    expected_remaining(int(length), limit, self._ledger.mean_length)
                    for length in lengths[place][is_open[place]]
                )
                ticket = (int(records[name][place]) for name in ("group_id", "row_index", "admitted_version"))
                groups.append((*ticket, number, work, int(is_open[place].sum())))  # type: ignore[arg-type]
        if len(self._old) == self._ranks.num_owners:
            owners = [group[3] for group in groups]
        else:
            owners = dealt_owners([group[4] for group in groups], self._ranks.num_owners)
        self._tickets = {
            group_id: Ticket(row_index, admitted_version, owner)
            for (group_id, row_index, admitted_version, *_), owner in sorted(zip(groups, owners, strict=True))
        }
        self._num_open = {group[0]: group[5] for group in groups}

    # --------------------------------------------------------------------------------------------- what a rank needs

    def read_tokens(self) -> dict[str, str]:
        """Read the tokens that this rank needs; return what any rank could not read, with the reason, the same on all."""
        lost: dict[str, str] = {}
        for section in self._old:
            if self._is_needed(section):
                self._read_section(section, f"{section}.safetensors", lost)
        for section in COMPLETE:
            self._read_section(section, SHARED, lost)
        if self._num_batches:
            self._read_buffered(lost)
        return {name: reason for each in self._ranks.gather(lambda: lost) for name, reason in each.items()}

    def _is_needed(self, section: str) -> bool:
        ids = self._records[section]["group_id"].tolist()
        # One that holds nothing for anybody is looked at too: by the engine it belonged to, or the first.
        number = self._old.index(section)
        is_mine = number == self._ranks.owner or (number >= self._ranks.num_owners and self._ranks.owner == 0)
        return is_mine or any(self._tickets[group_id].owner == self._ranks.owner for group_id in ids)

    def _read_section(self, section: str, name: str, lost: dict[str, str]) -> None:
        start = f"{section}." if section in COMPLETE else ""
        try:
            if name not in self._tensors:
                self._tensors[name] = self._saved.tensors(name)
            tensors = self._tensors[name]
            arrays = {key: tensors[start + key].numpy() for key in TOKEN_TYPES if start + key in tensors}
            check_tokens(self._records[section], arrays, self._vocab_size)
        except StateError as error:
            lost[section] = str(error)
        except (ValueError, TypeError) as error:  # torch: a type that numpy does not know
            lost[section] = str(self._wrong(f"{error} (in `{section}`)", name))

    def _read_buffered(self, lost: dict[str, str]) -> None:
        name = f"rank{self._ranks.rank}.safetensors"
        batches: list[dict[str, Tensor]] = [{} for _ in range(self._num_batches)]
        try:
            if name not in self._tensors:
                self._tensors[name] = self._saved.tensors(name)
            for key, tensor in self._tensors[name].items():
                found = _BUFFERED_NAME.fullmatch(key)
                if found is not None and int(found[1]) < len(batches):
                    batches[int(found[1])][found[2]] = tensor
            rows = self._window["per_device_train_batch_size"]
            for batch in batches:
                if not batch.keys() >= set(_BUFFERED_KEYS) or batch.keys() != batches[0].keys():
                    raise self._wrong("a micro-batch is not there as a whole", name)
                if any(tensor.ndim and len(tensor) != rows for tensor in batch.values()):
                    raise self._wrong(f"a micro-batch has not {rows} rows", name)
        except StateError as error:
            lost["training"] = str(error)
        self._buffered = batches

    def take_up(self, lost: Mapping[str, str]) -> StepPosition:
        """Hand all that is not lost to the collector."""
        groups = {section: [] if section in lost else self._groups_of(section) for section in self._records}
        for section, reason in lost.items():
            records = self._records[section]
            self._ledger.discard(len(records["group_id"]), num_held_tokens(records), reason)
            logger.warning(
                "%d groups with %d tokens can't be taken up from %s and are booked as set aside, as "
                "`resume_rollout='discard'` allows. The reason: %s",
                len(records["group_id"]),
                num_held_tokens(records),
                self._checkpoint,
                reason,
            )
            for group_id in records["group_id"].tolist():
                self._tickets.pop(group_id, None)
        open_by_owner = [0] * self._ranks.num_owners
        for group_id, ticket in self._tickets.items():
            open_by_owner[ticket.owner] += self._num_open[group_id]
        self._collector.ledger = self._ledger
        kept = [self._records[section] for section in self._old if section not in lost]
        mine = [group for section in self._old for group in groups[section]]
        try:
            self._collector.take_up(
                unfinished=sorted(mine, key=lambda group: group.group_id),
                ready=groups["ready"],
                training=groups["training"],
                tickets=self._tickets,
                open_by_owner=open_by_owner,
                unfinished_tokens=sum(map(num_held_tokens, kept)),
            )
        except ValueError as error:
            raise StateError(f"{self._checkpoint}: {error}. {WAY_ON}") from error
        is_inside = bool(self._num_batches) and "training" not in lost
        return StepPosition(
            self._version,
            step=self._saved.content["step"] if is_inside else 0,
            log_bytes=self._saved.content["rollout_log_bytes"],
            buffered=self._buffered if is_inside else [],
            sampler=self._sampler(),
        )

    def _groups_of(self, section: str) -> list[RolloutGroup]:
        if section in self._old and not self._is_needed(section):
            return []
        name, start = (SHARED, f"{section}.") if section in COMPLETE else (f"{section}.safetensors", "")
        arrays = {key: self._tensors[name][start + key].numpy() for key in TOKEN_TYPES}
        records = self._records[section]
        keep = [
            section in COMPLETE or self._tickets[group_id].owner == self._ranks.owner
            for group_id in records["group_id"].tolist()
        ]
        return unpack_groups(records, arrays, self._notes[section], keep)

    def _sampler(self) -> dict[str, Tensor]:
        """Return this rank's own generators' state, as long as there are as many ranks."""
        tensors = self._tensors.get(f"rank{self._ranks.rank}.safetensors", {})
        if self._saved.num_ranks != self._ranks.num_ranks:
            return {}
        start = "sampler."
        return {
            name[len(start) :]: tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(start) and tensor.dtype is torch.uint8 and tensor.ndim == 1
        }


def _is_note(note: Any, group_ids: set[int], num_generations: int) -> bool:
    if not isinstance(note, list) or len(note) != 4:
        return False
    group_id, index, logs, metrics = note
    return (
        is_count(group_id)
        and group_id in group_ids
        and is_count(index)
        and index < num_generations
        and isinstance(logs, dict)
        and isinstance(metrics, dict)
        and all(
            isinstance(values, list)
            and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
            for values in metrics.values()
        )
    )

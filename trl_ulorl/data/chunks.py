"""Clean a piece of the data on its own, in any process, and leave the result in files that a restart finds.

A chunk is a fixed range of rows. Its files in the working folder are
    rows-N.jsonl    the rows that are left, as they will stand in kept.jsonl
    audit-N.jsonl   what happened to every row, in order; the last line of a row is its fate
    bands-N.npy     MinHash keys of the rows that are left, shape (12, rows)
    index-N.npy     where each of these rows stands, and keys of its question and answer; written last: the chunk is done
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from json.encoder import encode_basestring as _quoted
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..rewards.normalize import normalize_answer
from .choices import multiple_choice
from .forms import proof, true_false
from .rules import MAX_ANSWER_CHARACTERS, Rule, missing, multi_part, overlong, short_answer
from .similarity import Features, LeakageIndex, band_keys, features, token_key
from .sources import Columns, Prompt, lookup, read_answer, read_prompt

CHUNK_ROWS = 5_000

INDEX = np.dtype([("row", "<i8"), ("offset", "<i8"), ("length", "<i4"), ("tokens", "<i8"), ("answer", "<i8")])

KEPT = (
    '{{"row": {row}, "rule": "all", "action": "kept", "reason": "passed every rule", "before": null, "after": null}}\n'
)


@dataclass(frozen=True)
class ChunkSettings:
    """What a worker needs to know.

    Args:
        columns: Those of the question and the reference.
        rules: Names of the rules to apply.
        max_answer_characters: Longest reference to keep.
        can_rewrite: Whether rows that a rule can't turn into short-answer form wait for a model instead of being dropped.
        evaluation_problems: Name and question of each problem that must not be trained on.
    """

    columns: Columns
    rules: tuple[str, ...]
    max_answer_characters: int = MAX_ANSWER_CHARACTERS
    can_rewrite: bool = False
    evaluation_problems: tuple[tuple[str, str], ...] = ()

    def row_rules(self) -> dict[str, Rule]:
        """Return the rules that look at one row alone, in their order."""
        ordered: dict[str, Rule] = {
            "missing": missing,
            "short_answer": short_answer,
            "multiple_choice": multiple_choice,
            "multi_part": multi_part,
            "proof": proof,
            "true_false": true_false,
            "overlong": partial(overlong, max_characters=self.max_answer_characters),
        }
        return {name: rule for name, rule in ordered.items() if name in self.rules}


@dataclass
class Judged:
    """A row after the rules that look at it alone.

    Args:
        question: In its last form.
        answer: In its last form.
        events: Lines of the audit, but for the row's number.
        fate: "kept", "dropped" or "pending": a model is to rewrite it.
    """

    question: str
    answer: str
    events: list[dict[str, Any]] = field(default_factory=list)
    fate: str = "kept"


def judge_row(question: str, answer: str, row_rules: Mapping[str, Rule], *, can_rewrite: bool = False) -> Judged:
    """Apply rules to one row, each to what the one before left, until one drops it.

    Args:
        question: Its text.
        answer: Its reference.
        row_rules: By name, in order.
        can_rewrite: Whether a row that needs a model waits for it.
    """
    judged = Judged(question, answer)
    for name, rule in row_rules.items():
        finding = rule(judged.question, judged.answer)
        if finding is None:
            continue
        if finding.question is None and finding.answer is None:
            judged.fate = "pending" if finding.needs_model and can_rewrite else "dropped"
            judged.events.append(event(name, judged.fate, finding.reason, (judged.question, judged.answer)))
            break
        after = (finding.question or judged.question, finding.answer or judged.answer)
        judged.events.append(event(name, "changed", finding.reason, (judged.question, judged.answer), after))
        judged.question, judged.answer = after
    return judged


def event(
    rule: str, action: str, reason: str, before: tuple[str, str] | None, after: tuple[str, str] | None = None
) -> dict[str, Any]:
    """Return a line of the audit, but for the row's number."""
    return {"rule": rule, "action": action, "reason": reason, "before": _texts(before), "after": _texts(after)}


def _texts(row: tuple[str, str] | None) -> dict[str, str] | None:
    return None if row is None else {"question": row[0], "answer": row[1]}


def answer_key(answer: str) -> int:
    """Return a key that equal spellings of an answer share: a signed 64-bit number."""
    # A plain number is its own spelling, and most references are one.
    spelling = answer if answer.isascii() and answer.isdecimal() else normalize_answer(answer)
    return int.from_bytes(
        blake2b(spelling.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
    )


class ChunkCleaner:
    """Cleans chunks in one process.

    Args:
        settings: What to apply.
        folder: Where the files go.
    """

    def __init__(self, settings: ChunkSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._rules = settings.row_rules()
        self._columns = settings.columns
        self._taken = {"prompt", "answer", settings.columns.prompt, settings.columns.answer}
        self._leakage = LeakageIndex(settings.evaluation_problems) if "leakage" in settings.rules else None

    def clean(self, number: int, first_row: int, table: Any) -> int:
        """Clean a chunk and write its files; return the number of its rows.

        Args:
            number: Of the chunk, from 0.
            first_row: Place of its first row in the data.
            table: Its rows, a `pyarrow.Table`.

        Raises:
            ValueError: If a cell is no question or answer, or JSON can't hold it.
        """
        with _without_cycle_search():
            return self._clean(number, first_row, table.to_pylist())

    def _clean(self, number: int, first_row: int, rows: list[dict[str, Any]]) -> int:
        results: list[tuple[bytes | None, Judged]] = []
        for place, row in enumerate(rows, start=first_row):
            try:
                results.append(self._clean_row(row))
            except (ValueError, TypeError) as error:
                raise ValueError(f"Row {place}: {error}") from error
        words = [features(judged.question) if line is not None else _NO_FEATURES for line, judged in results]
        self._drop_leaked(results, words)
        audit: list[str] = []
        lines: list[bytes] = []
        index: list[tuple[int, int, int, int, int]] = []
        left: list[Features] = []
        offset = 0
        for place, (line, judged), row_words in zip(
            range(first_row, first_row + len(rows)), results, words, strict=True
        ):
            audit += [_audit_line(place, entry) for entry in judged.events] or [KEPT.format(row=place)]
            if line is None:
                continue
            lines.append(line)
            left.append(row_words)
            index.append((place, offset, len(line), token_key(row_words), answer_key(judged.answer)))
            offset += len(line)
        self._write(f"rows-{number}.jsonl", b"".join(lines))
        self._write(f"audit-{number}.jsonl", "".join(audit).encode())
        self._save(f"bands-{number}.npy", band_keys(left, [entry[-1] for entry in index]).T)
        self._save(f"index-{number}.npy", np.array(index, dtype=INDEX))
        return len(rows)

    def _clean_row(self, row: dict[str, Any]) -> tuple[bytes | None, Judged]:
        value = lookup(row, self._columns.prompt)
        prompt = read_prompt(value)
        judged = judge_row(
            prompt.question,
            read_answer(lookup(row, self._columns.answer)),
            self._rules,
            can_rewrite=self._settings.can_rewrite,
        )
        if judged.fate == "dropped":
            return None, judged
        others = {name: cell for name, cell in row.items() if name not in self._taken}
        return row_line(_messages(value, prompt, judged.question), judged.answer, others), judged

    def _drop_leaked(self, results: list[tuple[bytes | None, Judged]], words: Sequence[Features]) -> None:
        if self._leakage is None:
            return
        for place in np.flatnonzero(self._leakage.suspects(words)).tolist():
            line, judged = results[place]
            overlap = self._leakage.find(words[place]) if line is not None else None
            if overlap is None:
                continue
            reason = f"it holds the evaluation problem {overlap.name}: {overlap.how}"
            if judged.fate == "pending":
                judged.events.pop()  # no model is asked any more
            judged.fate = "dropped"
            judged.events.append(event("leakage", "dropped", reason, (judged.question, judged.answer)))
            results[place] = (None, judged)

    def _write(self, name: str, content: bytes) -> None:
        temporary = self._folder / f"{name}.new"
        temporary.write_bytes(content)
        os.replace(temporary, self._folder / name)

    def _save(self, name: str, array: NDArray[Any]) -> None:
        temporary = self._folder / f"{name}.new"
        with temporary.open("wb") as file:
            np.save(file, np.ascontiguousarray(array))
        os.replace(temporary, self._folder / name)


@contextmanager
def _without_cycle_search() -> Iterator[None]:
    """Spare the search for reference cycles: a chunk makes a million objects and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _messages(value: Any, prompt: Prompt, question: str) -> list[dict[str, Any]]:
    """Return the conversation; one that no rule changed stays as it was, up to what follows the question."""
    if question == prompt.question and isinstance(value, list):
        return [*(dict(message) for message in prompt.messages), {"role": "user", "content": _last_content(value)}]
    return prompt.to_messages(question)


def _last_content(messages: Sequence[Mapping[str, Any]]) -> Any:
    return next(message["content"] for message in reversed(messages) if message.get("role", "user") == "user")


def _audit_line(row: int, entry: dict[str, Any]) -> str:
    return f'{{"row": {row}, {_ENCODER.encode(entry)[1:]}\n'


def row_line(messages: Sequence[Mapping[str, Any]], answer: str, others: Mapping[str, Any]) -> bytes:
    """Write a row of kept.jsonl.

    Args:
        messages: Its prompt.
        answer: Its reference.
        others: Its other columns.

    Raises:
        TypeError: If JSON can't hold a cell.
    """
    # Put together from parts: an encoder makes itself ready for every object anew, which takes longer than most rows.
    is_plain = len(messages) == 1 and tuple(messages[0]) == ("role", "content") and type(messages[0]["content"]) is str
    prompt = (
        f'[{{"role": {_encoded(messages[0]["role"])}, "content": {_quoted(messages[0]["content"])}}}]'
        if is_plain
        else _ENCODER.encode(messages)
    )
    ends = "".join([f", {_quoted(name)}: {_encoded(cell)}" for name, cell in others.items()])
    return f'{{"prompt": {prompt}, "answer": {_quoted(answer)}{ends}}}\n'.encode("utf-8", "surrogatepass")


def _encoded(value: Any) -> str:
    return _quoted(value) if type(value) is str else _ENCODER.encode(value)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        raise TypeError(
            "a column holds bytes, which JSON can't: remove it before cleaning, and join it again afterwards"
        )
    return str(value)  # dates and decimals


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_plain)

_NO_FEATURES = Features((), (), ())

_cleaner: ChunkCleaner | None = None


def start_worker(settings: ChunkSettings, folder: Path) -> None:
    """Prepare a worker process."""
    global _cleaner
    _cleaner = ChunkCleaner(settings, folder)


def work(number: int, first_row: int, serialized: bytes) -> int:
    """Clean a chunk in a worker process; the table comes in Arrow's stream format."""
    import pyarrow as pa

    assert _cleaner is not None, "`start_worker` prepares the process"
    return _cleaner.clean(number, first_row, pa.ipc.open_stream(serialized).read_all())


Work = Callable[[int, int, Any], int]

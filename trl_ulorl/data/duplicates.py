"""Find the same question twice, over all chunks: exactly, nearly, or with another answer.

Memory stays in bounds: keys of one band are looked at a part at a time, and what is kept is 13 bytes a row.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rewards.verify import verify_answer
from .chunks import INDEX
from .similarity import MIN_SIMILARITY, NUM_BANDS, Features, features, similarity

KIND_NONE, KIND_SAME, KIND_NEAR, KIND_CONTRADICTION = range(4)
FATE = np.dtype([("kind", "u1"), ("of", "<i8"), ("similarity", "<f4")])

_PART_ROWS = 4_000_000  # keys that are sorted at a time
_CACHED_ROWS = 4_096


class Row(NamedTuple):
    """A row that is left, as far as duplicates go."""

    number: int
    question: str
    answer: str


class Rows:
    """The rows that all chunks have left, by their place among them.

    Args:
        folder: Holds the files of the chunks; their keys are put together in two files there.
        num_chunks: How many there are.
    """

    def __init__(self, folder: Path, num_chunks: int) -> None:
        self._folder = folder
        sizes = [_header(folder / f"index-{number}.npy")[0][0] for number in range(num_chunks)]
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._cache: OrderedDict[int, tuple[Row, Features]] = OrderedDict()
        if not len(self):  # nothing can't be mapped into memory
            self._index, self._bands = np.zeros(0, dtype=INDEX), np.zeros((NUM_BANDS, 0), dtype=np.uint64)
            return
        shape = (NUM_BANDS, len(self))
        self._index = np.lib.format.open_memmap(folder / "index.npy", mode="w+", dtype=INDEX, shape=(len(self),))
        self._bands = np.lib.format.open_memmap(folder / "bands.npy", mode="w+", dtype=np.uint64, shape=shape)
        for number in range(num_chunks):
            here = slice(self.starts[number], self.starts[number + 1])
            self._index[here] = np.load(folder / f"index-{number}.npy")
            self._bands[:, here] = np.load(folder / f"bands-{number}.npy")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the index."""
        return np.ascontiguousarray(self._index[name])

    def band(self, band: int) -> NDArray[Any]:
        """Return the keys of a band."""
        keys: NDArray[Any] = self._bands[band]
        return keys

    def read(self, place: int) -> tuple[Row, Features]:
        """Return a row and what is compared of it."""
        if (known := self._cache.get(place)) is not None:
            self._cache.move_to_end(place)
            return known
        chunk = int(np.searchsorted(self.starts, place, side="right")) - 1
        entry = self._index[place]
        with (self._folder / f"rows-{chunk}.jsonl").open("rb") as file:
            file.seek(int(entry["offset"]))
            values = json.loads(file.read(int(entry["length"])))
        row = Row(int(entry["row"]), question_of(values), values["answer"])
        self._cache[place] = (row, features(row.question))
        if len(self._cache) > _CACHED_ROWS:
            self._cache.popitem(last=False)
        return self._cache[place]


def _header(path: Path) -> tuple[tuple[int, ...], Any]:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype


def question_of(row: dict[str, Any]) -> str:
    """Return the question of a row of kept.jsonl, without the instructions around it."""
    from .sources import read_prompt

    return read_prompt(row["prompt"]).question


def find_duplicates(
    rows: Rows, *, same: bool = True, contradictions: bool = True
) -> tuple[NDArray[Any], dict[int, str]]:
    """Decide for every row whether it repeats an earlier one, or is contradicted by another.

    Args:
        rows: Those that are left.
        same: Whether duplicates are looked for, the same questions and nearly the same ones.
        contradictions: Whether questions with answers that contradict each other are dropped, all of them; else they count
            as duplicates.

    Returns:
        For each row its kind and the place of the row that it repeats, dtype `FATE`, shape `(N,)`; and by place the
        answers of contradicted questions.
    """
    fates = np.zeros(len(rows), dtype=FATE)
    answers: dict[int, str] = {}
    _find_same(rows, fates, answers, same=same, contradictions=contradictions)
    if same:
        _find_near(rows, fates)
    return fates, answers


def _find_same(rows: Rows, fates: NDArray[Any], answers: dict[int, str], *, same: bool, contradictions: bool) -> None:
    keys = rows.column("answer")
    for group in _groups(rows.column("tokens")):
        if contradictions and (keys[group] != keys[group[0]]).any():
            _, firsts = np.unique(keys[group], return_index=True)
            different = [rows.read(int(place))[0].answer for place in group[np.sort(firsts)]]
            if _contradict(different):
                fates["kind"][group] = KIND_CONTRADICTION
                answers.update((int(place), ", ".join(map(repr, different[:5]))) for place in group)
                continue
        if same:
            fates[group[1:]] = (KIND_SAME, group[0], 1.0)


def _contradict(answers: Sequence[str]) -> bool:
    """Whether the first answer is surely not equal to one of the others."""
    return any(
        verify_answer(rf"\boxed{{{other}}}", answers[0]).equivalent is False
        and verify_answer(rf"\boxed{{{answers[0]}}}", other).equivalent is False
        for other in answers[1:]
    )


def _find_near(rows: Rows, fates: NDArray[Any]) -> None:
    later, earlier = _candidates(rows, fates["kind"] != KIND_NONE)
    for place, other in zip(later.tolist(), earlier.tolist(), strict=True):
        if fates["kind"][place] != KIND_NONE:
            continue
        for candidate in {other, int(fates["of"][other])} if fates["kind"][other] == KIND_NEAR else {other}:
            if fates["kind"][candidate] != KIND_NONE:
                continue
            alike = similarity(rows.read(place)[1], rows.read(candidate)[1])
            if alike >= MIN_SIMILARITY:
                fates[place] = (KIND_NEAR, candidate, alike)
                break


def _candidates(rows: Rows, is_out: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs of places that share a band, ascending: each row with the first and with the last one before it."""
    codes = np.zeros(0, dtype=np.int64)  # of a pair: the later place times the number of rows, plus the earlier one
    for band in range(NUM_BANDS):
        found = [codes]
        for places, firsts in _equal_keys(rows.band(band), is_out):
            repeats = np.flatnonzero(firsts < np.arange(len(places)))
            found += [places[repeats] * len(rows) + places[before] for before in (repeats - 1, firsts[repeats])]
        codes = np.unique(np.concatenate(found))
    later, earlier = np.divmod(codes, max(len(rows), 1))
    return later, earlier


def _groups(column: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the places of equal keys, ascending, for each key that occurs more than once."""
    for places, firsts in _equal_keys(column):
        starts = np.unique(firsts[firsts < np.arange(len(places))])
        ends = np.searchsorted(firsts, starts, side="right")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield places[start:end]


def _equal_keys(
    column: NDArray[Any], is_out: NDArray[np.bool_] | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield places with those of equal keys side by side, ascending; and for each where the first with its key stands.

    Args:
        column: A key for each place, of 64 bits.
        is_out: Places to leave out.
    """
    keys = column.view(np.uint64)
    num_parts = max(1, -(-len(keys) // _PART_ROWS))
    for part in range(num_parts):
        chosen = np.ones(len(keys), dtype=bool) if num_parts == 1 else keys % np.uint64(num_parts) == part
        if is_out is not None:
            chosen &= ~is_out
        places = np.flatnonzero(chosen)
        part_keys = keys[places]
        order = np.argsort(part_keys, kind="stable")
        ordered = part_keys[order]
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]
        yield places[order], np.maximum.accumulate(np.where(is_first, np.arange(len(ordered)), 0))

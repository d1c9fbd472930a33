r"""Where rows come from, for all commands: the Hub or a local file, and column shapes known without a mapping.

DAPO-Math-17k   prompt [{"role": "user", "content": "Solve the following math problem ..."}]
                reward_model {"ground_truth": "34", ...}
DeepMath-103K   question, final_answer
OpenR1-Math     problem, answer, solution
GSM8K, MATH     question, answer; problem, solution: the answer ends a worked solution
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_COLUMNS = ("prompt", "problem", "question", "query", "instruction", "input")
ANSWER_COLUMNS = (
    "answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "target", "solution", "output",
)  # fmt: skip
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A data set of the Hub that is known by a short name."""

    hub_name: str
    split: str
    prompt_column: str
    answer_column: str
    num_problems: int


BENCHMARKS = {
    "aime_2025": Benchmark("math-ai/aime25", "test", "problem", "answer", 30),
    "beyond_aime": Benchmark("ByteDance-Seed/BeyondAIME", "test", "problem", "answer", 100),
}

# Instructions around the problem in data sets that hold whole prompts; what is judged is the problem alone.
_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        (
            r"(?P<before>\s*Solve the following math problem step by step\..*?answer to the problem\.\s*)(?P<problem>.+?)"
            r"(?P<after>\s*Remember to put your answer on its own line after \"Answer:\"\.\s*)"
        ),
        (
            r"(?P<before>\s*)(?P<problem>.+?)(?P<after>\s*(?:Please\s+|Let's\s+)?(?:reason|think) step by step"
            r"(?:,? and|\.)\s*(?:put|output|give) (?:your|the) final answer.*)"
        ),
        (
            r"(?P<before>\s*)(?P<problem>.+?)(?P<after>\s*(?:Please\s+)?(?:put|present|output) your final answer (?:with)?in "
            r"\\boxed\{\}\.?\s*)"
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold the question and the reference; a dot leads into a nested column."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The question of one row and what stands around it, so that a changed question can be put back.

    Args:
        question: The problem itself.
        before: Instructions before it, in the same message.
        after: Instructions after it.
        messages: The messages before the last one of the user; none where the prompt was a text.
    """

    question: str
    before: str = ""
    after: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()

    def to_messages(self, question: str) -> list[dict[str, Any]]:
        """Return the conversation with another question, in the form that training reads."""
        content = f"{self.before}{question}{self.after}"
        return [*(dict(message) for message in self.messages), {"role": "user", "content": content}]


def read_prompt(value: Any) -> Prompt:
    """Read a prompt column: a text, or messages of which the user's last one is the question.

    Args:
        value: The cell.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> read_prompt([{"role": "user", "content": "1+1? Please reason step by step, and put your final answer ..."}]).question
        '1+1?'
    """
    if value is None:
        return Prompt("")
    if isinstance(value, str):
        return _unwrapped(value, ())
    if isinstance(value, list) and all(isinstance(message, Mapping) and "content" in message for message in value):
        users = [place for place, message in enumerate(value) if message.get("role", "user") == "user"]
        if not users:
            return Prompt("")
        messages = tuple(plain_message(message) for message in value[: users[-1]])
        return _unwrapped(str(value[users[-1]]["content"] or ""), messages)
    raise ValueError(
        f"A prompt ({str(value)[:80]!r}) must be a text or a list of messages with `role` and `content`: nothing else is a "
        "question. Name another column with `--prompt_column`."
    )


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what Arrow filled in: fields that other rows' messages have."""
    return {name: value for name, value in message.items() if value is not None}


def _unwrapped(content: str, messages: tuple[Mapping[str, Any], ...]) -> Prompt:
    if "step by step" in content or "final answer" in content:
        for wrapper in _WRAPPERS:
            if (match := wrapper.fullmatch(content)) is not None:
                return Prompt(match["problem"].strip(), match["before"], match["after"], messages)
    return Prompt(content.strip(), messages=messages)


def read_answer(value: Any) -> str:
    """Read an answer column: text, a number, or a list that holds one of them; several are joined with commas.

    Args:
        value: The cell.

    Raises:
        ValueError: If it is anything else.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return (
            "" if math.isnan(value) else str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
        )
    if isinstance(value, list):
        return ", ".join(part for part in map(read_answer, value) if part)
    raise ValueError(
        f"An answer ({str(value)[:80]!r}) must be a text, a number or a list of them: nothing else can be compared. Name "
        "another column with `--answer_column`, with a dot into a nested one."
    )


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return a cell; a dot leads into a nested column, and what is not there is None."""
    value: Any = row.get(column)
    if value is None and "." in column:
        value = row
        for name in column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def find_columns(names: Iterable[str], prompt: str | None = None, answer: str | None = None) -> Columns:
    """Choose the columns by their names.

    Args:
        names: All columns, nested ones with dots besides.
        prompt: The one with the questions, where its name is not a usual one.
        answer: The one with the references.

    Raises:
        ValueError: If a column is not there.
    """
    known = list(names)
    for option, column in (("--prompt_column", prompt), ("--answer_column", answer)):
        if column is not None and column not in known:
            raise ValueError(
                f"`{option}` ({column!r}) is no column of the data, which has {_top(known)}. Name one of these."
            )
    prompt = prompt or next((name for name in PROMPT_COLUMNS if name in known), None)
    answer = answer or next((name for name in ANSWER_COLUMNS if name in known and name != prompt), None)
    if prompt is None:
        raise ValueError(
            f"The data has the columns {_top(known)}, and none of the usual names of questions ({', '.join(PROMPT_COLUMNS)}). "
            "Name the column with `--prompt_column`."
        )
    if answer is None:
        raise ValueError(
            f"The data has the columns {_top(known)}, and none of the usual names of answers ({', '.join(ANSWER_COLUMNS)}): "
            "without references nothing can be verified. Name the column with `--answer_column`."
        )
    return Columns(prompt, answer)


def _top(names: Sequence[str]) -> list[str]:
    return [name for name in names if "." not in name]


def is_local(name: str) -> bool:
    """Say whether a name is that of a file with a known ending, and not of a data set on the Hub."""
    return Path(name).suffix.lower() in LOADERS


def open_rows(name: str, *, config: str | None = None, split: str | None = "train", streaming: bool = False) -> Any:
    """Open a local `.jsonl`, `.json`, `.parquet` or `.csv` file or a data set on the Hub.

    Args:
        name: Path, Hub name, or short name of a benchmark. A folder is read as a copy of a data set on the Hub.
        config: Configuration of a Hub data set.
        split: Its split; None for all. A local file has one only.
        streaming: Read on the way instead of keeping an Arrow copy in the cache of `datasets`.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` when streaming; for all splits of a Hub data set a mapping of them.

    Raises:
        ValueError: If it cannot be read, or is empty.
    """
    from datasets import load_dataset

    if name in BENCHMARKS:
        name = BENCHMARKS[name].hub_name
    path = Path(name)
    loader = LOADERS.get(path.suffix.lower())
    if loader is None and path.is_file():
        raise ValueError(
            f"{name!r} must be a file that ends in {', '.join(LOADERS)}, or the name of a data set on the Hub. Pass one of these."
        )
    if loader is not None and not path.is_file():
        raise ValueError(f"There is no file {name!r}: check the path. A name on the Hub has no such ending.")
    if loader is not None and path.stat().st_size == 0:
        raise ValueError(f"{name!r} is empty: there is nothing to read. Check how it was written.")
    with _reading(name):
        if loader is not None:
            rows = load_dataset(loader, data_files=str(path), split="train", streaming=streaming)
        else:
            rows = load_dataset(name, config, split=split, streaming=streaming)
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(
            f"{name!r} has no row, but must be data with at least one row. Check how it was made, or `--split` ({split})."
        )
    return rows


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a reader or the network raises, the data can't be read
        cause = error.__cause__ or error
        what = (
            "JSON, Parquet or CSV as its ending says"
            if is_local(name)
            else "the name, configuration and split of a data set"
        )
        raise ValueError(
            f"{name!r} can't be read ({type(cause).__name__}: {str(cause)[:300]}). It must be {what}, with at least one row. "
            "Check how it was made."
        ) from error


def tables(name: str, rows: Any, num_rows: int) -> Iterator[Any]:
    """Yield the rows as Arrow tables.

    Args:
        name: Of the data, for messages.
        rows: What `open_rows` returned.
        num_rows: Rows of a table; the last one may have less.

    Raises:
        ValueError: If what comes can't be read.
    """
    iterator = rows.with_format("arrow").iter(batch_size=num_rows)
    while True:
        with _reading(name):
            table = next(iterator, None)
        if table is None:
            return
        yield table


def column_names(rows: Any) -> list[str]:
    """Return the names of all columns, those inside nested ones with dots besides."""
    first = next(iter(rows))
    names = list(rows.column_names or first)
    types = dict(rows.features or first)  # an inner mapping stands for a nested column in both
    return names + [f"{name}.{inner}" for name in names if isinstance(types[name], dict) for inner in types[name]]


def questions(name: str) -> Iterator[str]:
    """Read the questions of a file, or of all splits of a Hub data set: answers are not needed to compare with them.

    Args:
        name: Path, Hub name, or short name of a benchmark.

    Raises:
        ValueError: If it cannot be read, or no column has a usual name of questions.
    """
    opened = open_rows(name, split=None)
    for rows in opened.values() if isinstance(opened, Mapping) else [opened]:
        names = column_names(rows)
        column = next((known for known in PROMPT_COLUMNS if known in names), None)
        if column is None:
            raise ValueError(
                f"{name!r} has the columns {_top(names)}, and none of the usual names of questions ({', '.join(PROMPT_COLUMNS)}). "
                "Rename the column with the questions to `prompt`."
            )
        for row in rows:
            yield read_prompt(row[column]).question


def read_objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read the rows of a file as they stand in it: a JSON Lines file may hold other columns and types in every line.

    Args:
        path: A `.jsonl` file, or one of any other ending that is none of `LOADERS`; else a file for `open_rows`.

    Returns:
        For each row where it stands, for messages, and its cells.

    Raises:
        ValueError: If it can't be read, or a line is no JSON object.
    """
    if path.suffix.lower() in (".json", ".parquet", ".csv"):
        return [(f"`{path}` row {number}", dict(row)) for number, row in enumerate(open_rows(str(path)))]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`{path}` can't be read ({error}). Pass a JSON Lines file in UTF-8.") from error
    return [
        (f"`{path}` line {number}", _object(line, f"`{path}` line {number}"))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}). Write one object per line.") from error
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - the type is the file's, not the caller's
            f"{place} is {type(value).__name__}, not an object. Write one object per line."
        )
    return value

"""Problems by name or from a file: rows with `prompt`, and `answer` where there are references.

A row of AIME 2025 as it is loaded: `{"prompt": "Find the sum of all integer bases $b>9$ …", "answer": "70", "id": "0"}`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from ..data.arithmetic import arithmetic_dataset

PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "solution")
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
NUM_ARITHMETIC = 256  # problems of the embedded task, those of the demo


@dataclass(frozen=True)
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


def load_rows(
    name: str, *, config: str | None = None, split: str = "train", prompt_column: str | None = None
) -> Dataset:
    """Load rows and call the column of their questions `prompt`.

    Args:
        name: A name on the Hub, or a local .jsonl, .json, .parquet or .csv file.
        config: Configuration of a Hub data set.
        split: Split of a Hub data set.
        prompt_column: The column of the questions. None: `prompt`, `problem` or `question`.

    Raises:
        ValueError: If there is no such data set or column, it can't be read, it is empty, or a question is missing.
    """
    rows = _read(name, config, split)
    if not len(rows):
        raise ValueError(f"The data set {name!r} is empty: at least one row is needed. Check how the file was made.")
    column = prompt_column or next((each for each in PROMPT_COLUMNS if each in rows.column_names), None)
    if column is None or column not in rows.column_names:
        wanted = f"{prompt_column!r}" if prompt_column else "`prompt`, `problem` or `question`"
        raise ValueError(
            f"{name!r} has the columns {rows.column_names}, but no {wanted} for the questions. Name the one that holds them."
        )
    rows = _renamed(rows, column, "prompt")
    for index, prompt in enumerate(rows["prompt"]):
        if not (prompt and isinstance(prompt, (str, list))):
            raise ValueError(
                f"The question in row {index} of {name!r} is {prompt!r}: it must be a text or a list of messages, and not "
                "empty. Filter such rows out."
            )
    return rows


def load_problems(
    name: str,
    *,
    config: str | None = None,
    split: str = "test",
    prompt_column: str | None = None,
    answer_column: str | None = None,
    needs_answers: bool = True,
    num_problems: int | None = None,
) -> Dataset:
    """Load problems to evaluate on.

    Args:
        name: `aime_2025`, `beyond_aime`, `arithmetic` (the embedded task), a name on the Hub, or a local file.
        config: Configuration of a Hub data set.
        split: Split of a Hub data set.
        prompt_column: The column of the questions. None: `prompt`, `problem` or `question`.
        answer_column: The column of the references. None: `answer`, or else `solution`.
        needs_answers: Whether every row must have a reference; False leaves the columns as they are.
        num_problems: Only the first ones. None: all; 256 of the embedded task.

    Returns:
        Rows with `prompt`, and with `answer` if `needs_answers`.

    Raises:
        ValueError: If they can't be had: the message says what is wrong with which row or column.
    """
    if name == "arithmetic":
        return arithmetic_dataset(num_problems or NUM_ARITHMETIC, seed=0, split="test")
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        rows = load_rows(name, config=config, split=split, prompt_column=prompt_column)
    else:
        rows = load_rows(benchmark.hub_name, split=benchmark.split, prompt_column=benchmark.prompt_column)
        answer_column = benchmark.answer_column
    if needs_answers:
        rows = _with_answers(rows, name, answer_column)
    if num_problems is not None and num_problems > len(rows):
        raise ValueError(
            f"`num_problems` ({num_problems}) is more than the {len(rows)} rows of {name!r}. Lower it, or leave it out for "
            "all of them."
        )
    return rows if num_problems is None else rows.select(range(num_problems))


def as_messages(rows: Dataset, instruction: str | None = None) -> Dataset:
    """Make a user message of each question that is a text, with an instruction after it.

    Args:
        rows: With `prompt`.
        instruction: Text that follows a question after an empty line.

    Raises:
        ValueError: If there is an instruction, but the questions are messages already.
    """
    if not isinstance(rows[0]["prompt"], str):
        if instruction:
            raise ValueError(
                "An instruction is appended to questions that are texts, but these are lists of messages already. Put it "
                "into their last message, or leave it out."
            )
        return rows
    ending = f"\n\n{instruction}" if instruction else ""
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"] + ending}]})


def problem_ids(rows: Dataset) -> list[str]:
    """Return a name for each problem, the same wherever its prompt and its reference are the same.

    A problem that occurs several times gets a number as well.
    """
    ids: list[str] = []
    seen: dict[str, int] = {}
    answers = rows["answer"] if "answer" in rows.column_names else [None] * len(rows)
    for prompt, answer in zip(rows["prompt"], answers, strict=True):
        text = json.dumps([prompt, None if answer is None else str(answer)], ensure_ascii=False, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[digest] = seen.get(digest, 0) + 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def _read(name: str, config: str | None, split: str) -> Dataset:
    suffix = Path(name).suffix
    if suffix in LOADERS and not Path(name).is_file():
        raise ValueError(f"There is no file {name!r}: check the path given as a data set.")
    if suffix in LOADERS and not Path(name).stat().st_size:
        raise ValueError(f"The file {name!r} is empty: at least one row is needed. Check how it was made.")
    try:
        if suffix in LOADERS:
            return load_dataset(LOADERS[suffix], data_files=name, split="train")
        return load_dataset(name, config, split=split)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last from a file of empty lines
        reason = error.__cause__ or error
        raise ValueError(
            f"The data set {name!r} can't be read ({type(reason).__name__}: {reason}). Pass a name on the Hub with an "
            f"existing split and configuration, or a file that ends in {', '.join(LOADERS)}."
        ) from error


def _renamed(rows: Dataset, column: str, name: str) -> Dataset:
    if column == name:
        return rows
    # What has the name already would be in the way, and is not what was asked for.
    return (rows.remove_columns(name) if name in rows.column_names else rows).rename_column(column, name)


def _with_answers(rows: Dataset, name: str, answer_column: str | None) -> Dataset:
    column = answer_column or next((each for each in ANSWER_COLUMNS if each in rows.column_names), None)
    if column is None or column not in rows.column_names:
        wanted = f"{answer_column!r}" if answer_column else "`answer` or `solution`"
        raise ValueError(
            f"{name!r} has the columns {rows.column_names}, but no {wanted} for the reference answers, which completions "
            "are compared with. Name the one that holds them."
        )
    rows = _renamed(rows, column, "answer")
    missing = [index for index, answer in enumerate(rows["answer"]) if _is_missing(answer)]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(rows)} rows of {name!r} have no reference answer, the first one row {missing[0]}: "
            "they could never be right. Fill the answers in, or filter such rows out."
        )
    return rows


def _is_missing(answer: Any) -> bool:
    return answer is None or not str(answer).strip()

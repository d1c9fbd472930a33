"""Problems by name or from a file: rows with `prompt`, and `answer` where there are references.

A row of AIME 2025 as it is loaded: `{"prompt": "Find the sum of all integer bases $b>9$ …", "answer": "70", "id": "0"}`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from datasets import Dataset

from ..data.arithmetic import arithmetic_dataset
from ..data.sources import ANSWER_COLUMNS, BENCHMARKS, PROMPT_COLUMNS, column_names, lookup, open_rows

NUM_ARITHMETIC = 256  # problems of the embedded task, those of the demo


def load_rows(
    name: str, *, config: str | None = None, split: str = "train", prompt_column: str | None = None
) -> Dataset:
    """Load rows and call the column of their questions `prompt`.

    Args:
        name: A name on the Hub, or a local .jsonl, .json, .parquet or .csv file.
        config: Configuration of a Hub data set.
        split: Split of a Hub data set.
        prompt_column: The column of the questions. None: the first usual name (`PROMPT_COLUMNS`).

    Raises:
        ValueError: If there is no such data set or column, it can't be read, it is empty, or a question is missing.
    """
    rows = open_rows(name, config=config, split=split)
    rows = _with_column(rows, "prompt", name, prompt_column, PROMPT_COLUMNS, "questions")
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
        prompt_column: The column of the questions. None: the first usual name (`PROMPT_COLUMNS`).
        answer_column: The column of the references, with a dot into a nested one. None: the first usual name
            (`ANSWER_COLUMNS`).
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


def _with_column(
    rows: Dataset, name: str, source: str, wanted: str | None, usual: tuple[str, ...], what: str
) -> Dataset:
    """Give a column, the one that is wanted or the first usual one, the name that the package reads."""
    names = column_names(rows)
    column = wanted or next((each for each in usual if each in names), None)
    if column is None or column not in names:
        known = f"no {wanted!r}" if wanted else f"none of {', '.join(f'`{each}`' for each in usual)}"
        way_out = "Name" if wanted else f"Rename the column to `{name}`, or where a command has `--{name}_column` name"
        raise ValueError(
            f"{source!r} has the columns {rows.column_names}, but {known} for the {what}. {way_out} the one that holds them."
        )
    if column == name:
        return rows
    # What has the name already would be in the way, and is not what was asked for.
    rows = rows.remove_columns(name) if name in rows.column_names else rows
    if column in rows.column_names:
        return rows.rename_column(column, name)
    return rows.add_column(name, [lookup(row, column) for row in rows])  # a nested one


def with_answer_column(rows: Dataset, name: str, answer_column: str | None = None) -> Dataset:
    """Call the column of the references `answer`.

    Args:
        rows: What `load_rows` returned.
        name: Of the data set, for messages.
        answer_column: The column, with a dot into a nested one. None: the first usual name (`ANSWER_COLUMNS`).

    Raises:
        ValueError: If there is none.
    """
    return _with_column(rows, "answer", name, answer_column, ANSWER_COLUMNS, "reference answers")


def _with_answers(rows: Dataset, name: str, answer_column: str | None) -> Dataset:
    rows = with_answer_column(rows, name, answer_column)
    missing = [index for index, answer in enumerate(rows["answer"]) if _is_missing(answer)]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(rows)} rows of {name!r} have no reference answer, the first one row {missing[0]}: "
            "they could never be right. Fill the answers in, or filter such rows out."
        )
    return rows


def _is_missing(answer: Any) -> bool:
    return answer is None or not str(answer).strip()

"""Clean a data set of questions with references: the paper's section 3.4, with duplicates and leakage besides.

The work is cut into chunks that any process can do and that a restart finds again; then duplicates are looked for over
all of them, and models are asked about what is left. Everything happens in a folder beside the results, which appear all
together at the end.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from . import audit, chunks, duplicates, models, sources
from .model_rules import ModelSettings, apply_models
from .rules import MAX_ANSWER_CHARACTERS

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
RESULTS = ("audit.jsonl", "audit.html", "summary.json", "kept.jsonl")  # in the order in which they appear
_FORMAT = 1  # of the working folder; a new number makes old ones invalid


@dataclass(frozen=True)
class CleaningSettings:
    """What is cleaned, and how.

    Args:
        source: A local file or a name on the Hub.
        config: Configuration of a Hub data set.
        split: Split of a Hub data set.
        streaming: Whether rows are read on the way.
        prompt_column: Column with the questions, if its name is not a usual one.
        answer_column: Column with the references, likewise.
        skip: Names of rules to leave out.
        max_answer_characters: Longest reference to keep.
        against: Evaluation sets that must not be trained on.
        models: What language models are asked for.
    """

    source: str
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    prompt_column: str | None = None
    answer_column: str | None = None
    skip: tuple[str, ...] = ()
    max_answer_characters: int = MAX_ANSWER_CHARACTERS
    against: tuple[str, ...] = ()
    models: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If a rule is unknown or can't be left out, or a limit makes no sense.
        """
        unknown = [name for name in self.skip if name not in audit.RULES or name == "missing"]
        if unknown:
            known = [name for name in audit.RULES if name != "missing"]
            raise ValueError(
                f"`--skip` ({', '.join(unknown)}) must name rules that can be left out. Choose from {', '.join(known)}."
            )
        if self.max_answer_characters < 1:
            raise ValueError(
                f"`--max_answer_characters` ({self.max_answer_characters}) must be at least 1: no reference is shorter. Raise it."
            )

    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules that apply, in their order."""
        applies = {
            "leakage": bool(self.against),
            "too_easy": self.models.model is not None,
            "wrong_reference": bool(self.models.reference_models),
        }
        return tuple(name for name in audit.RULES if name not in self.skip and applies.get(name, True))


def clean(settings: CleaningSettings, output: Path, *, num_proc: int = 1) -> audit.Summary:
    """Clean a data set and write `kept.jsonl`, `audit.jsonl`, `audit.html` and `summary.json`.

    An interrupted run is taken up where it stopped if it is started again with the same settings on the same data, and
    ends in the same files.

    Args:
        settings: What to do.
        output: Folder for the results; results of an earlier run are replaced at the end.
        num_proc: Processes that work on the rows.

    Returns:
        The counts.

    Raises:
        ValueError: If the data can't be read, or lacks questions or answers.
    """
    rows = sources.open_rows(
        settings.source, config=settings.config, split=settings.split, streaming=settings.streaming
    )
    columns = sources.find_columns(sources.column_names(rows), settings.prompt_column, settings.answer_column)
    chunk_settings = chunks.ChunkSettings(
        columns,
        settings.rules(),
        settings.max_answer_characters,
        can_rewrite=settings.models.rewrite_model is not None,
        evaluation_problems=tuple(_evaluation_problems(settings.against)),
    )
    for name in settings.models.names:
        models.check_model(name, settings.models.sampling)  # rather than after an hour
    work = output / PARTIAL
    with _locked(output):
        with _removed_on_bad_input(work):
            _prepare(work, _identity(settings, rows))
            num_chunks, num_rows = _clean_chunks(settings.source, rows, chunk_settings, work, num_proc)
            _check_answers(work, num_chunks, num_rows, columns)
        _put_together(work, num_chunks, settings)
        if settings.models.is_used:
            apply_models(work, settings.models, chunk_settings)
        summary = audit.summarize(work / "audit.jsonl", settings.rules())
        _check_conservation(work, summary)
        _publish(work, output, summary, settings, columns)
    return summary


def _evaluation_problems(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for place, question in enumerate(sources.questions(name)):
            yield f"{Path(name).name}[{place}]", question


# -------------------------------------------------------------------------------------------------- the working folder


def _identity(settings: CleaningSettings, rows: Any) -> str:
    """Return a text that differs if a restart must not go on with what lies there."""
    files = [_stamp(name) for name in (settings.source, *settings.against)]
    fingerprint = None if settings.streaming or Path(settings.source).is_file() else rows._fingerprint
    values = {"format": _FORMAT, "chunk_rows": chunks.CHUNK_ROWS, "files": files, "fingerprint": fingerprint}
    return json.dumps({**values, **_described(settings)}, sort_keys=True)


def _described(settings: CleaningSettings) -> dict[str, Any]:
    """Return the settings that results depend on: where a served model is and how long it may take is none of them."""
    values = asdict(settings)
    sampling = values["models"]["sampling"]
    if (endpoint := sampling.pop("endpoint")) is not None:
        sampling["extra_body"] = endpoint["extra_body"]
    return values


def _stamp(name: str) -> list[tuple[str, int, int]] | str:
    path = Path(name)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    stats = [(str(each.resolve()), each.stat()) for each in files if each.is_file()]
    return [(place, stat.st_size, stat.st_mtime_ns) for place, stat in stats] or name


def _prepare(work: Path, identity: str) -> None:
    state = work / "state.json"
    if state.exists() and state.read_text(encoding="utf-8") == identity:
        logger.info("Going on with what an interrupted run left in %s.", work)
        return
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    (work / "state.json.new").write_text(identity, encoding="utf-8")
    os.replace(work / "state.json.new", state)


@contextmanager
def _removed_on_bad_input(work: Path) -> Iterator[None]:
    """Leave nothing where the data turned out to be unusable: a restart could not go on with it."""
    try:
        yield
    except ValueError:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep a second run out of the folder; the lock ends with the process, however that ends."""
    import fcntl

    if output.exists() and not output.is_dir():
        raise ValueError(f"`--output` ({output}) must be a folder, and is a file. Name another one.")
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another run is cleaning into `--output` ({output}). Wait for it, or name another folder."
            ) from error
        try:
            yield
        finally:
            (output / ".lock").unlink()
            if not any(output.iterdir()):
                output.rmdir()


# ------------------------------------------------------------------------------------------------------------ the chunks


def _clean_chunks(name: str, rows: Any, settings: chunks.ChunkSettings, work: Path, num_proc: int) -> tuple[int, int]:
    """Clean all chunks that are not done yet; return the numbers of chunks and rows."""
    total = getattr(rows, "num_rows", None)
    num_rows = num_chunks = 0
    with (
        _workers(settings, work, num_proc if total is None or total > chunks.CHUNK_ROWS else 1) as submit,
        tqdm(total=total, desc="cleaning", unit="row", unit_scale=True) as progress,
    ):
        waiting: deque[Future[int]] = deque()
        for table in sources.tables(name, rows, chunks.CHUNK_ROWS):
            if (work / f"index-{num_chunks}.npy").exists():
                progress.update(table.num_rows)
            else:
                waiting.append(submit(num_chunks, num_rows, table))
            num_chunks += 1
            num_rows += table.num_rows
            while len(waiting) > 2 * num_proc:
                progress.update(waiting.popleft().result())
        while waiting:
            progress.update(waiting.popleft().result())
    return num_chunks, num_rows


@contextmanager
def _workers(settings: chunks.ChunkSettings, work: Path, num_proc: int) -> Iterator[Any]:
    """Yield a function that cleans a chunk and returns a future: in this process, or in others."""
    if num_proc == 1:
        cleaner = chunks.ChunkCleaner(settings, work)

        def run(number: int, first_row: int, table: Any) -> Future[int]:
            future: Future[int] = Future()
            future.set_result(cleaner.clean(number, first_row, table))
            return future

        yield run
        return
    # Not forked: Arrow's threads may hold a lock at that moment.
    pool = ProcessPoolExecutor(num_proc, get_context("spawn"), chunks.start_worker, (settings, work))
    try:
        yield lambda number, first_row, table: pool.submit(chunks.work, number, first_row, _serialized(table))
    finally:
        pool.shutdown(cancel_futures=True)


def _serialized(table: Any) -> bytes:
    """Write the rows of a slice, and not the whole table that it was cut from."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _check_answers(work: Path, num_chunks: int, num_rows: int, columns: sources.Columns) -> None:
    """Refuse data in which no row has what the columns promise."""
    lacking = {"there is no question": 0, "there is no reference answer": 0}
    for number in range(num_chunks):
        with (work / f"audit-{number}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                if '"rule": "missing"' not in line[:60]:
                    return
                lacking[json.loads(line)["reason"]] += 1
    raise ValueError(
        f"None of the {num_rows} rows has both a question (column {columns.prompt!r}) and an answer (column {columns.answer!r}): "
        f"{lacking['there is no question']} have no question, {lacking['there is no reference answer']} no answer. Name the right "
        "columns with `--prompt_column` and `--answer_column`."
    )


# ------------------------------------------------------------------------------------------------------------ the results


def _put_together(work: Path, num_chunks: int, settings: CleaningSettings) -> None:
    rows = duplicates.Rows(work, num_chunks)
    fates, answers = duplicates.find_duplicates(
        rows, same="duplicate" in settings.rules(), contradictions="contradiction" in settings.rules()
    )
    audit.write_deduplicated(work, rows, fates, answers, num_chunks)


def _check_conservation(work: Path, summary: audit.Summary) -> None:
    with (work / "kept.jsonl").open("rb") as kept:
        num_lines = sum(1 for _ in kept)
    if num_lines != summary.kept:
        raise RuntimeError(
            f"kept.jsonl has {num_lines} rows, but the audit keeps {summary.kept} of {summary.rows}: this is a bug. Please report it."
        )


def _publish(
    work: Path, output: Path, summary: audit.Summary, settings: CleaningSettings, columns: sources.Columns
) -> None:
    values = {**summary.to_json(), "columns": asdict(columns), "settings": _described(settings)}
    (work / "summary.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    source = f"{settings.source}; question from {columns.prompt}, reference from {columns.answer}"
    source += f"; compared with {', '.join(settings.against)}" if settings.against else ""
    (work / "audit.html").write_text(audit.page(summary, source), encoding="utf-8")
    for name in RESULTS:
        os.replace(work / name, output / name)
    (work / "state.json").unlink()  # first: what else is left then counts for nothing
    shutil.rmtree(work)

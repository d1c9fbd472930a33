"""The rules that ask language models: rewriting, too easy, wrong reference. They see what the other rules have left.

What a model said about a batch of rows is kept in the working folder, so that a restart asks only for the rest. A batch
holds the same rows and has the same seed however often a run is interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from ..rewards.verify import verify_answer
from . import audit
from .chunks import ChunkSettings, event, judge_row, row_line
from .models import ChatModel, EngineModel, Messages, SamplingSettings, load_model
from .sources import read_prompt

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
REWRITE = """\
Rewrite the problem below so that it asks for one short answer that can be checked: a number, a formula, a name.
- A multiple-choice problem: ask for what the right option states, and leave the options out.
- A problem that asks for yes or no, or true or false: ask for the value, the example or the quantity that decides it.
- A proof: ask for the quantity or the formula that is to be proved, without giving it away.
Keep every condition of the problem. The new answer must follow from the problem and its reference; if there is no such
question, reply with null.

Problem (a quotation, whatever it says):
{question}

Reference:
{answer}

Reply with JSON alone: {{"question": "...", "answer": "..."}} or null."""

_BATCH_ROWS = 32
_MAX_VALID_REWRITE = 20_000  # characters


@dataclass(frozen=True)
class ModelSettings:
    """Which models are asked for what; a None or empty one leaves its rule out.

    Args:
        model: The model that is to be trained: what it always gets right is too easy.
        samples: Its tries of each problem; all must be right (the paper: 8).
        reference_models: Strong models, two at least: what they agree on against the reference shows it to be wrong.
        rewrite_model: Turns questions into short-answer form where no rule can.
        instruction: What is added to a question that is to be answered, unless it says where the answer goes.
        seed: Of the sampling.
        sampling: How models are sampled.
    """

    model: str | None = None
    samples: int = 8
    reference_models: tuple[str, ...] = ()
    rewrite_model: str | None = None
    instruction: str = INSTRUCTION
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: If there is a single reference model, or no try.
        """
        if self.samples < 1:
            raise ValueError(
                f"`--samples` ({self.samples}) must be at least 1: no try says nothing about a row. Raise it."
            )
        if len(self.reference_models) == 1 or len(set(self.reference_models)) < len(self.reference_models):
            raise ValueError(
                f"`--reference_models` ({', '.join(self.reference_models)}) must be two different ones at least: agreement is "
                "what speaks against a reference. Add another one."
            )

    @property
    def is_used(self) -> bool:
        """Whether any model is asked."""
        return bool(self.names)

    @property
    def names(self) -> list[str]:
        """The models that are asked."""
        return [name for name in (self.rewrite_model, self.model, *self.reference_models) if name is not None]


@dataclass(frozen=True)
class LeftRow:
    """A row that the rules before have left.

    Args:
        number: Its place in the data.
        values: As it stands in kept.jsonl.
        pending: The line of the audit that waits for a rewriting; empty otherwise.
    """

    number: int
    values: dict[str, Any]
    pending: dict[str, Any]

    @property
    def question(self) -> str:
        """Its question, without the instructions around it."""
        return read_prompt(self.values["prompt"]).question

    @property
    def texts(self) -> tuple[str, str]:
        """Its question and its answer."""
        return self.question, self.values["answer"]


Load = Callable[[str, SamplingSettings], ChatModel]


def apply_models(
    folder: Path, settings: ModelSettings, chunk_settings: ChunkSettings, load: Load = load_model
) -> None:
    """Ask the models about the rows in the working folder, and write what follows into its files.

    Args:
        folder: The working folder, with `kept.jsonl` and `audit.jsonl`.
        settings: Which models are asked for what.
        chunk_settings: The rules, which a rewritten row has to pass.
        load: Makes a model of a name.

    Raises:
        ValueError: If a model can't be loaded.
    """
    if settings.rewrite_model is not None:
        said = _Asked(folder, "rewrite", settings.rewrite_model, settings, load)
        _rewrite(folder, said, chunk_settings)
    if settings.model is not None and "too_easy" in chunk_settings.rules:
        _drop_too_easy(folder, _Asked(folder, "easy", settings.model, settings, load), settings)
    if settings.reference_models and "wrong_reference" in chunk_settings.rules:
        asked = [
            _Asked(folder, f"reference-{place}", name, settings, load)
            for place, name in enumerate(settings.reference_models)
        ]
        _drop_wrong_references(folder, asked, settings)


class _Asked:
    """What one model said, batch by batch; it is loaded with the first batch that is not in the folder."""

    def __init__(self, folder: Path, name: str, model: str, settings: ModelSettings, load: Load) -> None:
        self._folder = folder
        self._name = name
        self._model_name = model
        self._settings = settings
        self._load = load
        self._model: ChatModel | None = None

    def complete(self, batch: int, prompts: Sequence[Messages]) -> list[str | None]:
        path = self._folder / f"said-{self._name}-{batch}.json"
        if path.exists():
            texts: list[str | None] = json.loads(path.read_text(encoding="utf-8"))
            return texts
        if self._model is None:
            self._model = self._load(self._model_name, self._settings.sampling)
        texts = self._model.complete(prompts, seed=self._settings.seed + batch)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(texts), encoding="utf-8")
        os.replace(new, path)
        return texts

    def close(self) -> None:
        """Let go of the model: another one may need its memory."""
        if isinstance(self._model, EngineModel):
            self._model.close()
        self._model = None
        gc.collect()


def _batches(folder: Path, *, pending: bool, describe: str) -> Iterator[tuple[int, list[LeftRow]]]:
    from tqdm.auto import tqdm

    rows = (
        LeftRow(number, json.loads(line), entry)
        for number, is_pending, entry, line in audit.left_rows(folder)
        if is_pending or not pending
    )
    number = 0
    with tqdm(desc=describe, unit="row") as progress:
        while batch := list(islice(rows, _BATCH_ROWS)):
            yield number, batch
            progress.update(len(batch))
            number += 1


# -------------------------------------------------------------------------------------------------------------- rewriting


def _rewrite(folder: Path, asked: _Asked, chunk_settings: ChunkSettings) -> None:
    entries: dict[int, list[dict[str, Any]]] = {}
    changed: dict[int, bytes] = {}
    for number, rows in _batches(folder, pending=True, describe="rewriting"):
        prompts: list[Messages] = [
            [{"role": "user", "content": REWRITE.format(question=row.question, answer=row.values["answer"])}]
            for row in rows
        ]
        for row, text in zip(rows, asked.complete(number, prompts), strict=True):
            entries[row.number], line = _rewritten(row, text, chunk_settings)
            if line is not None:
                changed[row.number] = line
    asked.close()
    audit.rewrite_fates(folder, entries, changed)


def _rewritten(row: LeftRow, text: str | None, settings: ChunkSettings) -> tuple[list[dict[str, Any]], bytes | None]:
    rule, reason = row.pending["rule"], row.pending["reason"]
    new = parse_rewriting(text)
    if new is None:
        return [event(rule, "dropped", f"{reason}; the model gave no other form of it", row.texts)], None
    judged = judge_row(*new, settings.row_rules())
    if judged.fate != "kept":
        failed = (
            f"{reason}; the model's form of it falls to {judged.events[-1]['rule']}: {judged.events[-1]['reason']}"
        )
        return [event(rule, "dropped", failed, row.texts, new)], None
    after = (judged.question, judged.answer)
    prompt = read_prompt(row.values["prompt"])
    others = {name: cell for name, cell in row.values.items() if name not in ("prompt", "answer")}
    line = row_line(prompt.to_messages(judged.question), judged.answer, others)
    return [event(rule, "changed", f"{reason}; rewritten by the model", row.texts, after)], line


def parse_rewriting(text: str | None) -> tuple[str, str] | None:
    """Read the question and the answer that a model gave; None if it gave none.

    Example:
        >>> parse_rewriting('<think>hm</think> {"question": "Find $x$.", "answer": "3"}')
        ('Find $x$.', '3')
    """
    final = (text or "").rpartition("</think>")[2]
    match = re.search(r"\{.*\}", final, re.DOTALL)
    if match is None or len(match[0]) > _MAX_VALID_REWRITE:
        return None
    try:
        values = json.loads(match[0])
    except json.JSONDecodeError:
        return None
    question, answer = values.get("question"), values.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip() or not answer.strip():
        return None
    return question.strip(), answer.strip()


# -------------------------------------------------------------------------------------------------------------- answering


def answering_prompt(values: dict[str, Any], instruction: str) -> Messages:
    r"""Return a row's conversation, with the request to mark the answer unless it is there.

    Args:
        values: A row of kept.jsonl.
        instruction: What to add.
    """
    messages: Messages = [dict(message) for message in values["prompt"]]
    text = " ".join(str(message["content"]) for message in messages)
    if instruction and not re.search(r"\\boxed|<answer>|[Aa]nswer:", text):
        messages[-1]["content"] = f"{messages[-1]['content']}\n\n{instruction}"
    return messages


def is_right(text: str | None, answer: str) -> bool | None:
    """Judge an answer; None if it could not be decided, and False for one that was cut off."""
    if text is None:
        return False
    verdict = verify_answer(text, rf"\boxed{{{answer}}}", lenient=False)
    return None if verdict.is_open else verdict.equivalent


def _drop_too_easy(folder: Path, asked: _Asked, settings: ModelSettings) -> None:
    entries: dict[int, list[dict[str, Any]]] = {}
    tries = settings.samples
    for number, rows in _batches(folder, pending=False, describe="too easy"):
        prompts = [answering_prompt(row.values, settings.instruction) for row in rows for _ in range(tries)]
        texts = asked.complete(number, prompts)
        for place, row in enumerate(rows):
            mine = texts[place * tries : (place + 1) * tries]
            if all(is_right(text, row.values["answer"]) for text in mine):
                reason = f"{settings.model} is right in {tries} of {tries} tries"
                entries[row.number] = [event("too_easy", "dropped", reason, row.texts)]
    asked.close()
    audit.rewrite_fates(folder, entries, {})


def _drop_wrong_references(folder: Path, asked: Sequence[_Asked], settings: ModelSettings) -> None:
    for model in asked:
        for number, rows in _batches(folder, pending=False, describe="answers to compare"):
            model.complete(number, [answering_prompt(row.values, settings.instruction) for row in rows])
        model.close()
    entries: dict[int, list[dict[str, Any]]] = {}
    for number, rows in _batches(folder, pending=False, describe="wrong references"):
        said = [model.complete(number, ()) for model in asked]  # all in the folder by now
        for row, texts in zip(rows, zip(*said, strict=True), strict=True):
            if (answer := agreed_answer(texts, row.values["answer"])) is not None:
                names = ", ".join(settings.reference_models)
                reason = f"{names} agree on {answer!r}, which the reference contradicts"
                entries[row.number] = [event("wrong_reference", "dropped", reason, row.texts)]
    audit.rewrite_fates(folder, entries, {})


def agreed_answer(texts: Sequence[str | None], reference: str) -> str | None:
    r"""Return the answer that all models agree on if it contradicts the reference; else None.

    Every model must have answered, all pairs of answers must be equal and each surely different from the reference: what
    can't be decided speaks for the reference.

    Args:
        texts: A whole output of each model; None for one that was cut off.
        reference: The short reference.

    Example:
        >>> agreed_answer([r"\boxed{4}", r"So \boxed{4}."], "5")
        '4'
        >>> agreed_answer([r"\boxed{4}", r"\boxed{3}"], "5") is None
        True
    """
    answers = []
    for text in texts:
        verdict = verify_answer(text or "", rf"\boxed{{{reference}}}", lenient=False)
        if verdict.equivalent is not False or verdict.is_open or not verdict.prediction:
            return None
        answers.append(verdict.prediction)
    same = all(
        verify_answer(rf"\boxed{{{first}}}", rf"\boxed{{{second}}}").equivalent is True
        for first, second in combinations(answers, 2)
    )
    return answers[0] if same and len(answers) > 1 else None

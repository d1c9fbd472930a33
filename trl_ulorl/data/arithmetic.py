r"""The embedded task: chains of one-digit terms, and the small model that was warm-started on them.

One row of `arithmetic_dataset`, with the output that solves it step by step:

    prompt     [{"role": "user", "content": "3+5-9="}]
    answer     "-1"
    num_terms  3
    output     3+5=8
               8-9=-1
               \boxed{-1}

The task stands in for reasoning with ultra-long outputs on a machine without a GPU or a network. A worked output has
one line per operation and the number of terms is heavy-tailed: $2 + \lfloor E^{1.6} \rfloor$ with $E$ exponential of
mean 1.2, at most 24. More than half of the drawn problems have two terms and a working of about 17 characters; one in
a hundred needs more than 130, so that a few long rollouts hold up a batch, as they do at full size.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal

import numpy as np
from datasets import Dataset

MIN_TERMS = 2
MAX_TERMS = 24

# Only 162 problems have two terms: one in four leaves 49 of them for evaluation and 113 for training.
_HELD_OUT_ONE_IN = 4

_PROBLEM = re.compile(rf"[1-9](?:[+-][1-9]){{{MIN_TERMS - 1},{MAX_TERMS - 1}}}=")


def arithmetic_dataset(num_problems: int, *, seed: int, split: Literal["train", "test"]) -> Dataset:
    """Draw problems of one split, the same ones for the same arguments on every machine.

    A problem belongs to the test split if a hash of its text says so (`is_held_out`), whatever the seed: nothing that
    was ever trained on, supervised or by RL, is evaluated on. Training rows are drawn independently, so short problems
    recur. Test rows are distinct; as short problems run out, a larger test set holds a larger share of long ones.

    Args:
        num_problems: Number of rows, at least 1.
        seed: Seed of the draw, at least 0.
        split: `"train"` or `"test"`.

    Returns:
        Data set with the columns `prompt` (one user message), `answer` (an integer as text) and `num_terms`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> arithmetic_dataset(1, seed=0, split="train").column_names
        ['prompt', 'answer', 'num_terms']
    """
    if num_problems < 1:
        raise ValueError(
            f"`num_problems` ({num_problems}) must be at least 1: an empty data set has no prompts to sample from. "
            "Ask for 1 or more."
        )
    if seed < 0:
        raise ValueError(f"`seed` ({seed}) must not be negative: NumPy seeds are unsigned. Use 0 or more.")
    if split not in ("train", "test"):
        raise ValueError(
            f"`split` ({split!r}) names no split of the embedded task: it has 'train' and 'test', which share no "
            "problem. Pass one of these."
        )
    rng = np.random.default_rng(seed)
    problems: list[str] = []
    seen: set[str] = set()
    while len(problems) < num_problems:
        problem = _draw_problem(rng)
        if is_held_out(problem) != (split == "test"):
            continue
        if split == "test" and problem in seen:
            continue
        seen.add(problem)
        problems.append(problem)
    terms = [_terms(problem) for problem in problems]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": problem}] for problem in problems],
            "answer": [str(sum(chain)) for chain in terms],
            "num_terms": [len(chain) for chain in terms],
        }
    )


def is_held_out(problem: str) -> bool:
    """Say whether a problem is kept for evaluation.

    Decided by SHA-256 of the text alone, so that every process, seed and run agrees before any training starts.

    Args:
        problem: Problem such as `"3+5-9="`.

    Returns:
        `True` for about one problem in four.
    """
    return int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "big") % _HELD_OUT_ONE_IN == 0


def worked_solution(problem: str, slips: dict[int, int] | None = None) -> str:
    r"""Work a problem out, one partial result per line, and box the answer.

    Args:
        problem: Problem such as `"3+5-9="`.
        slips: What to add to the result of an operation, by its index from 0. Later lines build on the wrong result,
            as they do when a model slips, so that demonstrations can hold workings that go wrong. None = no slip.

    Returns:
        Output text, without an end token.

    Raises:
        ValueError: If `problem` is not a problem of the embedded task, or a slip is not at one of its operations.

    Example:
        >>> print(worked_solution("3+5-9="))
        3+5=8
        8-9=-1
        \boxed{-1}
    """
    partial, *rest = _terms(problem)
    slips = slips or {}
    if not slips.keys() <= set(range(len(rest))):
        raise ValueError(
            f"`slips` ({slips}) must be at operations of `problem` ({problem!r}), which have the indices 0 to "
            f"{len(rest) - 1}: one elsewhere would have no effect. Leave it out."
        )
    lines = []
    for index, term in enumerate(rest):
        result = partial + term + slips.get(index, 0)
        lines.append(f"{partial}{term:+d}={result}")
        partial = result
    return "\n".join([*lines, boxed(partial)])


def boxed(answer: int) -> str:
    r"""Write an answer in the form that ends every output, such as `\boxed{-1}`."""
    return rf"\boxed{{{answer}}}"


def embedded_model_path() -> str:
    """Return the folder of the embedded model, as `from_pretrained` takes it.

    It holds a Qwen3 of 0.8M parameters with a character-level tokenizer and a chat template. The model was
    warm-started by `examples/warm_start.py`: it guesses almost half of its answers, works the others out, and slips
    now and then, which leaves RL something to learn within a few dozen steps.

    Returns:
        Absolute path of a folder.
    """
    return str(Path(__file__).resolve().parent / "embedded_model")


def _draw_problem(rng: np.random.Generator) -> str:
    """Draw a problem of heavy-tailed length from all of them, held out or not."""
    num_terms = min(MIN_TERMS + int(rng.exponential(1.2) ** 1.6), MAX_TERMS)
    digits = rng.integers(1, 10, size=num_terms)
    signs = rng.choice(["+", "-"], size=num_terms - 1)
    return str(digits[0]) + "".join(f"{sign}{digit}" for sign, digit in zip(signs, digits[1:], strict=True)) + "="


def _terms(problem: str) -> list[int]:
    """Read the signed terms of a problem."""
    if not _PROBLEM.fullmatch(problem):
        raise ValueError(
            f"`problem` ({problem!r}) must be a chain of {MIN_TERMS} to {MAX_TERMS} terms from 1 to 9 joined by + or "
            "-, with = at the end: nothing else belongs to the embedded task. Write it like '3+5-9='."
        )
    return [int(term) for term in re.findall(r"[+-]?[1-9]", problem)]

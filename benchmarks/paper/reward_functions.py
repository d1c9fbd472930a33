"""Reward functions of the figures, named by `reward: reward_functions:<name>`."""

from functools import cache
from typing import Any

import numpy as np

FLIPPED = 0.35  # share of verdicts that `loose_reward` turns round


@cache
def _verifier() -> Any:
    from trl_ulorl.rewards import VerifierReward

    return VerifierReward()


@cache
def _draws() -> np.random.Generator:
    """Every run is a process of its own, so it draws the same numbers in the same order."""
    return np.random.default_rng(0)


def signed_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """Return 1 where the verifier gives 1, and -1 where it gives 0."""
    scores = _verifier()(prompts=prompts, completions=completions, **columns)
    return [None if score is None else 2.0 * score - 1.0 for score in scores]


def loose_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """Return the verifier's verdict, turned round at random for a share of the completions.

    In a long output most tokens have little to do with whether the answer is right, so a response's reward says little about
    each of them. In an arithmetic chain of thirty tokens it says a lot: wrong answers come from unlikely tokens. Verdicts
    turned round at random loosen that tie.
    """
    scores = _verifier()(prompts=prompts, completions=completions, **columns)
    flips = _draws().random(len(scores)) < FLIPPED
    return [None if score is None else abs(score - flip) for score, flip in zip(scores, flips.tolist(), strict=True)]

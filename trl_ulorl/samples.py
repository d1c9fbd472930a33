"""`_samples.json`: some completions of a run with their segment borders, bounded in size however long the run is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .records import STAGE_COLUMN, reward_values, write_text
from .rollout.pool import Int32Array, Outcome, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

SAMPLES = "_samples.json"  # with this underscore Trainer leaves it out of what it pushes to the Hub: it is data
MAX_SAMPLES = 64  # groups; then every other one is dropped, and half as many are taken from there on
SHOWN_TOKENS = 1200  # of a completion; what is left out lies in the middle of its segments
MIN_EDGE_TOKENS = 8  # shown on each side of a border, however many segments there are
MAX_CHARACTERS = 2000  # of a prompt, a reference, an extracted answer
_INCOMPLETE = "�"  # what decoding gives for a character whose other bytes are in the next token


class SampleLog:
    """Keeps one trained group in so many versions, the one with most tokens, as borders are what is looked for.

    Of its rollouts it keeps the longest right one, the longest wrong one and the shortest.

    The file holds `every`, the versions between two samples, and `samples` with `group`, `row`, `left` (the version that
    trained on it), `question`, `prompt` as the model got it, `reference` and `rollouts`; in these, `segments` hold `version`, `tokens` and `parts`, which
    are text or, for tokens that are not shown, their number.

    Args:
        path: The file.
        is_enabled: False writes nothing.
        decode: Token ids to text.
        read_row: A row index to the row of the training set.
        correctness_index: The reward that says what is right; None for none.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_enabled: bool,
        decode: Callable[[Sequence[int]], str],
        read_row: Callable[[int], dict[str, Any]],
        correctness_index: int | None,
    ) -> None:
        self._path = path
        self._is_enabled = is_enabled
        self._decode = decode
        self._read_row = read_row
        self._correctness_index = correctness_index
        self.restart()

    def restart(self) -> None:
        """Forget what was kept: a new run begins."""
        self._every = 1
        self._samples: list[dict[str, Any]] = []
        self._version, self._longest = -1, 0  # the newest version, and the tokens of its longest group
        self._offered: RolloutGroup | None = None

    def offer(self, group: RolloutGroup, outcome: Outcome, version: int) -> None:
        """Take a group for the next `save`, if its turn has come and it is the longest so far."""
        if not self._is_enabled or outcome is not Outcome.TRAINED:
            return
        if self._samples and self._samples[-1]["left"] < version < self._samples[-1]["left"] + self._every:
            return
        if version != self._version:
            self._version, self._longest = version, 0
        if group.num_tokens > self._longest:
            self._offered, self._longest = group, group.num_tokens

    def save(self) -> None:
        """Write the file, if a group was taken since the last time."""
        if self._offered is None:
            return
        if self._samples and self._samples[-1]["left"] == self._version:  # a batch before, of the same update
            self._samples.pop()
        self._samples.append(self._sample(self._offered, self._version))
        self._offered = None
        if len(self._samples) > MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._every *= 2
        # Without indents, which take several times as long, as it is written with every sample.
        write_text(self._path, json.dumps({"every": self._every, "samples": self._samples}) + "\n")

    def go_back_to(self, version: int) -> None:
        """Take up the file, without the groups that training from this version on will train on again."""
        self.restart()
        if not self._is_enabled or not self._path.exists():
            return
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            every, samples = int(content["every"]), [each for each in content["samples"] if each["left"] < version]
        except (ValueError, TypeError, KeyError) as error:  # samples are for readers: no reason to refuse a resume
            logger.warning("%s can't be read (%s), so the samples begin anew.", self._path, error)
            return
        self._every, self._samples = every, samples

    def _sample(self, group: RolloutGroup, version: int) -> dict[str, Any]:
        row = self._read_row(group.row_index)
        reference = next((row[name] for name in ("answer", "solution") if row.get(name) is not None), None)
        return {
            "group": group.group_id,
            "row": group.row_index,
            "left": version,
            "question": shortened(_question(row["prompt"])),
            "prompt": shortened(self._decode(group.prompt_ids.tolist())),
            "reference": None if reference is None else shortened(str(reference)),
            "rollouts": [self._rollout(rollout) for rollout in self._chosen(group)],
        }

    def _chosen(self, group: RolloutGroup) -> list[Rollout]:
        """Return the longest rollout of those with the most correctness, and with the least, and the shortest of all."""
        correctness = [_correctness(rollout, self._correctness_index) for rollout in group.rollouts]
        chosen = []
        for value in dict.fromkeys([max(correctness), min(correctness)]):
            alike = [r for r, each in zip(group.rollouts, correctness, strict=True) if each == value]
            chosen.append(max(alike, key=lambda rollout: rollout.num_tokens))
        chosen.append(min(group.rollouts, key=lambda rollout: rollout.num_tokens))
        return [rollout for place, rollout in enumerate(chosen) if rollout not in chosen[:place]]

    def _rollout(self, rollout: Rollout) -> dict[str, Any]:
        segments = rollout.segments
        parts = segment_parts([segment.token_ids for segment in segments], self._decode)
        logs = {"stage": rollout.logs.get(STAGE_COLUMN), "extracted": rollout.logs.get("extracted_answer")}
        return {
            "finish": rollout.finish,
            "rewards": reward_values(rollout),
            **{name: shortened(str(value)) for name, value in logs.items() if value is not None},
            "segments": [
                {"version": segment.policy_version, "tokens": len(segment), "parts": part}
                for segment, part in zip(segments, parts, strict=True)
            ],
        }


def _correctness(rollout: Rollout, index: int | None) -> float:
    if index is None or rollout.rewards is None or np.isnan(rollout.rewards[index]):
        return -np.inf
    return float(rollout.rewards[index])


def _question(prompt: Any) -> str:
    """Return a prompt without its chat template: of messages the last one."""
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def shortened(text: str) -> str:
    """Return a text of at most `MAX_CHARACTERS` and a few words, without its middle."""
    if len(text) <= MAX_CHARACTERS:
        return text
    edge = MAX_CHARACTERS // 2
    return f"{text[:edge]} […{len(text) - 2 * edge} characters…] {text[-edge:]}"


def segment_parts(segments: Sequence[Int32Array], decode: Callable[[Sequence[int]], str]) -> list[list[str | int]]:
    """Decode segments, so that their texts joined are the text of the whole.

    A character whose bytes lie on both sides of a border goes to the later segment. Of a long completion the middle of
    each segment is left out, as borders are what is looked for.

    Args:
        segments: Token ids of each, shape `(T,)`.
        decode: Token ids to text.

    Returns:
        For each segment its parts: text, or the number of tokens left out.
    """
    edge = max(MIN_EDGE_TOKENS, SHOWN_TOKENS // (2 * max(1, len(segments))))
    parts: list[list[str | int]] = []
    run: list[int] = []  # ids shown since tokens were left out, whatever segment they are of
    for ids in segments:
        own: list[str | int] = []
        if ids.size <= 2 * edge:
            own.append(_grown(run, ids.tolist(), decode))
        else:
            own += [_grown(run, ids[:edge].tolist(), decode), int(ids.size - 2 * edge)]
            run.clear()
            own.append(_grown(run, ids[-edge:].tolist(), decode))
        parts.append(own)
    _end(parts, run, decode)
    return parts


def _grown(run: list[int], ids: list[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Add ids to the run, and return the text that they add to it."""
    before = decode(run).rstrip(_INCOMPLETE) if run else ""
    run += ids
    return decode(run).rstrip(_INCOMPLETE)[len(before) :]


def _end(parts: list[list[str | int]], run: list[int], decode: Callable[[Sequence[int]], str]) -> None:
    """Give the last part the incomplete characters that end the whole."""
    if parts:
        text = decode(run)
        parts[-1][-1] = f"{parts[-1][-1]}{text[len(text.rstrip(_INCOMPLETE)) :]}"

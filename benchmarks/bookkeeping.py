"""What our own bookkeeping costs a step, without a model: pools, schedule, exchange between ranks, collation.

The real collector runs on an engine that has every token ready, so that all the time is its own. A step continues the
rollouts in flight by a segment each; a quarter of them is complete after it, travels once through the exchange and is
laid out as the batch. The figures are those of steps in which the pools are full.

Writes outputs/bench/bookkeeping.json and prints the same as a table. Takes about 4 GB of memory and two minutes.

    python benchmarks/bookkeeping.py [--output FILE]
"""

import argparse
import json
import pickle
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from trl.trainer.utils import pad

from trl_ulorl.rollout.collector import CollectorSettings, Prompt
from trl_ulorl.rollout.engine import DecodedSegment
from trl_ulorl.rollout.packing import sampling_matrices
from trl_ulorl.rollout.prompts import PromptStream
from trl_ulorl.rollout.schedule import SegmentSchedule
from trl_ulorl.rollout.scoring import RewardInput, RewardScorer, RewardSource
from trl_ulorl.rollout.segmented import SegmentCollector

GENERATIONS = 8
SEGMENTS = 4
PROMPT_TOKENS = 200
STEPS = 5  # measured, after those that fill the pools
MAIN = (1024, 16_384)  # rollouts in flight, new tokens of each in a step
MOST_SECONDS = 1.0  # for that
SIZES = [(64, 16_384), (256, 16_384), MAIN, (128, 1_024), (128, 8_192), (128, 32_768), (128, 131_072)]
MOST_EXPONENT = 1.15  # of a power law fitted to the growth: 1 is linear


class ReadyEngine:
    """Has every segment ready: views of one array."""

    def __init__(self, segment_length: int) -> None:
        self._ids = np.arange(segment_length, dtype=np.int32)
        self._logps = -np.ones(segment_length, dtype=np.float32)

    def decode(self, requests):
        for index, request in enumerate(requests):
            length = request.max_new_tokens
            yield DecodedSegment(index, self._ids[:length], self._logps[:length], is_stopped=False)


def make_collector(segment_length: int, *, groups_per_batch: int, max_inflight_groups: int) -> SegmentCollector:
    """Return the package's collector with prompts and rewards at hand; its rollouts end at their limit of four segments."""
    limit = SEGMENTS * segment_length
    return SegmentCollector(
        engine=ReadyEngine(segment_length),
        schedule=SegmentSchedule(
            groups_per_batch=groups_per_batch, segment_length=segment_length, max_inflight_groups=max_inflight_groups
        ),
        prompts=PromptStream(100_000, seed=0),
        scorer=RewardScorer([RewardSource("length", lambda completions, **_: [1.0] * len(completions))]),
        settings=CollectorSettings(
            num_generations=GENERATIONS,
            max_completion_length=limit,
            num_segments=SEGMENTS,
            dynamic_sampling=False,
            reward_weights=(1.0,),
            scored_at_batch_time=False,
            correctness_index=0,
            truncated_is_wrong=False,
        ),
        tokenize=lambda rows: [Prompt([7] * PROMPT_TOKENS, limit) for _ in rows],
        # Without the ids: turning them into lists and text for the reward functions is those functions' affair.
        render=lambda group, rollout: RewardInput(rollout, "", "", rollout.completion_ids[:0], {}),
    )


def timed(work):
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def exchange(batch):
    """What two ranks do with complete groups, but for the network."""
    return pickle.loads(pickle.dumps(batch))


def collate(batch, version):
    """Lay the batch out as matrices: completion ids as TRL pads them, log-probabilities and ages."""
    rollouts = [rollout for group in batch for rollout in group.rollouts]
    ids = pad([torch.tensor(rollout.completion_ids.astype(np.int64)) for rollout in rollouts], padding_value=0)
    return ids, sampling_matrices(rollouts, ids.shape[1], version)


def measure(num_rollouts: int, segment_length: int) -> dict[str, float]:
    """Return median seconds of each part of a step."""
    num_groups = num_rollouts // GENERATIONS  # a quarter of them is complete after each step
    collector = make_collector(segment_length, groups_per_batch=num_groups // SEGMENTS, max_inflight_groups=num_groups)
    parts: dict[str, list[float]] = {"collect": [], "exchange": [], "collate": []}
    for version in range(SEGMENTS + STEPS):
        batch = collector.collect(version)
        _, exchange_seconds = timed(lambda batch=batch: exchange(batch))
        _, collate_seconds = timed(lambda batch=batch, version=version: collate(batch, version))
        if version >= SEGMENTS:
            parts["collect"].append(collector.report.bookkeeping_seconds)
            parts["exchange"].append(exchange_seconds)
            parts["collate"].append(collate_seconds)
        collector.finish_batch(version)
    collector.scorer.close()
    medians = {name: statistics.median(values) for name, values in parts.items()}
    return {"rollouts": num_rollouts, "new_tokens": segment_length, **medians, "seconds": sum(medians.values())}


def exponent(figures: list[dict[str, float]], size: str) -> float:
    """Fit seconds = c * size^e and return e."""
    return float(np.polyfit(np.log([f[size] for f in figures]), np.log([f["seconds"] for f in figures]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/bookkeeping.json"))
    args = parser.parse_args()
    figures = []
    print("rollouts  new tokens   collect  exchange   collate   seconds a step")
    for size in SIZES:
        figures.append(measure(*size))
        print(
            "{rollouts:8d}  {new_tokens:10d}  {collect:8.4f}  {exchange:8.4f}  {collate:8.4f}  {seconds:15.4f}".format(
                **figures[-1]
            )
        )
    by_rollouts = exponent([f for f in figures if f["new_tokens"] == MAIN[1]], "rollouts")
    by_tokens = exponent([f for f in figures if f["rollouts"] == 128 and f["new_tokens"] > 1_024], "new_tokens")
    main_seconds = next(f["seconds"] for f in figures if (f["rollouts"], f["new_tokens"]) == MAIN)
    print(f"Growth with the rollouts: exponent {by_rollouts:.2f}; with the tokens: {by_tokens:.2f} (1 is linear)")
    print(f"{MAIN[0]} rollouts of {MAIN[1]} new tokens: {main_seconds:.3f} s a step (at most {MOST_SECONDS:g})")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"steps": figures, "exponent_rollouts": by_rollouts, "exponent_tokens": by_tokens}
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if main_seconds > MOST_SECONDS or max(by_rollouts, by_tokens) > MOST_EXPONENT:
        raise SystemExit("The bookkeeping takes too long or grows faster than linearly.")


if __name__ == "__main__":
    main()

"""What the pools hold at full size, and what adding a segment costs: 5,120 rollouts with 240 million tokens.

Writes outputs/bench/pool_memory.json and prints the same as a table. Takes about 2 GB of memory and ten seconds; Linux
only, since the memory of the process is read from /proc.

    python benchmarks/pool_memory.py [--rollouts 5120] [--tokens 240000000] [--output FILE]
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from trl_ulorl.rollout.pool import Rollout, RolloutGroup, Segment, UnfinishedPool

GENERATIONS = 8
SEGMENT = 16_384  # tokens of a segment: 131,072 in 8 segments
MEMORY_LIMIT_GB = 2.2


def resident_bytes() -> int:
    """Memory of this process, as the system counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rollout_lengths(rollouts: int, tokens: int) -> np.ndarray:
    """Skewed as reasoning traces are, adding up to `tokens`; the longest are 2.75 times the mean, 128k at full size."""
    shares = np.random.default_rng(0).beta(1.2, 2.1, rollouts)
    return np.maximum(1, (shares / shares.sum() * tokens).astype(np.int64))


def fill_pool(lengths: np.ndarray) -> UnfinishedPool:
    """Add segments round by round, cut out of a padded matrix as an engine returns them."""
    pool = UnfinishedPool()
    for group_id in range(len(lengths) // GENERATIONS):
        pool.admit(
            RolloutGroup.start(
                group_id=group_id,
                row_index=group_id,
                prompt_ids=np.arange(200),
                max_length=10**6,
                admitted_version=0,
                num_generations=GENERATIONS,
            )
        )
    ids = np.ones((GENERATIONS, SEGMENT), dtype=np.int64)
    logps = -np.ones((GENERATIONS, SEGMENT), dtype=np.float32)
    remaining = lengths.copy()
    version = 0
    while remaining.any():
        for (_, rollout), left in zip(pool.open_rollouts(), remaining.tolist(), strict=True):
            if left:
                row, length = rollout.index, min(left, SEGMENT)
                rollout.extend(Segment.from_values(ids[row, :length], logps[row, :length], version), None)
        remaining = np.maximum(0, remaining - SEGMENT)
        version += 1
    return pool


def measure_memory(rollouts: int, tokens: int) -> dict[str, float]:
    lengths = rollout_lengths(rollouts, tokens)
    gc.collect()
    before, started = resident_bytes(), time.perf_counter()
    pool = fill_pool(lengths)
    seconds = time.perf_counter() - started
    gc.collect()
    increase = resident_bytes() - before
    held = [rollout for group in pool.groups for rollout in group.rollouts]
    return {
        "rollouts": len(held),
        "tokens": pool.num_tokens,
        "segments": sum(len(rollout.segments) for rollout in held),
        "longest_rollout": max(rollout.num_tokens for rollout in held),
        "resident_gb": increase / 1e9,
        "bytes_per_token": increase / pool.num_tokens,
        "fill_seconds": seconds,
    }


def measure_adding(segment_length: int, long_segments: int, repeats: int) -> dict[str, float]:
    """Time to add one segment to a new rollout and to a very long one, in turn."""
    ids = np.ones(segment_length, dtype=np.int64)
    logps = -np.ones(segment_length, dtype=np.float32)
    long_rollout = Rollout(0, 0)
    for version in range(long_segments):
        long_rollout.extend(Segment.from_values(ids, logps, version), None)
    seconds: dict[str, list[float]] = {"short": [], "long": []}
    for repeat in range(repeats):
        for name, rollout in (("short", Rollout(0, 1)), ("long", long_rollout)):
            started = time.perf_counter()
            rollout.extend(Segment.from_values(ids, logps, repeat), None)
            seconds[name].append(time.perf_counter() - started)
        long_rollout.num_tokens -= len(long_rollout.segments.pop())  # stays as long as it was
    short, long = (statistics.median(seconds[name]) * 1e6 for name in ("short", "long"))
    return {
        "segment_tokens": segment_length,
        "long_rollout_tokens": long_rollout.num_tokens,
        "short_microseconds": short,
        "long_microseconds": long,
        "ratio": long / short,
    }


def print_table(rows: dict[str, object]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value:>15,.3f}" if isinstance(value, float) else f"{name:<{width}}  {value:>15,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=5_120)
    parser.add_argument("--tokens", type=int, default=240_000_000)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/pool_memory.json"))
    args = parser.parse_args()

    result = {
        "memory": measure_memory(args.rollouts, args.tokens),
        "adding": measure_adding(segment_length=4_096, long_segments=512, repeats=2_000),
    }
    for title, rows in result.items():
        print(title)
        print_table(rows)
        print()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {args.output}")
    full_size = args.rollouts == 5_120 and args.tokens == 240_000_000
    if full_size and result["memory"]["resident_gb"] > MEMORY_LIMIT_GB:
        raise SystemExit(f"The pools hold more than {MEMORY_LIMIT_GB} GB.")


if __name__ == "__main__":
    main()

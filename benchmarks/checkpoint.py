"""What a checkpoint of the rollouts in progress costs: bytes per held token, time to save and to load.

A real collector holds 100M tokens: unfinished rollouts of one to three segments, whose lengths are log-normal, and a
few complete groups. Its whole way to the disk is timed, packing, checksums and the renaming of the folder included,
in turns with safetensors' own `save_file` of the same tokens, which takes joined arrays: the joining that it needs is
timed with it, and the bare call is stated beside. Each writes anew: the last file is deleted before, not meanwhile.

Writes outputs/bench/checkpoint.json and prints the same. Takes about 3 GB of memory, 2 GB of disk and a minute.

    python benchmarks/checkpoint.py [--tokens N] [--repeats N] [--folder DIR] [--output FILE]
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bookkeeping import GENERATIONS, PROMPT_TOKENS, SEGMENTS, make_collector
from safetensors.torch import save_file

from trl_ulorl.rollout.checkpoint import load_rollout, save_rollout
from trl_ulorl.rollout.collector import Ticket
from trl_ulorl.rollout.pool import Finish, RolloutGroup, Segment
from trl_ulorl.rollout.restore import StepPosition
from trl_ulorl.rollout.segmented import SegmentCollector
from trl_ulorl.rollout.state import Ranks

SEGMENT_LENGTH = 16_384
VERSION = 10
MOST_BYTES_PER_TOKEN = 9.0
MOST_RATIO = 1.5  # of the time that safetensors takes
WINDOW = {"num_ranks": 1}


def new_collector() -> SegmentCollector:
    return make_collector(SEGMENT_LENGTH, groups_per_batch=128, max_inflight_groups=100_000)


def fill(collector: SegmentCollector, num_tokens: int) -> None:
    """Hold groups of as many tokens, as in the middle of a run."""
    rng = np.random.default_rng(0)
    unfinished, ready, held = [], [], 0
    while held < num_tokens:
        group = RolloutGroup.start(
            group_id=len(unfinished) + len(ready),
            row_index=len(unfinished),
            prompt_ids=[7] * PROMPT_TOKENS,
            max_length=SEGMENTS * SEGMENT_LENGTH,
            admitted_version=VERSION - SEGMENTS,
            num_generations=GENERATIONS,
        )
        is_complete = rng.random() < 0.2
        for index, rollout in enumerate(group.rollouts):
            length = int(min(rng.lognormal(np.log(8_192), 1.0) + 1, (SEGMENTS - 1) * SEGMENT_LENGTH))
            if index == 0 and not is_complete:  # at the end of a segment, and not at its own
                length = max(1, length // SEGMENT_LENGTH) * SEGMENT_LENGTH
            is_ended = is_complete or index > 0
            for number, start in enumerate(range(0, length, SEGMENT_LENGTH)):
                size = min(SEGMENT_LENGTH, length - start)
                ids = rng.integers(0, 150_000, size=size, dtype=np.int32)
                logps = -rng.random(size, dtype=np.float32)
                rollout.extend(Segment(ids, logps, VERSION - SEGMENTS + number), None)
            rollout.finish = Finish.EOS if is_ended else None
            rollout.rewards = np.array([1.0], dtype=np.float32) if is_ended else None
            held += length
        (ready if is_complete else unfinished).append(group)
    collector.ledger.groups["admitted"] = len(unfinished) + len(ready)
    collector.ledger.tokens["generated"] = held
    collector.take_up(
        unfinished=unfinished,
        ready=ready,
        training=[],
        tickets={g.group_id: Ticket(g.row_index, g.admitted_version, 0) for g in unfinished},
        open_by_owner=[len(unfinished)],
        unfinished_tokens=sum(group.num_tokens for group in unfinished),
    )


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(num_tokens: int, repeats: int, folder: Path) -> dict[str, float]:
    collector = new_collector()
    fill(collector, num_tokens)
    groups = collector.unfinished.groups + collector.ready.groups
    segments = [s for group in groups for rollout in group.rollouts for s in rollout.segments]
    held = sum(map(len, segments))

    def write_plain() -> tuple[float, float]:
        """Return the seconds of joining and writing, and of writing alone."""
        started = time.perf_counter()
        arrays = {
            "token_ids": torch.from_numpy(np.concatenate([s.token_ids for s in segments])),
            "per_token_logps": torch.from_numpy(np.concatenate([s.per_token_logps for s in segments])),
        }
        joined = time.perf_counter()
        save_file(arrays, folder / "plain.safetensors")
        ended = time.perf_counter()
        return ended - started, ended - joined

    times: dict[str, list[float]] = {"safetensors": [], "safetensors_joined": [], "save": [], "load": []}
    for _ in range(repeats + 1):
        for name, seconds in zip(("safetensors", "safetensors_joined"), write_plain(), strict=True):
            times[name].append(seconds)
        (folder / "plain.safetensors").unlink()
        checkpoint = folder / "checkpoint-10"
        checkpoint.mkdir()
        times["save"].append(
            timed(lambda: save_rollout(collector, checkpoint, Ranks(), StepPosition(VERSION), WINDOW))  # noqa: B023
        )
        num_bytes = sum(path.stat().st_size for path in (checkpoint / "rollout").iterdir())
        loaded = new_collector()
        times["load"].append(
            timed(lambda: load_rollout(loaded, checkpoint, Ranks(), version=VERSION, window=WINDOW))  # noqa: B023
        )
        assert loaded.ledger_balance() == collector.ledger_balance()
        shutil.rmtree(checkpoint)
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up
    return {
        "tokens": held,
        "rollouts": len(groups) * GENERATIONS,
        "bytes_per_token": num_bytes / held,
        "safetensors_seconds": median["safetensors"],
        "safetensors_joined_seconds": median["safetensors_joined"],
        "save_seconds": median["save"],
        "load_seconds": median["load"],
        "save_ratio": median["save"] / median["safetensors"],
        **{f"{name}_seconds_all": values for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="completion tokens held")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/checkpoint.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(args.tokens, args.repeats, Path(folder))
    print(f"{figures['tokens']:,} tokens of {figures['rollouts']:,} rollouts")
    print(f"bytes per token: {figures['bytes_per_token']:.3f} (at most {MOST_BYTES_PER_TOKEN:g})")
    print(
        f"save: {figures['save_seconds']:.2f} s, {figures['save_ratio']:.2f}x safetensors' "
        f"{figures['safetensors_seconds']:.2f} s (at most {MOST_RATIO:g}x), of which its bare call takes "
        f"{figures['safetensors_joined_seconds']:.2f} s"
    )
    print(f"load: {figures['load_seconds']:.2f} s")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if figures["bytes_per_token"] > MOST_BYTES_PER_TOKEN or figures["save_ratio"] > MOST_RATIO:
        raise SystemExit("A checkpoint takes too many bytes or too long.")


if __name__ == "__main__":
    main()

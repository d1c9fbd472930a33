"""Table 1: seconds per step against the number of segments, read from what `rollout_speed.py` measured.

The paper: Qwen3-30B-A3B at 64k, 1240 s with one segment, 774 s (1.60 times as fast) with two, 601 s (2.06 times) with four.
`make bench` measures the embedded model on vLLM's CPU build; this script only sets the figures beside each other.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import runs

MEASURED = runs.ROOT / "outputs" / "bench" / "rollout_speed.json"
PAPER = {"segments_1": 1.0, "segments_2": 1240 / 774, "segments_4": 1240 / 601}


def rows(arms: dict[str, dict[str, Any]]) -> list[tuple[str, float, float, float | None]]:
    """Return each arm with how many times as fast its rollout phase and its step are as with one segment, and the paper's.

    They are medians over blocks that ran next to each other, as in the benchmark itself: the machine's pace changes.

    Raises:
        ValueError: If the measurement has no arm with one segment.
    """
    if "segments_1" not in arms:
        raise ValueError(
            f"the arms ({', '.join(arms)}) lack `segments_1`: measure it with `rollout_speed.py --arms …`"
        )

    def times_as_fast(arm: dict[str, Any], phase: str) -> float:
        key = f"completions_per_second_{phase}_blocks"
        return median(ours / one for ours, one in zip(arm[key], arms["segments_1"][key], strict=True))

    return [
        (name, times_as_fast(arm, "rollout"), times_as_fast(arm, "step"), PAPER.get(name))
        for name, arm in arms.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "measured", nargs="?", type=Path, default=MEASURED, help="(default: outputs/bench/rollout_speed.json)"
    )
    path = parser.parse_args().measured
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        table = rows(measured["arms"])
    except FileNotFoundError:
        sys.stderr.write(f"table1_speed.py: {path} does not exist: run `python benchmarks/rollout_speed.py` first\n")
        return 2
    except (ValueError, KeyError) as error:
        sys.stderr.write(f"table1_speed.py: {path}: {error}\n")
        return 2
    print(
        "| arm | speed of the rollout phase, against 1 segment | of the step | the paper's step |\n|---|---|---|---|"
    )
    for name, rollout, step, there in table:
        print(f"| {name} | {rollout:.2f} | {step:.2f} | {'' if there is None else f'{there:.2f}'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare figures made here with the committed ones: every mean has to lie in the committed interval.

    python benchmarks/paper/compare.py [--made outputs/paper] [--committed docs/evidence]

The exit code is 1 if one does not, and 2 if there is nothing to compare. The runs of a seed are the same on the same machine and
the same releases; elsewhere rounding makes them other runs of the same setting, and about one mean in ten of three seeds
falls out of a 95 % interval of three seeds.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import runs

FINALS = ("accuracy", "entropy at the end")


def compared(
    made: dict[str, Any], committed: dict[str, Any]
) -> Iterator[tuple[str, str, float, dict[str, Any], bool]]:
    """Yield arm, figure, the mean made, the committed interval, and whether the first lies in the second."""
    for name, arm in committed.get("arms", {}).items():
        for final in FINALS:
            if final in arm.get("finals", {}):
                old, new = arm["finals"][final], made["arms"][name]["finals"][final]["mean"]
                yield name, final, new, old, old["low"] is not None and old["low"] <= new <= old["high"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--made", type=Path, default=runs.ROOT / "outputs" / "paper", help="(default: outputs/paper)")
    parser.add_argument(
        "--committed", type=Path, default=runs.ROOT / "docs" / "evidence", help="(default: docs/evidence)"
    )
    folders = parser.parse_args()
    names = sorted(
        {path.name for path in folders.made.glob("*.json")} & {p.name for p in folders.committed.glob("*.json")}
    )
    rows = [
        (name, *row)
        for name in names
        for row in compared(*(json.loads((folder / name).read_text()) for folder in (folders.made, folders.committed)))
    ]
    if not rows:
        sys.stderr.write(f"compare.py: no figure is in both {folders.made} and {folders.committed}: make one first\n")
        return 2
    for name, arm, final, new, old, is_in in rows:
        print(f"{'ok  ' if is_in else 'OUT '} {name} {arm}, {final}: {new:g} in [{old['low']}, {old['high']}]")
    return 0 if all(row[-1] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Section 3.1.2's reason for POIS: the last segment of a rollout is on-policy. Is it, when whole groups are waited for?

GRPO's baseline needs all rollouts of a group. A rollout that ends early waits for its siblings, and a complete group may wait
for a place in a batch, so its last segment ages too. The age of a token is the number of updates between its sampling and
the update that it is trained in. The runs are those of the sweep of segments, and with 1 and 4 those of Figure 2.

    python benchmarks/paper/ages.py [--segments 1 4]
"""

import argparse
from pathlib import Path
from typing import Any

from arms import POIS
from study import Arm, Run, interval, make_runs, options, save


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: 1 2 4 8)")


def shares(run: Run) -> dict[str, float]:
    """Return what part of the trained tokens is on-policy, from the run's counts by age.

    Returns:
        Shares of age 0 among `all tokens`, among those of `last segments`, among those of `last segments, if groups did not wait
        in the pool`, and of `last segments of rollouts with several`; and the mean ages of the first two.
    """
    ages = run["ages"]
    several = {
        name: {k: v for k, v in ages[name].items() if k != "1"} for name in ("of_segments", "of_segments_on_policy")
    }
    total = sum(several["of_segments"].values())
    result = {
        "all tokens": _at_0(ages["all"]),
        "last segments": _at_0(ages["last_segment"]),
        "last segments, without the wait in the pool": _at_0(ages["last_segment_alone"]),
        "mean age, all tokens": _mean(ages["all"]),
        "mean age, last segments": _mean(ages["last_segment"]),
    }
    if total:
        result["last segments of rollouts with several"] = sum(several["of_segments_on_policy"].values()) / total
    return result


def _at_0(counts: dict[str, int]) -> float:
    return counts.get("0", 0) / sum(counts.values())


def _mean(counts: dict[str, int]) -> float:
    return sum(int(age) * count for age, count in counts.items()) / sum(counts.values())


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the on-policy shares as bars, one group per number of segments."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in shares_shown(content) if "age" not in name]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for index, name in enumerate(names):
        points = [(place, arm["shares"].get(name)) for place, arm in enumerate(content.values())]
        points = [(place, share) for place, share in points if share is not None]
        places = [place + (index - (len(names) - 1) / 2) * 0.2 for place, _ in points]
        errors = [0.0 if share["high"] is None else share["high"] - share["mean"] for _, share in points]
        axes.bar(places, [share["mean"] for _, share in points], width=0.18, yerr=errors, label=name, capsize=2)
    axes.set_xticks(range(len(content)), list(content))
    axes.set(ylabel="share of trained tokens of age 0", ylim=(0, 1.05))
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def shares_shown(content: dict[str, Any]) -> list[str]:
    """Return the names of all shares, in order."""
    return list(dict.fromkeys(name for arm in content.values() for name in arm["shares"]))


def main() -> None:
    chosen = options(__doc__, add_options)
    arms = [Arm(f"{count} segments", {**POIS, "num_segments": count}) for count in chosen.segments]
    content = {}
    for name, done in make_runs(arms, chosen).items():
        each = [shares(run) for run in done]
        content[name] = {
            "shares": {key: interval([one[key] for one in each]) for key in each[0] if all(key in one for one in each)}
        }
    for name, arm in content.items():
        print(name, *(f"{key}: {value['mean']:.3f}" for key, value in arm["shares"].items()), sep="\n  ")
    save("ages", {"arms": content}, chosen, lambda path: draw(content, path))


if __name__ == "__main__":
    main()

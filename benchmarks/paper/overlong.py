"""Section 3.5: truncated rollouts count as wrong, are left out of the loss, or are punished softly.

The paper: leaving them out (DAPO's overlong filtering) makes lengths grow fast; the soft punishment does about as well as
"wrong". The limit is 40 tokens here, which about one output in ten reaches.
"""

from arms import POIS
from study import ACCURACY, FINALS, Arm, Panel, figure

LIMIT = {**POIS, "max_completion_length": 40}

ARMS = (
    Arm("wrong", {**LIMIT, "overlong": "wrong"}),
    Arm("mask", {**LIMIT, "overlong": "mask"}),
    Arm("soft", {**LIMIT, "overlong": "soft"}),
)
PANELS = (
    Panel("rollout/completed_length_mean", "mean length of completed rollouts (tokens)"),
    Panel("rollout/truncated_frac", "share of rollouts truncated"),
    ACCURACY,
)

FINALS["length"] = lambda run: run["mean_length"]
FINALS["truncated"] = lambda run: run["truncated_frac"]


def main() -> None:
    figure("overlong", __doc__, ARMS, PANELS)


if __name__ == "__main__":
    main()

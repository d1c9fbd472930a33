"""Section 3.5: truncated rollouts count as wrong, are left out of the loss, or are punished softly.

The paper: leaving them out (DAPO's overlong filtering) makes lengths grow fast; the soft punishment does about as well as
"wrong". About one held-out output in ten reaches the limit of 64 tokens.
"""

from arms import POIS
from study import ACCURACY, FINALS, Arm, Panel, figure

ARMS = (
    Arm("wrong", POIS),
    Arm("mask", {**POIS, "overlong": "mask"}),
    Arm("soft", {**POIS, "overlong": "soft"}),
)
PANELS = (
    Panel("rollout/completed_length_mean", "mean length of completed rollouts (tokens)"),
    Panel("rollout/truncated_frac", "share of rollouts truncated"),
    ACCURACY,
)

FIGURES = {
    **FINALS,
    "length": lambda run: run["mean_length"],
    "truncated": lambda run: run["truncated_frac"],
}


def main() -> None:
    figure("overlong", __doc__, ARMS, PANELS, FIGURES)


if __name__ == "__main__":
    main()

"""Table 3: accuracy against the length limit.

The paper: 73.5, 79.9, 81.6 and 82.8 on AIME-2025 with 32k, 64k, 96k and 128k; the first with 1 segment, the second with 4,
the others with 8. Here 16 to 128 tokens are 1 to 8 segments, and each model is evaluated under the limit it was trained with.
"""

from arms import DMMPTS
from study import ACCURACY, FINALS, Arm, Panel, figure

SEGMENT = 16

ARMS = tuple(
    Arm(f"{limit} tokens", {**DMMPTS, "max_completion_length": limit, "num_segments": limit // SEGMENT})
    for limit in (16, 32, 64, 128)
)
PANELS = (ACCURACY, Panel("rollout/truncated_frac", "share of rollouts truncated"))

FIGURES = {**FINALS, "truncated": lambda run: run["truncated_frac"]}


def main() -> None:
    figure("table3_length", __doc__, ARMS, PANELS, FIGURES)


if __name__ == "__main__":
    main()

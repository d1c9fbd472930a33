"""Accuracy against time: stock TRL's GRPO, TOIS, SAIS and POIS in one picture.

The time is the processor's: a run has one thread, so on a quiet machine it is the wall clock. Stock TRL trains on every
group, ours on those with differing rewards, for which they decode about twice as many groups per step. All decode with
transformers' `generate`, which gains less from segments than vLLM does: `rollout_speed.py` has the speed on vLLM.
"""

from arms import POIS, SAIS, STOCK, TOIS
from study import ACCURACY, Arm, Panel, figure

ARMS = (
    Arm("stock TRL", STOCK),
    Arm("TOIS (1 segment)", TOIS),
    Arm("SAIS, 4 segments", SAIS),
    Arm("POIS, 4 segments", POIS),
)
PANELS = (
    Panel(ACCURACY.metric, ACCURACY.label, x="cpu_seconds", x_label="seconds of one core"),
    ACCURACY,
)


def main() -> None:
    figure("wall_clock", __doc__, ARMS, PANELS)


if __name__ == "__main__":
    main()

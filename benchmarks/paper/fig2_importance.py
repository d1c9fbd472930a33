"""Figure 2: entropy and accuracy under TOIS, SAIS and POIS.

The paper: with four segments, SAIS's entropy collapses and its accuracy falls; POIS lies on TOIS, the on-policy control with
one segment; SAIS with clip-higher (0.28) makes the entropy explode. All tokens are trained on, as there. With one segment
and one update per batch every ratio is 1, so POIS with one segment is TOIS, and is not run again.
"""

from arms import POIS, SAIS, TOIS
from study import ACCURACY, ENTROPY, Arm, figure

ARMS = (
    Arm("TOIS (1 segment)", TOIS),
    Arm("POIS, 4 segments", POIS),
    Arm("SAIS, 4 segments", SAIS),
    Arm("SAIS, clip-higher 0.28", {**SAIS, "epsilon_high": 0.28}),
)


def main() -> None:
    figure("fig2_importance", __doc__, ARMS, (ENTROPY, ACCURACY))


if __name__ == "__main__":
    main()

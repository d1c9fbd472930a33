"""Table 2's ablation: the whole method, and without one of its parts at a time.

The paper: AIME-2025 82.8 with DMMPTs, 78.6 without. It ablates nothing else; the other rows are ours.
"""

from arms import DMMPTS, POIS
from study import ACCURACY, ENTROPY, Arm, figure

ARMS = (
    Arm("POIS and DMMPTs", DMMPTS),
    Arm("without DMMPTs", POIS),
    Arm("SAIS instead of POIS", {**DMMPTS, "importance_mode": "sais"}),
    Arm("without dynamic sampling", {**DMMPTS, "dynamic_sampling": False}),
)


def main() -> None:
    figure("table2_ablation", __doc__, ARMS, (ENTROPY, ACCURACY))


if __name__ == "__main__":
    main()

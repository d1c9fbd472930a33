"""Figure 4: train on all tokens, never on mastered positive ones (static), or on them while the entropy is enough (DMMPTs).

The paper: all tokens make the entropy fall, static masking makes it rise without end, DMMPTs hold it at sigma. The verdicts are
loosened here (`reward_functions.py` says why); `table2_ablation.py` has DMMPTs with exact ones.
"""

from arms import ALL_TOKENS, DMMPTS, LOOSE, SIGMA, STATIC
from study import ACCURACY, ENTROPY, Arm, Panel, figure

ARMS = (
    Arm("all tokens", {**ALL_TOKENS, **LOOSE}),
    Arm("static masking", {**STATIC, **LOOSE}),
    Arm("DMMPTs", {**DMMPTS, **LOOSE}),
)
PANELS = (
    Panel(ENTROPY.metric, ENTROPY.label, line=SIGMA),
    ACCURACY,
    Panel("dmmpts/masked_frac", "share of tokens masked"),
)


def main() -> None:
    figure("fig4_masking", __doc__, ARMS, PANELS)


if __name__ == "__main__":
    main()

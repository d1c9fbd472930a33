"""Figure 4: train on all tokens, never on mastered positive ones (static), or on them while the entropy is enough (DMMPTs).

The paper: all tokens make the entropy fall, static masking makes it rise without end, DMMPTs hold it at sigma.
"""

from arms import ALL_TOKENS, DMMPTS, SIGMA, STATIC
from study import ACCURACY, ENTROPY, Arm, Panel, figure

ARMS = (Arm("all tokens", ALL_TOKENS), Arm("static masking", STATIC), Arm("DMMPTs", DMMPTS))


def main() -> None:
    panels = (
        Panel(ENTROPY.metric, ENTROPY.label, line=SIGMA),
        ACCURACY,
        Panel("dmmpts/masked_frac", "share of tokens masked"),
    )
    figure("fig4_masking", __doc__, ARMS, panels)


if __name__ == "__main__":
    main()

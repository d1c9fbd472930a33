"""Figure 5: DMMPTs hold the entropy at the target sigma, in models of three sizes.

The paper: after 300 steps 0.20, 0.20 and 0.22 with sigma = 0.2, against 0.14, 0.09 and 0.04 on all tokens. Holds here if the
entropy at the end lies within a quarter of sigma with DMMPTs, and does not without. The runs of the embedded model are those of
Figure 4. The two smaller models are warm-started first, minutes each.

    python benchmarks/paper/fig5_sigma.py [--sizes 0.8M]
"""

import argparse
from typing import Any

from arms import ALL_TOKENS, DMMPTS, LOOSE, MODELS, SIGMA
from models import make_model, model_options
from study import ENTROPY, Arm, Panel, draw_curves, make_runs, options, save, summary, table

TOLERANCE = 0.25
PANELS = (Panel(ENTROPY.metric, ENTROPY.label, line=SIGMA), Panel("dmmpts/masked_frac", "share of tokens masked"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: all)")


def verdicts(arms: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Say of each arm by how much its entropy at the end is off sigma, and whether that is within the tolerance."""
    result = {}
    for name, arm in arms.items():
        off = arm["finals"]["entropy at the end"]["mean"] / SIGMA - 1
        result[name] = {"entropy / sigma - 1": round(off, 3), "within": abs(off) <= TOLERANCE}
    return result


def main() -> None:
    chosen = options(__doc__, add_options)
    arms = []
    for size in chosen.sizes:
        make_model(MODELS[size])
        for label, overrides in (("all tokens", ALL_TOKENS), ("DMMPTs", DMMPTS)):
            arms.append(Arm(label, {**overrides, **LOOSE, **model_options(MODELS[size])}, row=f"{size} parameters"))
    content = summary(arms, make_runs(arms, chosen), PANELS)
    judged = verdicts(content)
    print(table(content), *(f"{name}: {verdict}" for name, verdict in judged.items()), sep="\n")
    save(
        "fig5_sigma", {"sigma": SIGMA, "verdicts": judged, "arms": content}, chosen, draw_curves(arms, content, PANELS)
    )


if __name__ == "__main__":
    main()

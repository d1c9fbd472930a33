"""What the paper leaves out: sweeps of tau, sigma, the number of segments and the learning rate.

Tau and sigma are swept in the setting of Figure 4. A figure each: `python benchmarks/paper/sweeps.py segments` makes one. The first arm of each is the setting of the other figures.
"""

import argparse

from arms import LEARNING_RATE, LOOSE, POIS, SIGMA, TAU
from study import ACCURACY, ENTROPY, Arm, Panel, draw_curves, make_runs, options, save, summary, table

SWEEPS = {
    "segments": tuple(Arm(f"{count} segments", {**POIS, "num_segments": count}) for count in (4, 1, 2, 8)),
    "learning_rate": tuple(
        Arm(f"{rate:g}", {**POIS, "learning_rate": rate})
        for rate in (LEARNING_RATE, LEARNING_RATE / 4, 4 * LEARNING_RATE)
    ),
    "sigma": tuple(
        Arm(f"sigma {sigma:g}", {**LOOSE, "dmmpts": {"tau": TAU, "sigma": sigma}})
        for sigma in (SIGMA, SIGMA / 2, 2 * SIGMA)
    ),
    "tau": tuple(Arm(f"tau {tau:g}", {**LOOSE, "dmmpts": {"tau": tau, "sigma": SIGMA}}) for tau in (TAU, 0.9, 0.99)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweeps", nargs="*", help=f"which of {', '.join(SWEEPS)} (default: all)")


def main() -> None:
    chosen = options(__doc__, add_options)
    unknown = sorted(set(chosen.sweeps) - SWEEPS.keys())
    if unknown:
        raise SystemExit(f"sweeps.py: no sweep is called {', '.join(unknown)}: choose from {', '.join(SWEEPS)}")
    for name in chosen.sweeps or SWEEPS:
        panels = (ENTROPY, ACCURACY)
        if name == "segments":
            panels += (Panel("rollout/age_mean", "mean age of trained tokens (versions)"),)
        content = summary(SWEEPS[name], make_runs(SWEEPS[name], chosen), panels)
        print(table(content))
        save(f"sweep_{name}", {"arms": content}, chosen, draw_curves(SWEEPS[name], content, panels))


if __name__ == "__main__":
    main()

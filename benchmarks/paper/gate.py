"""The entropy in the steps after the gate of DMMPTs opens, which the paper asks about and does not show.

The setting of Figure 4 with targets below the entropy that the model starts with, so that the gate opens on the way. It opens
at the first step from which on at least half of the responses have an entropy under sigma, as a mean of three steps; the
runs are laid upon each other there.
"""

from collections.abc import Sequence

from arms import LOOSE, TAU
from study import ENTROPY, Arm, Panel, Run, curve, draw_curves, make_runs, options, save

BEFORE = 4  # steps shown before the gate opens
SINCE = "optimizer steps since the gate opened"
SIGMAS = {f"sigma {sigma:g}": sigma for sigma in (0.04, 0.06)}

ARMS = tuple(
    Arm("DMMPTs", {**LOOSE, "dmmpts": {"tau": TAU, "sigma": sigma}}, row=name) for name, sigma in SIGMAS.items()
)
PANELS = (
    Panel(ENTROPY.metric, ENTROPY.label, line=SIGMAS, x_label=SINCE),
    Panel("dmmpts/low_entropy_frac", "share of responses under sigma", x_label=SINCE),
    Panel("dmmpts/masked_frac", "share of tokens masked", x_label=SINCE),
)


def opening(run: Run) -> int | None:
    """Return the index of the step at which the gate opens, None if it does not."""
    shares = [entry["dmmpts/low_entropy_frac"] for entry in run["history"]]
    means = [sum(shares[start : start + 3]) / 3 for start in range(len(shares) - 2)]
    return next((index for index, mean in enumerate(means) if mean >= 0.5), None)


def aligned(done: Sequence[Run]) -> list[Run]:
    """Cut the runs so that all open at the same place, and count their steps from there; leave out those that don't open."""
    places = [(run, opening(run)) for run in done]
    opened = [(run["history"], place) for run, place in places if place is not None]
    if not opened:
        return []
    before = min([BEFORE, *(place for _, place in opened)])
    length = min(len(history) - place for history, place in opened) + before
    return [
        {"history": [{**entry, "step": n - before} for n, entry in enumerate(history[place - before :][:length])]}
        for history, place in opened
    ]


def main() -> None:
    chosen = options(__doc__)
    content = {}
    for name, done in make_runs(ARMS, chosen).items():
        cut = aligned(done)
        content[name] = {
            "openings": [opening(run) for run in done],
            "curves": {panel.metric: curve(cut, panel.metric) if cut else None for panel in PANELS},
        }
        print(f"{name}: the gate opens at the steps {content[name]['openings']} (counted from 0)")
    save("gate", {"arms": content}, chosen, draw_curves(ARMS, content, PANELS))


if __name__ == "__main__":
    main()

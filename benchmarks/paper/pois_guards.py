"""A run that POIS loses, and what saves it.

The learning rate is two and a half times that of the other figures, and the data are older: eight segments. Each other arm
adds one guard to this setting; "on-policy" has one segment, and says whether the learning rate alone would lose the run. All
tokens are trained on.
"""

from arms import LEARNING_RATE, POIS
from study import ACCURACY, ENTROPY, FINALS, Arm, Panel, Run, figure

BARE = {**POIS, "max_steps": 16, "learning_rate": 2.5 * LEARNING_RATE, "num_segments": 8, "max_inflight_groups": 192}
ARMS = (
    Arm("bare POIS", BARE),
    Arm("SAIS", {**BARE, "importance_mode": "sais"}),
    Arm("2 segments", {**BARE, "num_segments": 2, "max_inflight_groups": 16}),
    Arm("max_staleness 2", {**BARE, "max_staleness": 2, "max_inflight_groups": 24}),
    Arm("off_policy_mask_threshold 0.1", {**BARE, "off_policy_mask_threshold": 0.1}),
    Arm("on-policy", {**BARE, "num_segments": 1, "max_inflight_groups": 8}),
)
PANELS = (
    ACCURACY,
    ENTROPY,
    Panel("importance/stale_kl", "KL of stale tokens (nats per token)"),
    Panel("rollout/age_mean", "mean age of trained tokens (updates)"),
)


def largest_stale_kl(run: Run) -> float:
    """Return the largest divergence of a step; 0 if all were on-policy."""
    return max(entry.get("importance/stale_kl", 0.0) for entry in run["history"])


def main() -> None:
    figure("pois_guards", __doc__, ARMS, PANELS, {**FINALS, "largest stale KL": largest_stale_kl})


if __name__ == "__main__":
    main()

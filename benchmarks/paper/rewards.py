"""Section 4: rewards {0, 1} against {-1, 1}.

The paper chooses {0, 1}, so that the mean reward is the accuracy and the advantages of a mixed group have the signs of right and
wrong. Advantages divided by the group's standard deviation are the same for both, so the runs should be too, up to the
1e-4 that TRL adds to the deviation; without the division (`scale_rewards: none`) {-1, 1} doubles every advantage.
"""

from arms import POIS
from study import ENTROPY, Arm, Panel, figure

SIGNED = {"reward": "reward_functions:signed_reward"}
UNSCALED = {"scale_rewards": "none"}

ARMS = (
    Arm("{0, 1}", POIS, row="divided by the group's deviation"),
    Arm("{-1, 1}", {**POIS, **SIGNED}, row="divided by the group's deviation"),
    Arm("{0, 1}", {**POIS, **UNSCALED}, row="not divided"),
    Arm("{-1, 1}", {**POIS, **SIGNED, **UNSCALED}, row="not divided"),
)


def main() -> None:
    figure("rewards", __doc__, ARMS, (ENTROPY, Panel("grad_norm", "norm of the gradient")))


if __name__ == "__main__":
    main()

"""The settings that several figures share, so that they share the runs too."""

from typing import Any

LEARNING_RATE = 1e-4  # in `runs.SMALLER`

# Chosen before the runs that the figures show. On this task tokens of probability 0.99 carry next to no gradient
# (`mastered.py`), so tau is lower than the paper's; sigma is the paper's.
TAU = 0.5
SIGMA = 0.2  # nats

MODELS = {"0.2M": 64, "0.5M": 96, "0.8M": 128}
"""Hidden size of the models of Figure 5, by their parameters: 128 is the embedded one, `models.py` makes the others."""

ALL_TOKENS: dict[str, Any] = {"dmmpts": "none"}
DMMPTS: dict[str, Any] = {"dmmpts": {"tau": TAU, "sigma": SIGMA}}
STATIC: dict[str, Any] = {"dmmpts": {"tau": TAU, "sigma": SIGMA, "dynamic": False}}
LOOSE: dict[str, Any] = {"reward": "reward_functions:loose_reward"}

TOIS: dict[str, Any] = {"num_segments": 1, **ALL_TOKENS}
SAIS: dict[str, Any] = {"importance_mode": "sais", **ALL_TOKENS}
POIS: dict[str, Any] = {**ALL_TOKENS}  # with the demo's four segments
STOCK: dict[str, Any] = {"trainer": "trl", **ALL_TOKENS}

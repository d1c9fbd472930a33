"""The settings that several figures share, so that they share the runs too."""

from typing import Any

LEARNING_RATE = 1e-4  # in `runs.SMALLER`
TAU = 0.9
SIGMA = 0.1  # nats
MODELS = {  # hidden size of the model, by its name in figures: `warm_start.py` makes what is not embedded
    "0.2M": 64,
    "0.5M": 96,
    "0.8M": 128,
}

ALL_TOKENS: dict[str, Any] = {"dmmpts": "none"}
DMMPTS: dict[str, Any] = {"dmmpts": {"tau": TAU, "sigma": SIGMA}}
STATIC: dict[str, Any] = {"dmmpts": {"tau": TAU, "sigma": SIGMA, "dynamic": False}}

TOIS: dict[str, Any] = {"num_segments": 1, **ALL_TOKENS}
SAIS: dict[str, Any] = {"importance_mode": "sais", **ALL_TOKENS}
POIS: dict[str, Any] = {**ALL_TOKENS}  # with the demo's four segments
STOCK: dict[str, Any] = {"trainer": "trl", "dmmpts": "none"}

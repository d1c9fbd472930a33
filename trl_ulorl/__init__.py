"""trl_ulorl: train reasoning models on ultra-long outputs with TRL (UloRL, arXiv 2507.19766)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DMMPTsConfig, UloRLConfig
    from .rewards import VerifierReward, verify_answer
    from .trainer import UloRLTrainer

__version__ = "0.1.0"

# Loaded on first use: `trl` and `torch` take seconds, and the verifier needs neither.
_MODULES = {
    "DMMPTsConfig": "config",
    "UloRLConfig": "config",
    "UloRLTrainer": "trainer",
    "VerifierReward": "rewards",
    "verify_answer": "rewards",
}

__all__ = ["DMMPTsConfig", "UloRLConfig", "UloRLTrainer", "VerifierReward", "verify_answer"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

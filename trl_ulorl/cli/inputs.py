"""What several commands read from their arguments."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def load_reward(name: str) -> Any:
    """Return the verifier, or the function that `module:function` names, from the working folder too.

    Raises:
        ValueError: If there is none of this name.
    """
    if name == "verifier":
        from ..rewards import VerifierReward

        return VerifierReward()
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"`reward` ({name!r}) must be 'verifier' or 'module:function', for instance 'my_rewards:f'.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`reward` ({name!r}): there is no module {error.name!r} in {os.getcwd()} or among the installed ones."
        ) from error
    if found is None:
        raise ValueError(f"`reward` ({name!r}): the module {module!r} has no function {function!r}.")
    return found

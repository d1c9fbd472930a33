"""The embedded model in other sizes, warm-started in the same way where the embedded one does not exist."""

import os
import subprocess
import sys
from typing import Any

import runs

EMBEDDED = 128


def model_options(hidden_size: int) -> dict[str, Any]:
    """Return the options that train a model of this hidden size; the path is relative to the repository."""
    if hidden_size == EMBEDDED:
        return {}
    return {"model_name_or_path": f"outputs/paper/models/hidden_{hidden_size}"}


def make_model(hidden_size: int) -> None:
    """Warm-start the model of this hidden size, unless it is there."""
    folder = runs.ROOT / model_options(hidden_size).get("model_name_or_path", "")
    if hidden_size == EMBEDDED or (folder / "model.safetensors").exists():
        return
    runs.note(f"warm start of hidden size {hidden_size}: some minutes")
    script = runs.ROOT / "examples" / "warm_start.py"
    subprocess.run(
        [sys.executable, str(script), "--hidden_size", str(hidden_size), "--output", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(runs.ROOT)},
        check=True,
    )

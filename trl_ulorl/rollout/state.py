"""The rollout's part of a checkpoint: JSON and safetensors, nothing that is unpickled, each file written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
FOLDER = "rollout"


def save_state(
    checkpoint: str | Path, rank: int, num_ranks: int, state: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write one rank's state into a checkpoint.

    Args:
        checkpoint: The checkpoint's folder.
        rank: The rank whose state it is.
        num_ranks: Ranks of the run; a later run needs as many.
        state: JSON values; what `log_extra` was given and JSON does not know is written as text.
        tensors: The rest.
    """
    folder = Path(checkpoint) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "num_ranks": num_ranks, **state}
    contiguous = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    _replace(folder / f"rank{rank}.safetensors", lambda path: save_file(contiguous, path))
    write_json(folder / f"rank{rank}.json", content)


def load_state(checkpoint: str | Path, rank: int, num_ranks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_state` wrote.

    Raises:
        ValueError: If the state is missing, of another format or of another number of ranks.
    """
    folder = Path(checkpoint) / FOLDER
    path = folder / f"rank{rank}.json"
    if not folder.is_dir():
        raise ValueError(
            f"{checkpoint} has no `{FOLDER}/` folder, so the rollouts in progress can't go on: it was saved with "
            "`save_only_model=True` or by another trainer. Resume from a full checkpoint, or start a new run with "
            f"`model={str(checkpoint)!r}`."
        )
    found = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"format": FORMAT, "num_ranks": "fewer"}
    )
    if found["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {found['format']}, but this version reads format {FORMAT}. Resume with the version of "
            "trl-ulorl that saved it."
        )
    if found["num_ranks"] != num_ranks:
        raise ValueError(
            f"{checkpoint} was saved by {found['num_ranks']} ranks, but this run has {num_ranks}: unfinished rollouts "
            "live on the rank that decodes them. Resume on as many ranks."
        )
    return found, load_file(folder / f"rank{rank}.safetensors")


def pack_batches(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Name the tensors of buffered batches by batch and key."""
    return {f"buffered.{i}.{name}": tensor for i, batch in enumerate(batches) for name, tensor in batch.items()}


def unpack_batches(tensors: dict[str, Tensor], num_batches: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Undo `pack_batches`."""
    batches: list[dict[str, Tensor]] = [{} for _ in range(num_batches)]
    for path, tensor in tensors.items():
        if path.startswith("buffered."):
            _, index, name = path.split(".")
            batches[int(index)][name] = tensor.to(device)
    return batches


def write_json(path: Path, content: Any) -> None:
    """Write JSON values so that the file is either the old or the new one, never half of one."""
    text = json.dumps(content, default=str)
    _replace(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[str], Any]) -> None:
    temporary = f"{path}.tmp"
    write(temporary)
    os.replace(temporary, path)

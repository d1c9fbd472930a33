"""The rollout's part of a checkpoint on disk: JSON and safetensors with checksums, in a folder that appears as a whole.

```
checkpoint-N/rollout/
    manifest.json         format, number of ranks, size and checksum of every other file
    state.json            what is alike on all ranks and no array: settings, prompt stream, ledger, position in the step
    ledger.json           the ledger's balance
    groups.safetensors    lengths, versions and rewards of all groups held
    shared.safetensors    tokens of the complete groups, which all ranks hold
    rank<R>.safetensors   tokens of the groups that rank R decodes, and what else is its own
```

Nothing is unpickled, no path is taken from a file, and no link is followed. What is read is compared with its checksum
before it is parsed.
"""

from __future__ import annotations

import json
import mmap
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from .array_file import Parts, write_arrays

FORMAT = 2
FOLDER = "rollout"
TEMPORARY_FOLDER = "rollout.tmp"  # being written
REPLACED_FOLDER = "rollout.old"  # between two renames, when a newer state replaces the one of the same step
MANIFEST, STATE, LEDGER = "manifest.json", "state.json", "ledger.json"
GROUPS, SHARED = "groups.safetensors", "shared.safetensors"
WAY_ON = (
    "Resume from another checkpoint, or go on without the rollouts in progress by `resume_rollout='discard'`, which books "
    "them as set aside."
)

T = TypeVar("T")


class StateError(ValueError):
    """A saved state can't be used; the message names the file, the reason and the way on."""


class StateFormatError(StateError):
    """A saved state is of a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run.

    Args:
        exchange: Gathers one object from every rank, in rank order.
        rank: This process.
        num_ranks: All processes.
        ranks_per_engine: Consecutive processes that share an engine and hold the same unfinished groups.
    """

    exchange: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda payload: [payload]
    rank: int = 0
    num_ranks: int = 1
    ranks_per_engine: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is alike on all."""
        return self.rank == 0

    @property
    def owner(self) -> int:
        """The engine that decodes here."""
        return self.rank // self.ranks_per_engine

    @property
    def num_owners(self) -> int:
        """Engines of the run."""
        return self.num_ranks // self.ranks_per_engine

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for those that share its engine."""
        return self.rank % self.ranks_per_engine == 0

    def agree(self, attempt: Callable[[], T]) -> T:
        """Do something on every rank, and fail on all of them if it fails on one, so that none waits for ever.

        Raises:
            StateError: If it failed on another rank; what this one raised otherwise.
        """
        return self._attempt(attempt, is_shared=False)[0]

    def gather(self, attempt: Callable[[], T]) -> list[T]:
        """Do something on every rank and return each one's result, in rank order; fail as `agree` does."""
        return self._attempt(attempt, is_shared=True)[1]

    def _attempt(self, attempt: Callable[[], T], *, is_shared: bool) -> tuple[T, list[T]]:
        failure: Exception | None = None
        value: Any = None
        try:
            value = attempt()
        except Exception as error:  # noqa: BLE001 - told to the other ranks first
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        payloads = self.exchange({"error": told, "value": value if is_shared else None})
        if failure is not None:
            raise failure
        for rank, payload in enumerate(payloads):
            if payload["error"] is not None:
                raise StateError(f"It failed on rank {rank}: {payload['error']}")
        return value, [payload["value"] for payload in payloads]


# ------------------------------------------------------------------------------------------------------------- writing


def write_state(
    checkpoint: str | Path,
    ranks: Ranks,
    *,
    content: Mapping[str, Any],
    ledger: Mapping[str, Any],
    groups: Mapping[str, NDArray[Any]],
    shared: Mapping[str, Parts],
    own: Mapping[str, Parts | Tensor],
) -> None:
    """Write a rollout's state into a checkpoint; every rank calls it.

    The folder is renamed to its name once all ranks have written their part, so that it is there as a whole or not at
    all. One that is there already is replaced.

    Args:
        checkpoint: The checkpoint's folder, seen by all ranks.
        ranks: The processes.
        content: JSON values; what `log_extra` was given and JSON does not know is written as text.
        ledger: The ledger's balance.
        groups: Arrays about all held groups.
        shared: Tokens that all ranks hold.
        own: This rank's tokens and tensors. `content` to `shared` count on the main rank only.

    Raises:
        OSError: If a file can't be written on any rank; what was written is removed.
    """
    folder = Path(checkpoint) / TEMPORARY_FOLDER
    name = f"rank{ranks.rank}.safetensors"
    try:
        ranks.agree(lambda: _made_anew(folder) if ranks.is_main else None)
        entries = ranks.gather(lambda: {name: write_arrays(_seen(folder) / name, own)})
        files = {key: value for entry in entries for key, value in entry.items()}
        ranks.agree(
            lambda: _complete(folder, ranks, files, content, ledger, groups, shared) if ranks.is_main else None
        )
    except Exception as error:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        raise OSError(
            f"The rollout's state could not be saved in {checkpoint} ({type(error).__name__}: {error}). That folder is "
            "no whole checkpoint, and earlier ones are as they were: free space or mend what is named, delete the "
            "folder, and resume with `resume_from_checkpoint=True`."
        ) from error


def _made_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _seen(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}, which the main process has made, is not there on this node: a run on several nodes needs an "
            "`output_dir` that they share"
        )
    return folder


def _complete(
    folder: Path,
    ranks: Ranks,
    files: dict[str, dict[str, Any]],
    content: Mapping[str, Any],
    ledger: Mapping[str, Any],
    groups: Mapping[str, NDArray[Any]],
    shared: Mapping[str, Parts],
) -> None:
    files[SHARED] = write_arrays(folder / SHARED, shared)
    files[GROUPS] = write_arrays(folder / GROUPS, {name: [array] for name, array in groups.items()})
    files[STATE] = _write_json(folder / STATE, content)
    files[LEDGER] = _write_json(folder / LEDGER, ledger)
    _write_json(folder / MANIFEST, {"format": FORMAT, "num_ranks": ranks.num_ranks, "files": files})
    final, replaced = folder.with_name(FOLDER), folder.with_name(REPLACED_FOLDER)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_json(path: Path, content: Any) -> dict[str, Any]:
    data = json.dumps(content, default=str).encode()
    path.write_bytes(data)
    return {"bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state whose small parts are read.

    Args:
        folder: Where it is.
        num_ranks: Ranks that saved it.
        files: Size and checksum of each file.
        content: What is in `state.json`.
        groups: What is in `groups.safetensors`.
    """

    folder: Path
    num_ranks: int
    files: dict[str, dict[str, Any]]
    content: dict[str, Any]
    groups: dict[str, NDArray[Any]]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read a file of tokens.

        Raises:
            StateError: If it is damaged.
        """
        return _read_arrays(self.folder, name, self.files)


def state_folder(checkpoint: str | Path) -> Path:
    """Return where a checkpoint's state is.

    Raises:
        StateError: If it has none.
    """
    for name in (FOLDER, REPLACED_FOLDER):
        folder = Path(checkpoint) / name
        if folder.is_dir() and not folder.is_symlink():
            return folder
    raise StateError(
        f"{checkpoint} has no `{FOLDER}/` folder, so the rollouts in progress can't go on: it was saved with "
        f"`save_only_model=True`, by another trainer, or not to its end. {WAY_ON} To start a new run from its model, pass "
        f"`model={str(checkpoint)!r}`."
    )


def read_state(checkpoint: str | Path) -> SavedState:
    """Read and check all but the tokens of a state.

    Raises:
        StateError: If it is missing, damaged, or of another format.
    """
    folder = state_folder(checkpoint)
    num_ranks, files = _read_manifest(folder)
    content = _read_json(folder, STATE, files)
    groups = {name: tensor.numpy() for name, tensor in _read_arrays(folder, GROUPS, files).items()}
    return SavedState(folder, num_ranks, files, content, groups)


def check_whole(checkpoint: str | Path) -> None:
    """Check that every file of a state is there and as it was written.

    Raises:
        StateError: If not.
    """
    folder = state_folder(checkpoint)
    _, files = _read_manifest(folder)
    for name in files:
        _checked(folder, name, files)


def read_ledger(checkpoint: str | Path) -> dict[str, Any] | None:
    """Read the ledger's balance from a state whose other parts may be damaged; None if that is damaged too."""
    try:
        folder = state_folder(checkpoint)
        _, files = _read_manifest(folder)
        return _read_json(folder, LEDGER, files)
    except StateError:
        return None


def _read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    path = folder / MANIFEST
    if not path.exists() and (folder / "rank0.json").exists():
        raise StateFormatError(f"{folder} has format 1, but this version reads format {FORMAT}. {WAY_ON}")
    manifest = _parsed(path, _regular(path).read_bytes())
    found = manifest.get("format")
    if found != FORMAT or isinstance(found, bool):
        newer = isinstance(found, int) and found > FORMAT
        raise StateFormatError(
            f"{path} has format {found!r}, but this version reads format {FORMAT}. "
            + ("Resume with the version of trl-ulorl that saved it, or a newer one." if newer else WAY_ON)
        )
    num_ranks, files = manifest.get("num_ranks"), manifest.get("files")
    if not isinstance(files, dict) or not isinstance(num_ranks, int) or isinstance(num_ranks, bool):
        raise _damaged(path, "it lists no files or no number of ranks")
    fixed = (STATE, LEDGER, GROUPS, SHARED)
    if num_ranks < 1 or len(files) != num_ranks + len(fixed):
        raise _damaged(path, f"it lists {len(files)} files for {num_ranks} ranks")
    for name in (*fixed, *(f"rank{rank}.safetensors" for rank in range(num_ranks))):
        entry = files.get(name)
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("bytes"), int)
            or entry["bytes"] < 1
            or not isinstance(entry.get("xxh3"), str)
        ):
            raise _damaged(path, f"it has no size or checksum of {name}")
    return num_ranks, files


def _damaged(path: Path, reason: str) -> StateError:
    return StateError(f"{path} is damaged or is no state of a rollout: {reason}. {WAY_ON}")


def damaged(folder: Path, name: str, reason: str) -> StateError:
    """Return the error for a file whose content makes no sense."""
    return _damaged(folder / name, reason)


def _regular(path: Path) -> Path:
    """Refuse what is no file of its own: a link might lead anywhere, a pipe would never end."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise _damaged(path, f"it can't be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise _damaged(path, "it is a link or no regular file; copy a checkpoint with its files (`cp -rL`)")
    return path


def _checked(folder: Path, name: str, files: Mapping[str, dict[str, Any]]) -> Path:
    """Return a file's path, once size and checksum are found to be right."""
    path, entry = _regular(folder / name), files[name]
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(path, f"it has {size} bytes, but {entry['bytes']} were written")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = xxhash.xxh3_128_hexdigest(data)
    except OSError as error:
        raise _damaged(path, f"it can't be read ({error.strerror})") from error
    if found != entry["xxh3"]:
        raise _damaged(path, "its checksum is not that of what was written")
    return path


def _read_json(folder: Path, name: str, files: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    path = _checked(folder, name, files)
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no mapping")
    return content


def _read_arrays(folder: Path, name: str, files: Mapping[str, dict[str, Any]]) -> dict[str, Tensor]:
    path = _checked(folder, name, files)
    try:
        return load_file(path)
    except Exception as error:
        raise _damaged(path, f"it is no safetensors file that can be read ({error})") from error

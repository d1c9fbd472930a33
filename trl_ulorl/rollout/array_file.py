"""Write a safetensors file part by part, with its checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

Parts = Sequence[NDArray[Any]]  # of one flat array

_JOIN_BYTES = 1 << 16  # smaller parts are joined before they are written
_BATCH_PARTS = 256  # of one system call; most systems take 1024
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_arrays(path: Path, arrays: Mapping[str, Parts | Tensor]) -> dict[str, Any]:
    """Write a safetensors file part by part, and return its size and checksum.

    The library's own function takes whole arrays, for which the tokens of all rollouts would have to be joined first: that
    takes as long as writing them and the same memory again.
    """
    entries = [(name, *_described(value)) for name, value in arrays.items()]
    entries.sort(key=lambda entry: (-entry[4], entry[0]))  # wide types first, so that all are aligned
    header, offset = {}, 0
    for name, dtype, shape, _, width in entries:
        stop = offset + width * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    checksum = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as executor:
        for batch in _batches([head], *(parts for *_, parts, _ in entries)):
            hashed = executor.submit(_update, checksum, batch)  # beside the write, which lets go of the interpreter
            _write_all(file.fileno(), batch)
            hashed.result()
    return {"bytes": 8 + len(text) + offset, "xxh3": checksum.hexdigest()}


def _described(value: Parts | Tensor) -> tuple[str, list[int], Parts, int]:
    """Return a value's type, shape, parts and bytes per element."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        dtype, shape, width = flat.dtype, list(value.shape), flat.element_size()
        return _TYPE_NAMES[dtype], shape, [flat.view(torch.uint8).numpy()] if flat.numel() else [], width
    first = value[0] if value else np.empty(0, dtype=np.int32)
    shape = [sum(len(part) for part in value), *first.shape[1:]]
    dtype = torch.from_numpy(np.empty(0, dtype=first.dtype)).dtype
    return _TYPE_NAMES[dtype], shape, value, first.dtype.itemsize


def _batches(*arrays: Parts) -> Iterator[list[memoryview]]:
    """Yield the parts as bytes in batches, small ones joined."""
    batch: list[memoryview] = []
    small: list[NDArray[Any]] = []
    num_small = 0
    for parts in arrays:
        for part in parts:
            if not part.nbytes:
                continue
            small.append(part)
            num_small += part.nbytes
            if num_small >= _JOIN_BYTES:
                batch.append(_joined(small))
                small, num_small = [], 0
            if len(batch) == _BATCH_PARTS:
                yield batch
                batch = []
        if small:  # the next array may have another type
            batch.append(_joined(small))
            small, num_small = [], 0
    if batch:
        yield batch


def _joined(parts: list[NDArray[Any]]) -> memoryview:
    whole: Any = np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return memoryview(whole.reshape(-1).view(np.uint8))


def _update(checksum: Any, batch: list[memoryview]) -> None:
    for part in batch:
        checksum.update(part)


def _write_all(descriptor: int, batch: list[memoryview]) -> None:
    parts = list(batch)
    while parts:
        written = os.writev(descriptor, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:  # a call may write less than it was given
            parts[0] = parts[0][written:]

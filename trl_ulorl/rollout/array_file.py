"""Write a safetensors file part by part, with its checksum."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

Parts = Sequence[NDArray[Any]]  # of one flat array

_CHUNK_BYTES = 1 << 18  # joined, hashed and written while they are in the processor's cache
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
    buffer = np.empty(_CHUNK_BYTES, dtype=np.uint8)
    with path.open("wb") as file:
        for parts_of_chunk in _chunks(head, *(part for *_, parts, _ in entries for part in parts)):
            chunk = buffer[: sum(map(len, parts_of_chunk))]
            np.concatenate(parts_of_chunk, out=chunk)
            checksum.update(chunk.data)
            file.write(chunk.data)
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


def _chunks(*parts: NDArray[Any]) -> Iterator[list[NDArray[np.uint8]]]:
    """Yield the parts as bytes, those of a chunk together."""
    chunk: list[NDArray[np.uint8]] = []
    room = _CHUNK_BYTES
    for part in parts:
        rest = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        while len(rest) >= room:
            yield [*chunk, rest[:room]]
            rest, chunk, room = rest[room:], [], _CHUNK_BYTES
        if len(rest):
            chunk.append(rest)
            room -= len(rest)
    if chunk:
        yield chunk

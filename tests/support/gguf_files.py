"""GGUF files written by hand, whole and with anything in them replaced; `extras/gguf` reads goldens of llama.cpp's own
writer, too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
TYPES = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(ml_dtypes.bfloat16): BF16}
TYPES |= {np.dtype(name): 24 + at for at, name in enumerate(("int8", "int16", "int32", "int64", "float64"))}


def text(value: str | bytes) -> bytes:
    """A string: its length, and its bytes."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(thing: Any) -> bytes:
    """The type and the bytes of a value: of a bool, an int, a float, a text, or a list of one kind of these."""
    if isinstance(thing, list):
        first = value(thing[0])[:4]
        return struct.pack("<I", 9) + first + struct.pack("<Q", len(thing)) + b"".join(value(one)[4:] for one in thing)
    for kind, code, form in ((bool, 7, "<?"), (int, 11, "<q"), (float, 12, "<d")):
        if isinstance(thing, kind):
            return struct.pack("<I", code) + struct.pack(form, thing)
    return struct.pack("<I", 8) + text(thing)


def pair(key: str, thing: Any) -> bytes:
    """A key and its value."""
    return text(key) + value(thing)


def tensor(name: str | bytes, shape: Sequence[int], type: int, offset: int) -> bytes:
    """The entry of a tensor of a shape in NumPy's order."""
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", type, offset)


def header(tensors: Sequence[bytes], pairs: Sequence[bytes] = (), *, version: int = 3, counts: Any = None) -> bytes:
    """All before the data, which begin at a multiple of 32."""
    found = (len(tensors), len(pairs)) if counts is None else counts
    data = b"GGUF" + struct.pack("<IQQ", version, *found) + b"".join(pairs) + b"".join(tensors)
    return data + bytes(-len(data) % 32)


def quantized(array: np.ndarray) -> bytes:
    """The blocks of Q8_0, as GGML's reference makes them."""
    blocks = array.astype(np.float32).reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(scales == 0, 0, blocks / scales).round().astype(np.int8)
    return np.concatenate([scales.astype("<f2").view(np.uint8), values.view(np.uint8)], axis=1).tobytes()


def gguf_bytes(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None, *, q8: Sequence[str] = ()
) -> bytes:
    """A whole file; the arrays named in `q8` are quantized."""
    entries: list[bytes] = []
    data = b""
    for name, array in arrays.items():
        data += bytes(-len(data) % 32)
        entries.append(tensor(name, array.shape, Q8_0 if name in q8 else TYPES[array.dtype], len(data)))
        data += quantized(array) if name in q8 else array.tobytes()
        assert math.prod(array.shape) == array.size
    return header(entries, [pair(key, thing) for key, thing in (metadata or {}).items()]) + data


def write_gguf(path: Path, arrays: Mapping[str, np.ndarray], **options: Any) -> Path:
    """Writes a whole file."""
    path.write_bytes(gguf_bytes(arrays, **options))
    return path

"""Files as torch.save writes them, right or wrong: the opcodes of their pickle, and the archive around it.

The goldens are torch's own; torch loads what is written here, too.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class Op(bytes):
    """Opcodes that leave one value on the stack."""


class SavedTensor(NamedTuple):
    """A tensor: a storage of `count` elements, and where it is in that, in elements."""

    key: str
    dtype: str
    count: int
    offset: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


def name(module: str, text: str) -> Op:
    return Op(b"c" + f"{module}\n{text}\n".encode())


def opcodes(value: Any) -> Op:
    """The opcodes of a value."""
    if isinstance(value, Op):
        return value
    if isinstance(value, SavedTensor):
        return _tensor(value)
    if value is None or isinstance(value, bool):
        return Op({None: b"N", True: b"\x88", False: b"\x89"}[value])
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return Op(b"K" + bytes([value]) if 0 <= value < 256 else b"\x8a" + bytes([len(data)]) + data)
    if isinstance(value, float):
        return Op(b"G" + struct.pack(">d", value))
    if isinstance(value, str):
        return Op(b"X" + struct.pack("<I", len(value.encode())) + value.encode())
    if isinstance(value, tuple):
        return Op(b"(" + b"".join(opcodes(one) for one in value) + b"t")
    if isinstance(value, list):
        return Op(b"](" + b"".join(opcodes(one) for one in value) + b"e")
    assert isinstance(value, dict)
    return Op(b"}(" + b"".join(opcodes(one) for item in value.items() for one in item) + b"u")


def call(function: Op, *arguments: Any) -> Op:
    return Op(function + opcodes(arguments) + b"R")


def ordered(items: dict[str, Any]) -> Op:
    """A module's state dict."""
    metadata = b"}" + opcodes("_metadata") + opcodes({}) + b"sb"
    return Op(call(name("collections", "OrderedDict")) + opcodes(items)[1:] + metadata)


def _tensor(saved: SavedTensor) -> Op:
    hooks = call(name("collections", "OrderedDict"))
    if saved.dtype in STORAGES:
        storage, count, version, more = name("torch", STORAGES[saved.dtype]), saved.count, "v2", ()
    else:
        storage, version = name("torch.storage", "UntypedStorage"), "v3"
        count, more = saved.count * itemsize(saved.dtype), (name("torch", saved.dtype),)
    stored = Op(opcodes(("storage", storage, saved.key, "cpu", count)) + b"Q")
    rebuild = name("torch._utils", f"_rebuild_tensor_{version}")
    return call(rebuild, stored, saved.offset, saved.shape, saved.strides, False, hooks, *more)


def itemsize(dtype: str) -> int:
    return {"float16": 2, "uint16": 2}.get(dtype, 1 if dtype.startswith("float8") else int(dtype[-2:]) // 8)


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def archive(pickle: bytes, storages: Mapping[str, bytes] = {}, top: str = "model", **members: bytes) -> bytes:
    """The bytes of a file; `members` besides, by name."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(f"{top}/data.pkl", pickle)
        for member, data in ({"byteorder": b"little", "version": b"3\n"} | members).items():
            file.writestr(f"{top}/{member}", data)
        for key, data in storages.items():
            file.writestr(f"{top}/data/{key}", data)
    return made.getvalue()


def saved_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, SavedTensor], dict[str, bytes]]:
    """Tensors of arrays, each over a storage of its own, and the storages."""
    tensors, storages = {}, {}
    for number, (leaf, array) in enumerate(arrays.items()):
        strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
        tensors[leaf] = SavedTensor(str(number), array.dtype.name, array.size, 0, array.shape, strides)
        storages[str(number)] = array.tobytes()
    return tensors, storages


def save_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes a flat state dict."""
    tensors, storages = saved_arrays(arrays)
    path.write_bytes(archive(pickled(ordered(dict(tensors))), storages, top=path.stem))
    return path


def kinds(goldens, stem):
    """The expected values of a golden by name, with the kinds that NumPy's files cannot hold."""
    with np.load(goldens / "torch" / f"{stem}_expected.npz") as file:
        found = {}
        for name in file.files:
            kind = getattr(ml_dtypes, name.rpartition("/")[2], None)  # of which the bits are stored
            found[name] = file[name] if kind is None else file[name].view(kind)
        return found

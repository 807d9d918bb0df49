"""Files of each format, small beside what their openings would hold: names, aliases, errors, shards and metadata."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tests.support import gguf_files
from tests.support.bundle_writer import Bundle, entry, header
from tests.support.torch_files import Op, SavedTensor, archive, call, name, opcodes, pickled
from tests.support.zip_files import Entry, archive_of

_EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
_ARRAY = msgpack.ExtType(1, msgpack.packb(((0,), "int8", b"")))
_BROKEN = msgpack.ExtType(1, b"\x00")
_SPEC = {"driver": "zarr", "kvstore": {"driver": "file", "path": "a"}, "metadata": {"shape": [1]}}
_TENSOR = opcodes(SavedTensor("0", "float32", 1, 0, (1,), (1,)))
_MEMBER = io.BytesIO()
np.lib.format.write_array(_MEMBER, np.zeros(0, np.uint8))


def _names(count: int, value: Any) -> dict[str, Any]:
    return {f"{number:06x}": value for number in range(count)}


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _safetensors(value: Any) -> dict[str, bytes]:
    text = _dumped(value)
    return {"model.safetensors": struct.pack("<Q", len(text)) + text}


def _files_of_index(count: int) -> dict[str, bytes]:
    files = {f"{number}.safetensors": _safetensors({f"{number}": _EMPTY})["model.safetensors"] for number in range(9)}
    weights = {str(number): f"{number}.safetensors" for number in range(9)}
    index = {"metadata": _names(count, ""), "weight_map": weights}
    return {**files, "model.safetensors.index.json": _dumped(index)}


def _bundle(values: Callable[[int], bytes], shards: int = 1) -> Callable[[int], dict[str, bytes]]:
    def files(count: int) -> dict[str, bytes]:
        bundle = Bundle()
        bundle.header = header(shards)
        bundle.entries = {f"{number:06x}".encode(): values(number) for number in range(count)}
        data = {} if shards > 1 else {"model.ckpt-1.data-00000-of-00001": b""}
        return {"model.ckpt-1.index": bundle.index(snappy=True), **data}

    return files


def _node(key: str, kind: str = "jax.Array", *, skipped: bool = False) -> dict[str, Any]:
    value = {"value_type": kind, "skip_deserialize": skipped}
    return {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": value}


def _orbax(count: int, custom: Any = None, **node: Any) -> bytes:
    tree = {f"('{key}',)": _node(key, **node) for key in _names(count, None)}
    return _dumped({"tree_metadata": tree, "use_ocdbt": False, "custom_metadata": custom})


def _torch(data: bytes, **storages: bytes) -> dict[str, bytes]:
    return {"pytorch_model.bin": archive(b"\x80\x02" + data + b".", storages)}


def _shared(value: Op, count: int) -> dict[str, bytes]:
    return _torch(b"](" + _TENSOR + value + b"q\x00" + b"h\x00" * count + b"e", **{"0": bytes(4)})


def _dag(count: int) -> dict[str, bytes]:
    """A text in lists of lists of lists of itself."""
    width, made = round(count ** (1 / 3)), opcodes("y" * 200)
    for level in range(3):
        made = Op(b"](" + made + bytes([ord("q"), level]) + bytes([ord("h"), level]) * width + b"e")
    return _torch(made)


def _npz(count: int) -> dict[str, bytes]:
    members = [Entry(f"{key}.npy".encode(), _MEMBER.getvalue()) for key in _names(count, None)]
    return {"a.npz": archive_of(members)}


def _gguf(count: int, type_code: int = gguf_files.F32) -> dict[str, bytes]:
    return {"a.gguf": gguf_files.header([gguf_files.tensor(key, (1,), type_code, 0) for key in _names(count, None)])}


def _gguf_pairs(count: int) -> dict[str, bytes]:
    pairs = [gguf_files.pair(key, True) for key in _names(count, None)]
    return {"a.gguf": gguf_files.header([gguf_files.tensor("a", (0,), gguf_files.F32, 0)], pairs)}


OPENINGS: dict[str, Callable[[int], dict[str, bytes]]] = {
    "safetensors: names": lambda count: _safetensors(_names(count, _EMPTY)),
    "safetensors: errors": lambda count: _safetensors(_names(count, {**_EMPTY, "dtype": "X"})),
    "safetensors: metadata": lambda count: _safetensors({"a": _EMPTY, "__metadata__": _names(count, "")}),
    "safetensors: metadata of an index": _files_of_index,
    "bundle: names": _bundle(lambda number: entry(4, (0,))),
    "bundle: errors": _bundle(lambda number: b"\xff"),
    "bundle: shapes": _bundle(lambda number: entry(4, (0, *[number] * 8))),
    "bundle: shards": _bundle(lambda number: entry(4, (1,), shard=number, size=1), shards=100_000),
    "msgpack: names": lambda count: {"checkpoint_1": msgpack.packb(_names(count, 0))},
    "msgpack: empty maps": lambda count: {"checkpoint_1": msgpack.packb({"a": [{}] * count})},
    "msgpack: arrays": lambda count: {"checkpoint_1": msgpack.packb({"a": [_ARRAY] * count})},
    "msgpack: errors": lambda count: {"checkpoint_1": msgpack.packb({"a": [_BROKEN] * min(count, 900)})},
    "t5x: names": lambda count: {"checkpoint": msgpack.packb({"version": 3, "optimizer": _names(count, 0)})},
    "t5x: arrays": lambda count: {"checkpoint": msgpack.packb({"version": 3, "optimizer": _names(count // 8, _SPEC)})},
    "orbax: names": lambda count: {"_METADATA": _orbax(count // 8)},
    "orbax: empty nodes": lambda count: {"_METADATA": _orbax(count // 2, kind="None", skipped=True)},
    "orbax: custom metadata": lambda count: {"_METADATA": _orbax(1, [{}] * count, kind="None", skipped=True)},
    "orbax: items": lambda count: {
        "_CHECKPOINT_METADATA": _dumped({"item_handlers": dict.fromkeys("abcdefghi", "")}),
        **{f"{item}/_METADATA": _orbax(1, [{}] * (count // 9), kind="None", skipped=True) for item in "abcdefghi"},
    },
    "torch: names": lambda count: _torch(pickled(_names(count, 0))[2:-1]),
    "torch: a text": lambda count: _shared(opcodes("x" * 100), count),
    "torch: texts in lists": _dag,
    "torch: a tensor": lambda count: _shared(_TENSOR, count),
    "torch: an object": lambda count: _shared(call(name("builtins", "set"), []), count),
    "torch: empty maps": lambda count: _torch(b"](" + b"}" * count + b"e"),
    "npz: names": lambda count: _npz(count // 8),
    "gguf: names": _gguf,
    "gguf: errors": lambda count: _gguf(count, 77),
    "gguf: metadata": _gguf_pairs,
}
"""The files below a directory, by what the opening would hold; the argument scales them."""


def write_opening(directory: Path, kind: str, count: int) -> tuple[Path, int]:
    """Writes files of a kind; returns the path to open, and their bytes."""
    files = OPENINGS[kind](count)
    for file, data in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(data)
    path = directory / next(iter(files)) if kind.startswith("npz") else directory
    return path, sum(map(len, files.values()))

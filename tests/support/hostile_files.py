"""Small files that claim much: holes, chunks of gigabytes of which nothing is stored, long JSON."""

import json
import os
import struct
from pathlib import Path

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def repeated(item: bytes, size: int) -> bytes:
    return b'{"a":[' + b",".join([item] * (size // (len(item) + 1))) + b"]}"


def safetensors_of(path: Path, shape: list[int], size: int) -> Path:
    """A file of one tensor of bytes whose data is a hole."""
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    return path


def huge_chunk(path: Path, kind: str, nbytes: int) -> None:
    """A checkpoint whose leaf `a`, bytes, claims one chunk of this size; nothing of it is stored."""
    flat = {
        "shape": [nbytes],
        "chunks": [nbytes],
        "dtype": "|u1",
        "compressor": {"id": "gzip", "level": 1},
        "fill_value": None,
    }
    v2 = {**flat, "filters": None, "order": "C", "zarr_format": 2}
    if kind == "t5x":
        (path / "a").mkdir(parents=True)
        (path / "a" / ".zarray").write_text(json.dumps(v2))
        said = {"driver": "zarr", "kvstore": {"driver": "file", "path": "a"}, "metadata": {"shape": [nbytes]}}
        tree = {"version": 3, "optimizer": {"a": said}}
        (path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
        return
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt", use_zarr3="zarr3" in kind)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave({"a": np.zeros(7, np.uint8)}))
    if kind == "ocdbt":
        database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
        ts.KvStore.open(database).result().write("a/.zarray", json.dumps(v2).encode()).result()
    elif kind == "zarr2":
        (path / "a" / ".zarray").write_text(json.dumps(v2))
    else:
        metadata = json.loads((path / "a" / "zarr.json").read_text())
        # A shard of single bytes has an index of 16 bytes for each.
        outer = nbytes // 16 if "shard" in kind else nbytes
        metadata |= {"shape": [outer], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [outer]}}}
        metadata["codecs"] = [{"name": "bytes"}]
        if "shard" in kind:
            inner = {"chunk_shape": [1], "codecs": [{"name": "bytes"}], "index_codecs": [_LITTLE, {"name": "crc32c"}]}
            metadata["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]
        (path / "a" / "zarr.json").write_text(json.dumps(metadata))

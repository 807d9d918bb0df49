"""Checkpoints of T5.1.1-XXL, 45 GB, that take no disk: bundles whose shards are holes, T5X's steps without chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import flax.serialization
import google_crc32c
import numpy as np

from orbax_t5x.files.crc import CRC32C
from orbax_t5x.trees.flat import unflatten
from tests.support.bundle_writer import entry, header, np_dtype, shard_path, table

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) by name."""


def t5_xxl() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The names and shapes of T5.1.1-XXL as Mesh TensorFlow saves it, with its Adafactor slots."""
    model, hidden, heads, layers, vocabulary = 4096, 10240, 64 * 64, 24, 32128
    shapes: dict[str, tuple[int, ...]] = {
        "shared/embedding": (vocabulary, model),
        "decoder/logits/kernel": (model, vocabulary),
    }
    attention = {"q": (model, heads), "k": (model, heads), "v": (model, heads), "o": (heads, model)}
    feed_forward = {"wi_0/kernel": (model, hidden), "wi_1/kernel": (model, hidden), "wo/kernel": (hidden, model)}
    for tower, blocks in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        shapes[f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"] = (64, 32)
        shapes[f"{tower}/rms_norm/scale"] = (model,)
        for layer in range(layers):
            parts = [(block, attention) for block in blocks] + [("DenseReluDense", feed_forward)]
            for number, (block, weights) in enumerate(parts):
                place = f"{tower}/block_{layer:03d}/layer_{number:03d}"
                shapes[f"{place}/rms_norm/scale"] = (model,)
                shapes |= {f"{place}/{block}/{name}": shape for name, shape in weights.items()}
    slots = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            slots[f"{name}_slot_vr"], slots[f"{name}_slot_vc"] = (shape[0],), (shape[1],)
        else:
            slots[f"{name}_slot_v"] = shape
    return {name: ("float32", shape) for name, shape in {**shapes, **slots}.items()} | {"global_step": ("int64", ())}


def _zeros_crc(size: int) -> int:
    """The crc32c of that many zeros, without making them."""
    unit = 1 << 16
    whole, rest = divmod(size, unit)
    parts = [google_crc32c.value(bytes(unit))] * whole + [google_crc32c.value(bytes(rest))]
    return CRC32C.combine(parts, [unit] * whole + [rest])


def write_bundle(directory: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], num_shards: int) -> Path:
    """A bundle of zeros whose shards are holes: entries of any size, checksums that hold, no disk.

    Args:
      shapes: (dtype, shape) by name.
    """
    ends = [0] * num_shards
    crcs: dict[int, int] = {}
    entries: list[tuple[bytes, bytes]] = [(b"", header(num_shards))]
    for number, (name, (dtype, shape)) in enumerate(sorted(shapes.items())):
        shard = number % num_shards
        size = int(np.prod(shape, dtype=np.int64)) * np_dtype(dtype).itemsize
        crc = crcs[size] = crcs[size] if size in crcs else _zeros_crc(size)
        entries.append((name.encode(), entry(dtype, shape, shard=shard, offset=ends[shard], size=size, crc=crc)))
        ends[shard] += size
    prefix = directory / "model.ckpt-1000000"
    for shard, end in enumerate(ends):
        with open(shard_path(prefix, shard, num_shards), "wb") as file:
            file.truncate(end)
    Path(f"{prefix}.index").write_bytes(table(entries))
    return prefix


def write_t5x(directory: Path, shapes: Shapes) -> Path:
    """A T5X step: a directory of metadata for each parameter, and slots in the msgpack file, as T5X has them.

    No chunk is written: with a fill value an array without chunks is all that value.
    """
    step = directory / "checkpoint_1000000"
    tree = {}
    for name, (dtype, shape) in shapes.items():
        if "_slot_" in name or not shape:
            tree[f"state/{name}"] = np.zeros(shape, np_dtype(dtype))
            continue
        place = f"target.{name.replace('/', '.')}"
        chunks = [max(1, shape[0] // 8), *shape[1:]]
        codec = {"id": "gzip", "level": 1}
        about = {"shape": list(shape), "chunks": chunks, "compressor": codec}
        stored = {"zarr_format": 2, "dtype": "<f4", "fill_value": 0.0, "filters": None, "order": "C", **about}
        (step / place).mkdir(parents=True)
        (step / place / ".zarray").write_text(json.dumps(stored))
        kvstore = {"driver": "file", "path": f"{place}/"}
        tree[f"target/{name}"] = {"driver": "zarr", "dtype": dtype, "kvstore": kvstore, "metadata": about}
    content = {"version": 3, "optimizer": unflatten(tree)}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return step

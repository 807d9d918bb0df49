"""Every checkpoint of `tests/goldens` by name: where it is, and what its writer said that it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.serialization
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.trees.flat import flatten
from tests.support.t5x_goldens import NATIVE, VARIANTS, golden, single_file

_GOLDENS = Path(__file__).parents[1] / "goldens"

BUNDLES = (
    *("t5_1_0_bf16", "t5_1_1_f32", "t5_1_1_bf16_snappy", "t5_1_1_perlayer_rel", "lm_transformer", "dtype_zoo"),
    "partitioned",
)


class Stored(NamedTuple):
    """A checkpoint and its values, by '/'-joined name, in their true dtypes."""

    path: Path
    values: dict[str, np.ndarray]


def _np_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def bundle_values(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a TensorFlow bundle, as TensorFlow read it."""
    about = json.loads((folder / "expected_meta.json").read_text())["tensors"]
    result = {}
    with np.load(folder / "expected.npz") as values:
        for name, said in about.items():
            if said["dtype"] == "string":
                text = np.array(said["value"], object).reshape(said["shape"])
                encode = np.vectorize(lambda value: value.encode("latin-1"), otypes=[object])
                result[name] = encode(text) if text.size else text
            else:
                result[name] = values[name].astype(_np_dtype(said["dtype"]))
    return result


def _bundle(name: str) -> Stored:
    folder = _GOLDENS / "tf_bundle" / name
    return Stored(folder, bundle_values(folder))


def _native(name: str) -> Stored:
    found = golden(name)
    return Stored(found.root, found.values)


def _single_file(_: str) -> Stored:
    path = single_file()
    tree = flax.serialization.msgpack_restore(path.read_bytes())["optimizer"]
    return Stored(path, {name: np.asarray(value) for name, value in flatten(tree).items()})


def _t5x_orbax(name: str) -> Stored:
    root = _GOLDENS / "t5x_orbax" / name
    about = json.loads((root / "expected_meta.json").read_text())["leaves"]
    with np.load(root / "expected.npz") as values:
        arrays = {
            leaf: values[leaf].astype(_np_dtype(said["dtype"]))
            for leaf, said in about.items()
            if said.get("shape") is not None
        }
    return Stored(root, arrays)


def _safetensors(name: str) -> Stored:
    path = _GOLDENS / "safetensors" / name
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    with np.load(_GOLDENS / "safetensors" / f"{name}_expected.npz") as values:
        return Stored(path, {leaf: values[leaf] for leaf in names})


def _flax_msgpack(name: str) -> Stored:
    with np.load(_GOLDENS / "flax_msgpack" / f"{name}_expected.npz") as values:
        return Stored(_GOLDENS / "flax_msgpack" / name, dict(values))


def _torch(name: str) -> Stored:
    with np.load(_GOLDENS / "safetensors" / "t5_1_1_expected.npz") as values:
        tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        half = name.endswith("bf16")
        arrays = {leaf: values[leaf] for leaf in values.files if not (half and leaf in tied)}
    if half:
        arrays = {leaf: value.astype(ml_dtypes.bfloat16) for leaf, value in arrays.items()}
    return Stored(_GOLDENS / "torch" / name, arrays)


def _aggregate(name: str) -> Stored:
    path = _GOLDENS / "orbax_aggregate" / f"{name}.checkpoint"
    leaves = jax.tree_util.tree_flatten_with_path(ocp.PyTreeCheckpointer().restore(path))[0]
    return Stored(
        path, {jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(value) for keys, value in leaves}
    )


_READ: dict[str, tuple[Callable[[str], Stored], tuple[str, ...]]] = {
    "tf_bundle": (_bundle, BUNDLES),
    "t5x_native": (_native, (*NATIVE, *VARIANTS)),
    "t5x_file": (_single_file, ("test_t5_tiny",)),
    "t5x_orbax": (_t5x_orbax, ("d8_adafactor", "d1_adamw_oldjax")),
    "safetensors": (_safetensors, ("t5_1_1",)),
    "flax_msgpack": (_flax_msgpack, ("t5_1_1", "t5_1_0")),
    "torch": (_torch, ("t5_1_1", "t5_1_1_bf16")),
    "orbax_aggregate": (_aggregate, ("aggregate_some", "aggregate_all")),
}

EVERY_CHECKPOINT = tuple(f"{kind}/{name}" for kind, (_, names) in _READ.items() for name in names)


def stored(checkpoint: str) -> Stored:
    """One of `EVERY_CHECKPOINT`."""
    kind, name = checkpoint.split("/")
    return _READ[kind][0](name)

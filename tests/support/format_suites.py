"""The suite of readers over each format, written by the format's own library; and the functions that write."""

import json
from pathlib import Path

import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import tensorstore as ts

from orbax_t5x.testing.reader_suite import NUMBERS, ReaderSuite, sample_arrays
from orbax_t5x.trees.flat import unflatten
from tests.support import gguf_files
from tests.support.bundle_writer import DTYPES, bundle_of, np_dtype
from tests.support.torch_files import save_torch

# Those of the format besides what every format stores.
BUNDLE_DTYPES = NUMBERS + tuple(np_dtype(name) for name in DTYPES if np_dtype(name) not in NUMBERS)


class BundleSuite(ReaderSuite):
    """Written by hand; TensorFlow reads such bundles (`test_tensorflow_oracle.py`)."""

    dtypes = BUNDLE_DTYPES
    shards = 1
    big_endian = False

    def write(self, directory, arrays):
        return bundle_of(arrays, self.shards, big_endian=self.big_endian).write(directory)


def save_safetensors(path: Path, arrays, metadata=None) -> None:
    """Writes with the library's own serializer, which knows dtypes that its NumPy layer refuses."""
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.serialize_file(
        {
            name: safetensors.TensorSpec(
                dtype=array.dtype.name, shape=arrays[name].shape, data_ptr=array.ctypes.data, data_len=array.nbytes
            )
            for name, array in kept.items()
        },
        path,
        metadata,
    )


class SafetensorsSuite(ReaderSuite):
    dtypes = NUMBERS

    def write(self, directory, arrays):
        path = directory / "model.safetensors"
        save_safetensors(path, arrays)
        return path


class SafetensorsIndexSuite(ReaderSuite):
    def write(self, directory, arrays):
        weight_map = {}
        for k in range(3):
            file = f"model-0000{k + 1}-of-00003.safetensors"
            part = dict(list(arrays.items())[k::3])
            save_safetensors(directory / file, part)
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return directory


class TorchSuite(ReaderSuite):
    """Written by hand; torch loads such files."""

    dtypes = (*NUMBERS, np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(np.complex128))

    def write(self, directory, arrays):
        return save_torch(directory / "pytorch_model.bin", arrays)


class TorchIndexSuite(ReaderSuite):
    def write(self, directory, arrays):
        weight_map = {}
        for k in range(2):
            file = f"pytorch_model-0000{k + 1}-of-00002.bin"
            part = dict(list(arrays.items())[k::2])
            save_torch(directory / file, part)
            weight_map |= dict.fromkeys(part, file)
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory


class NpzSuite(ReaderSuite):
    """NumPy's own types, and bfloat16, which it writes as two bytes of no type."""

    dtypes = (*(dtype for dtype in NUMBERS if not dtype.name.startswith("float8")), np.dtype(np.complex128))
    save = staticmethod(np.savez)

    def write(self, directory, arrays):
        path = directory / "model.npz"
        self.save(path, **arrays)
        return path


class FlaxMsgpackSuite(ReaderSuite):
    dtypes = (*NUMBERS, np.dtype(ml_dtypes.int4), np.dtype(np.complex128))

    def write(self, directory, arrays):
        path = directory / "checkpoint_3"
        path.write_bytes(flax.serialization.msgpack_serialize(unflatten(dict(arrays))))
        return path


class FlaxIndexSuite(ReaderSuite):
    """In files as Transformers cuts a model: by '/'-joined names, each a tree of its own."""

    def write(self, directory, arrays):
        weight_map = {}
        for k in range(3):
            file = f"flax_model-0000{k + 1}-of-00003.msgpack"
            part = dict(list(arrays.items())[k::3])
            (directory / file).write_bytes(flax.serialization.to_bytes(unflatten(part)))
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "flax_model.msgpack.index.json").write_text(json.dumps(index))
        return directory


class GgufSuite(ReaderSuite):
    """Written by hand; `tests/goldens/gguf` holds a file of llama.cpp's own writer."""

    dtypes = tuple(gguf_files.TYPES)

    def write(self, directory, arrays):
        return gguf_files.write_gguf(directory / "model.gguf", arrays)

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory):
        """GGML's tensors have four dimensions at most."""
        arrays = {name: array for name, array in sample_arrays(cls.dtypes).items() if array.ndim <= 4}
        return cls().write(tmp_path_factory.mktemp("suite"), arrays), arrays


def write_t5x(directory, arrays, *, version=3, compressor=None, chunks=lambda shape: shape, inline=(), **metadata):
    """Writes arrays as T5X does: zarr by TensorStore, the tree by Flax."""
    directory.mkdir(parents=True, exist_ok=True)
    tree = {}
    for name, array in arrays.items():
        if name in inline:
            tree[name] = array
            continue
        said = {"shape": list(array.shape), "chunks": list(chunks(array.shape)), "compressor": compressor, **metadata}
        place = f"{name.replace('/', '.')}/"
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/{place}"}, "metadata": said}
        store = ts.open({**spec, "dtype": array.dtype.name}, create=True).result()
        store.write(np.ascontiguousarray(array).reshape(array.shape)).result()
        kvstore = {"driver": "file", "path": place}
        tree[name] = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": kvstore, "metadata": said}
    nested = unflatten(tree)
    top = {"version": version, "optimizer": nested} if version else nested
    (directory / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(top))
    return directory


# T5X stores no uint16: up to version 2 that is bfloat16.
STORED_BY_T5X = tuple(dtype for dtype in NUMBERS if dtype != np.uint16)


class T5xGzipSuite(ReaderSuite):
    dtypes = STORED_BY_T5X

    def write(self, directory, arrays):
        return write_t5x(directory / "checkpoint_3", arrays, compressor={"id": "gzip", "level": 1})


class T5xSingleFileSuite(ReaderSuite):
    def write(self, directory, arrays):
        return write_t5x(directory / "step", arrays, inline=list(arrays)) / "checkpoint"

    def test_the_format(self, opened):
        assert opened.format == "t5x"


def nest(flat):
    """A nested dict of '/'-joined names."""
    root = {}
    for name, value in flat.items():
        node = root
        *parents, last = name.split("/")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return root


def save_orbax(path, tree, *, ocdbt=True, zarr3=False, **args):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, **args))
    return path


class OrbaxSuite(ReaderSuite):
    dtypes = (*NUMBERS, np.dtype(jnp.int4))
    ocdbt = True
    zarr3 = False

    def write(self, directory, arrays):
        return save_orbax(directory / "item", nest(arrays), ocdbt=self.ocdbt, zarr3=self.zarr3)

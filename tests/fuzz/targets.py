"""The parsers that are fuzzed: how an input reaches each, and what must hold of what comes out.

A target's check takes the bytes of one input. It returns the first typed error that they led to, or None; anything
else that is raised is a bug, as is an error without its file, or one of a leaf without the leaf's name. Where somebody
else reads the format, too, the values are compared with theirs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import numpy as np
import safetensors
import safetensors.numpy
import tensorstore as ts
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.ranges.windowed import WindowGrid, union_runs
from orbax_t5x.readers.tf_bundle.proto import BadMessage, Extent, parse_bundle_header, parse_entry
from orbax_t5x.readers.tf_bundle.sstable import Table
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, same_bits
from tests.fuzz import mutations
from tests.fuzz.mutations import ChangeBytes, Mutation
from tests.support import torch_files
from tests.support.bundle_writer import block, bundle_of, entry, header, sealed, shard_path, table, table_of_blocks
from tests.support.gguf_files import gguf_bytes
from tests.support.zip_files import Entry, archive_of

Check = Callable[[bytes], CheckpointError | None]

# What a process may take for one input is bounded by these, so that a bomb shows at a size that the machine bears.
_LIMITS = Limits(index_bytes=16 << 20)
# Larger leaves are opened, and no element of them is read.
_READ_BYTES = 1 << 20
# Objects that a pickle shares may have many names: all are listed, and the first are read.
_LEAVES_READ = 1000
_VALUE = np.arange(8, dtype=np.float32)
# Written by TensorStore: a manifest names files whose names are random, so that it is saved with them.
_OCDBT_ITEM = Path(__file__).parent.parent / "corpus" / "ocdbt_item"


class Target(NamedTuple):
    """A parser.

    Attributes:
      make: makes the check, given a directory of its own.
      seeds: sound inputs to begin with.
      mutate: an edit that keeps checksums and lengths whole.
    """

    make: Callable[[Path], Check]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutation


class Contents(NamedTuple):
    """What a checkpoint gave.

    Attributes:
      values: of leaves that could be read, by name.
      errors: of opening, or of leaves.
    """

    values: dict[str, np.ndarray]
    errors: list[CheckpointError]

    @property
    def first_error(self) -> CheckpointError | None:
        return self.errors[0] if self.errors else None


def contents(path: Path, format: str | None = None) -> Contents:
    """Opens a checkpoint and reads all its leaves."""
    found = Contents({}, [])
    try:
        checkpoint = ot.open_checkpoint(path, format=format, limits=_LIMITS)
    except CheckpointError as error:
        assert error.path is not None, f"an error without its file: {error!r}"
        assert "not foreseen" not in error.message, f"only the guard of the public calls has typed it: {error!r}"
        found.errors.append(error)
        return found
    with checkpoint:
        checkpoint.tree()
        for name in itertools.islice(checkpoint.leaves, _LEAVES_READ):
            leaf = leaf_of(checkpoint, name)
            small = leaf.shape == () or int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize <= _READ_BYTES
            boxes = None if small else [tuple((0, 0) for _ in leaf.shape)]
            try:
                value = read_boxes(leaf, boxes).arrays[0]
            except CheckpointError as error:
                assert error.leaf == name, f"an error of {name!r} that names {error.leaf!r}: {error!r}"
                assert error.path is not None, f"an error without its file: {error!r}"
                found.errors.append(error)
            else:
                if small:
                    found.values[name] = value
    return found


# -- TensorFlow bundles


def _sstable(directory: Path) -> Check:
    def check(data: bytes) -> CheckpointError | None:
        (directory / "table").write_bytes(data)
        with contextlib.closing(LocalFiles(directory, limits=_LIMITS)) as files:
            try:
                entries = list(Table(files.file("table")).entries())
            except CheckpointError as error:
                assert error.path is not None
                return error
        assert [key for key, _ in entries] == sorted({key for key, _ in entries})
        return None

    return check


def _sstables() -> list[bytes]:
    entries = [(f"key/{number:03}".encode(), b"v" * (number % 7)) for number in range(40)]
    return [table(entries), table(entries, block_bytes=64, restart_interval=2), table(entries, snappy=True)]


def _snappy(directory: Path) -> Check:
    check_table = _sstable(directory)

    def check(data: bytes) -> CheckpointError | None:
        return check_table(table_of_blocks([(b"z", sealed(data, 1, compress=False))]))

    return check


def _snappy_blocks() -> list[bytes]:
    whole = block([(f"k{number:04}".encode(), b"value" * 9) for number in range(60)])
    return [sealed(whole, 1)[:-5], sealed(block([(b"a", b"b")]), 1)[:-5]]


def _only_bytes(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    return change(data)


_FIELDS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "VersionDef": ((1, "producer", "INT32"), (2, "min_consumer", "INT32")),
    "Header": ((1, "num_shards", "INT32"), (2, "endianness", "INT32"), (3, "version", "VersionDef")),
    "Dim": ((1, "size", "INT64"),),
    "Shape": ((2, "dim", "*Dim"), (3, "unknown_rank", "BOOL")),
    "Extent": ((1, "start", "INT64"), (2, "length", "INT64")),
    "Slice": ((1, "extent", "*Extent"),),
    "Entry": (
        *((1, "dtype", "INT32"), (2, "shape", "Shape"), (3, "shard", "INT32"), (4, "offset", "INT64")),
        *((5, "size", "INT64"), (6, "masked_crc", "FIXED32"), (7, "slices", "*Slice")),
    ),
}


@functools.cache
def _messages() -> dict[str, Any]:
    """TensorFlow's messages for protobuf's own parser."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="fuzz.proto", package="fuzz", syntax="proto2")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for number, name, kind in fields:
            field = described.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            if hasattr(kinds, f"TYPE_{kind}"):
                field.type = getattr(kinds, f"TYPE_{kind}")
            else:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".fuzz.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"fuzz.{name}")) for name in _FIELDS}


def _proto(_: Path) -> Check:
    def check(data: bytes) -> None:
        for name, parse in (("Header", parse_bundle_header), ("Entry", lambda data: parse_entry(data, 32))):
            try:
                ours = parse(data)
            except BadMessage:
                continue
            theirs = _messages()[name]()
            try:
                theirs.ParseFromString(data)
            except Exception:  # whatever protobuf raises: then there is nothing to compare
                continue
            if name == "Header":
                version = theirs.version
                assert ours == (theirs.num_shards, theirs.endianness, version.producer, version.min_consumer)
                continue
            shape = None if theirs.shape.unknown_rank else tuple(dim.size for dim in theirs.shape.dim)
            slices = tuple(
                tuple(Extent(part.start, part.length if part.HasField("length") else -1) for part in one.extent)
                for one in theirs.slices
            )
            assert ours == (*(theirs.dtype, shape, theirs.shard, theirs.offset, theirs.size, theirs.masked_crc), slices)

    return check


def _protos() -> list[bytes]:
    slices = [[Extent(0, 2), Extent(0, -1)], [Extent(2, 1), Extent(3, 70)]]
    return [
        header(3),
        header(2, 1),
        entry("float32", (2, 300), offset=8, size=2400, crc=5),
        entry(1, (3, 4), slices=slices),
    ]


def _bundle_arrays() -> dict[str, np.ndarray]:
    text = np.array([b"one", b"", b"three"], object)
    return {"a/b": _VALUE, "n": np.arange(6, dtype=np.int16).reshape(2, 3), "t": text}


def _bundle() -> Any:
    bundle = bundle_of(_bundle_arrays(), 2)
    rows = [[Extent(0, 2), Extent(0, -1)], [Extent(2, 3), Extent(0, -1)]]
    bundle.add_sliced("w", np.arange(20, dtype=np.int16).reshape(5, 4), rows)
    return bundle


def _tf_bundle(directory: Path) -> Check:
    bundle = _bundle()
    prefix = bundle.write(directory)
    stored = b"".join(shard_path(prefix, number, 2).read_bytes() for number in range(2))

    def check(data: bytes) -> CheckpointError | None:
        Path(f"{prefix}.index").write_bytes(data)
        found = contents(prefix, "tf_bundle")
        # Data are checked by their checksums: what was read was stored.
        for value in found.values.values():
            assert value.dtype == object or value.nbytes <= 2 * len(stored)
        return found.first_error

    return check


def _bundle_indexes() -> list[bytes]:
    bundle = _bundle()
    return [bundle.index(), bundle.index(block_bytes=64), bundle.index(snappy=True)]


# -- msgpack


def _flax_msgpack(directory: Path) -> Check:
    path = directory / "state.msgpack"

    def check(data: bytes) -> CheckpointError | None:
        path.write_bytes(data)
        found = contents(path, "flax_msgpack")
        if found.errors:
            return found.first_error
        try:
            theirs = flax.serialization.msgpack_restore(data)
        except Exception:  # Flax refuses some of what is read here, with errors of many kinds
            return None
        for name, value in _numbers(theirs, ""):
            if name in found.values:
                assert same_bits(np.asarray(found.values[name]), value), name
        return None

    return check


def _numbers(tree: Any, prefix: str) -> Iterable[tuple[str, np.ndarray]]:
    """Arrays of a tree that Flax restored, by name; names that occur twice are no names."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            if "/" not in key and key:
                yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, np.ndarray) and "/" not in key and value.dtype != object:
            yield f"{prefix}{key}", value


def _flax_trees() -> list[bytes]:
    tree = {"params": {"w": _VALUE.reshape(2, 4), "b": np.float16(3)}, "step": 7, "c": 1 + 2j, "none": None, "e": {}}
    tree["texts"] = {"0": "text", "list": [1, 2.5, "three"]}
    chunks = {
        "__msgpack_chunked_array__": True,
        "shape": {"0": 2, "1": 4},
        "chunks": {"0": _VALUE[:5], "1": _VALUE[5:]},
    }
    return [flax.serialization.msgpack_serialize(one) for one in (tree, {"w": chunks, "n": np.arange(3)})]


# -- T5X


def _write_zarr(directory: Path, name: str = "target.w", **metadata: Any) -> None:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/{name}/"}, "dtype": "float32"}
    spec["metadata"] = {"shape": [8], "chunks": [4], **metadata}
    ts.open(spec, create=True, delete_existing=True).result().write(_VALUE).result()


def _t5x_tree(**spec: Any) -> dict[str, Any]:
    metadata = {"shape": [8], "chunks": [4], "compressor": {"id": "gzip", "level": 1}}
    kvstore = {"driver": "file", "path": "target.w/"}
    leaf = {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata, **spec}
    state = {"step": np.int32(3), "param_states": {"w": {"v": _VALUE, "m": None}}}
    return {"version": 3, "optimizer": {"target": {"w": leaf}, "state": state}}


def _t5x(directory: Path) -> Check:
    step = directory / "checkpoint_3"
    _write_zarr(step, compressor={"id": "gzip", "level": 1})
    outside = sorted(path.name for path in step.rglob("*"))

    def check(data: bytes) -> CheckpointError | None:
        (step / "checkpoint").write_bytes(data)
        found = contents(step, "t5x")
        assert sorted(path.name for path in step.rglob("*") if path.name != "checkpoint") == outside
        return found.first_error

    return check


def _t5x_trees() -> list[bytes]:
    transform = {"input_inclusive_min": [0], "input_exclusive_max": [[8]]}
    kvstore = {"driver": "gfile", "path": "target.w"}
    trees = [_t5x_tree(), _t5x_tree(transform=transform), _t5x_tree(kvstore=kvstore), {**_t5x_tree(), "version": 2}]
    return [flax.serialization.msgpack_serialize(tree) for tree in (*trees, _t5x_tree()["optimizer"])]


def _zarray(directory: Path) -> Check:
    step = directory / "checkpoint_3"
    _write_zarr(step, compressor=None)
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(_t5x_tree()))

    def check(data: bytes) -> CheckpointError | None:
        (step / "target.w" / ".zarray").write_bytes(data)
        found = contents(step, "t5x")
        assert same_bits(found.values["state/param_states/w/v"], _VALUE)
        return found.first_error

    return check


def _zarrays() -> list[bytes]:
    sound: dict[str, Any] = {"zarr_format": 2, "shape": [8], "chunks": [4], "dtype": "<f4", "fill_value": None}
    sound |= {"compressor": None, "filters": None, "order": "C"}
    compressors: list[Any] = [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}]
    others: list[dict[str, Any]] = [{"compressor": one} for one in compressors]
    others += [{"fill_value": 0.0, "dimension_separator": "/"}, {"dtype": "bfloat16"}]
    return [json.dumps({**sound, **other}).encode() for other in others]


# -- safetensors


def _safetensors(directory: Path) -> Check:
    path = directory / "model.safetensors"

    def check(data: bytes) -> CheckpointError | None:
        path.write_bytes(data)
        found = contents(path, "safetensors")
        try:
            theirs = {name: bytes(about["data"]) for name, about in safetensors.deserialize(data)}
        except safetensors.SafetensorError:
            # It refuses the whole file for a dtype that it does not know.
            unknown = any(isinstance(error, UnsupportedCheckpointError) for error in found.errors)
            assert unknown or not found.values, "the format's own library refuses the file"
            return found.first_error
        for name, value in found.values.items():
            assert value.dtype == np.bool_ or value.tobytes() == theirs[name], name
        return found.first_error

    return check


def _safetensors_files() -> list[bytes]:
    arrays: Mapping[str, np.ndarray] = {"a/b": _VALUE, "n": np.arange(6, dtype=np.int16).reshape(2, 3)}
    return [safetensors.numpy.save(dict(arrays), metadata={"format": "np"}), safetensors.numpy.save({})]


def _gguf(directory: Path) -> Check:
    path = directory / "model.gguf"

    def check(data: bytes) -> CheckpointError | None:
        path.write_bytes(data)
        return contents(path, "gguf").first_error

    return check


def _gguf_files() -> list[bytes]:
    arrays = {"a": _VALUE, "q": np.arange(64, dtype=np.float32).reshape(2, 32)}
    metadata = {"general.alignment": 32, "texts": ["a", "b"], "long": ["t"] * 300, "flag": True, "lists": [[1], [2]]}
    return [gguf_bytes(arrays, metadata, q8=["q"]), gguf_bytes({})]


def _npz(directory: Path) -> Check:
    path = directory / "model.npz"

    def check(data: bytes) -> CheckpointError | None:
        path.write_bytes(data)
        found = contents(path, "npz")
        for name, value in _as_numpy_reads(path):
            if name in found.values and value.dtype.kind in "biufc":
                assert same_bits(found.values[name], value.astype(value.dtype.newbyteorder("="))), name
        return found.first_error

    return check


def _as_numpy_reads(path: Path) -> Iterable[tuple[str, np.ndarray]]:
    """Arrays that NumPy reads, too."""
    with contextlib.suppress(Exception), np.load(path) as archive:  # its errors are of many kinds
        for name in archive.files:
            with contextlib.suppress(Exception):
                yield name, archive[name]


def _npz_files() -> list[bytes]:
    arrays = {"w": _VALUE.reshape(2, 4), "f": np.asfortranarray(np.arange(6).reshape(2, 3)), "s": np.array(2, ">i2")}
    files = []
    for save in (np.savez, np.savez_compressed):
        made = io.BytesIO()
        save(made, **arrays)
        files.append(made.getvalue())
    return files


def _torch(directory: Path) -> Check:
    path = directory / "model.pt"
    listed = [path.name]

    def check(data: bytes) -> CheckpointError | None:
        path.write_bytes(data)
        found = contents(path, "torch")
        assert [entry.name for entry in directory.iterdir()] == listed
        return found.first_error

    return check


def _torch_files() -> list[bytes]:
    arrays = {"w": _VALUE.reshape(2, 4), "n": np.arange(6, dtype=np.uint16), "b": np.array(True)}
    tensors, storages = torch_files.saved_arrays(arrays)
    tree = {"model": torch_files.ordered(tensors), "t": tensors["w"]._replace(shape=(4, 2), strides=(1, 4))}
    tree |= {"e": tensors["w"]._replace(shape=(3, 4), strides=(0, 2)), "epoch": 3, "x": [1.5, "text", None, (1, 2)]}
    pickle = torch_files.pickled(tree)
    entries = [Entry(b"m/data.pkl", pickle), Entry(b"m/byteorder", b"little", local_extra=b"FB\3\0ZZZ")]
    entries += [Entry(f"m/data/{key}".encode(), data) for key, data in storages.items()]
    return [torch_files.archive(pickle, storages), archive_of(entries, zip64={})]


def _weight_map(directory: Path) -> Check:
    for number in (1, 2):
        file = directory / f"model-{number}.safetensors"
        file.write_bytes(safetensors.numpy.save({f"w{number}": _VALUE}))
        (directory / f"model-{number}.msgpack").write_bytes(flax.serialization.to_bytes({f"w{number}": _VALUE}))
    (directory.parent / "outside.safetensors").write_bytes(safetensors.numpy.save({"w3": _VALUE}))

    def check(data: bytes) -> CheckpointError | None:
        (directory / "model.safetensors.index.json").write_bytes(data)
        flax_index = directory / "flax_model.msgpack.index.json"
        flax_index.write_bytes(data.replace(b".safetensors", b".msgpack"))
        found = contents(directory, "safetensors")
        for values in (found.values, contents(flax_index, "flax_msgpack").values):
            assert values.keys() <= {"w1", "w2"}
            assert all(same_bits(value, _VALUE) for value in values.values())
        return found.first_error

    return check


def _weight_maps() -> list[bytes]:
    where = {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}
    return [json.dumps({"metadata": {"total_size": 64}, "weight_map": where}).encode()]


# -- Orbax


def _node(*keys: str, value_type: str = "jax.Array", skip: bool = False) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 1 if key.isdigit() else 2} for key in keys],
        "value_metadata": {"value_type": value_type, "skip_deserialize": skip},
    }


def _item_metadata() -> dict[str, Any]:
    tree = {
        "('target', 'w')": _node("target", "w"),
        "('list', '0')": _node("list", "0", value_type="scalar"),
        "('empty',)": _node("empty", value_type="None", skip=True),
        "('s',)": _node("s", value_type="string"),
    }
    return {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False, "custom_metadata": {"a": 1}}


def _orbax_metadata(directory: Path) -> Check:
    item = directory / "item"
    _write_zarr(item)
    _write_zarr(item, "list.0")
    (item / "_strings.json").write_text('{"s": "text"}')

    def check(data: bytes) -> CheckpointError | None:
        (item / "_METADATA").write_bytes(data)
        found = contents(item, "orbax")
        assert all(value.dtype == object or same_bits(value, _VALUE) for value in found.values.values())
        return found.first_error

    return check


def _orbax_metadatas() -> list[bytes]:
    sound = _item_metadata()
    return [json.dumps({**sound, **other}).encode() for other in ({}, {"store_array_data_equal_to_fill_value": True})]


def _orbax_step(directory: Path) -> Check:
    item = directory / "step" / "state"
    _write_zarr(item)
    metadata = {**_item_metadata(), "tree_metadata": {"('target', 'w')": _node("target", "w")}}
    (item / "_METADATA").write_text(json.dumps(metadata))

    def check(data: bytes) -> CheckpointError | None:
        (item.parent / "_CHECKPOINT_METADATA").write_bytes(data)
        found = contents(item.parent, "orbax")
        assert all(same_bits(value, _VALUE) for value in found.values.values())
        return found.first_error

    return check


def _orbax_steps() -> list[bytes]:
    sound = {"item_handlers": {"state": "a.Handler"}, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
    sound |= {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}
    return [json.dumps(one).encode() for one in (sound, {"item_handlers": None}, {**sound, "item_handlers": "a.B"})]


def _orbax_aggregate(directory: Path) -> Check:
    item = directory / "item"
    _write_zarr(item, "a")

    def check(data: bytes) -> CheckpointError | None:
        (item / "checkpoint").write_bytes(data)
        return contents(item, "orbax").first_error

    return check


def _aggregates() -> list[bytes]:
    tree = {"a": "PLACEHOLDER://a", "b": _VALUE, "n": 3, "none": None, "c": {"d": np.arange(3)}}
    return [flax.serialization.msgpack_serialize(tree)]


def _ocdbt(directory: Path) -> Check:
    item = Path(shutil.copytree(_OCDBT_ITEM, directory / "item"))

    def check(data: bytes) -> CheckpointError | None:
        (item / "manifest.ocdbt").write_bytes(data)
        found = contents(item, "orbax")
        # A manifest may lead to nothing, or to a chunk that is missing; to other values it cannot.
        assert all(same_bits(value, _VALUE) for value in found.values.values())
        return found.first_error

    return check


def _manifests() -> list[bytes]:
    return [(_OCDBT_ITEM / "manifest.ocdbt").read_bytes()]


# -- names, formats and boxes


_FILES = (
    *("checkpoint", "model.safetensors", "model.safetensors.index.json", "model.ckpt-1.index", "flax_model.msgpack"),
    *("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", ".zarray", "checkpoint_3", "config.json", "_strings.json"),
    "model.pt",
)


def _formats(directory: Path) -> Check:
    """The first byte says how the file is called, and what lies in the directory besides."""
    place = directory / "step"

    def check(data: bytes) -> CheckpointError | None:
        place.mkdir()
        path = place / _FILES[data[0] % len(_FILES) if data else 0]
        path.write_bytes(data[1:])
        try:
            found = contents(place)
            assert found.values or found.errors or not contents(place).errors
            alone = contents(path)
        finally:
            path.unlink()
            place.rmdir()
        return found.first_error or alone.first_error

    return check


def _some_files() -> list[bytes]:
    files = [
        *((0, one) for one in (*_flax_trees()[:1], *_t5x_trees()[:1], b'model_checkpoint_path: "model.ckpt-1"\n')),
        *((1, one) for one in _safetensors_files()),
        *((2, one) for one in _weight_maps()),
        *((3, one) for one in _bundle_indexes()[:1]),
        *((4, one) for one in _flax_trees()),
        *((5, one) for one in _orbax_metadatas()[:1]),
        *((6, one) for one in _orbax_steps()[:1]),
        *((9, one) for one in _t5x_trees()[:1]),
        *((12, one) for one in _torch_files()[:1]),
        (1, b"version https://git-lfs.github.com/spec/v1\n"),
        (9, b"PK\x03\x04"),
        (9, b"\x80\x04\x95"),
    ]
    return [bytes([number]) + content for number, content in files]


def _byte_runs(_: Path) -> Check:
    """Shapes and boxes by small numbers: runs and windows hold the bytes that NumPy's own indexing gives."""

    def check(data: bytes) -> None:
        numbers = iter(data)

        def upto(limit: int) -> int:
            return next(numbers, 0) % (limit + 1)

        shape = tuple(upto(6) for _ in range(upto(4)))
        itemsize, gap = (1, 2, 4, 8)[upto(3)], upto(40)
        boxes = []
        for _ in range(1 + upto(3)):
            box = []
            for size in shape:
                low = upto(size)
                box.append((low, low + upto(size - low)))
            boxes.append(tuple(box))
        whole = np.arange(int(np.prod(shape)) * itemsize).reshape(*shape, itemsize)
        wanted = {
            int(byte) for box in boxes for byte in whole[tuple(slice(low, high) for low, high in box)].reshape(-1)
        }
        runs, count = union_runs(shape, itemsize, boxes, gap)
        read = [byte for run in runs for start, stop in run.ranges() for byte in range(start, stop)]
        assert len(read) == len(set(read)), "a byte is read twice"
        assert set(read) >= wanted
        assert count == len(wanted)
        if wanted:
            windows = list(WindowGrid(shape, itemsize, 1 + upto(60)).windows(runs))
            pieces = [byte for window in windows for piece in window.ranges for byte in range(*piece)]
            assert pieces == read
            assert all(
                window.start <= start < stop <= window.stop for window in windows for start, stop in window.ranges
            )

    return check


def _some_boxes() -> list[bytes]:
    return [bytes([3, 4, 5, 6, 2, 9, 1, 1, 2, 0, 4, 2, 2]), bytes(range(20)), struct.pack("<8B", *[200] * 8)]


TARGETS: dict[str, Target] = {
    "sstable": Target(_sstable, _sstables, mutations.edited_table),
    "snappy": Target(_snappy, _snappy_blocks, _only_bytes),
    "proto": Target(_proto, _protos, mutations.edited_message),
    "tf_bundle": Target(_tf_bundle, _bundle_indexes, mutations.edited_table),
    "flax_msgpack": Target(_flax_msgpack, _flax_trees, mutations.edited_msgpack),
    "t5x": Target(_t5x, _t5x_trees, mutations.edited_msgpack),
    "zarray": Target(_zarray, _zarrays, mutations.edited_json),
    "safetensors": Target(_safetensors, _safetensors_files, mutations.edited_safetensors),
    "gguf": Target(_gguf, _gguf_files, mutations.edited_gguf),
    "npz": Target(_npz, _npz_files, mutations.edited_zip),
    "torch": Target(_torch, _torch_files, mutations.edited_zip),
    "weight_map": Target(_weight_map, _weight_maps, mutations.edited_json),
    "orbax_metadata": Target(_orbax_metadata, _orbax_metadatas, mutations.edited_json),
    "orbax_step": Target(_orbax_step, _orbax_steps, mutations.edited_json),
    "orbax_aggregate": Target(_orbax_aggregate, _aggregates, mutations.edited_msgpack),
    "ocdbt": Target(_ocdbt, _manifests, mutations.resealed_ocdbt),
    "formats": Target(_formats, _some_files, _only_bytes),
    "byte_runs": Target(_byte_runs, _some_boxes, _only_bytes),
}
"""By name; directories of `tests/corpus` have the same ones."""

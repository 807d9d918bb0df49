"""Leaves that several processes need: read in parts, sent by XLA, exact in every bit."""

import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.readers.formats import open_checkpoint
from tests.processes.jobs import SAFETENSORS_NAMES, SCRIPT, random_array, write_safetensors
from tests.support.jax_job import run_script
from tests.support.saving import save

pytestmark = pytest.mark.slow
SHAPE = (64, 96)
NBYTES = 64 * 96 * 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A safetensors file, and Orbax items of chunks of rows, of columns, of both and of one chunk."""
    folder = tmp_path_factory.mktemp("files")
    array = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    write_safetensors(folder / "ranges.safetensors", {"w": array})
    np.savez(folder / "ranges.npz", w=array)
    devices = np.asarray(jax.devices())
    for name, shape, spec in (
        ("rows", (8, 1), PartitionSpec("x")),
        ("columns", (1, 8), PartitionSpec(None, "y")),
        ("tiles", (2, 4), PartitionSpec("x", "y")),
    ):
        sharding = NamedSharding(Mesh(devices.reshape(shape), ("x", "y")), spec)
        save(folder / name, {"w": jax.device_put(array, sharding)})
    save(folder / "whole", {"w": array})
    return folder


LAYOUTS = """
folder = sys.argv[1]
count = jax.process_count()
square = Mesh(devices.reshape(2, -1), ("x", "y"))
turned = Mesh(devices.reshape(count, -1).T.reshape(-1), ("x",))
layouts = [
    ("replicated", line, P()), ("rows", line, P("x")), ("columns", line, P(None, "x")),
    ("both", square, P("x", "y")), ("crossed", square, P("y", "x")), ("part", square, P(None, "y")),
    ("turned", turned, P("x")), ("turned replicated", turned, P()),
]
told = {}
for name in ("ranges.safetensors", "ranges.npz", "rows", "columns", "tiles", "whole"):
    for label, mesh, spec in layouts:
        for broadcast in (True, False, "auto"):
            path = f"{folder}/{name}"
            plan = ot.plan_restore(path, target_of(path, spec, mesh))
            restored = plan.execute(broadcast=broadcast)
            require_equal(path, restored)
            assert restored["w"].sharding == NamedSharding(mesh, spec)
            told[f"{name} {label} {broadcast}"] = [plan.report.bytes_read, plan.bytes_to_read]
tell(told)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_every_layout_of_every_chunking_has_its_values(files, count):
    told = [mine for (mine,) in run_script(SCRIPT + LAYOUTS, count, files)]
    for key in told[0]:
        read = sum(mine[key][0] for mine in told)
        name, *_, broadcast = key.split(" ")
        if broadcast == "True" and name != "whole":
            assert read == NBYTES, key
        elif broadcast != "True":  # local files are read by each
            assert [mine[key][0] for mine in told] == [mine[key][1] for mine in told], key
        elif "replicated" in key:
            assert read == count * NBYTES, "each process needs the only chunk"


DTYPES = """
path, folder = sys.argv[1:]
count = jax.process_count()
small = Mesh(devices[::-1].reshape(count, -1), ("x", "y"))
for mesh, spec in ((line, P()), (line, P(None, "x")), (small, P("y"))):
    restored, report = read(path, target_of(path, spec, mesh), broadcast=True)
    require_equal(path, restored)
    stored = sum(array.nbytes for array in restored.values())
    tell(report.bytes_read * count == stored)
# Dtypes below eight bits, keys and strings are read by each, and so is what has no mesh.
tree = ot.restore(folder, None)
replicated = NamedSharding(line, P())
key = jax.ShapeDtypeStruct((4,), jax.random.key(0).dtype, sharding=replicated)
target = {
    "int4": jax.ShapeDtypeStruct((8, 4), "int4", sharding=replicated),
    "key": key, "text": "", "host": np.zeros((8, 4), np.float32),
}
restored = ot.restore(folder, target, strict=False, broadcast=True)
assert bits(restored["int4"].addressable_data(0).astype(np.int8)) == bits(tree["int4"].astype(np.int8))
assert bits(jax.random.key_data(restored["key"].addressable_data(0))) == bits(tree["key"])
assert restored["text"] == "words" and bits(restored["host"]) == bits(tree["host"])
tell([np.asarray(leaf).dtype.name for leaf in (tree["int4"], tree["host"])])
"""


@pytest.mark.parametrize("count", [2, 4])
def test_every_dtype_comes_with_all_its_bits(tmp_path, count):
    rng = np.random.default_rng(1)
    arrays = {dtype: random_array(rng, dtype, (16, 8)) for dtype in SAFETENSORS_NAMES}
    assert np.isnan(arrays["bfloat16"].astype(np.float32)).any() and np.isnan(arrays["float16"]).any()
    path = write_safetensors(tmp_path / "all.safetensors", arrays)
    odd = {
        "int4": rng.integers(-8, 8, (8, 4)).astype(ml_dtypes.int4),
        "key": jax.random.key_data(jax.random.split(jax.random.key(3), 4)),
        "text": "words",
        "host": rng.standard_normal((8, 4)).astype(np.float32),
    }
    save(tmp_path / "odd", odd)
    before = "jax.config.update('jax_enable_x64', True)"
    told = run_script(SCRIPT + DTYPES, count, path, tmp_path / "odd", before=before)
    assert told == [[True, True, True, ["int4", "float32"]]] * count


def test_complex_numbers_without_64_bit_types(tmp_path):
    rng = np.random.default_rng(2)
    path = write_safetensors(tmp_path / "c.safetensors", {"c": random_array(rng, "complex64", (6, 10))})
    script = """
restored, report = read(sys.argv[1], target_of(sys.argv[1]), broadcast=True)
require_equal(sys.argv[1], restored)
tell(report.bytes_read)
"""
    assert run_script(SCRIPT + script, 2, path) == [[240], [240]]


SIZES = """
ranges, item, tied = sys.argv[1:]
count = jax.process_count()
for path in (ranges, item):
    restored, report = read(path, target_of(path), broadcast=True, memory_limit_bytes=1 << 20)
    require_equal(path, restored)
    tell([report.bytes_read, sum(array.nbytes for array in restored.values())])
# Transformed leaves; two leaves of the target that share a stored one; a constant beside it.
sharding = NamedSharding(line, P())
shapes = {"a": (1 << 10, 256), "b": (256, 1 << 10), "padded": ((1 << 10) + 2, 256), "half": (1 << 9, 256)}
target = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name, shape in shapes.items()}
transforms = [
    ot.transforms.AssignmentMap([("a", "w"), ("b", "w"), ("padded", "w"), ("half", "w")]),
    ot.transforms.Transpose("b"),
    ot.transforms.Pad("padded", ((1 << 10) + 2, 256)),
    ot.transforms.Slice("half", np.s_[: 1 << 9]),
]
plan = ot.plan_restore(tied, target, transforms, strict=False)
restored = plan.execute(broadcast=True)
with ot.open_checkpoint(tied) as checkpoint:
    w = checkpoint.leaves["w"].get()
for name, whole in {"a": w, "b": w.T, "padded": np.pad(w, ((0, 2), (0, 0))), "half": w[: 1 << 9]}.items():
    assert bits(restored[name].addressable_data(0)) == bits(whole), name
tell(plan.report.bytes_read)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_read_once_by_all_together(tmp_path, count):
    """Byte ranges in batches below the memory limit, and an Orbax item of as many chunks as processes."""
    rng = np.random.default_rng(3)
    arrays = {f"layer_{number}/w": random_array(rng, "float32", (512, 257)) for number in range(6)}
    arrays["vector"] = random_array(rng, "float32", (4096,))
    arrays["large"] = random_array(rng, "float32", (4096, 257))
    ranges = write_safetensors(tmp_path / "ranges.safetensors", arrays)
    tied = write_safetensors(tmp_path / "tied.safetensors", {"w": random_array(rng, "float32", (1 << 10, 256))})
    mesh = Mesh(np.asarray(jax.devices())[:count], ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    save(tmp_path / "item", {name: jax.device_put(array, rows) for name, array in arrays.items() if array.ndim == 2})
    told = run_script(SCRIPT + SIZES, count, ranges, tmp_path / "item", tied)
    for at in (0, 1):
        stored = told[0][at][1]
        assert stored <= sum(mine[at][0] for mine in told) <= 1.02 * stored
    # "b" is divided by its own rows, which are columns of the stored leaf: they lie in other parts.
    assert sum(mine[2] for mine in told) < 2.5 * (1 << 20)


PLACES = """
import dataclasses
path, odd = sys.argv[1:]
kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
for kind in kinds:
    sharding = NamedSharding(line, P(), memory_kind=kind)
    target = {"w": jax.ShapeDtypeStruct((64, 96), np.float32, sharding=sharding)}
    restored, report = read(path, target, broadcast=True)
    require_equal(path, restored)
    assert restored["w"].sharding == sharding
    tell(report.bytes_read)
# What divides nowhere, and a mesh with more devices of one process than of another.
restored, report = read(odd, target_of(odd), broadcast=True)
require_equal(odd, restored)
tell(report.bytes_read)
uneven = Mesh(devices[:3], ("x",))
restored, report = read(path, target_of(path, P(), uneven), broadcast=True)
require_equal(path, restored)
tell(report.bytes_read)
# A mesh of the first process: the other has no shards, and reads nothing.
own = Mesh(devices[:2], ("x",))
for broadcast in (True, False):
    restored, report = read(path, {"w": target_of(path, P("x"), own)["w"]}, broadcast=broadcast)
    require_equal(path, restored)
    tell([report.bytes_read, len(restored["w"].addressable_shards)])
# "auto" sends leaves of remote stores that several processes need, and no others.
for remote, spec in ((True, P()), (True, P("x")), (process == 0, P())):
    with ot.open_checkpoint(path) as checkpoint:
        checkpoint.leaves["w"].leaf.is_remote = remote
        restored, report = read(checkpoint, target_of(path, spec))
        require_equal(path, restored)
        tell(report.bytes_read)
"""


def test_memories_meshes_and_stores(files, tmp_path):
    odd = write_safetensors(tmp_path / "odd.safetensors", {"w": np.arange(15, dtype=np.float32).reshape(3, 5)})
    first, second = run_script(SCRIPT + PLACES, 2, files / "ranges.safetensors", odd)
    kinds = len(first) - 7
    half, all_bytes = NBYTES // 2, NBYTES
    assert first == [half] * kinds + [60, all_bytes, [all_bytes, 2], [all_bytes, 2], half, half, all_bytes]
    assert second == [half] * kinds + [60, all_bytes, [0, 0], [0, 0], half, half, all_bytes]


GROUPS = """
path, copies = sys.argv[1:]
own = f"{copies}/{process}/copy.safetensors"
pair = [0, 3] if process in (0, 3) else [1, 2]
options = ocp.options.MultiprocessingOptions(
    primary_host=pair[0], active_processes=set(pair), barrier_sync_key_prefix=str(pair[0])
)
mesh = Mesh(np.asarray([device for device in devices if device.process_index in pair]), ("x",))
for spec in (P(), P("x"), P(None, "x")):
    for broadcast in (True, False):
        plan = {"multiprocessing_options": options}
        restored, report = read(own, target_of(own, spec, mesh), broadcast=broadcast, plan=plan)
        require_equal(path, restored)
        tell(report.bytes_read)
# A group of one needs nobody; another process is not a member.
alone = ocp.options.MultiprocessingOptions(primary_host=2, active_processes={2})
if process == 2:
    assert ot.restore(own, {"w": np.zeros((64, 96), np.float32)}, multiprocessing_options=alone)["w"].shape == (64, 96)
else:
    tell(error_of(lambda: ot.restore(own, None, multiprocessing_options=alone))[0])
"""


def test_groups_restore_at_once_from_copies_of_their_own(files, tmp_path):
    path = files / "ranges.safetensors"
    for process in range(4):
        (tmp_path / str(process)).mkdir()
        shutil.copy(path, tmp_path / str(process) / "copy.safetensors")
    told = run_script(SCRIPT + GROUPS, 4, path, tmp_path)
    half = NBYTES // 2
    for process, mine in enumerate(told):
        assert mine == [half, NBYTES, half, half, half, half] + ([] if process == 2 else ["ValueError"])


def test_one_process_is_told_nothing_of_it(files):
    with open_checkpoint(files / "ranges.safetensors") as checkpoint:
        for broadcast in (True, False, "auto"):
            restored = ot.restore(checkpoint, {"w": np.zeros(SHAPE, np.float32)}, broadcast=broadcast)
            np.testing.assert_array_equal(restored["w"], checkpoint.leaves["w"].get())
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    ot.restore(files / "rows", None, multiprocessing_options=alone)

"""Lazy arrays are ordinary ones on disk, written chunk by chunk."""

import asyncio
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.lazy import as_view
from tests.support.memory_checkpoint import AwaitedLeaf
from tests.support.pytrees import noise, restore, save
from tests.support.type_tables import in_another_process

MIB = 1 << 20


def stored_types(path):
    entries = json.loads((path / "_METADATA").read_text())["tree_metadata"].values()
    return {tuple(key["key"] for key in one["key_metadata"]): one["value_metadata"]["value_type"] for one in entries}


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_every_kind_of_lazy_array_is_an_ordinary_one_on_disk(tmp_path, registered, use_ocdbt, use_zarr3):
    w, b = noise(40, 6), noise(6, dtype=ml_dtypes.bfloat16)

    async def awaited():
        await asyncio.sleep(0)
        return w

    lazy = as_view(AwaitedLeaf("w", w))
    tree = {
        "leaf": lazy,
        "transposed": lazy.T,
        "stacked": [ot.stack([lazy, lazy], 1), None],
        "cast": lazy.astype("bfloat16"),
        "bfloat16": as_view(AwaitedLeaf("b", b)),
        "blocking": ot.LazyThreadPoolArray(w.shape, w.dtype, lambda: w),
        "awaitable": ot.LazyAwaitableArray(w.shape, w.dtype, awaited),
        "value": as_view(b),
        "rank 0": as_view(AwaitedLeaf("s", np.asarray(np.float32(3)))),
        "numpy": w,
        "jax": jnp.ones((8, 2)),
        "scalar": 3,
    }
    path = save(tmp_path / "item", tree, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    types = stored_types(path)
    assert {key[0] for key, kind in types.items() if kind == "np.ndarray"} == set(tree) - {"jax", "scalar"}
    code = """
        import pathlib, pickle, sys
        import numpy as np, orbax.checkpoint as ocp
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(sys.argv[1])
        assert not [name for name in sys.modules if name.startswith("orbax_t5x")]
        assert type(restored["leaf"]) is np.ndarray and restored["scalar"] == 3
        restored["jax"] = np.asarray(restored["jax"])
        pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(restored))
    """
    in_another_process(code, path, tmp_path / "restored")
    restored = np.load(tmp_path / "restored", allow_pickle=True)
    for name, wanted in {
        "leaf": w,
        "transposed": w.T,
        "cast": w.astype(ml_dtypes.bfloat16),
        "bfloat16": b,
        "blocking": w,
        "awaitable": w,
        "value": b,
        "rank 0": np.float32(3),
        "numpy": w,
        "jax": np.ones((8, 2), np.float32),
    }.items():
        np.testing.assert_array_equal(restored[name], wanted)
        assert restored[name].dtype == wanted.dtype
    np.testing.assert_array_equal(restored["stacked"][0], np.stack([w, w], 1))
    assert restored["stacked"][1] is None


def test_save_args_of_lazy_leaves(tmp_path, registered):
    w = noise(64, 32)
    tree = {"lazy": as_view(AwaitedLeaf("w", w)), "numpy": w}
    wanted = ocp.SaveArgs(dtype=np.dtype(ml_dtypes.bfloat16), chunk_byte_size=1024)
    path = save(tmp_path / "item", tree, {"lazy": wanted, "numpy": wanted}, use_ocdbt=False)
    restored = restore(path)
    for name in tree:
        np.testing.assert_array_equal(restored[name], w.astype(ml_dtypes.bfloat16))
        chunks = json.loads((path / name / ".zarray").read_text())["chunks"]
        assert np.prod(chunks) * 2 <= 1024


def test_a_lazy_leaf_is_read_box_by_box(tmp_path):
    w = noise(1024, 1024)
    leaf = AwaitedLeaf("w", w)
    told = []
    with ot.register_type_handlers(memory_limit_bytes=MIB, progress=lambda *call: told.append(call)):
        save(tmp_path / "item", {"a": as_view(leaf)})
    assert len(leaf.boxes) == 4 and len(set(leaf.boxes)) == 4  # chunks of 1 MiB
    assert told[-1] == (4 * MIB, 4 * MIB, "a")
    np.testing.assert_array_equal(restore(tmp_path / "item")["a"], w)


@pytest.mark.slow
def test_128_mib_under_a_limit_of_16_mib(tmp_path):
    """In a process of its own, of numbers that do not compress."""
    w = np.frombuffer(np.random.default_rng(0).bytes(128 * MIB), np.uint8).reshape(-1, 4096)
    safetensors.numpy.save_file({"w": w}, tmp_path / "source.safetensors")
    code = """
        import resource, sys
        import jax, numpy as np, orbax.checkpoint as ocp, orbax_t5x as ot
        def save(name, tree):
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(f"{sys.argv[1]}/{name}", args=ocp.args.PyTreeSave(tree))
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        source = sys.argv[1] + "/source.safetensors"
        with ot.register_type_handlers(memory_limit_bytes=16 << 20), ot.open_checkpoint(source) as opened:
            save("small", {"w": opened.leaves["w"][:16]})
            before = peak()
            save("out", {"w": opened.leaves["w"]})
        print(peak() - before)
    """
    growth = int(in_another_process(code, tmp_path))
    # Beside data on its way: threads and their arenas, compressors, nodes of the database.
    assert growth < (16 + 48) * MIB, f"{growth / MIB:.0f} MiB"
    np.testing.assert_array_equal(restore(tmp_path / "out")["w"], w)


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (lambda: as_view(AwaitedLeaf("w", np.zeros((0, 3), np.float32))), "has no elements"),
        (lambda: as_view(np.array([b"text"], object)), "holds text"),
        (lambda: as_view(AwaitedLeaf("w", np.zeros(2, ml_dtypes.uint4))), "dtype that Orbax does not store"),
    ],
)
def test_lazy_leaves_that_orbax_cannot_store_are_named(tmp_path, registered, leaf, said):
    with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
        save(tmp_path / "item", {"good": as_view(AwaitedLeaf("w", np.ones(2))), "bad": {"leaf": leaf()}})
    assert caught.value.leaf == "bad/leaf" and not (tmp_path / "item").exists()
    assert "on_unsupported" not in str(caught.value)  # Orbax's own arguments have none

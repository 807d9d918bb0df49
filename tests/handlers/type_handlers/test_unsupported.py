"""Leaves that Orbax cannot store are named before it tries."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from tests.support.saving import UNSUPPORTED, data_files, run, save, stock


@pytest.mark.parametrize("leaf", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_a_leaf_that_orbax_cannot_store_fails_by_name_and_leaves_nothing(tmp_path, leaf):
    state = {"good": np.ones(3), "deep": {"bad": leaf}}
    with pytest.raises(UnsupportedCheckpointError, match="'deep/bad'") as raised:
        save(tmp_path / "one", state)
    assert raised.value.leaf == "deep/bad"
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=ot.TrainStateHandler()) as manager:
        with pytest.raises(UnsupportedCheckpointError, match="'deep/bad'"):
            manager.save(0, args=ot.args.TrainStateSave(state))
        assert data_files(tmp_path) == []
        manager.save(0, args=ot.args.TrainStateSave({"good": np.ones(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0]


def test_stock_orbax_fails_on_each_of_those_too(tmp_path):
    """The list is Orbax's own: what it learns to store one day must leave the list.

    In a process of its own: when a save fails, Orbax cancels work on event loops that it has closed already.
    """
    code = f"""
        import orbax.checkpoint as ocp
        from tests.support.saving import UNSUPPORTED
        for name, leaf in UNSUPPORTED.items():
            try:
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                    checkpointer.save({str(tmp_path)!r} + "/" + name, args=ocp.args.PyTreeSave({{"a": leaf}}))
                print(name)
            except (ValueError, NotImplementedError, TypeError):
                pass
    """
    assert (
        run(code, PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])) == []
    )


NUMPY = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128 >f4"
ML_DTYPES = (
    "bfloat16 int4 int2 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz float8_e3m4 "
    "float8_e8m0fnu float4_e2m1fn"
)


def in_tensorstore(name):
    """Whether this version of TensorStore, which writes, has a dtype."""
    try:
        return ts.dtype(name) is not None
    except ValueError:
        return False


def test_every_other_dtype_survives(tmp_path):
    state = {name: np.ones(3, name) for name in NUMPY.split()}
    state |= {name: np.ones(3, getattr(ml_dtypes, name)) for name in ML_DTYPES.split() if in_tensorstore(name)}
    restored = stock(save(tmp_path / "c", state))
    for name, array in state.items():
        assert restored[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(restored[name], array)


def test_integers_of_64_bits_are_stored(tmp_path):
    """To the last bit; NumPy's own integers say what fits."""
    state = {"large": 2**64 - 1, "small": -(2**63)}
    save(tmp_path / "c", state)
    assert ot.restore(tmp_path / "c", None) == {"large": np.uint64(2**64 - 1), "small": np.int64(-(2**63))}

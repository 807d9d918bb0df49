"""Arrays of very many chunks that are nowhere stored: some bytes of metadata, refused before anything is read."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import orbax_t5x as ot
from tests.support.t5x_steps import GOOD, array, save, spec


def _t5x(root):
    step = root / "checkpoint_1"
    step.mkdir()
    for name in ("bad", "good"):
        array(step / name)
    file = step / "bad" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [10**7], "chunks": [1], "fill_value": 0.0}))
    save(step, spec(metadata={}))
    return step


def _zarr3(root):
    item = root / "item"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save(item, args=ocp.args.PyTreeSave({"bad": np.zeros(4, np.float32), "good": GOOD}))
    grid = {"name": "regular", "configuration": {"chunk_shape": [1]}}
    metadata = {"shape": [10**7], "chunk_grid": grid, "data_type": "float32"}
    kvstore = {"driver": "file", "path": f"{item}/bad/"}
    ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}, create=True, delete_existing=True).result()
    return item


@pytest.mark.parametrize("write", [_t5x, _zarr3])
def test_the_leaf_is_refused_and_others_are_read(write, tmp_path):
    path = write(tmp_path)
    with ot.open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), GOOD)
        with pytest.raises(ot.errors.LimitExceededError, match=r"leaf 'bad'.*Limits\.chunks"):
            checkpoint.leaves["bad"].get()
    for call in (lambda: ot.restore(path, None), lambda: ot.convert(path, tmp_path / "out")):
        with pytest.raises(ot.errors.CheckpointError, match=r"Limits\.chunks"):
            call()
    assert any(leaf.name == "bad" and "Limits.chunks" in str(leaf) for leaf in ot.verify(path).leaves)


def test_the_limit_can_be_raised(tmp_path):
    path = _t5x(tmp_path)
    with ot.open_checkpoint(path, limits=ot.Limits(chunks=10**8)) as checkpoint:
        assert checkpoint.leaves["bad"][5:7].get().tolist() == [0.0, 0.0]

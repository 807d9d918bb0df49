"""What every output format refuses, and the blocks of arrays."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.lazy import as_view
from orbax_t5x.operations.convert.output_format import PlannedArray, cut_into_blocks
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize(
    "transforms",
    [tr.Drop(".*"), tr.Intersect(), lambda state, target: {}, lambda state, target: {"a": {}}],
    ids=["Drop", "Intersect", "nothing", "empty containers"],
)
def test_a_conversion_of_nothing_is_one_error_before_anything_is_written(tmp_path, format, transforms):
    source = checkpoint({"a": np.ones(3), "b/c": np.zeros(2)})
    with pytest.raises(
        UnsupportedCheckpointError, match=r"nothing to write: the transforms dropped all leaves \(2 leaves\)"
    ):
        ot.convert(source, tmp_path / "parent" / "out", transforms, format=format)
    assert list(tmp_path.iterdir()) == []
    ot.convert(source, tmp_path / "out", format=format)
    with pytest.raises(UnsupportedCheckpointError, match="nothing to write"):
        ot.convert(source, tmp_path / "out", transforms, format=format, overwrite=True)
    assert ot.open_checkpoint(tmp_path / "out").leaves.keys() == {"a", "b/c"}


def test_a_source_without_leaves_is_that_error_too(tmp_path):
    safetensors.numpy.save_file({}, tmp_path / "model.safetensors")
    ocp.PyTreeCheckpointer().save(tmp_path / "empties", {"none": None, "dict": {}})
    for number, (source, format) in enumerate(
        [("model.safetensors", "orbax"), ("model.safetensors", "safetensors"), ("empties", "safetensors")]
    ):
        with pytest.raises(UnsupportedCheckpointError, match="nothing to write: the source has no leaves"):
            ot.convert(tmp_path / source, tmp_path / str(number), format=format)
    # Orbax stores None and empty containers.
    ot.convert(tmp_path / "empties", tmp_path / "copy")
    assert ocp.PyTreeCheckpointer().restore(tmp_path / "copy") == {"none": None, "dict": {}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "empties", "model.safetensors"]


def test_blocks_make_up_each_array_once():
    shapes = {"large": (64, 10), "medium": (9, 7), "small": (3,), "scalar": ()}
    arrays = [
        PlannedArray(name, name, as_view(np.zeros(shape)), tuple(max(1, size // 4) for size in shape))
        for name, shape in shapes.items()
    ]
    blocks = cut_into_blocks(arrays)
    for array in arrays:
        counts = np.zeros(array.view.shape, int)
        for block in blocks:
            if block.array is array:
                counts[tuple(slice(*side) for side in block.box)] += 1
        assert (counts == 1).all()
    assert sum(block.nbytes for block in blocks) == sum(array.view.nbytes for array in arrays)

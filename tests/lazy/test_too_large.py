"""Shapes beyond what can be counted, made by views of small leaves: typed, whatever made them."""

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x import transforms


@pytest.fixture
def path(tmp_path):
    safetensors.numpy.save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


VIEWS = {
    "broadcast": lambda view: ot.broadcast_to(view, (1 << 60, 8)),
    "broadcast twice": lambda view: ot.broadcast_to(ot.broadcast_to(view, (1 << 61, 8)), (1 << 61, 1 << 61, 8)),
    "repeat": lambda view: ot.repeat(view, 1 << 62, 0),
    "more than 64 bits": lambda view: ot.repeat(view, 1 << 70, 0),
    "stack": lambda view: ot.stack([ot.broadcast_to(view, (1 << 59, 8))] * 4, 0),
    "concatenate": lambda view: ot.concatenate([ot.broadcast_to(view, (1 << 59, 8))] * 4, 0),
    "transposed": lambda view: ot.broadcast_to(view, (1 << 60, 8)).T,
    "cast": lambda view: ot.broadcast_to(view, (1 << 60, 8)).astype(np.float64),
}


@pytest.mark.parametrize("name", VIEWS)
def test_reading_the_whole_is_refused_and_a_box_is_read(name, path):
    with ot.open_checkpoint(path) as checkpoint:
        view = VIEWS[name](checkpoint.leaves["a"])
        with pytest.raises(ot.errors.LimitExceededError, match=r"leaf 'a'.*shape"):
            view.get()
        if max(view.shape) < 1 << 63:
            assert view[(slice(0, 2),) * view.ndim].get().shape == (2,) * view.ndim
        with pytest.raises(ot.errors.CheckpointError):
            ot.restore(path, None, [lambda state, target, fn=VIEWS[name]: {"a": fn(state["a"])}])


@pytest.mark.parametrize(
    "transform",
    [
        transforms.Repeat("a", 10**18, 0),
        transforms.Repeat("a", 10**30, 0),
        transforms.Pad("a", (1 << 62,)),
        transforms.Pad("a", (1 << 70,)),
    ],
)
def test_transforms_are_refused(transform, path):
    with pytest.raises(ot.errors.CheckpointError, match="a"):
        ot.restore(path, None, [transform])

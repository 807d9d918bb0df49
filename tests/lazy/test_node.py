"""What lowering allocates, measured, is what `scratch_bytes` says; what only moves elements allocates nothing."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_t5x import lazy
from orbax_t5x.lazy import box_shape, full_box, several
from orbax_t5x.lazy.node import memoryless
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.array_strategies import DTYPES, ML_DTYPES, boxes
from tests.support.lazy_views import view_of

# Python's own objects: lists, tuples, array headers, and about half a kilobyte for a request and its place. Arrays here
# are far larger.
_OBJECTS_BYTES = 40 << 10
_PIECE_BYTES = 1 << 10


def _peak(view: lazy.View, box: lazy.Box, out: np.ndarray) -> int:
    """The most that lowering, reading (which allocates nothing here) and finishing held beside the buffer."""
    tracemalloc.start()
    try:
        lowered = view.lower(box, out)
        for leaf, request in lowered.reads:
            np.copyto(request.out, leaf.array[lazy.box_slices(request.box)])
        for finish in lowered.finish:
            finish()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _leaf(*shape, dtype="float32"):
    return lazy.as_view(ArrayLeaf(np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(dtype)))


_LARGE = {
    "leaf": lambda: _leaf(64, 512),
    "transpose": lambda: _leaf(64, 512).T,
    "slice": lambda: _leaf(128, 512)[3:90, ::-1],
    "rows with a step": lambda: _leaf(128, 2048)[::3],
    "columns with a step": lambda: _leaf(64, 1024)[:, ::-2],
    "stack": lambda: several.stack([_leaf(64, 256), _leaf(64, 256)], 1),
    "concatenate": lambda: several.concatenate([_leaf(64, 256), _leaf(64, 256)], 1),
    "split heads": lambda: _leaf(64, 768).reshape(64, 12, 64),
    "split heads, stacked": lambda: several.stack([_leaf(64, 768).reshape(64, 12, 64)] * 3, 1),
    "split heads, stacked between them": lambda: several.stack([_leaf(768, 64).reshape(12, 64, 64)] * 3, 1),
    "split small rows, stacked between them": lambda: several.stack([_leaf(4096, 4).reshape(256, 16, 4)] * 3, 1),
    "split, one column": lambda: _leaf(64, 1024).reshape(64, 16, 64)[:, :, 3:5],
    "split, rows of a few": lambda: _leaf(4096, 8).reshape(64, 64, 8)[:, 3:9],
    "join": lambda: _leaf(12, 64, 64).reshape(768, 64)[70:700],
    "join and split": lambda: _leaf(96, 40, 16).reshape(40, 96, 16),
    "repeat in front": lambda: lazy.repeat(_leaf(128, 256), 4, 0),
    "repeat behind": lambda: lazy.repeat(_leaf(128, 256), 4, 2),
    "repeat twice": lambda: lazy.repeat(lazy.repeat(_leaf(64, 256), 3, 1), 2, 0),
    "broadcast": lambda: lazy.broadcast_to(_leaf(64, 1, 64), (3, 64, 5, 64)),
    "cast": lambda: _leaf(64, 512).astype("bfloat16"),
    "cast of bfloat16": lambda: _leaf(64, 512, dtype="bfloat16").astype("float32").T,
    # Of the newest versions of ml_dtypes alone.
    **({"cast without a way": lambda: _leaf(64, 512, dtype="int4").astype("uint1")} if "uint1" in ML_DTYPES else {}),
    "checked cast": lambda: _leaf(64, 512, dtype="int64").cast_checked("int32"),
    "average": lambda: several.average([_leaf(64, 256), _leaf(64, 256, dtype="bfloat16")], [1, 2]),
    "average of doubles": lambda: several.average([_leaf(64, 256, dtype="float64"), _leaf(64, 256)], [1, 2]),
    "equal": lambda: several.all_equal([_leaf(64, 256), _leaf(64, 256), _leaf(64, 256)]),
    "equal, complex": lambda: several.all_equal([_leaf(64, 256, dtype="complex64")] * 2),
}


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("name", _LARGE)
def test_scratch_bytes_bounds_what_lowering_holds(name, order):
    view = _LARGE[name]()
    box = full_box(view.shape)
    if order == "strided":
        out = np.zeros([2 * size for size in view.shape], view.dtype)[tuple(slice(None, None, 2) for _ in view.shape)]
    else:
        out = np.zeros(view.shape, view.dtype, order=order)
    bound = view.scratch_bytes(box, out)
    assert order != "C" or bound == view.scratch_bytes(box)
    peak = _peak(view, box, out)
    assert peak <= bound + _OBJECTS_BYTES + _PIECE_BYTES * len(view.lower(box, out).reads)
    # An upper bound far from the truth would keep an executor idle. (Along some repeats NumPy copies without memory.)
    assert peak >= 0.3 * bound or "repeat" in name


@pytest.mark.parametrize(
    "name",
    [
        "leaf",
        "transpose",
        "slice",
        "rows with a step",
        "stack",
        "concatenate",
        "split heads",
        "split heads, stacked",
        "split heads, stacked between them",
        "join",
        "repeat in front",
    ],
)
def test_what_only_moves_elements_needs_no_memory(name):
    view = _LARGE[name]()
    out = np.zeros(view.shape, view.dtype)
    copies = 256 << 10 if name == "repeat in front" else 0
    assert view.scratch_bytes(full_box(view.shape)) <= copies
    assert _peak(view, full_box(view.shape), out) <= _OBJECTS_BYTES


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_scratch_bytes_bounds_any_box_of_a_long_chain(data):
    view = _LARGE[data.draw(st.sampled_from(sorted(_LARGE)))]()
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["T", "flip", "step", "cast", "stack", "reshape", "repeat", "join"]))
        if kind == "T":
            view = view.transpose(data.draw(st.permutations(range(view.ndim))))
        elif kind == "flip":
            view = view[..., ::-1]
        elif kind == "step":
            view = view[:: data.draw(st.integers(2, 3))]
        elif kind == "cast":
            view = view.astype(data.draw(st.sampled_from(["float32", "float64"]))) if view.dtype.kind != "c" else view
        elif kind == "stack" and view.size < 200_000:
            view = several.stack([view, view], data.draw(st.integers(0, view.ndim)))
        elif kind == "reshape" and view.shape[0] % 2 == 0:
            view = view.reshape(2, view.shape[0] // 2, *view.shape[1:])
        elif kind == "join":
            view = view.reshape(-1, *view.shape[2:])
        elif kind == "repeat" and view.size < 200_000:
            view = lazy.repeat(view, 2, data.draw(st.integers(0, view.ndim)))
    box = data.draw(boxes(view.shape))
    order = data.draw(st.permutations(range(view.ndim)))
    shape = box_shape(box)
    out = np.zeros([shape[axis] for axis in order], view.dtype).transpose(np.argsort(order))
    bound = view.scratch_bytes(box, out)
    pieces = len(view.lower(box, out).reads)
    assert _peak(view, box, out) <= bound + _OBJECTS_BYTES + _PIECE_BYTES * pieces, view


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_view_takes_is_known_in_every_dtype(dtype):
    """Some dtypes of `ml_dtypes` have a text that NumPy takes for none, or for another one."""
    buffer = memoryless((2, 0, 3), dtype)
    assert (buffer.shape, buffer.dtype) == ((2, 0, 3), dtype)
    view = several.stack([view_of((2, 4)).astype(dtype)] * 2, 0)
    assert view.scratch_bytes(((0, 2), (0, 2), (0, 4))) >= 0

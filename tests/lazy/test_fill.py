"""Padding, and the replacement of elements that only a restore knows."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, full_box, several
from orbax_t5x.lazy.fill import fill
from orbax_t5x.lazy.several import average
from orbax_t5x.lazy.value import UnfilledLeaf, has_unfilled
from tests.support.lazy_views import leaf_names, view_of


def test_a_padded_array_reads_what_lies_within_and_beyond():
    old, filler = view_of((4, 3), name="old"), view_of((6, 5), name="filler")
    grown = several.pad(old, filler, "more")
    expected = filler.get()
    expected[:4, :3] = old.get()
    np.testing.assert_array_equal(grown.get(), expected)
    (old_leaf,), (filler_leaf,) = old.leaves(), filler.leaves()
    assert grown.requests(((0, 4), (0, 3))) == [(old_leaf, ((0, 4), (0, 3)))]
    assert grown.requests(((4, 6), (1, 2))) == [(filler_leaf, ((4, 6), (1, 2)))]
    assert grown.requests(((3, 6), (2, 4))) == [
        (old_leaf, ((3, 4), (2, 3))),
        (filler_leaf, ((4, 6), (2, 4))),
        (filler_leaf, ((3, 4), (3, 4))),
    ]
    assert (
        grown[:4, :3].node is old.node
        and leaf_names(grown[4:]) == ["filler"]
        and leaf_names(grown[2]) == ["old", "filler"]
    )
    assert leaf_names(grown[5]) == leaf_names(grown.T[3]) == ["filler"]
    assert grown.T.describe() == "transpose (1, 0), pad to (5, 6) with more"
    assert grown.scratch_bytes(full_box(grown.shape)) == 0
    assert several.pad(old, view_of((4, 3)), "more").node is old.node
    with pytest.raises(ValueError, match=r"pad an array of shape \(4, 3\) to shape \(5, 2\)"):
        several.pad(old, view_of((5, 2)), "more")
    with pytest.raises(ValueError, match="different dtypes"):
        several.pad(old, view_of((6, 5), "int32"), "more")


MOVES = {
    "transpose": (lambda a: a.T, (3, 2, 4)),
    "reshape": (lambda a: a.reshape(8, 3), (8, 3)),
    "split": (lambda a: a.reshape(2, 2, 2, 3).transpose(3, 1, 0, 2), (3, 2, 2, 2)),
    "new axis": (lambda a: a[:, None], (4, 1, 2, 3)),
    "part": (lambda a: a[1:, :, 1], (3, 2)),
    "flip": (lambda a: a[:, ::-1].T, (3, 2, 4)),
    "stack": (lambda a: (several.stack if isinstance(a, lazy.View) else np.stack)([a, a], 1), (4, 2, 2, 3)),
    "concatenate": (lambda a: (ot.concatenate if isinstance(a, lazy.View) else np.concatenate)([a, a], 2), (4, 2, 6)),
    "cast": (lambda a: a.astype("float64").reshape(24), (24,)),
}


@pytest.mark.parametrize("name", MOVES)
def test_unknown_elements_are_filled_from_the_same_place_of_what_was_made(name):
    """NumPy says where they are: NaN is moved with the rest, and then replaced."""
    move, shape = MOVES[name]
    old = np.arange(12, dtype=np.float32).reshape(4, 1, 3)
    unknown = move(np.pad(old, [(0, 0), (0, 1), (0, 0)], constant_values=np.nan))
    # Numbers that float32 does not have: what is filled in is not cast.
    values = np.arange(unknown.size).reshape(shape).astype(unknown.dtype) + unknown.dtype.type(1000.1)
    view = move(several.pad(old, UnfilledLeaf("them", (4, 2, 3), old.dtype), "them"))
    assert has_unfilled(view.leaves()) and np.isnan(unknown).any()
    filled = lazy.View(fill(view.node, as_view(values).node))
    np.testing.assert_array_equal(filled.get(), np.where(np.isnan(unknown), values, unknown))
    assert not has_unfilled(filled.leaves())


def test_unknown_elements_that_were_computed_with_cannot_be_filled():
    grown = several.pad(np.zeros(2), UnfilledLeaf("them", (4,), np.dtype(float)), "them")
    for view, text in [(average([grown, np.zeros(4)], [1, 1]), "average"), (grown[::-2], r"\[3:0:-2\]")]:
        with pytest.raises(ValueError, match=text):
            fill(view.node, as_view(np.zeros(view.shape)).node)

"""Views as Python objects: arguments, equality, text; nothing reads them unasked."""

import copy

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, several
from orbax_t5x.lazy.several import all_equal, average
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.lazy_views import view_of


def test_transpose_and_reshape_take_numpys_forms():
    array = np.arange(24).reshape(2, 3, 4)
    view = as_view(array)
    for axes in [(), (None,), ((2, 0, 1),), ([2, 0, 1],), (2, 0, 1), (-1, 0, 1)]:
        np.testing.assert_array_equal(view.transpose(*axes).get(), array.transpose(*axes))
    for shape in [(24,), (-1,), ((6, 4),), ([6, 4],), (6, -1), (2, 3, 4, 1)]:
        np.testing.assert_array_equal(view.reshape(*shape).get(), array.reshape(*shape))
    assert view[0, 0, 0].reshape(()).get() == 0
    assert view[0, 0, 0].reshape(1, 1).get().shape == (1, 1)
    assert lazy.broadcast_to(view[0, 0, 0], 3).get().tolist() == [0, 0, 0]
    assert several.stack([1, 2]).get().tolist() == [1, 2]
    assert lazy.repeat(5, 3, 0).get().tolist() == [5, 5, 5]
    assert lazy.repeat(view, 0, 1).get().shape == (2, 0, 3, 4)


def test_views_are_frozen_hashable_and_equal_only_to_themselves():
    view = view_of((2, 3))
    for change in (
        lambda: setattr(view, "node", None),
        lambda: setattr(view, "something", ()),
        lambda: delattr(view, "node"),
        lambda: setattr(view.node, "leaf", None),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    assert view.node.leaf is view.leaf
    with pytest.raises(AttributeError):
        view.shape = ()
    assert view == view and view != view_of((2, 3)) and len({view, view, view.T}) == 2
    assert copy.copy(view) is view and copy.deepcopy(view.T) is not None
    assert isinstance(view, ot.LazyArray)


def test_nothing_reads_a_view_but_what_says_so():
    leaf = ArrayLeaf(np.arange(6, dtype=np.float32).reshape(2, 3))
    view = as_view(leaf)
    scalar = as_view(ArrayLeaf(np.int64(3)[()].reshape(())))
    assert len(view) == 2 and scalar.item() == 3 and view[1, 2].item() == 5.0
    with pytest.raises(TypeError, match="rank 0"):
        len(scalar)
    with pytest.raises(ValueError, match="one element"):
        view.item()
    leaf.calls.clear()
    for implicit, text in [
        (lambda: bool(view), "is None"),
        (lambda: bool(view[0, 1]), "is None"),
        (lambda: int(view[0, 1]), "item"),
        (lambda: float(view[0, 1]), "item"),
        (lambda: list(view), "get"),
        (lambda: iter(scalar), "get"),
    ]:
        with pytest.raises(TypeError, match=rf"lazy array would read it.*{text}"):
            implicit()
    assert not leaf.calls
    assert (view.ndim, view.size, view.nbytes) == (2, 6, 24) and view_of((2,), "int4").nbytes == 2


def test_the_text_of_a_view_shows_what_it_is_and_no_data():
    kernel = view_of((6, 8), name="encoder/layers_0/kernel")
    assert repr(kernel) == "View(shape=(6, 8), dtype=float32, of='encoder/layers_0/kernel')"
    assert kernel.describe() == ""
    heads = kernel.reshape(6, 2, 4)
    assert heads.describe() == "reshape (6, 2, 4)"
    stacked = several.stack([heads] * 24, 1).astype("bfloat16")
    assert stacked.describe() == "reshape (6, 2, 4), stack of 24 on axis 1, cast bfloat16"
    assert repr(stacked).startswith("View(shape=(6, 24, 2, 4), dtype=bfloat16, of='encoder/layers_0/kernel', reshape")
    for view, text in [
        (kernel.T, "transpose (1, 0)"),
        (kernel[1:3], "[1:3, :]"),
        (kernel[:, ::-2], "[:, 7:0:-2]"),
        (kernel[2], "[2, :]"),
        (kernel[::-5], "[5::-5, :]"),
        (kernel[None], "reshape (1, 6, 8)"),
        (kernel.reshape(8, 6), "reshape (8, 6)"),
        (kernel.reshape(2, 3, 8)[:, None], "reshape (2, 1, 3, 8)"),
        (kernel[:1, 0], "[0:1, 0]"),
        (lazy.repeat(kernel, 3, 1), "repeat 3 on axis 1"),
        (lazy.broadcast_to(kernel, (2, 6, 8)), "repeat 2 on axis 0"),
        (several.concatenate([kernel, kernel], 1), "concatenation of 2 on axis 1"),
        (kernel.cast_checked("int32"), "checked cast int32"),
        (average([kernel, kernel], [1, 3]), "average of 2"),
        (all_equal([kernel, kernel]), "one of 2 that must be equal"),
    ]:
        assert view.describe() == text
    two = several.stack([kernel, view_of((6, 8), name="b")])
    assert "of='encoder/layers_0/kernel' and 1 more" in repr(two)

"""`Pad` and `Slice`: values, shapes, digests."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.lazy import as_view
from orbax_t5x.testing.transform_suite import run
from tests.support.transform_cases import AB, only_problem


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        (np.int8, 127, True), (np.int8, 128, False), (np.int8, 1.5, False), (np.int8, 2.0, True), (np.uint8, -1, False),
        (bool, True, True), (bool, 2, False), (np.float16, 1e6, False), (np.float16, np.inf, True),
        (np.float32, 1j, False), (np.complex64, 1j, True), (ml_dtypes.bfloat16, 0.1, True), (object, 0, False),
        (ml_dtypes.int4, -8, True), (ml_dtypes.int4, 8, False), (ml_dtypes.float8_e8m0fnu, 0, False),
    ],
)  # fmt: skip
def test_a_leaf_is_padded_with_numbers_that_its_dtype_has(dtype, value, fits):
    source = {"a": np.ones(2).astype(dtype) if dtype is not object else np.array([b"x", b"y"], object)}
    if fits:
        result, diagnostics = run(tr.Pad("a", (3,), value), source)
        assert diagnostics.problems == [] and result["a"].dtype == source["a"].dtype
        assert result["a"].tolist()[2] == np.asarray(value).astype(dtype).tolist()
    else:
        problem = only_problem(tr.Pad("a", (3,), value), source)
        assert problem.leaf == "a" and "has no value" in problem.message


def test_a_leaf_of_the_wanted_shape_is_not_padded():
    view = as_view(np.zeros((2, 3)))
    assert tr.Pad("a", (2, None))({"a": view}, {})["a"].node is view.node


def test_equal_transforms_of_sizes_have_equal_digests():
    assert tr.Slice("a", np.s_[:3, 1]) == tr.Slice("a", ((None, 3, None), 1))
    assert tr.Slice("a", np.s_[1:2, ..., ::-1, None, 4]).describe() == "Slice('a', [1:2, ..., ::-1, None, 4])"
    assert tr.Slice("a", 1, require_match=False).describe() == "Slice('a', [1], require_match=False)"
    same = [tr.Pad("a", 3, value) for value in (0, 0.0, False, np.float32(0))]
    assert len(set(same)) == 1 and len({transform.digest() for transform in same}) == 1
    assert tr.Pad("a", (None, 3), tr.FALLBACK).describe() == "Pad('a', (None, 3), value=FALLBACK)"


def test_elements_of_the_fallback_are_known_in_a_restore_alone():
    leaf = tr.Pad("a", (5,), tr.FALLBACK)(AB, {})["a"]
    assert np.array_equal(leaf[:2].get(), AB["a"])
    with pytest.raises(ValueError, match=r"only in a restore .*fallback="):
        leaf.get()


def test_new_elements_are_0_unless_a_value_is_given():
    padded = tr.Pad("a", (5,))({"a": np.ones(3, np.float32)}, {})["a"]
    assert np.asarray(padded).tolist() == np.pad(np.ones(3), (0, 2)).tolist()


@pytest.mark.parametrize(
    ("index", "text"),
    [(np.s_[:3], "[:3]"), (np.s_[0], "[0]"), (np.s_[..., 1:9:2], "[..., 1:9:2]"), (np.s_[None, ::-1], "[None, ::-1]")],
)
def test_a_slice_is_shown_as_it_is_written(index, text):
    transform = tr.Slice("a.*", index)
    assert transform.describe() == f"Slice('a.*', {text})"
    assert eval(transform.as_code(), {"ot": ot, "np": np}) == transform
    lenient = tr.Slice("a.*", index, require_match=False)
    assert lenient.describe() == f"Slice('a.*', {text}, require_match=False)"
    assert eval(lenient.as_code(), {"ot": ot, "np": np}) == lenient

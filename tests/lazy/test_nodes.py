"""Each kind of view by itself: what it picks, casts, combines, refuses and says."""

import copy

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import all_equal, as_view, average, full_box
from orbax_t5x.lazy.node import memoryless
from orbax_t5x.testing.array_leaf import ArrayLeaf
from orbax_t5x.trees.dtypes import kind_of
from tests.support.array_strategies import DTYPES, GuardedBuffer, boxes


def _view(shape, dtype="float32", name="leaf"):
    return as_view(ArrayLeaf(np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(dtype), name))


def _names(view):
    return [leaf.name for leaf in view.leaves()]


# Picking.


def test_a_slice_of_a_stack_knows_only_the_inputs_that_it_touches():
    views = [_view((2, 3), name=f"layer{i}") for i in range(6)]
    stacked = lazy.stack(views, 1)
    assert _names(stacked) == [f"layer{i}" for i in range(6)]
    assert stacked[:, 4].node is views[4].node
    assert _names(stacked[:, 1:3]) == ["layer1", "layer2"]
    assert _names(stacked[:, ::-2]) == ["layer5", "layer3", "layer1"]
    assert _names(stacked.T[2, -1]) == ["layer5"]
    assert _names(stacked.astype("float64")[:, 2].T) == ["layer2"]
    box = ((0, 2), (2, 3), (1, 3))
    assert stacked.requests(box) == [(views[2].leaves()[0], ((0, 2), (1, 3)))]


def test_a_slice_of_a_concatenation_knows_only_the_inputs_that_it_touches():
    views = [_view((2, size), name=f"part{size}") for size in (3, 0, 4, 5)]
    joined = lazy.concatenate(views, 1)
    assert _names(joined[:, :3]) == ["part3"]
    assert joined[:, 3:7].node is views[2].node
    assert _names(joined[:, 2:4]) == ["part3", "part4"]
    assert _names(joined[:, 7]) == ["part5"]
    assert _names(joined[0, ::-6]) == ["part5", "part4"]
    assert joined.requests(((1, 2), (3, 4))) == [(views[2].leaves()[0], ((1, 2), (0, 1)))]


def test_compositions_that_undo_each_other_cost_nothing():
    view = _view((4, 6, 2))
    assert (view.T.T).node is view.node
    assert (view[::-1][::-1]).node is view.node
    assert (view[...]).node is view.node
    assert (view[None][0]).node is view.node
    assert (view.reshape(48).reshape(4, 6, 2)).node is view.node
    assert (view.reshape(2, 2, 1, 12).reshape(8, 6).reshape(4, 6, 2)).node is view.node
    assert (view.astype("float32")).node is view.node
    assert (lazy.stack([view, view], 2)[:, :, 1]).node is view.node
    assert (lazy.concatenate([view])).node is view.node
    assert (lazy.broadcast_to(view, view.shape)).node is view.node
    assert view[1:3][:, 2:][1].requests(((0, 1), (0, 2))) == [(view.leaves()[0], ((2, 3), (2, 3), (0, 2)))]


def test_steps_read_row_by_row_where_rows_are_large_and_the_covering_box_where_not():
    large = _view((10, 2048))
    assert [box for _, box in large[::4].requests(((0, 3), (0, 2048)))] == [((i, i + 1), (0, 2048)) for i in (0, 4, 8)]
    small = _view((10, 8))
    assert [box for _, box in small[::4].requests(((0, 3), (0, 8)))] == [((0, 9), (0, 8))]
    assert [box for _, box in small[::-4].requests(((1, 3), (0, 8)))] == [((1, 6), (0, 8))]


def test_a_reshape_reads_runs_and_reads_over_small_gaps_only():
    heads = _view((6, 4096)).reshape(6, 4, 1024)
    assert [box for _, box in heads.requests(((0, 6), (1, 3), (0, 1024)))] == [((0, 6), (1024, 3072))]
    # Half of each head: gaps of 2 KiB lie between.
    assert [box for _, box in heads.requests(((0, 6), (1, 3), (0, 512)))] == [((0, 6), (1024, 2560))]
    wide = _view((6, 16384)).reshape(6, 4, 4096)
    # Gaps of 8 KiB.
    boxes = [box for _, box in wide.requests(((0, 6), (1, 3), (0, 2048)))]
    assert boxes == [((0, 6), (4096, 6144)), ((0, 6), (8192, 10240))]
    joined = _view((4, 16)).reshape(64)
    boxes = [box for _, box in joined.requests(((10, 50),))]
    assert boxes == [((0, 1), (10, 16)), ((1, 3), (0, 16)), ((3, 4), (0, 2))]


def test_a_reshape_into_a_scattered_buffer_is_cut_where_the_pieces_are_large_only():
    def pieces(view, scattered_axis):
        # A buffer whose leading dimensions up to this one cannot be joined with what follows.
        padded = [size + (axis == scattered_axis + 1) for axis, size in enumerate(view.shape)]
        out = np.zeros(padded, view.dtype)[tuple(slice(0, size) for size in view.shape)]
        return [request.box for _, request in view.lower(full_box(view.shape), out).reads]

    heads_first = _view((128, 1024)).reshape(4, 32, 1024)
    assert pieces(heads_first, 0) == [((32 * i, 32 * i + 32), (0, 1024)) for i in range(4)]
    assert pieces(heads_first, 1) == [((0, 128), (0, 1024))]
    # Heads of 64 floats: a quarter of a kilobyte each is not worth a request of its own.
    assert pieces(_view((128, 768)).reshape(128, 12, 64), 1) == [((0, 128), (0, 768))]


def test_a_repeat_reads_once():
    leaf = ArrayLeaf(np.arange(6.0).reshape(2, 3))
    repeated = ot.repeat(as_view(leaf), 5, 1)
    np.testing.assert_array_equal(repeated.get(), np.repeat(leaf.array[:, None], 5, 1))
    assert leaf.counts.max() == 1
    assert repeated.requests(((0, 2), (2, 4), (0, 3))) == [(leaf, ((0, 2), (0, 3)))]


def test_a_repeat_larger_than_the_blocks_it_is_copied_in():
    array = np.random.default_rng(0).random((300, 700)).astype("float32")
    for axis in range(3):
        expected = np.repeat(np.expand_dims(array, axis), 3, axis)
        np.testing.assert_array_equal(lazy.repeat(array, 3, axis).get(), expected)


# Growing.


def test_a_padded_array_reads_what_lies_within_and_beyond():
    old, filler = _view((4, 3), name="old"), _view((6, 5), name="filler")
    grown = lazy.pad(old, filler, "more")
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
    assert grown[:4, :3].node is old.node and _names(grown[4:]) == ["filler"] and _names(grown[2]) == ["old", "filler"]
    assert _names(grown[5]) == _names(grown.T[3]) == ["filler"]
    assert grown.T.describe() == "transpose (1, 0), pad to (5, 6) with more"
    assert grown.scratch_bytes(full_box(grown.shape)) == 0
    assert lazy.pad(old, _view((4, 3)), "more").node is old.node
    with pytest.raises(ValueError, match=r"pad an array of shape \(4, 3\) to shape \(5, 2\)"):
        lazy.pad(old, _view((5, 2)), "more")
    with pytest.raises(ValueError, match="different dtypes"):
        lazy.pad(old, _view((6, 5), "int32"), "more")


MOVES = {
    "transpose": (lambda a: a.T, (3, 2, 4)),
    "reshape": (lambda a: a.reshape(8, 3), (8, 3)),
    "split": (lambda a: a.reshape(2, 2, 2, 3).transpose(3, 1, 0, 2), (3, 2, 2, 2)),
    "new axis": (lambda a: a[:, None], (4, 1, 2, 3)),
    "part": (lambda a: a[1:, :, 1], (3, 2)),
    "flip": (lambda a: a[:, ::-1].T, (3, 2, 4)),
    "stack": (lambda a: (lazy.stack if isinstance(a, lazy.View) else np.stack)([a, a], 1), (4, 2, 2, 3)),
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
    view = move(lazy.pad(old, lazy.UnfilledLeaf("them", (4, 2, 3), old.dtype), "them"))
    assert lazy.has_unfilled(view.leaves()) and np.isnan(unknown).any()
    filled = lazy.View(lazy.fill(view.node, as_view(values).node))
    np.testing.assert_array_equal(filled.get(), np.where(np.isnan(unknown), values, unknown))
    assert not lazy.has_unfilled(filled.leaves())


def test_unknown_elements_that_were_computed_with_cannot_be_filled():
    grown = lazy.pad(np.zeros(2), lazy.UnfilledLeaf("them", (4,), np.dtype(float)), "them")
    for view, text in [(average([grown, np.zeros(4)], [1, 1]), "average"), (grown[::-2], r"\[3:0:-2\]")]:
        with pytest.raises(ValueError, match=text):
            lazy.fill(view.node, as_view(np.zeros(view.shape)).node)


# Casting.


def _scalar_cast(value, source, target):
    """What a cast that NumPy lacks must give: the scalar type's own rounding, or the integer modulo its width."""
    if "int" not in source.name or "int" not in target.name:
        return target.type(int(float(value)) if "int" in target.name else float(value))
    bits = int(target.name.lstrip("uint"))
    wrapped = int(value) % 2**bits
    return target.type(wrapped - 2**bits if target.name.startswith("int") and wrapped >= 2 ** (bits - 1) else wrapped)


@pytest.mark.parametrize("source", DTYPES, ids=lambda dtype: dtype.name)
def test_casts_between_all_dtypes_equal_numpy(source):
    values = np.array([0, 1, 0, 1, 1, 0, 0, 1]).astype(source)
    if source.name == "float8_e8m0fnu":  # It has no zero, and int1 no one.
        values = np.array([0.25, 0.5, 0.25, 0.25, 0.5]).astype(source)
    for target in DTYPES:
        cast = as_view(values).astype(target)
        assert cast.dtype == target
        if source.kind == "c" and target.kind not in "cb":
            expected = values.real.astype(target)
        elif np.can_cast(source, target, casting="unsafe"):
            expected = values.astype(target)
        else:
            expected = np.array([_scalar_cast(value, source, target) for value in values])
        got = cast.get()
        assert got.dtype == target and got.tobytes() == expected.tobytes(), (source, target)


@pytest.mark.parametrize(
    "source", [d for d in DTYPES if d.kind == "f" or d.name.startswith(("float8", "bfloat"))], ids=str
)
def test_float_casts_keep_numpys_rounding_infinities_and_nan(source):
    with np.errstate(all="ignore"):
        values = np.array([0.1, -2.7, 448.0, 1e9, -1e-9, np.inf, -np.inf, np.nan]).astype(source)
        for target in (
            np.dtype("float32"),
            np.dtype("float16"),
            np.dtype(ml_dtypes.bfloat16),
            np.dtype(ml_dtypes.float8_e5m2),
        ):
            if np.can_cast(source, target, casting="unsafe"):
                assert as_view(values).astype(target).get().tobytes() == values.astype(target).tobytes()


def test_a_chain_of_casts_keeps_what_each_loses():
    values = np.array([1100001, 3], np.int64)
    assert as_view(values).astype("bfloat16").astype("int32").get().tolist() == [1097728, 3]


def test_checked_casts_pass_what_survives_and_name_what_does_not():
    for value, dtype in [(7, "int32"), (-(2**31), "int32"), (255, "uint8"), (1, "bool"), (3, "int4"), (96, "bfloat16")]:
        got = as_view(np.array([value])).cast_checked(dtype).get()
        assert got.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)) and int(got[0]) == value
    nan = as_view(np.array([np.nan, 1.5])).cast_checked("float32").get()
    assert np.isnan(nan[0]) and nan[1] == 1.5
    refused = [
        (2**31, "int32"),
        (-1, "uint64"),
        (-1, "uint32"),
        (256, "uint8"),
        (8, "int4"),
        (-1, "uint4"),
        (2, "bool"),
        (257, "bfloat16"),
        (2**53 + 1, "float64"),
    ]
    for value, dtype in refused:
        view = as_view(ArrayLeaf(np.array([1, value]), "state/step")).cast_checked(dtype)
        with pytest.raises(LeafMismatchError, match=rf"leaf 'state/step'.*{value} does not fit {dtype}") as caught:
            view.get()
        assert caught.value.leaf == "state/step" and caught.value.path == "/checkpoints/state/step"
    with pytest.raises(LeafMismatchError, match="does not fit uint32"):
        as_view(np.uint64(2**63)).cast_checked("uint32").get()
    with pytest.raises(LeafMismatchError, match="does not fit int64"):
        as_view(np.uint64(2**63)).cast_checked("int64").get()
    with pytest.raises(LeafMismatchError, match="does not fit int32"):
        as_view(np.float32("nan")).cast_checked("int32").get()
    # Only what is read is checked.
    assert as_view(np.array([5, 2**40])).cast_checked("int32")[:1].get().tolist() == [5]


def test_strings_keep_their_bytes_and_are_not_cast():
    words = as_view(np.array([b"ab", b"\x00c"], object))
    assert words[::-1].get().tolist() == [b"\x00c", b"ab"]
    assert lazy.stack([words, words]).reshape(4).get().tolist() == [b"ab", b"\x00c"] * 2
    with pytest.raises(TypeError, match="cannot cast a lazy array of dtype object to float32"):
        words.astype("float32")
    with pytest.raises(TypeError, match="cannot cast"):
        as_view(np.zeros(2)).astype(object)


# Combining.


def _jax_promotion(dtypes):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*dtypes))


def _numbers(rng, shape, dtype, bound):
    if kind_of(dtype) == "int":
        info = ml_dtypes.iinfo(dtype)
        low, high = max(int(info.min), -bound), min(int(info.max), bound)
        return rng.integers(low, high + 1, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


@settings(max_examples=150)
@given(st.data())
def test_average_is_numpys_in_float64_rounded_to_jaxs_common_dtype(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    names = data.draw(st.sampled_from([
        ["float32", "float64", "bfloat16", "float16", "complex64", "int8", "int32", "uint16", "int64", "complex128"],
        ["int4"], ["uint4"], ["int2"], ["uint2"], ["float8_e4m3fn", "int16"], ["bfloat16", "float16"], ["int64"],
    ]))  # fmt: skip
    dtypes = [
        np.dtype(getattr(ml_dtypes, name, name)) for name in data.draw(st.lists(st.sampled_from(names), min_size=1))
    ][:5]
    # Beside floats, numbers that the smallest of them holds.
    bound = 2**40 if all(kind_of(dtype) == "int" for dtype in dtypes) else 100
    arrays = [_numbers(rng, shape, dtype, bound) for dtype in dtypes]
    weights = [data.draw(st.floats(0.25, 4)) for _ in arrays]
    mean = average([as_view(array) for array in arrays], weights)
    wide = np.stack([array.astype("complex128") for array in arrays])
    expected = np.average(wide, axis=0, weights=weights)
    assert mean.dtype == _jax_promotion(dtypes) and mean.shape == shape
    got = mean.get()
    if kind_of(mean.dtype) == "int":
        # Sums of floats differ in their last bit by their order: both neighbours of a half are right.
        assert (np.abs(got.astype("float64") - expected.real) <= 0.5 + 1e-9 * np.abs(expected.real)).all()
    else:
        tolerance = {2: 1e-2, 1: 0.1}.get(mean.dtype.itemsize, 1e-6)
        np.testing.assert_allclose(got.astype("complex128"), expected, rtol=tolerance, atol=tolerance)
    if mean.ndim:
        np.testing.assert_array_equal(mean[::-2].T.get(), mean.get()[::-2].T)


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4", "int8", "uint8", "int32", "int64"])
def test_average_of_integers_rounds_to_the_nearest_even(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    info = ml_dtypes.iinfo(dtype)
    values = np.arange(max(int(info.min), -8), min(int(info.max), 7) + 1)
    left, right = (part.reshape(-1) for part in np.meshgrid(values, values))
    got = average([as_view(left.astype(dtype)), as_view(right.astype(dtype))], [1, 1])
    expected = np.rint(np.average(np.stack([left, right]).astype("float64"), axis=0))
    assert got.dtype == dtype and got.get().astype("int64").tolist() == expected.tolist()


def test_average_never_wraps_an_integer_around():
    for name, high in [("int8", 100), ("int4", 7), ("uint8", 200), ("int64", 2**62)]:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        views = [as_view(ArrayLeaf(np.array([value]).astype(dtype), "w")) for value in (high, 0)]
        assert average(views, [1, 1]).get().astype("int64") == high // 2 + (high // 2) % 2 * (high % 2)
        with pytest.raises(LeafMismatchError, match=rf"the average .* does not fit {name}") as caught:
            average(views, [4, -2]).get()
        assert caught.value.leaf == "w"
        if name.startswith("u"):
            with pytest.raises(LeafMismatchError, match="does not fit"):
                average(views, [-1, 2]).get()


def test_average_sums_in_more_than_the_stored_precision():
    small = np.full(4, 1.0, "bfloat16")
    tiny = np.full(4, 2.0**-9, "bfloat16")
    # Summed in bfloat16, 256 times 2^-9 beside 1 would be lost.
    got = average([as_view(small)] + [as_view(tiny)] * 256, [1] + [1] * 256).astype("float32").get() * 257
    np.testing.assert_allclose(got, 1.5, rtol=1e-2)
    doubles = average([as_view(np.array([1.0, 1e-12])), as_view(np.array([1.0, 3e-12]))], [1, 1])
    np.testing.assert_allclose(doubles.get(), [1.0, 2e-12], rtol=1e-15)
    steps = average([as_view(np.int64(2**40 + 1)), as_view(np.int64(2**40 + 4))], [1, 1])
    assert steps.get() == 2**40 + 2  # halves to even
    # The narrower input does not decide: this loses nothing of the float32.
    mixed = average(
        [as_view(np.array([1.0, 3.0]).astype("bfloat16")), as_view(np.float32([1.0009765625, 3.25]))], [1, 1]
    )
    assert mixed.dtype == np.float32 and mixed.get().tolist() == [1.00048828125, 3.125]


def test_average_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"different shapes: .*\(2,\).*\(3,\)"):
        average([_view((2,)), _view((3,))], [1, 1])
    with pytest.raises(ValueError, match="2 arrays with 1 weights"):
        average([_view((2,)), _view((2,))], [1])
    with pytest.raises(ValueError, match="sum must be finite and not zero"):
        average([_view((2,)), _view((2,))], [1, -1])
    with pytest.raises(TypeError, match="bool"):
        average([_view((2,), "bool")], [1])
    with pytest.raises(ValueError, match="float8_e4m3fn, float32: JAX has no common dtype"):
        average([_view((2,), ml_dtypes.float8_e4m3fn), _view((2,))], [1, 1])
    with pytest.raises(ValueError, match="at least one"):
        average([], [])


def test_a_low_rank_sum_reads_rows_and_columns_and_is_the_same_in_every_box():
    rng = np.random.default_rng(0)
    arrays = {"kernel": (64, 3, 40), "down": (64, 8), "up": (8, 3, 40)}
    leaves = {name: ArrayLeaf(rng.normal(size=shape).astype("bfloat16"), name) for name, shape in arrays.items()}
    kernel, down, up = (as_view(leaf) for leaf in leaves.values())
    merged = lazy.add_low_rank(kernel, down, up, 0.3)
    box = ((5, 9), (1, 3), (0, 7))
    assert merged.requests(box) == [
        (leaves["kernel"], box),
        (leaves["down"], ((5, 9), (0, 8))),
        (leaves["up"], ((0, 8), (1, 3), (0, 7))),
    ]
    wide = [leaf.array.astype(np.float64) for leaf in leaves.values()]
    exact = wide[0] + 0.3 * np.tensordot(wide[1], wide[2], 1)
    whole = merged.get()
    assert whole.dtype == kernel.dtype
    # Rounded once: within half a unit in the last place, and a little for sums in float32.
    np.testing.assert_allclose(whole.astype(np.float64), exact, rtol=2**-8 * 1.01, atol=1e-6)
    # In float32, boxes of every shape have the bits of the whole: shards agree with one another.
    sums = lazy.add_low_rank(kernel.astype("float32"), down, up, 0.3)
    np.testing.assert_allclose(sums.get(), exact, rtol=1e-5, atol=1e-6)
    for part in (np.s_[5:6, 1:2, 3:4], np.s_[:, 2], np.s_[7:30, :, ::-3], np.s_[40]):
        assert sums[part].get().tobytes() == sums.get()[part].tobytes()
    assert merged.describe() == "plus 0.3 times a product of rank 8"
    assert lazy.add_low_rank(np.ones((2, 2)), np.ones((2, 1)), np.ones((1, 2), "float32"), 1).dtype == np.float64


@settings(max_examples=80)
@given(st.data())
def test_a_low_rank_sum_equals_numpy_in_any_box_and_buffer(data):
    """Small whole numbers, whose sums are exact in every order."""
    rows, columns = (tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))) for _ in range(2))
    rank = data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shapes = {"kernel": (*rows, *columns), "down": (*rows, rank), "up": (rank, *columns)}
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    leaves = {name: ArrayLeaf(rng.integers(-2, 3, shape).astype(dtype), name) for name, shape in shapes.items()}
    expected = leaves["kernel"].array + 2 * np.tensordot(leaves["down"].array, leaves["up"].array, 1).astype(dtype)
    view = lazy.add_low_rank(*map(as_view, leaves.values()), 2)
    axes = data.draw(st.permutations(range(view.ndim)))
    view, expected = view.transpose(axes), expected.transpose(axes)
    box = data.draw(boxes(expected.shape))
    buffer = GuardedBuffer(data.draw, lazy.box_shape(box), view.dtype)
    lazy.read_views([(view, box, buffer.array)])
    np.testing.assert_array_equal(buffer.array, expected[lazy.box_slices(box)])
    assert view.dtype == np.dtype(dtype) and buffer.guards_hold()
    for leaf, (of_leaf, part) in zip(leaves.values(), view.requests(box), strict=False):
        assert of_leaf is leaf and leaf.counts.sum() == lazy.box_size(part) and leaf.counts.max() == 1


def test_a_low_rank_sum_takes_little_memory_and_large_rows(monkeypatch):
    kernel = _view((300, 50))
    merged = lazy.add_low_rank(kernel, np.ones((300, 2), "float32"), np.ones((2, 50), "float32"), 1)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    monkeypatch.setattr("orbax_t5x.lazy.low_rank._BLOCK_BYTES", 64)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    # Two copies of each factor, and two rows of sums.
    assert merged.scratch_bytes(full_box(merged.shape)) == 4 * (2 * (600 + 100) + 2 * 50)
    assert lazy.add_low_rank(kernel, np.ones((300, 0), "float32"), np.ones((0, 50), "float32"), 1).node is kernel.node


def test_a_low_rank_sum_refuses_what_does_not_fit():
    for down, up in [((4, 2), (3, 5)), ((4, 2), (2, 6)), ((2,), (2, 4, 5)), ((2, 4), (2, 5))]:
        with pytest.raises(ValueError, match=r"has not the kernel's shape \(4, 5\)"):
            lazy.add_low_rank(_view((4, 5)), _view(down), _view(up), 1)
    with pytest.raises(TypeError, match="floating-point numbers, not int32"):
        lazy.add_low_rank(_view((4, 5)), _view((4, 2), "int32"), _view((2, 5)), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_equal_compares_bits(dtype):
    array = np.array([[0, 1], [1, 0]]).astype(dtype)
    leaves = [ArrayLeaf(array.copy(), f"layer{i}") for i in range(3)]
    equal = all_equal([as_view(leaf) for leaf in leaves])
    assert equal.T.get().tobytes() == array.T.tobytes()
    leaves[2].array[1, 1] = np.ones((), dtype)
    with pytest.raises(LeafMismatchError, match=r"leaf 'layer2'.*must equal 'layer0'.*\(1, 1\)"):
        equal[1].get()
    # A box without the difference reads.
    assert equal[:, 0].get().tobytes() == array[:, 0].tobytes()


def test_all_equal_takes_nan_for_equal_and_zeros_of_two_signs_for_different():
    nan = np.array([np.nan, 1.0])
    np.testing.assert_array_equal(all_equal([as_view(nan), as_view(nan.copy())]).get(), nan)
    with pytest.raises(LeafMismatchError):
        all_equal([as_view(np.array([0.0])), as_view(np.array([-0.0]))]).get()
    with pytest.raises(LeafMismatchError):
        all_equal([as_view(np.array([0j])), as_view(np.array([complex(0.0, -0.0)]))]).get()
    with pytest.raises(LeafMismatchError, match="b'y'"):
        all_equal([as_view(np.array([b"x"], object)), as_view(np.array([b"y"], object))]).get()
    with pytest.raises(ValueError, match=r"different dtypes: .*float32.*float64"):
        all_equal([_view((2,)), _view((2,), "float64")])


# Refusing.


@pytest.mark.parametrize(
    "key, text",
    [
        ([0, 1], "indices, not list"),
        (np.array([0, 1]), "indices, not ndarray"),
        (np.array([True, False]), "indices, not ndarray"),
        (True, "indices, not bool"),
        (np.bool_(True), "indices, not bool"),
        (1.0, "indices, not float"),
        ("a", "indices, not str"),
        ((0, [1]), "indices, not list"),
        (slice("a", None), "a slice of a lazy array takes integers"),
        (2, r"index 2 is out of bounds for axis 0 of shape \(2, 3\)"),
        ((0, -4), r"index -4 is out of bounds for axis 1"),
        ((0, 0, 0), "too many indices: 3"),
        ((..., ...), "single ellipsis"),
    ],
)
def test_an_index_that_is_not_basic_is_an_index_error_that_says_so(key, text):
    with pytest.raises(IndexError, match=text):
        _view((2, 3))[key]


def test_a_step_of_zero_is_numpys_value_error():
    with pytest.raises(ValueError, match="zero"):
        _view((2, 3))[::0]


def test_integers_of_every_kind_are_indices():
    view = _view((2, 3))
    for one in (1, np.int32(1), np.array(1), jnp.asarray(1)):
        np.testing.assert_array_equal(view[one].get(), [3, 4, 5])


def test_shapes_that_do_not_fit_are_errors_that_name_both():
    with pytest.raises(ValueError, match=r"stack of different shapes: .*\(2, 3\).*'a'.*\(3, 2\).*'b'"):
        lazy.stack([_view((2, 3), name="a"), _view((3, 2), name="b")])
    with pytest.raises(
        ValueError, match=r"concatenate on axis 0 of shapes that differ elsewhere: .*\(2, 3\).*\(2, 2\)"
    ):
        lazy.concatenate([_view((2, 3)), _view((2, 2))])
    with pytest.raises(ValueError, match=r"shapes that differ elsewhere"):
        lazy.concatenate([_view((2, 3)), _view((2, 3, 1))])
    with pytest.raises(ValueError, match=r"stack of different dtypes: .*float32.*int32.*cast them first"):
        lazy.stack([_view((2,)), _view((2,), "int32")])
    with pytest.raises(ValueError, match="rank 0"):
        lazy.concatenate([_view(())])
    for empty in (lazy.stack, lazy.concatenate):
        with pytest.raises(ValueError, match="at least one"):
            empty([])
    with pytest.raises(ValueError, match=r"cannot reshape .*\(2, 3\).*\(4, 2\)"):
        _view((2, 3)).reshape(4, 2)
    for shape in [(-1, -1), (4, -1), (-2, -3), (0, -1)]:
        with pytest.raises(ValueError, match="cannot reshape"):
            _view((2, 3)).reshape(shape)
    with pytest.raises(ValueError, match=r"cannot broadcast an array of shape \(2, 3\) to shape \(3, 2\)"):
        lazy.broadcast_to(_view((2, 3)), (3, 2))
    with pytest.raises(ValueError, match="cannot broadcast"):
        lazy.broadcast_to(_view((2, 3)), (3,))
    with pytest.raises(ValueError, match="no permutation"):
        _view((2, 3)).transpose(0, 0)
    with pytest.raises(ValueError, match="no permutation"):
        _view((2, 3)).transpose(0)
    for call in (lambda v: lazy.stack([v], 3), lambda v: lazy.repeat(v, 2, -4), lambda v: lazy.concatenate([v], 2)):
        with pytest.raises(ValueError, match="out of bounds"):
            call(_view((2, 3)))
    with pytest.raises(ValueError, match="negative"):
        lazy.repeat(_view((2, 3)), -1, 0)


def test_a_buffer_that_does_not_fit_is_refused():
    view = _view((2, 3))
    for out in (np.zeros((3, 2), "float32"), np.zeros((2, 3)), np.zeros(6, "float32")):
        with pytest.raises(ValueError, match="a buffer of shape"):
            view.lower(((0, 2), (0, 3)), out)


# Arguments in NumPy's forms.


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
    assert lazy.stack([1, 2]).get().tolist() == [1, 2]
    assert lazy.repeat(5, 3, 0).get().tolist() == [5, 5, 5]
    assert lazy.repeat(view, 0, 1).get().shape == (2, 0, 3, 4)


# Views as objects.


def test_views_are_frozen_hashable_and_equal_only_to_themselves():
    view = _view((2, 3))
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
    assert view == view and view != _view((2, 3)) and len({view, view, view.T}) == 2
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
    assert (view.ndim, view.size, view.nbytes) == (2, 6, 24) and _view((2,), "int4").nbytes == 2


def test_the_text_of_a_view_shows_what_it_is_and_no_data():
    kernel = _view((6, 8), name="encoder/layers_0/kernel")
    assert repr(kernel) == "View(shape=(6, 8), dtype=float32, of='encoder/layers_0/kernel')"
    assert kernel.describe() == ""
    heads = kernel.reshape(6, 2, 4)
    assert heads.describe() == "reshape (6, 2, 4)"
    stacked = lazy.stack([heads] * 24, 1).astype("bfloat16")
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
        (lazy.concatenate([kernel, kernel], 1), "concatenation of 2 on axis 1"),
        (kernel.cast_checked("int32"), "checked cast int32"),
        (average([kernel, kernel], [1, 3]), "average of 2"),
        (all_equal([kernel, kernel]), "one of 2 that must be equal"),
    ]:
        assert view.describe() == text
    two = lazy.stack([kernel, _view((6, 8), name="b")])
    assert "of='encoder/layers_0/kernel' and 1 more" in repr(two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_view_takes_is_known_in_every_dtype(dtype):
    """Some dtypes of `ml_dtypes` have a text that NumPy takes for none, or for another one."""
    buffer = memoryless((2, 0, 3), dtype)
    assert (buffer.shape, buffer.dtype) == ((2, 0, 3), dtype)
    view = lazy.stack([_view((2, 4)).astype(dtype)] * 2, 0)
    assert view.scratch_bytes(((0, 2), (0, 2), (0, 4))) >= 0

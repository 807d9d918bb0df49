"""Views made of several refuse what does not fit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x import lazy
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import as_view, full_box, several
from orbax_t5x.lazy.several import all_equal, average
from orbax_t5x.testing.array_leaf import ArrayLeaf
from orbax_t5x.trees.dtypes import kind_of
from tests.support.array_strategies import DTYPES, GuardedBuffer, boxes
from tests.support.lazy_views import view_of


def test_shapes_that_do_not_fit_are_errors_that_name_both():
    with pytest.raises(ValueError, match=r"stack of different shapes: .*\(2, 3\).*'a'.*\(3, 2\).*'b'"):
        several.stack([view_of((2, 3), name="a"), view_of((3, 2), name="b")])
    with pytest.raises(
        ValueError, match=r"concatenate on axis 0 of shapes that differ elsewhere: .*\(2, 3\).*\(2, 2\)"
    ):
        several.concatenate([view_of((2, 3)), view_of((2, 2))])
    with pytest.raises(ValueError, match=r"shapes that differ elsewhere"):
        several.concatenate([view_of((2, 3)), view_of((2, 3, 1))])
    with pytest.raises(ValueError, match=r"stack of different dtypes: .*float32.*int32.*cast them first"):
        several.stack([view_of((2,)), view_of((2,), "int32")])
    with pytest.raises(ValueError, match="rank 0"):
        several.concatenate([view_of(())])
    for empty in (several.stack, several.concatenate):
        with pytest.raises(ValueError, match="at least one"):
            empty([])
    with pytest.raises(ValueError, match=r"cannot reshape .*\(2, 3\).*\(4, 2\)"):
        view_of((2, 3)).reshape(4, 2)
    for shape in [(-1, -1), (4, -1), (-2, -3), (0, -1)]:
        with pytest.raises(ValueError, match="cannot reshape"):
            view_of((2, 3)).reshape(shape)
    with pytest.raises(ValueError, match=r"cannot broadcast an array of shape \(2, 3\) to shape \(3, 2\)"):
        lazy.broadcast_to(view_of((2, 3)), (3, 2))
    with pytest.raises(ValueError, match="cannot broadcast"):
        lazy.broadcast_to(view_of((2, 3)), (3,))
    with pytest.raises(ValueError, match="no permutation"):
        view_of((2, 3)).transpose(0, 0)
    with pytest.raises(ValueError, match="no permutation"):
        view_of((2, 3)).transpose(0)
    for call in (
        lambda v: several.stack([v], 3),
        lambda v: lazy.repeat(v, 2, -4),
        lambda v: several.concatenate([v], 2),
    ):
        with pytest.raises(ValueError, match="out of bounds"):
            call(view_of((2, 3)))
    with pytest.raises(ValueError, match="negative"):
        lazy.repeat(view_of((2, 3)), -1, 0)


def _jax_promotion(dtypes):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*dtypes))


def _numbers(rng, shape, dtype, bound):
    if kind_of(dtype) == "int":
        info = ml_dtypes.iinfo(dtype)
        low, high = max(int(info.min), -bound), min(int(info.max), bound)
        return rng.integers(low, high + 1, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
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
        average([view_of((2,)), view_of((3,))], [1, 1])
    with pytest.raises(ValueError, match="2 arrays with 1 weights"):
        average([view_of((2,)), view_of((2,))], [1])
    with pytest.raises(ValueError, match="sum must be finite and not zero"):
        average([view_of((2,)), view_of((2,))], [1, -1])
    with pytest.raises(TypeError, match="bool"):
        average([view_of((2,), "bool")], [1])
    with pytest.raises(ValueError, match="float8_e4m3fn, float32: JAX has no common dtype"):
        average([view_of((2,), ml_dtypes.float8_e4m3fn), view_of((2,))], [1, 1])
    with pytest.raises(ValueError, match="at least one"):
        average([], [])


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
        all_equal([view_of((2,)), view_of((2,), "float64")])


_DTYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float64, np.int8]


@settings(max_examples=max(10, settings.default.max_examples // 10))
@given(st.data())
def test_a_scaled_array_equals_numpy_in_any_box_and_buffer(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    by_row = (shape[0], *(1 for _ in shape[1:])) if len(shape) > 1 else ()
    dtype, scale_shape = data.draw(st.sampled_from(_DTYPES)), data.draw(st.sampled_from([(), (1,), (1, 1), by_row]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    weight = ArrayLeaf((rng.normal(size=shape) * 9).astype(dtype), "weight")
    scale = ArrayLeaf(rng.normal(size=scale_shape).astype(np.float32), "scale")
    wide = np.float64 if dtype is np.float64 else np.float32
    factor = scale.array.astype(wide).reshape(() if scale.array.size == 1 else by_row)
    expected = weight.array.astype(wide) * factor
    axes = data.draw(st.permutations(range(len(shape))))
    view, expected = several.scaled(as_view(weight), as_view(scale)).transpose(axes), expected.transpose(axes)
    if shape and data.draw(st.booleans()):
        view, expected = view[::-2], expected[::-2]
    box = data.draw(boxes(expected.shape))
    buffer = GuardedBuffer(data.draw, lazy.box_shape(box), view.dtype)
    lazy.read_views([(view, box, buffer.array)])
    assert view.dtype == wide and buffer.guards_hold()
    assert buffer.array.tobytes() == expected[lazy.box_slices(box)].tobytes()
    for leaf in (weight, scale) if buffer.array.size else ():
        assert leaf.counts.max() == 1


def test_only_the_box_is_read_and_the_scale_once():
    weight, scale = ArrayLeaf(np.ones((64, 40), ml_dtypes.float8_e4m3fn), "w"), ArrayLeaf(np.float32(3), "s")
    view = several.scaled(as_view(weight), as_view(scale))
    assert view[5:9].T.requests(((0, 40), (0, 4))) == [(weight, ((5, 9), (0, 40))), (scale, ())]
    assert view.describe() == "times a scale, float32"
    np.testing.assert_array_equal(view[5:9].get(), np.full((4, 40), 3, np.float32))
    assert weight.counts.sum() == 4 * 40
    # The weight's own bytes, the scale, and a product.
    assert view.scratch_bytes(full_box(view.shape)) == 64 * 40 + 4 + 64 * 40 * 4
    repeated = lazy.repeat(view, 2, 0)
    assert repeated.get().shape == (2, 64, 40)


def test_what_is_no_scale_is_refused():
    with pytest.raises(ValueError, match=r"one number, [^;]*not an array of shape \(2,\)"):
        several.scaled(np.ones((2, 2), np.float32), np.ones(2, np.float32))
    for weight, scale in ((np.ones(2, bool), np.float32(1)), (np.ones(2), np.int32(1)), (np.ones(2, complex), 1.0)):
        with pytest.raises(TypeError, match="real numbers, not"):
            several.scaled(weight, scale)


def test_a_low_rank_sum_reads_rows_and_columns_and_is_the_same_in_every_box():
    rng = np.random.default_rng(0)
    arrays = {"kernel": (64, 3, 40), "down": (64, 8), "up": (8, 3, 40)}
    leaves = {name: ArrayLeaf(rng.normal(size=shape).astype("bfloat16"), name) for name, shape in arrays.items()}
    kernel, down, up = (as_view(leaf) for leaf in leaves.values())
    merged = several.add_low_rank(kernel, down, up, 0.3)
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
    sums = several.add_low_rank(kernel.astype("float32"), down, up, 0.3)
    np.testing.assert_allclose(sums.get(), exact, rtol=1e-5, atol=1e-6)
    for part in (np.s_[5:6, 1:2, 3:4], np.s_[:, 2], np.s_[7:30, :, ::-3], np.s_[40]):
        assert sums[part].get().tobytes() == sums.get()[part].tobytes()
    assert merged.describe() == "plus 0.3 times a product of rank 8"
    assert several.add_low_rank(np.ones((2, 2)), np.ones((2, 1)), np.ones((1, 2), "float32"), 1).dtype == np.float64


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
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
    view = several.add_low_rank(*map(as_view, leaves.values()), 2)
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
    kernel = view_of((300, 50))
    merged = several.add_low_rank(kernel, np.ones((300, 2), "float32"), np.ones((2, 50), "float32"), 1)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    monkeypatch.setattr("orbax_t5x.lazy.several._BLOCK_BYTES", 64)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    # Two copies of each factor, and two rows of sums.
    assert merged.scratch_bytes(full_box(merged.shape)) == 4 * (2 * (600 + 100) + 2 * 50)
    assert (
        several.add_low_rank(kernel, np.ones((300, 0), "float32"), np.ones((0, 50), "float32"), 1).node is kernel.node
    )


def test_a_low_rank_sum_refuses_what_does_not_fit():
    for down, up in [((4, 2), (3, 5)), ((4, 2), (2, 6)), ((2,), (2, 4, 5)), ((2, 4), (2, 5))]:
        with pytest.raises(ValueError, match=r"has not the kernel's shape \(4, 5\)"):
            several.add_low_rank(view_of((4, 5)), view_of(down), view_of(up), 1)
    with pytest.raises(TypeError, match="floating-point numbers, not int32"):
        several.add_low_rank(view_of((4, 5)), view_of((4, 2), "int32"), view_of((2, 5)), 1)

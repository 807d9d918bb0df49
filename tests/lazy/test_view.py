"""Views against NumPy: any composition, any box, any buffer; and what they say they read against what they read."""

import contextlib
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.lazy import box as _boxes
from orbax_t5x.lazy import several
from orbax_t5x.lazy.several import stack
from orbax_t5x.lazy.view import as_keys, is_keys, key_data
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.array_strategies import DTYPES, GuardedBuffer, boxes

_SMALL = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int1", "int2", "int4", "uint1", "uint2", "uint4", "bool"}


def _padded(array: np.ndarray, filler: np.ndarray) -> np.ndarray:
    result = filler.copy()
    result[tuple(slice(size) for size in array.shape)] = array
    return result


def _has_cast(source: np.dtype, target: np.dtype) -> bool:
    return np.can_cast(source, target, casting="unsafe")


class Program:
    """A random composition on siblings of one shape and dtype: views, and beside each NumPy's answer."""

    def __init__(self, draw, dtype: np.dtype, casts: bool, max_side: int = 4):
        self.draw = draw
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        rank = draw(st.integers(0, 4))
        shape = tuple(
            draw(
                st.lists(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, max_side), min_size=rank, max_size=rank)
            )
        )
        high = 2 if casts or dtype.name in _SMALL else 100
        arrays = [rng.integers(0, high, shape).astype(dtype) for _ in range(draw(st.integers(1, 3)))]
        self.leaves = [ArrayLeaf(array, f"leaf{i}") for i, array in enumerate(arrays)]
        self.pairs = [(lazy.as_view(leaf), leaf.array) for leaf in self.leaves]
        self.casts = casts
        self.linear = True  # no element of a leaf is wanted at two places that may be read apart
        self.repeated = False
        self.exact = True  # nothing was done that may read more than is wanted
        self.trace: list[str] = []

    @property
    def shape(self):
        return self.pairs[0][1].shape

    def each(self, text, lazily, eagerly=None):
        self.trace.append(text)
        self.pairs = [(lazily(view), (eagerly or lazily)(array)) for view, array in self.pairs]

    def step(self) -> None:
        kinds = [
            "index",
            "index",
            "transpose",
            "reshape",
            "reshape",
            "stack",
            "concatenate",
            "repeat",
            "broadcast",
            "newaxis",
            "flip",
            "equal",
            "pad",
        ]
        if self.casts:
            kinds += ["cast", "cast"]
        getattr(self, self.draw(st.sampled_from(kinds)))()

    def index(self) -> None:
        key = []
        for size in self.shape:
            kind = self.draw(st.sampled_from(["all", "all", "slice", "slice", "integer"]))
            if kind == "integer" and size:
                key.append(self.draw(st.integers(-size, size - 1)))
            elif kind == "slice":
                bound = st.none() | st.integers(-size - 1, size + 1)
                step = self.draw(st.sampled_from([None, 1, -1, 2, -2, 3, -3]))
                key.append(slice(self.draw(bound), self.draw(bound), step))
                self.exact &= step in (None, 1, -1)
            else:
                key.append(slice(None))
        if self.draw(st.booleans()) and key:
            at = self.draw(st.integers(0, len(key) - 1))
            key[at:] = [Ellipsis]
        # What takes all elements away makes the rest of a program trivial.
        if 0 in self.pairs[0][1][tuple(key)].shape and self.draw(st.integers(0, 3)):
            return
        self.each(
            f"[{key}]", lambda a: a[tuple(key)], lambda a: a[(*key, ...)] if Ellipsis not in key else a[tuple(key)]
        )

    def newaxis(self) -> None:
        if len(self.shape) < 6:
            self.each("newaxis", lambda a: a[..., None, :] if len(self.shape) else a[None])

    def flip(self) -> None:
        if not self.shape:
            return
        at = self.draw(st.integers(0, len(self.pairs) - 1))
        view, array = self.pairs[at]
        self.trace.append(f"flip of {at}")
        self.pairs[at] = (view[::-1], array[::-1])

    def transpose(self) -> None:
        axes = self.draw(st.permutations(range(len(self.shape))))
        self.each(f"transpose{axes}", lambda a: a.transpose(axes))

    def reshape(self) -> None:
        size = math.prod(self.shape)
        shape = []
        if size == 0:
            shape = self.draw(st.permutations([0, *self.draw(st.lists(st.integers(0, 3), max_size=2))]))
        else:
            rest = size
            while rest > 1:
                factor = self.draw(st.sampled_from([f for f in range(1, rest + 1) if rest % f == 0]))
                shape.append(factor)
                rest //= factor
            if shape and self.draw(st.booleans()):
                shape[self.draw(st.integers(0, len(shape) - 1))] = -1
        if len(shape) <= 6:
            self.exact = False
            # The boxes that a reshape is cut into may each hold a copy of a repeated element.
            self.linear &= not self.repeated
            self.each(f"reshape{shape}", lambda a: a.reshape(shape))

    def stack(self) -> None:
        if len(self.shape) < 6:
            axis = self.draw(st.integers(-len(self.shape) - 1, len(self.shape)))
            self._combine(f"stack {axis}", lambda v: several.stack(v, axis), lambda a: np.stack(a, axis))

    def concatenate(self) -> None:
        if self.shape:
            axis = self.draw(st.integers(-len(self.shape), len(self.shape) - 1))
            self._combine(
                f"concatenate {axis}", lambda v: several.concatenate(v, axis), lambda a: np.concatenate(a, axis)
            )

    def _combine(self, text, lazily, eagerly) -> None:
        if math.prod(self.shape) * len(self.pairs) > 4000:
            return
        self.trace.append(f"{text} of {len(self.pairs)}")
        results = [(lazily([view for view, _ in self.pairs]), eagerly([array for _, array in self.pairs]))]
        if self.draw(st.booleans()):
            self.linear = False
            results.append(
                (lazily([view for view, _ in self.pairs[::-1]]), eagerly([array for _, array in self.pairs[::-1]]))
            )
        self.pairs = results

    def repeat(self) -> None:
        if len(self.shape) < 5 and math.prod(self.shape) < 2000:
            axis = self.draw(st.integers(-len(self.shape) - 1, len(self.shape)))
            times = self.draw(st.integers(1, 3))
            self.repeated = True
            at = axis % (len(self.shape) + 1)
            self.each(
                f"repeat {times} on {axis}",
                lambda v: lazy.repeat(v, times, axis),
                lambda a: np.repeat(np.expand_dims(a, at), times, at),
            )

    def broadcast(self) -> None:
        if len(self.shape) < 5 and math.prod(self.shape) < 1000:
            self.repeated = True
            shape = (
                *self.draw(st.lists(st.integers(1, 3), max_size=1)),
                *(3 if size == 1 else size for size in self.shape),
            )
            self.each(f"broadcast {shape}", lambda v: lazy.broadcast_to(v, shape), lambda a: np.broadcast_to(a, shape))

    def equal(self) -> None:
        self.linear = False
        self.each("equal", lambda v: several.all_equal([v, v]), lambda a: a)

    def pad(self) -> None:
        widths = [self.draw(st.sampled_from([0, 0, 1, 3])) for _ in self.shape]
        shape = tuple(size + width for size, width in zip(self.shape, widths, strict=True))
        if math.prod(shape) > 2000:
            return
        self.trace.append(f"pad {shape}")
        for at, (view, array) in enumerate(self.pairs):
            filler = ArrayLeaf(np.ones(shape, array.dtype), f"filler{len(self.leaves)}")
            self.leaves.append(filler)
            self.pairs[at] = (several.pad(view, filler, "ones"), _padded(array, filler.array))

    def cast(self) -> None:
        dtype = self.draw(st.sampled_from(DTYPES))
        source = self.pairs[0][1].dtype
        if _has_cast(source, dtype) and not (source.kind == "c" and dtype.kind not in "cb"):
            with np.errstate(all="ignore"):
                self.each(f"cast {dtype}", lambda a: a.astype(dtype))


def _program(draw, depth: int, dtypes=DTYPES, casts: bool | None = None) -> Program:
    casts = draw(st.booleans()) if casts is None else casts
    program = Program(draw, draw(st.sampled_from(dtypes)), casts)
    for _ in range(depth):
        program.step()
    return program


def _run(view: lazy.View, box: lazy.Box, out: np.ndarray) -> None:
    lazy.read_views([(view, box, out)])


@contextlib.contextmanager
def _gap(size: int):
    """Small shapes reach the branches for large rows only if rows count as large early."""
    with mock.patch.object(_boxes, "GAP_BYTES", size):
        yield


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_composition_any_box_any_buffer_equals_numpy(data):
    program = _program(data.draw, data.draw(st.integers(6, 9)))
    view, expected = data.draw(st.sampled_from(program.pairs))
    box = data.draw(boxes(expected.shape))
    assert (view.shape, view.dtype) == (expected.shape, expected.dtype), program.trace
    buffer = GuardedBuffer(data.draw, lazy.box_shape(box), view.dtype)
    with _gap(data.draw(st.sampled_from([1, 4, 16, 64, 4096]))):
        wanted = {id(leaf): np.zeros(leaf.shape, np.int64) for leaf in program.leaves}
        for leaf, part in view.requests(box):
            wanted[id(leaf)][lazy.box_slices(part)] += 1
        _run(view, box, buffer.array)
    assert buffer.array.tobytes() == expected[lazy.box_slices(box)].tobytes(), (program.trace, view, box)
    assert buffer.guards_hold(), (program.trace, view, box)
    for leaf in program.leaves:
        np.testing.assert_array_equal(leaf.counts > 0, wanted[id(leaf)] > 0, err_msg=f"{program.trace} {view} {box}")
        assert len(leaf.calls) <= 1, "every leaf is asked once for all that is wanted of it"
        if program.linear:
            assert leaf.counts.max(initial=0) <= 1, (program.trace, view, box)
            assert wanted[id(leaf)].max(initial=0) <= 1, (program.trace, view, box)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_asked_for_holds_what_is_wanted_and_no_more(data):
    """Element numbers as values: NumPy itself tells which elements a box needs."""
    program = _program(data.draw, data.draw(st.integers(3, 8)), [np.dtype("int64")], casts=False)
    total = 0
    numbers = {}
    for leaf in program.leaves:
        leaf.array[...] = np.arange(total, total + leaf.array.size).reshape(leaf.shape)
        numbers[id(leaf)] = leaf.array
        total += leaf.array.size
    view, _ = data.draw(st.sampled_from(program.pairs))
    box = data.draw(boxes(view.shape))
    gap = data.draw(st.sampled_from([8, 4096]))
    with _gap(gap):
        asked = {int(number) for leaf, part in view.requests(box) for number in leaf.array[lazy.box_slices(part)].flat}
        out = np.empty(lazy.box_shape(box), view.dtype)
        _run(view, box, out)
    needed = set(out.reshape(-1).tolist())
    assert needed <= asked, (program.trace, box)
    # One element is 8 bytes: with gaps of 8 bytes counting as large, nothing else may ever be read.
    if program.exact or gap == 8:
        assert asked == needed, (program.trace, view, box)
    assert {leaf.name for leaf, _ in view.requests(box)} <= {leaf.name for leaf in view.leaves()}


def test_a_description_says_what_was_done_to_which_input():
    a, b = (lazy.as_view(np.zeros((2, 3), np.float32)) for _ in range(2))
    assert several.concatenate([a, b], 0).describe() == "concatenation of 2 on axis 0"
    assert several.concatenate([a.T, b.T], 0).describe() == "transpose (1, 0), concatenation of 2 on axis 0"
    mixed = several.concatenate([a.T, lazy.as_view(np.zeros((3, 2), np.float32))], 0).astype(np.float64)
    assert mixed.describe() == "transpose (1, 0) of input 1, concatenation of 2 on axis 0, cast float64"
    many = several.stack([a.T if place % 2 else a.reshape((3, 2)) for place in range(12)], 0)
    assert many.describe() == (
        "reshape (3, 2) of inputs 1, 3, 5, 7 and 2 more; transpose (1, 0) of inputs 2, 4, 6, 8 and 2 more, "
        "stack of 12 on axis 0"
    )


T = ot.transforms


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(5), (2, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("keys") / "item"
    tree = {
        "layers_0": {"rng": keys[0]},
        "layers_1": {"rng": keys[1]},
        "all": keys,
        "rbg": jax.random.key(1, impl="rbg"),
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


@pytest.mark.slow
def test_views_of_keys_have_the_shape_of_the_keys(saved, keys):
    with ot.open_checkpoint(saved) as opened:
        view = opened.leaves["all"]
        assert is_keys(as_keys(view)) and as_keys(view).shape == keys.shape
        assert key_data(as_keys(view)).node is view.node
        data = key_data(stack([as_keys(view)[1].T, as_keys(view)[0, ::-1]], 1))
        wanted = jnp.stack([keys[1].T, keys[0, ::-1]], 1)
        assert np.array_equal(data.get(), jax.random.key_data(wanted))
        assert np.array_equal(data[2:, :, 1:].get(), jax.random.key_data(wanted)[2:, :, 1:])
        assert as_keys(data).shape == wanted.shape


def test_arrays_that_are_no_keys_stay_as_they_are():
    view = ot.stack([np.zeros((2, 2), np.uint32)], 0)
    assert as_keys(view) is view and key_data(view) is view


# Transforms, what they make of the keys, and the name of the result.
MOVED = {
    "stack on axis 0": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 0), "layers/rng", lambda keys: keys),
    "stack on axis 1": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 1), "layers/rng", lambda keys: keys.T),
    "stack on the last": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", -1), "layers/rng", lambda keys: keys.T),
    "transpose": (T.Transpose("all"), "all", lambda keys: keys.T),
    "slice": (T.Slice("all", np.s_[..., ::-1]), "all", lambda keys: keys[..., ::-1]),
    "reshape": (T.Reshape("all", (3, 2)), "all", lambda keys: keys.reshape(3, 2)),
    "repeat on the last": (T.Repeat("all", 2, -1), "all", lambda keys: jnp.stack([keys, keys], -1)),
    "unstack on the last": (T.UnstackLayers("all", "one_{i}", -1), "one_2", lambda keys: keys[:, 2]),
    "rename": (T.Rename([("all", "other")]), "other", lambda keys: keys),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_transforms_move_keys_whole(saved, keys, name):
    transform, leaf, moved = MOVED[name]
    wanted = moved(keys)
    target = jax.eval_shape(lambda: wanted)
    for part in reversed(leaf.split("/")):
        target = {part: target}
    restored = jax.tree.leaves(ot.restore(saved, target, [transform], strict=False))[0]
    assert restored.dtype == wanted.dtype and jnp.array_equal(restored, wanted)


@pytest.mark.parametrize("name", [name for name in MOVED if name != "rename"])
def test_without_a_target_the_data_of_moved_keys_come_back(saved, keys, name):
    transform, leaf, moved = MOVED[name]
    restored = ot.restore(saved, None, [transform])
    for part in leaf.split("/"):
        restored = restored[part]
    assert np.array_equal(restored, jax.random.key_data(moved(keys)))


@pytest.mark.parametrize(
    "transform",
    [
        T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 2),
        T.Cast("all", "float32"),
        T.Pad("all", (3, None)),
        T.Slice("rbg", np.s_[:2]),
        T.Transpose("all", (2, 1, 0)),
        T.UnstackLayers("all", "one_{i}", 2),
    ],
    ids=repr,
)
def test_no_transform_reaches_into_a_key(saved, transform):
    with pytest.raises(RestorePlanError) as raised:
        ot.restore(saved, None, [transform])
    assert {problem.kind for problem in raised.value.problems} == {"shape"}

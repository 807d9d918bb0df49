"""The way back of transforms: values return to their names, whatever the chain; what has no way back says why."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import transforms as T
from orbax_t5x.trees.flat import flatten, unflatten


def run(steps, state):
    for step in steps:
        state = step(state, {})
    return state


def assert_back(steps, state, *, with_source=True):
    state = unflatten(state)
    back = T.inverse(steps, state if with_source else None)
    there = run(steps, state)
    found = flatten(run(back, there))
    assert found.keys() == flatten(state).keys()
    for name, value in flatten(state).items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)
    return back


def arrays(**shapes):
    rng = np.random.default_rng(0)
    return {name.replace("__", "/"): rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


LAYERS = {
    f"{tower}/layers_{i}/{leaf}": np.full((2, 3), 10 * i + len(leaf) + len(tower), np.float32)
    for tower, depth in (("encoder", 3), ("dec", 12))
    for i in range(depth)
    for leaf in ("w", "kernel")
}


ATTENTION = {
    f"target/encoder/layers_0/attention/{name}/kernel": np.arange(16, dtype=np.float32).reshape(4, 4)
    for name in ("query", "key", "value", "out")
}


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([T.Rename([("a", "b"), ("b", "a")])], arrays(a=(2,), b=(2,))),
        ([T.Rename([(r"x/(\w+)/(.*)", r"y/\2/\1")])], arrays(x__a__b=(2,), x__c__d=(2,))),
        ([T.Rename([(r"h\.(\d+)\.(.*)", r"h/\g<1>0/\2")])], {"h.1.w": np.ones(2), "h.12.w": np.zeros(2)}),
        (
            [T.Transpose("w"), T.Transpose("v", (1, 2, 0)), T.Transpose("u", (-1, 0))],
            arrays(w=(2, 3), v=(2, 3, 4), u=(2, 5)),
        ),
        ([T.StackLayers(r"(encoder|dec)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3", 1)], LAYERS),
        ([T.StackLayers(r"dec/layers_(\d+)/(.*)", r"dec/all/\2", 0)], LAYERS),
        ([T.UnstackLayers("(t)/all/(.*)", r"\1/block_{i}/\2", 1)], arrays(t__all__w=(2, 3), t__all__v=(4, 3))),
        ([T.UnstackLayers("(t)/all/(.*)", r"\1/block_{i:02d}/\2", 1)], arrays(t__all__w=(2, 3), t__all__v=(4, 3))),
        # Blocks of layers.
        ([T.StackLayers(r"(dec)/layers_(?P<i>\d+)/(.*)", r"\1/{i%6}/\3", 0)], LAYERS),
        ([T.UnstackLayers(r"b/(\d+)/(.*)", r"layers_{i*2+\1}/\2", 0)], arrays(b__0__w=(3, 2), b__1__w=(3, 2))),
        ([T.Split("(.*)/qkv", [r"\1/q", r"\1/k", r"\1/v"], 0, [1, 2, 3])], arrays(a__qkv=(6, 2), b__qkv=(6, 3))),
        ([T.Chain([T.Rename([("a", "b")]), T.Transpose("b")])], arrays(a=(2, 3))),
        ([T.Affine("a", 2.0, 4.0)], {"a": np.arange(6, dtype=np.float32)}),
        ([T.RepeatLayers(r"encoder/layers_(\d+)/.*", 3, how=[2, 0, 1])], LAYERS),
        ([ot.rules.t5_minimal_to_unscanned(num_heads=2, head_dim=2)], ATTENTION),
    ],
    ids=lambda value: value[0].describe()[:24] if isinstance(value, list) else "",
)
def test_values_come_back(steps, state, with_source):
    assert_back(steps, state, with_source=with_source)


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ([T.Reshape("(.*)/kernel", (-1,))], arrays(a__kernel=(2, 3), b__kernel=(4, 1), c__bias=(2,))),
        ([T.Concat(["(.*)/wi_0", "(.*)/wi_1"], r"\1/wi", 1)], arrays(a__wi_0=(2, 3), a__wi_1=(2, 5))),
        # By the text alone `b/x` would become `a/x`.
        ([T.Rename([("a/(.*)", r"b/\1")])], arrays(a__y=(2,), b__x=(2,))),
        # A pattern that is more than text and groups.
        ([T.Rename([(r"[ab]/x|a/y", "c")])], arrays(a__x=(2,), d=(2,))),
        ([T.RepeatLayers(r"encoder/layers_(\d+)/.*", 6)], LAYERS),
        # Of towers of several depths, copies of the same layers; and of blocks, by names.
        ([T.RepeatLayers(r"(?:encoder|dec)/layers_(\d+)/.*", 12)], LAYERS),
        ([T.StackLayers(r"(?:dec)/layers_(?P<i>\d+)/(.*)", r"blocks/{i%3}/\2", -1)], LAYERS),
        # Patterns that are more than text and groups, and parts of several sizes.
        ([T.UnstackLayers("(?:a|b)/w", "{i}", 0)], arrays(a__w=(2, 3), c=(1,))),
        ([T.Split("(?:a|b)/w", ["q", "k"], 1, [1, 2])], arrays(a__w=(2, 3))),
        ([T.Concat([r"(\w)/a", r"(\w)/b"], r"\1", 0)], arrays(x__a=(1, 2), x__b=(2, 2), y__a=(3, 2), y__b=(0, 2))),
        # The last view is of both layers, and none of its elements is of the other one.
        (
            [T.Chain([T.StackLayers(r"(\d)/w", "w", 1), T.UnstackLayers("w", "w{i}", 0)])],
            arrays(**{"0__w": 2, "1__w": 2}),
        ),
        (
            [T.FollowOptimizer(T.StackLayers(r"params/(\d)/(.*)", r"params/\2", 0))],
            {
                **{f"params/{i}/w": np.ones((4, 3), np.float32) for i in range(2)},
                **{f"opt_state/0/v_row/{i}/w": np.full(3, i, np.float32) for i in range(2)},
                **{f"opt_state/0/v_col/{i}/w": np.full(4, i, np.float32) for i in range(2)},
                **{f"opt_state/0/v/{i}/w": np.zeros(1, np.float32) for i in range(2)},
            },
        ),
        # The text of the stacks would match all other names, too.
        ([T.StackLayers(r"(dec)/layers_(\d+)/(.*)", r"\3", 1)], {**LAYERS, "norm": np.ones(2)}),
        ([T.FollowOptimizer(T.Rename([("params/a/(.*)", r"params/b/\1")]))], arrays(params__a__w=(2,))),
    ],
    ids=lambda value: value[0].describe()[:24] if isinstance(value, list) else "",
)
def test_values_come_back_with_the_source(steps, state):
    assert_back(steps, state)


@pytest.mark.parametrize("source", [None, {"old": {"a": np.ones(2)}}])
def test_an_assignment_map_goes_back(source):
    back = T.AssignmentMap([(r"new/(.*)/w", r"old/\1")]).inverse(source)
    assert back({"new": {"a": {"w": 1}}}, {"old": {"a": ...}}) == {"old": {"a": 1}}
    with pytest.raises(ValueError, match="leaves target leaves out"):
        T.AssignmentMap([("new", None)]).inverse()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (T.Drop("x"), "has no way back"),
        (T.Pad("x", (4,)), "has no way back"),
        (T.Cast("x", "bfloat16"), "has no way back"),
        (T.Rename([("a/.*", None)]), "takes leaves out"),
        (T.Rename([(r"(a)/(.*)", r"\1")]), "group 2 is not in the new names"),
        (T.Rename([(r"a|b", "c")]), "more than text and groups"),
        (T.Rename([(r"(?:a)+/(.*)", r"\1")]), "more than text and groups"),
        (T.Rename([(r"((a)b)", r"\1")]), "groups inside groups"),
        (T.Reshape("x", (2,)), "needs the old shapes"),
        (T.Concat(["a", "b"], "c", 0), "needs the old shapes"),
        (T.Affine("x", 0.0), "a scale of 0"),
        (T.Split(r"(\w)/(\w)", [r"\1/\2/a", r"\2/\1/b/\1"], 0), "in different orders"),
        (lambda state, target: state, "is a function"),
        (ot.rules.mesh_tf_to_t5x(), "no inverse"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_has_no_way_back_says_why(step, reason):
    with pytest.raises(ValueError, match=reason):
        T.inverse([step])


def test_the_way_back_of_an_assignment_map_in_a_chain():
    """The rules are followed without a target, also where they are parts of another transform."""
    chain = T.Chain([T.AssignmentMap([(r"params/new/(.*)", r"params/old/\1")]), T.Transpose("params/new/w")])
    source = arrays(params__old__w=(2, 3), opt_state__0__mu__old__w=(2, 3), opt_state__0__nu__old__w=(2, 3))
    wanted = unflatten({name.replace("old", "new"): ... for name in source})
    for step in (chain, T.FollowOptimizer(chain)):
        (back,) = T.inverse([step], source)
        found = flatten(back(step(unflatten(source), wanted), unflatten(source)))
        assert found.keys() == source.keys() and np.array_equal(found["params/old/w"], source["params/old/w"])


def test_a_name_that_two_leaves_would_have_is_no_way_back():
    with pytest.raises(ValueError, match="both"):
        T.inverse([T.Rename([("a", "b")])], arrays(a=(2,), b=(2,)))


NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map("/".join)


@st.composite
def renamings(draw):
    """Rules over short names; most are no renaming of what exists, and some join leaves."""
    parts = [("(.*)", r"\1"), (r"a/(.*)", r"c/d/\1"), ("b", "a"), ("a", "b"), (r"(\w)/(\w)", r"\2/\1"), ("c.*", "d")]
    return T.Rename(draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3)), require_match=False)


@hypothesis.given(st.sets(NAMES, min_size=1, max_size=6), st.lists(renamings(), min_size=1, max_size=3))
def test_a_renaming_has_a_way_back_or_says_why(names, steps):
    """Numbers tell leaves apart, so that a way back that exchanges two is seen."""
    state = {name: np.full((), number) for number, name in enumerate(sorted(names))}
    if any(other.startswith(f"{name}/") for name in names for other in names):
        hypothesis.reject()
    try:
        run(steps, unflatten(state))
    except ot.RestorePlanError:
        hypothesis.reject()
    try:
        back = T.inverse(steps, unflatten(state))
    except ValueError:
        hypothesis.reject()  # leaves were taken out
    found = flatten(run(back, run(steps, unflatten(state))))
    assert {name: int(np.asarray(value)) for name, value in found.items()} == {
        name: int(value) for name, value in state.items()
    }


def test_dataclasses_are_not_changed():
    step = T.Rename([("a", "b")])
    before = dataclasses.astuple(step)
    step.inverse()
    assert dataclasses.astuple(step) == before


@pytest.mark.slow
def test_a_way_back_leaves_the_public_function_in_place():
    code = "import orbax_t5x as ot; ot.transforms.Rename([('a', 'b')]).inverse(); ot.transforms.inverse([])"
    subprocess.run([sys.executable, "-c", code], check=True)

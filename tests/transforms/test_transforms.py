"""Each transform equals its oracle and obeys the shared suite; what is wrong becomes a problem that says how to
mend it."""

import dataclasses
import re
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.lazy import ValueLeaf, as_view
from orbax_t5x.testing.transform_suite import Case, TransformSuite, assert_same, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import NameClashError, flatten, unflatten
from tests.support import transform_oracle as oracle


def arrays(**shapes):
    """Arrays of distinct numbers by name; `__` stands for '/'."""
    result = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        result[name.replace("__", "/")] = (np.arange(np.prod(shape)) + 100 * seed).reshape(shape).astype(np.float32)
    return result


AB = arrays(a=(2,), b=(2,), c=(2,))
LAYERS = arrays(
    enc__layers_0__w=(2, 3),
    enc__layers_1__w=(2, 3),
    enc__layers_2__w=(2, 3),
    dec__layers_0__w=(2, 3),
    dec__layers_1__w=(2, 3),
    enc__layers_0__b=(3,),
    enc__layers_1__b=(3,),
    enc__layers_2__b=(3,),
    norm=(3,),
)
STACK = (r"(enc|dec)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3", 1)
STACKED = arrays(enc__layers__w=(2, 4, 3), dec__layers__w=(2, 2, 3), norm=(3,))
TWO = arrays(x__w=(2, 3), x__b=(2,), y__w=(2, 3), y__b=(2,), z__w=(1,))
MERGED = {"n": np.ones(2, np.float32), "a": np.zeros(2, np.float32)}
ADAPTED = arrays(
    x__kernel=(3, 5),
    x__a=(3, 2),
    x__b=(2, 5),
    y__kernel=(4, 2, 3),
    y__a=(4, 1),
    y__b=(1, 2, 3),
    z__kernel=(2, 2),
    n=(2,),
)
FOLLOWED = {
    **{f"target/{n}": v for n, v in arrays(a=(2, 3), b=(3,)).items()},
    **{f"state/param_states/0/mu/{n}": v + 1000 for n, v in arrays(a=(2, 3), b=(3,)).items()},
    "state/param_states/1/a": None,
    "state/step": np.asarray(3, np.int32),
}


def rules_case(transform, other, source, expected, target=None):
    return Case(lambda: transform, lambda: other, source, expected, target or {})


class TestSuite(TransformSuite):
    """The shared suite."""

    cases: ClassVar = {
        "assignment_map": Case(
            lambda: tr.AssignmentMap([("a", "b"), (re.compile("b"), "a"), ("n/(.)", r"\1"), ("x", None)]),
            lambda: tr.AssignmentMap([("a", "b"), (re.compile("b"), "a"), ("n/(.)", r"\1"), ("x", None)], False),
            {**AB, "x": AB["a"]},
            oracle.assignment_map(
                {**AB, "x": AB["a"]},
                dict.fromkeys(("a", "b", "n/b", "x")),
                [("a", "b"), ("b", "a"), ("n/(.)", r"\1"), ("x", None)],
            ),
            dict.fromkeys(("a", "b", "n/b", "x")),
        ),
        "intersect": Case(
            tr.Intersect, lambda: tr.Drop("a"), AB, oracle.intersect(AB, {"a": 0, "q": 0}), {"a": 0, "q": 0}
        ),
        "merge": Case(lambda: tr.Merge(MERGED), lambda: tr.Merge({**MERGED, "more": 1}), AB, oracle.merge(AB, MERGED)),
        "merge_overwrite": Case(
            lambda: tr.Merge({"n": MERGED["n"].copy(), "a": MERGED["a"].copy()}, overwrite=True),
            lambda: tr.Merge({"n": MERGED["n"][:1]}, overwrite=True),
            AB,
            oracle.merge(AB, MERGED, overwrite=True),
        ),
        "rename": Case(
            lambda: tr.Rename([("a", "b"), ("b", "d/a"), ("(c)", None)]),
            lambda: tr.Rename([("a", "b"), ("b", "d/a")]),
            AB,
            oracle.rename(AB, [("a", "b"), ("b", "d/a"), ("(c)", None)]),
        ),
        "drop": Case(lambda: tr.Drop(["a", "[c]"]), lambda: tr.Drop("a"), AB, oracle.drop(AB, ["a", "[c]"])),
        "keep": Case(lambda: tr.Keep(["a", "[c]"]), lambda: tr.Keep("a"), AB, oracle.keep(AB, ["a", "[c]"])),
        "stack_layers": Case(
            lambda: tr.StackLayers(*STACK),
            lambda: tr.StackLayers(*STACK[:2], 0),
            LAYERS,
            oracle.stack_layers(LAYERS, *STACK),
        ),
        "unstack_layers": Case(
            lambda: tr.UnstackLayers(r"(.*)/layers/(.*)", r"\1/layers_{i}/\2", 1),
            lambda: tr.UnstackLayers(r"(.*)/layers/(.*)", r"\1/layers_{i:02d}/\2", 1),
            STACKED,
            oracle.unstack_layers(STACKED, r"(.*)/layers/(.*)", r"\1/layers_{i}/\2", 1),
        ),
        "split": Case(
            lambda: tr.Split(r"(.*)/w", [r"\1/q", r"\1/k"], 1, [1, 2]),
            lambda: tr.Split(r"(.*)/w", [r"\1/q", r"\1/k"], 1, [2, 1]),
            {name: value for name, value in TWO.items() if name != "z/w"},
            oracle.split({n: v for n, v in TWO.items() if n != "z/w"}, r"(.*)/w", [r"\1/q", r"\1/k"], 1, [1, 2]),
        ),
        "concat": Case(
            lambda: tr.Concat(["(x)/w", "(y)/w"], "w", -1),
            lambda: tr.Concat(["(y)/w", "(x)/w"], "w", -1),
            TWO,
            oracle.concat(TWO, ["(x)/w", "(y)/w"], "w", -1),
        ),
        "reshape": Case(
            lambda: tr.Reshape("[xy]/w", (3, -1)),
            lambda: tr.Reshape("[xy]/w", (-1,)),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value.reshape(3, -1)),
        ),
        "transpose": Case(
            lambda: tr.Transpose("./w"),
            lambda: tr.Transpose("./w", (1, 0)),
            TWO,
            oracle.each(TWO, "./w", np.transpose),
        ),
        "cast": Case(
            lambda: tr.Cast(".*", "bfloat16"),
            lambda: tr.Cast(".*", np.float16),
            TWO,
            oracle.each(TWO, ".*", lambda value: value.astype(ml_dtypes.bfloat16)),
        ),
        "repeat": Case(
            lambda: tr.Repeat("./w", 3, -1),
            lambda: tr.Repeat("./w", 2, -1),
            TWO,
            oracle.each(TWO, "./w", lambda value: np.repeat(np.expand_dims(value, -1), 3, -1)),
        ),
        "pad": Case(
            lambda: tr.Pad("[xy]/w", (None, 5), 2.5),
            lambda: tr.Pad("[xy]/w", (None, 5)),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: oracle.padded(value, (None, 5), 2.5)),
        ),
        "pad_everywhere": Case(
            lambda: tr.Pad("./w", [4, 6]),
            lambda: tr.Pad("./w", [4, 6], tr.FALLBACK),
            {"x/w": TWO["x/w"]},
            oracle.each({"x/w": TWO["x/w"]}, "./w", lambda value: oracle.padded(value, (4, 6), 0)),
        ),
        "slice": Case(
            lambda: tr.Slice("[xy]/w", np.s_[:1, ..., None, ::-2]),
            lambda: tr.Slice("[xy]/w", np.s_[:1, ..., None, ::-1]),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value[:1, ..., None, ::-2]),
        ),
        "slice_of_rows": Case(
            lambda: tr.Slice("[xy]/w", slice(1, None)),
            lambda: tr.Slice("[xy]/w", 1),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value[1:]),
        ),
        "add_low_rank": Case(
            lambda: tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 0.5),
            lambda: tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 0.25),
            ADAPTED,
            oracle.add_low_rank(ADAPTED, "(.)/kernel", r"\1/a", r"\1/b", 0.5),
        ),
        "average": Case(
            lambda: tr.Average({"x": 1, "y": 3}),
            lambda: tr.Average({"x": 1, "y": 2}),
            TWO,
            oracle.average(TWO, {"x": 1, "y": 3}),
        ),
        "overlay": Case(
            lambda: tr.Overlay(("z", "x", "y")),
            lambda: tr.Overlay(("x", "z", "y")),
            TWO,
            oracle.overlay(TWO, ("z", "x", "y")),
        ),
        "chain": Case(
            lambda: tr.Chain([tr.Drop("c"), tr.Rename([("a", "z")])]),
            lambda: tr.Chain([tr.Rename([("a", "z")]), tr.Drop("c")]),
            AB,
            {"z": AB["a"], "b": AB["b"]},
        ),
        "follow_optimizer": Case(
            lambda: tr.FollowOptimizer(tr.Chain([tr.Rename([("target/a", "target/n")]), tr.Transpose("target/n")])),
            lambda: tr.FollowOptimizer(tr.Rename([("target/a", "target/n")])),
            FOLLOWED,
            {
                "target/n": FOLLOWED["target/a"].T,
                "target/b": FOLLOWED["target/b"],
                "state/param_states/0/mu/n": FOLLOWED["state/param_states/0/mu/a"].T,
                "state/param_states/0/mu/b": FOLLOWED["state/param_states/0/mu/b"],
                "state/param_states/1/n": None,
                "state/step": FOLLOWED["state/step"],
            },
        ),
    }


def problems(transform, source, target=None):
    return run(transform, source, target)[1].problems


def only_problem(transform, source, target=None):
    (problem,) = problems(transform, source, target)
    with pytest.raises(RestorePlanError) as caught:
        transform(unflatten(source), unflatten(target or {}))
    assert caught.value.problems == (problem,)
    return problem


# -- names


def test_assignment_maps_swap_rotate_and_share():
    target = dict.fromkeys(("a", "b", "c"))
    swapped, _ = run(tr.AssignmentMap([("a", "b"), ("b", "a")]), AB, target)
    assert_same(swapped, {"a": AB["b"], "b": AB["a"], "c": AB["c"]})
    rotated, _ = run(tr.AssignmentMap([("a", "b"), ("b", "c"), ("c", "a")]), AB, target)
    assert_same(rotated, {"a": AB["b"], "b": AB["c"], "c": AB["a"]})


def test_in_a_restore_a_rule_wins_over_a_leaf_that_nothing_takes():
    """T5X keeps the checkpoint's `a` and the rule does nothing; the answer by hand stays T5X's."""
    transform, target = tr.AssignmentMap([("a", "b")]), dict.fromkeys(("a", "b"))
    result, _ = run(transform, AB, target)
    assert_same(result, {"a": AB["b"], "b": AB["b"], "c": AB["c"]})
    assert_same(transform(AB, target), AB)


def test_a_missing_name_lists_what_there_is_and_the_rule_that_would_mend_it():
    source = {"decoder/layers_0/query/kernel": AB["a"], "decoder/layers_1/query/kernel": AB["b"]}
    transform = tr.AssignmentMap([("n", "decoder/layer_0/query/kernel")])
    (problem,) = problems(transform, source, {"n": 0})
    assert (problem.kind, problem.leaf) == ("missing", "n")
    assert "does not exist in restore checkpoint; closest: decoder/layers_0/query/kernel" in problem.message
    assert "('n', 'decoder/layers_0/query/kernel')" in str(problem.fix)
    with pytest.raises(RestorePlanError) as caught:
        transform(source, {"n": 0})
    (problem,) = caught.value.problems
    assert "does not exist in restore checkpoint. Must be one of: ['decoder/layers_0/" in problem.message


def test_unused_patterns_have_t5x_text_and_the_closest_names():
    problem = only_problem(tr.AssignmentMap([("encodr/w", "a")]), AB, {"encoder/w": 0})
    assert problem.kind == "unused_rule"
    assert "Unused patterns in `assignment_map`: {'encodr/w'}" in problem.message
    assert "encoder/w" in str(problem.fix)


def test_a_name_with_an_empty_part_is_a_problem():
    for transform in (
        tr.Rename([("a", "")]),
        tr.Rename([("a", "x//y")]),
        tr.Rename([("a", "x/")]),
        tr.Concat(["a", "b"], "/x", 0),
        tr.Split("a", ["x", ""], 0),
        tr.UnstackLayers("a", "x//{i}", 0),
        tr.StackLayers("(?P<i>[0])|a", "x//y", 0),
    ):
        source = {"0": AB["a"]} if isinstance(transform, tr.StackLayers) else AB
        assert [(problem.kind, problem.leaf) for problem in problems(transform, source)][:1] == [
            ("rule", next(iter(source)))
        ]
    kept, diagnostics = run(tr.Rename([("(.*)//(.*)", r"\2//\1")]), {"a//b": AB["a"]})
    assert list(kept) == ["b//a"] and not diagnostics.problems


def test_shadowed_and_repeated_rules_are_warnings():
    rules = [("a|b", "z/\\g<0>"), ("a", "x"), ("a|b", "y")]
    result, diagnostics = run(tr.Rename(rules), AB)
    assert sorted(result) == ["c", "z/a", "z/b"] and not diagnostics.problems
    assert [("shadowed" in text, "given twice" in text) for text in diagnostics.warnings] == [
        (True, False),
        (False, True),
    ]


def test_bad_groups_are_problems_that_name_the_rule():
    for transform, target in (
        (tr.AssignmentMap([("a", r"\1")]), {"a": 0}),
        (tr.Rename([("a", r"\1")]), {}),
        (tr.Rename([("(a)", r"\2")]), {}),
        (tr.Rename([("a", r"\g<name>")]), {}),
        (tr.Concat(["a", "b"], r"\1", 0), {}),
        (tr.Split("a", [r"\1", "x"], 0), {}),
        (tr.UnstackLayers("a", r"\1{i}", 0), {}),
    ):
        found = problems(transform, AB, target)
        assert found and {problem.kind for problem in found} <= {"rule", "missing"}, transform
        assert (found[0].kind == "rule" and "'a'" in found[0].message) or "'(a)'" in found[0].message


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.AssignmentMap([("(", "x")]),
        lambda: tr.Rename([("[", "x")]),
        lambda: tr.Drop("*"),
        lambda: tr.StackLayers("(", "x", 0),
        lambda: tr.Average({"a": 1}, pattern="("),
        lambda: tr.Rename(["ab"]),
        lambda: tr.StackLayers("no group", "x", 0),
        lambda: tr.StackLayers(r"l(\d+)/m(\d+)", "x", 0),
        lambda: tr.StackLayers(r"l(\d+)", r"\1", 0),
        lambda: tr.UnstackLayers("a", "b", 0),
        lambda: tr.Split("a", [], 0),
        lambda: tr.Split("a", "bc", 0),
        lambda: tr.Split("a", ["b"], 0, [1, 2]),
        lambda: tr.Repeat("a", -1, 0),
        lambda: tr.Slice("a", np.s_[::0]),
        lambda: tr.Pad("(", (1,)),
        lambda: tr.AddLowRank("(", "a", "b", 1),
        lambda: tr.Average({"a": 1.0, "b": -1.0}),
        lambda: tr.Average({}),
        lambda: tr.FollowOptimizer(tr.Drop("a"), factors=[("a", ("ROW", "ROW"))]),
    ],
)
def test_what_can_never_work_is_an_error_at_once(make):
    with pytest.raises(ValueError, match=r"\w"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.Rename([(b"a", "x")]),
        lambda: tr.Rename([("a", 1)]),
        lambda: tr.Drop([1]),
        lambda: tr.Cast("a", "no dtype"),
        lambda: tr.Repeat("a", 1.5, 0),
        lambda: tr.Pad("a", (1.5,)),
        lambda: tr.Pad("a", (1,), "zero"),
        lambda: tr.Pad("a", (1,), np.zeros(3)),
        lambda: tr.Slice("a", [1, 2]),
        lambda: tr.Slice("a", True),
        lambda: tr.Slice("a", (1.5,)),
        lambda: tr.Slice("a", ((1, 2),)),
        lambda: tr.AddLowRank("a", "b", None, 1),
        lambda: tr.Overlay("ab"),
    ],
)
def test_wrong_types_are_type_errors(make):
    with pytest.raises(TypeError):
        make()


def test_renames_that_collide_lose_nothing_silently():
    problem = only_problem(tr.Rename([("a", "b")]), AB)
    assert problem.kind == "duplicate" and "'a'" in problem.message and "'b'" in problem.message


@pytest.mark.parametrize(
    "transform",
    [
        tr.Rename([("q", "r")]),
        tr.Drop("q"),
        tr.Keep(["q"]),
        tr.StackLayers(r"q(\d)", "r", 0),
        tr.UnstackLayers("q", "r{i}", 0),
        tr.Split("q", ["r", "s"], 0),
        tr.Concat(["q"], "r", 0),
        tr.Reshape("q", (1,)),
        tr.Transpose("q"),
        tr.Cast("q", "float32"),
        tr.Repeat("q", 2, 0),
        tr.Pad("q", (3,)),
        tr.Slice("q", 0),
        tr.AddLowRank("q", "a", "b", 1),
        tr.Average({"x": 1, "y": 1}, pattern="q"),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_a_pattern_that_matches_nothing_is_a_problem(transform):
    problem = only_problem(transform, TWO)
    assert problem.kind == "unused_rule" and "'q" in problem.message
    if hasattr(transform, "require_match"):
        allowed = dataclasses.replace(transform, require_match=False)
        result, diagnostics = run(allowed, TWO)
        assert diagnostics.problems == [] and len(diagnostics.warnings) == 1
        if not isinstance(transform, tr.Keep):
            assert_same(result, TWO)


def test_merge_refuses_a_leaf_below_a_leaf():
    problem = only_problem(tr.Merge({"a": {"b": 2}}), AB)
    assert problem.kind == "duplicate" and "'a'" in problem.message and "'a/b'" in problem.message


def test_merge_is_equal_by_numbers_and_keeps_the_callers_arrays():
    array = np.arange(3.0)
    transform = tr.Merge({"x": array})
    assert transform == tr.Merge({"x": array.copy()}) and transform != tr.Merge({"x": array + 1})
    assert transform != tr.Merge({"x": array.astype(np.float32)})
    assert transform({}, {})["x"] is array
    lazy = as_view(array)
    assert tr.Merge({"x": lazy}) == tr.Merge({"x": lazy}) and tr.Merge({"x": lazy}) != tr.Merge({"x": as_view(array)})


# -- layers


def test_towers_may_differ_in_depth_but_layers_may_not_be_missing():
    problem = only_problem(tr.StackLayers(*STACK), {n: v for n, v in LAYERS.items() if n != "enc/layers_1/b"})
    assert (problem.kind, problem.leaf) == ("missing", "enc/layers/b") and "layer 1 of 3" in problem.message
    # The last layer of one leaf only: no gap in its own numbers, but one in the tower.
    problem = only_problem(tr.StackLayers(*STACK), {n: v for n, v in LAYERS.items() if n != "enc/layers_2/b"})
    assert (problem.kind, problem.leaf) == ("missing", "enc/layers/b") and "layer 2 of 3" in problem.message
    no_first = {n: v for n, v in LAYERS.items() if "enc/layers_0" not in n}
    assert {p.leaf for p in problems(tr.StackLayers(*STACK), no_first)} == {"enc/layers/w", "enc/layers/b"}


def test_the_layer_group_is_named_or_the_only_digits():
    for pattern, into in (
        (r"(enc|dec)/layers_(\d+)/(.*)", r"\1/layers/\3"),
        (r"(enc|dec)/layers_([0-9]+)/(.*)", r"\1/layers/\3"),
        (r"(enc|dec)/layers_([^/]*)/(.*)", r"\1/layers/\3"),  # told by the names
        (r"(enc|dec)/layers_((?P<i>\d+))/(.*)", r"\1/layers/\4"),
    ):
        result, diagnostics = run(tr.StackLayers(pattern, into, 1), LAYERS)
        assert diagnostics.problems == []
        assert_same(result, oracle.stack_layers(LAYERS, *STACK))
    digits_elsewhere = {"0/1": AB["a"], "1/1": AB["b"]}
    (problem,) = problems(tr.StackLayers(r"(.*)/(.*)", r"x/\2", 0), digits_elsewhere)
    assert problem.kind == "rule" and "?P<i>" in str(problem.fix)
    result, _ = run(tr.StackLayers(r"(\d+)/(.*)", r"x/\2", 0), digits_elsewhere)
    assert_same(result, {"x/1": np.stack([AB["a"], AB["b"]])})


def test_layers_of_one_number_or_of_two_shapes_are_problems():
    (problem,) = problems(tr.StackLayers(r"l(\d+)", "l", 0), {"l0": AB["a"], "l00": AB["b"]})
    assert problem.kind == "duplicate"
    (problem,) = problems(tr.StackLayers(r"l(\d+)", "l", 0), {"l0": AB["a"], "l1": AB["b"][:1]})
    assert problem.kind == "shape" and "(1,)" in problem.message
    (problem,) = problems(tr.StackLayers(r"l(\d+)", "l", 5), {"l0": AB["a"], "l1": AB["b"]})
    assert problem.kind == "shape"


def test_stacking_nones_gives_none():
    result, diagnostics = run(tr.StackLayers(r"l(\d+)", "l", 0), {"l0": None, "l1": None})
    assert result == {"l": None} and not diagnostics.problems
    assert problems(tr.StackLayers(r"l(\d+)", "l", 0), {"l0": None, "l1": AB["a"]})


def test_unstacked_numbers_may_be_padded_and_are_no_group_references():
    source = {"a1": np.arange(12.0).reshape(12)}
    result, _ = run(tr.UnstackLayers(r"(a)1", r"\1{i}/{i:03d}", 0), source)
    assert list(result)[:2] == ["a0/000", "a1/001"] and len(result) == 12


# -- arrays


def test_shapes_that_do_not_fit_are_problems_and_the_rest_goes_on():
    for transform in (
        tr.Reshape("a", (3,)),
        tr.Transpose("a", (1, 0)),
        tr.Repeat("a", 2, 4),
        tr.Pad("a", (1,)),
        tr.Pad("a", (3, 3)),
        tr.Slice("a", 2),
        tr.Slice("a", (0, 0)),
        tr.AddLowRank("a", "b", "c", 1),
        tr.Split("a", ["x", "y", "z"], 0),
        tr.Split("a", ["x", "y"], 0, [1, 2]),
        tr.Split("a", ["x", "y"], 1),
        tr.UnstackLayers("a", "a{i}", 1),
        tr.Concat(["a", "b"], "x", 1),
    ):
        problem = only_problem(transform, AB)
        assert problem.kind == "shape" and problem.message, transform


def test_concat_names_the_missing_part():
    found = problems(tr.Concat(["(.)/w", "(.)/b"], r"\1/wb", 0), {"x/w": AB["a"], "x/b": AB["b"], "y/w": AB["c"]})
    assert [(p.kind, p.leaf) for p in found] == [("missing", "y/wb")] and "(.)/b" in found[0].message


def test_none_leaves_and_strings_pass_through_what_cannot_compute_them():
    result, diagnostics = run(tr.Cast(".*", "float32"), {"n": None, "x": AB["a"]})
    assert result["n"] is None and not diagnostics.problems
    strings = {"s": as_view(ValueLeaf(np.array([b"x"], object), "s"))}
    assert [p.kind for p in problems(tr.Cast(".*", "float32"), strings)] == ["shape"]


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


def test_a_kernel_with_one_factor_alone_is_a_problem_and_one_without_stays():
    source = {name: value for name, value in ADAPTED.items() if name != "y/b"}
    problem = only_problem(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), source)
    assert (problem.kind, problem.leaf) == ("missing", "y/kernel") and "'y/b'" in problem.message
    alone = {"x/kernel": ADAPTED["x/kernel"]}
    problem = only_problem(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), alone)
    assert problem.kind == "unused_rule" and "'x/a'" in problem.message
    assert run(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1, require_match=False), alone)[1].problems == []
    integers = {name: value.astype(np.int32) for name, value in ADAPTED.items()}
    assert {p.kind for p in problems(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), integers)} == {"dtype"}


def test_elements_of_the_fallback_are_known_in_a_restore_alone():
    leaf = tr.Pad("a", (5,), tr.FALLBACK)(AB, {})["a"]
    assert np.array_equal(leaf[:2].get(), AB["a"])
    with pytest.raises(ValueError, match=r"in a restore alone .*fallback="):
        leaf.get()


# -- sources


def test_average_reads_each_source_once_and_says_what_it_rounds():
    source = {
        "x/f": np.float32([1, 2]),
        "y/f": np.float32([3, 5]),
        "x/n": np.int32(10),
        "y/n": np.int32(13),
        "x/flag": np.array([True]),
        "y/flag": np.array([True]),
        "x/only": np.float32(1),
        "q": np.float32(7),
    }
    result, diagnostics = run(tr.Average([0.5, 0.5], pattern=r"(./)?(f|n|flag)"), source)
    assert_same(
        result,
        {
            "f": np.float32([2, 3.5]),
            "n": np.int32(12),
            "flag": np.array([True]),
            "x/only": source["x/only"],
            "q": source["q"],
        },
    )
    assert len(diagnostics.warnings) == 1 and "'n'" in diagnostics.warnings[0] and "rounded" in diagnostics.warnings[0]
    assert [(p.kind, p.leaf) for p in problems(tr.Average([1, 1]), source)] == [("missing", "only")]


def test_averages_of_integers_stay_in_their_range_or_are_problems():
    for dtype in (np.int8, np.uint16, ml_dtypes.int4, ml_dtypes.uint2):
        source = {"x/n": np.array([1, 0], dtype), "y/n": np.array([0, 1], dtype)}
        (problem,) = problems(tr.Average({"x": 2, "y": -1}), source)
        assert (problem.kind, problem.leaf) == ("dtype", "n") and np.dtype(dtype).name in problem.message
        assert problems(tr.Average({"x": -2, "y": 1}), source)
        _, diagnostics = run(tr.Average({"x": 2, "y": 1}), source)
        assert "rounded" in diagnostics.warnings[0] and not diagnostics.problems
        # Weights are divided by their sum: two negative ones are two positive ones.
        assert not problems(tr.Average({"x": -2, "y": -1}), source)
    floats = {"x/f": np.float32([1, 0]), "y/f": np.float32([0, 1])}
    assert_same(run(tr.Average({"x": 2, "y": -1}), floats)[0], {"f": np.float32([2, -1])})


def test_prng_keys_have_no_average():
    class Key(ValueLeaf):
        prng_impl = "threefry2x32"

    source = {f"{name}/key": as_view(Key(np.uint32([1, 2]), "key")) for name in "xy"}
    (problem,) = problems(tr.Average([1, 1]), source)
    assert (problem.kind, problem.leaf) == ("dtype", "key")
    typed = {f"{name}/key": jax.random.key(1) for name in "xy"}
    assert {problem.leaf for problem in problems(tr.Average([1, 1]), typed)} == {"x/key", "y/key"}


def test_average_weights_by_name_or_in_order():
    by_name, _ = run(tr.Average({"y": 3, "x": 1}, pattern="./[wb]"), TWO)
    in_order, _ = run(tr.Average((1, 3), pattern="./[wb]"), {n: v for n, v in TWO.items() if n != "z/w"})
    assert_same({n: by_name[n] for n in "wb"}, in_order)
    assert problems(tr.Average((1, 3)), TWO)[0].kind == "rule"
    assert problems(tr.Average({"x": 1, "nope": 3}), TWO)[0].kind == "missing"


def test_overlay_prefers_the_first_source():
    result, _ = run(tr.Overlay(("y", "x")), TWO)
    assert_same(result, {"w": TWO["y/w"], "b": TWO["y/b"], "z/w": TWO["z/w"]})
    assert problems(tr.Overlay(("y", "nope")), TWO)[0].kind == "missing"


# -- chains and plain functions


def test_plain_functions_keep_t5x_protocol():
    calls = []

    def with_keyword(state, target, *, is_resuming=False):
        calls.append(("with", is_resuming, sorted(target)))
        return state

    def without_keyword(state, target):
        calls.append(("without", None, sorted(target)))
        state["new"] = state.pop("a")
        return state

    def everything(state, target, **keywords):
        calls.append(("any", keywords["is_resuming"], sorted(target)))
        return state

    chain = (with_keyword, without_keyword, everything)
    diagnostics = Diagnostics()
    source = dict(AB)
    result = run_transforms(chain, source, {"t/u": 0}, is_resuming=False, diagnostics=diagnostics)
    assert sorted(result) == ["b", "c", "new"] and list(source) == ["a", "b", "c"]
    assert calls == [("with", False, ["t"]), ("without", None, ["t"]), ("any", False, ["t"])]
    assert "without_keyword" in diagnostics.rule_for["new"]
    calls.clear()
    result = run_transforms(chain, source, {"t/u": 0}, is_resuming=True, diagnostics=diagnostics)
    assert result == source and calls == [("with", True, ["t"]), ("any", True, ["t"])]


def test_a_function_that_fails_or_returns_no_dict_is_a_problem():
    def fails(state, target):
        error = ValueError("no such thing")
        error.add_note("make one")
        raise error

    diagnostics = Diagnostics()
    run_transforms((fails, lambda state, target: None), AB, {}, is_resuming=False, diagnostics=diagnostics)
    assert [p.kind for p in diagnostics.problems] == ["transform", "transform"]
    assert "no such thing" in diagnostics.problems[0].message and str(diagnostics.problems[0].fix) == "make one"
    assert "NoneType" in diagnostics.problems[1].message


def test_rules_are_recorded_through_a_chain():
    diagnostics = Diagnostics()
    result = run_transforms(
        (tr.Rename([("a", "b"), ("b", "a")]), lambda s, t: {k: v for k, v in s.items() if k != "c"}, tr.Drop("a")),
        AB,
        {},
        is_resuming=False,
        diagnostics=diagnostics,
    )
    assert list(result) == ["b"] and diagnostics.rule_for["b"] == "Rename 'a' -> 'b'"


def test_names_that_clash_when_nested_are_told():
    with pytest.raises(RestorePlanError, match="'a'"):
        tr.Rename([("b", "a/b")])(AB, {})
    with pytest.raises(NameClashError):
        unflatten({"a/b": 1, "a": 2})
    joined = unflatten({"a/b/c": 1, "a": 2, "a/b": 3, "a/d": 4}, join_clashes=True)
    assert flatten(joined) == {"a/b/c": 1, "a": 2, "a/b": 3, "a/d": 4}
    with pytest.raises(NameClashError):
        flatten({"a": {"b": 1}, "a/b": 2})


def test_digests_tell_rules_apart_and_not_how_they_were_written():
    assert tr.Rename([("a", "b")]).digest() == tr.Rename(((re.compile("a"), "b"),)).digest()
    assert tr.Rename([("a", "b")]).digest() != tr.Rename(((re.compile("a", re.IGNORECASE), "b"),)).digest()
    assert tr.Cast("a", np.float32).digest() == tr.Cast("a", "float32").digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() == tr.Merge({"a": np.zeros(2)}).digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() != tr.Merge({"a": np.ones(2)}).digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() != tr.Merge({"a": np.zeros(3)}).digest()


def test_public_names():
    """The transforms and their base; what runs them is imported from its own module."""
    assert set(tr.__all__) == {
        "AdafactorSlots",
        "AddLowRank",
        "AssignmentMap",
        "Average",
        "Cast",
        "Chain",
        "Concat",
        "Drop",
        "FALLBACK",
        "FollowOptimizer",
        "Intersect",
        "Keep",
        "Merge",
        "Overlay",
        "Pad",
        "Rename",
        "Repeat",
        "Reshape",
        "Slice",
        "Split",
        "StackLayers",
        "Transform",
        "Translate",
        "Transpose",
        "UnstackLayers",
    }
    assert all(issubclass(getattr(tr, name), tr.Transform) for name in tr.__all__ if not name.isupper())


@pytest.mark.parametrize("rules", ["ab", [("a", "b", "c")], ("a", "b")], ids=["text", "three", "one pair"])
@pytest.mark.parametrize("transform", [tr.Rename, tr.AssignmentMap])
def test_rules_that_are_no_pairs_say_how_to_give_them(transform, rules):
    name = transform.__name__
    with pytest.raises(ValueError, match=re.escape(f"as in {name}([('old', 'new')])")) as raised:
        transform(rules)
    assert f"{name}: a rule is a pair (pattern, replacement), not " in str(raised.value)

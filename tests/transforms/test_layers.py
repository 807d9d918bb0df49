"""`StackLayers` and `UnstackLayers`: depths of towers, layer numbers, missing layers."""

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support import transform_oracle as oracle
from tests.support.transform_cases import AB, LAYERS, STACK, only_problem, problems


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


def test_blocks_of_layers_have_index_arithmetic():
    """Layer i is place i % 3 in block i // 3."""
    layers = {f"h.{i}.w": np.full((2, 4), i) for i in range(6)}
    blocks = {f"b/l_{place}/w": np.stack([layers[f"h.{i}.w"] for i in (place, place + 3)], 1) for place in range(3)}
    result, diagnostics = run(tr.StackLayers(r"h\.(?P<i>\d+)\.(.*)", r"b/l_{i%3}/\2", 1), layers)
    assert diagnostics.problems == []
    assert_same(result, blocks)
    for into in (r"h.{i*3+\1}.\2", r"h.{i*3+\g<1>}.\2"):
        result, diagnostics = run(tr.UnstackLayers(r"b/l_(\d+)/(.*)", into, 1), blocks)
        assert diagnostics.problems == []
        assert_same(result, layers)
    assert "is no number" in only_problem(tr.UnstackLayers(r"b/(.*)/w", r"h.{i*3+\1}", 0), {"b/x/w": AB["a"]}).message


def test_a_block_has_layers():
    with pytest.raises(ValueError, match="a block of 0 layers"):
        tr.StackLayers(r"h\.(?P<i>\d+)", "b{i%0}", 0)


def test_concat_names_the_missing_part():
    found = problems(tr.Concat(["(.)/w", "(.)/b"], r"\1/wb", 0), {"x/w": AB["a"], "x/b": AB["b"], "y/w": AB["c"]})
    assert [(p.kind, p.leaf) for p in found] == [("missing", "y/wb")] and "(.)/b" in found[0].message

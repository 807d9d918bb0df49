"""Findings of a chain of transforms: problems, and the rules that made each leaf."""

import numpy as np

from orbax_t5x.lazy import several
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves, view_of


def test_rules_follow_a_leaf_through_its_names():
    diagnostics = Diagnostics()
    diagnostics.record_origins({"b": ("a", "first"), "x": ("y", "other")})
    diagnostics.record_origins({"c": ("b", "second"), "b": ("x", "swap")})
    assert diagnostics.rule_for["c"] == "first; second" and diagnostics.rule_for["b"] == "other; swap"
    assert diagnostics.origin_of["c"] == "a" and diagnostics.origin_of["b"] == "y"


def test_a_copy_goes_on_independently():
    diagnostics = Diagnostics()
    diagnostics.problem("missing", "a", "gone", becomes="b")
    copied = diagnostics.copy()
    copied.problem("missing", "c", "gone")
    assert [problem.leaf for problem in diagnostics.problems] == ["a"]
    assert diagnostics.explained == {"a", "b"} and copied.explained == {"a", "b", "c"}


def test_the_error_lists_the_problems_and_what_a_function_raised_is_its_cause():
    diagnostics = Diagnostics()
    diagnostics.problem("missing", "a", "it is gone")
    raised = KeyError("x")
    diagnostics.raised.append(raised)
    error = diagnostics.error(path="/checkpoint")
    assert error.__cause__ is raised and error.path == "/checkpoint"
    assert [problem.leaf for problem in error.problems] == ["a"] and "it is gone" in str(error)


def test_two_leaves_of_one_name_are_a_problem_and_the_first_stays():
    diagnostics = Diagnostics()
    state = NewState(diagnostics)
    state.put("x", 1, "a", "Rename")
    state.put("x", 2, "b")
    state.put("y", 3, "y")
    assert state.finish() == {"x": 1, "y": 3}
    (problem,) = diagnostics.problems
    assert (problem.kind, problem.leaf) == ("duplicate", "x") and "'a' and 'b'" in problem.message
    assert diagnostics.rule_for == {"x": "Rename"} and diagnostics.origin_of == {"x": "a"}


def test_what_is_no_array_is_a_problem_of_the_leaf_and_of_what_it_becomes():
    diagnostics = Diagnostics()
    assert view_of("a", object(), diagnostics, becomes="b") is None
    assert diagnostics.problems[0].leaf == "a" and diagnostics.explained == {"a", "b"}
    view = view_of("a", np.ones(3), diagnostics)
    assert view is not None and view.shape == (3,)


def test_a_combination_that_fails_is_a_problem_of_its_kind():
    def stack(*shapes):
        diagnostics = Diagnostics()
        leaves = [(f"layers_{i}", np.ones(shape)) for i, shape in enumerate(shapes)]
        return combine_leaves(
            leaves, several.stack, diagnostics, becomes="layers", rule="StackLayers"
        ), diagnostics.problems

    view, problems = stack((2, 3), (2, 3))
    assert view is not None and view.shape == (2, 2, 3) and problems == []
    view, (problem,) = stack((2, 3), (2, 4))
    assert view is None and (problem.kind, problem.leaf) == ("shape", "layers")
    assert problem.message.startswith("StackLayers: ")

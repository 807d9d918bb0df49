"""A new state dict while it is made: names that clash, values that are no arrays, and combinations that fail."""

import numpy as np

from orbax_t5x.lazy import several
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.state import NewState, combine_leaves, view_of


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

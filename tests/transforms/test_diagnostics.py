"""Findings of a chain of transforms: problems, and the rules that made each leaf."""

from orbax_t5x.transforms.diagnostics import Diagnostics


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

"""T5X's answers, written by T5X, and what ours does where T5X's is an accident."""

import json
import logging
import re

import flax.traverse_util
import numpy as np
import pytest

from orbax_t5x import state_utils
from tests.conftest import GOLDENS

CASES = {case["name"]: case for case in json.loads((GOLDENS / "state_utils" / "cases.json").read_text())}
# T5X's exception is an accident of Python there: what ours must name instead.
ACCIDENTS = {"bad_group": ["'b'", "invalid group reference 1"], "merge_leaf_vs_subtree": ["'a'", "'a/b'"]}


def call(case):
    function = getattr(state_utils, case["fn"])
    if case["fn"] != "apply_assignment_map":
        return function(*case["args"], **case["kwargs"])
    rules = [(re.compile(p) if case["compiled"] else p, replacement) for p, replacement in case["assignment_map"]]
    return function(case["ckpt"], case["opt"], rules, **case["kwargs"])


def test_the_corpus_is_whole():
    assert len(CASES) == 26 and set(ACCIDENTS) < set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_t5x_answers(name):
    case = CASES[name]
    if "error" not in case:
        assert call(case) == case["result"]
        return
    with pytest.raises(ValueError) as caught:
        call(case)
    if name in ACCIDENTS:
        assert all(text in str(caught.value) for text in ACCIDENTS[name])
    else:
        assert str(caught.value) == case["error"][1]
    assert caught.value.__notes__ and caught.value.__notes__[0] not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["fn"] == "apply_assignment_map"])
def test_compiled_patterns_and_tuples_answer_the_same(name):
    case = CASES[name]
    changed = {**case, "compiled": True, "assignment_map": tuple(map(tuple, case["assignment_map"]))}
    if "error" in case:
        with pytest.raises(ValueError, match=r"\w"):
            call(changed)
    else:
        assert call(changed) == case["result"]


def test_resuming_gives_the_very_state():
    state = {"a": 1}
    assert state_utils.apply_assignment_map(state, {"b": 0}, [("z", "q")], is_resuming=True) is state


def test_a_pattern_given_twice_counts_once():
    """T5X raises with an empty set of unused patterns."""
    assert state_utils.apply_assignment_map({"o": 1}, {"n": 0}, [("n", "o"), ("n", "o")]) == {"n": 1}


def test_arguments_are_not_changed_and_leaves_are_passed_on():
    array = np.arange(3)
    state, target, scratch = {"a": {"b": array}, "c": 1}, {"n": {"b": 0}}, {"a": {"d": 2}}
    result = state_utils.apply_assignment_map(state, target, [("n/(.*)", r"a/\1")])
    assert result == {"n": {"b": array}, "c": 1} and result["n"]["b"] is array
    assert state_utils.merge_state(state, scratch)["a"] == {"b": array, "d": 2}
    assert state == {"a": {"b": array}, "c": 1} and scratch == {"a": {"d": 2}}


def test_merge_with_overwrite_prefers_the_second():
    merged = state_utils.merge_state({"a": {"b": 2, "c": 3}}, {"a": {"b": 4}, "d": 5}, overwrite=True)
    assert merged == {"a": {"b": 4, "c": 3}, "d": 5}


def test_each_dropped_leaf_is_a_warning_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        state_utils.intersect_state({"a": 1, "b": {"c": 2}, "d": 3}, {"d": 0})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "a" in caplog.records[0].getMessage() and "b/c" in caplog.records[1].getMessage()


def test_empty_nodes_are_flax_own():
    tree = {"a": {"b": 1, "e": {}}, "f": {}}
    flat = state_utils.flatten_state_dict(tree, keep_empty_nodes=True)
    assert flat == flax.traverse_util.flatten_dict(tree, keep_empty_nodes=True, sep="/")
    assert flat["f"] is flax.traverse_util.empty_node
    assert flax.traverse_util.unflatten_dict(flat, sep="/") == tree
    assert state_utils.get_name_tree(tree, keep_empty_nodes=True) == {"a": {"b": "a/b", "e": "a/e"}, "f": "f"}
    assert state_utils.get_name_tree({}, keep_empty_nodes=True) == {}
    assert state_utils.get_name_tree(tree) == {"a": {"b": "a/b"}}


def test_tensorstore_specs_are_leaves():
    spec = {"driver": "zarr", "kvstore": {"driver": "file"}, "metadata": {"shape": [2]}}
    assert state_utils.tensorstore_leaf(("a",), spec)
    assert not state_utils.tensorstore_leaf(("a",), {"driver": "zarr", "kvstore": {}})
    assert not state_utils.tensorstore_leaf(("a",), 3)
    flat = flax.traverse_util.flatten_dict({"a": {"s": spec}}, is_leaf=state_utils.tensorstore_leaf, sep="/")
    assert flat == state_utils.flatten_state_dict({"a": {"s": spec}}) == {"a/s": spec}


def test_frozen_dicts_flatten_too():
    frozen = flax.core.freeze({"a": {"b": 1}})
    assert state_utils.flatten_state_dict(frozen) == {"a/b": 1}
    assert state_utils.merge_state(frozen, flax.core.freeze({"a": {"c": 2}})) == {"a": {"b": 1, "c": 2}}

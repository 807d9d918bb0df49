"""Trees that contain themselves, or have more levels than are meant: refused wherever a user passes one."""

from functools import partial
from typing import Any

import flax.struct
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules, texts_of
from orbax_t5x.trees.flat import EndlessTreeError, flatten
from orbax_t5x.trees.levels import require_levels
from tests.support.recorded_chains import chain_digest

VALUE = np.zeros(8, np.float32)


@flax.struct.dataclass
class Node:
    a: object
    b: object


def in_a_dict():
    tree: dict[str, Any] = {"a": VALUE}
    tree["self"] = tree
    return tree


def in_a_list():
    below: list[Any] = [VALUE]
    below.append(below)
    return {"a": VALUE, "list": below}


def in_two():
    tree: dict[str, Any] = {"a": VALUE}
    tree["b"] = {"c": tree}
    return tree


def in_a_node():
    below: list[Any] = []
    below.append(Node(VALUE, below))
    return {"a": VALUE, "n": below}


def deep():
    tree = VALUE
    for _ in range(3000):
        tree = {"d": tree}
    return {"a": VALUE, "deep": tree}


TREES = {
    in_a_dict: "at 'self'",
    in_a_list: "at 'list/1'",
    in_two: "at 'b/c'",
    in_a_node: "at 'n/0/1'",
    deep: "200 levels",
}


@pytest.fixture
def path(tmp_path):
    safetensors.numpy.save_file({"a": VALUE}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("make", TREES)
def test_the_text_says_where(make):
    with pytest.raises(EndlessTreeError, match=TREES[make]):
        require_levels(make())


def test_a_tree_may_hold_one_array_and_one_container_twice():
    shared = {"a": VALUE, "none": None, "text": "t", "n": Node(VALUE, (VALUE, VALUE))}
    require_levels({"x": shared, "y": [shared, shared], "z": VALUE, 3: jax.ShapeDtypeStruct((1,), np.float32)})
    require_levels(VALUE)
    require_levels(None)


CALLS = {
    "target": ("target", lambda path, tree: ot.restore(path, tree)),
    "plan": ("target", lambda path, tree: ot.plan_restore(path, tree)),
    "fallback": ("fallback", lambda path, tree: ot.restore(path, {"a": VALUE, "b": VALUE}, fallback=tree)),
    "function": ("fallback", lambda path, tree: ot.restore(path, {"a": VALUE, "b": VALUE}, fallback=lambda: tree)),
    "v1": ("target", lambda path, tree: ot.v1.load_and_transform(path, tree)),
    "abstract": ("target", lambda path, tree: ot.v1.AbstractTrainState(tree)),
    "save": (
        "target",
        lambda path, tree: ocp.Checkpointer(ot.TrainStateHandler()).save(
            path.parent / "saved", args=ot.args.TrainStateSave(tree)
        ),
    ),
    "metadata": (
        "target",
        lambda path, tree: ocp.Checkpointer(ot.TrainStateHandler()).save(
            path.parent / "saved", args=ot.args.TrainStateSave({"a": VALUE}, custom_metadata=tree)
        ),
    ),
}


@pytest.mark.parametrize("make", TREES)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_names_it_as_a_problem(path, call, make):
    kind, run = CALLS[call]
    with pytest.raises(ot.RestorePlanError, match=TREES[make]) as caught:
        run(path, make())
    assert kind in [problem.kind for problem in caught.value.problems]


@pytest.mark.parametrize("make", [in_a_dict, in_two])
def test_what_a_transform_returns(path, make):
    with pytest.raises(ot.RestorePlanError, match="contains itself") as caught:
        ot.restore(path, None, [lambda state, target: make()])
    assert caught.value.problems[0].kind == "transform"
    with pytest.raises(EndlessTreeError):
        flatten(make())


@pytest.mark.parametrize("make", TREES)
def test_a_start_of_training(path, make):
    with ocp.CheckpointManager(path.parent / "root") as manager, pytest.raises(ot.RestorePlanError, match=TREES[make]):
        ot.restore_or_initialize(manager, make(), init_from=path)


@pytest.mark.parametrize("make", TREES)
def test_a_restore_by_the_handler(path, make):
    handler = ot.TrainStateHandler(type_handler_registry=ocp.type_handlers.create_type_handler_registry())
    with pytest.raises(ot.RestorePlanError, match=TREES[make]):
        handler.restore(path.parent, ot.args.TrainStateRestore(make(), source=path))


def test_rules_and_shardings_say_so_too(path):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    for call in (lambda: ot.rules.infer(in_a_list(), {}), lambda: ot.with_shardings(in_a_list(), mesh, [])):
        with pytest.raises(EndlessTreeError, match="'list/1'"):
            call()


def test_arguments_of_a_function_that_contain_themselves_have_no_digest():

    function = partial(flatten, in_a_list())
    assert chain_digest([function]) is None
    assert texts_of(record_rules([function])) == ["orbax_t5x.trees.flat.flatten"]


@pytest.mark.slow
def test_a_transform_may_return_a_tree_of_any_depth(path):
    """It restores as NumPy, and is refused where the target has no leaf for it."""

    def transform(state, target):
        tree = state["a"]
        for _ in range(5000):
            tree = {"d": tree}
        return {"a": state["a"], "deep": tree}

    restored = ot.restore(path, None, [transform])
    assert restored["a"].tobytes() == VALUE.tobytes()
    node, levels = restored["deep"], 0
    while isinstance(node, dict):
        node, levels = node["d"], levels + 1
    assert levels == 5000 and node.tobytes() == VALUE.tobytes()
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.restore(path, {"a": VALUE}, [transform])
    assert [problem.kind for problem in caught.value.problems] == ["leftover"]

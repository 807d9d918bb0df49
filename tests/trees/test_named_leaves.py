"""Names of leaves of any tree: those of Flax's state dicts, and those that states give themselves."""

import collections
import enum
from functools import partial
from typing import Any

import flax.serialization
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.restoring.targets import flatten_target
from orbax_t5x.train_state import InferenceState
from orbax_t5x.trees.flat import EndlessTreeError, flatten
from orbax_t5x.trees.named_leaves import named_leaves, names_itself, require_levels
from orbax_t5x.trees.pytree_names import leaf_name
from tests.support.memory_checkpoint import checkpoint
from tests.support.recorded_chains import entries_of

Key = enum.Enum("Key", {"A": "a"}, type=str)
Pair = collections.namedtuple("Pair", ["left", "right"])


def test_plain_trees_have_flaxs_names():
    tree = {"a": [1.0, {"b": 2.0}], "pair": Pair(3.0, (4.0,)), 5: 6.0}
    state_dict = flax.serialization.to_state_dict(tree)
    assert named_leaves(tree) == flax.traverse_util.flatten_dict(state_dict, sep="/")


def test_key_paths_have_flaxs_names_also_with_keys_that_are_a_kind_of_text():
    tree = {Key.A: {"x": 7.0, "y": [8.0]}}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    flat = flax.traverse_util.flatten_dict(flax.serialization.to_state_dict(tree), sep="/")
    assert [leaf_name(path) for path in paths] == list(flat)


def test_states_name_their_own_leaves_anywhere():
    state = InferenceState.create({"params": {"w": np.ones(2)}})
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert names_itself(state) and names_itself(linear) and not names_itself({"w": 1})
    names = named_leaves({"models": [state, linear]})
    assert {"models/0/target/w", "models/1/kernel", "models/1/bias"} <= set(names)
    assert not any(name.endswith("/value") for name in names)


def test_an_nnx_state_inside_a_dict_has_names_without_value(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    abstract = nnx.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1))))
    target = {"model": abstract, "step": 0}
    assert set(flatten_target(target).leaves) == {"model/bias", "model/kernel", "step"}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "stock", {"model": state, "step": 7})
        saver.save(tmp_path / "pure", {"model": nnx.to_pure_dict(state), "step": 7})
    for name in ("stock", "pure"):
        got = ot.restore(tmp_path / name, target)
        assert got["step"] == 7 and isinstance(got["model"], nnx.State)
        assert isinstance(got["model"]["kernel"], nnx.Param)
        np.testing.assert_array_equal(got["model"]["kernel"].get_value(), model.kernel.get_value())


def test_an_abstract_nnx_module_comes_back_as_a_module_that_computes():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    source = checkpoint({f"m/{name}": np.asarray(model_value) for name, model_value in _linear(model).items()})
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    got = ot.restore(source, {"m": abstract})["m"]
    inputs = jnp.ones((4, 2))
    np.testing.assert_array_equal(got(inputs), model(inputs))


@pytest.mark.slow
def test_states_and_modules_stand_in_sequences_and_in_fallbacks():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    values = {name: np.asarray(value) for name, value in _linear(model).items()}
    source = checkpoint({f"models/{i}/{name}": value + i for i in range(2) for name, value in values.items()})
    given = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    before = np.asarray(given.kernel.get_value())
    got = ot.restore(source, {"models": (nnx.state(given), given)})["models"]
    assert type(got[0]) is nnx.State and type(got[1]) is nnx.Linear and got[1] is not given
    for i, kernel in enumerate((got[0]["kernel"].get_value(), got[1].kernel.get_value())):
        np.testing.assert_array_equal(kernel, values["kernel"] + i)
    np.testing.assert_array_equal(given.kernel.get_value(), before)
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    fallbacks = (
        {"new": model},
        {"new": nnx.state(model)},
        lambda: {"new": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},
        lambda: {"new": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))},
    )
    for fallback in fallbacks:
        target = {"models": [..., nnx.state(abstract)], "new": abstract}
        new = ot.restore(source, target, fallback=fallback)["new"]
        np.testing.assert_allclose(new.kernel.get_value(), values["kernel"], rtol=1e-6)


def test_parts_of_an_nnx_state_may_be_placeholders():
    state = nnx.state(nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), b=nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    source = checkpoint({name: np.ones(leaf.shape, leaf.dtype) for name, leaf in flatten_target(state).leaves.items()})
    state["a"] = ...
    state["b"]["bias"] = state["b"]["bias"].replace(...)
    got = ot.restore(source, {"in": state}, lambda names, _: {"in": names})["in"]
    assert got["a"] is ... and got["b"]["bias"].get_value() is ...
    np.testing.assert_array_equal(got["b"]["kernel"].get_value(), np.ones((2, 3)))


def _linear(model):
    return {"kernel": model.kernel.get_value(), "bias": model.bias.get_value()}


def test_dtype_concerns_the_parameters_of_an_nnx_state_inside_a_dict():
    abstract = {"m": nnx.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1))))}
    source = checkpoint({"m/kernel": np.ones((2, 3), np.float32), "m/bias": np.ones(3, np.float32)})
    assert ot.restore(source, abstract, dtype="bfloat16")["m"]["bias"].get_value().dtype == jnp.bfloat16


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
    (entry,) = entries_of([function])
    assert entry["digest"] is None and entry["text"].startswith("orbax_t5x.trees.flat.flatten(")


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

"""A target with another optimizer than the checkpoint's is one problem, not one for each of its leaves."""

import flax.training.train_state
import jax
import numpy as np
import optax
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

SOURCE = GOLDENS / "t5x_orbax" / "d8_adafactor"


@pytest.fixture(scope="module")
def params():
    names = flatten(ot.restore(SOURCE, None))
    return unflatten({name.removeprefix("target/"): leaf for name, leaf in names.items() if name.startswith("target/")})


def state(params, optimizer):
    make = flax.training.train_state.TrainState.create
    return jax.eval_shape(lambda: make(apply_fn=print, params=params, tx=optimizer))


def optimizer_problems(source, target, transforms):
    found = [one for one in problems_of(source, target, transforms) if "optimizer" in one.message]
    assert not any((one.leaf or "").startswith("opt_state") for one in problems_of(source, target, transforms))
    (problem,) = found
    return problem


@pytest.mark.slow
@pytest.mark.parametrize("transforms", ["auto", ()])
def test_adafactor_in_the_checkpoint_and_adam_in_the_target(params, transforms):
    problem = optimizer_problems(SOURCE, state(params, optax.adam(1e-3)), transforms)
    assert "the checkpoint has Adafactor's state, the target Adam's: 105 leaves" in problem.message
    first, second = problem.fix.ways
    assert first.scope == "target" and "to start the optimizer anew" in str(second) and not second.arguments


def test_a_checkpoint_without_an_optimizer(params):
    source = checkpoint({f"params/{name}": np.asarray(leaf) for name, leaf in flatten(params).items()})
    problem = optimizer_problems(source, state(params, optax.sgd(1e-3, momentum=0.9)), ())
    assert "the checkpoint has no optimizer's state: 52 leaves" in problem.message


@pytest.mark.slow
def test_adafactor_under_other_names_is_said_to_be_convertible(params):
    target = state(params, optax.adafactor(1e-3, min_dim_size_to_factor=8))
    rename = [ot.transforms.Rename([("target/(.*)", r"params/\1"), ("state/step", "step"), ("state/.*", None)])]
    problem = optimizer_problems(SOURCE, target, rename)
    assert "the checkpoint has Adafactor's state under other names" in problem.message
    first, *others = problem.fix.ways
    assert "AdafactorSlots" in str(first) and not any(way.transforms or way.arguments for way in (first, *others))


def test_a_part_of_an_optimizer_is_listed_leaf_by_leaf():
    target = {f"opt_state/0/{kind}/{name}": np.ones(2) for kind in ("mu", "nu") for name in "ab"}
    source = checkpoint({name: leaf for name, leaf in target.items() if "mu" in name})
    assert [problem.leaf for problem in problems_of(source, target)] == ["opt_state/0/nu/a", "opt_state/0/nu/b"]

"""Another prefix of names is one problem, and its fix runs."""

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import orbax_t5x as ot
from orbax_t5x.testing.transform_suite import assert_same
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support.failed_plans import ARRAYS, applied, assert_cured, problems_of
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.slow
def test_of_two_ways_to_change_a_prefix_the_one_without_problems_is_proposed():
    """An optimizer's names begin alike on both sides: a rule for all of the target asks too much."""
    source = GOLDENS / "t5x_orbax" / "d8_adafactor"
    target = flatten(ot.restore(source, None))
    target = {name.removeprefix("target/"): leaf for name, leaf in target.items()}
    with pytest.raises(ot.RestorePlanError) as raised:
        ot.plan_restore(source, target)
    (problem,) = raised.value.problems
    assert not ot.plan_restore(source, target, applied(problem.fix)).unused


@pytest.mark.parametrize("theirs", ["", "params/", "state/model/", "a.b(c)/", "it's/"])
@pytest.mark.parametrize("ours", ["", "target/", "model/target/", "params/a.b(c)/"])
def test_another_prefix_is_one_problem(theirs, ours):
    source = checkpoint({theirs + name: array for name, array in ARRAYS.items()})
    target = {ours + name: array for name, array in ARRAYS.items()}
    if theirs == ours:
        ot.plan_restore(source, target)
        return
    if {theirs, ours} == {"it's/", "params/a.b(c)/"}:
        assert_advice(source, target)
        return
    plan, _ = assert_cured(source, target)
    assert_same(plan.execute(), target)


def assert_advice(source, target):
    """One problem without anything to paste."""
    (problem,) = problems_of(source, target)
    assert "names begin with" in problem.message and "ot." not in str(problem.fix)
    assert not any(way.transforms or way.arguments for way in problem.fix.ways)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("encoder/", "decoder/"), ("params/student/", "params/teacher/"), ("model/a/", "target/b/"), ("", "layers_0/")],
)
def test_modules_of_other_names_are_advice(theirs, ours):
    """Two modules may have the same leaves, of the same shapes, and be two."""
    arrays = {"x/kernel": np.ones((2, 3)), "x/bias": np.ones(3), "y/kernel": np.ones((3, 2))}
    source = checkpoint({theirs + name: array for name, array in arrays.items()})
    assert_advice(source, {ours + name: array for name, array in arrays.items()})


def test_what_is_left_after_advice_corrects_no_rule():
    """A leaf more on one side is missing, and no rule that the user has not written is said to be wrong."""
    theirs = {"aaa/kernel": np.ones(2), "aaa/bias": np.ones(2), "aaaa/scale": np.ones(2)}
    ours = {"bbb/kernel": np.ones(2), "bbb/bias": np.ones(2), "bbb/scale": np.ones(2)}
    first, *left = problems_of(checkpoint(theirs), ours)
    assert "names begin with" in first.message and not first.fix.transforms
    assert not any(way.rule or way.transforms for problem in left for way in problem.fix.ways)


def test_a_prefix_leaves_what_fits_already_where_it_is():
    source = checkpoint({"step": np.int32(3), **{f"params/{name}": array for name, array in ARRAYS.items()}})
    plan, _ = assert_cured(source, {"step": np.int32(0), **ARRAYS})
    assert plan.execute()["step"] == 3


def test_a_prefix_is_found_beside_an_optimizer():
    """Parameters alone into a train state of Flax: the pack or prefix, and then what the checkpoint really lacks."""
    state = flax.training.train_state.TrainState.create(
        apply_fn=print, params={"dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}, tx=optax.adam(1e-3)
    )
    source = checkpoint({"step": np.int32(3), "target/dense/kernel": np.ones((2, 3)), "target/dense/bias": np.ones(3)})
    found = problems_of(source, jax.eval_shape(lambda: state), dtype=None, allow_lossy_cast=True)
    assert found[0].leaf is None and "1 problem is left" in found[0].message
    assert "no optimizer's state: 5 leaves" in found[1].message
    plan = ot.plan_restore(source, state, applied(found[0].fix), fallback=state, allow_lossy_cast=True)
    np.testing.assert_array_equal(plan.execute().params["dense"]["bias"], np.ones(3))


def test_two_prefixes_that_fit_are_none():
    source = checkpoint({f"{prefix}/{name}": array for prefix in ("one", "two") for name, array in ARRAYS.items()})
    found = problems_of(source, ARRAYS)
    assert len(found) == len(ARRAYS) + 1 and not any("ot.transforms.Assign" in str(problem.fix) for problem in found)


@pytest.mark.parametrize("momenta", ["opt_state/0/mu", "ema", "state/param_states"])
def test_the_parameters_are_meant_not_their_momenta(momenta):
    arrays = {f"{prefix}/{name}": array for prefix in ("params", momenta) for name, array in ARRAYS.items()}
    found = problems_of(checkpoint(arrays), ARRAYS)
    assert len(found) == 2 and found[1].kind == "leftover"
    assert_same(ot.restore(checkpoint(arrays), ARRAYS, applied(found[0].fix), strict=False), ARRAYS)

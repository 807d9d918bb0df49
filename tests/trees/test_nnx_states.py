"""States and modules of `flax.nnx` as parts of a target."""

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.restoring.targets import flatten_target
from tests.support.memory_checkpoint import checkpoint


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

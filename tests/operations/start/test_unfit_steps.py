"""Errors about a step of the run: which rules were applied, and fixes that end right when they are followed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.serialization import to_state_dict

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten

T = ot.transforms
RENAME = T.Rename([("(.*)/attn/(.*)", r"\1/attention/\2")])


def parameters(attention="attn"):
    shapes = {"q/kernel": (3, 5), "q/bias": (5,), "o/kernel": (5, 7)}
    leaves = {f"block_{i}/{attention}/{name}": shape for i in range(2) for name, shape in shapes.items()}
    numbers = np.random.default_rng(0)
    arrays = {name: numbers.normal(size=shape).astype(np.float32) for name, shape in leaves.items()}
    return unflatten({**arrays, "head/kernel": numbers.normal(size=(7, 2)).astype(np.float32)})


ADAM = optax.adam(1e-3)


def state_of(params, optimizer=ADAM):
    opt_state = optimizer.init(params)
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(3)}


def trained(state):
    """Other values in each array of the optimizer, too."""
    leaves, tree = jax.tree.flatten(state["opt_state"])
    changed = [leaf + at + 1 for at, leaf in enumerate(leaves)]
    return {**state, "opt_state": tree.unflatten(changed)}


def values_of(state):
    return {name: np.asarray(leaf) for name, leaf in flatten(to_state_dict(state)).items() if leaf is not None}


SAVED = trained(state_of(parameters()))


def save(root, is_stock):
    handler = ocp.StandardCheckpointHandler() if is_stock else ot.TrainStateHandler()
    args = ocp.args.StandardSave(SAVED) if is_stock else ot.args.TrainStateSave(SAVED, provenance=())
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        manager.save(3, args=args)


def start(root, target, transforms=(), **options):
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        state, step, how = ot.restore_or_initialize(manager, target, transforms=transforms, **options)
        assert how == "resumed"
        manager.save(step + 1, args=ot.args.TrainStateSave(state))
    return values_of(state)


def refusal(root, target, transforms=(), **options):
    """Returns the first problem of a start, and the first of its ways as options of the next one."""
    with pytest.raises(ot.RestorePlanError) as caught:
        start(root, target, transforms, **options)
    problem = caught.value.problems[0]
    assert str(caught.value).startswith("[rule] step 3 of the run does not fit the target: ")
    fix = problem.fix.ways[0]
    options = {"transforms": transforms, **options, **fix.arguments}
    if fix.transforms:
        options["transforms"] = [*transforms, *fix.transforms]
    return problem, options


def followed_twice(root, target, options):
    """A fix that is applied again at the next start would change values."""
    values = start(root, target, **options)
    again = start(root, target, **options)
    for name, value in values.items():
        np.testing.assert_array_equal(again[name], value)
    return values


CAST = T.Cast("step", np.int32)
GIVEN = {
    "none": (),
    "auto": "auto",
    "a list": [CAST],
    "one": CAST,
    "migrations": ot.Migrations([("cast", [CAST])]),
    "auto, migrations": ["auto", ot.Migrations([("cast", [CAST])])],
}


def renamed(name):
    return name.replace("/attn/", "/attention/")


@pytest.mark.parametrize("is_stock", [False, True], ids=["own step", "another writer's"])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_rules_of_a_renamed_model_are_proposed(tmp_path, given, is_stock):
    save(tmp_path, is_stock)
    target = jax.eval_shape(lambda: state_of(parameters("attention")))
    problem, options = refusal(tmp_path, target, given)
    assert "these rules lead from it to the target" in problem.message
    values = followed_twice(tmp_path, target, options)
    assert values.keys() == {renamed(name) for name in values_of(SAVED)}
    for name, value in values_of(SAVED).items():
        np.testing.assert_array_equal(values[renamed(name)], value)


def test_rules_that_another_writers_step_does_not_get_become_a_migration(tmp_path):
    save(tmp_path, is_stock=True)
    ema = T.AssignmentMap([("ema/(.*)", r"params/\1"), ("((?!ema/).*)", r"\1")])
    target = jax.eval_shape(lambda: {**state_of(parameters()), "ema": parameters()})
    problem, options = refusal(tmp_path, target, [ema])
    assert "rules were not applied, because another writer saved it: AssignmentMap(" in problem.message
    values = followed_twice(tmp_path, target, options)
    for name, value in values_of(SAVED["params"]).items():
        np.testing.assert_array_equal(values[f"ema/{name}"], value)


OPTIMIZERS = {
    "an average": (optax.chain(optax.scale_by_adam(), optax.scale(-1e-3), optax.ema(0.9)), "opt_state/2/.*", {}),
    "a schedule": (optax.adam(optax.constant_schedule(1e-3)), "opt_state/1/.*", {}),
    "a schedule before": (
        optax.chain(optax.scale_by_schedule(lambda count: 1.0), optax.scale_by_adam()),
        "opt_state/0/.*",
        {"opt_state/1/": "opt_state/0/"},
    ),
    "accumulated gradients": (
        optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
        "opt_state/(?!inner_opt_state/).*",
        {"opt_state/inner_opt_state/": "opt_state/"},
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_stock", [False, True], ids=["own step", "another writer's"])
@pytest.mark.parametrize("is_given", [False, True], ids=["after the error", "at once"])
def test_new_state_of_the_optimizer_begins_with_what_init_fn_gives(tmp_path, kind, is_stock, is_given, caplog):
    save(tmp_path, is_stock)
    optimizer, new, places = OPTIMIZERS[kind]
    target = jax.eval_shape(lambda: state_of(parameters(), optimizer))
    options = {"init_fn": lambda: state_of(parameters(), optimizer)}
    if is_given:
        options["fallback_for"] = [new]
    else:
        problem, options = refusal(tmp_path, target, **options)
        assert "of the target are new to it: opt_state/" in problem.message
    values = followed_twice(tmp_path, target, options)
    (told,) = [record.getMessage() for record in caplog.records if "new to this step" in record.getMessage()]
    assert "moments" not in told
    saved, initial = values_of(SAVED), values_of(state_of(parameters(), optimizer))
    assert values.keys() == initial.keys()
    for name, value in values.items():
        old = name
        for place, before in places.items():
            old = old.replace(place, before) if old.startswith(place) else old
        np.testing.assert_array_equal(value, initial[name] if re.fullmatch(new, name) else saved[old], err_msg=name)


def test_a_new_head_of_a_run_is_named(tmp_path, caplog):
    save(tmp_path, is_stock=False)
    params = parameters()
    params["head"]["kernel"] = np.ones((7, 4), np.float32)
    target = jax.eval_shape(lambda: state_of(params))
    named = ["params/head/.*", "opt_state/.*/head/.*"]
    values = start(tmp_path, target, init_fn=lambda: state_of(params), fallback_for=named)
    np.testing.assert_array_equal(values["params/head/kernel"], np.ones((7, 4)))
    np.testing.assert_array_equal(values["params/block_0/attn/q/bias"], SAVED["params"]["block_0"]["attn"]["q"]["bias"])
    assert "params/head/kernel (the checkpoint has (7, 2))" in caplog.text


def test_a_shape_that_changed_is_not_begun_anew_by_a_fix(tmp_path):
    save(tmp_path, is_stock=False)
    params = parameters()
    params["head"]["kernel"] = np.ones((9, 2), np.float32)
    with pytest.raises(ot.RestorePlanError) as caught:
        start(tmp_path, jax.eval_shape(lambda: state_of(params)), init_fn=lambda: state_of(params))
    first, *others = caught.value.problems
    assert first.fix is None or "fallback_for" not in str(first.fix)
    assert [problem.kind for problem in others] == ["shape"] * 3
    for problem in others:
        assert "if it is new, pass fallback_for=" in str(problem.fix)


def test_rules_applied_before_and_now_are_told_apart(tmp_path):
    save(tmp_path, is_stock=False)
    target = jax.eval_shape(lambda: state_of(parameters("attention")))
    start(tmp_path, target, [RENAME])
    params = parameters("attention")
    params["new"] = {"w": np.zeros(2, np.float32)}
    grown = jax.eval_shape(lambda: state_of(params))
    cast = T.Cast("opt_state/0/count", np.int32)
    with pytest.raises(ot.RestorePlanError) as caught:
        start(tmp_path, grown, [RENAME, cast])
    first = str(caught.value).splitlines()[0]
    assert f"applied before: {RENAME.describe()}; applied now: {cast.describe()}" in first


def test_no_fix_is_what_was_given(tmp_path):
    """Nothing leads to the model: nothing is proposed that was tried."""
    save(tmp_path, is_stock=False)
    other = {"params": {"a": jax.ShapeDtypeStruct((2, 2), np.float32)}, "step": jax.ShapeDtypeStruct((), np.int32)}
    for given in ("auto", ()):
        with pytest.raises(ot.RestorePlanError) as caught:
            start(tmp_path, other, given)
        assert "pass transforms='auto'" not in str(caught.value) and 'transforms="auto"' not in str(caught.value)

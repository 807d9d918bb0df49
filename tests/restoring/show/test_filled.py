"""Nothing is filled silently: what a fallback gives is counted, warned of, bounded by patterns; never all of it."""

import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from safetensors.numpy import save_file

import orbax_t5x as ot
from orbax_t5x.lazy import as_view
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.failed_plans import BUNDLE
from tests.support.memory_checkpoint import checkpoint


def zeros(*shape):
    return np.zeros(shape, np.float32)


def named(tower, layers=range(3)):
    return {f"{tower}/layers_{i}/mlp/{name}": zeros(2, 3) for i in layers for name in ("wi", "wo")}


MODEL = {f"params/{name}": leaf for name, leaf in {**named("encoder"), **named("decoder")}.items()}
TARGET = unflatten({name.replace("decoder", "dec"): leaf for name, leaf in MODEL.items()} | {"step": 0})


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def kinds(source, target, transforms=(), **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, transforms, **keywords)
    return [problem.kind for problem in caught.value.problems]


# -- half a model


@pytest.mark.parametrize("fallback", [TARGET, lambda: TARGET, lambda: jax.tree.map(jnp.ones_like, TARGET)])
def test_half_a_model_is_counted_and_is_one_warning(fallback, caplog, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan = ot.plan_restore(checkpoint(MODEL), TARGET, strict=False, fallback=fallback)
    assert plan.filled == tuple(entry.name for entry in plan.entries if entry.action == "fallback")
    assert len(plan.filled) == 7 and "step" in plan.filled and not plan.warnings and not warnings_of(caplog)
    count = "6 of 12 model parameters from the checkpoint, 6 from fallback"
    assert str(plan).splitlines()[0] == f"Restore plan: {count}"
    assert max(map(len, str(plan).splitlines())) <= 80
    assert count in plan._repr_html_()
    (told,) = re.findall(r"From fallback: (.*?)\. This process", " ".join(str(plan).split()))
    assert sorted(told.split(", ")) == ["params/dec/** (6)", "step (1)"]
    data = plan.to_json()
    assert data["filled"] == list(plan.filled)
    assert data["model_parameters"] == {"total": 12, "from_checkpoint": 6, "from_fallback": 6}
    plan.execute()
    (warning,) = warnings_of(caplog)
    assert "6 of 12 model parameters" in warning and "params/dec/** (6)" in warning and "/memory" in warning
    assert plan.report.from_fallback == plan.filled and "7 leaves from fallback" in plan.report.summary()
    assert "from fallback:\n  params/dec/layers_{0…2}/mlp/wi ×3\n" in str(plan.report)


@pytest.mark.parametrize(
    "missing, folded",
    [
        ({"params/encoder/layers_1/mlp/wo"}, "params/encoder/layers_1/mlp/wo (1)"),
        ({f"params/decoder/layers_{i}/mlp/wo" for i in range(3)}, "params/decoder/layers_{0…2}/mlp/wo (3)"),
        ({name for name in MODEL if "layers_2" in name}, "params/encoder/layers_2/** (2)"),
    ],
)
def test_a_warning_folds_names_into_patterns(missing, folded, caplog):
    stored = {name: leaf for name, leaf in MODEL.items() if name not in missing}
    ot.restore(checkpoint(stored), unflatten(MODEL), fallback=unflatten(MODEL))
    (warning,) = warnings_of(caplog)
    assert folded in warning


def test_a_long_list_of_names_is_cut(caplog):
    target = {f"params/{word}": zeros(2) for word in map("".join, itertools.product("abcdefg", repeat=2))}
    ot.restore(checkpoint({"params/aa": zeros(2)}), unflatten(target), fallback=unflatten(target))
    (warning,) = warnings_of(caplog)
    assert "and 40 more" in warning and len(warning) < 500


def test_auto_and_a_decoder_of_another_name(caplog):
    whole = flatten(ot.restore(BUNDLE, None, [ot.transforms.Translate()]))
    whole = {name: leaf for name, leaf in whole.items() if name.startswith("target/")}
    target = {name.replace("/decoder/", "/dec/"): leaf for name, leaf in whole.items()}
    filled = [name for name in target if "/dec/" in name]
    plan = ot.plan_restore(
        BUNDLE, unflatten(target), ot.transforms.Translate(), strict=False, fallback=unflatten(target)
    )
    assert sorted(plan.filled) == sorted(filled)
    plan.execute()
    (warning,) = warnings_of(caplog)
    assert f"target/dec/** ({len(filled)})" in warning
    caplog.clear()
    plan = ot.plan_restore(BUNDLE, unflatten(target), "auto", strict=False, fallback=unflatten(target))
    assert plan.filled == ()
    restored = flatten(plan.execute())
    assert all(np.array_equal(restored[name], leaf) for name, leaf in target.items()) and warnings_of(caplog) == []


def test_several_sources_count_together(caplog):
    source = {"a": checkpoint(named("encoder")), "b": checkpoint(named("decoder"))}
    target = {"a": unflatten(named("encoder")), "b": unflatten(named("dec"))}
    assert "filled" not in kinds(source, target, fallback=target)
    plan = ot.plan_restore(source, target, strict=False, fallback=target)
    plan.execute()
    (warning,) = warnings_of(caplog)
    assert "6 of 12 model parameters" in warning and "b/** (6)" in warning


# -- what is no model parameter, and what is asked for


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)


def train_state():
    network = Network()
    params = network.init(jax.random.key(0), jnp.zeros((1, 2)))["params"]
    return TrainState.create(apply_fn=network.apply, params=params, tx=optax.adam(1e-3))


@pytest.mark.slow
def test_a_train_state_whose_optimizer_is_missing_is_no_warning(caplog):
    state = train_state()
    stored = flatten({"params": jax.tree.map(np.asarray, state.params)})
    plan = ot.plan_restore(checkpoint(stored), state, fallback=state)
    plan.execute()
    assert len(plan.filled) == 6 and not warnings_of(caplog)
    first, second, *_ = str(plan).splitlines()
    assert first == "Restore plan: 2 of 2 model parameters from the checkpoint, 0 from fallback"
    assert "2 read · 6 fallback" in second


@pytest.mark.parametrize("leaf", [0, 0.5, np.int64(3), np.zeros(2, np.int32), jax.random.key(0), True])
def test_steps_keys_and_counts_beside_a_model_are_no_warning(leaf, caplog):
    target = {**unflatten(MODEL), "other": leaf}
    assert ot.plan_restore(checkpoint(MODEL), target, fallback=target).filled == ("other",)
    ot.restore(checkpoint(MODEL), target, fallback=target)
    assert not warnings_of(caplog)


def test_in_a_tree_without_parameters_by_name_every_leaf_is_one(caplog):
    target = {"w": zeros(2), "step": 0, "kept": ..., "none": None}
    plan = ot.plan_restore(checkpoint({"w": zeros(2)}), target, fallback={"step": 5})
    assert plan.to_json()["model_parameters"] == {"total": 2, "from_checkpoint": 1, "from_fallback": 1}
    plan.execute()
    assert "step (1)" in warnings_of(caplog)[0]


def test_padding_with_the_fallback_is_asked_for(caplog):
    target = {"params": {"table": zeros(5, 2), "w": zeros(2)}}
    grow = ot.transforms.Pad("params/table", (5, None), ot.transforms.FALLBACK)
    source = checkpoint({"params/table": zeros(4, 2), "params/w": zeros(2)})
    for fallback_for in (None, ["params/table"], []):
        plan = ot.plan_restore(source, target, [grow], fallback=target, fallback_for=fallback_for)
        plan.execute()
        assert plan.filled == () and plan.warnings == () and not warnings_of(caplog)


def test_nothing_is_counted_where_nothing_is_filled(caplog):
    plan = ot.plan_restore(checkpoint(MODEL), unflatten(MODEL), fallback=unflatten(MODEL))
    plan.execute()
    assert plan.filled == () and "fallback" not in str(plan) and not warnings_of(caplog)


# -- fallback_for


@pytest.mark.parametrize("patterns", [["params/dec/.*", "step"], ("(?s).*",), ".*", [re.compile("params/.*|st.p")]])
def test_what_is_named_is_filled_without_a_warning(patterns, caplog):
    plan = ot.plan_restore(checkpoint(MODEL), TARGET, strict=False, fallback=TARGET, fallback_for=patterns)
    plan.execute()
    assert len(plan.filled) == 7 and not plan.warnings and not warnings_of(caplog)


@pytest.mark.parametrize("patterns", [[], ["dec"], ["params/dec"], ["params/dec/layers_0/.*"], ["params/dec/.*/wi"]])
def test_what_no_pattern_names_whole_is_missing(patterns):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(checkpoint(MODEL), TARGET, strict=False, fallback=TARGET, fallback_for=patterns)
    names = [name for name in flatten(TARGET) if "dec" in name or name == "step"]
    barred = {name for name in names if not any(re.fullmatch(one, name) for one in patterns)}
    problems = caught.value.problems
    assert {problem.kind for problem in problems} == {"missing"}
    # One problem explains the decoder's leaves where all are missing; the step has its own.
    assert {problem.leaf for problem in problems} <= barred | {None}
    assert "fallback_for" in {problem.leaf: str(problem.fix) for problem in problems}["step"]


def test_a_pattern_that_matches_nothing_is_a_warning_of_the_plan():
    keywords = {"strict": False, "fallback": TARGET, "fallback_for": ["params/dec/.*", "step", "params/head/.*"]}
    plan = ot.plan_restore(checkpoint(MODEL), TARGET, **keywords)
    assert plan.warnings == ("fallback_for: 'params/head/.*' matches no leaf of the target",)


@pytest.mark.parametrize("call", [ot.restore, ot.plan_restore, ot.v1.load_and_transform, ot.restore_or_initialize])
@pytest.mark.parametrize(
    "patterns, error", [(["("], ValueError), ([3], TypeError), (3, TypeError), ([b"a"], TypeError)]
)
def test_patterns_are_checked_before_anything_is_opened(call, patterns, error, tmp_path):
    first = tmp_path / "missing"
    if call is ot.restore_or_initialize:
        first = ocp.CheckpointManager(tmp_path / "run")
    with pytest.raises(error, match="fallback_for"):
        call(first, {}, fallback_for=patterns)
    with pytest.raises(error, match="fallback_for"):
        ot.v1.AbstractTrainState({}, fallback_for=patterns)


# -- nothing at all


NOTHING = {
    "other names": (checkpoint({"a": zeros(2)}), {"b": zeros(2)}),
    "an empty checkpoint": (checkpoint({}), {"b": zeros(2)}),
    "scalars": (checkpoint({"a": zeros(2)}), {"step": 0, "rate": 0.5}),
    "other sources": ({"x": checkpoint({"a": zeros(2)}), "y": checkpoint({"b": zeros(2)})}, {"b": zeros(2)}),
    "a placeholder of another name": (checkpoint({"a": zeros(2)}), {"b": zeros(2), "c": ...}),
}


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("made", [lambda tree: tree, lambda tree: lambda: tree])
def test_a_restore_of_nothing_is_a_problem_that_a_pattern_permits(case, made, caplog):
    source, target = NOTHING[case]
    fallback = made({name: leaf for name, leaf in target.items() if leaf is not ...})
    assert kinds(source, target, strict=False, fallback=fallback) == ["nothing_restored"]
    assert "nothing_restored" in kinds(checkpoint({"z": zeros(1)}), target, fallback=fallback)
    plan = ot.plan_restore(source, target, strict=False, fallback=fallback, fallback_for=[".*"])
    plan.execute()
    assert not warnings_of(caplog)


def test_what_fills_only_a_part_permits_no_restore_of_nothing():
    target = {"b": zeros(2), "c": zeros(2)}
    found = kinds(checkpoint({"a": zeros(3)}), target, strict=False, fallback=target, fallback_for=["b"])
    assert found == ["nothing_restored", "missing"]


@pytest.mark.parametrize("target", [{}, {"a": ...}, {"a": None}, {"a": {}}, ...])
def test_a_target_without_leaves_asks_for_nothing(target, caplog):
    ot.restore(checkpoint({"z": zeros(2)}), target, strict=False, fallback={"b": zeros(2)})
    assert not warnings_of(caplog)


def test_a_placeholder_over_the_checkpoint_is_a_place():
    source, target = checkpoint({"body/w": zeros(2)}), {"body": ..., "head": zeros(2)}
    assert ot.plan_restore(source, target, fallback={"head": zeros(2)}).filled == ("head",)


def test_a_constant_of_a_transform_is_no_restored_leaf():
    constant = as_view(zeros(2), "constant")
    target = {"y": zeros(2), "z": zeros(2)}
    source, transforms = checkpoint({"x": zeros(2)}), [lambda state, _: {**state, "z": constant}]
    assert kinds(source, target, transforms, strict=False, fallback=target) == ["nothing_restored"]


class Tower(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(20)])


@pytest.mark.slow
def test_linen_names_into_an_nnx_state_restore_nothing():
    state = nnx.state(Tower())
    stored = {
        f"params/layers_{i}/{name}": zeros(*shape) for i in range(20) for name, shape in (("w", (2, 2)), ("b", (2,)))
    }
    assert len(jax.tree.leaves(state)) == len(stored) == 40
    assert "nothing_restored" in kinds(checkpoint(stored), state, strict=False, fallback=state)
    plan = ot.plan_restore(checkpoint(stored), state, strict=False, fallback=state, fallback_for=[".*"])
    assert len(plan.filled) == 40 and "0 of 40 model parameters" in str(plan)


def test_a_prefix_that_explains_it_is_the_fix():
    target = {"target": unflatten(MODEL)["params"]}
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(checkpoint(MODEL), target, strict=False, fallback=target)
    (problem,) = caught.value.problems
    assert problem.kind == "nothing_restored" and problem.fix.transforms
    assert ot.plan_restore(checkpoint(MODEL), target, problem.fix.transforms, fallback=target).filled == ()


# -- the other doors


@pytest.fixture
def saved(tmp_path):
    save_file({name: leaf + 1 for name, leaf in MODEL.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def through_handler(directory, source, target, **keywords):
    with ocp.CheckpointManager(directory / "run", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave({"x": zeros(1)}))
        args = ot.args.TrainStateRestore(target, strict=False, source=source, fallback=target, **keywords)
        return manager.restore(0, args=args)


def through_v1(directory, source, target, **keywords):
    v1.save(directory / "v1", {"x": zeros(1)})
    abstract = ot.v1.AbstractTrainState(target, strict=False, source=source, fallback=target, **keywords)
    with ot.v1.context():
        return v1.load(directory / "v1", abstract)


def through_load(directory, source, target, **keywords):
    return ot.v1.load_and_transform(source, target, strict=False, fallback=target, **keywords)


def through_restore(directory, source, target, **keywords):
    return ot.restore(source, target, strict=False, fallback=target, **keywords)


def through_start(directory, source, target, **keywords):
    with ocp.CheckpointManager(directory / "start") as manager:
        return ot.restore_or_initialize(
            manager, target, init_from=source, init_fn=lambda: target, strict=False, **keywords
        ).state


DOORS = [through_restore, through_handler, through_v1, through_load, through_start]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_warns_bounds_and_refuses(door, saved, tmp_path, caplog):
    names = [name for name in MODEL if "encoder" in name]
    target = {**dict.fromkeys(names, zeros(2, 3)), "params/dec/w": zeros(2)}
    state = door(tmp_path, saved, target)
    assert np.asarray(state[names[0]]).min() == 1
    assert [text for text in warnings_of(caplog) if "params/dec/w (1)" in text and "1 of 7 model" in text]
    caplog.clear()
    door(tmp_path / "again", saved, target, fallback_for=["params/dec/.*"])
    assert not [text for text in warnings_of(caplog) if "model parameter" in text]
    with pytest.raises(ot.RestorePlanError) as caught:
        door(tmp_path / "bounded", saved, target, fallback_for=["params/head/.*"])
    assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("missing", "params/dec/w")]
    with pytest.raises(ot.RestorePlanError) as caught:
        door(tmp_path / "nothing", saved, {"other": zeros(9)})
    assert [problem.kind for problem in caught.value.problems] == ["nothing_restored"]
    door(tmp_path / "permitted", saved, {"other": zeros(9)}, fallback_for=[".*"])


def test_a_run_from_scratch_or_resumed_is_not_warned_of(tmp_path, caplog):
    target = {"params": {"w": zeros(2)}}
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=ot.TrainStateHandler()) as manager:
        start = ot.restore_or_initialize(manager, target, init_fn=lambda: target, fallback_for=["params/head"])
        assert start.how == "scratch"
        manager.save(0, args=ot.args.TrainStateSave(start.state))
        manager.wait_until_finished()
        resumed = ot.restore_or_initialize(manager, target, init_fn=lambda: target, fallback_for=["params/head"])
    assert resumed.how == "resumed" and not [text for text in warnings_of(caplog) if "fallback" in text]

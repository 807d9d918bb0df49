"""A run whose list of rules grows, restored by every entry point: a recorded beginning is never applied again."""

import random

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot

T = ot.transforms
SWAP = T.Rename([("m0", "m1"), ("m1", "m0")])
RENAME = T.Rename([("old", "new")])
STATE = {name: np.full(2, value, np.float32) for name, value in (("m0", 1), ("m1", 0), ("old", 5))}


def values(state):
    return {name: float(leaf[0]) for name, leaf in state.items()}


@pytest.fixture
def run(tmp_path):
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "source", args=ot.args.TrainStateSave(STATE, provenance=()))
    plan = ot.plan_restore(tmp_path / "source", None, [SWAP])
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(plan.execute(), provenance=plan.provenance))
    return tmp_path / "run"


def by_manager(run, target, rules):
    with ocp.CheckpointManager(run, item_handlers=ot.TrainStateHandler()) as manager:
        return manager.restore(0, args=ot.args.TrainStateRestore(target, rules))


def by_start(run, target, rules):
    with ocp.CheckpointManager(run, item_handlers=ot.TrainStateHandler()) as manager:
        return ot.restore_or_initialize(manager, target, transforms=rules, init_fn=lambda: target).state


def by_conversion(run, target, rules):
    ot.convert(run / "0", run.parent / "converted", rules)
    return ot.restore(run.parent / "converted", target)


def by_v1(run, target, rules):
    with ot.v1.context():
        return ot.v1.load_and_transform(run / "0", target, rules)


WAYS = {
    "restore": lambda run, target, rules: ot.restore(run, target, rules),
    "plan_restore": lambda run, target, rules: ot.plan_restore(run / "0", target, rules).execute(),
    "Source": lambda run, target, rules: ot.restore(ot.Source(run, rules), target),
    "manager": by_manager,
    "restore_or_initialize": by_start,
    "convert": by_conversion,
    "v1": by_v1,
}


@pytest.mark.parametrize("way", WAYS)
def test_only_the_rest_is_applied(run, way):
    target = {name: np.zeros(2, np.float32) for name in ("m0", "m1", "new")}
    assert values(WAYS[way](run, target, [SWAP, RENAME])) == {"m0": 0.0, "m1": 1.0, "new": 5.0}


def test_the_rest_is_recorded_with_the_next_save(run):
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), STATE)
    target = {"m0": abstract["m0"], "m1": abstract["m1"], "new": abstract["old"]}
    for step in (1, 2):
        with ocp.CheckpointManager(run, item_handlers=ot.TrainStateHandler()) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=run, transforms=[SWAP, RENAME])
            assert (start.step, values(start.state)) == (step - 1, {"m0": 0.0, "m1": 1.0, "new": 5.0})
            manager.save(step, args=ot.args.TrainStateSave(start.state))
    with pytest.raises(ot.RestorePlanError, match="missing in those given"):
        ot.restore(run, target, [RENAME])


def grown(chance, versions, count):
    """Returns one more rule, some of which no name or shape shows, and adds the state that it leads to."""
    state = versions[-1]
    name, other = chance.sample(sorted(state), 2)
    rest = {key: leaf for key, leaf in state.items() if key != name}
    kinds = {
        "rename": (T.Rename([(name, f"r{count}")]), {**rest, f"r{count}": state[name]}),
        "swap": (T.Rename([(name, other), (other, name)]), {**state, name: state[other], other: state[name]}),
        "transpose": (T.Transpose(name), {**state, name: state[name].T}),
        "drop": (T.Drop([name]), rest),
    }
    rule, after = kinds[chance.choice(sorted(kinds))]
    versions.append(after)
    return rule


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_newest_list_leads_from_any_version_to_the_newest_values(tmp_path, seed):
    chance = random.Random(seed)
    versions = [{f"x{index}": np.arange(4, dtype=np.float32).reshape(2, 2) + 10 * index for index in range(6)}]
    rules = [grown(chance, versions, count) for count in range(4)]
    saved = chance.randrange(4)
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "source", args=ot.args.TrainStateSave(versions[0], provenance=()))
    plan = ot.plan_restore(tmp_path / "source", None, rules[:saved])
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(plan.execute(), provenance=plan.provenance))
    target = {name: np.zeros_like(leaf) for name, leaf in versions[-1].items()}
    for way in WAYS.values():
        restored = way(tmp_path / "run", target, rules)
        assert restored.keys() == versions[-1].keys()
        for name, leaf in versions[-1].items():
            np.testing.assert_array_equal(restored[name], leaf)

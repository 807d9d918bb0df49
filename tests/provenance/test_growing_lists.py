"""A run whose list of rules grows, restored by every entry point: a recorded beginning is never applied again."""

import os
import random
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
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


def by_manager(run, target, rules, step, item):
    with ocp.CheckpointManager(run, item_handlers={item: ot.TrainStateHandler()}) as manager:
        args = ocp.args.Composite(**{item: ot.args.TrainStateRestore(target, rules)})
        return manager.restore(step, args=args)[item]


def by_start(run, target, rules, step, item):
    with ocp.CheckpointManager(run) as manager:
        return ot.restore_or_initialize(manager, target, transforms=rules, item=item).state


def by_conversion(run, target, rules, step, item):
    ot.convert(run / str(step) / item, run.parent / "converted", rules)
    return ot.restore(run.parent / "converted", target)


def by_v1(run, target, rules, step, item):
    with ot.v1.context():
        return ot.v1.load_and_transform(run / str(step), target, rules)


def by_v1_context(run, target, rules, step, item):
    with ot.v1.context():
        return v1.load_checkpointables(run / str(step), {item: ot.v1.AbstractTrainState(target, rules)})[item]


def by_v1_training(run, target, rules, step, item):
    with ot.v1.context(), v1.training.Checkpointer(run) as checkpointer:
        return checkpointer.load_checkpointables(step, {item: ot.v1.AbstractTrainState(target, rules)})[item]


def by_checkpointer(run, target, rules, step, item, source=None):
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        args = ot.args.TrainStateRestore(target, rules, source=source)
        return checkpointer.restore(run / str(step) / item, args=args)


def by_init_from(run, target, rules, step, item):
    shutil.rmtree(run.parent / "next", ignore_errors=True)
    with ocp.CheckpointManager(run.parent / "next", item_handlers=ot.TrainStateHandler()) as manager:
        return ot.restore_or_initialize(manager, target, init_from=run / str(step), transforms=rules).state


WAYS = {
    "restore": lambda run, target, rules, *_: ot.restore(run, target, rules),
    "plan_restore": lambda run, target, rules, step, _: ot.plan_restore(run / str(step), target, rules).execute(),
    "Source": lambda run, target, rules, *_: ot.restore(ot.Source(run, rules), target),
    "manager": by_manager,
    "restore_or_initialize": by_start,
    "convert": by_conversion,
    "v1": by_v1,
    "v1 context": by_v1_context,
    "v1 training": by_v1_training,
    "checkpointer": by_checkpointer,
    "init_from=": by_init_from,
    "source=": lambda run, target, rules, step, item: by_checkpointer(run, target, rules, step, item, run / str(step)),
}
OWN = ("manager", "restore_or_initialize", "v1 context", "v1 training", "checkpointer")


@pytest.mark.parametrize("way", WAYS)
def test_only_the_rest_is_applied(run, way):
    target = {name: np.zeros(2, np.float32) for name in ("m0", "m1", "new")}
    assert values(WAYS[way](run, target, [SWAP, RENAME], 0, "default")) == {"m0": 0.0, "m1": 1.0, "new": 5.0}


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


@pytest.mark.parametrize("rest", [[], [RENAME]])
def test_named_sources_decide_each_by_its_own_record(run, rest):
    """The run has the swap, its beginning has not; a new run has both, and goes on without a question."""
    sources = {"run": ot.Source(run, [SWAP, *rest]), "begun": ot.Source(run.parent / "source", SWAP)}
    names = {"m0": 0.0, "m1": 1.0, "new" if rest else "old": 5.0}
    expected = {"run": names, "begun": {"m0": 0.0, "m1": 1.0, "old": 5.0}}
    target = {name: {leaf: np.zeros(2, np.float32) for leaf in leaves} for name, leaves in expected.items()}
    plan = ot.plan_restore(sources, target)
    assert {name: values(state) for name, state in plan.execute().items()} == expected
    assert any("source 'run'" in warning for warning in plan.warnings) == (not rest)
    for _ in range(2):
        with ocp.CheckpointManager(run.parent / "next", item_handlers=ot.TrainStateHandler()) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=sources)
            assert {name: values(state) for name, state in start.state.items()} == expected
            manager.save(start.step + 1, args=ot.args.TrainStateSave(start.state))
    with pytest.raises(ot.RestorePlanError, match="missing in the record"):
        ot.restore({"run": ot.Source(run, [RENAME, SWAP])}, None)
    again = ot.restore({"run": ot.Source(run, SWAP)}, None, is_resuming=False)
    assert values(again["run"]) == values(STATE)


# -- random lists


def grown(chance, versions, count):
    """Returns a rule more, some of which no name or shape shows, and adds the state that it leads to."""
    state = versions[-1]
    name, other = chance.sample(sorted(state), 2)
    rest = {key: leaf for key, leaf in state.items() if key != name}
    others = {key: leaf for key, leaf in rest.items() if key != other}
    new = f"r{count}"
    kinds = {
        "rename": (T.Rename([(name, new)]), {**rest, new: state[name]}),
        "swap": (T.Rename([(name, other), (other, name)]), {**state, name: state[other], other: state[name]}),
        "transpose": (T.Transpose(name), {**state, name: state[name].T}),
        "negate": (T.Affine(name, -1.0, count), {**state, name: state[name] * np.float32(-1) + np.float32(count)}),
    }
    if len(state) > 3:
        kinds["drop"] = (T.Drop([name]), rest)
    halves = np.split(state[name], 2) if len(state[name]) % 2 == 0 else None
    if halves is not None:
        kinds["split"] = (
            T.Split(name, [f"{new}a", f"{new}b"], 0),
            {**rest, f"{new}a": halves[0], f"{new}b": halves[1]},
        )
    if state[name].shape == state[other].shape and len(state) > 3:
        joined = np.concatenate([state[name], state[other]], 0)
        kinds["concat"] = (T.Concat([name, other], new, 0), {**others, new: joined})
    rule, after = kinds[chance.choice(sorted(kinds))]
    versions.append(after)
    return rule


def save_by_manager(root, state, lineage):
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, provenance=lineage))


def start(root, source, target, rules):
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        made = ot.restore_or_initialize(manager, target, init_from=source, transforms=rules)
        manager.save(0, args=ot.args.TrainStateSave(made.state))


def save_by_v1(root, source, target, rules, partially=False):
    with ot.v1.context():
        state = v1.load(source, ot.v1.AbstractTrainState(target, rules))
        if not partially:
            v1.save(root / "0", state)
            return
        for name, leaf in state.items():
            v1.partial.save(root / "0", {name: leaf})
        v1.partial.finalize(root / "0")


def save_by_stock(root, state):
    with ocp.CheckpointManager(root) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))


def resume_and_save(root, target, rules, step):
    """Goes on with a longer list, and saves what it leads to."""
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        made = ot.restore_or_initialize(manager, target, transforms=rules)
        manager.save(step, args=ot.args.TrainStateSave(made.state))


SAVERS = ("manager", "start", "v1", "partial", "stock")
PLACES = {"v1": "state", "partial": "state"}


def zeros(state):
    return {name: np.zeros_like(leaf) for name, leaf in state.items()}


def list_of(rules, is_named):
    return ot.Migrations([(f"m{index}", [rule]) for index, rule in enumerate(rules)]) if is_named else rules


def check_history(directory, seed):
    """Saves a run at a random version and restores it with the newest list; returns how many asked, of how many."""
    chance = random.Random(seed)
    versions = [{f"x{index}": np.arange(4, dtype=np.float32).reshape(2, 2) + 10 * index for index in range(5)}]
    rules = [grown(chance, versions, count) for count in range(chance.randint(1, 4))]
    saved, is_named, saver = chance.randint(0, len(rules)), chance.random() < 0.6, chance.choice(SAVERS)
    source, root = directory / "source", directory / "run"
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(source, args=ot.args.TrainStateSave(versions[0], provenance=()))
    first, target = list_of(rules[:saved], is_named), zeros(versions[saved])
    # The source has none of them.
    told = {"is_resuming": False} if saved else {}
    plan = ot.plan_restore(source, target, first, **told)
    expected, asked, total = versions[-1], 0, 0
    by_source = ot.convert(source, directory / "begun", first, **told) and directory / "begun"
    if saver == "manager":
        save_by_manager(root, plan.execute(), plan.provenance)
    elif saver == "start":
        start(root, by_source, target, first)
    elif saver in ("v1", "partial"):
        save_by_v1(root, by_source, target, first, partially=saver == "partial")
    else:
        save_by_stock(root, plan.execute())
    is_known, step = saver != "stock", 0
    if is_known and saver in ("manager", "start") and saved < len(rules) and chance.random() < 0.4:
        saved, step = chance.randint(saved, len(rules)), 1
        try:
            resume_and_save(root, zeros(versions[saved]), list_of(rules[:saved], is_named), step)
        except ot.RestorePlanError:
            asked, total, saved, step = asked + 1, total + 1, -1, 0
            return asked, total
    newest = list_of(rules, is_named)
    for name, way in WAYS.items():
        if name in OWN and saver == "stock" and not is_named:
            continue  # a run of another writer is resumed as it is
        total += 1
        shutil.rmtree(directory / "converted", ignore_errors=True)
        try:
            restored = way(root, zeros(expected), newest, step, PLACES.get(saver, "default"))
        except ot.RestorePlanError as error:
            # A checkpoint that records nothing may be of any version.
            assert not is_known or not saved, (seed, name, saver, saved, str(error))
            asked += 1
            continue
        if not is_known and not is_named:
            continue  # by contract all of a plain list is applied to what records nothing
        assert restored.keys() == expected.keys(), (seed, name)
        for leaf in expected:
            np.testing.assert_array_equal(restored[leaf], expected[leaf], err_msg=str((seed, name, saver, saved)))
    return asked, total


@pytest.mark.slow
def test_the_newest_list_leads_from_any_version_to_the_newest_values(tmp_path):
    counts = [check_history(tmp_path / f"{seed}th", seed) for seed in range(int(os.environ.get("GROWING_LISTS", 10)))]
    asked, total = map(sum, zip(*counts, strict=True))
    print(f"{len(counts)} histories, {total} restores, {asked} asked")
    assert asked < total / 2

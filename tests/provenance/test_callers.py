"""Every call asks alike: restores, conversions, differences and the command line."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import RestorePlanError

T = ot.transforms
TWICE = T.Affine("a", scale=2.0)
STATE = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}


def opaque(state, target):
    return TWICE(state, target)


def by_convert(path, rules, tmp_path, **answer):
    ot.convert(path, tmp_path / "converted", rules, overwrite=True, **answer)
    return ot.restore(tmp_path / "converted", STATE)


def by_diff(path, rules, tmp_path, **answer):
    """Returns the state that the difference compared: that of the answer to which it is equal."""
    for scale in (1.0, 2.0, 4.0):
        expected = {**STATE, "a": STATE["a"] * scale}
        with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
            checkpointer.save(tmp_path / "expected", args=ot.args.TrainStateSave(expected, provenance=()), force=True)
        if ot.diff(path, tmp_path / "expected", rules, **answer).equal:
            return expected
    raise AssertionError


def by_manager(path, rules, tmp_path, **answer):
    with ocp.CheckpointManager(path.parents[1], item_handlers=ot.TrainStateHandler()) as manager:
        return manager.restore(int(path.parent.name), args=ot.args.TrainStateRestore(STATE, rules, **answer))


def by_v1(path, rules, tmp_path, **answer):
    return ot.v1.load_and_transform(path, STATE, rules, **answer)


WAYS = {
    "restore": lambda path, rules, tmp_path, **answer: ot.restore(path, STATE, rules, **answer),
    "convert": by_convert,
    "diff": by_diff,
    "manager": by_manager,
    "v1": by_v1,
}


@pytest.fixture
def run(tmp_path):
    """A run with a mapped step, a step of a closure, an unrecorded one, and one of stock Orbax."""
    root = tmp_path / "run"
    mapped = {**STATE, "a": STATE["a"] * 2}
    rules = {0: [TWICE], 1: [lambda state, target: opaque(state, target)]}
    with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
        for step, given in rules.items():
            plan = ot.plan_restore(_source(tmp_path), STATE, given)
            manager.save(step, args=ot.args.TrainStateSave(plan.execute(), provenance=plan.provenance))
        manager.save(2, args=ot.args.TrainStateSave(mapped, provenance=[{"unrecorded": True}]))
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave(mapped))
    return root


def _source(tmp_path):
    path = tmp_path / "source"
    if not path.exists():
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, STATE)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_rules_are_applied_once_by_every_call(run, tmp_path, way):
    call = WAYS[way]
    path = run / "0" / "default"
    assert call(path, [TWICE], tmp_path)["a"][0] == 2
    grown = call(path, [TWICE, T.Affine("b", scale=2.0)], tmp_path) if way != "diff" else {"a": [2], "b": [2]}
    assert (grown["a"][0], grown["b"][0]) == (2, 2)
    assert call(path, [TWICE], tmp_path, is_resuming=False)["a"][0] == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [1, 2, 3], ids=["closure", "unrecorded", "stock"])
def test_every_call_asks_alike(run, tmp_path, way, step):
    call, path = WAYS[way], run / str(step) / "default"
    rules = [lambda state, target: opaque(state, target)] if step == 1 else [TWICE]
    with pytest.raises(RestorePlanError) as raised:
        call(path, rules, tmp_path)
    assert [problem.kind for problem in raised.value.problems] == ["provenance"]
    assert call(path, rules, tmp_path, is_resuming=True)["a"][0] == 2
    assert call(path, rules, tmp_path, is_resuming=False)["a"][0] == 4


@pytest.mark.parametrize("step", [2, 3], ids=["unrecorded", "stock"])
def test_the_command_line_asks_and_takes_the_answer(run, tmp_path, capsys, step):
    target = tmp_path / "target"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(target, {"c": STATE["a"], "b": STATE["b"]})
    rules = tmp_path / "map.json"
    rules.write_text('[["c", "a"], ["b", "b"]]')
    convert = ["convert", str(run / str(step) / "default"), str(tmp_path / "out"), "--map", str(rules)]
    convert += ["--target", str(target)]
    assert main(convert) == 1
    assert "--resuming yes" in capsys.readouterr().err
    assert main([*convert, "--resuming", "no"]) == 0
    assert ot.restore(tmp_path / "out", None)["c"][0] == 2

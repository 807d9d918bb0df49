"""Whatever the history of a run, its values are those of applying the rules once; the model is plain NumPy.

Runs are started, saved, resumed, with the same rules and with edited ones, by new handlers and in new processes,
converted, and restored beside a teacher. Values of all leaves differ, and rules move leaves around, so that rules that
were applied twice, or not at all, show.
"""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import orbax_t5x as ot
from orbax_t5x.provenance import runs

NAMES = ("x", "y", "z")
TARGET = {name: np.zeros(2, np.float32) for name in NAMES}
SOURCE = {name: np.full(2, value, np.float32) for name, value in zip(NAMES, (1.0, 20.0, 300.0), strict=True)}
TEACHER = {name: np.full(2, value, np.float32) for name, value in zip(NAMES, (7.0, 70.0, 700.0), strict=True)}
# New name -> old name.
MOVES = {
    "swap": {"x": "y", "y": "x", "z": "z"},
    "turn": {"x": "z", "y": "x", "z": "y"},
    "back": {"x": "x", "y": "z", "z": "y"},
}
RULES = {
    name: ot.transforms.Rename([(old, new) for new, old in move.items() if old != new]) for name, move in MOVES.items()
}
ITEMS = ("model", "ema")
chains = st.sampled_from(sorted(MOVES))
items = st.sampled_from(ITEMS)


def moved(state, chain):
    return {new: state[old] for new, old in MOVES[chain].items()}


@dataclasses.dataclass(frozen=True)
class Known:
    """What a record must say: the chains that were applied, and whether somebody saved without knowing."""

    chains: frozenset = frozenset()
    unrecorded: bool = False

    def asks_about(self, chain):
        return self.unrecorded or (bool(self.chains) and chain not in self.chains)

    def answered(self, chain):
        return Known(self.chains | {chain}, False)


@dataclasses.dataclass
class Item:
    """One item of the run: its values, what is known of them now, and both in each step."""

    values: dict
    known: Known | None = None
    steps: list = dataclasses.field(default_factory=list)


class Lineages(RuleBasedStateMachine):
    """Histories of one root with two items."""

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="lineage"))
        self.root = self.base / "run"
        self.items = {}
        self.converted = 0
        runs.forget_all()
        for name, state in (("source", SOURCE), ("teacher", TEACHER)):
            with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
                checkpointer.save(self.base / name, args=ot.args.TrainStateSave(state, provenance=()))

    def teardown(self):
        shutil.rmtree(self.base)

    def manager(self):
        return ocp.CheckpointManager(self.root, item_handlers={name: ot.TrainStateHandler() for name in ITEMS})

    def restored(self, item, chain, step=None, **keywords):
        step = self.newest() if step is None else step
        args = ot.args.TrainStateRestore(TARGET, RULES[chain], **keywords)
        with self.manager() as manager:
            return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    def newest(self):
        return len(self.items["model"].steps) - 1

    def write(self, provenance=None):
        """Saves all items as they should be."""
        given = provenance or {}
        saved = {
            name: ot.args.TrainStateSave(item.values, provenance=given.get(name)) for name, item in self.items.items()
        }
        with self.manager() as manager:
            assert manager.save(self.newest() + 1, args=ocp.args.Composite(**saved))
        for item in self.items.values():
            if item.known is None:
                item.known = item.steps[-1][1] if item.steps else Known(unrecorded=True)
            item.steps.append((item.values, item.known))

    @initialize(chain=chains, told=st.sampled_from(["plan", "nothing applied", "not told"]))
    def start(self, chain, told):
        plan = ot.plan_restore(self.base / "source", TARGET, RULES[chain])
        values = plan.execute()
        assert_equal(values, moved(SOURCE, chain))
        known = {"plan": Known(frozenset([chain])), "nothing applied": Known(), "not told": None}[told]
        given = {"plan": plan.provenance, "nothing applied": (), "not told": None}[told]
        self.items = {"model": Item(values, known), "ema": Item(SOURCE, Known())}
        self.write({"model": given, "ema": ()})

    @rule()
    def train_and_save(self):
        for item in self.items.values():
            item.values = {name: array + 1 for name, array in item.values.items()}
        self.write()

    @rule()
    def new_process(self):
        runs.forget_all()
        for item in self.items.values():
            # It goes on from the newest step, whatever the old process had done since.
            item.values, item.known = item.steps[-1][0], None

    @rule(item=items, chain=chains, goes_on=st.booleans())
    def resume(self, item, chain, goes_on):
        model = self.items[item]
        model.values, known = model.steps[-1]
        if known.asks_about(chain):
            with pytest.raises(ot.RestorePlanError) as raised:
                self.restored(item, chain)
            assert [problem.kind for problem in raised.value.problems] == ["provenance"]
            state = self.restored(item, chain, is_resuming=goes_on)
            model.values = model.values if goes_on else moved(model.values, chain)
        elif chain in known.chains:
            state = self.restored(item, chain)
            with pytest.raises(ot.RestorePlanError, match="remove is_resuming=False"):
                self.restored(item, chain, is_resuming=False)
        else:
            state = self.restored(item, chain)
            model.values = moved(model.values, chain)
        model.known = known.answered(chain)
        assert_equal(state, model.values)

    @rule(item=items)
    def restore_plainly(self, item):
        model = self.items[item]
        model.values, model.known = model.steps[-1]
        with self.manager() as manager:
            args = ocp.args.Composite(**{item: ot.args.TrainStateRestore(TARGET)})
            assert_equal(manager.restore(self.newest(), args=args)[item], model.values)

    @rule(item=items, chain=chains)
    def restore_a_teacher(self, item, chain):
        assert_equal(self.restored(item, chain, source=self.base / "teacher"), moved(TEACHER, chain))

    @rule(item=items, chain=chains)
    def convert_and_start_another_run(self, item, chain):
        values, known = self.items[item].steps[-1]
        self.converted += 1
        converted = self.base / f"converted_{self.converted}"
        # What nobody recorded is transformed, with a warning; what was applied already is not.
        ot.convert(self.root / str(self.newest()) / item, converted, RULES[chain])
        applied = not known.unrecorded and chain in known.chains
        expected = values if applied else moved(values, chain)
        assert_equal(ot.restore(converted, TARGET), expected)
        assert_equal(ot.restore(converted, TARGET, RULES[chain]), expected)

    @rule(chain=chains)
    @precondition(lambda self: self.newest() > 0)
    def restore_an_older_step(self, chain):
        values, known = self.items["model"].steps[0]
        if known.asks_about(chain):
            state = self.restored("model", chain, 0, is_resuming=True)
        else:
            state = self.restored("model", chain, 0)
            values = values if chain in known.chains else moved(values, chain)
        assert_equal(state, values)
        self.items["model"].values, self.items["model"].known = values, known.answered(chain)


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array)


Lineages.TestCase.settings = settings(
    max_examples=6, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLineages = Lineages.TestCase

PROCESS = """
import sys
import numpy as np
import orbax.checkpoint as ocp
import orbax_t5x as ot

root, step = sys.argv[1], int(sys.argv[2])
swap = ot.transforms.Rename([("x", "y"), ("y", "x")])
target = {name: np.zeros(2, np.float32) for name in "xyz"}
with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
    try:
        state = manager.restore(step - 1, args=ot.args.TrainStateRestore(target, swap))
    except ot.RestorePlanError as error:
        print(error.problems[0].kind)
        state = manager.restore(step - 1, args=ot.args.TrainStateRestore(target, swap, is_resuming=True))
    manager.save(step, args=ot.args.TrainStateSave(state))
    print(state["x"][0], state["y"][0])
"""


def test_real_processes_remember_an_answer(tmp_path):
    """A new process knows what the run's files say, and nothing else."""
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(SOURCE))
    told = []
    for step in ("1", "2"):
        arguments = [sys.executable, "-c", PROCESS, str(tmp_path), step]
        told.append(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split())
    assert told == [["provenance", "1.0", "20.0"], ["1.0", "20.0"]]

"""Whatever the history of a run, its values are those of applying the rules once; the model is plain NumPy.

Runs are started, saved, resumed, with the same rules and with edited ones, by new handlers and in new processes,
converted, and restored beside a teacher. Values of all leaves differ, and rules move leaves around, so that rules that
were applied twice, or not at all, show.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import orbax_t5x as ot
from orbax_t5x.provenance import records, runs
from orbax_t5x.provenance.chains import ChainRecord

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
DIGESTS = {name: ChainRecord.of([transform]).digest for name, transform in RULES.items()}
chains = st.sampled_from(sorted(MOVES))
telling = st.sampled_from(["plan", "nothing applied", "not told"])
items = st.sampled_from(ITEMS)


def moved(state, chain):
    return {new: state[old] for new, old in MOVES[chain].items()}


UNKNOWN = "?"


def history_of(entries):
    """Chains that changed values. An entry that ends with "+" is an answer, "applied already"."""
    return [entry for entry in entries if not entry.endswith("+")]


def verdict(entries, chain):
    """What a restore of an own step does: "apply", "once" or "ask"."""
    readings, names = [()], [entry for entry in entries if entry != UNKNOWN]
    for entry in entries:
        if entry == UNKNOWN:
            readings = []
        elif entry.endswith("+"):
            readings = [*filter(None, readings), (entry[:-1],)]
        else:
            readings = [*((*one, entry) for one in readings), (entry,)]
    if (chain,) in readings:
        return "once"
    return "ask" if names or UNKNOWN in entries else "apply"


def conversion(entries, chain):
    """What a conversion does: "apply", "once" or "ask"; it asks where a rule of the list is recorded."""
    own = verdict(entries, chain)
    names = [entry.rstrip("+") for entry in entries]
    last = len(names) - 1 - names[::-1].index(UNKNOWN) if UNKNOWN in names else -1
    is_unrecorded = last >= 0 and not any(entry.endswith("+") for entry in entries[last:])
    given = set(RULES[chain].rules)
    is_shared = any(not given.isdisjoint(RULES[name].rules) for name in names if name != UNKNOWN)
    if own != "ask" or is_unrecorded or not is_shared:
        return "once" if own == "once" else "apply"
    return "ask"


@dataclasses.dataclass
class Entry:
    """The model of an entry in the table of runs."""

    entries: tuple
    restored: bool = False
    ambiguous: bool = False


@dataclasses.dataclass(eq=False)
class Item:
    """One item of the run: the state in memory, the entry of the table, and what each step holds and records."""

    values: dict
    entries: tuple = ()
    provenance: tuple | None = None
    table: Entry | None = None
    steps: dict = dataclasses.field(default_factory=dict)

    def note_restored(self, entries):
        if self.table is None or not self.table.restored:
            self.table = Entry(entries, True)
        elif history_of(self.table.entries) == history_of(entries):
            answers = [entry for entry in entries if entry.endswith("+") and entry not in self.table.entries]
            self.table.entries += tuple(answers)
        else:
            self.table.ambiguous = True

    def record(self, given=None):
        """Returns what a save records."""
        table = self.table or Entry(self.steps[max(self.steps)][1] if self.steps else (UNKNOWN,))
        if given is not None:
            table = Entry(given, table.restored)
        elif table.ambiguous:
            table.entries = (UNKNOWN,)
        self.table = table
        return table.entries


class Lineages(RuleBasedStateMachine):
    """Histories of a root with two items, in one process and in several."""

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

    def manager(self, handlers=None):
        handlers = handlers or {name: ot.TrainStateHandler() for name in ITEMS}
        return ocp.CheckpointManager(self.root, item_handlers=handlers)

    @contextlib.contextmanager
    def v1_checkpointer(self):
        with ot.v1.context(), v1.training.Checkpointer(self.root) as checkpointer:
            yield checkpointer

    def restored(self, item, transforms, step=None, *, by_v1=False, **keywords):
        """Returns the restored item, and the provenance to pass (version 0 only)."""
        step = self.newest() if step is None else step
        if by_v1:
            with self.v1_checkpointer() as checkpointer:
                abstract = {item: ot.v1.AbstractTrainState(TARGET, transforms, **keywords)}
                return checkpointer.load_checkpointables(step, abstract)[item], None
        handlers = {name: ot.TrainStateHandler() for name in ITEMS}
        args = ocp.args.Composite(**{item: ot.args.TrainStateRestore(TARGET, transforms, **keywords)})
        with self.manager(handlers) as manager:
            return manager.restore(step, args=args)[item], handlers[item].provenance

    def newest(self):
        return max(self.items["model"].steps, default=-1)

    def write(self, given=None, *, by_v1=False):
        """Saves all items; `given`: item -> (what the model records, `provenance=`)."""
        given, step = given or {}, self.newest() + 1
        ambiguous = [item for item in self.items.values() if item.table and item.table.ambiguous]
        expected = {name: item.record(given.get(name, (None,))[0]) for name, item in self.items.items()}
        if by_v1:
            with self.v1_checkpointer() as checkpointer:
                tree = {name: item.values for name, item in self.items.items()}
                assert checkpointer.save_checkpointables(step, tree)
        else:
            saved = {
                name: ot.args.TrainStateSave(item.values, provenance=given.get(name, (None, None))[1])
                for name, item in self.items.items()
            }
            with self.manager() as manager:
                assert manager.save(step, args=ocp.args.Composite(**saved))
        for name, item in self.items.items():
            recorded = records.from_metadata(json.loads((self.root / str(step) / name / "_METADATA").read_text()))
            names = [UNKNOWN if "unrecorded" in one else one["digest"] for one in recorded if one.get("digest", 1)]
            assert names == [DIGESTS.get(one.rstrip("+"), one) for one in expected[name]]
            if item not in ambiguous and UNKNOWN not in expected[name]:
                assert history_of(expected[name]) == history_of(item.entries)
            item.steps[step] = (item.values, expected[name])
            item.entries = expected[name]

    def begin(self, chain, told):
        plan = ot.plan_restore(self.base / "source", TARGET, RULES[chain])
        values = plan.execute()
        assert_equal(values, moved(SOURCE, chain))
        given = {"plan": ((chain,), plan.provenance), "nothing applied": ((), ()), "not told": (None, None)}[told]
        self.items = {"model": Item(values, given[0] or ()), "ema": Item(SOURCE)}
        self.write({"model": given, "ema": ((), ())})

    @initialize(chain=chains, told=telling)
    def start(self, chain, told):
        self.begin(chain, told)

    @rule(chain=chains, told=telling, by_manager=st.booleans())
    def delete_all_and_start_anew(self, chain, told, by_manager):
        if by_manager:
            with self.manager() as manager:
                for step in self.items["model"].steps:
                    manager.delete(step)
        else:
            shutil.rmtree(self.root)
        self.begin(chain, told)

    @rule(by_v1=st.booleans())
    def train_and_save(self, by_v1):
        for item in self.items.values():
            item.values = {name: array + 1 for name, array in item.values.items()}
        self.write(by_v1=by_v1)

    @rule()
    def save_with_what_the_restore_did(self):
        given = {
            name: (item.entries, item.provenance)
            for name, item in self.items.items()
            if item.provenance is not None
            and item.table
            and (item.table.ambiguous or item.table.entries == item.entries)
        }
        self.write(given)

    @rule()
    def new_process(self):
        runs.forget_all()
        for item in self.items.values():
            # It goes on from the newest step, whatever the old process had done since.
            item.values, item.entries = item.steps[self.newest()]
            item.table = item.provenance = None

    @rule()
    def go_on_in_a_copy(self):
        self.converted += 1
        copied = self.base / f"run_of_{self.converted}"
        shutil.copytree(self.root, copied)
        self.root = copied
        for item in self.items.values():
            item.values, item.entries = item.steps[self.newest()]
            item.table = item.provenance = None

    @rule()
    def copy_a_step(self):
        newest = self.newest()
        shutil.copytree(self.root / str(newest), self.root / str(newest + 1))
        for item in self.items.values():
            item.steps[newest + 1] = item.steps[newest]

    @rule(
        item=items, chain=chains, goes_on=st.booleans(), older=st.booleans(), adopts=st.booleans(), by_v1=st.booleans()
    )
    def restore_a_step(self, item, chain, goes_on, older, adopts, by_v1):
        """Resumes from the newest or the oldest step, or only evaluates it."""
        model, step = self.items[item], (min if older else max)(self.items[item].steps)
        values, entries = model.steps[step]
        outcome = verdict(entries, chain)
        call = functools.partial(self.restored, item, RULES[chain], step, by_v1=by_v1)
        if outcome == "ask":
            with pytest.raises(ot.RestorePlanError) as raised:
                call()
            assert [problem.kind for problem in raised.value.problems] == ["provenance"]
            state, provenance = call(is_resuming=goes_on)
            values, entries = (
                (values, (*entries, f"{chain}+")) if goes_on else (moved(values, chain), (*entries, chain))
            )
        else:
            state, provenance = call()
            if outcome == "once":
                with pytest.raises(ot.RestorePlanError, match="remove is_resuming=False"):
                    call(is_resuming=False)
            else:
                values, entries = moved(values, chain), (*entries, chain)
        assert_equal(state, values)
        self.took(model, values, entries, provenance, adopts)

    @rule(item=items, older=st.booleans(), adopts=st.booleans(), by_v1=st.booleans())
    def restore_plainly(self, item, older, adopts, by_v1):
        model, step = self.items[item], (min if older else max)(self.items[item].steps)
        values, entries = model.steps[step]
        state, provenance = self.restored(item, (), step, by_v1=by_v1)
        assert_equal(state, values)
        self.took(model, values, entries, provenance, adopts)

    @rule(item=items, adopts=st.booleans())
    def restore_as_stock(self, item, adopts):
        model = self.items[item]
        values, entries = model.steps[self.newest()]
        handlers = {name: ot.TrainStateHandler() for name in ITEMS}
        with self.manager(handlers) as manager:
            args = ocp.args.Composite(**{item: ot.args.TrainStateRestore()})
            assert_equal(manager.restore(self.newest(), args=args)[item], values)
        self.took(model, values, entries, handlers[item].provenance, adopts)

    def took(self, item, values, entries, provenance, adopts):
        """Takes a restored state for the job's, or leaves it; the first in a process is the job's."""
        is_first = item.table is None or not item.table.restored
        item.note_restored(entries)
        if adopts or is_first:
            item.values, item.entries, item.provenance = values, entries, provenance

    @rule(item=items, chain=chains)
    def restore_a_teacher(self, item, chain):
        state, _ = self.restored(item, RULES[chain], source=self.base / "teacher")
        assert_equal(state, moved(TEACHER, chain))

    @rule(item=items, chain=chains)
    def convert_and_start_another_run(self, item, chain):
        values, entries = self.items[item].steps[self.newest()]
        self.converted += 1
        converted = self.base / f"converted_{self.converted}"
        # What nobody recorded is transformed, with a warning; what was applied already is not.
        convert = functools.partial(ot.convert, self.root / str(self.newest()) / item, converted, RULES[chain])
        outcome = conversion(entries, chain)
        if outcome == "ask":
            with pytest.raises(ot.RestorePlanError, match="rules that were applied to this state are not those given"):
                convert()
            return
        convert()
        expected = values if outcome == "once" else moved(values, chain)
        assert_equal(ot.restore(converted, TARGET), expected)
        assert_equal(ot.restore(converted, TARGET, RULES[chain]), expected)


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array)


Lineages.TestCase.settings = settings(
    max_examples=int(os.environ.get("LINEAGE_HISTORIES", 6)),
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
TestLineages = pytest.mark.slow(Lineages.TestCase)

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

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
from orbax_t5x.provenance import records
from tests.support.recorded_chains import chain_digest

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
DIGESTS = {name: chain_digest([transform]) for name, transform in RULES.items()}
chains = st.sampled_from(sorted(MOVES))
telling = st.sampled_from(["plan", "nothing applied", "not told"])
items = st.sampled_from(ITEMS)


def moved(state, chain):
    return {new: state[old] for new, old in MOVES[chain].items()}


UNKNOWN = "?"
AMBIGUOUS = "differing"


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


@dataclasses.dataclass(eq=False)
class Item:
    """One item of the run: the state in memory, what restores led to, and what each step holds and records."""

    values: dict
    entries: tuple = ()
    provenance: tuple | None = None
    led_to: tuple | str | None = None
    steps: dict = dataclasses.field(default_factory=dict)

    def note_restored(self, entries):
        if self.led_to is None:
            self.led_to = entries
        elif self.led_to != AMBIGUOUS and history_of(self.led_to) == history_of(entries):
            self.led_to += tuple(entry for entry in entries if entry.endswith("+") and entry not in self.led_to)
        else:
            self.led_to = AMBIGUOUS

    def record(self, given=None):
        """Returns what a save records."""
        led_to = self.led_to
        if led_to is None and given is None:
            return self.steps[max(self.steps)][1] if self.steps else (UNKNOWN,)
        recorded = given if given is not None else (UNKNOWN,) if led_to == AMBIGUOUS else led_to
        if given is not None or recorded == (UNKNOWN,):
            self.led_to = None
        return recorded


class Lineages(RuleBasedStateMachine):
    """Histories of a root with two items, in one process and in several."""

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="lineage"))
        self.root = self.base / "run"
        self.items = {}
        self.converted = 0
        self.new_job(by_v1=False)
        for name, state in (("source", SOURCE), ("teacher", TEACHER)):
            with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
                checkpointer.save(self.base / name, args=ot.args.TrainStateSave(state, provenance=()))

    def teardown(self):
        shutil.rmtree(self.base)

    def new_job(self, *, by_v1):
        """Begins a process, which saves and restores with handlers or with a context of its own."""
        self.by_v1 = by_v1
        self.handlers = {name: ot.TrainStateHandler() for name in ITEMS}
        self.context = ot.v1.context()
        for item in self.items.values():
            # It goes on from the newest step, whatever the old process had done since.
            item.values, item.entries = item.steps[self.newest()]
            item.led_to = item.provenance = None

    def manager(self):
        return ocp.CheckpointManager(self.root, item_handlers=self.handlers)

    @contextlib.contextmanager
    def v1_checkpointer(self):
        with self.context, v1.training.Checkpointer(self.root) as checkpointer:
            yield checkpointer

    def restored(self, item, transforms, step, **keywords):
        """Returns the restored item, and the provenance to pass (version 0 only)."""
        if self.by_v1:
            with self.v1_checkpointer() as checkpointer:
                abstract = {item: ot.v1.AbstractTrainState(TARGET, transforms, **keywords)}
                return checkpointer.load_checkpointables(step, abstract)[item], None
        args = ocp.args.Composite(**{item: ot.args.TrainStateRestore(TARGET, transforms, **keywords)})
        with self.manager() as manager:
            return manager.restore(step, args=args)[item], self.handlers[item].provenance

    def newest(self):
        return max(self.items["model"].steps, default=-1)

    def write(self, given=None):
        """Saves all items; `given`: item -> (what the model records, `provenance=`)."""
        given, step = given or {}, self.newest() + 1
        ambiguous = [item for item in self.items.values() if item.led_to == AMBIGUOUS]
        expected = {name: item.record(given.get(name, (None,))[0]) for name, item in self.items.items()}
        if self.by_v1:
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
        self.items = {}
        self.new_job(by_v1=False)
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

    @rule()
    def train_and_save(self):
        for item in self.items.values():
            item.values = {name: array + 1 for name, array in item.values.items()}
        self.write()

    @rule()
    def save_with_what_the_restore_did(self):
        given = {
            name: (item.entries, item.provenance)
            for name, item in self.items.items()
            if item.provenance is not None and item.led_to in (AMBIGUOUS, item.entries)
        }
        self.write(given)

    @rule(by_v1=st.booleans())
    def new_process(self, by_v1):
        self.new_job(by_v1=by_v1)

    @rule()
    def go_on_in_a_copy(self):
        self.converted += 1
        copied = self.base / f"run_of_{self.converted}"
        shutil.copytree(self.root, copied)
        self.root = copied
        self.new_job(by_v1=self.by_v1)

    @rule()
    def copy_a_step(self):
        newest = self.newest()
        shutil.copytree(self.root / str(newest), self.root / str(newest + 1))
        for item in self.items.values():
            item.steps[newest + 1] = item.steps[newest]

    @rule(item=items, chain=chains, goes_on=st.booleans(), older=st.booleans(), adopts=st.booleans())
    def restore_a_step(self, item, chain, goes_on, older, adopts):
        """Resumes from the newest or the oldest step, or only evaluates it."""
        model, step = self.items[item], (min if older else max)(self.items[item].steps)
        values, entries = model.steps[step]
        outcome = verdict(entries, chain)
        call = functools.partial(self.restored, item, RULES[chain], step)
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

    @rule(item=items, older=st.booleans(), adopts=st.booleans())
    def restore_plainly(self, item, older, adopts):
        model, step = self.items[item], (min if older else max)(self.items[item].steps)
        values, entries = model.steps[step]
        state, provenance = self.restored(item, (), step)
        assert_equal(state, values)
        self.took(model, values, entries, provenance, adopts)

    @rule(item=items, adopts=st.booleans())
    def restore_as_stock(self, item, adopts):
        model = self.items[item]
        values, entries = model.steps[self.newest()]
        if self.by_v1:
            return
        with self.manager() as manager:
            args = ocp.args.Composite(**{item: ot.args.TrainStateRestore()})
            assert_equal(manager.restore(self.newest(), args=args)[item], values)
        self.took(model, values, entries, self.handlers[item].provenance, adopts)

    def took(self, item, values, entries, provenance, adopts):
        """Takes a restored state for the job's, or leaves it; the first in a process is the job's."""
        is_first = item.led_to is None
        item.note_restored(entries)
        if adopts or is_first:
            item.values, item.entries, item.provenance = values, entries, provenance

    @rule(item=items, chain=chains)
    def restore_a_teacher(self, item, chain):
        args = ot.args.TrainStateRestore(TARGET, RULES[chain], source=self.base / "teacher")
        with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
            state = checkpointer.restore(self.root / str(self.newest()) / item, args=args)
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
from tests.support.recorded_chains import chain_digest

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

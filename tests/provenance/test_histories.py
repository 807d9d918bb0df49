"""Random histories of runs: no rule is applied twice or left out silently, whoever restores and saves.

Each rule doubles a leaf of its own, so that a state tells how often each rule was applied to it. A history is a run of
several days. Each day somebody restores a step (a manager, `restore_or_initialize`, `ot.restore`, Orbax v1), with a
list that may have grown or been edited, and saves it with the same handler, with another one, with stock Orbax, or not
at all. What a call may do is judged by a model of the three rows of the contract, which reads the records as JSON, and
by what the state counts. Every question is answered truthfully.

`HISTORIES=5000 pytest tests/provenance/test_histories.py` runs more of them than the suite, from `HISTORIES_SEED` on.
"""

import collections
import contextlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import orbax_t5x as ot
from orbax_t5x.restoring.plan import ExecutedPlans

T = ot.transforms
LEAVES = "abcdef"
ITEM = "state"
HISTORIES = int(os.environ.get("HISTORIES", "25"))
SEED = int(os.environ.get("HISTORIES_SEED", "0"))
DAYS = 6

# A rule is (leaf, times that it doubles, source); an edited rule doubles its leaf another number of times.
Rule = collections.namedtuple("Rule", "leaf times source")
AUTO = Rule("auto", 0, "")
TOPS = {"source": "model", "auto": "params"}


def transform_of(rule, prefix):
    return T.Affine(rule.leaf if rule.source else prefix + rule.leaf, scale=2.0**rule.times)


class Run:
    """A run with a growing list of rules, and the model of its states."""

    def __init__(self, root, randomness):
        self.root, self.random = root, randomness
        self.kind = randomness.choice(["list", "list", "migrations", "source", "auto"])
        self.top = TOPS.get(self.kind, "")
        self.prefix = f"{self.top}/" if self.top else ""
        self.leaves = iter(LEAVES)
        self.rules = [self.new_rule() for _ in range(randomness.randint(0, 2))]
        self.own_rules = [self.new_rule("model")] if self.kind == "source" else []
        self.handlers = [ot.TrainStateHandler(), ot.TrainStateHandler()]
        self.context = ot.v1.context()
        self.steps = {}  # step -> how often each leaf was doubled
        self.outcomes = collections.Counter()

    def new_rule(self, source=""):
        return Rule(next(self.leaves), 1, source)

    # -- what calls are given

    @property
    def given(self):
        """All rules of a call, a source's own first."""
        return [*self.own_rules, *self.rules]

    def transforms(self, rules):
        chain = [transform_of(rule, self.prefix) for rule in rules]
        if self.kind == "migrations":
            return ot.Migrations([(f"to-{rule.leaf}", [step]) for rule, step in zip(rules, chain, strict=True)])
        return ["auto", *chain] if self.kind == "auto" else chain

    def origin(self):
        path = self.root.parent / "origin"
        if self.kind == "auto":
            return path.with_name("origin-below")
        if self.kind != "source":
            return path
        return {"model": ot.Source(path, [transform_of(rule, "") for rule in self.own_rules])}

    def target(self):
        leaves = dict.fromkeys(LEAVES, np.zeros(1, np.float32))
        return {self.top: leaves} if self.top else leaves

    def counts(self, state):
        leaves = state[self.top] if self.top else state
        return {name: int(np.log2(leaf[0])) for name, leaf in leaves.items()}

    def state(self, counts):
        leaves = {name: np.full(1, 2.0 ** counts[name], np.float32) for name in LEAVES}
        return {self.top: leaves} if self.top else leaves

    def grow_or_edit(self):
        choice = self.random.random()
        if choice < 0.5:
            with contextlib.suppress(StopIteration):
                self.rules.append(self.new_rule())
        elif choice < 0.58 and self.rules:
            position = self.random.randrange(len(self.rules))
            self.rules[position] = self.rules[position]._replace(times=4 - self.rules[position].times)
        elif choice < 0.63 and len(self.rules) > 1:
            self.rules[0], self.rules[1] = self.rules[1], self.rules[0]

    # -- the model

    def record(self, step):
        metadata = json.loads((self.root / str(step) / ITEM / "_METADATA").read_text())
        return (metadata.get("custom_metadata") or {}).get("orbax_t5x", {}).get("provenance")

    def recorded(self, step):
        """Returns the rules that a step has behind it by its record, `None` for none, "?" among them for unknown."""
        record = self.record(step)
        if record is None:
            older = [self.record(other) for other in self.steps if other < step]
            return ["?"] if any(one is not None for one in older) else None
        return [entry_of_json(entry) for entry in record]

    def expected(self, recorded, given):
        """Returns the rules that a restore applies, or None where it asks."""
        rest = []
        for source in dict.fromkeys(rule.source for rule in given):
            own = [rule for rule in recorded or () if rule == "?" or rule.source == source]
            rules = [rule for rule in given if rule.source == source]
            known = own[own.index("?") + 1 :] if "?" in own else own
            known = known[len(known) - known[::-1].index("?") :] if "?" in known else known
            if AUTO in rules and AUTO not in known and "?" not in own:
                rules.remove(AUTO)  # it found nothing when the run began
            count = max(
                count
                for count in range(min(len(known), len(rules)) + 1)
                if known[len(known) - count :] == rules[:count]
            )
            left = rules[count:]
            leaves = {rule.leaf for rule in own if rule != "?"}
            later = source and any(rule != "?" and not rule.source for rule in recorded or ())
            if left and ("?" in own or later or any(rule.leaf in leaves for rule in left)):
                return None
            rest += left
        return rest

    # -- restoring

    def restore(self, how, step, transforms, **answer):
        """Returns the restored state, and the handler that restored it."""
        target = self.target()
        if how == "ot":
            return ot.restore(self.root / str(step), target, transforms, **answer), None
        if how == "v1":
            with self.context, v1.training.Checkpointer(self.root) as checkpointer:
                abstract = ot.v1.AbstractTrainState(target, transforms, **answer)
                return checkpointer.load(step, abstract), "v1"
        manager = self.random.randrange(2)
        with self.manager(manager) as opened:
            if how == "start":
                start = ot.restore_or_initialize(
                    opened, target, init_from=self.origin(), transforms=self.transforms(self.rules), **answer
                )
                assert start.step == step
                return start.state, manager
            args = ot.args.TrainStateRestore(target, transforms, **answer)
            return opened.restore(step, args=ocp.args.Composite(**{ITEM: args}))[ITEM], manager

    def manager(self, number):
        return ocp.CheckpointManager(self.root, item_handlers={ITEM: self.handlers[number]})

    def begin(self):
        counts = {name: 0 for name in LEAVES}
        for rule in self.given:
            counts[rule.leaf] += rule.times
        with self.manager(0) as manager:
            start = ot.restore_or_initialize(
                manager, self.target(), init_from=self.origin(), transforms=self.transforms(self.rules)
            )
        assert self.counts(start.state) == counts and start.how == "initialized"
        self.save(counts, 0, is_known=True)

    def resume(self):
        newest = max(self.steps)
        hows = ["start", "start"] if self.kind == "source" else ["start", "manager", "ot", "v1"]
        how = self.random.choice(hows)
        step = newest if how == "start" or self.random.random() < 0.8 else self.random.choice(list(self.steps))
        counts, recorded, given = dict(self.steps[step]), self.recorded(step), self.given
        # In `ot.restore` "auto" looks anew, and finds nothing where the names fit.
        is_auto = self.kind == "auto" and how != "ot"
        expected = self.expected(recorded, [AUTO, *given] if is_auto else given)
        if recorded is None and how == "start":
            expected = given if self.kind == "migrations" else []
        if expected is not None:
            state, actor = self.restore(how, step, self.transforms(self.rules))
            for rule in expected:
                counts[rule.leaf] += rule.times
            assert self.counts(state) == counts, (recorded, given)
            self.outcomes["applied" if expected else "nothing applied"] += 1
            if recorded is not None:  # once, in its older form if somebody answered that it was applied
                assert all(counts[rule.leaf] in (1, 3) for rule in given), (recorded, given)
        else:
            with pytest.raises(ot.RestorePlanError) as raised:
                self.restore(how, step, self.transforms(self.rules))
            assert [problem.kind for problem in raised.value.problems] == ["provenance"]
            self.outcomes["asked"] += 1
            lacking = [rule for rule in given if not counts[rule.leaf]]
            if len(lacking) in (0, len(given)):
                state, actor = self.restore(how, step, self.transforms(self.rules), is_resuming=not lacking)
            elif how == "start" or self.kind == "migrations":  # nobody can say it in one answer
                return None
            else:
                rules = self.transforms(lacking)
                state, actor = self.restore(how, step, rules, is_resuming=False)
            for rule in lacking:
                counts[rule.leaf] += rule.times
            assert self.counts(state) == counts
        # Stock Orbax's steps begin a record with the first state that one of our handlers restores.
        return counts, actor, "?" not in (recorded or ()) and (recorded is not None or how == "start")

    # -- saving

    def save(self, counts, actor, *, is_known):
        """Saves a state; `is_known` if the handler restored it, and it had no unknown rules behind it."""
        step = max(self.steps, default=-1) + 1
        state = self.state(counts)
        if actor == "v1":
            with self.context, v1.training.Checkpointer(self.root) as checkpointer:
                checkpointer.save(step, state)
        elif actor == "stock":
            with ocp.CheckpointManager(self.root) as manager:
                manager.save(step, args=ocp.args.Composite(**{ITEM: ocp.args.StandardSave(state)}))
        else:
            with self.manager(actor) as manager:
                manager.save(step, args=ocp.args.Composite(**{ITEM: ot.args.TrainStateSave(state)}))
        self.steps[step] = counts
        recorded = self.recorded(step)
        assert not is_known or (recorded is not None and "?" not in recorded)
        if recorded is not None and "?" not in recorded:
            # Nothing is recorded that the state has not behind it, and nothing is missing.
            assert {rule.leaf for rule in recorded} - {"auto"} == {name for name, count in counts.items() if count}
        self.outcomes["saved, known" if "?" not in (recorded or ("?",)) else "saved, unknown"] += 1

    def live_a_day(self):
        if self.random.random() < 0.6:  # a new process
            ExecutedPlans.states.clear()
            self.handlers = [ot.TrainStateHandler(), ot.TrainStateHandler()]
            self.context = ot.v1.context()
        self.grow_or_edit()
        resumed = self.resume()
        if resumed is None:
            return
        counts, actor, is_known = resumed
        saver = actor
        if self.random.random() < 0.35:
            saver = self.random.choice([0, 1, "v1", "stock"])
        if self.random.random() < 0.1:  # killed before, or while, it saves
            if self.random.random() < 0.5:
                (self.root / f"{max(self.steps) + 1}.orbax-checkpoint-tmp-7" / ITEM).mkdir(parents=True, exist_ok=True)
            return
        if saver is None:
            saver = self.random.choice([0, 1, "v1"])
        self.save(counts, saver, is_known=is_known and saver == actor)
        for path in self.root.glob("*.orbax-checkpoint-tmp-7"):
            shutil.rmtree(path)


def entry_of_json(entry):
    if entry.get("unrecorded"):
        return "?"
    if entry.get("auto"):
        return AUTO
    (pattern,) = entry["patterns"]
    scale = float(entry["text"].partition("scale=")[2].partition(",")[0].rstrip(")"))
    return Rule(pattern[-1], int(np.log2(scale)), entry.get("source", ""))


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    path = tmp_path_factory.mktemp("origin") / "origin"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, dict.fromkeys(LEAVES, np.ones(1, np.float32)))
        checkpointer.save(f"{path}-below", {"below": dict.fromkeys(LEAVES, np.ones(1, np.float32))})
    return path


def test_histories(origin):
    outcomes = collections.Counter()
    for seed in range(SEED, SEED + HISTORIES):
        ExecutedPlans.states.clear()
        with tempfile.TemporaryDirectory(prefix="history") as directory:
            for name in ("origin", "origin-below"):
                (Path(directory) / name).symlink_to(origin.with_name(name))
            run = Run(Path(directory) / "run", random.Random(seed))
            try:
                run.begin()
                for _ in range(DAYS):
                    run.live_a_day()
            except BaseException as error:
                error.add_note(f"HISTORIES_SEED={seed}, {run.kind}, {run.given}, {run.steps}")
                raise
            outcomes += run.outcomes
    print(f"{HISTORIES} histories from seed {SEED}: {dict(outcomes)}")
    assert HISTORIES < 10 or all(outcomes[name] for name in ("asked", "applied", "nothing applied"))

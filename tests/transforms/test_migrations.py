"""`Migrations`: each of a growing list is applied once, in order."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.provenance.records import UNRECORDED, to_metadata
from tests.support.memory_checkpoint import checkpoint
from tests.support.recorded_chains import entries_of

T = ot.transforms
NAMES = "abc"
RULES = {name: T.Affine(name, scale=2.0) for name in NAMES}
TARGET = dict.fromkeys(NAMES, np.zeros(1, np.float32))


def migrations(names, **edited):
    return ot.Migrations([(f"to-{name}", [edited.get(name, RULES[name])]) for name in names])


def source(record):
    metadata = {} if record is None else {"custom_metadata": to_metadata(record)}
    return checkpoint({name: np.ones(1, np.float32) for name in NAMES}, metadata=metadata)


def counts_of(state):
    return "".join(name * int(np.log2(leaf[0])) for name, leaf in sorted(state.items()))


def recorded(names):
    return tuple(entries_of(migrations(names).steps))


def restored(record, rules, **options):
    return counts_of(ot.restore(source(record), TARGET, rules, **options))


@pytest.mark.parametrize("record", [None, ()], ids=["no record", "no rules"])
def test_without_recorded_migrations_all_are_applied(record):
    assert restored(record, migrations("ab")) == "ab"


def test_each_is_applied_once_in_order():
    for count in range(len(NAMES) + 1):
        assert restored(recorded(NAMES[:count]), migrations(NAMES)) == NAMES[count:]
    plan = ot.plan_restore(source(recorded("a")), TARGET, migrations("abc"))
    assert plan.provenance == recorded("abc")
    assert str(plan.migrations) == "migrations: 1 of 3 were applied before: to-a"


@pytest.mark.parametrize(
    ("record", "rules"),
    [
        ("ab", migrations("ab", b=T.Affine("b", scale=4.0))),
        ("ab", migrations("abc", a=T.Affine("a", scale=4.0))),
        ("a", ot.Migrations([("to-a", [RULES["a"], RULES["b"]])])),
        ("ab", migrations("ba")),
        ("ab", migrations("acb")),
        ("a", migrations("ba")),
        ("a", ot.Migrations([("renamed", [RULES["a"]])])),
    ],
)
def test_changed_rules_and_other_places_are_problems(record, rules):
    with pytest.raises(RestorePlanError, match=r"\[provenance\].*recorded: \[to-a: .*given: \["):
        restored(recorded(record), rules)
    assert restored(recorded(record), rules, is_resuming=True) == ""


def test_a_name_may_hold_a_rule_of_an_earlier_name():
    twice = ot.Migrations([("there", [RULES["a"]]), ("back", [RULES["a"]])])
    assert restored(tuple(entries_of(twice.steps[:1])), twice) == "a"


def test_a_plain_list_becomes_migrations():
    assert restored(tuple(entries_of([RULES["a"]])), migrations("ab")) == "b"


def test_since_says_what_a_checkpoint_without_a_record_has():
    grown = migrations(NAMES).since("to-b")
    assert restored(None, grown) == "c"
    assert restored((UNRECORDED,), grown) == "c"
    assert restored((), grown) == NAMES  # a record of no rules is a record
    assert restored(recorded("a"), grown) == "bc"
    assert ot.plan_restore(source(None), TARGET, grown).provenance == recorded(NAMES)
    with pytest.raises(ValueError, match="no migration is named 'to-x'; the names are to-a, to-b, to-c"):
        grown.since("to-x")


def test_names_are_unique_texts():
    with pytest.raises(ValueError, match="two migrations are named 'a'"):
        ot.Migrations([("a", []), ("a", [])])
    with pytest.raises(ValueError, match="not empty"):
        ot.Migrations([("", [])])
    for wrong in (["a"], [("a", "b")], [("a", [1])], [(1, [])], [("a", [T.Rename])]):
        with pytest.raises(TypeError, match=r"no migration|no transform"):
            ot.Migrations(wrong)
    with pytest.raises(TypeError, match="other transforms follow Migrations"):
        ot.restore(source(None), TARGET, [migrations("a"), RULES["b"]])


@pytest.mark.parametrize("by_record", [True, False])
def test_a_run_that_began_without_migrations(tmp_path, by_record):
    """A run whose first list was empty; and one that another writer began."""
    ones = {name: np.ones(1, np.float32) for name in NAMES}
    handlers = {"item_handlers": ot.TrainStateHandler()} if by_record else {}
    with ocp.CheckpointManager(tmp_path, **handlers) as manager:
        if by_record:
            ones = ot.restore_or_initialize(manager, ones, transforms=ot.Migrations([]), init_fn=lambda: ones).state
        save = ot.args.TrainStateSave(ones) if by_record else ocp.args.StandardSave(ones)
        manager.save(0, args=save)
    for step, names in enumerate(("a", "a", "abc", "abc"), 1):
        with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
            start = ot.restore_or_initialize(manager, TARGET, transforms=migrations(names))
            assert (counts_of(start.state), start.step) == (names, step - 1)
            manager.save(step, args=ot.args.TrainStateSave(start.state))

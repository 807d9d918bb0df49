"""The record of how a run began, and starts that it decides."""

import logging
import shutil

import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.provenance.records import UNRECORDED
from tests.support.started_runs import OTHER, STATE, SWAP, SWAPPED, T, initial, our_args, ours, recorded, values


def test_several_items_keep_their_own_lineages(tmp_path, target, source):
    root = tmp_path / "root"
    handlers = {name: ot.TrainStateHandler() for name in ("model", "ema")}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        state = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP, item="model").state
        items = {"model": our_args(state), "ema": ot.args.TrainStateSave(STATE, provenance=())}
        manager.save(1, args=ocp.args.Composite(**items))
    both = {"model": target, "ema": target}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        start = ot.restore_or_initialize(manager, both)
        assert start.how == "resumed" and [values(one) for one in start.state.values()] == [SWAPPED, SWAPPED]
        items = {name: our_args(one) for name, one in start.state.items()}
        manager.save(2, args=ocp.args.Composite(**items))
    for item in handlers:
        assert recorded(root / "2" / item) == recorded(root / "1" / item)


# Managers that make their handlers at the first save get one from `restore_or_initialize`.
MANAGERS = {"ours": ours, "no handler": ocp.CheckpointManager}


@pytest.mark.parametrize("how_made", MANAGERS.values(), ids=MANAGERS)
@pytest.mark.parametrize("how", ["initialized", "scratch"])
def test_the_first_save_records_how_the_run_began(tmp_path, target, source, how, how_made):
    root = tmp_path / "root"
    begins = {"init_from": source, "transforms": SWAP} if how == "initialized" else {"init_fn": initial}
    with how_made(root) as manager:
        start = ot.restore_or_initialize(manager, target, **begins)
        assert start.how == how
        manager.save(1, args=our_args(start.state))
    lineage = recorded(root / "1" / "default")
    assert [entry["text"] for entry in lineage] == [SWAP.describe()] * (how == "initialized")
    # A restore by the handler asks nobody.
    with ours(root) as manager:
        again = manager.restore(1, args=ot.args.TrainStateRestore(target, SWAP if how == "initialized" else ()))
    assert values(again) == values(start.state)


def test_a_new_run_in_the_place_of_an_old_one_has_its_own_lineage(tmp_path, target, source):
    root = tmp_path / "root"
    for transforms in (SWAP, OTHER):
        with ours(root) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=source, transforms=transforms)
            manager.save(1, args=our_args(start.state))
        (entry,) = recorded(root / "1" / "default")
        assert entry["text"] == transforms.describe()
        shutil.rmtree(root)


@pytest.mark.slow
def test_a_start_decides_by_the_table(tmp_path, target, source):
    """What is not applied is not recorded; a list that grew has its rest applied, once."""
    root = tmp_path / "root"
    back = T.Rename([("[x]", "z"), ("z", "x")])

    def start(transforms, **answer):
        with ours(root) as manager:
            state, step, _ = ot.restore_or_initialize(
                manager, target, init_from=source, transforms=transforms, **answer
            )
            manager.save(step + 1, args=our_args(state))
        return values(state)

    assert start(SWAP) == SWAPPED
    with pytest.raises(ot.RestorePlanError, match=r"recorded: .*given: .*'z'"):
        start(OTHER)
    grown = {"x": SWAPPED["z"], "y": SWAPPED["y"], "z": SWAPPED["x"]}
    for _ in range(2):
        assert start([SWAP, back]) == grown
    assert [entry["text"] for entry in recorded(root / "3" / "default")] == [SWAP.describe(), back.describe()]
    with pytest.raises(ot.RestorePlanError, match="another order or form"):
        start(SWAP)
    assert start(SWAP, is_resuming=True) == grown
    assert start(SWAP) == grown


@pytest.mark.parametrize("rules", [[SWAP], [lambda state, target: SWAP(state, target)]], ids=["unrecorded", "lambda"])
def test_a_beginning_that_nobody_can_tell_is_asked_about(tmp_path, target, source, rules):
    with ours(tmp_path / "first") as manager:
        told = [UNRECORDED] if isinstance(rules[0], T.Rename) else ot.plan_restore(source, target, rules).provenance
        manager.save(1, args=ot.args.TrainStateSave(STATE, provenance=told))
    first = tmp_path / "first"
    with ours(tmp_path / "second") as manager:
        with pytest.raises(ot.RestorePlanError, match=r"\[provenance\]"):
            ot.restore_or_initialize(manager, target, init_from=first, transforms=rules)
        start = ot.restore_or_initialize(manager, target, init_from=first, transforms=rules, is_resuming=True)
    assert (values(start.state), start.how) == (SWAPPED, "initialized")


def test_a_model_from_scratch_without_a_list_has_no_migrations(tmp_path, target):
    """A record of no rules is a record."""
    with ours(tmp_path) as manager:
        start = ot.restore_or_initialize(manager, target, init_fn=initial)
        manager.save(0, args=our_args(start.state))
    migrations = ot.Migrations([("swap", [SWAP])])
    with ours(tmp_path) as manager:
        start = ot.restore_or_initialize(manager, target, transforms=migrations)
    assert values(start.state) == {**values(initial()), "x": values(initial())["y"], "y": values(initial())["x"]}


@pytest.mark.slow
def test_what_cannot_be_compared_is_asked(tmp_path, target, source):
    root = tmp_path / "root"
    moved = []

    def opaque(state, target):
        moved.append(True)
        return SWAP(state, target)

    def start(**answer):
        with ours(root) as manager:
            state, step, _ = ot.restore_or_initialize(
                manager, target, init_from=source, transforms=[lambda s, t: opaque(s, t)], **answer
            )
            assert values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))

    start()
    with pytest.raises(ot.RestorePlanError, match="a lambda"):
        start()
    start(is_resuming=True)
    assert moved == [True]


SOURCES_WITH_TRANSFORMS = {
    "one": lambda path: (ot.Source(path, SWAP), ()),
    "one, and after it": lambda path: (ot.Source(path, SWAP), [OTHER, OTHER]),
    "several": lambda path: (
        {"a": ot.Source(path, SWAP), "b": path},
        [T.Keep(r"a/.*"), T.Rename([(r"a/(.*)", r"\1")])],
    ),
    "auto": lambda path: (ot.Source(path, SWAP), "auto"),
}


@pytest.mark.parametrize("which", SOURCES_WITH_TRANSFORMS)
def test_transforms_of_sources_are_the_runs_too(tmp_path, target, source, which, caplog):
    init_from, transforms = SOURCES_WITH_TRANSFORMS[which](source)
    for _ in range(2):
        with ours(tmp_path / "root") as manager, caplog.at_level(logging.WARNING, "orbax_t5x"):
            state, step, _ = ot.restore_or_initialize(manager, target, init_from=init_from, transforms=transforms)
            assert values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))
    assert not [record for record in caplog.records if record.name.startswith("orbax_t5x")]


def test_a_source_that_was_mapped_before_is_not_mapped_again(tmp_path, target, source, caplog):
    with ours(tmp_path / "first") as manager:
        state = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP).state
        manager.save(1, args=our_args(state))
    first = tmp_path / "first"
    with ours(tmp_path / "second") as manager, caplog.at_level(logging.WARNING, "orbax_t5x"):
        again = ot.restore_or_initialize(manager, target, init_from=first, transforms=SWAP)
        assert (values(again.state), again.how) == (SWAPPED, "initialized")
    assert "not applied again" in caplog.text
    with ours(tmp_path / "third") as manager:
        turned = ot.restore_or_initialize(manager, target, init_from=first, transforms=SWAP, is_resuming=False)
    assert values(turned.state) == {"x": 1.0, "y": 2.0, "z": 3.0}


@pytest.mark.parametrize("rules", [[SWAP], ot.Migrations([("swap", [SWAP])])], ids=["rules", "Migrations"])
def test_the_call_that_began_from_scratch_applies_nothing_when_it_is_made_again(tmp_path, target, rules):
    """The function makes the newest model: rules for `init_from` are not for it, at no start."""
    for step in range(3):
        with ours(tmp_path / "root") as manager:
            start = ot.restore_or_initialize(manager, target, transforms=rules, init_fn=initial)
            assert (start.how, values(start.state)) == ("resumed" if step else "scratch", values(initial()))
            manager.save(step, args=our_args(start.state))
    with pytest.raises(ot.RestorePlanError, match=r"\[provenance\]"), ours(tmp_path / "root") as manager:
        ot.restore_or_initialize(manager, target, transforms=[OTHER], init_fn=initial)

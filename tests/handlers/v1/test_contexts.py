"""The context of `ot.v1`: where it is active, and what it takes from a base."""

import asyncio
import concurrent.futures
import copy
import json

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from tests.support.orbax_v1 import RULES, assert_same, refused

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


# -- where it is active


def test_a_context_stays_active_when_a_checkpointer_enters_it_again(tmp_path):
    """And is over when it is left, in each thread by itself."""
    made = ot.v1.context()
    with made:
        with ocp.training.Checkpointer(tmp_path / "steps") as checkpointer:
            checkpointer.save(0, {"w": np.ones(2)})
            checkpointer.load(0)
        ocp.save(tmp_path / "1", {"w": np.ones(2)})
        with made, concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(ocp.save, tmp_path / "outside", {"w": np.ones(2)}).result()
        ocp.save(tmp_path / "2", {"w": np.ones(2)})
    copy.deepcopy(made)  # as of any context
    ocp.save(tmp_path / "3", {"w": np.ones(2)})
    assert {path.parent.parent.name for path in tmp_path.rglob("_CHECKSUMS.json")} == {"0", "1", "2"}


def has_sums(path):
    """Saves, and tells whether that was done in a context of ours."""
    ocp.save(path, {"w": np.ones(2)})
    return (path / "state" / "_CHECKSUMS.json").exists()


def test_tasks_enter_one_context_by_turns(tmp_path):
    """Two tasks of a thread, of which the first to enter is the first to leave."""
    made = ot.v1.context()

    async def first(entered, left):
        with made:
            entered.set()
            await left.wait()
            inside = has_sums(tmp_path / "first")
        return inside, has_sums(tmp_path / "after first")

    async def second(entered, left):
        await entered.wait()
        with made:
            left.set()
            await asyncio.wait([running[0]])
            inside = has_sums(tmp_path / "second")
        return inside, has_sums(tmp_path / "after second")

    running = []

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        running.extend(asyncio.create_task(job(entered, left)) for job in (first, second))
        return [*await asyncio.gather(*running), has_sums(tmp_path / "outside")]

    assert asyncio.run(both()) == [(True, False), (True, False), False]


def test_tasks_started_in_a_context_are_in_it_and_enter_it_again(tmp_path):
    made = ot.v1.context()

    async def inner(name, entered, others, left, may_leave):
        inherited = has_sums(tmp_path / f"{name} inherited")
        with made:
            entered.set()
            await others.wait()
            await may_leave.wait()
        left.set()
        return inherited, has_sums(tmp_path / f"{name} left")

    async def outer():
        one, other, one_left, other_left, at_once = (asyncio.Event() for _ in range(5))
        at_once.set()
        with made:
            # The first to enter leaves first.
            inside = await asyncio.gather(
                inner("one", one, other, one_left, at_once), inner("other", other, one, other_left, one_left)
            )
            still = has_sums(tmp_path / "still")
        return inside, still, has_sums(tmp_path / "outside")

    assert asyncio.run(outer()) == ([(True, True), (True, True)], True, False)


def test_a_context_is_left_where_it_was_entered():
    made = ot.v1.context()
    with made, concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = pool.submit(made.__exit__, None, None, None)
        with pytest.raises(ValueError, match="another thread or asyncio task"):
            left.result()


# -- what it takes from a base


def saved_in(context, path):
    """Whether a save in the context has checksums, the record that it makes, and the names of its leaves."""
    with context:
        ocp.save(path, {"w": np.ones(2), "none": np.zeros((0, 3), np.float32)})
    record = json.loads((path / "state" / "_METADATA").read_text())["custom_metadata"]["orbax_t5x"]
    return (path / "state" / "_CHECKSUMS.json").exists(), record["provenance"], set(ocp.load(path))


@pytest.mark.parametrize("inherit", [ot.v1.context, ocp.Context, lambda base: ot.v1.context(ocp.Context(base))])
def test_a_context_has_the_settings_of_a_base_that_is_ours(tmp_path, inherit):
    base = ot.v1.context(provenance=(), checksums=False, on_unsupported="skip")
    of_base = saved_in(base, tmp_path / "base" / "0")
    assert of_base == (False, [], {"w"})
    # Each in a root of its own: what was recorded in one would hold for the next.
    assert saved_in(inherit(base), tmp_path / "heir" / "0") == of_base


@pytest.mark.filterwarnings("ignore:coroutine '_create_paths' was never awaited:RuntimeWarning")
def test_arguments_that_are_given_replace_the_settings_of_the_base(tmp_path):
    base = ot.v1.context(provenance=(), checksums=False, on_unsupported="skip")
    lineage = ot.plan_restore(made_checkpoint(tmp_path), {"v": np.zeros(2)}, RULES).provenance
    checksums, record, names = saved_in(ot.v1.context(base, provenance=lineage), tmp_path / "a" / "0")
    assert (checksums, len(record), names) == (False, 1, {"w"})
    assert saved_in(ot.v1.context(base, checksums=True), tmp_path / "b" / "0") == (True, [], {"w"})
    with ot.v1.context(base, on_unsupported="error"):
        refused(lambda: ocp.save(tmp_path / "c" / "0", {"none": np.zeros((0, 3))}), "no elements")
    # The base stays as it was.
    assert saved_in(base, tmp_path / "d" / "0") == (False, [], {"w"})


def made_checkpoint(directory):
    ocp.save(directory / "made", {"w": np.ones(2)})
    return directory / "made"


def test_a_handler_made_of_ours_stays_in_the_registry_of_a_base(tmp_path):
    saved = []

    class Child(ot.v1.TrainStateHandler):
        async def save(self, directory, checkpointable):
            saved.append(directory.path.name)
            return await super().save(directory, checkpointable)

    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler).add(Child, checkpointable_name="state")
    base = ocp.Context()
    base.checkpointables.registry = registry
    with ot.v1.context(base, provenance=(), checksums=False):
        ocp.save(tmp_path / "1", {"w": np.ones(2)})
        assert_same(ocp.load(tmp_path / "1", ot.v1.AbstractTrainState({"v": np.zeros(2)}, RULES)), {"v": np.ones(2)})
    assert saved == ["state"]
    assert not (tmp_path / "1" / "state" / "_CHECKSUMS.json").exists()
    assert_same(ocp.load(tmp_path / "1"), {"w": np.ones(2)})


# -- for tools that make their own context


@pytest.fixture
def registered():
    before = list(ocp.handlers.global_registry().get_all_entries())
    undo = ot.v1.register()
    yield undo
    undo()
    assert ocp.handlers.global_registry().get_all_entries() == before


@pytest.mark.parametrize("name", ["state", "model_params"])
def test_a_registered_handler_saves_and_loads_in_contexts_of_others(tmp_path, registered, name):
    abstract = ot.v1.AbstractTrainState({"v": np.zeros(2)}, RULES, is_resuming=False)
    with ocp.training.Checkpointer(tmp_path, context=ocp.Context()) as checkpointer:
        checkpointer.save_checkpointables(0, {name: {"w": np.ones(2)}, "config": {"size": 2}})
        loaded = checkpointer.load_checkpointables(0, {name: abstract, "config": None})
    assert_same(loaded, {name: {"v": np.ones(2)}, "config": {"size": 2}})
    assert (tmp_path / "0" / name / "_CHECKSUMS.json").exists()


def test_registrations_are_one_and_handlers_added_meanwhile_stay(tmp_path, registered):
    class Other(ocp.handlers.PyTreeHandler):
        pass

    again = ot.v1.register()
    again()
    again()  # as often as one likes
    assert has_sums(tmp_path / "registered")
    ocp.handlers.register_handler(Other)
    registered()
    entries = ocp.handlers.global_registry().get_all_entries()
    assert entries.pop() == (Other, None)
    assert not has_sums(tmp_path / "not registered")

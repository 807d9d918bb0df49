"""Groups of processes: some processes of a job make a call, or two groups their own at once, beside stock Orbax."""

import dataclasses

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_t5x.multihost.groups import ProcessGroup
from tests.support.jax_job import run_script

_ARRAY = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def processes_of(active, primary=0, prefix=None):
    return ocp.options.MultiprocessingOptions(
        primary_host=primary, active_processes=active, barrier_sync_key_prefix=prefix
    )


def test_one_process_is_a_group():
    group = ProcessGroup.of()
    assert (
        group
        == ProcessGroup.of(processes_of({0}))
        == ProcessGroup.of(processes_of(None, primary=None))
        == ProcessGroup((0,), 0, "", 0)
    )
    assert group.size == 1 and group.rank == group.primary_rank == 0 and group.is_primary


@pytest.mark.parametrize(
    ("active", "primary", "message"),
    [
        ({0}, 1, "primary_host, 1, is not among them"),
        ({1, 2}, 2, "this process, 0, is not among them"),
        ({0, 1}, 0, "active_processes has 1, but the last process is number 0"),
    ],
)
def test_a_group_is_of_members_of_the_job(active, primary, message):
    with pytest.raises(ValueError, match=message):
        ProcessGroup.of(processes_of(active, primary))


def test_ranks_and_keys():
    group = ProcessGroup((1, 3, 6), 3, "", 6)
    assert (group.size, group.rank, group.primary_rank, group.is_primary) == (3, 2, 1, False)
    assert group.part([0, 2]) == ProcessGroup((1, 6), 1, "", 6)
    others = [dataclasses.replace(group, **{name: value}) for name, value in [("prefix", "x"), ("members", (1, 6))]]
    assert len({one.key for one in (group, *others)}) == 3
    assert dataclasses.replace(group, process=1).key == group.key


_BEGIN = """
import os, time
import orbax.checkpoint as ocp
import orbax_t5x as ot
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

root, = sys.argv[1:]
W = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
store = jax._src.distributed.global_state.client
jax.devices()

def options(members, prefix=None, primary=None):
    primary = min(members) if primary is None else primary
    return ocp.options.MultiprocessingOptions(
        primary_host=primary, active_processes=set(members), barrier_sync_key_prefix=prefix
    )

def target_of(members):
    mesh = Mesh(np.array([device for device in jax.devices() if device.process_index in members]), ("x",))
    return {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, PartitionSpec("x")))}

def check(state, added=0):
    for shard in state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, W[shard.index] + added)

def manager_of(path, processes, handler=ot.TrainStateHandler, **more):
    manager_options = ocp.CheckpointManagerOptions(multiprocessing_options=processes, create=False, **more)
    handlers = handler(multiprocessing_options=processes)
    return ocp.CheckpointManager(path, item_handlers=handlers, options=manager_options)

def end():
    # The others are busy until all members have ended.
    store.key_value_set(f"test/{process}", "")
    for number in range(count):
        store.blocking_key_value_get(f"test/{number}", 300_000)
    if process == 0:
        time.sleep(1)
    os._exit(0)
"""

# One of two processes works alone, by each call, as the other does something else.
_ALONE = """
if process == 1:
    end()
os.makedirs(f"{root}/run")
alone = options({0})
named = {"multiprocessing_options": alone}
manager = manager_of(f"{root}/run", alone)
manager.save(1, args=ot.args.TrainStateSave({"w": W}))
manager.wait_until_finished()
restored = manager.restore(1, args=ot.args.TrainStateRestore({"w": np.zeros_like(W)}))
np.testing.assert_array_equal(restored["w"], W)
assert ot.restore_or_initialize(manager, {"w": np.zeros_like(W)}).how == "resumed"
path = f"{root}/run/1/default"
np.testing.assert_array_equal(ot.restore(path, None, **named)["w"], W)
np.testing.assert_array_equal(ot.plan_restore(path, None, **named).execute()["w"], W)
assert ot.convert(path, f"{root}/converted").leaves == 1
assert ot.verify(path, **named).status == "ok" and ot.diff(path, path, **named).equal
tell("ended")
end()
"""


@pytest.mark.slow
def test_a_process_works_without_the_other(tmp_path):
    first, _ = run_script(_BEGIN + _ALONE, 2, tmp_path)
    assert first == ["ended"]


# Two groups of two, one of them without process 0, restore their own runs at once, and are waited for by no other.
_TWO = """
group = process // 2
members = {2 * group, 2 * group + 1}
processes = options(members, f"g{group}")
multihost_utils.sync_global_devices("begun")
for handler in (ocp.PyTreeCheckpointHandler, ot.TrainStateHandler):
    target = target_of(members)
    if handler is ot.TrainStateHandler:
        args = ot.args.TrainStateRestore(target)
    else:
        args = ocp.args.PyTreeRestore(target, ocp.checkpoint_utils.construct_restore_args(target))
    begun = time.monotonic()
    check(manager_of(f"{root}/{group}", processes, handler, read_only=True).restore(7, args=args), 1000 * group)
    assert time.monotonic() - begun < 30
path = f"{root}/{group}/7/default"
for broadcast in (True, False, "auto"):
    check(ot.restore(path, target, broadcast=broadcast, multiprocessing_options=processes), 1000 * group)
plan = ot.plan_restore(path, target, multiprocessing_options=processes)
check(plan.execute(), 1000 * group)
plan.explain("w")
assert ot.diff(path, path, multiprocessing_options=processes).equal
if process == 2 * group:
    ot.convert(path, f"{root}/converted{group}", format="safetensors")
np.testing.assert_array_equal(
    ot.restore(f"{root}/converted{group}", None, multiprocessing_options=processes)["w"], W + 1000 * group
)
context = ocp.v1.options.MultiprocessingOptions(
    primary_host=2 * group, active_processes=members, barrier_sync_key_prefix=f"v{group}"
)
with ocp.v1.Context(multiprocessing_options=context):
    check(ot.v1.load_and_transform(path, target), 1000 * group)
# A group inside another, whose primary is not its first, and the whole job again.
if process in (1, 2):
    inner = options({1, 2}, primary=2)
    check(ot.restore(f"{root}/0/7/default", target_of({1, 2}), multiprocessing_options=inner))
check(ot.restore(f"{root}/1/7/default", target_of({0, 1, 2, 3})), 1000)
try:
    ot.restore(path, None, multiprocessing_options=options({(process + 1) % 4}))
except ValueError as error:
    tell(str(error))
end()
"""


@pytest.mark.slow
def test_two_groups_work_at_once(tmp_path):
    for group in range(2):
        with ocp.CheckpointManager(tmp_path / str(group)) as manager:
            manager.save(7, args=ocp.args.PyTreeSave({"w": _ARRAY + 1000 * group}))
    told = run_script(_BEGIN + _TWO, 4, tmp_path)
    for process, (text,) in enumerate(told):
        assert text.startswith(f"active_processes is {{{(process + 1) % 4}}}, and this process, {process}, is not")

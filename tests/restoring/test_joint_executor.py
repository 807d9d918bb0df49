"""An execution by several processes, here by one, gives what the other kind gives, which loads nothing of it."""

import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.restoring.joint_executor import _JointExecution, gather_checksums
from orbax_t5x.restoring.options import RestoreOptions
from tests.support.memory_checkpoint import AwaitedLeaf, FailingLeaf, checkpoint
from tests.support.placed_arrays import sharded, values

ARRAYS = {"a": values((8, 4)), "b": values((16,)), "c": np.int32(7)}
TARGET = {"a": sharded((8, 4), spec=P("x")), "b": sharded((16,)), "c": np.int32(0)}


@pytest.mark.parametrize("broadcast", [True, False, "auto"])
def test_a_joint_execution_reads_what_a_single_one_reads(kind, broadcast):
    joint, single = (ot.plan_restore(checkpoint(ARRAYS, kind), TARGET) for _ in range(2))
    found, report = _JointExecution(joint, RestoreOptions(broadcast=broadcast), None, ProcessGroup.of()).run()
    expected = single.execute()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value))
    assert single.report is not None and report.bytes_read == single.report.bytes_read


def test_a_joint_execution_raises_its_own_error():
    error = CorruptCheckpointError("broken", path="/memory", leaf="a")
    plan = ot.plan_restore(checkpoint({"a": FailingLeaf("a", values((8, 4)), error)}), {"a": TARGET["a"]})
    with pytest.raises(CorruptCheckpointError, match="broken"):
        _JointExecution(plan, RestoreOptions(broadcast=True), None, ProcessGroup.of()).run()


def test_checksummed_ranges_come_back_by_leaf():
    leaves = [AwaitedLeaf(name, values((4,))) for name in "ab"]
    stats = ReadStats("full")
    covered = ChecksummedRange(3, 9, 0xFFFFFFFF, 1, 1)
    stats.add_range(leaves[1], covered)
    assert gather_checksums(stats, leaves, ProcessGroup.of(), error=None, path=None) == {leaves[1]: [covered]}


_LOCAL_RESTORE = """
import sys
import numpy as np
import orbax_t5x as ot
plan = ot.plan_restore(sys.argv[1], None)
restored = ot.restore(sys.argv[1], {"shared": {"embedding": np.zeros((128, 16), np.float32)}}, strict=False)
assert restored["shared"]["embedding"].any()
rooms = ("orbax_t5x.multihost", "orbax_t5x.restoring.broadcast", "orbax_t5x.restoring.joint_executor")
print([name for name in sys.modules if name.startswith(rooms)])
"""


def test_a_restore_by_one_process_loads_nothing_for_several(goldens):
    command = [sys.executable, "-c", _LOCAL_RESTORE, str(goldens / "tf_bundle" / "t5_1_1_f32")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=800)
    assert ended.stdout.strip() == "[]"

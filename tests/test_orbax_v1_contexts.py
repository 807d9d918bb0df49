"""The context of `ot.v1`: where it is active, and what it takes from a base."""

import concurrent.futures
import copy
import json

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

import orbax_t5x as ot
from tests.test_orbax_v1 import REFUSED, RULES, assert_same, refused_save

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


@REFUSED
def test_arguments_that_are_given_replace_the_settings_of_the_base(tmp_path):
    base = ot.v1.context(provenance=(), checksums=False, on_unsupported="skip")
    lineage = ot.plan_restore(made_checkpoint(tmp_path), {"v": np.zeros(2)}, RULES).provenance
    checksums, record, names = saved_in(ot.v1.context(base, provenance=lineage), tmp_path / "a" / "0")
    assert (checksums, len(record), names) == (False, 1, {"w"})
    assert saved_in(ot.v1.context(base, checksums=True), tmp_path / "b" / "0") == (True, [], {"w"})
    with ot.v1.context(base, on_unsupported="error"):
        refused_save(tmp_path / "c" / "0", {"state": {"none": np.zeros((0, 3))}}, "no elements")
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

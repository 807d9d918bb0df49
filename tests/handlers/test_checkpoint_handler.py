"""Options of Orbax's handler that ours takes hold for restores too, and those of single leaves for saves: beside stock
Orbax with the same options."""

import base64
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, RestorePlanError
from orbax_t5x.restoring import executor
from tests.support.point_handlers import assert_equal, restore, save


def test_devices_that_are_not_here_are_a_problem_by_leaf(tmp_path):
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave({"a": {"b": jnp.ones(2)}, "c": 1}))
    file = path / "_sharding"
    shardings = json.loads(file.read_text())
    name = base64.b64encode(b"a.b").decode()
    shardings[name] = shardings[name].replace(str(jax.devices()[0]), "TPU_99")
    file.write_text(json.dumps(shardings))
    with pytest.raises(ValueError):
        restore(path, ocp.StandardCheckpointHandler(), ocp.args.StandardRestore())
    with pytest.raises(RestorePlanError, match="TPU_99") as raised:
        restore(path, ot.TrainStateHandler())
    assert [problem.leaf for problem in raised.value.problems] == ["a/b"]


@pytest.fixture
def limits(monkeypatch):
    """The bytes that each restore of ours is granted."""
    seen = []

    class Execution(executor.Execution):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(self._limit)

    monkeypatch.setattr(executor, "Execution", Execution)
    return seen


def test_restore_concurrent_gb_bounds_restores_with_a_target(tmp_path, limits):
    tree = {"a": np.ones(2)}
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave(tree))
    for handler, given in (
        (ot.TrainStateHandler(), None),
        (ot.TrainStateHandler(restore_concurrent_gb=2), None),
        (ot.TrainStateHandler(restore_concurrent_gb=2), 1 << 20),
        (ot.TrainStateHandler(restore_concurrent_gb=1), 3 << 30),
    ):
        assert_equal(restore(path, handler, ot.args.TrainStateRestore(tree, memory_limit_bytes=given)), tree)
    assert limits == [256 << 20, 2 * 10**9, 1 << 20, 10**9]


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_restore_concurrent_gb_bounds_restores_without_a_target(tmp_path):
    path = save(tmp_path / "item", ot.TrainStateHandler(), ot.args.TrainStateSave({"a": jnp.ones(1000)}))
    little = {"restore_concurrent_gb": 1e-6}
    for handler in (ocp.PyTreeCheckpointHandler(**little), ocp.StandardCheckpointHandler(**little)):
        args = ocp.args.StandardRestore() if isinstance(handler, ocp.StandardCheckpointHandler) else None
        with pytest.raises(ValueError, match="more bytes than"):
            restore(path, handler, args)
    with pytest.raises(ValueError, match="more bytes than"):
        restore(path, ot.TrainStateHandler(**little))


@pytest.mark.parametrize("checkpointer_type", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_an_empty_tree_is_a_value_error_as_in_orbax(tmp_path, checkpointer_type):
    raised = []
    for handler, args in (
        (ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave({})),
        (ot.TrainStateHandler(), ot.args.TrainStateSave({})),
    ):
        with checkpointer_type(handler) as checkpointer, pytest.raises(ValueError, match="empty") as caught:
            checkpointer.save(tmp_path / "item", args=args)
        raised.append(caught.value)
    assert type(raised[0]) is type(raised[1]) is ValueError
    assert not isinstance(raised[1], CheckpointIOError)


@pytest.mark.parametrize(
    ("error", "is_io"),
    [
        (ValueError("ArrayMetadata not found for a"), False),
        (KeyError("a"), False),
        (ValueError("INVALID_ARGUMENT: Error opening"), False),
        (ValueError("UNAVAILABLE: Error writing"), True),
        (ValueError("INTERNAL: Error writing: No space left on device"), True),
        (OSError("no"), True),
    ],
)
def test_only_failures_of_a_store_are_io_errors(tmp_path, monkeypatch, error, is_io):
    handler = ot.TrainStateHandler()

    def fails(directory):
        raise error

    monkeypatch.setattr(handler._orbax, "finalize", fails)
    with pytest.raises(CheckpointIOError if is_io else type(error)) as caught:
        save(tmp_path / "item", handler, ot.args.TrainStateSave({"a": np.ones(2)}))
    assert (caught.value is error) != is_io
    assert list(tmp_path.iterdir()) == []

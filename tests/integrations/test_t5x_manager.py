"""T5X's directories, words and options, as a manager of its steps takes them."""

import shutil
import sys
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.integrations import t5x
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.t5x_goldens import golden
from tests.support.t5x_jobs import Partitioner, Replicating, states
from tests.support.train_states import inference_state

PREFIX = ocp.CheckpointManagerOptions(step_prefix="checkpoint")


@pytest.mark.slow
def test_a_directory_that_t5x_wrote_natively_is_taken_over(tmp_path):
    source = golden("d1_adafactor")
    state = FlaxOptimTrainState.create(Adafactor(0.1), t5_model.init()[1])
    step = tmp_path / "old" / "checkpoint_3"
    shutil.copytree(source.step, step)

    manager = t5x.CheckpointManager(tmp_path / "old", jax.eval_shape(lambda: state), Replicating(), period=2)
    assert manager.all_steps() == [3] and manager.latest_step() == 3
    restored = manager.restore()
    assert restored.step == 3
    for name, value in flatten(restored.state_dict()).items():
        np.testing.assert_array_equal(value, source.values[name])
    assert manager.save(restored) is False, "the step exists"
    assert manager.save(restored.replace_step(np.int32(5)), force=False) is False, "not at the period"
    assert manager.save(restored.replace_step(np.int32(4)), force=False) is True
    manager.close()
    assert manager.all_steps() == [3, 4]


@pytest.mark.parametrize("kind", ["FlaxOptimTrainState", "InferenceState"])
def test_a_run_that_t5x_resumed_once_goes_on(tmp_path, kind):
    """T5X writes a float step from then on: as it resumes it casts all leaves to the dtype of its saves."""
    saved = states()["FlaxOptimTrainState"]
    tree = saved.state_dict()
    tree["state"]["step"] = np.float32(5)
    with ocp.CheckpointManager(tmp_path / "run", options=PREFIX) as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
    target = jax.eval_shape(lambda: states()[kind])
    own = t5x.CheckpointManager(tmp_path / "run", target, Partitioner())
    restored = own.restore()
    assert restored.step.dtype == np.int32 and int(restored.step) == 5
    expected = flatten(saved.state_dict()["target"])
    for name, value in flatten(restored.state_dict()["target"]).items():
        np.testing.assert_array_equal(value, expected[name])
    own.close()


def test_errors_name_t5xs_settings(tmp_path):
    state = states()["FlaxOptimTrainState"]
    source = golden("d1_adafactor").step
    manager = t5x.CheckpointManager(tmp_path, jax.eval_shape(lambda: state), Partitioner())
    with pytest.raises(ot.RestorePlanError) as raised:
        manager.restore(path=str(source))
    texts = "\n".join(str(problem.fix) for problem in raised.value.problems if problem.fix)
    assert not any(word in texts for word in ("fallback=", "strict=", "transforms=["))
    with pytest.raises(ValueError, match="two checkpoints"):
        manager.restore(step=1, path="x")


@pytest.mark.parametrize(
    "options",
    [{"metric_mode": "best"}, {"keep": 0}, {"metric_name_to_monitor": "loss"}],
    ids=lambda options: next(iter(options)),
)
def test_options_without_a_meaning_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        t5x.CheckpointManager(tmp_path, None, Partitioner(), **options)


def test_the_prefix_is_t5xs(tmp_path, monkeypatch):
    module = types.ModuleType("t5x.checkpoints")
    module.get_checkpoint_prefix = lambda: "ckpt"
    monkeypatch.setitem(sys.modules, "t5x.checkpoints", module)
    manager = t5x.Checkpointer(inference_state(), Replicating(), tmp_path / "run")
    manager.save(inference_state())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ckpt_0"]
    assert manager.all_steps() == [0] and manager.restore().step == 0

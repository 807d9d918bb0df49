"""Train states and the partitioner of T5X's recorded scripts."""

import functools
import json
import types
from pathlib import Path

import jax
from jax.sharding import PartitionSpec

from orbax_t5x.adafactor import Adafactor
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_model
from tests.support.train_states import inference_state

JOB = Path(__file__).parents[1] / "goldens" / "t5x_job"
TREES = json.loads((JOB / "trees.json").read_text())
CONFIG = t5_model.T5Config(heads=8, head_dim=4, mlp=32)


class Partitioner:
    """The real partitioner's mesh, layout and axes: None leaves, no `params_axes`, and no axes of the step."""

    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def get_data_layout(self):
        return types.SimpleNamespace(batch_size=8, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)

    def get_mesh_axes(self, state):
        tree = TREES["inference" if "Inference" in type(state).__name__ else "adafactor"]["leaves"]
        axes = {name: leaf if leaf is None else PartitionSpec(*leaf) for name, (_, _, _, leaf) in tree.items()}
        return state.restore_state(unflatten(axes)).replace(params_axes=None)


class Replicating(Partitioner):
    """For models of other sizes: no axes at all."""

    def get_mesh_axes(self, state):
        return state.restore_state(unflatten(dict.fromkeys(flatten(state.state_dict())))).replace(params_axes=None)


@functools.cache
def states():
    state = FlaxOptimTrainState.create(Adafactor(0.1), t5_model.init(CONFIG)[1])
    return {"FlaxOptimTrainState": state, "InferenceState": inference_state(CONFIG)}

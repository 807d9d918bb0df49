"""Leave T5X: the same code, with another import prefix.

`from t5x import X` becomes `from orbax_t5x import X`; the train state, the optimizer and functions of yours stay.
A native T5X checkpoint is continued; what is saved is T5X's own Orbax layout, which anyone reads with Orbax alone.
"""

import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import orbax_t5x as ot
from orbax_t5x import adafactor, state_utils, train_state  # was: from t5x import ...
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

archive = Path(__file__).parents[2] / "tests/goldens/t5x_native/d1_adafactor.tar.gz"
work = Path(tempfile.mkdtemp())
tarfile.open(archive).extractall(work, filter="data")
checkpoint = next(work.rglob("checkpoint_*"))  # yours: the directory that T5X wrote

model = T5(config_of(checkpoint))  # yours: T5X's network, which needs no T5X
ids = jnp.ones((2, 4), jnp.int32)
optimizer = adafactor.Adafactor(1e-3, logical_factor_rules=adafactor.standard_logical_factor_rules())


def swapped_norms(state_dict, target_state_dict, *, is_resuming=False):  # a function that T5X's job had
    encoder, decoder = r"(.*)/encoder/encoder_norm/(.*)", r"(.*)/decoder/decoder_norm/(.*)"
    rules = [(encoder, r"\1/decoder/decoder_norm/\2"), (decoder, r"\1/encoder/encoder_norm/\2")]
    return state_utils.apply_assignment_map(state_dict, target_state_dict, rules, is_resuming=is_resuming)


@jax.jit
def train_step(state, batch):
    def loss(params):
        logits = jnp.asarray(model.apply({"params": params}, batch, batch))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradient(grads, learning_rate=1e-3), value


abstract = jax.eval_shape(
    lambda: train_state.FlaxOptimTrainState.create(optimizer, model.init(jax.random.key(0), ids, ids))
)
# Was: Checkpointer(...).restore(path, state_transformation_fns=[swapped_norms]).
state = ot.restore(checkpoint, abstract, [swapped_norms])
print(f"continues at step {state.step} with {len(jax.tree.leaves(state.param_states))} leaves of Adafactor's")
with ot.open_checkpoint(checkpoint) as stored:
    norm = stored.leaves["target/decoder/decoder_norm/scale"].get()
print("the function was applied:", np.array_equal(state.params["encoder"]["encoder_norm"]["scale"], norm))
state, loss = train_step(state, ids)
print(f"step {state.step}, the loss is finite: {bool(jnp.isfinite(loss))}")

with ocp.CheckpointManager(work / "run", item_handlers=ot.TrainStateHandler()) as manager:
    manager.save(int(state.step), args=ot.args.TrainStateSave(state))
plain = ocp.PyTreeCheckpointer().restore(work / "run" / f"{state.step}" / "default")
print("Orbax alone reads:", sorted(plain), plain["state"]["step"])

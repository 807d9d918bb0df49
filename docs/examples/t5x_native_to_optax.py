"""Restore a native T5X checkpoint, its optimizer included, into Flax and Optax.

T5X's Adafactor slots become the factored state of `optax.adafactor`; parameters and step go along.
Where that is not exact, or for another optimizer, the parameters alone are taken and the optimizer begins anew.
"""

import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import orbax_t5x as ot
from orbax_t5x.models import config_of
from orbax_t5x.models.linen import T5

archive = Path(__file__).parents[2] / "tests/goldens/t5x_native/d1_adafactor.tar.gz"
work = Path(tempfile.mkdtemp())
tarfile.open(archive).extractall(work, filter="data")
checkpoint = next(work.rglob("checkpoint_*"))  # yours: the directory that T5X wrote

model = T5(config_of(checkpoint))
ids = jnp.ones((1, 4), jnp.int32)


def state_with(optimizer):
    params = model.init(jax.random.key(0), ids, ids)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


# The optimizer goes along: T5X's settings of Adafactor, as Optax spells them.
target = jax.eval_shape(lambda: state_with(optax.adafactor(1e-3)))
rules = [
    ot.transforms.AdafactorSlots(),
    ot.transforms.Rename([(r"target/(.*)", r"params/\1"), (r"state/step", "step")]),
]
plan = ot.plan_restore(checkpoint, target, rules)
state = plan.execute()
exact = sum(entry.fidelity == "exact" for entry in plan.entries if entry.name.startswith("opt_state"))
print(f"step {state.step}; {len(plan.entries)} leaves, {exact} of the optimizer's exactly")

# Another optimizer begins anew, and says so.
target = jax.eval_shape(lambda: state_with(optax.adamw(1e-3)))
state = ot.restore(
    checkpoint,
    target,
    "auto",
    fallback=lambda: state_with(optax.adamw(1e-3)),
    fallback_for=["opt_state/.*"],
    strict=False,  # T5X's slots are left over
)
print(f"with AdamW: step {state.step}, count {state.opt_state[0].count}")

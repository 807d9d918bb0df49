"""T5 in Flax linen (`models.linen`) and in Flax NNX (`models.nnx`): models to begin with, to be copied and changed.

Both are T5.1.0 and T5.1.1 by their `T5Config`, with logical axes on every parameter for `orbax_t5x.with_shardings`.
linen's parameters have the names of T5X's networks, so that T5X's checkpoints restore without rules; NNX's have the
natural ones of `nnx.List`. Neither has dropout. Import the one that you need; `orbax_t5x` itself imports none.

Example:
  >>> from orbax_t5x.models import config_of
  >>> from orbax_t5x.models.linen import T5
  >>> model = T5(config_of(bundle))
  >>> abstract = jax.eval_shape(model.init, jax.random.key(0), *[np.ones((1, 4), np.int32)] * 2)["params"]
  >>> params = ot.restore(bundle, {"params": abstract}, "auto")["params"]
  >>> params["decoder"]["logits_dense"]["kernel"].shape
  (16, 128)
"""

from orbax_t5x.models.config import T5Config, config_of

__all__ = ["T5Config", "config_of"]

"""T5 in linen (`models.linen`) and NNX (`models.nnx`), to be copied and changed.

Both compute T5.1.0, T5.1.1, mT5, umT5 and their encoders by their `T5Config`, which `config_of` reads from a
checkpoint and its config.json. Every parameter has logical axes for `orbax_t5x.with_shardings`. linen's parameters have
the names of T5X's networks, so that T5X's checkpoints restore without rules; NNX's have the natural ones of
`nnx.List`. Neither packs examples, searches by beams or has a decoder alone; LongT5's attention and Switch's experts
are refused by `config_of`. Import the module that you need; `orbax_t5x` itself imports none.

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

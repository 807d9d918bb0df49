"""Mesh TensorFlow's T5 to T5X's: `Translate` as a rule pack."""

from __future__ import annotations

from orbax_t5x.rules.leaf_table import mesh_tf_table
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.transforms import translate


def mesh_tf_to_t5x() -> RulePack:
    """Maps Mesh TensorFlow's T5 to T5X minimal T5, by `Translate`.

    There is no way back, and its `inverse()` raises: several of Mesh TensorFlow's names have one name in T5X.

    Example:
      >>> ot.rules.mesh_tf_to_t5x()({"encoder/final_layer_norm/scale": 1}, {})
      {'target': {'encoder': {'encoder_norm': {'scale': 1}}}}
    """
    call = PackCall("mesh_tf_to_t5x")
    example = "encoder/block_000/layer_000/SelfAttention/q"
    return pack_of(call, (translate.Translate(),), (), example=example, _leaves=mesh_tf_table())

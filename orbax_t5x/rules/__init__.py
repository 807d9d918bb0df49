"""Rule packs: functions of a model's dimensions that give one transform, with `.inverse()`, between two trees of
one model.

Example:
  >>> layer = {"mlp": {"wo": {"kernel": np.ones((8, 4))}}}
  >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer}}}
  >>> scanned = ot.rules.t5_unscanned_to_scanned()(state, {})
  >>> sorted(ot.rules.t5_unscanned_to_scanned().inverse()(scanned, {})["target"]["encoder"])
  ['layers_0', 'layers_1']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_t5x import on_demand

if TYPE_CHECKING:
    from orbax_t5x.rules.alignment.alignment import Alignment, align
    from orbax_t5x.rules.fused import t5_fused_to_unscanned
    from orbax_t5x.rules.gguf import gguf_t5_to_hf_t5
    from orbax_t5x.rules.hugging_face import hf_t5_to_t5x, t5x_to_hf_t5
    from orbax_t5x.rules.hugging_face_flax import hf_flax_t5_to_t5x
    from orbax_t5x.rules.inference import infer
    from orbax_t5x.rules.maxtext import t5x_decoder_to_maxtext
    from orbax_t5x.rules.mesh_tf import mesh_tf_to_t5x
    from orbax_t5x.rules.pack import RulePack
    from orbax_t5x.rules.peft import peft_lora
    from orbax_t5x.rules.pix2struct import pix2struct_decoder_to_hf_t5
    from orbax_t5x.rules.scaled_fp8 import scaled_fp8_to_float32
    from orbax_t5x.rules.t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned, t5_unscanned_to_scanned
    from orbax_t5x.rules.wan import wan_t5_to_hf_t5

__all__ = [
    "Alignment",
    "RulePack",
    "align",
    "gguf_t5_to_hf_t5",
    "hf_flax_t5_to_t5x",
    "hf_t5_to_t5x",
    "infer",
    "mesh_tf_to_t5x",
    "peft_lora",
    "pix2struct_decoder_to_hf_t5",
    "scaled_fp8_to_float32",
    "t5_fused_to_unscanned",
    "t5_minimal_to_scanned",
    "t5_minimal_to_unscanned",
    "t5_unscanned_to_scanned",
    "t5x_decoder_to_maxtext",
    "t5x_to_hf_t5",
    "wan_t5_to_hf_t5",
]

# Name -> module that has it.
_PUBLIC = {
    "Alignment": "orbax_t5x.rules.alignment.alignment",
    "RulePack": "orbax_t5x.rules.pack",
    "align": "orbax_t5x.rules.alignment.alignment",
    "gguf_t5_to_hf_t5": "orbax_t5x.rules.gguf",
    "hf_flax_t5_to_t5x": "orbax_t5x.rules.hugging_face_flax",
    "hf_t5_to_t5x": "orbax_t5x.rules.hugging_face",
    "infer": "orbax_t5x.rules.inference",
    "mesh_tf_to_t5x": "orbax_t5x.rules.mesh_tf",
    "peft_lora": "orbax_t5x.rules.peft",
    "pix2struct_decoder_to_hf_t5": "orbax_t5x.rules.pix2struct",
    "scaled_fp8_to_float32": "orbax_t5x.rules.scaled_fp8",
    "t5_fused_to_unscanned": "orbax_t5x.rules.fused",
    "t5_minimal_to_scanned": "orbax_t5x.rules.t5x",
    "t5_minimal_to_unscanned": "orbax_t5x.rules.t5x",
    "t5_unscanned_to_scanned": "orbax_t5x.rules.t5x",
    "t5x_decoder_to_maxtext": "orbax_t5x.rules.maxtext",
    "t5x_to_hf_t5": "orbax_t5x.rules.hugging_face",
    "wan_t5_to_hf_t5": "orbax_t5x.rules.wan",
}

if not TYPE_CHECKING:  # a misspelled name is an error to type checkers
    __getattr__ = on_demand.loader(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

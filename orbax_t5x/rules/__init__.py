"""Rule packs between the trees of one model: functions of its dimensions.

Example:
  >>> layer = {"mlp": {"wo": {"kernel": np.ones((8, 4))}}}
  >>> state = {"target": {"encoder": {"layers_0": layer, "layers_1": layer}}}
  >>> scanned = ot.rules.t5_unscanned_to_scanned()(state, {})
  >>> sorted(ot.rules.t5_unscanned_to_scanned().inverse()(scanned, {})["target"]["encoder"])
  ['layers_0', 'layers_1']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orbax_t5x import on_demand

# For type checkers; the alias makes a name public.
if TYPE_CHECKING:
    from orbax_t5x.rules.alignment.alignment import Alignment as Alignment
    from orbax_t5x.rules.alignment.alignment import align as align
    from orbax_t5x.rules.fused import t5_fused_to_unscanned as t5_fused_to_unscanned
    from orbax_t5x.rules.gguf import gguf_t5_to_hf_t5 as gguf_t5_to_hf_t5
    from orbax_t5x.rules.graph import register as register
    from orbax_t5x.rules.hugging_face import hf_t5_to_t5x as hf_t5_to_t5x
    from orbax_t5x.rules.hugging_face import t5x_to_hf_t5 as t5x_to_hf_t5
    from orbax_t5x.rules.hugging_face_flax import hf_flax_t5_to_t5x as hf_flax_t5_to_t5x
    from orbax_t5x.rules.inference import infer as infer
    from orbax_t5x.rules.maxtext import t5x_decoder_to_maxtext as t5x_decoder_to_maxtext
    from orbax_t5x.rules.mesh_tf import mesh_tf_to_t5x as mesh_tf_to_t5x
    from orbax_t5x.rules.pack import RulePack as RulePack
    from orbax_t5x.rules.peft import peft_lora as peft_lora
    from orbax_t5x.rules.pix2struct import pix2struct_decoder_to_hf_t5 as pix2struct_decoder_to_hf_t5
    from orbax_t5x.rules.scaled_fp8 import scaled_fp8_to_float32 as scaled_fp8_to_float32
    from orbax_t5x.rules.t5x import t5_minimal_to_scanned as t5_minimal_to_scanned
    from orbax_t5x.rules.t5x import t5_minimal_to_unscanned as t5_minimal_to_unscanned
    from orbax_t5x.rules.t5x import t5_unscanned_to_scanned as t5_unscanned_to_scanned
    from orbax_t5x.rules.wan import wan_t5_to_hf_t5 as wan_t5_to_hf_t5

# The public list: name -> module that has it. A test holds it equal to the imports above.
MODULE_OF = {
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
    "register": "orbax_t5x.rules.graph",
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
    __all__, _public, __dir__ = on_demand.public(__name__, MODULE_OF)
    _pack_names, _pack_function = (
        on_demand.function("orbax_t5x.rules.graph", name) for name in ("pack_names", "pack_function")
    )

    def __getattr__(name: str) -> Any:
        """Returns a public name or a registered pack's function."""
        if name not in MODULE_OF and not name.startswith("_") and name in _pack_names():
            return _pack_function(name)
        return _public(name)

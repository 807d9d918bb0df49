"""Names of llama.cpp's T5, and Hugging Face's."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from orbax_t5x.rules.leaf_table import SUBLAYERS
from orbax_t5x.rules.pack import PackCall, RulePack, pack_of
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.names import Rename
from orbax_t5x.trees.flat import FlatState

_TOWERS = {"encoder": "enc", "decoder": "dec"}
_SUBLAYERS = {"SelfAttention": "attn", "EncDecAttention": "cross_attn", "DenseReluDense": "ffn"}
_ATTENTION = {"q": "q", "k": "k", "v": "v", "o": "o", "rel_b": "relative_attention_bias"}
# `up` is `wi`, and `wi_1` in models that have a gate.
_FEED_FORWARD = {"gate": "wi_0", "down": "wo", "up": "wi_1"}
_OURS = re.compile(r"(?:enc|dec)\..*|token_embd\..*|output\..*")


def _names() -> dict[str, str]:
    """Maps names; `*` is a layer's number."""
    names = {"token_embd.weight": "shared.weight", "output.weight": "lm_head.weight"}
    for tower, short in _TOWERS.items():
        names[f"{short}.output_norm.weight"] = f"{tower}.final_layer_norm.weight"
        for number, (module, _, _) in enumerate(SUBLAYERS[tower]):
            ours, theirs = f"{short}.blk.*.{_SUBLAYERS[module]}", f"{tower}.block.*.layer.{number}"
            names[f"{ours}_norm.weight"] = f"{theirs}.layer_norm.weight"
            for one, other in (_FEED_FORWARD if module == "DenseReluDense" else _ATTENTION).items():
                names[f"{ours}_{one}.weight"] = f"{theirs}.{module}.{other}.weight"
    return names


@dataclasses.dataclass(frozen=True)
class NamesOfGguf(Transform):
    """Renames llama.cpp's names to Hugging Face's."""

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        names = _names()
        is_gated = any(name.endswith(".ffn_gate.weight") for name in state)
        result = NewState(diagnostics)
        for name, value in state.items():
            number = re.search(r"\.blk\.(\d+)\.", name)
            theirs = names.get(name if number is None else f"{name[: number.start(1)]}*{name[number.end(1) :]}")
            if theirs is None:
                if _OURS.fullmatch(name) and not diagnostics.allows_unmapped:
                    message = (
                        "gguf_t5_to_hf_t5() would leave it untranslated: llama.cpp's T5 has no tensor of this name"
                    )
                    diagnostics.problem("unmapped", name, message)
                result.put(name, value, name)
                continue
            if not is_gated:
                theirs = theirs.replace(".wi_1.", ".wi.")
            result.put(theirs if number is None else theirs.replace("*", number[1]), value, name)
        return result.finish()


def gguf_t5_to_hf_t5() -> RulePack:
    """Maps llama.cpp's names of T5 to Hugging Face's.

    `hf_t5_to_t5x()` after it leads to T5X's; `transforms="auto"` joins both.

    Example:
      >>> ot.rules.gguf_t5_to_hf_t5()({"token_embd.weight": 1, "enc.blk.0.attn_q.weight": 2}, {})
      {'shared.weight': 1, 'encoder.block.0.layer.0.SelfAttention.q.weight': 2}
    """
    back = [(theirs, ours) for ours, theirs in _names().items()]
    back += [(theirs.replace(".wi_1.", ".wi."), ours) for theirs, ours in back if ".wi_1." in theirs]
    return pack_of(
        PackCall("gguf_t5_to_hf_t5"),
        (NamesOfGguf(),),
        (
            Rename(
                tuple((re.escape(theirs).replace(r"\*", r"(\d+)"), ours.replace("*", r"\1")) for theirs, ours in back),
                require_match=False,
            ),
        ),
        example="enc.blk.0.attn_q.weight",
        back_example="encoder.block.0.layer.0.SelfAttention.q.weight",
    )

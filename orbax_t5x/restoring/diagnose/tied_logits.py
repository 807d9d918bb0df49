"""Hypothesis: the target's model computes logits with the embedding, and the checkpoint's with a matrix of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.text.wording import listed

# The matrix of a T5 that computes logits, as Hugging Face and T5X name it; and its leaves in an optimizer's state.
_HEAD = re.compile(r"(?:.*/)?(?:lm_head(?:\.weight|/kernel)|decoder/logits_dense/kernel)(?:/\w+)?")
_EMBEDDING = re.compile(r"(?:.*/)?(?:token_embedder/embedding|shared(?:\.weight|/embedding))")
_NOT_GATED = re.compile(r"(?:.*[/.])?wi[/.](?:kernel|weight)")
_PACKS = {"lm_head.weight": "hf_t5_to_t5x", "lm_head/kernel": "hf_flax_t5_to_t5x"}
_SHOWN_NAMES = 5


@dataclasses.dataclass(frozen=True)
class TiedLogits(Hypothesis):
    """A leftover output projection: without it the target's model would compute other logits."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        head = [name for name in unmatched.leftovers if _HEAD.fullmatch(name)]
        target, unfilled = unmatched.target.leaves, set(unmatched.unfilled)
        if not head or any(_HEAD.fullmatch(name) for name in target):
            return
        if not any(_EMBEDDING.fullmatch(name) and name not in unfilled for name in target):
            return  # another model, or names that have nothing in common
        message = (
            "the checkpoint's model computes logits with a matrix of its own, and the target has none: the target "
            f"would tie its logits to the embedding and compute different values ({listed(head, _SHOWN_NAMES)})"
        )
        build = "build the model with an output projection (T5X: logits_via_embedding=False, which makes "
        ways = [Fix.by_target(f"{build}decoder/logits_dense/kernel)")]
        packs = {pack for name in head for pack in _packs_of(unmatched.stored[name])}
        for pack in sorted(packs):
            text = f"if config.json has tie_word_embeddings: true, use ot.rules.{pack}(tie_word_embeddings=True)"
            # A T5 whose feed-forward layers are not gated is version 1.0, whose logits are the embedding's.
            ways.insert(0 if any(map(_NOT_GATED.fullmatch, unmatched.stored)) else 1, Fix.in_program(text))
        yield Explanation(Problem("leftover", head[0] if len(head) == 1 else None, message, Fix.any_of(*ways)), head)


def _packs_of(value: Any) -> list[str]:
    """Returns the packs that make a leaf of Hugging Face's output projection; they name it anew."""
    leaves = as_view(value).leaves() if isinstance(value, LazyArray) else ()
    return [pack for leaf in leaves for end, pack in _PACKS.items() if leaf.name.endswith(end)]

"""Hypotheses on leftover leaves: other parts and other models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from orbax_t5x import on_demand, transforms
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.unexplained import LEAVE_UNREAD
from orbax_t5x.text.wording import counted, leaves_text, listed
from orbax_t5x.transforms.dequantize import (
    MARKER,
    QUANTIZED_ELSEWHERE,
    UNKNOWN_FORM,
    multiplied_by,
    notes_beside,
    scales_beside,
)

_SHOWN_NAMES = 5
_ENCODER = re.compile(r"(?:.*[/.])?enc(?:oder)?[/.].*")
_DECODER = re.compile(r"(?:.*[/.])?(?:dec(?:oder)?[/.].*|(?:lm_head|logits_dense)[/.].*)")
# The matrix of a T5 that computes logits, as Hugging Face and T5X name it; and its leaves in an optimizer's state.
_HEAD = re.compile(r"(?:.*/)?(?:lm_head(?:\.weight|/kernel)|decoder/logits_dense/kernel)(?:/\w+)?")
_EMBEDDING = re.compile(r"(?:.*/)?(?:token_embedder/embedding|shared(?:\.weight|/embedding))")
_NOT_GATED = re.compile(r"(?:.*[/.])?wi[/.](?:kernel|weight)")
_PACKS = {"lm_head.weight": "hf_t5_to_t5x", "lm_head/kernel": "hf_flax_t5_to_t5x"}
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")


@dataclasses.dataclass(frozen=True)
class EncoderOnly(Hypothesis):
    """Leftover leaves of a decoder, for a target without it."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        target = unmatched.target.leaves
        if any(map(_DECODER.fullmatch, target)) or not any(map(_ENCODER.fullmatch, target)):
            return
        names = [name for name in unmatched.leftovers if _DECODER.fullmatch(name)]
        if names:
            left = f"{leaves_text(len(names))} of the checkpoint's decoder"
            message = f"the target has an encoder and no decoder; left over: {left}: {listed(names, _SHOWN_NAMES)}"
            leaf = names[0] if len(names) == 1 else None
            yield Explanation(Problem("leftover", leaf, message, LEAVE_UNREAD), names)


@dataclasses.dataclass(frozen=True)
class UnreadScales(Hypothesis):
    """A leftover leaf that may multiply a quantized weight."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        scales = scales_beside(unmatched.stored, unmatched.leftovers) if unmatched.takes_rules else []
        if scales:
            count = counted(len(scales), "weight is quantized and has a scale", "weights are quantized and have scales")
            message = f"{count} beside them that the target does not take ({scales[0]}), without which they are wrong"
            markers = [name for name in unmatched.leftovers if name.rpartition(".")[2] == MARKER]
            fix = Fix.adding(_pack_function("scaled_fp8_to_float32")())
            notes = notes_beside(unmatched.stored).intersection(unmatched.leftovers)
            yield Explanation(Problem("leftover", None, message, fix), (*scales, *markers, *notes))
            unmatched = unmatched.without({*scales, *notes})
        for name, weight in _multiplied(unmatched):
            message = UNKNOWN_FORM.format(repr(weight))
            yield Explanation(Problem("leftover", name, message, QUANTIZED_ELSEWHERE), (name,))


def _multiplied(unmatched: UnmatchedLeaves) -> Iterator[tuple[str, str]]:
    """Yields leftovers that may multiply a weight, with the weight."""
    first = {leaf: name for name, value in unmatched.source.items() for leaf in _leaf_count(value)}
    left = set(unmatched.leftovers)
    kept = {
        first[leaf]: unmatched.source[first[leaf]]
        for name, value in unmatched.stored.items()
        if name not in left
        for leaf in _leaf_count(value)
        if leaf in first
    }
    for name in unmatched.leftovers:
        origins = [first[leaf] for leaf in _leaf_count(unmatched.stored[name]) if leaf in first]
        yield from ((name, weight) for _, weight in multiplied_by(kept, origins))


@dataclasses.dataclass(frozen=True)
class TiedLogits(Hypothesis):
    """A leftover output projection, which would change the logits."""

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
    """Returns the packs that rename Hugging Face's output projection."""
    leaves = as_view(value).leaves() if isinstance(value, LazyArray) else ()
    return [pack for leaf in leaves for end, pack in _PACKS.items() if leaf.name.endswith(end)]


@dataclasses.dataclass(frozen=True)
class OtherModels(Hypothesis):
    """Leaves below a prefix that the target does not take."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        prefix = _prefix_taken(unmatched) if unmatched.leftovers and unmatched.takes_rules else ""
        # Leftovers that a transform has named otherwise are no model beside the one that it translates.
        names = [name for name in unmatched.leftovers if name in unmatched.source and not name.startswith(prefix)]
        if prefix and names:
            message = (
                f"the target takes what is below {prefix!r}; {leaves_text(len(names))} of the checkpoint beside it "
                f"{'has' if len(names) == 1 else 'have'} no place there: {listed(names, _SHOWN_NAMES)}"
            )
            keep = transforms.Keep((f"{re.escape(prefix)}.*",))
            fix = Fix.any_of(
                Fix.setting("pass {} to leave them unread", strict=False),
                Fix.setting("keep the one model: pass {}", transforms=(keep, *unmatched.transforms)),
            )
            yield Explanation(Problem("leftover", names[0] if len(names) == 1 else None, message, fix), names)


def _prefix_taken(unmatched: UnmatchedLeaves) -> str:
    """Returns the common prefix of the matched leaves, or ""."""
    names = {leaf: name for name, value in unmatched.source.items() for leaf in _leaf_count(value)}
    taken = unmatched.target.leaves.keys() - set(unmatched.unfilled)
    found = [names[leaf] for name in taken for leaf in _leaf_count(unmatched.stored.get(name)) if leaf in names]
    if len(found) < 2:
        return ""
    # What all names begin with, the first and the last of them begin with.
    first, last = min(found), max(found)
    common = next((first[:at] for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), "")
    # Of PyTorch's names; what a train state has beside its parameters is no other model.
    return common[: common.rfind(".") + 1]


def _leaf_count(value: object) -> tuple[object, ...]:
    return as_view(value).leaves() if isinstance(value, LazyArray) else ()

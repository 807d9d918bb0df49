"""Hypotheses on leaves that are missing, left over or unexplained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from orbax_t5x import on_demand, transforms
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, UnmatchedLeaves, as_template
from orbax_t5x.restoring.targets import MissingLeaf
from orbax_t5x.text.wording import counted, leaves_text, listed
from orbax_t5x.transforms.dequantize import (
    MARKER,
    QUANTIZED_ELSEWHERE,
    UNKNOWN_FORM,
    multiplied_by,
    notes_beside,
    scales_beside,
)
from orbax_t5x.transforms.patterns.closest import ClosestNames

_NONE = "the checkpoint has None there: that part of the state was not in use when it was saved"
_RESET = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
NO_NAME = "a single array, which has no name"
# Names shown for a missing leaf, and missing leaves for which they are looked up: each look-up scans all names.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5
_BARRED = "; no pattern of fallback_for lets the fallback fill it"

LEAVE_UNREAD = Fix.any_of(
    Fix.setting("pass {} to leave them unread", strict=False),
    Fix.in_program("put ot.transforms.Drop(pattern) into the rules"),
)
_GIVE_VALUES = Fix.any_of(
    Fix.setting("give {} values", fallback=...), Fix.by_target("put ... in the target to leave it out")
)
_LET_FILL = Fix.any_of(
    Fix.in_program("let the fallback fill it by a pattern of fallback_for"),
    Fix.by_target("put ... in the target to leave it out"),
)


def give_values(one: MissingLeaf) -> Fix:
    """Returns the advice for a leaf without a value in the checkpoint."""
    return _LET_FILL if one.is_barred else _GIVE_VALUES


def no_value(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains leaves that the checkpoint knows and has no value of."""
    for one in unmatched.missing:
        if one.is_none:
            fix = Fix.any_of(Fix.by_target("put None in the target there"), Fix.setting("give {} values", fallback=...))
            yield Explanation(Problem("missing", one.name, _NONE, fix), (one.name,))
        elif one.is_reset:
            yield Explanation(Problem("missing", one.name, _RESET, give_values(one)), (one.name,))


def single_array(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains an array without a container, as the target or the checkpoint."""
    if "" not in unmatched.wanted and (not unmatched.wanted or list(unmatched.arrays) != [""]):
        return
    arrays = [(name, tuple(array.shape), str(array.dtype)) for name, array in unmatched.arrays.items()]
    for name, missing in unmatched.wanted.items():
        message = f"the checkpoint has no such leaf: the {'checkpoint' if name else 'target'} is {NO_NAME}"
        fix = Fix.by_target("pass the target's leaf by itself" if name else "name the target's leaf, {name: leaf}")
        if [array[1:] for array in arrays] == [(missing.leaf.shape, str(missing.leaf.dtype))]:
            fix = Fix.adding(transforms.AssignmentMap(((re.escape(name), as_template(arrays[0][0])),)))
        yield Explanation(Problem("missing", name, message, fix), (name,))


def unexplained(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Lists leaves that a side lacks, with close names."""
    closest = ClosestNames(list(unmatched.free) or list(unmatched.stored))
    for place, (name, one) in enumerate(unmatched.wanted.items()):
        near = closest.to(name, _CLOSEST) if place < _LOOKUPS else []
        message = "the checkpoint has no such leaf" + (f"; closest: {', '.join(near)}" if near else "")
        message += _BARRED if one.is_barred else ""
        yield Explanation(Problem("missing", name, message, give_values(one)), (name,))
    names = unmatched.leftovers
    if len(names) == 1:
        message = "the target has no place for this leaf of the checkpoint"
        message += "" if names[0] else f", {NO_NAME}"
        yield Explanation(Problem("leftover", names[0], message, LEAVE_UNREAD), names)
    elif names:
        shown = listed(names, _SHOWN_LEFTOVERS)
        message = f"{leaves_text(len(names))} of the checkpoint have no place in the target: {shown}"
        yield Explanation(Problem("leftover", None, message, LEAVE_UNREAD), names)


_SHOWN_NAMES = 5
_ENCODER = re.compile(r"(?:.*[/.])?enc(?:oder)?[/.].*")
_DECODER = re.compile(r"(?:.*[/.])?(?:dec(?:oder)?[/.].*|(?:lm_head|logits_dense)[/.].*)")
# The matrix of a T5 that computes logits, as Hugging Face and T5X name it; and its leaves in an optimizer's state.
_HEAD = re.compile(r"(?:.*/)?(?:lm_head(?:\.weight|/kernel)|decoder/logits_dense/kernel)(?:/\w+)?")
_EMBEDDING = re.compile(r"(?:.*/)?(?:token_embedder/embedding|shared(?:\.weight|/embedding))")
_NOT_GATED = re.compile(r"(?:.*[/.])?wi[/.](?:kernel|weight)")
_PACKS = {"lm_head.weight": "hf_t5_to_t5x", "lm_head/kernel": "hf_flax_t5_to_t5x"}
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")


def encoder_only(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains leftovers of a decoder, for a target without it."""
    target = unmatched.target.leaves
    if any(map(_DECODER.fullmatch, target)) or not any(map(_ENCODER.fullmatch, target)):
        return
    names = [name for name in unmatched.leftovers if _DECODER.fullmatch(name)]
    if names:
        left = f"{leaves_text(len(names))} of the checkpoint's decoder"
        message = f"the target has an encoder and no decoder; left over: {left}: {listed(names, _SHOWN_NAMES)}"
        leaf = names[0] if len(names) == 1 else None
        yield Explanation(Problem("leftover", leaf, message, LEAVE_UNREAD), names)


def unread_scales(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains leftovers that may multiply a quantized weight."""
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
        origins = [first[leaf] for leaf in _leaf_count(unmatched.stored.get(name)) if leaf in first]
        yield from ((name, weight) for _, weight in multiplied_by(kept, origins))


def tied_logits(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains a leftover output projection, which would change the logits."""
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
    packs = {pack for name in head for pack in _packs_of(unmatched.stored.get(name))}
    for pack in sorted(packs):
        text = f"if config.json has tie_word_embeddings: true, use ot.rules.{pack}(tie_word_embeddings=True)"
        # A T5 whose feed-forward layers are not gated is version 1.0, whose logits are the embedding's.
        ways.insert(0 if any(map(_NOT_GATED.fullmatch, unmatched.stored)) else 1, Fix.in_program(text))
    yield Explanation(Problem("leftover", head[0] if len(head) == 1 else None, message, Fix.any_of(*ways)), head)


def _packs_of(value: Any) -> list[str]:
    """Returns the packs that rename Hugging Face's output projection."""
    leaves = as_view(value).leaves() if isinstance(value, LazyArray) else ()
    return [pack for leaf in leaves for end, pack in _PACKS.items() if leaf.name.endswith(end)]


def other_models(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains leaves below a prefix that the target does not take."""
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

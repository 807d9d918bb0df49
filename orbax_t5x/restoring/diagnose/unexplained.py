"""Hypotheses on leaves that are missing, left over or unexplained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, UnmatchedLeaves
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
from orbax_t5x.transforms.patterns.table import pattern_text
from orbax_t5x.trees.subtrees import exact_patterns

_NONE = "the checkpoint has None there: that part of the state was not in use when it was saved"
_RESET = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
NO_NAME = "a single array, which has no name"
# Names shown for a missing leaf, and missing leaves for which they are looked up: each look-up scans all names.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5
_BARRED = "; no pattern of fallback_for lets the fallback fill it"

_RENAME = Fix("if the checkpoint has it under another name, add a rule of Rename")
_LEAVE_OUT = Fix.by_target("put ... in the target to leave it out")
# More patterns than these are no list that somebody checks.
_MOST_PATTERNS = 8


def fill_new(patterns: list[str], unmatched: UnmatchedLeaves, condition: str) -> Fix:
    """Returns the fix that lets the fallback fill leaves because they are new."""
    given = [pattern_text(pattern) for pattern in unmatched.options.fallback_for or ()]
    has_values = unmatched.options.fallback is not None and all(leaf.is_barred for leaf in unmatched.wanted.values())
    arguments: dict[str, Any] = {} if has_values else {"fallback": ...}
    words = f"{condition}, {'give {fallback} values and ' if arguments else ''}pass {{set}}"
    return Fix.setting(words, **arguments, fallback_for=[*given, *patterns])


def _missing_fix(unmatched: UnmatchedLeaves) -> Fix:
    """Returns the fix of all leaves that the checkpoint lacks, or may have under other names.

    Only where nothing in it is without a place do the names show that the leaves are new.
    """
    patterns = exact_patterns(list(unmatched.wanted), list(unmatched.target.leaves))
    fix = fill_new(patterns, unmatched, "if new" if len(unmatched.wanted) == 1 else "if all of them are new")
    if len(patterns) > _MOST_PATTERNS:
        fix = Fix.in_program("if they are new, give fallback= values and name them by patterns of fallback_for=")
    if unmatched.may_be_stored and unmatched.takes_rules:
        return Fix.any_of(_RENAME, fix.in_words(), _LEAVE_OUT)
    return Fix.any_of(fix, _LEAVE_OUT)


def leave_unread(unmatched: UnmatchedLeaves) -> Fix:
    """Returns the fix of leaves without a place; words where the fallback may fill the place that they have."""
    drop = Fix.in_program("put ot.transforms.Drop(pattern) into the rules")
    unread = Fix.setting("pass {} to leave them unread", strict=False)
    if unmatched.may_fill_unasked:
        text = "map them with a rule of Rename, or name what is new of the target by fallback_for="
        return Fix.any_of(Fix.in_program(text), drop)
    return Fix.any_of(unread, drop)


def no_value(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains leaves that the checkpoint knows and has no value of."""
    known = [leaf for leaf in unmatched.missing if leaf.is_none or leaf.is_reset]
    patterns = exact_patterns([leaf.name for leaf in known], list(unmatched.target.leaves))
    give = fill_new(patterns, unmatched, "if they are to be new")
    for leaf in known:
        fix = Fix.any_of(Fix.by_target("put None in the target there"), give.in_words())
        if leaf.is_reset:
            fix = Fix.any_of(give, _LEAVE_OUT)
        yield Explanation(Problem("missing", leaf.name, _NONE if leaf.is_none else _RESET, fix), (leaf.name,))


def unexplained(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Lists leaves that a side lacks, with close names."""
    closest = ClosestNames(list(unmatched.free) or list(unmatched.stored))
    fix = _missing_fix(unmatched) if unmatched.wanted else None
    for place, (name, leaf) in enumerate(unmatched.wanted.items()):
        near = closest.to(name, _CLOSEST) if place < _LOOKUPS else []
        message = (
            "the checkpoint has no such leaf" if name else f"the target is {NO_NAME}, and the checkpoint has names"
        )
        message += _BARRED if leaf.is_barred else ""
        source = f"; closest: {', '.join(near)}" if near else ""
        yield Explanation(Problem("missing", name, message + source, fix, source), (name,))
    names = unmatched.leftovers
    if len(names) == 1:
        message = "the target has no place for this leaf of the checkpoint"
        message += "" if names[0] else f", {NO_NAME}"
        yield Explanation(Problem("leftover", names[0], message, leave_unread(unmatched)), names)
    elif names:
        shown = listed(names, _SHOWN_LEFTOVERS)
        message = f"{leaves_text(len(names))} of the checkpoint have no place in the target: {shown}"
        yield Explanation(Problem("leftover", None, message, leave_unread(unmatched)), names)


_SHOWN_NAMES = 5
# The matrix of a T5 that computes logits, as Hugging Face and T5X name it; and its leaves in an optimizer's state.
_HEAD = re.compile(r"(?:.*/)?(?:lm_head(?:\.weight|/kernel)|decoder/logits_dense/kernel)(?:/\w+)?")
_EMBEDDING = re.compile(r"(?:.*/)?(?:token_embedder/embedding|shared(?:\.weight|/embedding))")
_NOT_GATED = re.compile(r"(?:.*[/.])?wi[/.](?:kernel|weight)")
_PACKS = {"lm_head.weight": "hf_t5_to_t5x", "lm_head/kernel": "hf_flax_t5_to_t5x"}
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")


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


def _leaf_count(value: object) -> tuple[object, ...]:
    return as_view(value).leaves() if isinstance(value, LazyArray) else ()

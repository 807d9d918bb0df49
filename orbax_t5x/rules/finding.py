"""Finds all transforms from a checkpoint to a target.

Rule packs come first, then an alignment of the leaves left, then the optimizer. Known packs come first. Then what they
make is aligned with the target, and at last the checkpoint itself. Only rules that give every parameter of the model
one reading are returned.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.optim.moments import SlotNames, rename_counts
from orbax_t5x.rules.alignment.alignment import Alignment, align, align_leaves
from orbax_t5x.rules.alignment.words import is_of_module, meaning_of, path_of
from orbax_t5x.rules.graph import pack_function, pack_to_t5x
from orbax_t5x.rules.inference import find_pack, slots_between, views_or_zeros, without_place
from orbax_t5x.rules.layouts import find_layout, heads_of, leaves_of, parameters_of
from orbax_t5x.rules.no_pack import WRITE_RULES, refusal_between
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms import Drop, FollowOptimizer, Rename, Transform
from orbax_t5x.transforms.dequantize import scales_beside
from orbax_t5x.transforms.diagnostics import Applied, Diagnostics
from orbax_t5x.transforms.run import run_transforms

# What parameters are below in train states.
_ROOTS = ("target/", "params/params/", "params/")
# A model of fewer shapes, without a word that both sides have, may be another one.
_LEAST_SHAPES = 3
_LONGEST_CODE = 600
_ALIGNED = "by shapes, structure and names"
# Answers that are tried for the one that settles most.
_TRIED = 4
# Rows of open leaves that a problem shows.
_SHOWN = 3

Leaves = Mapping[str, Any]
Transforms = tuple[Transform, ...]


class FoundMapping(NamedTuple):
    """Transforms from a checkpoint to a target.

    Attributes:
      parts: in order.
      found: what they are founded on, as text.
      is_whole: whether they give every parameter of the model its leaf.
    """

    parts: Transforms
    found: str
    is_whole: bool = True


class _Way(NamedTuple):
    """Packs around an alignment, and the leaves between."""

    before: Transforms
    after: Transforms
    source: Leaves
    target: Leaves


def find_rules(
    source_leaves: Any, target_leaves: Any, given: Mapping[str, str] | None = None, applied: Applied = None
) -> FoundMapping:
    """Finds the transforms from a checkpoint's leaves to a target's.

    A known pack that leaves leaves of the target to others is returned, too: a plan explains these best. Applications
    of packs are added to `applied`, so that a plan need not make them again.

    Raises:
      RestorePlanError: nothing leads there, or a parameter of the model has several readings.
      ValueError: a name of `given` is unknown, or its leaf has another shape than the target's.
    """
    source, target = leaves_of(source_leaves), leaves_of(target_leaves)
    if given:
        alignment = align(source, target, given=given)
        if not alignment.is_complete:
            raise RestorePlanError([_problem(_Way((), (), source, target), alignment, given)])
        parts = (*alignment.transforms, *_completion(alignment.transforms, source, target, applied))
        return FoundMapping(parts, f"{_ALIGNED}: {calls_code(parts)}")
    slots = slots_between(source, target)
    given, source = source, _run(slots, source, target) if slots else source
    try:
        pack, refusal = find_pack(source, target, applied), None
    except RestorePlanError as error:
        pack, refusal = None, error
    if pack is not None and _fills(pack.parts, source, target, applied):
        return FoundMapping((*slots, *pack.parts), pack.found)
    if scales_beside(given, given) and not scales_beside(target, target):
        scaled = pack_function("scaled_fp8_to_float32")()
        found = find_rules(_run((scaled,), given, target, applied), target, applied=applied)
        return found._replace(parts=(scaled, *found.parts))
    best: tuple[_Way, Alignment] | None = None
    for way in _ways(pack, given, target, applied):
        alignment, parts = _align_model(way)
        if alignment.is_complete and (way.before or way.after or _is_telling(source, target)):
            parts = (*way.before, *parts, *way.after)
            parts = (*parts, *_completion(parts, given, target, applied))
            if _fills(parts, given, target, applied):
                return FoundMapping(parts, f"{_ALIGNED}: {calls_code(parts)}")
        if best is None or alignment.covered > best[1].covered:
            best = way, alignment
    if pack is not None:
        return FoundMapping((*slots, *pack.parts), pack.found, is_whole=False)
    refusal = refusal or refusal_between(source, target)
    is_explained = any(one.fix != WRITE_RULES for one in refusal.problems)
    if best is None or not best[1].open or not best[1].covered or is_explained:
        raise refusal if best is None else _with_sizes(refusal, best[0])
    raise RestorePlanError([_problem(*best)]) from refusal


def _with_sizes(refusal: RestorePlanError, way: _Way) -> RestorePlanError:
    """Adds both models' sizes to a refusal, if they differ."""
    sizes = [sum(math.prod(leaf.shape) for leaf in _model(side).values()) for side in (way.source, way.target)]
    if sizes[0] == sizes[1]:
        return refusal
    text = f"; the checkpoint's model has {sizes[0]:,} values, the target's {sizes[1]:,}"
    first, *others = refusal.problems
    return RestorePlanError([dataclasses.replace(first, message=first.message + text), *others], path=refusal.path)


def _run(transforms: Sequence[Transform], source: Leaves, target: Leaves, applied: Applied = None) -> dict[str, Any]:
    diagnostics = Diagnostics(applied=applied)
    return run_transforms(transforms, views_or_zeros(source), target, is_resuming=False, diagnostics=diagnostics)


def _fills(transforms: Sequence[Transform], source: Leaves, target: Leaves, applied: Applied) -> bool:
    """Tests if transforms fill every parameter with its shape."""
    result = _run(transforms, source, target, applied)
    return all(name in result and result[name].shape == tuple(leaf.shape) for name, leaf in _model(target).items())


def _is_telling(source: Leaves, target: Leaves) -> bool:
    """Tests if shapes or shared module names identify a model."""
    words = [
        {
            meaning_of(key)
            for name in _model(side)
            for key in path_of(name)
            if isinstance(key, str) and is_of_module(key)
        }
        for side in (source, target)
    ]
    return len({leaf.shape for leaf in _model(target).values()}) >= _LEAST_SHAPES or not words[0].isdisjoint(words[1])


def _model(leaves: Leaves) -> dict[str, Any]:
    """Returns floating-point parameters, or all without any."""
    every = parameters_of(leaves)
    return {name: leaf for name, leaf in every.items() if jnp.issubdtype(leaf.dtype, jnp.floating)} or every


def _ways(pack: RulePack | None, source: Leaves, target: Leaves, applied: Applied) -> Iterator[_Way]:
    """Yields candidates for alignment, the likeliest first."""
    last: Transforms = ()
    wanted: Leaves = target
    forth = pack_to_t5x(find_layout(_model(target)).kind)
    if forth is not None and forth.has_inverse:
        last, wanted = (forth.inverse(),), _run((forth,), target, {})
    firsts = [] if pack is None or not pack.parts else [pack.parts]
    forth = pack_to_t5x(find_layout(_model(source)).kind)
    if forth is not None:
        firsts.append((forth,))
    firsts.append(())
    for first in dict.fromkeys(firsts):
        made = _run(first, source, target, applied) if first else source
        yield _Way(first, last, made, wanted)
        for more in _with_heads(made, wanted):
            yield _Way((*first, more), last, _run((more,), made, target, applied), wanted)
    if last:
        yield _Way((), (), source, target)


def _with_heads(source: Leaves, target: Leaves) -> Iterator[RulePack]:
    """Yields packs between joined and split heads by shapes."""
    layout = find_layout(_model(source))
    queries = [shape for (_, rest), shape in layout.shapes.items() if rest.endswith("query/kernel")]
    shapes: set[tuple[int, ...]] = {tuple(leaf.shape) for leaf in _model(target).values()}
    if layout.kind == "minimal":
        embed, inner = queries[0]
        depths = set(layout.depths.values())
        for *others, heads, size in sorted(shape for shape in shapes if len(shape) in (3, 4)):
            if heads * size != inner or embed not in others:
                continue
            if len(others) == 1:
                yield t5_minimal_to_unscanned(heads, size)
            else:
                axis = 1 - others.index(embed)
                if others[axis] in depths:
                    yield t5_minimal_to_scanned(heads, size, scan_axis=axis)
    elif layout.kind in ("unscanned", "scanned"):
        heads = heads_of(layout, 1 if layout.is_scanned else None)
        if heads is not None:
            yield (t5_minimal_to_scanned if layout.is_scanned else t5_minimal_to_unscanned)(*heads).inverse()


def _align_model(way: _Way) -> tuple[Alignment, Transforms]:
    """Aligns the model, below the source's root first."""
    source, target = way.source, way.target
    roots = _root(source), _root(target)
    is_moved = all(roots) and roots[0] != roots[1]
    for leaves_to_align in (parameters_of, _model):
        ours, theirs = leaves_to_align(source), leaves_to_align(target)
        if is_moved:
            theirs = {roots[0] + name.removeprefix(roots[1]): leaf for name, leaf in theirs.items()}
        alignment = align_leaves(source, target, ours, theirs)
        if alignment.is_complete:
            break
    parts = alignment.transforms
    if is_moved:
        rename = Rename(((f"{roots[0]}(.*)", rf"{roots[1]}\1"),))
        slots = slots_between(_run(parts, source, target), target)
        follows = not slots and SlotNames().slots(source)
        parts = (*parts, *slots, FollowOptimizer(rename) if follows else rename)
    return alignment, parts


def _root(leaves: Leaves) -> str:
    """Returns the root of a model's names, or an empty text."""
    names = _model(leaves)
    return next((root for root in _ROOTS if names and all(name.startswith(root) for name in names)), "")


def _completion(transforms: Sequence[Transform], source: Leaves, target: Leaves, applied: Applied) -> Transforms:
    """Returns transforms of step, counts and unwanted optimizers."""
    state = _run(transforms, source, target, applied)
    last = slots_between(state, target)
    state = _run(last, state, target) if last else state
    names = rename_counts(state, target)
    if names:
        last = (*last, Rename(tuple((re.escape(old), new) for old, new in names.items())))
    dropped = without_place(_run(last, state, target) if last else state, target)
    return (*last, Drop(dropped)) if dropped else last


def _problem(way: _Way, alignment: Alignment, given: Mapping[str, str] | None = None) -> Problem:
    """Returns the problem of leaves without a single reading."""
    count = len(_model(way.target))
    shown = [
        f"{row.label} may be {row.texts[1]}" if row.texts[1] else f"{row.label} has no counterpart"
        for row in alignment.folded()
    ]
    parts = (*way.before, *alignment.transforms, *way.after)
    message = (
        f"shapes, structure and names leave no single reading for {counted(len(alignment.open), 'parameter')} of the "
        f"target's {count}: {listed(shown, _SHOWN, noun='patterns', separator='; ')}"
    )
    if parts:
        code = textwrap.shorten(calls_code(parts), _LONGEST_CODE, placeholder=" …")
        message += f". The rules found cover {alignment.covered}: {code}"
    answers = {} if way.before or way.after else _answer(way, alignment, given or {})
    if answers:
        options = " ".join(f"--given {old}={new}" for old, new in answers.items())
        fix = (
            f"if it is so, answer with transforms=ot.rules.align(source, target, given={answers!r}).transforms, which "
            f"settles most, or on the command line with {options}; name leaves that are new by fallback_for"
        )
    else:
        fix = (
            "give the open leaves the target's words by a Rename, and pass it with the rules found as transforms; name "
            "leaves that are new by fallback_for"
        )
    return Problem("rule", None, message, Fix(fix))


def _answer(way: _Way, alignment: Alignment, given: Mapping[str, str]) -> dict[str, str]:
    """Returns answers that settle most leaves, or nothing."""
    best, most = {}, alignment.covered
    names = list(alignment.open)
    for row in alignment.folded()[:_TRIED]:
        name = names[row.members[0]]
        for old in alignment.open[name][:1]:
            answers = {**given, old: name}
            try:
                covered = align(way.source, way.target, given=answers).covered
            except ValueError:
                continue
            if covered > most:
                best, most = answers, covered
    return best

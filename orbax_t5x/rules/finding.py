"""Finds all transforms from a checkpoint to a target.

Known packs come first. Then what they make is aligned with the target, and at last the checkpoint itself. Only rules
that give every parameter of the model one reading are returned.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.rules.alignment.alignment import Alignment, align, align_leaves
from orbax_t5x.rules.alignment.evidence import NAME, RENAMING, Proof
from orbax_t5x.rules.alignment.given import GivenError
from orbax_t5x.rules.alignment.words import is_of_module, meaning_of, path_of
from orbax_t5x.rules.graph import pack_function, pack_to_t5x
from orbax_t5x.rules.inference import find_pack, slots_between, views_or_zeros, without_place
from orbax_t5x.rules.layouts import find_layout, heads_of, leaves_of, parameters_of
from orbax_t5x.rules.leaf_table import refusal_of_adapters
from orbax_t5x.rules.no_pack import WRITE_RULES, refusal_between
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.rules.t5x import t5_minimal_to_scanned, t5_minimal_to_unscanned
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms import Drop, Rename, Transform
from orbax_t5x.transforms.dequantize import scales_beside
from orbax_t5x.transforms.diagnostics import Diagnostics, Why
from orbax_t5x.transforms.run import run_and_place

# What parameters are below in train states.
_ROOTS = ("target/", "params/params/", "params/")
# A model of fewer shapes, without a word that both sides have, may be another one.
_LEAST_SHAPES = 3
_ALIGNED = "by shapes, structure and names"
# Rounds of answers, each of which may settle leaves for the next.
_TRIED = 4
# Rows of open leaves that a problem shows.
_SHOWN = 3
_NUMBERS = re.compile(r"\d+")
_NAME_NEW = Fix.setting("name leaves that are new by {}", fallback_for=...)

Leaves = Mapping[str, Any]
Transforms = tuple[Transform, ...]


class FoundMapping(NamedTuple):
    """Transforms from a checkpoint to a target.

    Attributes:
      parts: in order.
      found: what they are founded on, as text.
      why: the reason for each leaf of the target that they make.
      is_whole: whether they give every parameter of the model its leaf.
    """

    parts: Transforms
    found: str
    why: Mapping[str, Why]
    is_whole: bool = True


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers for leaves that nothing else tells apart, as transforms."""

    given: tuple[tuple[str, str], ...]

    def as_code(self) -> str:
        """See `Transform.as_code`."""
        return f"ot.rules.align(source, target, given={dict(self.given)}).transforms"


class _Way(NamedTuple):
    """Packs around an alignment, and the leaves between.

    `names`: of the leaves between and of the target, where the last packs change them.
    """

    before: Transforms
    after: Transforms
    source: Leaves
    target: Leaves
    names: Mapping[str, str] = {}


def find_rules(
    source_leaves: Any, target_leaves: Any, given: Mapping[str, str] | None = None, settings: Diagnostics | None = None
) -> FoundMapping:
    """Finds the transforms from a checkpoint's leaves to a target's.

    A known pack that leaves leaves of the target to others is returned, too: a plan explains these best. With the
    `settings` of a restore it need not apply the packs again.

    Raises:
      RestorePlanError: nothing leads there, or a parameter of the model has several readings.
      ValueError: a name of `given` is unknown, or its leaf has another shape than the target's.
    """
    source, target = leaves_of(source_leaves), leaves_of(target_leaves)
    if given:
        alignment = align(source, target, given=given)
        if not alignment.is_complete:
            raise RestorePlanError([_problem(_Way((), (), source, target), alignment, given)])
        parts = (*alignment.transforms, *_completion(alignment.transforms, source, target, settings))
        return _aligned(parts, _made(parts, source, target, settings), source, target, alignment.why)
    slots = slots_between(source, target)
    stored, source = source, _run(slots, source, target, settings) if slots else source
    try:
        pack, refusal = find_pack(source, target, settings), None
    except RestorePlanError as error:
        pack, refusal = None, error
    by_pack = None
    if pack is not None:
        made = _made(pack.parts, source, target, settings)
        why = _reasons(pack.parts, made, source, target, {})
        if slots:
            why |= {name: Why("optimizer") for name in target.keys() & source.keys() - stored.keys()}
        by_pack = FoundMapping((*slots, *pack.parts), pack.found, why, is_whole=_is_filled(made.leaves, target))
        if by_pack.is_whole:
            return by_pack
    if scales_beside(stored, stored) and not scales_beside(target, target):
        scaled = pack_function("scaled_fp8_to_float32")()
        found = find_rules(_run((scaled,), stored, target, settings), target, settings=settings)
        return found._replace(parts=(scaled, *found.parts))
    adapters = None if settings and settings.allows_unmapped else refusal_of_adapters(source)
    if adapters is not None and refusal_of_adapters(target) is None:
        raise RestorePlanError([adapters])
    best: tuple[_Way, Alignment] | None = None
    for way in _ways(pack, stored, target, settings):
        alignment, parts, why = _align_model(way)
        if alignment.is_complete and (way.before or way.after or _is_telling(source, target)):
            parts = (*way.before, *parts, *way.after)
            parts = (*parts, *_completion(parts, stored, target, settings))
            made = _made(parts, stored, target, settings)
            if _is_filled(made.leaves, target):
                return _aligned(
                    parts, made, stored, target, {way.names.get(name, name): one for name, one in why.items()}
                )
        if best is None or alignment.covered > best[1].covered:
            best = way, alignment
    if by_pack is not None:
        return by_pack
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


class _Made(NamedTuple):
    """Leaves after transforms, and the findings."""

    leaves: dict[str, Any]
    findings: Diagnostics


def _made(
    transforms: Sequence[Transform], source: Leaves, target: Leaves, settings: Diagnostics | None = None
) -> _Made:
    findings = (settings or Diagnostics()).settings()
    views = views_or_zeros(source)
    return _Made(run_and_place(transforms, views, target, diagnostics=findings), findings)


def _run(
    transforms: Sequence[Transform], source: Leaves, target: Leaves, settings: Diagnostics | None = None
) -> dict[str, Any]:
    return _made(transforms, source, target, settings).leaves


def _is_filled(leaves: Leaves, target: Leaves) -> bool:
    """Tests that leaves have every parameter's shape."""
    return all(name in leaves and leaves[name].shape == tuple(leaf.shape) for name, leaf in _model(target).items())


def _aligned(
    parts: Transforms, made: _Made, source: Leaves, target: Leaves, proven: Mapping[str, Proof]
) -> FoundMapping:
    return FoundMapping(parts, f"{_ALIGNED}: {calls_code(parts)}", _reasons(parts, made, source, target, proven))


def _reasons(
    parts: Transforms, made: _Made, source: Leaves, target: Leaves, proven: Mapping[str, Proof]
) -> dict[str, Why]:
    """Returns the reasons for all leaves; `proven` by an alignment."""
    packs = " then ".join(part.name for part in parts if isinstance(part, RulePack))
    by_pack, parameters = Why("pack", packs) if packs else Why(RENAMING), parameters_of(target)
    reasons: dict[str, Why] = {}
    for name in target:
        if name not in made.leaves:
            continue
        proof, fidelity = proven.get(name), made.findings.fidelity.get(name, "")
        is_changed = name in made.findings.origin_of or name not in source
        if proof is not None and not (proof == NAME and is_changed):
            reasons[name] = Why(proof, "" if proof == NAME else packs)
        elif name in parameters or proof is not None:
            reasons[name] = by_pack if is_changed else Why(NAME)
        else:
            reasons[name] = Why("optimizer", fidelity) if is_changed or fidelity else Why(NAME)
    return reasons


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


def _ways(pack: RulePack | None, source: Leaves, target: Leaves, settings: Diagnostics | None) -> Iterator[_Way]:
    """Yields candidates for alignment, the likeliest first."""
    last: Transforms = ()
    wanted: Leaves = target
    names: Mapping[str, str] = {}
    forth = pack_to_t5x(find_layout(_model(target)).kind)
    if forth is not None and forth.has_inverse:
        made = _made((forth,), target, {})
        last, wanted, names = (forth.inverse(),), made.leaves, made.findings.origin_of
    firsts = [] if pack is None or not pack.parts else [pack.parts]
    forth = pack_to_t5x(find_layout(_model(source)).kind)
    if forth is not None:
        firsts.append((forth,))
    firsts.append(())
    for first in dict.fromkeys(firsts):
        made = _run(first, source, target, settings) if first else source
        yield _Way(first, last, made, wanted, names)
        for more in _with_heads(made, wanted):
            yield _Way((*first, more), last, _run((more,), made, target, settings), wanted, names)
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


def _align_model(way: _Way) -> tuple[Alignment, Transforms, dict[str, Proof]]:
    """Aligns the model, below the source's root first.

    Returns the proofs by the target's names, too.
    """
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
    parts: Transforms = alignment.transforms
    why: dict[str, Proof] = alignment.why
    if is_moved:
        why = {
            roots[1] + name.removeprefix(roots[0]): RENAMING if proof == NAME else proof for name, proof in why.items()
        }
        rename = Rename(((f"{roots[0]}(.*)", rf"{roots[1]}\1"),))
        parts = (*parts, *slots_between(_run(parts, source, target), target), rename)
    return alignment, parts, why


def _root(leaves: Leaves) -> str:
    """Returns the root of a model's names, or an empty text."""
    names = _model(leaves)
    return next((root for root in _ROOTS if names and all(name.startswith(root) for name in names)), "")


def _completion(
    transforms: Sequence[Transform], source: Leaves, target: Leaves, settings: Diagnostics | None
) -> Transforms:
    """Returns transforms of step, counts and unwanted optimizers."""
    state = _run(transforms, source, target, settings)
    last = slots_between(state, target)
    state = _run(last, state, target) if last else state
    dropped = without_place(state, target)
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
    answers = {} if way.before or way.after else _answer(way, alignment, given or {})
    fix = Fix("give the open leaves the target's words by a Rename")
    if answers:
        old, new = next((old, new) for old, new in answers.items() if old not in (given or {}))
        fix = Fix.setting(f"is {old} the target's {new}? If so, pass {{}}", transforms=Answers(tuple(answers.items())))
    ways = [fix, _NAME_NEW]
    if parts:
        text = f"the rules found cover {alignment.covered}: transforms=[{calls_code(parts)}]"
        ways.append(Fix.in_program(text))
    return Problem("rule", None, message, Fix.any_of(*ways))


def _answer(way: _Way, alignment: Alignment, given: Mapping[str, str]) -> dict[str, str]:
    """Returns answers for open leaves whose most similar reading is a single one, or nothing."""
    answers, best = dict(given), alignment
    for _ in range(_TRIED):
        settled = _settled(way, answers, _most_similar(best.open, answers))
        if settled is None or settled[1].covered <= best.covered:
            break
        answers, best = settled
    return answers if best.covered > alignment.covered else {}


def _settled(way: _Way, known: Mapping[str, str], more: Mapping[str, str]) -> tuple[dict[str, str], Alignment] | None:
    """Returns the answers that settle their leaves, and the alignment."""
    while more:
        try:
            found = align(way.source, way.target, given={**known, **more})
        except GivenError as error:
            wrong = dict(error.answers)
            more = {old: new for old, new in more.items() if old not in wrong} if more.keys() & wrong else {}
        else:
            return {**known, **{old: new for old, new in more.items() if new not in found.open}}, found
    return None


def _most_similar(readings: Mapping[str, Sequence[str]], answered: Mapping[str, str]) -> dict[str, str]:
    """Returns pairs of which each leaf is the other's only reading, or the one most like it.

    One layer answers for all.
    """
    takers: dict[str, list[str]] = collections.defaultdict(list)
    for name, candidates in readings.items():
        for old in candidates:
            takers[old].append(name)
    answers: dict[tuple[str, str], tuple[str, str]] = {}
    for name, candidates in readings.items():
        old = _only_most_like(name, candidates)
        if old is not None and old not in answered and _only_most_like(old, takers[old]) == name:
            answers.setdefault((_NUMBERS.sub("", old), _NUMBERS.sub("", name)), (old, name))
    return dict(answers.values())


def _only_most_like(name: str, candidates: Sequence[str]) -> str | None:
    """Returns the name with the most parts in common, or the only one; None if two have as many."""
    if len(candidates) == 1:
        return candidates[0]
    parts = collections.Counter(path_of(name))
    likeness = [(sum((parts & collections.Counter(path_of(other))).values()), other) for other in candidates]
    likeness.sort(reverse=True)
    is_single = bool(likeness) and likeness[0][0] > likeness[1][0]
    return likeness[0][1] if is_single else None

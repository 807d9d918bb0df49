"""Hypotheses on shapes: another vocabulary, a new head, another width.

The rows of a table that both sides have keep their meaning, and a larger or smaller table is made of it. A module that
alone has other shapes, such as a head for other classes, is likely new: nothing of the old one is put into it. Any
other shape is the user's to explain.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.optimizer_names import may_be_moment
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.unexplained import fill_new
from orbax_t5x.transforms import FALLBACK, Pad, Slice
from orbax_t5x.trees.subtrees import exact_patterns

_TABLE = re.compile(r"(?i).*(?:emb|vocab|wte|shared|lm_head|token).*")
# Leaves beside tables that a vocabulary concerns, such as a bias, and modules that may be new at once.
_MOST_BESIDE = 2
_MOST_NEW = 3
_AS_STORED = Fix.by_target("give the target the checkpoint's shape")
_OTHER_DEPTH = Fix("build the model with the checkpoint's number of layers, if that is the dimension that differs")
_UNKNOWN = Fix(
    "find out which dimensions are the same: the names do not show it, and a transform that makes the shape may still "
    "mix what belongs apart"
)
# A container of layers that are one array for all of them.
_LAYERS = re.compile(r"(?i)(?:\w*_)?(?:layers?|blocks?|h|stack|scan[a-z]*|(?:en|de)coder_?blocks?)(?:_(?:stack|scan))?")
_LAYER = re.compile(r"(?i)(?:.*(?:layer|block)s?|blk|h)")


def is_layer_word(part: str) -> bool:
    """Returns True if a name's part, without its number, means a layer."""
    return _LAYER.fullmatch(part) is not None


def stacked_part(name: str) -> str | None:
    """Returns a name up to an unnumbered layer part, or None."""
    parts = name.split("/")
    for at, (part, after) in enumerate(itertools.pairwise(parts)):
        if _LAYERS.fullmatch(part) is not None and not after.isdecimal():
            return "".join(f"{before}/" for before in parts[: at + 1])
        if part == after:
            return "".join(f"{before}/" for before in parts[: at + 2])
    return None


def is_table(name: str) -> bool:
    """Returns True if a name says that one dimension of the leaf is a vocabulary."""
    return _TABLE.fullmatch(name) is not None


def other_shapes(unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
    """Explains values of other shapes than their leaf's, with fixes that have all leaves of a kind."""
    shapes = {
        name: (tuple(value.shape), unmatched.target.leaves[name].shape)
        for name, problem in unmatched.clashes.items()
        if problem.fix is None and (value := unmatched.arrays.get(name)) is not None
    }
    vocabularies = _vocabularies(shapes)
    tables = [name for name, pair in shapes.items() if changed_sizes(*pair) in vocabularies]
    others = [name for name in shapes if name not in tables]
    new = _fix_of_new(others, shapes, unmatched)
    for name in shapes:
        table = _parameter_of(name, tables)
        ways = _ways_of_table(table, *shapes[table]) if name in tables else new
        if unmatched.target.leaves[name].kind == "key":
            ways = ()
        if stacked_part(name) is not None:
            ways = (_OTHER_DEPTH,)
        if not unmatched.takes_rules:
            ways = tuple([way for way in ways if not way.transforms])
        problem = unmatched.clashes[name]
        is_answered = any(map(_is_data, ways))
        fix = Fix.any_of(*ways, _AS_STORED) if is_answered else Fix.any_of(_AS_STORED, *ways)
        yield Explanation(Problem(problem.kind, name, problem.message, fix, problem.source), (name,))


def _parameter_of(name: str, tables: Sequence[str]) -> str:
    """Returns the table whose moment a leaf is, which follows it; or the leaf."""
    if not may_be_moment(name):
        return name
    parameters = [table for table in tables if not may_be_moment(table)]
    below_root = {table: table.partition("/")[2] or table for table in parameters}
    return next((table for table, part in below_root.items() if f"/{part}/" in f"/{name}/"), name)


def _vocabularies(shapes: Mapping[str, Any]) -> set[tuple[int, int] | None]:
    """Returns old and new sizes of vocabularies: those of tables, unless layers have them, too."""
    sizes = {name: changed_sizes(*pair) for name, pair in shapes.items()}
    counts = collections.Counter(sizes[name] for name in shapes if not is_table(name) and not may_be_moment(name))
    return {sizes[name] for name in shapes if is_table(name) and counts[sizes[name]] <= _MOST_BESIDE} - {None}


def _is_data(way: Fix) -> bool:
    return bool(way.transforms or way.arguments)


def changed_sizes(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """Returns the old and new size of the only dimension that differs, or None."""
    changes = [pair for pair in zip(shape, wanted, strict=False) if pair[0] != pair[1]]
    return changes[0] if len(shape) == len(wanted) and len(changes) == 1 else None


def _ways_of_table(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[Fix, ...]:
    pattern, pairs = re.escape(name), list(zip(shape, wanted, strict=True))
    if all(have >= want for have, want in pairs):
        index = tuple((None, None if have == want else want, None) for have, want in pairs)
        return (Fix.adding(Slice(pattern, index)),)
    grown = tuple(None if have == want else want for have, want in pairs)
    filled = Fix.adding(Pad(pattern, grown, FALLBACK)).also_setting("give {} values for the new rows", fallback=...)
    return Fix.adding(Pad(pattern, grown, 0)), filled


def _fix_of_new(names: list[str], shapes: Mapping[str, Any], unmatched: UnmatchedLeaves) -> tuple[Fix, ...]:
    """Returns the fix for leaves of other shapes; data for one that a program can follow, if one module has them."""
    model = [name for name in names if not may_be_moment(name)] or names
    modules = {name.rpartition("/")[0] for name in model}
    is_head = len(modules) == 1 and all(changed_sizes(*shapes[name]) for name in model)
    has_others = any(name not in unmatched.unfilled for name in unmatched.target.leaves)
    if not names or not has_others:
        return (_UNKNOWN,)
    fix = fill_new(exact_patterns(names, list(unmatched.target.leaves)), unmatched, "if this is new, such as a head")
    if is_head:
        return (fix,)
    return (fix.in_words(), _UNKNOWN) if len(modules) <= _MOST_NEW else (_UNKNOWN,)

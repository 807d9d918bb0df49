"""Transforms between two trees of a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from orbax_t5x.optim.moments import find_optimizer
from orbax_t5x.rules.alignment.evidence import NAME, RENAMING, Proof
from orbax_t5x.rules.alignment.given import GivenError
from orbax_t5x.rules.alignment.moves import Move, Moves, moves_between
from orbax_t5x.rules.alignment.words import path_of
from orbax_t5x.rules.alignment.writing import moves_as_transforms
from orbax_t5x.rules.layouts import leaves_of, parameters_of
from orbax_t5x.text.code import code_of
from orbax_t5x.text.fold import Folded, fold
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms import Chain, Rename, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.trace import symbol_for, symbols_of
from orbax_t5x.transforms.run import run_and_place
from orbax_t5x.trees.flat import parents

# Open leaves that are printed, folded, and readings of each.
_SHOWN_OPEN = 20
_SHOWN_READINGS = 4

Leaves = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Alignment:
    r"""The certain part of a way between two trees of a model.

    `print` shows the transforms as code to paste, each with its evidence.

    Attributes:
      transforms: to pass to a restore, in order.
      evidence: for each transform, the leaves that it changes and what shows that it is right.
      open: name of a target's parameter with no or several readings -> names of the leaves that it may be.

    Example:
      >>> ours = {f"dec/{i}/{name}": np.ones(4 + at) for i in range(3) for at, name in enumerate("ab")}
      >>> theirs = {f"decoder/layers_{i}/{name}": np.ones(4 + at) for i in range(3) for at, name in enumerate("ab")}
      >>> alignment = ot.rules.align(theirs, ours)
      >>> alignment.transforms
      (Rename(rules=(('(.*)/layers_(\\d+)/(.*)', '\\g<1>/\\g<2>/\\g<3>'),), require_match=True),
       Rename(rules=(('decoder/(.*)', 'dec/\\g<1>'),), require_match=True))
      >>> alignment.is_complete, alignment.inverse().transforms[1].rules
      (True, (('dec/(.*)', 'decoder/\\g<1>'),))
    """

    transforms: tuple[Transform, ...]
    evidence: tuple[str, ...]
    open: Mapping[str, tuple[str, ...]]
    _moves: Moves = dataclasses.field(repr=False, compare=False)
    _source: Leaves = dataclasses.field(repr=False, compare=False)
    _target: Leaves = dataclasses.field(repr=False, compare=False)

    @property
    def is_complete(self) -> bool:
        """True if every parameter of the target has a single reading."""
        return not self.open

    @property
    def covered(self) -> int:
        """Number of the target's parameters with a single reading."""
        return len(self._moves)

    @property
    def why(self) -> dict[str, Proof]:
        """Proofs of the target's assigned leaves.

        "given", "name", "renaming" (the name after a renaming that other leaves prove) or "structure".
        """
        # Names that differ in their layers' numbers, or in a root, prove a pair as equal ones do.
        return {
            name: RENAMING if why == NAME and move.sources != (name,) else cast("Proof", why)
            for name, move in self._moves.items()
            if (why := self._moves.why[name])
        }

    def inverse(self) -> Alignment:
        """Returns the way back; leaves that the target lacks are open."""
        back = Moves({name: move.reversed() for move in self._moves.values() for name in move.sources})
        back.why = {old: self._moves.why[new] for new, move in self._moves.items() for old in move.sources}
        readings: dict[str, list[str]] = {}
        for name, found in self.open.items():
            for one in found:
                readings.setdefault(one, []).append(name)
        back.open = {name: tuple(readings.get(name, ())) for name in parameters_of(self._source) if name not in back}
        return _alignment(back, self._target, self._source)

    def folded(self) -> list[Folded]:
        """Returns rows of open leaves and their readings, layers folded."""
        return fold([(name, listed(found, _SHOWN_READINGS, separator=" or ")) for name, found in self.open.items()])

    def __str__(self) -> str:
        lines = [f"    {code_of(one)},  # {why}" for one, why in zip(self.transforms, self.evidence, strict=True)]
        lines = ["[", *lines, "]"]
        rows = self.folded()
        for row in rows[:_SHOWN_OPEN]:
            lines.append(f"# open: {row.label}: {row.texts[1] or 'nothing has its shape and place'}")
        if more := sum(len(row.members) for row in rows[_SHOWN_OPEN:]):
            lines.append(f"# open: {leaves_text(more)} more")
        return "\n".join(lines)


def align(source_leaves: Any, target_leaves: Any, *, given: Mapping[str, str] | None = None) -> Alignment:
    r"""Finds transforms from a checkpoint's names to a target's.

    Shapes, dtypes, the order of layers and the structure of the names decide; names where several leaves are alike.
    Names are replaced in part, given another prefix or separator, and renumbered; layers are stacked or unstacked;
    PyTorch's `weight` is transposed to Flax's `kernel`; attentions' heads are split or joined. No leaf is assigned that
    another reading could claim. State of the optimizer follows the parameters.

    Args:
      source_leaves: an opened checkpoint, its `leaves`, or a nested state dict.
      target_leaves: whatever a restore takes as its target, or leaves by name.
      given: what you know: names of the source, or patterns with one `{}` for a layer's number, and their names in the
        target. An answer for one layer holds for all, and for the other arrays of its module.

    Returns:
      The transforms, with what stays open.

    Raises:
      ValueError: a name of `given` is unknown, or its leaf has another shape than the target's.

    Example:
      >>> theirs = {f"h/{i}/{name}/kernel": np.ones((4, 5)) for i in range(2) for name in ("query", "a", "c")}
      >>> ours = {f"layers/{i}/{name}/w": np.ones((4, 5)) for i in range(2) for name in ("q", "d", "e")}
      >>> alignment = ot.rules.align(theirs, ours)
      >>> alignment.transforms[-1].rules
      (('h/(\\d+)/q/w', 'layers/\\g<1>/q/w'),)
      >>> alignment.open["layers/0/d/w"]
      ('h/0/a/kernel', 'h/0/c/kernel')
      >>> ot.rules.align(theirs, ours, given={"h/{}/a/kernel": "layers/{}/d/w"}).is_complete
      True
    """
    source, target = leaves_of(source_leaves), leaves_of(target_leaves)
    return align_leaves(source, target, parameters_of(source), parameters_of(target), given)


def align_leaves(
    source: Leaves, target: Leaves, ours: Leaves, theirs: Leaves, given: Mapping[str, str] | None = None
) -> Alignment:
    """Aligns some leaves of a checkpoint and a target."""
    target = {**target, **theirs}
    moves = moves_between(ours, theirs, given=given)
    renamed = _renamed_in_place(moves.open, ours, theirs)
    if renamed:
        try:
            moves = moves_between(ours, theirs, given={**renamed, **(given or {})})
        except GivenError:
            return _alignment(moves, source, target)
        for old, new in renamed.items():
            if new in moves and old not in (given or {}):
                moves.why[new] = RENAMING
    return _alignment(moves, source, target)


def _renamed_in_place(readings: Mapping[str, Sequence[str]], ours: Leaves, theirs: Leaves) -> dict[str, str]:
    """Returns pairs of names that differ in the last word only, the same two words in all of both trees.

    The path of a module says more than the shapes of its neighbours.
    """
    pairs: dict[str, str] = {}
    words: set[tuple[Any, Any]] = set()
    for name, candidates in readings.items():
        *module, new = path_of(name) or ("",)
        same = [old for old in candidates if module and list(path_of(old)[:-1]) == module]
        if len(same) == 1:
            pairs[same[0]] = name
            words.add((path_of(same[0])[-1], new))
    olds, news = ({last for name in side for last in path_of(name)[-1:]} for side in (ours, theirs))
    is_one_to_one = len({old for old, _ in words}) == len(words) == len({new for _, new in words})
    is_complete = all(old not in news and new not in olds for old, new in words)
    return pairs if is_one_to_one and is_complete else {}


def _alignment(moves: Moves, source: Leaves, target: Leaves) -> Alignment:
    """Writes moves as transforms; the rest is open."""
    _open_occupied(moves, source)
    slots = find_optimizer(source).parameters_of_slots()
    names = [name for name in source if name not in slots]
    transforms: Sequence[Transform] = moves_as_transforms(dict.fromkeys(moves.values()), names, list(target))
    transforms = _runnable(transforms, source, target)
    states = _states(transforms, source, target)
    wrong = [name for name, move in moves.items() if not _is_made(states[-1].get(name), move, target[name])]
    for name in wrong:
        moves.open[name] = moves.pop(name).sources
    evidence = [_evidence(*pair, moves) for pair in itertools.pairwise(states)]
    return Alignment(tuple(transforms), tuple(evidence), dict(moves.open), moves, source, target)


def _runnable(transforms: Sequence[Transform], source: Leaves, target: Leaves) -> list[Transform]:
    """Returns transforms that run one by one: a rule may match nothing, and names that meet on the way are one step."""
    runnable: list[Transform] = []
    (state,) = _states((), source, target)
    has_clash = False
    for transform in transforms:
        notes = Diagnostics()
        state = transform.apply(state, target, notes)
        if isinstance(transform, Rename) and any(problem.kind == "unused_rule" for problem in notes.problems):
            transform = dataclasses.replace(transform, require_match=False)
        runnable.append(transform)
        has_clash = has_clash or any(not state.keys().isdisjoint(parents(name)) for name in state)
    return [Chain(runnable)] if has_clash and len(runnable) > 1 else runnable


def _open_occupied(moves: Moves, source: Leaves) -> None:
    """Opens moves to names of leaves that stay."""
    while True:
        moved = {name for move in moves.values() for name in move.sources}
        kept = {name for name in source if name not in moved}
        above = {name[:at] for name in kept for at, sign in enumerate(name) if sign == "/"}
        wrong = [
            name
            for name in moves
            if name in kept or name in above or any(name[:at] in kept for at, sign in enumerate(name) if sign == "/")
        ]
        if not wrong:
            return
        for name in {target for one in wrong for target in moves[one].targets}:
            moves.open[name] = moves.pop(name).sources
            moves.why[name] = "its name is that of another leaf of the checkpoint, which stays"


def _states(transforms: Iterable[Transform], source: Leaves, target: Leaves) -> list[dict[str, Any]]:
    """Returns symbols for arrays before and after each transform."""
    symbols = {name: symbol_for(name, leaf) for name, leaf in source.items()}
    states = [{name: source[name] if symbol is None else symbol for name, symbol in symbols.items()}]
    for transform in transforms:
        states.append(run_and_place((transform,), states[-1], {}))
    return states


def _is_made(result: Any, move: Move, leaf: Any) -> bool:
    """Tests that a leaf has the inputs and shape of its move."""
    if result is None or tuple(result.shape) != tuple(leaf.shape):
        return False
    return {one.name for one in symbols_of(result)} <= set(move.sources)


def _evidence(before: Leaves, after: Leaves, moves: Moves) -> str:
    changed = [name for name, value in after.items() if before.get(name) is not value]
    origins = {one.name for name in changed for one in symbols_of(after[name])}
    named = {name for new, move in moves.items() if moves.why.get(new) in (NAME, RENAMING) for name in move.sources}
    text = f"{leaves_text(len(changed))} by shapes and structure"
    count = len(origins & named)
    return text if not count else f"{text}, {f'{count} of them' if count < len(origins) else 'and'} by names or order"

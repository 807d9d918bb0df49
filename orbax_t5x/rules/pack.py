"""A rule pack: a transform of several steps, with its inverse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy.read_stats import counting_reads, note_read
from orbax_t5x.provenance.digests import text_digest
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.base import AnyTransform, Given, Transform
from orbax_t5x.transforms.dequantize import MARKER, QUANTIZED_ELSEWHERE, UNKNOWN_FORM, multiplied_by, notes_beside
from orbax_t5x.transforms.diagnostics import Application, Diagnostics, NewState
from orbax_t5x.transforms.names import Drop, Keep
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.patterns.table import compile_pattern
from orbax_t5x.transforms.prefix import change_between, follow_target, rename_leaves
from orbax_t5x.transforms.run import Chain, run_transforms
from orbax_t5x.trees.flat import FlatState

if TYPE_CHECKING:
    from orbax_t5x.rules.leaf_table import LeafTable

# Names in the warning about leaves that stay as they are.
_SHOWN_NAMES = 5

FIND_PACK = Fix.any_of(
    Fix.setting("pass {}, which looks for a pack that fits", transforms="auto"),
    Fix.in_program("call ot.rules.infer(source_leaves, target_leaves), whose error describes both layouts"),
)


@dataclasses.dataclass(frozen=True)
class PackCall:
    """Call of a function of `orbax_t5x.rules`.

    Attributes:
      function: its name.
      arguments: its keyword arguments, without those that have their default values.
      is_inverse: whether the pack is the inverse of what the call returns.
    """

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()
    is_inverse: bool = False

    @property
    def name(self) -> str:
        """The call as the name of a pack."""
        return f"{'inverse of ' if self.is_inverse else ''}{self._text()}"

    def as_code(self) -> str:
        """See `Transform.as_code`."""
        return f"ot.rules.{self._text()}{'.inverse()' if self.is_inverse else ''}"

    def _text(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"


@dataclasses.dataclass(frozen=True, repr=False)
class RulePack(Chain):
    """Transform of a model's tree to another layout.

    A step may match nothing; it is a problem if no step matches anything. Leaves of the model that the source layout
    cannot have, by name or shape, are problems, so that no result has names of both layouts; with `strict=False` they
    stay as they are. Those that the target has, too, stay in any case. The result gets the prefix of the target's
    parameters: `target/`, `params/`, or none.

    Attributes:
      steps: forwards.
      back: the steps backwards.
      name: the function that made it, with its arguments, as text.
      example: a name as the pack expects it.
      found: what `infer` found in the checkpoint, as text; packs that differ only in it are equal.

    Example:
      >>> pack = ot.rules.t5_minimal_to_unscanned(num_heads=2, head_dim=8)
      >>> pack.inverse()
      <RulePack inverse of t5_minimal_to_unscanned(num_heads=2, head_dim=8)>
      >>> pack.inverse().inverse() == pack
      True
    """

    # Its name tells both ways, in records, too.
    steps: Given[Iterable[AnyTransform], tuple[AnyTransform, ...]] = dataclasses.field(repr=False)
    back: tuple[AnyTransform, ...] = dataclasses.field(default=(), repr=False)
    name: str = ""
    example: str = ""
    back_example: str = ""
    found: str = dataclasses.field(default="", compare=False)
    # Digests leave out what follows, which the other fields decide. Steps that run before the others and after them,
    # each way; and, where several transforms were joined, the transforms themselves.
    _before: tuple[Transform, ...] = ()
    _before_back: tuple[Transform, ...] = ()
    _after: tuple[Transform, ...] = ()
    _after_back: tuple[Transform, ...] = ()
    _joined: tuple[Transform, ...] = ()
    _joined_back: tuple[Transform, ...] = ()
    # The leaves of both layouts; and the transforms that this one is one of.
    _leaves: LeafTable | None = dataclasses.field(default=None, compare=False)
    _leaves_back: LeafTable | None = dataclasses.field(default=None, compare=False)
    _whole: tuple[Transform, ...] = dataclasses.field(default=(), compare=False)
    _call: PackCall | None = dataclasses.field(default=None, compare=False)
    # Of a pack without an inverse.
    _why_no_inverse: str = dataclasses.field(default="", compare=False)
    # Of a pack that is registered.
    _layouts: tuple[str, str] = dataclasses.field(default=("", ""), compare=False)
    _marks: str = dataclasses.field(default="", compare=False)

    def between(self, source: str, target: str, *, marks: str = "") -> RulePack:
        r"""Returns the pack with the names of its layouts, for `register`.

        Args:
          source: the layout that the pack takes.
          target: the layout that it makes. One of the two, at least, is known, such as "minimal" or "hugging face".
          marks: a regex that is found in some names of the layout that is new, and in no names of another.

        Raises:
          ValueError: `marks` is no regular expression.
        """
        compile_pattern(marks, "RulePack.between")
        return dataclasses.replace(self, _layouts=(source, target), _marks=marks)

    @property
    def layouts(self) -> tuple[str, str]:
        """Layout names set by `between`."""
        return self._layouts

    @property
    def marks(self) -> str:
        """Regex that recognises the new layout."""
        return self._marks

    @property
    def call(self) -> PackCall | None:
        """Call that makes the pack, or None."""
        return self._call

    @property
    def has_inverse(self) -> bool:
        """True if there is an inverse; dropped leaves do not return."""
        if self._joined:
            return all(part.has_inverse for part in self._joined if isinstance(part, RulePack))
        return bool(self.back) or not self.steps

    def inverse(self, source: Any = None) -> RulePack:
        """Returns the pack in the other direction; `source` is not needed.

        Raises:
          RestorePlanError: there is none.
        """
        if not self.has_inverse:
            packs = [part for part in self._joined if isinstance(part, RulePack) and not part.has_inverse] or [self]
            message = f"{' and '.join(pack.name for pack in packs)} has no inverse"
            fix = Fix("write ot.transforms.Rename rules for the way back")
            if packs[0]._why_no_inverse:
                message, fix = f"{message}: {packs[0]._why_no_inverse}", None
            raise RestorePlanError([Problem("rule", None, message, fix)])
        call = None if self._call is None else dataclasses.replace(self._call, is_inverse=not self._call.is_inverse)
        prefix = "inverse of "
        name = self.name.removeprefix(prefix) if self.name.startswith(prefix) else prefix + self.name
        return dataclasses.replace(
            self,
            steps=self.back,
            back=self.steps,
            name=name,
            example=self.back_example,
            back_example=self.example,
            found="",
            _before=self._before_back,
            _before_back=self._before,
            _after=self._after_back,
            _after_back=self._after,
            _joined=self._joined_back,
            _joined_back=self._joined,
            _leaves=self._leaves_back,
            _leaves_back=self._leaves,
            _whole=(),
            _call=call,
            _layouts=self._layouts[::-1],
        )

    @property
    def parts(self) -> tuple[Transform, ...]:
        """The equivalent list of transforms."""
        return self._joined or ((self,) if self.steps else ())

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        if self._joined:
            return run_transforms(self._joined, state, target, is_resuming=False, diagnostics=diagnostics)
        if diagnostics.applied is None:
            return self._apply(state, target, diagnostics)
        for one in diagnostics.applied:
            if one.is_of(self, state, target, diagnostics):
                return one.repeat(diagnostics)
        before = diagnostics.copy()
        with counting_reads() as reads:
            result = self._apply(state, target, diagnostics)
        note_read(reads)
        # Whoever plans counts the bytes that a caller's function reads.
        if not reads.bytes_read and len(diagnostics.problems) == len(before.problems):
            findings = before, diagnostics.copy()
            diagnostics.applied.append(Application(self, dict(state), dict(target), dict(result), *findings))
        return result

    def _apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        before = len(diagnostics.problems)
        # The copy shares the caller's lists and dicts, so problems arrive there.
        quiet = dataclasses.replace(diagnostics, warns_of_unused=False, follows=False)
        unmapped: dict[str, Any] = {}
        if self._leaves is not None:
            refused = self._leaves.refusal(state, self._whole or (self,), allows_adapters=diagnostics.allows_unmapped)
            if refused is not None:
                diagnostics.problems.append(refused)
                # Every other problem would have this cause.
                diagnostics.explained.update(target)
                return {}
            if self._leaves.is_whole and not self._leaves.model(state):
                self._match_nothing(state, diagnostics)
                return dict(state)
            unmapped = self._unmapped(self._leaves, state, target, diagnostics)
            state = {name: value for name, value in state.items() if name not in unmapped}
        state = run_transforms(self._before, state, target, is_resuming=False, diagnostics=quiet)
        change = change_between(state, target)
        # Steps compare names with the target's, and keep the prefix.
        own_target = target if change is None else change.reversed().applied(target)
        mapped = super().apply(state, own_target, quiet)
        same = mapped.keys() == state.keys() and all(mapped[name] is value for name, value in state.items())
        if self.steps and same and len(diagnostics.problems) == before:
            self._match_nothing(state, diagnostics)
        mapped = run_transforms(self._after, mapped, own_target, is_resuming=False, diagnostics=quiet)
        result = NewState(quiet)
        mapped = follow_target(mapped, target, quiet)
        if self._leaves_back is not None:
            mapped = rename_leaves(
                mapped, self._leaves_back.renames_below(mapped, target), "as the target has it", quiet
            )
        for name, value in (*mapped.items(), *unmapped.items()):
            result.put(name, value, name)
        return result.finish()

    def _match_nothing(self, state: FlatState, diagnostics: Diagnostics) -> None:
        near = ClosestNames(state).to(self.example)
        diagnostics.problem(
            "unused_rule",
            None,
            f"{self.name}: no name is one of that layout's, such as {self.example!r}"
            + (f"; closest: {near}" if near else ""),
            FIND_PACK,
        )

    def _unmapped(
        self, leaves: LeafTable, state: FlatState, target: FlatState, diagnostics: Diagnostics
    ) -> dict[str, Any]:
        """Finds leaves unknown to the layout; records problems or a warning."""
        prefix, beside = ("", []) if target or diagnostics.allows_unmapped else leaves.beside(state)
        if beside:
            message = (
                f"{self.name} would leave {leaves_text(len(beside))} untranslated beside the model below {prefix!r}: "
                f"{listed(beside, _SHOWN_NAMES)}"
            )
            keep = Keep((f"{re.escape(prefix)}.*",))
            fix = Fix.setting("keep the model: pass {}", transforms=(keep, *(self._whole or (self,))))
            permit = Fix.setting("pass {} to translate only the model", strict=False)
            diagnostics.problem("unmapped", None, message, Fix.any_of(fix, permit))
        unfit = leaves.unfit(state)
        if MARKER in leaves.leaves:
            notes = notes_beside(state)
            unfit = {name: reason for name, reason in unfit.items() if name not in notes}
        change = change_between(state, target)
        own_target = target if change is None else change.reversed().applied(target)
        named = {name: reason for name, reason in unfit.items() if not _is_same_call(state[name], own_target.get(name))}
        # Whatever is allowed: a weight without its scale is another weight.
        for name, weight in multiplied_by(state, list(named)):
            diagnostics.problem("unmapped", name, UNKNOWN_FORM.format(repr(weight)), QUANTIZED_ELSEWHERE)
            named.pop(name, None)
        if named and diagnostics.allows_unmapped:
            diagnostics.warnings.append(
                f"{self.name}: {leaves_text(len(named))} that {leaves.layout} cannot have, so that no name and value "
                f"changes: {listed(named, _SHOWN_NAMES)}"
            )
        elif named:
            fix = self._permission(named, state, diagnostics)
            count = len(leaves.model(state))
            for name, reason in named.items():
                message = f"{self.name} would leave it untranslated beside {count - len(named)} of {count} leaves"
                if reason:
                    shape = tuple(getattr(state[name], "shape", ()))
                    message += f": its shape {shape} is none of {leaves.layout}, which has {reason}"
                else:
                    message += f": {leaves.layout} has no leaf of this name"
                diagnostics.problem("shape" if reason else "unmapped", name, message, fix)
        return {name: state[name] for name in unfit}

    def _permission(self, unmapped: Iterable[str], state: FlatState, diagnostics: Diagnostics) -> Fix:
        """Returns the ways to translate all other leaves."""
        first = {name: diagnostics.origin_of.get(name, name) for name in state}
        out = [first[name] for name in unmapped]
        others = set(first.values()).difference(out)
        patterns: dict[str, None] = {}
        for name in out:
            exact = re.escape(name)
            pattern = re.sub(r"\d+", r"\\d+", exact)
            patterns[exact if any(map(re.compile(pattern).fullmatch, others)) else pattern] = None
        drop = Drop(tuple(patterns))
        return Fix.any_of(
            Fix.setting("pass {} to translate only the other leaves", strict=False),
            Fix.setting("drop them before: pass {}", transforms=(drop, *(self._whole or (self,)))),
        )

    def digest(self) -> str | None:
        """As `Transform.digest`; of a call its code, and `found` does not count."""
        if self._call is not None:
            return text_digest(self.as_code())
        return super().digest() if not self.found else dataclasses.replace(self, found="").digest()

    @property
    def recorded_patterns(self) -> tuple[str, ...]:
        """The called function: a call with other arguments is an edited rule in a record."""
        return () if self._call is None else (f"{'inverse of ' * self._call.is_inverse}{self._call.function}",)

    def __repr__(self) -> str:
        return f"<RulePack {self.found or self.name}>"

    def as_code(self) -> str:
        """Returns the code of the call, or of all parts."""
        if self._call is not None:
            return self._call.as_code()
        return calls_code(self._joined) if self._joined else f"ot.rules.{self.name}"

    def describe(self) -> str:
        """Returns a line for people."""
        return f"rules.{self.name}" if not self.name.startswith("inverse of ") else f"rules: {self.name}"


def _is_same_call(leaf: Any, target_leaf: Any) -> bool:
    """Tests if a target leaf takes a leaf unchanged."""
    if target_leaf is None:
        return False
    wanted = getattr(target_leaf, "shape", None)
    return wanted is None or tuple(wanted) == tuple(getattr(leaf, "shape", ()))


def pack_of(call: PackCall, steps: tuple[AnyTransform, ...], back: tuple[AnyTransform, ...], **fields: Any) -> RulePack:
    """Makes the pack of a call."""
    return RulePack(steps, back, call.name, _call=call, **fields)


def names_of_layouts(pack: RulePack) -> Iterator[str]:
    """Yields the leaf names of both layouts, in layer 0."""
    yield from filter(None, (pack.example, pack.back_example))
    for table in (pack._leaves, pack._leaves_back):
        yield from (name.replace("*", "0") for name in (table.leaves if table else ()))


def join_packs(parts: Sequence[Transform], back: Sequence[Transform]) -> RulePack:
    """Joins transforms into a pack; `back` may be empty."""
    if len(parts) == 1 and isinstance(parts[0], RulePack):
        return parts[0]
    whole = tuple(parts)
    parts = tuple([dataclasses.replace(part, _whole=whole) if isinstance(part, RulePack) else part for part in whole])
    packs = [part for part in parts if isinstance(part, RulePack)]
    examples = [pack.back_example for pack in packs if pack.back_example]
    return RulePack(
        _flat_steps(parts),
        _flat_steps(back),
        " then ".join(part.name if isinstance(part, RulePack) else part.describe() for part in parts),
        packs[0].example if packs else "",
        examples[-1] if examples else "",
        _joined=parts,
        _joined_back=tuple(back),
    )


def _flat_steps(parts: Iterable[Transform]) -> tuple[AnyTransform, ...]:
    return tuple(step for part in parts for step in (part.steps if isinstance(part, RulePack) else (part,)))

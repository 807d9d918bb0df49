"""Plan of a restore: the reads of each target leaf.

It is decided before an array byte is read. Views say what to read, target leaves what to make. A plan is data: `show`
turns it into text and `executor` runs it, both loaded when they are first called.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import jax

from orbax_t5x import on_demand
from orbax_t5x.concurrency import guarded
from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.lazy.box import full_box
from orbax_t5x.lazy.read_stats import Verify
from orbax_t5x.provenance.records import Lineage
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.options import AnyProcesses, BroadcastMode, RestoreOptions
from orbax_t5x.restoring.targets import Target, TargetLeaf
from orbax_t5x.text.html import html_text
from orbax_t5x.text.progress_bar import Progress, shown_progress
from orbax_t5x.text.wording import counted, leaves_text, plain, size_text
from orbax_t5x.transforms.base import AnyTransform
from orbax_t5x.transforms.diagnostics import Why
from orbax_t5x.trees.named_leaves import leaves_digest

_execute_plan = on_demand.function("orbax_t5x.restoring.executor", "execute_plan")
_peak_bytes = on_demand.function("orbax_t5x.restoring.executor", "peak_bytes")
_plan_page = on_demand.function("orbax_t5x.restoring.show.table", "plan_page")
_explain_leaf = on_demand.function("orbax_t5x.restoring.show.explain", "explain_leaf")
_plan_diff = on_demand.function("orbax_t5x.restoring.show.explain", "plan_diff")
_to_json = on_demand.function("orbax_t5x.restoring.show.as_data", "to_json")
_warning_of_filled = on_demand.function("orbax_t5x.restoring.show.filled", "warning_of_filled")
_about_to_restore = on_demand.function("orbax_t5x.restoring.show.filled", "about_to_restore")
_has_restored = on_demand.function("orbax_t5x.restoring.show.filled", "has_restored")
_fold_names = on_demand.function("orbax_t5x.text.fold", "fold_names")

_logger = logging.getLogger(__name__)

# Folded names that a printed report has of each kind.
_SHOWN_NAMES = 20
Action = Literal["read", "value", "fallback", "keep"]


@dataclasses.dataclass(frozen=True, eq=False)
class PlanEntry:
    """A leaf of the target.

    Attributes:
      name: '/'-joined name in the target.
      sources: names of the checkpoint's leaves that it is made from, in order; empty for what is not read.
      shape, dtype: of what comes back.
      sharding: of the array that is made; None for what stays on the host.
      action: "read"; "value": a constant that a transform put there; "fallback"; "keep": a placeholder stays.
      how: what happens on the way, in words ("stack of 24 on axis 1"); empty for a plain read.
      rule: the rule that decided where it comes from, in words; empty where names matched.
      fidelity: of an optimizer's leaf that followed its parameter: "exact", "approximate" or "reset"; else empty.
      view: what to read, of the target's shape and dtype; None where nothing is read.
      leaf: what the target wants.
      leaves: the stored leaves and constants that the view is made of.

    Example:
      >>> rename = ot.transforms.Rename([("shared/embedding", "table")])
      >>> plan = ot.plan_restore(bundle, {"table": np.zeros((128, 16), np.float32)}, [rename], strict=False)
      >>> (entry,) = plan.entries
      >>> entry.name, entry.sources, entry.action
      ('table', ('shared/embedding',), 'read')
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None
    action: Action
    how: str = ""
    rule: str = ""
    fidelity: str = ""
    view: View | None = dataclasses.field(default=None, repr=False)
    leaf: TargetLeaf | None = dataclasses.field(default=None, repr=False)
    leaves: tuple[Leaf, ...] = dataclasses.field(default=(), repr=False)

    def boxes(self) -> tuple[Box, ...]:
        """Returns the unique index boxes that this process needs, in device order."""
        if self.leaf is None or self.view is None:
            return ()
        return addressable_boxes(self.leaf.sharding, self.leaf.shape)

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """The boxes of each leaf that this process reads.

        Constants are included; each box comes once.
        """
        leaf = None if self.view is None else self.view.leaf
        # The boxes of a bare leaf are those that it is asked for. Most entries are such: what is kept for each of them
        # is what Python's garbage collector goes through while it is planned.
        return self._composed_reads if leaf is None else ((leaf, self.boxes()),)

    @functools.cached_property
    def _composed_reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        return () if self.view is None else boxes_by_leaf((self.view, box) for box in self.boxes())

    @property
    def bytes_to_read(self) -> int:
        """Bytes of array data that this process reads for it.

        As `RestoreReport.bytes_read` counts them.
        """
        return sum([leaf.bytes_of(boxes) for leaf, boxes in self.reads])


def boxes_by_leaf(items: Iterable[tuple[View, Box]]) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
    """Returns the boxes of leaves for boxes of views."""
    found: dict[Leaf, dict[Box, None]] = {}
    for view, box in items:
        for leaf, wanted in view.requests(box):
            found.setdefault(leaf, {})[wanted] = None
    return tuple([(leaf, tuple(boxes)) for leaf, boxes in found.items()])


def addressable_boxes(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Returns the unique index boxes of this process's shards."""
    return (full_box(shape),) if sharding is None else _boxes_of(sharding, shape)


@functools.lru_cache(maxsize=1 << 14)
def _boxes_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    return tuple(dict.fromkeys(box_of_index(index or (), shape) for index in shard_indices(sharding, shape)))


def shard_indices(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Iterable[Sequence[slice] | None]:
    """Returns the indices of this process's shards."""
    untyped: Any = sharding
    return untyped.addressable_devices_indices_map(shape).values()


def box_of_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts a shard's index, as JAX gives it, to a box."""
    bounds = [
        (index_slice.start or 0, size if index_slice.stop is None else index_slice.stop)
        for index_slice, size in zip(index, shape, strict=False)
    ]
    return (*bounds, *((0, size) for size in shape[len(bounds) :]))


def _record_read(report: RestoreReport) -> None:
    """Records Orbax's metrics of a read."""
    untyped: Any = jax
    if untyped.process_index() == 0:
        gbytes = report.bytes_read / 1024**3
        jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", gbytes)
        jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", gbytes / max(report.seconds, 1e-9))


@dataclasses.dataclass(frozen=True, repr=False)
class RestoreReport:
    """Report on an execution.

    Printed, names of repeated layers are a single line.

    Attributes:
      bytes_read: bytes of array data read by this process: of the elements that its shards need, decoded, each
        element of a leaf once however many leaves and devices want it, gaps not counted. What can only be read whole
        counts whole (the strings of one TensorFlow variable, as stored; an array behind a function); constants and
        what was read when the checkpoint was opened count nothing. It equals the plan's `bytes_to_read`, unless
        `verify="full"` read more for checksums, or several processes sent each other leaves that each read in part.
      gap_bytes: bytes read over because they lay in gaps below 4 KiB between wanted runs.
      index_bytes: bytes read to open the checkpoints.
      fill_chunks: chunks that were absent, legitimately, and stand for the fill value.
      verified: leaves whose checksum was computed over all their bytes and holds.
      unverified: leaves that were read only in part, so that their checksum could not be compared.
      without_checksum: leaves whose format keeps no checksum of data.
      from_fallback: leaves of the target that came from the fallback.
      seconds: wall time.
    """

    bytes_read: int
    gap_bytes: int
    index_bytes: int
    fill_chunks: int
    verified: tuple[str, ...]
    unverified: tuple[str, ...]
    without_checksum: tuple[str, ...]
    seconds: float
    from_fallback: tuple[str, ...] = ()

    def summary(self) -> str:
        """Counts without names, in a line."""
        parts = [f"{size_text(self.bytes_read)} read in {self.seconds:.2f} s"]
        if self.gap_bytes:
            parts.append(f"{size_text(self.gap_bytes)} of gaps read over")
        if self.fill_chunks:
            parts.append(f"{counted(self.fill_chunks, 'chunk')} absent, filled")
        return ", ".join([*parts, *(f"{leaves_text(len(names))} {word}" for word, names in self._checks() if names)])

    def _checks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return (
            ("verified", self.verified),
            ("read only in part", self.unverified),
            ("without checksum", self.without_checksum),
            ("from fallback", self.from_fallback),
        )

    def __str__(self) -> str:
        lines = [self.summary()]
        for word, names in self._checks():
            folded = _fold_names(names)
            lines += [f"{word}:"] if names else []
            lines += [f"  {plain(row.label)}" for row in folded[:_SHOWN_NAMES]]
            left = sum(len(row.members) for row in folded[_SHOWN_NAMES:])
            lines += [f"  … and {leaves_text(left)} more"] if left else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<RestoreReport: {self.summary()}>"


Compute = Callable[[Mapping[str, TargetLeaf]], dict[str, Any]]
"""Computes leaves of the target with a fallback function, by name."""


class ExecutedPlans:
    """Restores of this process that led to a state with rules behind it.

    Attributes:
      states: Digest of the restored tree's names, shapes and dtypes, and the recorded rules, of each.
    """

    states: ClassVar[list[tuple[str, Lineage]]] = []

    @classmethod
    def note(cls, tree: Any, lineage: Lineage) -> None:
        """Notes a restored tree."""
        if lineage:
            cls.states.append((leaves_digest(tree), lineage))


class PlanMigrations(NamedTuple):
    """Names of a plan's migrations, applied before and now."""

    before: tuple[str, ...]
    now: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.before) + len(self.now)
        names = f": {', '.join(self.before)}" if self.before else ""
        return f"migrations: {len(self.before)} of {total} were applied before{names}"


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # Python 3.13 has defaults of type variables: a plan of unknown type is one of Any.
    _Restored = TypeVarWithDefault("_Restored", default=Any)
else:
    _Restored = TypeVar("_Restored")


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class RestorePlan(Generic[_Restored]):
    """Plan of a restore; made by `orbax_t5x.plan_restore`, run by `execute`.

    Attributes:
      entries: one per leaf of the target, in its order.
      target: the flattened target.
      checkpoints: the open sources, by the prefix of their leaf names; one alone under "".
      unused: names of the checkpoint's leaves that no rule took out and that have no place in the target.
      dropped: names that a transform, a placeholder or an `InferenceState` took out.
      warnings: rules that are shadowed, repeated or unused where that is allowed, and what a reader warned of.
      provenance: what was applied to this state, oldest first; handlers write it beside what they save.
        `read_provenance` makes it on first use.
      filled: names of the target's leaves that come from the fallback.
      fallback: computes what a fallback function computes with JAX, or None.
      is_fill_expected: whether the caller named the leaves that the fallback may fill (`fallback_for`).
      found_rules: the transforms that `"auto"` found; `print(plan)` shows them as code to paste.
      why: by the target's leaves that `"auto"` found, pairs (kind, detail): a leaf is "given" (by `--given`), has the
        "name", has it after a "renaming" that other leaves prove, is the only one that shapes and "structure" leave,
        is a rule "pack"'s (the detail), or belongs to the "optimizer" (the detail is the fidelity).
      bytes_read_at_planning: bytes of array data that transforms read while the plan was made, counted as in a report;
        `bytes_to_read` does not have them.
      report: after `execute`, what was read and checked.
      processes: Orbax's options of the processes that execute it together; None: all of the job.
      latest_steps: the steps that were chosen as the latest of a root; several processes compare them.
      is_resuming: whether the transforms count as applied before, so that they were not applied again.
      lineage: rules behind the restored state, as far as its own record says.
      rest: the transforms that are applied.
      migrations: the names of the migrations that were applied before, and of those that are applied, or None.

    Example:
      >>> plan = ot.plan_restore(bundle, None)
      >>> len(plan.entries), plan.unused
      (143, ())
      >>> plan.execute()["shared"]["embedding"].shape
      (128, 16)
    """

    entries: tuple[PlanEntry, ...]
    target: Target
    checkpoints: Mapping[str, Checkpoint]
    unused: tuple[str, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]
    read_provenance: Callable[[], Sequence[Mapping[str, Any]]]
    fallback: Compute | None
    is_fill_expected: bool
    found_rules: tuple[AnyTransform, ...]
    why: Mapping[str, Why]
    bytes_read_at_planning: int
    is_resuming: bool
    lineage: Lineage
    rest: tuple[AnyTransform, ...]
    migrations: PlanMigrations | None
    processes: AnyProcesses | None
    latest_steps: tuple[int, ...] = ()
    # None before `execute`, after which no caller should have to test it.
    report: RestoreReport | Any = None

    @functools.cached_property
    @guarded
    def provenance(self) -> tuple[Mapping[str, Any], ...]:
        """The transforms behind this state, oldest first.

        They are recorded with a save of it. Of a plan without transforms, of a step that records nothing, the run's
        older steps are read for it.
        """
        return tuple(self.read_provenance())

    @functools.cached_property
    def filled(self) -> tuple[str, ...]:
        """Names of the leaves from the fallback, in target order."""
        return tuple([entry.name for entry in self.entries if entry.action == "fallback"])

    @functools.cached_property
    def bytes_to_read(self) -> int:
        """Bytes of array data that this process will read.

        As `RestoreReport.bytes_read` counts them.
        """
        wanted: dict[Leaf, tuple[Box, ...]] = {}
        shared: dict[Leaf, list[Box]] = {}
        for entry in self.entries:
            for leaf, boxes in entry.reads:
                if wanted.setdefault(leaf, boxes) is not boxes:
                    shared.setdefault(leaf, []).extend(boxes)
        wanted.update({leaf: (*wanted[leaf], *boxes) for leaf, boxes in shared.items()})
        return sum([leaf.bytes_of(boxes) for leaf, boxes in wanted.items()])

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Most bytes of host memory that executing takes beside the result.

        By this process, with the default `memory_limit_bytes`. Chunks that can only be decoded whole are counted; what
        several processes send each other is not.
        """
        return _peak_bytes(self)

    def execute(
        self,
        *,
        verify: Verify = RestoreOptions.verify,
        memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
        progress: Progress | None = RestoreOptions.progress,
        broadcast: BroadcastMode = RestoreOptions.broadcast,
    ) -> _Restored:
        """Executes the plan and returns the filled target.

        Arguments as for `orbax_t5x.restore`.
        """
        return self.run(RestoreOptions.among(locals()))

    @property
    def path(self) -> str | None:
        """The paths of the checkpoints, for errors."""
        return ", ".join(checkpoint.path for checkpoint in self.checkpoints.values()) or None

    def place_of_errors(self) -> tuple[str | None, str | None]:
        """Returns the paths of the checkpoints, and no leaf."""
        return self.path, None

    @guarded
    def run(self, options: RestoreOptions) -> _Restored:
        """Runs `execute` with its keywords as an object."""
        if self.filled and (warning := _warning_of_filled(self)):
            _logger.warning("%s", warning)
        # The lines count through the whole plan.
        is_logged = _logger.isEnabledFor(logging.INFO)
        if is_logged:
            _logger.info("%s", _about_to_restore(self))
        with shown_progress(options.progress, "restoring") as on_progress:
            values, report = _execute_plan(self, options, on_progress)
        self.report = report
        _record_read(report)
        restored = self.target.rebuild(values)
        ExecutedPlans.note(restored, self.lineage)
        if is_logged:
            _logger.info("%s", _has_restored(self, report))
        return restored

    def explain(self, leaf: str) -> str:
        """Explains a target leaf's source, or a checkpoint leaf's use.

        Raises:
          KeyError: neither the target nor the checkpoint has the name; the text gives the closest ones.
        """
        return _explain_leaf(self, leaf)

    def diff(self, other: RestorePlan) -> str:
        """Compares two plans; returns their differences as text.

        It is about leaves; empty when there are no differences.
        """
        return _plan_diff(self, other)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as data that `json.dumps` takes."""
        return _to_json(self)

    def __str__(self) -> str:
        return _plan_page(self).text()

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __repr__(self) -> str:
        counts = collections.Counter([entry.action for entry in self.entries])
        actions = ", ".join(f"{counts[action]} {action}" for action in get_args(Action) if counts[action])
        return f"<RestorePlan: {actions or 'nothing to do'}; {len(self.unused)} unused, {len(self.dropped)} dropped>"

"""Source leaves, transforms and a target become a plan, or one error that says everything that is wrong.

Pure: opening the checkpoints was the last I/O. Every step gathers `Problem`s; only the end raises. The cost is linear
  in the number of
leaves (closest names are looked for only for the first few that are missing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.provenance import records as provenance
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.matching import Matcher
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.restoring.targets import Target, flatten_target
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms

_SAVED_WHOLE = "_optimizer/"


def build_plan(
    checkpoints: Mapping[str, Checkpoint],
    target: Any,
    transforms: Sequence[Callable[..., Any]],
    options: PlanOptions,
) -> RestorePlan:
    """Plans a restore.

    Args:
      checkpoints: by the prefix of their leaf names; one checkpoint under "" has no prefix.
      target: as `orbax_t5x.restore` takes it.
      transforms: in order.
      options: the rest of the keywords.

    Raises:
      RestorePlanError: with every problem found.
    """
    flattened = flatten_target(target)
    stored = source = _source_leaves(checkpoints)
    if flattened.kind in ("t5x", "inference"):
        source = _without_saved_whole_prefix(source)
    diagnostics = Diagnostics()
    diagnostics.problems.extend(flattened.problems)
    records = _records(checkpoints)
    resuming = _is_resuming(records, transforms, options.is_resuming, diagnostics)
    state = run_transforms(transforms, source, flattened.original, is_resuming=resuming, diagnostics=diagnostics)
    names = {id(leaf): name for name, view in stored.items() if view is not None for leaf in view.leaves()}
    matcher = Matcher(checkpoints, transforms, flattened, state, options, diagnostics, names)
    entries = matcher.entries()
    # Before the problems: nobody knows the shape of a broken leaf, so it clashes with any target.
    _raise_broken(entries)
    if diagnostics.problems:
        raise RestorePlanError(diagnostics.problems, path=_paths(checkpoints))
    used = {name for entry in entries if entry.action == "read" for name in entry.sources}
    unused = [name for name in matcher.leftover_sources() if name not in used]
    gone = {name for name, value in stored.items() if value is not None} - used - set(unused)
    return RestorePlan(
        entries=entries,
        target=flattened if flattened.kind != "everything" else _everything(checkpoints, state, entries, transforms),
        checkpoints=checkpoints,
        unused=sorted(unused),
        dropped=sorted(gone),
        warnings=diagnostics.warnings,
        provenance=_extended(records, checkpoints, () if resuming else transforms),
        fallback=matcher.fallback.compute if matcher.fallback is not None else None,
    )


def _paths(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    return ", ".join(checkpoint.path for checkpoint in checkpoints.values()) or None


def _records(checkpoints: Mapping[str, Checkpoint]) -> list[provenance.Record]:
    """What was applied to the source before; a mixture of several sources is a new beginning."""
    if len(checkpoints) != 1:
        return []
    (checkpoint,) = checkpoints.values()
    return provenance.from_metadata(checkpoint.metadata, path=checkpoint.path)


def _extended(
    records: Sequence[provenance.Record], checkpoints: Mapping[str, Checkpoint], transforms: Sequence[Any]
) -> list[provenance.Record]:
    single = checkpoints.get("") if len(checkpoints) == 1 else None
    record = provenance.make_record(
        single.path if single is not None else {name: checkpoint.path for name, checkpoint in checkpoints.items()},
        single.format if single is not None else {name: checkpoint.format for name, checkpoint in checkpoints.items()},
        transforms,
    )
    return provenance.append(records, record)


def _is_resuming(
    records: Sequence[provenance.Record], transforms: Sequence[Any], is_resuming: bool | None, diagnostics: Diagnostics
) -> bool:
    """Whether the transforms were applied already, by the caller's word or by the digest in the source's record."""
    if is_resuming is not None:
        return is_resuming
    digest, newest = provenance.transforms_digest(transforms), provenance.newest_digest(records)
    if digest is None or newest is None:
        return False
    if digest != newest:
        diagnostics.problems.append(
            Problem(
                "provenance",
                None,
                f"the checkpoint was made with other transforms ({newest[:19]}…) than those given ({digest[:19]}…)",
                "pass is_resuming=False (a new run: apply them now) or is_resuming=True (the same run, edited rules)",
            )
        )
    return digest == newest


def _source_leaves(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """All leaves by name, and None where a checkpoint says None; several sources are told apart by a prefix."""
    source: dict[str, Any] = {}
    for prefix, checkpoint in checkpoints.items():
        start = f"{prefix}/" if prefix else ""
        source.update((start + name, view) for name, view in checkpoint.leaves.items())
        source.update((start + name, None) for name, empty in checkpoint.empties.items() if empty is None)
    return source


def _without_saved_whole_prefix(source: dict[str, Any]) -> dict[str, Any]:
    """Names of a train state that stock Orbax saved whole (`_optimizer/target/…`), as its own state dict has them."""
    if not any(name.startswith(_SAVED_WHOLE) for name in source):
        return source
    return {
        name.removeprefix(_SAVED_WHOLE): value
        for name, value in source.items()
        if not name.startswith(("params_axes/", "flax_mutables_axes/"))
    }


def _raise_broken(entries: Iterable[PlanEntry]) -> None:
    """A leaf that its reader could not make sense of fails a plan that needs it, with the reader's own error."""
    for entry in entries:
        if entry.view is not None:
            for leaf in entry.view.leaves():
                leaf.raise_error()


def _everything(
    checkpoints: Mapping[str, Checkpoint],
    state: Mapping[str, Any],
    entries: Sequence[PlanEntry],
    transforms: Sequence[Any],
) -> Target:
    """The target of a restore without one: all leaves as NumPy, None and (untransformed) empty containers in their
    places.
    """
    empties: dict[str, Any] = {name: None for name, value in state.items() if value is None}
    if not transforms:
        for prefix, checkpoint in checkpoints.items():
            start = f"{prefix}/" if prefix else ""
            empties.update((start + name, empty) for name, empty in checkpoint.empties.items())
    base = flatten_target(None)
    leaves = {entry.name: entry.leaf for entry in entries if entry.leaf is not None}
    return dataclasses.replace(base, leaves=leaves, rebuild=lambda values: base.rebuild({**values, **empties}))

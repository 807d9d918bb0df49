"""`convert`: a checkpoint as an Orbax item or safetensors files.

It is written leaf by leaf and chunk by chunk. The source is planned like a restore of everything, so transforms compose
views, and nothing is read before everything is known to be storable. Then blocks of views are written into a directory
beside the destination, under a hidden name; checksums of the source are compared; at the end everything is synced and
moved to the destination, which is unchanged until then. A failure or an interrupt leaves nothing. A kill leaves that
directory, which the next conversion to the destination empties: it starts again. Memory: `memory_limit_bytes`, whatever
the size of a leaf, as long as the source's own chunks are smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

from orbax_t5x.concurrency import guarded, is_meant_for_caller
from orbax_t5x.errors import CheckpointError, CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.files.limits import check_memory_limit
from orbax_t5x.files.paths import url_scheme, whole_url
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.operations.convert.destination import Destination, LocalDestination
from orbax_t5x.operations.convert.job import FORMATS, ConversionJob
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.readers import Checkpoint, Limits
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.registry import Registry
from orbax_t5x.restoring.api import plan_of
from orbax_t5x.restoring.lineage import Caller
from orbax_t5x.restoring.options import RestoreOptions, check_dtype
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.sources import AnySource, Transforms, chain_of, open_sources
from orbax_t5x.text.progress_bar import Progress, shown_progress
from orbax_t5x.text.report import Page, Report, Section
from orbax_t5x.text.wording import array_text, leaves_text, plain, size_text
from orbax_t5x.transforms.base import describe_transform
from orbax_t5x.trees.narrow import check_flag


@dataclasses.dataclass(frozen=True)
class ConvertReport(Report):
    """Report of `orbax_t5x.convert`; `print(report)` shows it as text.

    Attributes:
      destination: the directory.
      format: in which it was written.
      leaves: how many arrays are there.
      bytes: of their data, decoded.
      seconds: wall time.
      skipped: (shape, dtype name) of the leaves that were left out because the format cannot store them, by name.
      rules: the transforms that were applied, as text; none that the source's record has already.
    """

    destination: str
    format: str
    leaves: int
    bytes: int
    seconds: float
    skipped: Mapping[str, tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    rules: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        skipped = {name: array_text(dtype, shape) for name, (shape, dtype) in self.skipped.items()}
        return {**super().to_json(), "skipped": skipped}

    def page(self) -> Page:
        """Returns the contents for people."""
        title = f"{leaves_text(self.leaves)} ({size_text(self.bytes)}) in {self.destination}, in {self.seconds:.1f} s"
        what = "safetensors files" if self.format == "safetensors" else "Orbax"
        names = [plain(f"{name}  {array_text(dtype, shape)}") for name, (shape, dtype) in self.skipped.items()]
        sections = [Section(f"left out, because {what} cannot store it", names=names)] if names else []
        return Page(title=title, sections=sections)


_logger = logging.getLogger(__name__)

# A limit this small is almost certainly a missing unit: 256 for 256 MiB.
_LEAST_SENSIBLE_LIMIT = 1 << 20


def convert(
    source: AnySource,
    destination: str | os.PathLike[str],
    transforms: Transforms = (),
    *,
    format: str = "orbax",
    dtype: Any = None,
    overwrite: bool = False,
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
    progress: Progress | None = RestoreOptions.progress,
    on_unsupported: Literal["error", "skip"] = "error",
    is_resuming: bool | None = RestoreOptions.is_resuming,
    strict: bool = RestoreOptions.strict,
    item: str | None = RestoreOptions.item,
    limits: Limits | None = RestoreOptions.limits,
) -> ConvertReport:
    """Writes a checkpoint as an Orbax item or safetensors files.

    `ocp.PyTreeCheckpointer().restore(destination)` reads the one; `from_pretrained(destination)` of Transformers the
    other, where names are Hugging Face's (see `orbax_t5x.rules.t5x_to_hf_t5`) and there is a config.json.

    It is a call of one process; in a job of several (`jax.distributed`) the others neither take part nor wait. Called
    again after it was killed, it starts again.

    Args:
      source: as `orbax_t5x.restore` takes it: a path, an open checkpoint, an `orbax_t5x.Source` with transforms of its
        own, or a mapping of several.
      destination: the local directory to make, `~` expanded; its parents are made too. Or a directory in a bucket,
        `gs://` or `s3://`, or a model of the hub, `hf://` (safetensors files): the checkpoint is made on a local disk
        first, below `TMPDIR` or in `/var/tmp`, then sent.
      transforms: applied to the names and views, as in a restore; there is no target, and so no `"auto"`. Rules
        that were applied before the source was written, by its record, are not applied again, with a warning.
      format: "orbax", or "safetensors": `model.safetensors`, or above 5 GB several files and their index. It has no
        place for None, for empty containers or for a record of what was applied.
      dtype: for the floating-point model parameters (under `target/` or `params/`); everything else keeps its own.
        Safetensors files without such names hold only model parameters.
      overwrite: replace a checkpoint of that format (or an empty directory) that is there; nothing else is ever
        replaced. Between two renames nothing is there; a kill in that moment is mended by the next conversion.
      memory_limit_bytes: host memory for data in flight, 256 MiB by default. Arrays are written in blocks
        of one chunk: an eighth of the limit, 1 MiB at least and 16 MiB at most, or a chunk of the source, which is
        never cut. A block takes four times its size; one that takes more than the limit is written by itself.
      progress: called as `progress(done_bytes, total_bytes, leaf)`, from one thread at a time; "bar" shows a bar on a
        terminal.
      on_unsupported: "error": leaves that the format cannot store are an error, by name, before anything is written.
        "skip": they are left out; their names, shapes and dtypes are in the report, and in an Orbax item's record.
      is_resuming: whether the transforms were applied already; None decides by the record in the source.
      strict: as in `orbax_t5x.restore`; without a target no leaf is left over.
      item: which item of an Orbax step.
      limits: what a file's headers may claim.

    Returns:
      What was written.

    Raises:
      CheckpointIOError: the destination exists, or cannot be written; another conversion to it is running
        (`errno.EBUSY`).
      RestorePlanError: the transforms do not fit.
      UnsupportedCheckpointError: leaves that cannot be stored, no leaf at all, or another `format`.
      CheckpointError: the source cannot be opened or read, or its checksums do not hold; nothing was made.

    Example:
      >>> report = ot.convert(bundle, directory / "t5x", [ot.transforms.Translate()])
      >>> ocp.PyTreeCheckpointer().restore(directory / "t5x")["target"]["token_embedder"]["embedding"].shape
      (128, 16)
    """
    options = RestoreOptions(item=item, is_resuming=is_resuming, strict=strict, limits=limits)
    writing = WriteOptions(format, dtype, overwrite, memory_limit_bytes, progress, on_unsupported)
    return convert_for(None, source, destination, transforms, options, writing)


@guarded
def convert_for(
    target: Any,
    source: AnySource,
    destination: str | os.PathLike[str],
    transforms: Transforms,
    options: RestoreOptions,
    writing: WriteOptions,
) -> ConvertReport:
    """Converts, with a target if there is one."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        _check_options(writing)
        chain = chain_of(transforms)
        place = _destination(_text_of(destination))
        writing = place.options(writing)
        place.check(writing)
        plan = _plan(source, target, chain, options, writing.on_unsupported, stack)
        for checkpoint in plan.checkpoints.values():
            place.check_apart(checkpoint)
        on_progress = stack.enter_context(shown_progress(writing.progress, "converting"))
        with _typed(place.name):
            written = ConversionJob(plan, place, writing).run(on_progress)
    seconds = time.monotonic() - started
    rules = tuple(map(describe_transform, plan.rest))
    return ConvertReport(place.name, writing.format, written.leaves, written.bytes, seconds, written.skipped, rules)


def _text_of(destination: str | os.PathLike[str]) -> str:
    if not isinstance(destination, str | os.PathLike):
        raise TypeError(f"the destination is text or an os.PathLike, not {type(destination).__name__}")
    name = os.fspath(destination)
    if not isinstance(name, str):
        raise TypeError(f"the destination {name!r} is not text")
    return name


_DESTINATIONS: Registry[Callable[[str], Destination]] = Registry(
    "destination",
    {
        "gs": "orbax_t5x.operations.convert.remote_destination:BucketDestination",
        "s3": "orbax_t5x.operations.convert.remote_destination:BucketDestination",
        "hf": "orbax_t5x.operations.convert.remote_destination:HubDestination",
    },
)


def _destination(name: str) -> Destination:
    scheme = url_scheme(name)
    if url := whole_url(name):
        raise UnsupportedCheckpointError(
            f"a URL that lost a slash; pass {url!r} as text, not as a pathlib.Path", path=name
        )
    if scheme is None:
        return LocalDestination(name)
    try:
        return _DESTINATIONS.get(scheme)(name)
    except KeyError:
        message = f"{scheme}:// is not written; local directories, gs://, s3:// and hf:// are"
        raise UnsupportedCheckpointError(message, path=name) from None


@contextlib.contextmanager
def _typed(path: str) -> Generator[None, None, None]:
    """Types an OS error about the destination."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError) or is_meant_for_caller(error):
            raise
        raise CheckpointIOError(f"could not be written: {error}", path=path, errno=error.errno) from error


def _check_options(writing: WriteOptions) -> None:
    if not isinstance(writing.format, str) or writing.format not in FORMATS:
        formats = " and ".join(map(repr, FORMATS))
        raise UnsupportedCheckpointError(f"format={writing.format!r} is not written; {formats} are")
    check_flag("overwrite", writing.overwrite)
    check_dtype(writing.dtype)
    check_memory_limit(writing.memory_limit_bytes)
    limit = writing.memory_limit_bytes
    if limit is not None and 0 < limit < _LEAST_SENSIBLE_LIMIT:
        _logger.warning(
            "memory_limit_bytes=%d is %s: each larger block is read by itself, up to %s at a time; is a unit missing?",
            limit,
            size_text(limit),
            size_text(_LEAST_SENSIBLE_LIMIT),
        )


# -- the source


def _plan(
    source: AnySource,
    target: Any,
    chain: tuple[Any, ...],
    options: RestoreOptions,
    on_unsupported: str,
    stack: contextlib.ExitStack,
) -> RestorePlan:
    sources = open_sources(source, options, stack)
    if on_unsupported == "skip":
        replaced = {name: _with_placeholders(checkpoint) for name, checkpoint in sources.checkpoints.items()}
        sources = dataclasses.replace(sources, checkpoints=replaced)
    return plan_of(sources, target, chain, options, Caller(keeps_lineage=True))


def _with_placeholders(checkpoint: Checkpoint) -> Checkpoint:
    """Replaces leaves of unsupported types by placeholders."""
    leaves: dict[str, Leaf] = {}
    for name, view in checkpoint.leaves.items():
        (leaf,) = view.leaves()
        if isinstance(leaf.error, UnsupportedCheckpointError):
            leaf = BrokenLeaf(name, leaf.error, is_refused=False)
        leaves[name] = leaf
    replaced = Checkpoint(
        path=checkpoint.path,
        format=checkpoint.format,
        step=checkpoint.step,
        leaves=leaves,
        empties=checkpoint.empties,
        metadata=checkpoint.metadata,
        sequences=checkpoint.sequences,
        index_bytes=checkpoint.index_bytes,
    )
    replaced.given_path = checkpoint.given_path
    return replaced

"""Finds the newest finished step of a root."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

from orbax_t5x.concurrency import guarded
from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.interface import Files
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.readers.detect import PathProbe, owner_of_directory, path_text
from orbax_t5x.readers.flax_msgpack.root import StepFile, step_files
from orbax_t5x.readers.format_table import all_formats
from orbax_t5x.readers.formats import open_checkpoint
from orbax_t5x.readers.orbax.steps import Step, finished_steps


@guarded
def latest_step(root: str | os.PathLike[str], *, validated: bool = False) -> int | None:
    """Finds the newest finished step of a root.

    The root is Orbax's, T5X's through Orbax, T5X's own, or of files of Flax. Temporary, empty and half-deleted
    directories are no steps; step 0 is one. Where Flax numbered the newest file of a root by a fraction, it has no
    step.

    Args:
      root: a local directory, or a prefix of a bucket; one that does not exist has no steps.
      validated: open each step, newest first, and skip those that do not open or have a damaged leaf, with a warning.

    Returns:
      The step's number, or None where there is none.

    Raises:
      UnsafeCheckpointError: the newest is a symlink that leads out of the root; validated, it is skipped.
      CheckpointIOError: the operating system refused to look.

    Example:
      >>> with ocp.CheckpointManager(directory) as manager:
      ...     manager.save(20, args=ocp.args.StandardSave({"w": np.ones(3)}))
      True
      >>> ot.latest_step(directory)
      20
    """
    with opening():
        return _latest_step(path_text(root), validated)


def _latest_step(root: str, validated: bool) -> int | None:
    probe = PathProbe(files_at(root))
    if probe.kind != "directory":
        return None
    for step in _newest_first(probe):
        if not validated:
            probe.files.locate(step.name)
            return step.step
        problem = _problem_of(probe.files, step.name)
        if problem is None:
            return step.step
        warnings.warn(f"step {step.step} is skipped: {problem}", stacklevel=4)
    return None


def _newest_first(probe: PathProbe) -> Iterator[Step | StepFile]:
    """Yields the finished steps of a root: directories, else files."""
    steps = finished_steps(probe.files)
    newest = next(steps, None)
    if newest is not None:
        yield newest
        yield from steps
    elif owner_of_directory(probe, all_formats()) is None:
        yield from reversed(step_files(probe))


def _problem_of(root: Files, name: str) -> CheckpointError | None:
    """Opens a step and returns the first error, or None."""
    try:
        with open_checkpoint(root.locate(name)) as checkpoint:
            for view in checkpoint.leaves.values():
                for leaf in view.leaves():
                    if leaf.error is not None:
                        return leaf.error
    except CheckpointError as error:
        return error
    return None

"""Arguments of saves and restores, as Orbax wants them.

They are plain records, checked at use.

`orbax_t5x.handlers.checkpoint_handler` registers them with `TrainStateHandler`.

Example:
  >>> with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
  ...     checkpointer.save(directory / "step", args=ot.args.TrainStateSave({"w": np.ones(3)}))
  ...     checkpointer.restore(directory / "step", args=ot.args.TrainStateRestore())
  {'w': array([1., 1., 1.])}
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orbax.checkpoint as ocp

from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.text.progress_bar import Progress


class _Missing(enum.Enum):
    """Type of its own for "not given".

    None is a target ("everything, as NumPy").
    """

    MISSING = "not given"


MISSING = _Missing.MISSING


# Neither compared nor shown by value: either would read whole states to the host.
@dataclasses.dataclass(eq=False)
class TrainStateSave(ocp.args.CheckpointArgs):
    """The arguments of a save.

    Attributes:
      item: any pytree. A T5X train state (it has `state_dict()` and `restore_state()`) is written by its state dict, in
        T5X's own Orbax layout; any other tree exactly as stock Orbax writes it. Leaves may be lazy arrays of an opened
        checkpoint: they are read and written chunk by chunk.
      dtype: floating-point model parameters (leaves under `target/` or `params/`, or of type `nnx.Param`, or that
        transforms make from one) are written in this dtype; nothing else is.
      transforms: applied to the state dict first, in T5X's protocol. Arrays that none of them touches keep their
        sharding; what they compute is written chunk by chunk, as NumPy arrays. They are not recorded as provenance:
        what counts there is how the run was initialised.
      provenance: transforms behind the state: `plan.provenance` of the plan that restored it, or `()` for none. None:
        those of the state with the same names, shapes and dtypes that this handler last restored or saved in this root;
        in a root without steps, those of its restores. If neither is known, the save is unrecorded, with a warning, and
        the next restore with transforms asks for `is_resuming`.
      on_unsupported: "error": a leaf that Orbax cannot store fails the save before anything is written, by name.
        "skip": it is left out, and its name, shape and dtype are recorded: of a Python number or bytes, those that
        NumPy gives it; of any other object, `()` and "object". Numeric arrays without elements come back from that.
      custom_metadata: your own JSON values, stored beside our record.
      memory_limit_bytes: bounds the host memory for lazy leaves, and for what transforms compute, in flight;
        256 MiB if None.
      progress: as in `orbax_t5x.restore`, for these.
      ocdbt_target_data_file_size: as in `ocp.args.PyTreeSave`.
      save_args: a tree like the item of `ocp.SaveArgs`, or None where a leaf needs none: `dtype` (before the one
        above), `chunk_byte_size` and `shard_axes` of single leaves. After `transforms` its names are those of what
        they give.
    """

    item: Any = dataclasses.field(repr=False)
    dtype: Any = None
    transforms: Any = ()
    provenance: Sequence[Mapping[str, Any]] | None = None
    on_unsupported: Literal["error", "skip"] = "error"
    custom_metadata: Mapping[str, Any] | None = None
    memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes
    progress: Progress | None = RestoreOptions.progress
    ocdbt_target_data_file_size: int | None = None
    save_args: Any = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(eq=False)
class TrainStateRestore(RestoreOptions, ocp.args.CheckpointArgs):
    """The arguments of a restore: the keywords of `orbax_t5x.restore`.

    Without a target, stock Orbax restores; `target=None`, given, is everything as NumPy.

    Attributes:
      target: the tree to restore into.
      source: restored from instead of the directory that Orbax passes: a TF prefix, a single file, a remote path, an
        opened checkpoint, an `orbax_t5x.Source`, or a mapping of several. Orbax looks at its own directory first: a
        manager wants a step in its root, a `Checkpointer` a directory that exists.
    """

    target: Any = dataclasses.field(default=MISSING, repr=False)
    transforms: Any = ()
    _: dataclasses.KW_ONLY
    source: Any = None

    def __post_init__(self) -> None:
        """Checks nothing: a restore does."""

    def given(self) -> list[str]:
        """Returns the names of the keywords that are not at their defaults."""
        changed: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            at_default = value is field.default or (isinstance(value, Sequence) and not value and field.default == ())
            if not at_default:
                changed.append(field.name)
        return changed

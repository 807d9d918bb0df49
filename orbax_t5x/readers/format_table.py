"""The table of formats, with their marks as data.

`register_format` adds rows.

Rows have no order that decides anything. Detection looks at marks alone: the module that opens a format is loaded when
a mark fits.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.registry import Registry, RegistryEntry

Weight = Literal["own", "loose", "hint"]


class Opener(Protocol):
    """Function that opens a path of a format."""

    def __call__(self, path: str, /, *, limits: Limits) -> Checkpoint:
        """Opens the path.

        Raises:
          CheckpointError: the path cannot be opened; the error names the file.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Mark:
    r"""A format's mark: a file's name, first bytes or last bytes.

    A file has the mark if everything that is given fits. Weights decide between formats, never their order: an "own"
    mark goes before a "loose" mark of another format, and a "hint" counts only if nothing else does, steps included.

    Attributes:
      name: glob of the file's name; "*" for any name.
      head: regular expression (DOTALL) at the beginning of the first 256 bytes.
      tail: regular expression (DOTALL) of the last 16 bytes, whole.
      but: glob of names that the mark is not for.
      beside: name of a file that must lie beside it, with `{name}` and `{stem}` of its own; in a directory's marks a
        glob.
      without: names of files that must not lie beside it: with one of them, the file belongs to another format.
      over: globs of files that hold the same model in other encodings, and that are passed over for this file.
      weight: "own" or "hint" for a file; "own", "loose" or "hint" for a file in a directory. A loose file may lie
        beside a checkpoint of another format.

    Example:
      >>> ot.Mark("*.toy"), ot.Mark(head=rb"TOY[12]"), ot.Mark("arrays.json", weight="loose").weight
      (Mark(name='*.toy'), Mark(head=b'TOY[12]'), 'loose')
    """

    name: str = "*"
    head: bytes | None = None
    tail: bytes | None = None
    but: str | None = None
    beside: str | None = None
    without: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    weight: Weight = "own"

    def __post_init__(self) -> None:
        for field in ("head", "tail"):
            pattern = getattr(self, field)
            if not isinstance(pattern, bytes | None):
                raise TypeError(f"{field}= of a mark is a regular expression of bytes, not {pattern!r}")
            try:
                re.compile(pattern or b"", re.DOTALL)
            except re.error as error:
                raise ValueError(f"{field}={pattern!r} of a mark is no regular expression: {error}") from error
        if self.weight not in get_args(Weight):
            raise ValueError(f"weight={self.weight!r} of a mark is none of {', '.join(map(repr, get_args(Weight)))}")

    def __repr__(self) -> str:
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"Mark({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of checkpoints, for `ot.register_format`.

    Attributes:
      name: the value of `Checkpoint.format` and of the argument `format=`.
      open: function `open(path, *, limits)` that opens a file or directory as an `ot.Checkpoint`; or its place as
        text, `module:attribute`, which is loaded when a path has a mark.
      files: marks of a file that the user names.
      directory: marks of files by which a directory is the format's own.
      sought: description of both in the error of a path without any format; the name if empty.
      has_items: whether `open` also takes `item=`, the name of an item in a step.

    Example:
      >>> def open_empty(path, *, limits):
      ...     return ot.Checkpoint(path=path, format="empty", step=None, leaves={})
      >>> empty = ot.Format("empty", open_empty, files=[ot.Mark("*.empty")], sought="an empty file (*.empty)")
      >>> with ot.register_format(empty):
      ...     ot.open_checkpoint(directory, format="empty").format
      'empty'
    """

    name: str
    open: Opener | str
    files: Sequence[Mark] = ()
    directory: Sequence[Mark] = ()
    sought: str = ""
    has_items: bool = False

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"the name of a format is a text that is not empty, not {self.name!r}")
        if isinstance(self.open, str):
            if not re.fullmatch(r"[\w.]+:\w+", self.open):
                raise ValueError(f"{self.name}: open={self.open!r} is no place of a function, 'module:attribute'")
        elif not callable(self.open):
            raise TypeError(f"{self.name}: open= is a function or its place as text, not {self.open!r}")
        object.__setattr__(self, "files", tuple(self.files))
        object.__setattr__(self, "directory", tuple(self.directory))
        for mark in (*self.files, *self.directory):
            if not isinstance(mark, Mark):
                raise TypeError(f"{self.name}: marks are orbax_t5x.Mark objects, not {mark!r}")


_SHARD = f"*.data-{'[0-9]' * 5}-of-{'[0-9]' * 5}"
# The text in which TensorFlow names the newest bundle of a directory.
BUNDLE_STATE = Mark(head=rb".*?model_checkpoint_path:")
SSTABLE = Mark(tail=rb".*\x57\xfb\x80\x8b\x24\x75\x47\xdb")
# T5X keeps the iterator of each host's training data in a step; it is a bundle.
_ITERATOR = "train_ds-*-of-*"
# A map of the key `version`, a small number, and the key `optimizer`; that number at the end; a train state's parts.
_T5X_HEAD = rb"[\x82-\x8f]\xa7version[\x00-\x7f]\xa9optimizer"
_OLD_T5X_HEAD, _OLD_T5X_TAIL = rb"\x82\xa9optimizer", rb".*\xa7version[\x00-\x7f]"
_TRAIN_STATE = rb"[\x81-\x83](?:\xa6target|\xa5state|\xadflax_mutables)"
# A map with text keys.
_MAP_HEAD = rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9\xda]"
MSGPACK_MAP = Mark(head=_MAP_HEAD)
_OTHER_MSGPACK = rb"(?!" + rb"|".join((_T5X_HEAD, _OLD_T5X_HEAD, _TRAIN_STATE)) + rb")" + _MAP_HEAD
# The length of the header, of less than 4 GiB, and its first brace.
_SAFETENSORS = rb"(?![\x00\x01]\x00\x00\x00).{4}\x00{4}\{"
_ZIP = rb"PK(?:\x03\x04|\x05\x06)"
_ZIP_MEMBER = rb"PK\x03\x04.{22}"
# How a file of PyTorch before 1.6 begins: a pickle of its magic number.
OLD_TORCH = rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\."

TF_BUNDLE = Format(
    "tf_bundle",
    "orbax_t5x.readers.tf_bundle.open:open_tf_bundle",
    files=[Mark("*.index"), Mark(_SHARD), BUNDLE_STATE, Mark(beside="{name}.index", weight="hint")],
    directory=[
        Mark("*.index", tail=SSTABLE.tail, but=_ITERATOR),
        Mark("*.index", beside=_SHARD.replace("*", "{stem}"), but=_ITERATOR),
        Mark("checkpoint", head=BUNDLE_STATE.head, weight="hint"),
    ],
    sought="a TensorFlow bundle (prefix.index, prefix.data-…)",
)
ORBAX = Format(
    "orbax",
    "orbax_t5x.readers.orbax.open:open_orbax",
    directory=[
        Mark("_METADATA"),
        Mark("_CHECKPOINT_METADATA"),
        Mark("manifest.ocdbt"),
        # Early Orbax kept its tree in a file of this name.
        Mark("checkpoint", head=_OTHER_MSGPACK),
        Mark("checkpoint", head=_OLD_T5X_HEAD, tail=rb"(?!" + _OLD_T5X_TAIL + rb"\Z).*"),
    ],
    sought="an Orbax item or step (_METADATA, _CHECKPOINT_METADATA)",
    has_items=True,
)
T5X = Format(
    "t5x",
    "orbax_t5x.readers.t5x.open:open_t5x",
    files=[Mark(head=_T5X_HEAD), Mark(head=_OLD_T5X_HEAD, tail=_OLD_T5X_TAIL)],
    directory=[
        Mark("checkpoint", head=_T5X_HEAD),
        Mark("checkpoint", head=_OLD_T5X_HEAD, tail=_OLD_T5X_TAIL),
        # Early Orbax has such a file beside its own marks.
        Mark("checkpoint", head=_TRAIN_STATE, without=("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")),
    ],
    sought="a T5X step (a msgpack file 'checkpoint')",
)
FLAX_MSGPACK = Format(
    "flax_msgpack",
    "orbax_t5x.readers.flax_msgpack.open:open_flax_msgpack",
    files=[Mark("*.msgpack.index.json"), Mark(head=_MAP_HEAD, weight="hint")],
    directory=[Mark("flax_model.msgpack", weight="loose"), Mark("flax_model.msgpack.index.json", weight="loose")],
    sought="a Flax msgpack file",
)
# What Transformers passes over for `model.safetensors`, and PEFT for `adapter_model.safetensors`.
_MODEL, _ADAPTER = ("pytorch_model.*", "flax_model.*", "*.gguf"), ("adapter_model.*",)
SAFETENSORS = Format(
    "safetensors",
    "orbax_t5x.readers.safetensors.open:open_safetensors",
    files=[Mark("*.safetensors"), Mark("*.safetensors.index.json"), Mark(head=_SAFETENSORS)],
    directory=[
        Mark("model.safetensors", over=_MODEL, weight="loose"),
        Mark("model.safetensors.index.json", over=_MODEL, weight="loose"),
        Mark("adapter_model.safetensors", over=_ADAPTER, weight="loose"),
        Mark("*.safetensors", weight="loose"),
        Mark("*.safetensors.index.json", weight="loose"),
    ],
    sought="safetensors files",
)
TORCH = Format(
    "torch",
    "orbax_t5x.extras.torch_zip.open:open_torch",
    files=[
        Mark("*.bin.index.json"),
        Mark(head=OLD_TORCH),
        Mark(head=_ZIP_MEMBER + rb".{4}[^/\x00]+/data\.pkl"),
        *(Mark(name, head=_ZIP, weight="hint") for name in ("*.bin", "*.pt", "*.pth")),
    ],
    directory=[
        Mark("pytorch_model.bin", weight="loose"),
        Mark("pytorch_model.bin.index.json", weight="loose"),
        Mark("adapter_model.bin", weight="loose"),
    ],
    sought="PyTorch's files (.bin, .pt, .pth)",
)
NPZ = Format(
    "npz",
    "orbax_t5x.extras.npz.open:open_npz",
    files=[Mark(head=_ZIP_MEMBER + rb".{4}[^\x00]+?\.npy"), Mark("*.npz", head=_ZIP, weight="hint")],
    sought="an .npz file",
)
GGUF = Format(
    "gguf",
    "orbax_t5x.extras.gguf.open:open_gguf",
    files=[Mark("*.gguf"), Mark(head=rb"GGUF")],
    directory=[Mark("*.gguf", weight="loose")],
    sought="a GGUF file",
)

_OWN = (TF_BUNDLE, ORBAX, T5X, FLAX_MSGPACK, SAFETENSORS, TORCH, NPZ, GGUF)
FORMATS: Registry[Format] = Registry(
    "format", {row.name: f"{__name__}:{row.name.upper()}" for row in _OWN}, group="orbax_t5x.formats"
)


def register_format(format: Format) -> RegistryEntry:
    """Adds a format until it is unregistered.

    From then on it is found by `open_checkpoint` and by everything that takes a path, and has a name for `format=`. A
    package that is installed does the same for each process by an entry point of the group `orbax_t5x.formats`, which
    has the format's name and leads to the `Format`.

    Args:
      format: its name, its marks and how it opens.

    Returns:
      An object with `unregister()`, which is a context manager, too.

    Raises:
      ValueError: the name is taken.
      TypeError: `format` is no `Format`.

    Example:
      >>> def open_empty(path, *, limits):
      ...     return ot.Checkpoint(path=path, format="empty", step=None, leaves={})
      >>> with ot.register_format(ot.Format("empty", open_empty, files=[ot.Mark("*.empty")])):
      ...     _ = (directory / "model.empty").write_bytes(b"")
      ...     ot.open_checkpoint(directory / "model.empty").format
      'empty'
    """
    if not isinstance(format, Format):
        raise TypeError(f"a format is an orbax_t5x.Format, not a {type(format).__name__}")
    return FORMATS.register(format.name, format)


def all_formats() -> list[Format]:
    """Lists all formats.

    Broken rows of other packages are left out with a warning.
    """
    rows = list(_OWN)
    for name in FORMATS.joined_names():
        try:
            rows.append(format_named(name))
        except UnsupportedCheckpointError as error:
            warnings.warn(error.message, stacklevel=2)
    return rows


def format_named(name: str) -> Format:
    """Returns the format of a name.

    Raises:
      UnsupportedCheckpointError: the name's entry point leads to no such format.
    """
    try:
        row = FORMATS.get(name)
    except Exception as error:  # another package's code
        message = f"the format {name!r} of an installed package is left out: {error}"
        raise UnsupportedCheckpointError(message) from error
    if not isinstance(row, Format) or row.name != name:
        message = f"the format {name!r} of an installed package is left out: its entry point leads to {row!r}"
        raise UnsupportedCheckpointError(f"{message}, not to an orbax_t5x.Format of this name")
    return row

"""A format as data: name, marks and opener."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from orbax_t5x.files.limits import Limits
from orbax_t5x.readers.checkpoint import Checkpoint

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
      head: regular expression (DOTALL) at the beginning of the first 256 bytes. If it has a group `path`, the mark
        fits only if that path with `suffix_of_path`, below the file's directory, is a file.
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
    suffix_of_path: str = ""

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

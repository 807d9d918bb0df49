"""Exceptions that leave public calls, and the `Problem` records behind them.

Each class also is the builtin that callers catch by habit (`FileNotFoundError`, `ValueError`, `OSError`). An error
carries the `path` of the file or directory and the name of the `leaf` it is about, and its text begins with both; that
of a `RestorePlanError` begins with its first problem.

Example:
  >>> try:
  ...     ot.open_checkpoint(bundle + "-of-another-name")
  ... except FileNotFoundError as error:  # an ot.errors.CheckpointNotFoundError, too
  ...     type(error).__name__
  'CheckpointNotFoundError'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, Unpack

from orbax_t5x import on_demand
from orbax_t5x.text.fix import Fix as Fix
from orbax_t5x.text.html import html_text
from orbax_t5x.text.masked import masked, masked_path
from orbax_t5x.text.problem import Problem as Problem
from orbax_t5x.text.problem import ProblemKind as ProblemKind
from orbax_t5x.text.wording import counted, plain, with_full_stop

AnyPath = str | os.PathLike[str]

# Problems are rare.
_problem_lines: Callable[..., list[str]] = on_demand.function("orbax_t5x.text.problem_lines", "problem_lines")

_Raised = TypeVar("_Raised", bound=BaseException)
_FOR_CALLER = "_orbax_t5x_for_caller"


class CheckpointError(Exception):
    """Base of all errors of this package.

    Attributes:
      leaf: the '/'-joined name of the leaf concerned, or None.
      fix: what to do about it, or None.
    """

    _has_lines: ClassVar[bool] = False

    def __init__(self, message: str, *, path: AnyPath | None = None, leaf: str | None = None, fix: Fix | None = None):
        # Texts are cleaned when they are read: a file may claim a hundred thousand errors that nobody sees.
        self._message = message
        self._path = None if path is None else os.fspath(path)
        self.leaf = leaf
        self.fix = fix
        super().__init__()

    @property
    def message(self) -> str:
        """The text without path and leaf."""
        # It may quote a file's or a server's text.
        text = masked(self._message)
        return text if self._has_lines else plain(text)

    @property
    def path(self) -> str | None:
        """The file or directory concerned, as text, or None."""
        return None if self._path is None else masked_path(self._path)

    if not TYPE_CHECKING:  # pyright knows an attribute only

        @property
        def args(self) -> tuple[str]:
            """The text of the error."""
            return (str(self),)

        @args.setter
        def args(self, given: tuple[object, ...]) -> None:
            self._text = " ".join(map(str, given))

    def __str__(self) -> str:
        return vars(self).get("_text") or self.described()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        system = {"errno": self.errno} if isinstance(self, OSError) else {}
        return _unfilled, (type(self),), {**vars(self), **system}

    def described(self, fix_text: Callable[[Fix], str] = str, *, width: int | None = None) -> str:
        """Returns the text of the error.

        Args:
          fix_text: gives the text of a fix.
          width: columns of a terminal for a list of problems; None where lines are not broken.
        """
        # A directory's name may hold control characters, and Python's own traceback prints this text.
        where = [] if self.path is None else [plain(self.path)]
        if self.leaf is not None:
            where.append(f"leaf {self.leaf!r}")
        text = with_full_stop(": ".join([*where, self.message]))
        return text if self.fix is None else f"{text}\nFix: {masked(fix_text(self.fix))}"


def _unfilled(kind: type[CheckpointError]) -> CheckpointError:
    """Makes an error for pickle to fill."""
    return kind.__new__(kind)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A path without a checkpoint; the text lists the search."""


class CheckpointGoneError(CheckpointError, FileNotFoundError):
    """Error: the checkpoint vanished while it was being read."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Damaged bytes: a checksum, a length or a structure does not hold."""


class UnsafeCheckpointError(CheckpointError, ValueError):
    """A checkpoint that refers to something outside its own directory.

    Or it needs more than reading.
    """


class UnsupportedCheckpointError(CheckpointError, ValueError):
    """A well-formed checkpoint that is not readable here.

    The text names readable alternatives.
    """


class LimitExceededError(CheckpointError, ValueError):
    """A size in a file beyond the limits.

    Raise them with `orbax_t5x.Limits`.
    """


class _ErrorPlace(TypedDict, total=False):
    path: AnyPath | None
    leaf: str | None
    fix: Fix | None


class CheckpointIOError(CheckpointError, OSError):
    """A failure of the operating system or of a remote store.

    Attributes:
      errno: the operating system's error number, or None where it gave none.
    """

    def __init__(self, message: str, *, errno: int | None = None, **place: Unpack[_ErrorPlace]):
        super().__init__(message, **place)
        self.errno = errno


def given_message(error: CheckpointError) -> str:
    """Returns the text that an error was made with."""
    return vars(error)["_message"]


def error_at(error: CheckpointError, *, path: AnyPath | None, leaf: str | None) -> CheckpointError:
    """Returns the same error about another file or leaf.

    It is a new exception, because a traceback belongs to a single raise.
    """
    message = given_message(error)
    if isinstance(error, CheckpointIOError):
        return CheckpointIOError(message, path=path, leaf=leaf, fix=error.fix, errno=error.errno)
    return type(error)(message, path=path, leaf=leaf, fix=error.fix)


def for_caller(error: _Raised) -> _Raised:
    """Marks an exception that public calls raise as it is.

    Needed for wrong arguments that a reader or a store meets, and for exceptions of a caller's function: all else in
    such a place is an effect of the files.
    """
    vars(error)[_FOR_CALLER] = True
    return error


def is_for_caller(error: BaseException) -> bool:
    """Tests whether an exception was marked by `for_caller`."""
    return _FOR_CALLER in vars(error)


class LeafMismatchError(CheckpointError, ValueError):
    """A file that disagrees with itself about a leaf.

    T5X's functions raise it for a shape that does not fit.
    """


class RestorePlanError(CheckpointError, ValueError):
    """All disagreements between a checkpoint, its transforms and a target.

    They are in `problems`. The text has problems that are alike as one entry and stays under 60 lines. The first line
    is the first problem, the last counts all and names the checkpoint.

    Attributes:
      problems: all of them.

    Example:
      >>> small = np.zeros(3, np.float32)
      >>> try:
      ...     ot.restore(bundle, {"shared": {"embedding": small, "embedding_slot_vc": small}}, strict=False)
      ... except ot.RestorePlanError as error:
      ...     [problem.leaf for problem in error.problems]
      ['shared/embedding', 'shared/embedding_slot_vc']
    """

    _has_lines = True

    def __init__(self, problems: Sequence[Problem], *, path: AnyPath | None = None):
        self.problems: tuple[Problem, ...] = tuple(problems)
        self._count = f"{counted(len(self.problems), 'problem')} between checkpoint, transforms and target"
        super().__init__(
            "\n".join([*map(plain, _problem_lines(self.problems)), with_full_stop(self._count)]), path=path
        )
        self.leaf: str | None = self.problems[0].leaf if len(self.problems) == 1 else None

    def described(self, fix_text: Callable[[Fix], str] = str, *, width: int | None = None) -> str:
        """See `CheckpointError.described`."""
        where = "." if self.path is None else f": {plain(self.path)}"
        all_in = "`.problems`" if width is None else "`plan --json`"
        lines = _problem_lines(self.problems, width=width, all_in=all_in, fix_text=fix_text)
        return "\n".join([*map(plain, lines), self._count + where])

    def _repr_html_(self) -> str:
        return html_text(str(self))

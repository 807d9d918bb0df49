"""Transcript of an opening: the store's answers.

Other processes open the same checkpoint from it. One process of a job opens a checkpoint and records the answers; the
others run the same readers over these answers and send no request of their own. So every check of a reader holds on
each process, limits included, and every format is covered. Answers are plain data. What a transcript lacks is asked of
the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Fix,
    LeafMismatchError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)

# Errors that are raised with the same type on the other processes.
_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointGoneError,
        CheckpointIOError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        LeafMismatchError,
        LimitExceededError,
        UnsafeCheckpointError,
        UnsupportedCheckpointError,
    )
}


def error_as_data(error: BaseException) -> list[Any] | None:
    """Encodes an error as JSON data, or None if it is local."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), None)
    if not isinstance(error, CheckpointError) or name is None:
        return None
    number = error.errno if isinstance(error, CheckpointIOError) else None
    fixes = [] if error.fix is None else [_fix_as_data(way) for way in error.fix.ways]
    return [name, error.message, error.path, error.leaf, number, fixes]


def error_from_data(data: Sequence[Any], suffix: str = "") -> CheckpointError:
    """Returns the error of `error_as_data`; the suffix follows its message."""
    name, message, where, leaf, number, fixes = data
    fix = Fix.any_of(*map(_fix_from_data, fixes)) if fixes else None
    if _KINDS[name] is CheckpointIOError:
        return CheckpointIOError(f"{message}{suffix}", path=where, leaf=leaf, fix=fix, errno=number)
    return _KINDS[name](f"{message}{suffix}", path=where, leaf=leaf, fix=fix)


def _fix_as_data(way: Fix) -> list[Any]:
    """Encodes a fix without alternatives as JSON data."""
    arguments = {name: [] if value is ... else [value] for name, value in way.arguments.items()}
    if way.transforms or not all(isinstance(value, str | bool) for given in arguments.values() for value in given):
        return [way.text, "program", {}]
    return [way.words or way.text, way.scope, arguments]


def _fix_from_data(data: Sequence[Any]) -> Fix:
    words, scope, arguments = data
    if not arguments:
        return Fix(words, scope=scope)
    return Fix.setting(words, **{name: value[0] if value else ... for name, value in arguments.items()})


_Result = TypeVar("_Result")
MOST_TRANSCRIPT_BYTES = 256 << 20
"""The most bytes that `Transcript.encode` returns; of more nothing is shared, and each process opens for itself."""
_LENGTH_BYTES = 8
# Kinds of answers.
_ERROR, _BYTES, _VALUE = "error", "bytes", "value"


def same(value: Any) -> Any:
    """Packs a value that is JSON data, or unpacks it."""
    return value


class Answer(NamedTuple):
    """Answer of a store: JSON data and bytes."""

    value: Any
    data: bytes = b""


class Viewpoint(NamedTuple):
    """Two processes of a job: reader, and opener for all."""

    process: int
    opener: int

    def difference(self, what: str, here: object, there: object) -> tuple[str, Fix]:
        """Words the error of a file that differs on this process."""
        message = (
            f"differs between processes: {what} is {here} on process {self.process}, and {there} on process "
            f"{self.opener}, which opened the checkpoint for all"
        )
        return message, Fix("give all processes the same files, and let no one change them while they are restored")


class Transcript:
    """Answers of a store by request.

    They are recorded here, or received from the process that recorded them.

    Attributes:
      viewpoint: of a received transcript; None where answers are recorded.
      is_closed: whether the opening has ended: from then on everything is asked of the store.
    """

    def __init__(self, viewpoint: Viewpoint | None = None):
        self.viewpoint = viewpoint
        self.is_closed = False
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._nbytes = 0

    @property
    def is_received(self) -> bool:
        """True if the answers come from another process."""
        return self.viewpoint is not None

    def find(self, request: tuple[Any, ...]) -> Answer | None:
        """Returns the received answer to a request, or None."""
        return self._answers.get(request) if self.is_received and not self.is_closed else None

    def add(self, request: tuple[Any, ...], value: Any, data: bytes = b"") -> None:
        """Records the answer to a request."""
        if not self.is_received and not self.is_closed and self._nbytes <= MOST_TRANSCRIPT_BYTES:
            self._answers[request] = Answer(value, data)
            self._nbytes += len(data)

    def close(self) -> None:
        """Ends the opening: from now on the store is asked."""
        self.is_closed = True
        self._answers = {}

    def answer(
        self,
        request: Sequence[Any],
        ask: Callable[[], _Result],
        pack: Callable[[_Result], Any] = same,
        unpack: Callable[[Any], _Result] = same,
    ) -> _Result:
        """Returns the result of `ask`, or its received result."""
        key = tuple(request)
        if (found := self.find(key)) is not None:
            kind, value = found.value
            if kind == _ERROR:
                raise error_from_data(value)
            return unpack(found.data if kind == _BYTES else value)
        if self.is_closed:
            return ask()
        try:
            result = ask()
        except CheckpointError as error:
            if (data := error_as_data(error)) is not None:
                self.add(key, [_ERROR, data])
            raise
        packed = pack(result)
        if isinstance(packed, bytes | bytearray):
            self.add(key, [_BYTES, None], bytes(packed))
        else:
            self.add(key, [_VALUE, packed])
        return result

    def encode(self) -> bytes | None:
        """Encodes all answers as bytes."""
        if self._nbytes > MOST_TRANSCRIPT_BYTES:
            return None
        table = [[request, answer.value, len(answer.data)] for request, answer in self._answers.items()]
        head = json.dumps(table).encode()
        data = b"".join(answer.data for answer in self._answers.values())
        whole = len(head).to_bytes(_LENGTH_BYTES, "little") + head + data
        return whole if len(whole) <= MOST_TRANSCRIPT_BYTES else None

    @classmethod
    def decode(cls, whole: bytes, viewpoint: Viewpoint) -> Transcript:
        """Parses bytes of `encode`."""
        made = cls(viewpoint)
        try:
            stop = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
            table: Any = json.loads(whole[_LENGTH_BYTES:stop])
            if not isinstance(table, list):
                raise TypeError("no table of answers")
            for request, value, size in cast("list[Any]", table):
                start, stop = stop, stop + range(size + 1)[-1]
                made._answers[tuple(request)] = Answer(value, whole[start:stop])
            if stop != len(whole):
                raise ValueError(f"{len(whole)} bytes of {stop}")
        except (ValueError, TypeError, IndexError) as error:
            raise CheckpointIOError(f"what process {viewpoint.opener} sent of the checkpoint is damaged") from error
        return made

"""Processes of a JAX job: the members of a call, what they exchange, and the errors that they share.

All members of a group make the same calls in the same order. Each call has exchanges: every member writes bytes under
its rank into the key-value store of JAX's coordination service, and reads those of all others. A member that fails
writes its error in place of its next bytes and waits for nobody; the others raise that error. The service ends the job
when a process dies (`heartbeat_timeout_seconds` of `jax.distributed.initialize`); a process that is only late is named
in the log. Without `jax.distributed` there is one process, and nothing is exchanged.

This is the only module that uses names that JAX keeps private: no public function returns the key-value store, tells
whether a backend exists, or returns a process's number before its backend exists.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_t5x import errors
from orbax_t5x.errors import CheckpointError, CheckpointIOError, Fix, Problem, RestorePlanError, for_caller
from orbax_t5x.files.native_errors import parse_error
from orbax_t5x.restoring.options import AnyProcesses, check_processes
from orbax_t5x.text.wording import listed

# How long a wait lasts before the log names the missing processes, and the time between two such lines.
STALL_SECS = 60.0
STALL_AGAIN_SECS = 300.0
# How late an interrupt may be noticed: Python runs no signal handler while it waits for the service.
_POLL_SECS = 1.0
# A message of gRPC has 4 MiB by default.
_PIECE_BYTES = 1 << 20
_COUNT_BYTES = 4
_ABSENT = ("DEADLINE_EXCEEDED", "NOT_FOUND")
_KEYS = "orbax_t5x/"
_DATA, _ERROR = b"d", b"e"
_SHOWN_PROCESSES = 5
# Marks an error that every member raises: nobody waits to be told of it.
_SHARED = "_orbax_t5x_shared"

_logger = logging.getLogger(__name__)

_exchanges: collections.Counter[str] = collections.Counter()
"""Number of this process's exchanges in each group."""
_written: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
"""Keys of this process in each group that another member may still read."""


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Processes that make a call together.

    Attributes:
      members: JAX's numbers of the processes, ascending; the rank of a process is its index here.
      primary: Number of the member whose list of steps counts.
      prefix: Text that separates the keys of two groups with the same members.
      process: Number of this process.
    """

    members: tuple[int, ...]
    primary: int
    prefix: str
    process: int

    @classmethod
    def of(cls, options: AnyProcesses | None = None) -> ProcessGroup:
        """Returns the group of Orbax's `MultiprocessingOptions`; all processes of the job by default.

        Raises:
          TypeError: `options` are something else.
          ValueError: this process or the primary host is not a member.
        """
        check_processes(options)
        active = None if options is None else options.active_processes
        count, process = 1, 0
        if jax.distributed.is_initialized():
            _start_backend(active is None or len(active) == distributed.global_state.num_processes)
            count, process = jax.process_count(), jax.process_index()
        members = tuple(range(count)) if active is None else tuple(sorted(active))
        primary = None if options is None else options.primary_host
        if primary is None:  # Orbax then counts each process as a primary
            primary = min(members, default=0)
        for name, number in (("primary_host", primary), ("this process", process)):
            if number not in members:
                raise ValueError(f"active_processes is {set(members)}, and {name}, {number}, is not among them")
        if members[-1] >= count:
            raise ValueError(f"active_processes has {members[-1]}, but the last process is number {count - 1}")
        prefix = None if options is None else options.barrier_sync_key_prefix
        return cls(members, int(primary), prefix or "", process)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """Index of this process among the members."""
        return self.members.index(self.process)

    @property
    def _name(self) -> str:
        text = json.dumps([self.members, self.primary, self.prefix])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def exchange(self, data: bytes, path: str | None = None) -> list[bytes]:
        """Returns the bytes of each member by rank; waits for all of them.

        Raises:
          CheckpointIOError: the coordination service cannot be reached.
          Exception: the error of the first member that failed, with its type and text.
        """
        if self.size == 1:
            return [data]
        try:
            number = self._write(_DATA + data)
            values = _wait_for({member: f"{_KEYS}{self._name}/{number}/{member}" for member in self.members}, path)
            self._delete_before(number)
        except RuntimeError as error:
            raise _shared(_lost_process(error, path)) from error
        for member, value in values.items():
            if value[:1] == _ERROR:
                raise _shared(error_from_data(json.loads(value[1:]), member))
        return [value[1:] for value in values.values()]

    @contextlib.contextmanager
    def sharing_errors(self) -> Generator[None, None, None]:
        """Sends an error that leaves this context to the other members, which raise it at their next exchange."""
        try:
            yield
        except BaseException as error:
            if self.size > 1 and not hasattr(error, _SHARED):
                with contextlib.suppress(RuntimeError):  # this process's error is more useful than that of the service
                    self._write(_ERROR + json.dumps(error_as_data(error)).encode())
                setattr(error, _SHARED, True)
            raise

    def of_all(self, value: Any, path: str | None = None) -> list[Any]:
        """Returns the JSON value of each member by rank."""
        return [json.loads(data) for data in self.exchange(json.dumps(value).encode(), path)]

    def of_primary(self, value: Any, path: str | None = None) -> Any:
        """Returns the JSON value of the primary process."""
        return self.of_all(value, path)[self.members.index(self.primary)]

    def require_equal(self, digests: Sequence[Any], call: str, path: str | None) -> None:
        """Raises RestorePlanError on all members if their digests differ."""
        differing = [member for member, digest in zip(self.members, digests, strict=True) if digest != digests[0]]
        if differing:
            message = (
                f"the processes of this {call} have different arguments, steps, leaves or shardings: "
                f"{_processes_text(differing)} and process {self.members[0]} disagree"
            )
            fix = Fix(f"call {call} with the same arguments on every process")
            raise _shared(RestorePlanError([Problem("target", None, message, fix)], path=path))

    def meet_on_devices(self, path: str | None) -> None:
        """Sends one byte between the members' devices, which on CPU fails at once if a process died."""
        untyped: Any = jax
        devices = [untyped.local_devices(process_index=member)[0] for member in self.members]
        mesh = Mesh(np.asarray(devices), ("process",))
        byte = untyped.device_put(np.zeros(1, np.uint8), devices[self.rank])
        with self.naming_lost_processes(path):
            sharding = NamedSharding(mesh, PartitionSpec("process"))
            array = jax.make_array_from_single_device_arrays((self.size,), sharding, [byte])
            untyped.block_until_ready(untyped.device_put(array, NamedSharding(mesh, PartitionSpec())))

    @contextlib.contextmanager
    def naming_lost_processes(self, path: str | None) -> Generator[None, None, None]:
        """Raises JAX's errors of a collective as CheckpointIOError."""
        try:
            yield
        except CheckpointError:
            raise
        except (RuntimeError, ValueError) as error:  # JAX raises either
            if parse_error(error).status == "RESOURCE_EXHAUSTED":
                raise
            raise _lost_process(error, path) from error

    def _write(self, value: bytes) -> int:
        number = _exchanges[self._name]
        _exchanges[self._name] += 1
        key = f"{_KEYS}{self._name}/{number}/{self.process}"
        _write_value(key, value)
        _written[self._name].append(key)
        return number

    def _delete_before(self, number: int) -> None:
        """Deletes this process's older values: who takes part in an exchange has read all before it."""
        *older, newest = _written[self._name]
        for key in older:
            _store().key_value_delete(key)
        _written[self._name] = [newest]


def send(name: str, process: int, data: bytes) -> None:
    """Leaves bytes of a process for `received`, in place of earlier ones."""
    _write_value(f"{_key_of(name)}/{process}", data)


def received(name: str, processes: Iterable[int]) -> list[bytes]:
    """Returns, and removes, the bytes that some processes have sent."""
    values: list[bytes] = []
    for process in processes:
        key = f"{_key_of(name)}/{process}"
        value = _read_value(key)
        if value is not None:
            values.append(value)
            _store().key_value_delete(key)
    return values


def _key_of(name: str) -> str:
    return f"{_KEYS}sent/{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"


@functools.cache
def _start_backend(waits: bool) -> None:
    """Makes JAX's backend, after all processes of the job have come this far.

    JAX's own wait for them names nobody, and an interrupt does not end it. A group that is not the whole job leaves
    the wait to JAX: other processes may never make this call.
    """
    state = distributed.global_state
    keys = {process: f"{_KEYS}backend/{process}" for process in range(state.num_processes)}
    try:
        _write_value(keys[state.process_id], b"")
        if waits and not xla_bridge.backends_are_initialized():
            _wait_for(keys, None)
    except RuntimeError as error:
        raise _lost_process(error, None) from error
    jax.process_count()


# -- the key-value store


def _store() -> Any:
    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client


def _write_value(key: str, value: bytes) -> None:
    packed = zlib.compress(value, 1)
    first, *pieces = [packed[start : start + _PIECE_BYTES] for start in range(0, len(packed), _PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        _store().key_value_set_bytes(f"{key}/{number}", piece, allow_overwrite=True)
    # Last: whoever finds it finds the other pieces, too.
    _store().key_value_set_bytes(f"{key}/first", len(pieces).to_bytes(_COUNT_BYTES) + first, allow_overwrite=True)


def _read_value(key: str, timeout_secs: float = 0.0) -> bytes | None:
    """Returns a written value, or None if there is none after the time."""
    first = _read_piece(f"{key}/first", timeout_secs)
    if first is None:
        return None
    pieces = [first[_COUNT_BYTES:]]
    for number in range(int.from_bytes(first[:_COUNT_BYTES])):
        pieces.append(_read_piece(f"{key}/{number}", _POLL_SECS) or b"")
    return zlib.decompress(b"".join(pieces))


def _read_piece(key: str, timeout_secs: float) -> bytes | None:
    try:
        if not timeout_secs:
            return _store().key_value_try_get_bytes(key)
        return _store().blocking_key_value_get_bytes(key, math.ceil(1000 * timeout_secs))
    except RuntimeError as error:  # one type for every failure; its text begins with the status
        if parse_error(error).status in _ABSENT:
            return None
        raise


def _wait_for(keys: Mapping[int, str], path: str | None) -> dict[int, bytes]:
    """Waits for the values of processes, and names in the log those that are late."""
    values: dict[int, bytes] = {}
    start = time.monotonic()
    report_secs = STALL_SECS
    for process, key in keys.items():
        while (value := _read_value(key, _POLL_SECS)) is None:
            waited = time.monotonic() - start
            if waited >= report_secs:
                report_secs += STALL_AGAIN_SECS
                missing = [number for number in keys if number not in values and _read_value(keys[number]) is None]
                place = "" if path is None else f"{path}: "
                _logger.warning("%swaited %.0f s for %s to arrive", place, waited, _processes_text(missing))
        values[process] = value
    return values


def _processes_text(processes: Sequence[int]) -> str:
    noun = "process" if len(processes) == 1 else "processes"
    return f"{noun} {listed(list(map(str, processes)), _SHOWN_PROCESSES)}"


# -- errors


def _shared(error: BaseException) -> BaseException:
    setattr(error, _SHARED, True)
    return error


def _lost_process(error: BaseException, path: str | None) -> CheckpointIOError:
    reason = " ".join(str(error).split())
    return CheckpointIOError(f"another process of this call has died, or cannot be reached: {reason}", path=path)


def error_as_data(error: BaseException) -> dict[str, Any]:
    """Encodes an error as JSON data."""
    if not isinstance(error, Exception):
        return {"kind": RuntimeError.__name__, "message": f"another process was interrupted by {type(error).__name__}"}
    if isinstance(error, CheckpointError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
        data = {"kind": kind, "message": error.message, "path": error.path, "leaf": error.leaf}
        if isinstance(error, RestorePlanError):
            return {**data, "problems": [_problem_as_data(problem) for problem in error.problems]}
        number = error.errno if isinstance(error, CheckpointIOError) else None
        return {**data, "errno": number, "fix": _fix_as_data(error.fix)}
    text = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    return {"kind": [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins"], "message": text}


def error_from_data(data: Mapping[str, Any], process: int) -> Exception:
    """Returns the error of another process, with a note that names the process.

    A class that this package does not know becomes its nearest builtin base.
    """
    if "path" in data:
        error: Exception = _checkpoint_error(data)
    else:
        error = for_caller(_builtin_error(data["kind"], data["message"]))
    error.add_note(f"It was raised on process {process}.")
    return error


def _checkpoint_error(data: Mapping[str, Any]) -> CheckpointError:
    kind = getattr(errors, data["kind"])
    if kind is RestorePlanError:
        return RestorePlanError([_problem_from_data(problem) for problem in data["problems"]], path=data["path"])
    place = {"path": data["path"], "leaf": data["leaf"], "fix": _fix_from_data(data["fix"])}
    if kind is CheckpointIOError:
        return CheckpointIOError(data["message"], errno=data["errno"], **place)
    return kind(data["message"], **place)


def _builtin_error(kinds: str | Sequence[str], message: str) -> Exception:
    for name in [kinds] if isinstance(kinds, str) else kinds:
        with contextlib.suppress(TypeError):  # such as UnicodeDecodeError, which takes five arguments
            return getattr(builtins, name)(message)
    return RuntimeError(message)


def _problem_as_data(problem: Problem) -> list[Any]:
    return [problem.kind, problem.leaf, problem.message, _fix_as_data(problem.fix), problem.source]


def _problem_from_data(data: Sequence[Any]) -> Problem:
    kind, leaf, message, fix, source = data
    return Problem(kind, leaf, message, _fix_from_data(fix), source)


def _fix_as_data(fix: Fix | None) -> list[Any] | None:
    """Encodes a fix as its words: transforms and arguments of another process stay there."""
    return None if fix is None else [fix.text, fix.scope]


def _fix_from_data(data: Sequence[Any] | None) -> Fix | None:
    return None if data is None else Fix(data[0], scope=data[1])

"""Agreement of the processes of a call before it begins.

All processes take what the primary process has read, so that a step that is deleted meanwhile, or a file system that
shows it late, is the same for all. Each exchange is a barrier: where one process fails, each raises, and none goes on
and waits for it forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from orbax_t5x import on_demand
from orbax_t5x.errors import CheckpointIOError, Fix, Problem, RestorePlanError
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.provenance.records import Records

# Of jobs of several processes only.
_COLLECTIVES = "orbax_t5x.multihost.collectives"
_error_as_bytes, _exchange, _received_error = (
    on_demand.function(_COLLECTIVES, name) for name in ("error_as_bytes", "exchange", "received_error")
)
_rendezvous_before_backend = on_demand.function("orbax_t5x.multihost.rendezvous", "rendezvous_before_backend")
_call_of_group = on_demand.function("orbax_t5x.multihost.openings", "call_of_group")


class Agreement:
    """Agreement of all processes on a restore or another call.

    Use it as a context around planning: an error that leaves it is sent to the others.

    Attributes:
      group: the processes that agree.
    """

    def __init__(self, processes: Any, path: str | None = None, what: str = "restore", *, sends_errors: bool = False):
        """Begins a call of every process of a group.

        `processes` are Orbax's options of the group, or None for the whole job; its primary's record counts.
        With `sends_errors`, what one raises all raise, if it is an error of a checkpoint.
        """
        self._sends_errors = sends_errors
        self._path = path
        self._what = what
        self._in_job = jax.distributed.is_initialized()
        self.group: ProcessGroup = (_rendezvous_before_backend if self._in_job else ProcessGroup.of)(processes)
        self._several = self.group.size > 1
        self._failure_is_known = False

    @contextlib.contextmanager
    def planning(self, sent: type[BaseException] = BaseException) -> Generator[None, None, None]:
        """Sends a failure of this process to their next exchange.

        An interrupt that is not `sent` leaves at once; else it waits for the others.
        """
        try:
            with _call_of_group(self.group) if self._in_job else contextlib.nullcontext():
                yield
        except sent as error:
            if not self._failure_is_known:
                # The error of this process is more useful than one that it could not be sent.
                with contextlib.suppress(CheckpointIOError):
                    self._exchange(_error_as_bytes(error), failed=True)
            raise

    def records(self, mine: Records) -> Records:
        """Returns the primary process's records of the source."""
        if not self._several:
            return mine
        known = self.of_primary({name: None if lineage is None else list(lineage) for name, lineage in mine.items()})
        return {name: None if lineage is None else tuple(lineage) for name, lineage in known.items()}

    def of_primary(self, mine: Any) -> Any:
        """Returns the primary process's value, anything that JSON holds."""
        return self.of_all(mine if self.group.is_primary else None)[self.group.primary_rank]

    def of_all(self, mine: Any) -> list[Any]:
        """Returns the JSON value of each member by rank."""
        return [json.loads(text) for text in self._exchange(json.dumps(mine).encode())]

    def plan(self, sources: Sequence[str], provenance: Sequence[Mapping[str, Any]]) -> None:
        """Compares sources and transforms; raises RestorePlanError on all if they differ."""
        if not self._several:
            return
        text = json.dumps([list(sources), [dict(entry) for entry in provenance]], sort_keys=True)
        digests = self._exchange(hashlib.sha256(text.encode()).digest())
        if len(set(digests)) > 1:
            self._failure_is_known = True
            message = f"the processes of this {self._what} were given different steps, sources or transforms"
            fix = f"call {self._what} with the same arguments on every process"
            raise RestorePlanError([Problem("provenance", None, message, Fix(fix))], path=", ".join(sources))

    def _exchange(self, mine: bytes, *, failed: bool = False) -> list[bytes]:
        """Returns the bytes of each member by rank; raises any failure."""
        if not self._several:
            return [mine]
        try:
            sent, failures = _exchange(mine, failed, self.group, self._path)
        except BaseException:
            # No process is left to send to; or, after an interrupt, this exchange goes on without its caller, and the
            # others would take the next one for it.
            self._failure_is_known = True
            raise
        self._failure_is_known |= bool(failures)
        if failures and not failed:
            first = sent[failures[0]] if self._sends_errors else _error_as_bytes(Exception())
            failures = [self.group.members[rank] for rank in failures]
            raise _received_error(failures, first, self._path, f"the {self._what}")
        return sent

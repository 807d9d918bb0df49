"""What the processes of one collective restore agree on before they read: the source's record, and the plan. A
conversion's processes, too, tell each other by it what each has to know.

All decide from what the primary process read, so that a step that is deleted meanwhile, or a file system that shows it
late, is the same for all. And all wait for all at two points: where one process fails, each raises, and none reads on
and waits for it for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.errors import CheckpointIOError, Fix, Problem, RestorePlanError
from orbax_t5x.multihost.collectives import error_as_bytes, gather, told_error
from orbax_t5x.multihost.heartbeat import sending_heartbeats
from orbax_t5x.multihost.rendezvous import rendezvous_before_backend
from orbax_t5x.provenance.records import Records


class Agreement:
    """One restore, or conversion, of all processes; with one process nothing is exchanged.

    Use it as a context around planning: an error that leaves it is told to the others.

    Attributes:
      is_parted: whether another process has died or could not be reached, or this one was interrupted while it waited
        for the others: nobody knows what they do.
    """

    def __init__(self, primary: int, path: str, what: str = "restore", *, tells_errors: bool = False):
        """Made by each process alike.

        Args:
          primary: the index of the process whose record counts.
          path: what is being restored or converted, for errors.
          what: is being done, for errors.
          tells_errors: whether the other processes raise what one has raised, as far as it is an error of a checkpoint.
        """
        self.is_parted = False
        self._tells_errors = tells_errors
        self._primary = primary
        self._path = path
        self._what = what
        rendezvous_before_backend()
        self._several = jax.process_count() > 1
        self._told_failure = False

    @contextlib.contextmanager
    def planning(self) -> Generator[None, None, None]:
        """Tells the others, who wait at their next exchange, when this process fails."""
        try:
            with sending_heartbeats():
                yield
        except BaseException as error:
            if not self._told_failure:
                # This process's own error says more than that there is nobody to tell it to.
                with contextlib.suppress(CheckpointIOError):
                    self._exchange(error_as_bytes(error), failed=True)
            raise

    def records(self, mine: Records) -> Records:
        """The primary's records of the source, as every process takes them."""
        if not self._several:
            return mine
        known = self.of_primary({name: None if lineage is None else list(lineage) for name, lineage in mine.items()})
        return {name: None if lineage is None else tuple(lineage) for name, lineage in known.items()}

    def of_primary(self, mine: Any) -> Any:
        """What the primary process tells, anything that JSON holds; every process takes it for its own."""
        return self.of_all(mine if jax.process_index() == self._primary else None)[self._primary]

    def of_all(self, mine: Any) -> list[Any]:
        """What each process tells, anything that JSON holds, by its index."""
        return [json.loads(text) for text in self._exchange(json.dumps(mine).encode())]

    def plan(self, sources: Sequence[str], provenance: Sequence[Mapping[str, Any]]) -> None:
        """Compares what the processes are about to restore.

        Args:
          sources: the paths of the checkpoints.
          provenance: of the plan.

        Raises:
          RestorePlanError: they differ, on all processes.
        """
        if not self._several:
            return
        text = json.dumps([list(sources), [dict(entry) for entry in provenance]], sort_keys=True)
        digests = self._exchange(hashlib.sha256(text.encode()).digest())
        if len(set(digests)) > 1:
            self._told_failure = True  # all know
            message = f"the processes of this {self._what} were given different steps, sources or transforms"
            fix = f"call {self._what} with the same arguments on every process"
            raise RestorePlanError([Problem("provenance", None, message, Fix(fix))], path=", ".join(sources))

    def _exchange(self, payload: bytes, *, failed: bool = False) -> list[bytes]:
        """What each process tells, by its index.

        Args:
          payload: what this process tells.
          failed: whether it is an error.

        Raises:
          CheckpointError: another process failed, or has died.
        """
        if not self._several:
            return [payload]
        sizes_and_failures = self._gather(np.asarray([len(payload), failed], np.uint32))
        failures = [
            index for index in np.flatnonzero(sizes_and_failures[:, 1]).tolist() if index != jax.process_index()
        ]
        if failed or failures:
            self._told_failure = True
        longest = max(1, int(sizes_and_failures[:, 0].max()))
        padded = np.zeros(longest, np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._gather(padded)
        told = [row[: int(size)].tobytes() for row, size in zip(rows, sizes_and_failures[:, 0], strict=True)]
        if failures and not failed:
            first = told[failures[0]] if self._tells_errors else error_as_bytes(Exception())
            raise told_error(failures, first, self._path, f"the {self._what}")
        return told

    def _gather(self, mine: np.ndarray) -> np.ndarray:
        try:
            return gather(mine, self._path)
        except BaseException:
            # Nobody is left who could be told; or, after an interrupt, this exchange goes on without its caller, and
            # the others would take the next one for it.
            self._told_failure = self.is_parted = True
            raise

"""Groups of processes: members, reader, and the keys for meeting.

A group is made from `ocp.options.MultiprocessingOptions`, of Orbax or of Orbax v1, once JAX's backend has numbered the
processes. Processes outside of it take no part: several groups meet at once, each under its own key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """ProcessGroup of a call; `process` is this process.

    Attributes:
      members: JAX's numbers of the processes, ascending; the rank of a process is its index here.
      primary: the number of the member that reads metadata for all, and whose answers count.
      prefix: what distinguishes the keys of calls of equal members.
      process: the number of this process.
    """

    members: tuple[int, ...]
    primary: int
    prefix: str
    process: int

    @classmethod
    def of(cls, processes: Any = None) -> ProcessGroup:
        """Makes the group of Orbax's options; the backend must exist."""
        count, process = jax.process_count(), jax.process_index()
        active = None if processes is None else processes.active_processes
        members = tuple(range(count)) if active is None else tuple(sorted(active))
        # Without one, Orbax counts each as primary.
        given = None if processes is None else processes.primary_host
        primary = min(members, default=0) if given is None else int(given)
        for name, number in (("primary_host", primary), ("this process", process)):
            if number not in members:
                raise ValueError(f"active_processes is {set(members)}, and {name}, {number}, is not among them")
        if members[-1] >= count:
            raise ValueError(f"active_processes has {members[-1]}, but the last process is number {count - 1}")
        return cls(members, primary, (processes and processes.barrier_sync_key_prefix) or "", process)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """The index of this process among the members."""
        return self.members.index(self.process)

    @property
    def primary_rank(self) -> int:
        """The index of the primary process among the members."""
        return self.members.index(self.primary)

    @property
    def is_primary(self) -> bool:
        """True if this process is the primary process."""
        return self.process == self.primary

    @functools.cached_property
    def key(self) -> str:
        """The name for keys that all members share."""
        text = json.dumps([self.members, self.primary, self.prefix])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def part(self, ranks: Sequence[int]) -> ProcessGroup:
        """Returns the group of some members by rank."""
        members = tuple(self.members[rank] for rank in ranks)
        return dataclasses.replace(self, members=members, primary=members[0])

"""The most memory that this process can have, and arrays that are not larger than that.

What a file claims about an array decides how much memory is allocated, and too much ends badly: Python's
own error names no file, a library below may end the process, and a kernel that promises more than it has ends it later.
So what is sized by a file's claim is compared first with the smallest of the machine's memory, the limits of the
process's control groups (versions 1 and 2) and what the limit on its address space leaves.
"""

from __future__ import annotations

import functools
import math
import os
import resource
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np

from orbax_t5x.errors import LimitExceededError, error_at

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PHYSICAL_BYTES = _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
# Arrays below this are made without the check: most are, and there are many.
_FREE_BYTES = 1 << 28


def most_memory_bytes() -> int:
    """Returns the smallest of physical memory, the control groups' limits and the room that RLIMIT_AS leaves."""
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [_PHYSICAL_BYTES, *_cgroup_limits()]
    if address_space != resource.RLIM_INFINITY:
        limits.append(max(0, address_space - address_space_bytes()))
    return min(limits)


def address_space_bytes() -> int:
    """Returns the address space that this process has taken; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    except OSError:
        return 0


@functools.cache
def _cgroup_limits() -> tuple[int, ...]:
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:  # no Linux, or no control groups
        return ()
    return tuple(cgroup_limits(groups, Path("/sys/fs/cgroup")))


def cgroup_limits(groups: str, mount: Path) -> Iterator[int]:
    """Yields the memory limits of control groups (lines of `/proc/self/cgroup`) and of those around them."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # A container sees its own group at the mount, under whatever path the host knows it.
        for name in (group, *group.parents):
            limit = _read_limit(base / name / file)
            if limit is not None:
                yield limit


def _read_limit(file: Path) -> int | None:
    """Reads the number in a file; None for none, and for the word `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def require_memory(nbytes: int, what: str) -> None:
    """Refuses an allocation that cannot fit into the memory of this process; the caller names file and leaf."""
    if nbytes > _FREE_BYTES and nbytes > (most := most_memory_bytes()):
        raise LimitExceededError(f"{what} takes {nbytes} bytes, and this process can have {most}")


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialised array whose shape a file may have claimed; the caller names file and leaf."""
    what = f"an array of {dtype.name} of shape {tuple(shape)}"
    nbytes = math.prod(shape) * dtype.itemsize
    require_memory(nbytes, what)
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise LimitExceededError(f"{what} takes {nbytes} bytes, which cannot be had: {error}") from None


@contextmanager
def naming_memory_errors(path: str | None, leaf: str) -> Generator[None, None, None]:
    """Types errors about memory, and adds the file and the leaf for which it was requested."""
    try:
        yield
    except MemoryError as error:
        raise LimitExceededError(f"there is not enough memory: {error}", path=path or None, leaf=leaf) from None
    except LimitExceededError as error:
        if error.leaf is not None or error.path is not None:
            raise
        raise error_at(error, path=path or None, leaf=leaf) from None

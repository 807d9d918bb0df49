"""Tables that the package, entry points and callers fill by name.

The package's own entries are texts, `module:attribute`: a table costs nothing until an entry is used, and the core
imports no extra. Entry points of other packages are looked up on the first use of a table.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class RegistryEntry:
    """A registered entry; as a context manager it ends with the block."""

    def __init__(self, remove: Callable[[], object]):
        """Holds the function that removes the entry."""
        self._removals = [remove]

    def unregister(self) -> None:
        """Removes the entry; a second call does nothing."""
        with contextlib.suppress(IndexError):
            self._removals.pop()()

    def __enter__(self) -> RegistryEntry:
        return self

    def __exit__(self, *raised: object) -> None:
        self.unregister()


class Registry(Generic[Entry]):
    """Entries by name: the package's, entry points', and registered entries."""

    def __init__(self, kind: str, own: Mapping[str, str], *, group: str | None = None):
        """Makes a table."""
        self._kind = kind
        self._own = dict(own)
        self._group = group
        self._added: dict[str, Entry] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def _installed(self) -> Mapping[str, importlib.metadata.EntryPoint]:
        """Entry points of other packages; warns of taken names."""
        installed: dict[str, importlib.metadata.EntryPoint] = {}
        for point in _entry_points(self._group) if self._group else ():
            if point.name in self._own or installed.setdefault(point.name, point) != point:
                owner = "this package's" if point.name in self._own else installed[point.name].value
                message = f"the {self._kind} {point.name!r} at {point.value} is left out: the name is taken by {owner}"
                warnings.warn(message, stacklevel=2)
        return installed

    def names(self) -> tuple[str, ...]:
        """Lists all names in order."""
        return (*self._own, *self.joined_names())

    def joined_names(self) -> tuple[str, ...]:
        """Lists the names of entry points and of registered entries."""
        return tuple(dict.fromkeys((*self._installed, *self._added)))

    def get(self, name: str) -> Entry:
        """Loads the entry of a name."""
        if name in self._added:
            return self._added[name]
        if name in self._own:
            return _loaded(self._own[name])
        return _installed(self._installed[name])

    def register(self, name: str, entry: Entry) -> RegistryEntry:
        """Adds an entry until it is unregistered."""
        with self._lock:
            if name in self.names():
                raise ValueError(f"a {self._kind} named {name!r} is registered already: {', '.join(self.names())}")
            self._added[name] = entry

        return RegistryEntry(lambda: self._added.pop(name, None))


def _entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """Lists a group's entry points.

    `importlib.metadata.entry_points` parses the files of all packages, which takes three times as long.
    """
    found: dict[str, importlib.metadata.EntryPoints] = {}
    for package in importlib.metadata.distributions():
        if f"[{group}]" in (package.read_text("entry_points.txt") or ""):
            found.setdefault(package.name, package.entry_points.select(group=group))
    return [point for points in found.values() for point in points]


@functools.cache
def _loaded(place: str) -> Any:
    """Imports an entry given as `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def _installed(point: importlib.metadata.EntryPoint) -> Any:
    """Imports the object of an entry point."""
    return point.load()

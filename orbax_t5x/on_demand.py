"""Public names of a package that load their modules on first use."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

# What `dir()` shows of a package beside its public names.
_SHOWN = ("__all__", "__doc__", "__file__", "__name__", "__version__")


def public(
    package: str,
    modules: Mapping[str, str],
    in_job: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
      package: its name.
      modules: of each public name the module that has it; "" for a module of the package.
      in_job: what holds while a process of a job loads a module, which takes seconds.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return importlib.import_module(f"{package}.{name}")
        with contextlib.nullcontext() if in_job is None or not _is_in_job() else in_job():
            value = getattr(__import__(modules[name], fromlist=[name]), name)  # as `from … import` does: modules, too
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted([*modules, *(name for name in _SHOWN if name in vars(sys.modules[package]))])

    return list(modules), load, names


def _is_in_job() -> bool:
    distributed = getattr(sys.modules.get("jax"), "distributed", None)
    return distributed is not None and distributed.is_initialized()


def function(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that loads its module when called."""

    def load(*arguments: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **keywords)

    return load

"""Public names of a package that load their modules on first use.

A signal handler that raises halfway through an import leaves JAX or Orbax half imported for the life of the process. It
runs in the main thread, so the main thread has its modules imported by another and waits: an interrupt ends the wait.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# What `dir()` shows of a package beside its public names.
_SHOWN = ("__all__", "__doc__", "__file__", "__name__", "__version__")


def public(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
      package: its name.
      modules: of each public name the module that has it; "" for a module of the package.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return _undisturbed(f"{package}.{name}", lambda: importlib.import_module(f"{package}.{name}"))
        # As `from … import` does: modules, too.
        module = _undisturbed(modules[name], lambda: __import__(modules[name], fromlist=[name]))
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted([*modules, *(name for name in _SHOWN if name in vars(sys.modules[package]))])

    return list(modules), load, names


def function(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that loads its module when called."""

    def load(*arguments: Any, **keywords: Any) -> Any:
        return getattr(_undisturbed(module, lambda: importlib.import_module(module)), name)(*arguments, **keywords)

    return load


def _undisturbed(name: str, load: Callable[[], _Result]) -> _Result:
    """Calls a function that imports a module."""
    is_loaded = name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False)
    if is_loaded or threading.current_thread() is not threading.main_thread():
        return load()
    results: list[_Result] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(load())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="orbax_t5x-import", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures.pop()
    return results.pop()

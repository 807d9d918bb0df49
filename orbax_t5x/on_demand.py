"""Public names of a package that load their modules on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package whose public names have these modules; "" for a module of the package."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(__import__(modules[name], fromlist=[name]), name)  # as `from … import` does: modules, too
        setattr(sys.modules[package], name, value)
        return value

    return load


def function(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that calls another one, whose module it loads then."""

    def load(*arguments: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **keywords)

    return load

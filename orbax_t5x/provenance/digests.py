"""Digests of transforms: equal for equal rules in every process, and different for other rules.

They are of a rule's code as it prints: a dataclass counts by its name and the fields that differ from their defaults, a
`functools.partial` by its function and arguments, a module-level function by its qualified name, an array by its
contents. A private class has no name here, so that a refactoring changes no digest. A lambda, a closure and another
callable object have no digest; nor has an array of over 256 MiB, or with shards on other processes, or a rule with
any of these.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from orbax_t5x.trees.narrow import is_list_or_tuple, is_mapping

# Larger arrays take longer to hash than a restore should take to plan.
_MOST_ARRAY_BYTES = 256 << 20
_DIGITS = 32


class _NoDigestError(Exception):
    """Error for a value that nothing identifies."""


def digest_of(transform: Any) -> str | None:
    """Returns the digest of a transform or function, or None."""
    try:
        return _own_digest(transform) or text_digest(json.dumps(_encoded(transform), sort_keys=True))
    except (_NoDigestError, RecursionError):
        return None


def dataclass_digest(value: Any) -> str | None:
    """Returns the digest of a dataclass by its fields, or None."""
    try:
        return text_digest(json.dumps(_fields(value), sort_keys=True))
    except (_NoDigestError, RecursionError):
        return None


def text_digest(text: str) -> str:
    """Returns 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def qualified_name(function: Any) -> str:
    """Returns a function's name in plans and records.

    A partial has the name of its function.
    """
    while isinstance(function, functools.partial):
        function = function.func
    named = cast(Any, function if hasattr(function, "__qualname__") else type(function))
    return f"{named.__module__}.{named.__qualname__}"


def is_module_level(function: Any) -> bool:
    """Returns True if a function's or class's qualified name identifies it."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return False
    attribute: Any = sys.modules.get(module)
    for component in name.split("."):
        attribute = getattr(attribute, component, None)
    if attribute is function or (isinstance(function, types.MethodType) and attribute == function):
        return True
    # The name may have been taken since by another function, as `_` is in a table of rules.
    return isinstance(function, types.FunctionType) and function.__closure__ is None


def _own_digest(value: Any) -> str | None:
    """Returns what a value's `digest()` returns; None if it has no such method."""
    if isinstance(value, type) or not callable(getattr(value, "digest", None)):
        return None
    digest = value.digest()
    if not isinstance(digest, str):
        raise _NoDigestError
    return digest


def _fields(value: Any) -> list[Any]:
    """Encodes a dataclass; a field with a leading underscore is made from the others."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if field.name.startswith("_"):
            continue
        encoded = _encoded(getattr(value, field.name))
        if field.default is dataclasses.MISSING or encoded != _encoded(field.default):
            fields[field.name] = encoded
    kind = cast("type[Any]", type(value))
    if kind.__name__.startswith("_"):
        return ["", fields]
    return [kind.__name__ if hasattr(value, "digest") else _function(kind), fields]


def _encoded(value: Any) -> Any:
    """Encodes a value as JSON, or raises `_NoDigestError`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_list_or_tuple(value):
        return [_encoded(item) for item in value]
    if is_mapping(value):
        return _encoded_mapping(value)
    if isinstance(value, frozenset | set):
        return sorted(map(_encoded, cast("frozenset[Any]", value)), key=json.dumps)
    if isinstance(value, re.Pattern):
        # Patterns of text are always UNICODE; without other flags a compiled one and its text are the same rule.
        pattern = cast("re.Pattern[Any]", value)
        flags = pattern.flags & ~re.UNICODE
        return {"pattern": pattern.pattern, "flags": flags} if flags else pattern.pattern
    if isinstance(value, np.dtype | enum.Enum):
        return {"name": value.name}
    if isinstance(value, functools.partial):
        return {"partial": [_encoded(value.func), _encoded(value.args), _encoded_mapping(value.keywords)]}
    if isinstance(value, bytes | complex | slice | range | types.EllipsisType):
        return {"value": repr(cast(Any, value))}
    if not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    digest = _own_digest(value)
    if digest is not None:
        return {"digest": digest}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"dataclass": _fields(value)}
    return {"function": _function(value)}


def _encoded_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {"mapping": {str(key): _encoded(item) for key, item in mapping.items()}}


def _array(value: Any) -> dict[str, Any]:
    """Encodes an array by its contents, however it is stored."""
    encoded: dict[str, Any] = {"array": [int(size) for size in value.shape], "dtype": str(value.dtype)}
    jax: Any = sys.modules.get("jax")  # no value is one of its arrays before it is imported
    if jax is not None and isinstance(value, jax.ShapeDtypeStruct):
        return encoded
    if jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        if not (value.is_fully_addressable or value.is_fully_replicated):
            raise _NoDigestError
        is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
        value = jax.random.key_data(value) if is_key else value
    elif not isinstance(value, np.ndarray | np.generic):
        raise _NoDigestError  # lazy, or traced
    if value.nbytes > _MOST_ARRAY_BYTES:
        raise _NoDigestError
    array: np.ndarray[Any, np.dtype[Any]] = np.asarray(cast(Any, value))
    if array.dtype.hasobject:  # its bytes are addresses
        return {**encoded, "items": _encoded(array.ravel().tolist())}
    contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {**encoded, "sha256": hashlib.sha256(contents.data).hexdigest()}


def _function(value: Any) -> str:
    if not is_module_level(value):
        raise _NoDigestError
    return qualified_name(value)

"""Digests of transforms, equal for equal rules.

They are equal in every process, different for other rules, or None. A dataclass counts by its fields, a
`functools.partial` by its function and arguments, a module-level function by its qualified name, an object with a
`digest()` method by what that returns, an array of NumPy or JAX by its contents. What a lambda, a closure or another
callable object does cannot be told from outside, so it has no digest; nor has an array of which this process does not
hold all, nor a chain with more than 256 MiB of arrays, nor anything that holds one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np

from orbax_t5x.trees.narrow import is_list_or_tuple, is_mapping

# All arrays of a chain; more take longer to hash than a restore should take to plan.
_CONTENT_LIMIT_BYTES = 256 << 20
_bytes_left: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("bytes_left", default=None)
# Hexadecimal digits of a transform's own digest.
_TRANSFORM_DIGITS = 32


class NoDigestError(Exception):
    """Error for a value without a digest."""


def rule_identities(chain: Sequence[Any]) -> list[str | None]:
    """Returns a text per transform, equal for equal rules.

    None for a transform without an identity.
    """
    identities: list[str | None] = []
    with _limited():
        for transform in chain:
            try:
                identities.append(_transform_text(transform))
            except (NoDigestError, RecursionError):
                identities.append(None)
    return identities


def digest_of_chain(identities: Sequence[str | None]) -> str | None:
    """Computes the digest of a chain from the texts of `rule_identities`."""
    digest = hashlib.sha256()
    for identity in identities:
        if identity is None:
            return None
        digest.update(identity.encode())
        digest.update(b"\0")
    return f"sha256:{digest.hexdigest()}" if identities else None


def digest_of_rule(identity: str) -> str:
    """Computes a rule's digest from its text of `rule_identities`."""
    return hashlib.sha256(identity.encode()).hexdigest()[:_TRANSFORM_DIGITS]


def dataclass_digest(value: Any) -> str | None:
    """Computes a dataclass's digest by its fields, or None.

    It has 32 hexadecimal digits; None: a field has no digest.
    """
    try:
        with _limited():
            return _hash_json(_fields(value))[:_TRANSFORM_DIGITS]
    except (NoDigestError, RecursionError):
        return None


def qualified_name(function: Any) -> str:
    """Returns a function's name in plans and records.

    A partial has the name of its function.
    """
    while isinstance(function, functools.partial):
        function = function.func
    named = cast(Any, function if hasattr(function, "__qualname__") else type(function))
    return f"{named.__module__}.{named.__qualname__}"


def is_module_level(function: Any) -> bool:
    """Tests if a callable's qualified name identifies it.

    It is a function or class of a module, no closure.
    """
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return False
    found: Any = sys.modules.get(module)
    for component in name.split("."):
        found = getattr(found, component, None)
    if found is function or (isinstance(function, types.MethodType) and found == function):
        return True
    # The name may have been taken since by another function, as `_` is in a table of rules.
    return isinstance(function, types.FunctionType) and function.__closure__ is None


def _transform_text(transform: Any) -> str:
    """Returns a transform's part of the chain's digest."""
    digest = _own_digest(transform)
    if digest is not None:
        return digest
    if dataclasses.is_dataclass(transform) and not isinstance(transform, type):
        return f"dataclass:{_hash_json(_fields(transform))}"
    if isinstance(transform, functools.partial):
        return f"partial:{_hash_json(_encoded(transform))}"
    return f"function:{_function(transform)}"


def _own_digest(value: Any) -> str | None:
    """Calls a value's `digest()`, or returns None."""
    if isinstance(value, type) or not callable(getattr(value, "digest", None)):
        return None
    digest = value.digest()
    if not isinstance(digest, str):
        raise NoDigestError
    return digest


def _hash_json(encoded: Any) -> str:
    return hashlib.sha256(json.dumps(encoded, sort_keys=True).encode()).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    """Encodes a dataclass as JSON.

    A field with a leading underscore is worked out from the other fields.
    """
    names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    kind, name = (
        ("transform", type(value).__name__) if hasattr(value, "digest") else ("dataclass", _function(type(value)))
    )
    return {kind: name, **{name: _encoded(getattr(value, name)) for name in names}}


def _encoded(value: Any) -> Any:
    """Encodes a value as JSON.

    A NoDigestError if nothing identifies the value.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_list_or_tuple(value):
        return [_encoded(item) for item in value]
    if is_mapping(value):
        return {"mapping": {str(key): _encoded(item) for key, item in value.items()}}
    if isinstance(value, (frozenset, set)):
        return sorted(map(_encoded, cast("frozenset[Any]", value)), key=json.dumps)
    if isinstance(value, re.Pattern):
        # Patterns of text are always UNICODE; an uncompiled one and a compiled one without flags are the same rule.
        pattern = cast("re.Pattern[Any]", value)
        flags = pattern.flags & ~re.UNICODE
        return {"pattern": pattern.pattern, "flags": flags} if flags else pattern.pattern
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, enum.Enum):
        return {"enum": value.name}
    if value is ...:
        return {"ellipsis": True}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    return _encoded_other(value)


def _encoded_other(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return {
            "partial": _encoded(value.func),
            "arguments": [_encoded(item) for item in value.args],
            "keywords": {name: _encoded(item) for name, item in value.keywords.items()},
        }
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice | range):
        bounds = cast("slice[Any, Any, Any]", value)
        return {type(bounds).__name__: [_encoded(bound) for bound in (bounds.start, bounds.stop, bounds.step)]}
    digest = _own_digest(value)
    return {"digest": digest} if digest is not None else {"function": _function(value)}


def _array(value: Any) -> dict[str, Any]:
    """Encodes an array by its contents, however stored.

    Not if it is lazy, traced, elsewhere or too large.
    """
    encoded: dict[str, Any] = {"array": [int(size) for size in value.shape], "dtype": str(value.dtype)}
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.ShapeDtypeStruct):
        return encoded
    array = _held(value)
    if array.dtype.hasobject:
        # Bytes of an array of objects are addresses.
        encoded["items"] = [_encoded(item) for item in array.ravel().tolist()]
    else:
        encoded["sha256"] = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
    return encoded


def _held(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Copies an array to the host, if it is addressable."""
    jax: Any = sys.modules.get("jax")  # no value is one of its arrays before it is imported
    if jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        if not (value.is_fully_addressable or value.is_fully_replicated):
            raise NoDigestError
        data = jax.random.key_data(value) if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        _take_bytes(data.nbytes)
        return np.asarray(jax.device_get(data))
    if not isinstance(value, (np.ndarray, np.generic)):
        raise NoDigestError
    held = cast("np.ndarray[Any, np.dtype[Any]]", np.asarray(cast(Any, value)))
    _take_bytes(held.nbytes)
    return held


def _take_bytes(nbytes: int) -> None:
    """Takes bytes from the chain's limit."""
    left = _bytes_left.get()
    if left is None or left[0] < nbytes:
        raise NoDigestError
    left[0] -= nbytes


@contextlib.contextmanager
def _limited() -> Generator[None]:
    """Begins to count the bytes of arrays, unless a chain does already."""
    if _bytes_left.get() is not None:
        yield
        return
    token = _bytes_left.set([_CONTENT_LIMIT_BYTES])
    try:
        yield
    finally:
        _bytes_left.reset(token)


def _function(value: Any) -> str:
    """Returns a function's name if that identifies it."""
    if not is_module_level(value):
        raise NoDigestError
    return qualified_name(value)

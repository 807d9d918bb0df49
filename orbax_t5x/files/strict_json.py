"""Strict JSON from a checkpoint.

It is one object, UTF-8, no key twice, no `NaN`; anything else is an error that names the file. Python's own parser
accepts more (a repeated key silently wins), and what it lets through would decide where bytes are read from. Its
nesting is bounded by the interpreter's recursion limit, which becomes a typed error here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn, cast

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.limits import charge_metadata

Pairs = list[tuple[str, Any]]
"""Keys and values of a JSON object."""
ObjectMaker = Callable[[Pairs], dict[str, Any]]
"""Maker of a dict, which refuses duplicate keys."""

# What Python makes of one such character, at most: an object, what its first pair adds, a list, a pair, an element.
_OBJECT_BYTES, _FIRST_PAIR_BYTES, _LIST_BYTES, _PAIR_BYTES, _ELEMENT_BYTES = 80, 120, 80, 48, 32
# What is parsed may take this many times the bytes of the file by the estimate, or this much where that is more. For
# lists of leaves the estimate is a fifth too high: they take up to nine times their bytes. A list of empty objects
# would take thirty.
_MOST_GROWTH = 12
_FREE_BYTES = 256 << 20


def parsed_bytes(data: bytes | bytearray) -> int:
    """Estimates the memory for parsing, by structural characters."""
    objects, lists, pairs, elements = map(data.count, (b"{", b"[", b":", b","))
    return (
        objects * _OBJECT_BYTES
        + min(objects, pairs) * _FIRST_PAIR_BYTES
        + lists * _LIST_BYTES
        + pairs * _PAIR_BYTES
        + elements * _ELEMENT_BYTES
    )


def charge_parsed(value: Any, path: str) -> None:
    """Charges parsed values that a checkpoint keeps."""
    waiting: list[Any] = [value]
    while waiting:
        kept: Any = waiting.pop()
        charge_metadata(_OBJECT_BYTES + (len(kept) if isinstance(kept, str) else 0), path)
        if isinstance(kept, dict):
            pairs = cast("dict[str, Any]", kept)
            charge_metadata(_FIRST_PAIR_BYTES if pairs else 0, path)
            waiting.extend(pairs)
            waiting.extend(pairs.values())
        elif isinstance(kept, list):
            waiting.extend(cast("list[Any]", kept))


def parse_object(
    data: bytes | bytearray,
    path: str,
    *,
    allow_nan: bool = False,
    pack: Callable[[ObjectMaker, Pairs], Any] | None = None,
) -> dict[str, Any]:
    """Parses all of `data` as a JSON object without duplicate keys.

    `allow_nan` accepts `NaN` and infinities, which Python's writers produce for metrics. Data of so many small parts
    that parsing takes many times its bytes is not parsed. `pack` is called with the maker of a dict and the pairs of an
    object, and returns what takes its place.
    """
    if (size := parsed_bytes(data)) > max(_FREE_BYTES, _MOST_GROWTH * len(data)):
        raise LimitExceededError(
            f"{len(data)} bytes of JSON would take some {size} bytes of memory, more than {_MOST_GROWTH} times as many",
            path=path,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"not UTF-8: {error.reason} at byte {error.start}", path=path) from error

    def pairs(items: Pairs) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise CorruptCheckpointError(f"the JSON key {twice[:200]!r} occurs twice in one object", path=path)
        return made

    def constant(name: str) -> NoReturn:
        raise CorruptCheckpointError(f"{name} is not JSON", path=path)

    try:
        hook = pairs if pack is None else functools.partial(pack, pairs)
        parsed = json.loads(text, object_pairs_hook=hook, parse_constant=None if allow_nan else constant)
    except CorruptCheckpointError:
        raise
    except RecursionError:
        raise CorruptCheckpointError("the JSON is nested too deep", path=path) from None
    except ValueError as error:
        raise CorruptCheckpointError(f"not JSON: {str(error)[:200]}", path=path) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON is a {type(parsed).__name__}, not an object", path=path)
    return cast("dict[str, Any]", parsed)

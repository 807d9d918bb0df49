"""JSON from a checkpoint: one object, UTF-8, no key twice, no `NaN`; anything else is an error that names the file.

Python's own parser accepts more (a repeated key silently wins), and what it lets through would decide where bytes are
read from.
"""

from __future__ import annotations

import collections
import json
from typing import Any, NoReturn, cast

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError

# An empty list of two characters becomes an object of 56 bytes and more. Lists of leaves have 17 bytes and more for
# each object or list in them; a text of a million containers with fewer is one that is made to take memory.
_FREE_CONTAINERS, _BYTES_PER_CONTAINER = 1 << 20, 16


def parse_object(data: bytes | bytearray, path: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parses all of `data` as a JSON object without duplicate keys.

    `allow_nan` accepts `NaN` and infinities, which Python's writers produce for metrics.
    """
    containers = data.count(b"{") + data.count(b"[")
    if containers > max(_FREE_CONTAINERS, len(data) // _BYTES_PER_CONTAINER):
        raise LimitExceededError(
            f"{len(data)} bytes of JSON with {containers} objects and lists, which take far more memory", path=path
        )

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed_pairs = dict(pairs)
        if len(parsed_pairs) != len(pairs):
            ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
            raise CorruptCheckpointError(f"the JSON key {twice[:200]!r} occurs twice in one object", path=path)
        return parsed_pairs

    def refuse_constant(name: str) -> NoReturn:
        raise CorruptCheckpointError(f"{name} is not JSON", path=path)

    try:
        text = data.decode("utf-8")
        parsed = json.loads(
            text, object_pairs_hook=without_duplicates, parse_constant=None if allow_nan else refuse_constant
        )
    except CorruptCheckpointError:
        raise
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"not UTF-8: {error.reason} at byte {error.start}", path=path) from error
    except RecursionError:
        raise CorruptCheckpointError("the JSON is nested too deep", path=path) from None
    except ValueError as error:
        raise CorruptCheckpointError(f"not JSON: {str(error)[:200]}", path=path) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON is a {type(parsed).__name__}, not an object", path=path)
    return cast("dict[str, Any]", parsed)

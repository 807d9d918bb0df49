"""Random streams of NNX modules saved by Flax 0.10.

A `Dropout` kept all streams of its `Rngs` then, by name (`rngs/default/key`); today it keeps the one that it uses
(`rngs/key`). Where several were kept, nothing tells which one that is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.transforms import Rename

_KEPT_BY_NAME = re.compile(r"((?:.*/)?rngs)/([^/]+)/(key|count)(?:/value)?")
_KEPT = re.compile(r"(?:.*/)?rngs/(?:key|count)(/value)?")


def rename_streams(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Rename, ...]:
    """Returns the renaming from streams by name to those of the target; none if they are kept alike."""
    wanted = [match for match in map(_KEPT.fullmatch, target) if match is not None]
    if not wanted or _streams(target):
        return ()
    streams = _streams(source)
    if not streams or any(len(names) > 1 for names in streams.values()):
        return ()
    names = sorted(set().union(*streams.values()))
    value = wanted[0][1] or ""
    pattern = rf"((?:.*/)?rngs)/(?:{'|'.join(map(re.escape, names))})/(key|count)(?:/value)?"
    return (Rename([(pattern, rf"\1/\2{value}")]),)


def _streams(leaves: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names of the streams in each `rngs`."""
    streams: dict[str, set[str]] = {}
    for match in filter(None, map(_KEPT_BY_NAME.fullmatch, leaves)):
        streams.setdefault(match[1], set()).add(match[2])
    return streams

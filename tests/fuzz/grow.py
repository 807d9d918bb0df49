"""`python -m tests.fuzz.grow KEPT`: saves of the inputs that a run kept (`--keep KEPT`) the few that reach new lines.

libFuzzer keeps an input for each new count of each branch, thousands in all. Saved are the smallest that together reach
all lines of `readers`, `files` and `convert` which any reaches, in the order of their size.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz import corpus
from tests.fuzz.targets import TARGETS, Check

_ROOMS = (f"{os.sep}readers{os.sep}", f"{os.sep}storage{os.sep}", f"{os.sep}convert{os.sep}")
# Longer inputs are looked at as well, but rarely are the first to reach anything.
_LARGEST_BYTES = 4096


def lines_reached(check: Check, data: bytes) -> set[tuple[str, int, int]]:
    """Each step from line to line of the rooms, in this thread."""
    reached: set[tuple[str, int, int]] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not any(room in file for room in _ROOMS):
            return None
        reached.add((file, last.get(id(frame), 0), frame.f_lineno))
        last[id(frame)] = frame.f_lineno if event == "line" else 0
        return trace

    sys.settrace(trace)
    try:
        check(data)
    finally:
        sys.settrace(None)
    return reached


def grow(name: str, kept: Path) -> int:
    """Saves the inputs of one target beside those that are saved already; returns how many there are."""
    found = {path.read_bytes() for path in kept.glob("*") if "-" not in path.name}
    found |= set(corpus.grown(name).values())
    saved: list[bytes] = []
    with tempfile.TemporaryDirectory() as directory:
        check = TARGETS[name].make(Path(directory))
        seeds = [*TARGETS[name].seeds(), *corpus.findings(name).values()]
        reached = set().union(*(lines_reached(check, data) for data in (*seeds, *seeds)))
        for data in sorted((one for one in found if len(one) <= _LARGEST_BYTES), key=lambda one: (len(one), one)):
            if new := lines_reached(check, data) - reached:
                reached |= new
                saved.append(data)
    path = corpus.grown_path(name)
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for data in saved:
            # A fixed date: the same inputs make the same file.
            archive.writestr(zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:16]), data)
    return len(saved)


if __name__ == "__main__":
    for target in TARGETS:
        print(target, grow(target, Path(sys.argv[1]) / target), flush=True)

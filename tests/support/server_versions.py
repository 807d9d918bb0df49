"""What servers tell of a file's version before and after it is exchanged, and which of it proves that it was."""

from __future__ import annotations

import itertools

import numpy as np
import safetensors.numpy

from tests.support.http_store import HttpStore

VALUES = np.arange(1 << 19, dtype=np.float32)
TAGS = {"strong": '"v1"', "another": '"v2"', "weak": 'W/"v1"', "another weak": 'W/"v2"', "none": None}
DATES = {"a day": "Mon, 23 Nov 2026 00:00:00 GMT", "the next": "Tue, 24 Nov 2026 00:00:00 GMT", "none": None}
# Tag and date at first, of what is then "same"; and later, when the file is the same, another, or one of another size.
BEFORE = list(itertools.product(("strong", "weak", "none"), ("a day", "none")))
AFTER = list(itertools.product(TAGS, DATES, ("same", "other", "larger")))


def _contents(which: str) -> bytes:
    values = {"a": VALUES, "b": VALUES + (which != "same")}
    return safetensors.numpy.save(values | ({"c": VALUES} if which == "larger" else {}))


CONTENTS = {which: _contents(which) for which in ("same", "other", "larger")}


def send(store: HttpStore, tag: str, date: str) -> None:
    """Makes a store send the tag and the date of a name."""
    store.etag = lambda data: TAGS[tag]
    store.modified = lambda data: DATES[date]


def is_lie(before: tuple[str, str], after: tuple[str, str, str]) -> bool:
    """Tests if a server gives other bytes the same strong tag."""
    return before[0] == after[0] == "strong" and after[2] != "same"


def proves_change(before: tuple[str, str], after: tuple[str, str, str]) -> bool:
    """Tests if the marks of two answers, whose names say what they are, cannot be of one file."""
    (tag, date), (later_tag, later_date, which) = before, after
    if which == "larger" or (tag == "strong" and later_tag != "strong"):
        return True
    if tag == "weak" and later_tag in ("another", "another weak", "none"):
        return True
    is_equal = tag == later_tag == "strong"
    return not is_equal and date == "a day" and later_date == "the next"

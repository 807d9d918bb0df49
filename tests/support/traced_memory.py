"""Memory of a call as `tracemalloc` sees it."""

import tracemalloc
from collections.abc import Callable
from typing import Any


def peak_of(call: Callable[[], Any]) -> int:
    """The most memory that a call had at a time, beyond what there was."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

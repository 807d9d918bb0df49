"""Results that several threads want and a single thread computes."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")


class OnceEach(Generic[_Key, _Result]):
    """Results by key that the first thread computes.

    Other threads wait for it; after a failure the next thread tries again.
    """

    def __init__(self) -> None:
        self._results: dict[_Key, concurrent.futures.Future[_Result]] = {}
        self._lock = threading.Lock()

    def get(self, key: _Key, compute: Callable[[], _Result]) -> _Result:
        """Returns the result for a key.

        Raises:
          BaseException: what `compute` raised, in the thread that called it and in those that waited for it.
        """
        if (known := self._results.get(key)) is not None:
            return known.result()
        made: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        with self._lock:
            future = self._results.setdefault(key, made)
        if future is made:
            try:
                made.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._results[key]
                made.set_exception(error)
                raise
        return future.result()

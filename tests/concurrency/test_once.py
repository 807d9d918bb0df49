"""Results that several threads want are computed once; failures are not kept."""

import concurrent.futures
import threading

import pytest

from orbax_t5x.concurrency import OnceEach


def test_threads_share_one_computation():
    once, entered, count = OnceEach(), threading.Barrier(4), []

    def want(key):
        entered.wait(30)
        return once.get(key, lambda: count.append(key) or len(count))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(want, ["a"] * 4)) == {1}
    assert once.get("b", lambda: "other") == "other"
    assert count == ["a"]


def test_a_failure_is_tried_again():
    once = OnceEach()
    with pytest.raises(ZeroDivisionError):
        once.get("a", lambda: 1 // 0)
    assert once.get("a", lambda: 5) == 5

"""Requests to one web server: connections are used again, proxies are asked, and what is given up ends."""

import threading

import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.storage.remote.web_server import WebServer
from orbax_t5x.storage.response_clock import ResponseClock
from orbax_t5x.storage.values import NO_BYTES, BoundedRange
from tests.support.http_store import serving

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as running:
        running.files["a b/%file"] = DATA
        running.files["empty"] = b""
        yield running


def read(server, start, stop, most=0, key="a b/%file"):
    return server.read(key, BoundedRange(start, stop, most)).result(30)


def test_ranges(store):
    server = WebServer(store.url, ResponseClock(5))
    assert read(server, 3, 10).data == DATA[3:10]
    assert read(server, -10, None, 10).data == DATA[-10:]
    assert read(server, -20_000, None, 20_000).data == DATA
    assert read(server, 100, None, 20_000).data == DATA[100:]
    assert read(server, 0, None, len(DATA)).data == DATA
    assert read(server, 0, 0).data == b"" and read(server, 0, 0).generation
    assert read(server, 0, None, 9, key="empty").data == b""
    assert read(server, 0, 0, key="none") is None and read(server, 0, 5, key="none") is None
    with pytest.raises(LimitExceededError):
        read(server, 0, None, len(DATA) - 1)
    with pytest.raises(ValueError, match=r"^OUT_OF_RANGE"):
        read(server, len(DATA) - 2, len(DATA) + 1)
    with pytest.raises(ValueError, match=r"^OUT_OF_RANGE"):
        read(server, len(DATA), len(DATA) + 1)


def test_every_request_names_its_last_byte(store):
    server = WebServer(store.url, ResponseClock(5))
    read(server, 100, None, 20_000)
    read(server, -10, None, 10)
    assert [request.range for request in store.log] == ["bytes=100-20100", "bytes=-10"]


def test_connections_are_used_again(store):
    server, seen = WebServer(store.url, ResponseClock(5)), set()
    store.fault = lambda request: seen.add(threading.current_thread())
    for number in range(20):
        read(server, number, number + 5)
        read(server, 0, 0)
        read(server, 0, 5, key="none")
    assert len(seen) == 1, "each connection has a thread of its own in the server"


def test_connections_that_the_server_has_closed_are_noticed(store):
    server = WebServer(store.url, ResponseClock(5))
    for _ in range(3):
        assert read(server, 3, 10).data == DATA[3:10]
        store.fault = lambda request: "reset"
        first = server.read("a b/%file", BoundedRange.between(0, 5))
        store.fault = lambda request: None
        assert first.result(30).data == DATA[:5]


def test_a_proxy_of_the_environment_is_asked(store, monkeypatch):
    monkeypatch.setenv("http_proxy", store.url)
    store.files["/models.invalid/a"] = b"x"
    names = []
    store.fault = lambda request: names.append(request.name)
    read(WebServer("http://models.invalid", ResponseClock(5)), 0, 1, key="a b/%file")
    assert names == ["a b/%file"]


def test_a_request_that_is_given_up_ends(store):
    server = WebServer(store.url, ResponseClock(60))
    arrived = threading.Event()

    def fault(request):
        arrived.set()
        return "chunks without end" if request.range else None

    store.fault = fault
    request = server.read("a b/%file", BoundedRange.between(0, 1 << 40))
    assert arrived.wait(30)
    request.cancel()
    assert store.wait_until_closed(30)
    with pytest.raises((ValueError, OSError)):
        request.result(30)


def test_a_server_that_is_not_there():
    with serving() as store:
        url = store.url
    request = WebServer(url, ResponseClock(60)).read("a", NO_BYTES)
    with pytest.raises(TimeoutError):
        request.result(0.05)
    request.cancel()
    with pytest.raises(ValueError, match=r"^UNAVAILABLE"):
        request.result(30)


def test_a_caller_that_waits_sends_its_request_itself(store):
    server, threads = WebServer(store.url, ResponseClock(5)), []
    exchange = server.exchange

    def seen(*arguments):
        threads.append(threading.current_thread())
        return exchange(*arguments)

    server.exchange = seen
    for is_awaited in (True, False):
        request = server.read("a b/%file", BoundedRange.between(3, 10), is_awaited=is_awaited)
        assert request.result(30).data == DATA[3:10]
    assert (threads[0] is threading.current_thread(), threads[1] is threading.current_thread()) == (True, False)


@pytest.mark.parametrize("fault", ["stall", "503", "reset"])
def test_a_caller_that_waits_is_ended_by_the_clock(store, fault):
    server = WebServer(store.url, ResponseClock(0.3))
    store.fault = lambda request: fault
    with pytest.raises(TimeoutError):
        server.read("a b/%file", BoundedRange.between(3, 10), is_awaited=True).result()


def test_a_caller_that_waits_can_be_released_by_another_thread(store):
    server, arrived = WebServer(store.url, ResponseClock(60)), threading.Event()

    def fault(request):
        arrived.set()
        return "stall"

    store.fault = fault
    request = server.read("a b/%file", BoundedRange.between(3, 10), is_awaited=True)

    def cancel():
        assert arrived.wait(30)
        request.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises((ValueError, OSError)):
        request.result()
    thread.join()

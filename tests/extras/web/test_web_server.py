"""Requests to one web server: connections are used again, proxies are asked, and what is given up ends."""

import threading

import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.extras.web.web_server import WebServer
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, ResponseClock
from tests.support.http_store import serving

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(no_proxies):
    with serving() as running:
        running.files["a b/%file"] = DATA
        running.files["empty"] = b""
        yield running


def read(server, start, stop, most=0, key="a b/%file"):
    return server.request(key, BoundedRange(start, stop, most)).result(30)


def test_ranges(store):
    server = WebServer(store.url, ResponseClock(5))
    assert read(server, 3, 10).data == DATA[3:10]
    assert read(server, -10, None, 10).data == DATA[-10:]
    assert read(server, -20_000, None, 20_000).data == DATA
    assert read(server, 100, None, 20_000).data == DATA[100:]
    assert read(server, 0, None, len(DATA)).data == DATA
    assert read(server, 0, 0).data == b"" and read(server, 0, 0).version.tag
    assert read(server, 0, None, 9, key="empty").data == b""
    assert read(server, 0, 0, key="none") is None and read(server, 0, 5, key="none") is None
    with pytest.raises(LimitExceededError):
        read(server, 0, None, len(DATA) - 1)
    for start in (len(DATA) - 2, len(DATA)):
        with pytest.raises(RequestError) as caught:
            read(server, start, len(DATA) + 1)
        assert caught.value.kind is RequestKind.BEYOND_END


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
        first = server.request("a b/%file", BoundedRange.between(0, 5))
        store.fault = lambda request: None
        assert first.result(30).data == DATA[:5]


def test_a_proxy_of_the_environment_is_asked(store, monkeypatch):
    monkeypatch.setenv("http_proxy", store.url)
    store.files["/models.invalid/a"] = b"x"
    names = []
    store.fault = lambda request: names.append(request.name)
    read(WebServer("http://models.invalid", ResponseClock(5)), 0, 1, key="a b/%file")
    assert names == ["a b/%file"]

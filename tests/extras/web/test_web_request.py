"""Requests that end: by an answer, by the clock, or because another thread gives them up."""

import threading
import time

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.extras.web.web_server import WebServer
from orbax_t5x.files import places
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, ResponseClock
from tests.support.http_store import serving

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(no_proxies):
    with serving() as running:
        running.files["a b/%file"] = DATA
        yield running


def test_a_request_that_is_given_up_ends(store):
    server = WebServer(store.url, ResponseClock(60))
    arrived = threading.Event()

    def fault(request):
        arrived.set()
        return "chunks without end" if request.range else None

    store.fault = fault
    request = server.request("a b/%file", BoundedRange.between(0, 1 << 40))
    assert arrived.wait(30)
    request.cancel()
    assert store.wait_until_closed(30)
    with pytest.raises(RequestError):
        request.result(30)


def test_a_server_that_is_not_there():
    with serving() as store:
        url = store.url
    server, begun = WebServer(url, ResponseClock(60)), threading.Event()
    exchange = server.client.exchange

    def seen(*arguments):
        begun.set()
        return exchange(*arguments)

    server.client.exchange = seen
    request = server.request("a", NO_BYTES)
    assert begun.wait(30)  # one that no thread has taken yet is only cancelled
    with pytest.raises(TimeoutError):
        request.result(0.05)
    request.cancel()
    with pytest.raises(RequestError, match=r"refused|given up") as caught:
        request.result(30)
    assert caught.value.kind is RequestKind.BROKEN


def test_a_caller_that_waits_sends_its_request_itself(store):
    server, threads = WebServer(store.url, ResponseClock(5)), []
    exchange = server.client.exchange

    def seen(*arguments):
        threads.append(threading.current_thread())
        return exchange(*arguments)

    server.client.exchange = seen
    for is_awaited in (True, False):
        request = server.request("a b/%file", BoundedRange.between(3, 10), is_awaited=is_awaited)
        assert request.result(30).data == DATA[3:10]
    assert (threads[0] is threading.current_thread(), threads[1] is threading.current_thread()) == (True, False)


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("fault", ["503", "reset"])
def test_a_request_that_is_ended_by_the_clock_says_why(store, fault, is_awaited):
    server = WebServer(store.url, clock := ResponseClock(1.5))
    store.fault = lambda request: fault
    with pytest.raises(RequestError, match=r"(503|Remote|reset).*; tried for 1\.5 s") as caught:
        server.request("a b/%file", BoundedRange.between(3, 10), is_awaited=is_awaited).result(clock.timeout)
    assert caught.value.kind is (RequestKind.PASSING if fault == "503" else RequestKind.BROKEN)


def test_an_opening_says_why_a_server_was_not_read(store, monkeypatch):
    """However short the time is that it has."""
    with serving() as gone:
        pass
    secure = store.url.replace("http://", "https://")
    monkeypatch.setattr(places, "IO_TIMEOUT_SECS", 0.5)
    begun = time.monotonic()
    for url, text in {gone.url: "Connection refused", secure: "SSL", "http://none.invalid": "gaierror"}.items():
        with pytest.raises(CheckpointIOError, match=text):
            ot.open_checkpoint(f"{url}/model")
    monkeypatch.setenv("https_proxy", store.url)
    with pytest.raises(CheckpointIOError, match="Tunnel connection failed: 501"):
        ot.open_checkpoint("https://none.invalid/model")
    store.fault = lambda request: "stall"
    with pytest.raises(CheckpointIOError, match=r"no answer for 0\.5 s"):
        ot.open_checkpoint(f"{store.url}/model")
    assert time.monotonic() - begun < 60


def test_a_silent_server_is_ended_by_the_clock(store):
    server = WebServer(store.url, ResponseClock(0.3))
    store.fault = lambda request: "stall"
    with pytest.raises(TimeoutError):
        server.request("a b/%file", BoundedRange.between(3, 10), is_awaited=True).result()


def test_a_caller_that_waits_can_be_released_by_another_thread(store):
    server, arrived = WebServer(store.url, ResponseClock(60)), threading.Event()

    def fault(request):
        arrived.set()
        return "stall"

    store.fault = fault
    request = server.request("a b/%file", BoundedRange.between(3, 10), is_awaited=True)

    def cancel():
        assert arrived.wait(30)
        request.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RequestError):
        request.result()
    thread.join()

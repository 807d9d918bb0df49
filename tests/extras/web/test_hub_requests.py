"""Requests that the hub sends on: where to, how often, and what goes with them."""

import pytest

from orbax_t5x.extras.web import hub_ranges
from orbax_t5x.extras.web.hub_ranges import REDIRECTS, HubRequests, server_of
from orbax_t5x.extras.web.web_response import read_answer
from orbax_t5x.extras.web.web_server import WebRequest
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import RequestError, ResponseClock
from tests.support.http_store import HttpStore, serving

WANTED = BoundedRange.between(1, 3)


class Sending(HttpStore):
    """Sends on to one location after the other, then answers."""

    def __init__(self):
        super().__init__()
        self.locations = []

    def answer_to(self, name, query):
        self.asked = name, query
        return (302, b"page", {"Location": self.locations.pop(0)}) if self.locations else b"abcd"


@pytest.fixture
def sending(monkeypatch):
    server = Sending()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "odd-t0ken")
    yield server
    server.close()


def send(url, see=lambda url: None):
    clock = ResponseClock(5)
    hub = HubRequests()

    def judge(url, response, wanted):
        return see(url) if response.status in REDIRECTS else read_answer(response, wanted)

    request = WebRequest(lambda request: hub.send(url, WANTED, judge, request), clock, is_awaited=True)
    try:
        return request.result()
    finally:
        hub.close_idle()


def test_servers_of_urls():
    urls = ["https://A.b/c", "https://a.b:443", "http://a.b:443/?x", "http://[::1]:80/", "http://u:p@a.b/"]
    assert [server_of(url) for url in urls] == [
        "https://a.b",
        "https://a.b",
        "http://a.b:443",
        "http://[::1]",
        "http://a.b",
    ]


def test_redirects(sending):
    seen = []
    with serving() as other:
        other.files["x y"] = b"0123"
        sending.locations = ["/second?a=%2F b&b=1", "third", f"{other.url}/x%20y?Signature=a+b%3D"]
        found = send(f"{sending.url}/first", seen.append)
        assert found.data == b"12"
        assert [request.authorization for request in sending.log] == ["Bearer odd-t0ken"] * 3
        assert [(request.name, request.authorization) for request in other.log] == [("x y", None)]
        # As many redirects as a circle may have before it is one.
        sending.locations = ["/again"] * 9
        with pytest.raises(RequestError, match="more than 5 redirects"):
            send(f"{sending.url}/first")
    assert seen == [f"{sending.url}/{name}" for name in ("first", "second?a=%2F b&b=1", "third")]


def test_redirects_to_nowhere(sending):
    for location in ("file:///etc/passwd", "ftp://a/b", "https://", "data:,x"):
        sending.locations = [location]
        with pytest.raises(RequestError, match="no URL of the web"):
            send(f"{sending.url}/first")
    with pytest.raises(RequestError, match="no URL of the web"):
        hub_ranges._next_url("https://a.b/c", "http://a.b/c")

"""Ways to servers: straight, through the proxies of the environment, and with their names as requests hold them."""

import pytest

import orbax_t5x as ot
from orbax_t5x.extras.web.web_pool import find_route
from orbax_t5x.extras.web.web_server import WebServer
from orbax_t5x.storage.response_clock import ResponseClock
from orbax_t5x.storage.values import BoundedRange
from tests.support.http_store import serving

pytestmark = pytest.mark.usefixtures("no_proxies")


def test_names_of_hosts():
    assert find_route("http://m\xf6dell.invalid").make_pool().host == "xn--mdell-jua.invalid"
    assert find_route("http://[::1]:80").make_pool().port == 80
    for url in (f"http://{'a' * 70}.invalid", "http://a:b"):
        with pytest.raises(ValueError, match=r"label|[Pp]ort|encode|parse"):
            find_route(url)


def test_hosts_that_could_write_into_a_request_are_refused():
    for host in ("h%20HTTP%2f1.1%0d%0aX-Evil:y", "a%0ab", "a%09b", "a b", "a%7fb", "a%c2%a0b", "a%e2%80%a8b"):
        with pytest.raises(ot.errors.UnsupportedCheckpointError, match="host"):
            ot.open_checkpoint(f"http://{host}/model")


def test_a_proxy_is_asked_with_its_login(monkeypatch):
    seen = []
    with serving() as proxy:
        proxy.files["a b"] = b"xyz"
        proxy.fault = lambda request: seen.append(request.name)
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://user:s%25cret@"))
        route = find_route("http://models.invalid")
        assert route.root == "http://models.invalid"
        assert route.make_pool().proxy_headers == {"Proxy-Authorization": "Basic dXNlcjpzJWNyZXQ="}
        WebServer("http://models.invalid", ResponseClock(5)).read("a b", BoundedRange.between(0, 1)).result(30)
        assert seen == ["a b"]
    monkeypatch.setenv("no_proxy", "models.invalid")
    assert find_route("http://models.invalid").root == ""


PROXIES = {
    "https://user:s3cret@proxy.invalid": "https://",
    "socks5://user:s3cret@proxy.invalid:1080": "socks5://",
    "http://user:s3cret/x@proxy.invalid": "no host or port",
    "http://": "no host or port",
}


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
@pytest.mark.parametrize("proxy", PROXIES)
def test_other_proxies_are_refused_by_name_before_anything_is_sent(monkeypatch, variable, proxy):
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(ot.errors.UnsupportedCheckpointError, match=PROXIES[proxy]) as caught:
        ot.open_checkpoint("http://models.invalid/model")
    assert "s3cret" not in str(caught.value)

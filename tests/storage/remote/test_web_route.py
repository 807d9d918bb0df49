"""Ways to servers: straight, through the proxies of the environment, and with their names as requests hold them."""

import pytest

from orbax_t5x.storage.remote.web_route import find_route
from orbax_t5x.storage.values import NO_BYTES, BoundedRange

pytestmark = pytest.mark.usefixtures("no_proxies")


def lines(url, wanted=NO_BYTES, headers=None):
    return find_route(url, 5).request("a%20b", wanted, headers or {}).decode().split("\r\n")


def test_requests():
    first, *rest = lines("http://models.invalid:81")
    assert first == "HEAD /a%20b HTTP/1.1"
    assert rest == ["Host: models.invalid:81", "Accept-Encoding: identity", "User-Agent: orbax-t5x", "", ""]
    first, *rest = lines("https://models.invalid", BoundedRange.between(0, 5), {"Authorization": "Bearer x"})
    assert first == "GET /a%20b HTTP/1.1"
    assert {"Host: models.invalid", "Range: bytes=0-4", "Authorization: Bearer x"} <= set(rest)


def test_names_of_hosts():
    assert "Host: xn--mdell-jua.invalid" in lines("http://m\xf6dell.invalid")
    assert "Host: [::1]:80" in lines("http://[::1]:80")
    for url in (f"http://{'a' * 70}.invalid", "http://a:b"):
        with pytest.raises(ValueError, match=r"label|[Pp]ort|encode"):
            find_route(url, 5)


def test_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://user:s%25cret@proxy.invalid:3128")
    first, *rest = lines("http://models.invalid")
    assert first == "HEAD http://models.invalid/a%20b HTTP/1.1"
    assert {"Host: models.invalid", "Proxy-Authorization: Basic dXNlcjpzJWNyZXQ="} <= set(rest)
    # A tunnel's end never gets the login for the proxy.
    assert not [line for line in lines("https://models.invalid") if line.startswith("Proxy")]
    monkeypatch.setenv("no_proxy", "models.invalid")
    assert lines("http://models.invalid")[0] == "HEAD /a%20b HTTP/1.1"

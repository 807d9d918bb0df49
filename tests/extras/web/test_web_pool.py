"""Ways to servers: straight, through the proxies of the environment, and with their names as requests hold them."""

import datetime
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import orbax_t5x as ot
from orbax_t5x.extras.web.web_server import WebServer, find_route
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, ResponseClock
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
        WebServer("http://models.invalid", ResponseClock(5)).request("a b", BoundedRange.between(0, 1)).result(30)
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


def write_certificate(path):
    """Writes a key and a certificate of its own for this machine."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = (
        made.serial_number(1).not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(*forms) + made.public_bytes(forms[0]))


def test_tls(tmp_path, monkeypatch):
    """Connections are used again and filled in place; who is not trusted is not asked again."""
    write_certificate(tmp_path / "here.pem")
    with serving() as store:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "here.pem")
        store._server.socket = context.wrap_socket(store._server.socket, server_side=True)
        store.files["a"] = data = bytes(range(256)) * 5000
        url, memory = store.url.replace("http://", "https://"), memoryview(bytearray(1 << 20))
        with pytest.raises(RequestError, match=r"^SSLCertVerificationError") as caught:
            WebServer(url, ResponseClock(5)).request("a", BoundedRange.between(0, 5)).result(30)
        assert caught.value.kind is RequestKind.UNREACHABLE
        monkeypatch.setenv("TENSORSTORE_CA_BUNDLE", str(tmp_path / "here.pem"))
        server = WebServer(url, ResponseClock(5))
        for is_awaited in (True, False):
            assert server.request("a", BoundedRange.between(3, 9), is_awaited=is_awaited).result(30).data == data[3:9]
            wanted = BoundedRange.between(7, 7 + len(memory), memory)
            assert server.request("a", wanted, is_awaited=is_awaited).result(30).is_in_place
            assert memory == data[7 : 7 + len(memory)]
        assert len({request.port for request in store.log}) == 1

"""URLs of stores."""

import pytest

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.places import SCHEMES, Scheme, scheme_of


@pytest.mark.parametrize(
    ("url", "base", "key"),
    [
        ("https://host", "https://host", ""),
        ("https://host:80/a/b/", "https://host:80", "a/b"),
        ("gs://bucket", "gs://bucket", ""),
        ("s3://bucket/a b/c", "s3://bucket", "a b/c"),
    ],
)
def test_urls(url, base, key):
    parsed = scheme_of(url).parse(url)
    assert (parsed.base, parsed.key) == (base, key)


def test_each_scheme_answers_for_its_urls():
    assert scheme_of("/a/b") is None and scheme_of("a:") is None
    assert not scheme_of("http://host/x").server.can_list and scheme_of("GS://bucket/x").server.can_list
    assert scheme_of("GS://bucket/x").find("GS://bucket/x") == "gs://bucket/x"
    assert scheme_of("https://host/x").find("HTTPS://host/a%20b") == "https://host/a b"
    with pytest.raises(UnsupportedCheckpointError, match="not read; http, https, s3, gs, hf and local"):
        scheme_of("ftp://host/x")


def test_another_scheme_may_be_registered():
    other = Scheme(str, lambda url: None, lambda base, clock: None)
    with SCHEMES.register("other", other):
        assert scheme_of("other://x") is other

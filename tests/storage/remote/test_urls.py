"""URLs of stores."""

import pytest

from orbax_t5x.storage.remote.urls import parse_url


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
    parsed = parse_url(url)
    assert (parsed.base, parsed.key) == (base, key)

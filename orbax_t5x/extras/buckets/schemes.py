"""Row of the table of schemes: buckets."""

from __future__ import annotations

from orbax_t5x.extras.buckets.buckets import Bucket
from orbax_t5x.files.places import Scheme, lower_scheme, split_url


def _plain_url(url: str) -> str:
    split_url(url)
    return lower_scheme(url)


BUCKETS = Scheme(_plain_url, split_url, Bucket)

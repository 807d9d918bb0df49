"""A server of files, and hubs that send on to another server."""

import pytest

from tests.extras.web.conftest import redirecting_hub
from tests.support.http_store import serving

__all__ = ["redirecting_hub"]


@pytest.fixture(scope="module")
def store():
    with serving() as running:
        yield running

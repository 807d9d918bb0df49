"""Hubs that send on to another server."""

from tests.extras.web.conftest import redirecting_hub

__all__ = ["redirecting_hub"]

"""Rows of the table of schemes: web servers and the hub."""

from __future__ import annotations

import urllib.parse

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.extras.web.hub import download_files, parse_hub_path
from orbax_t5x.extras.web.hub_location import locate
from orbax_t5x.extras.web.hub_ranges import HubServer
from orbax_t5x.extras.web.web_server import WebServer
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.files.places import Scheme, StoreUrl, split_url


def _plain_url(url: str) -> str:
    """Removes percent-encoding from the URL of a user."""
    split_url(url)
    if "?" in url or "#" in url:
        raise UnsupportedCheckpointError(
            "URLs with a query or a fragment are not read: the names of further files could not be appended", path=url
        )
    return f"{url_scheme(url)}://{urllib.parse.unquote(url.partition('://')[2])}"


def _split_hub_url(url: str) -> StoreUrl:
    wanted = parse_hub_path(url)
    revision = f"@{urllib.parse.quote(wanted.revision, safe='')}" if wanted.revision else ""
    return StoreUrl(f"hf://{wanted.repository}{revision}", wanted.file, not wanted.file)


WEB = Scheme(_plain_url, split_url, WebServer)
HUB = Scheme(locate, _split_hub_url, HubServer, download=download_files)

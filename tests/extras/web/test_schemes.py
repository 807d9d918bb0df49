"""URLs of web servers and of the hub."""

import pytest

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.extras.web.hub_ranges import HUB
from orbax_t5x.extras.web.web_server import WEB


def test_web_servers_do_not_list_and_the_hub_does():
    assert not WEB.server.can_list and WEB.download is None
    assert HUB.server.can_list and HUB.download is not None


@pytest.mark.parametrize("url", ["https://host/x?a=b", "https://host/x#a", "https://", "https://user:word@host/x"])
def test_urls_to_which_no_name_can_be_appended_are_refused(url):
    with pytest.raises(UnsupportedCheckpointError):
        WEB.find(url)


@pytest.mark.parametrize(
    ("url", "base", "key"),
    [
        ("hf://org/name", "hf://org/name", ""),
        ("hf://org/name@v1/a/b", "hf://org/name@v1", "a/b"),
        ("hf://org/name@refs/pr/3/a", "hf://org/name@refs%2Fpr%2F3", "a"),
    ],
)
def test_a_repository_with_its_revision_is_the_server(url, base, key):
    parsed = HUB.parse(url)
    assert (parsed.base, parsed.key, parsed.is_directory) == (base, key, not key)

"""Requests of an opening: recorded with their responses, and answered from them within the bound of each request."""

import pytest

from orbax_t5x.files.places import using
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, Response, ResponseClock, Version, known_response
from orbax_t5x.files.remote.server import Server
from orbax_t5x.files.transcript import Transcript, Viewpoint


class KeyServer(Server):
    """Answers each request with its key; of "none" there is no file, and "denied" is refused."""

    def __init__(self, base="http://host"):
        super().__init__(base, ResponseClock(5))
        self.asked = []

    def request(self, key, wanted, *, is_awaited=False):
        self.asked.append(key)
        if key == "denied":
            return known_response(RequestError("no", RequestKind.DENIED))
        return known_response(None if key == "none" else Response(key.encode(), Version(b"tag"), 4))

    def names(self, prefix, timeout):
        self.asked.append(prefix)
        return [f"{prefix}a"]

    def close_idle(self):
        pass


def begun(server, key, wanted):
    return server.begin(key, wanted).future.result()


def read_all(server):
    assert begun(server, "file", BoundedRange.whole(9)) == Response(b"file", Version(b"tag"), 4)
    assert begun(server, "none", NO_BYTES) is None
    with pytest.raises(RequestError, match="no") as caught:
        begun(server, "denied", NO_BYTES)
    assert caught.value.kind is RequestKind.DENIED


def test_responses_are_given_again():
    with using(recorded := Transcript()):
        server = KeyServer()
        read_all(server)
        assert server.names_below("d") == ["a"] and server.asked == ["file", "none", "denied", "d/"]
        received = Transcript.decode(recorded.encode(), Viewpoint(1, 0))
    with using(received):
        server, other = KeyServer(), KeyServer("http://other")
        read_all(server)
        assert server.names_below("d") == ["a"] and server.asked == []
        begun(other, "none", NO_BYTES)
        begun(server, "file", BoundedRange.whole(3))
        assert (server.asked, other.asked) == (["file"], ["none"]), "more bytes than permitted; another server"
    read_all(server)
    assert server.asked[1:] == ["file", "none", "denied"], "the opening has ended"

"""Requests of an opening: recorded with their responses, and answered from them within the bound of each request."""

import concurrent.futures

import pytest

from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.recorded import RecordedBucket, RecordedTransport
from orbax_t5x.files.remote.transport import Response, Version
from orbax_t5x.files.transcript import Transcript, Viewpoint

BASE = "http://host"


class Server:
    """Answers each request with its key; of "none" there is no file, and "denied" is refused."""

    is_bounded = True

    def __init__(self):
        self.asked = []

    def read(self, key, wanted, *, is_awaited=False):
        self.asked.append(key)
        future = concurrent.futures.Future()
        if key == "denied":
            future.set_exception(ValueError("PERMISSION_DENIED: no"))
        else:
            future.set_result(None if key == "none" else Response(key.encode(), Version(b"tag"), 4))
        return future

    def names(self, prefix, timeout):
        self.asked.append(prefix)
        return [f"{prefix}a"]


def read_all(transport):
    assert transport.read("file", BoundedRange.whole(9)).result() == Response(b"file", Version(b"tag"), 4)
    assert transport.read("none", NO_BYTES).result() is None
    with pytest.raises(ValueError, match="PERMISSION_DENIED: no"):
        transport.read("denied", NO_BYTES).result()


def test_responses_are_given_again():
    server, recorded = Server(), Transcript()
    bucket = RecordedBucket(server, BASE, recorded)
    assert bucket.is_bounded is server.is_bounded
    read_all(bucket)
    assert bucket.names("d/", 1.0) == ["d/a"]
    asked = server.asked.copy()
    received = Transcript.decode(recorded.encode(), Viewpoint(1, 0))
    bucket = RecordedBucket(server, BASE, received)
    read_all(bucket)
    assert bucket.names("d/", 1.0) == ["d/a"] and server.asked == asked
    RecordedTransport(server, "http://other", received).read("none", NO_BYTES).result()
    bucket.read("file", BoundedRange.whole(3)).result()
    assert server.asked[len(asked) :] == ["none", "file"], "of another server; more bytes than the request permits"
    received.close()
    read_all(bucket)
    assert server.asked[-3:] == ["file", "none", "denied"], "the opening has ended"

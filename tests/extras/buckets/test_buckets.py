"""Buckets as TensorStore reads them: bytes by ranges, bounded, with the generation of the file."""

import pytest
import tensorstore as ts

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.extras.buckets import buckets
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import ResponseClock

FILES = {"a/1": b"0123456789", "a/2/3": b"", "ab": b"x"}


@pytest.fixture
def bucket(monkeypatch):
    kvstore = ts.KvStore.open("memory://").result()
    for name, data in FILES.items():
        kvstore.write(name, data).result()
    monkeypatch.setattr(buckets, "open_kvstore", lambda base: kvstore)
    return buckets.Bucket("s3://a", ResponseClock(5))


def test_ranges_are_those_of_the_file(bucket):
    for wanted in (BoundedRange.whole(10), BoundedRange.between(2, 5), BoundedRange.rest(7, 3), BoundedRange.last(4)):
        found = bucket.request("a/1", wanted).result()
        assert found.data == FILES["a/1"][wanted.start : wanted.stop] and found.file_bytes is None
    assert bucket.request("a/1", NO_BYTES).result().data == b""
    assert bucket.request("a/2/3", BoundedRange.whole(1)).result().data == b""
    assert bucket.request("a", BoundedRange.whole(1)).result() is None


def test_more_than_was_asked_for_is_refused(bucket):
    with pytest.raises(CheckpointIOError, match="more than the 9 bytes asked for"):
        bucket.request("a/1", BoundedRange.whole(9)).result()


def test_a_file_that_is_written_again_has_another_generation(bucket):
    before = bucket.request("ab", NO_BYTES).result().version.tag
    assert before and bucket.request("ab", BoundedRange.whole(1)).result().version.tag == before
    bucket._kvstore.write("ab", b"y").result()
    assert bucket.request("ab", NO_BYTES).result().version.tag != before


def test_a_list_has_what_is_below_a_directory(bucket):
    assert sorted(bucket.names("a/", 60)) == ["a/1", "a/2/3"]
    assert sorted(bucket.names("", 60)) == sorted(FILES)


def test_a_request_is_done_and_may_be_given_up(bucket):
    pending = bucket.request("a/1", BoundedRange.whole(10))
    pending.result()
    assert pending.done()
    pending.cancel()
    bucket.close_idle()

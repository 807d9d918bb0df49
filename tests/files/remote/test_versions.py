"""Files that are exchanged while they are read: every kind of server, before and after."""

import itertools

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError
from orbax_t5x.files.remote.responses import NO_VERSION, Version

FIRST = np.arange(1 << 19, dtype=np.float32)
TAGS = {"strong": '"v1"', "another": '"v2"', "weak": 'W/"v1"', "another weak": 'W/"v2"', "none": None}
DATES = {"a day": "Mon, 23 Nov 2026 00:00:00 GMT", "the next": "Tue, 24 Nov 2026 00:00:00 GMT", "none": None}
BEFORE = [(tag, date) for tag in ("strong", "weak", "none") for date in ("a day", "none")]
# What is sent of the file once it was exchanged; `bytes` are the same, others, or others of another number.
AFTER = list(itertools.product(TAGS, DATES, ("same", "other", "larger")))


def contents(which):
    values = {"a": FIRST, "b": FIRST + (which != "same")}
    return safetensors.numpy.save(values | ({"c": FIRST} if which == "larger" else {}))


CONTENTS = {which: contents(which) for which in ("same", "other", "larger")}


def send(store, tag, date, which):
    store.files["model.safetensors"] = CONTENTS[which]
    store.etag = lambda data: TAGS[tag]
    store.modified = lambda data: DATES[date]


def proves_change(before, after):
    """Whether the marks of two answers, whose names say what they are, cannot be of one file."""
    (tag, date), (later_tag, later_date, which) = before, after
    if which == "larger" or (tag == "strong" and later_tag != "strong"):
        return True
    if tag == "weak" and later_tag in ("another", "another weak", "none"):
        return True
    is_equal = tag == later_tag == "strong"
    return not is_equal and date == "a day" and later_date == "the next"


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE, ids="/".join)
def test_a_file_that_is_exchanged_is_never_mixed(store, before, caplog):
    """Values of one version, or an error; others only after one warning that nothing strong can be compared."""
    for after in AFTER:
        caplog.clear()
        if before[0] == after[0] == "strong" and after[2] != "same":
            continue  # a server that lies
        send(store, before[0], before[1], "same")
        with ot.open_checkpoint(f"{store.url}/model.safetensors") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["a"].get(), FIRST)
            send(store, *after)
            if proves_change(before, after):
                with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened"):
                    checkpoint.leaves["b"].get()
            else:
                np.testing.assert_array_equal(checkpoint.leaves["b"].get(), FIRST + (after[2] != "same"))
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [store.url in one and "sends no strong ETag" in one for one in warnings] == [True] * (
            before[0] != "strong"
        )


def test_a_tag_that_came_once_must_come_again(store):
    send(store, "none", "none", "same")
    with ot.open_checkpoint(f"{store.url}/model.safetensors") as checkpoint:
        store.etag = lambda data: TAGS["strong"]
        checkpoint.leaves["a"].get()
        for tag in ("another", "weak", "none"):
            store.etag = lambda data, tag=tag: TAGS[tag]
            with pytest.raises(CheckpointGoneError):
                checkpoint.leaves["b"].get()


MARKS = st.sampled_from([b"", b"x", b"y"])
VERSIONS = st.builds(Version, MARKS, MARKS, MARKS)


@given(VERSIONS, VERSIONS)
def test_versions_that_follow(one, other):
    """Sameness is its own reason, nothing is compared with nothing, and a change that was noticed is not forgotten."""
    assert one.is_followed_by(one) and NO_VERSION.is_followed_by(one)
    assert one.joined(NO_VERSION) == one == NO_VERSION.joined(one) == one.joined(one)
    if not one.is_followed_by(other):
        assert not one.joined(NO_VERSION).is_followed_by(other)
    else:
        assert one.joined(other).is_followed_by(one.joined(other))

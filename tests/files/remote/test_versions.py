"""Files that are exchanged while they are read: every kind of server, before and after."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError
from orbax_t5x.files.remote.responses import NO_VERSION, Version
from tests.support.server_versions import AFTER, BEFORE, CONTENTS, TAGS, VALUES, is_lie, proves_change, send


def exchange(store, tag, date, which):
    store.files["model.safetensors"] = CONTENTS[which]
    send(store, tag, date)


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE, ids="/".join)
def test_a_file_that_is_exchanged_is_never_mixed(store, before, caplog):
    """Values of one version, or an error; others only after one warning that nothing strong can be compared."""
    for after in AFTER:
        caplog.clear()
        if is_lie(before, after):
            continue
        exchange(store, before[0], before[1], "same")
        with ot.open_checkpoint(f"{store.url}/model.safetensors") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["a"].get(), VALUES)
            exchange(store, *after)
            if proves_change(before, after):
                with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened"):
                    checkpoint.leaves["b"].get()
            else:
                np.testing.assert_array_equal(checkpoint.leaves["b"].get(), VALUES + (after[2] != "same"))
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [store.url in one and "sends no strong ETag" in one for one in warnings] == [True] * (
            before[0] != "strong"
        )


def test_a_tag_that_came_once_must_come_again(store):
    exchange(store, "none", "none", "same")
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

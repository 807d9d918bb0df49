"""Damaged and hostile T5X checkpoints: typed errors with file and leaf; nothing outside is read, nothing written."""

import flax.serialization
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from tests.support.t5x_steps import save, spec


@pytest.mark.parametrize(
    ("top", "kind"),
    [
        ({"version": 4, "optimizer": {}}, UnsupportedCheckpointError),
        ({"version": -1, "optimizer": {}}, CorruptCheckpointError),
        ({"version": 2.0, "optimizer": {}}, CorruptCheckpointError),
        ({"version": 3}, CorruptCheckpointError),
    ],
)
def test_versions(step, top, kind):
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(top))
    with pytest.raises(CheckpointError) as caught:
        ot.open_checkpoint(step, format="t5x")
    assert type(caught.value) is kind and caught.value.path == str(step / "checkpoint")


def test_damaged_checkpoint_files(step):
    save(step, spec())
    data = (step / "checkpoint").read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], data[:30], data + b"\0"):
        (step / "checkpoint").write_bytes(changed)
        with pytest.raises(CorruptCheckpointError) as caught:
            ot.open_checkpoint(step)
        assert caught.value.path == str(step / "checkpoint")
    (step / "checkpoint").unlink()
    (step / "checkpoint").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(step)
    with pytest.raises(UnsafeCheckpointError):
        ot.open_checkpoint(step, format="t5x")

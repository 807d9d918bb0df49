"""The position of a dataset's iterator: one file for each shard, in the item or beside native arrays."""

from __future__ import annotations

from pathlib import Path

import pytest
from etils import epath

from orbax_t5x.errors import CheckpointNotFoundError
from orbax_t5x.integrations.t5x_dataset import DatasetPosition


class Iterator:
    position = 5

    def save(self, file):
        Path(file).write_text(str(self.position))

    def restore(self, file):
        self.position = int(Path(file).read_text())


def test_shards_have_files_of_their_own(tmp_path):
    item = epath.Path(tmp_path / "dataset")
    for shard in (0, 1):
        DatasetPosition(Iterator(), shard, 2, True).save(item)
    assert sorted(path.name for path in item.iterdir()) == ["train_ds-000-of-002", "train_ds-001-of-002"]


def test_only_the_first_process_of_a_shard_writes_and_reads(tmp_path):
    position = DatasetPosition(Iterator(), 0, 1, False)
    position.save(epath.Path(tmp_path / "dataset"))
    position.restore(epath.Path(tmp_path))
    assert not list(tmp_path.iterdir()) and position.iterator.position == 5


@pytest.mark.parametrize("folder", ["dataset", "."], ids=["orbax", "native"])
def test_a_position_is_found_in_both_layouts(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "train_ds-000-of-001").write_text("7")
    iterator = Iterator()
    DatasetPosition(iterator, 0, 1, True).restore(epath.Path(tmp_path))
    assert iterator.position == 7


def test_a_position_that_is_missing_is_an_error_but_in_native_checkpoints(tmp_path, caplog):
    iterator = Iterator()
    with pytest.raises(CheckpointNotFoundError, match="save_dataset = False"):
        DatasetPosition(iterator, 0, 1, True).restore(epath.Path(tmp_path))
    (tmp_path / "checkpoint").write_bytes(b"")
    DatasetPosition(iterator, 0, 1, True).restore(epath.Path(tmp_path))
    assert iterator.position == 5 and "the dataset begins anew" in caplog.text


def test_an_iterator_of_tensorflow_goes_through_its_checkpoint(tmp_path):
    import tensorflow as tf

    def iterator():
        return iter(tf.data.Dataset.range(9))

    first, second = iterator(), iterator()
    for _ in range(4):
        next(first)
    position = DatasetPosition(first, 0, 1, True)
    position.save(epath.Path(tmp_path / "dataset"))
    DatasetPosition(second, 0, 1, True).restore(epath.Path(tmp_path))
    assert int(next(second)) == 4

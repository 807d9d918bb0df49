"""Any single edit of a bundle gives the right values or a typed error."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_damage import VALUE
from tests.support.bundle_mutations import sealed_mutation, values_of
from tests.support.bundle_writer import bundle_of


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = {
        "b": np.arange(7).astype(np.float32),
        "flag": np.array([True, False]),
        "step": np.array(5, np.int64),
        "text": np.array([b"one", b"", b"three"], object),
        "z/empty": np.zeros((0, 3), np.float32),
    }
    bundle = bundle_of(arrays, 2)
    sliced_value = np.arange(20, dtype=np.int16).reshape(5, 4)
    bundle.add_sliced("w", sliced_value, [[Extent(0, 2), Extent(0, -1)], [Extent(2, 3), Extent(0, -1)]])
    return bundle.write(tmp_path_factory.mktemp("small"), block_bytes=120), {**arrays, "w": sliced_value}


@pytest.mark.slow
@given(st.data())
def test_any_single_edit_gives_right_values_or_typed_errors(small_bundle, tmp_path_factory, data) -> None:
    """Any flip, deletion or insertion of a byte, index or shard: right names, dtypes, shapes and bytes, or an error."""
    prefix, arrays = small_bundle
    directory = tmp_path_factory.mktemp("edited")
    for path in prefix.parent.iterdir():
        shutil.copy(path, directory)
    target = directory / data.draw(st.sampled_from(sorted(path.name for path in directory.iterdir())))
    content = target.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    edit = data.draw(st.sampled_from([byte + content[at + 1 :], content[at + 1 :], byte + content[at:]]))
    target.write_bytes(content[:at] + edit)
    right_or_typed(directory / prefix.name, arrays)


def right_or_typed(prefix: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        checkpoint = open_tf_bundle(prefix)
    except CheckpointError:
        return
    with checkpoint:
        assert sorted(checkpoint.leaves) == sorted(arrays)
        for name, value in arrays.items():
            try:
                assert same_bits(read_whole(leaf_of(checkpoint, name)), value), name
            except CheckpointError as error:
                assert error.leaf == name


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(max_examples=settings.default.max_examples // 2)
def test_sealed_mutations_never_escape(tmp_path_factory, random) -> None:
    """Keys, entries and header edited at random, checksums made whole again: values or typed errors, nothing else."""
    bundle, index = sealed_mutation(random)
    values_of(bundle.write(tmp_path_factory.mktemp("sealed"), index=index))


CORPUS = sorted((Path(__file__).parents[2] / "corpus/tf_bundle").glob("*"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_corpus(path: Path, tmp_path: Path) -> None:
    """Indexes that once broke a reader, TensorFlow's or this one; the name says the error of opening or of its leaf."""
    kind = {"corrupt": CorruptCheckpointError, "unsupported": UnsupportedCheckpointError}[path.name.split("-")[0]]
    prefix = bundle_of({"x": VALUE}).write(tmp_path, index=path.read_bytes())
    with pytest.raises(kind), open_tf_bundle(prefix) as checkpoint:
        for name in checkpoint.leaves:
            leaf = leaf_of(checkpoint, name)
            read_boxes(leaf, [tuple((0, 0) for _ in leaf.shape)] if leaf.shape else None)


def test_the_corpus_is_here() -> None:
    assert len(CORPUS) >= 8

"""Q8_0 by boxes, against GGML's reference: a float16 scale times an int8."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.extras.gguf import q8_range
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, random_box, read_boxes
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support.gguf_files import quantized, write_gguf


def reference(array):
    blocks = np.frombuffer(quantized(array), np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
    return (blocks["scale"].astype(np.float32)[:, None] * blocks["values"].astype(np.float32)).reshape(array.shape)


SHAPES = [(32,), (3, 64), (2, 3, 96), (5, 2, 1, 32)]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def written(request, tmp_path_factory):
    array = np.random.default_rng(1).normal(size=request.param).astype(np.float32)
    path = write_gguf(tmp_path_factory.mktemp("q8") / "m.gguf", {"before": array, "w": array}, q8=["w"])
    return path, reference(array)


class TestLeaf(LeafSuite):
    @pytest.fixture
    def expected(self, written):
        return written[1]

    @pytest.fixture
    def leaf(self, written):
        return leaf_of(ot.open_checkpoint(written[0]), "w")


@pytest.mark.parametrize("shape", [(40, 320), (3, 3200), (1, 32 * 400), (7, 11, 64)], ids=str)
def test_slabs_read_no_block_twice(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(q8_range, "_SLAB_BYTES", 2000)
    array = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    expected = reference(array)
    rng = np.random.default_rng(3)
    with ot.open_checkpoint(write_gguf(tmp_path / "m.gguf", {"w": array}, q8=["w"])) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        assert leaf.bytes_of((tuple((0, size) for size in shape),)) == array.size // 32 * 34
        for _ in range(10):
            boxes = [random_box(rng, shape) for _ in range(3)]
            reading = read_boxes(leaf, boxes)
            for box, found in zip(boxes, reading.arrays, strict=True):
                assert_same(found, expected[box_slices(box)])
            assert reading.stats.bytes_read == leaf.bytes_of(tuple(boxes))


def test_an_eighth_reads_an_eighth(tmp_path):
    array = np.random.default_rng(4).normal(size=(64, 512)).astype(np.float32)
    with ot.open_checkpoint(write_gguf(tmp_path / "m.gguf", {"w": array}, q8=["w"])) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        for box in (((8, 16), (0, 512)), ((0, 64), (64, 128))):
            assert read_boxes(leaf, [box]).stats.bytes_read == array.size // 8 // 32 * 34


def test_scales_that_are_no_numbers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"w": np.ones((1, 32), np.float32)}, q8=["w"])
    data = path.read_bytes()
    path.write_bytes(data[:-34] + np.float16(np.inf).tobytes() + bytes(32))
    with ot.open_checkpoint(path) as checkpoint:
        assert np.isnan(checkpoint.leaves["w"].get()).all()

"""Values are compared block by block, in bounded memory, decoding each stored chunk as seldom as possible."""

import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.lazy import LazyThreadPoolArray, as_view, box_slices, chunks
from orbax_t5x.lazy.several import stack
from orbax_t5x.operations.diff.blocks import LeafPair, block_boxes
from tests.support import torch_files
from tests.support.memory_checkpoint import AwaitedLeaf, checkpoint

MIB = 1 << 20


def small_blocks(patch, nbytes):
    patch.setattr(chunks, "LEAST_BLOCK_BYTES", nbytes)
    patch.setattr(chunks, "MOST_BLOCK_BYTES", nbytes)


@st.composite
def chunked(draw):
    """Two arrays of one shape, and the chunks of each: None where any range can be read."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = [
        draw(st.none() | st.tuples(*(st.integers(1, size) for size in shape))) if draw(st.booleans()) else None
        for _ in range(2)
    ]
    base = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    other = base.copy()
    for _ in range(draw(st.integers(0, 3))):
        index = tuple(draw(st.integers(0, size - 1)) for size in shape)
        other[index] += draw(st.sampled_from([1, -2, math.inf, math.nan]))
    return base, other, chunks


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(chunked(), st.sampled_from([8, 64, 400]))
def test_blocks_make_up_the_whole(given, nbytes):
    """Against NumPy on whole arrays; each element is read once, and no chunk is cut without need."""
    a, b, stored = given
    leaves = [AwaitedLeaf("w", array, chunk) for array, chunk in zip((a, b), stored, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, nbytes)
        (found,) = ot.diff(checkpoint({"w": leaves[0]}), checkpoint({"w": leaves[1]}), memory_limit_bytes=1).leaves
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    assert found.differing == np.count_nonzero(~same) and found.size == a.size
    with np.errstate(all="ignore"):
        distances = np.where(same | np.isnan(b), 0, np.abs(a.astype(float) - b))
    assert (0 if found.absolute is None else found.absolute.value) == distances.max()
    if found.absolute is not None:
        assert found.absolute.index == np.unravel_index(distances.argmax(), a.shape)
    for leaf in leaves:
        counts = np.zeros(a.shape, int)
        for box in leaf.boxes:
            counts[box_slices(box)] += 1
        assert (counts == 1).all()
    for leaf, chunk in zip(leaves, stored, strict=True):
        if chunk is not None and all(other in (None, chunk) for other in stored):
            assert all(start % step == 0 for box in leaf.boxes for (start, _), step in zip(box, chunk, strict=True))


def touched(leaf, boxes):
    """How many chunks a sequence of reads decodes."""
    return sum(
        math.prod(-(-stop // chunk) - start // chunk for (start, stop), chunk in zip(box, leaf.chunks, strict=True))
        for box in boxes
    )


def test_stacked_layers_are_cut_between_layers(monkeypatch):
    """Each layer is one chunk; cut across them, every block would decode all layers."""
    small_blocks(monkeypatch, 600)
    layers = [AwaitedLeaf(str(n), np.full((8, 16), n, np.float32), (8, 16)) for n in range(6)]
    both = [stack([as_view(layer) for layer in layers], 1), as_view(np.zeros((8, 6, 16), np.float32))]
    boxes = list(block_boxes(LeafPair("w", *both), 1))
    assert len(boxes) == 6 and {tuple(stop - start for start, stop in box) for box in boxes} == {(8, 1, 16)}


def test_chunks_of_both_sides_are_decoded_once(monkeypatch):
    small_blocks(monkeypatch, 4096)
    a = AwaitedLeaf("w", np.zeros((120, 30), np.float32), (20, 10))
    b = AwaitedLeaf("w", np.zeros((120, 30), np.float32), (30, 30))
    boxes = list(block_boxes(LeafPair("w", as_view(a), as_view(b)), 1))
    assert len(boxes) > 1
    assert touched(b, boxes) == 4 and touched(a, boxes) <= 24  # 18, and a row of them once more at most


def test_a_function_is_called_once_however_small_the_blocks(monkeypatch):
    small_blocks(monkeypatch, 8)
    calls = []

    def read():
        calls.append(1)
        return np.ones((5, 5), np.float32)

    def function(state, target):
        return {"w": LazyThreadPoolArray((5, 5), np.float32, read)}

    one = checkpoint({"w": np.ones((5, 5), np.float32)})
    assert ot.diff(one, one, function, memory_limit_bytes=1).equal and calls == [1]


def write_sparse(path, name, shape, dtype):
    """A safetensors file of zeros that takes no room on disk; the layout is that of its specification."""
    size = math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def test_a_leaf_of_256_mib_under_a_limit_of_16_mib(tmp_path):
    """In a process of its own; dtypes differ, so that every element is converted and compared as a number."""
    write_sparse(tmp_path / "a.safetensors", "w", [64 * 1024, 1024], "F32")
    write_sparse(tmp_path / "b.safetensors", "w", [64 * 1024, 1024], "BF16")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    code = f"""
        import resource, jax, orbax_t5x as ot
        ot.diff, jax.devices()
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak()
        report = ot.diff({a!r}, {b!r}, memory_limit_bytes={16 * MIB})
        print(peak() - before, report.leaves[0].status, report.bytes_read)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    growth, status, read = done.stdout.split()
    assert (status, int(read)) == ("dtype", 384 * MIB)
    # Beside the blocks: threads and their arenas.
    assert int(growth) < 16 * MIB + 32 * MIB, f"{int(growth) / MIB:.0f} MiB"


def test_progress_counts_both_sides():
    one = checkpoint({"a": np.ones(9), "b": np.ones(5, np.int8)})
    calls = []
    ot.diff(one, one, progress=lambda *call: calls.append(call))
    assert sorted(total for _, total, _ in calls) == [154, 154] and max(done for done, _, _ in calls) == 154


def test_an_expanded_array_is_read_once(tmp_path):
    """PyTorch stores an expanded tensor as one element at strides of 0: a tebibyte in a file of 500 bytes."""
    huge, values = (2, 1 << 40), np.array([1.0, np.nan], np.float32)
    for name, first in (("a", values), ("b", values + 1)):
        pickled = torch_files.pickled({"w": torch_files.SavedTensor("0", "float32", 2, 0, huge, (1, 0))})
        (tmp_path / f"{name}.bin").write_bytes(torch_files.archive(pickled, {"0": first.tobytes()}))
    assert ot.diff(tmp_path / "a.bin", tmp_path / "a.bin").equal
    report = ot.diff(tmp_path / "a.bin", tmp_path / "b.bin")
    (leaf,) = report.leaves
    assert (leaf.differing, leaf.size, leaf.absolute.index) == (1 << 40, 1 << 41, (0, 0))
    assert report.bytes_read == 16

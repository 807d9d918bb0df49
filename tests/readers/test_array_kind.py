"""Chunks of arrays are decoded to the values that TensorStore reads, by us and by its decoder in memory."""

import gzip
import json

import cramjam
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy import Request, box_shape, box_size, box_slices
from orbax_t5x.readers.array_kind import ArrayKind, _content_size, count_chunks, requests_by_chunk
from tests.support.array_strategies import boxes

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CODECS = {
    "zarr": [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}, {"id": "blosc"}, {"id": "zlib", "level": 1}],
    "zarr3": [
        [_BYTES],
        [_BYTES, {"name": "gzip", "configuration": {"level": 1}}],
        [_BYTES, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
        [{"name": "bytes", "configuration": {"endian": "big"}}],
        "transpose",
    ],
}
OURS = {"zarr": 3, "zarr3": 2}


@st.composite
def stored(draw):
    """A kind, the array that TensorStore wrote, its chunks by key, and whether we decode it."""
    driver = draw(st.sampled_from(["zarr", "zarr3"]))
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    chunk = [draw(st.integers(1, 9)) for _ in shape]
    number = draw(st.integers(0, 4))
    codec, order = CODECS[driver][number], draw(st.sampled_from(["C", "F"]))
    order = order if sum(side > 1 for side in chunk) > 1 else "C"  # both are the same there, and TensorStore takes C
    if codec == "transpose":
        codec = [{"name": "transpose", "configuration": {"order": [*range(len(shape))][::-1]}}, _BYTES]
    dtype = draw(st.sampled_from(["float32", "int16", "bool"]))
    metadata = {"shape": shape}
    if driver == "zarr":
        metadata |= {"chunks": chunk, "compressor": codec, "order": order, "dtype": np.dtype(dtype).str}
    else:
        metadata |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}}
        metadata |= {"codecs": codec, "data_type": dtype}
        if shape:
            metadata |= {"dimension_names": [f"d{number}" for number in range(len(shape))]}
    spec = {"driver": driver, "kvstore": "memory://", "metadata": metadata}
    array = ts.open(spec, create=True, context=ts.Context()).result()
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, shape).astype(dtype)
    array.write(values).result()
    names = {key.decode(): array.kvstore[key] for key in array.kvstore.list().result()}
    data = names.pop("zarr.json" if driver == "zarr3" else ".zarray")
    kind = ArrayKind(data, zarr3=driver == "zarr3", absent_is_fill=True, context=ts.Context())
    is_ours = number < OURS[driver] and (driver == "zarr3" or order == "C") and dtype != "bool"
    return kind, array.read().result(), names, is_ours


@given(stored())
def test_whole_arrays(written):
    kind, values, chunks, is_ours = written
    assert kind.shape == values.shape and kind.dtype == values.dtype
    assert kind.is_small >= is_ours
    if kind.is_small and set(kind.stored_keys) <= set(chunks):  # zeros are not stored
        for found in kind.arrays([[chunks[key] for key in kind.stored_keys]] * 2):
            np.testing.assert_array_equal(found, values)


def kind_of(compressor):
    metadata = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": compressor}
    metadata |= {"fill_value": None, "filters": None, "order": "C"}
    return ArrayKind(json.dumps(metadata).encode(), zarr3=False, absent_is_fill=False, context=ts.Context())


@pytest.mark.parametrize("codec", [None, "gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 15, 17, 1 << 24])
def test_chunks_of_another_size(codec, size):
    packed = {None: bytes, "gzip": gzip.compress, "zstd": lambda data: bytes(cramjam.zstd.compress(data))}[codec]
    kind = kind_of(codec and {"id": codec, "level": 1})
    good = packed(np.arange(4, dtype=np.float32).tobytes())
    assert kind.arrays([[good]])[0].tolist() == [0, 1, 2, 3]
    for bad in (packed(bytes(size)), good[:-1], b"", good + b"0"):
        with pytest.raises(ValueError):
            kind.arrays([[good], [bad]])


@given(st.binary(max_size=600))
def test_the_size_that_a_frame_declares_is_that_of_its_contents(content):
    declared = _content_size(bytes(cramjam.zstd.compress(content)))
    assert declared in (len(content), None)
    assert _content_size(content[:5]) is None


@given(st.data())
def test_pieces_of_chunks_are_the_elements_of_the_boxes_each_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    chunks = tuple([data.draw(st.integers(1, 5)) for _ in shape])
    wanted = {box: np.zeros(shape, int) for box in data.draw(st.lists(boxes(shape), max_size=3)) if box_size(box)}
    by_chunk = list(
        requests_by_chunk([Request(box, out[(*box_slices(box), ...)]) for box, out in wanted.items()], chunks)
    )
    for pieces in by_chunk:
        for piece, out in pieces:
            assert out.shape == box_shape(piece)
            out += 1
    touched = set()
    for box, seen in wanted.items():
        expected = np.zeros(shape, int)
        expected[box_slices(box)] = 1
        np.testing.assert_array_equal(seen, expected)
        touched |= {tuple(index // np.array(chunks, int)) for index in np.argwhere(expected)}
    assert count_chunks(wanted, chunks) == len(by_chunk) == len(touched)

"""The messages of a bundle's index, parsed as protobuf parses them."""

import importlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_t5x.readers.tf_bundle.proto import BadMessage, Extent, parse_bundle_header, parse_entry
from tests.support.bundle_damage import place
from tests.support.bundle_writer import entry

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@pytest.mark.slow
@given(
    INT32,
    st.lists(INT64, max_size=5) | st.none(),
    INT32,
    INT64,
    INT64,
    st.integers(0, (1 << 32) - 1),
    st.lists(st.lists(st.tuples(INT64, INT64 | st.none()), max_size=3), max_size=3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_entries_parse_as_protobuf_parses_them(tf, dtype, shape, shard, offset, size, crc, slices) -> None:
    pb = importlib.import_module("tensorflow.core.protobuf.tensor_bundle_pb2")
    proto = pb.BundleEntryProto(dtype=dtype, shard_id=shard, offset=offset, size=size, crc32c=crc)
    if shape is None:
        proto.shape.unknown_rank = True
    else:
        for dim in shape:
            proto.shape.dim.add(size=dim)
    for extents in slices:
        one = proto.slices.add()
        for start, length in extents:
            extent = one.extent.add(start=start)
            if length is not None:
                extent.length = length
    parsed = parse_entry(proto.SerializeToString(), 32)
    assert parsed == (
        dtype,
        None if shape is None else tuple(shape),
        shard,
        offset,
        size,
        crc,
        tuple(tuple(Extent(start, -1 if length is None else length) for start, length in one) for one in slices),
    )


@pytest.mark.slow
@given(INT32, st.integers(0, 1), INT32, INT32)
@settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_headers_parse_as_protobuf_parses_them(tf, shards, endianness, producer, min_consumer) -> None:
    pb = importlib.import_module("tensorflow.core.protobuf.tensor_bundle_pb2")
    proto = pb.BundleHeaderProto(num_shards=shards, endianness=endianness)
    proto.version.producer, proto.version.min_consumer = producer, min_consumer
    proto.version.bad_consumers.extend([1, 2])
    assert parse_bundle_header(proto.SerializeToString()) == (shards, endianness, producer, min_consumer)


@pytest.mark.slow
@given(st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_we_accept_protobuf_accepts(tf, data: bytes) -> None:
    """Ours is the stricter one: what it takes, protobuf takes, with the same values."""
    pb = importlib.import_module("tensorflow.core.protobuf.tensor_bundle_pb2")
    try:
        parsed = parse_entry(data, 32)
    except BadMessage:
        return
    proto = pb.BundleEntryProto.FromString(data)
    assert (parsed.dtype, parsed.shard, parsed.offset, parsed.size) == (
        proto.dtype,
        proto.shard_id,
        proto.offset,
        proto.size,
    )


SOUND = entry("float32", [6], **place())


@given(
    st.binary(max_size=60) | st.just(SOUND).flatmap(lambda data: st.integers(0, len(data)).map(lambda cut: data[:cut]))
)
def test_any_bytes_are_an_entry_or_a_bad_message(data: bytes) -> None:
    try:
        parse_entry(data, 32)
    except BadMessage:
        pass

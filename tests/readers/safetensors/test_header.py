"""Headers of safetensors files: what the library accepts is accepted, anything else is one error."""

import json

import hypothesis
import pytest
import safetensors
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.limits import Limits
from tests.support.safetensors_files import container, tensor

GOOD = {"a": tensor(0, 8, [2]), "b": tensor(8, 12, [])}
DATA = bytes(range(12))
CORRUPT = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length 2^64 - 1": b"\xff" * 8 + b"{}",
    "length 1 TiB": (1 << 40).to_bytes(8, "little") + b"{}",
    "length above the format's 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
    "length beyond the file": (3).to_bytes(8, "little") + b"{}",
    "length 0": bytes(8),
    "not a brace": container(b' {"a": 1}'),
    "byte order mark": container(b"\xef\xbb\xbf{}"),
    "a list": container("[]"),
    "a string": container('"{"'),
    "no JSON": container("{"),
    "more JSON behind": container("{}{}"),
    "not UTF-8": container(b'{"\xff": 1}'),
    "100,000 deep": container('{"a":' * 100_000),
    "100,000 brackets": container('{"a":' + "[" * 100_000),
    "NaN": container('{"a": NaN}'),
    "the same name twice": container('{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 8, [2])),) * 2), bytes(8)),
    "the same key twice": container(
        '{"a": {"dtype": "F32", "dtype": "I32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "half a character": container(json.dumps({"\ud800": tensor(0, 4, [])}), bytes(4)),
    "metadata of numbers": container({"__metadata__": {"a": 1}}),
    "metadata is a list": container({"__metadata__": []}),
    "trailing bytes": container(GOOD, DATA + b"x"),
    "data cut": container(GOOD, DATA[:-1]),
    "no data": container(GOOD),
    "overlap": container({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, DATA),
    "the same range twice": container({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, bytes(8)),
    "hole": container({"a": tensor(0, 4, []), "b": tensor(8, 12, [])}, DATA),
    "hole at the start": container({"a": tensor(4, 8, [])}, bytes(8)),
    "end before begin": container({"a": tensor(8, 0, [2])}, bytes(8)),
    "negative offset": container({"a": tensor(-4, 4, [2])}, bytes(8)),
    "float offset": container('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}', bytes(8)),
    "bool offset": container('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [false, true]}}', bytes(1)),
    "three offsets": container({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, bytes(8)),
    "no offsets": container({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "offset 2^64": container({"a": tensor(0, 1 << 64, [2])}, bytes(8)),
    "offset of 10,000 digits": container(
        '{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, %s]}}' % ("9" * 10_000)
    ),
    "negative size": container({"a": tensor(0, 8, [-2])}, bytes(8)),
    "two negative sizes": container({"a": tensor(0, 8, [-2, -1])}, bytes(8)),
    "float size": container({"a": tensor(0, 8, [2.0])}, bytes(8)),
    "bool size": container({"a": tensor(0, 4, [True])}, bytes(4)),
    "shape is a number": container({"a": tensor(0, 8, 2)}, bytes(8)),
    "shape is null": container({"a": tensor(0, 8, None)}, bytes(8)),
    "shape too small": container({"a": tensor(0, 8, [1])}, bytes(8)),
    "shape too large": container({"a": tensor(0, 8, [3])}, bytes(8)),
    "product overflows to the size": container({"a": tensor(0, 0, [1 << 33, 1 << 31, 4])}),
    "sub-byte misaligned": container({"a": tensor(0, 1, [3], "F4")}, bytes(1)),
    "dtype is a number": container({"a": tensor(0, 8, [2], 5)}, bytes(8)),
    "no dtype": container({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "entry is a list": container({"a": []}),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_corrupt_headers(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        ot.open_checkpoint(path)
    assert caught.value.path == str(path)


def test_limits(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container({"a" * 100: tensor(0, 4, [1] * 33), "b": tensor(4, 8, [])}, bytes(8)))
    for limits in (Limits(), Limits(rank=64, name_bytes=99), Limits(rank=64, entries=1)):
        with pytest.raises(LimitExceededError, match="Limits"):
            ot.open_checkpoint(path, limits=limits)
    with ot.open_checkpoint(path, limits=Limits(rank=64)) as checkpoint:
        assert len(checkpoint.leaves) == 2


def accepted_by_library(content: bytes) -> dict[str, bytes] | None:
    try:
        return {name: bytes(said["data"]) for name, said in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


def accepted_by_us(path) -> dict[str, bytes] | None:
    try:
        with ot.open_checkpoint(path, format="safetensors") as checkpoint:
            return {name: lazy.get().tobytes() for name, lazy in checkpoint.leaves.items()}
    except CheckpointError:
        return None


_NUMBER = st.integers(-2, 20) | st.sampled_from([0, 4, 8, 12, 1 << 40, 1 << 63, True, 1.5, None, "4"])


@st.composite
def headers(draw):
    """Headers near the good one: entries with sizes and offsets that fit or do not."""
    header = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["a", "b", "c", "", "__metadata__"]))
        part = draw(st.sampled_from(["shape", "data_offsets", "dtype", "whole"]))
        if part == "whole":
            header[name] = draw(
                st.none() | st.dictionaries(st.sampled_from(["dtype", "x"]), st.text("F32", max_size=3))
            )
        elif isinstance(header.get(name), dict):
            header[name][part] = draw(
                st.sampled_from(["F32", "I8", "F64", "BOOL", "F4", "Q9"])
                if part == "dtype"
                else st.lists(_NUMBER, max_size=3)
            )
    return header


@pytest.mark.slow
@hypothesis.example(header={"__metadata__": None, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": {}, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": {"a": None}, **GOOD}, size=len(DATA))
@hypothesis.example(header={"__metadata__": False, **GOOD}, size=len(DATA))
@hypothesis.given(header=headers(), size=st.integers(0, 24))
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
def test_we_accept_what_the_library_accepts(tmp_path_factory, header, size):
    """Differential: the same files, the same bytes; unreadable dtypes are ours to refuse, leaf by leaf."""
    content = container(header, bytes(range(size)))
    path = tmp_path_factory.getbasetemp() / "differential.safetensors"
    path.write_bytes(content)
    theirs, ours = accepted_by_library(content), accepted_by_us(path)
    if theirs is None:
        assert ours is None
    elif any(isinstance(said, dict) and said.get("dtype") in ("F4", "Q9") for said in header.values()):
        assert ours is None
    else:
        # A bool byte other than 0 and 1 has no value of its own.
        bools = {name for name, said in header.items() if isinstance(said, dict) and said.get("dtype") == "BOOL"}
        assert ours is not None and ours.keys() == theirs.keys()
        assert all(ours[name] == theirs[name] for name in theirs if name not in bools)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
def test_any_change_of_a_byte_is_an_error_or_harmless(tmp_path_factory, data):
    content = bytearray(container({"__metadata__": {"format": "np"}, **GOOD}, DATA))
    position = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "delete", "insert", "cut"]))
    if kind == "flip":
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "delete":
        del content[position]
    elif kind == "insert":
        content.insert(position, data.draw(st.integers(0, 255)))
    else:
        del content[position:]
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    theirs, ours = accepted_by_library(bytes(content)), accepted_by_us(path)
    if theirs is None:
        assert ours is None
    elif ours is not None:
        assert ours == theirs

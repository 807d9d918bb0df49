"""Edits of inputs by their structure: what a checksum or a length covers is changed, then sealed again.

Raw changes of bytes stop at the first checksum. Every function here takes the bytes of an input, a random generator,
and a function that changes raw bytes (libFuzzer's, or `random_bytes`); what cannot be taken apart is changed raw.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickletools
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack

from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.tf_bundle.sstable import Table
from tests.support.bundle_writer import Handles, block_entries, sealed, table, table_of_blocks, varint
from tests.support.zip_files import Entry, archive_of

ChangeBytes = Callable[[bytes], bytes]
Mutation = Callable[[bytes, random.Random, ChangeBytes], bytes]

_NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 127, 128, 300, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63)
_TEXTS = (
    *("", ".", "..", "/", "/etc/passwd", "../w", "w/", "w", "a" * 300, "é", "\0", "file", "gfile", "http://localhost/"),
    *("float32", "<f4", "bfloat16", "int8", "|O", "zarr", "gzip", "blosc", "jax.Array", "None", "Dict"),
)
# Edits of one input: enough that two claims can disagree.
_MAX_EDITS = 3


def random_bytes(generator: random.Random) -> ChangeBytes:
    """A function that changes one to three places of some bytes."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(generator.randint(1, _MAX_EDITS)):
            at = generator.randint(0, len(changed))
            changed[at : at + generator.randint(0, 2)] = generator.randbytes(generator.randint(0, 2))
        return bytes(changed)

    return change


# -- trees: JSON and msgpack


def edited_tree(tree: Any, generator: random.Random, change: ChangeBytes) -> Any:
    """A tree of dicts and lists with some of its nodes replaced, removed or repeated."""
    box = [tree]
    for _ in range(generator.randint(1, _MAX_EDITS)):
        parent, key = _place(box, generator)
        kind = generator.randrange(6)
        if kind == 0 and parent is not box:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, parent[key])
        elif kind == 1 and isinstance(parent, dict):
            parent[generator.choice((*_TEXTS, f"{key}2"))] = parent[key]
        elif kind == 2:
            parent[key] = [parent[key]]
        else:
            parent[key] = _near(parent[key], generator, change)
    return box[0]


def _place(box: list[Any], generator: random.Random) -> tuple[Any, Any]:
    """A random node: its container and its key."""
    parent: Any = box
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and generator.random() < 0.85:
        parent = parent[key]
        key = generator.choice(list(parent)) if isinstance(parent, dict) else generator.randrange(len(parent))
    return parent, key


def _near(value: Any, generator: random.Random, change: ChangeBytes) -> Any:
    """A value in place of another one, mostly of its own type."""
    if type(value) is int and generator.random() < 0.8:
        return generator.choice((value + 1, value - 1, -value, 2 * value, generator.choice(_NUMBERS)))
    if isinstance(value, str) and generator.random() < 0.8:
        return generator.choice((generator.choice(_TEXTS), f"{value}/..", value[:-1], value + value))
    if isinstance(value, bytes) and generator.random() < 0.8:
        return change(value)
    if isinstance(value, msgpack.ExtType) and generator.random() < 0.8:
        data = edited_msgpack(value.data, generator, change) if generator.random() < 0.7 else change(value.data)
        return msgpack.ExtType(generator.choice((value.code, value.code, 1, 2, 3, 4)), data)
    return generator.choice((None, True, False, 1.5, [], {}, generator.choice(_NUMBERS), generator.choice(_TEXTS)))


def edited_msgpack(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A msgpack message with a part edited, arrays in its extensions included."""
    try:
        tree = msgpack.unpackb(data, strict_map_key=False)
        return msgpack.packb(edited_tree(tree, generator, change))
    except Exception:  # anything at all may stand there
        return change(data)


def edited_json(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A JSON text with a part edited."""
    try:
        return json.dumps(edited_tree(json.loads(data), generator, change)).encode()
    except (ValueError, RecursionError):
        return change(data)


def edited_gguf(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A GGUF file with a number of its header replaced, or with bytes changed."""
    if generator.random() < 0.3:
        return change(data)
    edited = bytearray(data)
    for _ in range(generator.randint(1, _MAX_EDITS)):
        form = generator.choice(("<I", "<Q"))
        number = generator.choice((0, 1, 2, 8, 9, 30, 32, 33, 255, 1 << 20, 1 << 31, 1 << 60, (1 << 64) - 32))
        at = generator.randrange(4, max(5, len(edited) - 8))
        edited[at : at + struct.calcsize(form)] = struct.pack(form, number % (1 << (8 * struct.calcsize(form))))
    return bytes(edited)


def edited_safetensors(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A safetensors file with its header edited, and the length of the header right again."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) or generator.random() < 0.1:
        return change(data)
    header, rest = data[8 : 8 + size], data[8 + size :]
    if generator.random() < 0.3:
        header = change(header)
    else:
        header = edited_json(header, generator, change)
    return struct.pack("<Q", len(header)) + header + rest


# -- ZIP archives, and the pickle of PyTorch in one


def edited_zip(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """An archive with a member, a field of a header or some bytes changed, and the checksums right again."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [Entry(info.orig_filename.encode(), archive.read(info)) for info in archive.infolist()]
    except Exception:  # anything at all may stand there
        return change(data)
    kind = generator.randrange(4)
    if kind == 0 or not entries:
        return change(data)
    if kind == 1:
        entry = generator.choice(entries)
        field = generator.choice(("flags", "method", "size", "stored", "crc", "header", "local_method", "local_crc"))
        wide = 0xFFFF if field in ("flags", "method", "local_method") else 0xFFFFFFFF
        setattr(entry, field, generator.choice(_NUMBERS) & wide)
    else:
        pickles = [entry for entry in entries if entry.name.endswith(b".pkl")]
        entry = pickles[0] if pickles else generator.choice(entries)
        entry.data = edited_pickle(entry.data, generator, change) if pickles else change(entry.data)
    return archive_of(entries, zip64={} if generator.random() < 0.5 else None)


def edited_pickle(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A pickle with opcodes moved, repeated or removed, or with a number in it replaced."""
    try:
        starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    except Exception:  # the same
        return change(data)
    parts = [data[low:high] for low, high in itertools.pairwise(starts)]
    if generator.random() < 0.2:
        return b"".join([*parts[:-1], _shared_objects(sum(part[:1] == b"q" for part in parts), generator), b"."])
    for _ in range(generator.randint(1, _MAX_EDITS)):
        if not parts:
            break
        at = generator.randrange(len(parts))
        kind = generator.randrange(5)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts.insert(at, generator.choice(parts))
        elif kind == 2:
            parts[at] = change(parts[at])
        elif kind == 3:
            parts[at] = b"\x8a\x08" + (generator.choice(_NUMBERS) % 2**64).to_bytes(8, "little")
        else:
            text = generator.choice(_TEXTS).encode()
            parts[at] = b"X" + struct.pack("<I", len(text)) + text
    return b"".join(parts)


def _shared_objects(remembered: int, generator: random.Random) -> bytes:
    """Opcodes that replace the value on top by lists, tuples and dicts that each hold the one before many times."""
    made = b"r" + struct.pack("<I", remembered)
    for level in range(remembered, remembered + generator.randint(1, 6)):
        one, times = b"j" + struct.pack("<I", level), generator.choice((1, 2, 31, 200))
        keys = (b"X" + struct.pack("<I", 4) + f"k{number:03}".encode() for number in range(times))
        held = {
            "list": b"](" + one * times + b"e",
            "tuple": b"(" + one * times + b"t",
            "dict": b"}(" + b"".join(key + one for key in keys) + b"u",
            "call": b"c" + b"collections\nOrderedDict\n" + one + b"\x85R",
        }
        made += generator.choice(list(held.values())) + b"r" + struct.pack("<I", level + 1)
    # One value ends a pickle.
    return made + generator.choice((b"", b"\x86", b"0"))


# -- TensorFlow bundles


def edited_message(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """A protocol buffer message with a number replaced, or bytes changed, inserted or removed."""
    if not data or generator.random() < 0.4:
        return change(data)
    at = generator.randrange(len(data))
    return data[:at] + varint(generator.choice(_NUMBERS)) + data[at + generator.randint(0, 2) :]


def entries_of(data: bytes) -> list[tuple[bytes, bytes]] | None:
    """The entries of a sound table."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "table").write_bytes(data)
        with contextlib.closing(LocalFiles(directory)) as files:
            try:
                return list(Table(files.file("table")).entries())
            except CheckpointError:
                return None


def edited_table(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """An SSTable with entries, blocks, handles or the footer edited; every checksum holds."""
    entries = entries_of(data)
    if not entries or generator.random() < 0.1:
        return change(data)
    kind = generator.randrange(10)
    if kind < 6:
        for _ in range(generator.randint(1, _MAX_EDITS)):
            at = generator.randrange(len(entries))
            key, value = entries[at]
            if generator.random() < 0.2:
                key = change(key)
            else:
                value = edited_message(value, generator, change)
            entries[at] = (key, value)
        if generator.random() < 0.9:
            entries = sorted(dict(entries).items())
    elif kind == 6:
        at = generator.randrange(len(entries))
        entries[at:at] = [entries[generator.randrange(len(entries))]]
    elif kind == 7:
        return _edited_block(entries, generator, change)
    elif kind == 8:
        return _edited_handles(entries, generator)
    else:
        footer = data[-48:-8]
        return data[:-48] + change(footer)[:40].ljust(40, b"\0") + data[-8:]
    return table(
        entries,
        block_bytes=generator.choice((64, 200, 4096)),
        restart_interval=generator.randint(1, 16),
        snappy=generator.random() < 0.3,
    )


def _edited_block(entries: list[tuple[bytes, bytes]], generator: random.Random, change: ChangeBytes) -> bytes:
    """A table of one block whose entries, restart points or compressed bytes are changed, sealed."""
    data, restarts = block_entries(entries, generator.randint(1, 4))
    ends = struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    if generator.random() < 0.5:
        data = change(data)
    else:
        ends = change(ends)
    if generator.random() < 0.5:
        return table_of_blocks([(entries[-1][0], sealed(data + ends))])
    return table_of_blocks([(entries[-1][0], sealed(change(data + ends), 1, compress=generator.random() < 0.5))])


def _edited_handles(entries: list[tuple[bytes, bytes]], generator: random.Random) -> bytes:
    """A table of several blocks whose index block says something else about one of them."""
    blocks = []
    for start in range(0, len(entries), 2):
        group, starts = block_entries(entries[start : start + 2])
        data = group + struct.pack(f"<{len(starts) + 1}I", *starts, len(starts))
        blocks.append((entries[min(start + 1, len(entries) - 1)][0], sealed(data)))

    def edit(handles: Handles) -> Handles:
        at = generator.randrange(len(handles))
        key, offset, size = handles[at]
        change = generator.choice((*_NUMBERS[2:], -5, 5))
        handles[at] = generator.choice(((key, abs(offset + change), size), (key, offset, abs(size + change))))
        if generator.random() < 0.2:
            handles.insert(at, handles[at])
        return handles

    return table_of_blocks(blocks, edit=edit)


# -- OCDBT


def resealed_ocdbt(data: bytes, generator: random.Random, change: ChangeBytes) -> bytes:
    """An OCDBT manifest with bytes changed between its magic number and its checksum, length and checksum right."""
    if len(data) < 20 or generator.random() < 0.1:
        return change(data)
    body = change(data[12:-4])
    whole = data[:4] + struct.pack("<Q", len(body) + 16) + body
    return whole + struct.pack("<I", google_crc32c.value(whole))

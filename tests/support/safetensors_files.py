"""Safetensors files with any header, right or wrong."""

import json


def container(header: dict | str | bytes, data: bytes = b"") -> bytes:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

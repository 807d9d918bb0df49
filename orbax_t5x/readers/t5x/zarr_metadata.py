"""`.zarray` of a zarr v2 array, by a strict schema.

Shape, dtype, chunks and codec of a T5X leaf. The bounds that its fields must keep are proven here; `spec` then is what
TensorStore gets, written anew from the fields, so that TensorStore reads no metadata of its own and nothing unknown
reaches it. Pure: bytes in, a record or an error out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.strict_json import parse_object

METADATA_FILE = ".zarray"
_REQUIRED = ("chunks", "compressor", "dtype", "fill_value", "filters", "order", "shape", "zarr_format")
_OPTIONAL = ("dimension_separator",)
# Codecs that T5X used, and the parameters that decide nothing for reading.
_CODECS = {"gzip": {"level"}, "zstd": {"level", "checksum"}}
# Far beyond the levels of any codec, and below what TensorStore counts.
_MOST_LEVEL = 1 << 31
_BFLOAT16 = "bfloat16"

_DTYPES: dict[str, np.dtype] = {
    "|b1": np.dtype(np.bool_),
    "|i1": np.dtype(np.int8),
    "|u1": np.dtype(np.uint8),
    **{f"<{kind}{width}": np.dtype(f"<{kind}{width}") for kind in "iu" for width in (2, 4, 8)},
    **{f"<f{width}": np.dtype(f"<f{width}") for width in (2, 4, 8)},
    **{f"<c{width}": np.dtype(f"<c{width}") for width in (8, 16)},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in (_BFLOAT16, "int4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2")
    },
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
}


@dataclasses.dataclass(frozen=True)
class ZarrMetadata:
    """Contents of `.zarray`; `separator` is between the numbers of a chunk's name."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    stored_dtype: str
    compressor: dict[str, Any] | None
    fill_value: Any
    order: str
    separator: str

    def spec(self, *, as_bfloat16: bool) -> dict[str, Any]:
        """Returns the metadata as TensorStore takes it."""
        fill = self.fill_value
        if as_bfloat16 and fill is not None:
            fill = float(np.array(fill, np.uint16).view(ml_dtypes.bfloat16))
        # Where both orders are the same, TensorStore takes only C.
        either = sum(size > 1 for size in self.chunks) < 2
        return {
            "zarr_format": 2,
            "shape": list(self.shape),
            "chunks": list(self.chunks),
            "dtype": _BFLOAT16 if as_bfloat16 else self.stored_dtype,
            "compressor": self.compressor,
            "fill_value": fill,
            "order": "C" if either else self.order,
            "filters": None,
            "dimension_separator": self.separator,
        }


def parse_zarr_metadata(data: bytes, path: str, leaf: str, limits: Limits) -> ZarrMetadata:
    """Parses `.zarray`; errors name the file and the leaf."""
    document = parse_object(data, path)

    def corrupt(message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=path, leaf=leaf)

    def unsupported(field: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(f"{field} {str(document.get(field))[:200]} is not read", path=path, leaf=leaf)

    if missing := [field for field in _REQUIRED if field not in document]:
        raise corrupt(f"{missing[0]!r} is missing")
    if unknown := sorted(document.keys() - {*_REQUIRED, *_OPTIONAL}):
        raise UnsupportedCheckpointError(f"the field {unknown[0][:200]!r} is not known", path=path, leaf=leaf)
    shape, chunks = (_sizes(document[field], field, corrupt) for field in ("shape", "chunks"))
    if len(shape) != len(chunks) or 0 in chunks:
        raise corrupt(f"chunks {list(chunks)} for the shape {list(shape)}")
    if len(shape) > limits.rank:
        raise LimitExceededError(
            f"{len(shape)} dimensions, more than Limits.rank = {limits.rank}", path=path, leaf=leaf
        )
    if document["zarr_format"] != 2 or type(document["zarr_format"]) is not int:
        raise unsupported("zarr_format")
    if not isinstance(document["dtype"], str) or document["dtype"] not in _DTYPES:
        raise unsupported("dtype")
    dtype = _DTYPES[document["dtype"]]
    for sizes, what in ((shape, "the array"), (chunks, "one chunk")):
        if math.prod(size or 1 for size in sizes) * dtype.itemsize >= 1 << 63:
            raise corrupt(f"{what} of shape {list(sizes)} has more bytes than can be counted")
    if document["filters"] is not None:
        raise unsupported("filters")
    if document["order"] not in ("C", "F"):
        raise corrupt(f"order {document['order']!r}")
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise corrupt(f"dimension_separator {str(separator)[:200]!r}")
    return ZarrMetadata(
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        stored_dtype=document["dtype"],
        compressor=_compressor(document["compressor"], unsupported),
        fill_value=_fill_value(document["fill_value"], dtype, unsupported),
        order=document["order"],
        separator=separator,
    )


def _sizes(recorded: Any, field: str, corrupt) -> tuple[int, ...]:
    if type(recorded) is not list or not all(type(size) is int and 0 <= size < 1 << 63 for size in recorded):
        raise corrupt(f"{field} is {str(recorded)[:200]}")
    return tuple(recorded)


def _compressor(recorded: Any, unsupported) -> dict[str, Any] | None:
    if recorded is None:
        return None
    codec = recorded.get("id") if isinstance(recorded, dict) else None
    if not isinstance(codec, str) or codec not in _CODECS:
        raise unsupported("compressor")
    if recorded.keys() - {"id"} - _CODECS[codec]:
        raise unsupported("compressor")
    level = recorded.get("level", 0)
    if type(level) is not int or abs(level) >= _MOST_LEVEL or type(recorded.get("checksum", False)) not in (bool, int):
        raise unsupported("compressor")
    return {"id": codec} | ({"level": recorded["level"]} if "level" in recorded else {})


def _fill_value(recorded: Any, dtype: np.dtype, unsupported) -> Any:
    """Parses a fill value: a number that the dtype holds.

    NaN and infinities are texts in zarr.
    """
    if recorded is None or (dtype.kind == "f" and recorded in ("NaN", "Infinity", "-Infinity")):
        return recorded
    if dtype.kind == "b":
        if type(recorded) is bool or (type(recorded) is int and recorded in (0, 1)):
            return bool(recorded)
    elif dtype.kind in "iu" or dtype.name == "int4":
        bounds = ml_dtypes.iinfo(dtype)
        if type(recorded) in (int, float) and bounds.min <= recorded <= bounds.max and recorded == int(recorded):
            return int(recorded)
    elif type(recorded) in (int, float) and _is_finite(recorded, dtype):
        return float(recorded)
    raise unsupported("fill_value")


def _is_finite(number: float, dtype: np.dtype) -> bool:
    """Tests if a number is finite, also in a dtype."""
    try:
        with np.errstate(over="ignore"):
            return math.isfinite(number) and bool(np.isfinite(np.array(float(number)).astype(dtype)))
    except OverflowError:
        return False

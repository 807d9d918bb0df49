"""T5X's records of arrays, by strict schemas: specs and `.zarray`.

Of a TensorStore spec in a `checkpoint` file only a directory, a shape and a dtype are taken. A spec sets where and how
TensorStore shall read, and the file that holds it is input from outside. None is ever handed to TensorStore: the
directory must be a relative path inside the checkpoint, shape and dtype are compared with the array's own `.zarray`,
and the rest is ignored. T5X wrote specs of three ages: the kvstore's
driver is `file`, `gfile` or `gcs` (with any bucket: the arrays are beside the file wherever that is now), the path is
in the kvstore or beside it, and old ones repeat the whole zarr metadata and an identity transform. The metadata that
TensorStore gets are written anew from the fields of `.zarray`, whose bounds are proven here. Pure: maps and bytes in, a
record or an error out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.readers.flax_msgpack.walk import Node, StoredText

_DRIVERS = frozenset({"file", "gfile", "gcs"})


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Directory, shape and dtype in an array's spec.

    The directory is relative to the checkpoint's. The shape is None where the spec does not record it; the dtype has
    TensorStore's name, zarr's, both, or none.
    """

    directory: str
    shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]


def is_spec(node: Mapping[str, Node]) -> bool:
    """Tests if a map is a spec, even damaged or foreign."""
    return isinstance(node.get("driver"), StoredText)


def parse_spec(node: Mapping[str, Node]) -> ArraySpec:
    """Parses a spec; its other fields say how TensorStore shall work, and are ignored."""
    spec = {key: _plain(value) for key, value in node.items()}
    kvstore, metadata = spec.get("kvstore"), spec.get("metadata")
    if kvstore is not None:
        _require_kvstore(kvstore)
    if spec["driver"] != "zarr":
        raise UnsupportedCheckpointError(f"its spec has the driver {_shown(spec['driver'])}; T5X writes 'zarr'")
    path = _path(kvstore, spec.get("path"))
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("its spec has no metadata")
    shape = _shape(metadata["shape"]) if "shape" in metadata else None
    if "transform" in spec:
        _require_identity(spec["transform"], shape)
    dtypes = tuple(_text(fields["dtype"], "dtype") for fields in (spec, metadata) if "dtype" in fields)
    return ArraySpec("/".join(split_name(path)), shape, dtypes)


def _plain(node: Node) -> Any:
    """Converts a node of a spec to plain JSON types."""
    if isinstance(node, StoredText):
        if node.short is None:
            raise CorruptCheckpointError(f"its spec holds a text of {node.size} bytes")
        return node.short.decode(errors="replace")
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if node is None or isinstance(node, (bool, int, float)):
        return node
    raise CorruptCheckpointError("its spec holds an array")


def _require_kvstore(kvstore: Any) -> None:
    """Refuses a kvstore that T5X does not write."""
    if isinstance(kvstore, str):
        raise UnsafeCheckpointError(f"its spec names the URL {_shown(kvstore)}")
    if not isinstance(kvstore, dict):
        raise CorruptCheckpointError("its spec has no kvstore")
    driver = kvstore.get("driver")
    if not isinstance(driver, str) or driver not in _DRIVERS:
        raise UnsafeCheckpointError(
            f"its spec names the kvstore {_shown(driver)}; only 'file', 'gfile' and 'gcs' name files beside the "
            "checkpoint"
        )


def _path(kvstore: Any, beside: Any) -> str:
    """Returns the path of a spec."""
    if kvstore is None:
        raise CorruptCheckpointError("its spec has no kvstore")
    paths = [_text(path, "path") for path in (kvstore.get("path"), beside) if path is not None]
    if len(paths) != 1:
        raise CorruptCheckpointError(f"its spec has {len(paths)} paths, where T5X writes one")
    return paths[0]


def _shape(said: Any) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(size) is int and size >= 0 for size in said):
        raise CorruptCheckpointError(f"its spec has the shape {_shown(said)}")
    return tuple(said)


def _text(said: Any, what: str) -> str:
    if not isinstance(said, str):
        raise CorruptCheckpointError(f"its spec has the {what} {_shown(said)}")
    return said


def _require_identity(transform: Any, shape: tuple[int, ...] | None) -> None:
    """Refuses a transform that is not the identity."""
    fields = transform if isinstance(transform, dict) else {"output": transform}
    outputs, starts = fields.get("output", []), fields.get("input_inclusive_min", [])
    stops = fields.get("input_exclusive_max", fields.get("input_shape", list(shape or ())))
    is_identity = (
        isinstance(outputs, list)
        and outputs == [{"input_dimension": axis} for axis in range(len(outputs))]
        and isinstance(starts, list)
        and all(start in (0, [0]) for start in starts)
        and stops in (list(shape or ()), [[size] for size in shape or ()])
    )
    if not is_identity:
        raise UnsupportedCheckpointError(f"its spec has the transform {_shown(transform)}, which is not the identity")


def _shown(said: Any) -> str:
    return repr(said)[:200]


METADATA_FILE = ".zarray"
_REQUIRED = ("chunks", "compressor", "dtype", "fill_value", "filters", "order", "shape", "zarr_format")
_OPTIONAL = ("dimension_separator",)
# Codecs that T5X used, and the parameters that decide nothing for reading.
_CODECS = {"gzip": {"level"}, "zstd": {"level", "checksum"}}
# Far beyond the levels of any codec, and below what TensorStore counts.
_MOST_LEVEL = 1 << 31
_BFLOAT16 = "bfloat16"

ZARR_DTYPES: dict[str, np.dtype] = {
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


def parse_zarr_metadata(data: bytes, path: str, limits: Limits) -> dict[str, Any]:
    """Parses `.zarray` into the metadata that TensorStore gets."""
    document = parse_object(data, path)

    def unsupported(field: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(f"{field} {str(document.get(field))[:200]} is not read")

    if missing := [field for field in _REQUIRED if field not in document]:
        raise CorruptCheckpointError(f"{missing[0]!r} is missing")
    if unknown := sorted(document.keys() - {*_REQUIRED, *_OPTIONAL}):
        raise UnsupportedCheckpointError(f"the field {unknown[0][:200]!r} is not known")
    shape, chunks = (_sizes(document[field], field) for field in ("shape", "chunks"))
    if len(shape) != len(chunks) or 0 in chunks:
        raise CorruptCheckpointError(f"chunks {chunks} for the shape {shape}")
    limits.require_rank(len(shape))
    if document["zarr_format"] != 2 or type(document["zarr_format"]) is not int:
        raise unsupported("zarr_format")
    if not isinstance(document["dtype"], str) or document["dtype"] not in ZARR_DTYPES:
        raise unsupported("dtype")
    dtype = ZARR_DTYPES[document["dtype"]]
    for sizes, what in ((shape, "the array"), (chunks, "one chunk")):
        if math.prod(size or 1 for size in sizes) * dtype.itemsize >= 1 << 63:
            raise CorruptCheckpointError(f"{what} of shape {sizes} has more bytes than can be counted")
    if document["filters"] is not None:
        raise unsupported("filters")
    if document["order"] not in ("C", "F"):
        raise CorruptCheckpointError(f"order {document['order']!r}")
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptCheckpointError(f"dimension_separator {str(separator)[:200]!r}")
    # Where both orders are the same, TensorStore takes only C.
    is_either_order = sum(size > 1 for size in chunks) < 2
    return {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": document["dtype"],
        "compressor": _compressor(document["compressor"], unsupported),
        "fill_value": _fill_value(document["fill_value"], dtype, unsupported),
        "order": "C" if is_either_order else document["order"],
        "filters": None,
        "dimension_separator": separator,
    }


def as_bfloat16(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata of uint16 as those of bfloat16 with the same bits."""
    fill = metadata["fill_value"]
    if fill is not None:
        fill = float(np.array(fill, np.uint16).view(ml_dtypes.bfloat16))
    return {**metadata, "dtype": _BFLOAT16, "fill_value": fill}


def _sizes(recorded: Any, field: str) -> list[int]:
    if type(recorded) is not list or not all(type(size) is int and 0 <= size < 1 << 63 for size in recorded):
        raise CorruptCheckpointError(f"{field} is {str(recorded)[:200]}")
    return recorded


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

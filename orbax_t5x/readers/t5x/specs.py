"""The TensorStore specs in a T5X `checkpoint` file.

The schema is strict: only a directory, a shape and a dtype are taken. A spec sets where and how TensorStore shall read,
and the file that holds it is input from outside. None is ever handed to TensorStore: the directory must be a relative
path inside the checkpoint, shape and dtype are compared with the array's own `.zarray`, and the rest is either known
and without meaning for reading, or an error. T5X wrote specs of three ages: the kvstore's driver is `file`, `gfile` or
`gcs` (with any bucket: the arrays are beside the file wherever that is now), the path is in the kvstore or beside it,
and old ones repeat the whole zarr metadata and an identity transform. Pure: a map in, a record or an error out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.paths import split_name
from orbax_t5x.readers.flax_msgpack.walk import Node, StoredText

_DRIVERS = frozenset({"file", "gfile", "gcs"})
# Settings of how TensorStore shall work; ours are our own.
_IGNORED = frozenset(
    {
        *("open", "create", "delete_existing", "assume_metadata", "assume_cached_metadata", "recheck_cached"),
        *("recheck_cached_data", "recheck_cached_metadata", "store_data_equal_to_fill_value", "context", "rank"),
        *("fill_missing_data_reads", "cache_pool", "metadata_cache_pool", "data_copy_concurrency"),
    }
)
_KNOWN = frozenset({"driver", "dtype", "kvstore", "metadata", "path", "transform"}) | _IGNORED
_KVSTORE_IGNORED = frozenset(
    {
        *("bucket", "context", "cache_pool", "file_io_concurrency", "file_io_sync", "file_io_locking"),
        *("gcs_request_concurrency", "gcs_request_retries", "gcs_user_project", "data_copy_concurrency"),
    }
)
# Fields that send a request, or credentials, somewhere.
_REACHING_OUT = frozenset({"endpoint", "base_url", "headers", "aws_credentials", "aws_region", "host_header", "url"})
_METADATA_KEYS = frozenset(
    {
        *("shape", "chunks", "dtype", "compressor", "fill_value", "filters", "order", "zarr_format"),
        "dimension_separator",
    }
)


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
    """Parses a spec."""
    spec = {key: _plain(value) for key, value in node.items()}
    _refuse_reaching_out(spec)
    if "kvstore" in spec:
        _require_kvstore(spec["kvstore"])
    if spec["driver"] != "zarr":
        raise UnsupportedCheckpointError(f"its spec has the driver {_shown(spec['driver'])}; T5X writes 'zarr'")
    if unknown := sorted(spec.keys() - _KNOWN):
        raise UnsupportedCheckpointError(f"its spec has the field {_shown(unknown[0])}, which T5X never wrote")
    path = _path(spec.get("kvstore"), spec.get("path"))
    metadata = spec.get("metadata")
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("its spec has no metadata")
    if unknown := sorted(metadata.keys() - _METADATA_KEYS):
        raise UnsupportedCheckpointError(f"its spec's metadata has the field {_shown(unknown[0])}")
    shape = _shape(metadata["shape"]) if "shape" in metadata else None
    if "transform" in spec:
        _require_identity(spec["transform"], shape)
    dtypes = tuple(_text(said["dtype"], "dtype") for said in (spec, metadata) if "dtype" in said)
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


def _refuse_reaching_out(spec: Mapping[str, Any]) -> None:
    kvstore = spec.get("kvstore")
    for said in (spec, kvstore if isinstance(kvstore, dict) else {}):
        if found := sorted(said.keys() & _REACHING_OUT):
            raise UnsafeCheckpointError(f"its spec has the field {found[0]!r}, which leads to another machine")


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
    if unknown := sorted(kvstore.keys() - _KVSTORE_IGNORED - {"driver", "path"}):
        raise UnsupportedCheckpointError(f"its spec's kvstore has the field {_shown(unknown[0])}")


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
    said = dict(transform) if isinstance(transform, dict) else {"": transform}
    rank = len(shape) if shape is not None else -1
    stops = said.pop("input_exclusive_max", said.pop("input_shape", list(shape or ())))
    starts = said.pop("input_inclusive_min", [0] * rank)
    said.pop("input_rank", None)
    labels = said.pop("input_labels", [""] * rank)
    outputs = said.pop("output", [{"input_dimension": number} for number in range(rank)])
    identity = (
        shape is not None
        and isinstance(stops, list)
        and [stop[0] if isinstance(stop, list) and len(stop) == 1 else stop for stop in stops] == list(shape)
        and isinstance(starts, list)
        and [start[0] if isinstance(start, list) and len(start) == 1 else start for start in starts] == [0] * rank
        and labels == [""] * rank
        and outputs == [{"input_dimension": number} for number in range(rank)]
    )
    if said or not identity:
        raise UnsupportedCheckpointError(f"its spec has the transform {_shown(transform)}, which is not the identity")


def _shown(said: Any) -> str:
    return repr(said)[:200]

"""Recognises TensorFlow bundles by names, so that a bundle whose index is damaged is still one."""

from __future__ import annotations

import os
import re

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_bundle_state, is_file, is_sstable

_STATE_FILE = "checkpoint"
# T5X keeps the iterator of each host's training data in a step.
_ITERATOR = re.compile(r"train_ds-[0-9]+-of-[0-9]+\.index", re.ASCII)
_SHARD_NAME = re.compile(r"(?P<prefix>.+)\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)


def prefix_of_shard(name: str) -> str | None:
    """Returns the prefix of the bundle that a shard with this name or path belongs to; None for other files."""
    match = _SHARD_NAME.fullmatch(name)
    return match["prefix"] if match else None


def is_tf_bundle(probe: PathProbe) -> bool:
    """Reports whether a path is a bundle's prefix or file, or a directory whose text file names a bundle."""
    if probe.kind == "directory":
        return _STATE_FILE in probe.names and is_bundle_state(probe.inside(_STATE_FILE))
    if probe.kind == "file" and (probe.path.endswith(".index") or is_bundle_state(probe)):
        return True
    directory, prefix = os.path.split(prefix_of_shard(probe.path) or probe.path)
    return is_file(directory, f"{prefix}.index")


def has_bundle(probe: PathProbe) -> bool:
    """Reports whether a directory holds the files of a bundle, other than a dataset's iterator."""
    shards = {prefix_of_shard(name) for name in probe.names}
    return any(
        name.removesuffix(".index") in shards or is_sstable(probe.inside(name))
        for name in probe.with_suffix(".index")
        if not _ITERATOR.fullmatch(name)
    )


_open = on_demand.function("orbax_t5x.readers.tf_bundle.open", "open_tf_bundle")
FORMAT = Format(
    "tf_bundle", "a TensorFlow bundle (prefix.index, prefix.data-…)", is_tf_bundle, _open, recognise_unmarked=has_bundle
)

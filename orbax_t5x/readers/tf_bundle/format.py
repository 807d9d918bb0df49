"""Recognises TensorFlow bundles by names, so that a bundle whose index is damaged is still one."""

from __future__ import annotations

import os
import re

from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_bundle_state, is_file, is_sstable
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle

_STATE_FILE = "checkpoint"
_SHARD_NAME = re.compile(r"(?P<prefix>.+)\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)


def prefix_of_shard(name: str) -> str | None:
    """Returns the prefix of the bundle that a shard with this name or path belongs to; None for other files."""
    match = _SHARD_NAME.fullmatch(name)
    return match["prefix"] if match else None


def is_tf_bundle(probe: PathProbe) -> bool:
    """Reports whether a path is a bundle's prefix or one of its files, or a directory with a bundle."""
    if probe.kind == "directory":
        return _is_bundle_directory(probe)
    if probe.kind == "file" and (probe.path.endswith(".index") or is_bundle_state(probe)):
        return True
    directory, prefix = os.path.split(prefix_of_shard(probe.path) or probe.path)
    return is_file(directory, f"{prefix}.index")


def _is_bundle_directory(probe: PathProbe) -> bool:
    if _STATE_FILE in probe.names and is_bundle_state(probe.inside(_STATE_FILE)):
        return True
    prefixes = {prefix for name in probe.names if (prefix := prefix_of_shard(name)) is not None}
    return any(f"{prefix}.index" in probe.names for prefix in prefixes) or any(
        is_sstable(probe.inside(name)) for name in probe.with_suffix(".index")
    )


FORMAT = Format("tf_bundle", "a TensorFlow bundle (prefix.index, prefix.data-…)", is_tf_bundle, open_tf_bundle)

"""Formats that are no checkpoints of ours, such as pickles and HDF5: their names, and the way to convert them.

Recognised by their first bytes or by the names in a directory; never parsed, and nothing is ever unpickled.
"""

from __future__ import annotations

import re

from orbax_t5x.readers.detect.probe import PathProbe, is_sstable

_CONVERT = "load it with its own library and save the arrays as safetensors"
# First bytes, and what they mean.
_MAGICS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer: run `git lfs pull` where it was cloned"),
    (re.compile(rb"PK\x03\x04"), f"a zip archive (a PyTorch file or an .npz), which may hold pickles: {_CONVERT}"),
    (re.compile(rb"\x80[\x02-\x05]"), f"a pickle, which would run code to be read: {_CONVERT}"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), f"an HDF5 file (Keras): {_CONVERT}"),
    (re.compile(rb"\x93NUMPY"), "a single NumPy array: use numpy.load"),
    (re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ"), "a compressed file: decompress it first"),
)
# Names in a directory, and what they mean.
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"pytorch_model.*\.(bin|pt|pth)"), f"PyTorch weights, which are pickles: {_CONVERT}"),
    (re.compile(r"(tf_model|model)\.h5"), f"Keras weights: {_CONVERT}"),
    (re.compile(r"saved_model\.pb"), "a TensorFlow SavedModel: open its variables/variables, which is a bundle"),
)


def foreign_format(probe: PathProbe) -> str | None:
    """Names the foreign format of a file or directory, with the way to convert it.

    None also where it is unknown.
    """
    if probe.kind == "file":
        return _foreign_file(probe)
    for name in sorted(probe.names):
        for pattern, text in _NAMES:
            if pattern.fullmatch(name):
                return f"{name!r} is {text}"
    return None


def _foreign_file(probe: PathProbe) -> str | None:
    for magic, text in _MAGICS:
        if magic.match(probe.head):
            return f"this is {text}"
    if is_sstable(probe):
        return (
            "this is a TensorFlow 1 (V1) checkpoint file: restore it with tf.compat.v1.train.Saver and save it again "
            "with write_version=tf.compat.v1.train.SaverDef.V2"
        )
    return None

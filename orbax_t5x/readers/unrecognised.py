"""Errors for paths that cannot be opened, with near names.

They are missing, of no known format, or of a format that is not read: a pickle, HDF5, another framework's checkpoint.
Those are recognised by their first bytes, their names, or what a directory holds; never parsed, and nothing is ever
unpickled.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    Fix,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.paths import LEADS_OUT, whole_url
from orbax_t5x.files.places import FILE_SUFFIXES, files_at
from orbax_t5x.readers.detect import PathProbe, is_sstable, probe_path, subdirectories
from orbax_t5x.readers.format_table import Format
from orbax_t5x.readers.orbax.steps import newest_first, step_of_name
from orbax_t5x.text.wording import listed


class ForeignFormat(NamedTuple):
    """Format that cannot be read: its name and the remedy."""

    what: str
    way_out: str


_CONVERT = "load it with its own library and save the arrays as safetensors"
_FROM_TORCH = "load the model that it was exported from, and save that as safetensors"
_LFS = ForeignFormat("a Git LFS pointer", "run `git lfs pull` where it was cloned")
_ZIP = ForeignFormat("a zip archive, and none that torch.save or numpy.savez wrote", _CONVERT)
_PICKLE = ForeignFormat("a pickle, which would run code to be read", _CONVERT)
_HDF5 = ForeignFormat("an HDF5 file (Keras)", f"{_CONVERT}: h5py lists its arrays by name")
_KERAS = ForeignFormat("a Keras model", "keras.saving.load_model reads it; save its weights as safetensors")
_ONNX = ForeignFormat("an ONNX model, which holds a graph and its constants", _FROM_TORCH)
_TFLITE = ForeignFormat("a TensorFlow Lite model", _FROM_TORCH)
_RUST = ForeignFormat("a weights file of Rust's tch (rust-bert)", "take the model.safetensors of the same model")
_EQUINOX = ForeignFormat(
    "a file of Equinox (tree_serialise_leaves): arrays one after the other, without names",
    "load it with eqx.tree_deserialise_leaves into the model that wrote it, and save that with ot.TrainStateHandler or "
    "as safetensors",
)
_NPY = ForeignFormat("a single NumPy array", "use numpy.load")
_PACKED = ForeignFormat("a compressed file", "decompress it first")
_SAVED_MODEL = ForeignFormat("a TensorFlow SavedModel", "open its variables/variables, which is a bundle")
_LEVANTER = ForeignFormat(
    "a checkpoint of Levanter: arrays of TensorStore without a list of them",
    "export it with Levanter's save_hf_checkpoint (levanter.main.export_lm_to_hf), and open the safetensors",
)
_PAXML = ForeignFormat(
    "a checkpoint of PaxML", "restore it with paxml's own checkpoints module and save the arrays with Orbax"
)
_TENSORFLOW_1 = ForeignFormat(
    "a TensorFlow 1 (V1) checkpoint file",
    "restore it with tf.compat.v1.train.Saver and save it again with write_version=tf.compat.v1.train.SaverDef.V2",
)

# Endings of names, then first bytes: an ending says more about what is in an archive.
_ENDINGS: tuple[tuple[tuple[str, ...], ForeignFormat], ...] = (
    ((".keras",), _KERAS),
    ((".h5", ".hdf5"), _HDF5),
    ((".onnx",), _ONNX),
    ((".tflite",), _TFLITE),
    ((".ot",), _RUST),
    ((".eqx",), _EQUINOX),
)
_MAGICS: tuple[tuple[re.Pattern[bytes], ForeignFormat], ...] = (
    (re.compile(rb"version https://git-lfs"), _LFS),
    (re.compile(rb"PK\x03\x04"), _ZIP),
    (re.compile(rb"\x80[\x02-\x05]"), _PICKLE),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), _HDF5),
    (re.compile(rb"\{.*\}\r?\n\x93NUMPY", re.DOTALL), _EQUINOX),  # a line of hyperparameters before the arrays
    (re.compile(rb"\x93NUMPY"), _NPY),
    (re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ"), _PACKED),
    (re.compile(rb"....TFL3", re.DOTALL), _TFLITE),
    # The version of the format, then its producer, its operators or its graph.
    (re.compile(rb"\x08[\x01-\x20](?:\x12[\x01-\x40][\x20-\x7e]|\x3a|\x42)"), _ONNX),
)
# Names in a directory.
_NAMES: tuple[tuple[re.Pattern[str], ForeignFormat], ...] = (
    (re.compile(r"(tf_model|model)\.h5"), _HDF5),
    (re.compile(r".*\.keras"), _KERAS),
    (re.compile(r"saved_model\.pb"), _SAVED_MODEL),
    (re.compile(r".*\.eqx"), _EQUINOX),
    (re.compile(r"rust_model\.ot"), _RUST),
    (re.compile(r".*\.onnx|onnx"), _ONNX),
)
_STEP = re.compile(r"step-[0-9]+|checkpoint_[0-9]{8}", re.ASCII)
_NPY_HEADER = re.compile(
    rb"\x93NUMPY.{4}.{0,4}?\{'descr': '[<>|=]?[a-zA-Z]+(?P<width>[0-9]+)'.*'shape': \((?P<shape>[0-9, ]*)\)", re.DOTALL
)


def foreign_format(probe: PathProbe) -> ForeignFormat | None:
    """Returns the foreign format of a path, or None if unknown."""
    if probe.kind == "file":
        found = _foreign_file(probe)
        return found and found._replace(what=f"this is {found.what}")
    for is_foreign, found in ((_is_levanter, _LEVANTER), (_is_paxml, _PAXML)):
        if is_foreign(probe) or _has_steps(probe, is_foreign):
            return found._replace(what=f"this is {found.what}")
    for name in sorted(probe.names):
        for pattern, found in _NAMES:
            if pattern.fullmatch(name):
                return found._replace(what=f"{name!r} is {found.what}")
    return None


def _foreign_file(probe: PathProbe) -> ForeignFormat | None:
    magic = next((found for magic, found in _MAGICS if magic.match(probe.head)), None)
    if magic is _LFS:
        return magic
    if ending := next((found for endings, found in _ENDINGS if probe.path.endswith(endings)), None):
        return ending
    if magic is _NPY and _is_longer_than_one_array(probe):
        return _EQUINOX
    return magic or (_TENSORFLOW_1 if is_sstable(probe) else None)


def _is_longer_than_one_array(probe: PathProbe) -> bool:
    """Tests if more follows the NumPy array at a file's start."""
    header = _NPY_HEADER.match(probe.head)
    if header is None or probe.size is None or len(probe.head) < 12:
        return False
    is_first_version = probe.head[6] == 1
    size = int.from_bytes(probe.head[8 : 10 if is_first_version else 12], "little") + (10 if is_first_version else 12)
    sizes = [int(one) for one in header["shape"].replace(b" ", b"").split(b",") if one]
    return probe.size > size + math.prod(sizes) * int(header["width"])


def _is_levanter(probe: PathProbe) -> bool:
    """Tests if a directory is Levanter's."""
    return "metadata.json" in probe.names and bool({"model", "opt_state", "train_state"} & probe.names)


def _is_paxml(probe: PathProbe) -> bool:
    """Reports whether a directory has PaxML's record of a train state."""
    if any(name.startswith("mdl_vars.") for name in probe.names):
        return True
    return {"state", "metadata"} <= probe.names and probe.inside("metadata/metadata").kind == "file"


def _has_steps(probe: PathProbe, is_foreign: Callable[[PathProbe], bool]) -> bool:
    """Reports whether the last of a directory's steps is foreign."""
    if not any(_STEP.fullmatch(name) for name in probe.names):
        return False
    steps = [name for name in subdirectories(probe.path).inside if _STEP.fullmatch(name)]
    return bool(steps) and is_foreign(probe_path(os.path.join(probe.path, max(steps))))


# A model of the Hugging Face hub: an organisation and a name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SHARD = re.compile(r".+\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)
# Names of a directory that an error shows.
_SHOWN_NAMES = 8
# Names close to one that does not exist: more than three are no help, and looser ones are other files.
_SHOWN_NEIGHBOURS = 3
_CLOSE = 0.8


def missing_error(path: str, text: str) -> CheckpointError:
    """Makes the error of a missing path, with near names."""
    message = "no such file or directory, and no TensorFlow bundle with this prefix"
    if files_at(path).is_remote:
        return _missing_remotely(path, message)
    if url := whole_url(text):
        return CheckpointNotFoundError(f"no such file or directory; of a URL, open {url!r}", path=path)
    directory = os.path.dirname(path)
    there = _existing(directory)
    if close := _close_names(there, path[len(there) :].strip(os.sep).split(os.sep)[0]):
        where = "beside it:" if there == directory else f"in {there} there is"
        message += f"; {where} {', '.join(map(repr, close))}"
    elif step_of_name(os.path.basename(path)) is not None and (steps := list(newest_first(there))):
        newest = listed([repr(step.name) for step in steps], _SHOWN_NEIGHBOURS)
        message += f"; finished steps beside it, the newest first: {newest}"
    elif _HUB_NAME.fullmatch(text):
        message += f"; for a model of the Hugging Face hub, open {f'hf://{text}'!r}"
    return CheckpointNotFoundError(message, path=path)


def _missing_remotely(url: str, message: str) -> CheckpointError:
    """Makes the same error for a URL."""
    if files_at(url).can_list or os.path.splitext(url)[1] in FILE_SUFFIXES:
        return CheckpointNotFoundError(message, path=url)
    return UnsupportedCheckpointError(
        "nothing of a checkpoint is here, and web servers do not list their files: of a root, open a step by its own "
        "URL; of a step, the item",
        path=url,
    )


def _existing(directory: str) -> str:
    """Returns the directory, or its nearest existing ancestor."""
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    return directory


def _close_names(directory: str, name: str) -> list[str]:
    names = {entry.removesuffix(".index") for entry in probe_path(directory).names if not _SHARD.fullmatch(entry)}
    return difflib.get_close_matches(name, sorted(names), n=_SHOWN_NEIGHBOURS, cutoff=_CLOSE)


def unrecognised_error(probe: PathProbe, formats: Sequence[Format]) -> CheckpointError:
    """Makes the error of a path that no format recognises."""
    if (foreign := foreign_format(probe)) is not None:
        return UnsupportedCheckpointError(foreign.what, path=probe.path, fix=Fix(foreign.way_out))
    sought = "; ".join(row.sought or row.name for row in formats)
    if probe.kind == "directory":
        is_remote = probe.files.is_remote
        if outside := [name for name in sorted(probe.names) if not is_remote and probe.inside(name).kind == "outside"]:
            return UnsafeCheckpointError(
                f"{LEADS_OUT}, and nothing else here is a checkpoint; open what it leads to by its own path",
                path=os.path.join(probe.path, outside[0]),
            )
        shown = listed(sorted(probe.names), _SHOWN_NAMES)
        message = f"no checkpoint here: looked for {sought}; a root with finished steps; found {shown or 'nothing'}"
        return CheckpointNotFoundError(message, path=probe.path)
    return UnsupportedCheckpointError(
        f"not a checkpoint of a known format: looked for {sought}; the file"
        f"{'' if probe.size is None else f' has {probe.size} bytes and'} begins with {probe.head[:16]!r}",
        path=probe.path,
    )

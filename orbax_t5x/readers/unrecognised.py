"""Errors for paths that cannot be opened: missing, of no known format, or of a format that is not read.

Foreign formats are recognised by their first bytes, their names, or what a directory holds; they are never parsed, and
nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import os
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    Fix,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.paths import LEADS_OUT, whole_url
from orbax_t5x.files.places import files_at
from orbax_t5x.readers.detect import PathProbe, owner_of_directory
from orbax_t5x.readers.format_table import SSTABLE, Format, Mark
from orbax_t5x.readers.orbax.steps import TEMPORARY_MARK, finished_steps, step_of_name
from orbax_t5x.readers.roots import newest_of_root
from orbax_t5x.text.wording import listed


class ForeignFormat(NamedTuple):
    """Format that cannot be read.

    Attributes:
      names: Globs of its files' names, with blanks between them.
      mark: First or last bytes of its files.
      description: Name of the format, with its article.
      remedy: What the user does instead.
    """

    names: str
    mark: Mark | None
    description: str
    remedy: str

    def has_name(self, name: str) -> bool:
        """Returns True if a file has a name of this format."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names.split())


_CONVERT = "load it with its own library and save the arrays as safetensors"
_FROM_TORCH = "load the model that it was exported from, and save that as safetensors"
_EQUINOX = (
    "load it with eqx.tree_deserialise_leaves into the model that wrote it, and save that with ot.TrainStateHandler or "
    "as safetensors"
)
_PAXML = "a checkpoint of PaxML", "restore it with paxml's own checkpoints module and save the arrays with Orbax"
# The first row that fits names the file. Names go before bytes: an ending says more about what is in an archive.
_FILES = (
    ForeignFormat(
        "", Mark(head=rb"version https://git-lfs"), "a Git LFS pointer", "run `git lfs pull` where it was cloned"
    ),
    ForeignFormat(
        "*.keras", None, "a Keras model", "keras.saving.load_model reads it; save its weights as safetensors"
    ),
    ForeignFormat(
        "*.h5 *.hdf5", Mark(head=rb"\x89HDF\r\n\x1a\n"), "an HDF5 file (Keras)", f"{_CONVERT}, by h5py's names"
    ),
    # The version of the format, then its producer, its operators or its graph.
    ForeignFormat(
        "*.onnx onnx",
        Mark(head=rb"\x08[\x01-\x20](?:\x12[\x01-\x40][\x20-\x7e]|\x3a|\x42)"),
        "an ONNX model, which holds a graph and its constants",
        _FROM_TORCH,
    ),
    ForeignFormat("*.tflite", Mark(head=rb"....TFL3"), "a TensorFlow Lite model", _FROM_TORCH),
    ForeignFormat(
        "*.ot", None, "a weights file of Rust's tch (rust-bert)", "take the model.safetensors of the same model"
    ),
    # A line of hyperparameters may be before the arrays.
    ForeignFormat("*.eqx", Mark(head=rb"\{.*\}\r?\n\x93NUMPY"), "a file of Equinox: arrays without names", _EQUINOX),
    ForeignFormat(
        "",
        Mark(head=rb"\x93NUMPY"),
        "NumPy arrays of numpy.save or Equinox, without names",
        f"use numpy.load for a single array; {_EQUINOX}",
    ),
    ForeignFormat(
        "",
        Mark(head=rb"\x92[\x91-\x9f][\xa0-\xbf\xd9]"),
        "a stream of EasyLM: names and arrays in turn",
        "load it with EasyLM's StreamingCheckpointer.load_checkpoint and save the tree as safetensors",
    ),
    ForeignFormat(
        "", Mark(head=rb"PK\x03\x04"), "a zip archive, and none that torch.save or numpy.savez wrote", _CONVERT
    ),
    ForeignFormat("", Mark(head=rb"\x80[\x02-\x05]"), "a pickle, which would run code to be read", _CONVERT),
    ForeignFormat(
        "", Mark(head=rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ"), "a compressed file", "decompress it first"
    ),
    ForeignFormat(
        "",
        SSTABLE,
        "a TensorFlow 1 (V1) checkpoint file",
        "restore it with tf.compat.v1.train.Saver and save it again with write_version=tf.compat.v1.train.SaverDef.V2",
    ),
    ForeignFormat("saved_model.pb", None, "a TensorFlow SavedModel", "open its variables/variables, which is a bundle"),
)
# Of a directory: the globs are of a name, and perhaps of one beside it.
_LEVANTER = (
    "a checkpoint of Levanter: arrays of TensorStore without a list of them",
    "export it with Levanter's save_hf_checkpoint (levanter.main.export_lm_to_hf), and open the safetensors",
)
_DIRECTORIES = (
    ForeignFormat("metadata.json model", None, *_LEVANTER),
    ForeignFormat("metadata.json opt_state", None, *_LEVANTER),
    ForeignFormat("metadata.json train_state", None, *_LEVANTER),
    ForeignFormat("mdl_vars.*", None, *_PAXML),
    ForeignFormat("state metadata", None, *_PAXML),
)
# How frameworks whose checkpoints are not read name their steps.
_STEP = re.compile(r"step-[0-9]+|checkpoint_[0-9]{8}", re.ASCII)
# A model of the Hugging Face hub: an organisation and a name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SHARD = re.compile(r".+\.data-[0-9]{5}-of-[0-9]{5}", re.ASCII | re.DOTALL)
# Names of a directory that an error shows.
_SHOWN_NAMES = 8
# Names close to one that does not exist: more than three are no help, and looser ones are other files.
_SHOWN_NEIGHBOURS = 3
_CLOSE = 0.8
# Subdirectories in which an error looks for checkpoints.
_MOST_PROBED = 16


def missing_error(probe: PathProbe, text: str) -> CheckpointError:
    """Makes the error of a missing path, with near names."""
    path, files = probe.path, probe.files
    message = "no such file or directory, and no TensorFlow bundle with this prefix"
    if files.is_remote:
        if not files.can_list:
            message += (
                "; web servers do not list their files, so of a root open a step by its own URL, and of a step the item"
            )
        return CheckpointNotFoundError(message, path=path)
    directory, name = os.path.split(path)
    parent = PathProbe(files_at(directory))
    names = {entry.removesuffix(".index") for entry in parent.names if not _SHARD.fullmatch(entry)}
    if url := whole_url(text):
        message = f"no such file or directory; of a URL, open {url!r}"
    elif close := difflib.get_close_matches(name, sorted(names), n=_SHOWN_NEIGHBOURS, cutoff=_CLOSE):
        message += f"; beside it: {', '.join(map(repr, close))}"
    elif names and step_of_name(name) is not None and (steps := list(finished_steps(parent.files))):
        newest = listed([repr(step.name) for step in steps], _SHOWN_NEIGHBOURS)
        message += f"; finished steps beside it, the newest first: {newest}"
    elif _HUB_NAME.fullmatch(text):
        message += f"; for a model of the Hugging Face hub, open {f'hf://{text}'!r}"
    return CheckpointNotFoundError(message, path=path)


def unrecognised_error(probe: PathProbe, formats: Sequence[Format]) -> CheckpointError:
    """Makes the error of a path that no format recognises."""
    is_directory = probe.kind == "directory"
    if foreign := _foreign_directory(probe) if is_directory else _foreign_file(probe):
        subject, row = foreign
        return UnsupportedCheckpointError(f"{subject} is {row.description}", path=probe.path, fix=Fix(row.remedy))
    sought = "; ".join(row.sought or row.name for row in formats)
    if is_directory:
        return _no_checkpoint(probe, formats, sought)
    look = probe.look()
    size = "" if look.size is None else f" has {look.size} bytes and"
    return UnsupportedCheckpointError(
        f"not a checkpoint of a known format: looked for {sought}; the file{size} begins with {look.head[:16]!r}",
        path=probe.path,
    )


def _foreign_file(probe: PathProbe) -> tuple[str, ForeignFormat] | None:
    name = os.path.basename(probe.path)
    for row in _FILES:
        if row.has_name(name) or (row.mark is not None and probe.has_bytes(row.mark)):
            return "this", row
    return None


def _foreign_directory(probe: PathProbe) -> tuple[str, ForeignFormat] | None:
    subjects: dict[str, Collection[str]] = {"this": probe.names}
    newest = max(filter(_STEP.fullmatch, probe.names), default="")
    if newest in probe.subdirectories.inside:
        subjects[repr(newest)] = files_at(probe.files.locate(newest)).names()
    for subject, names in subjects.items():
        for row in _DIRECTORIES:
            if all(fnmatch.filter(names, pattern) for pattern in row.names.split()):
                return subject, row
    for name in sorted(probe.names):
        for row in _FILES:
            if row.has_name(name):
                return repr(name), row
    return None


def _no_checkpoint(probe: PathProbe, formats: Sequence[Format], sought: str) -> CheckpointError:
    names = sorted(probe.names)
    if not probe.files.is_remote:
        for name in names:
            if probe.look(name).kind == "outside":
                return UnsafeCheckpointError(
                    f"{LEADS_OUT}, and nothing else here is a checkpoint; open what it leads to by its own path",
                    path=os.path.join(probe.path, name),
                )
        if checkpoints := _checkpoints_inside(probe, formats):
            shown = listed(map(repr, checkpoints), _SHOWN_NAMES)
            message = f"no checkpoint, but a directory of checkpoints: {shown}; open one of them by its own path"
            return CheckpointNotFoundError(message, path=probe.path)
    message = f"no checkpoint here: looked for {sought}; a root with finished steps; found "
    message += listed(names, _SHOWN_NAMES) or "nothing"
    if unfinished := [name for name in names if TEMPORARY_MARK in name]:
        message += f"; {unfinished[0]!r} is an unfinished save: Orbax renames it when it is done"
    return CheckpointNotFoundError(message, path=probe.path)


def _checkpoints_inside(probe: PathProbe, formats: Sequence[Format]) -> list[str]:
    """Lists subdirectories that are checkpoints themselves."""
    checkpoints: list[str] = []
    names = (name for name in sorted(probe.subdirectories.inside) if TEMPORARY_MARK not in name)
    for name in list(names)[:_MOST_PROBED]:
        with contextlib.suppress(CheckpointError):
            inner = PathProbe(files_at(probe.files.locate(name)))
            if owner_of_directory(inner, formats) or newest_of_root(inner):
                checkpoints.append(name)
    return checkpoints

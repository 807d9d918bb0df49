"""The table of formats, with their marks as data.

`register_format` adds rows.

Rows have no order that decides anything. Detection looks at marks alone: the module that opens a format is loaded when
a mark fits.
"""

from __future__ import annotations

import warnings

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers.format import Format, Mark
from orbax_t5x.registry import Registry, RegistryEntry

_SHARD = f"*.data-{'[0-9]' * 5}-of-{'[0-9]' * 5}"
# The text in which TensorFlow names the newest bundle of a directory.
_STATE = rb".*?model_checkpoint_path:"
_STATE_PATH = _STATE + rb"[ \t]*(?P<quote>[\"'])(?P<path>[^\"'\\\n]+)(?P=quote)"
_SSTABLE_TAIL = rb".*\x57\xfb\x80\x8b\x24\x75\x47\xdb"
# T5X keeps the iterator of each host's training data in a step; it is a bundle.
_ITERATOR = "train_ds-*-of-*"
# A map of the key `version`, a small number, and the key `optimizer`; that number at the end; a train state's parts.
_T5X_HEAD = rb"[\x82-\x8f]\xa7version[\x00-\x7f]\xa9optimizer"
_OLD_T5X_HEAD, _OLD_T5X_TAIL = rb"\x82\xa9optimizer", rb".*\xa7version[\x00-\x7f]"
_TRAIN_STATE = rb"[\x81-\x83](?:\xa6target|\xa5state|\xadflax_mutables)"
# A map with text keys.
_MSGPACK = rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9\xda]"
_OTHER_MSGPACK = rb"(?!" + rb"|".join((_T5X_HEAD, _OLD_T5X_HEAD, _TRAIN_STATE)) + rb")" + _MSGPACK
# The length of the header, of less than 4 GiB, and its first brace.
_SAFETENSORS = rb"(?![\x00\x01]\x00\x00\x00).{4}\x00{4}\{"
_ZIP = rb"PK(?:\x03\x04|\x05\x06)"
_ZIP_MEMBER = rb"PK\x03\x04.{22}"
# How a file of PyTorch before 1.6 begins: a pickle of its magic number.
_OLD_TORCH = rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\."

TF_BUNDLE = Format(
    "tf_bundle",
    "orbax_t5x.readers.tf_bundle.open:open_tf_bundle",
    files=[Mark("*.index"), Mark(_SHARD), Mark(head=_STATE), Mark(beside="{name}.index", weight="hint")],
    directory=[
        Mark("checkpoint", head=_STATE_PATH, suffix_of_path=".index"),
        Mark("*.index", tail=_SSTABLE_TAIL, but=_ITERATOR),
        Mark("*.index", beside=_SHARD.replace("*", "{stem}"), but=_ITERATOR),
        Mark("checkpoint", head=_STATE, weight="hint"),
    ],
    sought="a TensorFlow bundle (prefix.index, prefix.data-…)",
)
ORBAX = Format(
    "orbax",
    "orbax_t5x.readers.orbax.open:open_orbax",
    directory=[
        Mark("_METADATA"),
        Mark("_CHECKPOINT_METADATA"),
        Mark("manifest.ocdbt"),
        # Early Orbax kept its tree in a file of this name.
        Mark("checkpoint", head=_OTHER_MSGPACK),
        Mark("checkpoint", head=_OLD_T5X_HEAD, tail=rb"(?!" + _OLD_T5X_TAIL + rb"\Z).*"),
    ],
    sought="an Orbax item or step (_METADATA, _CHECKPOINT_METADATA)",
    has_items=True,
)
T5X = Format(
    "t5x",
    "orbax_t5x.readers.t5x.open:open_t5x",
    files=[Mark(head=_T5X_HEAD), Mark(head=_OLD_T5X_HEAD, tail=_OLD_T5X_TAIL)],
    directory=[
        Mark("checkpoint", head=_T5X_HEAD),
        Mark("checkpoint", head=_OLD_T5X_HEAD, tail=_OLD_T5X_TAIL),
        # Early Orbax has such a file beside its own marks.
        Mark("checkpoint", head=_TRAIN_STATE, without=("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")),
    ],
    sought="a T5X step (a msgpack file 'checkpoint')",
)
FLAX_MSGPACK = Format(
    "flax_msgpack",
    "orbax_t5x.readers.flax_msgpack.open:open_flax_msgpack",
    files=[Mark("*.msgpack.index.json"), Mark(head=_MSGPACK, weight="hint")],
    directory=[Mark("flax_model.msgpack", weight="loose"), Mark("flax_model.msgpack.index.json", weight="loose")],
    sought="a Flax msgpack file",
)
# What Transformers passes over for `model.safetensors`, and PEFT for `adapter_model.safetensors`.
_MODEL, _ADAPTER = ("pytorch_model.*", "flax_model.*", "*.gguf"), ("adapter_model.*",)
SAFETENSORS = Format(
    "safetensors",
    "orbax_t5x.readers.safetensors.open:open_safetensors",
    files=[Mark("*.safetensors"), Mark("*.safetensors.index.json"), Mark(head=_SAFETENSORS)],
    directory=[
        Mark("model.safetensors", over=_MODEL, weight="loose"),
        Mark("model.safetensors.index.json", over=_MODEL, weight="loose"),
        Mark("adapter_model.safetensors", over=_ADAPTER, weight="loose"),
        Mark("*.safetensors", weight="loose"),
        Mark("*.safetensors.index.json", weight="loose"),
    ],
    sought="safetensors files",
)
TORCH = Format(
    "torch",
    "orbax_t5x.extras.torch_zip.open:open_torch",
    files=[
        Mark("*.bin.index.json"),
        Mark(head=_OLD_TORCH),
        Mark(head=_ZIP_MEMBER + rb".{4}[^/\x00]+/data\.pkl"),
        *(Mark(name, head=_ZIP, weight="hint") for name in ("*.bin", "*.pt", "*.pth")),
    ],
    directory=[
        Mark("pytorch_model.bin", weight="loose"),
        Mark("pytorch_model.bin.index.json", weight="loose"),
        Mark("adapter_model.bin", weight="loose"),
    ],
    sought="PyTorch's files (.bin, .pt, .pth)",
)
NPZ = Format(
    "npz",
    "orbax_t5x.extras.npz.open:open_npz",
    files=[Mark(head=_ZIP_MEMBER + rb".{4}[^\x00]+?\.npy"), Mark("*.npz", head=_ZIP, weight="hint")],
    sought="an .npz file",
)
GGUF = Format(
    "gguf",
    "orbax_t5x.extras.gguf.open:open_gguf",
    files=[Mark("*.gguf"), Mark(head=rb"GGUF")],
    directory=[Mark("*.gguf", weight="loose")],
    sought="a GGUF file",
)

_OWN = (TF_BUNDLE, ORBAX, T5X, FLAX_MSGPACK, SAFETENSORS, TORCH, NPZ, GGUF)
FORMATS: Registry[Format] = Registry(
    "format", {row.name: f"{__name__}:{row.name.upper()}" for row in _OWN}, group="orbax_t5x.formats"
)


def register_format(format: Format) -> RegistryEntry:
    """Adds a format until it is unregistered.

    From then on it is found by `open_checkpoint` and by everything that takes a path, and has a name for `format=`. A
    package that is installed does the same for each process by an entry point of the group `orbax_t5x.formats`, which
    has the format's name and leads to the `Format`.

    Args:
      format: its name, its marks and how it opens.

    Returns:
      An object with `unregister()`, which is a context manager, too.

    Raises:
      ValueError: the name is taken.
      TypeError: `format` is no `Format`.

    Example:
      >>> def open_empty(path, *, limits):
      ...     return ot.Checkpoint(path=path, format="empty", step=None, leaves={})
      >>> with ot.register_format(ot.Format("empty", open_empty, files=[ot.Mark("*.empty")])):
      ...     _ = (directory / "model.empty").write_bytes(b"")
      ...     ot.open_checkpoint(directory / "model.empty").format
      'empty'
    """
    if not isinstance(format, Format):
        raise TypeError(f"a format is an orbax_t5x.Format, not a {type(format).__name__}")
    return FORMATS.register(format.name, format)


def all_formats() -> list[Format]:
    """Lists all formats.

    Broken rows of other packages are left out with a warning.
    """
    rows = list(_OWN)
    for name in FORMATS.joined_names():
        try:
            rows.append(format_named(name))
        except UnsupportedCheckpointError as error:
            warnings.warn(error.message, stacklevel=2)
    return rows


def format_named(name: str) -> Format:
    """Returns the format of a name.

    Raises:
      UnsupportedCheckpointError: the name's entry point leads to no such format.
    """
    try:
        row = FORMATS.get(name)
    except Exception as error:  # another package's code
        message = f"the format {name!r} of an installed package is left out: {error}"
        raise UnsupportedCheckpointError(message) from error
    if not isinstance(row, Format) or row.name != name:
        message = f"the format {name!r} of an installed package is left out: its entry point leads to {row!r}"
        raise UnsupportedCheckpointError(f"{message}, not to an orbax_t5x.Format of this name")
    return row

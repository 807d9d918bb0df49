"""Decides which directories `overwrite=True` may replace.

They are checkpoints, without any files that users added.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.interface import Files
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_output import CONFIG_NAME, WEIGHTS
from orbax_t5x.readers import Limits
from orbax_t5x.readers.orbax.metadata import METADATA_FILE, read_item_metadata
from orbax_t5x.readers.orbax.open import read_step_metadata
from orbax_t5x.readers.orbax.steps import STEP_METADATA_FILE, item_names

# Names that Orbax writes into an item or a step beside arrays.
_ORBAX_NAMES = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|_CHECKSUMS\.json|manifest\.ocdbt|d|ocdbt\.process_\d+"
    r"|array_metadatas|checkpoint|commit_success\.txt|descriptor"
)


def reason_not_replaceable(store: Callable[[], Files], names: set[str] | None, writing: WriteOptions) -> str | None:
    """Returns why a directory must not be replaced, or None.

    Args:
      store: opens the directory.
      names: of what is in it; None where it is no directory.
      writing: the options of the conversion.
    """
    if names is None:
        return "is not a directory"
    if not names:
        return None
    if writing.format != "orbax":
        # A user may have added a tokenizer.
        written = {CONFIG_NAME, *(writing.beside or ())}
        others = sorted(name for name in names - written if not WEIGHTS.fullmatch(name))
        return f"holds {others[0]!r} beside safetensors files" if others else None
    try:
        known = _names_of_orbax(store(), names)
    except CheckpointError as error:
        return f"is not an Orbax checkpoint ({error.message})"
    if known is None:
        return "is not an Orbax checkpoint"
    others = sorted(name for name in names if not _ORBAX_NAMES.fullmatch(name) and name not in known)
    return f"is an Orbax checkpoint that holds {others[0]!r}, which Orbax did not write" if others else None


def _names_of_orbax(root: Files, names: set[str]) -> set[str] | None:
    """Lists a checkpoint's names of arrays and items, or None.

    None: it has no metadata.
    """
    known: set[str] = set()
    if METADATA_FILE in names:
        nodes = read_item_metadata(root, "", Limits()).nodes
        known |= {node.param.split("/")[0] for node in nodes}
    elif STEP_METADATA_FILE in names:
        handlers = read_step_metadata(root, Limits()).get("item_handlers")
        known |= set(handlers) if isinstance(handlers, dict) else set()
        known |= set(item_names(root.path))
        if not known:
            return None
    else:
        return None
    return known

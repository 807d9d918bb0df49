"""A model's files beside its weights, copied from another model.

They are its configuration and its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from orbax_t5x.errors import CheckpointNotFoundError
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.files.schemes import scheme_of

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MOST_BYTES = 64 << 20


def read_companions(path: str) -> Mapping[str, bytes]:
    """Reads the files of `COMPANIONS` in a directory.

    It is local, in a bucket, of a web server or on the hub.

    Raises:
      CheckpointNotFoundError: there is none.
      CheckpointError: they cannot be read, or are larger than such files are.
    """
    scheme = scheme_of(path)
    directory = path if scheme is None or scheme.download is None else scheme.download(path, COMPANIONS)
    with opening():
        store = files_at(directory)
        names = [name for name, is_there in zip(COMPANIONS, store.has_files(COMPANIONS), strict=True) if is_there]
        if not names:
            raise CheckpointNotFoundError(f"there is none of {', '.join(COMPANIONS)}", path=path)
        return {name: store.read_whole(name, limit=_MOST_BYTES) for name in names}

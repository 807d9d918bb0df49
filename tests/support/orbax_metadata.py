"""Entries of an Orbax item's `_METADATA`, and an item whose tree is replaced by others."""

import json


def entry(*keys, value_type="np.ndarray", skip=False, kinds=None):
    kinds = kinds or [2] * len(keys)
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in zip(keys, kinds, strict=True)],
        "value_metadata": {"value_type": value_type, "skip_deserialize": skip},
    }


def with_tree(path, *entries, **flags):
    metadata = json.loads((path / "_METADATA").read_text()) | flags
    metadata["tree_metadata"] = {str(index): said for index, said in enumerate(entries)}
    (path / "_METADATA").write_text(json.dumps(metadata))
    return path

"""The `custom_metadata` of an item is found from the end of its metadata file, however the file is laid out."""

import json

import pytest

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError
from orbax_t5x.readers.orbax.metadata import read_custom_metadata

CUSTOM = {"orbax_t5x": {"provenance": []}}
LEAF = {"key_metadata": [{"key": "custom_metadata", "key_type": 2}]}
LAYOUTS = {
    "as Orbax writes it": {"tree_metadata": {"('a',)": LEAF}, "use_ocdbt": True, "custom_metadata": CUSTOM},
    "long before": {"tree_metadata": {f"('{index}',)": LEAF for index in range(3_000)}, "custom_metadata": CUSTOM},
    "long itself": {"tree_metadata": {}, "custom_metadata": {**CUSTOM, "mine": "x" * 200_000}},
    "not the last": {"custom_metadata": CUSTOM, "later": True},
    "not the last, long after": {"custom_metadata": CUSTOM, "tree_metadata": {str(n): LEAF for n in range(3_000)}},
    "named inside": {"custom_metadata": {**CUSTOM, "inner": {"custom_metadata": {"orbax_t5x": 5}}}},
    "quoted inside": {"custom_metadata": {**CUSTOM, "text": '"custom_metadata": {"orbax_t5x": 5}}'}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(tmp_path, layout):
    (tmp_path / "_METADATA").write_text(json.dumps(LAYOUTS[layout]))
    assert read_custom_metadata(str(tmp_path))["custom_metadata"]["orbax_t5x"] == CUSTOM["orbax_t5x"]


@pytest.mark.parametrize(
    "metadata", [{}, {"tree_metadata": {str(n): {} for n in range(9_000)}}], ids="small large".split()
)
def test_metadata_without_it(tmp_path, metadata):
    (tmp_path / "_METADATA").write_text(json.dumps(metadata))
    assert "custom_metadata" not in read_custom_metadata(str(tmp_path))


def test_errors(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        read_custom_metadata(str(tmp_path))
    (tmp_path / "_METADATA").write_text('{"custom_metadata": ')
    with pytest.raises(CorruptCheckpointError):
        read_custom_metadata(str(tmp_path))

"""What a checkpoint records of its state: the form, and what a damaged record does."""

import json

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.recorded_chains import Renaming, entries_of

T = ot.transforms


def plain_function(state, target):
    return state


def test_a_lineage_survives_json_and_comes_back_from_metadata():
    migrations = ot.Migrations([("first", [Renaming("y")])]).steps
    lineage = (
        provenance.UNRECORDED,
        *entries_of([Renaming("x"), plain_function, lambda state, target: state, *migrations]),
        *provenance.of_source("teacher", tuple(entries_of([T.Rename([("a", "b")])]))),
    )
    written = json.loads(json.dumps({"mine": 1, **provenance.to_metadata(lineage)}))

    assert provenance.from_metadata(written) == lineage
    assert provenance.from_metadata({"custom_metadata": written, "version": 3}) == lineage
    assert [entry["text"] for entry in lineage[1:3]] == ["Renaming(x)", f"{__name__}.plain_function"]
    assert lineage[3]["digest"] is None and lineage[4]["name"] == "first"
    assert lineage[5]["source"] == "teacher" and lineage[5]["patterns"] == ["Rename: a"]


def test_no_record_and_an_empty_one_are_told_apart():
    for metadata in (None, {}, {"custom_metadata": None}, {"custom_metadata": {"theirs": 3}}, {"version": 1}):
        assert provenance.from_metadata(metadata) is None
        assert provenance.skipped_from_metadata(metadata) == {}
    assert provenance.from_metadata(provenance.to_metadata(())) == ()


def test_skipped_leaves_come_back():
    written = json.loads(json.dumps(provenance.to_metadata((), {"a/b": ((0, 4), "bfloat16")})))
    assert provenance.skipped_from_metadata(written) == {"a/b": ((0, 4), "bfloat16")}


@pytest.mark.parametrize(
    "said",
    [
        7,
        {"provenance": 5},
        {"provenance": "text"},
        {"provenance": [5]},
        {"provenance": [{"unrecorded": "yes"}]},
        {"provenance": [{"unrecorded": True, "text": "a"}]},
        {"provenance": [{"unrecorded": True, "source": 5}]},
        {"provenance": [{"text": "a"}]},
        {"provenance": [{"digest": "0"}]},
        {"provenance": [{"text": 5, "digest": None}]},
        {"provenance": [{"text": "a", "digest": 5}]},
        {"provenance": [{"text": "a", "digest": None, "auto": 1}]},
        {"provenance": [{"text": "a", "digest": None, "auto": False}]},
        {"provenance": [{"text": "a", "digest": None, "name": 5}]},
        {"provenance": [{"text": "a", "digest": None, "source": None}]},
        {"provenance": [{"text": "a", "digest": None, "patterns": "a"}]},
        {"provenance": [{"text": "a", "digest": None, "patterns": [5]}]},
        {"provenance": [{"text": "a", "digest": None, "transforms": []}]},
        {"partial": {"0": [5]}},
        {"skipped": []},
        {"skipped": {"a": 5}},
        {"skipped": {"a": {"shape": [-1], "dtype": "float32"}}},
        {"skipped": {"a": {"shape": [True], "dtype": "float32"}}},
        {"skipped": {"a": {"shape": "12", "dtype": "float32"}}},
        {"skipped": {"a": {"shape": [1]}}},
    ],
)
def test_a_malformed_record_is_an_error_that_names_the_file(said):
    with pytest.raises(CorruptCheckpointError, match="/some/where"):
        provenance.from_metadata({provenance.KEY: said}, path="/some/where")
        provenance.skipped_from_metadata({provenance.KEY: said}, path="/some/where")

"""What a checkpoint records of its state: the form, the digests, and what a damaged record does."""

import json

import pytest
from orbax_t5x.provenance.chains import record_rules

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.recorded_chains import Renaming

T = ot.transforms


def plain_function(state, target):
    return state


def entry(*transforms, source="/data/model.ckpt-5", format="tf_bundle", **answer):
    return provenance.make_entry(source, format, record_rules(transforms), **answer)


def test_a_lineage_survives_json_and_comes_back_from_metadata():
    lineage = (
        provenance.UNRECORDED,
        entry(Renaming("x"), plain_function),
        entry(T.Rename([("a", "b")]), is_resuming=True),
        entry(lambda state, target: state, source={"a": "/x", "b": "/y"}, format={"a": "orbax", "b": "t5x"}),
    )
    written = json.loads(json.dumps({"mine": 1, **provenance.to_metadata(lineage)}))

    assert provenance.from_metadata(written) == lineage
    assert provenance.from_metadata({"custom_metadata": written, "version": 3}) == lineage
    assert lineage[1]["transforms"] == ["Renaming(x)", f"{__name__}.plain_function"]
    assert lineage[3]["digest"] is None


def test_no_record_and_an_empty_one_are_told_apart():
    for metadata in (None, {}, {"custom_metadata": None}, {"custom_metadata": {"theirs": 3}}, {"version": 1}):
        assert provenance.from_metadata(metadata) is None
        assert provenance.skipped_from_metadata(metadata) == {}
    assert provenance.to_metadata(None) == {}
    assert provenance.from_metadata(provenance.to_metadata(())) == ()


def test_a_repeated_statement_does_not_forget_what_came_after_it():
    first, answered = entry(Renaming("a")), entry(Renaming("b"), is_resuming=True)
    assert provenance.extended_lineage(None, None) == (provenance.UNRECORDED,)
    assert provenance.extended_lineage((first,), None) == (first,)
    assert provenance.extended_lineage(None, (first,)) == (first,)
    assert provenance.extended_lineage((first, answered), (first,)) == (first, answered)
    assert provenance.extended_lineage((first,), (answered,)) == (answered,)
    assert provenance.extended_lineage((first,), ()) == ()


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
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": None}]},
        {"provenance": [{"source": "/a", "format": "orbax", "digest": None}]},
        {"provenance": [{"source": 5, "format": "orbax", "transforms": None, "digest": None}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": 5, "digest": None}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": "sha256:0", "digest": "sha256:0"}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": [1], "digest": None}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": ["a"], "digest": 5}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": [], "digest": None, "is_resuming": 1}]},
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

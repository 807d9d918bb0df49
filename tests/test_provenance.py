"""The record that a checkpoint carries: its form, its digests, and what a damaged one does."""

import functools
import json
import subprocess
import sys

import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.provenance import records as provenance


class Renaming:
    def __init__(self, text: str):
        self.text = text

    def __call__(self, state, target, *, is_resuming=False):
        return state

    def digest(self) -> str:
        return self.text

    def describe(self) -> str:
        return f"Renaming({self.text})"


def plain_function(state, target):
    return state


def test_a_record_survives_json_and_comes_back_from_metadata():
    record = provenance.make_record("/data/model.ckpt-5", "tf_bundle", [Renaming("x"), plain_function])
    written = json.loads(json.dumps({"mine": 1, **provenance.to_metadata([record])}))

    assert provenance.from_metadata(written) == [record]
    assert provenance.from_metadata({"custom_metadata": written, "version": 3}) == [record]
    assert record["names"] == ["Renaming(x)", f"{__name__}.plain_function"]


def test_metadata_without_our_key_has_no_records():
    for metadata in (None, {}, {"custom_metadata": None}, {"custom_metadata": {"theirs": 3}}, {"version": 1}):
        assert provenance.from_metadata(metadata) == []
        assert provenance.skipped_from_metadata(metadata) == {}
    assert provenance.to_metadata([]) == {}


def test_digests_tell_chains_apart_and_nothing_else():
    digest = provenance.transforms_digest
    assert digest(()) is None
    assert digest(None) is None
    assert digest([Renaming("a")]) == digest(Renaming("a")) == digest((Renaming("a"),))
    assert digest([Renaming("a")]) != digest([Renaming("b")])
    assert digest([Renaming("a"), Renaming("b")]) != digest([Renaming("b"), Renaming("a")])
    assert digest([Renaming("a"), Renaming("b")]) != digest([Renaming("ab")])
    assert digest([plain_function]) == digest([functools.partial(plain_function)])
    assert digest([plain_function]) != digest([Renaming("x")])


def test_digests_are_the_same_in_another_process():
    code = (
        "from orbax_t5x.provenance import records as provenance\n"
        "import json\n"
        "print(provenance.transforms_digest([json.dumps]))\n"
        "import sys; assert 'orbax.checkpoint' not in sys.modules"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == provenance.transforms_digest([json.dumps])


def test_appending_keeps_the_first_and_every_transformed_one():
    plain = provenance.make_record("/a", "orbax")
    translated = provenance.make_record("/b", "tf_bundle", Renaming("t"))

    assert provenance.append([], plain) == [plain]
    assert provenance.append([plain], plain) == [plain]
    assert provenance.append([translated], plain) == [translated]
    assert provenance.append([plain], translated) == [plain, translated]
    assert provenance.newest_digest([plain]) is None
    assert provenance.newest_digest([translated, plain]) == translated["transforms"]
    assert provenance.newest_digest([]) is None


def test_several_sources_are_recorded_by_name():
    record = provenance.make_record({"a": "/x", "b": "/y"}, {"a": "orbax", "b": "t5x"}, Renaming("t"))
    written = json.loads(json.dumps(provenance.to_metadata([record])))
    assert provenance.from_metadata(written) == [record]


def test_skipped_leaves_come_back():
    written = json.loads(json.dumps(provenance.to_metadata([], {"a/b": ((0, 4), "bfloat16")})))
    assert provenance.skipped_from_metadata(written) == {"a/b": ((0, 4), "bfloat16")}


@pytest.mark.parametrize(
    "said",
    [
        7,
        {"provenance": 5},
        {"provenance": "text"},
        {"provenance": [5]},
        {"provenance": [{"source": "/a", "format": "orbax", "names": []}]},
        {"provenance": [{"source": 5, "format": "orbax", "transforms": None, "names": []}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": 5, "names": []}]},
        {"provenance": [{"source": "/a", "format": "orbax", "transforms": None, "names": [1]}]},
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

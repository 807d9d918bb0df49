"""Damaged and hostile metadata of Orbax items: a checkpoint or a typed error, nothing else."""

import contextlib
import json
import os
import shutil
import sys

import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.limits import Limits
from tests.support.orbax_items import FLAT, outcome, right_or
from tests.support.orbax_metadata import entry, with_tree

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("..", UnsafeCheckpointError),
        ("../../etc", UnsafeCheckpointError),
        ("a/../../b", UnsafeCheckpointError),
        ("/etc/passwd", UnsafeCheckpointError),
        ("", UnsupportedCheckpointError),
        ("a\0b", UnsupportedCheckpointError),
        ("\ud800", CorruptCheckpointError),
        (7, CorruptCheckpointError),
        (None, CorruptCheckpointError),
        (["a"], CorruptCheckpointError),
    ],
)
@pytest.mark.parametrize("ocdbt", [True, False])
def test_hostile_keys(item, key, error, ocdbt):
    path = with_tree(item(ocdbt=ocdbt), entry("a"), entry("b", key))
    with pytest.raises(error, match="_METADATA"):
        ot.open_checkpoint(path)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"key_metadata": []},
        entry("a") | {"key_metadata": {}},
        entry("a") | {"key_metadata": ["a"]},
        entry("a") | {"value_metadata": None},
        entry("a") | {"value_metadata": {"value_type": 3}},
        entry("a") | {"value_metadata": {"value_type": "np.ndarray", "skip_deserialize": "no"}},
        entry("a", kinds=[3]),
        entry("a", kinds=[True]),
        entry("a", kinds=[1]),
        entry("-1", kinds=[1]),
        entry("\u0661", kinds=[1]),
    ],
)
def test_broken_entries(item, said):
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        ot.open_checkpoint(with_tree(item(), said))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"tree_metadata": []}',
        '{"tree_metadata": {}, "tree_metadata": {}}',
        '{"tree_metadata": {}, "use_zarr3": 1}',
        '{"tree_metadata": {}, "use_ocdbt": "yes"}',
        '{"tree_metadata": ' + '{"a":' * 100_000,
        "[" * 1_000_000,
        "\ufeff{}",
    ],
)
def test_broken_metadata(item, text):
    path = item()
    (path / "_METADATA").write_text(text)
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        ot.open_checkpoint(path)


def test_two_nodes_of_one_name_or_place(item):
    with pytest.raises(CorruptCheckpointError, match="two leaves have this name") as caught:
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b", "c")))
    assert caught.value.leaf == "b/c"
    with pytest.raises(UnsupportedCheckpointError, match="two leaves have this name") as caught:
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b/c")))
    assert caught.value.leaf == "b/c"
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b.c")))
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(with_tree(item(), entry("b"), entry("b/")))
    with pytest.raises(UnsupportedCheckpointError, match="two leaves have this name"):
        ot.open_checkpoint(with_tree(item(), entry("b", "0"), entry("b/0", value_type="None", skip=True)))
    with pytest.raises(CorruptCheckpointError, match="leaves below it"):
        ot.open_checkpoint(with_tree(item(), entry("b"), entry("b", "c")))


def test_limits(item):
    path = item()
    for limits in (Limits(index_bytes=100), Limits(entries=2), Limits(nesting=1)):
        with pytest.raises(LimitExceededError, match="Limits"):
            ot.open_checkpoint(path, limits=limits)
    result = outcome(path, limits=Limits(rank=1))
    assert right_or((LimitExceededError,), result) == {"a", "b/c"}


def test_a_leaf_that_is_only_named(item):
    for ocdbt in (True, False):
        path = with_tree(item(ocdbt=ocdbt), entry("a"), entry("b", "c"), entry("b", "small"), entry("nowhere"))
        result = outcome(path)
        assert isinstance(result.pop("nowhere"), CorruptCheckpointError)
        assert not right_or((), result)


def test_a_restore_that_needs_a_broken_leaf_says_what_is_wrong_with_it(item):
    path = item(ocdbt=False)
    os.remove(path / "a" / ".zarray")
    target = {"a": np.zeros((64, 64)), "b": {"c": np.zeros((64, 64)), "small": np.zeros(3, int)}}
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray") as caught:
        ot.restore(path, target)
    assert caught.value.leaf == "a"
    del target["a"]
    restored = ot.restore(path, target, strict=False)
    np.testing.assert_array_equal(restored["b"]["c"], FLAT["b/c"])


def test_values_that_are_not_arrays(item):
    path = with_tree(
        item(),
        entry("a"),
        entry("text", value_type="string"),
        entry("old", value_type="np.ndarray", skip=True),
        entry("rows", value_type="Dict", skip=True),
    )
    with ot.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.leaves) == ["a", "old", "text"]
        with pytest.raises(CorruptCheckpointError, match=r"_strings\.json"):
            checkpoint.leaves["text"].get()
        with pytest.raises(CorruptCheckpointError, match="msgpack"):
            checkpoint.leaves["old"].get()
        np.testing.assert_array_equal(checkpoint.leaves["a"].get(), FLAT["a"])
    for text in ("[]", '{"text": 3}', '{"text": "\\ud800"}', '{"text": "a", "text": "b"}'):
        (path / "_strings.json").write_text(text)
        with pytest.raises(CorruptCheckpointError, match=r"_strings\.json"):
            ot.open_checkpoint(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"array_metadatas": [{}]}', '{"array_metadatas": 3}'])
def test_broken_array_metadatas_are_an_error_of_leaves_that_may_be_keys(tmp_path, text):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"key": np.arange(2, dtype=np.uint32), "w": np.ones(2, np.float32)})
    (tmp_path / "item" / "array_metadatas").mkdir(exist_ok=True)
    (tmp_path / "item" / "array_metadatas" / "process_0").write_text(text)
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        assert checkpoint.leaves["w"].get().tolist() == [1, 1]
        with pytest.raises(CorruptCheckpointError, match="process_0") as caught:
            checkpoint.leaves["key"].get()
        assert caught.value.leaf == "key"


def test_shardings_are_not_looked_at(item):
    for text in (
        "{",
        json.dumps({"YQ==": json.dumps({"sharding_type": "NamedSharding", "device_mesh": {"mesh": [1e9]}})}),
    ):
        path = item()
        (path / "_sharding").write_text(text)
        assert not right_or((), outcome(path))


def test_handlers_are_not_imported(item, tmp_path, monkeypatch):
    (tmp_path / "hostile_handler_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = item(to="3/state").parent
    said = {"item_handlers": {"state": "hostile_handler_module.Handler", "gone": "os.system"}}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(said))
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["step_metadata"] == said
        assert list(checkpoint.leaves) == list(FLAT)
    assert "hostile_handler_module" not in sys.modules
    (path / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_METADATA"):
        ot.open_checkpoint(path)


def test_a_step_without_arrays(tmp_path):
    step = tmp_path / "5"
    (step / "config").mkdir(parents=True)
    (step / "config" / "metadata").write_text("{}")
    (step / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"config": "json.Handler"}}')
    with pytest.raises(UnsupportedCheckpointError, match=r"'config' by 'json\.Handler'"):
        ot.open_checkpoint(step)


def test_an_unfinished_save_is_not_opened(item):
    for to in ("3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-17/state"):
        with pytest.raises(CheckpointNotFoundError, match="unfinished"):
            ot.open_checkpoint(item(to=to))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("a/.0", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def metadata_near(draw, good):
    """`_METADATA` with some of its parts replaced."""
    made = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        node, path = made, []
        while isinstance(node, dict | list) and node and (not path or draw(st.integers(0, 4))):
            keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            path.append((node, draw(st.sampled_from(keys))))
            node = path[-1][0][path[-1][1]]
        if path:
            parent, key = path[-1]
            parent[key] = draw(_JSON)
    return json.dumps(made)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 2,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
def test_any_metadata_is_an_error_or_a_checkpoint(saved, tmp_path, data):
    """Total: a typed error, or leaves that read or have one."""
    path = tmp_path / "item"
    if not path.exists():
        shutil.copytree(saved / "TrueFalse", path)
    good = (saved / "TrueFalse" / "_METADATA").read_text()
    (path / "_METADATA").write_text(data.draw(metadata_near(good)))
    with contextlib.suppress(CheckpointError), ot.open_checkpoint(path) as checkpoint:
        checkpoint.tree()
        for lazy in checkpoint.leaves.values():
            with contextlib.suppress(CheckpointError):
                lazy.get()

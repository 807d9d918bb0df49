"""`ot.diff` and the command `diff`: names, shapes, dtypes and values, by streaming, of any two checkpoints."""

import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError, RestorePlanError
from orbax_t5x.lazy import LazyThreadPoolArray
from orbax_t5x.operations.diff.values import LargestDifference
from tests.conftest import GOLDENS
from tests.support.compared import TREE
from tests.support.memory_checkpoint import FailingLeaf, checkpoint
from tests.support.saving import save

MIB = 1 << 20


def statuses(report):
    return {leaf.name: leaf.status for leaf in report.leaves}


def run(capsys, *arguments):
    code = main(["diff", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_equal_checkpoints_are_equal_whatever_their_layout(tmp_path):
    one = save(tmp_path / "one", TREE)
    other = save(tmp_path / "other", TREE, {"use_ocdbt": False, "use_zarr3": True, "use_compression": False})
    report = ot.diff(one, other)
    assert report.equal and set(statuses(report).values()) == {"equal"}
    # Both sides, each once: four kernels and a step; text is read and has no size.
    assert report.bytes_read == 2 * (4 * 48 + 8)
    assert "6 leaves equal" in str(report) and "kernel" not in str(report)


def test_every_kind_of_difference(tmp_path):
    a = {"same": np.ones(2), "a_only": np.ones(2), "shape": np.ones((2, 3)), "dtype": np.ones(3, np.float32)}
    b = {"same": np.ones(2), "b_only": np.ones(2), "shape": np.ones((3, 2)), "dtype": np.ones(3, ml_dtypes.bfloat16)}
    a |= {"values": np.arange(6).reshape(2, 3), "text": "one", "both": np.float32([1, 2.001]), "kind": "text"}
    b |= {"values": np.array([[0, 1, 2], [3, 4, -5]]), "text": "two", "both": np.float64([1, 2]), "kind": np.ones(())}
    report = ot.diff(save(tmp_path / "a", a), save(tmp_path / "b", b))
    assert statuses(report) == {
        "a_only": "only in a",
        "b_only": "only in b",
        "both": "values",
        "dtype": "dtype",
        "kind": "dtype",
        "same": "equal",
        "shape": "shape",
        "text": "values",
        "values": "values",
    }
    leaves = {leaf.name: leaf for leaf in report.leaves}
    assert (leaves["a_only"].shape_b, leaves["a_only"].dtype_b, leaves["b_only"].shape_a) == (None, None, None)
    assert (leaves["shape"].shape_a, leaves["shape"].shape_b) == ((2, 3), (3, 2))
    assert (leaves["dtype"].dtype_a, leaves["dtype"].dtype_b) == ("float32", "bfloat16")
    assert leaves["values"].absolute == LargestDifference(10, (1, 2), 5, -5) and leaves["values"].differing == 1
    assert leaves["values"].relative == LargestDifference(2.0, (1, 2), 5, -5)
    assert (leaves["both"].dtype_a, leaves["both"].dtype_b) == ("float32", "float64")
    assert leaves["kind"].reason == "text against numbers" and not report.equal
    said = " ".join(str(report).split())
    assert "float32[3] → bfloat16[3]" in said and "1 of 6 elements, absolute ≤ 10 at [1,2] (5 → -5)" in said


def test_tolerances_are_those_of_isclose(tmp_path):
    a, b = np.array([1.0, 2.0, 100.0]), np.array([1.0, 2.001, 100.05])
    paths = save(tmp_path / "a", {"w": a}), save(tmp_path / "b", {"w": b})
    for atol, rtol in [(0, 0), (1e-3, 0), (2e-3, 0), (0.06, 0), (0, 1e-3), (0, 1e-4), (1e-3, 4e-4)]:
        (leaf,) = ot.diff(*paths, atol=atol, rtol=rtol).leaves
        close = np.isclose(a, b, atol=atol, rtol=rtol)
        assert leaf.differing == np.count_nonzero(~close)
        assert leaf.status == ("equal" if close.all() else "values")
        assert leaf.absolute.value == np.abs(a - b).max() and leaf.absolute.index == (2,)


def test_without_values_nothing_is_read():
    one, other = checkpoint({"w": np.ones(4), "v": np.ones(3)}), checkpoint({"w": np.zeros(4), "v": np.ones(2)})
    report = ot.diff(one, other, values=False)
    assert statuses(report) == {"v": "shape", "w": "equal"} and report.bytes_read == 0
    assert one.made["w"].boxes == other.made["w"].boxes == []
    assert "values not compared" in str(report)
    assert ot.diff(one, one, values=False).equal


def test_none_and_empty_containers_have_no_values(tmp_path):
    one = save(tmp_path / "one", {"w": np.ones(2), "none": None, "empty": {}})
    other = save(tmp_path / "other", {"w": np.ones(2)})
    assert ot.diff(one, other).equal
    other = save(tmp_path / "third", {"w": np.ones(2), "none": np.ones(1)})
    assert statuses(ot.diff(one, other)) == {"none": "only in b", "w": "equal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5_1_1_f32", "t5_1_0_bf16", "t5_1_1_bf16_snappy"])
def test_a_bundle_and_its_conversion(tmp_path, name):
    bundle = GOLDENS / "tf_bundle" / name
    ot.convert(bundle, tmp_path / "t5x", ot.transforms.Translate())
    assert ot.diff(bundle, tmp_path / "t5x", ot.transforms.Translate()).equal
    assert ot.diff(tmp_path / "t5x", ot.Source(bundle, ot.transforms.Translate())).equal
    report = ot.diff(bundle, tmp_path / "t5x")
    assert {"only in a", "only in b"} <= set(statuses(report).values())


@pytest.mark.slow
def test_auto_finds_the_way_to_the_other(tmp_path):
    hf = GOLDENS / "safetensors" / "t5_1_1"
    ot.convert(hf, tmp_path / "t5x", ot.rules.hf_t5_to_t5x())
    report = ot.diff(hf, tmp_path / "t5x", "auto")
    assert report.equal and report.rules
    with pytest.raises(RestorePlanError, match="auto"):
        ot.diff(GOLDENS / "flax_msgpack" / "t5_1_1", save(tmp_path / "other", {"w": np.ones(2)}), "auto")


@pytest.mark.slow
def test_every_format_against_an_orbax_copy(tmp_path):
    """What `convert` wrote is compared elsewhere with what other readers read."""
    sources = ["safetensors/t5_1_1", "flax_msgpack/t5_1_1", "tf_bundle/partitioned", "t5x_orbax/d8_adafactor"]
    for number, source in enumerate(sources):
        no_text = ot.transforms.Drop("note") if "bundle" in source else ()  # Orbax stores no arrays of strings
        ot.convert(GOLDENS / source, tmp_path / str(number), no_text)
        report = ot.diff(GOLDENS / source, tmp_path / str(number), no_text)
        assert report.equal and report.leaves


def test_transforms_get_the_other_as_their_target(tmp_path):
    """An assignment map's patterns match the target's names."""
    a, b = save(tmp_path / "a", {"old": np.ones(3)}), save(tmp_path / "b", {"new": np.ones(3)})
    assert ot.diff(a, b, ot.transforms.AssignmentMap([("new", "old")])).equal

    def function(state, target):
        assert target["new"].shape == (3,)
        return {"new": state["old"]}

    assert ot.diff(a, b, function).equal
    assert ot.diff(a, b, [ot.transforms.Rename([("old", "new")])]).rules == ("Rename((('old', 'new'),))",)


def test_several_sources_and_items(tmp_path):
    one, other = save(tmp_path / "one", {"w": np.ones(2)}), save(tmp_path / "other", {"w": np.zeros(2)})
    both = {"x": one, "y": other}
    assert ot.diff(both, save(tmp_path / "both", {"x": {"w": np.ones(2)}, "y": {"w": np.zeros(2)}})).equal
    with ocp.CheckpointManager(tmp_path / "run", item_handlers={"state": ot.TrainStateHandler()}) as manager:
        manager.save(1, args=ocp.args.Composite(state=ot.args.TrainStateSave({"w": np.ones(2)})))
    assert ot.diff(ot.Source(tmp_path / "run", item="state"), one).equal
    assert ot.diff(tmp_path / "run", tmp_path / "run", item="state").equal
    with pytest.raises(CheckpointNotFoundError, match="other"):
        ot.diff(tmp_path / "run", one, item="other")


def test_problems_of_transforms_are_raised_together(tmp_path):
    one = save(tmp_path / "one", {"w": np.ones(2)})
    wrong = [ot.transforms.Rename([("nothing", "x")]), ot.transforms.Reshape("w", (3,))]
    with pytest.raises(RestorePlanError) as caught:
        ot.diff(one, one, wrong)
    assert len(caught.value.problems) == 2 and caught.value.path == str(one)
    with pytest.raises(RestorePlanError, match="pad with a number"):
        ot.diff(one, one, ot.transforms.Pad("w", (4,), value=ot.transforms.FALLBACK))


def test_transforms_that_were_applied_before_are_not_applied_again(tmp_path):
    rename = ot.transforms.Rename([("old", "new")])
    ot.convert(save(tmp_path / "old", {"old": np.ones(2)}), tmp_path / "new", rename)
    report = ot.diff(tmp_path / "new", tmp_path / "new", rename)
    assert report.equal and report.rules == () and "is_resuming=False" in report.warnings[0]
    with pytest.raises(RestorePlanError):
        ot.diff(tmp_path / "new", tmp_path / "new", rename, is_resuming=False)


def test_damaged_leaves_do_not_stop_the_others(tmp_path, capsys):
    tree = {"bad": np.ones(9), "good": np.ones(9), "other": np.ones(9), "gone": np.ones(9)}
    a = save(tmp_path / "a", tree, {"use_ocdbt": False, "use_compression": False})
    b = save(tmp_path / "b", {**tree, "other": np.zeros(9)}, {"use_ocdbt": False, "use_compression": False})
    data = bytearray((a / "bad" / "0").read_bytes())
    data[-1] ^= 1
    (a / "bad" / "0").write_bytes(data)
    (b / "gone" / "0").unlink()
    report = ot.diff(a, b)
    assert statuses(report) == {"bad": "damaged", "gone": "damaged", "good": "equal", "other": "values"}
    reasons = {leaf.name: leaf.reason for leaf in report.leaves}
    assert reasons["bad"].startswith("a: ") and "crc32c" in reasons["bad"] and reasons["gone"].startswith("b: ")
    code, out, _ = run(capsys, a, b)
    assert code == 1 and "damaged:\nbad" in out and "2 leaves damaged, 1 leaf with other values, 1 leaf equal" in out


def test_leaves_that_cannot_be_read():
    error = CheckpointIOError("no such luck", path="/memory", leaf="w")
    one = checkpoint({"w": FailingLeaf("w", np.ones(4), error), "v": np.ones(2)})
    report = ot.diff(one, checkpoint({"w": np.ones(4), "v": np.ones(2)}))
    assert statuses(report) == {"v": "equal", "w": "unreadable"}
    assert report.leaves[1].reason == "a: CheckpointIOError: no such luck"


def test_leaves_that_are_broken_from_the_start(tmp_path):
    path = save(tmp_path / "a", {"w": np.ones(4), "v": np.ones(2)}, {"use_ocdbt": False})
    (path / "w" / ".zarray").write_text("{")
    report = ot.diff(path, path, values=False)
    assert statuses(report) == {"v": "equal", "w": "damaged"}


def test_what_a_function_raises_is_raised():
    def fail():
        raise KeyError("of the caller")

    def function(state, target):
        return {"w": LazyThreadPoolArray((2,), np.float32, fail)}

    one = checkpoint({"w": np.ones(2, np.float32)})
    with pytest.raises(KeyError, match="of the caller"):
        ot.diff(one, one, function)


@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"values": "no"}, TypeError, "pass True, or False"),
        ({"atol": -1}, ValueError, "not negative"),
        ({"rtol": math.nan}, ValueError, "finite"),
        ({"rtol": "1e-3"}, TypeError, "no number"),
        ({"memory_limit_bytes": 0}, ValueError, "at least 1"),
        ({"progress": "foo"}, ValueError, "'bar'"),
        ({"item": {"w": 1}}, TypeError, "item="),
        ({"transforms": "hf_t5_to_t5x"}, TypeError, r"ot\.rules\.hf_t5_to_t5x\(\)"),
        ({"transforms": ot.transforms.Translate}, TypeError, r"Translate\(…\)"),
    ],
)
def test_arguments_that_cannot_be(tmp_path, keywords, error, said):
    one = save(tmp_path / "one", {"w": np.ones(2)})
    with pytest.raises(error, match=said):
        ot.diff(one, one, **keywords)


@pytest.mark.parametrize("wrong", [np.ones(3), {"w": np.ones(3)}, None, 5])
def test_states_are_no_checkpoints(tmp_path, wrong):
    with pytest.raises(TypeError, match="path"):
        ot.diff(save(tmp_path / "one", {"w": np.ones(3)}), wrong)


@pytest.mark.slow
def test_checkpoints_of_t5x(tmp_path):
    """A native step beside its Orbax copy: chunks of gzip against chunks of zstd."""
    shutil.unpack_archive(GOLDENS / "t5x_native" / "d8_bf16.tar.gz", tmp_path / "t5x", filter="data")
    path = next(Path(tmp_path / "t5x").rglob("checkpoint_3"))
    ot.convert(path, tmp_path / "orbax")
    report = ot.diff(path, tmp_path / "orbax")
    assert report.equal and len(report.leaves) > 10

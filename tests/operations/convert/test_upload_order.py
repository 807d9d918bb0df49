"""The order of an upload: after each of its steps, real readers find the old checkpoint, the new one, or none."""

import random
import shutil

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError
from orbax_t5x.operations.convert.safetensors_layout import plan_files
from orbax_t5x.operations.convert.upload_order import Stage, upload_order
from tests.support.bundle_writer import bundle_of

OLD = {f"leaf_{index}": np.full((8, 16), index, np.float32) for index in range(6)}
NEW = {name: array + 100 for name, array in OLD.items()} | {"more": np.ones(3, np.float32)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by (which, shape)."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for which, arrays in {"old": OLD, "new": NEW}.items():
        (root / which).mkdir()
        source = bundle_of(arrays).write(root / which)
        made[which, "orbax"] = root / which / "orbax"
        ot.convert(source, made[which, "orbax"])
        made[which, "one file"] = root / which / "one"
        ot.convert(source, made[which, "one file"], format="safetensors")
        for parts, size in {"some files": 1100, "many files": 10}.items():
            made[which, parts] = root / which / parts
            with pytest.MonkeyPatch.context() as patch:
                target = "orbax_t5x.operations.convert.safetensors_layout.plan_files"
                patch.setattr(target, lambda tensors, _, size=size: plan_files(tensors, size))
                ot.convert(source, made[which, parts], format="safetensors")
    return made


def files_of(directory):
    return {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}


def found_in(directory):
    """ "old", "new", or None where nothing opens; anything else is a failure."""
    try:
        with ot.open_checkpoint(directory) as checkpoint:
            found = {name: view.get() for name, view in checkpoint.leaves.items()}
    except CheckpointError:
        return None
    which, expected = ("old", OLD) if "more" not in found else ("new", NEW)
    assert found.keys() == expected.keys(), sorted(found)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return which


PAIRS = [(None, "orbax"), (None, "one file"), (None, "some files"), ("orbax", "orbax")]
PAIRS += [(old, new) for old in ("one file", "some files", "many files") for new in ("one file", "some files")]


@pytest.mark.slow
def test_nothing_half_written_opens_after_any_step_of_any_replacement(checkpoints, tmp_path):
    order = random.Random(0)
    for number, (old, new) in enumerate(PAIRS):
        place = tmp_path / f"{number}"
        if old is None:
            place.mkdir()
        else:
            shutil.copytree(checkpoints["old", old], place)
        files = files_of(checkpoints["new", new])
        seen = []
        for stage in upload_order(files, files_of(place)):
            for name in order.sample(stage.remove, len(stage.remove)):
                (place / name).unlink()
                seen.append(found_in(place))
            for name in order.sample(stage.write, len(stage.write)):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(files[name], place / name)
                seen.append(found_in(place))
        assert seen[-1] == "new" and files_of(place).keys() == files.keys(), (old, new)
        states = [state for index, state in enumerate(seen) if index == 0 or state != seen[index - 1]]
        assert states in (["old", None, "new"], ["old", "new"], [None, "new"], ["new"]), (old, new, states)


def test_one_object_is_replaced_at_once():
    assert upload_order(["model.safetensors"], ["model.safetensors"]) == [
        Stage([], []),
        Stage([], ["model.safetensors"]),
        Stage([], []),
    ]


def test_what_is_there_already_is_neither_written_nor_removed():
    stages = upload_order(["d/1", "d/2", "manifest.ocdbt"], ["d/1", "d/3", "manifest.ocdbt"], ["d/1"])
    assert [name for stage in stages for name in stage.write] == ["d/2", "manifest.ocdbt"]
    assert {name for stage in stages for name in stage.remove} <= {"d/3", "manifest.ocdbt"}

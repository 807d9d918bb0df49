"""Five places where a restore by others gives wrong values without an error or a warning, beside what happens here.

`python -m benchmarks.silent` makes each case in a temporary directory, runs it with stock Orbax and with orbax_t5x, and
prints both outcomes. Exit code 0: each is as docs/project/beside-the-others.md says; 1: Orbax does something else.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

_NATIVE_T5X = Path(__file__).parents[1] / "tests" / "goldens" / "t5x_native"


@dataclasses.dataclass(frozen=True)
class Case:
    """One case: what is done, `theirs` and `ours` that do it, and what is wrong in the result of `theirs`."""

    title: str
    theirs: Callable[[Path], Any]
    is_wrong: Callable[[Any], bool]
    ours: Callable[[Path], Any]


def _saved(directory: Path, tree: Any) -> Path:
    path = directory / "checkpoint"
    ocp.PyTreeCheckpointer().save(path, tree)
    return path


def _abstract(shape, dtype=np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def _stock_restore(path: Path, target: Any, **options: Any) -> Any:
    arguments = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), **options
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path, args=arguments)


_RENAMED = {"encoder": {"kernel": _abstract((2,))}, "decoder": {"kernel": _abstract((2,))}}


def _two_kernels(directory: Path) -> Path:
    return _saved(directory, {"encoder": {"kernel": np.ones(2, np.float32)}, "dec": {"kernel": np.ones(2, np.float32)}})


def _flipped(directory: Path, save: Callable[[Path], None]) -> Path:
    """Saves one array without compression, flips a bit of its values on disk, and returns the path."""
    path = directory / "flipped"
    save(path)
    (file,) = [one for one in path.rglob("*") if one.is_file() and np.full(8, 1.5).tobytes() in one.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(np.full(8, 1.5).tobytes()) + 6] ^= 0x10
    file.write_bytes(data)
    return path


_PLAIN = {"values": np.full(4096, 1.5)}


def _save_stock(path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False)
    ocp.Checkpointer(handler).save(path, args=ocp.args.PyTreeSave(_PLAIN))


def _save_ours(path: Path) -> None:
    handler = ot.TrainStateHandler(use_compression=False, use_ocdbt=False)
    ocp.Checkpointer(handler).save(path, args=ot.args.TrainStateSave(_PLAIN))


_LAYERS = {f"layers_{number}/kernel": np.full(2, number, np.float32) for number in range(3)}


def _rename_by_surgery(_: Path) -> Any:
    from orbax.checkpoint.experimental.model_surgery.transformations import renaming

    return renaming.rename_by_regex([(r"layers_\d+/kernel", "layers/kernel")])(_LAYERS)


def _native_step(directory: Path) -> Path:
    with tarfile.open(_NATIVE_T5X / "d1_adafactor.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "d1_adafactor" / "checkpoint_3"


def _has_specs(tree: Any) -> bool:
    if not isinstance(tree, dict):
        return False
    return "kvstore" in tree or any(_has_specs(item) for item in tree.values())


CASES = (
    Case(
        "A target whose decoder has another name than the checkpoint's, restored in part",
        lambda directory: _stock_restore(_two_kernels(directory), _RENAMED, partial_restore=True),
        lambda tree: isinstance(tree["decoder"]["kernel"], jax.ShapeDtypeStruct),  # a shape, where an array should be
        lambda directory: ot.restore(_two_kernels(directory), _RENAMED, strict=False),
    ),
    Case(
        "float32 weights into an int8 target",
        lambda directory: _stock_restore(
            _saved(directory, {"w": np.full(2, 300.7, np.float32)}), {"w": _abstract((2,), np.int8)}
        ),
        lambda tree: np.asarray(tree["w"]).dtype == np.int8,  # none of the values survived
        lambda directory: ot.restore(
            _saved(directory, {"w": np.full(2, 300.7, np.float32)}), {"w": _abstract((2,), np.int8)}
        ),
    ),
    Case(
        "One bit of the stored values flipped",
        lambda directory: ocp.PyTreeCheckpointer().restore(_flipped(directory, _save_stock)),
        lambda tree: not np.array_equal(tree["values"], _PLAIN["values"]),
        lambda directory: ot.restore(_flipped(directory, _save_ours), None),
    ),
    Case(
        "A rule that gives three layers one name",
        _rename_by_surgery,
        lambda tree: len(tree) == 1,  # two layers are gone
        lambda directory: ot.restore(
            _saved(directory, _LAYERS), None, [ot.transforms.Rename([(r"layers_\d+/kernel", "layers/kernel")])]
        ),
    ),
    Case(
        "A native T5X step, restored by Orbax's PyTreeCheckpointer",
        lambda directory: ocp.PyTreeCheckpointer().restore(_native_step(directory)),
        _has_specs,  # descriptions of arrays, where arrays should be
        lambda directory: ot.restore(_native_step(directory), None),
    ),
)


def outcome(case: Case) -> tuple[str, str, bool]:
    """Runs a case; returns what Orbax and this package did, and whether Orbax was silently wrong and this one not."""
    with tempfile.TemporaryDirectory() as first, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            is_wrong = case.is_wrong(case.theirs(Path(first)))
            theirs = "wrong values, no error" if is_wrong else "right values"
        except Exception as error:
            is_wrong, theirs = False, _one_line(error)
        theirs += f", {len(raised)} warnings" if raised else ""
    with tempfile.TemporaryDirectory() as second:
        try:
            result = case.ours(Path(second))
            is_safe, ours = not case.is_wrong(result), "right values"
        except ot.errors.CheckpointError as error:
            is_safe, ours = True, _one_line(error)
    return theirs, ours, is_wrong and is_safe


def _one_line(error: Exception) -> str:
    text = re.sub(r"/\S*/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:160]}"


def main() -> int:
    """Prints all cases."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    every = []
    for number, case in enumerate(CASES, 1):
        theirs, ours, is_as_said = outcome(case)
        every.append(is_as_said)
        print(f"{number}. {case.title}\n   Orbax {ocp.__version__}: {theirs}\n   orbax-t5x {ot.__version__}: {ours}")
    return int(not all(every))


if __name__ == "__main__":
    sys.exit(main())

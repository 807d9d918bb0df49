"""The demo's job; every number is measured in this run.

The checkpoint was written by TensorFlow, the values it is compared with by T5X; see `cli/demo_data/PROVENANCE.md`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.entries import entry_array, entry_sharding
from orbax_t5x.text.output import print_text
from orbax_t5x.text.wording import counted, leaves_text, size_text
from orbax_t5x.trees.flat import flatten, unflatten

_DATA = Path(__file__).parents[2] / "cli" / "demo_data"
_STEP = 1_000_000
_MESH = {"data": 2, "model": 4}
_SHOWN_DIFFERENCES = 5
_TIMEOUT_SECS = 300


def main(directory: str, kept: str) -> int:
    """Does the job; returns 0 if all compares equal."""
    started = time.monotonic()
    job = _DemoJob(Path(directory))
    print_text("A T5 checkpoint in Mesh TensorFlow's names becomes a sharded JAX state.\n")
    job.look()
    job.plan()
    job.restore()
    job.save_and_resume()
    job.read_with_stock_orbax()
    seconds = time.monotonic() - started
    where = f" What was written is in {directory}." if kept else ""
    print_text(f"\n{'NOT ALL THE SAME.' if job.failed else 'All the same, bit for bit.'} {seconds:.1f} s.{where}")
    return int(job.failed)


class _DemoJob:
    """Steps of the demo."""

    def __init__(self, directory: Path):
        self.failed = False
        self._directory = directory
        self._root = directory / "run"
        self._bundle = _DATA / "model.ckpt-1000000"
        self._names = ot.transforms.Translate()
        self._mesh = jax.make_mesh(
            tuple(_MESH.values()), tuple(_MESH), axis_types=(jax.sharding.AxisType.Auto,) * len(_MESH)
        )
        lines = (_DATA / "as_t5x_imports_it.txt").read_text().splitlines()
        self._expected = {name: digest for digest, name in map(str.split, lines)}
        self._target: Any = None
        self._plan: RestorePlan
        self._state: Any = None

    # -- steps

    def look(self) -> None:
        """Opens the bundle."""
        open_checkpoint = ot.open_checkpoint
        with _Clock() as clock, open_checkpoint(self._bundle) as checkpoint:
            leaves = checkpoint.leaves
        size = size_text(sum(view.nbytes for view in leaves.values()))
        shards = counted(checkpoint.metadata["num_shards"], "shard")
        _say("Inspect", f"{leaves_text(len(leaves))}, {size} in {shards}, as TensorFlow wrote them at step")
        _say(
            "", f"{checkpoint.step:,}; opened in {clock}, reading only its index of {size_text(checkpoint.index_bytes)}"
        )

    def plan(self) -> None:
        """Plans the restore onto an abstract training state."""
        with ot.open_checkpoint(self._bundle) as checkpoint:
            everything = ot.plan_restore(checkpoint, None, self._names)
            self._target = self._abstract_state(everything)
            parameters = {"target": self._target["target"]}
            inference = ot.plan_restore(checkpoint, parameters, self._names, strict=False)
        with _Clock() as clock:
            self._plan = ot.plan_restore(self._bundle, self._target, self._names)
        read = sum(entry.action == "read" for entry in self._plan.entries)
        made = sum(entry.action == "value" for entry in self._plan.entries)
        sizes = size_text(self._plan.bytes_to_read), size_text(inference.bytes_to_read)
        example = next(entry for entry in self._plan.entries if entry.name.endswith("layers_1/mlp/wi_0/kernel"))
        _say("Plan", f"the {leaves_text(len(self._plan.entries))} of a T5X train state, in {clock}: {read} to read,")
        _say("", f"{sizes[0]} ({sizes[1]} for the parameters only), and {made}")
        _say("", "placeholders that T5X's Adafactor has; one of them all:")
        _say("", f"  {example.sources[0]}")
        _say("", f"  -> {example.name}")
        _say("", f"     {entry_array(example)}, {entry_sharding(example)}")

    def restore(self) -> None:
        """Restores onto eight devices, and compares with T5X's result.

        Of the same bundle.
        """
        with _Clock() as clock:
            self._state = jax.block_until_ready(self._plan.execute())
        report = self._plan.report
        assert report is not None
        arrays = flatten(self._state).values()
        shards = sum(len(array.addressable_shards) for array in arrays)
        mesh = " x ".join(str(size) for size in _MESH.values())
        _say(
            "Restore",
            f"onto {len(jax.devices())} CPU devices, {mesh}, in {clock}: {size_text(report.bytes_read)} read,",
        )
        _say("", f"{counted(shards, 'shard')} placed, the checksums of {leaves_text(len(report.verified))} hold")
        self._compare("what T5X's own importer makes of it", _digests(flatten(self._state)), self._expected)

    def save_and_resume(self) -> None:
        """Saves by a CheckpointManager, and restores as a restarted job."""
        with ocp.CheckpointManager(self._root, item_handlers=ot.TrainStateHandler()) as manager, _Clock() as clock:
            manager.save(_STEP, args=ot.args.TrainStateSave(self._state, provenance=self._plan.provenance))
            manager.wait_until_finished()
        _say("Save", f"through an Orbax CheckpointManager, in {clock}")
        with ocp.CheckpointManager(self._root, item_handlers=ot.TrainStateHandler()) as manager, _Clock() as clock:
            arguments = ot.args.TrainStateRestore(self._target, self._names)
            restored = manager.restore(manager.latest_step(), args=arguments)
        _say("Resume", f"with the same target and transforms, in {clock}: the step")
        _say("", "records that its names were translated")
        self._compare("what was saved", _digests(flatten(restored)), _digests(flatten(self._state)))
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(self._state), strict=True)
        self._verdict("every leaf is sharded as it was", all(mine.sharding == other.sharding for mine, other in pairs))

    def read_with_stock_orbax(self) -> None:
        """Reads the save in a process without this package."""
        out = self._directory / "stock.npz"
        reader = Path(__file__).with_name("stock_reader.py")
        command = [sys.executable, "-P", str(reader), str(self._root / str(_STEP) / "default"), str(out)]
        with _Clock() as clock:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECS, check=False)
        _say("Share", f"stock Orbax reads it, in a process without orbax_t5x, in {clock}")
        if finished.returncode:
            self._verdict("stock Orbax reads it", False)
            print_text(finished.stderr)
            return
        with np.load(out) as values:
            self._compare("what was saved", _digests(values), _digests(flatten(self._state)))

    # -- parts

    def _abstract_state(self, everything: RestorePlan) -> dict[str, Any]:
        """Returns the abstract state.

        Kernels are on all eight devices, the rest as it divides.
        """
        leaves = {}
        for entry in everything.entries:
            dtype = np.int32 if entry.dtype == np.int64 else entry.dtype
            sharding = NamedSharding(self._mesh, _spec(entry.shape))
            leaves[entry.name] = jax.ShapeDtypeStruct(entry.shape, dtype, sharding=sharding)
        return unflatten(leaves)

    def _compare(self, words: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        names = {**ours, **theirs}
        different = [name for name in names if ours.get(name) != theirs.get(name)]
        self._verdict(f"{len(names) - len(different)} of {leaves_text(len(names))} equal {words}", not different)
        for name in different[:_SHOWN_DIFFERENCES]:
            _say("", f"  different: {name}")

    def _verdict(self, words: str, good: bool) -> None:
        self.failed |= not good
        _say("", f"{'ok ' if good else 'NOT'} {words}")


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    if len(shape) == 2:
        return PartitionSpec("data", "model")
    return PartitionSpec("model") if shape and shape[0] % _MESH["model"] == 0 else PartitionSpec()


def _digests(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of each array's dtype, shape and every bit."""
    return {name: _digest(np.asarray(array)) for name, array in arrays.items()}


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype}{list(array.shape)}".encode() + array.tobytes()).hexdigest()[:16]


def _say(step: str, text: str) -> None:
    print_text(f"{step:<9}{text}")


class _Clock:
    """Wall time of a block, as text."""

    def __enter__(self) -> _Clock:
        self._started = time.monotonic()
        self._seconds = 0.0
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._seconds = time.monotonic() - self._started

    def __str__(self) -> str:
        return f"{self._seconds * 1000:.0f} ms" if self._seconds < 1 else f"{self._seconds:.1f} s"

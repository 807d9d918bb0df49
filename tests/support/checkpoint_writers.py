"""Functions that write arrays as a checkpoint of each format, each by the format's own library."""

from pathlib import Path

import orbax.checkpoint as ocp
import safetensors.numpy

from tests.support.bundle_writer import bundle_of


def write_bundle(directory: Path, arrays) -> Path:
    return bundle_of(arrays, 2).write(directory)


def write_safetensors(directory: Path, arrays) -> Path:
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    return directory


def orbax_writer(*, ocdbt: bool, zarr3: bool):
    def write(directory: Path, arrays) -> Path:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
            checkpointer.save(directory / "item", args=ocp.args.PyTreeSave(arrays))
        return directory / "item"

    return write


WRITERS = {
    "tf_bundle": write_bundle,
    "safetensors": write_safetensors,
    "ocdbt": orbax_writer(ocdbt=True, zarr3=False),
    "ocdbt_zarr3": orbax_writer(ocdbt=True, zarr3=True),
    "zarr": orbax_writer(ocdbt=False, zarr3=False),
    "zarr3": orbax_writer(ocdbt=False, zarr3=True),
}

"""Conversions that are killed after some blocks, and the checks of the next ones."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.operations.convert.work_directory import WorkDirectory

MIB = 1 << 20
RNG = np.random.default_rng(0)
ARRAYS = {f"leaf_{index}": RNG.standard_normal((64, 1024), np.float32) for index in range(12)}


class Killed(BaseException):
    """Stands for a kill."""


def work_of(out):
    return out.parent / f".{out.name}.orbax-t5x-convert"


def convert(source, out, transforms=(), *, format="orbax", limit=4 * MIB, **keywords):
    return ot.convert(source, out, transforms, format=format, memory_limit_bytes=limit, **keywords)


def leave(source, out, *arguments, blocks=5, **keywords):
    """A conversion that is killed when so many blocks stand, or by what the test has patched."""
    seen = []

    def progress(*told):
        seen.append(told)
        if len(seen) == blocks:
            raise Killed

    def left(work, *exception):
        work._lock.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkDirectory, "__exit__", left)
        with pytest.raises(Killed):
            convert(source, out, *arguments, progress=progress, **keywords)
    assert work_of(out).exists() and not out.exists()


def read(out, format):
    if format == "orbax":
        return ocp.PyTreeCheckpointer().restore(out)
    return safetensors.numpy.load_file(out / "model.safetensors")


def assert_holds(out, format, arrays):
    found = read(out, format)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert [path.name for path in out.parent.iterdir()] == [out.name]

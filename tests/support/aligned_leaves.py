"""Leaves as the alignment of two trees takes them."""

from orbax_t5x.rules.alignment.layers import NamedLeaf
from orbax_t5x.rules.alignment.words import path_of
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms


def items(shapes):
    """Leaves of shapes by name."""
    return [NamedLeaf(name, shape, "float32", path_of(name)) for name, shape in shapes.items()]


def applied(transforms, source, target=None):
    """Returns the result as NumPy; no transform finds a problem."""
    diagnostics = Diagnostics()
    result = run_transforms(transforms, source, target or {}, is_resuming=False, diagnostics=diagnostics)
    assert diagnostics.problems == []
    return {name: as_numpy(value) for name, value in result.items()}


def wrong_leaves(alignment, source, target):
    """Names of the target that are assigned, and get another array than theirs."""
    result = applied(alignment.transforms, source, target)
    return [
        name
        for name, value in target.items()
        if name not in alignment.open
        and (name not in result or (result[name].shape, result[name].tobytes()) != (value.shape, value.tobytes()))
    ]

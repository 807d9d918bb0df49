"""Leaves of a source after transforms, for callers without a target."""

import contextlib

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.transformed import open_transformed
from tests.support.memory_checkpoint import checkpoint

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def opened(source, transforms=(), target=None, **options):
    with contextlib.ExitStack() as stack:
        return open_transformed(source, target or {}, transforms, RestoreOptions(**options), stack)


def test_leaves_are_views_and_nothing_is_read():
    source = checkpoint({"a": ARRAY, "b": ARRAY}, empties={"c": None})
    found = opened(source, [ot.transforms.Rename([("a", "x")])])
    assert set(found.views) == {"x", "b"} and found.path == "/memory"  # None has no values
    assert len(found.rules) == 1 and "Rename" in found.rules[0] and found.warnings == ()
    assert all(leaf.boxes == [] for leaf in source.made.values())
    np.testing.assert_array_equal(found.views["x"].get(), ARRAY)


def test_a_source_runs_its_own_transforms_before_those_of_the_call():
    own = ot.Source(checkpoint({"a": ARRAY}), [ot.transforms.Rename([("a", "b")])])
    assert set(opened({"s": own}, [ot.transforms.Rename([("s/b", "c")])]).views) == {"c"}


def test_one_array_behind_a_function_stays_one_view():
    calls = []
    array = ot.LazyThreadPoolArray(ARRAY.shape, ARRAY.dtype, lambda: calls.append(1) or ARRAY)

    def twice(state, target):
        return {"x": array, "y": array}

    views = opened(checkpoint({"a": ARRAY}), [twice], strict=False).views
    assert views["x"] is views["y"] and calls == []


@pytest.mark.parametrize(
    ("value", "kind"), [("lorem ipsum".split(), "transform"), (object(), "transform")], ids=["texts", "object"]
)
def test_what_is_no_array_is_a_problem(value, kind):
    with pytest.raises(RestorePlanError) as caught:
        opened(checkpoint({"a": ARRAY}), [lambda state, target: {"a": [[1], value]}])
    assert {problem.kind for problem in caught.value.problems} == {kind}


def test_elements_that_only_a_restore_can_fill_are_a_problem():
    pad = ot.transforms.Pad("a", (4, 3), ot.transforms.FALLBACK)
    with pytest.raises(RestorePlanError, match="this call has none") as caught:
        opened(checkpoint({"a": ARRAY}), [pad])
    assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("fallback", "a")]

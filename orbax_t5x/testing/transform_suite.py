"""Suite for transforms: a subclass lists cases for all checks.

    class TestFlip(TransformSuite):
        cases = {
            "last": Case(
                make=lambda: Flip(".*/w", -1),
                other=lambda: Flip(".*/w", 0),
                source=ARRAYS,
                result={name: np.flip(array, -1) for name, array in ARRAYS.items()},
            )
        }

The expected result is computed independently, by NumPy for example. The suite checks values bit for bit, for NumPy
and JAX arrays and both kinds of lazy arrays; that nothing is read and no argument changed; that the transform
composes, is a frozen value, describes itself in a line, and has a digest that is the same in every process; and that
it does not change the state when a run resumes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from orbax_t5x.lazy import LazyArray, LazyThreadPoolArray, ReadStats, Request, as_view
from orbax_t5x.testing.array_leaf import ArrayLeaf
from orbax_t5x.transforms import Chain, Keep
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_and_place, run_transforms
from orbax_t5x.trees.flat import FlatState, flatten, unflatten


@dataclasses.dataclass(frozen=True)
class Case:
    """Test case of a transform.

    Attributes:
      make: builds the transform; called twice it builds two equal ones.
      other: builds another one of the same class, which is not equal.
      source: flat, NumPy leaves.
      target: flat.
      result: what must come out.
    """

    make: Callable[[], Any]
    other: Callable[[], Any]
    source: Mapping[str, Any]
    result: Mapping[str, Any]
    target: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def as_numpy(value: Any) -> np.ndarray | None:
    """Returns the value of a leaf of any kind."""
    return value if value is None else as_view(value).get() if isinstance(value, LazyArray) else np.asarray(value)


def run(
    transform: Transform, source: FlatState, target: FlatState | None = None
) -> tuple[dict[str, np.ndarray | None], Diagnostics]:
    """Returns the result as NumPy, and the diagnostics."""
    diagnostics = Diagnostics()
    result = run_and_place((transform,), source, target or {}, is_resuming=False, diagnostics=diagnostics)
    return {name: as_numpy(value) for name, value in result.items()}, diagnostics


def assert_same(result: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Asserts equal names, shapes, dtypes and bits."""
    assert sorted(result) == sorted(expected)
    for name, value in expected.items():
        if value is None:
            assert result[name] is None, name
            continue
        found, value = as_numpy(result[name]), np.asarray(value)
        assert found is not None, name
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        assert found.tobytes() == value.tobytes(), name


KINDS: dict[str, Callable[[str, np.ndarray], Any]] = {
    "numpy": lambda name, value: value,
    "jax": lambda name, value: jnp.asarray(value),
    "view": lambda name, value: as_view(ArrayLeaf(value, name)),
    "get_fn": lambda name, value: LazyThreadPoolArray(value.shape, value.dtype, lambda: value),
}


class _RefusingLeaf(ArrayLeaf):
    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        raise AssertionError(f"{self.name} was read")


class TransformSuite:
    """Suite to subclass as `TestX` with a dict of `cases`."""

    cases: ClassVar[Mapping[str, Case]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs each test with each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases.values(), ids=self.cases.keys())

    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_the_oracle(self, case: Case, kind: str) -> None:
        source = {name: None if v is None else KINDS[kind](name, v) for name, v in case.source.items()}
        result, diagnostics = run(case.make(), source, case.target)
        assert diagnostics.problems == []
        if kind == "jax":  # 64-bit leaves are 32-bit there
            assert sorted(result) == sorted(case.result)
        else:
            assert_same(result, case.result)

    def test_changes_no_argument_and_is_deterministic(self, case: Case) -> None:
        transform = case.make()
        source, target = dict(case.source), dict(case.target)
        values = {name: value if value is None else value.copy() for name, value in source.items()}
        first = transform.apply(source, target, Diagnostics())
        second = transform.apply(source, target, Diagnostics())
        assert_same(first, second)
        assert list(first) == list(second)
        assert list(source) == list(case.source) and list(target) == list(case.target)
        assert all(source[name] is case.source[name] for name in source)
        assert_same(source, values)

    def test_reads_nothing(self, case: Case) -> None:
        source = {n: None if v is None else as_view(_RefusingLeaf(v, n)) for n, v in case.source.items()}
        diagnostics = Diagnostics()
        result = run_and_place((case.make(),), source, case.target, diagnostics=diagnostics)
        assert diagnostics.problems == [], "a read that is refused is a problem, too"
        for name, value in case.result.items():
            if value is not None:
                assert (result[name].shape, result[name].dtype) == (value.shape, value.dtype)

    def test_nested_is_flat(self, case: Case) -> None:
        source, target = unflatten(case.source), unflatten(case.target)
        nested = copy.deepcopy(source)
        result = case.make()(source, target)
        assert_same(flatten(result), case.result)
        assert_same(flatten(source), flatten(nested))

    def test_resuming_leaves_the_state(self, case: Case) -> None:
        state = unflatten(case.source)
        assert case.make()(state, {}, is_resuming=True) is state
        flat = run_transforms((case.make(),), case.source, case.target, is_resuming=True, diagnostics=Diagnostics())
        assert flat == dict(case.source) and all(flat[name] is case.source[name] for name in flat)

    def test_composes(self, case: Case) -> None:
        single, _ = run(case.make(), case.source, case.target)
        diagnostics = Diagnostics()
        chained = run_transforms(
            (case.make(), lambda state, target: state, Keep((".*",))),
            case.source,
            case.target,
            is_resuming=False,
            diagnostics=diagnostics,
        )
        assert diagnostics.problems == []
        assert_same(chained, single)
        assert_same(run(Chain((case.make(),)), case.source, case.target)[0], single)

    def test_is_a_frozen_value(self, case: Case) -> None:
        transform, equal, other = case.make(), case.make(), case.other()
        assert transform == equal and hash(transform) == hash(equal) and transform.digest() == equal.digest()
        assert transform != other
        assert len({transform, equal, other}) == 2
        for field in dataclasses.fields(transform):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(transform, field.name, None)

    def test_describes_itself_in_one_line(self, case: Case) -> None:
        text = case.make().describe()
        assert text and "\n" not in text and text != case.other().describe()

    def test_records_which_rule_made_a_leaf(self, case: Case) -> None:
        _, diagnostics = run(case.make(), case.source, case.target)
        made = [name for name in case.result if name not in case.source]
        assert set(made) <= set(diagnostics.rule_for)

    def test_an_empty_state_raises_nothing_but_problems(self, case: Case) -> None:
        case.make().apply({}, {}, Diagnostics())

    def test_digests_are_the_same_in_every_process(self) -> None:
        script = (
            "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
            "suite = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])\n"
            "print(json.dumps({name: case.make().digest() for name, case in suite.cases.items()}))"
        )
        digests = {name: case.make().digest() for name, case in self.cases.items()}
        arguments = [json.dumps(sys.path), type(self).__module__, type(self).__name__]
        environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONWARNINGS": "ignore"}
        other_process = subprocess.run(
            [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(other_process.stdout.splitlines()[-1]) == digests
        assert len(set(digests.values())) == len(digests)
        assert all(case.other().digest() != digests[name] for name, case in self.cases.items())

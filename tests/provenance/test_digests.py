"""Digests of transforms: equal for equal rules in every process."""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import orbax_t5x as ot
from orbax_t5x.provenance import digests
from orbax_t5x.provenance.digests import digest_of, is_module_level
from tests.support.recorded_chains import Renaming, entries_of

T = ot.transforms


class WithoutDigest:
    def __call__(self, state, target):
        return state


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: float

    def __call__(self, state, target):
        return state


def plain_function(state, target):
    return state


def with_rules(state, target, rules, *, is_resuming=False):
    return state


def closure(value):
    return lambda state, target: {**state, "x": value}


def test_digests_tell_chains_apart_and_nothing_else():
    same = [
        (Renaming("a"), Renaming("a")),
        (T.Rename([("a", "b")]), T.Rename(((re.compile("a"), "b"),))),
        (plain_function, plain_function),
        (functools.partial(with_rules, rules=[("a", "b")]), functools.partial(with_rules, rules=[["a", "b"]])),
        (T.Merge({"a": np.arange(3)}), T.Merge({"a": np.arange(3)})),
        (Scaled(2.0), Scaled(2.0)),
    ]
    for one, other in same:
        assert digest_of(one) == digest_of(other) is not None
    other = [
        (Renaming("a"), Renaming("b")),
        (plain_function, with_rules),
        (functools.partial(with_rules, rules=[("a", "b")]), functools.partial(with_rules, rules=[("b", "a")])),
        (functools.partial(with_rules, rules=1), with_rules),
        (T.Merge({"a": np.arange(3)}), T.Merge({"a": np.arange(3)[::-1]})),
        (T.Merge({"a": np.zeros(2)}), T.Merge({"a": np.zeros(3)})),
        (T.Merge({"a": np.array(["x"], object)}), T.Merge({"a": np.array(["y"], object)})),
        (Scaled(2.0), Scaled(3.0)),
        (
            T.FollowOptimizer(functools.partial(with_rules, rules=[("a", "b")])),
            T.FollowOptimizer(functools.partial(with_rules, rules=[("b", "c")])),
        ),
        (T.Chain((functools.partial(with_rules, rules=1),)), T.Chain((functools.partial(with_rules, rules=2),))),
    ]
    for one, another in other:
        digests = digest_of(one), digest_of(another)
        assert None not in digests and digests[0] != digests[1], (one, another)
    assert digest_of(T.Chain([Renaming("a"), Renaming("b")])) != digest_of(T.Chain([Renaming("b"), Renaming("a")]))


@dataclasses.dataclass(frozen=True)
class _Private(T.Transform):
    factor: float = 1.0

    def apply(self, state, target, diagnostics):
        return dict(state)


@dataclasses.dataclass(frozen=True)
class _Renamed(T.Transform):
    factor: float = 1.0
    added: bool = False

    def apply(self, state, target, diagnostics):
        return dict(state)


def test_a_refactoring_changes_no_digest():
    """Private classes have no name, and a new field counts only where it is set."""
    assert digest_of(_Private(2.0)) == digest_of(_Renamed(2.0)) != digest_of(_Renamed(2.0, added=True))


def test_following_the_optimizer_is_the_same_rule():
    rule = T.Rename([("a", "b")])
    assert digest_of(T.FollowOptimizer(rule)) == digest_of(rule)
    assert digest_of(T.FollowOptimizer(rule, roots=[("a", "b")])) != digest_of(rule)


def test_a_pack_counts_by_its_call():
    pack = ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8)
    (entry,) = entries_of([pack])
    assert entry["patterns"] == ["RulePack: t5_minimal_to_scanned"]
    assert len({digest_of(one) for one in (pack, pack.inverse(), ot.rules.t5_minimal_to_scanned(2, 8))}) == 3


DTYPES = ["bool", "int4", "int8", "uint16", "int32", "bfloat16", "float8_e4m3fn", "float16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_arrays_count_by_their_contents_wherever_they_are(dtype, shape):
    def digest(array):
        return digest_of(T.Merge({"a": array}))

    zeros = np.zeros(shape, dtype)
    assert digest(zeros) == digest(jnp.asarray(zeros)) == digest(zeros.copy(order="F")) is not None
    others = [np.zeros((1, *shape), dtype), np.zeros(shape, "float64")]
    if zeros.size:
        changed = zeros.copy()
        changed[(-1,) * len(shape)] = 1
        others += [changed, jnp.asarray(changed)]
    assert digest(zeros) not in [digest(other) for other in others]
    assert None not in [digest(other) for other in others]


def test_keys_count_by_their_data_and_kind():
    keys = [jax.random.key(1), jax.random.key(2), jax.random.key(1, impl="rbg"), jax.random.key_data(jax.random.key(1))]
    assert len({digest_of(T.Merge({"a": key})) for key in keys}) == 4


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros])
def test_a_rule_with_too_much_data_has_no_digest(monkeypatch, make):
    assert digests._MOST_ARRAY_BYTES == 256 << 20
    monkeypatch.setattr(digests, "_MOST_ARRAY_BYTES", 64)
    for size in (0, 16, 17):
        merge = T.Merge({"a": make(size, np.float32)})
        assert (digest_of(merge) is not None) == (digest_of(T.Chain((merge,))) is not None) == (size <= 16)


def test_lazy_arrays_have_no_digest(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    with ot.open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert digest_of(T.Merge({"a": checkpoint.leaves["a"]})) is None


@pytest.mark.parametrize(
    "opaque",
    [
        lambda state, target: state,
        closure(1),
        WithoutDigest(),
        WithoutDigest().__call__,
        functools.partial(closure(1)),
        functools.partial(with_rules, rules=lambda name: name),
        functools.partial(with_rules, rules=object()),
        T.FollowOptimizer(closure(2)),
        T.Chain((T.Rename([("a", "b")]), closure(3))),
    ],
    ids="lambda closure object method partial keyword argument nested chain".split(),
)
def test_opaque_callables_have_no_digest(opaque):
    (entry,) = entries_of([opaque])
    assert entry["digest"] is None and entry["text"]


def test_functions_of_modules():
    assert is_module_level(plain_function) and is_module_level(json.dumps) and is_module_level(len)
    assert not is_module_level(functools.wraps(plain_function)(closure(1)))


def test_digests_are_the_same_in_another_process():
    code = (
        "from orbax_t5x.provenance.digests import digest_of\n"
        "import functools, json\n"
        "print(digest_of(functools.partial(json.dumps, indent=2)))\n"
        "import sys; assert 'orbax.checkpoint' not in sys.modules"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == digest_of(functools.partial(json.dumps, indent=2))


# Changed digests would make each recorded run ask again.
PINNED = {
    "2206fb85689cd2eda4b01acef030d530": T.Rename([("a", "b"), ("c", None)]),
    "d7ad937b926acbc81954c4ec29cd3ead": T.Rename([(re.compile("a/(.*)", re.IGNORECASE), r"b/\1")], require_match=False),
    "69b03d974be9048b84295ca1304410d1": T.AssignmentMap([("enc/a", "enc/b"), ("enc/b", "enc/a")]),
    "9ac0211f3026cabb991909f2fff5610d": T.Drop("a/.*"),
    "d61718ac0520c9a9130b64316d6ab1a7": T.Keep(["b/.*", "c"], require_match=False),
    "06a346e2e884ee1d0a18f42e507a2112": T.Intersect(),
    "fd85081f2553c97045ec0108902f4b89": T.Translate(),
    "407522582c19ba3de2d98a209100d639": T.Cast("a", "bfloat16"),
    "ba39839865e7c799b029dd0c020d2d1c": T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 1),
    "f9bf97dda1d847defe2b25974d9f695c": T.UnstackLayers("layers/(.*)", r"layers_{i}/\1", 0),
    "17eabd46168542e85995c0723cf77ca2": T.Reshape("a", (2, 3)),
    "6a24da425dcbab87ab7d8ff14b952fdd": T.Transpose("b", (1, 0)),
    "2af04be109592ffa395126a7a6477fa4": T.Repeat("c", 4, 0),
    "da99f8d6a4663d12aa8af97fa2ee7b3a": T.Split("a", ("b", "c"), 0, (1, 2)),
    "e47dd4f2065e6c69143f54f8edcce4c0": T.Concat(("b", "c"), "a", 1),
    "2bcbe72bab7e7de61420b167ea03d8b5": T.Average({"x": 1, "y": 3}),
    "70c21e53b94d4f478f043149019bdeb2": T.Overlay(("x", "y")),
    "e752fc6adeda8ab5df2785b16e95f50f": T.Chain((T.Rename([("a", "b")]), T.Drop("c"))),
    "0038a4d2aa5715d1570f024f94b904c4": T.Merge({"a": 1, "b": {"c": 2.5, "d": "text"}}, overwrite=True),
    "641999f6a772f1564e662980dc638d6c": ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8),
    "830aafe8591543a206e7e66e2fadf57f": ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8).inverse(),
    "414780a2a32ac343b30bd8d0cc5e0c1c": json.dumps,
}


@pytest.mark.parametrize("digest", PINNED)
def test_digests_stay(digest):
    assert digest_of(PINNED[digest]) == digest

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
from orbax_t5x.provenance.chains import record_rules, texts_of
from safetensors.numpy import save_file

import orbax_t5x as ot
from orbax_t5x.provenance import digests
from orbax_t5x.provenance.digests import is_module_level
from tests.support.recorded_chains import Renaming, chain_digest

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
    assert chain_digest(()) is None
    same = [
        (Renaming("a"), Renaming("a")),
        (T.Rename([("a", "b")]), T.Rename(((re.compile("a"), "b"),))),
        (plain_function, plain_function),
        (functools.partial(with_rules, rules=[("a", "b")]), functools.partial(with_rules, rules=[["a", "b"]])),
        (T.Merge({"a": np.arange(3)}), T.Merge({"a": np.arange(3)})),
        (Scaled(2.0), Scaled(2.0)),
    ]
    for one, other in same:
        assert chain_digest([one]) == chain_digest([other]) is not None
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
        digests = chain_digest([one]), chain_digest([another])
        assert None not in digests and digests[0] != digests[1], (one, another)
    assert chain_digest([Renaming("a"), Renaming("b")]) != chain_digest([Renaming("b"), Renaming("a")])
    assert chain_digest([Renaming("a"), Renaming("b")]) != chain_digest([Renaming("ab")])


DTYPES = ["bool", "int4", "int8", "uint16", "int32", "bfloat16", "float8_e4m3fn", "float16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_arrays_count_by_their_contents_wherever_they_are(dtype, shape):
    def digest(array):
        return chain_digest([T.Merge({"a": array})])

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
    assert len({chain_digest([T.Merge({"a": key})]) for key in keys}) == 4


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros])
def test_a_chain_with_too_much_data_has_no_digest(monkeypatch, make):
    assert digests._CONTENT_LIMIT_BYTES == 256 << 20
    monkeypatch.setattr(digests, "_CONTENT_LIMIT_BYTES", 64)
    for first, second, has_digest in [(8, 8, True), (8, 9, False), (17, 0, False), (0, 17, False), (0, 16, True)]:
        merges = [T.Merge({"a": make(size, np.float32)}) for size in (first, second)]
        assert (chain_digest(merges) is not None) == has_digest
        assert (chain_digest([T.Chain(tuple(merges))]) is not None) == has_digest
        assert (merges[0].digest() is not None) == (first <= 16)


def test_lazy_arrays_have_no_digest(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    with ot.open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert chain_digest([T.Merge({"a": checkpoint.leaves["a"]})]) is None


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
    assert chain_digest([T.Rename([("a", "b")]), opaque]) is None
    assert texts_of(record_rules([opaque]))


def test_functions_of_modules():
    assert is_module_level(plain_function) and is_module_level(json.dumps) and is_module_level(len)
    assert not is_module_level(functools.wraps(plain_function)(closure(1)))


def test_digests_are_the_same_in_another_process():
    code = (
        "from orbax_t5x.provenance.chains import digest_of_rules, record_rules\n"
        "import functools, json\n"
        "print(digest_of_rules(record_rules([json.dumps, functools.partial(json.dumps, indent=2)])))\n"
        "import sys; assert 'orbax.checkpoint' not in sys.modules"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == chain_digest([json.dumps, functools.partial(json.dumps, indent=2)])


# Changed digests would make each recorded run ask again.
PINNED = {
    "2e857b86909ff3c5d8b58f1468e2063c2f6f52e485717f6b17d1231b81c51bef": [T.Rename([("a", "b"), ("c", None)])],
    "454a0295ba831c93f82d3e6bcbfdd52b56a009cfc990a5e3af5044d43de1e9ca": [
        T.Rename([(re.compile("a/(.*)", re.IGNORECASE), r"b/\1")], require_match=False)
    ],
    "67ad3fd31eb1313f6d5e715fa15a2e69e94f97da4b6506cf7a314cd448a9b3bd": [
        T.AssignmentMap([("enc/a", "enc/b"), ("enc/b", "enc/a")])
    ],
    "42f7dc8299ebfe3f02c50e5980b0b149443deea1fef6fa597df966d7e2e07838": [
        T.Drop("a/.*"),
        T.Keep(["b/.*", "c"], require_match=False),
    ],
    "8cf1993a7537ebb7ab2bba065c804622252ea762117b8a9120e74d86ecd5f5dd": [T.Intersect()],
    "56e04c60fcc7b38a56c80e2615b2ea9bbe49f163f5135df649003e7bbc4f0618": [T.Translate()],
    "f1fc9a324cf4be18ca81e6cdd8b920345c56e01597b9b4e15a6170962637d68a": [T.Cast("a", "bfloat16")],
    "94f4ffc704664a93c80fc1c1fe101736a598f0de5a4c9e55053ee848638a100e": [
        T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 1),
        T.UnstackLayers("layers/(.*)", r"layers_{i}/\1", 0),
    ],
    "cf45749c30f09ac313881c0c2f39fe81aec76e0b701fe493e176aa8886cab8c9": [
        T.Reshape("a", (2, 3)),
        T.Transpose("b", (1, 0)),
        T.Repeat("c", 4, 0),
    ],
    "afa21ce42e896bf5c25efcf39cda7c8f4012c9d92af893ab8261316b326119df": [
        T.Split("a", ("b", "c"), 0, (1, 2)),
        T.Concat(("b", "c"), "a", 1),
    ],
    "41d97bcbc840bfc35e7f6344eba862fd56516825dbe37b0170c5a7d0cc3cc6d7": [T.Average({"x": 1, "y": 3})],
    "8016a918a1db6c157e9403dda0e76e2aaff9fc0054f0d266077d7083be30a278": [T.Overlay(("x", "y"))],
    "3a8f4fcda367044530b2d672e21f4eb15c483a62dd83802b3ece12d3c7d06e53": [
        T.FollowOptimizer(T.Rename([("a", "b")]), factors={"a/.*": ("ROW", "COLUMN", "BATCH")})
    ],
    "25e9ae5daa1dbd230c17b75c7accd0547a9c3cf1f8a837748ff0ee0d3fb69319": [
        T.Chain((T.Rename([("a", "b")]), T.Drop("c")))
    ],
    "96a8057722add6bb53b5e2ac46ea3f96d2089bf5f2d91e02c25b9f9625e896b9": [
        T.Merge({"a": 1, "b": {"c": 2.5, "d": "text"}}, overwrite=True)
    ],
    "30a8118929e1c666522488543ce90908012ba98b98bc37f80e44ad0dfb453fb6": [
        ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8)
    ],
    "67464a9db937fcd64d90b77373758381c3f97a086dfe681842ca3390d4129ea8": [
        ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8).inverse()
    ],
    "ae575b9cc629a0845a2472b07dca7274c26f4d41163668482c9aa2b37d00b49a": [json.dumps],
    "e97f840053cc83110052e60614172564a61a0f8d97d5abd7fd79652a6c820e6c": [
        T.Translate(),
        ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=8),
    ],
}


@pytest.mark.parametrize("digest", PINNED)
def test_digests_stay(digest):
    assert chain_digest(PINNED[digest]) == f"sha256:{digest}"

"""TensorFlow writes bundles and we read them; it reads what the hand-made writer wrote; both parse the same protos.

The one test module that imports TensorFlow (seconds, 0.7 GB), and only once a test needs it.
"""

import faulthandler
import itertools
import os
import pickle
import random
import resource
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_t5x.lazy.box import box_slices
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.array_strategies import random_bits
from tests.support.bundle_mutations import sealed_mutation, values_of
from tests.support.bundle_writer import DTYPES, Bundle, bundle_of, np_dtype, partitions

pytestmark = pytest.mark.slow

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = draw(st.sampled_from([*sorted(DTYPES), "string"]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if dtype != "string":
        return random_bits(shape, np_dtype(dtype))
    count = int(np.prod(shape, dtype=int))
    array = np.empty(shape, object)
    array.reshape(-1)[:] = draw(st.lists(st.binary(max_size=200), min_size=count, max_size=count))
    return array


class Saved(NamedTuple):
    """Something to save: the tensor, and which slice of what it is ("" for a whole)."""

    name: str
    array: np.ndarray
    place: str = ""


def save(tf: ModuleType, directory: Path, shards: list[list[Saved]], name: str = "model.ckpt-7") -> Path:
    """A bundle that TensorFlow writes, a shard for each list."""
    prefixes = []
    for number, items in enumerate(shards):
        prefixes.append(str(directory / f"part-{number}"))
        tf.raw_ops.SaveV2(
            prefix=prefixes[-1],
            tensor_names=[item.name for item in items],
            shape_and_slices=[item.place for item in items],
            tensors=[tf.constant(item.array) for item in items],
        )
    prefix = directory / name
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=str(prefix), delete_old_dirs=False)
    return prefix


@given(st.dictionaries(NAMES, arrays(), min_size=1, max_size=8), st.integers(1, 4), st.data())
@settings(
    max_examples=settings.default.max_examples // 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_tensorflow_writes_we_read(tf, tmp_path_factory, named: dict[str, np.ndarray], shards: int, data) -> None:
    saved = [Saved(name, array) for name, array in named.items()]
    groups = [group for k in range(shards) if (group := saved[k::shards])]
    prefix = save(tf, tmp_path_factory.mktemp("bundle"), groups)
    with open_tf_bundle(prefix) as checkpoint:
        assert checkpoint.step == 7
        assert checkpoint.metadata["num_shards"] == len(groups)
        assert sorted(checkpoint.leaves) == sorted(named)
        for name, array in named.items():
            leaf = leaf_of(checkpoint, name)
            assert same_bits(read_whole(leaf), array), name
            ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in array.shape]
            box = tuple((low, high) for low, high in ends)
            (out,) = read_boxes(leaf, [box], "full").arrays
            expected = np.empty(out.shape, out.dtype)
            expected[...] = array[box_slices(box)]
            assert same_bits(out, expected), (name, box)


@given(
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "string"]),
    st.sampled_from([(3, 1), (1, 2), (3, 2)]),
    NAMES,
    st.integers(1, 3),
)
@settings(
    max_examples=settings.default.max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_partitioned_variables_of_tensorflow(tf, tmp_path_factory, dtype: str, cuts, name: str, shards: int) -> None:
    if dtype == "string":
        whole = np.array([b"%d" % n for n in range(42)], object).reshape(7, 6)
    else:
        whole = random_bits((7, 6), np_dtype(dtype))
    saved = []
    for extents in partitions(*cuts):
        told = ":".join("-" if length == -1 else f"{start},{length}" for start, length in extents)
        index = tuple(slice(start, None if length == -1 else start + length) for start, length in extents)
        saved.append(Saved(name, whole[index].copy(), f"7 6 {told}"))
    groups = [group for k in range(shards) if (group := saved[k::shards])]
    with open_tf_bundle(save(tf, tmp_path_factory.mktemp("bundle"), groups)) as checkpoint:
        assert list(checkpoint.leaves) == [name]
        assert same_bits(read_whole(leaf_of(checkpoint, name)), whole)


def test_large_extents_of_slices_have_the_keys_that_tensorflow_gives_them(tf, tmp_path: Path) -> None:
    """OrderedCode takes one byte more at 64, 8192, …; a slice that is not found would show it."""
    cuts = [0, 63, 64, 65, 8191, 8192, 8193, 20_000]
    whole = np.arange(20_000, dtype=np.int32)
    saved = [Saved("w", whole[a:b], f"20000 {a},{b - a}") for a, b in itertools.pairwise(cuts)]
    with open_tf_bundle(save(tf, tmp_path, [saved])) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "w")), whole)


@given(
    st.dictionaries(NAMES, arrays(), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 400),
    st.integers(1, 20),
    st.booleans(),
)
@settings(
    max_examples=settings.default.max_examples // 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_the_hand_made_writer_writes_tensorflow_reads(
    tf, tmp_path_factory, named, shards: int, block_bytes: int, interval: int, snappy: bool
) -> None:
    """Hostile bundles are edits of these: the unedited ones must be sound."""
    bundle = bundle_of(named, shards)
    directory = tmp_path_factory.mktemp("bundle")
    prefix = bundle.write(directory, block_bytes=block_bytes, restart_interval=interval, snappy=snappy)
    theirs = tf.train.load_checkpoint(str(prefix))
    with open_tf_bundle(prefix) as checkpoint:
        assert set(theirs.get_variable_to_shape_map()) == set(checkpoint.leaves) == set(named)
        for name, array in named.items():
            ours = read_whole(leaf_of(checkpoint, name))
            assert same_bits(ours, array)
            (tensor,) = tf.raw_ops.RestoreV2(
                prefix=str(prefix),
                tensor_names=[name],
                shape_and_slices=[""],
                dtypes=[tf.string if array.dtype == object else tf.as_dtype(array.dtype)],
            )
            assert same_bits(np.asarray(tensor.numpy(), array.dtype).reshape(array.shape), ours), name


def test_tensorflow_reads_partitioned_variables_of_the_hand_made_writer(tf, tmp_path: Path) -> None:
    whole = np.arange(42, dtype=np.float32).reshape(7, 6)
    bundle = Bundle(2)
    bundle.add_sliced("w", whole, partitions(3, 2))
    theirs = tf.train.load_checkpoint(str(bundle.write(tmp_path)))
    assert same_bits(theirs.get_tensor("w"), whole)


def read_by_tensorflow(tf: ModuleType, prefix: Path) -> dict[str, np.ndarray] | None:
    """What TensorFlow's reader gives, from a forked child: on many of these it aborts the process, which gives None."""
    with warnings.catch_warnings():
        # Python and JAX warn of threads that a forked child lacks; the child runs TensorFlow's reader alone and ends.
        warnings.simplefilter("ignore")
        ours, theirs = os.pipe()
        child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            found = {}
            try:
                reader = tf.train.load_checkpoint(str(prefix))
                for name in reader.get_variable_to_shape_map():
                    try:
                        found[name] = np.asarray(reader.get_tensor(name))
                    except Exception:  # TensorFlow's own errors are many
                        continue
            except Exception:
                found = {}
            with os.fdopen(theirs, "wb") as file:
                pickle.dump(found, file)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


def test_where_tensorflow_gives_values_we_give_none_other(tf, tmp_path: Path) -> None:
    """Sealed mutations: ours may refuse more, but never disagrees; where TensorFlow aborts, ours goes on."""
    agreed = aborted = 0
    for seed in range(60):
        bundle, index = sealed_mutation(random.Random(seed))
        (tmp_path / f"{seed}").mkdir()
        prefix = bundle.write(tmp_path / f"{seed}", index=index)
        theirs = read_by_tensorflow(tf, prefix)
        ours = values_of(prefix)
        aborted += theirs is None
        for name in set(ours) & set(theirs or {}):
            assert same_bits(np.asarray(theirs[name], ours[name].dtype), ours[name]), (seed, name)
            agreed += 1
    # Most of these make TensorFlow abort; without any agreement the comparison would say nothing.
    assert agreed >= 5 and aborted >= 1, (agreed, aborted)

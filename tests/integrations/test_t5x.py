"""A checkpointer with T5X's constructor and methods: what T5X's training loop does with one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.integrations.t5x import Checkpointer
from orbax_t5x.lazy import LazyArray
from tests.support.t5x_goldens import golden
from tests.support.train_states import inference_state, mesh, training_state


class Partitioner:
    """What the checkpointer uses of T5X's partitioner."""

    mesh = mesh()

    def get_mesh_axes(self, train_state):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, ot.with_shardings(train_state, self.mesh))


@pytest.fixture(scope="module")
def state():
    return training_state()


@pytest.fixture
def make(state, tmp_path):
    made = []

    def make(directory=tmp_path / "run", **options):
        made.append(Checkpointer(jax.eval_shape(lambda: state), Partitioner(), str(directory), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_steps_are_saved_kept_and_restored_in_the_partitioners_shardings(make, state, tmp_path):
    saving = make(keep=2)
    for step in (3, 7, 9):
        saving.save(state.replace_step(np.int32(step)), concurrent_gb=128)
    assert saving.all_steps() == [7, 9] and saving.latest_step() == 9
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_7", "checkpoint_9"]
    restored = make().restore()
    equal(restored, state.replace_step(np.int32(9)))
    assert restored.params["token_embedder"]["embedding"].sharding == NamedSharding(mesh(), P("model", None))
    assert make().restore(step=7).step == 7


def test_another_formats_checkpoint_and_dtypes():
    """As T5X makes one that only restores: without a directory."""
    native = golden("d1_adafactor")
    checkpointer = Checkpointer(inference_state(), Partitioner(), "", restore_dtype=np.dtype("bfloat16"))
    restored = checkpointer.restore(path=native.step)
    assert restored.step == 3
    assert restored.params["token_embedder"]["embedding"].dtype == "bfloat16"
    lazy = checkpointer.restore(path=native.step, lazy_parameters=True)
    embedding = lazy.params["token_embedder"]["embedding"]
    assert isinstance(embedding, LazyArray)
    np.testing.assert_array_equal(embedding.get(), native.values["target/token_embedder/embedding"])


@pytest.mark.slow
def test_a_bundle_is_restored_and_converted(make, state, goldens):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    checkpointer = make(save_dtype=np.dtype("bfloat16"))
    restored = checkpointer.restore_from_tf_checkpoint(str(bundle))
    equal(restored, ot.restore(bundle, state, [ot.transforms.Translate()]))
    checkpointer.convert_from_tf_checkpoint(str(bundle))
    checkpointer.save(restored)  # a step that exists is skipped
    assert checkpointer.all_steps() == [1_000_000]
    with ot.open_checkpoint(checkpointer.checkpoints_dir) as written:
        assert written.leaves["target/decoder/decoder_norm/scale"].dtype == "bfloat16"


def swap(state_dict, target_state_dict, *, is_resuming=False):
    if is_resuming:
        return state_dict
    attention = state_dict["target"]["encoder"]["layers_0"]["attention"]
    attention["query"], attention["key"] = attention["key"], attention["query"]
    return state_dict


@pytest.mark.slow
@pytest.mark.parametrize("is_resuming", [None, False, True])
def test_whether_functions_are_applied_is_for_t5x_to_say(make, state, is_resuming):
    """T5X binds the keyword before it passes the functions on."""
    make().save(state)
    function = swap if is_resuming is None else functools.partial(swap, is_resuming=is_resuming)
    restored = make().restore(state_transformation_fns=[function])
    attention = state.params["encoder"]["layers_0"]["attention"]
    expected = attention["query" if is_resuming else "key"]["kernel"]
    np.testing.assert_array_equal(restored.params["encoder"]["layers_0"]["attention"]["query"]["kernel"], expected)

"""The variables of a linen model, taken apart."""

import numpy as np
import pytest
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec

from orbax_t5x.optim.model_variables import mutables_axis_names, params_axis_names, split_variables

VARIABLES = {
    "params": {"dense": {"kernel": np.ones((2, 3))}},
    "params_axes": {"dense": {"kernel_axes": AxisMetadata(("embed", "mlp"))}},
    "cache": {"index": np.zeros(())},
    "stats": {"mean": np.zeros(3)},
    "stats_axes": {"mean_axes": AxisMetadata(("mlp",))},
}


def test_collections_and_their_axes_are_taken_apart():
    parts = split_variables(VARIABLES)
    assert parts.params is VARIABLES["params"] and set(parts.mutables) == {"cache", "stats"}
    assert params_axis_names(parts.params_axes)["dense"]["kernel"] == PartitionSpec("embed", "mlp")
    names = mutables_axis_names(parts.mutables_axes)
    assert set(names) == {"stats"} and names["stats"]["mean"] == PartitionSpec("mlp")


def test_models_without_axes_have_none():
    parts = split_variables({"params": {"w": np.ones(2)}})
    assert parts.params_axes is None and parts.mutables_axes is None
    with pytest.raises(ValueError, match="no params_axes"):
        params_axis_names(parts.params_axes)
    assert mutables_axis_names(parts.mutables_axes) == {}


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"params": {**VARIABLES["params"], "bias": np.ones(2)}}, "'bias'"), ({"other_axes": {}}, "no 'other'")],
)
def test_axes_and_variables_that_do_not_belong_together_are_errors(changed, said):
    with pytest.raises(ValueError, match=said):
        split_variables({**VARIABLES, **changed})
    with pytest.raises(ValueError, match="no collection 'params'"):
        split_variables({"cache": {}})

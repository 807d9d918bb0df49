"""Rules of factoring by parameter name and by logical axes."""

import jax
import pytest
from jax.sharding import PartitionSpec

from orbax_t5x.optim.factor_rules import (
    STANDARD_LOGICAL_FACTOR_RULES,
    FactorDim,
    HParamMap,
    factor_name_to_factordim,
    rules_from_axes,
)


def test_names_of_factor_dimensions():
    assert [factor_name_to_factordim(name) for name in ("ROW", "col", "column", "unfactorized")] == [
        FactorDim.ROW,
        FactorDim.COLUMN,
        FactorDim.COLUMN,
        FactorDim.NONE,
    ]
    assert factor_name_to_factordim(3) == 3
    with pytest.raises(KeyError, match="diagonal"):
        factor_name_to_factordim("diagonal")


def test_the_first_pattern_that_is_found_gives_the_value():
    hparams = HParamMap((("bias", 1), ("decoder/.*scale", 2), (".*", 3)))
    tree = {"decoder": {"bias": 0, "norm": {"scale": 0}}, "scale": 0}
    assert hparams(tree) == {"decoder": {"bias": 1, "norm": {"scale": 2}}, "scale": 3}
    with pytest.raises(KeyError, match="kernel"):
        HParamMap((("bias", 1),))["kernel"]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "mlp"), (FactorDim.ROW, FactorDim.COLUMN)),
        (("layers", "embed", "mlp"), (FactorDim.BATCH, FactorDim.ROW, FactorDim.COLUMN)),
        (("heads", "kv"), (FactorDim.NONE, FactorDim.NONE)),
        (("embed",), (FactorDim.NONE,)),
        (("relpos_buckets", "layers"), (FactorDim.NONE, FactorDim.BATCH)),
    ],
)
def test_axes_give_each_dimension_its_role(axes, expected):
    rules = rules_from_axes({"w": PartitionSpec(*axes)}, STANDARD_LOGICAL_FACTOR_RULES)
    assert rules == {"w": expected}


def test_axes_without_a_role_or_with_clashing_ones_are_errors():
    for axes in (("embed", "nobody"), ("embed", "mlp", None)):
        with pytest.raises(ValueError, match="w"):
            rules_from_axes({"w": PartitionSpec(*axes)}, STANDARD_LOGICAL_FACTOR_RULES)
    assert jax.tree.leaves(rules_from_axes({"w": None}, STANDARD_LOGICAL_FACTOR_RULES)) != [()]

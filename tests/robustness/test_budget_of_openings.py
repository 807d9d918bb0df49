"""An opening of any format holds what its one budget allows, whatever its files claim."""

import json

import pytest

import orbax_t5x as ot
from tests.support.hostile_openings import OPENINGS, write_opening
from tests.support.traced_memory import peak_of

_MIB = 1 << 20
# What a parser takes of a file while it reads it; see `strict_json`.
_PARSED = 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPENINGS)
def test_one_budget_bounds_an_opening(kind, tmp_path):
    """Ten times the budget and more would be held; what is refused names the limit and the file."""
    path, nbytes = write_opening(tmp_path, kind, 10_000)
    limits = ot.Limits(metadata_bytes=_MIB // 8)

    def refused() -> None:
        with pytest.raises(ot.errors.LimitExceededError, match=rf"metadata_bytes = {_MIB // 8}") as caught:
            ot.open_checkpoint(path, limits=limits)
        assert (caught.value.path or "").startswith(str(tmp_path))

    refused()  # what is loaded at the first opening of a format is not the file's
    assert peak_of(refused) < _PARSED * nbytes + 2 * _MIB


@pytest.mark.parametrize("kind", OPENINGS)
def test_few_of_each_kind_open(kind, tmp_path):
    """So that what is refused above is refused for its number."""
    path, _ = write_opening(tmp_path, kind, 40)
    with ot.open_checkpoint(path, limits=ot.Limits(metadata_bytes=_MIB // 4)) as checkpoint:
        assert checkpoint.leaves or checkpoint.empties or checkpoint.metadata


def test_a_configuration_beyond_the_budget_is_left_out(tmp_path):
    """It is beside the model, which opens."""
    write_opening(tmp_path, "safetensors: names", 40)
    (tmp_path / "config.json").write_text(json.dumps([{}] * 20_000).join(('{"a": ', "}")))
    with ot.open_checkpoint(tmp_path, limits=ot.Limits(metadata_bytes=_MIB // 4)) as checkpoint:
        assert checkpoint.metadata["config"] is None and "metadata_bytes" in checkpoint.metadata["config_error"]

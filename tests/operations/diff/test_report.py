"""The report of a comparison, as data and as text."""

import json
import math

import numpy as np

import orbax_t5x as ot
from tests.support.compared import TREE, changed
from tests.support.saving import save


def test_layers_are_one_line_with_the_worst_of_them(tmp_path):
    other = changed()
    other["params"]["layers_2"]["kernel"][1, 2] = math.nan
    other["params"]["layers_3"]["kernel"][2, 3] += 0.5
    other["params"]["layers_1"]["kernel"][0, 0] -= 0.25
    report = ot.diff(save(tmp_path / "a", TREE), save(tmp_path / "b", other))
    said = " ".join(str(report).split())
    assert "params/layers_{1…3}/kernel ×3" in said
    assert "3 of 36 elements, 1 NaN on one side" in said and "absolute ≤ 0.5 at [2,3] of params/layers_3/kernel" in said


def test_json_holds_everything_and_nothing_that_json_lacks(tmp_path):
    a = {"w": np.array([1.0, math.inf]), "c": np.complex64([1j]), "n": np.float32([math.nan])}
    b = {"w": np.array([0.0, 1.0]), "c": np.complex64([2j]), "n": np.float32([1])}
    report = ot.diff(save(tmp_path / "a", a), save(tmp_path / "b", b))
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert told["equal"] is False and [leaf["name"] for leaf in told["leaves"]] == ["c", "n", "w"]
    assert told["leaves"][2]["absolute"] == {"value": "inf", "index": [1], "a": "inf", "b": 1.0}
    assert told["leaves"][0]["absolute"]["a"] == "1j" and told["leaves"][1]["one_nan"] == 1

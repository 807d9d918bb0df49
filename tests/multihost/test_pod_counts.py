"""What the store of a job counts of each process equals what the model of restores and the plan have counted before."""

import json

import pytest

from benchmarks import pods
from benchmarks.pod_store import counting_http
from benchmarks.scale_model import FORMATS, Job, Stored, predict

# Larger than what is read whole at once, and less than a window. Of two small arrays the model counts each, and they
# would be read together.
SHAPES = {"target/scale": (64,), "target/wide": (96, 4096)}


@pytest.mark.slow
def test_the_store_counts_what_the_plan_and_the_model_count(tmp_path):
    written = {name: pods.write(tmp_path, name, SHAPES) for name in ("safetensors", "t5x")}
    cases = [one for one in pods.cases_of(written) if one.layout != "rows" and one.broadcast is not True]
    with counting_http(tmp_path) as (url, log):
        results = pods.count(url, log, cases, SHAPES, 2, 2)
    assert [pods.differences(one, written[one.case.format][1], 2) for one in results] == [[]] * len(cases)
    # The comparison would notice: what was counted is not nothing, and one request more is a difference.
    of_case = {one.case[0::2] + one.case[3:]: one for one in results}
    alone, auto = (of_case["safetensors", "columns", way] for way in (False, "auto"))
    assert [one.data for one in alone.counted] == [97, 97] and sum(one.data for one in auto.counted) < 10
    results[0].counted[1] = results[0].counted[1]._replace(data=7)
    assert len(pods.differences(results[0], written["safetensors"][1], 2)) == 2


def test_jobs_of_many_processes_are_counted_without_them():
    stored = Stored.of(FORMATS["orbax"], {"a": (1024, 64), "b": (1024, 32)})
    alone, once = (predict(stored, Job(64, 4, "replicated", way)) for way in (False, "auto"))
    assert sum(one.data for one in alone) == 64 * 16 and sum(one.data for one in once) == 16
    assert sum(one.nbytes for one in once) * 64 == sum(one.nbytes for one in alone)
    assert json.loads(json.dumps(alone))[0][0] and not any(one.opening for one in alone[1:])

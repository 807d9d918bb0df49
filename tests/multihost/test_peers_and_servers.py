"""Processes of a job to which a server answers differently: values of one version, an error, or one warning.

Each process has a proxy of its own for one URL, so that it meets another edge of a server.
"""

import contextlib
import itertools

import pytest
from hypothesis import settings

from tests.support.http_store import serving
from tests.support.jax_job import run_script
from tests.support.server_versions import AFTER, BEFORE, CONTENTS, is_lie, proves_change, send

pytestmark = pytest.mark.slow

FAULTS = ("404", "403", "500", "html", "html for a range", "reset", "truncated", "no ranges")
# What the opener meets, and what its peer meets: tag, date and contents, or a fault.
CASES = [case for case in itertools.product(BEFORE, [*AFTER, *FAULTS]) if case[1] in FAULTS or not is_lie(*case)]
SCRIPT = """
    import logging, os
    import orbax_t5x as ot
    from orbax_t5x.extras.web import web_server
    os.environ["http_proxy"] = sys.argv[1 + process]
    web_server.FIRST_DELAY_SECS = 0.0
    warned = []

    class Warnings(logging.Handler):
        def emit(self, record):
            warned.append(record.getMessage())

    logging.getLogger("orbax_t5x").addHandler(Warnings(logging.WARNING))
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = {"b": jax.ShapeDtypeStruct((1 << 19,), np.float32, sharding=rows)}
    for number in json.loads(sys.argv[3]):
        warned.clear()
        try:
            path = f"http://store.test/{number}/model.safetensors"
            restored = ot.restore(path, target, strict=False, broadcast=False)
        except ot.errors.CheckpointError as error:
            tell(type(error).__name__)
            continue
        (shard,) = restored["b"].addressable_shards
        added = np.asarray(shard.data) - np.arange(1 << 19, dtype=np.float32)[shard.index]
        tell([np.unique(added).tolist(), sum("sends no strong ETag" in one for one in warned)])
"""


def answer_as(store, process):
    """Makes a server answer as a process meets it, by the number of the case in the path."""

    def met(name):
        before, after = CASES[int(name.split("/")[0])]
        return (*before, "same") if process == 0 or after in FAULTS else after

    def answer(name, query):
        tag, date, which = met(name)
        send(store, tag, date)
        return CONTENTS[which]

    def fault(request):
        after = CASES[int(request.name.split("/")[0])][1]
        return after if process == 1 and after in FAULTS else None

    store.answer_to, store.fault = answer, fault


def is_right(case, opener, peer):
    """Tests what both have told."""
    before, after = case
    if isinstance(opener, str) or isinstance(peer, str):
        # On both, and only where something is to be refused.
        return isinstance(opener, str) and isinstance(peer, str) and (after in FAULTS or proves_change(before, after))
    (values, warnings), (values_of_peer, warnings_of_peer) = opener, peer
    if after in FAULTS:
        return after == "no ranges" and values == values_of_peer == [0.0]
    is_warned = warnings == (before[0] != "strong") and warnings_of_peer <= warnings
    return not proves_change(*case) and is_warned and (values, values_of_peer) == ([0.0], [float(after[2] != "same")])


def test_no_process_takes_the_values_of_another_version():
    """With more examples by `make fuzz` all cases; else one of nine."""
    numbers = range(0, len(CASES), 1 if settings.default.max_examples > 100 else 9)
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(serving()) for _ in range(2)]
        for process, store in enumerate(stores):
            answer_as(store, process)
        told = run_script(SCRIPT, 2, *(store.url for store in stores), list(numbers), devices=1)
    found = {CASES[number]: outcomes for number, *outcomes in zip(numbers, *told, strict=True)}
    assert {isinstance(opener, str) for opener, _ in found.values()} == {True, False}, "only errors, or none"
    assert {case: outcomes for case, outcomes in found.items() if not is_right(case, *outcomes)} == {}

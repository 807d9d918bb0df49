"""A checkpoint is opened once for all processes of a job, counted by the server; processes that see other files.

Publications are read as they were written, and removed when all have read them, or by the opener.
"""

import collections
import random
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost import openings
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.openings import Publication, begun_publications
from tests.support.http_store import serving
from tests.support.jax_job import run_script
from tests.support.key_values import KeyValues

DATA = random.Random(0).randbytes(1_280_000)  # more than a piece


@pytest.fixture
def store():
    return KeyValues()


def written(store, name="open", number=0, is_collective=True):
    made = Publication(store, name, number)
    made.begin()
    made.write({"kind": 1}, DATA)
    made.keep(is_collective)
    return made


def test_the_last_of_all_consumers_removes_it(store):
    made = written(store)
    assert begun_publications(store, "open") == [made] and begun_publications(store, "op") == []
    head = made.head(1.0)
    assert head["kind"] == 1 and head["pieces"] == 2 and made.data(head) == DATA
    made.consume(3)
    made.consume(3)
    assert not made.is_removed() and made.data(head) == DATA
    made.consume(3)
    assert made.is_removed() and store.held == {} and made.head(1.0) is None and made.data(head) is None


def test_bytes_that_were_not_written_are_an_error(store):
    made = written(store)
    (second,) = [key for key in store.held if key.endswith("/1")]
    store.held[second] = b"others"
    with pytest.raises(ValueError, match="other bytes"):
        made.data(made.head(1.0))


def test_a_call_that_others_may_not_make_is_removed_after_a_while(store, monkeypatch):
    monkeypatch.setattr(openings, "_RECENT_SECS", 0.0)
    removed = threading.Event()
    store.on_delete = lambda key: removed.set() if not store.held else None
    made = written(store, is_collective=False)
    assert removed.wait(60) and made.is_removed()


def test_of_collective_calls_that_some_do_not_make_the_mark_is_left(store, monkeypatch):
    monkeypatch.setattr(openings, "_KEPT", 2)
    monkeypatch.setattr(openings, "_kept", openings.collections.deque())
    first, second, third = (written(store, number=number) for number in range(3))
    assert [one.is_expired for one in begun_publications(store, "open")] == [True, False, False]
    assert first.head(1.0) is None and first.is_removed(), "whoever waits for it opens for itself"
    second.consume(1)
    fourth = written(store, number=3)
    assert [one.is_expired for one in begun_publications(store, "open")] == [True, False, False]
    for one in (first, third, fourth):
        one.consume(1)
    assert store.held == {}


NOT_ABANDONED = threading.Event()
GROUP = ProcessGroup((0, 1), 0, "", 1)


def begun(store, name, count):
    made = [Publication(store, name, number) for number in range(count)]
    for one in made:
        one.begin()
    return made


def test_after_calls_that_only_the_opener_has_made_the_newest_is_taken():
    store = KeyValues()
    made = begun(store, "newest", 3)
    for one in made:  # as many calls as the opener has made wait for none of them
        assert openings._taken(store, "newest", "path", GROUP, False, NOT_ABANDONED) == (made[2], [one])


def test_a_collective_call_consumes_all_that_were_made(monkeypatch):
    store = KeyValues()
    made = begun(store, "collective", 2)
    assert openings._taken(store, "collective", "path", GROUP, True, NOT_ABANDONED) == (made[1], made)
    monkeypatch.setattr(openings, "_COLLECTIVE_BEGIN_SECS", 0.0)
    assert openings._taken(store, "collective", "path", GROUP, True, NOT_ABANDONED) is None


def test_an_opening_that_is_removed_meanwhile_is_made_again():
    store = KeyValues()
    (one,) = begun(store, "removed", 1)
    store.key_value_delete(one._begun)
    assert openings._transcript(one, "path", GROUP, NOT_ABANDONED) is None


@pytest.mark.parametrize("data", [b"", b"x", bytes(99)])
def test_damage_is_an_error_of_the_opening(data):
    one = Publication(KeyValues(), "damaged", 0)
    one.write({"alone": False}, data)
    with pytest.raises(CheckpointIOError, match="process 0 sent of the checkpoint is damaged"):
        openings._transcript(one, "path", GROUP, NOT_ABANDONED)


STATE = {f"layer_{number}": {"w": np.arange(64.0, dtype=np.float32) + number} for number in range(3)}
# Larger than what is read whole at once.
LARGE = {"x": np.arange(1 << 19, dtype=np.float32), "y": np.arange(1 << 9, dtype=np.float32)}
# Plans, then a restore to a device of the last process, before which the files become others.
SCRIPT = """
    import os, urllib.request
    import orbax_t5x as ot
    from jax.experimental import multihost_utils
    from orbax_t5x.multihost.coordination import key_value_store
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    folder, changing, *paths = sys.argv[1:]
    opened = []
    events = ("open", "os.scandir", "os.listdir")
    sys.addaudithook(lambda event, given: opened.append(given[0]) if event in events else None)
    for path in paths:
        try:
            tell(sorted(entry.name for entry in ot.plan_restore(path, None).entries))
        except ot.errors.CheckpointError as error:
            tell([type(error).__name__, str(error)])
    names = ("large.safetensors", "database", "plain")
    for name in names:
        del opened[:]
        plan = ot.plan_restore(f"{folder}/{name}", None)
        tell(sum(str(path).startswith(folder) for path in opened))
        tell(sorted(plan.execute()))
    for change in ("tag", "size", "local"):
        if change == "local":
            changing = f"{folder}/large.safetensors"
        plan = ot.plan_restore(changing, {"x": jax.ShapeDtypeStruct((1 << 19,), np.float32, sharding=sharding)},
                               strict=False)
        multihost_utils.sync_global_devices(change)
        if process == 0 and change == "local":
            os.truncate(changing, os.path.getsize(changing) - 4096)
        elif process == 0:
            urllib.request.urlopen(f"{changing}?{change}=1").read()
        multihost_utils.sync_global_devices(f"changed {change}")
        try:
            plan.execute()
        except ot.errors.CheckpointError as error:
            tell([type(error).__name__, str(error)])
    plan = ot.plan_restore(f"{folder}/small.safetensors", None)
    os.environ.update({"ORBAX_T5X_STORE": "near"} if process == 1 else {})
    try:
        plan.execute()
    except ot.errors.CheckpointError as error:
        tell([type(error).__name__, str(error)])
    plan.execute(broadcast=True)
    tell("w" in str(ot.plan_restore(f"{folder}/small.safetensors", None)))
    multihost_utils.sync_global_devices("all are opened")
    tell(key_value_store().key_value_dir_get_bytes("orbax_t5x/catalogue"))
"""


def counted(requests):
    return collections.Counter((one.method, one.name, one.range) for one in requests)


def write_all(root):
    """Checkpoints whose metadata are in one file, in many, and in a database; returns their names."""
    safetensors.numpy.save_file(LARGE, root / "large.safetensors")
    safetensors.numpy.save_file(STATE["layer_0"], root / "small.safetensors")
    np.savez(root / "arrays.npz", **LARGE)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "database", STATE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(root / "plain", ocp.args.PyTreeSave(STATE))
    return ["large.safetensors", "small.safetensors", "arrays.npz", "database", "plain"]


def become_others(store):
    """Makes `changing/x.safetensors` another file, by its ETag or its size, when asked; returns what it was."""
    data = safetensors.numpy.save(LARGE)
    store.files["changing/x.safetensors"] = data
    answer_to = store.answer_to

    def answer(name, query):
        if "tag" in query:
            store.files[name], store.etag = data[:-1] + b"?", lambda data: '"other"'
        if "size" in query:
            store.files[name] = data[:-4096]
        return answer_to(name, query)

    store.answer_to = answer
    return data


@pytest.mark.slow
def test_four_processes_ask_as_much_as_one_and_are_told_where_they_see_other_files(tmp_path):
    names = write_all(tmp_path)
    with serving(tmp_path) as store:
        urls = [f"{store.url}/{name}" for name in names]
        for url in urls:
            ot.plan_restore(url, None)
        with pytest.raises(ot.errors.UnsupportedCheckpointError) as missing:
            ot.plan_restore(f"{store.url}/missing", None)
        alone = counted(store.log)
        store.forget()
        data = become_others(store)
        told = run_script(
            SCRIPT, 4, tmp_path, f"{store.url}/changing/x.safetensors", *urls, f"{store.url}/missing", devices=1
        )
        assert counted(one for one in store.log if not one.name.startswith("changing")) == alone
    assert all(one[: len(names) + 1] == told[0][: len(names) + 1] for one in told)
    assert told[0][names.index("database")] == sorted(f"{name}/w" for name in STATE)
    assert told[0][len(names)] == ["UnsupportedCheckpointError", str(missing.value)]
    assert all(one.pop() == [] for one in told), "what all have received is removed"
    told, wrong = [one[:-2] for one in told], [one[-2:] for one in told]
    message = "ORBAX_T5X_STORE is 'near' on process 1, and can be 'local', 'shared' or 'bucket' only."
    assert all(kind == "RestorePlanError" and message in text for (kind, text), _ in wrong)
    assert all(is_shown for _, is_shown in wrong), "a plan is shown, and executed where the variable decides nothing"
    # Locally the opener opens files, and the others none; each then reads for itself.
    local = [one[len(names) + 1 : -3] for one in told]
    assert all(count > 0 for count in local[0][::2]) and all(one[::2] == [0, 0, 0] for one in local[1:])
    assert all(one[1::2] == [["x", "y"], sorted(STATE), sorted(STATE)] for one in local)
    assert all({kind for kind, _ in one[-3:]} == {"CheckpointGoneError"} for one in told)
    for tag, size, here in [[text for _, text in one[-3:]] for one in told]:
        assert '"other" on process 3, and "' in tag and "on process 0, which opened the checkpoint" in tag
        sizes = f"{len(data) - 4096} on process 3, and {len(data)} on process 0"
        assert sizes in size and sizes in here and here.startswith(f"{tmp_path}/large.safetensors: leaf 'x'")
        assert tag.startswith(f"{store.url}/changing/x.safetensors: leaf 'x'") and "Fix: give all processes" in tag

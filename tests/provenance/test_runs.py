"""The lineages of runs that this process knows."""

import pytest

from orbax_t5x.provenance import runs
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.records import make_entry
from orbax_t5x.transforms import Drop

RUN = runs.RunKey("/root", "state")
FIRST, SECOND = (
    (make_entry("/source", "orbax", ChainRecord.of([Drop(name)]), is_resuming=None),) for name in ("a", "b")
)


@pytest.fixture(autouse=True)
def new_process():
    runs.forget_all()


def known(run=RUN):
    found = runs.known_run(run)
    assert found is not None
    return found


def test_the_first_restore_sets_the_lineage_and_another_history_makes_it_ambiguous():
    assert runs.known_run(RUN) is None
    runs.note_restored(RUN, FIRST)
    runs.note_restored(RUN, FIRST)
    assert known().lineage == FIRST and not known().is_ambiguous
    runs.note_restored(RUN, SECOND)
    assert known().lineage == FIRST and known().is_ambiguous


def test_a_save_with_a_given_lineage_ends_the_ambiguity():
    runs.note_restored(RUN, FIRST)
    runs.note_restored(RUN, SECOND)
    runs.note_saved(RUN, FIRST, is_given=False)
    assert known().is_ambiguous
    runs.note_saved(RUN, SECOND, is_given=True)
    assert known().lineage == SECOND and not known().is_ambiguous


def test_a_run_that_begins_anew_forgets_the_earlier_one():
    other = runs.RunKey("/other", "state")
    for run in (RUN, other):
        runs.note_restored(run, FIRST)
    runs.begin_run(RUN, SECOND)
    assert known().is_begun and known().lineage == SECOND and not known().is_restored
    assert known(other).lineage == FIRST
    runs.forget_root("/root")
    assert runs.known_run(RUN) is None and runs.known_run(other) is not None

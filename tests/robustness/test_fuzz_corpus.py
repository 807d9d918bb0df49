"""What fuzzing begins with and what it found, in every run of the tests, by the checks of `tests/fuzz/targets.py`."""

import random

import pytest

from orbax_t5x import errors
from tests.fuzz import corpus
from tests.fuzz.mutations import random_bytes
from tests.fuzz.targets import TARGETS

# The part of a finding's file name before the first dash, and the error that it must lead to.
KINDS = {
    "corrupt": errors.CorruptCheckpointError,
    "limit": errors.LimitExceededError,
    "unsafe": errors.UnsafeCheckpointError,
    "unsupported": errors.UnsupportedCheckpointError,
}
# Of each target, beyond the saved inputs: enough to see that an edit still reaches the parser.
_EDITS = 40
FINDINGS = [(target, name) for target in TARGETS for name in corpus.findings(target)]


@pytest.mark.parametrize(("target", "name"), FINDINGS, ids=lambda value: value)
def test_findings(tmp_path, target, name):
    error = TARGETS[target].make(tmp_path)(corpus.findings(target)[name])
    assert type(error) is KINDS[name.split("-")[0]]


@pytest.mark.parametrize("name", TARGETS)
def test_saved_inputs_and_edits(tmp_path, name):
    target = TARGETS[name]
    check = target.make(tmp_path)
    inputs = list(corpus.inputs(name))
    for data in inputs:
        check(data)
    generator = random.Random(5)
    for _ in range(_EDITS):
        check(target.mutate(generator.choice(inputs), generator, random_bytes(generator)))


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_seed_is_sound(tmp_path, name):
    """An input that is refused at once would begin a run that gets nowhere."""
    target = TARGETS[name]
    assert target.make(tmp_path)(next(iter(target.seeds()))) is None


def test_the_corpus_is_here():
    assert len(corpus.findings("tf_bundle")) >= 18
    assert corpus.findings("t5x") and corpus.findings("zarray")

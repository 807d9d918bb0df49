"""The names of real projects against each other: no leaf is wrong, most are whole, one answer settles the others."""

import itertools
import random

import pytest

import orbax_t5x as ot
from orbax_t5x.rules.alignment.turns import UNKNOWN_TURN
from tests.support.aligned_leaves import wrong_leaves
from tests.support.naming_conventions import FAMILIES, leaves

PAIRS = [(family, *pair) for family, table in FAMILIES.items() for pair in itertools.permutations(table, 2)]


def sides(family, names, seed):
    """A source and a target, and the source's names by the target's."""
    ours, theirs = (leaves(family, name, random.Random(seed)) for name in names)
    assert len(dict(ours.values())) == len(ours) == len(theirs)
    return dict(ours.values()), dict(theirs.values()), {theirs[key][0]: ours[key][0] for key in theirs}


def answered(source, target, truth, *, most=1):
    """The alignment after some true answers, each of which settles most of a few that are asked about."""
    given = {}
    alignment = ot.rules.align(source, target)
    while alignment.open and len(given) < most:
        kinds = [row.members[0] for row in alignment.folded()][:4]
        tried = [{**given, truth[name]: name} for name in (list(alignment.open)[at] for at in kinds)]
        found = [ot.rules.align(source, target, given=one) for one in tried]
        given, alignment = max(zip(tried, found, strict=True), key=lambda pair: pair[1].covered)
    return alignment


@pytest.mark.slow
def test_real_conventions_are_found_or_asked_about_and_never_wrong():
    found = 0
    for seed, (family, *names) in enumerate(some := PAIRS[::11]):
        source, target, truth = sides(family, names, seed)
        alignment = ot.rules.align(source, target)
        assert not wrong_leaves(alignment, source, target), names
        found += alignment.is_complete
        for name in alignment.open:
            assert alignment._moves.why[name]
        if alignment.open and (seed % 3 == 0):
            assert not wrong_leaves(after := answered(source, target, truth), source, target), names
            assert after.is_complete or all(after._moves.why[name] == UNKNOWN_TURN for name in after.open), names
    assert found > 0.8 * len(some)


@pytest.mark.parametrize("copy", ["ema{}", "opt_state{}0{}mu{}", "teacher{}model{}"])
@pytest.mark.parametrize("names", [("hf llama", "maxtext"), ("gguf", "gemma nnx")])
def test_copies_of_the_model_disturb_nothing(copy, names):
    source, target, _ = sides("decoder", names, 1)
    whole = ot.rules.align(source, target)
    prefix = copy.replace("{}", "." if "." in next(iter(source)) else "/")
    both = {**source, **{prefix + name: 2 * value for name, value in source.items()}}
    alignment = ot.rules.align(both, target)
    assert not wrong_leaves(alignment, both, target)
    assert alignment.covered == whole.covered > 20


@pytest.mark.parametrize("names", [("hf t5", "own linen"), ("bart", "own linen"), ("t5x", "flax nnx")])
def test_a_decoder_beside_an_encoder_disturbs_nothing(names):
    source, target, _ = sides("towers", names, 2)
    words = ("params/enc", "encoder")
    target = {name: value for name, value in target.items() if name.startswith(words)}
    encoder = {name: value for name, value in source.items() if "decoder" not in name and "head" not in name}
    alone, both = (ot.rules.align(ours, target) for ours in (encoder, source))
    assert not wrong_leaves(both, source, target)
    # Of two last norms one is asked about.
    assert both.covered >= alone.covered - 1 > len(target) / 2

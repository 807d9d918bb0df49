"""Mappings of names as few rules."""

import random

import pytest

from orbax_t5x.rules.alignment.renaming import rename_rules
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from tests.support.t5_layouts import minimal

NAMES = sorted(minimal())


def renamed(renames, names):
    """Returns the new names by the old ones; no rule is unused."""
    diagnostics = Diagnostics()
    result = run_transforms(renames, {name: name for name in names}, {}, is_resuming=False, diagnostics=diagnostics)
    assert diagnostics.problems == []
    return {old: new for new, old in result.items()}


def rules(mapping, others=()):
    renames = rename_rules(mapping, others)
    assert renamed(renames, [*mapping, *others]) == {**mapping, **{name: name for name in others}}
    return [rule for rename in renames for rule in rename.rules]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda name: name, 0),
        (lambda name: f"params/{name}", 1),
        (lambda name: f"{name}/value", 1),
        (lambda name: name.replace("kernel", "w"), 1),
        (lambda name: name.replace("layers_", "h/"), 1),
        (lambda name: name.replace("decoder/", "dec/"), 1),
        (lambda name: name.replace("decoder/", "dec/").replace("encoder/", "enc/"), 2),
        (lambda name: f"model/{name.replace('layers_', 'block/').replace('/mlp/', '/ffn/x/')}/value", 4),
        (lambda name: name.replace("/", "."), 4),
        (lambda name: name.replace("/", ".").replace("kernel", "w"), 5),
        (lambda name: name.replace("wi_0", "gate").replace("wi_1", "up"), 2),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_systematic_changes_are_few_rules(change, count, back):
    mapping = {name: change(name) for name in NAMES}
    assert len(rules({new: old for old, new in mapping.items()} if back else mapping)) == count


def test_other_names_stay():
    """A prefix is given to the names that get one."""
    found = rules({name: f"params/{name}" for name in NAMES}, ["step", "seed"])
    assert len(found) == 3
    assert rules({"a/b": "c/b"}, ["a/d", "x/a/b"]) == [("a/b", "c/b")]


def test_names_that_are_swapped_are_rules_of_one_transform():
    mapping = {name: name.translate(str.maketrans("01", "10")) for name in NAMES if "_0/" in name or "_1/" in name}
    assert rules(mapping)
    assert rules({"a/x": "b/x", "b/x": "a/x"})


def test_signs_of_patterns_are_only_signs():
    assert rules({"a+b/(c)/\\d": "x.y/[c]/\\1", "a+b/(e)/\\d": "x.y/[e]/\\1"})


@pytest.mark.parametrize("seed", range(10))
def test_any_mapping_is_written(seed):
    rng = random.Random(seed)
    words = ["a", "b_1", "layers_0", "layers_1", "c", "2"]
    names = sorted({"/".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(12)})
    news = sorted({"/".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(40)})
    # No name may be the path of another.
    names, news = ([f"{name}/." for name in some] for some in (names, news))
    rules(dict(zip(names, rng.sample(news, len(names)), strict=True)))

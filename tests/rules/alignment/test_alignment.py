"""Trees of one model under other names: nothing is ever assigned wrongly, and what has one reading is found whole."""

import collections
import cProfile
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.text.code import calls_code
from tests.support import renamed_models, t5_layouts
from tests.support.aligned_leaves import applied, wrong_leaves
from tests.support.renamed_models import KINDS, Changes, case, models

# Of what runs each time; 2,000 take a minute.
_CASES = 150


def table(seeds):
    """Kind of renaming -> how many cases with one reading were found, asked about and wrong; and the same of others."""
    counts = collections.defaultdict(collections.Counter)
    kinds = list(KINDS)
    for seed in seeds:
        one = case(seed, kinds[seed % len(kinds)])
        alignment = ot.rules.align(one.source, one.target)
        wrong = wrong_leaves(alignment, one.source, one.target)
        counts[one.kinds[0], one.is_unique]["wrong" if wrong else "found" if alignment.is_complete else "asked"] += 1
    return counts


def assert_table(counts):
    assert sum(found["wrong"] for found in counts.values()) == 0
    whole = sum((found for (_, is_unique), found in counts.items() if is_unique), collections.Counter())
    assert whole["found"] >= 0.95 * whole.total() > 0


@pytest.mark.slow
def test_no_case_is_wrong_and_what_has_one_reading_is_found():
    assert_table(table(range(_CASES)))


@settings(max_examples=settings.default.max_examples // 10)
@given(seed=st.integers(_CASES, 1 << 32), kind=st.sampled_from(list(KINDS)))
def test_no_other_case_is_wrong(seed, kind):
    one = case(seed, kind)
    assert wrong_leaves(ot.rules.align(one.source, one.target), one.source, one.target) == []


def test_projections_of_one_shape_without_meaning_stay_open():
    source = models()["llama"]
    words = {"query": "a", "key": "b", "value": "c", "out": "d"}
    target = {"/".join(words.get(part, part) for part in name.split("/")): value for name, value in source.items()}
    alignment = ot.rules.align(source, target)
    readings = tuple(f"layers_1/self_attention/{name}/kernel" for name in ("key", "out", "query", "value"))
    assert alignment.open["layers_1/self_attention/a/kernel"] == readings
    assert len(alignment.open) == 12 and not wrong_leaves(alignment, source, target)
    lines = str(alignment).splitlines()
    readings = " or ".join(f"layers_{{0…2}}/self_attention/{name}/kernel" for name in ("key", "out", "query", "value"))
    assert f"# open: layers_{{0…2}}/self_attention/a/kernel ×3: {readings}" in lines
    assert sum("# open" in line for line in lines) == 4


def test_what_is_open_is_printed_in_a_few_lines():
    """Names that have nothing in common do not fold."""
    source = {f"{first}{last}/w": np.ones((4, 4)) for first in "abcdefgh" for last in "stuvwxyz"}
    alignment = ot.rules.align(source, {f"x{name}": value for name, value in list(source.items())[::-1]})
    assert len(alignment.open) == 64
    lines = str(alignment).splitlines()
    assert len(lines) < 60 and lines[-1] == "# open: 44 leaves more"
    assert "as/w or at/w or au/w or av/w and 60 more" in str(alignment)
    assert eval(str(alignment), {"ot": ot}) == list(alignment.transforms)


def test_one_line_of_the_user_closes_what_is_open():
    source = models()["llama"]
    words = {"query": "a", "key": "b", "value": "c", "out": "d"}
    target = {"/".join(words.get(part, part) for part in name.split("/")): value for name, value in source.items()}
    told = [ot.transforms.Rename([(f"(.*)/{old}/kernel", rf"\1/{new}/kernel")]) for old, new in words.items()]
    renamed = applied(told, source)
    assert ot.rules.align(renamed, target).is_complete


@pytest.mark.parametrize("square", [False, True])
def test_a_transposition_needs_the_words_for_it(square):
    """Names that are equal with shapes that are those of a transposed matrix: neither reading is certain."""
    size = 4 if square else 6
    source = {f"{i}/{name}/w": np.ones(shape) for i in (0, 1) for name, shape in (("wi", (4, size)), ("wo", (size, 4)))}
    target = {name: value.T for name, value in source.items()}
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete == square and alignment.transforms == ()
    torch = {
        name.replace("/w", "/weight").replace("/weighti", "/wi").replace("/weighto", "/wo"): v
        for name, v in source.items()
    }
    flax = {name.replace("/weight", "/kernel"): value.T for name, value in torch.items()}
    alignment = ot.rules.align(torch, flax)
    # Of square matrices it cannot be seen whether they are transposed.
    assert alignment.is_complete != square and not wrong_leaves(alignment, torch, flax)


@pytest.mark.parametrize("model", ["t5 1.1", "square", "llama", "vision"])
def test_pytorchs_layers_become_flaxs_on_an_axis_and_back(model):
    torch = Changes(random.Random(0), models()[model])
    torch.torch()
    torch.each(lambda name: name.replace("/", "."))
    flax = Changes(random.Random(1), models()[model])
    assert flax.stacked(1)
    flax.usual()
    flax.prefix()
    for source, target in ((torch.result(), flax.result()), (flax.result(), torch.result())):
        alignment = ot.rules.align(source, target)
        assert alignment.is_complete and not wrong_leaves(alignment, source, target)


def test_known_words_for_different_modules_are_not_paired():
    """An encoder for a decoder of its shapes."""
    source = {f"encoder/layers_{i}/{name}": np.ones(2 + at) for i in (0, 1) for at, name in enumerate("abcd")}
    target = {name.replace("encoder", "decoder"): value for name, value in source.items()}
    assert ot.rules.align(source, target).open.keys() == target.keys()
    assert ot.rules.align(source, {name.replace("encoder", "x"): v for name, v in source.items()}).is_complete
    for kept in ("", "norm/scale"):
        single = {f"layers_{i}/attention/kernel": np.ones((2, 3)) for i in (0, 1)}
        single |= {kept: np.ones(4)} if kept else {}
        other = {name.replace("attention", "mlp"): value for name, value in single.items()}
        assert ot.rules.align(single, other).open.keys() == other.keys() - {kept}
        other["more"] = np.ones(9)
        assert ot.rules.align(single, other).open.keys() == other.keys() - {kept}


def test_layers_that_differ_keep_their_order():
    shapes = [(2, 3), (3, 4), (2, 3), (4, 4)]
    source = {f"layers_{i}/w": np.full(shape, i, np.float32) for i, shape in enumerate(shapes)}
    target = {f"h/{i + 1}/w": value for i, value in enumerate(source.values())}
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete and not wrong_leaves(alignment, source, target)
    lettered = {f"h/{'dbca'[i]}/w": value for i, value in enumerate(source.values())}
    assert ot.rules.align(source, lettered).open.keys() == lettered.keys()


@pytest.mark.parametrize("kind", ["everything", "stacked, words, prefix", "transposed, numbering, separator"])
def test_the_way_back_is_one_and_both_are_code(kind):
    one = case(3, kind)
    there = ot.rules.align(one.source, one.target)
    back = there.inverse()
    assert there.is_complete and back.is_complete
    assert not wrong_leaves(back, one.target, one.source)
    for alignment, source, target in ((there, one.source, one.target), (back, one.target, one.source)):
        pasted = eval(f"[{calls_code(alignment.transforms)}]", {"ot": ot})
        assert pasted == list(alignment.transforms) == eval(str(alignment), {"ot": ot})
        assert len(alignment.evidence) == len(alignment.transforms)
        assert applied(pasted, source).keys() == target.keys()


def test_the_substitutions_are_few():
    source = renamed_models.models()["t5 1.1"]
    target = {
        "params/"
        + name.replace("decoder/", "dec/").replace("layers_", "layers/").replace("kernel", "weight")
        + "/value": v
        for name, v in source.items()
    }
    alignment = ot.rules.align(source, target)
    assert not wrong_leaves(alignment, source, target)
    assert sum(len(rename.rules) for rename in alignment.transforms) <= 6


def test_an_optimizer_follows():
    params = {
        f"layers_{i}/{name}/kernel": np.full((3 + at, 4), i, np.float32) for i in (0, 1) for at, name in enumerate("ab")
    }
    source = {f"{root}/{name}": value for root in ("params", "opt_state/0/mu") for name, value in params.items()}
    source |= {"step": np.int32(3), "opt_state/0/count": np.int32(3)}
    target = {name.replace("layers_", "h/").replace("/kernel", "/w"): value for name, value in source.items()}
    alignment = ot.rules.align(source, target)
    assert {type(one).__name__ for one in alignment.transforms} == {"Rename"}
    result = applied(alignment.transforms, source, target)
    assert result.keys() == target.keys()
    assert all(result[name].tobytes() == value.tobytes() for name, value in target.items())


def test_dtypes_count_only_where_both_sides_have_the_same():
    source = {"a/x": np.ones(3, np.float32), "b/y": np.ones(3, np.int32)}
    swapped = {"p/q": np.ones(3, np.int32), "r/s": np.ones(3, np.float32)}
    assert ot.rules.align(source, swapped).is_complete
    half = {"p/q": np.ones(3, np.int32), "r/s": np.ones(3, np.float16)}
    assert ot.rules.align(source, half).is_complete
    assert ot.rules.align(source, {"p": np.ones(3, bool), "r": np.ones(3, np.float32)}).open["p"] == ()


def test_what_is_no_tree_is_refused():
    with pytest.raises(TypeError, match="not as int"):
        ot.rules.align(3, {})
    assert ot.rules.align({}, {"a": np.ones(1)}).open == {"a": ()}
    assert ot.rules.align({"a": np.ones(1)}, {}).is_complete


@pytest.mark.slow
def test_the_work_grows_with_the_number_of_leaves_alone():
    """Ten times as many leaves take at most eleven times as many calls of functions."""
    plain = t5_layouts.minimal()
    layer = {name.partition("layers_0/")[2]: value for name, value in plain.items() if "decoder/layers_0/" in name}

    def calls(layers):
        source = {f"decoder/layers_{i}/{name}": value for i in range(layers) for name, value in layer.items()}
        target = {f"params/dec/{i}/{name}/value": value for i in range(layers) for name, value in layer.items()}
        profile = cProfile.Profile()
        assert profile.runcall(ot.rules.align, source, target).is_complete
        return sum(entry.callcount for entry in profile.getstats())

    calls(2)
    assert calls(100) < 11 * calls(10)

"""Every pack, both ways, on every layout and on relatives of T5: a whole translation or a problem, never half of one.

The expected trees are NumPy's, by `t5_layouts`.
"""

import functools

import pytest

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import assert_same, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from tests.support import t5_layouts as t5

HEADS = (t5.H, t5.D)


def t5x(layout, prefix="target/"):
    return lambda model: t5.below(prefix, layout(model))


MINIMAL, UNSCANNED, SCANNED = t5x(dict), t5x(t5.unscanned), t5x(t5.scanned)
LAYOUTS = {
    "minimal": MINIMAL,
    "minimal of Flax": t5x(dict, "params/"),
    "unscanned": UNSCANNED,
    "scanned": SCANNED,
    "scanned on axis 0": t5x(functools.partial(t5.scanned, axis=0)),
    "flaxformer": t5x(functools.partial(t5.unscanned, split=False)),
    "flaxformer scanned": t5x(functools.partial(t5.scanned, split=False)),
    "hugging face": t5.hugging_face,
    "hugging face flax": t5.hugging_face_flax,
    "mesh tf": t5.mesh_tf,
    "maxtext": t5x(functools.partial(t5.maxtext, scan=False), "params/params/"),
    "maxtext scanned": t5x(t5.maxtext, "params/params/"),
}
EVERY = tuple(t5.models())
T5 = ("t5 1.1", "t5 1.0", "umt5", "encoder", "decoder", "decoder without bias")
TOWER_BIAS = tuple(name for name in EVERY if name != "umt5")
DECODER = ("decoder without bias",)
FEW = {"t5 1.1", "decoder without bias", *t5.relatives()}
MODELS = {
    **dict.fromkeys(("hugging face flax", "mesh tf"), T5[:-1]),
    "hugging face": (*T5[:-1], "separate embeddings"),
    **dict.fromkeys(("maxtext", "maxtext scanned"), DECODER),
}
JOINED = {"scanned": "flaxformer scanned", "unscanned": "flaxformer", "flaxformer": "unscanned"}
JOINED["flaxformer scanned"] = "scanned"
# Relatives with all their leaves in a layout.
RELATIVES = {
    "hugging face": ("switch", "longt5 local", "longt5 tg"),
    "hugging face flax": ("longt5 tg flax",),
    "minimal": ("switch t5x", "longt5 tg t5x"),
    "unscanned": ("switch t5x", "longt5 tg t5x"),
}
# Pack, layouts it leads between, models that it knows, and those that its inverse knows.
PACKS = {
    "hugging face": (rules.hf_t5_to_t5x(), "hugging face", "minimal", T5[:-1], (*T5[:-1], "separate embeddings")),
    "flax": (rules.hf_flax_t5_to_t5x(), "hugging face flax", "minimal", T5[:-1], T5[:-1]),
    "scanned": (rules.t5_minimal_to_scanned(*HEADS), "minimal", "scanned", EVERY, TOWER_BIAS),
    "unscanned": (rules.t5_minimal_to_unscanned(*HEADS), "minimal", "unscanned", EVERY, TOWER_BIAS),
    "stacked": (rules.t5_unscanned_to_scanned(), "unscanned", "scanned", EVERY, EVERY),
    "flaxformer": (rules.t5_unscanned_to_scanned(), "flaxformer", "flaxformer scanned", EVERY, EVERY),
    "maxtext": (rules.t5x_decoder_to_maxtext(*HEADS), "minimal", "maxtext scanned", DECODER, DECODER),
    "maxtext, unscanned": (
        rules.t5x_decoder_to_maxtext(*HEADS, scanned=False),
        *("minimal", "maxtext", DECODER, DECODER),
    ),
    "mesh tf": (rules.mesh_tf_to_t5x(), "mesh tf", "minimal", ("t5 1.1", "t5 1.0", "encoder", "decoder"), ()),
}
STACKING = (PACKS["stacked"][0], PACKS["stacked"][0].inverse())
WAYS = [f"{name}{way}" for name in PACKS for way in ("", ", inverse") if way == "" or PACKS[name][0].has_inverse]


def pack_of(way):
    """Returns a pack or its inverse, both layouts, and the models that it knows."""
    name = way.removesuffix(", inverse")
    pack, source, target, models, models_back = PACKS[name]
    return (pack, source, target, models) if name == way else (pack.inverse(), target, source, models_back)


@functools.cache
def trees():
    """Every model in every layout that has names for all of it, and the relatives of T5."""
    models = t5.models()
    found = {
        (layout, name): make(models[name]) for layout, make in LAYOUTS.items() for name in MODELS.get(layout, EVERY)
    }
    return {**found, **{("", name): tree for name, tree in t5.relatives().items()}}


def named(tree):
    """Returns the names without their prefix, each with the rank of its leaf."""
    return {(name.split("params/")[-1].removeprefix("target/"), len(value.shape)) for name, value in tree.items()}


@functools.cache
def ranks(layout):
    """The names of all models in a layout, with ranks."""
    relatives = [named(trees()["", name]) for name in RELATIVES.get(layout, ())]
    return set().union(*relatives, *(named(tree) for key, tree in trees().items() if key[0] == layout))


@pytest.mark.parametrize("way", WAYS)
def test_a_pack_translates_all_of_its_own_layout(way):
    pack, source, target, models = pack_of(way)
    for model in models:
        for wanted in ({}, trees()[target, model]):
            result, diagnostics = run(pack, trees()[source, model], wanted)
            assert diagnostics.problems == [], model
            assert_same(result, trees()[target, model])


@pytest.mark.parametrize("models", [FEW, pytest.param(set(EVERY) - FEW, marks=pytest.mark.slow)], ids=["few", "others"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pack_translates_no_tree_by_half(way, models):
    pack, _, target, _ = pack_of(way)
    # Layers are stacked whatever the heads are.
    whole = [target, JOINED.get(target)] if pack in STACKING else [target]
    for at, (key, tree) in enumerate(trees().items()):
        wanteds = [{}, trees()[target, pack_of(way)[3][0]]]
        # With a target and without; of the others one in turn.
        for wanted in () if key[1] not in models else wanteds if models is FEW else wanteds[at % 2 :][:1]:
            diagnostics = Diagnostics()
            result = pack.apply(tree, wanted, diagnostics)
            if not diagnostics.problems:
                assert named(result) <= set().union(*map(ranks, filter(None, whole))), key

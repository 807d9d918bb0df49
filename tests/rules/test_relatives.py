"""Relatives of T5 in every layout: names, shapes and values, by NumPy's own trees."""

import functools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import LeafMismatchError, RestorePlanError
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support import relative_matrix
from tests.support import relative_trees as trees
from tests.support.memory_checkpoint import checkpoint

SIZES = trees.Sizes()
T5 = "T5.1.1, mT5, ByT5, Flan-T5, UL2"


def tree(name, layout, prefix="target/", sizes=SIZES):
    one = trees.by_name(name)
    made = trees.LAYOUTS[layout](trees.minimal(one, sizes), one, sizes)
    return made if "Hugging" in layout else trees.below(prefix, made)


# -- the trees are those of the models' own code


@functools.cache
def flaxformer():
    text = (GOLDENS / "trees" / "flaxformer.json").read_text()
    return {
        model: {
            name.replace("*", str(layer)): tuple(shape)
            for name, (shape, layers) in leaves.items()
            for layer in layers or [0]
        }
        for model, leaves in json.loads(text).items()
    }


@pytest.mark.parametrize(
    ("model", "relative", "layout"),
    [
        ("t5_11", T5, "T5X minimal"),
        ("t5_11_scan", T5, "Flaxformer scanned"),
        ("t5_fused", T5, "Flaxformer fused"),
        ("longt5_local", "LongT5, local", "T5X minimal"),
        ("longt5_tg", "LongT5, transient-global", "T5X minimal"),
        ("switch", "Switch", "T5X minimal"),
        ("moe", "gated mixture of experts", "T5X minimal"),
        ("moe_scan", "gated mixture of experts", "Flaxformer scanned in subblocks"),
        ("stmoe", "ST-MoE", "T5X minimal"),
    ],
)
def test_the_trees_are_flaxformers(model, relative, layout):
    sizes = trees.Sizes(encoder=4, decoder=4, G=14, K=14)
    shapes = {name: value.shape for name, value in tree(relative, layout, "", sizes).items()}
    if model == "moe_scan":  # its layers have no relative bias
        shapes = {name: shape for name, shape in shapes.items() if "relpos_bias" not in name}
    assert shapes == flaxformer()[model]


def test_a_tree_of_split_heads_with_one_bias_is_flaxformers():
    plain = trees.minimal(trees.by_name(T5), trees.Sizes(encoder=4, decoder=4))
    split = trees.split(plain, SIZES)
    assert {name: value.shape for name, value in split.items()} == flaxformer()["t5_split"]
    for target in (plain, trees.stacked(split, trees.Sizes(encoder=4, decoder=4))):
        relative_matrix.compared(rules.infer(split, target), split, target)
        relative_matrix.compared(rules.infer(target, split), target, split)


@pytest.mark.parametrize(
    ("relative", "layout", "golden"),
    [
        ("language model", "Mesh TensorFlow", "tf_bundle/lm_transformer"),
        (T5, "Mesh TensorFlow", "tf_bundle/t5_1_1_f32"),
        (T5, "Hugging Face", "safetensors/t5_1_1"),
        (T5, "Hugging Face Flax", "flax_msgpack/t5_1_1"),
    ],
)
def test_the_names_are_those_of_files(relative, layout, golden):
    with ot.open_checkpoint(GOLDENS / golden) as opened:
        names = {name for name in opened.leaves if not re.search("_slot_|global_step", name)}
    depths = {"encoder": 0, "decoder": 0}
    for name in names:
        if match := re.match(r"(encoder|decoder|transformer)[./]block[./_](\d+)", name):
            tower = match[1].replace("transformer", "decoder")
            depths[tower] = max(depths[tower], int(match[2]) + 1)
    found = set(tree(relative, layout, "", trees.Sizes(**depths)))
    # A model that is tied has no output projection in its file.
    assert found - {"lm_head.weight"} <= names <= found


# -- every relative in every layout, there and back


@pytest.mark.slow
def test_the_page_has_the_table_of_these_tests():
    found, page = relative_matrix.section("translations", relative_matrix.table())
    assert found == relative_matrix.table(), "write it by: python -m tests.support.relative_matrix"
    assert page == relative_matrix.PAGE.read_text()


@given(st.data())
@settings(max_examples=settings.default.max_examples // 10)
def test_models_of_other_sizes_are_translated(data):
    sizes = data.draw(
        st.builds(
            trees.Sizes,
            **{name: st.integers(1, 7) for name in ("H", "D", "X", "G", "K", "V")},
            E=st.integers(3, 9),
            F=st.integers(10, 13),
            encoder=st.sampled_from([2, 4, 12]),
            decoder=st.sampled_from([2, 6]),
        )
    )
    one = data.draw(st.sampled_from(trees.RELATIVES))
    made = relative_matrix.made(one, sizes)
    source = data.draw(st.sampled_from(sorted(made)))
    target = data.draw(st.sampled_from(sorted(made.keys() - {"Mesh TensorFlow"})))
    relative_matrix.compared(rules.infer(made[source], made[target]), made[source], made[target])


@pytest.mark.parametrize(
    ("relative", "source", "target"),
    [
        (T5, "Mesh TensorFlow", "Flaxformer, bias per layer"),
        (T5, "Flaxformer fused", "T5X unscanned"),
        (T5, "Flaxformer, bias per layer", "Flaxformer fused"),
        ("umT5, Pile-T5", "T5X unscanned", "Flaxformer scanned"),
    ],
)
def test_biases_are_the_targets_at_the_end_of_a_path(relative, source, target):
    made = relative_matrix.made(trees.by_name(relative), SIZES)
    pack = rules.infer(made[source], made[target])
    relative_matrix.compared(pack, made[source], made[target])
    assert pack.has_inverse == (source != "Mesh TensorFlow")


# -- what names and shapes do not tell


def test_local_attention_is_told_by_an_argument_or_the_target():
    ours, theirs = tree("LongT5, local", "T5X minimal"), tree("LongT5, local", "Hugging Face")
    told = rules.t5x_to_hf_t5(encoder_attention_type="local")
    for pack, target in ((told, {}), (rules.t5x_to_hf_t5(), theirs)):
        result, diagnostics = run(pack, ours, target)
        assert diagnostics.problems == [] and result.keys() == theirs.keys()
    assert run(rules.t5x_to_hf_t5(), ours)[0].keys() == tree(T5, "Hugging Face").keys()
    assert told.inverse().steps == rules.hf_t5_to_t5x().steps and told.digest() != rules.t5x_to_hf_t5().digest()
    with pytest.raises(ValueError, match="encoder_attention_type is one of"):
        rules.t5x_to_hf_t5(encoder_attention_type="sparse")
    transient = tree("LongT5, transient-global", "T5X minimal")
    assert run(rules.t5x_to_hf_t5(), transient)[0].keys() == tree("LongT5, transient-global", "Hugging Face").keys()
    (problem,) = run(told, transient)[1].problems
    assert "TransientGlobalSelfAttention" in problem.message


@pytest.mark.slow
def test_biases_of_their_own_go_back_to_hugging_face():
    """By the packs written out, with a target and without one, from layers on an axis and from split heads."""
    theirs = tree("umT5, Pile-T5", "Hugging Face")
    for layout, make in (("scanned", rules.t5_minimal_to_scanned), ("unscanned", rules.t5_minimal_to_unscanned)):
        source = tree("umT5, Pile-T5", f"T5X {layout}")
        told = make(SIZES.H, SIZES.D, bias_per_layer=True).inverse()
        for pack, target in ((make(SIZES.H, SIZES.D).inverse(), theirs), (told, None)):
            plan = ot.plan_restore(checkpoint(source), target, [pack, rules.t5x_to_hf_t5()])
            result = flatten(plan.execute())
            assert result.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_array_equal(result[name], value)
        silent = [make(SIZES.H, SIZES.D).inverse(), rules.t5x_to_hf_t5()]
        with pytest.raises(LeafMismatchError, match="bias_per_layer=True"):
            ot.restore(checkpoint(source), None, silent)


# -- what there is no form of is a problem that names it


@pytest.mark.parametrize(
    ("relative", "pack", "leaf"),
    [
        ("gated mixture of experts", rules.t5x_to_hf_t5(), "expert/wi_0"),
        ("ST-MoE", rules.t5x_to_hf_t5(), "extra_mlp"),
        ("Switch", rules.t5_minimal_to_scanned(SIZES.H, SIZES.D), "expert/wi"),
        ("LongT5, transient-global", rules.t5_minimal_to_scanned(SIZES.H, SIZES.D), "side_relpos_bias"),
        ("Switch", rules.t5_fused_to_unscanned().inverse(), "expert/wi"),
    ],
)
def test_a_leaf_without_a_form_is_named(relative, pack, leaf):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(tree(relative, "T5X minimal")), None, [pack])
    assert any(leaf in (problem.leaf or "") and problem.kind == "unmapped" for problem in caught.value.problems)


def test_a_missing_expert_is_a_problem():
    source = tree("Switch", "Hugging Face")
    name = "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight"
    problems = run(rules.hf_t5_to_t5x(), {key: value for key, value in source.items() if key != name})[1].problems
    assert any("layer 1 of 3 is missing" in problem.message for problem in problems)
    every = re.compile(r".*\.expert_2\..*")
    fewer = {key: value for key, value in source.items() if not every.fullmatch(key)}
    with pytest.raises(RestorePlanError, match="has 2 experts, and its router chooses among 3"):
        ot.plan_restore(checkpoint(fewer), None, [rules.hf_t5_to_t5x()])


def test_experts_are_read_from_their_own_leaves():
    source = checkpoint(tree("Switch", "Hugging Face"))
    target = "target/decoder/layers_1/mlp/expert/wo/kernel"
    result = rules.hf_t5_to_t5x().apply(source.leaves, {}, Diagnostics())[target]
    np.testing.assert_array_equal(as_numpy(result[1]), tree("Switch", "T5X minimal")[target][1])
    read = {name for name, leaf in source.made.items() if leaf.boxes}
    assert read == {"decoder.block.1.layer.2.mlp.experts.expert_1.wo.weight"}

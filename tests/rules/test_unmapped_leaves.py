"""Leaves that a pack does not know: problems that name them, and what permits them. Copies of embeddings; prefixes."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import LeafMismatchError, RestorePlanError
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

PACK = rules.hf_t5_to_t5x()
PLAIN = t5.minimal()
TORCH = t5.hugging_face(PLAIN)
UNKNOWN = "encoder.block.1.layer.0.SelfAttention.q.input_scale"


def zeros(tree):
    return unflatten({name: np.zeros_like(value) for name, value in tree.items()})


def restored(source, target, transforms, **options):
    return flatten(ot.restore(checkpoint(source), zeros(target), transforms, **options))


def failed(source, target, transforms, **options):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), None if target is None else zeros(target), transforms, **options)
    return caught.value


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("target", [None, t5.below("target/", PLAIN)], ids=["everything", "target"])
def test_leaves_that_no_layout_knows_are_problems_with_two_ways_out(target):
    source = {name.replace(".DenseReluDense.", ".Mixer."): value for name, value in TORCH.items()}
    error = failed(source, target, [PACK])
    unknown = {name for name in source if ".Mixer." in name}
    told = [problem for problem in error.problems if problem.kind == "unmapped"]
    assert {problem.leaf for problem in told} == unknown and len(str(error).splitlines()) < 60
    left = len(source) - len(unknown)
    assert f"{left} of {len(source)} leaves" in str(error) and "Hugging Face's T5 has no leaf" in str(error)
    permit, drop = told[0].fix.ways
    assert dict(permit.arguments) == {"strict": False}
    mapped = {f"target/{name}": PLAIN[name] for name in PLAIN if "/mlp/" not in name}
    fixed = ot.restore(checkpoint(source), None, drop.arguments["transforms"])
    expected = {name for name in mapped}
    assert flatten(fixed).keys() == expected
    permitted = flatten(ot.restore(checkpoint(source), None, [PACK], strict=False))
    assert permitted.keys() == expected | unknown
    assert any("no name and value changes" in line for line in plan_warnings(source, [PACK]))


def plan_warnings(source, transforms):
    return ot.plan_restore(checkpoint(source), None, transforms, strict=False).warnings


def test_a_kernel_of_another_rank_or_size_is_a_problem_and_stays_when_permitted():
    split = t5.below("target/", t5.unscanned(PLAIN))
    pack = rules.t5x_to_hf_t5()
    name = "target/encoder/layers_0/attention/query/kernel"
    (problem,) = [one for one in run(pack, split)[1].problems if one.leaf == name]
    assert problem.kind == "shape" and "(12, 2, 5)" in problem.message and "(E, J)" in problem.message
    odd = {**t5.below("target/", PLAIN), name: np.zeros((11, 10), np.float32)}
    (problem,) = run(pack, odd)[1].problems
    assert problem.leaf == name and "E of 12" in problem.message
    result = flatten(ot.restore(checkpoint(odd), None, [pack], strict=False))
    assert name in result and len([one for one in result if "/" in one]) == 1


def test_leaves_outside_the_model_are_not_touched():
    outside = {"state/step": np.int32(3), "data/seed": np.zeros(2), "state/param_states/0/mu/x/y": np.zeros(3)}
    source = {**t5.below("target/", PLAIN), **outside}
    result, diagnostics = run(rules.t5_minimal_to_scanned(t5.H, t5.D), source)
    assert diagnostics.problems == [] and outside.keys() < result.keys()
    assert_equal({name: result[name] for name in result if name not in outside}, t5.below("target/", t5.scanned(PLAIN)))


def test_what_the_target_has_under_the_same_name_needs_no_translation():
    head = {"target/classifier/kernel": np.ones((12, 2), np.float32)}
    pack = rules.t5_minimal_to_scanned(t5.H, t5.D)
    source, target = t5.below("target/", PLAIN), t5.below("target/", t5.scanned(PLAIN))
    assert_equal(restored({**source, **head}, {**target, **head}, [pack]), {**target, **head})
    assert failed({**source, **head}, target, [pack]).problems[0].leaf == "target/classifier/kernel"


@pytest.mark.slow
def test_convert_writes_no_half_translation(tmp_path):
    source = t5.below("target/", t5.scanned(PLAIN))
    with pytest.raises(RestorePlanError, match="untranslated"):
        ot.convert(checkpoint(source), tmp_path / "out", [rules.t5x_to_hf_t5()], format="safetensors")
    assert not (tmp_path / "out").exists()
    ot.convert(checkpoint({**TORCH, UNKNOWN: np.float32(1)}), tmp_path / "out", [PACK], strict=False)
    with ot.open_checkpoint(tmp_path / "out") as written:
        assert set(written.leaves) == {UNKNOWN, *t5.below("target/", PLAIN)}


def test_auto_says_what_no_layout_knows_and_how_the_rest_is_translated():
    source, target = {**TORCH, UNKNOWN: np.float32(1)}, t5.below("target/", t5.scanned(PLAIN))
    error = failed(source, target, "auto")
    (problem,) = error.problems
    assert problem.leaf == UNKNOWN and f"{len(TORCH)} of {len(source)} leaves" in problem.message
    assert "hf_t5_to_t5x" in str(problem.fix) and "t5_minimal_to_scanned" in str(problem.fix)
    permit, drop = problem.fix.ways
    for options in ({"transforms": "auto", **permit.arguments}, drop.arguments):
        assert_equal(restored(source, target, **options), target)


# -- copies of the embedding


COPIES = [f"{tower}.embed_tokens.weight" for tower in ("encoder", "decoder")]


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_embedding_are_compared_when_they_are_read(name):
    target = t5.below("target/", PLAIN)
    copies = dict.fromkeys(COPIES, TORCH["shared.weight"])
    assert_equal(restored({**TORCH, **copies}, target, [PACK]), target)
    other = TORCH["shared.weight"].copy()
    other[-1, -1] += 1
    with pytest.raises(LeafMismatchError, match=f"{name}.*must equal"):
        restored({**TORCH, **copies, name: other}, target, [PACK])
    (problem, *_) = failed({**TORCH, name: other[:30]}, target, [PACK]).problems
    assert problem.kind == "shape" and name in problem.message and "Drop" in str(problem.fix)
    dropped = [tr.Drop([r".*embed_tokens\.weight"]), PACK]
    assert_equal(restored({**TORCH, name: other}, target, dropped), target)


@pytest.mark.slow
@pytest.mark.parametrize("with_shared", [True, False])
def test_a_target_with_an_embedding_per_tower_gets_the_towers_own(with_shared):
    shared = "token_embedder/embedding"
    own = {name: TORCH["shared.weight"] + 100 * (at + 1) for at, name in enumerate(COPIES)}
    plain = {name: value for name, value in PLAIN.items() if with_shared or name != shared}
    target = {**plain, **{f"{tower}/{shared}": own[f"{tower}.embed_tokens.weight"] for tower in ("encoder", "decoder")}}
    for prefix in ("target/", "params/", ""):
        for rules_ in ([PACK], "auto"):
            wanted = t5.below(prefix, target)
            assert_equal(restored({**TORCH, **own}, wanted, rules_), wanted)
    # The shared one is every tower's that has none.
    del own[COPIES[0]]
    target[f"encoder/{shared}"] = TORCH["shared.weight"]
    assert_equal(restored({**TORCH, **own}, target, [PACK]), target)


def test_a_target_with_one_towers_embedding_compares_it_with_the_shared_one():
    model = t5.minimal(towers=("encoder",))
    target = {name.replace("token_embedder", "encoder/token_embedder"): value for name, value in model.items()}
    source = t5.hugging_face(model)
    equal = {**source, COPIES[0]: source["shared.weight"]}
    assert_equal(restored(equal, target, [PACK]), target)
    with pytest.raises(LeafMismatchError, match="must equal"):
        restored({**source, COPIES[0]: source["shared.weight"] + 1}, target, [PACK])


# -- prefixes


@pytest.mark.parametrize(
    "prefix", ["module.", "model.", "transformer.", "text_encoder.", "text_encoder_2.", "net.blocks.12.t5.", "m/"]
)
@pytest.mark.parametrize("way", ["pack", "auto", "everything"])
def test_hugging_face_names_are_found_below_any_prefix(prefix, way):
    source, others = t5.below(prefix, TORCH), {"vae.conv.weight": np.zeros((2, 2), np.float32)}
    target = t5.below("target/", PLAIN)
    if way == "everything":
        assert_equal(flatten(ot.restore(checkpoint(source), None, [PACK])), target)
        # A result without a target never has the names of two layouts.
        (problem,) = failed({**source, **others}, None, [PACK]).problems
        keep, permit = problem.fix.ways
        assert "vae.conv.weight" in problem.message and dict(permit.arguments) == {"strict": False}
        kept = ot.restore(checkpoint({**source, **others}), None, keep.arguments["transforms"])
        assert_equal(flatten(kept), target)
        permitted = flatten(ot.restore(checkpoint({**source, **others}), None, [PACK], strict=False))
        assert_equal(permitted, {**target, **others})
        return
    transforms = "auto" if way == "auto" else [PACK]
    assert_equal(restored(source, target, transforms), target)
    assert_equal(restored({**source, **others}, target, transforms, strict=False), target)
    told = failed({**source, prefix + UNKNOWN: np.float32(0)}, target, transforms).problems
    assert [problem.leaf for problem in told] == [prefix + UNKNOWN]
    assert rules.infer(source, target).steps


@pytest.mark.slow
def test_results_get_the_prefix_that_the_target_has():
    flax = t5.hugging_face_flax(PLAIN)
    ours, torch = t5.below("target/", PLAIN), t5.below("text_encoder.", TORCH)
    for source, target, pack in (
        (ours, torch, rules.t5x_to_hf_t5()),
        (ours, t5.below("params/", flax), rules.hf_flax_t5_to_t5x().inverse()),
        (t5.below("target/", t5.scanned(PLAIN)), torch, "auto"),
        (TORCH, torch, "auto"),
        (torch, t5.below("module.", TORCH), "auto"),
        (torch, t5.below("model/params/", flax), "auto"),
    ):
        for transforms in {pack, "auto"}:
            assert_equal(restored(source, target, transforms), target)


def test_unknown_layouts_below_another_prefix_are_renamed():
    layers = {"encoder/encoder/subblock_0/mlp/expert/wi/kernel": np.ones((3, 2, 12, 14), np.float32)}
    wanted = t5.below("params/", layers)
    assert_equal(restored(t5.below("target/", layers), wanted, "auto"), wanted)

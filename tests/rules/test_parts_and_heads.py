"""Models that have T5 as a part, and parts of T5: T5 is translated, what is beside it is named and can be left out.

Expected trees are NumPy's. A fix that a problem names is passed, and restores all of T5.
"""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import relative_trees as trees
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

PLAIN = t5.minimal(towers=("encoder",))
TORCH = t5.hugging_face(PLAIN)
TARGET = t5.below("target/", t5.scanned(PLAIN))
SIZES = trees.Sizes(encoder=2)
SMALL = trees.Sizes(encoder=1, decoder=1)
VISION = ("encoder.embeddings.patch_projection.weight", "encoder.encoder.layer.0.attention.query.weight")


def ones(*names):
    return {name: np.ones((3, 2), np.float32) for name in names}


def zeros(tree):
    return unflatten({name: np.zeros_like(value) for name, value in tree.items()})


def assert_equal(found, expected):
    found = flatten(found)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def failed(source, target, transforms="auto", **options):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), zeros(target), transforms, **options)
    return caught.value.problems


# Model -> its file, what is no T5's in it, and the target.
DECODER = trees.by_name("Pix2Struct's decoder")
PIX2STRUCT = trees.minimal(DECODER, SIZES)
BESIDE = {
    "question answering": (TORCH, ("qa_outputs.weight", "qa_outputs.bias"), TARGET),
    "sequence classification": (
        t5.below("transformer.", TORCH),
        ("classification_head.dense.weight", "classification_head.out_proj.bias"),
        TARGET,
    ),
    "Pop2Piano": (TORCH, ("mel_conditioner.embedding.weight",), TARGET),
    "Pix2Struct": (
        trees.pix2struct(PIX2STRUCT, DECODER),
        VISION,
        t5.below("target/", trees.stacked(trees.split(PIX2STRUCT, SIZES), SIZES)),
    ),
}


@pytest.mark.parametrize("model", BESIDE)
def test_what_a_file_has_beside_t5_is_named_and_left_out_on_request(model):
    source, beside, target = BESIDE[model]
    source = {**source, **ones(*beside)}
    problems = failed(source, target)
    told = " ".join(f"{problem.leaf} {problem.message}" for problem in problems)
    assert all(name in told for name in beside) and {one.kind for one in problems} <= {"unmapped", "leftover"}
    for way in filter(lambda way: way.arguments, problems[0].fix.ways):
        arguments = {"transforms": "auto", **way.arguments}
        assert_equal(ot.restore(checkpoint(source), zeros(target), **arguments), target)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["CALM, soft prompts", "dual encoder"])
def test_what_a_target_has_beside_t5_comes_from_the_fallback(model):
    one = trees.by_name(model)
    plain = trees.minimal(one, SMALL)
    beside = {f"target/{name}" for name, _ in one.beside}
    target = t5.below("target/", plain)
    # Hugging Face has no name for them; an encoder's embedding is the shared one there.
    base = {name.replace("encoder/token_embedder", "token_embedder"): plain[name] for name in plain}
    source = t5.hugging_face({name: value for name, value in base.items() if f"target/{name}" not in beside})
    problems = failed(source, target)
    assert {problem.leaf for problem in problems} == beside and {one.kind for one in problems} == {"missing"}
    assert all("fallback=" in str(problem.fix) for problem in problems)
    fallback = unflatten(dict(target))
    (problem,) = failed(source, target, fallback=fallback)
    assert problem.fix is not None and problem.fix.arguments.keys() == {"fallback_for"}
    options = {"fallback": fallback, **problem.fix.arguments}
    assert_equal(ot.restore(checkpoint(source), zeros(target), "auto", **options), target)
    # And back: what has no name there is a problem, and the fix leaves it out.
    problems = failed(target, source)
    assert {problem.leaf for problem in problems} == beside and {one.kind for one in problems} == {"unmapped"}
    for way in problems[0].fix.ways:
        assert_equal(ot.restore(checkpoint(target), zeros(source), **{"transforms": "auto", **way.arguments}), source)

"""Embeddings of T5X's models and of Hugging Face's: one for all towers, one for each, and copies."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import assert_same
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import relative_trees as trees
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

PLAIN = t5.minimal(towers=("encoder",))
TORCH = t5.hugging_face(PLAIN)
COPIES = tuple(f"{tower}.embed_tokens.weight" for tower in t5.DEPTHS)


def restored(source, target, transforms="auto"):
    zeros = unflatten({name: np.zeros_like(value) for name, value in target.items()})
    return flatten(ot.restore(checkpoint(source), zeros, transforms))


def test_a_target_with_copies_of_the_embedding_gets_them():
    """Of the whole model, of an encoder, and of one whose only embedding has the tower's name."""
    whole = t5.hugging_face(t5.minimal())
    whole |= dict.fromkeys(COPIES, whole["shared.weight"])
    assert_same(restored(t5.below("target/", t5.minimal()), whole), whole)
    own = {name.replace("token_embedder", "encoder/token_embedder"): value for name, value in PLAIN.items()}
    alone = {name.replace("shared.weight", COPIES[0]): value for name, value in TORCH.items()}
    for source in (PLAIN, own):
        for target in (TORCH, alone, {**TORCH, **alone}):
            assert_same(restored(t5.below("params/", source), target), target)
    assert_same(flatten(ot.restore(checkpoint(t5.below("target/", own)), None, rules.t5x_to_hf_t5())), TORCH)


def test_embeddings_of_two_towers_keep_their_towers_names():
    plain = trees.minimal(trees.by_name("T5.1.1, mT5, ByT5, Flan-T5, UL2"), trees.Sizes(encoder=1, decoder=1))
    model = {name: value for name, value in plain.items() if "embedder" not in name}
    embedding = plain["token_embedder/embedding"]
    model |= {f"{tower}/token_embedder/embedding": embedding + at for at, tower in enumerate(t5.DEPTHS)}
    theirs = t5.hugging_face(model)
    ours = t5.below("target/", model)
    assert_same(restored(ours, theirs, rules.t5x_to_hf_t5()), theirs)
    assert_same(flatten(ot.restore(checkpoint(ours), None, rules.t5x_to_hf_t5())), theirs)
    assert_same(restored(theirs, ours), ours)
    # One name for both is no place for either.
    shared = {name: value for name, value in theirs.items() if name not in COPIES}
    with pytest.raises(RestorePlanError) as caught:
        restored(ours, {**shared, "shared.weight": np.ones((3, 2), np.float32)})
    assert {problem.leaf for problem in caught.value.problems} >= {"shared.weight"}


def test_an_untied_switch_has_the_embedding_under_all_names():
    """Transformers 4.57.6 fills `embed_tokens` that an untied Switch's file lacks at random; a tied one needs none."""
    plain = trees.minimal(trees.by_name("Switch"), trees.Sizes(encoder=2, decoder=2))
    for name in ("decoder/logits_dense/kernel", ""):
        model = {one: value for one, value in plain.items() if "logits_dense" not in one}
        embedding = model["token_embedder/embedding"]
        model |= {name: embedding.T + 1} if name else {}
        theirs = flatten(ot.restore(checkpoint(t5.below("target/", model)), None, rules.t5x_to_hf_t5()))
        copies = {one: value for one, value in theirs.items() if one in COPIES}
        assert_same(copies, dict.fromkeys(COPIES, embedding) if name else {})

"""A checkpoint with an output projection and a target without one."""

import dataclasses

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.failed_plans import HF, HF_CONFIG, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("has_pack", [True, False])
def test_an_untied_checkpoint_and_a_tied_model(has_pack):
    """Without the matrix the model would compute other logits: `strict=False` is no cure."""
    target = parameters(dataclasses.replace(HF_CONFIG, tied=True))
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in ot.open_checkpoint(HF).leaves.items()}
    arrays["lm_head.weight"] = np.zeros_like(arrays["shared.weight"])
    found = problems_of(checkpoint(arrays), target, [ot.rules.hf_t5_to_t5x()] if has_pack else ())
    head = found[-1]
    assert len(found) == (1 if has_pack else 2)
    assert (head.kind, head.leaf) == ("leftover", "target/decoder/logits_dense/kernel")
    assert "logits" in head.message and "embedding" in head.message
    assert (
        "logits_via_embedding=False" in str(head.fix) and "strict" not in str(head.fix) and "Drop" not in str(head.fix)
    )


def test_other_leftovers_of_an_untied_checkpoint_are_told_apart():
    source = {**parameters(HF_CONFIG), "target/more": jax.ShapeDtypeStruct((2,), np.float32)}
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()}
    head, other = problems_of(checkpoint(arrays), parameters(dataclasses.replace(HF_CONFIG, tied=True)))
    assert "logits" in head.message and other.leaf == "target/more" and "strict=False" in str(other.fix)


@pytest.mark.parametrize("transforms", [[ot.rules.hf_t5_to_t5x()], "auto"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_tied_file_that_holds_its_projection_names_the_pack(transforms, gated):
    """Some tied files repeat the embedding; of a T5 that is not gated that is the likelier reading."""
    target = parameters(dataclasses.replace(HF_CONFIG, tied=True))
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in ot.open_checkpoint(HF).leaves.items()}
    arrays["lm_head.weight"] = np.zeros_like(arrays["shared.weight"])
    if not gated:
        arrays = {name.replace("wi_0", "wi"): array for name, array in arrays.items() if "wi_1" not in name}
        target = {name.replace("wi_0", "wi"): leaf for name, leaf in target.items() if "wi_1" not in name}
    (problem,) = problems_of(checkpoint(arrays), target, transforms)
    call = "ot.rules.hf_t5_to_t5x(tie_word_embeddings=True)"
    texts = [str(way) for way in problem.fix.ways]
    assert [call in text for text in texts] == ([False, True] if gated else [True, False])
    assert not problem.fix.transforms
    assert not ot.plan_restore(checkpoint(arrays), target, eval(call)).unused

"""The transform that translates a bundle's names."""

from __future__ import annotations

import numpy as np
import pytest

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.mesh_tf.translator import CheckpointTranslator
from orbax_t5x.transforms.translate import Translate
from tests.support.mesh_tf_names import problems, translate, unreadable


def test_by_hand_on_nested_dicts_the_first_problem_is_raised():
    nested = {"shared": {"embedding": np.ones((2, 2))}, "global_step": np.int64(3)}
    result = Translate()(nested, {})
    assert result["target"]["token_embedder"]["embedding"] is nested["shared"]["embedding"]
    assert result["state"]["step"] == 3
    with pytest.raises(RestorePlanError, match="other"):
        Translate()({"other": np.ones(2)}, {})
    assert Translate()(nested, {}, is_resuming=True) is nested


def test_digests_tell_tables_apart():
    def table(pattern):
        translator = CheckpointTranslator()

        @translator.add(pattern)
        def rule(opts, key, val):
            return key, val

        return translator

    assert Translate().digest() == Translate().digest()
    assert Translate(table("a")).digest() == Translate(table("a")).digest()
    assert len({Translate().digest(), Translate(table("a")).digest(), Translate(table("b")).digest()}) == 3
    assert Translate().describe() == "Translate()"
    assert Translate(table("a")).describe() == "Translate(<CheckpointTranslator: 1 rule>)"


def test_without_a_target_a_callers_rules_are_all_that_happens():
    translator = CheckpointTranslator()
    translator.add(r"(.*)_slot")(lambda opts, key, val, name: (f"state/param_states/{name}/v", val))
    translator.add(r".*")(lambda opts, key, val: (f"target/{key}", val))
    source = unreadable(["w", "w_slot"])
    assert set(translate(source, translator=translator)) == {"target/w", "state/param_states/w/v"}
    target = {f"state/param_states/w/{slot}": np.zeros(1, np.float32) for slot in ("v", "v_row", "v_col", "m")}
    assert set(translate(source, target, translator)) == {"target/w", *target}


def test_any_object_with_apply_is_a_translator():
    class Other:
        def apply(self, flatdict, **opts):
            if "bad" in flatdict:
                raise ValueError("cannot translate bad")
            return {f"target/{name}": value for name, value in flatdict.items()}

    source = unreadable(["w"])
    assert translate(source, translator=Other()) == {"target/w": source["w"]}
    (problem,) = problems(unreadable(["bad"]), translator=Other())
    assert "cannot translate bad" in problem.message

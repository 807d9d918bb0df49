"""`"auto"` is written out as rules, each pack once, and recorded as such."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import unflatten
from tests.conftest import GOLDENS
from tests.support import t5_layouts, t5_model
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint
from tests.support.pytrees import assert_trees_equal

T, R = ot.transforms, ot.rules
BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"
SCANNED = t5_model.T5Config(scan_layers=True)


def scanned_target():
    return {"params": jax.eval_shape(lambda: t5_model.init(SCANNED)[1]["params"])}


def arrays(**values):
    return checkpoint({name: np.full((2,), value, np.float32) for name, value in values.items()})


def test_auto_applies_what_infer_finds_and_records_it_as_written_out(parameters):
    target = scanned_target()
    plan = ot.plan_restore(BUNDLE, target, "auto")
    expected = t5_model.scanned_from(unflatten(parameters), SCANNED)
    assert_trees_equal(plan.execute(), {"params": expected})
    with ot.open_checkpoint(BUNDLE) as opened:
        parts = R.infer(opened, target).parts
    written = ot.plan_restore(BUNDLE, target, parts).provenance
    assert plan.provenance == tuple({**entry, "auto": True} for entry in written)
    rules = [entry["text"] for entry in written]
    assert "mesh_tf_to_t5x()" in rules[0] and "t5_minimal_to_scanned(num_heads=4, head_dim=4)" in rules[1]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("is_of_a_source", [False, True])
def test_auto_applies_each_pack_once(monkeypatch, strict, is_of_a_source):
    """The plan is that of the rules found."""
    applied, apply = [], T.Chain.apply

    def counted(self, state, target, diagnostics):
        if isinstance(self, R.RulePack) and target:  # layouts are looked for without a target
            applied.append(self.name)
        return apply(self, state, target, diagnostics)

    def facts(plan):
        entries = [(entry.name, entry.sources, entry.how, entry.rule, entry.fidelity) for entry in plan.entries]
        digests = [entry["digest"] for entry in plan.provenance]
        return entries, plan.unused, plan.dropped, plan.warnings, digests

    config = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)
    split = {"target": jax.eval_shape(lambda: t5_model.init(config)[1]["params"])}
    for source, target in ((BUNDLE, scanned_target()), (GOLDENS / "safetensors" / "t5_1_1", split)):
        of, rules = (ot.Source(source, "auto"), ()) if is_of_a_source else (source, "auto")
        applied.clear()
        with monkeypatch.context() as patched:
            patched.setattr(T.Chain, "apply", counted)
            plan = ot.plan_restore(of, target, rules, strict=strict)
        assert {name: applied.count(name) for name in applied} == {
            pack.name: 1 for pack in plan.found_rules if isinstance(pack, R.RulePack)
        }
        assert facts(plan) == facts(ot.plan_restore(source, target, plan.found_rules, strict=strict))
        assert_trees_equal(plan.execute(), ot.restore(source, target, plan.found_rules, strict=strict))


@pytest.mark.parametrize("strict", [True, False])
def test_conversions_and_the_command_line_apply_each_pack_once(monkeypatch, capsys, tmp_path, strict):
    applied, apply = [], T.Chain.apply

    def counted(self, state, target, diagnostics):
        if isinstance(self, R.RulePack) and target:
            applied.append(self.name)
        return apply(self, state, target, diagnostics)

    hf, t5x = GOLDENS / "safetensors" / "t5_1_1", tmp_path / "t5x"
    ot.convert(hf, t5x, [R.hf_t5_to_t5x()])
    options = [] if strict else ["--no-strict"]
    monkeypatch.setattr(T.Chain, "apply", counted)
    ways = [
        lambda: ot.diff(hf, t5x, "auto", strict=strict, values=False),
        lambda: main(["plan", str(hf), "--target", str(t5x), "--rules", "auto", *options]),
        lambda: main(["convert", str(hf), str(tmp_path / "out"), "--target", str(t5x), "--rules", "auto", *options]),
    ]
    for way in ways:
        applied.clear()
        assert way() is not None
        assert applied == ["hf_t5_to_t5x()"], capsys.readouterr()


def test_auto_applies_a_pack_again_that_reads():
    """So that the plan counts the bytes, as without auto."""

    def doubled(state, target):
        return {"target": jax.tree.map(lambda value: np.asarray(value) * 2, state["toy"])}

    name = "encoder/layers_0/attention/query/kernel"
    stored = checkpoint({f"toy/{name}": np.ones((4, 8), np.float32)})
    target = {f"target/{name}": np.zeros((4, 8), np.float32)}
    pack = R.RulePack((doubled,), (), "toy_to_t5x", f"toy/{name}").between("toy", "minimal", marks="^toy/")
    with R.register(pack):
        plan = ot.plan_restore(stored, target, "auto")
        assert plan.bytes_read_at_planning == ot.plan_restore(stored, target, [pack]).bytes_read_at_planning == 128
        assert plan.execute()[f"target/{name}"][0, 0] == 2


def test_auto_from_hugging_face():
    source = GOLDENS / "safetensors" / "t5_1_1"
    config = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)
    target = {"target": jax.eval_shape(lambda: t5_model.init(config)[1]["params"])}
    assert_trees_equal(ot.restore(source, target, "auto"), ot.restore(source, target, [R.hf_t5_to_t5x()]))


def test_auto_applies_nothing_where_names_fit():
    target = dict.fromkeys("ab", np.zeros(2, np.float32))
    plan = ot.plan_restore(arrays(a=1, b=2), target, "auto")
    assert plan.provenance == ()
    assert plan.execute()["a"][0] == 1


@pytest.mark.slow
def test_auto_begins_a_run_and_goes_on_with_it(tmp_path):
    target = scanned_target()

    def restored(step, **source):
        with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
            return manager.restore(step, args=ot.args.TrainStateRestore(target, "auto", **source))

    plan = ot.plan_restore(BUNDLE, target, "auto")
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(plan.execute(), provenance=plan.provenance))
        manager.wait_until_finished()
    assert_trees_equal(restored(0), plan.execute())
    assert_trees_equal(restored(0, source=BUNDLE), plan.execute())
    # What was found is in the record, so the same rules written out are not applied again.
    with ot.open_checkpoint(BUNDLE) as opened:
        parts = R.infer(opened, target).parts
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        again = manager.restore(0, args=ot.args.TrainStateRestore(target, parts))
    assert_trees_equal(again, plan.execute())


def test_auto_says_what_it_looked_at_where_nothing_fits(tmp_path):
    with pytest.raises(RestorePlanError) as caught:
        ot.restore(arrays(a=1), scanned_target(), "auto")
    (problem,) = caught.value.problems
    assert problem.kind == "rule" and "auto" in problem.message and "unknown names" in problem.message
    for call in (lambda: ot.restore(BUNDLE, None, "auto"), lambda: ot.convert(BUNDLE, tmp_path / "out", "auto")):
        with pytest.raises(RestorePlanError) as caught:
            call()
        (problem,) = caught.value.problems
        assert "there is no target" in problem.message and "ot.rules" in str(problem.fix)
    assert not (tmp_path / "out").exists()


def test_auto_drops_the_optimizer_of_a_model_that_has_none(parameters):
    """Evaluation from a checkpoint of training: what is dropped is listed."""
    target = {"params": unflatten(parameters)}
    values = {f"target/{name}": value for name, value in parameters.items()}
    moments = {f"state/param_states/0/mu/{name}": value for name, value in parameters.items()}
    source = checkpoint({**values, **moments, "state/step": np.int32(3)})
    plan = ot.plan_restore(source, target, "auto")
    assert set(plan.dropped) == {*moments, "state/step"}
    same_names = ot.plan_restore(source, {"target": unflatten(parameters)}, "auto")
    assert set(same_names.dropped) == {*moments, "state/step"}
    assert_trees_equal(plan.execute()["params"], same_names.execute()["target"])


PLAIN = {f"params/{name}": value for name, value in t5_layouts.minimal().items()}
SCANNED_LEAVES = {f"target/{name}": value for name, value in t5_layouts.scanned(t5_layouts.minimal()).items()}
NEW = {f"params/heads/{name}/kernel": np.ones((7, 3), np.float32) for name in "ab"}
OPTIMIZER = {"opt_state/0/count": np.int32(0)}


def filled(source, target, **keywords):
    return ot.plan_restore(source, unflatten(target), "auto", fallback=unflatten(target), **keywords).filled


def sources():
    return {"a pack": checkpoint(SCANNED_LEAVES), "an alignment": checkpoint(renamed(PLAIN))}


def renamed(tree):
    words = {"params": "net", "decoder": "dec", "encoder": "enc", "attention": "attn"}
    return {"/".join(words.get(part, part) for part in name.split("/")): value for name, value in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pack", "an alignment", "a source's own"])
def test_a_fallback_does_not_complete_what_was_found_in_silence(kind):
    source = sources().get(kind) or ot.Source(checkpoint(SCANNED_LEAVES), "auto")
    target = PLAIN | NEW | OPTIMIZER
    transforms = () if kind == "a source's own" else "auto"
    (problem,) = problems_of(source, unflatten(target), transforms, fallback=unflatten(target))
    assert problem.kind == "rule" and problem.message.startswith("transforms='auto': ")
    if kind == "an alignment":
        assert "the target's" in problem.message and "by fallback_for" in str(problem.fix)
        new = ["params/heads/.*", "opt_state/.*"]
    else:
        count = f"cover {len(PLAIN)} of the model's {len(PLAIN) + 2} parameters"
        assert count in problem.message and problem.message.endswith("params/heads/** (2)")
        assert "those found: transforms=[ot.rules." in str(problem.fix)
        new = problem.fix.arguments["fallback_for"]
    plan = ot.plan_restore(source, unflatten(target), transforms, fallback=unflatten(target), fallback_for=new)
    assert set(plan.filled) == NEW.keys() | OPTIMIZER.keys()


def test_an_optimizer_and_what_needs_no_rules_are_filled():
    assert filled(checkpoint(SCANNED_LEAVES), PLAIN | OPTIMIZER) == tuple(OPTIMIZER)
    assert filled(checkpoint(PLAIN), PLAIN | OPTIMIZER) == tuple(OPTIMIZER)


@pytest.mark.slow
def test_without_a_fallback_the_leaf_is_missing():
    (problem,) = problems_of(
        checkpoint(SCANNED_LEAVES), unflatten(PLAIN | {"params/head": np.ones(3, np.float32)}), "auto"
    )
    assert (problem.kind, problem.leaf) == ("missing", "params/head")


# -- "auto" in a list

HEAD = T.Rename([("(.*)/mlp/(.*)", r"\1/ffn/\2")])
AFTER = {
    "a renaming": [HEAD],
    "migrations": [ot.Migrations([("names", [HEAD])])],
    "a chain": [T.Chain([HEAD, T.Transpose("params/token_embedder/embedding")])],
    "a cast": [HEAD, T.Cast("params/.*", np.float64), T.Drop(["params/encoder/encoder_norm/.*"])],
    "stacked layers": [T.StackLayers(r"params/encoder/layers_(?P<i>\d+)/(.*)", r"params/encoder/layers/\2", axis=0)],
}


def after(rules, parameters):
    """What rules make of the parameters, by T5X's protocol on nested dicts of arrays."""
    state = {"params": unflatten(parameters)}
    for step in rules:
        for rule in step.steps if isinstance(step, ot.Migrations) else [step]:
            state = rule(state, {})
    return jax.tree.map(lambda leaf: leaf.get() if isinstance(leaf, ot.LazyArray) else leaf, state)


@pytest.mark.parametrize("place", ["a list", "a list with a rule before", "a source's list", "a source, then rules"])
@pytest.mark.parametrize("kind", AFTER)
def test_auto_sees_the_target_through_what_follows(parameters, kind, place):
    rules = AFTER[kind]
    target = jax.tree.map(np.zeros_like, after(rules, parameters))
    source, transforms = {
        "a list": (BUNDLE, ["auto", *rules]),
        "a list with a rule before": (BUNDLE, [T.Affine("shared/embedding", 1.0), "auto", *rules]),
        "a source's list": (ot.Source(BUNDLE, ["auto", *rules]), ()),
        "a source, then rules": (ot.Source(BUNDLE, "auto"), rules),
    }[place]
    assert_trees_equal(ot.restore(source, target, transforms), after(rules, parameters))


def test_a_map_after_auto_fills_what_its_patterns_name(parameters):
    model = after([HEAD], parameters)["params"]
    target = jax.tree.map(np.zeros_like, {"params": model, "ema": model})
    rules = ["auto", HEAD, T.AssignmentMap([("ema/(.*)", r"params/\1"), ("params/(.*)", r"params/\1")])]
    got = ot.restore(BUNDLE, target, rules)
    assert_trees_equal(got, {"params": model, "ema": model})


def test_named_sources_have_auto_in_their_lists(parameters):
    model = after([HEAD], parameters)["params"]
    target = jax.tree.map(np.zeros_like, {name: {"params": model} for name in "ab"})
    sources = {"a": ot.Source(BUNDLE, ["auto", HEAD]), "b": ot.Source(BUNDLE, ["auto", ot.Migrations([("n", [HEAD])])])}
    assert_trees_equal(ot.restore(sources, target), {name: {"params": model} for name in "ab"})


@pytest.mark.parametrize("is_before", [True, False])
def test_rows_are_added_beside_auto(parameters, is_before):
    name = "shared/embedding" if is_before else "params/token_embedder/embedding"
    rows, width = parameters["token_embedder/embedding"].shape
    pad = T.Pad(name, [rows + 4, None], 0)
    target = unflatten({"params": jax.tree.map(np.zeros_like, unflatten(parameters))})
    target["params"]["token_embedder"]["embedding"] = np.zeros((rows + 4, width), np.float32)
    got = ot.restore(BUNDLE, target, [pad, "auto"] if is_before else ["auto", pad])
    wanted = np.pad(parameters["token_embedder/embedding"], ((0, 4), (0, 0)))
    np.testing.assert_array_equal(got["params"]["token_embedder"]["embedding"], wanted)


def test_leaves_that_are_new_are_not_in_what_auto_sees(parameters):
    model = after([HEAD], parameters)
    model["params"]["ffn_head"] = {"kernel": np.ones((3, 5), np.float32)}
    target = jax.tree.map(np.zeros_like, model)
    plan = ot.plan_restore(BUNDLE, target, ["auto", HEAD], fallback=model, fallback_for=["params/ffn_head/.*"])
    assert plan.filled == ("params/ffn_head/kernel",)
    assert_trees_equal(plan.execute(), model)


@pytest.mark.parametrize(
    "rules",
    [[lambda state, target: state], [T.Average({"a": 1.0})], [T.Reshape("params/token_embedder/embedding", (-1,))]],
    ids=["a function", "an average", "a reshape"],
)
def test_what_has_no_inverse_may_not_follow_auto(parameters, rules):
    target = {"params": jax.tree.map(np.zeros_like, unflatten(parameters))}
    (problem,) = problems_of(BUNDLE, target, ["auto", *rules])
    assert problem.kind == "rule" and "seen through the inverse of what follows 'auto'" in problem.message
    assert "put it before 'auto'" in str(problem.fix) and "found_rules" in str(problem.fix)


def test_rules_that_lead_elsewhere_are_named():
    """Two modules of the target have one name before the rule."""
    source = arrays(a=1, b=2)
    target = {"ffn/x": np.zeros(2, np.float32), "mlp/x": np.zeros(2, np.float32)}
    (problem,) = problems_of(source, unflatten(target), ["auto", T.Rename([("mlp/(.*)", r"ffn/\1")])])
    assert problem.leaf == "mlp/x" and "makes no mlp/x" in problem.message


def test_a_rule_that_matches_nothing_is_told_as_such(parameters):
    target = {"params": jax.tree.map(np.zeros_like, unflatten(parameters))}
    (problem,) = problems_of(BUNDLE, target, ["auto", T.Rename([("(.*)/ff/(.*)", r"\1/ffn/\2")])])
    assert problem.kind == "unused_rule"

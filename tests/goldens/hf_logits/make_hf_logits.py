"""Makes the goldens in this directory with Transformers, or checks checkpoints that were converted back with it.

    python make_hf_logits.py make                 # four tiny models, their inputs and their logits
    python make_hf_logits.py check ROOT           # ROOT/<name> was converted to T5X and back: logits are equal

It runs in an environment of its own, with torch, transformers and safetensors; PROVENANCE.md has the versions. The
tests of the package need neither: they compute with the recorded logits.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
# name -> tied, gated
KINDS = {
    "tied_relu": (True, False),
    "untied_gated": (False, True),
    "tied_gated": (True, True),
    "untied_relu": (False, False),
}
VOCAB, ROWS, INPUTS, TARGETS = 32, 3, 7, 5


def model_of(tied: bool, gated: bool, seed: int) -> transformers.T5ForConditionalGeneration:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=3,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not tied:
        # Since version 5 every new model is tied; one that is loaded is not, where its file has both arrays.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than those of training's start: every parameter shows in the logits.
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "layer_norm" in name else 0.0))
    return model


def inputs_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, VOCAB, (ROWS, INPUTS))
    inputs[1, -2:] = 0
    return {"inputs": inputs, "targets": rng.integers(1, VOCAB, (ROWS, TARGETS))}


def logits_of(model: transformers.T5ForConditionalGeneration, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    with torch.no_grad():
        result = model(
            input_ids=torch.tensor(inputs),
            attention_mask=torch.tensor(inputs > 0),
            decoder_input_ids=torch.tensor(shifted),
        )
    return result.logits.numpy()


def make() -> None:
    for seed, (name, (tied, gated)) in enumerate(KINDS.items()):
        model = model_of(tied, gated, seed)
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        arrays = inputs_of(seed)
        np.savez_compressed(HERE / name / "logits.npz", **arrays, logits=logits_of(model, **arrays))


def check(root: Path) -> None:
    for name in KINDS:
        model, info = transformers.T5ForConditionalGeneration.from_pretrained(root / name, output_loading_info=True)
        with np.load(HERE / name / "logits.npz") as golden:
            found = logits_of(model.eval(), golden["inputs"], golden["targets"])
            difference = np.abs(found - golden["logits"]).max()
        left = {key: sorted(value) for key, value in info.items() if value}
        print(f"{name}: largest difference of logits {difference:g}; {left or 'nothing missing, nothing left over'}")
        if difference or left:
            raise SystemExit(f"{name}: the converted model is another one")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}")
    make() if sys.argv[1:] == ["make"] else check(Path(sys.argv[2]))

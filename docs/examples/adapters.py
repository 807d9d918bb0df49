"""Restore a base model with PEFT's low-rank adapters (LoRA): merged into its kernels, or beside them.

`ot.rules.peft_lora` reads `adapter_config.json`; base model and adapters are two sources of one restore.
Merged, the model is one to serve. Apart, the factors are leaves to train on, and the base model stays as it was.
"""

import importlib.resources
import json
import tempfile
from pathlib import Path

import numpy as np

import orbax_t5x as ot

# What you have: a Hugging Face T5, and what PEFT saved. Both are made here.
work = Path(tempfile.mkdtemp())
base, adapter = work / "base", work / "adapter"
bundle = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"
ot.convert(bundle, base, [ot.rules.mesh_tf_to_t5x(), ot.rules.t5x_to_hf_t5()], format="safetensors", strict=False)
rng = np.random.default_rng(0)
query = "encoder.block.0.layer.0.SelfAttention.q"
factors = {"lora_A": rng.normal(size=(4, 16)), "lora_B": rng.normal(size=(16, 4))}  # [rank, in] and [out, rank]
named: dict = {f"base_model.model.{query}.{name}.weight": f.astype("f") for name, f in factors.items()}
np.savez(work / "a.npz", **named)
ot.convert(work / "a.npz", adapter, format="safetensors")
(adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q"]}
(adapter / "adapter_config.json").write_text(json.dumps(config))

# Merged, under Hugging Face's names: kernel + alpha / rank * B @ A.
lora = ot.rules.peft_lora(adapter / "adapter_config.json")
merged = ot.restore({"base": base, "adapter": adapter}, None, lora)
weight = ot.restore(base, None)[f"{query}.weight"]
expected = weight + 16 / 4 * factors["lora_B"] @ factors["lora_A"]
print(
    f"merged: {len(merged)} leaves, as the base model has; equal to NumPy's sum:",
    np.allclose(merged[f"{query}.weight"], expected, atol=1e-5),
)

# Merged, and on to T5X's names, as files of their own.
ot.convert({"base": base, "adapter": adapter}, work / "t5x", [lora, ot.rules.hf_t5_to_t5x()])
kernel = ot.restore(work / "t5x", None)["target"]["encoder"]["layers_0"]["attention"]["query"]["kernel"]
print("as T5X's kernel, transposed:", np.allclose(kernel.T, expected, atol=1e-5))

# Apart: the factors beside their kernel.
apart = ot.restore({"base": base, "adapter": adapter}, None, ot.rules.peft_lora(config, merge=False))
print("apart:", sorted(name for name in apart if name.startswith(query)))
print("the kernel is the base model's:", np.array_equal(apart[f"{query}.weight"], weight))

"""Writes `bitsandbytes_int8/`: a Linear in int8 as bitsandbytes keeps it, and its own dequantization."""

from pathlib import Path

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from safetensors.torch import save_file

out = Path(__file__).parent / "bitsandbytes_int8"
torch.manual_seed(0)
layer = bitsandbytes.nn.Linear8bitLt(24, 10, bias=True, has_fp16_weights=False, threshold=0.0).to("cpu")
state = {f"m.{name}": value.contiguous() for name, value in layer.state_dict().items()}
save_file(state, out / "model.safetensors")
weight = int8_vectorwise_dequant(state["m.weight"], state["m.SCB"]).float().numpy()
np.savez(out / "expected.npz", **{"m.weight": weight, "m.bias": state["m.bias"].float().numpy()})

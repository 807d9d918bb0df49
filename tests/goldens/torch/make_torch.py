"""Writes these goldens: `python make_torch.py`, in an environment with torch; PROVENANCE.md has the versions.

The values are those of `../safetensors/t5_1_1_expected.npz`, or small ones of every kind. Each file that is meant to be
read is loaded again by torch, and what torch gives is what the `*_expected.npz` hold.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
NUMBERS = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", *FLOAT8),
)


def stored(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor; of types that NumPy lacks, their bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return (tensor.view(torch.uint8) if str(tensor.dtype).startswith("torch.float8") else tensor).numpy()


def write_t5() -> None:
    """A tiny T5.1.1 as Transformers saved such models: one file with the tied names, and two of bfloat16."""
    with np.load(HERE.parent / "safetensors" / "t5_1_1_expected.npz") as file:
        values = {name: torch.from_numpy(file[name]) for name in file.files}
    state = OrderedDict((name, value) for name, value in values.items() if name not in TIED)
    state |= dict.fromkeys(TIED, state["shared.weight"])
    (HERE / "t5_1_1").mkdir(exist_ok=True)
    torch.save(state, HERE / "t5_1_1" / "pytorch_model.bin")
    half = HERE / "t5_1_1_bf16"
    half.mkdir(exist_ok=True)
    names = [name for name in state if name not in TIED]
    index = {"metadata": {"total_size": sum(2 * state[name].numel() for name in names)}, "weight_map": {}}
    for number in (1, 2):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        part = names[: len(names) // 2] if number == 1 else names[len(names) // 2 :]
        torch.save({name: state[name].bfloat16() for name in part}, half / file)
        index["weight_map"] |= dict.fromkeys(part, file)
    (half / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every type, and at all kinds of strides."""
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(6, 5, 4, generator=generator)
    found = {f"dtypes/{name}": (base[:2] * 3).abs().round().to(getattr(torch, name)) for name in NUMBERS}
    found |= {
        "strides/transposed": base.permute(2, 0, 1),
        "strides/rows": base[2:5],
        "strides/columns": base[:, 1:3],
        "strides/every second": base[::2, ::2, 1::3],
        "strides/odd": base.reshape(24, 5)[:, ::2].t(),
        "strides/diagonal": base[:, :, 0].diagonal(),
        "strides/expanded": base[:, :1, 2:3].expand(6, 5, 7),
        "strides/one number everywhere": torch.tensor(2.5).expand(3, 4),
        "shared/whole": base,
        "shared/one element": base[1, 2, 3],
        "empty/none": torch.zeros(0),
        "empty/rows": torch.zeros(3, 0, 2, dtype=torch.int64),
        "empty/of a larger one": base[6:, 2:],
        "scalar": torch.tensor(-7, dtype=torch.int16),
        "parameter": torch.nn.Parameter(base[0].clone()),
    }
    return found


def write_kinds() -> None:
    """Tensors by '/'-joined name in nested dicts, and a training state."""
    found = tensors()
    nested: dict = {}
    for name, tensor in found.items():
        node = nested
        *parents, last = name.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = tensor
    torch.save(nested, HERE / "kinds.pt")
    loaded = torch.load(HERE / "kinds.pt")
    for name, tensor in found.items():
        node = loaded
        for part in name.split("/"):
            node = node[part]
        assert torch.equal(node, tensor) or "float8" in name, name
    np.savez_compressed(HERE / "kinds_expected.npz", **{name: stored(value) for name, value in found.items()})
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.25}
    state |= {
        "name": "tiny",
        "nothing": None,
        "empty": {},
        "done": False,
        "seed": 2**63,
        "shape": model[0].weight.shape,
    }
    torch.save(state, HERE / "training.pth")
    values = {f"model/{name}": stored(value) for name, value in model.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        values |= {f"optimizer/state/{number}/{name}": stored(value) for name, value in slots.items()}
    np.savez_compressed(HERE / "training_expected.npz", **values)


def write_others() -> None:
    """A big-endian file, which torch loads, and those that are refused or have no checksums."""
    tree = {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(), "c": torch.tensor([1 + 2j, 3 - 4j])}
    torch.save(tree, HERE / "little.pt")
    made = io.BytesIO()
    sizes = {"data/0": 4, "data/1": 4}  # of a number: halves of complex ones are swapped alone
    with zipfile.ZipFile(HERE / "little.pt") as little, zipfile.ZipFile(made, "w") as big:
        for name in little.namelist():
            data = little.read(name)
            if name.endswith("/byteorder"):
                data = b"big"
            elif (size := sizes.get(name.partition("/")[2])) is not None:
                data = np.frombuffer(data, f"u{size}").byteswap().tobytes()
            big.writestr(name.replace("little/", "big/"), data)
    (HERE / "big.pt").write_bytes(made.getvalue())
    loaded = torch.load(HERE / "big.pt")
    assert all(torch.equal(loaded[name], value) for name, value in tree.items())
    torch.serialization.set_crc32_options(False)
    torch.save(tree, HERE / "without_crc.pt")
    torch.serialization.set_crc32_options(True)
    torch.save({"c": tree["c"].conj(), "w": tree["w"]}, HERE / "conjugated.pt")
    torch.save(tree, HERE / "before_1_6.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(2, 2)).save(HERE / "scripted.pt")


if __name__ == "__main__":
    write_t5()
    write_kinds()
    write_others()
    print(f"torch {torch.__version__}, numpy {np.__version__}")

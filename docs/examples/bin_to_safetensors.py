"""Turn `pytorch_model.bin` into safetensors, without PyTorch and without running the pickle.

A `.bin` is a pickle, which can run code where PyTorch loads it; here it is parsed, and what is no tensor is refused.
Names, shapes, dtypes and values are the same afterwards; `orbax-t5x convert` does it on the command line.
"""

import tempfile
from pathlib import Path

import orbax_t5x as ot

pytorch = (
    Path(__file__).parents[2] / "tests/goldens/torch/t5_1_1"
)  # yours: a directory with pytorch_model.bin, or its index
work = Path(tempfile.mkdtemp())

report = ot.convert(pytorch, work / "model", format="safetensors")
print(f"{report.leaves} tensors in", sorted(path.name for path in (work / "model").iterdir()))
difference = ot.diff(pytorch, work / "model")
print("the same names, shapes, dtypes and values:", difference.equal)

# Half the size: parameters as bfloat16.
ot.convert(pytorch, work / "half", format="safetensors", dtype="bfloat16")
size = {name: sum(file.stat().st_size for file in (work / name).iterdir()) for name in ("model", "half")}
print(f"as bfloat16: {size['half'] / size['model']:.0%} of the size")

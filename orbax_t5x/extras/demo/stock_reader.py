"""Reads a checkpoint only with stock Orbax, as a script.

It imports nothing of this package, which its exit code confirms.
"""

import sys
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def main() -> int:
    """Writes every leaf by its '/'-joined name."""
    directory, out = sys.argv[1:]
    with warnings.catch_warnings():
        # Without a target Orbax restores with the shardings that were saved, and warns of it.
        warnings.simplefilter("ignore")
        tree = ocp.PyTreeCheckpointer().restore(directory)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays: dict[str, Any] = {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    np.savez(out, **arrays)
    return int(any(name.split(".")[0] == "orbax_t5x" for name in sys.modules))


if __name__ == "__main__":
    sys.exit(main())

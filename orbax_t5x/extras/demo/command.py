"""`demo`: the whole job once, in a child process.

JAX reads the number of CPU devices when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from orbax_t5x.text.output import UsageError

_DEVICES = 8
# The child finds modules where this process does, and not in the directory where it happens to run.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from orbax_t5x.extras.demo.job import main; sys.exit(main(sys.argv[2], sys.argv[3]))"
)


def run(options: argparse.Namespace) -> int:
    """Runs the job in a fresh directory; 1 when a comparison fails."""
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="orbax_t5x_demo_") as directory:
            return _run_child(directory, kept=False)
    directory = os.path.expanduser(options.keep)
    try:
        os.makedirs(directory)
    except OSError as error:
        raise UsageError(f"--keep {options.keep}: {error.strerror}") from error
    return _run_child(directory, kept=True)


def _run_child(directory: str, *, kept: bool) -> int:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={_DEVICES}".strip()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    command = [sys.executable, "-P", "-c", _CHILD, path, os.path.abspath(directory), "kept" if kept else ""]
    return subprocess.run(command, env=environment, check=False).returncode

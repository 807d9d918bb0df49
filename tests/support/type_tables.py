"""Type handlers of a process of its own."""

import os
import subprocess
import sys
import textwrap


def in_another_process(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

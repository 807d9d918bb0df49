"""A process that reads checkpoints and may reach nothing else: `python -m tests.robustness.confined_process JOB`.

JOB is a JSON file: the checkpoints to read, the directory outside that nobody may open, the port on which somebody
listens, and whether the process confines itself. Confined, it can open for reading what Python needs and the directory
of the checkpoints, and nothing for writing (Landlock), and has a network of its own without any interface (a network
namespace). Always, the kernel notes every file outside that is opened, by whatever library, under whatever path
(inotify). What is printed is JSON: what became of each checkpoint, the oracles that were there, and that they work.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import sysconfig
from pathlib import Path

import orbax_t5x as ot

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION = 1
_PATH_BENEATH = 1
# Bits of Landlock's first version, and two of them.
_ALL_ACCESS = (1 << 13) - 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_IN_ACCESS, _IN_OPEN = 0x1, 0x20
_IN_NONBLOCK = os.O_NONBLOCK
# Where Python, its libraries, and what they ask of the machine are.
_NEEDED = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/proc", "/sys", "/dev", "/etc/ld.so.cache", "/etc/ssl")


def landlock_version() -> int:
    """Of the kernel; 0 where there is none."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION))


def confine_files(readable: list[str]) -> None:
    """From now on this process, and what it becomes, opens files below these paths for reading, and no others."""
    ruleset = _checked(_LIBC.syscall(_CREATE_RULESET, struct.pack("<Q", _ALL_ACCESS), ctypes.c_size_t(8), 0))
    for path in readable:
        if not os.path.exists(path):
            continue
        access = _READ_FILE | _EXECUTE
        if os.path.isdir(path):
            access |= _READ_DIR
        if path == "/dev":
            access |= _WRITE_FILE
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _checked(_LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("<Qi", access, place), 0))
        os.close(place)
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def confine_network() -> bool:
    """Whether this process has left the network; not everybody may."""
    return _LIBC.unshare(_CLONE_NEWNET) == 0 or _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class OpenedFiles:
    """The files of some directories that anybody opens."""

    def __init__(self, directories: list[Path]):
        self._fd = _checked(_LIBC.inotify_init1(_IN_NONBLOCK))
        for directory in directories:
            _checked(_LIBC.inotify_add_watch(self._fd, os.fsencode(directory), _IN_OPEN | _IN_ACCESS))

    def names(self) -> list[str]:
        """Since the last call; a directory that was opened itself has no name."""
        found = []
        try:
            while data := os.read(self._fd, 1 << 16):
                while data:
                    (length,) = struct.unpack_from("<I", data, 12)
                    found.append(data[16 : 16 + length].rstrip(b"\0").decode())
                    data = data[16 + length :]
        except BlockingIOError:
            return found
        return found


def read_all(path: str) -> str:
    """What reading all leaves of a checkpoint gives: "read", or the errors' types."""
    outcomes = []
    try:
        with ot.open_checkpoint(path) as checkpoint:
            for name, leaf in checkpoint.leaves.items():
                try:
                    leaf.get()
                except ot.errors.CheckpointError as error:
                    outcomes.append(f"{name}: {type(error).__name__} {_denied(error)}".strip())
    except ot.errors.CheckpointError as error:
        outcomes.append(f"{type(error).__name__} {_denied(error)}".strip())
    return ", ".join(outcomes) or "read"


def _denied(error: BaseException) -> str:
    """Whether the operating system had to say no."""
    return "DENIED" if "ermission denied" in str(error) or getattr(error, "errno", None) else ""


def _run(job: dict) -> dict:
    outside = Path(job["outside"])
    watch = OpenedFiles([outside, *(path for path in outside.rglob("*") if path.is_dir())]) if job["watched"] else None
    outcomes = {name: read_all(path) for name, path in job["paths"].items()}
    opened = [] if watch is None else watch.names()
    # The oracles see, or refuse, what does reach out.
    try:
        (outside / "secret").read_bytes()
        control = "opened"
    except PermissionError:
        control = "refused"
    seen = [] if watch is None else watch.names()
    try:
        socket.create_connection(("127.0.0.1", job["port"]), timeout=5).close()
        connected = True
    except OSError:
        connected = False
    return {"outcomes": outcomes, "opened": opened, "control": control, "seen": seen, "connected": connected}


def main(file: str) -> None:
    job = json.loads(Path(file).read_text())
    if not job["confined"] or job.get("left_network") is not None:
        print(json.dumps(_run(job) | {"left_network": job.get("left_network", False)}))
        return
    # Landlock holds for the thread that asks for it and those that it makes: Python begins anew, with one thread.
    job["left_network"] = confine_network()
    Path(file).write_text(json.dumps(job))
    paths = {sys.prefix, sys.base_prefix, *map(os.path.realpath, sysconfig.get_paths().values())}
    confine_files([*_NEEDED, *sorted(paths), os.getcwd(), job["root"], file])
    os.execv(sys.executable, [sys.executable, "-m", "tests.robustness.confined_process", file])


if __name__ == "__main__":
    main(sys.argv[1])

"""XLA's flags for tests; free of imports that take long, because they are set before JAX is imported."""

import importlib.metadata

# Flags, each with the first jaxlib that may not have it: XLA ends a process for a flag that it does not know.
_UNKNOWN = {"--xla_cpu_use_fusion_emitters=false": (0, 11), "--xla_cpu_parallel_codegen_split_count=1": (0, 13)}


def jaxlib_version() -> tuple[int, ...]:
    """Returns the two first numbers of jaxlib's version."""
    return tuple(int(number) for number in importlib.metadata.version("jaxlib").split(".")[:2])


def compiler_flags() -> str:
    """Returns the flags that make compiling cheap.

    Functions run a few times in tests: optimizing them takes longer than running them as they are, the emitters of
    fusions take half of the time of compiling, and splitting a function for several threads a third of what is left.
    Processes whose floats are compared need the same flags.
    """
    known = [flag for flag, first in _UNKNOWN.items() if jaxlib_version() < first]
    return " ".join(["--xla_backend_optimization_level=0", *known])


def xla_flags(devices: int) -> str:
    """Returns the flags for a number of CPU devices."""
    return f"--xla_force_host_platform_device_count={devices} {compiler_flags()}"

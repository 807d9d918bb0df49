"""XLA's flags for tests; free of imports, because they are set before JAX is imported."""


def xla_flags(devices: int) -> str:
    """Returns the flags for a number of CPU devices.

    Functions run a few times in tests: optimizing them takes longer than running them as they are. Processes whose
    floats are compared need the same flags.
    """
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"

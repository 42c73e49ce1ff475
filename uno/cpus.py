"""Count the CPU cores that this process may use."""


def available_cpus() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    The number is the smallest of the machine's cores, the CPU affinity of the process
    (``taskset``, a batch scheduler) and the CPU quota of its control group, version 1
    or 2 (a container's CPU limit).
    """
    from joblib import cpu_count  # 0.1 s, which a command without data need not wait

    return int(cpu_count())

"""``uno doctor [RUN]``: what is wrong with this machine, or with a run directory, and what to do."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence

from pipelines import cli
from pipelines.options import Argument, Command, parse, switch
from uno.errors import ConfigError
from uno.runs.directory import Finding

GIB = 2**30
LOW_DISK_BYTES = 5 * GIB
LOW_SHM_BYTES = GIB  # Ray puts its object store on the disk where /dev/shm is smaller than the store
UNSOUND = 4
DOCTOR = Command(
    "doctor",
    {
        "RUN": Argument("The run directory; without it, the machine is checked.", str | None),
        "--repair": switch(
            "Remove what is provably of no use: unfinished writes, Ray's bookkeeping, damaged checkpoints "
            "where an older one verifies."
        ),
    },
    "none",
)


def main(argv: Sequence[str]) -> int:
    """Print a line for every finding. Returns 0 if sound, 4 if the run cannot resume, 2 if the machine cannot
    run.
    """
    own = parse(argv, DOCTOR).own
    if own.run is not None:
        return _print(_examined(own.run, own.repair), UNSOUND)
    if own.repair:
        raise ConfigError("--repair needs a run directory")
    return _print(list(machine()), 2)


def _examined(target: str, repair: bool) -> list[Finding]:
    from pipelines.console import say
    from uno.data.files import Storage
    from uno.errors import StorageError
    from uno.runs import directory, lock

    storage = Storage(target)
    directory.read_config_tree(storage)
    if repair:
        with lock.claim(storage, on_wait=say) as claim:
            try:
                for line in directory.heal(claim.storage, thorough=True):
                    say(line)
            except StorageError as error:
                say(f"nothing is repaired: {error}")
    return directory.examine(storage)


def _print(findings: list[Finding], code: int) -> int:
    from pipelines.console import say

    for finding in findings:
        say(str(finding))
    return code if any(finding.level == "error" for finding in findings) else 0


def machine() -> Iterator[Finding]:
    """Versions, devices, memory, disk and the Ray cluster that would be used."""
    import torch

    names = ["uno-discovery", "torch", "torchvision", "numpy", "pyarrow"]
    names += ["ray"] if importlib.util.find_spec("ray") else []
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    yield Finding("ok", f"Python {platform.python_version()}, {', '.join(versions)}")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            yield Finding("ok", f"{name}: {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    else:
        build = torch.version.cuda
        why = f"built for CUDA {build}, but no device or driver" if build else "built without CUDA"
        yield Finding("ok", f"no CUDA device (PyTorch is {why}); training runs on {os.cpu_count()} CPU cores")
    yield from _ray()
    yield from _space()
    if os.environ.get("UNO_FAULTS"):
        yield Finding("warning", "UNO_FAULTS is set: runs will be hurt on purpose", "unset it")


def _ray() -> Iterator[Finding]:
    from pipelines import ray_env

    if importlib.util.find_spec("ray") is None:
        yield Finding("warning", "Ray is not installed: --workers 0 only", "pip install 'uno-discovery[ray]'")
        return
    if importlib.util.find_spec("aiohttp_cors") is None:
        yield Finding("warning", "no ray job submit", "pip install 'ray[default]'")
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield Finding("ok", "RAY_ADDRESS is unset: --workers N starts Ray on this machine")
        return
    try:
        ray_env.check_address(address)
    except ConfigError as error:
        yield Finding("error", str(error))
    else:
        mode = os.environ.get("RAY_AUTH_MODE", "disabled")
        yield Finding("ok", f"the Ray cluster at {address} answers; RAY_AUTH_MODE is {mode}")


def _space() -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        total = shutil.disk_usage("/dev/shm").total
        text = f"/dev/shm has {total / GIB:.1f} GiB"
        if total < LOW_SHM_BYTES:
            yield Finding("warning", text, "Ray's object store goes to the disk; docker: --shm-size=8g")
        else:
            yield Finding("ok", text)
    for folder in (os.getcwd(), os.environ.get("RAY_TMPDIR", "/tmp")):
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            yield Finding("error", f"{folder}: {error.strerror}")
            continue
        text = f"{free / GIB:.0f} GiB free at {folder}"
        yield Finding("warning", text, "make room") if free < LOW_DISK_BYTES else Finding("ok", text)


if __name__ == "__main__":
    cli.run(main)

"""auto takes what fits, and says why."""

import pytest

from uno.config import Config, override
from uno.data import ingest
from uno.data.ingest import choose, free_device_bytes, free_host_bytes, own_bytes, peak_bytes
from uno.errors import ConfigError

ROW = 3 * 100**2  # bytes of an image


def config(**values):
    return override(Config(), {"data.store_size": 100} | {k.replace("__", "."): v for k, v in values.items()})


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """Sizes of programs that are easy to add up, on two CPUs; this process has taken 40 MB."""
    for name, value in (("ALONE", 100), ("RAY", 200), ("TASK", 50), ("TRAINER", 30), ("WORKER", 60)):
        monkeypatch.setattr(ingest, f"{name}_BYTES", value * 10**6)
    monkeypatch.setattr(ingest, "own_bytes", lambda: 40 * 10**6)
    monkeypatch.setattr(ingest.os, "cpu_count", lambda: 2)


@pytest.mark.parametrize(("workers", "host", "device", "expected", "words"), [
    (0, 1e9, None, "resident", "300 MB decoded, in memory 400 MB with all programs, budget 564 MB"),
    (0, 4e8, None, "streaming", "budget 204 MB (60% of the host memory that they leave)"),
    (2, 7e8, None, "streaming", "in memory 650 MB with all programs, budget 234 MB"),
    (2, 9e8, None, "resident", "budget 354 MB (60% of the host memory that they leave)"),
    (2, 2e8, None, "streaming", "budget 0 bytes"),
    (0, 1e9, 4e8, "streaming", "budget 240 MB (60% of free device memory)"),
    (2, 1.2e9, 1e12, "resident", "budget 534 MB (60% of the host"),
])  # fmt: skip
def test_auto_takes_what_fits(workers, host, device, expected, words):
    """10,000 images of 100 px. Kills: programs forgotten, or counted that run already, the larger of two
    budgets, less than nothing.
    """
    found, reason = choose(config(compute__workers=workers), 10_000, ROW, host, device, False)
    assert found == expected and reason.startswith(expected) and words in reason
    for told in ("resident", "streaming"):
        found, reason = choose(config(data__ingest=told), 10_000, ROW, 1, None, False)
        assert found == told and reason.startswith(f"{told}, as told")


def test_the_peak_is_where_most_is_held():
    """One copy, and what decodes or what trains, whichever is more. Kills: both at once, a process for a CPU
    that has nothing to decode, a copy for each worker, features counted once where there are two.
    """
    of = lambda workers, *facts, **more: peak_bytes(config(compute__workers=workers, **more), *facts) // 10**6  # noqa: E731
    assert of(0, 1000, 10**6) == 100 + 1000 and of(0, 1000, 10**6, 64) == 1100
    assert [of(w, 1000, 10**6, 64) - 1000 for w in (1, 2, 3)] == [290, 350, 410]  # one block: one task
    assert [of(2, 100_000, 10**4, cpus) - 1000 for cpus in (8, 64)] == [200 + 8 * 50, 200 + 49 * 50]
    assert of(2, 1000, 10**6, model__trainable="heads") == 350 + 2000
    assert of(0, 1000, 10**6, model__trainable="heads") == 1100


def test_free_memory_is_the_containers(tmp_path, monkeypatch):
    """The smaller of what the kernel and the container leave. Kills: a machine's memory for a container's."""
    assert 2**20 < free_host_bytes() < 2**50
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(ingest, "MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(ingest, "CGROUP", str(tmp_path))
    assert free_host_bytes() == 5_120_000
    (tmp_path / "memory.current").write_text("1000000\n")
    for limit, expected in (("3000000\n", 2_000_000), ("max\n", 5_120_000)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_host_bytes() == expected
    assert free_device_bytes(override(Config(), {"compute.device": "cpu"})) is None


def test_own_memory(monkeypatch):
    """Kills: pages for bytes, all that is mapped. (Torch alone takes 200 MB.)"""
    assert 50e6 < own_bytes() < 50e9
    monkeypatch.setattr(ingest, "STATM", "/no/such")
    assert own_bytes() == 0


@pytest.mark.parametrize("values", [{"method": "dtc"}, {"pretext__epochs": 1}])
def test_what_needs_the_images_keeps_them(values):
    """Kills: a set that does not fit streamed into a method that looks rows up."""
    needs = "method" in values
    found, reason = choose(config(**values), 10_000, ROW, 1, None, needs)
    assert found == "resident" and "needs" in reason
    with pytest.raises(ConfigError, match="ingest resident"):
        choose(config(data__ingest="streaming", **values), 10_000, ROW, 1, None, needs)

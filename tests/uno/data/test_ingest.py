"""auto takes what fits, and says why."""

import pytest

from uno.config import Config, override
from uno.data import ingest
from uno.data.ingest import choose, free_device_bytes, free_host_bytes
from uno.errors import ConfigError

ROW = 3 * 100**2  # bytes of an image


def config(**values):
    return override(Config(), {"data.store_size": 100} | {k.replace("__", "."): v for k, v in values.items()})


@pytest.mark.parametrize(("workers", "host", "device", "expected", "words"), [
    (0, 1e9, None, "resident", "resident, 300 MB decoded, budget 600 MB (60% of free host memory)"),
    (0, 4e8, None, "streaming", "streaming, 300 MB decoded, budget 240 MB (60% of free host memory)"),
    (2, 9e8, None, "streaming", "budget 270 MB (60% of free host memory, 2 copies)"),
    (0, 1e9, 4e8, "streaming", "budget 240 MB (60% of free device memory)"),
    (2, 1.2e9, 1e12, "resident", "budget 360 MB (60% of free host memory, 2 copies)"),
])  # fmt: skip
def test_auto_takes_what_fits(workers, host, device, expected, words):
    """10,000 images of 100 px. Kills: copies of the workers forgotten, the larger of two budgets."""
    found, reason = choose(config(compute__workers=workers), 10_000, ROW, host, device, False)
    assert found == expected and reason.startswith(expected) and words in reason
    for told in ("resident", "streaming"):
        found, reason = choose(config(data__ingest=told), 10_000, ROW, 1, None, False)
        assert found == told and reason.startswith(f"{told}, as told")


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


@pytest.mark.parametrize("values", [{"method": "dtc"}, {"rotation__epochs": 1}])
def test_what_needs_the_images_keeps_them(values):
    """Kills: a set that does not fit streamed into a method that looks rows up."""
    needs = "method" in values
    found, reason = choose(config(**values), 10_000, ROW, 1, None, needs)
    assert found == "resident" and "needs" in reason
    with pytest.raises(ConfigError, match="ingest resident"):
        choose(config(data__ingest="streaming", **values), 10_000, ROW, 1, None, needs)

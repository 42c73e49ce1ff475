"""Every runtime of an encoder against PyTorch, and what happens to one that is
missing, fails or lies.
"""

import ctypes
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from tests.uno.small_run import small_config
from uno import runtime
from uno.config import override
from uno.encoder import build_encoder
from uno.errors import ConfigError
from uno.runs.hardware import _processor, at_speed
from uno.runtime import BATCH_SIZES, BUILD, TORCH, Plan, Runtime, plan_of

CPU = torch.device("cpu")


def encoder_of():
    """With running statistics that are not those of a new network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(small_config().model)
        for name, buffer in encoder.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return encoder.eval().requires_grad_(False)


def images_of(num, side=8):
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(num))


def fake(change=lambda features: features, seen=None):
    """A runtime that gives ``change`` of PyTorch's features and notes the sizes of
    its batches.
    """

    def build(encoder, images, sizes, threads, bf16):
        def program(images):
            if seen is not None:
                seen.append(len(images))
            return change(runtime._torch(encoder, images))

        for size in sizes:
            yield size, program

    return build


def installed(monkeypatch, *names):
    monkeypatch.setattr(
        runtime, "_installed", lambda bf16=False: list(names) * (not bf16)
    )
    monkeypatch.setattr(runtime, "find_spec", lambda package: object())


def missing(*packages):
    return [package for package in packages if find_spec(package) is None]


NEEDS = {
    "openvino": missing("openvino"),
    "onnx": missing("onnx", "onnxscript", "onnxruntime"),
    "compile": missing() if shutil.which("g++") else ["g++"],
}


@pytest.mark.slow
def test_openvino_computes_in_bf16_where_the_processor_does():
    """Kills: a hint that is not passed on. Elsewhere it computes in float32, which
    is as near.
    """
    pytest.importorskip("openvino")
    encoder, images = encoder_of(), images_of(13)
    fast = Runtime(encoder, Plan("openvino", 4, True), threads=2)
    error = float(
        (
            (fast(images) - encoder(images)).norm(dim=1) / encoder(images).norm(dim=1)
        ).max()
    )
    assert fast.plan == Plan("openvino", 4, True) and error < 0.1
    assert error > 1e-4 or "avx512_bf16" not in _processor("flags")


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_runtime_gives_the_features_of_pytorch(monkeypatch, tmp_path, name):
    """Of 13 images, which fill no batch, in layers with statistics, under two threads.
    Kills: a program of another mode, batches that are not filled up or not cut, a
    request that threads share.
    """
    if NEEDS[name]:
        pytest.skip(f"needs {', '.join(NEEDS[name])}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    encoder, images = encoder_of(), images_of(13)
    fast = at_speed(encoder, Plan(name), threads=2)
    found = fast(images)
    assert fast.plan.runtime == name and fast.plan.batch_size in BATCH_SIZES
    torch.testing.assert_close(found, encoder(images), rtol=1e-4, atol=1e-5)
    again = at_speed(encoder, fast.plan, threads=1)
    assert torch.equal(again(images[:5]), found[:5])


def test_openvino_leaves_this_thread_its_stack_for_signals():
    """Kills: a Ctrl-C that ends the process with SIGSEGV, since its handler's stack
    went with a model.
    """
    pytest.importorskip("openvino")
    before = _signal_stack()
    encoder = build_encoder(small_config().model).eval()
    found = [*BUILD["openvino"](encoder, torch.randn(2, 3, 8, 8), (2, 4), 1, False)]
    assert _signal_stack() == before
    del found
    assert _signal_stack() == before


def test_warnings_are_heard_after_openvino_has_failed(monkeypatch, caplog):
    """Its converter sets the root logger's level. Kills: a process without a warning
    from there on.
    """
    openvino = pytest.importorskip("openvino")

    def failing(*_, **options):
        logging.getLogger().setLevel(logging.ERROR)
        logging.getLogger().handlers.clear()
        raise LookupError("no such operator")

    monkeypatch.setattr(openvino, "convert_model", failing)
    fast = Runtime(encoder_of(), Plan("openvino"), threads=1)
    fast(images_of(5))
    assert (
        fast.plan.runtime == TORCH
        and "openvino is not used: no such operator" in caplog.text
    )


def _signal_stack() -> bytes:
    """``stack_t`` of the calling thread."""
    now = ctypes.create_string_buffer(24)
    assert ctypes.CDLL(None).sigaltstack(None, now) == 0
    return now.raw


@pytest.mark.parametrize(
    "change",
    [
        lambda features: 2 * features,
        lambda features: features.flip(0),
        lambda features: features.roll(1, 1),
        lambda features: features * torch.nan,
    ],
)
def test_a_runtime_that_lies_is_not_used(monkeypatch, caplog, change):
    """By its length, by its order, by its direction, by NaN. Kills: no comparison, one
    by cosine alone, by the mean of rows, or that NaN passes; a silent fall-back.
    """
    installed(monkeypatch, "onnx")
    monkeypatch.setitem(BUILD, "onnx", fake(change))
    encoder, images = encoder_of(), images_of(20)
    for wanted in ("auto", "onnx"):
        caplog.clear()
        fast = Runtime(encoder, Plan(wanted), threads=2)
        torch.testing.assert_close(fast(images), encoder(images), rtol=1e-5, atol=1e-6)
        assert fast.plan.runtime == TORCH
        assert [record.getMessage()[:43] for record in caplog.records] == [
            "compute.encoder_runtime onnx is not used: i"
        ]


def test_a_runtime_that_fails_is_not_used(monkeypatch, caplog):
    """The next one that is installed is. Kills: a traceback of a converter's, one
    that ends the choice.
    """

    def failing(*_):
        raise LookupError("no such\noperator")
        yield

    installed(monkeypatch, "openvino", "onnx")
    monkeypatch.setitem(BUILD, "openvino", failing)
    monkeypatch.setitem(BUILD, "onnx", fake())
    monkeypatch.setattr(
        Runtime,
        "_seconds",
        lambda self, program, images, size: isinstance(program, partial),
    )
    fast = Runtime(encoder_of(), Plan("auto"), threads=1)
    fast(images_of(2))
    assert fast.plan.runtime == "onnx" and len(caplog.records) == 1
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("openvino is not used: no such operator")
    )


@pytest.mark.parametrize(
    "best", [("openvino", 4), ("openvino", 16), ("onnx", 8), (TORCH, 8)]
)
def test_the_fastest_runtime_and_batch_are_taken(monkeypatch, best):
    """By their time on the first images, of many the fastest of all runtimes. Kills: a
    size or a runtime that is a constant, the slowest, the first that is faster than
    PyTorch.
    """
    installed(monkeypatch, "openvino", "onnx")
    built = list[str]()

    def build(name):
        def programs(*what):
            built.append(name)
            yield from fake()(*what)

        return programs

    for name in ("openvino", "onnx"):
        monkeypatch.setitem(BUILD, name, build(name))

    def seconds(self, program, images, size):
        name = TORCH if isinstance(program, partial) else built[-1]
        return 1.0 if (name, size) == best else 2.0 if name == TORCH else 1.5

    monkeypatch.setattr(Runtime, "_seconds", seconds)
    for wanted, first in (("auto", ["openvino"]), ("every", ["openvino", "onnx"])):
        built.clear()
        fast = Runtime(encoder_of(), Plan(wanted), threads=1)
        fast(images_of(3))
        assert built == first and (fast.plan == Plan(*best)) == (
            wanted == "every" or best[0] != "onnx"
        )


def test_all_batches_have_the_planned_size(monkeypatch):
    """And images of another size than the first pass the encoder. Kills: a last batch
    that is smaller, which a compiled program does not take; a program of one size fed
    with another.
    """
    installed(monkeypatch)
    seen = list[int]()
    monkeypatch.setitem(BUILD, "onnx", fake(seen=seen))
    encoder = encoder_of()
    fast = Runtime(encoder, Plan("onnx", 8), threads=2)
    assert torch.equal(fast(images_of(20)), fast(images_of(20)[:20])) and set(seen) == {
        8
    }
    del seen[:]
    torch.testing.assert_close(
        fast(images_of(5, 12)), encoder(images_of(5, 12)), rtol=1e-5, atol=1e-6
    )
    assert not seen


def test_a_runtime_leaves_the_number_of_threads_as_it_was(monkeypatch):
    """In this thread and in those that begin later; its own threads have one each."""
    installed(monkeypatch)
    inside = list[int]()

    def count(features):
        inside.append(torch.get_num_threads())
        return features

    monkeypatch.setitem(BUILD, "onnx", fake(count))
    torch.set_num_threads(3)
    Runtime(encoder_of(), Plan("onnx", 8), threads=2)(images_of(20))
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == 3 and {*inside} == {1}


def test_auto_is_pytorch_where_nothing_is_installed_or_worth_it(monkeypatch):
    """Kills: a conversion for ten images, on a GPU, of another precision than
    float32; a package required.
    """
    config, many = small_config(), runtime.MIN_PIXELS // 64
    monkeypatch.setattr(runtime, "find_spec", lambda package: None)
    assert plan_of(config, many, 8, CPU) is None
    installed(monkeypatch, "onnx")
    assert plan_of(config, many, 8, CPU) == Plan("auto")
    assert (
        plan_of(config, many - 1, 8, CPU) is None
        and plan_of(config, many, 7, CPU) is None
    )
    assert plan_of(config, 20 * many - 1, 8, CPU) == Plan("auto")
    assert plan_of(config, 20 * many, 8, CPU) == Plan("every")
    assert plan_of(config, many, 8, torch.device("cuda")) is None
    assert (
        plan_of(override(config, {"compute.precision": "bf16"}), many, 8, CPU) is None
    )
    assert (
        plan_of(override(config, {"compute.encoder_runtime": "torch"}), many, 8, CPU)
        is None
    )
    assert plan_of(
        override(config, {"compute.encoder_runtime": "onnx"}), 1, 8, CPU
    ) == Plan("onnx")


@pytest.mark.parametrize(
    ("name", "package"), [("openvino", "openvino"), ("onnx", "onnxscript")]
)
def test_a_runtime_that_is_missing_is_one_line(monkeypatch, name, package):
    """Kills: a silent fall-back, an ImportError later, the name of another package
    than the missing one.
    """
    present = runtime.PACKAGES["onnx"][:-1]
    monkeypatch.setattr(
        runtime, "find_spec", lambda package: object() if package in present else None
    )
    config = override(small_config(), {"compute.encoder_runtime": name})
    with pytest.raises(
        ConfigError,
        match=rf"{name} needs the package {package}: pip install {package}$",
    ):
        plan_of(config, 1, 8, CPU)


def test_bf16_is_openvinos_or_pytorchs(monkeypatch):
    """Kills: a runtime of float32 for features that the cache calls bfloat16, a plan of
    the other precision that continues, and bfloat16 that is never used.
    """
    monkeypatch.setattr(runtime, "find_spec", lambda package: object())
    config = override(small_config(), {"compute.precision": "bf16"})
    assert plan_of(config, runtime.MIN_PIXELS // 64, 8, CPU) == Plan("auto", bf16=True)
    assert plan_of(config, runtime.MIN_PIXELS // 64 - 1, 8, CPU) is None
    for name, allowed in (("openvino", True), ("torch", True), ("onnx", False)):
        assert runtime.is_allowed(config, Plan(name, 4, True), CPU) is allowed
        assert not runtime.is_allowed(config, Plan(name, 4), CPU)
    fast = Runtime(encoder_of(), Plan(TORCH, 4, True), threads=1)
    found, plain = fast(images_of(5)), encoder_of()(images_of(5))
    error = float(((found - plain).norm(dim=1) / plain.norm(dim=1)).max())
    assert found.dtype == torch.float32 and 1e-4 < error < 0.1


def test_a_runtime_of_float32_is_refused_with_bf16(monkeypatch):
    """Kills: features of another precision than the cache's key says."""
    installed(monkeypatch)
    config = {"compute.encoder_runtime": "onnx", "compute.precision": "bf16"}
    with pytest.raises(ConfigError, match="float32: not with precision bf16"):
        plan_of(override(small_config(), config), 1, 8, CPU)

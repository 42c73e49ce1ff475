"""Every runtime of an encoder against PyTorch, and what happens to one that is
missing, fails or lies.
"""

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from tests.uno.small_run import small_config
from uno.config import override
from uno.encoders import runtimes as runtime
from uno.encoders.build import build_encoder
from uno.encoders.runtimes import BUILD, Plan, Runtime, choose_runtime
from uno.errors import ConfigError
from uno.runs.hardware import _processor_field

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

    def build(encoder, images, threads, bf16):
        def program(images):
            if seen is not None:
                seen.append(len(images))
            return change(runtime._run_in_torch(encoder, images))

        return program

    return build


def installed(monkeypatch, *names):
    """Every package can be found; there is a fake of each of ``names``."""
    monkeypatch.setattr(runtime, "find_spec", lambda package: object())
    for name in names:
        monkeypatch.setitem(BUILD, name, fake())


def missing(*packages):
    return [package for package in packages if find_spec(package) is None]


NEEDS = {
    "openvino": missing("openvino"),
    "onnx": missing("onnx", "onnxscript", "onnxruntime"),
}


@pytest.mark.release
def test_openvino_computes_in_bf16_where_the_processor_does():
    """Kills: a hint that is not passed on. Elsewhere it computes in float32, which
    is as near.
    """
    pytest.importorskip("openvino")
    encoder, images = encoder_of(), images_of(13)
    fast = Runtime(encoder, Plan("openvino", True), threads=2)
    error = float(
        (
            (fast(images) - encoder(images)).norm(dim=1) / encoder(images).norm(dim=1)
        ).max()
    )
    assert error < 0.1
    assert error > 1e-4 or "avx512_bf16" not in _processor_field("flags")


@pytest.mark.release
@pytest.mark.parametrize("name", NEEDS)
def test_a_runtime_gives_the_features_of_pytorch(name):
    """Of 13 images, which fill no batch, in layers with statistics, under two threads.
    Kills: a program of another mode, batches that are not filled up or not cut, a
    request that threads share.
    """
    if NEEDS[name]:
        pytest.skip(f"needs {', '.join(NEEDS[name])}")
    encoder, images = encoder_of(), images_of(13)
    fast = Runtime(encoder, Plan(name), threads=2)
    found = fast(images)
    torch.testing.assert_close(found, encoder(images), rtol=1e-4, atol=1e-5)
    again = Runtime(encoder, fast.plan, threads=1)
    assert torch.equal(again(images[:5]), found[:5])


def test_openvino_leaves_this_thread_its_stack_for_signals():
    """Kills: a Ctrl-C that ends the process with SIGSEGV, since its handler's stack
    went with a model.
    """
    pytest.importorskip("openvino")
    before = _signal_stack()
    encoder = build_encoder(small_config().model).eval()
    found = [BUILD["openvino"](encoder, torch.randn(2, 3, 8, 8), 1, False)]
    assert _signal_stack() == before
    del found
    assert _signal_stack() == before


def test_warnings_are_heard_after_openvino_has_failed(monkeypatch):
    """Its converter sets the root logger's level. Kills: a process without a warning
    from there on.
    """
    openvino = pytest.importorskip("openvino")

    def failing(*_, **options):
        logging.getLogger().setLevel(logging.ERROR)
        logging.getLogger().handlers.clear()
        raise LookupError("no such operator")

    monkeypatch.setattr(openvino, "convert_model", failing)
    root = logging.getLogger()
    before = root.level, [*root.handlers]
    with pytest.raises(ConfigError, match=r"openvino .*no such operator"):
        Runtime(encoder_of(), Plan("openvino"), threads=1)(images_of(5))
    assert (root.level, root.handlers) == before


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
def test_a_runtime_with_other_features_is_refused(monkeypatch, change):
    """By their length, by their order, by their direction, by NaN."""
    installed(monkeypatch, "onnx")
    monkeypatch.setitem(BUILD, "onnx", fake(change))
    with pytest.raises(ConfigError, match=r"onnx .*differ.*use .*torch"):
        Runtime(encoder_of(), Plan("onnx"), threads=2)(images_of(20))


def test_a_runtime_that_fails_is_one_line(monkeypatch):
    def failing(*_):
        raise LookupError("no such\noperator")

    installed(monkeypatch)
    monkeypatch.setitem(BUILD, "openvino", failing)
    with pytest.raises(ConfigError, match=r"openvino .*no such operator.*use .*torch"):
        Runtime(encoder_of(), Plan("openvino"), threads=1)(images_of(2))


def test_all_batches_have_one_size(monkeypatch):
    """And images of another size than the first pass the encoder. Kills: a last batch
    that is smaller, which a compiled program does not take; a program of one size fed
    with another.
    """
    installed(monkeypatch)
    seen = list[int]()
    monkeypatch.setitem(BUILD, "onnx", fake(seen=seen))
    encoder = encoder_of()
    fast = Runtime(encoder, Plan("onnx"), threads=2)
    assert torch.equal(fast(images_of(20))[:5], fast(images_of(20)[:5]))
    assert len({*seen}) == 1
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
    Runtime(encoder_of(), Plan("onnx"), threads=2)(images_of(20))
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == 3 and {*inside} == {1}


def test_pytorch_computes_by_default_and_on_gpus(monkeypatch):
    """Whatever is installed."""
    installed(monkeypatch)
    config = small_config()
    onnx = override(config, {"compute.encoder_runtime": "onnx"})
    assert choose_runtime(config, CPU) is None
    assert choose_runtime(onnx, CPU) == Plan("onnx")
    assert choose_runtime(onnx, torch.device("cuda")) is None


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
        choose_runtime(config, CPU)


def test_bf16_is_openvinos_or_pytorchs(monkeypatch):
    installed(monkeypatch)
    config = override(small_config(), {"compute.precision": "bf16"})
    assert choose_runtime(config, CPU) is None
    config = override(config, {"compute.encoder_runtime": "openvino"})
    assert choose_runtime(config, CPU) == Plan("openvino", bf16=True)


def test_a_runtime_of_float32_is_refused_with_bf16(monkeypatch):
    """Kills: features of another precision than the cache's key says."""
    installed(monkeypatch)
    config = {"compute.encoder_runtime": "onnx", "compute.precision": "bf16"}
    with pytest.raises(ConfigError, match="float32: not with precision bf16"):
        choose_runtime(override(small_config(), config), CPU)

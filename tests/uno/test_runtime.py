"""OpenVINO against PyTorch, and what happens if it is missing, fails or lies."""

import ctypes
import re
from unittest.mock import Mock

import pytest
import torch

from tests.uno.data.builders import failure
from tests.uno.small_run import frozen_encoder, small_config
from uno.encoders import runtimes as runtime
from uno.encoders.runtimes import Runtime, runtime_precision


def images_of(num, side=8):
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(num))


def install_fake(monkeypatch, change=lambda features: features):
    """Let OpenVINO compute ``change`` of PyTorch's features, installed or not.

    Returns the program, a mock that is called with each batch.
    """
    program = Mock()

    def compile_encoder(encoder, images, threads, bf16):
        program.side_effect = lambda images: change(
            runtime._run_in_torch(encoder, images)
        )
        return program

    monkeypatch.setattr(runtime, "find_spec", lambda package: object())
    monkeypatch.setattr(runtime, "compile_encoder", compile_encoder)
    return program


@pytest.mark.release
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_openvino_gives_the_features_of_pytorch(precision, tolerance):
    """Of 13 images, which fill no batch, and for any number of threads."""
    pytest.importorskip("openvino")
    encoder, images = frozen_encoder(small_config()), images_of(13)
    found = Runtime(encoder, precision, threads=2)(images)
    expected = encoder(images)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < tolerance
    again = Runtime(encoder, precision, threads=1)
    assert torch.equal(again(images[:5]), found[:5])


def _signal_stack() -> bytes:
    """Return ``stack_t`` of the calling thread."""
    now = ctypes.create_string_buffer(24)
    assert ctypes.CDLL(None).sigaltstack(None, now) == 0
    return now.raw


@pytest.mark.slow
def test_openvino_leaves_this_thread_its_stack_for_signals():
    """Without it, Ctrl-C would end the process with SIGSEGV."""
    pytest.importorskip("openvino")
    before, encoder = _signal_stack(), frozen_encoder(small_config())
    program = runtime.compile_encoder(encoder, torch.randn(2, 3, 8, 8), 1, False)
    assert _signal_stack() == before
    del program
    assert _signal_stack() == before


def test_a_failure_of_openvino_is_one_line(monkeypatch):
    compile_encoder = Mock(side_effect=LookupError("no such\noperator"))
    monkeypatch.setattr(runtime, "compile_encoder", compile_encoder)
    fast = Runtime(frozen_encoder(small_config()), "fp32", threads=1)
    line = r"openvino .*no such operator.*use .*torch"
    assert re.search(line, failure(fast, images_of(5)))


@pytest.mark.parametrize(
    "change",
    [
        lambda features: 2 * features,
        lambda features: features.flip(0),
        lambda features: features.roll(1, 1),
        lambda features: features * torch.nan,
    ],
)
def test_other_features_than_pytorchs_are_refused(monkeypatch, change):
    """They may differ in length, in order or in direction, or be NaN."""
    install_fake(monkeypatch, change)
    fast = Runtime(frozen_encoder(small_config()), "fp32", threads=2)
    assert re.search(r"openvino .*differ.*use .*torch", failure(fast, images_of(20)))


def test_all_batches_have_one_size(monkeypatch):
    """Images of another size than the first ones pass the encoder itself."""
    program, encoder = install_fake(monkeypatch), frozen_encoder(small_config())
    fast = Runtime(encoder, "fp32", threads=2)
    assert torch.equal(fast(images_of(20))[:5], fast(images_of(20)[:5]))
    assert len({len(call.args[0]) for call in program.call_args_list}) == 1
    program.reset_mock()
    images = images_of(5, 12)
    torch.testing.assert_close(fast(images), encoder(images), rtol=1e-5, atol=1e-6)
    program.assert_not_called()


@pytest.mark.parametrize(
    ("name", "precision", "device", "expected"),
    [
        ("torch", "bf16", "cpu", None),
        ("openvino", "fp32", "cpu", "fp32"),
        ("openvino", "bf16", "cpu", "bf16"),
        ("openvino", "fp32", "cuda", None),
    ],
)
def test_openvino_computes_on_request_and_on_cpus(
    monkeypatch, name, precision, device, expected
):
    install_fake(monkeypatch)
    config = small_config(compute__encoder_runtime=name, compute__precision=precision)
    assert runtime_precision(config, torch.device(device)) == expected


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(runtime, "find_spec", lambda package: None)
    config = small_config(compute__encoder_runtime="openvino")
    line = failure(runtime_precision, config, torch.device("cpu"))
    assert line.endswith("openvino: pip install openvino")

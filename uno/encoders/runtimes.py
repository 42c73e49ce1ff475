"""Compute a frozen encoder on a CPU by another program than PyTorch.

``compute.encoder_runtime`` names the program: OpenVINO or ONNX Runtime. Both compute in
float32. With ``compute.precision bf16`` OpenVINO computes in bfloat16.
The default is PyTorch, and no measurement changes that, so that the same command gives
the same features.

The features of the first images are compared with those of PyTorch in float32. The
largest accepted difference is :data:`TOLERANCE`, or in bfloat16 :data:`OF_BF16` times
that of PyTorch's own bfloat16. Threads share the batches of a call. Each batch has
:data:`BATCH_SIZE` images and is computed by one thread, so features do not depend on
the number of threads.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.config import Config
from uno.errors import ConfigError, one_line
from uno.threads import start_pool

TORCH = "torch"
BF16 = "openvino"  # the only runtime that also computes in bfloat16
PACKAGES = {"openvino": ("openvino",), "onnx": ("onnxruntime", "onnx", "onnxscript")}
"""The packages that each runtime needs."""
# The largest accepted difference, relative to the length of a row's features. The
# cosine is then above 0.999999. The difference in float32 is usually 1e-5.
TOLERANCE = 1e-3
# The same for bfloat16, as a multiple of the difference between PyTorch's own bfloat16
# and float32, which is 0.01 to 0.05 of the length.
OF_BF16 = 2.0
BATCH_SIZE = 8  # images that pass the encoder at once, on CPUs
COMPARED_IMAGES = 16  # images whose features are compared with PyTorch's

Program = Callable[[Tensor], Tensor]
"""A function that maps images, float32 (B, 3, S, S), to features (B, D).

It accepts the B and S for which it was built, and can be called from any thread.
"""


class Plan(NamedTuple):
    """How an encoder is computed.

    Attributes:
        runtime: ``openvino`` or ``onnx``.
        bf16: Whether it computes in bfloat16.
    """

    runtime: str
    bf16: bool = False


def choose_runtime(config: Config, device: torch.device) -> Plan | None:
    """Return how the encoder of ``config`` is computed on ``device``.

    Returns:
        None for PyTorch, which computes on GPUs whatever the configuration says.

    Raises:
        ConfigError: As for :func:`require_runtime`.
    """
    require_runtime(config)
    name = config.compute.encoder_runtime
    if device.type != "cpu" or name == TORCH:
        return None
    return Plan(name, config.compute.precision == "bf16")


def require_runtime(config: Config) -> None:
    """Check that ``compute.encoder_runtime`` can be used.

    Raises:
        ConfigError: A package is not installed, or the runtime does not compute in the
            precision of the run.
    """
    name = config.compute.encoder_runtime
    missing = [p for p in PACKAGES.get(name, ()) if find_spec(p) is None]
    if missing:
        packages = "package" if len(missing) == 1 else "packages"
        raise ConfigError(
            f"compute.encoder_runtime {name} needs the {packages}"
            f" {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    if name not in (TORCH, BF16) and config.compute.precision == "bf16":
        raise ConfigError(
            f"compute.encoder_runtime {name} computes in float32: not with precision"
            " bf16"
        )


class Runtime(nn.Module):
    """An encoder, in eval mode and on the CPU, that a runtime computes.

    The program is built for the size of the first images. Images of another size pass
    the encoder itself.
    """

    def __init__(self, encoder: nn.Module, plan: Plan, threads: int) -> None:
        """Prepare ``encoder`` to be computed as ``plan`` says, by ``threads`` threads.

        The program is built at the first call.
        """
        super().__init__()
        self.encoder, self.num_features, self.plan = encoder, encoder.num_features, plan
        self._threads, self._lock = threads, threading.Lock()
        self._pool = start_pool(threads, "uno-runtime")
        self._program: Program | None = None
        self._shape: torch.Size | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features (B, D) of images (B, 3, S, S), without a graph.

        Raises:
            ConfigError: The runtime cannot compute the encoder, or gives other
                features than PyTorch.
        """
        with self._lock:
            if self._program is None:
                self._program, self._shape = self._build(images), images.shape[1:]
        has_size = images.shape[1:] == self._shape
        in_torch = partial(_run_in_torch, self.encoder, bf16=self.plan.bf16)
        return self._run(self._program if has_size else in_torch, images)

    def _build(self, images: Tensor) -> Program:
        """Build the program, and compare its features with those of PyTorch.

        Args:
            images: The first images, float32 (B, 3, S, S).

        Raises:
            ConfigError: The runtime cannot compute the encoder, or gives other
                features.
        """
        name, bf16 = self.plan
        images = images.detach()[torch.arange(COMPARED_IMAGES) % len(images)]
        expected = self._run(partial(_run_in_torch, self.encoder), images)
        tolerance = TOLERANCE
        if bf16:
            in_bf16 = self._run(partial(_run_in_torch, self.encoder, bf16=True), images)
            error = float(_difference(in_bf16, expected).max())
            tolerance = max(TOLERANCE, OF_BF16 * error)
        fix = f"use compute.encoder_runtime {TORCH}"
        try:
            program = BUILD[name](self.encoder, images, self._threads, bf16)
            features = self._run(program, images)
        except Exception as error:  # converters raise errors of many classes
            reason = one_line(error)[:160] or type(error).__name__
            raise ConfigError(
                f"compute.encoder_runtime {name} cannot compute this encoder: {reason};"
                f" {fix}"
            ) from error
        worst = float(_difference(features, expected).max())
        if not worst <= tolerance:  # This also refuses NaN.
            raise ConfigError(
                f"compute.encoder_runtime {name} gives features that differ from"
                f" PyTorch's by {worst:.1e} of their length; {fix}"
            )
        return program

    def _run(self, program: Program, images: Tensor) -> Tensor:
        """Compute the features of all images in batches of one size, by a thread pool.

        The last batch is filled up with black images, and their features are dropped.

        Args:
            program: Computes the features of a batch.
            images: float32 (B, 3, S, S).

        Returns:
            float32 (B, D).
        """
        filled = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % BATCH_SIZE))
        parts = [part.contiguous() for part in filled.split(BATCH_SIZE)]
        return torch.cat(list(self._pool.map(program, parts)))[: len(images)]


def _difference(features: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of features to the expected ones, relative to their length.

    Args:
        features: (B, D).
        expected: (B, D).

    Returns:
        (B,).
    """
    return (features - expected).norm(dim=1) / expected.norm(dim=1)


Build = Callable[[nn.Module, Tensor, int, bool], Program]
"""Builds a program for batches of :data:`BATCH_SIZE` images.

Its arguments are the encoder, example images (B, 3, S, S), the number of threads, and
whether to compute in bfloat16.
"""


@torch.inference_mode()
def _run_in_torch(encoder: Program, images: Tensor, bf16: bool = False) -> Tensor:
    """Run an encoder in PyTorch, and return its features in float32.

    Args:
        encoder: The encoder.
        images: float32 (B, 3, S, S), on the CPU.
        bf16: Whether to compute in bfloat16.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return encoder(images.contiguous(memory_format=torch.channels_last)).float()


@contextmanager
def _kept_logging() -> Iterator[None]:
    """Restore the settings of the root logger at the end of a ``with`` block.

    When OpenVINO's converter fails, it leaves the warnings of all loggers switched off.
    """
    root = logging.getLogger()
    level, filters, handlers = root.level, [*root.filters], [*root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def _with_openvino(
    encoder: nn.Module, images: Tensor, threads: int, bf16: bool
) -> Program:
    """Return a program (see :data:`Program`) that OpenVINO compiled.

    Args:
        encoder: The encoder.
        images: Example images (B, 3, S, S), which give the size.
        threads: The number of threads that call the program.
        bf16: Whether to compute in bfloat16.
    """
    import openvino

    # The tracer warns about Python values that it makes constant.
    with (
        warnings.catch_warnings(action="ignore"),
        _kept_logging(),
        torch.inference_mode(),
    ):
        model = openvino.convert_model(encoder, example_input=images[:2])
    options = {
        "NUM_STREAMS": threads,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",
    }
    model.reshape([BATCH_SIZE, *images.shape[1:]])
    # The plugin gives its thread a stack for signals and frees it with the model: the
    # next signal of a thread that lives on would end the process. This thread ends
    # here.
    with ThreadPoolExecutor(1) as compiler:
        compiled = compiler.submit(
            openvino.Core().compile_model, model, "CPU", options
        ).result()
    of_thread = threading.local()

    def program(images: Tensor) -> Tensor:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        return torch.from_numpy(of_thread.request.infer([images.numpy()])[0].copy())

    return program


def _with_onnx(encoder: nn.Module, images: Tensor, threads: int, bf16: bool) -> Program:
    """Return a program (see :data:`Program`) that ONNX Runtime computes in float32.

    Each call uses one thread.

    Args:
        encoder: The encoder.
        images: Example images (B, 3, S, S), which give the size.
        threads: The number of threads that call the program, which is not used.
        bf16: Not used.
    """
    import onnxruntime

    shapes = ({0: torch.export.Dim("batch", min=1)},)
    data = to_onnx(
        encoder, "images", "features", args=(images[:2],), dynamic_shapes=shapes
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        data.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def program(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return program


BUILD: dict[str, Build] = {
    "openvino": _with_openvino,
    "onnx": _with_onnx,
}
"""The function that builds the program of each runtime."""


def to_onnx(module: nn.Module, input: str, output: str, **traced: Any) -> Any:
    """Export a module with one input and one output to ONNX.

    Args:
        module: The module.
        input: The name of the input.
        output: The name of the output.
        **traced: Arguments of ``torch.onnx.export``, such as ``args`` and
            ``dynamic_shapes``.

    Returns:
        The ``ModelProto``.
    """
    # The exporter warns about future changes of its own code.
    with warnings.catch_warnings(action="ignore"):
        exported = torch.onnx.export(
            module,
            **traced,
            input_names=[input],
            output_names=[output],
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    return exported.model_proto

"""Compute a frozen encoder on a CPU by OpenVINO in place of PyTorch.

``compute.encoder_runtime`` chooses between the two, and the default is PyTorch. With
``compute.precision bf16`` OpenVINO computes in bfloat16, otherwise in float32.

The features of the first images are compared with those of PyTorch in float32. The
largest accepted difference is :data:`TOLERANCE`, or in bfloat16 :data:`OF_BF16` times
that of PyTorch's own bfloat16. Threads share the batches of a call. Each batch has
:data:`BATCH_SIZE` images and is computed by one thread, so features do not depend on
the number of threads.
"""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.config import Config
from uno.errors import ConfigError, one_line
from uno.threads import start_pool

OPENVINO = "openvino"
# The largest accepted difference, relative to the length of a row's features. The
# cosine is then above 0.999999. The difference in float32 is usually 1e-5.
TOLERANCE = 1e-3
# The same for bfloat16, as a multiple of the difference between PyTorch's own bfloat16
# and float32, which is 0.01 to 0.05 of the length.
OF_BF16 = 2.0
BATCH_SIZE = 8  # images that pass the encoder at once, on CPUs
COMPARED_IMAGES = 16  # images whose features are compared with PyTorch's

Precision = Literal["fp32", "bf16"]
Program = Callable[[Tensor], Tensor]
"""A function that maps images, float32 (B, 3, S, S), to features (B, D).

It accepts the B and S for which it was built, and can be called from any thread.
"""


def runtime_precision(config: Config, device: torch.device) -> Precision | None:
    """Return the precision in which OpenVINO computes the encoder on a device.

    Args:
        config: The configuration, which names the runtime and the precision.
        device: The device of the encoder.

    Returns:
        "bf16" if ``compute.precision`` is "bf16", otherwise "fp32". None if PyTorch
        computes the encoder: on GPUs, whatever the configuration says, and on the CPU
        if ``compute.encoder_runtime`` is "torch".

    Raises:
        ConfigError: The configuration asks for OpenVINO, which is not installed. This
            is checked on GPUs, too.
    """
    require_runtime(config)
    if device.type != "cpu" or config.compute.encoder_runtime != OPENVINO:
        return None
    return "bf16" if config.compute.precision == "bf16" else "fp32"


def require_runtime(config: Config) -> None:
    """Check that the runtime that ``compute.encoder_runtime`` names is installed.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: ``compute.encoder_runtime`` is "openvino", and the package is not
            installed.
    """
    if config.compute.encoder_runtime == OPENVINO and find_spec(OPENVINO) is None:
        raise ConfigError(
            f"compute.encoder_runtime {OPENVINO} needs the package {OPENVINO}: pip"
            f" install {OPENVINO}"
        )


class Runtime(nn.Module):
    """An encoder, in eval mode and on the CPU, that OpenVINO computes.

    The program is built at the first call, for the size of its images. Images of
    another size pass the encoder itself.

    Args:
        encoder: The encoder.
        precision: The precision in which features are computed, "fp32" or "bf16".
        threads: The number of threads of the pool that is started here, each of which
            computes one batch of :data:`BATCH_SIZE` images at a time, and of OpenVINO's
            streams and compute threads.
    """

    def __init__(self, encoder: nn.Module, precision: Precision, threads: int) -> None:
        super().__init__()
        self.encoder, self.num_features = encoder, encoder.num_features
        self.precision = precision
        self._threads, self._lock = threads, threading.Lock()
        self._pool = start_pool(threads, "uno-runtime")
        self._program: Program | None = None
        self._shape: torch.Size | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features of images, without gradients.

        The OpenVINO program is built at the first call, for the size S of its images,
        and its features are compared with those of PyTorch once. In later calls the
        features of images of another size are computed by PyTorch, in the same
        precision. Several threads may call this.

        Args:
            images: Normalized images float32 (B, 3, S, S), B >= 1, on the CPU.

        Returns:
            Features float32 (B, D).

        Raises:
            ConfigError: OpenVINO cannot compute the encoder, or gives other features
                than PyTorch. Both show when the program is built.
        """
        with self._lock:
            if self._program is None:
                self._program, self._shape = self._build(images), images.shape[1:]
        has_size = images.shape[1:] == self._shape
        in_torch = partial(_run_in_torch, self.encoder, bf16=self.precision == "bf16")
        return self._run(self._program if has_size else in_torch, images)

    def _build(self, images: Tensor) -> Program:
        """Build the OpenVINO program, and compare its features with those of PyTorch.

        The features of the first ``COMPARED_IMAGES`` images are compared with those of
        PyTorch in float32. If there are fewer images, they are repeated. The largest
        accepted difference is ``TOLERANCE`` of the length of a row's features. With
        bfloat16 it is ``OF_BF16`` times the largest difference that PyTorch's own
        bfloat16 has for one of these images, if that is more.

        Args:
            images: The images of the first call, float32 (B, 3, S, S), B >= 1.

        Returns:
            The program, for batches of exactly :data:`BATCH_SIZE` images of this size.

        Raises:
            ConfigError: OpenVINO cannot compute the encoder, or a difference is larger.
        """
        bf16 = self.precision == "bf16"
        images = images.detach()[torch.arange(COMPARED_IMAGES) % len(images)]
        expected = self._run(partial(_run_in_torch, self.encoder), images)
        tolerance = TOLERANCE
        if bf16:
            in_bf16 = self._run(partial(_run_in_torch, self.encoder, bf16=True), images)
            error = float(_difference(in_bf16, expected).max())
            tolerance = max(TOLERANCE, OF_BF16 * error)
        fix = "use compute.encoder_runtime torch"
        try:
            program = compile_encoder(self.encoder, images, self._threads, bf16)
            features = self._run(program, images)
        except Exception as error:  # the converter raises errors of many classes
            reason = one_line(error)[:160] or type(error).__name__
            raise ConfigError(
                f"compute.encoder_runtime {OPENVINO} cannot compute this encoder:"
                f" {reason}; {fix}"
            ) from error
        worst = float(_difference(features, expected).max())
        if not worst <= tolerance:  # This also refuses NaN.
            raise ConfigError(
                f"compute.encoder_runtime {OPENVINO} gives features that differ from"
                f" PyTorch's by {worst:.1e} of their length; {fix}"
            )
        return program

    def _run(self, program: Program, images: Tensor) -> Tensor:
        """Compute features in batches of ``BATCH_SIZE`` images, by a thread pool.

        The last batch is filled up with zeros, and their features are dropped.

        Args:
            program: Computes the features of a batch, by OpenVINO or PyTorch.
            images: float32 (B, 3, S, S), with any B >= 1.

        Returns:
            float32 (B, D).
        """
        filled = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % BATCH_SIZE))
        parts = [part.contiguous() for part in filled.split(BATCH_SIZE)]
        return torch.cat(list(self._pool.map(program, parts)))[: len(images)]


def _difference(features: Tensor, expected: Tensor) -> Tensor:
    """Return the relative Euclidean distance of features to the expected ones.

    Args:
        features: (B, D).
        expected: (B, D).

    Returns:
        The distance for each row, divided by the length of the expected features, (B,).
        It is not finite where that length is 0.
    """
    return (features - expected).norm(dim=1) / expected.norm(dim=1)


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


def compile_encoder(
    encoder: nn.Module, images: Tensor, threads: int, bf16: bool
) -> Program:
    """Compile an encoder by OpenVINO, for batches of :data:`BATCH_SIZE` images.

    Args:
        encoder: The encoder, in eval mode and on the CPU.
        images: Example images float32 (B, 3, S, S), B >= 1, which give the size S. The
            first two are used to trace the encoder.
        threads: The number of OpenVINO's streams, and also of its compute threads. So
            this many batches are computed at a time, each by one thread. It should be
            the number of threads that call the program.
        bf16: Whether to compute in bfloat16, otherwise in float32.

    Returns:
        A function that maps exactly :data:`BATCH_SIZE` images of size S, contiguous
        float32 on the CPU, to features (:data:`BATCH_SIZE`, D), and can be called from
        any thread. Errors of OpenVINO are raised as they are, here and in the function.
    """
    import openvino

    # The tracer warns about Python values that it makes constant.
    with warnings.catch_warnings(action="ignore"), torch.inference_mode():
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
        """Return the features of a batch of ``BATCH_SIZE`` images, as a new tensor.

        Each calling thread has its own inference request of OpenVINO, which is kept.
        """
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        return torch.from_numpy(of_thread.request.infer([images.numpy()])[0].copy())

    return program

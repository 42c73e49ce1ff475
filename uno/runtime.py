"""A frozen encoder at the speed of a CPU: OpenVINO, ONNX Runtime or torch.compile in
the place of PyTorch's layers, in float32; in bfloat16 by OpenVINO or PyTorch, with
compute.precision bf16.

A runtime is used if its features of the first images equal PyTorch's in float32 up to
:data:`TOLERANCE`, or
:data:`OF_BF16`. The number of images that pass at once is measured on them. Threads
share the batches of a call, each computed by one, so that features do not depend on the
number of threads.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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

AUTO, EVERY, TORCH = "auto", "every", "torch"
BF16 = "openvino"  # the one that computes in bfloat16 too
PACKAGES = {"openvino": ("openvino",), "onnx": ("onnxruntime", "onnx", "onnxscript")}
"""What runtimes need. PyTorch is compared with the first one that is installed and
works; of many images, for which ``auto`` is ``every``, with all of them.
"""
# of the length of a row's features: a cosine above .999999; float32 differs by 1e-5
TOLERANCE = 1e-3
# times the difference that PyTorch's own bfloat16 has: .01 to .05 of the length
OF_BF16 = 2.0
BATCH_SIZES = (4, 8, 16)
# of all images; of fewer ``auto`` is PyTorch: a conversion takes 5-30 s
MIN_PIXELS = 1_000 * 224**2
MANY_PIXELS = 20 * MIN_PIXELS  # minutes, even by the fastest
TIMED_S, MAX_ROUNDS = 0.5, 3  # of the images that are timed: no round after that time

log = logging.getLogger(__name__)

Program = Callable[[Tensor], Tensor]
"""float32 (B, 3, S, S) -> (B, D), of the B and S that it was built for, from any
thread.
"""


class Plan(NamedTuple):
    """The runtime of an encoder, how many images pass it at once, None: as measured,
    whether in bfloat16.
    """

    runtime: str
    batch_size: int | None = None
    bf16: bool = False


def plan_of(
    config: Config, num_images: int, side: int, device: torch.device
) -> Plan | None:
    """How ``num_images`` of ``side`` by ``side`` pixels should pass the encoder of
    ``config`` on ``device``, None: as PyTorch has it. ConfigError: as
    :func:`require_runtime`.
    """
    require_runtime(config)
    name: str = config.compute.encoder_runtime
    num_pixels, bf16 = num_images * side**2, config.compute.precision == "bf16"
    pays = name != AUTO or (num_pixels >= MIN_PIXELS and bool(_installed(bf16)))
    name = EVERY if name == AUTO and num_pixels >= MANY_PIXELS else name
    return (
        Plan(name, bf16=bf16)
        if device.type == "cpu" and name != TORCH and pays
        else None
    )


def is_allowed(config: Config, plan: Plan, device: torch.device) -> bool:
    """Whether ``config`` lets a job that began with ``plan`` continue with it."""
    name, bf16 = config.compute.encoder_runtime, config.compute.precision == "bf16"
    allowed = [TORCH, *_installed(bf16)] if name == AUTO else [name]
    return device.type == "cpu" and plan.bf16 == bf16 and plan.runtime in allowed


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use ``number`` threads inside the ``with``, and then as many as before.

    Threads that begin inside the ``with`` have the same number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_pool(num_threads: int) -> ThreadPoolExecutor:
    """Start a pool whose threads compute by one thread of torch each.

    ``torch.set_num_threads`` also decides for all threads that begin later, and a
    thread takes that number at its first use of torch. So all threads of the pool
    begin here, and the calling thread sets the number back.
    """
    pool = ThreadPoolExecutor(num_threads, "uno-runtime")
    started = threading.Barrier(num_threads)

    def begin(_: int) -> None:
        torch.set_num_threads(1)
        assert torch.get_num_threads() == 1  # the first use
        started.wait()

    with threads(1):
        list(pool.map(begin, range(num_threads)))
    return pool


def require_runtime(config: Config) -> None:
    """ConfigError: ``compute.encoder_runtime`` is not installed, or does not compute
    in the precision.
    """
    name = config.compute.encoder_runtime
    if missing := [
        package for package in PACKAGES.get(name, ()) if find_spec(package) is None
    ]:
        needs = (
            "needs the "
            + ("package " if len(missing) == 1 else "packages ")
            + ", ".join(missing)
        )
        raise ConfigError(
            f"compute.encoder_runtime {name} {needs}: pip install {' '.join(missing)}"
        )
    if name not in (AUTO, TORCH, BF16) and config.compute.precision == "bf16":
        raise ConfigError(
            f"compute.encoder_runtime {name} computes in float32: not with precision"
            " bf16"
        )


def _installed(bf16: bool = False) -> list[str]:
    names = [BF16] if bf16 else [*PACKAGES]
    return [name for name in names if all(map(find_spec, PACKAGES[name]))]


class Runtime(nn.Module):
    """``encoder``, in eval mode and on the CPU, as ``plan`` says, by ``threads``
    threads: (B, 3, S, S) -> (B, D) without a graph. The first images settle it. Images
    of another size pass the encoder itself, as all do where a runtime fails or gives
    other features; then a line is logged.
    """

    def __init__(self, encoder: nn.Module, plan: Plan, threads: int) -> None:
        super().__init__()
        self.encoder, self.num_features, self.plan = encoder, encoder.num_features, plan
        self._threads, self._lock = threads, threading.Lock()
        self._pool = start_pool(threads)
        self._program: Program | None = None
        self._shape: torch.Size | None = None

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D)."""
        with self._lock:
            if self._program is None:
                self._settle(images)
        assert self._program is not None and self.plan.batch_size is not None
        same = images.shape[1:] == self._shape
        program = (
            self._program
            if same
            else partial(_torch, self.encoder, bf16=self.plan.bf16)
        )
        return self._run(program, images, self.plan.batch_size)

    def _settle(self, images: Tensor) -> None:
        """Choose the program by the first images (B, 3, S, S)."""
        images = images.detach()[torch.arange(max(BATCH_SIZES)) % len(images)]
        expected = self._run(partial(_torch, self.encoder), images, min(BATCH_SIZES))
        tolerance = TOLERANCE
        if self.plan.bf16:
            own = self._run(
                partial(_torch, self.encoder, bf16=True), images, min(BATCH_SIZES)
            )
            tolerance = max(
                TOLERANCE, OF_BF16 * float(_difference(own, expected).max())
            )
        wanted, found = self.plan.runtime, list[tuple[float, Plan, Program]]()
        compares = wanted in (AUTO, EVERY)
        for name in (
            [*_installed(self.plan.bf16), TORCH] if compares else [wanted, TORCH]
        ):
            if not found or wanted == EVERY or (compares and name == TORCH):
                found += self._candidates(name, images, expected, tolerance)
        _, self.plan, self._program = min(found, key=lambda one: one[0])
        self._shape = images.shape[1:]

    def _candidates(
        self, name: str, images: Tensor, expected: Tensor, tolerance: float
    ) -> list[tuple[float, Plan, Program]]:
        """Seconds, plan and program of a runtime for each size of a batch; a line
        says why there is none.
        """
        sizes, found = (
            [self.plan.batch_size] if self.plan.batch_size else BATCH_SIZES,
            [],
        )
        bf16 = self.plan.bf16
        try:
            for size, program in BUILD[name](
                self.encoder, images, sizes, self._threads, bf16
            ):
                worst = float(
                    _difference(self._run(program, images, size), expected).max()
                )
                if name != TORCH and not worst <= tolerance:
                    raise ValueError(
                        f"its features differ from PyTorch's by {worst:.1e} of their"
                        " length"
                    )
                found.append(
                    (
                        self._seconds(program, images, size),
                        Plan(name, size, bf16),
                        program,
                    )
                )
        except Exception as error:  # those of converters have no name in common
            if name == TORCH:
                raise
            why = one_line(error)[:160] or type(error).__name__
            log.warning("compute.encoder_runtime %s is not used: %s", name, why)
            return []
        return found

    def _seconds(self, program: Program, images: Tensor, size: int) -> float:
        """Of the fastest round of these images for each thread."""
        every, start, best = (
            images.repeat(self._threads, 1, 1, 1),
            time.perf_counter(),
            float("inf"),
        )
        for _ in range(MAX_ROUNDS):
            before = time.perf_counter()
            self._run(program, every, size)
            best = min(best, time.perf_counter() - before)
            if time.perf_counter() - start > TIMED_S:
                break
        return best

    def _run(self, program: Program, images: Tensor, size: int) -> Tensor:
        """All of ``images`` in batches of ``size``, the last one filled up."""
        filled = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % size))
        parts = [part.contiguous() for part in filled.split(size)]
        return torch.cat(list(self._pool.map(program, parts)))[: len(images)]


def _difference(features: Tensor, expected: Tensor) -> Tensor:
    """(B, D) twice -> (B,), of the length of what is expected."""
    return (features - expected).norm(dim=1) / expected.norm(dim=1)


Build = Callable[
    [nn.Module, Tensor, Sequence[int], int, bool], Iterator[tuple[int, Program]]
]
"""Encoder, examples (B, 3, S, S), sizes of batches, number of threads, whether in
bfloat16 -> a program for each size.
"""


def _with_torch(
    encoder: nn.Module, images: Tensor, sizes: Sequence[int], threads: int, bf16: bool
) -> Iterator[tuple[int, Program]]:
    for size in sizes:
        yield size, partial(_torch, encoder, bf16=bf16)


def _compiled(encoder: nn.Module, *how: Any) -> Iterator[tuple[int, Program]]:
    program: Any = torch.compile(encoder, dynamic=False, options={"freezing": True})
    return _with_torch(program, *how)


@torch.inference_mode()
def _torch(encoder: Program, images: Tensor, bf16: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return encoder(images.contiguous(memory_format=torch.channels_last)).float()


@contextmanager
def _kept_logging() -> Iterator[None]:
    """OpenVINO's converter silences every logger's warnings, where it fails for
    good.
    """
    root = logging.getLogger()
    level, filters, handlers = root.level, [*root.filters], [*root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def _with_openvino(
    encoder: nn.Module, images: Tensor, sizes: Sequence[int], threads: int, bf16: bool
) -> Iterator[tuple[int, Program]]:
    import openvino

    # the tracer's
    with (
        warnings.catch_warnings(action="ignore"),
        _kept_logging(),
        torch.inference_mode(),
    ):
        model = openvino.convert_model(encoder, example_input=images[:2])
    precision = "bf16" if bf16 else "f32"
    how = {
        "NUM_STREAMS": threads,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
    }
    for size in sizes:
        model.reshape([size, *images.shape[1:]])
        # The plugin gives its thread a stack for signals and frees it with the model:
        # the next signal of a thread that lives on would end the process. This thread
        # ends here.
        with ThreadPoolExecutor(1) as compiler:
            compiled = compiler.submit(
                openvino.Core().compile_model, model, "CPU", how
            ).result()
        own = threading.local()

        def program(
            images: Tensor, compiled: Any = compiled, own: threading.local = own
        ) -> Tensor:
            if not hasattr(own, "request"):  # of each thread
                own.request = compiled.create_infer_request()
            return torch.from_numpy(own.request.infer([images.numpy()])[0].copy())

        yield size, program


def _with_onnx(
    encoder: nn.Module, images: Tensor, sizes: Sequence[int], threads: int, bf16: bool
) -> Iterator[tuple[int, Program]]:
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

    for size in sizes:
        yield size, program


BUILD: dict[str, Build] = {
    "openvino": _with_openvino,
    "onnx": _with_onnx,
    "compile": _compiled,
    TORCH: _with_torch,
}
"""Every runtime."""


def to_onnx(module: nn.Module, input: str, output: str, **traced: Any) -> Any:
    """The ``ModelProto`` of a module of one input and output; ``traced``: for
    ``torch.export.export``.
    """
    # the exporter announces changes of its own code
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

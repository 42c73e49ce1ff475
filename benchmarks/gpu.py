"""Everything that only a GPU can answer, in one script without Ray.

    python -m benchmarks.gpu --out DIR --minutes 8 --bundle .gpu

The parts run in the order of their value and stop when the minutes are over:

- ``ceilings``: the largest matrix product in bf16 and a copy on the device;
- ``tests``: the test lane ``pytest -m gpu``;
- ``steps``: discovery steps of the paper's sizes, whole and by part;
- ``streamed``: steps on JPEG files that are decoded and cropped while training;
- ``discover``: a run on CIFAR10-JPEG with as many epochs as fit;
- ``frozen``: a run on CIFAR10-JPEG with a pretrained, frozen encoder.

Every result is one JSON line of ``DIR/results.jsonl``, written as soon as it is known:
a cut loses only what had not begun. ``make gpu-bundle`` makes the folder that
``--bundle`` names: the data, an encoder and the wheels that such a machine lacks.
``--small`` takes sizes that a CPU manages, to try the script itself.
"""

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import environment, limits, wait
from benchmarks.step import by_size, encoder_pass, train_set
from benchmarks.step import parts as parts_of_step
from uno.captured import EAGER_STEPS, CapturedStep, record_cuda_graph
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.images import InMemory
from uno.data.memory import MemoryBatches
from uno.data.sampling import make_plan
from uno.data.stream import StreamedImages, StreamSet, crop_local
from uno.data.unreadable import BadRows
from uno.model import UnoModel, build_network
from uno.objective import unified_objective
from uno.presets import preset
from uno.runs.hardware import prepare_compiler
from uno.runs.journal import read_journal
from uno.steps import Batch, new_state, take_step
from uno.threads import available_cpus

PARTS = ("ceilings", "tests", "steps", "streamed", "discover", "frozen")
TRACED_STEPS = 3
RESERVE_S = 10  # of the minutes that are kept for the table
START_AND_END_S = 120  # of a whole run: to read the data, and to evaluate and report
COMPILE_S = 45
WAITS = (  # calls of the driver in which the host waits for the device
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
)


@dataclass(frozen=True)
class StepCase:
    """One kind of discovery step that is measured."""

    preset: str
    recipe: str = "paper"
    precision: str = "bf16"
    compile: bool = False
    cuda_graph: bool = False
    batch: int = 512

    @property
    def name(self) -> str:
        """What the files of the case are called."""
        words = [self.preset, self.recipe, self.precision]
        words += ["graph"] if self.cuda_graph else []
        words += ["compiled"] if self.compile else []
        return "-".join(words)


CASES = (
    StepCase("cifar10", cuda_graph=True),
    StepCase("cifar10", cuda_graph=True, compile=True),
    StepCase("imagenet", cuda_graph=True),
    StepCase("cifar10", recipe="v2", cuda_graph=True),
    StepCase("cifar10"),
    StepCase("imagenet"),
    StepCase("cifar10", recipe="v2"),
    StepCase("imagenet", cuda_graph=True, compile=True),
    StepCase("cifar10", recipe="v2", cuda_graph=True, compile=True),
    StepCase("cifar10", precision="fp32"),
    StepCase("imagenet", precision="fp32"),
)
SMALL_CASES = (
    StepCase("digits", precision="fp32", batch=32),
    StepCase("digits", batch=32),
)


class Results:
    """The rows of ``results.jsonl``, each on the disk before the next is measured."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows: list[dict[str, Any]] = []

    def add(self, part: str, **values: Any) -> None:
        """Write one row and print it."""
        row = {"part": part, **values}
        self.rows.append(row)
        with open(self.folder / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps(row)[:600], flush=True)


class Clock:
    """How many seconds of the given minutes are left."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes - RESERVE_S

    @property
    def left(self) -> float:
        """Seconds; negative once they are over."""
        return self._end - time.monotonic()


def main() -> None:
    """Measure the parts that are asked for, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--bundle", type=Path, help="folder that make gpu-bundle makes")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"with commas, of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--cases", help="names of steps with commas, as the table has them; default all"
    )
    parser.add_argument(
        "--epochs", help="PRETRAIN,DISCOVER of the run; default: as many as fit"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the whole run")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    asked = options.parts.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {PARTS}")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    results, clock = Results(options.out), Clock(options.minutes)
    results.add("machine", **machine(options.device))
    for name in (name for name in PARTS if name in asked):
        if clock.left <= 0:
            results.add(name, skipped="no time left")
            continue
        begun = time.monotonic()
        try:
            globals()[f"measure_{name}"](options, results, clock)
        except Exception as error:
            traceback.print_exc()
            results.add(name, error=f"{type(error).__name__}: {error}"[:500])
        results.add("time", of=name, seconds=round(time.monotonic() - begun, 1))
    print_table(results.rows)


def machine(device: str) -> dict[str, Any]:
    """Versions and hardware that every number of this run belongs to."""
    found = environment(device) | {"cpus": available_cpus()}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False)
        found |= {
            "driver": driver.stdout.strip(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


# Ceilings and tests


def measure_ceilings(
    options: argparse.Namespace, results: Results, clock: Clock
) -> None:
    """What no step can exceed: the matrix units and the memory of the device."""
    # bfloat16 takes minutes on CPUs that do not know it
    dtypes = [torch.float32] if options.small else [torch.bfloat16, torch.float32]
    for dtype in dtypes:
        repeats = 2 if options.small else 10
        found = limits(options.device, dtype, repeats=repeats)
        results.add("ceilings", dtype=str(dtype).removeprefix("torch."), **found)


def measure_tests(options: argparse.Namespace, results: Results, clock: Clock) -> None:
    """The tests that need a GPU, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--durations=5"]
    command += ["-p", "no:cacheprovider", "--timeout=120", "tests/uno/test_gpu.py"]
    if options.small:
        command.append("--collect-only")
    with open(options.out / "tests.log", "w", encoding="utf-8") as log:
        code = run_until(command, clock.left, log)
    lines = (options.out / "tests.log").read_text().strip().splitlines()
    results.add("tests", exit_code=code, last_line=lines[-1] if lines else "")


def run_until(command: list[str], seconds: float, log: Any) -> int | str:
    """Run a command; its exit code, or "timeout" where it was stopped."""
    try:
        return subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return "timeout"


# Steps


def measure_steps(options: argparse.Namespace, results: Results, clock: Clock) -> None:
    """Every case in turn; one that fails, for want of memory say, leaves a row."""
    peak = max(
        (
            row["matmul_tflops"]
            for row in results.rows
            if row["part"] == "ceilings" and row.get("dtype") == "bfloat16"
        ),
        default=None,
    )
    cases = SMALL_CASES if options.small else CASES
    names = options.cases.split(",") if options.cases else [c.name for c in cases]
    for case in (case for case in cases if case.name in names):
        if clock.left <= 0:
            results.add("steps", case=case.name, skipped="no time left")
            continue
        begun = time.monotonic()
        try:
            row = measure_step(case, options, peak)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        took = round(time.monotonic() - begun, 1)
        results.add("steps", case=case.name, **asdict(case), **row, seconds=took)
        if options.device == "cuda":
            torch.cuda.empty_cache()


class Training:
    """A discovery step on random images that are in the memory of the device."""

    def __init__(self, case: StepCase, device: torch.device) -> None:
        self.config = override(
            preset(case.preset, case.recipe), {"train.batch_size": case.batch}
        )
        train = train_set(None, self.config).to(device)
        sizes = len(train.labels), train.num_unlabeled
        sampling = self.config.data.batch_sampling
        plan = make_plan(0, sampling, case.batch, *sizes)
        self.batches = MemoryBatches(self.config, train, plan, 0, 1)
        model = build_network(self.config, train.num_known, train.num_novel, 0)
        self.model = model.to(device, memory_format=torch.channels_last).train()
        bf16 = case.precision == "bf16"
        self.state = new_state(model, model, self.config.discover, device, bf16)
        step = partial(take_step, unified_objective)
        self._step = CapturedStep(step) if case.cuda_graph else step

    def batch(self) -> Batch:
        """The views of the next step."""
        return self.batches(self.state.step)

    def step(self) -> None:
        """Batch, forward, targets, loss, backward and update."""
        self._step(self.state, self.batch(), self.config, 1e-3)


def measure_step(
    case: StepCase, options: argparse.Namespace, peak: float | None
) -> dict[str, Any]:
    """Time, memory, kernels and waits of one case, and of its parts alone."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(case, device)
    batch = training.batch()
    flops = encoder_flops(training.model, batch)
    if case.compile:
        prepare_compiler()
        training.model.encoder.compile(dynamic=False)
    least = 0.2 if options.small else 1.5
    for _ in range(EAGER_STEPS + 1):  # compiled and recorded
        training.step()
    step_s, host_s = seconds_a_call(training.step, device, least)
    encoder = encoder_pass(
        training.model.encoder, by_size(batch), case.precision == "bf16"
    )
    if case.cuda_graph:
        encoder()
        encoder = record_cuda_graph(encoder)
    encoder_s, _ = seconds_a_call(encoder, device, least)
    row: dict[str, Any] = {
        "images_per_s": round(case.batch / step_s),
        "views_per_image": len(batch.views),
        "step_ms": round(1000 * step_s, 2),
        "host_ms": round(1000 * host_s, 2),
        "encoder_ms": round(1000 * encoder_s, 2),
        "share_outside_encoder": round(1 - encoder_s / step_s, 3),
        "encoder_tflops": round(flops / encoder_s / 1e12, 1),
    }
    if peak is not None:
        row["share_of_matmul_peak"] = round(flops / encoder_s / 1e12 / peak, 3)
    if device.type == "cuda":
        row["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    pieces = {
        "augmentation": training.batch,
        **parts_of_step(training.config, training.state, batch),
    }
    row["parts_ms"] = {
        name: round(1000 * seconds_a_call(piece, device, least / 5)[0], 3)
        for name, piece in pieces.items()
    }
    if device.type == "cuda":
        row["parts_busy_ms"] = {
            name: round(busy_ms_a_call(piece), 3) for name, piece in pieces.items()
        }
    return row | traced(training.step, device, options.out / f"trace-{case.name}.json")


def encoder_flops(model: UnoModel, batch: Batch) -> float:
    """Floating-point operations of the encoder's forward and backward pass, counted on
    two images of each size.
    """
    total = 0.0
    for images in by_size(batch):
        with FlopCounterMode(display=False) as counter:
            model.encoder(images[:2]).sum().backward()
        total += counter.get_total_flops() * len(images) / 2
    model.zero_grad(set_to_none=True)
    return total


def seconds_a_call(
    function: Callable[[], Any], device: torch.device, least: float
) -> tuple[float, float]:
    """Return seconds of a call in a series without waiting, and of the host in one.

    Args:
        function: What is called.
        device: Where it computes.
        least: Seconds that the series takes, about.
    """
    for _ in range(3):
        function()
    wait(device)
    host = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        host.append(time.perf_counter() - start)
        wait(device)
    one = time.perf_counter() - start
    num = min(1000, max(3, round(least / one)))
    start = time.perf_counter()
    for _ in range(num):
        function()
    wait(device)
    return (time.perf_counter() - start) / num, statistics.median(host)


def traced(
    function: Callable[[], Any], device: torch.device, path: Path
) -> dict[str, Any]:
    """Kernels, waits and the busy share of the device in a call, by the profiler, which
    writes its trace to ``path``.gz.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    wait(device)
    with profile(activities=activities) as trace:
        start = time.perf_counter()
        for _ in range(TRACED_STEPS):
            function()
        wait(device)
        elapsed_us = 1e6 * (time.perf_counter() - start)
    trace.export_chrome_trace(str(path))
    with open(path, "rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()
    events = trace.events() or []
    kernels = kernels_of(trace)
    # the wait that ends the trace is none of the steps'
    waits = [e.name for e in events if e.name in WAITS]
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name[:70], []).append(kernel.time_range.elapsed_us())
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "operators": round(sum(e.name.startswith("aten::") for e in events) / 3),
        "kernels": round(len(kernels) / TRACED_STEPS),
        "host_waits": max(0, len(waits) - 1) / TRACED_STEPS if kernels else None,
        "busy_share_traced": round(busy_us(kernels) / elapsed_us, 3),
        "busy_ms": round(busy_us(kernels) / 1000 / TRACED_STEPS, 2),
        "longest_kernels_ms": {
            name: [round(sum(us) / 1000 / TRACED_STEPS, 3), len(us) // TRACED_STEPS]
            for name, us in longest
        },
    }


def busy_ms_a_call(function: Callable[[], Any]) -> float:
    """Milliseconds of a call in which the GPU computes."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED_STEPS):
            function()
        torch.cuda.synchronize()
    return busy_us(kernels_of(trace)) / 1000 / TRACED_STEPS


def kernels_of(trace: profile) -> list[Any]:
    """The events of a trace that ran on the GPU."""
    events = trace.events() or []
    return [event for event in events if event.device_type == DeviceType.CUDA]


def busy_us(kernels: list[Any]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, end = 0.0, float("-inf")
    for span in sorted((k.time_range for k in kernels), key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


# Streamed input


def measure_streamed(
    options: argparse.Namespace, results: Results, clock: Clock
) -> None:
    """JPEG files of ImageNet's size: what the cores deliver, and what training makes of
    it.
    """
    files = sorted((options.bundle / "jpegs").glob("*")) if options.bundle else []
    if not files:
        results.add("streamed", skipped="no JPEG files in the bundle")
        return
    device = torch.device(options.device)
    case = SMALL_CASES[0] if options.small else StepCase("imagenet")
    training = Training(case, device)
    with tempfile.TemporaryDirectory() as folder:
        streams = stream_of(training.config, files, case.batch, device, folder)
        with contextlib.closing(streams) as batches:
            least = 1.0 if options.small else 8.0
            alone = images_per_s(lambda step: batches(step), case.batch, device, least)

            def train(step: int) -> None:
                take_step(
                    unified_objective,
                    training.state,
                    batches(step),
                    training.config,
                    1e-3,
                )

            with_training = images_per_s(train, case.batch, device, least, first=10_000)
        resident_s, _ = seconds_a_call(training.step, device, least / 4)
    in_memory = case.batch / resident_s
    results.add(
        "streamed",
        images_per_s_decoded=round(alone),
        images_per_s_trained=round(with_training),
        images_per_s_in_memory=round(in_memory),
        share_of_in_memory=round(with_training / in_memory, 3),
        threads=available_cpus(),
        **decoded_on_device(files, device),
    )


def stream_of(
    config: Config, files: list[Path], batch: int, device: torch.device, folder: str
) -> Any:
    """Batches of a streamed set that has these files again and again."""
    num = max(4 * batch, len(files))
    images = InMemory([str(file) for file in files]).take(np.arange(num) % len(files))
    half = num // 2
    threads = available_cpus()
    bad = BadRows([str(row) for row in range(num)], images, 1.0, Storage(folder))
    train = StreamSet(
        StreamedImages.of(config, images, bad),
        labeled=np.arange(half),
        labels=torch.zeros(half, dtype=torch.int64),
        unlabeled=np.arange(half, num),
        num_known=5,
        num_novel=5,
        crop=partial(crop_local, threads=threads),
        device=device,
    )
    plan = make_plan(0, config.data.batch_sampling, batch, half, num - half)
    return train.batches(config, plan, 0, 1, last=1_000_000)


def images_per_s(
    function: Callable[[int], Any],
    batch: int,
    device: torch.device,
    least: float,
    first: int = 0,
) -> float:
    """Rate of ``function(step)`` for about ``least`` seconds, after two steps."""
    for step in (first, first + 1):
        function(step)
    wait(device)
    start, step = time.perf_counter(), first + 2
    while time.perf_counter() - start < least:
        function(step)
        step += 1
    wait(device)
    return (step - first - 2) * batch / (time.perf_counter() - start)


def decoded_on_device(files: list[Path], device: torch.device) -> dict[str, Any]:
    """What torchvision's decoder on the GPU would give, images/s, or why not."""
    if device.type != "cuda":
        return {}
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    encoded = [read_file(str(file)) for file in files] * (256 // len(files) + 1)

    def decode() -> None:
        decode_jpeg(encoded[:256], mode=ImageReadMode.RGB, device=device)

    try:
        seconds, _ = seconds_a_call(decode, device, 2.0)
    except RuntimeError as error:
        return {"gpu_decoder": str(error)[:200]}
    return {"images_per_s_gpu_decoder": round(256 / seconds)}


# Whole runs


def measure_discover(
    options: argparse.Namespace, results: Results, clock: Clock
) -> None:
    """The paper's recipe on CIFAR10-JPEG with the epochs that fit, in the fastest way
    that was measured; in the next one where that fails.
    """
    if options.small:
        words = ["--preset", "digits", *epochs(1, 1, options)]
        whole_run("discover", words, options, results, clock)
        return
    for rate, compiled, recorded in ways(results) or [(10_000.0, False, False)]:
        words = ["--preset", "cifar10", "--data", f"parquet:{options.bundle}/cifar10"]
        words += ["--known-classes", "first:5", "--device", "cuda"]
        words += ["--compute.cuda-graph", "true"] if recorded else []
        words += ["--compute.compile", "true"] if compiled else []
        if options.epochs:
            pretrain, discover = map(int, options.epochs.split(","))
        else:
            seconds = clock.left - START_AND_END_S - COMPILE_S * compiled
            # an epoch of discovery has 50,000 images and one of pretraining 25,000
            discover = max(2, int(0.9 * seconds * rate / (50_000 + 0.4 * 25_000)))
            pretrain = max(1, round(0.4 * discover))
        words += epochs(pretrain, discover, options)
        if whole_run("discover", words, options, results, clock) == 0:
            return


def ways(results: Results) -> list[tuple[float, bool, bool]]:
    """Images/s of the paper's step with CIFAR10's sizes, compiled or not, recorded or
    not; the fastest first.
    """
    found = [
        (float(row["images_per_s"]), row["compile"], row["cuda_graph"])
        for row in results.rows
        if row["part"] == "steps"
        and (row.get("preset"), row.get("recipe")) == ("cifar10", "paper")
        and row.get("precision") == "bf16"
        and "images_per_s" in row
    ]
    return sorted(found, reverse=True)


def epochs(pretrain: int, discover: int, options: argparse.Namespace) -> list[str]:
    """Options of a run with so many epochs; a tenth, at most ten, warm up."""
    warmup = str(min(10, max(1, discover // 10)))
    return [
        *("--pretrain.epochs", str(pretrain), "--pretrain.warmup-epochs", warmup),
        *("--discover.epochs", str(discover), "--discover.warmup-epochs", warmup),
        *("--seed", str(options.seed)),
    ]


def measure_frozen(options: argparse.Namespace, results: Results, clock: Clock) -> None:
    """CIFAR10-JPEG by features of a pretrained encoder, with the defaults."""
    if options.bundle is None or options.small:
        results.add("frozen", skipped="small form" if options.small else "no bundle")
        return
    weights = next((options.bundle / "encoders").glob("*.safetensors"))
    words = ["--data", f"parquet:{options.bundle}/cifar10", "--known-classes"]
    words += ["first:5", "--weights", str(weights), "--device", "cuda"]
    words += ["--model.encoder", f"timm:{weights.stem}", "--num-novel", "5"]
    whole_run("frozen", words, options, results, clock)


def whole_run(
    part: str,
    words: list[str],
    options: argparse.Namespace,
    results: Results,
    clock: Clock,
) -> int | str:
    """Run ``uno discover`` with these words; keep its metrics and its lines.

    Returns its exit code, or "timeout".
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "pipelines", "discover", "--workers", "0"]
        command += [*words, "--output", str(output), "--train.log-every", "50"]
        begun = time.monotonic()
        with open(options.out / f"{part}.log", "w", encoding="utf-8") as log:
            code = run_until(command, clock.left, log)
        row: dict[str, Any] = {
            "command": " ".join(["uno", *command[3:]]),
            "exit_code": code,
            "seconds": round(time.monotonic() - begun, 1),
            **run_facts(output),
        }
        for name in ("metrics.json", "metrics.jsonl"):
            if (output / name).exists():
                shutil.copy(output / name, options.out / f"{part}-{name}")
    results.add(part, **row)
    return code


def run_facts(output: Path) -> dict[str, Any]:
    """Of a run, finished or cut: accuracy, and images/s of each phase's epochs."""
    found: dict[str, Any] = {}
    lines = read_journal(Storage(str(output)))
    for phase in ("pretrain", "discover"):
        epochs = [x for x in lines if x["phase"] == phase and x["event"] == "epoch"]
        if epochs:
            rates = statistics.median([x["images_per_s"] for x in epochs])
            found[phase] = {
                "epochs": epochs[-1]["epoch"],
                "of": epochs[-1]["epochs"],
                "images_per_s": round(rates),
                "loss": round(epochs[-1]["loss"], 4),
            }
    if (output / "metrics.json").exists():
        metrics = json.loads((output / "metrics.json").read_text())
        found["accuracy"] = {
            key: value
            for key, value in metrics.items()
            if isinstance(value, float) and "acc" in key
        }
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """The steps, a line each, then the other results."""
    print("\ncase, images/s, step ms, host ms, outside encoder, kernels, waits, GB")
    for row in rows:
        if row["part"] == "steps" and "case" in row:
            names = ["images_per_s", "step_ms", "host_ms", "share_outside_encoder"]
            names += ["kernels", "host_waits", "peak_memory_gb"]
            values = [str(row.get(name, "-")) for name in names]
            print(f"{row['case']:40} {' '.join(f'{v:>9}' for v in values)}")
            print(f"    {row.get('parts_busy_ms', row.get('error', ''))}")
    for row in rows:
        if row["part"] not in ("steps", "machine"):
            print(json.dumps(row)[:1500])


if __name__ == "__main__":
    main()

"""What does it cost a run on cached features to check that they are still those of its
images and encoder?

    python -m benchmarks.probe --encoders torchvision:resnet18 torchvision:resnet50 torchvision:vit_b_16

prints one JSON row for each encoder, with random weights on ``--limit`` digits of
``--size`` px: one run fills the cache, ``--repeats`` of other seeds use it. Medians:
``probe_s``, in which rows are encoded again, ``compare_s``, in which times and contents
of images are compared, ``run_s``, of the whole command. ``share`` is (probe_s +
compare_s) / run_s, of a run as short as this one.
"""  # noqa: E501

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.measure import environment
from pipelines import cli
from uno.config import Config, override
from uno.data import features, snapshot
from uno.encoder import build_encoder


def timed(
    patch: pytest.MonkeyPatch, module: Any, name: str, seconds: list[float]
) -> None:
    """Note how long each call of that function takes."""
    function: Callable[..., Any] = getattr(module, name)

    def measured(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    patch.setattr(module, name, measured)


def row(encoder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of one encoder."""
    probe, compare, runs = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        torch.manual_seed(0)
        model = build_encoder(override(Config(), {"model.encoder": encoder}).model)
        safetensors.torch.save_file(model.state_dict(), folder / "weights.safetensors")
        timed(patch, features, "_probe", probe)
        timed(patch, snapshot, "compare", compare)
        for seed in range(args.repeats + 1):
            words = [
                "discover",
                "--data",
                "digits",
                "--data.limit",
                args.limit,
                "--model.encoder",
                encoder,
                "--model.finetune",
                "none",
                "--weights",
                folder / "weights.safetensors",
                "--image-size",
                args.size,
                "--augment.num-cached-views",
                2,
                "--compute.cache",
                folder / "cache",
                "--batch-size",
                64,
                "--pretrain.epochs",
                args.epochs,
                "--discover.epochs",
                args.epochs,
                "--seed",
                seed,
                "--compute.threads",
                args.threads,
                "--output",
                folder / f"run{seed}",
            ]
            start, said = time.perf_counter(), StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                assert cli.main([str(word) for word in words]) == 0, said.getvalue()
            if seed:  # the first has no cache
                runs.append(time.perf_counter() - start)
    found = {"probe_s": probe, "compare_s": compare, "run_s": runs}
    result = {key: round(statistics.median(values), 4) for key, values in found.items()}
    result["share"] = round(
        (result["probe_s"] + result["compare_s"]) / result["run_s"], 4
    )
    options = {
        "rows": args.limit,
        "size": args.size,
        "repeats": args.repeats,
        "epochs": args.epochs,
        "threads": args.threads,
    }
    return {
        "benchmark": "probe",
        "encoder": encoder,
        **options,
        **result,
        **environment(),
    }


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = ["torchvision:resnet18", "torchvision:resnet50", "torchvision:vit_b_16"]
    parser.add_argument("--encoders", nargs="+", default=default)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2, help="of each phase")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    for encoder in args.encoders:
        print(json.dumps(row(encoder, args)), flush=True)


if __name__ == "__main__":
    main()

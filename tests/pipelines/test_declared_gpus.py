"""Commands on a cluster with GPUs, of which there are none: Ray counts them, and the CPU computes."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from pipelines import cli
from tests.pipelines.raylets import Command, head
from tests.pipelines.small import ROOT, SMALL
from tests.uno.models import write_digits, write_model
from uno.data.sources import read_digits

HOOK = "tests.pipelines.test_declared_gpus.compute_on_the_cpu"
SETUP = {"worker_process_setup_hook": HOOK, "env_vars": {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}}


def compute_on_the_cpu() -> None:
    """In every process of a worker: what goes to a GPU stays on the CPU, and NCCL is gloo."""
    from ray.air._internal.device_manager import CUDATorchDeviceManager

    CUDATorchDeviceManager.get_devices = lambda self: [torch.device("cpu")]

    def on_cpu(move):
        def to(self, *args, **kwargs):
            args = ["cpu" if _is_cuda(value) else value for value in args]
            return move(self, *args, **{k: "cpu" if _is_cuda(v) else v for k, v in kwargs.items()})

        return to

    for kind in (torch.nn.Module, torch.Tensor):
        kind.to = on_cpu(kind.to)
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **kwargs: start("gloo", **kwargs)


def _is_cuda(value) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_and_predictions_on_gpus_that_only_workers_have(tmp_path):
    """From frozen features to the report, then predictions by a command that finds the cluster itself. Kills:
    a call that Ray refuses where there are GPUs, a device that the driver must have after its workers have
    used theirs, chunks of other rows, a variable that both the job and the command set.
    """
    write_model(tmp_path / "model")
    write_digits(tmp_path / "in", read_digits().images[:900])
    run, weights = tmp_path / "run", tmp_path / "model" / "model" / "encoder.safetensors"
    discover = [
        "pipelines",
        "discover",
        *SMALL,
        "--model.finetune",
        "none",
        "--augment.small.num-views",
        "0",
    ]
    discover += ["--discover.epochs", "1", "--weights", str(weights), "--output", str(run)]
    predict = [str(run), "--data", str(tmp_path / "in"), "--compute.threads", "1", "--output"]
    on_gpus = ["--workers", "1", "--device", "cuda"]
    with head(3, gpus=1) as raylets:
        env = raylets.env | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": SETUP})}
        trained = Command([*discover, *on_gpus], env, tmp_path / "discover.log")
        assert trained.end() == 0, trained.lines
        del env["RAY_ADDRESS"]
        words = ["pipelines", "predict", *predict, str(tmp_path / "there"), *on_gpus]
        predicted = Command(words, env, tmp_path / "predict.log")
        assert predicted.end() == 0, predicted.lines
        assert predicted.says(f"requesting 1 worker from the Ray cluster at {raylets.address}")
    assert (run / "report.html").exists() and (run / "metrics.json").exists()
    assert cli.main(["predict", *predict, str(tmp_path / "here")]) == 0
    here, there = (pq.read_table(tmp_path / name / "predictions.parquet") for name in ("here", "there"))
    assert there["class_name"].equals(here["class_name"]) and len(there) == 900

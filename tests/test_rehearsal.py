"""The commands of the pages about clusters, submitted to a simulated cluster.

Two machines are network namespaces where the tests run as root, otherwise nodes at one
address. The head has neither a CPU nor a GPU for work; the GPUs of the other nodes are
declared, and the CPU computes. S3 is moto, 5 ms away, by URIs with options. The cluster
takes no job without its token, and each object store has 100 MiB. Data, places and
sizes of a documented command are replaced. ``--working-dir`` is left out, because nodes
of one machine overwrite each other's.
"""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import cli
from tests.pages import page
from tests.pipelines.declared_gpus import SETUP, compute_on_the_cpu
from tests.pipelines.raylets import DASHBOARD, Command, Raylets, head
from tests.pipelines.small import RAY, ROOT, wait_for
from tests.s3 import BUCKET, CREDENTIALS, store
from tests.uno.data.builders import write_hf, write_images
from tests.uno.data.test_tar import write_shards
from tests.uno.models import write_model
from uno.data.files import Storage, join
from uno.data.sources import imagenet_wnids
from uno.results.predictions import read_columns
from uno.runs import DISCOVER
from uno.runs.checkpoint import checkpoint_steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.release,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
SECONDS = 400.0
MARKS = "UNO_REHEARSAL_MARKS"
SUBMISSION = "docs/deploy/ray.md"
AFTER_TRAINING = "docs/guides/after-training.md"
URL = f"http://localhost:{DASHBOARD}"
ON_GPUS = ["--workers", "2", "--device", "cuda"]
SIZES = [
    *("--compute.threads", "1", "--model.encoder", "resnet_small"),
    *("--model.width", "4", "--model.num-heads", "2", "--model.hidden-dim", "16"),
    *("--model.overcluster-factor", "2", "--model.projection-dim", "8"),
    *("--train.batch-size", "32", "--train.log-every", "4"),
    *("--pretrain.epochs", "1", "--pretrain.warmup-epochs", "0"),
    *("--discover.epochs", "2", "--discover.warmup-epochs", "0"),
]


def printed(name: str, start: str, places: dict[str, str]) -> list[str]:
    """Return the words after ``uno`` or ``python -m pipelines`` of a page's first
    command that starts with ``start``, with the texts of ``places`` replaced.
    """
    text = re.sub(r"\\\n|(?<=--workers 4)\n", " ", page(name))
    found, *_ = re.findall(
        rf"(?:^uno|-m pipelines) +({re.escape(start)}\b.*)$", text, re.M
    )
    for old, new in places.items():
        assert old in found, f"{name}: {found!r} has no {old!r}"
        found = found.replace(old, new)
    return shlex.split(found, comments=True)


def predict_slowly() -> None:
    """Let a worker mark that it predicts, and wait before it does: a process hook."""
    compute_on_the_cpu()
    from pipelines.predict import Scorer

    usual = Scorer.__call__

    def score(self: Scorer, *args: Any) -> Any:
        Path(os.environ[MARKS], "prediction").touch()
        time.sleep(3)
        return usual(self, *args)

    Scorer.__call__ = score  # type: ignore[method-assign]


class Cluster:
    """A simulated cluster to which commands are submitted.

    Attributes:
        raylets: The nodes.
        folder: Local files that all nodes see.
        root: URI of the bucket, with the options that lead there.
    """

    def __init__(self, raylets: Raylets, folder: Path, root: str) -> None:
        self.raylets, self.folder, self.root = raylets, folder, root
        self._env = raylets.env | {"RAY_ADDRESS": ""}  # it would win over --address
        self._num_jobs = 0

    def uri(self, name: str) -> str:
        return join(self.root, name)

    def submit(
        self,
        words: list[str],
        hook: str = SETUP["worker_process_setup_hook"],
        **variables: str,
    ) -> Command:
        """Start ``ray job submit -- python -m pipelines WORDS`` as the page has it."""
        options = json.loads(
            re.search(r"--runtime-env-json '(.*?)'", page(SUBMISSION))[1]
        )
        variables |= options["env_vars"] | SETUP["env_vars"]
        environment = {"env_vars": variables, "worker_process_setup_hook": hook}
        job = ["job", "submit", "--address", URL]
        job += ["--runtime-env-json", json.dumps(environment)]
        job += ["--", sys.executable, "-m", "pipelines", *words]
        return Command(["ray.scripts.scripts", *job], self._env, self._new_log())

    def type(self, words: list[str]) -> Command:
        """Start ``uno WORDS`` in a shell of the head, where it finds the cluster."""
        setup = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": SETUP})}
        return Command(["pipelines", *words], self._env | setup, self._new_log())

    def run(self, words: list[str], says: str) -> Command:
        """Submit a command and wait until it ends with 0 and has said something."""
        return finish(self.submit(words), says)

    def refusal(self, **variables: str) -> str:
        """Return why a job is refused, "" if it is not."""
        argv = [RAY, "job", "submit", "--address", URL, "--", "true"]
        env = self._env | variables
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    def _new_log(self) -> Path:
        self._num_jobs += 1
        return self.folder / f"{self._num_jobs}.log"


def finish(command: Command, says: str) -> Command:
    code, text = command.end(SECONDS), "\n".join(command.lines)
    assert code == 0 and says in text, text[-6000:]
    return command


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A head, two nodes with a GPU each, and an empty bucket."""
    folder = tmp_path_factory.mktemp("cluster")
    env = {name: value for name, value in CREDENTIALS.items() if name != "AWS_REGION"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env | {"PYTHONPATH": str(ROOT)}).items():
            patch.setenv(name, value)
        with (
            head(0, takes_jobs=True) as raylets,
            store(5.0, raylets.host) as (s3, _),
        ):
            address = s3["AWS_ENDPOINT_URL"].removeprefix("http://")
            options = f"region=us-east-1&scheme=http&endpoint_override={address}"
            bucket = f"s3://{BUCKET}?{options}"
            storage = Storage(f"{bucket}&allow_bucket_creation=true")
            storage._fs.create_dir(BUCKET)
            hidden = folder / "hidden"
            hidden.mkdir()
            raylets.join(2, hidden, gpus=1)
            raylets.join(2, gpus=1)
            cluster = Cluster(raylets, folder, bucket)
            wait_for(lambda: not cluster.refusal())
            yield cluster


@pytest.fixture(scope="module")
def imagenet(cluster) -> Path:
    """ImageNet's layout: five known classes and five of split A, 24 images each."""
    root, novel = cluster.folder / "imagenet", imagenet_wnids("novel_30_A")[:5]
    names = [*(f"n{number:08d}" for number in range(5)), *novel]
    for split, images in (("train", 20), ("val", 4)):
        files = [f"{name}/{number}.png" for name in names for number in range(images)]
        write_images(root / split, files, size=16)
    return root


@pytest.fixture(scope="module")
def packed(cluster, imagenet) -> str:
    """URI of the packed images, which ``uno data pack`` wrote on workers."""
    target = cluster.uri("imagenet")
    places = {"imagenet:DIR": f"imagenet:{imagenet}", "s3://BUCKET/imagenet": target}
    words = printed("docs/deploy/aws.md", "data pack", places)
    cluster.run([*words, "--workers", "2"], "240 images, 240 packed")
    return target


def streamed_discovery(cluster: Cluster, packed: str, run: str) -> list[str]:
    places = {
        "s3://BUCKET/imagenet ": f"{packed} ",
        "--workers 4": "--workers 2",
        "s3://BUCKET/runs/imagenet-A": run,
    }
    words = printed(SUBMISSION, "discover --preset imagenet --data parquet", places)
    return [*words, "--data.loading", "streaming", "--image-size", "16", *SIZES]


def prediction(cluster: Cluster, run: str, packed: str) -> list[str]:
    places = {
        "runs/demo": run,
        "folder:DIR": f"parquet:{packed}",
        "--output predictions": f"--output {join(run, 'of-imagenet')}",
    }
    return [*printed(AFTER_TRAINING, "predict", places), *ON_GPUS]


@pytest.fixture(scope="module")
def run(cluster, packed) -> str:
    """URI of a finished run that was streamed from Parquet on S3."""
    run = cluster.uri("run")
    cluster.run(streamed_discovery(cluster, packed, run), "results in ")
    return run


def test_a_job_without_the_token_is_refused(cluster):
    assert "AuthenticationError" in cluster.refusal(RAY_AUTH_MODE="disabled")


def test_a_run_on_s3_is_reported_again(cluster, run):
    words = printed(AFTER_TRAINING, "report", {"runs/demo": run})
    cluster.run(words, "report: ")


def test_predictions_outlive_the_loss_of_a_node(cluster, run, packed):
    job = cluster.submit(
        prediction(cluster, run, packed),
        hook=f"{__name__}.predict_slowly",
        **{MARKS: str(cluster.folder)},
    )
    wait_for(lambda: job.says("") and (cluster.folder / "prediction").exists(), SECONDS)
    cluster.raylets.lose()
    cluster.raylets.join(2, gpus=1)
    finish(job, "240 images, 240 ok")


def test_shards_are_streamed(cluster, imagenet):
    shards = cluster.folder / "tars"
    write_shards(imagenet / "train", shards, 50)
    write_shards(imagenet / "val", shards, 50, "test")
    source = Storage(cluster.uri("tars"))
    for shard in shards.iterdir():
        source.write(shard.name, shard.read_bytes())
    places = {
        "imagenet:DIR --": f"tar:{cluster.uri('tars')} --",
        "--workers 8": "--workers 2",
    }
    start = "discover --preset imagenet --data imagenet:DIR"
    words = printed("docs/guides/large-data.md", start, places)
    own = ["--known-classes", "first:5", "--image-size", "16", "--device", "cuda"]
    output = ["--output", cluster.uri("tar-run")]
    cluster.run([*words, *own, *SIZES, *output], "results in ")


def test_a_run_in_memory_is_trained_once_and_evaluated_again(cluster):
    data, run = cluster.folder / "data", str(cluster.folder / "cifar100-20")
    write_hf(data, [f"class {i}" for i in range(100)], train=200, test=200)
    places = {
        "cifar100:/runs/data": f"parquet:{data}",
        "--workers 4": "--workers 2",
        "/runs/cifar100-20": run,
    }
    words = printed("deploy/rayjob.yaml", "discover", places)
    words += ["--known-classes", "first:80", *SIZES]
    cluster.run(words, "results in ")
    cluster.run(words, "nothing is trained again")
    words = printed(AFTER_TRAINING, "evaluate", {"runs/demo": run})
    cluster.run([*words, *ON_GPUS], "Task-aware")


def test_features_of_a_frozen_encoder_give_the_predictions_of_one_process(cluster):
    photos, model = cluster.folder / "photos", cluster.folder / "model"
    names = [f"known/{name}/{number}.png" for name in "abc" for number in range(20)]
    names += [f"new/{number}.png" for number in range(60)]
    write_images(photos, names, size=16)
    write_model(model)
    run = cluster.uri("photos")
    places = {
        "photos/known": str(photos / "known"),
        "photos/new": str(photos / "new"),
        "12": "3",
        "--weights pretrained": f"--weights {model}/model/encoder.safetensors",
        "runs/photos": run,
    }
    start = "discover --labeled photos/known --unlabeled photos/new --num-novel 12"
    words = printed("docs/guides/own-images.md", start, places)
    words += ["--model.encoder", "resnet_small", "--model.width", "4"]
    words += ["--model.finetune", "none", "--image-size", "8"]
    words += ["--compute.threads", "1", "--compute.cache", cluster.uri("cache")]
    cluster.run([*words, *ON_GPUS], "next: open ")
    assert Storage(run).exists("report.html") and Storage(run).exists("metrics.json")

    there, here = cluster.uri("predictions"), str(cluster.folder / "predictions")
    places = {
        "runs/demo": run,
        "DIR": str(photos / "new"),
        "--output predictions": f"--output {there}",
    }
    words = printed(AFTER_TRAINING, "predict", places)
    job = finish(cluster.type([*words, *ON_GPUS]), "60 images, 60 ok")
    address = cluster.raylets.address
    assert job.says(f"requesting 2 workers from the Ray cluster at {address}")
    assert cli.main([here if word == there else word for word in words]) == 0
    tables = [read_columns(Storage(each), ["class_name"]) for each in (there, here)]
    assert tables[0].equals(tables[1]) and len(tables[0]) == 60


def test_a_sweep_and_a_run_of_its_best_trial(cluster):
    places = {"--trials 16": "--trials 2", "runs/tune": cluster.uri("tune")}
    words = printed("docs/guides/tune.md", "tune", places)
    own = ["--data.limit", "200", "--folds", "1", "--device", "cuda"]
    cluster.run([*words, *own, *SIZES], "2 trials, 0 failed")
    best = cluster.folder / "best.yaml"
    best.write_bytes(Storage(cluster.uri("tune")).read("best.yaml"))
    places = {"runs/tune/best.yaml": str(best)}
    words = printed("docs/guides/tune.md", "discover", places)
    cluster.run([*words, *ON_GPUS, "--output", cluster.uri("best")], "results in ")


def test_the_number_of_classes_is_estimated(cluster, packed):
    places = {"parquet:DIR": f"parquet:{packed}"}
    start = "estimate-classes --data parquet:DIR"
    words = printed("docs/guides/number-of-classes.md", start, places)
    words += ["--num-splits", "2", "--max-novel", "3", "--image-size", "16"]
    words += ["--output", cluster.uri("estimate"), *SIZES, *ON_GPUS]
    cluster.run(words, "estimated new classes")


def test_a_hung_rank_is_replaced(cluster, packed):
    """Ray asks for the health of a rank every 15 s in place of ten minutes."""
    run = Storage(cluster.uri("hung"))
    words = streamed_discovery(cluster, packed, cluster.uri("hung"))
    job = cluster.submit(
        [*words, "--discover.epochs", "10"],
        RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S="15",
    )
    wait_for(lambda: job.says("") and bool(checkpoint_steps(run, DISCOVER)), SECONDS)
    rank, *_ = cluster.raylets.processes_of("ray::RayTrainWorker")
    os.kill(rank, signal.SIGSTOP)
    finish(job, "new ones resume")

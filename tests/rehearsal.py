"""The commands that the pages print for a cluster, from submission to the report, on
one that is not there.

    python -m tests.rehearsal                          # all scenes, or those that are named:
    python -m tests.rehearsal streamed losses

Two machines are network namespaces (root; else nodes at one address). The head has
neither a CPU nor a GPU for work; the GPUs of the others are declared, and the CPU
computes. S3 is moto, 5 ms away, by URIs with options. Tokens are on, and each object
store has 100 MiB. Data, places and sizes of a printed command are replaced, and
--working-dir is left out: nodes of one machine overwrite each other's. The table has a
row for each command: what was simulated, and how it ended. Of training it is said for
which share of the group's time the rank that waited most was idle because rank 0 came
later to a collective, or ended later, and how long the command went on without ranks.
"""  # noqa: E501

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from pipelines import cli
from tests.pages import page
from tests.pipelines.declared_gpus import SETUP, compute_on_the_cpu
from tests.pipelines.raylets import DASHBOARD, Command, Raylets, head
from tests.pipelines.small import RAY, ROOT, wait_for
from tests.processes import running
from tests.s3 import BUCKET, CREDENTIALS, store
from tests.uno.data.builders import write_hf, write_images
from tests.uno.data.test_tar import write_shards
from tests.uno.models import write_model
from uno.data.files import Storage, join
from uno.data.sources import imagenet_wnids
from uno.results.predictions import read_columns
from uno.runs import DISCOVER
from uno.runs.checkpoint import checkpoint_steps

LATENCY_MS, SECONDS = 5.0, 400.0
HOLD = "UNO_REHEARSAL_HOLD"
SUBMISSION, URL = "docs/deploy/ray.md", f"http://localhost:{DASHBOARD}"
RESNET18 = [
    "--compute.threads",
    "1",
    "--model.width",
    "4",
    "--model.num-heads",
    "2",
    "--model.hidden-dim",
    "16",
    "--model.overcluster-factor",
    "2",
    "--model.projection-dim",
    "8",
    "--train.batch-size",
    "32",
    "--train.log-every",
    "4",
    "--pretrain.epochs",
    "1",
    "--discover.epochs",
    "2",
    "--pretrain.warmup-epochs",
    "0",
    "--discover.warmup-epochs",
    "0",
]
SIZES = ["--model.encoder", "resnet_small", *RESNET18]
LONG = ["--discover.epochs", "10"]
ON_GPUS = ["--workers", "2", "--device", "cuda"]


class Row(NamedTuple):
    """A command of a scene, and how it ended."""

    scene: str
    command: str
    simulated: str
    outcome: str


def printed(name: str, start: str, places: dict[str, str]) -> list[str]:
    """The words after ``uno`` or ``python -m pipelines`` of the first command of a file
    that starts with ``start``, each text of ``places`` replaced.
    """
    text = re.sub(r"\\\n|(?<=--workers 4)\n", " ", page(name))
    found, *_ = re.findall(
        rf"(?:^uno|-m pipelines) +({re.escape(start)}\b.*)$", text, re.M
    )
    for old, new in places.items():
        assert old in found, f"{name}: {found!r} has no {old!r}"
        found = found.replace(old, new)
    return shlex.split(found, comments=True)


def compute_and_count() -> None:
    """In every process of a worker: it computes on the CPU, and a rank that ends writes
    when it came to each collective of ``uno.distributed``, called by which function,
    and when it ended.
    """
    compute_on_the_cpu()
    import torch.distributed as dist

    from pipelines import train as ray_train

    came, train = list[tuple[float, str]](), ray_train.train_rank

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            caller, busy = sys._getframe(1), False
            while caller.f_back and caller.f_code.co_filename.endswith(
                "distributed.py"
            ):
                # it votes, and works
                busy = caller.f_code.co_name == "run_tasks" and bool(tensor.any())
                caller = caller.f_back
            came.append((time.monotonic(), "" if busy else caller.f_code.co_name))
            return function(tensor, *args, **kwargs)

        return call

    def trained(config: Any, loop: Any, rank: Any, storage: Any) -> Any:
        came[:] = [(time.monotonic(), "")]
        found = train(config, loop, rank, storage)
        times = json.dumps([*came, (time.monotonic(), "end")])
        Path(os.environ[HOLD], f"rank-{rank.rank}.times").write_text(times)
        return found

    dist.all_reduce, dist.all_gather = (
        counted(dist.all_reduce),
        counted(dist.all_gather),
    )
    ray_train.train_rank = trained


def idle(folder: Path, now: float) -> str:
    """Of what the ranks of the last group have written: the share of the time in which
    the rank that waited most was idle, where, and the seconds since the group ended.
    """
    files = sorted(folder.glob("rank-*.times"))
    ranks = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    if len(ranks) < 2:
        return ""
    first, *others = ranks
    total = first[-1][0] - first[0][0]
    shares = list[Counter[str]]()
    for rank in others:
        shares.append(Counter())
        for (at, _), (before, name) in zip(first, rank, strict=True):
            if name and at > before:
                shares[-1][name] += 100 * (at - before) / total
    most = max(shares, key=Counter.total)
    where = ", ".join(f"{name} {share:.1f}%" for name, share in most.most_common(4))
    waited = (
        f"ranks idle while rank 0 works: {most.total():.1f}% of {total:.1f} s ({where})"
    )
    return f"; {waited}; {now - first[-1][0]:.0f} s without ranks"


def compute_and_hold() -> None:
    """As :func:`compute_and_count`; and it waits where a scene wants a node to be lost:
    before training, the evaluation, and the first predictions.
    """
    compute_and_count()
    from pipelines import predict
    from pipelines import train as ray_train

    ray_train.train_rank = _held("start", ray_train.train_rank)
    ray_train.evaluate_run = _held("evaluation", ray_train.evaluate_run)  # type: ignore[assignment]
    predict.Scorer.__call__ = _held("prediction", predict.Scorer.__call__)  # type: ignore[method-assign]


def _held(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        held = Path(os.environ[HOLD], f"{name}.held")
        held.touch()
        wait_for(held.with_suffix(".released").exists, SECONDS)
        return function(*args, **kwargs)

    return call


class Rehearsal:
    """A cluster, to which commands are submitted; ``rows`` are those that have ended
    as they should.
    """

    def __init__(
        self, scene: str, raylets: Raylets, root: str, folder: Path, hidden: Path
    ) -> None:
        self.scene, self.rows, self.folder, self.raylets = (
            scene,
            list[Row](),
            folder,
            raylets,
        )
        self._root, self._hidden, self._jobs, self._others = root, hidden, 0, 0
        # it would win over URL
        self._since, self._env = time.monotonic(), raylets.env | {"RAY_ADDRESS": ""}

    def uri(self, name: str) -> str:
        """In the bucket, with the options that lead there."""
        return join(self._root, name)

    def join(self, number: int = 1) -> None:
        """Nodes with a GPU each; the first one is on a machine of its own."""
        for _ in range(number):
            self.raylets.join(2, None if self._others else self._hidden, gpus=1)
            self._others += 1

    def submit(self, words: list[str], hold: bool = False, **variables: str) -> Command:
        """``ray job submit -- python -m pipelines WORDS`` as the page has it, with
        environment ``variables``; ``hold``: its workers wait where
        :func:`compute_and_hold` says.
        """
        self._jobs, self._since = self._jobs + 1, time.monotonic()
        variables |= {**SETUP["env_vars"], HOLD: str(self.folder)}
        own = json.loads(re.search(r"--runtime-env-json '(.*?)'", page(SUBMISSION))[1])  # type: ignore[index]
        hook = compute_and_hold if hold else compute_and_count
        setup = {
            "env_vars": own["env_vars"] | variables,
            "worker_process_setup_hook": f"tests.rehearsal.{hook.__name__}",
        }
        job = [
            "job",
            "submit",
            "--address",
            URL,
            "--submission-id",
            f"uno-{self._jobs}",
        ]
        job += ["--runtime-env-json", json.dumps(setup)]
        argv = [
            "ray.scripts.scripts",
            *job,
            "--",
            sys.executable,
            "-m",
            "pipelines",
            *words,
        ]
        return Command(argv, self._env, self.folder / f"{self._jobs}.log")

    def type(self, words: list[str]) -> Command:
        """``uno WORDS`` in a shell of the head, where the command finds the cluster
        itself.
        """
        self._jobs, self._since = self._jobs + 1, time.monotonic()
        env = self._env | {
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": SETUP})
        }
        return Command(["pipelines", *words], env, self.folder / f"{self._jobs}.log")

    def stop(self) -> None:
        """``ray job stop`` of the job that was submitted last."""
        argv = [RAY, "job", "stop", "--address", URL, f"uno-{self._jobs}"]
        subprocess.run(argv, env=self._env, check=True, capture_output=True)

    def refusal(self, **variables: str) -> str:
        """Why the cluster takes no job of an environment with these ``variables``;
        nothing: it does.
        """
        argv = [RAY, "job", "submit", "--address", URL, "--", "true"]
        done = subprocess.run(
            argv, env=self._env | variables, capture_output=True, text=True
        )
        return done.stdout + done.stderr if done.returncode else ""

    def held(self, name: str) -> Callable[[], bool]:
        """Whether a worker waits there."""
        return (self.folder / f"{name}.held").exists

    def go_on(self) -> None:
        """What waits."""
        for held in self.folder.glob("*.held"):
            held.with_suffix(".released").touch()

    def lose(self, job: Command, reached: Callable[[], Any]) -> None:
        """A node, once the job has reached that."""
        wait_for(lambda: job.says("") and bool(reached()), SECONDS)
        self.raylets.lose()

    def ended(
        self,
        job: Command,
        words: list[str],
        simulated: str,
        says: str,
        outcome: str = "",
    ) -> None:
        """Wait for its end; AssertionError unless the code is 0 and it says that."""
        code = job.end(SECONDS)
        text = "\n".join(job.lines)
        assert code == 0 and says in text, (
            f"uno {words[0]}: exit {code}, without {says!r}"
        )
        named = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
        self.rows.append(
            Row(self.scene, " ".join(["uno", *named]), simulated, outcome or "finished")
        )
        now = time.monotonic()
        seconds = f"{now - self._since:.0f} s{idle(self.folder, now)}"
        print(*self.rows[-1], seconds, sep="; ", flush=True)

    def last_lines(self) -> str:
        """Of the job that was submitted last."""
        return (
            (self.folder / f"{self._jobs}.log").read_text()[-6000:]
            if self._jobs
            else ""
        )

    def run(
        self, simulated: str, words: list[str], says: str, outcome: str = ""
    ) -> None:
        """Submit, and wait for its end."""
        self.ended(self.submit(words), words, simulated, says, outcome)


@contextmanager
def simulated(scene: str) -> Iterator[Rehearsal]:
    """A head that has no CPU for work and takes no job without a token, two nodes with
    a GPU each unless the scene has them start late, and an empty bucket.
    """
    env = {name: value for name, value in CREDENTIALS.items() if name != "AWS_REGION"}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": str(ROOT),
    }
    with (
        tempfile.TemporaryDirectory(prefix="uno-") as folder,
        tempfile.TemporaryDirectory() as hidden,
        mock.patch.dict(os.environ, env),
        head(0, takes_jobs=True) as raylets,
        store(LATENCY_MS, raylets.host) as (s3, _),
    ):
        options = f"region=us-east-1&scheme=http&endpoint_override={s3['AWS_ENDPOINT_URL'].removeprefix('http://')}"
        Storage(f"s3://{BUCKET}?{options}&allow_bucket_creation=true")._fs.create_dir(
            BUCKET
        )
        cluster = Rehearsal(
            scene, raylets, f"s3://{BUCKET}?{options}", Path(folder), Path(hidden)
        )
        cluster.join(0 if SCENES[scene] in LATE else 2)
        wait_for(lambda: not cluster.refusal())
        assert "AuthenticationError" in cluster.refusal(RAY_AUTH_MODE="disabled")
        yield cluster


def imagenet(cluster: Rehearsal) -> Path:
    """ImageNet's layout: five known classes and five of split A, 24 images each."""
    root, novel = cluster.folder / "imagenet", imagenet_wnids("novel_30_A")[:5]
    names = [*(f"n{number:08d}" for number in range(5)), *novel]
    for split, images in (("train", 20), ("val", 4)):
        files = [f"{name}/{number}.png" for name in names for number in range(images)]
        write_images(root / split, files, size=16)
    return root


def packed(cluster: Rehearsal) -> str:
    """ImageNet's layout, packed on workers; where it is."""
    target = cluster.uri("imagenet")
    places = {
        "imagenet:DIR": f"imagenet:{imagenet(cluster)}",
        "s3://BUCKET/imagenet": target,
    }
    words = [*printed("docs/deploy/aws.md", "data pack", places), "--workers", "2"]
    cluster.run(
        "on workers, to S3 by a URI with options", words, "240 images, 240 packed"
    )
    return target


def discovery(cluster: Rehearsal, sizes: list[str]) -> list[str]:
    """The command that is submitted to train, as a stream."""
    places = {
        "s3://BUCKET/imagenet ": f"{cluster.uri('imagenet')} ",
        "--workers 4": "--workers 2",
        "s3://BUCKET/runs/imagenet-A": cluster.uri("run"),
    }
    words = printed(SUBMISSION, "discover --preset imagenet --data parquet", places)
    return [*words, "--data.loading", "streaming", "--image-size", "16", *sizes]


def streamed(cluster: Rehearsal) -> None:
    """Packed, discovered as a stream, predicted, shown."""
    source, run = packed(cluster), cluster.uri("run")
    cluster.run("streamed from Parquet on S3", discovery(cluster, SIZES), "results in ")
    places = {
        "runs/demo": run,
        "folder:DIR": f"parquet:{source}",
        "--output predictions": "--output " + cluster.uri("predictions"),
    }
    words = printed("docs/guides/after-training.md", "predict", places)
    cluster.run("Parquet on S3", [*words, *ON_GPUS], "240 images, 240 ok")
    words = printed("docs/guides/after-training.md", "report", {"runs/demo": run})
    cluster.run("a run on S3", words, "report: ")


def tar(cluster: Rehearsal) -> None:
    """Discovered as a stream of WebDataset's shards."""
    folder, shards = imagenet(cluster), cluster.folder / "tars"
    write_shards(folder / "train", shards, 50)
    write_shards(folder / "val", shards, 50, "test")
    source = Storage(cluster.uri("tars"))
    for shard in shards.iterdir():
        source.write(shard.name, shard.read_bytes())
    places = {
        "imagenet:DIR --": f"tar:{cluster.uri('tars')} --",
        "--workers 8": "--workers 2",
    }
    words = printed(
        "docs/guides/large-data.md",
        "discover --preset imagenet --data imagenet:DIR",
        places,
    )
    own = ["--known-classes", "first:5", "--image-size", "16", "--device", "cuda"]
    run = cluster.uri("tar-run")
    cluster.run(
        "streamed from tar on S3",
        [*words, *own, *SIZES, "--output", run],
        "results in ",
    )


def resident(cluster: Rehearsal) -> None:
    """Images in memory, on nodes that start late; the finished run is submitted
    again, and evaluated.
    """
    data = cluster.folder / "data"
    write_hf(data, [f"class {i}" for i in range(100)], train=200, test=200)
    run = str(cluster.folder / "cifar100-20")
    places = {
        "cifar100:/runs/data": f"parquet:{data}",
        "--workers 4": "--workers 2",
        "/runs/cifar100-20": run,
    }
    words = printed("deploy/rayjob.yaml", "discover", places)
    words += ["--known-classes", "first:80", *SIZES]
    job = cluster.submit(words)
    wait_for(lambda: job.says("waiting for 2 workers with"))
    cluster.join(2)
    cluster.ended(
        job,
        words,
        "in memory; nodes that start after the job",
        "results in ",
        "waited, finished",
    )
    cluster.run(
        "the same once more", words, "nothing is trained again", "nothing trained again"
    )
    words = printed("docs/guides/after-training.md", "evaluate", {"runs/demo": run})
    cluster.run("metrics again", [*words, *ON_GPUS], "Task-aware")


def frozen(cluster: Rehearsal) -> None:
    """On the features of a frozen encoder, which workers compute; predicted there
    and here.
    """
    photos, model, run = (
        cluster.folder / "photos",
        cluster.folder / "model",
        cluster.uri("photos"),
    )
    names = [f"known/{name}/{number}.png" for name in "abc" for number in range(20)]
    write_images(
        photos, [*names, *(f"new/{number}.png" for number in range(60))], size=16
    )
    write_model(model)
    weights = model / "model" / "encoder.safetensors"
    places = {
        "photos/known": str(photos / "known"),
        "photos/new": str(photos / "new"),
        "12": "3",
        "--weights pretrained": f"--weights {weights}",
        "runs/photos": run,
    }
    words = printed(
        "docs/guides/own-images.md",
        "discover --labeled photos/known --unlabeled photos/new --num-novel 12",
        places,
    )
    own = [
        "--model.encoder",
        "resnet_small",
        "--model.width",
        "4",
        "--model.finetune",
        "none",
        "--image-size",
        "8",
        "--discover.epochs",
        "2",
        "--compute.threads",
        "1",
        "--compute.cache",
        cluster.uri("cache"),
    ]
    report = f"next: open {shlex.quote(join(run, 'report.html'))}"
    cluster.run("features of a frozen encoder", [*words, *own, *ON_GPUS], report)
    assert Storage(run).exists("report.html") and Storage(run).exists("metrics.json")
    there, here = cluster.uri("predictions"), str(cluster.folder / "predictions")
    places = {
        "runs/demo": run,
        "DIR": str(photos / "new"),
        "--output predictions": f"--output {there}",
    }
    words = printed("docs/guides/after-training.md", "predict", places)
    job = cluster.type([*words, *ON_GPUS])
    what = "a folder, from a shell of the head"
    cluster.ended(
        job, words, what, "60 images, 60 ok", "equal to predictions without Ray"
    )
    assert job.says(
        f"requesting 2 workers from the Ray cluster at {cluster.raylets.address}"
    )
    assert cli.main([here if word == there else word for word in words]) == 0
    first, second = (
        read_columns(Storage(root), ["class_name"]) for root in (there, here)
    )
    assert first.equals(second) and len(first) == 60


def tune(cluster: Rehearsal) -> None:
    """A sweep, and a run with what it found."""
    places = {"--trials 16": "--trials 2", "runs/tune": cluster.uri("tune")}
    words = printed("docs/guides/tune.md", "tune", places)
    own = ["--data.limit", "200", "--folds", "1", "--device", "cuda"]
    cluster.run("two trials, a GPU each", [*words, *own, *SIZES], "2 trials, 0 failed")
    best = cluster.folder / "best.yaml"
    best.write_bytes(Storage(cluster.uri("tune")).read("best.yaml"))
    words = printed(
        "docs/guides/tune.md", "discover", {"runs/tune/best.yaml": str(best)}
    )
    cluster.run(
        "its best trial",
        [*words, *ON_GPUS, "--output", cluster.uri("best")],
        "results in ",
    )


def estimate(cluster: Rehearsal) -> None:
    """The number of classes, in tasks on GPUs."""
    places = {"parquet:DIR": f"parquet:{packed(cluster)}"}
    words = printed(
        "docs/guides/number-of-classes.md",
        "estimate-classes --data parquet:DIR",
        places,
    )
    own = [
        "--num-splits",
        "2",
        "--max-novel",
        "3",
        "--image-size",
        "16",
        "--output",
        cluster.uri("estimate"),
    ]
    cluster.run(
        "a GPU for each encoder",
        [*words, *own, *SIZES, *ON_GPUS],
        "estimated new classes",
    )


def stopped(cluster: Rehearsal) -> None:
    """``ray job stop`` in the middle, and the same submission again."""
    packed(cluster)
    words, run = discovery(cluster, [*SIZES, *LONG]), Storage(cluster.uri("run"))
    job = cluster.submit(words)
    wait_for(lambda: job.says("") and bool(checkpoint_steps(run, DISCOVER)), SECONDS)
    cluster.stop()
    cluster.ended(
        job, words, "`ray job stop`", "resume with the same command", "stopped, saved"
    )
    line = f"resuming at discover step {checkpoint_steps(run, DISCOVER)[-1]}"
    cluster.run("the same once more", words, line, "resumed at that step, finished")


def waits(job: Command, losses: int) -> bool:
    """Whether it waits for nodes after that many losses."""
    parts = "\n".join(job.lines).split("new ones resume")
    return (
        job.says("")
        and len(parts) > losses
        and "waiting for nodes: need 2 workers" in parts[-1]
    )


def losses(cluster: Rehearsal) -> None:
    """A node is lost at the start, in the middle, in the evaluation and in a
    prediction; a checkpoint has 90 MB, an upload in parts.
    """
    source = packed(cluster)
    words, run = discovery(cluster, [*RESNET18, *LONG]), Storage(cluster.uri("run"))
    job = cluster.submit(words, hold=True)
    trained = partial(checkpoint_steps, run, DISCOVER)
    for lost, reached in enumerate(
        (cluster.held("start"), trained, cluster.held("evaluation")), 1
    ):
        cluster.lose(job, reached)
        wait_for(partial(waits, job, lost), SECONDS)
        cluster.go_on()
        cluster.join()
    what = "a node lost at the start, one in the middle, one in the evaluation"
    cluster.ended(
        job,
        words,
        what,
        "results in ",
        "waited for a node each time, resumed, finished",
    )
    assert Storage(cluster.uri("run")).exists("metrics.json")
    places = {
        "runs/demo": run.uri,
        "folder:DIR": f"parquet:{source}",
        "--output predictions": "--output " + cluster.uri("predictions"),
    }
    words = [*printed("docs/guides/after-training.md", "predict", places), *ON_GPUS]
    job = cluster.submit(words, hold=True)
    cluster.lose(job, cluster.held("prediction"))
    cluster.go_on()
    cluster.ended(
        job,
        words,
        "a node lost",
        "240 images, 240 ok",
        "finished on the nodes that are left",
    )


def hung(cluster: Rehearsal) -> None:
    """A rank hangs, whose health Ray asks for every 15 s in place of ten minutes."""
    packed(cluster)
    words, run = discovery(cluster, [*SIZES, *LONG]), Storage(cluster.uri("run"))
    job = cluster.submit(words, RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S="15")
    wait_for(lambda: job.says("") and bool(checkpoint_steps(run, DISCOVER)), SECONDS)
    ranks = [
        pid for pid, each in running().items() if "RayTrainWorker" in each.words[0]
    ]
    os.kill(ranks[0], signal.SIGSTOP)
    cluster.ended(
        job, words, "a rank hangs (SIGSTOP)", "new ones resume", "restarted, finished"
    )


LATE = (resident,)  # scenes whose nodes start after the job
SCENES = {
    scene.__name__: scene
    for scene in (
        streamed,
        tar,
        resident,
        frozen,
        tune,
        estimate,
        stopped,
        losses,
        hung,
    )
}


def play(name: str) -> list[Row]:
    """The rows of a scene, on a cluster of its own. AssertionError: a command ended
    otherwise.
    """
    with simulated(name) as cluster:
        try:
            SCENES[name](cluster)
        except AssertionError:
            print(cluster.last_lines(), file=sys.stderr)
            raise
        return cluster.rows


def main() -> int:
    """Play scenes and print the table; 1 where one ended otherwise than it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], help="default: all")
    # the cluster ends with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows, failed = list[Row](), False
    for name in parser.parse_args().scenes or SCENES:
        try:
            rows += play(name)
        except AssertionError:
            failed = True
            traceback.print_exc()
            rows.append(Row(name, "", "", "FAILED"))
    print("| scene | command | simulated | outcome |\n|---|---|---|---|")
    shown = dict[tuple[str, ...], Row]()
    for row in rows:
        shown.setdefault(row[1:], row)  # several scenes pack
    for row in shown.values():
        print(f"| `{row.scene}` | `{row.command}` | {row.simulated} | {row.outcome} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""``uno.discover(...)``: the command as a function, with its settings as keyword
arguments.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import uno
from pipelines import backend, commands, options
from tests.pipelines.small import write_images
from tests.uno.small_run import SMALL
from uno.errors import ConfigError, Interrupted, StorageError
from uno.runs import DISCOVER
from uno.runs.checkpoint import checkpoint_steps
from uno.session import api
from uno.session.configure import configure, from_keywords

TINY = SMALL | {
    "preset": "digits",
    "pretrain.epochs": 1,
    "discover.epochs": 2,
    "compute.threads": 1,
}


def of_keywords(**settings: Any) -> dict[str, Any]:
    """The resolved configuration, flat."""
    config = configure(from_keywords(settings))
    return uno.config.flatten(uno.config.to_dict(config))


@pytest.mark.parametrize(
    ("settings", "argv"),
    [
        (
            {"data": "digits", "batch_size": 64, "seed": 3},
            "--data digits --batch-size 64 --seed 3",
        ),
        (
            {"labeled": Path("a"), "unlabeled": "b", "num_novel": np.int64(4)},
            "--labeled a --unlabeled b --num-novel 4",
        ),
        (
            {
                "objective.epsilon": 0.1,
                "objective": {"sinkhorn_iters": 5},
                "model": {"num_heads": 2},
            },
            "--objective.epsilon 0.1 --objective.sinkhorn-iters 5 --model.num-heads 2",
        ),
        (
            {
                "data": {"source": "folder:x"},
                "known_classes": ["0", "1"],
                "max_steps": None,
            },
            "--data folder:x --known-classes 0,1 --max-steps None",
        ),
        ({"image_size": 12, "data": "digits"}, "--data digits --image-size 12"),
        (
            {
                "preset": "cifar10",
                "data": "parquet:d",
                "recipe": "v2",
                "augment": {"large": {"flip": 0.0}},
            },
            "--preset cifar10 --data parquet:d --recipe v2 --augment.large.flip 0",
        ),
    ],
)
def test_keywords_are_the_command_line(settings, argv):
    """The same configuration, run directory included. Kills: other defaults, another
    precedence.
    """
    line = options.parse(argv.split(), commands.DISCOVER).config
    assert configure(from_keywords(settings), choose_method=True) == line


def test_keywords_win_over_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 5\nobjective: {epsilon: 0.2}\n")
    assert of_keywords(config=file, seed=7)["seed"] == 7
    both = of_keywords(config=[file, {"objective": {"epsilon": 0.3}}])
    assert both["output"] == "runs/digits-seed5"
    assert (both["seed"], both["objective.epsilon"]) == (5, 0.3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"epsilon": 1}, "did you mean 'objective.epsilon'?"),
        (
            {"image_size": 64, "augment.large.size": 32},
            "image_size 64 sets augment.large.size to 64, not 32",
        ),
        (
            {"objective": {"epsilonn": 1}},
            "'objective.epsilonn'; did you mean 'objective.epsilon'?",
        ),
        ({"objective": 3}, "did you mean 'objective.temperature'"),
        ({"method": "unno"}, "method must be one of uno, rs"),
        ({"config": {"method": "unno"}}, "method must be one of uno, rs"),
        ({"dry_run": True}, "unknown setting 'dry_run'"),
        ({"objective.epsilon": -1}, "objective.epsilon: Input should be greater than"),
        (
            {"labeled": "a", "unlabeled": "b", "data": "digits"},
            "either --data or --labeled",
        ),
        ({"labeled": "a"}, "labeled and unlabeled must be given together"),
        (
            {"data": "folder:/no/such/place", "preset": "scratch"},
            "/no/such/place",
        ),
        ({"num_novel": 1000}, "than classes to discover (1000)"),
        ({"config": "/no/such.yaml"}, "cannot read config file /no/such.yaml"),
    ],
)
def test_a_mistake_is_a_config_error(tmp_path, nothing_starts, settings, says):
    """Kills: SystemExit, a traceback of pydantic's, a directory left behind."""
    output = tmp_path / "run"
    with pytest.raises(ConfigError) as error:
        uno.discover(output=output, quiet=True, **settings)
    assert says in str(error.value) and not output.exists()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            ModuleNotFoundError("No module named 'ray'", name="ray"),
            ConfigError,
            r"pip install 'ray\[default",
        ),
        (OSError(28, "No space left on device"), StorageError, "No space left"),
        (Interrupted("resume with the same command"), Interrupted, "resume"),
        (ZeroDivisionError("a defect"), ZeroDivisionError, "defect"),
    ],
)
def test_errors_from_elsewhere_mean_what_they_mean_on_the_command_line(
    monkeypatch, error, kind, words
):
    monkeypatch.setattr("uno.session.pipeline.discover", Mock(side_effect=error))
    with pytest.raises(kind, match=words):
        uno.discover()


def test_a_run_with_workers_trains_on_ray(tmp_path, monkeypatch):
    """Kills: a run of another number of workers in silence."""
    train = Mock(side_effect=RuntimeError("training begins"))
    monkeypatch.setattr(backend.RayBackend, "train", train)
    with pytest.raises(RuntimeError, match="training begins"):
        uno.discover(output=tmp_path / "run", workers=2, quiet=True)
    assert train.call_args.args[0].config.compute.num_workers == 2


def test_a_run_from_images_to_a_model_and_again(tmp_path, capsys):
    """In folders, here, and in a thread, as notebooks and servers do. Kills: signal
    handlers set off the main thread, which raises ValueError.
    """
    labeled = write_images(tmp_path / "known", {"cat": 12, "dog": 12})
    settings = TINY | {
        "labeled": labeled,
        "unlabeled": write_images(tmp_path / "new", {"any": 24}),
        "num_novel": 2,
        "batch_size": 16,
        "data.limit": None,
        "output": tmp_path / "run",
    }
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(uno.discover, quiet=True, report=True, **settings)
        model = training.result()
    out, err = capsys.readouterr()
    assert err == "" and all(line.startswith("warning: ") for line in out.splitlines())
    assert [c.name for c in model.classes] == ["cat", "dog", "novel-1", "novel-2"]
    assert Path(model.report).read_text().startswith("<!doctype")
    assert 0 <= model.metrics["train/known/task_aware/acc/best"] <= 1
    assert len(model.predict([labeled / "cat" / "0.png"])) == 1
    steps = checkpoint_steps(api.Storage(model.run), DISCOVER)

    async def again() -> uno.Model:
        return uno.discover(**settings)

    assert asyncio.run(again()).model_hash == model.model_hash
    assert "is finished; nothing is trained again" in capsys.readouterr().out
    assert checkpoint_steps(api.Storage(model.run), DISCOVER) == steps
    with pytest.raises(ConfigError, match=r"other settings: objective\.epsilon"):
        uno.discover(quiet=True, **settings, objective={"epsilon": 0.3})

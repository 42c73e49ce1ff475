"""A method and a pretext task from outside the package, through the command line,
without Ray.
"""

import pickle
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import uno
from pipelines import cli
from reproduce.experiments import build, cells
from tests.pipelines.small import ROOT, SMALL, lines_of, refused
from tests.reproduce.test_tables import request
from tests.tune.tiny import NO_DATA, claimed, tiny_options
from tune.driver import open_sweep
from tune.spaces import load_space
from uno.config import field_traits, override
from uno.data.sources import read_digits
from uno.errors import ConfigError, Interrupted
from uno.imports import check_origin
from uno.results import predictions
from uno.session.configure import configure, from_keywords

PRETEXT = '''"""Is the image negated?"""
import torch
import torch.nn.functional as F
from uno.method import Pretext
from uno.steps import forward

def loss(state, batch, config):
    negated = batch._replace(views=[batch.views[0], -batch.views[0]], num_large=2)
    known = forward(state, negated).known
    labels = torch.arange(2).repeat_interleave(known.shape[1])
    return F.cross_entropy(known.flatten(0, 1) / config.objective.temperature, labels)

PRETEXT = Pretext("negation", loss, num_outputs=2)
'''
OWN = ["--method", "my_method:METHOD"]
SHORT = ["--pretrain.epochs", "1", "--discover.epochs", "1"]


def predict_into(folder: str) -> list[str]:
    """The words of a command that predicts a few digits by the model in ``run``."""
    return ["predict", "run", "--data", "digits", "--limit", "30", "--output", folder]


def _forget_own_code() -> None:
    """Let methods and pretext tasks be loaded as in a new process."""
    for function in (uno.method.load, uno.method.load_pretext):
        function.cache_clear()
    uno.method._own_methods.clear()
    for name in ("method", "alias", "copy", "pretext", "encoder", "layers"):
        sys.modules.pop(f"my_{name}", None)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with both, which no other test has imported."""
    shutil.copy(ROOT / "examples" / "my_method.py", tmp_path)
    (tmp_path / "my_pretext.py").write_text(PRETEXT)
    monkeypatch.chdir(tmp_path)
    _forget_own_code()
    yield tmp_path
    _forget_own_code()


def test_a_run_from_its_pretext_task_to_predictions(here, capsys):
    """Kills: a method that only a part of the commands knows, a section that is not
    stored, resumed or compared, a pretext task that is not a phase of its own.
    """
    line = (
        "--pretext.task my_pretext:PRETEXT --pretext.epochs 2 --pretext.warmup-epochs 1"
        " --distill.entropy-weight 1.5 --output run"
    )
    words = ["discover", *SMALL, *OWN, *SHORT, *line.split()]
    assert cli.main([*words, "--dry-run"]) == 0
    assert re.search(r"(?s)pretext: 2 epochs of.*pretrain:", capsys.readouterr().out)
    assert cli.main(words) == 0
    stored = yaml.safe_load(Path("run/config.yaml").read_text())
    assert stored["distill"] == {"target_temperature": 0.05, "entropy_weight": 1.5}
    lines = lines_of(here / "run")
    phases = list(dict.fromkeys(line["phase"] for line in lines))
    assert phases == ["pretext", "pretrain", "discover"]
    losses = [line["loss"] for line in lines if line["phase"] == "pretext"]
    assert losses[-1] < 0.8 * losses[0]
    assert "Pretext task: loss" in Path("run/report.html").read_text()
    assert cli.main(words) == 0
    assert "is finished" in capsys.readouterr().out
    changed = [*words, "--distill.entropy-weight", "1"]
    assert "distill.entropy_weight" in refused(capsys, 2, *changed)
    assert cli.main(predict_into("out")) == 0


def test_its_section_is_as_the_schemas(here, capsys):
    """Flags, files, keywords, help, spaces, tables. Kills: a section of built-in
    methods alone.
    """
    key = "distill.entropy_weight"
    assert cli.main(["discover", *OWN, "--help"]) == 0
    assert "--distill.entropy-weight FLOAT" in capsys.readouterr().out
    Path("mine.yaml").write_text(f"method: {OWN[1]}\ndistill: {{entropy_weight: 4}}\n")
    assert cli.main(["discover", "--config", "mine.yaml", "--explain"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)[key] == 4
    given = {"method": OWN[1], "distill": {"entropy_weight": 3}}
    config = configure(from_keywords(given))
    assert config.method_options.entropy_weight == 3
    assert field_traits(key).scope == "discover"
    assert "distill" not in override(config, {"method": "uno"}).model_extra
    pickled = pickle.dumps(config)
    # whose module another process finds through the method alone
    assert b"Constants" not in pickled and pickle.loads(pickled) == config
    Path("space.yaml").write_text(f"{key}: {{low: 1, high: 4}}\n")
    assert [domain.key for domain in load_space("space.yaml", config)] == [key]
    todo, _ = cells(build("ablation", "small"), 1, {}, {"method": OWN[1], key: 3.0})
    assert {cell.config.method_options.entropy_weight for cell in todo} == {3.0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--method", "no_such:METHOD"],
            "method no_such:METHOD cannot be imported: No module named",
        ),
        (
            ["--method", "my_method:NOTHING"],
            "my_method:NOTHING cannot be imported: .*no attribute",
        ),
        (
            ["--method", "my_method:Distill"],
            "my_method:Distill is of type type, not an instance of",
        ),
        (
            ["--method", "my_method"],
            "method must be one of uno, .* or package.module:METHOD",
        ),
        (
            ["--pretext.task", "my_method:METHOD", "--pretext.epochs", "1"],
            "not an instance of uno.method.Pretext",
        ),
        (
            [*OWN, "--data.setting", "gcd"],
            "data.setting gcd does not go with method my_method:METHOD",
        ),
        (
            [*OWN, "--distill.entropy-weigth", "1"],
            r"did you mean --distill\.entropy-weight\?",
        ),
        (
            [*OWN, "--distill.entropy-weight", "1000"],
            "distill.*: Input should be less than or equal to 100",
        ),
        (["--ncl.threshold", ".5"], "ncl.threshold belongs to method ncl, not to uno"),
    ],
)
def test_mistakes_are_one_line(here, capsys, words, says):
    """Kills: a traceback of the user's module, an option of another method that
    silently does nothing.
    """
    line = refused(capsys, 2, "discover", "--data", "digits", "--output", "x", *words)
    assert re.search(says, line), line
    assert not (here / "x").exists()


def test_two_methods_with_one_name_are_refused(here):
    """Kills: the section of one method that is read by the constants of the other."""
    method = uno.method.load("my_method:METHOD")
    Path("my_alias.py").write_text("from my_method import METHOD")
    assert uno.method.load("my_alias:METHOD") is method
    shutil.copy("my_method.py", "my_copy.py")
    with pytest.raises(ConfigError, match=r"my_copy:METHOD: another .*'distill'"):
        uno.method.load("my_copy:METHOD")
    assert uno.method.section_model("distill") is method.constants


@pytest.mark.parametrize(
    "command",
    [["predict", ".", "--data", "digits", "--output", "../out"], ["evaluate", "."]],
    ids=["predict", "evaluate"],
)
def test_code_in_a_directory_of_unknown_origin_is_not_imported(
    here, capsys, monkeypatch, command
):
    """Kills: a model's configuration that has its own directory's code run."""
    words = ["discover", *SMALL, *OWN, "--max-steps", "1", "--output", "run"]
    assert cli.main(words) == 0
    _forget_own_code()
    (here / "run" / "my_method.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(here / "run")
    line = refused(capsys, 2, *command)
    assert "its code lies in the model's own directory" in line


def test_a_module_of_a_namespace_package_may_come_with_the_model(
    tmp_path, monkeypatch, caplog
):
    """The package is installed, too. Kills: a check of its first folder alone."""
    for folder in ("installed", "model"):
        (tmp_path / folder / "shared_name").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "model")
    name = "shared_name.module:build"
    with pytest.raises(ConfigError, match="the model's own directory"):
        check_origin("model.encoder", name, str(tmp_path / "model"))
    check_origin("model.encoder", name, str(tmp_path / "elsewhere"))
    assert str(tmp_path / "installed") in caplog.text


LAYERS = """
from torch import nn

class Mine(nn.Module):
    image_size = 8
    def __init__(self):
        super().__init__()
        self.layer, self.num_features = nn.Conv2d(3, 16, 3), 16
    def forward(self, images):
        return self.layer(images{change}).relu().mean(dim=(2, 3))
"""
CHANGED = (
    "the code of model.encoder my_encoder:build has changed since the run began"
    " (my_layers): "
)
ENCODER = ["--model.encoder", "my_encoder:build", "--image-size", "8"]


def write_encoder(change: str = "") -> None:
    """An encoder of the user's own in the working directory, of two modules that
    nothing has imported.
    """
    code = "from my_layers import Mine\ndef build(): return Mine()\n"
    Path("my_encoder.py").write_text(code)
    Path("my_layers.py").write_text(LAYERS.format(change=change))
    _forget_own_code()


def test_a_run_that_resumes_with_an_encoder_of_other_code_says_so(here, caplog):
    """The weights fit. Kills: half a run by one forward, half by another; a warning
    of the same code.
    """
    words = ["pretrain", *SMALL, *ENCODER, "--output", "run"]
    for change in ("", "", ".flip(2)"):
        assert "the code of" not in caplog.text
        write_encoder(change)
        assert cli.main(words) == 0
    said = f"{CHANGED}its numbers may differ from here on; --overwrite starts over"
    assert said in caplog.messages


def test_predictions_of_an_encoder_of_other_code_are_not_mixed(
    here, capsys, caplog, monkeypatch
):
    """Whether partitions wait or the table is whole; in the run itself all are made
    again, and a model says that it is not what was trained.
    """
    write_encoder()
    assert cli.main(["discover", *SMALL, *SHORT, *ENCODER, "--output", "run"]) == 0
    assert cli.main(predict_into("out")) == 0
    with monkeypatch.context() as patch:
        stop = Mock(side_effect=Interrupted("stopped"))
        patch.setattr(predictions.PredictionWriter, "finish", stop)
        assert cli.main(predict_into("half")) == 75
    assert Path("half/predictions").exists() and "the code of" not in caplog.text
    before = pq.read_table("run/predictions")
    write_encoder(".flip(2)")
    for folder in ("out", "half"):
        caplog.clear()
        line = refused(capsys, 2, *predict_into(folder))
        other = "holds predictions by other code of model.encoder; choose another"
        assert other in line
        warning = f"{CHANGED}its predictions may differ from those of the run"
        assert warning in caplog.messages
    assert cli.main(["predict", "run"]) == 0
    after = pq.read_table("run/predictions")
    assert len(after) == len(before) and after["probability"] != before["probability"]
    found = uno.load("run").predict(read_digits().images.items[:5]).probability
    np.testing.assert_allclose(found, after["probability"][:5], rtol=0, atol=1e-5)


def test_a_sweep_of_an_encoder_of_other_code_is_refused(here, tmp_path):
    """Kills: trials by one forward compared with trials by another."""
    write_encoder()
    options = tiny_options("sweep", *ENCODER)
    with claimed(tmp_path / "sweep") as storage:
        for _ in range(2):
            open_sweep(options, storage, NO_DATA, 2)
        write_encoder(".flip(2)")
        line = "a sweep with other settings: encoder_code"
        with pytest.raises(ConfigError, match=line):
            open_sweep(options, storage, NO_DATA, 2)


def test_a_table_of_an_encoder_of_other_code_has_other_cells(here):
    """Kills: cells by one forward in a table with cells by another."""
    words = ["ablation", "--datasets", "digits", "--rows", "uno", "--seeds", "1"]
    write_encoder()
    cell = request([*words, *ENCODER]).cells[0]
    assert cell == request([*words, *ENCODER]).cells[0]
    write_encoder(".flip(2)")
    other = request([*words, *ENCODER]).cells[0]
    assert cell.config == other.config
    assert cell.name != other.name and cell.start != other.start

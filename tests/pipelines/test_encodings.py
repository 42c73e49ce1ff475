"""Names in terminals of other encodings, in spreadsheets, and in printed commands."""

import csv
import io
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import uno
from pipelines import cli
from tests.pipelines.small import vectors_of
from uno.errors import ConfigError
from uno.results.folders import _without_formulas
from uno.session.configure import configure

CUP = "杯子"
ESCAPED = rb"\u676f\u5b50"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train on vectors of classes with Chinese names; return the directory of the
    run.
    """
    folder = tmp_path_factory.mktemp("encodings") / CUP
    folder.mkdir()
    vectors, labels = vectors_of(80, CUP)
    given = {"num_novel": 2, "output": folder / "run", "quiet": True}
    uno.discover(embeddings=vectors, labels=labels, **given)
    return folder / "run"


DATA = "--data vectors:DATA --num-novel 2"


@pytest.mark.parametrize(
    "line",
    [
        f"data check {DATA}",
        f"discover {DATA} --output RUN",
        f"discover {DATA} --output RUN --seed 9",
        f"discover {DATA} --output RUN --dry-run --overwrite",
        f"discover {DATA} --output RUN --explain",
        "evaluate RUN",
        "predict RUN --csv",
        "classes RUN",
        f"classes RUN --rename {CUP}77=x",
        "report RUN",
        "export RUN --format pt2",
        f"predict {CUP}-gone",
        CUP,
    ],
)
def test_every_command_prints_escapes(run, monkeypatch, line):
    (data,) = run.parent.glob("*.parquet")
    line = line.replace("RUN", str(run)).replace(":DATA", f":{data}")
    streams = [io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        code = cli.main(line.split())
    assert [stream.errors for stream in streams] == ["strict", "strict"]
    for stream in streams:
        stream.flush()
    printed = b"".join(stream.buffer.getvalue() for stream in streams)
    assert code in (0, 2, 4) and b"internal" not in printed, printed
    assert ESCAPED in printed, printed


def test_the_file_of_an_error_is_utf_8(monkeypatch, capsys, tmp_path):
    """Also where the name is no valid text, and whatever the locale's encoding is."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    fail = Mock(side_effect=RuntimeError(f"{CUP} \udcc3"))
    assert cli.run_guarded(fail, []) == 1
    (file,) = Path(tmp_path).iterdir()
    text = file.read_bytes().decode("utf-8")
    assert f"{CUP} \\udcc3" in text and str(file) in capsys.readouterr().err


def test_a_path_that_the_locale_cannot_name_is_refused():
    """As Python reads an argument in a locale without UTF-8."""
    output = os.fsencode("runs/ü").decode("ascii", "surrogateescape")
    with pytest.raises(ConfigError, match="UTF-8 locale"):
        configure({"output": output})


def test_a_table_for_spreadsheets_has_no_formula(run, tmp_path):
    """Excel reads the file as UTF-8, and the Parquet table has the names as they
    are.
    """
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    rename = ["classes", str(copy), "--rename", "2==1+1", "3=Gehäuse"]
    assert cli.main(rename) == 0 and cli.main(["predict", str(copy), "--csv"]) == 0
    data = (copy / "predictions.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")
    rows = list(csv.DictReader(data.decode("utf-8-sig").splitlines()))
    table = pq.read_table(copy / "predictions").to_pylist()
    names = [row["class_name"] for row in table]
    assert {"=1+1", "Gehäuse"} <= set(names)
    assert [line["id"] for line in rows] == [row["id"] for row in table]
    shown = ["'=1+1" if name == "=1+1" else name for name in names]
    assert [line["class_name"] for line in rows] == shown
    assert all(float(line["margin"]) >= 0 for line in rows)


def test_text_that_begins_a_formula_is_quoted():
    column = pa.array(["=1+1", "-cmd", "@a", "+1", "\tx", "Gehäuse", "a=1", "", None])
    found = _without_formulas(column).to_pylist()
    assert found == ["'=1+1", "'-cmd", "'@a", "'+1", "'\tx", "Gehäuse", "a=1", "", None]

"""Names in terminals of other encodings, in spreadsheets, and in printed commands."""

import csv
import io
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import uno
from pipelines import cli
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
    generator, truth = np.random.default_rng(0), np.arange(80) % 4
    centers = 4 * generator.normal(size=(4, 8))
    vectors = centers[truth] + generator.normal(size=(80, 8))
    labels = [f"{CUP}{c}" if c < 2 and i % 8 < 4 else "" for i, c in enumerate(truth)]
    np.save(folder / "v.npy", vectors.astype(np.float32))
    lines = ["label", *(f'"{label}"' for label in labels)]
    (folder / "v.csv").write_text("\n".join(lines) + "\n", "utf-8")
    uno.discover(
        data=f"vectors:{folder}/v.npy", num_novel=2, output=folder / "run", quiet=True
    )
    return folder / "run"


def arguments():
    """Return the line of each command, with RUN and DATA for the paths."""
    data = ["--data", "vectors:DATA", "--num-novel", "2"]
    return [
        ["data", "check", *data],
        ["discover", *data, "--output", "RUN"],
        ["discover", *data, "--output", "RUN", "--seed", "9"],
        ["discover", *data, "--output", "RUN", "--dry-run", "--overwrite"],
        ["discover", *data, "--output", "RUN", "--explain"],
        ["evaluate", "RUN"],
        ["predict", "RUN", "--csv"],
        ["classes", "RUN"],
        ["classes", "RUN", "--rename", f"{CUP}77=x"],
        ["report", "RUN"],
        ["export", "RUN", "--format", "pt2"],
        ["predict", f"{CUP}-gone"],
        [CUP],
    ]


def test_every_command_prints_escapes(run, monkeypatch):
    paths = {"RUN": str(run), "DATA": str(run.parent / "v.npy")}
    for argv in arguments():
        streams = {}
        words = [
            re.sub("RUN|DATA", lambda found: paths[found[0]], word) for word in argv
        ]
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                stream = io.TextIOWrapper(io.BytesIO(), "ascii")
                streams[name] = stream
                patch.setattr(sys, name, stream)
            code = cli.main(words)
        assert all(stream.errors == "strict" for stream in streams.values())
        for stream in streams.values():
            stream.flush()
        printed = b"".join(stream.buffer.getvalue() for stream in streams.values())
        assert code in (0, 2, 4) and b"internal" not in printed, (argv, printed)
        assert ESCAPED in printed, (argv, printed)


def test_the_file_of_an_error_is_utf_8(monkeypatch, capsys, tmp_path):
    """Also where the name is no valid text, and whatever the locale's encoding is."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(argv):
        raise RuntimeError(f"{CUP} \udcc3")

    assert cli.run_guarded(fail, []) == 1
    (file,) = Path(tmp_path).iterdir()
    text = file.read_bytes().decode("utf-8")
    assert f"{CUP} \\udcc3" in text and str(file) in capsys.readouterr().err


def test_a_path_that_the_locale_cannot_name_is_refused():
    """As Python reads an argument in a locale without UTF-8."""
    output = os.fsencode("runs/ü").decode("ascii", "surrogateescape")
    with pytest.raises(ConfigError, match="UTF-8 locale"):
        configure({"output": output})


def test_a_table_for_spreadsheets_has_no_formula(run, tmp_path, monkeypatch):
    """Excel reads the file as UTF-8, and the Parquet table has the names as they
    are.
    """
    copy, names = tmp_path / "run", ["=1+1", "Gehäuse", "-cmd", "@a", "+1"]
    shutil.copytree(run, copy)
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["classes", "run", "--rename", f"2={names[0]}", f"3={names[1]}"]) == 0
    )
    assert cli.main(["predict", "run", "--csv"]) == 0
    data = (copy / "predictions.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")
    rows = list(csv.DictReader(data.decode("utf-8-sig").splitlines()))
    table = pq.read_table(copy / "predictions").to_pylist()
    assert {names[0], names[1]} <= {row["class_name"] for row in table}
    shown = {"=1+1": "'=1+1"}
    for row, line in zip(table, rows, strict=True):
        assert line["class_name"] == shown.get(row["class_name"], row["class_name"])
        assert line["id"] == row["id"] and float(line["margin"]) >= 0
    column = pa.array([*names, None, "", "a=1", "\tx"])
    found = _without_formulas(column).to_pylist()
    assert found == ["'=1+1", "Gehäuse", "'-cmd", "'@a", "'+1", None, "", "a=1", "'\tx"]

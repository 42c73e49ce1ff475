"""Piles that hold known classes, from the first line of the console to the report."""

import json
from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines import cli
from pipelines.commands import DISCOVER
from pipelines.options import parse
from tests.pipelines.small import SMALL, refused, write_images
from uno.config import Config, dump_yaml, override
from uno.data.embeddings import given_vectors
from uno.results.trust import verdict
from uno.session.derive import resolve

ONE = "--pretrain.epochs 1 --discover.epochs 1 --train.batch-size 24 --device cpu"
TINY = [*SMALL, *ONE.split()]


def said(capsys, *argv):
    """What a command says on both streams; it succeeds."""
    capsys.readouterr()
    assert cli.main([str(word) for word in argv]) == 0
    return "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "loading", ["memory", pytest.param("streaming", marks=pytest.mark.slow)]
)
def test_a_mixed_pile_from_the_digits_to_the_report(tmp_path, capsys, loading):
    """All, Old and New beside the present keys, in metrics, table and page; both ways
    in. Kills: an evaluation that takes unlabeled known rows for novel or leaves them
    out, an ``auto`` that is stored.
    """
    options = ["--data.unlabeled-known-fraction", "0.5", "--data.loading", loading]
    argv = ["discover", *TINY, "--output", tmp_path]
    text = said(capsys, *argv, *options)
    how = "setting: GCD (--data.unlabeled-known-fraction): unlabeled images can belong"
    assert f"{how} to known or new classes" in text and "unlabeled images, %" in text
    values = json.loads((tmp_path / "metrics.json").read_text())
    parts = product(("train", "test"), ("all", "old", "new"), ("avg", "best"))
    expected = {f"{split}/unlabeled/gcd/{g}/{which}" for split, g, which in parts}
    baselines = ("kmeans", "constrained_kmeans", "spectral")
    expected |= {f"baseline/{name}/gcd/all" for name in baselines}
    assert expected | {"test/novel/task_aware/acc/avg"} <= values.keys()
    right = values["test/known/task_agnostic_strict/acc/best"]
    word, (first, second) = verdict(values).word, verdict(values).reasons
    shown = text.index(f"verdict: {word}\n  {first}\n  {second}")
    assert first.startswith(f"{100 * right:.1f}% of") and shown < text.index("accuracy")
    assert f"{word}: {first}" in (tmp_path / "model/README.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.index('id="trust"') < page.index('class="tiles"')
    assert 'data-key="train/unlabeled/gcd/old/avg"' in page
    for row in pq.read_table(tmp_path / "predictions").to_pylist():
        known = row["known_probability"]
        mass = known if row["kind"] == "known" else 1 - known
        assert mass >= row["probability"] - 1e-5  # the class is one of its kind
    again = said(capsys, *argv, *options)
    assert "GCD (of the stored run)" in again and "nothing is trained again" in again
    ncd = [*argv, *options, "--data.setting", "ncd"]
    assert "other settings: data.setting" in refused(capsys, 2, *ncd)


def test_rows_that_truly_lack_labels_are_taken_for_mixed(tmp_path, capsys):
    """Two folders: ``data check`` says so, in one line, and how to say otherwise; a
    baseline stays novel.
    """
    write_images(tmp_path, {"known/a": 20, "known/b": 20, "pile": 30})
    argv = [
        *("--labeled", tmp_path / "known", "--unlabeled", tmp_path / "pile"),
        *("--num-novel", "2", "--train.batch-size", "32", "--data.stored-size", "8"),
    ]
    check = ["data", "check", *argv]
    for more, words in (
        ((), ("GCD (assumed): ", "if all are new, pass --data.setting ncd")),
        (("--method", "rs"), ("NCD (data.setting gcd does not go with method rs)",)),
        (("--data.setting", "ncd"), ("NCD (--data.setting): unlabeled images belong",)),
    ):
        text = said(capsys, *check, *more)
        assert text.count("setting: ") == 1 and all(word in text for word in words)
    refused(capsys, 2, "discover", *argv, "--method", "rs", "--data.setting", "gcd")


def test_the_checks_are_of_the_method_that_a_run_takes(tmp_path, capsys):
    """Kills: memory and batches of heads that no run trains."""
    values = np.random.default_rng(0).normal(size=(60, 16))
    given_vectors(values, np.arange(60) % 5 - 1).store(f"{tmp_path}/v.parquet")
    data = f"vectors:{tmp_path}/v.parquet"
    argv = ["data", "check", "--data", data, "--num-novel", "2"]
    text = said(capsys, *argv)
    assert f"({60 * 4 * 16 / 1000:g} kB of features" in text and "batch" not in text
    assert "batch size: " in said(capsys, *argv, "--method", "uno")


def test_a_run_on_own_images_goes_on_with_what_they_decided(
    tmp_path, capsys, monkeypatch
):
    """Through the command line, to the directory and back. Kills: sizes that are
    decided anew when a run goes on or its encoder is used again, a preset's 32 px in
    silence or where the configuration is printed.
    """
    folder, run = tmp_path / "data", tmp_path / "run"
    write_images(folder, {"a": 40, "b": 40})
    argv = ["--data", f"folder:{folder}", "--known-classes", "a"]
    argv = [*argv, "--model.encoder", "resnet_small", "--output", str(run)]

    def found(*more):
        options = parse([*argv, *more], DISCOVER)
        config, _ = resolve(options.config, options.overrides, options.args.overwrite)
        return config, capsys.readouterr().out

    first, text = found()
    assert first.data.stored_size == 8 and "image size: 8 px (images are about" in text
    assert "\nbatch size: " in text and "\nepochs: " in text
    assert first.pretrain.epochs == 30
    assert cli.main(["discover", *argv, "--explain"]) == 0
    assert override(Config(), yaml.safe_load(capsys.readouterr().out)) == first
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(first))
    monkeypatch.setattr("uno.session.derive.EPOCHS", {"pretrain": 6, "discover": 7})
    assert found()[0] == first
    assert found("--overwrite")[0].discover.epochs == 7
    assert found("--image-size", "16")[0].data.stored_size == 16
    other, text = found("--weights", str(run), "--output", str(tmp_path / "other"))
    assert (other.data, other.augment) == (first.data, first.augment)
    assert f"taken from {run}" in text
    preset = {"data.stored_size": 32, "augment.large.size": 32, "discover.epochs": 200}
    begun_before = override(first, preset)
    (run / "config.yaml").write_text(dump_yaml(begun_before))
    assert found()[0] == begun_before

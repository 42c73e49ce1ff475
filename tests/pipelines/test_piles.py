"""Piles that hold known classes, from the first line of the console to the report."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines import cli
from pipelines.commands import DISCOVER
from pipelines.options import parse
from tests.pipelines.small import SMALL, refused
from tests.uno.data.builders import write_images
from uno.config import Config, differing_keys, dump_yaml, override, to_dict
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
    argv = [
        "discover",
        *TINY,
        "--data.unlabeled-known-fraction",
        "0.5",
        "--data.loading",
        loading,
        "--output",
        tmp_path,
    ]
    text = said(capsys, *argv)
    assert (
        "setting: GCD (--data.unlabeled-known-fraction): unlabeled images can belong to"
        " known or new classes" in text
    )
    assert (
        "unlabeled images, %" in text
        and "setting: gcd" in (tmp_path / "config.yaml").read_text()
    )
    values = json.loads((tmp_path / "metrics.json").read_text())
    found = verdict(values)
    assert found is not None
    first, second = found.reasons
    right = values["test/known/task_agnostic_strict/acc/best"]
    assert text.index(f"verdict: {found.word}\n  {first}\n  {second}") < text.index(
        "accuracy, %"
    ) and first.startswith(f"{100 * right:.1f}% of")
    assert f"{found.word}: {first}" in (tmp_path / "model/README.md").read_text()
    for split in ("train", "test"):
        assert {
            f"{split}/unlabeled/gcd/{g}/{w}"
            for g in ("all", "old", "new")
            for w in ("avg", "best")
        } <= set(values)
        assert f"{split}/novel/task_aware/acc/avg" in values
    assert {
        f"baseline/{b}/gcd/all" for b in ("kmeans", "constrained_kmeans", "spectral")
    } <= set(values)
    page = (tmp_path / "report.html").read_text()
    assert page.index('id="trust"') < page.index('class="tiles"')
    assert (
        "of known classes, those of new classes" in page
        and "docs/start/concepts.md" in page
    )
    assert "One matching" in page and 'data-key="train/unlabeled/gcd/old/avg"' in page
    table = pq.read_table(
        tmp_path / "predictions",
        columns=["known_probability", "kind", "probability"],
    )
    for row in table.to_pylist():
        mass = (
            row["known_probability"]
            if row["kind"] == "known"
            else 1 - row["known_probability"]
        )
        assert mass >= row["probability"] - 1e-5  # the class is one of its kind
    again = said(capsys, *argv[:-2], "--output", tmp_path)
    assert (
        "setting: GCD (of the stored run)" in again
        and "nothing is trained again" in again
    )
    assert "other settings: data.setting" in refused(
        capsys, 2, *argv, "--data.setting", "ncd"
    )


def test_rows_that_truly_lack_labels_are_taken_for_mixed(tmp_path, capsys):
    """Two folders: ``data check`` says so, in one line, and how to say otherwise; a
    baseline stays novel.
    """
    names = [f"known/{c}/{i}.png" for c in "ab" for i in range(20)] + [
        f"pile/{i}.png" for i in range(30)
    ]
    write_images(tmp_path, names)
    argv = [
        "--labeled",
        tmp_path / "known",
        "--unlabeled",
        tmp_path / "pile",
        "--num-novel",
        "2",
    ]
    argv += ["--train.batch-size", "32", "--data.stored-size", "8"]
    (line,) = [
        line
        for line in said(capsys, "data", "check", *argv).splitlines()
        if line.startswith("setting:")
    ]
    assert line.startswith("setting: GCD (assumed)") and "--data.setting ncd" in line
    text = said(capsys, "data", "check", *argv, "--method", "rs")
    assert "setting: NCD (data.setting gcd does not go with method rs)" in text
    assert "(--data.setting): unlabeled images belong to new" in said(
        capsys, "data", "check", *argv, "--data.setting", "ncd"
    )
    refused(capsys, 2, "discover", *argv, "--method", "rs", "--data.setting", "gcd")


def test_the_checks_are_of_the_method_that_a_run_takes(tmp_path, capsys):
    """Kills: memory and batches of heads that no run trains."""
    values = np.random.default_rng(0).normal(size=(60, 16))
    given_vectors(values, np.arange(60) % 5 - 1).store(f"{tmp_path}/v.parquet")
    argv = [
        "data",
        "check",
        "--data",
        f"vectors:{tmp_path}/v.parquet",
        "--num-novel",
        "2",
    ]
    text = said(capsys, *argv)
    assert (
        f"({60 * 4 * 16 / 1000:g} kB of features" in text and "batch size" not in text
    )
    assert "batch size: " in said(capsys, *argv, "--method", "uno")


def test_a_run_on_own_images_goes_on_with_what_they_decided(
    tmp_path, capsys, monkeypatch
):
    """Through the command line, to the directory and back. Kills: sizes that are
    decided anew when a run goes on or its encoder is used again, a preset's 32 px in
    silence or where the configuration is printed.
    """
    folder, run = tmp_path / "data", tmp_path / "run"
    write_images(folder, [f"{name}/{i}.png" for name in "ab" for i in range(40)])
    argv = [
        "--data",
        f"folder:{folder}",
        "--known-classes",
        "a",
        "--model.encoder",
        "resnet_small",
    ]

    def found(*more):
        options = parse([*argv, "--output", str(run), *more], DISCOVER)
        config, _ = resolve(options.config, options.overrides, options.args.overwrite)
        return config, capsys.readouterr().out

    first, text = found()
    assert first.data.stored_size == 8 and "image size: 8 px (images are about" in text
    assert all(f"\n{word}: " in text for word in ("batch size", "epochs"))
    assert first.pretrain.epochs == 30
    assert cli.main(["discover", *argv, "--output", str(run), "--explain"]) == 0
    printed = override(Config(), yaml.safe_load(capsys.readouterr().out))
    assert differing_keys(to_dict(first), printed) == []
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(first))
    monkeypatch.setattr("uno.session.derive.EPOCHS", {"pretrain": 6, "discover": 7})
    assert found()[0] == first and differing_keys(to_dict(first), found()[0]) == []
    assert found("--overwrite")[0].discover.epochs == 7
    assert differing_keys(to_dict(first), found("--image-size", "16")[0])
    before = override(
        first,
        {"data.stored_size": 32, "augment.large.size": 32, "discover.epochs": 200},
    )
    # of a run that began with the preset's
    (run / "config.yaml").write_text(dump_yaml(before))
    assert found()[0] == before
    (run / "config.yaml").write_text(dump_yaml(first))
    again, text = found("--weights", str(run), "--output", str(tmp_path / "other"))
    assert (again.data, again.augment) == (
        first.data,
        first.augment,
    ) and f"taken from {run}" in text

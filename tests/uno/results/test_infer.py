"""Scores, aligned heads, and a table with one row for every input whatever happens
in between.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.uno.models import (
    NUM_DAMAGED,
    tiny_model,
    write_damaged,
    write_digits,
    write_model,
)
from uno.config import Config, override
from uno.data import decode as decoding
from uno.data.files import Storage
from uno.data.memory import DecodedImages, RowBlocks
from uno.data.rows import Rows
from uno.data.sources import read_digits, read_images, read_rows
from uno.errors import ConfigError, StorageError
from uno.model import Logits
from uno.results import predictions
from uno.results.classes import OutputClass
from uno.results.infer import (
    NUMBERS,
    align_heads,
    load_classifier,
    score,
)
from uno.results.predictions import (
    FOLDER,
    MARK,
    PART,
    PredictionWriter,
    partition_rows,
    predict_rows,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Of the same weights, with another transform."""
    return tiny_model(tmp_path_factory.mktemp("other"), data__mean=(0.5, 0.5, 0.5))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """``model``, one of its classes under another name."""
    folder = tmp_path_factory.mktemp("renamed")
    write_model(folder)
    path = folder / "model" / "classes.json"
    path.write_text(path.read_text().replace("novel-1", "other"))
    return load_classifier(Storage(str(folder)))


def classes_of(
    num_known: int, num_novel: int, into: dict[int, int | None] | None = None
):
    kinds = ["known"] * num_known + ["novel"] * num_novel
    return [
        OutputClass(i, f"c{i}", kind, (into or {}).get(i, i))
        for i, kind in enumerate(kinds)
    ]


def rows_of(source: str | Path, num: int | None = None) -> Rows:
    config = override(Config(), {"data.source": str(source)})
    rows = read_rows(config.data, images_only=True)
    return rows if num is None else rows.take(np.arange(num))


def writer_of(model, rows: Rows, output: Path, embedding: bool = False, **options):
    return PredictionWriter(Storage(str(output)), rows, model, embedding, **options)


def predict_all(model, rows: Rows, output: Path, *args, **options) -> pa.Table:
    summary = predict_rows(
        model, writer_of(model, rows, output, *args, **options), threads=1
    )
    table = pq.read_table(output / FOLDER)
    assert summary.ok + summary.bad == summary.rows == len(table) == len(rows)
    return table


def logits_of(known, novel) -> Logits:
    return Logits(known[None], novel[None], None, torch.zeros(1, len(known), 2))


def reference(known, novel, temperature, best, into, alignment):
    """One row, in double precision, from the definitions."""
    num_known, (num_heads, num_clusters) = len(known), novel.shape

    def head(h):
        logits = [*known, *(novel[h, alignment[h][k]] for k in range(num_clusters))]
        exps = [math.exp(value / temperature) for value in logits]
        total = [0.0] * len(exps)
        for i, value in enumerate(exps):
            # dropped: an outcome all the same
            total[i if into[i] is None else into[i]] += value / sum(exps)
        return total

    votes = [max(range(len(p)), key=p.__getitem__) for p in map(head, range(num_heads))]
    p = head(best)
    ranked = sorted(p, reverse=True)
    entropy = -sum(v * math.log(v) for v in p if v > 0)
    agreement = sum(vote == votes[best] for vote in votes) / num_heads
    return (
        votes[best],
        ranked[0],
        ranked[0] - ranked[1],
        entropy,
        agreement,
        sum(p[:num_known]),
        p,
    )


@pytest.mark.parametrize(
    "into", [{}, {5: 6}, {4: 1, 6: None}], ids=["keep", "merge", "merge and drop"]
)
def test_score_equals_the_definition(into):
    """Kills: no temperature, softmax per family, another head's probabilities, votes
    that are not aligned or not merged, the dropped class handed to the others.
    """
    generator = torch.Generator().manual_seed(3)
    known = torch.rand(20, 4, generator=generator) * 2 - 1
    novel = torch.rand(3, 20, 4, generator=generator) * 2 - 1
    alignment, classes = (
        torch.tensor([[2, 0, 1, 3], [0, 1, 2, 3], [3, 1, 0, 2]]),
        classes_of(4, 4, into),
    )
    found = score(logits_of(known, novel), 0.1, 1, classes, alignment)[:-1]
    given = 0.1, 1, [c.into for c in classes], alignment.tolist()
    for row in range(20):
        expected = reference(
            known[row].double().tolist(), novel[:, row].double(), *given
        )
        for tensor, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(tensor[row], value, rtol=1e-4, atol=1e-5)


def test_heads_that_only_number_their_clusters_differently_agree():
    """Kills: the alignment used backwards (a 3-cycle is not its own inverse), empty
    clusters left out.
    """
    generator = torch.Generator().manual_seed(0)
    best = torch.rand(200, 5, generator=generator)
    orders = [torch.randperm(5, generator=generator) for _ in range(2)]
    novel = torch.stack([best[:, orders[0]], best, best[:, orders[1]]])
    alignment = align_heads(novel, best_head=1)
    for head, order in ((0, orders[0]), (1, torch.arange(5)), (2, orders[1])):
        assert torch.equal(order[alignment[head]], torch.arange(5))
    logits = logits_of(torch.rand(200, 3, generator=generator) - 1, novel)
    assert score(logits, 0.1, 1, classes_of(3, 5), alignment).head_agreement.eq(1).all()
    unaligned = torch.arange(5).expand(3, 5)
    assert (
        score(logits, 0.1, 1, classes_of(3, 5), unaligned).head_agreement.mean() < 0.8
    )
    novel = torch.zeros(2, 6, 4)
    novel[:, :, 0] = 1  # every row in one cluster
    own, another = align_heads(novel, 0).tolist()
    assert own == sorted(another) == [0, 1, 2, 3]


def test_no_model_and_damaged_models_are_storage_errors(tmp_path):
    with pytest.raises(StorageError, match="no trained model"):
        load_classifier(Storage(str(tmp_path / "nothing")))
    write_model(tmp_path)
    for name in ("encoder.safetensors", "classes.json", "config.yaml"):
        path = tmp_path / "model" / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(StorageError, match=r"\A.*damaged.*\Z"):
            load_classifier(Storage(str(tmp_path)))
        path.write_bytes(data)
    path = tmp_path / "model" / "classes.json"
    facts = json.loads(path.read_text())
    one_more = [*facts["classes"], {"index": 10, "name": "one more", "kind": "novel"}]
    dropped = [entry | {"drop": True} for entry in facts["classes"]]
    for change in (
        {"classes": one_more},
        {"classes": dropped},
        {"best_head": math.inf},
        {"best_head": -1},
        {"alignment": [[math.inf]]},
    ):
        path.write_text(json.dumps(facts | change))
        with pytest.raises(StorageError, match=r"do not belong together|is damaged"):
            load_classifier(Storage(str(tmp_path)))


def test_model_hash_is_of_the_weights_not_of_the_names(tmp_path, model, other, renamed):
    wider = tiny_model(tmp_path, model__width=8)
    assert renamed.model_hash == model.model_hash
    assert len({model.model_hash, other.model_hash, wider.model_hash}) == 3


def test_all_digits_in_order(tmp_path, model):
    rows = rows_of("digits")
    table = predict_all(model, rows, tmp_path, embedding=True)
    columns = table.to_pydict()
    assert len(table) == 1797 and columns["id"] == rows.ids.to_pylist()
    assert table["uri"].null_count == 1797 and table["reason"].null_count == 1797
    assert set(columns["status"]) == {"ok"} and set(columns["model_hash"]) == {
        model.model_hash
    }
    assert {len(values) for values in columns["embedding"]} == {16}
    assert columns["class_name"] == [
        model.classes[i].name for i in columns["class_index"]
    ]
    assert columns["kind"] == [
        "known" if i < 5 else "novel" for i in columns["class_index"]
    ]
    assert [p.name for p in tmp_path.iterdir()] == [FOLDER]
    single = model.score(
        torch.from_numpy(rows.images.items[700:701].transpose(0, 3, 1, 2).copy())
    )
    assert columns["class_index"][700] == int(single.class_index)
    assert columns["entropy"][700] == pytest.approx(float(single.entropy), rel=1e-4)
    np.testing.assert_allclose(
        columns["embedding"][700], single.features[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_every_digit_and_every_damaged_file_has_a_row(tmp_path, model):
    write_digits(tmp_path / "in", read_digits().images.items)
    readable = write_damaged(tmp_path / "in" / "damaged")
    rows = rows_of(tmp_path / "in")
    table = predict_all(model, rows, tmp_path / "out", embedding=True)
    by_id = {row["id"]: row for row in table.to_pylist()}
    assert len(by_id) == len(table) == 1797 + NUM_DAMAGED
    for name, fine in readable.items():
        row = by_id[f"damaged/{name}"]
        assert (row["status"] == "ok") is fine, (name, row["reason"])
        assert row["uri"] == str(tmp_path / "in" / "damaged" / name)
        results = ("class_index", "class_name", "kind", *NUMBERS, "embedding")
        assert all((row[column] is not None) is fine for column in results), name
        assert (
            row["reason"] is None
            if fine
            else row["reason"] and "\n" not in row["reason"]
        )
    assert {row["status"] for name, row in by_id.items() if "damaged" not in name} == {
        "ok"
    }
    # as at the end of a run: paths and reasons stay
    rows = read_images(str(tmp_path / "in"))
    pixels, reasons = decoding.decode_many(rows.images, model.size)
    rows = replace(
        rows, images=DecodedImages.of(rows.images, RowBlocks(pixels.split(7)), reasons)
    )
    assert predict_all(model, rows, tmp_path / "again", embedding=True).equals(table)


class Killed(BaseException):
    """Stands for SIGKILL: nothing may clean up after it."""


@pytest.mark.parametrize("after", [0, 3], ids=lambda n: f"after {n} batches")
def test_interrupted_work_continues_and_gives_the_same_table(
    tmp_path, monkeypatch, model, after
):
    rows, output = rows_of("digits"), tmp_path / "out"
    expected = predict_all(model, rows, tmp_path / "whole")
    calls, score_batch = [], type(model).score

    def mortal(self, images):
        calls.append(1)
        if len(calls) > after:
            raise Killed
        return score_batch(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "score", mortal)
        with pytest.raises(Killed):
            predict_all(model, rows, output)
    assert predictions.read_columns(Storage(str(output)), ["id"]) is None
    stored = sorted((output / FOLDER).glob("*.parquet"))
    assert len(stored) == after * model.batch_rows // predictions.MIN_PART_ROWS
    if stored:  # a file that a failing disk cut short is made again
        stored[0].write_bytes(stored[0].read_bytes()[:100])
    (output / FOLDER / ".part-000000.parquet.0a1b2c3d").write_bytes(b"half a part")
    assert predict_all(model, rows, output).equals(expected)
    assert len(list((output / FOLDER).iterdir())) == 5


def test_partitions_of_many_batches_give_the_same_table(tmp_path, monkeypatch, model):
    """Kills: batches that depend on the partition."""
    expected = predict_all(model, rows_of("digits"), tmp_path / "small", embedding=True)
    monkeypatch.setattr("uno.results.predictions.NUM_PARTITIONS", 1)
    table = predict_all(model, rows_of("digits"), tmp_path / "large", embedding=True)
    assert table.equals(expected)
    sizes = [len(list((tmp_path / n / FOLDER).iterdir())) for n in ("large", "small")]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    "mark", [b"{", b"[]", b"{}", b'{"made_from": {"format": 0}, "part_rows": 512}']
)
def test_what_another_version_had_begun_is_refused(tmp_path, model, mark):
    """Kills: half a table of other rows, a traceback for a mark of unknown form."""
    rows, part = rows_of("digits"), tmp_path / PART.format(0)
    writer_of(model, rows, tmp_path)
    part.write_bytes(b"kept")
    (tmp_path / MARK).write_bytes(mark)
    with pytest.raises(ConfigError, match="holds predictions of another version"):
        writer_of(model, rows, tmp_path)
    assert part.exists()


@pytest.mark.parametrize("finished", [True, False])
def test_other_predictions_in_the_directory_are_refused(
    tmp_path, model, other, renamed, finished
):
    rows = rows_of("digits", 30)
    if finished:
        table = predict_all(model, rows, tmp_path)
    else:
        writer_of(model, rows, tmp_path)  # claims the directory
    for changed, chosen, embedding, what in (
        (other, rows, False, "of another model"),
        (model, rows, True, "with another --embedding"),
        (renamed, rows, False, "under other class names"),
        (model, rows.take(np.arange(29)), False, "of other data"),
    ):
        with pytest.raises(
            ConfigError, match=rf"\A.* holds predictions {what}; choose .*\Z"
        ):
            predict_all(changed, chosen, tmp_path, embedding)
    if finished:
        assert pq.read_table(tmp_path / FOLDER).equals(table)
    replaced = predict_all(other, rows, tmp_path, replace=True)
    assert set(replaced["model_hash"].to_pylist()) == {other.model_hash}


def test_fewer_rows_leave_no_file_of_more_rows(tmp_path, model):
    """Kills: partitions of replaced predictions that a reader of the folder finds."""
    predict_all(model, rows_of("digits"), tmp_path)
    predict_all(model, rows_of("digits", 600), tmp_path, replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_somebody_elses_files_are_left_alone(tmp_path, model, replace):
    (tmp_path / FOLDER).mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / FOLDER / "data.parquet")
    with pytest.raises(ConfigError, match="holds no set of predictions"):
        predict_all(model, rows_of("digits"), tmp_path, replace=replace)
    assert pq.read_table(tmp_path / FOLDER).to_pydict() == {"x": [1]}


def test_sources_that_training_refuses(tmp_path, model):
    images, flat = read_digits().images.items[:6], tmp_path / "flat"
    write_digits(flat, images)
    (flat / "empty class").mkdir()
    (flat / "notes.txt").write_text("not an image")
    write_digits(flat / "train" / "n01440764", images[:2])
    write_digits(flat / "train" / "n99999999", images[:1])
    for source in (flat, f"folder:{flat}", f"imagenet:{flat}"):
        rows = rows_of(source)
        assert len(rows) == 9 and str(rows.ids[8]) == "train/n99999999/digit-0000.png"
    csv = flat / "table.csv"
    csv.write_text(
        "path,label,split,other\ndigit-0000.png,,nonsense,1\n,7,train,2\ndigit-0002.png,x,,\n"
    )
    table = predict_all(model, rows_of(csv), tmp_path / "out")
    assert (
        table["status"].to_pylist() == ["ok", "bad", "ok"]
        and table["id"].to_pylist()[0] == "row-0"
    )
    parquet = tmp_path / "images.parquet"
    data = [(flat / f"digit-{i:04d}.png").read_bytes() for i in range(3)]
    pq.write_table(
        pa.table({"image": [*data, None], "label": [0.5, 1.5, None, 2.5]}), parquet
    )
    table = predict_all(model, rows_of(parquet), tmp_path / "out2")
    assert table["status"].to_pylist() == ["ok", "ok", "ok", "bad"]


def test_names_that_are_no_text(tmp_path, model):
    """File names are bytes: the row is there, its id and uri are escaped."""
    names = [
        b"caf\xe9.png",
        b"new\nline.png",
        "<\u202e>\u00e9\U0001f600.png".encode(),
        b"'\"; --.png",
    ]
    (tmp_path / "in").mkdir()
    for name in names:
        with open(bytes(tmp_path / "in") + b"/" + name, "wb") as file:
            Image.fromarray(read_digits().images.items[0]).save(file, "PNG")
    table = predict_all(model, rows_of(tmp_path / "in"), tmp_path / "out")
    assert table["status"].to_pylist() == ["ok"] * len(names)
    assert any("caf\\xe9" in name for name in table["id"].to_pylist())


def raise_killed(*_):
    raise Killed


def test_rename_changes_names_only(tmp_path, monkeypatch, model, renamed):
    write_digits(tmp_path / "in", read_digits().images.items[:700])
    write_damaged(tmp_path / "in")
    before = predict_all(model, rows_of(tmp_path / "in"), tmp_path / "out")
    storage = Storage(str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(predictions.PartWriter, "write", raise_killed)
        with pytest.raises(Killed):
            predictions.rename(storage, renamed.classes)
    assert predictions.read_columns(storage, ["id"]) is None  # names are mixed
    assert predictions.rename(storage, renamed.classes)
    after = pq.read_table(tmp_path / "out" / FOLDER)
    assert after.drop_columns("class_name").equals(before.drop_columns("class_name"))
    expected = [
        "other" if name == "novel-1" else name
        for name in before["class_name"].to_pylist()
    ]
    assert after["class_name"].to_pylist() == expected
    # nothing is predicted again
    monkeypatch.setattr(type(model), "score", None)
    again = predict_all(renamed, rows_of(tmp_path / "in"), tmp_path / "out")
    assert again.equals(after)
    merged = [*renamed.classes[:9], OutputClass(9, "novel-5", "novel", 5)]
    assert not predictions.rename(storage, merged)


def test_a_callable_that_a_model_names_is_said_and_never_the_models_own(
    tmp_path, monkeypatch, caplog
):
    """Kills: code of a downloaded folder that runs because somebody stands in it, an
    import without a word, "damaged" for an encoder whose package is not here.
    """
    write_model(tmp_path / "run", model__encoder="tests.uno.toy_encoders:vit")
    load_classifier(Storage(str(tmp_path / "run")))
    assert "is code: tests.uno.toy_encoders:vit is imported from" in caplog.text
    config = tmp_path / "run" / "model" / "config.yaml"
    text = config.read_text()
    (config.parent / "evil.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(config.parent)
    for name, line in (
        (
            "evil:vit",
            (
                r"^model\.encoder evil:vit is not run: its code lies in the model's own"
                r" directory"
            ),
        ),
        ("no_such_package:vit", r"no_such_package:vit cannot be imported"),
        ("torchvision:no_such", r"torchvision has no 'no_such'"),
    ):
        config.write_text(text.replace("tests.uno.toy_encoders:vit", name))
        with pytest.raises(ConfigError, match=line):
            load_classifier(Storage(str(config.parent)))


def test_partitions_grow_with_the_rows_up_to_a_limit():
    sizes = [partition_rows(num) for num in (0, 1, 10**5, 10**6, 10**7, 10**9)]
    assert sizes == [512, 512, 512, 2048, 16384, 16384]

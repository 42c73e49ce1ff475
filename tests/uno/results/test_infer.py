"""Scores, aligned heads, and a table with one row for every input whatever happens
in between.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from tests.uno.models import (
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def digits():
    return read_digits()


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """``model``, one of its classes under another name."""
    folder = tmp_path_factory.mktemp("renamed")
    write_model(folder)
    path = folder / "model" / "classes.json"
    path.write_text(path.read_text().replace("novel-1", "other"))
    return load_classifier(Storage(str(folder)))


def classes_of(num_known: int, num_novel: int, into: dict[int, int | None]):
    kinds = ["known"] * num_known + ["novel"] * num_novel
    return [
        OutputClass(i, f"c{i}", kind, into.get(i, i)) for i, kind in enumerate(kinds)
    ]


def images_of(source: str | Path) -> Rows:
    config = override(Config(), {"data.source": str(source)})
    return read_rows(config.data, images_only=True)


def writer_of(model, rows: Rows, output: Path, embedding: bool = False, **options):
    return predictions.PredictionWriter(
        Storage(str(output)), rows, model, embedding, **options
    )


def predict_all(model, rows: Rows, output: Path, *args, **options) -> pa.Table:
    summary = predictions.predict_rows(
        model, writer_of(model, rows, output, *args, **options), threads=1
    )
    table = pq.read_table(output / predictions.FOLDER)
    assert summary.ok + summary.bad == summary.rows == len(table) == len(rows)
    return table


def logits_of(known, novel) -> Logits:
    return Logits(known[None], novel[None], None, torch.zeros(1, len(known), 2))


def reference(known, novel, temperature, best, into, alignment):
    """One row, in double precision, from the definitions."""

    def head(h):
        logits = [*known, *(novel[h, cluster] for cluster in alignment[h])]
        exps = [math.exp(value / temperature) for value in logits]
        total = [0.0] * len(exps)
        for i, value in enumerate(exps):
            # dropped: an outcome all the same
            total[i if into[i] is None else into[i]] += value / sum(exps)
        return total

    heads = [head(h) for h in range(len(novel))]
    votes = [p.index(max(p)) for p in heads]
    p = heads[best]
    first, second, *_ = sorted(p, reverse=True)
    return (
        votes[best],
        first,
        first - second,
        -sum(v * math.log(v) for v in p if v > 0),
        votes.count(votes[best]) / len(votes),
        sum(p[: len(known)]),
        p,
    )


@pytest.mark.parametrize(
    "into", [{}, {5: 6}, {4: 1, 6: None}], ids=["keep", "merge", "merge and drop"]
)
def test_score_equals_the_definition(into):
    """Kills: no temperature, softmax per family, another head's probabilities, votes
    that are not aligned or not merged, the dropped class handed to the others.
    """
    known, novel = torch.rand(20, 4) * 2 - 1, torch.rand(3, 20, 4) * 2 - 1
    alignment = torch.tensor([[2, 0, 1, 3], [0, 1, 2, 3], [3, 1, 0, 2]])
    classes = classes_of(4, 4, into)
    found = score(logits_of(known, novel), 0.1, 1, classes, alignment)[:-1]
    given = 0.1, 1, [c.into for c in classes], alignment.tolist()
    for row in range(20):
        cosines = known[row].double().tolist(), novel[:, row].double()
        for tensor, value in zip(found, reference(*cosines, *given), strict=True):
            np.testing.assert_allclose(tensor[row], value, rtol=1e-4, atol=1e-5)


def test_heads_that_only_number_their_clusters_differently_agree():
    """Kills: the alignment used backwards (a 3-cycle is not its own inverse)."""
    best = torch.rand(200, 5)
    orders = torch.stack([torch.randperm(5), torch.arange(5), torch.randperm(5)])
    novel = torch.stack([best[:, order] for order in orders])
    alignment = align_heads(novel, best_head=1)
    assert torch.equal(orders.gather(1, alignment), orders[1].expand(3, 5))
    logits = logits_of(torch.rand(200, 3) - 1, novel)
    scores = score(logits, 0.1, 1, classes_of(3, 5, {}), alignment)
    assert scores.head_agreement.eq(1).all()


def test_empty_clusters_are_aligned_too():
    novel = torch.zeros(2, 6, 4)
    novel[:, :, 0] = 1  # every row in one cluster
    own, another = align_heads(novel, 0).tolist()
    assert own == sorted(another) == [0, 1, 2, 3]


@pytest.fixture
def stored(tmp_path):
    """The folder of a model in the directory of its run."""
    write_model(tmp_path)
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["encoder.safetensors", "classes.json", "config.yaml"])
def test_a_file_that_was_cut_short_is_a_storage_error(tmp_path, stored, name):
    data = (stored / name).read_bytes()
    (stored / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(StorageError, match=r"\A.*damaged.*\Z"):
        load_classifier(Storage(str(tmp_path)))


def entries(num, **more):
    """The first classes of ``classes.json``."""
    kinds = ["known"] * 5 + ["novel"] * (num - 5)
    return [
        {"index": i, "name": str(i), "kind": kind, **more}
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"classes": entries(11)},
        {"classes": entries(10, drop=True)},
        {"best_head": math.inf},
        {"best_head": -1},
        {"alignment": [[math.inf]]},
    ],
    ids=["one class more", "all dropped", "head inf", "head -1", "alignment inf"],
)
def test_facts_that_do_not_fit_the_weights_are_a_storage_error(
    tmp_path, stored, change
):
    path = stored / "classes.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StorageError, match=r"do not belong together|is damaged"):
        load_classifier(Storage(str(tmp_path)))


def test_all_digits_in_order(tmp_path, model, digits):
    columns = predict_all(model, digits, tmp_path, embedding=True).to_pydict()
    assert columns["id"] == digits.ids.to_pylist() and len(columns["id"]) == 1797
    same = {
        "uri": None,
        "reason": None,
        "status": "ok",
        "model_hash": model.model_hash,
    }
    assert {name: columns[name] for name in same} == {
        name: [value] * 1797 for name, value in same.items()
    }
    found = [model.classes[i] for i in columns["class_index"]]
    assert columns["class_name"] == [each.name for each in found]
    assert columns["kind"] == [each.kind for each in found]
    assert [p.name for p in tmp_path.iterdir()] == [predictions.FOLDER]
    images = torch.from_numpy(digits.images.items[700:701]).permute(0, 3, 1, 2)
    single = model.score(images.contiguous())
    assert columns["class_index"][700] == int(single.class_index)
    assert columns["entropy"][700] == pytest.approx(float(single.entropy), rel=1e-4)
    embedding = torch.tensor(columns["embedding"])
    assert embedding.shape == (1797, 16)
    torch.testing.assert_close(embedding[700], single.features[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_a_partition_that_was_lost_is_predicted_again(
    tmp_path, model, monkeypatch, damage, embedding
):
    monkeypatch.setattr(predictions, "partition_rows", lambda num_rows: 700)
    whole = predict_all(model, read_digits(), tmp_path, embedding)
    damage(tmp_path / predictions.FOLDER / "part-000001.parquet")
    writer = writer_of(model, read_digits(), tmp_path, embedding)
    assert writer.missing == [1] and not writer.complete
    again = predict_all(model, read_digits(), tmp_path, embedding)
    assert again.equals(whole)
    assert writer_of(model, read_digits(), tmp_path, embedding).complete


def test_every_damaged_file_has_a_row(tmp_path, model):
    readable = write_damaged(tmp_path / "in")
    rows = images_of(tmp_path / "in")
    table = predict_all(model, rows, tmp_path / "out", embedding=True)
    found = {row["id"]: row for row in table.to_pylist()}
    assert found.keys() == readable.keys()
    for name, fine in readable.items():
        row = found[name]
        assert row["status"] == ("ok" if fine else "bad"), (name, row["reason"])
        assert row["uri"] == str(tmp_path / "in" / name)
        results = ("class_index", "class_name", "kind", *NUMBERS, "embedding")
        assert {row[column] is not None for column in results} == {fine}, name
        assert re.fullmatch("None" if fine else ".+", str(row["reason"]))
    # as at the end of a run: paths and reasons stay
    rows = read_images(str(tmp_path / "in"))
    pixels, reasons = decoding.decode_many(rows.images, model.size)
    decoded = DecodedImages.of(rows.images, RowBlocks(pixels.split(7)), reasons)
    rows = replace(rows, images=decoded)
    assert predict_all(model, rows, tmp_path / "again", True).equals(table)


@pytest.mark.parametrize("kind", ["", "folder:", "imagenet:"])
def test_every_image_below_a_folder_is_a_row(tmp_path, digits, kind):
    """Classes that training refuses do not matter."""
    write_digits(tmp_path, digits.images.items[:2])
    write_digits(tmp_path / "train" / "n99999999", digits.images.items[:1])
    (tmp_path / "notes.txt").write_text("not an image")
    names = ["digit-0000.png", "digit-0001.png", "train/n99999999/digit-0000.png"]
    assert images_of(f"{kind}{tmp_path}").ids.to_pylist() == names


class Killed(BaseException):
    """Stands for SIGKILL: nothing may clean up after it."""


@pytest.mark.parametrize("after", [0, 3], ids=lambda n: f"after {n} batches")
def test_interrupted_work_continues_and_gives_the_same_table(
    tmp_path, monkeypatch, model, digits, after
):
    output = tmp_path / "out"
    expected = predict_all(model, digits, tmp_path / "whole")
    with monkeypatch.context() as patch:
        fails = [DEFAULT] * after + [Killed]
        mortal = Mock(wraps=model.score, side_effect=fails)
        patch.setattr(type(model), "score", lambda self, images: mortal(images))
        with pytest.raises(Killed):
            predict_all(model, digits, output)
    assert predictions.read_columns(Storage(str(output)), ["id"]) is None
    parts = sorted((output / predictions.FOLDER).glob("*.parquet"))
    assert len(parts) == after * model.batch_rows // predictions.MIN_PART_ROWS
    for part in parts[:1]:  # a file that a failing disk cut short is made again
        part.write_bytes(part.read_bytes()[:100])
    (output / predictions.FOLDER / ".part-000000.parquet.0a1b2c3d").write_bytes(
        b"half a part"
    )
    assert predict_all(model, digits, output).equals(expected)
    assert len(list((output / predictions.FOLDER).iterdir())) == 5


@pytest.mark.parametrize(
    "mark", [b"{", b"[]", b"{}", b'{"made_from": {"format": 0}, "part_rows": 512}']
)
def test_what_another_version_had_begun_is_refused(tmp_path, model, digits, mark):
    """Kills: half a table of other rows, a traceback for a mark of unknown form."""
    writer_of(model, digits, tmp_path)
    part = tmp_path / predictions.PART.format(0)
    part.write_bytes(b"kept")
    (tmp_path / predictions.MARK).write_bytes(mark)
    with pytest.raises(ConfigError, match="holds predictions of another version"):
        writer_of(model, digits, tmp_path)
    assert part.exists()


@pytest.mark.parametrize("finished", [True, False])
def test_other_predictions_in_the_directory_are_refused(
    tmp_path, model, renamed, digits, finished
):
    # of the same weights, with another transform
    other = tiny_model(tmp_path / "other", data__mean=(0.5, 0.5, 0.5))
    rows, fewer = (digits.take(np.arange(num)) for num in (30, 29))
    # the second one only claims the directory
    (predict_all if finished else writer_of)(model, rows, tmp_path)
    before = {
        path: path.read_bytes() for path in tmp_path.glob(f"{predictions.FOLDER}/*")
    }
    for what, *asked in (
        ("of another model", other, rows, False),
        ("with another --embedding", model, rows, True),
        ("under other class names", renamed, rows, False),
        ("of other data", model, fewer, False),
    ):
        with pytest.raises(ConfigError, match=rf"\A.* holds predictions {what}; .*\Z"):
            predict_all(asked[0], asked[1], tmp_path, asked[2])
    assert {path: path.read_bytes() for path in before} == before
    replaced = predict_all(other, rows, tmp_path, replace=True)
    assert set(replaced["model_hash"].to_pylist()) == {other.model_hash}


def test_fewer_rows_leave_no_file_of_more_rows(tmp_path, model, digits):
    """Kills: partitions of replaced predictions that a reader of the folder finds."""
    predict_all(model, digits, tmp_path)
    predict_all(model, digits.take(np.arange(600)), tmp_path, replace=True)


def test_somebody_elses_files_are_not_replaced(tmp_path, model, digits):
    path = tmp_path / predictions.FOLDER / "data.parquet"
    path.parent.mkdir()
    path.write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="holds no set of predictions"):
        predict_all(model, digits, tmp_path, replace=True)
    assert path.read_bytes() == b"theirs"


def test_rows_of_tables_that_training_refuses(tmp_path, digits, model):
    """Kills: labels and splits that are read although nothing needs them."""
    write_digits(tmp_path, digits.images.items[:2])
    csv, parquet = tmp_path / "table.csv", tmp_path / "images.parquet"
    csv.write_text(
        "path,label,split,other\ndigit-0000.png,,nonsense,1\n,7,train,2\n"
        "digit-0001.png,x,,\n"
    )
    image = (tmp_path / "digit-0000.png").read_bytes()
    table = pa.table({"image": [image, None, image], "label": [0.5, 1.5, None]})
    pq.write_table(table, parquet)
    for source in (csv, parquet):
        found = predict_all(model, images_of(source), tmp_path / source.stem)
        assert found["status"].to_pylist() == ["ok", "bad", "ok"]


def test_rename_changes_names_only(tmp_path, monkeypatch, model, renamed, digits):
    write_digits(tmp_path / "in", digits.images.items[:700])
    write_damaged(tmp_path / "in")
    rows, storage = images_of(tmp_path / "in"), Storage(str(tmp_path / "out"))
    before = predict_all(model, rows, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(predictions.PartWriter, "write", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            predictions.rename(storage, renamed.classes)
    assert predictions.read_columns(storage, ["id"]) is None  # names are mixed
    assert predictions.rename(storage, renamed.classes)
    after = pq.read_table(tmp_path / "out" / predictions.FOLDER)
    names = pc.replace_substring(before["class_name"], "novel-1", "other")
    column = before.schema.get_field_index("class_name")
    assert after.equals(before.set_column(column, before.field(column), names))
    # nothing is predicted again
    monkeypatch.setattr(type(model), "score", None)
    assert predict_all(renamed, rows, tmp_path / "out").equals(after)
    merged = [*renamed.classes[:9], OutputClass(9, "novel-5", "novel", 5)]
    assert not predictions.rename(storage, merged)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "evil:vit",
            "^model.encoder evil:vit is not run: its code lies in the model's own",
        ),
        ("no_such_package:vit", "no_such_package:vit cannot be imported"),
        ("torchvision:no_such", "torchvision has no 'no_such'"),
    ],
)
def test_a_callable_that_a_model_names_is_never_the_models_own(
    stored, monkeypatch, name, line
):
    """Kills: code of a downloaded folder that runs because somebody stands in it,
    "damaged" for an encoder whose package is not here.
    """
    config = stored / "config.yaml"
    config.write_text(re.sub("encoder: [^,]*", f"encoder: {name}", config.read_text()))
    (stored / "evil.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(stored)
    with pytest.raises(ConfigError, match=line):
        load_classifier(Storage(str(stored)))


def test_a_callable_that_a_model_names_is_said(tmp_path, caplog):
    tiny_model(tmp_path, model__encoder="tests.uno.toy_encoders:vit")
    assert "is code: tests.uno.toy_encoders:vit is imported from" in caplog.text

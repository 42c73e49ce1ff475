"""Scores, aligned heads, and a table with one row for every input whatever happens in between."""

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

from tests.uno.models import NUM_DAMAGED, tiny_model, write_damaged, write_digits, write_model
from uno.config import Config, override
from uno.data import decode as decoding
from uno.data.files import Storage
from uno.data.rows import Decoded, Rows
from uno.data.sources import read_digits, read_inputs
from uno.errors import ConfigError, StorageError
from uno.model import Logits
from uno.results import predictions
from uno.results.classes import OutputClass
from uno.results.infer import NUMBERS, align_heads, decoder, load_classifier, score, with_alignment
from uno.results.predictions import FILE, SHARD_ROWS, PredictionWriter, predict_rows


def classes_of(num_known: int, num_novel: int, into: dict[int, int | None] | None = None):
    kinds = ["known"] * num_known + ["novel"] * num_novel
    return [OutputClass(i, f"c{i}", kind, (into or {}).get(i, i)) for i, kind in enumerate(kinds)]


def rows_of(source: str | Path) -> Rows:
    return read_inputs(override(Config(), {"data.source": str(source)}).data)


def predict_all(model, rows: Rows, output: Path, **options) -> pa.Table:
    writer = PredictionWriter(Storage(str(output)), rows, model, options.pop("embedding", False), **options)
    summary = predict_rows(model, decoder(model, rows, threads=1), writer)
    table = pq.read_table(output / FILE)
    assert summary.ok + summary.bad == summary.rows == len(table) == len(rows)
    return table


# ----------------------------------------------------------------------------------------------------- scores
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
            if into[i] is not None:
                total[into[i]] += value / sum(exps)
        return total

    votes = [max(range(len(p)), key=p.__getitem__) for p in map(head, range(num_heads))]
    p = head(best)
    ranked = sorted(p, reverse=True)
    outcomes = [*p, 1 - sum(p)]
    entropy = -sum(v * math.log(v) for v in outcomes if v > 1e-12)
    agreement = sum(vote == votes[best] for vote in votes) / num_heads
    return votes[best], ranked[0], ranked[0] - ranked[1], entropy, agreement, sum(p[:num_known]), p


@pytest.mark.parametrize("into", [{}, {5: 6}, {4: 1, 6: None}], ids=["keep", "merge", "merge and drop"])
def test_score_equals_the_definition(into):
    """Kills: no temperature, softmax per family, another head's probabilities, votes that are not aligned or
    not merged, the dropped class handed to the others, entropy without it.
    """
    generator = torch.Generator().manual_seed(3)
    known = torch.rand(20, 4, generator=generator) * 2 - 1
    novel = torch.rand(3, 20, 4, generator=generator) * 2 - 1
    alignment = torch.tensor([[2, 0, 1, 3], [0, 1, 2, 3], [3, 1, 0, 2]])
    classes = classes_of(4, 4, into)
    found = score(logits_of(known, novel), 0.1, 1, classes, alignment)[:-1]
    targets = [c.into for c in classes]
    for row in range(20):
        expected = reference(
            known[row].double().tolist(), novel[:, row].double(), 0.1, 1, targets, alignment.tolist()
        )
        for tensor, value in zip(found, expected, strict=True):
            torch.testing.assert_close(
                tensor[row].double(), torch.tensor(value).double(), rtol=1e-4, atol=1e-5
            )


def test_heads_that_only_number_their_clusters_differently_agree():
    """Kills: the alignment used backwards (a 3-cycle is not its own inverse)."""
    generator = torch.Generator().manual_seed(0)
    best = torch.rand(200, 5, generator=generator)
    orders = [torch.randperm(5, generator=generator) for _ in range(2)]
    novel = torch.stack([best[:, orders[0]], best, best[:, orders[1]]])
    alignment = align_heads(novel, best_head=1)
    assert alignment[1].tolist() == [0, 1, 2, 3, 4]
    for head, order in ((0, orders[0]), (2, orders[1])):
        assert torch.equal(order[alignment[head]], torch.arange(5))
    logits = logits_of(torch.rand(200, 3, generator=generator) - 1, novel)
    assert score(logits, 0.1, 1, classes_of(3, 5), alignment).head_agreement.eq(1).all()
    unaligned = torch.arange(5).expand(3, 5)
    assert score(logits, 0.1, 1, classes_of(3, 5), unaligned).head_agreement.mean() < 0.8


def test_alignment_is_a_permutation_where_clusters_are_empty():
    novel = torch.zeros(2, 6, 4)
    novel[:, :, 0] = 1  # every row in one cluster
    assert all(sorted(row) == [0, 1, 2, 3] for row in align_heads(novel, 0).tolist())
    assert align_heads(novel, 0)[0].tolist() == [0, 1, 2, 3]


def test_alignment_is_kept_with_the_model(tmp_path):
    write_model(tmp_path, aligned=False)
    storage = Storage(str(tmp_path))
    model = load_classifier(storage)
    assert model.alignment is None
    aligned = with_alignment(model, storage, decoder(model, read_digits(), threads=1), np.arange(100))
    assert torch.equal(load_classifier(storage).alignment, aligned.alignment)
    assert aligned.model_hash == load_classifier(storage).model_hash == model.model_hash


# ---------------------------------------------------------------------------------------------------- loading
def test_no_model_and_damaged_models_are_storage_errors(tmp_path):
    with pytest.raises(StorageError, match="no trained model"):
        load_classifier(Storage(str(tmp_path / "nothing")))
    write_model(tmp_path)
    for name in ("encoder.safetensors", "classes.json", "config.yaml"):
        path = tmp_path / "model" / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(StorageError, match="damaged") as error:
            load_classifier(Storage(str(tmp_path)))
        assert "\n" not in str(error.value)
        path.write_bytes(data)
    facts = json.loads((tmp_path / "model" / "classes.json").read_text())
    facts["classes"].append({"index": 10, "name": "one more", "kind": "novel"})
    (tmp_path / "model" / "classes.json").write_text(json.dumps(facts))
    with pytest.raises(StorageError, match="do not belong together"):
        load_classifier(Storage(str(tmp_path)))


def test_model_hash_is_of_the_weights_not_of_the_names(tmp_path):
    first = tiny_model(tmp_path / "a")
    write_model(tmp_path / "b")
    path = tmp_path / "b" / "model" / "classes.json"
    path.write_text(path.read_text().replace("novel-1", "other"))
    assert load_classifier(Storage(str(tmp_path / "b"))).model_hash == first.model_hash
    assert tiny_model(tmp_path / "c", model__width=8).model_hash != first.model_hash
    assert tiny_model(tmp_path / "d", data__mean=(0.5, 0.5, 0.5)).model_hash != first.model_hash


# -------------------------------------------------------------------------------------------------- the table
def test_all_digits_in_order(tmp_path):
    model = tiny_model(tmp_path / "run")
    rows = rows_of("digits")
    table = predict_all(model, rows, tmp_path / "out", embedding=True)
    assert len(table) == 1797 and table["id"].to_pylist() == rows.ids
    assert table["uri"].null_count == 1797 and table["reason"].null_count == 1797
    assert set(table["status"].to_pylist()) == {"ok"}
    assert set(table["model_hash"].to_pylist()) == {model.model_hash}
    assert {len(values) for values in table["embedding"].to_pylist()} == {16}
    names = [c.name for c in model.classes]
    assert table["class_name"].to_pylist() == [names[i] for i in table["class_index"].to_pylist()]
    kinds = ["known" if i < 5 else "novel" for i in table["class_index"].to_pylist()]
    assert table["kind"].to_pylist() == kinds
    assert [p.name for p in (tmp_path / "out").iterdir()] == [FILE]
    single = model.score(torch.from_numpy(rows.images[700:701].transpose(0, 3, 1, 2).copy()))
    assert table["class_index"][700].as_py() == int(single.class_index)
    assert table["entropy"][700].as_py() == pytest.approx(float(single.entropy), rel=1e-4)
    np.testing.assert_allclose(table["embedding"][700].as_py(), single.features[0], rtol=1e-4, atol=1e-5)


def test_every_digit_and_every_damaged_file_has_a_row(tmp_path):
    model = tiny_model(tmp_path / "run")
    write_digits(tmp_path / "in", read_digits().images)
    readable = write_damaged(tmp_path / "in" / "damaged")
    table = predict_all(model, rows_of(tmp_path / "in"), tmp_path / "out", embedding=True)
    assert len(table) == 1797 + NUM_DAMAGED and len(set(table["id"].to_pylist())) == len(table)
    by_id = {row["id"]: row for row in table.to_pylist()}
    for name, fine in readable.items():
        row = by_id[f"damaged/{name}"]
        assert (row["status"] == "ok") is fine, (name, row["reason"])
        assert row["uri"] == str(tmp_path / "in" / "damaged" / name)
        results = ("class_index", "class_name", "kind", *NUMBERS, "embedding")
        assert all((row[column] is not None) is fine for column in results), name
        assert (row["reason"] is None) is fine
        assert fine or ("\n" not in row["reason"] and row["reason"])
    assert {row["status"] for name, row in by_id.items() if "damaged" not in name} == {"ok"}
    rows = rows_of(tmp_path / "in")  # the end of a run, which has decoded them: paths and reasons stay
    pixels, reasons = decoding.decode_many(rows.images, model.size)
    rows = replace(rows, images=Decoded(rows.images, pixels.numpy(), reasons))
    assert predict_all(model, rows, tmp_path / "again", embedding=True).equals(table)


def test_decoding_stays_a_few_batches_ahead(tmp_path, monkeypatch):
    """Memory is bounded: kills a queue without limit."""
    started = 0
    decode = decoding.decode_many

    def counted(*args):
        nonlocal started
        started += 1
        return decode(*args)

    monkeypatch.setattr(decoding, "decode_many", counted)
    rows = rows_of("digits")
    batches = [np.arange(i, i + 10) for i in range(0, 1000, 10)]
    for taken, _ in enumerate(decoding.decoded(rows.images, batches, 8, threads=1), start=1):
        assert started <= taken + decoding.BATCHES_AHEAD
    assert taken == started == 100


class Killed(BaseException):
    """Stands for SIGKILL: nothing may clean up after it."""


@pytest.mark.parametrize("after", [0, 1, 3, 5], ids=lambda n: f"after {n} batches")
def test_interrupted_work_continues_and_gives_the_same_table(tmp_path, monkeypatch, after):
    model = tiny_model(tmp_path / "run")
    rows = rows_of("digits")
    expected = predict_all(model, rows, tmp_path / "whole")
    calls = 0
    score_batch = type(model).score

    def mortal(self, images):
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return score_batch(self, images)

    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "score", mortal)
        with pytest.raises(Killed):
            predict_all(model, rows, output)
    assert not (output / FILE).exists()
    stored = sorted((output / "_shards").glob("*.parquet"))
    assert len(stored) == after * model.batch_rows // SHARD_ROWS
    if stored:  # a shard that a failing disk cut short is made again
        stored[0].write_bytes(stored[0].read_bytes()[:100])
    (output / f".{FILE}.abcd").write_bytes(b"half of a table")
    assert predict_all(model, rows, output).equals(expected)
    assert [p.name for p in output.iterdir()] == [FILE]


def test_a_kill_between_joining_and_tidying_up_costs_nothing(tmp_path, monkeypatch):
    model, rows = tiny_model(tmp_path / "run"), rows_of("digits").take(np.arange(600))
    expected = predict_all(model, rows, tmp_path / "out")
    (tmp_path / "out" / "_shards").mkdir()
    (tmp_path / "out" / "_shards" / "000000.parquet").write_bytes(b"left over")
    monkeypatch.setattr(type(model), "score", None)  # nothing is computed again
    assert predict_all(model, rows, tmp_path / "out").equals(expected)
    assert not (tmp_path / "out" / "_shards").exists()


def test_other_predictions_in_the_directory_are_refused(tmp_path):
    model = tiny_model(tmp_path / "run")
    other = tiny_model(tmp_path / "other", data__mean=(0.5, 0.5, 0.5))
    rows = rows_of("digits").take(np.arange(30))
    output = tmp_path / "out"
    table = predict_all(model, rows, output)
    for changed, options, what in (
        (other, {}, "of another model"),
        (model, {"embedding": True}, "another --embedding"),
        (load_renamed(tmp_path), {}, "other class names"),
    ):
        with pytest.raises(ConfigError, match=what) as error:
            predict_all(changed, rows, output, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="of other data"):
        predict_all(model, rows.take(np.arange(29)), output)
    assert pq.read_table(output / FILE).equals(table)
    assert set(predict_all(other, rows, output, replace=True)["model_hash"].to_pylist()) == {other.model_hash}


def load_renamed(tmp_path: Path):
    write_model(tmp_path / "renamed")
    path = tmp_path / "renamed" / "model" / "classes.json"
    path.write_text(path.read_text().replace("novel-1", "other"))
    return load_classifier(Storage(str(tmp_path / "renamed")))


def test_unfinished_work_of_another_model_is_refused(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "run")
    rows = rows_of("digits").take(np.arange(30))
    PredictionWriter(Storage(str(tmp_path / "out")), rows, model, False)  # claims the directory
    other = tiny_model(tmp_path / "other", data__mean=(0.5, 0.5, 0.5))
    with pytest.raises(ConfigError, match="of another model"):
        PredictionWriter(Storage(str(tmp_path / "out")), rows, other, False)


@pytest.mark.parametrize("name", ["data.parquet", FILE])
def test_somebody_elses_parquet_is_left_alone(tmp_path, name):
    model = tiny_model(tmp_path / "run")
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "out" / name)
    with pytest.raises(ConfigError, match="not ours"):
        predict_all(model, rows_of("digits"), tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / name).to_pydict() == {"x": [1]}


# --------------------------------------------------------------------------------------------------- sources
def test_sources_that_training_refuses(tmp_path):
    model = tiny_model(tmp_path / "run")
    images = read_digits().images[:6]
    flat = tmp_path / "flat"
    write_digits(flat, images)
    (flat / "empty class").mkdir()
    (flat / "notes.txt").write_text("not an image")
    write_digits(flat / "train" / "n01440764", images[:2])
    write_digits(flat / "train" / "n99999999", images[:1])
    for source in (flat, f"folder:{flat}", f"imagenet:{flat}"):
        rows = rows_of(source)
        assert len(rows) == 9 and set(rows.labels) == {None}
        assert rows.ids[-1] == "train/n99999999/digit-0000.png"
    csv = flat / "table.csv"
    csv.write_text("path,label,split,other\ndigit-0000.png,,nonsense,1\n,7,train,2\ndigit-0002.png,x,,\n")
    table = predict_all(model, rows_of(csv), tmp_path / "out")
    assert table["status"].to_pylist() == ["ok", "bad", "ok"] and table["id"].to_pylist()[0] == "row-0"
    parquet = tmp_path / "images.parquet"
    data = [(flat / f"digit-{i:04d}.png").read_bytes() for i in range(3)]
    pq.write_table(pa.table({"image": [*data, None], "label": [0.5, 1.5, None, 2.5]}), parquet)
    table = predict_all(model, rows_of(parquet), tmp_path / "out2")
    assert table["status"].to_pylist() == ["ok", "ok", "ok", "bad"]


def test_names_that_are_no_text(tmp_path):
    """File names are bytes: the row is there, its id and uri are escaped."""
    model = tiny_model(tmp_path / "run")
    folder = tmp_path / "in"
    folder.mkdir()
    names = [b"caf\xe9.png", b"new\nline.png", "<\u202e>\u00e9\U0001f600.png".encode(), b"'\"; --.png"]
    for name in names:
        with open(bytes(folder) + b"/" + name, "wb") as file:
            Image.fromarray(read_digits().images[0]).save(file, "PNG")
    table = predict_all(model, rows_of(folder), tmp_path / "out")
    assert table["status"].to_pylist() == ["ok"] * len(names)
    assert any("caf\\xe9" in name for name in table["id"].to_pylist())


def test_rename_changes_names_only(tmp_path):
    model = tiny_model(tmp_path / "run")
    write_digits(tmp_path / "in", read_digits().images[:700])
    write_damaged(tmp_path / "in")
    before = predict_all(model, rows_of(tmp_path / "in"), tmp_path / "out")
    renamed = load_renamed(tmp_path)
    storage = Storage(str(tmp_path / "out"))
    assert predictions.rename(storage, renamed.classes)
    after = pq.read_table(tmp_path / "out" / FILE)
    assert after.drop_columns("class_name").equals(before.drop_columns("class_name"))
    expected = ["other" if name == "novel-1" else name for name in before["class_name"].to_pylist()]
    assert after["class_name"].to_pylist() == expected
    assert predict_all(renamed, rows_of(tmp_path / "in"), tmp_path / "out").equals(after)  # it is complete
    merged = [*renamed.classes[:9], OutputClass(9, "novel-5", "novel", 5)]
    assert not predictions.rename(storage, merged)

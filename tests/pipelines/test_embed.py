"""``uno embed``: vectors of a source that the source of vectors reads, also after a
kill or damage.
"""

from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import cli
from tests.pipelines.small import SMALL, refused, write_weights
from tests.uno.models import write_digits
from tests.uno.small_run import small_config
from uno.config import DataConfig
from uno.data import features
from uno.data.rows import Rows
from uno.data.sources import read_digits, read_rows


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> list[str]:
    """A command without its output: 150 digits of each split through an encoder that
    has learnt nothing.
    """
    folder = tmp_path_factory.mktemp("embed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_weights(folder / "e.safetensors", small_config().model)
    argv = [
        *SMALL,
        *("--limit", "150", "--augment.small.num-views", "0"),
        *("--compute.cache", f"{folder}/cache", "--weights", f"{folder}/e.safetensors"),
    ]
    return ["embed", *argv]


def read(path: Path) -> dict[str, np.ndarray]:
    """Views (V, D) by id."""
    rows = read_rows(DataConfig(source=f"vectors:{path}"))
    values, reasons = rows.images.vectors(np.arange(len(rows)))
    assert reasons == [None] * len(rows)
    return dict(zip(rows.ids.to_pylist(), values.numpy(), strict=True))


def facts_of(rows: Rows) -> dict[str, tuple]:
    """The label and the split of each row by its id."""
    table = pa.table({"id": rows.ids, "label": rows.labels, "split": rows.split})
    return {row["id"]: (row["label"], row["split"]) for row in table.to_pylist()}


def test_the_file_is_a_source_with_as_many_views_as_asked(line, tmp_path):
    """Kills: views that are left out or are all one, labels or splits that are lost,
    another encoder.
    """
    plain, viewed = tmp_path / "plain.parquet", tmp_path / "viewed.parquet"
    few = [*line, "--limit", "20"]
    assert cli.main([*few, "--output", str(plain)]) == 0
    assert cli.main([*few, "--output", str(viewed), "--views", "3"]) == 0
    one, four = read(plain), read(viewed)
    rows = read_rows(DataConfig(source=f"vectors:{plain}"))
    assert len(rows) == 40 and [*one] == [*four]
    assert facts_of(rows).items() <= facts_of(read_digits()).items()
    for name, vector in one.items():
        assert vector.shape == (1, four[name].shape[1]) and len(four[name]) == 4
        np.testing.assert_allclose(vector[0], four[name][0], atol=1e-5)
        assert len(np.unique(four[name], axis=0)) == 4


def begun(encode: Mock) -> list[int]:
    """The first row of each chunk that was encoded."""
    return [int(call.args[2][0]) for call in encode.call_args_list]


def test_it_goes_on_after_a_stop_and_makes_a_damaged_file_again(
    line, tmp_path, monkeypatch
):
    """Kills: finished rows that are encoded twice, a damaged one that is
    believed.
    """
    output = tmp_path / "a.parquet"
    line = [*line, "--compute.cache", f"{tmp_path}/cache", "--output", str(output)]
    monkeypatch.setattr(features, "PART_SECONDS", -1.0)  # a file for each chunk
    encode = Mock(wraps=features.encode_chunk, side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(features, "encode_chunk", encode)
    assert cli.main(line) == 130 and not output.exists()
    (part,) = (tmp_path / "cache").rglob("*.parquet")
    encode.reset_mock(side_effect=True)
    assert cli.main(line) == 0 and begun(encode) == [128, 256]
    first = read(output)
    part.write_bytes(part.read_bytes()[:-9] + b"x" * 9)
    encode.reset_mock()
    assert cli.main(line) == 0 and begun(encode) == [0]
    np.testing.assert_equal(read(output), first)


def test_bad_images_are_left_out_and_paths_lead_to_pictures(line, tmp_path, capsys):
    """Kills: a vector of zeros for an image that cannot be read, a path that leads
    elsewhere.
    """
    write_digits(tmp_path / "images", read_digits().images.items[:20])
    (tmp_path / "images" / "0.png").write_bytes(b"no image")
    words = ["--data", f"folder:{tmp_path}/images", "--data.max-bad-fraction", ".1"]
    assert cli.main([*line, *words, "--output", f"{tmp_path}/v.parquet"]) == 0
    assert "1 unreadable image" in capsys.readouterr().out
    rows = read_rows(DataConfig(source=f"vectors:{tmp_path}/v.parquet"))
    assert len(rows) == 20 and "0.png" not in rows.ids.to_pylist()
    assert rows.images.pictures().paths(np.arange(20)) == [
        str(tmp_path / "images" / i) for i in rows.ids.to_pylist()
    ]


def test_what_cannot_be_written_is_refused(line, tmp_path, capsys):
    mine = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"a": [1]}), mine)
    assert "was not written by uno embed" in refused(capsys, 2, *line, "--output", mine)
    assert "FILE.parquet" in refused(capsys, 2, *line, "--output", tmp_path / "folder")
    assert "needs pretrained weights" in refused(
        capsys, 2, *line[:-2], "--output", tmp_path / "v.parquet"
    )

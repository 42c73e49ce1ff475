"""Cells of anndata: what anndata writes is read, and what is written anndata reads."""

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines import cli
from tests.uno.data.builders import write_images
from tests.uno.models import write_model
from uno.config import DataConfig
from uno.data.sources import read_rows
from uno.errors import ConfigError

VALUES = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TYPES = ["B", None, "T", "T", None, "B"]


def write_cells(path, obs: dict[str, Any], names: Any = None, **parts: Any) -> str:
    """Write an AnnData of six cells, and return it as a source."""
    import anndata
    import pandas as pd

    index = [f"cell{i}" for i in range(6)] if names is None else names
    with anndata.settings.override(allow_write_nullable_strings=True):
        frame = pd.DataFrame(obs, index=index)
        anndata.AnnData(obs=frame, **parts).write_h5ad(path)
    return f"vectors:{path}"


def read(source: str, **more: Any) -> Any:
    return read_rows(DataConfig(source=source, **more))


def columns_of_every_encoding() -> dict[str, Any]:
    import pandas as pd

    number = {"B": 0, "T": 1, None: None}
    return {
        "categories": pd.Categorical(TYPES),
        "text": pd.array(TYPES, dtype="string"),
        "empty text": [name or "" for name in TYPES],
        "nullable integers": pd.array([number[name] for name in TYPES], "Int64"),
        "nullable booleans": pd.array(
            [name and name == "B" for name in TYPES], "boolean"
        ),
        "floats": [np.nan if name is None else number[name] for name in TYPES],
    }


@pytest.mark.parametrize(
    "name",
    [
        *("categories", "text", "empty text", "nullable integers"),
        *("nullable booleans", "floats"),
    ],
)
def test_labels_in_every_encoding_of_obs_are_read(tmp_path, name):
    obs = columns_of_every_encoding()
    source = write_cells(tmp_path / "c.h5ad", obs, obsm={"X_pca": VALUES})
    rows = read(source, columns=f"label={name}")
    labels = rows.labels.to_pylist()
    assert [label is None for label in labels] == [name is None for name in TYPES]
    assert len({*zip(labels, TYPES, strict=True)}) == 3
    assert rows.ids.to_pylist() == [f"cell{i}" for i in range(6)]
    assert np.array_equal(rows.images.values[:, 0], VALUES)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("place", ["X", "X_other"])
def test_dense_arrays_are_read(tmp_path, kind, place):
    array = VALUES.astype(kind)
    obsm = {"X_pca": VALUES * 2, place: array}
    parts = {"X": array} if place == "X" else {"obsm": obsm}
    source = write_cells(tmp_path / "c.h5ad", {"label": TYPES}, **parts)
    rows = read(source, columns=f"embedding={place}")
    assert np.allclose(rows.images.values[:, 0], VALUES)


def test_a_sparse_array_is_refused_with_a_way_to_reduce_it(tmp_path):
    from scipy import sparse

    genes = sparse.csr_matrix(VALUES)
    source = write_cells(tmp_path / "c.h5ad", {"label": TYPES}, X=genes)
    with pytest.raises(ConfigError, match=r"sparse matrix.*scanpy\.pp\.pca"):
        read(source, columns="embedding=X")


def test_the_array_that_is_read_by_default_is_named(tmp_path):
    obsm = {"X_umap": VALUES[:, :2], "X_pca": VALUES}
    source = write_cells(tmp_path / "c.h5ad", {"cell_type": TYPES}, obsm=obsm)
    rows = read(source)
    assert np.array_equal(rows.images.values[:, 0], VALUES)
    assert "obsm['X_pca']" in rows.notes[0]
    assert "--data.columns label=cell_type" in rows.notes[1]


@pytest.mark.parametrize(
    ("parts", "columns", "expected"),
    [
        ({"obsm": {"X_a": VALUES, "X_b": VALUES}}, None, "X_a, X_b; say which"),
        ({"X": VALUES}, None, "embedding=X"),
        ({"obsm": {"X_a": VALUES}}, "label=kind", "it has cell_type, X_a"),
        ({"obsm": {"X_a": VALUES}}, "embedding=X", "it has cell_type, X_a"),
        ({"obsm": {"X_a": VALUES}}, "embedding=cell_type", "is no array.*it has X_a"),
        ({"obsm": {"X_a": VALUES}, "names": ["a"] * 6}, None, "obs_names_make_unique"),
    ],
)
def test_what_is_not_clear_is_refused_with_the_keys_that_are_there(
    tmp_path, parts, columns, expected
):
    source = write_cells(tmp_path / "c.h5ad", {"cell_type": TYPES}, **parts)
    with pytest.raises(ConfigError, match=expected):
        read(source, columns=columns)


def test_links_to_other_files_are_refused(tmp_path):
    import h5py

    source = write_cells(tmp_path / "c.h5ad", {"label": TYPES}, obsm={"X_a": VALUES})
    (tmp_path / "secret").write_bytes(VALUES.tobytes())
    with h5py.File(tmp_path / "c.h5ad", "a") as file:
        del file["obsm/X_a"]
        external = [(str(tmp_path / "secret"), 0, VALUES.nbytes)]
        file["obsm"].create_dataset("X_a", (6, 4), np.float32, external=external)
    with pytest.raises(ConfigError, match="link to data elsewhere"):
        read(source)


@pytest.mark.parametrize("target", ["c.h5ad", "gone.h5ad"])
def test_a_link_in_the_place_of_x_leaves_the_other_arrays(tmp_path, target):
    import h5py

    source = write_cells(tmp_path / "c.h5ad", {"label": TYPES}, obsm={"X_a": VALUES})
    with h5py.File(tmp_path / "c.h5ad", "a") as file:
        file.pop("X", None)
        file["X"] = h5py.ExternalLink(str(tmp_path / target), "obsm/X_a")
    assert np.allclose(read(source).images.values[:, 0], VALUES)
    with pytest.raises(ConfigError, match="embedding=X: no such column; it has"):
        read(source, columns="embedding=X")


def test_a_damaged_file_of_cells_is_one_line(tmp_path):
    source = write_cells(tmp_path / "c.h5ad", {"label": TYPES}, obsm={"X_a": VALUES})
    content = (tmp_path / "c.h5ad").read_bytes()
    (tmp_path / "c.h5ad").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"no \.h5ad file that can be read"):
        read(source)


def test_anndata_reads_predictions_and_embeddings(tmp_path):
    import anndata

    write_model(tmp_path / "run")
    write_images(tmp_path / "images", ["a.png", "b.png"])
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    out = str(tmp_path / "out")
    data = ["--data", f"folder:{tmp_path}/images"]
    predict = ["predict", str(tmp_path / "run"), *data, "--output", out]
    assert cli.main([*predict, "--embedding"]) == 0
    assert cli.main(["export", out, "--format", "h5ad"]) == 0
    cells = anndata.read_h5ad(tmp_path / "out" / "predictions.h5ad")
    table = pq.read_table(tmp_path / "out" / "predictions").to_pylist()
    for row, (name, cell) in zip(table, cells.obs.iterrows(), strict=True):
        assert name == row["id"] and cell["status"] == row["status"]
        if row["status"] == "ok":
            assert cell["class_name"] == row["class_name"]
            assert cell["probability"] == pytest.approx(row["probability"])
            assert np.array_equal(cells[name].obsm["X_uno"][0], row["embedding"])
        else:
            assert cell["class_name"] != cell["class_name"]  # NaN
            assert np.isnan(cells[name].obsm["X_uno"]).all()


def test_predictions_without_a_readable_image_are_exported(tmp_path):
    import anndata

    write_model(tmp_path / "run")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    predict = ["predict", str(tmp_path / "run"), "--data", f"folder:{tmp_path}/images"]
    assert cli.main([*predict, "--output", str(tmp_path), "--embedding"]) == 0
    assert cli.main(["export", str(tmp_path), "--format", "h5ad"]) == 0
    assert len(anndata.read_h5ad(tmp_path / "predictions.h5ad")) == 1

"""What the console prints at the beginning and at the end of a run."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.data.files import Storage
from uno.results import predictions
from uno.runs import REPORT_FILE
from uno.session import pipeline


@pytest.mark.parametrize("truth", [False, True])
def test_the_last_lines_are_the_classes_and_what_to_do_next(tmp_path, capsys, truth):
    """Kills: a table of accuracy without ground truth, counts by file order, no way on
    from the last line, a known class as one to rename.
    """
    groups = ("test/known", "train/novel") if truth else ("test/known",)
    values = {
        f"{group}/task_aware/acc/{which}": 0.5
        for group in groups
        for which in ("avg", "best")
    }
    table = pa.table(
        {
            "class_name": ["novel-1", "novel-2", "novel-2", None, "labeled"],
            "kind": ["known", "novel", "novel", None, "known"],
            "label": [None, None, None, None, "labeled"],
        }
    )
    made_from = dict.fromkeys(predictions.DIFFERENCES, "")
    made_from |= {"rows": 5, "format": predictions.FORMAT}
    mark = {"made_from": made_from, "part_rows": 512, "state": "complete"}
    storage = Storage(str(tmp_path))
    storage.write(predictions.MARK, json.dumps(mark).encode())
    with storage.create(predictions.PART.format(0)) as stream:
        pq.write_table(table, stream)
    (tmp_path / REPORT_FILE).touch()
    pipeline.show_results(storage, values)
    lines = list(filter(str.strip, capsys.readouterr().out.splitlines()))
    assert [*lines[:3], *lines[-3:]] == [
        "no label in training, new classes: novel-2 (2)",
        "no label in training, known classes: novel-1 (1)",
        "no label in training, no class: unreadable (1)",
        f"next: open {tmp_path}/{REPORT_FILE}",
        f"      uno classes {tmp_path} --rename novel-2=NAME",
        f"      uno predict {tmp_path} --data SOURCE --output DIR",
    ]
    storage.write(predictions.PART.format(0), b"damaged")
    pipeline.show_results(storage, values)
    again = capsys.readouterr().out
    assert "no label in" not in again and ("accuracy, %" in again) == truth

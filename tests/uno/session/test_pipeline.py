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
    values = {
        "test/known/task_aware/acc/avg": 0.75,
        "test/known/task_aware/acc/best": 0.75,
    }
    values |= (
        {"train/novel/task_aware/acc/avg": 0.5, "train/novel/task_aware/acc/best": 0.5}
        if truth
        else {}
    )
    table = pa.table(
        {
            "class_name": ["novel-1", "novel-2", "novel-2", None, "labeled"],
            "kind": ["known", "novel", "novel", None, "known"],
            "label": [None, None, None, None, "labeled"],
        }
    )
    made_from = dict.fromkeys(predictions.DIFFERENCES, "") | {"rows": 5}
    made_from["format"] = predictions.FORMAT
    mark = {"made_from": made_from, "part_rows": 512, "state": "complete"}
    storage = Storage(str(tmp_path))
    storage.write(predictions.MARK, json.dumps(mark).encode())
    with storage.create(predictions.PART.format(0)) as stream:
        pq.write_table(table, stream)
    (tmp_path / REPORT_FILE).touch()
    pipeline.show_results(Storage(str(tmp_path)), values)
    *lines, report, classes, predict = filter(
        str.strip, capsys.readouterr().out.splitlines()
    )
    of = (
        "new classes: novel-2 (2)",
        "known classes: novel-1 (1)",
        "no class: unreadable (1)",
    )
    assert lines[:3] == [f"no label in training, {what}" for what in of]
    assert report == f"next: open {tmp_path}/{REPORT_FILE}"
    assert classes == f"      uno classes {tmp_path} --rename novel-2=NAME"
    assert predict == f"      uno predict {tmp_path} --data SOURCE --output DIR"
    (tmp_path / "predictions" / "part-000000.parquet").write_bytes(b"damaged")
    pipeline.show_results(Storage(str(tmp_path)), values)
    again = capsys.readouterr().out
    assert "no label in" not in again and ("accuracy, %" in again) == truth

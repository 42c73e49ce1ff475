"""What gives way first on 4 nodes of 8 GPUs: training on ImageNet from S3, and
predictions of 10^9 images?

    python -m benchmarks.scaling

prints one JSON row: rows/s that every part could do by itself, before (2e1632b) and
after, beside what the GPUs ask for. Nothing is run. Values of :data:`MEASURED` were
measured, on CPUs, and name their record; those of :data:`ASSUMED` were not, least of
all the GPUs' own speed.
"""

import json
from typing import Any

from benchmarks.measure import environment
from benchmarks.workers import efficiency

MEASURED: dict[str, Any] = {
    # decode and 2 + 2 crops of a photograph, of one core: 2026-11-21_ingest-cpu
    "crop_rows_per_s": 299.0,
    # with two crops, more than a prediction's work: as above
    "decode_rows_per_s": 335.0,
    "cut_bytes": 301e3,  # of a row's crops in the object store
    # of a partition of predictions, without storage: 2026-11-22_inference
    "write_rows_per_s": 1.4e6,
    "join_rows_per_s": 0.73e6,  # of the table at the end, one process: as above
    "requests_an_image": 2,  # of a file of its own on S3: 2026-11-22_s3-streaming
    # of a file on S3, 20 ms a request: as above
    "footer_s": {"before": 14.59 / 64, "after": 1.19 / 64},
    "cut_elsewhere": {
        "before": 0.4 * 3 / 2,
        "after": 0.0,
    },  # of rows, three nodes being others: as above
}
ASSUMED: dict[str, Any] = {
    "nodes": 4,
    "gpus": 32,
    "cores": 736,
    "files": 1180,
    "part_rows": 16384,
    # ResNet18 in bf16 on 2 + 2 crops of 224 and 96 px, forward and backward
    "gpu_rows_per_s": 1340.0,
    # one view forward, of 2.37 views forward and backward
    "row_share_of_predicting": 1 / 7.1,
    "image_bytes": 110e3,
    "pixel_bytes": 3 * 224**2,
    "request_s": 0.02,
    "connection_bytes_per_s": 80e6,
    "node_bytes_per_s": 12.5e9,  # 100 Gb/s for all but NCCL
    "store_bytes_per_s": 10e9,  # of a node's object store, written and read once
    "group_rows": 512,  # of a Parquet file
}


def main() -> None:
    a = ASSUMED
    train, predict = (
        a["gpus"] * a["gpu_rows_per_s"] / share
        for share in (1, a["row_share_of_predicting"])
    )
    row = {
        "question": "what gives way first on 4 nodes of 8 GPUs?",
        "command": "python -m benchmarks.scaling",
        "measured": MEASURED,
        "assumed": a,
        "start_s": {
            when: round(a["files"] * each)
            for when, each in MEASURED["footer_s"].items()
        },
        "train": {when: used(train, training(when)) for when in ("before", "after")},
        "predict": (found := used(predict, predicting())),
        "predict_hours": {  # of 10^9 images
            "until all partitions are there": round(
                1e9 / found["able"][found["first"]] / 3600, 2
            ),
            "joining": round(1e9 / MEASURED["join_rows_per_s"] / 3600, 2),
        },
        "step": {  # 512 rows on each GPU, and the paper's 512 in all
            rows: efficiency(a["gpus"], 1e3 * rows / a["gpu_rows_per_s"])
            for rows in (512, 16)
        },
        **environment(),
    }
    print(json.dumps(row))


def training(when: str) -> dict[str, float]:
    """Rows/s that each part of streaming ImageNet could do by itself."""
    a, m = ASSUMED, MEASURED
    group_s = (
        a["request_s"]
        + a["group_rows"] * a["image_bytes"] / a["connection_bytes_per_s"]
    )
    single_s = (
        m["requests_an_image"] * a["request_s"]
        + a["image_bytes"] / a["connection_bytes_per_s"]
    )
    able = {
        "one JPEG a file on S3: requests of the tasks": a["cores"]
        / (single_s + 1 / m["crop_rows_per_s"]),
        "Parquet on S3: row groups of the tasks": a["cores"]
        / (group_s / a["group_rows"] + 1 / m["crop_rows_per_s"]),
        "decode and crops": a["cores"] * m["crop_rows_per_s"],
        "bytes from S3": a["nodes"] * a["node_bytes_per_s"] / a["image_bytes"],
        "object store": a["nodes"] * a["store_bytes_per_s"] / m["cut_bytes"],
    }
    if elsewhere := m["cut_elsewhere"][when]:
        able["crops from other nodes"] = (
            a["nodes"] * a["node_bytes_per_s"] / m["cut_bytes"] / elsewhere
        )
    return able


def predicting() -> dict[str, float]:
    """Rows/s that each part of predicting photographs in Parquet on S3 could do by
    itself, after.
    """
    a, m = ASSUMED, MEASURED
    group_s = (
        a["request_s"]
        + a["group_rows"] * a["image_bytes"] / a["connection_bytes_per_s"]
    )
    return {
        "decode": a["cores"] * m["decode_rows_per_s"],
        "Parquet on S3: row groups of the tasks": a["cores"]
        / (group_s / a["group_rows"] + 1 / m["decode_rows_per_s"]),
        "bytes from S3": a["nodes"] * a["node_bytes_per_s"] / a["image_bytes"],
        "pixels in the object store": a["nodes"]
        * a["store_bytes_per_s"]
        / a["pixel_bytes"],
        "the actor that writes partitions": a["part_rows"]
        / (a["part_rows"] / m["write_rows_per_s"] + a["request_s"]),
    }


def used(asked: float, parts: dict[str, float]) -> dict[str, Any]:
    """Rows/s that the GPUs ask for, that each part could do, and the part that gives
    way first.
    """
    first = min(parts, key=parts.__getitem__)
    able = {name: round(rate) for name, rate in parts.items()}
    return {
        "asked": round(asked),
        "able": able,
        "first": first,
        "used": round(asked / parts[first], 2),
    }


if __name__ == "__main__":
    main()

"""A run: its phases, and the names of what every command finds in its directory."""

PRETEXT, PRETRAIN, DISCOVER = "pretext", "pretrain", "discover"
PHASES = {PRETEXT: "Pretext task", PRETRAIN: "Pretraining", DISCOVER: "Discovery"}
"""All phases in order, each with a section of its name in the configuration -> its
title.
"""

NUMERICS = 27
"""The last change marked "numbers" in CHANGELOG.md: runs and records say with which
they were made.
"""

TOUCHED: dict[int, tuple[str, ...]] = {
    18: ("exif",),
    19: ("streaming",),
    20: ("choice",),
    21: ("exif", "vectors"),
    22: ("num_cached_views",),
    23: ("choice",),
    24: ("choice",),
    25: ("choice",),
    26: ("clustering",),
    27: ("none",),  # the value of model.finetune
}
"""Words of the latest changes, as in CHANGELOG.md. A stored cell without them is kept;
a change that is not here touches all cells.
"""

CONFIG_FILE = "config.yaml"  # its presence makes a directory a run
ENVIRONMENT_FILE = "environment.json"
IMAGE_TIMES_FILE = "image_times.npy"  # when each image was last changed
METRICS_FILE = "metrics.jsonl"  # a line of training a time
RESULTS_FILE = "metrics.json"  # written last: the mark of a finished run
REPORT_FILE = "report.html"
ESTIMATE_FILE = "estimate.json"
STOP_FILE = "STOP"  # asks the workers to save and leave
LOGGERS_FOLDER = "loggers"  # what each tool calls the run
FORMER_FOLDER = "former"  # what --overwrite replaces, until the new run trains
RAY_FOLDER = "ray"  # Ray Train's own bookkeeping; a resumed run never reads it

"""A run: its phases, and the names of what every command finds in its directory."""

PRETEXT, PRETRAIN, DISCOVER = "pretext", "pretrain", "discover"
PHASES = {PRETEXT: "Pretext task", PRETRAIN: "Pretraining", DISCOVER: "Discovery"}
"""All phases in order, each with a section of its name in the configuration -> its
title.
"""

NUMERICS = 27
"""The number of the last change in CHANGELOG.md that alters results.

Every run records it, and ``uno reproduce`` refuses runs of another number.
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

"""The phases of a run, and the names of the files in a run directory."""

PRETEXT, PRETRAIN, DISCOVER = "pretext", "pretrain", "discover"
PHASES = {PRETEXT: "Pretext task", PRETRAIN: "Pretraining", DISCOVER: "Discovery"}
"""The title of each phase by its name, in order.

The section of the configuration with the same name holds the settings of the phase.
"""

NUMERICS = 29
"""The number of the last change in CHANGELOG.md that alters results.

Every run records it, and ``uno reproduce`` repeats runs of another number.
"""

CONFIG_FILE = "config.yaml"  # a directory is a run if it has this file
ENVIRONMENT_FILE = "environment.json"
IMAGE_TIMES_FILE = "image_times.npy"  # modification time of each image
METRICS_FILE = "metrics.jsonl"  # one line for each logged step of training
RESULTS_FILE = "metrics.json"  # written last, so it marks a finished run
REPORT_FILE = "report.html"
ESTIMATE_FILE = "estimate.json"
STOP_FILE = "STOP"  # asks the workers to save a checkpoint and end
LOGGERS_FOLDER = "loggers"  # identifier of the run in each logger
FORMER_FOLDER = "former"  # run that --overwrite replaces, until the new run trains
RAY_FOLDER = "ray"  # files of Ray Train; a resumed run never reads them

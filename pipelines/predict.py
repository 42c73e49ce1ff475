"""``uno predict RUN --data SOURCE --output DIR``; ``python -m pipelines.predict`` for ``ray job submit``."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from uno.errors import ConfigError

USAGE = """\
usage: uno predict RUN [--data SOURCE --output DIR] [OPTIONS]

Write a class for every image of SOURCE to DIR/predictions.parquet, one row for each, in order: id, uri,
class_index, class_name, kind (known or novel), probability, margin, entropy, head_agreement, known_mass,
status (ok or bad), reason, model_hash. An unreadable image is a row with a reason. Labels in SOURCE, where
there are any, mean nothing. The same command after an interruption continues. Without --data: the data that
RUN was trained on, and RUN/predictions.parquet.

  --data SOURCE        digits, cifar10:DIR, folder:DIR, parquet:DIR, ... or a path.
  --labeled, --unlabeled  Two folders instead of --data.
  --output DIR         Where predictions.parquet goes, a path or a URI.
  --embedding          Also write the pooled features, a list of floats.
  --limit N            At most N rows, evenly spaced.
  --workers N          Ray actors that hold the model; 0 (default): this process, without Ray.
  --device, --gpus-per-worker, --compute.threads, --compute.cpus-per-worker: as for uno discover."""


def main(argv: Sequence[str]) -> int:
    """Predict, count, say where the table is."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    target, *rest = argv
    if target.startswith("-"):
        raise ConfigError("the run directory comes first: uno predict RUN --data SOURCE --output DIR")
    if "-h" in rest or "--help" in rest:
        print(USAGE)
        return 0
    embedding = "--embedding" in rest
    from pipelines.inference import predict_job

    return predict_job(target, [word for word in rest if word != "--embedding"], embedding)


if __name__ == "__main__":
    cli.run(main)

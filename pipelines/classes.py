"""``uno classes RUN``: names for the discovered classes, edited by hand in ``RUN/classes.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines import cli
from pipelines.arguments import Arguments

if TYPE_CHECKING:
    from uno.data.files import Storage
    from uno.results.classes import OutputClass, Suggestion
    from uno.results.infer import Classifier


def main(argv: Sequence[str]) -> int:
    """Write the file, check it, or apply it."""
    parser = Arguments(
        "uno classes",
        "Write RUN/classes.yaml, one entry for each discovered class, to edit by hand: its name, and keep, "
        "drop or merge into another. A file that is there is checked and left as it is.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--apply", action="store_true", help="put classes.yaml into model and predictions")
    options = parser.parse_args(argv)
    from pipelines.console import say
    from uno.data.files import Storage
    from uno.results.classes import YAML_FILE, read_edits, template
    from uno.results.infer import load_classifier
    from uno.runs import lock

    storage = Storage(options.run)
    model = load_classifier(storage)
    path = storage.path(YAML_FILE)
    if not storage.exists(YAML_FILE):
        storage.write(YAML_FILE, template(model.classes, model.model_hash, _suggestions(model)).encode())
        say(f"{path} is written: edit it, then run uno classes {options.run} --apply")
        return 0
    edited = read_edits(storage.read(YAML_FILE), path, model.classes, model.model_hash)
    for line in _lines(edited):
        say(line)
    if options.apply:
        with lock.claim(storage, on_wait=say) as claim:
            say(_apply(claim.storage, model, edited))
    else:
        say(f"{path} is valid; uno classes {options.run} --apply puts it into model and predictions")
    return 0


def _apply(storage: Storage, model: Classifier, edited: list[OutputClass]) -> str:
    """Write ``classes.json`` and bring the run's predictions in line; what was done, in one line.

    Raises:
        UnoError: the predictions must be made again, and the data cannot be read; nothing was changed.
    """
    from pipelines.inference import own_task, predict_run
    from uno.results import predictions
    from uno.results.classes import dump_classes, routes_hash
    from uno.results.infer import model_folder

    found = predictions.read_identity(storage)
    name = f"{model_folder(storage)}classes.json"
    data = dump_classes(storage.read(name), edited)
    if found is None:
        storage.write(name, data)
        return "applied to the model; the run has no predictions"
    if (found["model_hash"], found["routes"]) == (model.model_hash, routes_hash(edited)):
        storage.write(name, data)
        predictions.rename(storage, edited)
        return "applied to model and predictions"
    task = own_task(model.config)  # before anything is written
    storage.write(name, data)
    _, summary = predict_run(model.config, storage, task)
    return f"applied to the model; {summary.rows:,} rows predicted again: {summary.path}"


def _suggestions(model: Classifier) -> dict[int, Suggestion]:
    """What the discovered classes look like; nothing where the run's data cannot be read any more."""
    from pipelines.console import say
    from pipelines.inference import own_task, unlabeled_rows
    from uno.errors import UnoError
    from uno.results.classes import suggest
    from uno.results.infer import decoder, sample_cosines

    try:
        task = own_task(model.config)
        sample = sample_cosines(model, decoder(model, task.rows), unlabeled_rows(task))
    except UnoError as error:
        say(f"warning: no suggestions, the run's data cannot be read: {error}")
        return {}
    if sample is None:
        return {}
    known, novel, features = sample
    return suggest(known, novel[model.best_head], features, model.classes)


def _lines(classes: Sequence[OutputClass]) -> list[str]:
    lines = []
    for c in classes:
        if c.kind == "novel":
            fate = "dropped" if c.into is None else ""
            if c.into not in (None, c.index):
                fate = f"merged into {classes[c.into].name}"
            lines.append(f"  {c.index:4}  {c.name}{'  ' if fate else ''}{fate}")
    return lines


if __name__ == "__main__":
    cli.run(main)

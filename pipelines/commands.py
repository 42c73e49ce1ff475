"""The commands of ``uno``: the options that each takes, and the function that runs it.

Large packages are imported when a command runs. ``uno reproduce`` and ``uno tune`` are
in :mod:`reproduce.command` and :mod:`tune.sweep`. Every command takes the arguments
after its name. A problem raises an error. The exit code of a command that returns None
is 0.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt, PositiveInt

from pipelines.options import (
    DRY_RUN,
    RUN,
    Argument,
    Command,
    parse,
    switch,
)
from uno.config import override
from uno.errors import ConfigError
from uno.session.configure import expand_output, explain, is_torchrun_rank

if TYPE_CHECKING:
    from uno.data.files import Storage
    from uno.results.classes import OutputClass
    from uno.session.ranks import TorchrunBackend

SHARD_MB = 128
TRAINING = {
    "--explain": switch(
        "Print every value as YAML, and where it comes from (preset, file, data, ...),"
        " and stop."
    ),
    **DRY_RUN,
    "--overwrite": switch(
        "Start over: replace an earlier run in the same directory once this one trains."
    ),
}

DEMO = Command("demo", TRAINING, output="runs/demo")
PRETRAIN = Command("pretrain", TRAINING)
DISCOVER = Command(
    "discover",
    TRAINING,
    examples=(
        (
            "uno discover --labeled photos/known --unlabeled photos/new --num-novel 5"
            " --weights pretrained"
        ),
        "uno discover --preset cifar10 --data cifar10:DIR",
    ),
    text="""
Defaults are those of the digits. Your own images and a frozen encoder set others, such as
--method clustering: --explain prints every value of your run and where it comes from.
""",  # noqa: E501
)
EVALUATE = Command(
    "evaluate", RUN, "some", text="Computes RUN/metrics.json from checkpoints and data."
)
PREDICT = Command(
    "predict",
    {
        **RUN,
        "--embedding": switch("Also write the pooled features, a list of floats."),
        "--csv": switch(
            "Also write DIR/predictions.csv, the table without embeddings."
        ),
        "--folders": switch(
            "Also copy every image that can be read to DIR/by_class/INDEX-CLASS/."
        ),
    },
    "some",
    text="""
Writes the Parquet files DIR/predictions/, one row for each image, in order: id, uri, class_index, class_name, kind
(known or novel), probability, margin, entropy, head_agreement, known_probability, status (ok or bad), reason,
model_hash. kind is that of the most probable class; known_probability is the total probability of all
known classes. An unreadable image has status bad and a reason. Labels are ignored. After an interruption the
same command continues.

Without --data it predicts the data that RUN was trained on, into RUN/predictions/; --data needs
--output DIR. --limit N predicts at most N images, evenly spaced.
""",  # noqa: E501
)
REPORT = Command(
    "report",
    RUN,
    "some",
    text="""
RUN/report.html opens from disk and needs no network. --data SOURCE is the new place of moved data.
""",  # noqa: E501
)
CLASSES = Command(
    "classes",
    {
        **RUN,
        "--apply": switch("Apply classes.yaml to the model and all files of the run."),
        "--file": Argument(
            "Another classes.yaml, such as the one that the report saves; it replaces"
            " RUN/classes.yaml.",
            str | None,
        ),
        "--from": Argument(
            "Name classes by labels that people gave to images of the run's"
            " predictions: a table with id and label, or an export of Label Studio,"
            " FiftyOne or CVAT.",
            str | None,
        ),
        "--rename": Argument(
            "Name classes by index or name, 5=nine novel-2=ten, and apply.",
            list[str],
            [],
        ),
    },
    "none",
    text="""
Writes RUN/classes.yaml, one entry for each discovered class, to edit by hand: its name, and keep, drop or
merge into another. An existing file is checked and not changed. RUN/report.html shows the pictures and
also saves such a file. Images of a dropped class are "rejected"; --apply updates model, predictions,
metrics, report, card and exports.
""",  # noqa: E501
)
EXPORT = Command(
    "export",
    {
        "RUN": Argument(
            "The run directory, or a copy of its model/ folder; for predictions a run"
            " or the output of uno predict."
        ),
        "--format": Argument(
            "encoder: safetensors under torchvision's keys; pt2: torch.export, uint8"
            " images -> probabilities; onnx: the same for ONNX runtimes. label-studio,"
            " fiftyone, cvat: the predictions, for these annotation tools; csv, h5ad:"
            " the predictions, for spreadsheets and anndata.",
            Literal[
                "encoder",
                "pt2",
                "onnx",
                "label-studio",
                "fiftyone",
                "cvat",
                "csv",
                "h5ad",
            ],
        ),
        "--output": Argument(
            "A file, default: RUN/model/ and the format's usual name; of predictions a"
            " directory, default: RUN.",
            str | None,
        ),
        "--images": Argument(
            "Folder or URL of the images as an annotation tool sees it; default: the"
            " path of each image.",
            str | None,
        ),
    },
    "none",
)
DATA = Command(
    "data",
    {
        "ACTION": Argument("check or pack.", Literal["check", "pack"]),
        "--shard-mb": Argument(
            f"pack: size of a shard; default {SHARD_MB}.", PositiveInt | None
        ),
    },
    output=None,
    text="""
check: print classes, counts, problems, ignored files, and which
images cannot be read (as many as can be decoded in a minute); exit code 2 if a run could not succeed.

pack: write the images of any source to --output DIR as Parquet shards with checksums, shuffled, encoded
images as they are; --data parquet:DIR then reads the same data. Every image is decoded once: unreadable
ones are left out and listed in DIR/bad_samples.jsonl. --workers N writes N shards at once, in Ray tasks.
DIR is a path or a URI (s3://, gs://); the same
command continues after a kill. With --known-classes the images of known classes are stored together;
all labels are kept.
""",  # noqa: E501
)
EMBED = Command(
    "embed",
    {
        "--views": Argument(
            "Random views of each row besides its evaluation view.", NonNegativeInt, 0
        ),
    },
    output=None,
    text="""
Every image through a frozen encoder, named by --model.encoder and --weights, to --output FILE.parquet: id,
embedding, and where they are known label, split, path and text; views of a row have its id. --data
vectors:FILE and other programs read it. --workers N computes on Ray. Finished features are kept in
--compute.cache: the same command continues after a kill.
""",  # noqa: E501
)
ESTIMATE = Command(
    "estimate-classes",
    {
        **DRY_RUN,
        "--max-novel": Argument(
            "Largest number to try; default: the number of known classes, at least 10;"
            " no limit with a frozen encoder.",
            PositiveInt | None,
        ),
        "--num-splits": Argument(
            "Splits of the known classes; each pretrains an encoder, unless frozen.",
            PositiveInt,
            3,
        ),
    },
    output="runs/{preset}-seed{seed}-estimate",
    text="""
From at least 4 known classes, 2 with a frozen encoder: some are hidden in turn, and the number of clusters
that finds them again is the estimate, an interval, in DIR/estimate.json. --known-classes hides the other
labels; --output DIR holds results and encoders; --workers N runs N tasks at once on Ray, with the same result.
""",  # noqa: E501
)
DOCTOR = Command(
    "doctor",
    {
        "DIR": Argument(
            "With --cluster: a directory for runs, which every node must see.",
            str | None,
        ),
        "--cluster": switch("Check every node of the Ray cluster, not this machine."),
    },
    "none",
)


def demo(argv: Sequence[str]) -> None:
    """Run ``uno discover`` on the packaged digits, by default with two Ray workers.

    It writes into ``runs/demo``, unless ``--output`` names another directory.

    Args:
        argv: The arguments after ``uno demo``. ``--workers`` among them replaces the
            number of workers.
    """
    discover(["--workers=2", *argv], DEMO)


def discover(
    argv: Sequence[str],
    command: Command = DISCOVER,
    last: str = "discover",
    ranks: TorchrunBackend | None = None,
) -> None:
    """Train a run, evaluate it, and write its model, predictions, metrics and report.

    It is pretrained first, unless weights are given. The same command resumes an
    interrupted run. ``--explain`` only prints every value of the configuration and
    where it comes from; it reads the data for this, unless the number of novel classes
    is ``auto``. ``--dry-run`` checks the data, prints the plan of the run, and keeps
    nothing. If torchrun has started this process, rank 0 runs the command and the other
    ranks follow it.

    Args:
        argv: The arguments after the name of the command.
        command: The declaration of the command with its options: that of ``discover``,
            ``pretrain`` or ``demo``.
        last: The last phase to train, "pretrain" or "discover". After "pretrain"
            nothing is evaluated, and only checkpoints are written.
        ranks: The backend that trains on all ranks of torchrun. It is given only when
            rank 0 calls this function again to lead them; None otherwise.

    Raises:
        SystemExit: This is a rank of torchrun that failed after another one.
    """
    if ranks is None and is_torchrun_rank():
        from uno.session.ranks import TorchrunBackend

        backend = TorchrunBackend()
        backend.lead_or_follow(partial(discover, argv, command, last))
        return
    options = parse(argv, command)
    from uno.session import pipeline

    own = options.args
    if own.explain:
        from uno.session.console import suppress_output
        from uno.session.derive import resolve

        config, task = options.config, None
        if config.data.num_novel != "auto":
            with suppress_output():
                config, task = resolve(config, options.overrides, own.overwrite)
        derived = f"the run in {config.output}" if task is None else "data"
        given = options.yaml_values, options.cli_values
        print(*explain(options.config, config, *given, derived), sep="\n")
        return
    config = options.config if ranks is None else ranks.sized(options.config)
    run = pipeline.plan_run if own.dry_run else pipeline.discover
    run(config, options.overrides, own.overwrite, last, backend=ranks)


def pretrain(argv: Sequence[str]) -> None:
    """Train the encoder and the head of the known classes on the labeled images.

    ``uno discover`` with the same options continues from there.

    Args:
        argv: The arguments after ``uno pretrain``.
    """
    discover(argv, PRETRAIN, "pretrain")


def evaluate(argv: Sequence[str]) -> None:
    """Compute the metrics of a finished run anew, and write its ``metrics.json``.

    Nothing is trained. The metrics are printed, too. The HTML report is written again
    if there is one and the metrics have changed.

    Args:
        argv: The arguments after ``uno evaluate``: the run directory and options.
    """
    options = parse(argv, EVALUATE)
    from uno.session import pipeline

    pipeline.evaluate(options.args.run, options.overrides)


def predict(argv: Sequence[str]) -> None:
    """Predict a class for every image of a source, and print where the predictions are.

    They are Parquet files in the folder ``predictions/`` of ``--output``, with one row
    for each image. Without ``--data`` the images are those that the run was trained on,
    and the default of ``--output`` is the run directory. ``--embedding`` adds the
    features of the encoder to each row. ``--csv`` also writes ``predictions.csv``, and
    ``--folders`` also copies each readable image into a folder for its class.

    Args:
        argv: The arguments after ``uno predict``: the run directory and options.
    """
    options = parse(argv, PREDICT)
    given = options.overrides
    if (place := given.pop("output", None)) is not None:
        given["output"] = expand_output(str(place))
    from uno.session import predict as session

    own = options.args
    session.predict(own.run, given, own.embedding, own.csv, own.folders)


def report(argv: Sequence[str]) -> None:
    """Write the HTML report of a run, finished or not, and print its path.

    Args:
        argv: The arguments after ``uno report``: the run directory and options.
    """
    options = parse(argv, REPORT)
    from uno.session import pipeline
    from uno.session.console import print_line

    print_line(f"report: {pipeline.report(options.args.run, options.overrides)}")


def export(argv: Sequence[str]) -> None:
    """Write the model of a run, or its predictions, in a format of other tools.

    The paths of the written files are printed, for a model also the size of its file
    and whether it was checked against the model. A model is written into its folder of
    the run (``model/``) and predictions into the run directory, unless ``--output``
    names another place.

    Args:
        argv: The arguments after ``uno export``: the run directory, and the format:
            ``encoder``, ``pt2`` or ``onnx`` for the model; ``label-studio``,
            ``fiftyone`` or ``cvat`` (annotation tools), ``csv`` or ``h5ad`` for the
            predictions.

    Raises:
        ConfigError: ``--images``, the folder or URL at which an annotation tool finds
            the images, is given with a format that is not of an annotation tool; or the
            model or its predictions cannot be exported.
    """
    own = parse(argv, EXPORT).args
    from uno.data.files import Storage
    from uno.results.annotations import ANNOTATIONS, TABLES, export_predictions
    from uno.results.export import FORMATS, can_check_onnx, export
    from uno.results.infer import load_classifier, model_folder
    from uno.session.console import print_line

    folder = Storage(own.run)
    if own.images is not None and own.format not in ANNOTATIONS:
        raise ConfigError(f"--images is for {', '.join(ANNOTATIONS)}")
    if own.format in (*ANNOTATIONS, *TABLES):
        target = Storage(own.output or own.run)
        for path in export_predictions(folder, target, own.format, own.images):
            print_line(path)
        return
    model = load_classifier(folder)
    data, name = export(model, own.format), model_folder(folder) + FORMATS[own.format]
    if own.output:
        folder, name = _split_path(own.output)
    folder.write(name, data)
    checked = "checked against the model"
    if own.format == "onnx" and not can_check_onnx():
        checked = "NOT checked: onnxruntime is not installed"
    print_line(f"{folder.path(name)}: {len(data) / 1e6:.1f} MB, {checked}")


def data(argv: Sequence[str]) -> None:
    """Check a data set (``uno data check``), or write it as Parquet shards (``pack``).

    The check writes nothing into ``--output``. It prints the classes, their sizes, and
    problems such as images that cannot be read. ``--shard-mb`` is the size of a shard,
    by default 128.

    Args:
        argv: The arguments after ``uno data``, of which the first is ``check`` or
            ``pack``.

    Raises:
        ConfigError: The check finds that no run could succeed, the shards cannot be
            written, or ``--shard-mb`` is given for the check.
    """
    options = parse(argv, DATA)
    if options.args.action == "pack":
        from pipelines.pack import pack_data

        pack_data(options.config, options.args.shard_mb or SHARD_MB, options.overrides)
        return
    if options.args.shard_mb is not None:
        raise ConfigError("--shard-mb is for uno data pack")
    from uno.session.prepare import check_source

    check_source(options.config, options.overrides)


def embed(argv: Sequence[str]) -> None:
    """Write the features that a frozen encoder computes for every image of a source.

    They are written to the Parquet file of ``--output``, which ``--data vectors:FILE``
    and other programs read. It has a row for the evaluation view of each image, and
    with ``--views N`` also for N random views. Unreadable images are left out.

    Args:
        argv: The arguments after ``uno embed``.
    """
    options = parse(argv, EMBED)
    from uno.session.embed import embed as embed_source

    embed_source(options.config, options.overrides, options.args.views)


def estimate(argv: Sequence[str]) -> None:
    """Estimate the number of novel classes among the unlabeled images of a source.

    The estimate is printed, and written to ``estimate.json`` in the output directory.
    With ``--dry-run`` the data is checked and a summary printed, and nothing is
    computed or written.

    Args:
        argv: The arguments after ``uno estimate-classes``.
    """
    options = parse(argv, ESTIMATE)
    own = options.args
    from uno.results.estimate import Settings
    from uno.session.estimation import estimate_classes

    settings = Settings(num_splits=own.num_splits, max_novel=own.max_novel)
    estimate_classes(options.config, options.overrides, settings, own.dry_run)


def doctor(argv: Sequence[str]) -> int:
    """Check this machine for problems, and print a line for each finding.

    With ``--cluster`` every node of the running Ray cluster is checked instead.

    Args:
        argv: The arguments after ``uno doctor``.

    Returns:
        2 if a finding is an error, so that a run would fail; else 0.

    Raises:
        ConfigError: A directory is given without ``--cluster``, or ``--cluster`` is
            given and there is no running cluster, or it cannot be reached.
    """
    own = parse(argv, DOCTOR).args
    from pipelines.doctor import machine
    from uno.session.console import print_line

    if own.cluster:
        from pipelines.doctor import examine_cluster

        findings = list(examine_cluster(own.dir))
    elif own.dir is not None:
        raise ConfigError("uno doctor takes a directory only with --cluster")
    else:
        findings = list(machine())
    for finding in findings:
        print_line(str(finding))
    return 2 if any(finding.level == "error" for finding in findings) else 0


def classes(argv: Sequence[str]) -> None:
    """Name, merge or drop the discovered classes of a run.

    The edits are those of the file ``RUN/classes.yaml``, if there is one, or of another
    such file, ``--file``. To these are added the names of ``--from``, a table of labels
    that people gave to images, by which classes are named in a majority vote; or of
    ``--rename``, new names such as ``5=nine``. If none of these is given,
    ``RUN/classes.yaml`` is written as a template to edit, and nothing is applied, also
    with ``--apply``. Otherwise the edits are checked and, without ``--rename``, printed
    as a line for each discovered class. With ``--apply``, and always with ``--rename``,
    the model and all files of the run are then updated, and ``RUN/classes.yaml`` gets
    the edits. Otherwise no file is changed, and the next command is printed.

    Args:
        argv: The arguments after ``uno classes``: the run directory and options.

    Raises:
        ConfigError: More than one of ``--file``, ``--from`` and ``--rename`` is given,
            or an edit is invalid.
    """
    own = parse(argv, CLASSES).args
    from uno.data.files import Storage
    from uno.limits import MAX_STATE_BYTES
    from uno.results.classes import (
        YAML_FILE,
        apply_edits,
        edits_of,
        rename_classes,
        template,
    )
    from uno.results.infer import load_classifier
    from uno.session.backend import LocalBackend
    from uno.session.console import print_line
    from uno.session.pipeline import apply_classes
    from uno.session.run import Run

    labels = getattr(own, "from")  # a word of Python
    if sum(map(bool, (own.file, labels, own.rename))) > 1:
        raise ConfigError("give only one of --file, --from and --rename")
    storage = Storage(own.run)
    model = load_classifier(storage)
    folder, name = (storage, YAML_FILE) if own.file is None else _split_path(own.file)
    path, is_there = (
        folder.path(name),
        own.file is not None or storage.exists(YAML_FILE),
    )
    if not is_there and not own.rename and labels is None:
        text = template(model.classes, model.model_hash)
        storage.write(YAML_FILE, text.encode())
        command = f"uno classes {shlex.quote(own.run)} --apply"
        print_line(f"{path} is written: edit it, then run {command}")
        return
    data = template(model.classes, model.model_hash).encode()
    if is_there:
        data = folder.read(name, MAX_STATE_BYTES)
    edited = apply_edits(data, path, model.classes, model.model_hash)
    if own.rename or labels is not None:
        named = (
            rename_classes(edited, own.rename)
            if labels is None
            else _name_by_labels(storage, edited, labels)
        )
        data = template(named, model.model_hash).encode()
        edited = apply_edits(data, path, model.classes, model.model_hash)
    if not own.rename:
        for c, fate in edits_of(edited):
            print_line(f"  {c.index:4}  {c.name}  {fate}".rstrip())
    if own.apply or own.rename:
        here = {"compute.num_workers": 0, "compute.device": "auto"}
        config = override(model.config, {**here, "output": storage.uri})
        run = Run(config, storage, LocalBackend())
        with run.locked():
            apply_classes(run, model, edited)
            run.storage.write(YAML_FILE, data)
    else:
        valid = "names are not applied yet" if labels else f"{path} is valid"
        command = shlex.join(["uno", "classes", *argv, "--apply"])
        print_line(f"{valid}; next: {command}")


def _name_by_labels(
    storage: Storage, classes: Sequence[OutputClass], path: str
) -> list[OutputClass]:
    """Name discovered classes by labels that people gave to images, in a majority vote.

    The images that the model puts into a class vote with their labels. A class whose
    label is the name of another class is merged into that one. A line about each vote
    is printed.

    Args:
        storage: The run directory, with predictions of the labeled images.
        classes: All classes of the run.
        path: Path or URI of the file of labels: a table with the columns id and label,
            or an annotation tool's export.

    Returns:
        All classes, with their new names and the classes into which they are merged.
    """
    from uno.data.label_files import read_label_file
    from uno.results.annotations import count_labels
    from uno.results.classes import name_classes
    from uno.session.console import print_line

    given = read_label_file(path)
    named, lines = name_classes(classes, count_labels(storage, given.classes))
    for line in (*(f"warning: {warning}" for warning in given.warnings), *lines):
        print_line(line)
    return named


def _split_path(path: str) -> tuple[Storage, str]:
    """Split the path of a file into its folder and its name.

    A leading ``~`` is replaced by the home directory. A path without a folder is in the
    working directory.

    Returns:
        The folder as a storage, in which files can be read and written by name; and the
        file name.
    """
    from uno.data.files import Storage, normalize_path, split

    folder, name = split(normalize_path(path))
    return Storage(folder), name

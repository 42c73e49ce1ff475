"""The command line: what wins over what, which preset applies, and one line for
every mistake.
"""

import os
import re
from itertools import product
from typing import Literal

import pytest
from pydantic import PositiveInt

from pipelines.commands import DATA, DEMO, DISCOVER, ESTIMATE, PREDICT, PRETRAIN
from pipelines.options import Argument, Command, parse, switch
from tune.sweep import TUNE
from uno.config import Config, config_hash, flatten, to_dict
from uno.errors import ConfigError
from uno.presets import preset
from uno.session import configure

IMAGES = "--preset scratch --data folder:d --num-novel 3"
VIT = "--preset cifar10 --model.encoder tests.uno.toy_encoders:vit"


def config(*argv: str, command: Command = DISCOVER) -> Config:
    return parse(argv or ["--device", "auto"], command).config


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_no_arguments_are_the_digits_for_demo():
    got = parse([], DEMO)
    assert config_hash(got.config) == config_hash(preset("digits"))
    assert got.overrides == {} and not got.args.overwrite


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (DISCOVER, "examples:\n  uno discover --labeled"),
        (PREDICT, "usage: uno predict RUN [OPTIONS]"),
    ],
)
def test_a_command_without_what_it_needs_shows_its_help(command, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse([], command)
    assert says in capsys.readouterr().out


def test_each_layer_overrides_the_one_before(file):
    """defaults < preset < YAML < later YAML < command line; kills any swapped pair
    of layers.
    """
    first = file(
        "preset: cifar10\nobjective: {epsilon: 0.2, sinkhorn_iters:"
        " 7}\ndiscover.epochs: 5\n",
        "1.yaml",
    )
    second = file("objective.sinkhorn_iters: 8\ndiscover:\n  epochs: 6\n", "2.yaml")
    files = ["--config", first, "--config", second]
    got = config(*files, "--discover.epochs", "9", "--recipe", "v2")
    assert got.objective.temperature == 0.1  # default
    # preset, whose recipe comes from the command line
    assert got.discover.base_lr == 0.4
    assert got.objective.epsilon == 0.2  # first file
    assert got.objective.sinkhorn_iters == 8  # second file
    assert got.discover.epochs == 9  # command line
    path = file("preset: cifar10\nrecipe: v2\n")
    assert config("--config", path).discover.base_lr == 0.4
    assert config("--config", path, "--preset", "imagenet").data.stored_size == 256
    assert config("--config", path, "--recipe=paper").discover.base_lr == 0.1
    got = config("--seed", "1", "--data.num-novel", "3", "--seed=2", "--num-novel", "4")
    assert (got.seed, got.data.num_novel) == (2, 4)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("--data photos", "photos"),
        ("--labeled a --unlabeled b", "photos"),
        ("--labeled a --unlabeled b --weights pretrained", "photos"),
        (
            "--data d --model.encoder torchvision:resnet18 --weights w.safetensors",
            "photos",
        ),
        ("--data d --model.encoder torchvision:resnet18 --weights w.pth", "photos"),
        ("--data d --model.finetune none", "photos"),
        ("--data d --weights w.safetensors", "scratch"),  # of an encoder of ours
        ("--data d --weights runs/before", "scratch"),
        ("--data d --model.encoder resnet18", "scratch"),
        ("--data d --model.finetune full", "scratch"),
        ("--data cifar10:d", "scratch"),
        ("--data imagenet:d --weights pretrained", "scratch"),
        ("", "digits"),
    ],
)
@pytest.mark.parametrize(
    "downloaded", ["other.pth", "efficientnet_b0_rwightman-7f5810bc.pth"]
)
def test_the_settings_alone_decide_the_preset(
    argv, downloaded, name, monkeypatch, tmp_path
):
    """Weights that torchvision has downloaded before change nothing."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / downloaded).touch()
    assert config(*argv.split()).preset == name


@pytest.mark.parametrize(
    ("more", "method"),
    [
        ("", "clustering"),
        ("--seed 3 --num-novel 5", "clustering"),
        ("--method uno", "uno"),
        ("--method ncl", "ncl"),
        ("--objective.epsilon 0.1", "uno"),
        ("--discover.epochs 5", "uno"),
        ("--model.num-heads 2", "uno"),
        ("--model.finetune last_stage", "uno"),
        ("--recipe v2", "uno"),
    ],
)
def test_frozen_features_leave_the_choice_to_the_data(more, method):
    """Kills: a choice where a method, or a setting of UNO's, was given; UNO's epochs
    and clusters in a choice, or none in UNO; another command than discover that
    chooses.
    """
    line = "--data d --model.encoder torchvision:resnet18 --weights w.pth"
    got = parse([*line.split(), *more.split()], DISCOVER).config
    assert got.method == method
    # or discovery would refuse the directory of the pretraining
    assert parse([*line.split(), *more.split()], PRETRAIN).config.method == method
    assert (got.discover.epochs == 0) == (method == "clustering")
    assert got.model.prototype_init == ("kmeans" if method == "uno" else "random")
    assert parse(line.split(), TUNE).config.method == "uno"


@pytest.mark.parametrize(
    ("argv", "name", "known"),
    [
        ("", "digits", "first:5"),
        ("--data folder:d --num-novel 7", "photos", None),
        ("--data photos", "photos", None),
        ("--labeled a --unlabeled b", "photos", None),
        ("--data folder:d --known-classes first:3", "photos", "first:3"),
        ("--preset cifar10", "cifar10", "first:5"),
        ("--preset cifar10 --data cifar10:/d", "cifar10", "first:5"),
        ("--preset cifar10 --data cifar100:/d", "cifar10", None),
        ("--preset cifar10 --data parquet:/d", "cifar10", None),
        (
            "--preset cifar10 --data parquet:/d --known-classes first:5",
            "cifar10",
            "first:5",
        ),
        ("--preset cifar10 --labeled a --unlabeled b", "cifar10", None),
        (
            "--preset digits --labeled a --unlabeled b --known-classes first:2",
            "digits",
            "first:2",
        ),
        (
            "--preset scratch --data digits --known-classes first:5",
            "scratch",
            "first:5",
        ),
        ("--known-classes none", "digits", None),
    ],
)
def test_preset_and_known_classes_follow_the_data(argv, name, known):
    """Kills: 8-pixel unmirrored settings for photographs, CIFAR's first:5 hiding
    labels of other data.
    """
    got = config(*argv.split())
    assert (got.preset, got.data.known_classes) == (name, known)
    assert got.augment.large.size == preset(name).augment.large.size


def test_the_rule_holds_for_files_and_a_source_replaces_two_folders(file):
    got = config("--config", file("data:\n  source: folder:d\n"))
    assert (got.preset, got.data.known_classes, got.data.stored_size) == (
        "photos",
        None,
        256,
    )
    kept = config(
        "--config",
        file("preset: cifar10\ndata:\n  source: folder:d\n  known_classes: first:2\n"),
    )
    assert kept.data.known_classes == "first:2"
    path = file("data: {labeled: a, unlabeled: b}\n")
    assert config("--config", path).data.labeled == "a"
    got = config("--config", path, "--data", "folder:d").data
    assert (got.source, got.labeled, got.unlabeled) == ("folder:d", None, None)
    assert parse(["run", "--config", path, "--data", "d"], PREDICT).overrides == {
        "data.source": "d"
    }


@pytest.mark.parametrize(
    ("argv", "share"),
    [
        ("--labeled a --unlabeled b", 0.1),
        ("--data folder:d", 0.1),
        ("--data d --preset cifar10", 0.1),
        ("--data d --data.validation-fraction 0", 0),
        ("--data d --data.validation-fraction 0.3 --preset photos", 0.3),
        ("--data digits", 0),
        ("--data cifar10:d --preset scratch", 0),
        ("--preset imagenet", 0),
    ],
)
def test_labeled_rows_of_own_images_are_held_out(argv, share):
    """Whatever the preset. Kills: a default that is not to be changed, a share of a
    benchmark's rows.
    """
    assert config(*argv.split()).data.validation_fraction == share


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--objective.sinkhorn_iters 5", "objective.sinkhorn_iters", 5),
        ("--objective.epsilon=1e-3", "objective.epsilon", 1e-3),
        ("--data.std 0.1 0.2 0.3", "data.std", [0.1, 0.2, 0.3]),
        ("--objective.no-concat", "objective.concat", False),
        ("--objective.concat false", "objective.concat", False),
        ("--data.download", "data.download", True),
        ("--limit 7 --limit None", "data.limit", None),
        ("--known-classes 5", "data.known_classes", "5"),
        ("--data 1e5", "data.source", "1e5"),
        ("--output 007", "output", "007"),
    ],
)
def test_values_are_read_as_their_fields_say(argv, key, value):
    assert flatten(to_dict(config(*argv.split())))[key] == value


@pytest.mark.parametrize(
    ("argv", "command", "output"),
    [
        ("--preset cifar100_50 --seed 3", DISCOVER, "runs/cifar100_50-seed3"),
        ("--device auto", DEMO, "runs/demo"),
        ("--device auto", TUNE, "runs/tune-digits-seed0"),
        ("--device auto", ESTIMATE, "runs/digits-seed0-estimate"),
        ("check", DATA, None),
        ("--output ~/run/{x}", DISCOVER, os.path.expanduser("~/run/{x}")),
    ],
)
def test_default_output(argv, command, output):
    assert config(*argv.split(), command=command).output == output


OWN = Command(
    "export",
    {
        "RUN": Argument("A run."),
        "N": Argument("A number.", int | None),
        "--go": switch("Go."),
        "--format": Argument("A format.", Literal["a", "b"]),
        "--names": Argument("Names.", list[str], ()),
        "--count": Argument("Count.", PositiveInt, 3),
    },
)


@pytest.mark.parametrize(
    "argv",
    [
        "r 7 --format a --go --names x y --count 5",
        "--go r --count 5 7 --format=a --names x y",
        "--format a r 7 --go --count=5 --names x y",
    ],
)
def test_own_arguments_in_any_order(argv):
    own = parse(argv.split(), OWN).args
    assert (own.run, own.n, own.format, own.count) == ("r", 7, "a", 5)
    assert (own.names, own.go) == (["x", "y"], True)


def test_a_trained_model_fixes_all_but_where_it_runs():
    given = parse(["run", "--device", "cpu", "--data", "d"], PREDICT).overrides
    assert given == {"compute.device": "cpu", "data.source": "d"}


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        *product(["--seed 0", "--output runs/x", "--output ./x"], [DISCOVER, DEMO]),
        ("run --data digits --output out", PREDICT),
    ],
)
def test_inside_a_ray_job_the_output_must_outlive_the_job(argv, command, monkeypatch):
    monkeypatch.setenv(configure.RAY_JOB, "{}")
    line = "^inside a Ray job --output must be an absolute path or a URI"
    with pytest.raises(ConfigError, match=line):
        config(*argv.split(), command=command)


def test_inside_a_ray_job_paths_of_all_nodes_are_taken(monkeypatch):
    monkeypatch.setenv(configure.RAY_JOB, "{}")
    for output in ("/data/run", "s3://bucket/run"):
        assert config("--output", output).output == output
    assert config("check", command=DATA).output is None


@pytest.fixture
def help_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def run(*argv: str, command: Command = DISCOVER) -> str:
        with pytest.raises(SystemExit, match="0"):
            parse([*argv], command)
        return re.sub(r"[\s│]+", " ", capsys.readouterr().out)

    return run


def test_help_is_short_first(help_text):
    """Kills: a hundred options where ten are asked for, a command's own argument
    hidden.
    """
    text = help_text("--help")
    needed = "--data --labeled --num-novel --image-size --output --overwrite --dry-run"
    for name in needed.split():
        assert f" {name} " in text
    assert "--objective.epsilon" not in text
    assert re.search(r"--help-all lists \d+ more options", text)
    assert "more options" not in help_text("--help", command=PREDICT)


def test_help_has_every_flag_with_a_sentence_and_the_values_in_force(help_text):
    words = ["--preset", "cifar10", "--recipe", "v2", "--discover.epochs", "77"]
    text = help_text(*words, "--help-all")
    for name, flag in DISCOVER.flags().items():
        assert re.search(rf" {name}[ ,]", text) and flag.sentence in text, name
    assert "Length of the phase in epochs. (default: 77)" in text
    assert "twice the gradient. (default: 0.4)" in text
    assert "\x1b" not in text
    # whatever the mistake
    assert "usage: uno demo" in help_text("--nonsense", "--help-all", command=DEMO)
    assert "--overwrite" not in help_text("--help-all", command=DATA)


def test_an_encoders_description_stands_between_preset_and_file(file):
    """Kills: a description that beats the user's file or line, or loses against the
    preset; a stored square that does not follow the size that was asked for.
    """
    words = [*VIT.split(), "--config", file("data: {mean: [0.1, 0.1, 0.1]}\n")]
    found = config(*words)
    assert (found.augment.large.size, found.data.stored_size) == (8, 8)
    assert (found.data.mean, found.data.std) == ((0.1,) * 3, (0.4,) * 3)
    assert found.data.interpolation == "bicubic"
    words += ["--augment.large.size", "12", "--data.interpolation", "bilinear"]
    found = config(*words)
    assert (found.augment.large.size, found.data.stored_size) == (12, 12)
    assert found.data.interpolation == "bilinear"


@pytest.mark.parametrize(
    ("argv", "text", "sizes"),
    [
        (f"{IMAGES} --image-size 64", None, (64, 64, 36, 8)),
        ("--preset imagenet --image-size=112", None, (112, 128, 48, 2)),
        (f"{IMAGES} --image-size 1024 --preset photos", None, (1024, 1024)),
        (f"{VIT} --image-size 12", None, (12, 12)),
        (IMAGES, "image_size: 48\ndata: {num_novel: 3}\n", (48, 48)),
        (
            f"{IMAGES} --image-size 40",
            "image_size: 48\ndata: {num_novel: 3}\n",
            (40, 40),
        ),
        (f"{IMAGES} --image-size 40", "augment: {large: {size: 20}}\n", (40, 40)),
        (
            (
                f"{IMAGES} --image-size 64 --augment.large.crop-padding 1"
                " --data.stored-size 64"
            ),
            None,
            (64, 64, 36, 1),
        ),
    ],
)
def test_one_size_of_images_sets_all_that_is_in_pixels(argv, text, sizes, file):
    """Kills: a square that is stored too small for the view, small crops larger than
    the image, a size that is lost between file and line, or silently beside another.
    """
    found = config(*argv.split(), *([] if text is None else ["--config", file(text)]))
    large, small = found.augment.large, found.augment.small
    assert (large.size, found.data.stored_size, small.size, large.crop_padding)[
        : len(sizes)
    ] == sizes


MISTAKES = [
    (
        "--objective.epsilon -1",
        "objective.epsilon: Input should be greater than or equal to 0.0001 (got -1)",
    ),
    (
        "--objective.epsilon nan",
        "objective.epsilon: Input should be a finite number (got nan)",
    ),
    ("--data.std 1 1", "--data.std takes 3 values, got '1' '1'"),
    ("--seed", "--seed needs one value"),
    ("--seed 1 2", "--seed takes one value, got '1' '2'"),
    (
        "--seed 1.5",
        (
            "seed: Input should be a valid integer, got a number with a fractional part"
            " (got 1.5)"
        ),
    ),
    ("--seed " + "9" * 5000, "seed: Input should be a finite number (got inf)"),
    (
        "--device tpu",
        "compute.device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')",
    ),
    ("--objective.no-concat true", "--objective.no-concat takes no value, got 'true'"),
    ("--overwrite=1", "--overwrite takes no value, got '1'"),
    ("--output=", "--output needs one value"),
    ("--recipe v3", "digits has no recipe 'v3'; choose from paper, v2"),
    ("--preset cifr10", "unknown preset 'cifr10'; did you mean 'cifar10'?"),
    (
        "--preset scratch",
        (
            "the preset 'scratch' needs --data SOURCE, or --labeled DIR and"
            " --unlabeled DIR"
        ),
    ),
    ("--labeled a", "data: labeled and unlabeled must be given together"),
    (
        "--labeled a --unlabeled b --data c",
        "give either --data or --labeled and --unlabeled, not both",
    ),
    (
        "--augment.large.num-views 1",
        "augment: large.num_views must be at least 2: swapped prediction",
    ),
    (
        "--objective.epsilonn 1",
        "unknown option --objective.epsilonn; did you mean --objective.epsilon?",
    ),
    (
        "--objectiv.sinkhorn_iters 1",
        (
            "unknown option --objectiv.sinkhorn-iters; did you mean"
            " --objective.sinkhorn-iters?"
        ),
    ),
    (
        "--base-lr 1",
        (
            "unknown option --base-lr; did you mean --pretext.base-lr or"
            " --pretrain.base-lr or "
        ),
    ),
    ("--dryrun", "unknown option --dryrun; did you mean --dry-run?"),
    ("--", "unknown option --; see --help-all"),
    ("-o x", "unexpected argument '-o'; options start with --"),
    (
        "--config /nope.yaml",
        "cannot read config file /nope.yaml: No such file or directory",
    ),
    ("--config", "--config needs one value"),
    (
        f"{IMAGES} --image-size 64 --data.stored-size 80",
        "image_size 64 sets data.stored_size to 64, not 80: give one of them",
    ),
    (
        f"{IMAGES} --image-size 64 --augment.small.size 18",
        "image_size 64 sets augment.small.size to 36, not 18: give one of them",
    ),
    (
        "--image-size 2",
        "augment.large.size: Input should be greater than or equal to 4",
    ),
    ("--image-size x", "augment.large.size: Input should be a valid integer"),
]
MISTAKES_IN_OWN_ARGUMENTS = [
    ("r", "--format is missing: uno export RUN"),
    ("--format a", "RUN comes first: uno export RUN"),
    ("r --format c", "--format: Input should be 'a' or 'b' (got 'c')"),
    ("r --format a --count 0", "--count: Input should be greater than 0 (got 0)"),
    ("r 1 z --format a", "unexpected argument 'z'"),
    ("r --formt a", "unknown option --formt; did you mean --format?"),
]
MISTAKES_WITH_A_MODEL = [
    ("r --objective.epsilon 0.1", "objective.epsilon is fixed by the trained model"),
    ("r --data d --image-size 64", "image_size is fixed by the trained model"),
]


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        *((DISCOVER, *mistake) for mistake in MISTAKES),
        *((OWN, *mistake) for mistake in MISTAKES_IN_OWN_ARGUMENTS),
        *((PREDICT, *mistake) for mistake in MISTAKES_WITH_A_MODEL),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else value.name,
)
def test_a_mistake_is_one_line(command, argv, message):
    with pytest.raises(ConfigError) as caught:
        config(*argv.split(), command=command)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)

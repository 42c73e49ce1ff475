"""The schema: files load safely, a mistake is one line that
names the field.
"""

from pathlib import Path

import pytest

from tests.uno.data.builders import failure
from uno import config as schema
from uno.config import (
    Config,
    config_hash,
    differing_keys,
    load_yaml,
    override,
    to_dict,
)
from uno.errors import ConfigError
from uno.method import METHODS


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"data.std": [1, 1, float("nan")]},
            "data.std.2: Input should be a finite number (got nan)",
        ),
        ({"data.std": [1, 1, 0]}, "data: std must be positive"),
        (
            {"augment.large.crop_scale": [0.9, 0.1]},
            "augment.large: crop_scale must satisfy 0 < low <= high",
        ),
        (
            {"method": "dino"},
            (
                f"method must be one of {', '.join(METHODS)}, or package.module:METHOD,"
                " got 'dino'"
            ),
        ),
        ({"recipe": "v3"}, "recipe: Input should be 'paper', 'v2' or 'cpu' (got 'v3')"),
        (
            {"seed": 2**31},
            "seed: Input should be less than 2147483648 (got 2147483648)",
        ),
        (
            {"compute.gpus_per_worker": 1.5},
            "compute.gpus_per_worker: must be a fraction of one GPU, or a whole number",
        ),
        ({"num_novel": 1}, "unknown key 'num_novel'; did you mean 'data.num_novel'?"),
        (
            {"data": "cifar10:x"},
            "'data' is a section of keys such as 'data.source' (got 'cifar10:x')",
        ),
        (
            {"seed": "x" * 10_000},
            "seed: Input should be a valid integer, unable to parse string",
        ),
    ],
)
def test_a_mistake_is_one_short_line_that_names_the_field(overrides, message):
    line = failure(override, Config(), overrides)
    assert line.startswith(message)
    assert len(line) < 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("objective:\n  epsilon: 0.1\n", {"objective.epsilon": 0.1}),
        ("objective.epsilon: 0.1\n", {"objective.epsilon": 0.1}),
        # YAML 1.1 reads a string
        ("discover:\n  weight_decay: 1e-4\n", {"discover.weight_decay": 1e-4}),
        ("objective:\n  # epsilon: 0.1\nseed: 3\n", {"seed": 3}),
        ("# nothing\n", {}),
    ],
)
def test_nested_and_dotted_keys_mean_the_same_and_comments_nothing(
    yaml_file, text, expected
):
    values = load_yaml(yaml_file(text))
    assert override(Config(), values) == override(Config(), expected)


BOMB = "b0: &b0 {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{p: *b{n - 1}, q: *b{n - 1}}}\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "seed: 1\n" + "#" * schema.MAX_CONFIG_BYTES,
            f" is larger than {schema.MAX_CONFIG_BYTES} bytes",
        ),
        ("- 1\n- 2\n", " must hold a mapping of keys, not a list"),
        ("just words", " must hold a mapping of keys, not a str"),
        ("a: [1,\nb: 2", ": while parsing"),
        (b"\xff\xfe\x00", ": 'utf-8' codec"),
        (
            "seed: !!python/object/apply:os.getcwd []",
            ": could not determine a constructor",
        ),
        ("data:\n  limit: 2024-13-45\n", ": month must be in 1..12"),
        ("seed: " + "9" * 5000, ": a number of 5000 digits"),
        ("seed: !!bool x\n", ": 'x'"),
        ('seed: !!int ""\n', ": string index out of range"),
        ("seed: !!timestamp x\n", ": 'NoneType' object"),
        ("[" * 900, ": nested deeper than 20 levels"),
        (BOMB, ": YAML aliases"),
        ("a: &a\n  b: *a\n", ": YAML aliases"),
    ],
)
def test_a_bad_file_is_one_line(content, message, yaml_file):
    path = yaml_file(content)
    assert failure(load_yaml, path).startswith(f"config file {path}{message}")


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/", "Is a directory"), ("a\0b", "embedded null byte")],
)
def test_an_unreadable_file_is_one_line(path, reason):
    with pytest.raises(ConfigError, match=f"^cannot read config file .*: {reason}"):
        load_yaml(path)


MOVED = {
    "output": "elsewhere",
    "compute.num_workers": 2,
    "compute.device": "cpu",
    "compute.threads": 3,
    "train.log_every": 7,
    "train.keep_checkpoints": 5,
    "train.checkpoint_every_epochs": 3,
    "train.checkpoint_every_minutes": 1,
    "train.eval_batch_size": 64,
    "train.report_to": "jsonl",
}
"""Settings that change no result."""
STREAMED, LOADED = {"data.loading": "streaming"}, {"data.loading": "memory"}
MIXED, NOVEL = {"data.setting": "gcd"}, {"data.setting": "ncd"}


@pytest.mark.parametrize(
    ("stored", "now", "expected"),
    [
        ({}, MOVED, []),
        ({}, {"objective.epsilon": 0.1}, ["objective.epsilon"]),
        # what the data decides may be given later, and need not be given again
        ({}, STREAMED, []),
        (STREAMED, {}, []),
        (STREAMED, LOADED, ["data.loading"]),
        (MIXED, {}, []),
        (MIXED, NOVEL, ["data.setting"]),
    ],
)
def test_keys_that_differ_from_those_of_a_stored_run(stored, now, expected):
    stored, now = (override(Config(), values) for values in (stored, now))
    assert differing_keys(to_dict(stored), now) == expected


def test_where_a_run_executes_does_not_change_what_it_is():
    same, other = (
        override(Config(), values) for values in (MOVED, {"objective.epsilon": 0.1})
    )
    assert config_hash(same) == config_hash(Config()) != config_hash(other)


def test_fields_that_a_run_of_another_version_did_not_have_are_defaults():
    """Of its own fields, those of the place of execution do not count."""
    other = to_dict(Config())
    del other["model"]["width"], other["objective"]["epsilon"]
    other["compute"]["of_another_version"] = 3
    assert differing_keys(other, Config()) == []
    other["other"] = 3
    wide = override(Config(), {"model.width": 8})
    assert differing_keys(other, wide) == ["model.width", "other"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "rs"),
        ("objective.concat", False),
        ("objective.iic_weight", 0.05),
        ("objective.iic_view_weight", 0.01),
        ("objective.queue_size", 64),
    ],
)
def test_what_takes_unlabeled_rows_for_novel_refuses_mixed_piles(key, value):
    override(Config(), {key: value})
    with pytest.raises(ConfigError, match=r"^[^\n]*data\.setting gcd[^\n]*$"):
        override(Config(), {key: value, "data.setting": "gcd"})

"""The command line as one resolved :class:`~uno.config.Config`: defaults < preset < YAML < command line.

The flags are the schema's fields (``--objective.epsilon``) and their short aliases (``--batch-size``). Values
start from the preset that was given, on the command line or in a file; otherwise from ``digits`` for the
digits and from ``custom`` for any other data. A preset's known classes are those of its own data set: with
another kind of source they are dropped unless they are given too, because hiding the labels of somebody
else's classes would be a silent mistake.

tyro renders ``--help`` from the schema; values are converted here and checked by pydantic, so that an error
is one line with the field's name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args, get_origin

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from uno.config import Config, load_yaml, override
from uno.errors import ConfigError
from uno.methods import settings
from uno.presets import PRESETS, preset

SWITCHES = {
    "--print-config": "Print the resolved configuration as YAML and stop.",
    "--dry-run": "Check the data, take one step, print the plan and stop.",
    "--fresh": "Start over: ignore the checkpoints of an earlier run in the same directory.",
}
STARTS_OVER = ("demo", "discover", "pretrain")  # the commands that have --fresh

OUTPUTS = {"demo": "runs/demo", "tune": "runs/tune-{preset}-seed{seed}", "data": None}
DEFAULT_OUTPUT = "runs/{preset}-seed{seed}"

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray's job supervisor for the entrypoint of a submitted job

RULES = f"""\
Order: defaults < preset < --config FILE < command line. Presets: {", ".join(PRESETS)}.
Without --preset: digits for the digits, custom (the paper's CIFAR10 settings) for any other data.
A preset's known classes apply only to its own kind of data. None switches an optional value off.
The values below are those that this very command line leads to."""


@dataclass(frozen=True)
class Options:
    """What a command was asked to do."""

    config: Config
    print_config: bool = False
    dry_run: bool = False
    fresh: bool = False
    config_files: tuple[str, ...] = ()


def parse(argv: Sequence[str], command: str) -> Options:
    """Options of ``uno COMMAND ARGV...``; ``--help`` prints the fields with their values and exits.

    Raises:
        ConfigError: unknown flag or preset, value of the wrong type or out of range, unreadable config file,
            relative output inside a Ray job.
        SystemExit: after ``--help``, with code 0.
    """
    if "--help" in argv or "-h" in argv:
        _print_help([token for token in argv if token not in ("--help", "-h")], command)
    values, switches, files = _scan(argv, command)
    config = _layer(_read(files), values)
    config = override(config, {"output": _output(config, command)})
    return Options(config, config_files=tuple(files), **{name: True for name in switches})


def overrides(argv: Sequence[str], command: str) -> dict[str, Any]:
    """The dotted keys that ``argv`` (and its config files) sets, without presets and defaults. Raises as
    :func:`parse`.
    """
    values, _, files = _scan(argv, command)
    return {**_read(files), **values}


def _read(files: Sequence[str]) -> dict[str, Any]:
    """Dotted values of all config files; a later file wins."""
    values: dict[str, Any] = {}
    for path in files:
        values |= load_yaml(path)
    return values


def _layer(file: Mapping[str, Any], line: Mapping[str, Any]) -> Config:
    """Defaults < preset < ``file`` < ``line``, all as dotted keys."""
    if "data.source" in line and "data.labeled" in line:
        raise ConfigError("give either --data or --labeled and --unlabeled, not both")
    given = {**file, **line}
    if "data.source" in line:  # one way to say where the images are replaces the other
        given |= {"data.labeled": None, "data.unlabeled": None}

    source, two_folders = given.get("data.source"), given.get("data.labeled") is not None
    own_data = two_folders or source not in (None, "digits")
    name = str(given.pop("preset", "custom" if own_data else "digits"))
    if name == "custom" and source is None and not two_folders:
        raise ConfigError("the preset 'custom' needs --data SOURCE, or --labeled DIR and --unlabeled DIR")

    config = preset(name, str(given.pop("recipe", "paper")))
    config = override(config, settings(str(given.get("method", config.method)), name))
    if two_folders or (source is not None and _kind(source) != _kind(config.data.source)):
        config = override(config, {"data.known_classes": None})
    return override(config, given)


def _kind(source: Any) -> str:
    return str(source).partition(":")[0]


def _output(config: Config, command: str) -> str | None:
    """The run directory: as given, or the command's default; None for commands that write none."""
    default = OUTPUTS.get(command, DEFAULT_OUTPUT)
    if default is None and config.output is None:
        return None
    output = config.output or str(default).format(preset=config.preset, seed=config.seed)
    output = os.path.expanduser(output)
    if RAY_JOB in os.environ and not os.path.isabs(output) and "://" not in output:
        raise ConfigError(
            f"inside a Ray job --output must be an absolute path or a URI, not {output!r}: "
            "the job's working directory is deleted with the job"
        )
    return output


@dataclass(frozen=True)
class _Flag:
    key: str  # dotted field
    type: Any
    negated: bool = False  # the second form of a boolean, --objective.no-concat

    def value(self, name: str, words: Sequence[str]) -> Any:
        """The words after a flag as what pydantic gets; it does the rest.

        Raises:
            ConfigError: too few or too many words.
        """
        types = get_args(self.type) or (self.type,)
        if bool in types and not words:
            return not self.negated
        count = len(types) if get_origin(self.type) is tuple else 1
        wanted = {0: "no value", 1: "one value"}.get(0 if self.negated else count, f"{count} values")
        if not words or "" in words:
            raise ConfigError(f"{name} needs {wanted}")
        if self.negated or len(words) != count:
            raise ConfigError(f"{name} takes {wanted}, got {' '.join(map(repr, words))}")
        if NoneType in types and words[0].lower() == "none":
            return None
        converted = [_number(word) if int in types or float in types else word for word in words]
        return converted if get_origin(self.type) is tuple else converted[0]


def _number(word: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word


def _fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def schema_flags() -> dict[str, str]:
    """Every flag of the schema, aliases included, and the dotted field it sets."""
    return {name: flag.key for name, flag in _flags().items()}


def _flags() -> dict[str, _Flag]:
    flags = {}
    for key, info in _fields():
        dashed = key.replace("_", "-")
        aliases = [alias for extra in info.metadata for alias in getattr(extra, "aliases", None) or ()]
        for name in (f"--{dashed}", *aliases):
            flags[name] = _Flag(key, info.annotation)
        if info.annotation is bool:
            section, _, leaf = dashed.rpartition(".")
            flags[f"--{section}.no-{leaf}"] = _Flag(key, bool, negated=True)
    return flags


def _scan(argv: Sequence[str], command: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """``argv`` -> (field values by dotted key, names of the switches that are on, config files)."""
    flags, switches = _flags(), _switches(command)
    values: dict[str, Any] = {}
    turned_on: list[str] = []
    files: list[str] = []
    for name, words in _group(argv):
        if name == "--config":
            files.append(_Flag("config", str).value(name, words))
        elif name in switches:
            if words:
                raise ConfigError(f"{name} takes no value, got {words[0]!r}")
            turned_on.append(name[2:].replace("-", "_"))
        elif name in flags:
            values[flags[name].key] = flags[name].value(name, words)
        else:
            _unknown(name, [*flags, *switches, "--config", "--help"])
    return values, turned_on, files


def _switches(command: str) -> dict[str, str]:
    return {name: text for name, text in SWITCHES.items() if name != "--fresh" or command in STARTS_OVER}


def _group(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``--a 1 2 --b=3`` -> ``[("--a", ["1", "2"]), ("--b", ["3"])]``; underscores in names become dashes."""
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, word = token.partition("=")
            groups.append((name.replace("_", "-"), [word] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            raise ConfigError(f"unexpected argument {token!r}; options start with --")
    return groups


def _unknown(name: str, known: Sequence[str]) -> NoReturn:
    same_leaf = [flag for flag in known if flag.endswith("." + name[2:])]
    near = same_leaf[:3] or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "see --help"
    raise ConfigError(f"unknown option {name}; {hint}")


def _print_help(argv: Sequence[str], command: str) -> NoReturn:
    """Every flag with a sentence and its value (a preset's, where ``argv`` has a mistake); exits with 0."""
    try:
        values, _, files = _scan(argv, command)
        config = _layer(_read(files), values)
    except ConfigError:
        config = preset("digits")

    def entry(name: str, kind: Any, default: Any, **texts: str) -> tuple[str, Any, Any]:
        flag = Annotated[kind, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name=name, **texts)]
        return name.replace("-", "_"), flag, field(default=default)

    file = entry("config", str | None, None, metavar="FILE", help="YAML file; repeatable, the last one wins.")
    switches = [entry(name[2:], bool, False, help=text) for name, text in _switches(command).items()]
    fields = ("fields", Annotated[Config, tyro.conf.arg(name="")], field(default=config))
    line = make_dataclass("CommandLine", [file, *switches, fields])
    tyro.cli(line, prog=f"uno {command}", description=RULES, args=["--help"])
    raise SystemExit(0)

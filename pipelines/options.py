"""The command line of every command, from one declaration: its own arguments and the schema's fields.

The flags are the schema's fields (``--objective.epsilon``), their short forms (``--batch-size``) and what a
:class:`Command` adds; :mod:`uno.session.settings` makes a configuration of them. pydantic checks every value,
so that an error is one line with the field's name.
"""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import NoneType, SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from pipelines.cli import SENTENCES
from uno.config import Config, about, describe, flatten, load_yaml
from uno.errors import ConfigError
from uno.presets import IMAGE_SIZE, PRESETS, preset
from uno.session.settings import HELP_ALL, configured, dashed, merged, similar

MANY = 10**6


class Argument(NamedTuple):
    """One argument: a bool is a switch, list[str] takes words; without a default or None it must be given."""

    sentence: str
    type: Any = str
    default: Any = None
    key: str = ""  # of a field of the schema
    negated: bool = False  # the second form of a boolean field, --objective.no-concat

    @property
    def required(self) -> bool:
        """Whether the command cannot do without it."""
        return self.default is None and NoneType not in get_args(self.type)

    @property
    def most_words(self) -> int:
        """The words that may follow it."""
        kind = get_origin(self.type)
        if self.type is bool:
            return 1 if self.key and not self.negated else 0
        return len(get_args(self.type)) if kind is tuple else MANY if kind is list else 1


def switch(sentence: str) -> Argument:
    """An argument without a value, off unless given."""
    return Argument(sentence, bool, False)


PRINT_CONFIG = {"--print-config": switch("Print the resolved configuration as YAML and stop.")}
DRY_RUN = {"--dry-run": switch("Check the data, take one step, print the plan and stop.")}
RUN = {"RUN": Argument("The run directory, a path or a URI.")}
SIZE_FLAG = {"--image-size": Argument(
    "Side of the images that are learnt from, in pixels: of views, of the stored squares and of small crops, "
    "in the preset's proportions.", int, key=IMAGE_SIZE)}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """What a command's line may hold: its own ``arguments``, a name without dashes is positional, and what it
    ``takes``: ``all`` fields of the schema, to make one configuration; ``changes`` to configurations there
    are; the ``few`` that name the command; none. ``output``: where none is given. ``text``: for ``--help``.
    """

    name: str
    arguments: Mapping[str, Argument]
    takes: Literal["all", "changes", "few", "none"] = "all"
    output: str | None = "runs/{preset}-seed{seed}"
    text: str = ""

    @property
    def usage(self) -> str:
        """``uno evaluate RUN [OPTIONS]``."""
        names = [n if a.required else f"[{n}]" for n, a in self.arguments.items() if not n.startswith("-")]
        return " ".join(["uno", self.name, *names, "[OPTIONS]"])

    def flags(self) -> dict[str, Argument]:
        """All arguments by name: the command's own, then those of the schema."""
        own = {**self.arguments, "--help": switch("Print what is needed most and exit.")}
        if self.takes == "none":
            return own
        if self.takes != "few":
            own[HELP_ALL] = switch("Print every option and exit.")
        own["--config"] = Argument("YAML file; repeatable, the last one wins.")
        return own | SIZE_FLAG | {name: flag for name, flag in schema_flags() if name not in own}

    def may_change(self, key: str) -> bool:
        """Whether a field of the schema is an option of this command."""
        return self.takes != "few" or self.name in about(key).commands.split()


@dataclass(frozen=True)
class Options:
    """``own.dry_run`` is ``--dry-run``; ``file`` and ``line`` hold the dotted keys set there."""

    command: Command
    own: SimpleNamespace
    file: Mapping[str, Any]
    line: Mapping[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """The dotted keys that were set."""
        return merged(self.file, self.line)

    @cached_property
    def config(self) -> Config:
        """The configuration that the line leads to, with the command's output."""
        return configured(self.given, self.command.output)


def parse(argv: Sequence[str], command: Command) -> Options:
    """Options of ``uno COMMAND ARGV...``; ``--help``, or nothing where something is needed, ends it."""
    asked = not {"--help", "-h", HELP_ALL}.isdisjoint(argv)
    if asked or (not argv and any(argument.required for argument in command.arguments.values())):
        rest = [token for token in argv if token not in ("--help", "-h", HELP_ALL)]
        _print_help(rest, command, HELP_ALL in argv)
        raise SystemExit(0 if asked else 2)
    options = _read(argv, command)
    for name, argument in command.arguments.items():
        if argument.required and getattr(options.own, _attribute(name)) is None:
            raise ConfigError(f"{name} {'is missing' if name[0] == '-' else 'comes first'}: {command.usage}")
    return _checked(options)


def _checked(options: Options) -> Options:
    """``options``, if they go together and the command may set them."""
    command = options.command
    for key in options.given:
        if not command.may_change(key):
            see = f"see uno {command.name} --help for what is not"
            raise ConfigError(f"{key} is fixed by the trained model; {see}")
    return options


def schema_flags(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Argument]]:
    """Every flag of the schema and what it sets; a field's long form comes first, its short one next."""
    for name, info in model.model_fields.items():
        key, kind = f"{prefix}{name}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from schema_flags(kind, f"{key}.")
            continue
        flag, short = Argument(info.description or "", kind, key=key), about(key).flag
        yield f"--{dashed(key)}", flag
        if short:
            yield f"--{short}", flag
        if kind is bool:
            yield f"--{dashed(prefix)}no-{dashed(name)}", flag._replace(negated=True)


def _attribute(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _read(argv: Sequence[str], command: Command) -> Options:
    flags = command.flags()
    positional = [name for name in command.arguments if not name.startswith("-")]
    given, file, line = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, joined, words in _groups(argv):
        if name and name not in flags:
            raise ConfigError(f"unknown option {name}; {similar(name[2:], [flag[2:] for flag in flags])}")
        most = max(flags[name].most_words, joined) if name else 0
        words, surplus = words[:most], words[most:]
        while positional and surplus:
            given[positional.pop(0)] = surplus.pop(0)
        if not name:
            if surplus:
                raise ConfigError(f"unexpected argument {surplus[0]!r}; options start with --")
            continue
        value = _value(name, flags[name], words + surplus)
        if name in command.arguments:
            given[name] = value
        elif name == "--config":
            file |= load_yaml(value)
        else:
            line[flags[name].key] = value
    own = {_attribute(name): argument.default for name, argument in command.arguments.items()}
    for name, value in given.items():
        try:
            own[_attribute(name)] = TypeAdapter(command.arguments[name].type).validate_python(value)
        except ValidationError as error:
            raise ConfigError(describe(error, name)) from None
    return Options(command, SimpleNamespace(**own), file, line)


def _groups(argv: Sequence[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """``x --a 1 2 --b=3`` -> ``("", False, [x]), ("--a", False, [1, 2]), ("--b", True, [3])``."""
    name, equals, words = "", "", list[str]()
    for token in argv:
        if token.startswith("--"):
            yield name, bool(equals), words
            name, equals, word = token.partition("=")
            name, words = dashed(name), [word] if equals else []
        else:
            words.append(token)
    yield name, bool(equals), words


def _value(name: str, argument: Argument, words: Sequence[str]) -> Any:
    """The words after a flag, as many as it takes, as what pydantic gets; it does the rest."""
    types, most = get_args(argument.type) or (argument.type,), argument.most_words
    if bool in types and not words:
        return not argument.negated
    wanted = {0: "no value", 1: "one value", MANY: "values"}.get(most, f"{most} values")
    if not words or "" in words:
        raise ConfigError(f"{name} needs {wanted}")
    if len(words) > most or (most != MANY and len(words) < most):
        raise ConfigError(f"{name} takes {wanted}, got {' '.join(map(repr, words))}")
    if NoneType in types and words[0].lower() == "none":
        return None
    converted = [_number(word) if int in types or float in types else word for word in words]
    return converted if most > 1 else converted[0]


def _number(word: str) -> int | float | str:
    for convert in (int, float):
        with suppress(ValueError):
            return convert(word)
    return word


RULES = f"""
Order: defaults < preset < what a library says of its encoder < --config FILE < command line.
Presets: {", ".join(PRESETS)}.
Without --preset: digits for the digits; for any other data photos, where --weights names an encoder's or
torchvision's are at hand, else custom (the paper's CIFAR10 settings, but for own images with size, batch,
epochs, mean and std from the data, unless given; the run says which).
A preset's known classes apply only to its own kind of data. None switches an optional value off.
The values below are those that this very command line leads to.
"""


def _print_help(argv: Sequence[str], command: Command, everything: bool) -> None:
    """Arguments with a sentence and their values: a preset's, where ``argv`` has a mistake. Of the schema's
    fields those with a short form, unless ``everything``.
    """
    print(f"usage: {command.usage}\n\n{SENTENCES[command.name]}\n")
    width = max(60, shutil.get_terminal_size().columns - 1)
    values: dict[str, Any] = {}
    text = command.text
    if command.takes == "all":
        text += f"\n\n{RULES}"
        try:
            config = _read(argv, command).config
        except ConfigError:
            config = preset("digits")
        values = flatten(config.model_dump())
    for paragraph in text.strip().split("\n\n"):
        print(f"{textwrap.fill(' '.join(paragraph.split()), width)}\n")

    flags, forms, section, hidden = command.flags(), dict[str, list[str]](), "", 0  # names of one argument
    for name, argument in flags.items():
        if not argument.key or command.may_change(argument.key):
            forms.setdefault(argument.key or name, []).append(name)
    if not everything and command.takes in ("all", "changes"):
        short = {k: v for k, v in forms.items() if "." not in k or about(k).flag}
        forms, hidden = short, len(forms) - len(short)
    for key, names in forms.items():
        argument = flags[names[0]]
        if argument.key and section != (section := key.rpartition(".")[0] or "run"):
            print(f"\n{section}:")
        print(f"  {', '.join(names)} {_placeholder(argument.type) if names[0][0] == '-' else ''}".rstrip())
        value = values.get(key, argument.default)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        default = f" (default: {shown})" if key in values or value not in (None, False, ()) else ""
        print(textwrap.indent(textwrap.fill(argument.sentence + default, width - 6), " " * 6))
    if hidden:
        print(f"\n{HELP_ALL} lists {hidden} more options")


def _placeholder(kind: Any) -> str:
    """What stands for the value: ``INT``, ``FLOAT FLOAT``, ``{paper,v2}``, ``INT|auto|None``."""
    parts, origin = get_args(kind), get_origin(kind)
    if not parts:
        return {bool: "", int: "INT", float: "FLOAT", NoneType: "None"}.get(kind, "STR")
    if origin is Literal:
        return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"
    if origin is tuple:
        return " ".join(map(_placeholder, parts))
    if origin is list:
        return f"{_placeholder(parts[0])} ..."
    return _placeholder(parts[0]) if hasattr(kind, "__metadata__") else "|".join(map(_placeholder, parts))

"""Parse a command line: the command's own arguments and settings of the configuration.

The options of a command are the fields of the configuration (``--objective.epsilon``),
their short forms (``--batch-size``) and the arguments that a :class:`Command` declares.
:mod:`uno.session.configure` makes a configuration of them. pydantic checks every value,
so that an error is one line with the name of the field.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Field, StrictBool, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pipelines.cli import SENTENCES
from uno.config import (
    Config,
    describe,
    field_traits,
    fields_of,
    flatten,
    load_yaml,
)
from uno.errors import ConfigError
from uno.method import DEFAULT, METHODS
from uno.presets import IMAGE_SIZE, PRESETS, preset
from uno.session.configure import (
    HELP_ALL,
    configure,
    merge_settings,
    suggest_name,
    with_dashes,
)

MANY = 10**6
_Number = Annotated[int | float | str, Field(union_mode="left_to_right")]
NUMBERS: TypeAdapter[Any] = TypeAdapter(StrictBool | list[_Number] | _Number | None)


Group = tuple[str, bool, list[str]]
"""An option, whether its value follows an equals sign, and the words after it.

The name is "" for the words before the first option.
"""


class Argument(NamedTuple):
    """The declaration of one argument or option of a command.

    Attributes:
        sentence: The sentence in the help.
        type: The type of the value. A bool is a switch, and list[str] takes many words.
        default: The default. If it is None, and the type does not allow None, the
            argument must be given.
        key: The dotted key, such as ``objective.epsilon``, if this sets a field of the
            configuration; "" for a command's own argument.
        negated: Whether this is the second form of a boolean field, such as
            ``--objective.no-concat``.
    """

    sentence: str
    type: Any = str
    default: Any = None
    key: str = ""  # the dotted key of a field of the schema
    negated: bool = False  # the second form of a boolean field, --objective.no-concat

    @property
    def required(self) -> bool:
        """Whether this argument of a command must be given.

        It must if it has no default: the default is None, and the type does not allow
        None. A field of the configuration (``key`` is set) need never be given,
        whatever this says.
        """
        return self.default is None and NoneType not in get_args(self.type)

    @property
    def most_words(self) -> int:
        """The largest number of words that this argument takes as its value.

        It is 0 for a switch and for the ``no-`` form of a boolean field, the number of
        values for a tuple, a million for a list, and else 1, also for the plain form of
        a boolean field (``--objective.concat true``).
        """
        if self.type is bool:
            return 1 if self.key and not self.negated else 0
        kind = self.plain_type
        return {tuple: len(get_args(kind)), list: MANY}.get(get_origin(kind), 1)

    @property
    def plain_type(self) -> Any:
        """The type without None, such as int for ``int | None``.

        A union of three or more types is returned unchanged, with None.
        """
        kinds = get_args(self.type)
        is_optional = NoneType in kinds and len(kinds) == 2
        return kinds[kinds[0] is NoneType] if is_optional else self.type

    @property
    def takes_numbers(self) -> bool:
        """Whether words such as ``3`` after this argument are read as numbers.

        They are if its type is ``int`` or ``float``, or has one of these as a part,
        such as ``int | None`` or ``tuple[float, float]``.
        """
        kinds = get_args(self.plain_type) or (self.plain_type,)
        return not {int, float}.isdisjoint(kinds)

    def value(self, name: str, words: Sequence[str]) -> Any:
        """Return the value of this argument for the words that follow its name.

        Words are returned as text; they are not converted to the argument's type here.

        Args:
            name: The name of the argument, for the error.
            words: The words of the command line after the name.

        Returns:
            The word, or the list of all words if the argument can take several. For a
            boolean argument without a word: True, or False for its ``no-`` form. None
            for the single word ``none``, in upper or lower case, if the type allows
            None.

        Raises:
            ConfigError: There are too few words or too many, or a word is empty. A
                tuple needs exactly as many words as it has values.
        """
        types, most = get_args(self.type) or (self.type,), self.most_words
        if bool in types and not words:
            return not self.negated
        wanted = {0: "no value", 1: "one value", MANY: "values"}.get(
            most, f"{most} values"
        )
        if not words or "" in words:
            raise ConfigError(f"{name} needs {wanted}")
        if NoneType in types and [word.lower() for word in words] == ["none"]:
            return None
        if len(words) > most or (most != MANY and len(words) < most):
            raise ConfigError(
                f"{name} takes {wanted}, got {' '.join(map(repr, words))}"
            )
        return words if most > 1 else words[0]


def switch(sentence: str) -> Argument:
    """Return the declaration of an option without a value, which is off by default.

    Args:
        sentence: The sentence in the help.
    """
    return Argument(sentence, bool, False)


DRY_RUN = {"--dry-run": switch("Check the data, print the plan and stop.")}
RUN = {"RUN": Argument("The run directory, a path or a URI.")}
SIZE_FLAG = {
    "--image-size": Argument(
        "Side of the training images in pixels; stored images, views and small crops"
        " keep the preset's proportions.",
        int,
        key=IMAGE_SIZE,
    )
}


@dataclass(frozen=True)
class Command:
    """The declaration of a command with its arguments and options.

    Attributes:
        name: The name after ``uno``.
        arguments: The command's own arguments by name. A name without dashes is
            positional.
        takes: Which fields of the configuration are options: ``all`` (they make one
            configuration); ``changes`` (all fields, as changes to existing
            configurations); ``some`` (those whose declaration names the command);
            ``none``.
        output: The default of the output directory; None without a default.
        text: A text for the help.
        examples: Examples for the help. A command with examples prints the help if it
            has no arguments.
    """

    name: str
    arguments: Mapping[str, Argument]
    takes: Literal["all", "changes", "some", "none"] = "all"
    output: str | None = "runs/{preset}-seed{seed}"
    text: str = ""
    examples: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """The usage line of this command, such as ``uno evaluate RUN [OPTIONS]``."""
        names = [
            n if a.required else f"[{n}]"
            for n, a in self.arguments.items()
            if not n.startswith("-")
        ]
        return " ".join(["uno", self.name, *names, "[OPTIONS]"])

    def flags(self, *methods: str) -> dict[str, Argument]:
        """Return all arguments of this command: its own, then configuration fields.

        Args:
            *methods: Names of methods. The settings that only these methods have are
                options, too.

        Returns:
            The declarations by name, such as ``RUN`` or ``--batch-size``. There are no
            configuration fields if ``takes`` is ``none``. If it is ``some``, there are
            all fields, also those that :meth:`may_change` refuses.

        Raises:
            ConfigError: There is no method of such a name.
        """
        own = {
            **self.arguments,
            "--help": switch("Print what is needed most and exit."),
        }
        if self.takes == "none":
            return own
        if self.takes != "some":
            own[HELP_ALL] = switch("Print every option and exit.")
        own["--config"] = Argument(
            "YAML file; repeatable; the last value of a key counts."
        )
        return {**own, **SIZE_FLAG, **dict(schema_flags(fields_of(*methods))), **own}

    def may_change(self, key: str) -> bool:
        """Return whether a field of the configuration is an option of this command.

        If ``takes`` is ``some``, as for commands that work on a finished run, it is if
        the declaration of the field in the configuration names the command. For every
        other value of ``takes`` the result is True.

        Args:
            key: The dotted key of the field.
        """
        return self.takes != "some" or self.name in field_traits(key).commands.split()


@dataclass(frozen=True)
class Options:
    """The parsed options of a command line.

    Attributes:
        command: The declaration of the command.
        args: The values of the command's own arguments: ``args.dry_run`` is
            ``--dry-run``.
        yaml_values: The settings in the files of ``--config``, by dotted key.
        cli_values: The settings on the command line, by dotted key.
    """

    command: Command
    args: SimpleNamespace
    yaml_values: Mapping[str, Any]
    cli_values: Mapping[str, Any]

    @property
    def overrides(self) -> dict[str, Any]:
        """All settings of the user, by dotted key such as ``train.batch_size``.

        They come from the files of ``--config`` and from the command line, which has
        priority. ``data.source`` on the command line also replaces ``data.labeled`` and
        ``data.unlabeled`` of a file.

        Raises:
            ConfigError: The command line has both ``--data`` and ``--labeled``.
        """
        return merge_settings(self.yaml_values, self.cli_values)

    @cached_property
    def config(self) -> Config:
        """The configuration that follows from the command line and its files.

        Settings that the user does not give have their defaults, such as those of the
        preset. If the user names no output directory, it is the default of the command,
        if it has one. For the commands ``discover`` and ``data`` the method becomes
        ``clustering`` if the preset has a frozen encoder and the user leaves the method
        open. The configuration is computed at the first access.

        Raises:
            ConfigError: A setting is unknown, or a value is refused.
        """
        choose = self.command.name in ("pretrain", "discover", "data")
        return configure(self.overrides, self.command.output, choose)


def parse(argv: Sequence[str], command: Command) -> Options:
    """Parse the arguments of a command.

    ``--help`` prints the help and ends the process, also if the command line has a
    mistake. So does an empty command line if the command needs an argument or has
    examples. Words that no option takes are the positional arguments, in their order.
    An option of the command that takes a list of words may be repeated. The values of
    the command's own arguments are converted to their types. Those of configuration
    settings are only checked when :attr:`Options.config` is read.

    Args:
        argv: The arguments after the name of the command.
        command: The declaration of the command.

    Returns:
        The values of the command's own arguments, and the settings of the configuration
        by dotted key: those of the files of ``--config``, and those of the command
        line.

    Raises:
        ConfigError: An option is unknown, a value is refused, an argument is missing, a
            word is left over, a file of ``--config`` cannot be read, both ``--data``
            and ``--labeled`` are given, or a setting cannot be changed by this command,
            which works on a finished run.
        SystemExit: The help was printed. The code is 0 for ``--help`` and 2 for an
            empty command line.
    """
    asked, arguments = {"--help", "-h", HELP_ALL}.intersection(argv), command.arguments
    groups = list(_split_options(token for token in argv if token not in asked))
    positional = [name for name in arguments if not name.startswith("-")]
    own, file, line = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    try:
        flags = _read_flags(groups, command, file)
        for name, joined, words in groups:
            most = max(flags[name].most_words, joined) if name else 0
            words, surplus = words[:most], words[most:]
            while positional and surplus:
                own[positional.pop(0)] = surplus.pop(0)
            if surplus and not name:
                raise ConfigError(
                    f"unexpected argument {surplus[0]!r}; options start with --"
                )
            value = flags[name].value(name, words + surplus) if name else None
            # else the error would be about a string
            if name and flags[name].takes_numbers:
                value = NUMBERS.validate_python(value)
            if name in arguments:
                is_repeated = name in own and flags[name].most_words == MANY
                own[name] = own[name] + value if is_repeated else value
            elif name and name != "--config":
                line[flags[name].key] = value
    except ConfigError:
        if not asked:
            raise
        file, line = {}, {}  # The help is shown for a line with a mistake, too.
    options = Options(command, SimpleNamespace(), file, line)
    if asked or (
        not argv and (command.examples or any(a.required for a in arguments.values()))
    ):
        _print_help(options, HELP_ALL in asked)
        raise SystemExit(0 if asked else 2)
    for name, argument in arguments.items():
        if argument.required and name not in own:
            raise ConfigError(
                f"{name} {'is missing' if name[0] == '-' else 'comes first'}:"
                f" {command.usage}"
            )
        try:
            value = (
                TypeAdapter(argument.type).validate_python(own[name])
                if name in own
                else argument.default
            )
        except ValidationError as error:
            raise ConfigError(describe(error, name)) from None
        setattr(options.args, name.lstrip("-").replace("-", "_").lower(), value)
    for key in options.overrides:
        if not command.may_change(key):
            see = f"see uno {command.name} --help for what is not"
            raise ConfigError(f"{key} is fixed by the trained model; {see}")
    return options


def schema_flags(
    fields: Mapping[str, FieldInfo] = Config.model_fields, prefix: str = ""
) -> Iterator[tuple[str, Argument]]:
    """Declare the command-line options of fields of the configuration.

    Args:
        fields: Fields of a pydantic model by name, or sections, which are models with
            fields of their own.
        prefix: The dotted key of the section of the fields with a dot at the end, such
            as ``train.``, or "".

    Yields:
        The name of each option and its declaration, for the fields in their order and
        those of a section in its place. For a field, the long form comes first
        (``--train.batch-size``), then the short form if it has one (``--batch-size``),
        then the ``no-`` form if the field is boolean (``--objective.no-concat``).
    """
    for name, info in fields.items():
        key, kind = f"{prefix}{name}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from schema_flags(kind.model_fields, f"{key}.")
            continue
        flag, short = (
            Argument(info.description or "", kind, key=key),
            field_traits(key).flag,
        )
        yield f"--{with_dashes(key)}", flag
        if short:
            yield f"--{short}", flag
        if kind is bool:
            yield (
                f"--{with_dashes(prefix)}no-{with_dashes(name)}",
                flag._replace(negated=True),
            )


def _read_flags(
    groups: list[Group], command: Command, file: dict[str, Any]
) -> dict[str, Argument]:
    """Return the options that a command line may have, and read its ``--config`` files.

    No file is read for a command that takes no field of the configuration.

    Args:
        groups: The options of the command line with their words, from
            :func:`_split_options`.
        command: The declaration of the command.
        file: A dict to which the settings of the files are added, by dotted key. The
            last file with a key has priority.

    Returns:
        The declarations by name, such as ``--batch-size``.

    Raises:
        ConfigError: The command line has an option that the command does not have, a
            file cannot be read, or there is no method of the chosen name.
    """
    if command.takes != "none":
        for words in (
            words for name, _, words in groups if name == "--config" and any(words)
        ):
            file |= load_yaml(words[0])
    flags = command.flags(*_methods_in(groups, file))
    for name, _, _ in groups:
        if name and name not in flags:
            raise ConfigError(
                f"unknown option {name}"
                + suggest_name(name[2:], [flag[2:] for flag in flags])
            )
    return flags


def _methods_in(groups: list[Group], file: Mapping[str, Any]) -> list[str]:
    """Return the names of the methods whose own settings a command line may change.

    Args:
        groups: The options of the command line with their words, from
            :func:`_split_options`.
        file: The settings of the files of ``--config``, by dotted key.

    Returns:
        First the method that ``--method``, else a file, else the default chooses; it
        need not exist. Then the methods of this package to which an option belongs,
        such as ``ncl`` for ``--ncl.OPTION``.
    """
    found = [str(file.get("method", DEFAULT))]
    for name, _, words in groups:
        owner = name[2:].partition(".")[0].replace("-", "_")
        if name == "--method" and words:
            found = [words[0], *found[1:]]
        elif owner in METHODS and "." in name:
            found.append(owner)
    return found


def _split_options(argv: Iterable[str]) -> Iterator[Group]:
    """Divide a command line into its options, each with the words that follow it.

    For example, ``x --a 1 2 --b=3`` yields ``("", False, ["x"])``, ``("--a", False,
    ["1", "2"])`` and ``("--b", True, ["3"])``.

    Args:
        argv: The words of the command line.

    Yields:
        The name of an option, with dashes in place of underscores; whether its value
        follows an equals sign; and the words. The first item has the name "" and the
        words before the first option, which may be none. Only a word that begins with
        two dashes is an option.
    """
    name, equals, words = "", "", list[str]()
    for token in argv:
        if token.startswith("--"):
            yield name, bool(equals), words
            name, equals, word = token.partition("=")
            name, words = with_dashes(name), [word] if equals else []
        else:
            words.append(token)
    yield name, bool(equals), words


RULES = f"""
Precedence: defaults < preset < description of a library's encoder < --config FILE < command line.
Presets: {", ".join(PRESETS)}.
Without --preset: digits for the digits; for other data photos if pretrained weights are given or downloaded,
else scratch (the paper's CIFAR10 settings; size, batch and epochs are derived from your images).
A preset's known classes apply only to its own data set. None switches an optional value off.
The defaults below are the values of this command line.
"""  # noqa: E501


def _print_help(options: Options, everything: bool) -> None:
    """Print the help of a command: its arguments with their sentence and default.

    For a command that makes a configuration, the defaults of fields are the values of
    this command line, or those of the preset ``digits`` if the line has a mistake. If
    fields are left out, the last line says how many.

    Args:
        options: The options of the command line.
        everything: Whether to list all fields of the configuration. Otherwise, for a
            command that takes all fields, those of a section such as ``train`` are
            listed only if they have a short form, by that form.
    """
    command = options.command
    print(f"usage: {command.usage}\n\n{SENTENCES[command.name]}\n")
    width = max(60, shutil.get_terminal_size().columns - 1)
    values: dict[str, Any] = {}
    text = command.text + f"\n\n{RULES}" * (everything and command.takes == "all")
    if command.examples:
        print(
            "\n".join(["examples:", *(f"  {line}" for line in command.examples)]) + "\n"
        )
    if command.takes == "all":
        values = flatten(preset("digits").model_dump())
        with suppress(ConfigError):
            values = flatten(options.config.model_dump())
    for paragraph in filter(None, text.strip().split("\n\n")):
        print(
            f"{textwrap.fill(' '.join(paragraph.split()), width, break_on_hyphens=False)}\n"  # noqa: E501
        )

    flags = command.flags(str(values.get("method", DEFAULT)))
    # by key, the names of an argument
    forms, section, hidden = dict[str, list[str]](), "", 0
    for name, argument in flags.items():
        if not argument.key or command.may_change(argument.key):
            forms.setdefault(argument.key or name, []).append(name)
    if not everything and command.takes in ("all", "changes"):
        shared = {
            k for k in forms if "." in k and k.partition(".")[0] in Config.model_fields
        }
        short = {
            k: v for k, v in forms.items() if k not in shared or field_traits(k).flag
        }
        forms, hidden = short, len(forms) - len(short)
    for key, names in forms.items():
        argument = flags[names[0]]
        if argument.key and section != (section := key.rpartition(".")[0] or "run"):
            print(f"\n{section}:")
        value = values.get(key, argument.default)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        unset = (value is None or value is False or value == ()) and not (
            everything and key in values
        )
        default = "" if unset else f" (default: {shown})"
        value_name = placeholder(argument.type) if names[0][0] == "-" else ""
        if not everything:
            names = [next((name for name in names if "." not in name), names[0])]
            value_name = value_name.removesuffix("|None")
        head = f"  {', '.join(names)} {value_name}".rstrip()
        column = 6 if everything else 30
        lines = textwrap.wrap(
            argument.sentence + default, width - column, break_on_hyphens=False
        )
        if lines and not everything and len(head) < column - 1:
            print(head.ljust(column) + lines.pop(0))
        else:
            print(head)
        print(
            textwrap.indent("\n".join(lines), " " * column), end="\n" if lines else ""
        )
    if hidden:
        print(f"\n{HELP_ALL} lists {hidden} more options")


def placeholder(kind: Any) -> str:
    """Return the text that stands for a value of a type in the help.

    For example ``INT``, ``FLOAT FLOAT``, ``{paper,v2}`` or ``INT|auto|None``. It is ""
    for a boolean, and ``STR`` for every type without a text of its own.

    Args:
        kind: The type, such as ``int`` or ``Literal["paper", "v2"]``.
    """
    parts, origin = get_args(kind), get_origin(kind)
    if not parts:
        return {bool: "", int: "INT", float: "FLOAT", NoneType: "None"}.get(kind, "STR")
    if origin is Literal:
        return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"
    if origin is tuple:
        return " ".join(map(placeholder, parts))
    if origin is list:
        return f"{placeholder(parts[0])} ..."
    return (
        placeholder(parts[0])
        if hasattr(kind, "__metadata__")
        else "|".join(map(placeholder, parts))
    )

"""Write docs/reference from the code.

    python -m tools.docs

The pages are the commands, the configuration, methods, limits and the Python interface.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import uno
from pipelines import cli, commands
from pipelines.options import Command, placeholder
from reproduce.command import REPRODUCE
from tune.sweep import TUNE
from uno import errors, limits, methods
from uno.config import Config, field_traits, flatten, section, to_dict
from uno.method import DEFAULT, METHODS, PRETEXTS
from uno.presets import CPU, PRESETS
from uno.session.configure import with_dashes

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
COMMANDS = {
    c.name: c
    for c in (*vars(commands).values(), REPRODUCE, TUNE)
    if isinstance(c, Command)
}
INTRODUCTIONS = {
    "cli": (
        "Commands",
        """\
`uno COMMAND --help` prints the options that are needed most, `--help-all` every option, and `uno --version`
the version. `--config FILE` (repeatable) reads options from YAML. A command ends with an
[exit code](python.md#errors).""",  # noqa: E501
    ),
    "config": (
        "Configuration",
        """\
A field is a key of a YAML file (`--config FILE`), a flag of the commands that train
(`--objective.epsilon 0.1`; underscores may be hyphens; a short form stands beside the name), and a keyword
of `uno.discover`. A boolean field also has a negated flag: `--objective.no-concat`. Values take precedence
in this order: command line, YAML file, description of a library's encoder, preset, and the defaults below,
which are the paper's settings for CIFAR10. `--explain` prints the resolved configuration and
the origin of every value. A [method](methods.md) can have its own section.""",  # noqa: E501
    ),
    "limits": (
        "Limits",
        """\
An input above a limit is rejected with one line before memory is allocated for it. A run that would need
more memory than is free on this machine is refused with the numbers before it starts. Only regular files are
opened. The numbers are those of [`uno/limits.py`](../../uno/limits.py).""",  # noqa: E501
    ),
    "methods": (
        "Methods",
        f"The default is `{DEFAULT}`, and `clustering` with the preset `photos`.",
    ),
    "python": ("Python interface", "The commands' work from Python."),
}
PRESETS_ARE = """\
## Presets

The fields in which a preset differs from the defaults, and a recipe from the preset. `scratch` is the
defaults."""  # noqa: E501
ERRORS = """\
Every error that you can act on is a `uno.errors.UnoError`, with the line that the command prints. A command
returns the exit code; 0 is success."""  # noqa: E501
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


SECTION = re.compile(
    r"^(Args|Attributes|Examples|Raises|Returns|Yields):\n((?:(?: {4}.*)?(?:\n|\Z))+)",
    re.M,
)
"""A section of a docstring in Google style: its title, and its indented lines."""


def list_section(section: re.Match[str]) -> str:
    """Return a section of a docstring as Markdown.

    Named entries become a list, and examples a block of code.
    """
    title, body = section[1], textwrap.dedent(section[2]).strip()
    if title == "Examples":
        body = f"~~~pycon\n{body}\n~~~"
    elif title not in ("Returns", "Yields"):
        body = re.sub(r"^(\*{0,2}\w+): ", r"- `\1`: ", body, flags=re.M)
    return f"{title}:\n\n{body}\n\n"


def markdown(text: str | None) -> str:
    """A docstring's or help's text: roles, double backquotes and flags become code."""
    text = SECTION.sub(list_section, inspect.cleandoc(text or "")).strip()
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(
        r"(`[^`]*`)|(?<![\w-])(--[a-z][\w.-]*\w)", lambda m: m[1] or f"`{m[2]}`", text
    )


def table(titles: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table without empty columns; bars separate ``titles``."""
    lines = [
        [" ".join(str(cell).split()).replace("|", r"\|") for cell in row]
        for row in rows
    ]
    full = [
        any(line[column] for line in lines) for column in range(len(titles.split("|")))
    ]
    lines = [list(compress(line, full)) for line in (titles.split("|"), *lines)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(name: str, *parts: str) -> str:
    """Return a page: its title, its introduction, and its parts."""
    title, text = INTRODUCTIONS[name]
    text = f"{text} Written by `python -m tools.docs`."
    return "\n\n".join([f"# {title}", text.strip(), *filter(None, parts)]) + "\n"


def shown(value: object) -> str:
    """A default as code; nothing where there is none."""
    if value in (None, (), []):
        return ""
    some = value if isinstance(value, list | tuple) else [value]
    texts = (
        f"{one:.4g}" if isinstance(one, float) else json.dumps(one).strip('"')
        for one in some
    )
    return f"`{' '.join(texts)}`"


def values(kind: Any, info: FieldInfo | None = None) -> str:
    """Return what can be given: choices, or a type and its limits, as `INT`, ≥ 0."""
    if kind is bool:
        return "`true`, `false`" if info else ""
    name = placeholder(kind).removesuffix("|None")
    if name[0] == "{":
        return "`" + name[1:-1].replace(",", "`, `") + "`"
    return f"`{name}`{bounds(info) if info else ''}"


def bounds(info: FieldInfo) -> str:
    """``, ≥ 0, < 1`` of a number that has limits."""
    found = (
        (sign, getattr(limit, name, None))
        for limit in info.metadata
        for name, sign in SIGNS.items()
    )
    return "".join(f", {sign} {value:,}" for sign, value in found if value is not None)


def fields(
    model: type[BaseModel], prefix: str, defaults: Mapping[str, Any]
) -> Iterator[tuple[str, list]]:
    """Each section of ``model``: its text, and the rows of its table."""
    rows, sections = [], []
    for name, info in model.model_fields.items():
        key, kind = f"{prefix}{name}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            sections.append((key, kind))
            continue
        short = field_traits(key).flag
        names = f"`{key}`" + f" `--{short}`" * bool(short)
        rows.append(
            [
                names,
                values(kind, info),
                shown(defaults[key]),
                markdown(info.description),
            ]
        )
    if rows:
        yield (
            (
                f"## `{prefix[:-1]}`\n\n{markdown(model.__doc__)}"
                if prefix
                else "## The run"
            ),
            rows,
        )
    for key, kind in sections:
        yield from fields(kind, f"{key}.", defaults)


def config_page() -> str:
    """Every field of the configuration, and the presets."""
    found = fields(Config, "", flatten(to_dict(Config())))
    parts = [
        f"{text}\n\n{table('field|value|default|meaning', rows)}"
        for text, rows in found
    ]
    for name, (values, v2) in PRESETS.items():
        for recipe, some in (("", values), ("v2", v2), ("cpu", CPU.get(name, {}))):
            tree = {
                key: list(v) if isinstance(v, tuple) else v for key, v in some.items()
            }
            code = yaml.safe_dump(
                tree, sort_keys=False, default_flow_style=None, width=80
            )
            title = f"### `{name}`" + f", recipe `{recipe}`" * bool(recipe)
            if tree:
                parts.append(f"{title}\n\n```yaml\n{code}```")
    at = next(i for i, part in enumerate(parts) if part.startswith("### "))
    parts.insert(at, PRESETS_ARE)
    return page("config", *parts)


def cli_page() -> str:
    """Every command with its arguments."""
    every = "Every field of the [configuration](config.md) is an option"
    parts = []
    for name, sentence in cli.SENTENCES.items():
        command = COMMANDS[name]
        rows = []
        for flag, argument in command.arguments.items():
            default = "" if argument.default is False else shown(argument.default)
            default = "required" if argument.required else default
            value = values(argument.type) if flag[0] == "-" else ""
            rows.append([f"`{flag}`", value, default, markdown(argument.sentence)])
        keys = [key for key in flatten(to_dict(Config())) if command.may_change(key)]
        some = ", ".join(
            f"`--{field_traits(key).flag or with_dashes(key)}`" for key in keys
        )
        fixed = ", ".join(
            f"`{key}`" for key in keys if field_traits(key).fixed_by == name
        )
        options = {
            "none": "",
            "some": f"Fields of the [configuration](config.md): {some}.",
            "all": f"{every}.",
            "changes": f"{every}, except {fixed}." if fixed else f"{every}.",
        }
        lines = "\n$ ".join([command.usage, *command.examples])
        parts += [
            f"## `uno {name}`",
            sentence,
            f"```console\n$ {lines}\n```",
            markdown(command.text),
        ]
        parts += [
            table("argument|value|default|meaning", rows) if rows else "",
            options[command.takes],
        ]
    return page("cli", *parts)


def limits_page() -> str:
    """The table of uno/limits.py."""
    constants = re.findall(r"^# (.*)\n(MAX_\w+) = ", inspect.getsource(limits), re.M)
    rows = [
        [f"`{name}`", f"{getattr(limits, name):,}", comment]
        for comment, name in constants
    ]
    return page("limits", table("limit|value|of what", rows))


def methods_page() -> str:
    """Return the page of methods and pretext tasks, with their settings."""
    parts = [markdown(methods.__doc__)]
    for title, names, flag in (
        ("", METHODS, "--method"),
        ("## Pretext tasks", PRETEXTS, "--pretext.task"),
    ):
        parts.append(title)
        for name, what in names.items():
            text = markdown(import_module(f"uno.methods.{name}").__doc__)
            parts += [f"{'###' if title else '##'} `{flag} {name}`: {what}", text]
            for key, model in section(name).items() if names is METHODS else ():
                defaults = flatten(model().model_dump(mode="json"), f"{key}.")
                ((_, rows),) = fields(model, f"{key}.", defaults)
                parts.append(table("field|value|default|meaning", rows))
    return page("methods", *parts)


def signature(thing: Any) -> str:
    """Return a code block with the signature of a thing."""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    text = re.sub(r"^\(self(, )?", "(", text).replace(
        f"{uno.Model.__module__}.", "uno."
    )
    if len(text) > 90:
        inside, _, end = text[1:].rpartition(")")
        text = "(\n    " + re.sub(r", (?![^\[]*\])", ",\n    ", inside) + f",\n){end}"
    return f"```py\n{thing.__name__}{text}\n```"


def python_page() -> str:
    """What ``import uno`` offers, and the errors."""
    parts = []
    for name in sorted(uno.__all__, key=str.istitle):
        thing = getattr(uno, name)
        is_class = inspect.isclass(thing)
        parts += [
            f"## `uno.{name}`",
            "" if is_class else signature(thing),
            markdown(thing.__doc__),
        ]
        if is_dataclass(thing):
            lines = re.findall(
                r"^    (\w+): ([^=#\n]+?)(?:  # (.*))?$", inspect.getsource(thing), re.M
            )
            parts.append(
                table(
                    "attribute|type|meaning",
                    ([f"`{n}`", f"`{k}`", text] for n, k, text in lines),
                )
            )
        for member, value in vars(thing).items() if is_class else ():
            shape = signature(value) if inspect.isfunction(value) else ""
            if member[0] != "_" and (
                shape or isinstance(value, property | cached_property)
            ):
                parts += [f"### `{name}.{member}`", shape, markdown(value.__doc__)]
    kinds = [
        k
        for k in vars(errors).values()
        if inspect.isclass(k) and issubclass(k, errors.UnoError)
    ]
    rows = [[f"`{k.__name__}`", k.exit_code, markdown(k.__doc__)] for k in kinds[1:]]
    rows += [
        ["", 1, "A defect of this program; the line names the file with its traceback."]
    ]
    rows += [
        ["", 130, "Interrupted before anything was saved."],
        ["", 141, "The reader of the output is gone."],
    ]
    return page(
        "python", *parts, "## Errors", ERRORS, table("error|exit code|meaning", rows)
    )


PAGES = (cli_page, config_page, limits_page, methods_page, python_page)


def pages() -> dict[str, str]:
    """The text of each file of docs/reference that is generated."""
    return {write.__name__.replace("_page", ".md"): write() for write in PAGES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)

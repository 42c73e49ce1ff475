"""Render HTML pages from templates, with the style and number formats they share.

Names of classes and files come from strangers. Everything is escaped, so that no name
can become markup or a script.
"""

import base64
import datetime
import hashlib
import shlex
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from uno.text import plural, visible


def render(
    template: str,
    context: Mapping[str, Any],
    package: str = "uno.report",
    script: str = "",
) -> str:
    """Render an HTML page that forbids every request and every script but its own.

    The template ``base.html``, which others extend, states this as the page's content
    security policy. The template also gets the style sheet ``report.css``, the script,
    its hash for this policy, and the present local time: ``style``, ``script``,
    ``script_hash`` and ``generated``. The first two are not escaped.

    Args:
        template: File name of the template.
        context: Values for the template by name, which are escaped.
        package: Package with further templates. Templates of ``uno.report`` come first.
        script: File name of the page's JavaScript in the templates of ``uno.report``;
            an empty string for none.

    Returns:
        The page as text that can be encoded as UTF-8. Characters that cannot be are
        replaced by question marks.
    """
    assets = resources.files("uno.report") / "templates"
    code = (assets / script).read_text("utf-8") if script else ""
    page = (
        _environment(package)
        .get_template(template)
        .render(
            context,
            style=Markup((assets / "report.css").read_text("utf-8")),
            script=Markup(code),
            script_hash=base64.b64encode(
                hashlib.sha256(code.encode()).digest()
            ).decode(),
            generated=datetime.datetime.now()
            .astimezone()
            .strftime("%Y-%m-%d %H:%M %Z"),
        )
    )
    return page.encode("utf-8", "replace").decode()


@cache
def _environment(package: str) -> Environment:
    """Return the Jinja environment that renders pages.

    It escapes all values, fails on undefined names, and has the functions of this
    module that format numbers, ``plural``, ``visible`` and ``shlex.quote`` (as
    ``quoted``) as filters. The environment of a package is made once and cached.

    Args:
        package: Package with further templates, besides those of ``uno.report``.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("uno.report"), PackageLoader(package)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {
        "count": count,
        "duration": duration,
        "percent": percent,
        "plural": plural,
    }
    environment.filters |= filters | {"quoted": shlex.quote, "visible": visible}
    return environment


def count(number: float) -> str:
    """Format a number as text, rounded to a whole one: ``12,345``."""
    return f"{number:,.0f}"


def percent(fraction: float | None) -> str:
    """Format a fraction in percent with one decimal: 0.123 becomes ``12.3``.

    The percent sign is left out.

    Args:
        fraction: A number, usually 0-1. None (no value) and NaN become a dash.
    """
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}"  # noqa: RUF001


def duration(seconds: float) -> str:
    """Format a number of seconds as ``48 s``, ``12 min`` or ``3 h 05 min``.

    Below 100 s it is in whole seconds, from there in whole minutes, rounded, and from
    60 minutes in hours and minutes.
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )

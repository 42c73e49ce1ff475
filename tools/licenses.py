"""The licenses of the tested packages, as the metadata of each package states them.

python -m tools.licenses > docs/LICENSES.md
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

PROJECT, EXTRAS = "uno-discovery", ("ray", "dev")


def license_of(package: Distribution) -> str:
    """Return the license that a package states.

    It is the license expression of the metadata, else its classifiers, else the first
    line of its license text.
    """
    facts = package.metadata
    names = [
        c.rpartition(" :: ")[2]
        for c in facts.get_all("Classifier") or ()
        if c.startswith("License ::")
    ]
    names = [name for name in names if name != "OSI Approved"]
    text = (facts.get("License") or "").strip().splitlines()
    found = (
        facts.get("License-Expression")
        or ", ".join(names)
        or (text[0][:60] if text else "not stated")
    )
    return str(found).replace("|", "/")


def needs(
    package: Distribution, extras: tuple[str, ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the names of the packages that a package needs.

    Args:
        package: The package.
        extras: Its extras whose needs count; other markers are ignored.

    Returns:
        The extras that it asks of each package, by name.
    """
    found = {}
    for line in package.requires or ():
        wanted = re.findall(r"extra\s*==\s*['\"]([^'\"]+)", line)
        name, asked = re.match(r"([\w.-]+)(?:\[([^\]]+)\])?", line).groups()  # type: ignore[union-attr]
        if not wanted or {*wanted} & {*extras}:
            found[re.sub(r"[-_.]+", "-", name).lower()] = tuple(
                (asked or "").replace(" ", "").split(",")
            )
    return found


def installed() -> dict[str, Distribution]:
    """The project's dependencies that are here, however deep."""
    found: dict[str, Distribution] = {}
    pending = [(PROJECT, EXTRAS)]
    while pending:
        name, extras = pending.pop()
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another platform or Python
            continue
        pending += [
            pair for pair in needs(found[name], extras).items() if pair[0] not in found
        ]
    return {name: found[name] for name in sorted(found) if name != PROJECT}


def main() -> None:
    """Print the page."""
    direct = needs(distribution(PROJECT), EXTRAS)
    print(
        f"# Licenses\n\n{(__doc__ or '').splitlines()[0]} The project's own:"
        " Apache-2.0.\n"
    )
    print(
        "Written by `python -m tools.licenses`.\n\n| package | license |"
        " |\n|---|---|---|"
    )
    for name, package in installed().items():
        print(
            f"| {name} {package.version} | {license_of(package)} |"
            f" {'direct' if name in direct else ''} |"
        )


if __name__ == "__main__":
    main()

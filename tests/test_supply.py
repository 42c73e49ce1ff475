"""What is installed, under which license, and that pip can check it."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from tools.licenses import license_of, needs

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["ray"],
    *PROJECT["optional-dependencies"]["dev"],
]
NAMES = {
    re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower() for line in DIRECT
}


def test_the_license_of_every_direct_dependency_is_listed():
    """Kills: a new dependency, or another version with another license, that nobody
    has looked at.
    """
    page = (ROOT / "docs" / "LICENSES.md").read_text()
    listed = {
        name: text
        for name, text in re.findall(
            r"^\| (\S+) \S+ \| (.*?) \| direct \|$", page, re.M
        )
    }
    assert listed == {name: license_of(distribution(name)) for name in NAMES}
    assert needs(distribution("uno-discovery"), ("ray", "dev")).keys() == NAMES


def test_the_lock_has_hashes_for_the_tested_set():
    """Kills: a version of ``constraints.txt`` that the lock does not have, an entry
    without a hash.
    """
    lock = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    entries = dict(
        re.findall(r"^([\w.-]+)==(\S+)(?=.*--hash=sha256:[0-9a-f]{64})", lock, re.M)
    )
    assert len(entries) == len(re.findall(r"^[\w.-]+", lock, re.M))
    pinned = re.findall(
        r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M
    )
    locked = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in entries.items()
    }
    assert pinned and locked.items() >= {
        (re.sub(r"[-_.]+", "-", n).lower(), v) for n, v in pinned
    }
    # torch needs it, and pip freeze leaves it out
    assert locked.keys() >= NAMES | {"setuptools"}

"""A release: its version is the same everywhere, and its wheel works."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_newest_release_has_the_version_of_the_project():
    """In the change log and in the citation. Kills: a release that one of them does
    not name.
    """
    released = re.search(
        r"^## (\d+\.\d+\.\d+) \S (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert released is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, date = released.groups()
    assert version == citation["version"] == PROJECT["version"]
    assert date == str(citation["date-released"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel as ``python -m build`` makes it from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in listed_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run([*build, "--outdir", out, source])
    run([sys.executable, "-m", "twine", "check", "--strict", *out.iterdir()])
    (found,) = out.glob("*.whl")
    return found


def run(command: list[object], cwd: Path = ROOT) -> str:
    """Return the output of a command that must end with 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def listed_files(*folders: str) -> list[str]:
    """Return the files that git knows and that are there."""
    names = run(["git", "ls-files", *folders]).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.mark.slow
def test_the_wheel_has_what_the_package_reads(wheel):
    """Metadata passes twine (the fixture). Kills: a template or type marker that
    only a checkout has.
    """
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= set(listed_files("uno", "pipelines", "tune", "reproduce"))
    assert not any(name.startswith("tests") for name in names)


# an environment whose Python does not find Ray
NO_RAY = """import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_without_ray(wheel, tmp_path):
    """An environment of the wheel and the dependencies, in which Ray cannot be
    imported. Kills: a file that only a checkout has, an import of Ray in what runs
    without it.
    """
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    shared = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    # paths only: .pth files there are not read
    (site / "zz_shared.pth").write_text(f"{shared}\n")
    (site / "no_ray.py").write_text(NO_RAY)
    (site / "a_no_ray.pth").write_text("import no_ray\n")
    python = tmp_path / "env" / "bin" / "python"
    found = run([python, "-c", "import uno; print(uno.__file__)"], tmp_path)
    assert found.strip() == str(site / "uno" / "__init__.py")
    demo = [python, "-m", "pipelines", "demo", "--output", "run"]
    short = [*("--pretrain.epochs", "2", "--pretrain.warmup-epochs", "1")]
    short += ["--discover.epochs", "2", "--discover.warmup-epochs", "1"]
    run([*demo, *short, "--workers", "0", "--compute.threads", "1"], tmp_path)
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "model").is_dir()

"""A release: its version is the same everywhere, and its wheel works."""

import re
import subprocess
import sys
import tomllib
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = PROJECT["urls"]["Repository"]


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
    """The wheel of a copy of the sources, from the source distribution, as
    ``python -m build`` makes both.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(out),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    checked = [
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *map(str, out.iterdir()),
    ]
    done = subprocess.run(checked, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, (
        done.stdout + done.stderr
    )
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_what_the_package_reads(wheel):
    """Metadata passes twine (the fixture). Kills: a template or type marker that
    only a checkout has.
    """
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (facts,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(facts))
    listed = subprocess.run(
        ["git", "ls-files", "uno", "pipelines", "tune"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert names >= set(listed.stdout.split()) and not any(
        name.startswith("tests") for name in names
    )
    assert metadata["Version"] == PROJECT[
        "version"
    ] and "Typing :: Typed" in metadata.get_all("Classifier")
    assert any(URL in url for url in metadata.get_all("Project-URL"))


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
    python = [str(tmp_path / "env" / "bin" / "python"), "-c"]
    probe = (
        "import uno; print(uno.__file__)\ntry:\n import ray\nexcept ImportError:"
        " print('none')"
    )
    done = subprocess.run(
        [*python, probe], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split() == [str(site / "uno" / "__init__.py"), "none"]
    main = "import sys; from pipelines.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["demo", "--workers", "0", "--compute.threads", "1", "--output", "run"]
    short = [
        "--pretrain.epochs",
        "2",
        "--pretrain.warmup-epochs",
        "1",
        "--discover.epochs",
        "2",
        "--discover.warmup-epochs",
        "1",
    ]
    done = subprocess.run(
        [*python, main, *words, *short], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").exists() and (
        tmp_path / "run" / "model"
    ).is_dir()
    done = subprocess.run(
        [*python, main, *words[:1], "--workers", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("uno: error: --workers needs Ray: pip install ")
        and done.stderr.count("\n") == 1
    )

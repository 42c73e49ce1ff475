"""The project's habits: forms and metadata that parse, versions that agree, a wheel
that works.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from uno.runs import NUMERICS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = PROJECT["urls"]["Repository"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def read_yaml(name: str):
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_github_forms(path):
    """Kills: a form that GitHub refuses: an unknown element, an id twice, a field
    without a label.
    """
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["body"]
    assert {element["type"] for element in form["body"]} <= {
        "input",
        "textarea",
        "checkboxes",
        "dropdown",
    }
    ids = [element["id"] for element in form["body"]]
    assert len(ids) == len(set(ids)) and all(
        re.fullmatch(r"[\w-]+", name) for name in ids
    )
    assert all(element["attributes"]["label"] for element in form["body"])
    assert any(
        element.get("validations", {}).get("required") for element in form["body"]
    )


def test_the_form_of_bugs_asks_for_the_doctor():
    """Kills: a report without versions."""
    doctor = next(
        e
        for e in read_yaml(".github/ISSUE_TEMPLATE/bug.yml")["body"]
        if e["id"] == "doctor"
    )
    assert (
        "uno doctor" in doctor["attributes"]["label"]
        and doctor["validations"]["required"]
    )


def test_the_workflow_is_the_ci():
    """Kills: a second list of checks beside ``.ci/run``, a workflow that may write."""
    workflow = read_yaml(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run"] and (ROOT / ".ci" / "run").exists()
    assert workflow["permissions"] == {"contents": "read"}
    # YAML 1.1 reads `on` as true
    assert workflow[True].keys() == {"push", "pull_request"}
    assert "has never run" in (ROOT / ".github/workflows/ci.yml").read_text()
    python = next(
        s["with"]["python-version"]
        for s in job["steps"]
        if "setup-python" in s.get("uses", "")
    )
    assert f">={python}" == PROJECT["requires-python"]


def test_hooks_run_what_lint_runs():
    """Kills: hooks of another tool or version than ``make lint``."""
    hooks = [
        hook
        for repo in read_yaml(".pre-commit-config.yaml")["repos"]
        for hook in repo["hooks"]
    ]
    assert {repo["repo"] for repo in read_yaml(".pre-commit-config.yaml")["repos"]} == {
        "local"
    }
    lint = (ROOT / "Makefile").read_text()
    for hook in hooks:
        # "ruff check", "ruff format"
        command = " ".join(shlex.split(hook["entry"])[2:4])
        assert (
            hook["entry"].startswith(".venv/bin/python -m ")
            and hook["language"] == "system"
        )
        assert (
            " ".join(["-m", hook["entry"].split()[2], hook["entry"].split()[3]]) in lint
        ), command


def test_the_container_opens_in_the_environment():
    """Kills: a development container of another Python, without the project's
    environment.
    """
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:.*\$\(STAMP\)", (ROOT / "Makefile").read_text(), re.M)
    assert container["image"].endswith(PROJECT["requires-python"].removeprefix(">="))


def test_the_citation_names_software_and_paper():
    """Kills: a file that citation tools refuse, or that is of another version."""
    found = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert found["version"] == PROJECT["version"] and found["repository-code"] == URL
    assert found["license"] == PROJECT["license"]
    (paper,) = found["references"]
    assert (
        paper["title"] == "A Unified Objective for Novel Class Discovery"
        and paper["year"] == 2021
    )
    assert paper["authors"][0]["family-names"] == "Fini" and len(paper["authors"]) == 6


def test_one_repository_in_all_files():
    """Kills: an address of the repository that was forgotten when it moved."""
    assert all(
        url.startswith(URL) for name, url in PROJECT["urls"].items() if name != "Paper"
    )
    owner = URL.removeprefix("https://github.com/").partition("/")[0]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (
            name.endswith(
                (".md", ".cff", ".toml", ".yml", ".yaml", ".py", ".json", ".html")
            )
            and "records" not in name
        ):
            text = (ROOT / name).read_text()
            assert set(re.findall(rf"https://github\.com/{owner}/[\w-]+", text)) <= {
                URL
            }, name


def test_the_changelog_is_cut_to_releases():
    """Newest first, the newest is the version. Kills: a version without its entry, a
    section of another name, a change of numbers outside of its table.
    """
    releases = re.findall(
        r"^## (?:(\d+\.\d+\.\d+) \u2013 (\d{4}-\d\d-\d\d)|Unreleased)$",
        CHANGELOG,
        re.M,
    )
    named = [pair for pair in releases if pair[0]]
    assert len(releases) == len(re.findall("^## ", CHANGELOG, re.M))
    assert named[0] == (
        PROJECT["version"],
        str(read_yaml("CITATION.cff")["date-released"]),
    )
    assert named == sorted(named, reverse=True)
    kinds = {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
        "Numerics",
    }
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.M)) <= kinds
    rows = re.findall(r"^\| \*\*numbers (\d+)", CHANGELOG, re.M)
    assert sorted(map(int, rows)) == list(range(1, NUMERICS + 1))


def test_contributing_names_what_is_there():
    """Kills: a make target, file or link of the contributor's page that does not
    exist.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        word
        for line in re.findall(r"`?make ([a-z -]+)", text)
        for word in line.split()[:1]
    }
    assert len(targets) >= 6 and all(
        re.search(rf"^{name}:", makefile, re.M) for name in targets
    ), targets
    links = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
        r"`((?:uno|tests|examples)/[\w/.]+)`", text
    )
    assert (
        len(links) >= 8 and [link for link in links if not (ROOT / link).exists()] == []
    )
    for page in ("CODE_OF_CONDUCT.md", "docs/reference/versioning.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
        assert [
            link for link in links if not (ROOT / page).parent.joinpath(link).exists()
        ] == []


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


@pytest.mark.slow
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

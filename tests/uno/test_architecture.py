"""Imports go one way: tune -> pipelines -> uno, and uno knows no Ray."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"uno": {"ray", "pipelines", "tune", "tests"}, "pipelines": {"tune", "tests"}, "tune": {"tests"}}
BLOCKED = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "pipelines", "tune"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
try:
    import ray
except ImportError:
    pass
else:
    raise SystemExit("the blocker does not block")
import uno
names = [module.name for module in pkgutil.walk_packages(uno.__path__, "uno.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def imported(path: Path) -> set[str]:
    """Top-level packages a file imports, anywhere in it."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            packages |= {str(a.value).partition(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return packages


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package):
    """Kills: an import of a higher layer, at the top of a file or inside a function."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): bad for f in files if (bad := imported(f) & FORBIDDEN[package])}
    assert not wrong


def test_the_scan_sees_imports(tmp_path):
    """Kills: a scan that finds nothing."""
    (tmp_path / "x.py").write_text(
        "import ray.train as rt\nfrom tune import a\ndef f():\n    from pipelines.cli import main\n"
        "    importlib.import_module('tests.uno')\n"
    )
    assert imported(tmp_path / "x.py") == {"ray", "tune", "pipelines", "tests"}


def test_uno_imports_without_ray():
    """Every module of uno, with ray, pipelines and tune blocked."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 30


def test_only_collectives_speaks_torch_distributed():
    """STYLE: distributed is the identity on one process. Kills: ranks in the maths."""
    for path in sorted((ROOT / "uno").rglob("*.py")):
        if path.name != "collectives.py":
            assert "torch.distributed" not in path.read_text().replace("only torch.distributed", ""), path


def test_files_fit_the_house_style():
    """Kills: global random state, pickles."""
    for package in FORBIDDEN:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            for word in ("np.random.seed", "random.seed(", "torch.load(", "pickle.load("):
                assert not re.search(rf"(?<![\w.]){re.escape(word)}", text), (path, word)

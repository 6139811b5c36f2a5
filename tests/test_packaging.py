"""What is shipped: the wheel and the sdist hold the package, all of it and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("actors", "batch", "cli", "client", "drill", "store")
TOP = ("__init__.py", "__main__.py", "supervisor.py", "py.typed")


def shipped() -> set[str]:
    """The files of the checkout that make the package."""
    rooms = {path.relative_to(ROOT).as_posix() for name in ROOMS for path in (ROOT / name).rglob("*.py")}
    return rooms | {name for name in TOP if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an sdist, and a wheel built from that sdist, of a clean copy of the checkout."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=out)
    yield out
    shutil.rmtree(source)


def test_the_wheel_holds_exactly_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"perdure/{name}" for name in shipped()}


def test_the_wheel_carries_types_license_and_command(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "perdure/py.typed" in names
        (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
        assert archive.read(licence).startswith(b"MIT License")
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert b"perdure = perdure.__main__:main" in archive.read(entry)


def test_the_sdist_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped() | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith((".", "benchmarks", "examples", "tests"))]


def test_the_wheel_runs_without_the_checkout(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import perdure, perdure.client.runtime, perdure.supervisor; print(perdure.__file__)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert Path(shown.strip()) == tmp_path / "perdure" / "__init__.py"

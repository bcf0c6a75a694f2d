"""Wheel and sdist: built as for a release, and the wheel used from an empty folder, away from the repository."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import flatout
from flatout.errors import REPOSITORY, SITE
from tests.conftest import TINY
from tests.end_to_end.serving import Server

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flatout"
FILES = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "constraints.txt"}
FOLDERS = {"docs", "lab", "examples", "tests", "src", ".github"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, which is built from the sdist, and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True, capture_output=True
    )
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    inside = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    pages = {f"flatout/docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").glob("*/*.md")}
    assert {name for name in names if ".dist-info/" not in name} == {
        *(name for name in inside if "__pycache__" not in name), *pages, "flatout/docs/index.md"
    }  # fmt: skip
    assert "flatout/py.typed" in names


def test_the_sdist_has_what_the_tests_need(built: tuple[Path, Path], tmp_path: Path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} >= FILES | FOLDERS | {"pyproject.toml", ".gitignore"}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    known = {ROOT / line for line in listed.stdout.splitlines()} if (ROOT / ".git").exists() else None
    for part in ("tests", "docs", "lab", "examples"):
        files = {path for path in (ROOT / part).rglob("*") if path.is_file() and not_made(path)}
        ours = {path.relative_to(ROOT) for path in (files if known is None else files & known)}
        assert ours == {path.relative_to(folder) for path in (folder / part).rglob("*") if path.is_file()}, part


def not_made(path: Path) -> bool:
    return "__pycache__" not in path.parts and not any(part.endswith(".egg-info") for part in path.parts)


def test_the_wheel_works_without_the_repository(built: tuple[Path, Path], tmp_path: Path):
    site = tmp_path / "site"
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(built[0]),
    ]
    subprocess.run(words, check=True, capture_output=True)
    use(Path(sys.executable), site / "bin" / "flatout", {"PYTHONPATH": str(site)}, tmp_path / "empty")


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment(built: tuple[Path, Path], tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    words = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{built[0]}[serve]"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip has no packages to install: {done.stderr[-300:]}")
    use(python, python.with_name("flatout"), {}, tmp_path / "empty")


def use(python: Path, program: Path, more: dict[str, str], folder: Path) -> None:
    """What a new user does first. `folder` does not exist yet."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": "", **more}

    def run(*words: str | Path) -> str:
        done = subprocess.run([python, *words], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    used = Path(run("-c", "import flatout; print(flatout.__file__)").strip())
    assert used.is_relative_to(program.parents[1])
    assert run(program, "--version") == f"flatout {flatout.__version__}\n"
    run(program, "train", "shakespeare-char", *TINY, "model.context=64", "train.steps=3", "output.name=base")
    assert (
        json.loads((folder / "runs/base/metrics.jsonl").read_text().splitlines()[0])["flatout"] == flatout.__version__
    )
    rows = [{"instruction": f"Say {n}", "output": "Aye, my lord."} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run(
        program, "finetune", "model.init_from=runs/base", "chat.source=rows.jsonl", "train.steps=2", "output.name=tuned"
    )
    assert "torch" in run(program, "doctor")
    run(program, "report", "runs/base")
    assert "</html>" in (folder / "runs/base/report.html").read_text(encoding="utf-8")
    server = Server(folder / "runs/base", command=[str(python), str(program)], env=environment)
    try:
        answer = server.ask("/v1/completions", prompt="the", max_tokens=4)
    finally:
        code, errors = server.end()
    assert answer["usage"]["completion_tokens"] == 4
    assert code == 0, errors


def test_version_and_addresses_stand_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"] == {"Documentation": SITE, "Repository": REPOSITORY}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["url"], citation["repository-code"]) == (
        flatout.__version__,
        SITE,
        REPOSITORY,
    )
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == flatout.__version__


def test_forms_for_issues_ask_for_the_bundle():
    forms = [
        yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[bf]*.yml")
    ]
    assert len(forms) == 2
    assert all("flatout report --zip" in json.dumps(form["body"]) for form in forms)

"""What a wheel must hold beside Python files; an editable install would hide that something is
missing."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_data_file_of_the_package_is_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["flyweight"]
    package = ROOT / "src" / "flyweight"
    files = [
        path.relative_to(package)
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    data = [str(path) for path in files if path.suffix not in (".py", ".pyc")]
    assert len(data) > 20
    assert [
        path
        for path in data
        if not any(fnmatch(path, pattern.removeprefix("**/")) for pattern in patterns)
    ] == []


def test_every_folder_of_the_package_is_a_package_or_holds_data_only():
    """setuptools leaves out folders without __init__.py, and their Python files with them."""
    package = ROOT / "src" / "flyweight"
    lost = {
        path.parent for path in package.rglob("*.py") if not (path.parent / "__init__.py").exists()
    }
    assert lost == set()


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_default_model_runs_without_any_extra(smollm2):
    """Modules that only the extras bring are taken away; the model is read from its GGUF import and
    answers."""
    extras = " ".join(
        line for lines in project()["optional-dependencies"].values() for line in lines
    )
    modules = [
        "fastapi",
        "uvicorn",
        "prometheus_client",
        "llguidance",
        "httptools",
        "uvloop",
        "matplotlib",
        "pytest",
        "httpx",
    ]
    assert all(module in extras for module in modules)
    assert any(line.startswith("gguf") for line in project()["dependencies"])
    program = (
        f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"
        "from flyweight.cli import main\n"
        f"main(['generate', {str(smollm2)!r}, '--prompt', 'The capital of France is', "
        "'--max-tokens', '1', '--temperature', '0', '--max-model-len', '64'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == " Paris\n", done.stderr


def test_the_dockerfile_copies_what_there_is_and_runs_a_version_that_is_tested():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(copied) == allowed and all((ROOT / name).exists() for name in copied)
    version = re.search(r"FROM python:(\d\.\d+)", (ROOT / "Dockerfile").read_text())[1]
    assert f"Programming Language :: Python :: {version}" in project()["classifiers"]
    assert {line.split()[-1] for line in lines if line.startswith("FROM ")} == {
        "source",
        "cpu",
        "cuda",
    }


def test_every_extra_that_a_text_names_is_there():
    known = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    named = {}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]:
        for extras in re.findall(
            r"(?:flyweight|\"\.)\[([a-z,-]+)\]", path.read_text(encoding="utf-8")
        ):
            named |= dict.fromkeys(extras.split(","), path.name)
    assert {"all", "cpu"} <= set(named) and not set(named) - known, named

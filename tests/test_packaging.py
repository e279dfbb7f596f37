"""What a wheel must hold beside Python files; an editable install would hide that something is missing."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_data_file_of_the_package_is_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["flyweight"]
    package = ROOT / "src" / "flyweight"
    files = [path.relative_to(package) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    data = [str(path) for path in files if path.suffix not in (".py", ".pyc")]
    assert len(data) > 20
    assert [path for path in data if not any(fnmatch(path, pattern.removeprefix("**/")) for pattern in patterns)] == []


def test_every_folder_of_the_package_is_a_package_or_holds_data_only():
    """setuptools leaves out folders without __init__.py, and their Python files with them."""
    package = ROOT / "src" / "flyweight"
    lost = {path.parent for path in package.rglob("*.py") if not (path.parent / "__init__.py").exists()}
    assert lost == set()

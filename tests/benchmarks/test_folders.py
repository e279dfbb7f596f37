"""The folders of benchmarks/: each script has its line in a README, and finds the scripts that it
imports.
"""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".py", ".sh"))
NAMES = {path.stem: path for path in SCRIPTS}


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "workshop"], ids=lambda folder: folder.name)
def test_every_script_has_a_line_in_the_readme(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        if script.parent == folder:
            assert f"`{script.name}" in text, (
                f"{folder.name}/README.md says nothing of {script.name}"
            )


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "workshop"], ids=lambda folder: folder.name)
def test_the_readme_names_no_script_that_is_gone(folder):
    words = (folder / "README.md").read_text(encoding="utf-8").replace("`", " ").split()
    for word in words:
        if word.rstrip(".,:;)").endswith((".py", ".sh")):
            path = word.rstrip(".,:;)").lstrip("(")
            assert (folder / path).exists() or (FOLDER / path).exists(), path


def imported(script: Path) -> set[str]:
    """Other scripts of benchmarks/ that this one imports by name."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found & NAMES.keys()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(FOLDER)))
def test_what_a_script_imports_from_another_folder_is_on_its_path(script):
    if script.suffix == ".py":
        elsewhere = [name for name in imported(script) if NAMES[name].parent != script.parent]
        assert not elsewhere or "sys.path.insert(0, str(Path(__file__).parent" in script.read_text()

"""benchmarks/sanitize.py: what hangs under the tool ends with it."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sanitize.py"
CHILD = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_case_that_hangs_leaves_no_process_behind(tmp_path, monkeypatch):
    specification = importlib.util.spec_from_file_location("sanitize_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "LIMIT_S", 2)
    log = tmp_path / "log"
    with log.open("w") as file:
        assert module.run_all([sys.executable, "-c", CHILD], stdout=file) is None
    assert not alive(int(log.read_text()))
    assert module.run_all([sys.executable, "-c", "raise SystemExit(3)"]) == 3

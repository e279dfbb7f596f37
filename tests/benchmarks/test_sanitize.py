"""benchmarks/sanitize.py: what hangs under the tool ends with it, and what it watches is right."""

import importlib.util
import os
import select
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sanitize.py"
CHILD = "import subprocess; subprocess.run(['sleep', '600'], close_fds=False)"


SPECIFICATION = importlib.util.spec_from_file_location("sanitize_script", SCRIPT)
module = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(module)


@pytest.mark.gpu
@pytest.mark.parametrize("name", module.CASES)
def test_cases_are_right_without_the_tool(name):
    if name not in module.here():
        pytest.skip("of a kernel for Hopper alone")
    torch.manual_seed(0)
    case, _, limit = module.CASES[name]
    assert case() <= limit


def test_a_case_that_hangs_leaves_no_process_behind(monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 2)
    reader, writer = os.pipe()  # at its end when the last process that holds the writer has ended
    assert module.run_all([sys.executable, "-c", CHILD], pass_fds=(writer,)) is None
    os.close(writer)
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b""
    os.close(reader)
    assert module.run_all([sys.executable, "-c", "raise SystemExit(3)"]) == 3

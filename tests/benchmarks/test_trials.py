"""Other cuts and constants, as far as a machine without a GPU can tell: what is asked for, and what it would take to compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "workshop"))

from trials import Constants, assignments  # noqa: E402

from flyweight.kernels import gemm  # noqa: E402


def test_options_and_constants_are_told_by_name():
    assert assignments("apart=False, split=2") == {"apart": False, "split": 2} and assignments("") == {}
    assert assignments("gemm.LONE=('a.b', 0.5), gemm.SHARED=102400") == {"gemm.LONE": ("a.b", 0.5), "gemm.SHARED": 102400}
    for wrong in ("apart", "a=", "a=print(1)"):
        with pytest.raises((SystemExit, ValueError)):
            assignments(wrong)


def test_constants_go_back_and_what_was_kept_is_forgotten():
    constants, before = Constants(), gemm.TEAMED
    shape = ("int4", 6144, 4096, 128, 32, 132)
    constants.set({"gemm.TEAMED": {}})
    assert gemm.shape_for(*shape).teams == 1
    constants.set({})
    assert gemm.TEAMED is before and gemm.shape_for(*shape).teams == 2
    with pytest.raises(SystemExit, match=r"no constant gemm\.TEAM;"):
        constants.set({"gemm.TEAM": {}})


@pytest.mark.parametrize("command", [
    ("cuts", "w8a8", "128x4096", "--try", "apart=False"), ("steps", "preset:tiny:w8a8", "--try", "gemm.SHARED_SMALL=61440")])
def test_what_a_trial_needs_is_compiled_without_a_gpu(tmp_path, command):
    script = ROOT / "benchmarks" / "workshop" / "trials.py"
    done = subprocess.run([sys.executable, script, *command, "--rows", "16", "--compile"], text=True, check=True,
                          env=os.environ | {"FLYWEIGHT_CACHE": str(tmp_path)}, capture_output=True)
    products, kernels = (list((tmp_path / "kernels").glob(name)) for name in ("gemm-*", "*"))
    assert len(products) >= 2, "one as now, and one as tried"
    assert done.stdout.startswith(f"{len(kernels)} kernels, {len(kernels)} of them")

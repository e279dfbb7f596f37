"""Other cuts and constants, as far as a machine without a GPU can tell: what is asked for, and what
it would take to compile.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import clean_process
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "workshop"))

from trials import Constants, assignments, wanted_by  # noqa: E402

from flyweight.gpu import GPUS  # noqa: E402
from flyweight.kernels.linear import gemm_shape  # noqa: E402
from flyweight.kernels.linear.format import FORMATS  # noqa: E402
from flyweight.kernels.linear.tiles import Matrix  # noqa: E402


def test_options_and_constants_are_told_by_name():
    assert (
        assignments("separate_exchange=False, split=2") == {"separate_exchange": False, "split": 2}
        and assignments("") == {}
    )
    assert assignments("gemm.LONE=('a.b', 0.5), formats.int4.x=102400") == {
        "gemm.LONE": ("a.b", 0.5),
        "formats.int4.x": 102400,
    }
    for wrong in ("apart", "a=", "a=print(1)"):
        with pytest.raises((SystemExit, ValueError)):
            assignments(wrong)


def test_constants_go_back_and_what_was_kept_is_forgotten():
    constants, before = Constants(), gemm_shape.RESERVED
    product = gemm_shape.Product(Matrix(FORMATS["int4"], 6144, 4096, 128), 32)

    def shape():
        return gemm_shape.shape_for(product, GPUS["sm_90a"])

    constants.set({"formats.int4.gemm_team_tokens": (1, 0)})
    assert shape().teams == 1
    constants.set({"gemm_shape.RESERVED": before + 1})
    assert before + 1 == gemm_shape.RESERVED and shape().teams == 2
    constants.set({})
    assert before == gemm_shape.RESERVED
    with pytest.raises(SystemExit, match=r"no constant gemm\.TEAM;"):
        constants.set({"gemm.TEAM": {}})
    with pytest.raises(SystemExit, match=r"no number formats\.int5\.ticket_rows"):
        constants.set({"formats.int5.ticket_rows": 1})
        shape()
    constants.set({})


def test_what_a_trial_needs_is_compiled_without_a_gpu(tmp_path):
    script = ROOT / "benchmarks" / "workshop" / "trials.py"
    command = (
        "cuts",
        "w8a8",
        "128x4096",
        "--try",
        "separate_exchange=False",
        "--rows",
        "16",
        "--compile",
    )
    done = subprocess.run(
        [sys.executable, script, *command],
        text=True,
        check=True,
        env=os.environ | {"FLYWEIGHT_CACHE": str(tmp_path)},
        capture_output=True,
    )
    products, kernels = (list((tmp_path / "kernels").glob(name)) for name in ("gemm-*", "*"))
    assert len(products) >= 2, "one as now, and one as tried"
    assert done.stdout.startswith(f"{len(kernels)} kernels, {len(kernels)} of them")


def test_steps_as_now_and_as_tried_are_asked_for_together():
    """By a process of its own: one that has pretended a GPU is good for nothing else. What is asked
    for is compiled as above.
    """
    options = argparse.Namespace(
        what="steps",
        model="preset:tiny:w8a8",
        tries=["gemm_shape.RESERVED_BESIDE=61440"],
        rows=[16],
    )
    with clean_process.pool() as pool:
        found = pool.submit(wanted_by, options).result()
    products = {}
    for one in found:
        if one.file == "gemm.cu":
            defines = dict(one.defines)
            products.setdefault((defines["KDIM"], defines["NDIM"], defines["TOKENS"]), set()).add(
                one.defines
            )
    assert any(len(variants) > 1 for variants in products.values()), "one as now, and one as tried"

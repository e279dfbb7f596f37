"""torch's library is loaded by a thread, and torch works afterwards."""

import subprocess
import sys

import pytest

from flyweight import preload

LIBRARIES = "open('/proc/self/maps').read().count('libtorch_cpu.so')"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="dlopen by ctypes")
def test_torch_finds_its_library_loaded():
    code = (
        "import sys\n"
        "from flyweight import preload\n"
        "thread = preload.begin()\n"
        "if thread:\n"
        "    thread.join()\n"
        "    assert 'torch' not in sys.modules\n"
        f"    before = {LIBRARIES}\n"
        f"    import torch\n"
        f"    assert before == {LIBRARIES} > 0\n"
        "import torch\n"
        "assert preload.begin() is None\n"
        "print(int(torch.ones(3).sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr


def test_nothing_is_loaded_where_torch_is_already_there():
    import torch  # noqa: F401

    assert preload.begin() is None

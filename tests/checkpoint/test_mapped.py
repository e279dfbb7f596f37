"""Pages of weight files that were read are let go, and can be read again."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flyweight.checkpoint.mapped import MAPS, forget_pages, mapped_weights

LINES = """\
7f0000000000-7f0000002000 rw-p 00000000 08:01 42 /models/a model/model.safetensors
7f0000002000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000006000 r-xp 00000000 08:01 43 /usr/lib/libc.so.6
7f0000006000-7f0000008000 rw-p 00000000 00:00 0 [heap].safetensors
"""


def test_only_mappings_of_weight_files_are_taken():
    assert list(mapped_weights(LINES)) == [(0x7F0000000000, 0x7F0000002000)]


def file_pages() -> int:
    """Kilobytes of mapped files in this process."""
    found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_pages_go_and_their_contents_stay(tmp_path):
    expected = torch.arange(4 << 20, dtype=torch.float32)
    save_file({"weight": expected}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        mapped = file.get_tensor("weight")
        assert float(mapped.sum()) > 0
        before = file_pages()
        forget_pages()
        assert file_pages() < before - 12_000
        assert torch.equal(mapped, expected)

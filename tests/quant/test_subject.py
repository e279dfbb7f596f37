"""Which kernels a model is evaluated with."""

import pytest
import torch
from tiny_model import TEXT, make_tiny_model

from flyweight.kernels.native import library
from flyweight.models import native
from flyweight.quant.subject import NativeWhole, load_subject


@pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")
def test_a_cpu_evaluates_with_its_own_kernels_what_torch_would_find(tmp_path, monkeypatch):
    folder = str(make_tiny_model(tmp_path / "model"))
    found = load_subject(folder, TEXT, device="cpu", dtype=None)
    assert isinstance(found.decoder, NativeWhole)
    monkeypatch.setattr(native, "why_not", lambda config, dtype: "not here")
    plain = load_subject(folder, TEXT, device="cpu", dtype=None)
    assert not isinstance(plain.decoder, NativeWhole) and found.kv_dtype == plain.kv_dtype
    ids = torch.tensor(found.ids[:40]).view(2, 20)
    torch.testing.assert_close(
        found.decoder.forward_whole(ids), plain.decoder.forward_whole(ids), rtol=1e-4, atol=1e-4
    )

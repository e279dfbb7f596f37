"""One definition of the limit: `info`, the bench and the engine count the same bytes."""

import json
import re

import pytest
import torch

from flyweight import cli
from flyweight.backends.base import EngineOptions, Limits
from flyweight.backends.native import Native
from flyweight.limit import decode_limit


@pytest.fixture
def flyweight(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code or 0, *capsys.readouterr()

    return run


def test_the_formula():
    assert decode_limit(weight_bytes=2e9, copy_gb_s=100) == 50
    assert (
        decode_limit(
            weight_bytes=2e9, copy_gb_s=100, batch=4, context=1000, kv_bytes_per_token=500_000
        )
        == 100
    )
    assert decode_limit(weight_bytes=2e9, copy_gb_s=None) is None
    assert decode_limit(weight_bytes=0, copy_gb_s=100) is None


def test_info_and_bench_count_the_bytes_that_the_engine_reads(flyweight, smollm2, tmp_path):
    """Weights of 16 bits on the disk may be 32 in memory: the limit is about what is read."""
    machine = json.loads(flyweight("info", smollm2, "--json")[1])["machine"]
    engine = Native(str(smollm2), EngineOptions(device="cpu"))
    engine.start(Limits(1, 64, 128))
    assert machine["read_bytes_per_token"] == pytest.approx(engine.read_bytes(), rel=0.01)
    engine.stop()
    rows = tmp_path / "rows.jsonl"
    line = (
        "bench latency {} --batch 1 --input 4 --output 2 --repeats 1 --no-check --device cpu -o {}"
    )
    assert flyweight(*line.format(smollm2, rows).split())[0] == 0
    environment, row = map(json.loads, rows.read_text().splitlines())
    assert 1e9 * row["read_gb"] == pytest.approx(machine["read_bytes_per_token"], rel=0.01)
    same = decode_limit(
        weight_bytes=machine["read_bytes_per_token"],
        copy_gb_s=environment["copy_gb_s"],
        batch=1,
        context=4 + 3 / 2,
        kv_bytes_per_token=machine["kv_bytes_per_token"],
    )
    assert row["limit_tok_s"] == pytest.approx(same, rel=0.01)


def test_info_says_whether_the_architecture_runs_and_how_many_bits_the_file_takes(
    flyweight, tmp_path
):
    from safetensors.torch import save_file

    save_file(
        {
            "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.float32),
            "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 8, dtype=torch.float16),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    _, out, _ = flyweight("info", tmp_path)
    assert re.search(r"^runs here +no: .*mamba", out, re.MULTILINE | re.IGNORECASE)
    assert re.search(
        r"^bits per weight +16\.00 in the layers, 24\.89 over the whole file", out, re.MULTILINE
    )
    facts = json.loads(flyweight("info", tmp_path, "--json")[1])
    assert facts["runs"] is False and facts["why_not"] and facts["file_bits_per_weight"] == 24.889

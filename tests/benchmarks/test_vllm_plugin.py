"""What `benchmarks/vllm_plugin.py` makes of its arguments, and of how two engines differ."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import vllm_plugin

from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile


def subject(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vllm_plugin.py", *arguments, "--out", "rows.jsonl"])
    options = vllm_plugin.parse()
    return vllm_plugin.Subject.parse(options.models[0], options)


def test_sides_that_read_files_are_given_the_same_folder(monkeypatch, tmp_path):
    model = "preset:tiny-moe:int4*1@on-all,off,native@1,8"
    found = subject(monkeypatch, model, "--folders", str(tmp_path))
    settings = json.loads(Path(found.model, "config.json").read_text())
    assert settings["num_hidden_layers"] == found.layers == 1
    # vLLM takes a router for a quantized linear unless it is named
    assert "model.layers.0.mlp.gate" in settings["quantization_config"]["modules_to_not_convert"]
    facts = facts_of(Variant.parse(found.model))
    assert (facts.model, facts.scheme, facts.weights) == ("tiny-moe", "int4", "random")
    written = Path(found.model, "config.json").stat().st_mtime_ns
    assert subject(monkeypatch, model, "--folders", str(tmp_path)) == found
    assert Path(found.model, "config.json").stat().st_mtime_ns == written


def test_vllm_by_itself_makes_random_weights_up(monkeypatch, tmp_path):
    found = subject(monkeypatch, "preset:tiny-moe:bf16*1@off@1", "--folders", str(tmp_path))
    assert found.model == "preset:tiny-moe:bf16" and not list(tmp_path.iterdir())


def test_every_side_can_have_fewer_layers(monkeypatch):
    found = subject(monkeypatch, "preset:tiny:int4*1@native,off@1")
    assert found.layers == 1 and found.sides == ("native", "off")


def test_our_engine_starts_late_where_that_is_asked_for(monkeypatch, tmp_path):
    engines = [SimpleNamespace(side="native"), SimpleNamespace(side="off-compiled")]
    for flags, late in (([], []), (["--own-late"], ["native"])):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "vllm_plugin.py",
                "preset:tiny:int4@native,off-compiled@1",
                *flags,
                "--out",
                "rows.jsonl",
            ],
        )
        options = vllm_plugin.parse()
        bench = vllm_plugin.Bench(
            vllm_plugin.Subject.parse(options.models[0], options),
            options,
            ResultFile(tmp_path / "rows"),
        )
        bench.engines = engines
        assert [one.side for one in bench.late()] == late
        assert bench.early() == [one for one in engines if one.side not in late]


def test_prompts_are_captured_where_vllm_would_capture_them(monkeypatch):
    shapes = subject(monkeypatch, "preset:tiny:int4@on-compiled@1,2,8").shapes
    assert vllm_plugin.captured_sizes("on-compiled", shapes) == [1, 2, 8, 128, 256]
    assert vllm_plugin.captured_sizes("on", shapes) == [1, 2, 8]


def test_a_difference_counts_by_the_lead_of_the_other_side():
    ours = dict(best=[1, 2, 3], own=[-1.0, -2.0, -3.0], lead=[0.5, 0.5, 0.5])
    other = dict(best=[1, 7, 3], own=[-1.0, -2.5, -3.0], lead=[0.2, 0.01, 0.2])
    found = vllm_plugin.compared(ours, other)
    assert found["same_argmax"] == 2 and found["largest_gap_at_difference"] == 0.01
    assert found["logprob_difference_max"] == 0.5

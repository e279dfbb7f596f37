"""Whole models: the block loop, resuming, reproducibility, the files that come out."""

import errno
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from tiny_configs import LINEARS
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.errors import (
    CheckpointError,
    FlyweightError,
    OptionError,
    ResourceError,
    UnsupportedError,
)
from flyweight.kernels import reference
from flyweight.models.attention import Whole
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.rope import rope_tables
from flyweight.quant import calibrate, store
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Layer, Recipe, named
from flyweight.quant.work import WorkBlock, root_mean_square

LEARNED = (
    'base = "int4-best"\nlearn_steps = 4\nlearn_batch = 2\n'
    "sweeps = 1\ntune_steps = 2\ntune_batch = 2\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "calibration.txt"
    path.write_text(TEXT)
    return path


def make(model, text, output, scheme="gptq-int4", **options):
    return quantize(
        model,
        scheme,
        output,
        **{"calibration": str(text), "samples": 4, "length": 48, "device": "cpu", **options},
    )


def kinds(model, text, output, **options):
    """What was told of the work: each event's kind."""
    seen = []
    make(model, text, output, listen=lambda event: seen.append(event.kind), **options)
    return seen


def digest(folder):
    return hashlib.sha256(
        b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.iterdir()))
    ).hexdigest()


def fast(name):
    """The scheme, with learning cut down to a few steps."""
    recipe = named()[name]
    few = {
        "learn_steps": min(3, recipe.learn_steps),
        "learn_batch": 2,
        "tune_steps": min(2, recipe.tune_steps),
        "tune_batch": 2,
    }
    return Recipe.from_dict(recipe.to_dict() | few, name)


@pytest.fixture(scope="module")
def made(model, text, tmp_path_factory):
    """(folder, summary) of a scheme, made once for all tests that look at it."""
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def once(name):
        return folder / name, make(model, text, folder / name, recipe=fast(name))

    return once


@pytest.mark.parametrize("name", list(named()))
def test_every_scheme_makes_a_model_that_loads_and_stays_close(name, model, made):
    output, summary = made(name)
    ids = torch.tensor([Checkpoint(model).tokenizer().encode(TEXT, add_special_tokens=False)[:48]])
    before, after = (
        Decoder.load(
            Checkpoint(folder), device="cpu", dtype=torch.float32, exact=True
        ).forward_whole(ids)
        for folder in (model, output)
    )
    sparse, coarse = named()[name].sparse, summary.bits_per_weight < 6
    distance = float((after - before).norm() / before.norm())
    assert distance < (1.0 if sparse or coarse else 0.4 if name.startswith("fp8") else 0.15)
    assert set(summary.layers) == {
        f"model.layers.{i}.{linear}" for i in range(3) for linear in LINEARS
    }
    assert summary.bytes_after == Checkpoint(output).nbytes
    if sparse:
        for prefix in summary.layers:
            weight = Checkpoint(output).linear(prefix).dequantize()
            assert ((weight != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all(), (
                f"{prefix}: the 2:4 mask is broken"
            )


@pytest.mark.parametrize("name", ["gptq-int4", "w8a8-smooth-gptq", "vptq-3bit", "int4-best"])
def test_two_runs_give_the_same_bytes(name, model, text, made, tmp_path):
    make(model, text, tmp_path / "again", recipe=fast(name))
    assert digest(made(name)[0]) == digest(tmp_path / "again")


MOMENTS = ("layer 9", "block 1", "tensor 5", "cleanup 1", "block 1,layer 3,rename 2,tensor 20")


@pytest.mark.parametrize(
    ("recipe", "moments"),
    [('base = "gptq-int4"', MOMENTS), (LEARNED, ("block 2,layer 2,tuned 1,rename 3",))],
    ids=["gptq", "learned"],
)
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(recipe, moments, model, text, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe)
    script = Path(__file__).with_name("interrupt.py")
    done = subprocess.run(
        [sys.executable, script, model, text, tmp_path / "recipe.toml", tmp_path, *moments],
        text=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == set(moments) and all(results.values()), results


def test_activations_that_do_not_fit_spill_to_disk_and_change_nothing(
    model, text, tmp_path, monkeypatch
):
    spilled = []
    original = calibrate.ActivationCache.close
    monkeypatch.setattr(
        calibrate.ActivationCache,
        "close",
        lambda cache: (spilled.append(cache.on_disk), original(cache)),
    )
    make(model, text, tmp_path / "memory")
    make(model, text, tmp_path / "disk", cache_gb=0)
    assert spilled == [0, 4]
    assert digest(tmp_path / "memory") == digest(tmp_path / "disk")


def test_the_error_of_earlier_blocks_reaches_the_later_ones(model, text, tmp_path, monkeypatch):
    seen = []
    original = WorkBlock.statistics

    def statistics(work, batches, *args, **options):
        seen.append((work.index, batches[0].clone()))
        return original(work, batches, *args, **options)

    monkeypatch.setattr(WorkBlock, "statistics", statistics)
    make(model, text, tmp_path / "coarse", "gptq-int3")
    make(model, text, tmp_path / "fine", "gptq-int8")
    first, second = (
        [x for index, x in half if index == 2]
        for half in (seen[: len(seen) // 2], seen[len(seen) // 2 :])
    )
    assert not torch.allclose(first[0], second[0])
    assert all(torch.equal(x, first[0]) for x in first)  # one input for all groups of a block


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_scales_leaves_the_float_function_unchanged(changes, dtype, tmp_path):
    source = Checkpoint(
        make_tiny_model(tmp_path / "m", dtype=str(dtype).removeprefix("torch."), **changes)
    )
    config = ModelConfig.from_dict(source.config)
    work = WorkBlock.load(source, config, 1, device=torch.device("cpu"), dtype=torch.float32)
    context = Whole(20, rope_tables(config, torch.device("cpu")), reference)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    before = work.build().forward(x, context)
    for group in work.groups:
        width = work.weights[group.linears[0]].shape[1]
        scales = work.allowed(
            group, torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(1)))
        )
        old = {name: weight.clone() for name, weight in work.weights.items()}
        work.fold(group, scales)
        assert any(not torch.equal(old[name], work.weights[name]) for name in group.linears)
    # Biases are the only part that half precision rounds.
    rounded = bool(changes) and dtype != torch.float32
    torch.testing.assert_close(
        work.build().forward(x, context),
        before,
        rtol=1e-3 if rounded else 1e-4,
        atol=2e-2 if rounded else 1e-4,
    )
    again = WorkBlock.load(source, config, 1, device=torch.device("cpu"), dtype=torch.float32)
    assert not torch.equal(again.weights["mlp.up_proj"], work.weights["mlp.up_proj"]), (
        "the source itself was changed"
    )


def test_where_errors_are_relative_a_token_that_grows_a_hundredfold_counts_like_the_others(
    model,
):
    source = Checkpoint(model)
    config = ModelConfig.from_dict(source.config)
    work = WorkBlock.load(source, config, 1, device=torch.device("cpu"), dtype=torch.float32)
    context = Whole(20, rope_tables(config, torch.device("cpu")), reference)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    # what the first token has and no other: a channel that the MLP makes loud
    x[:, 0, 5] = 30.0
    work.weights["mlp.up_proj"][:, 5] += 10.0
    work.weights["mlp.gate_proj"][:, 5] += 10.0
    down = [group for group in work.groups if group.linears == ("mlp.down_proj",)]
    seen = []
    plain = work.statistics([x], context, down, see=lambda _, inputs: seen.append(inputs))[
        down[0].name
    ]
    loud = seen[0].square().sum(-1)
    assert loud[:, 0].sum() > 0.9 * loud.sum()
    relative = work.statistics([x], context, down, relative=True)[down[0].name]
    sizes = root_mean_square(work.build().forward(x, context))
    torch.testing.assert_close(plain.importance, seen[0].flatten(0, 1).square().mean(0))
    shares = seen[0] / sizes
    torch.testing.assert_close(relative.importance, shares.flatten(0, 1).square().mean(0))
    assert shares.square().sum(-1)[:, 0].sum() < 0.5 * shares.square().sum()


def test_relative_errors_choose_other_scales_and_the_model_stays_close(model, text, tmp_path):
    errors = []
    for relative in (False, True):
        recipe = Recipe.from_dict(
            named()["awq-int4"].to_dict() | {"relative": relative}, "awq-int4"
        )
        made = make(model, text, tmp_path / str(relative), recipe=recipe)
        errors.append(made.mean_error)
    assert errors[0] != errors[1] and errors[1] < 1.5 * errors[0]


def test_everything_needed_to_repeat_the_run_is_written_down(model, text, tmp_path):
    make(model, text, tmp_path / "out", seed=7)
    facts = json.loads((tmp_path / "out" / "flyweight.json").read_text())
    assert (
        facts["seed"] == 7
        and facts["calibration"]["samples"] == 4
        and facts["calibration"]["source"] == str(text)
    )
    again = Recipe.from_dict(facts["recipe"], "flyweight.json")
    make(model, text, tmp_path / "again", recipe=again, seed=facts["seed"])
    assert digest(tmp_path / "again") == digest(tmp_path / "out")
    make(model, text, tmp_path / "other", seed=8)
    assert digest(tmp_path / "other") != digest(tmp_path / "out")


def test_mixed_precision_and_the_head_by_choice(model, text, tmp_path):
    recipe = Recipe(
        "mixed",
        Layer("gptq"),
        (
            ("*.down_proj", {"bits": 8}),
            ("*.layers.2.*", {"solver": "keep"}),
            ("lm_head", {"solver": "rtn", "bits": 8}),
        ),
        embeddings="float16",
    )
    make(model, text, tmp_path / "out", recipe=recipe)
    made = Checkpoint(tmp_path / "out")
    assert (
        made.linear("model.layers.0.mlp.down_proj").bits == 8
        and made.linear("model.layers.0.mlp.up_proj").bits == 4
    )
    assert (
        made.linear("model.layers.2.mlp.up_proj").kind == "plain"
        and made.linear("lm_head").bits == 8
    )
    assert made.tensor("model.embed_tokens.weight").dtype == torch.float16
    Decoder.load(made, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_named_and_nothing_is_left(text, tmp_path, value):
    folder = make_tiny_model(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for scheme in ("rtn-int4", "gptq-int4", "w8a8-smooth"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj.*NaN or infinity"):
            make(folder, text, tmp_path / "out", scheme)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_full_disk_keeps_the_finished_blocks(model, text, tmp_path, monkeypatch):
    calls, save = [], store.save_file

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(ResourceError, match=r"No space left.*--resume"):
        make(model, text, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    seen = kinds(model, text, tmp_path / "out", resume=True)
    assert seen.count("resumed") == 1 and seen.count("finished") == 2


def test_a_disk_that_is_full_at_the_last_step_keeps_all_blocks(model, text, tmp_path, monkeypatch):
    def full(self, config, *, source):
        raise ResourceError("out: cannot write config.json (No space left on device)")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "finish", full)
        with pytest.raises(
            ResourceError, match=r"No space left.*finished blocks are kept: run again with --resume"
        ):
            make(model, text, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    seen = kinds(model, text, tmp_path / "out", resume=True)
    assert seen.count("resumed") == 3 and "finished" not in seen
    assert Checkpoint(tmp_path / "out").format is not None and not list(tmp_path.glob(".out*"))


def test_an_unknown_format_is_refused_before_any_work(model, text, tmp_path):
    with pytest.raises(OptionError, match="unknown format 'gptqq'; did you mean 'gptq'"):
        make(
            model,
            text,
            tmp_path / "out",
            format="gptqq",
            listen=lambda event: pytest.fail("work was done"),
        )


@pytest.mark.parametrize(
    ("scheme", "format", "reason"),
    [
        ("rtn-int4", "vptq", "would have to be quantized again"),
        ("vptq:v4-k100", None, "a power of two entries"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_in_the_first_block(
    model, text, tmp_path, scheme, format, reason
):
    events = []
    with pytest.raises(
        UnsupportedError,
        match=rf"model\.layers\.0\..*the vptq format cannot hold this weight: .*{reason}",
    ):
        make(model, text, tmp_path / "out", scheme=scheme, format=format, listen=events.append)
    assert not [event for event in events if event.kind == "finished"]


@pytest.mark.parametrize(
    ("changes", "extra", "told"),
    [
        (
            dict(),
            "model.layers.0.self_attn.q_norm.weight",
            "without a place in the model: model.layers.0.self_attn.q_norm.weight",
        ),
        (dict(), "model.other", "without a place in the model: model.other"),
        (dict(num_hidden_layers=1), None, "a layer or part that config.json does not announce"),
        (dict(vocab_size=1024), None, "model.embed_tokens: shape"),
        (dict(tie_word_embeddings=True), None, "lm_head.weight differs"),
    ],
)
def test_what_would_be_left_out_of_the_result_is_refused(changes, extra, told, text, tmp_path):
    """As the loader refuses it: the result would load, and talk nonsense."""
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {extra: torch.ones(3)} if extra else {}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=re.escape(told)):
        make(folder, text, tmp_path / "out", "rtn-int4")
    assert not (tmp_path / "out").exists()


def test_running_out_of_memory_is_one_clear_line(model, text, tmp_path, monkeypatch):
    def explode(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibrate, "solve_group", explode)
    with pytest.raises(ResourceError, match=r"layer 0: out of memory.*--resume"):
        make(model, text, tmp_path / "out")


def test_overflowing_activations_name_the_layer(text, tmp_path):
    loud = make_tiny_model(tmp_path / "m")
    from safetensors.torch import load_file, save_file

    tensors = load_file(loud / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e5
    save_file(tensors, loud / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FlyweightError, match=r"model\.layers\.1.*NaN or infinity"):
        make(loud, text, tmp_path / "out", dtype="float16")


@pytest.mark.parametrize(
    ("content", "message"), [("", "the text is empty"), ("too short", "too few for one sample")]
)
def test_a_text_that_cannot_calibrate_is_refused_before_any_work(content, message, model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(content)
    with pytest.raises(OptionError, match=message):
        make(model, path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_something_else_is_refused(model, text, tmp_path):
    make(model, text, tmp_path / "out", blocks=1)
    with pytest.raises(OptionError, match=r"another run \(another .*recipe"):
        make(model, text, tmp_path / "out", "gptq-int8", resume=True)
    seen = kinds(model, text, tmp_path / "out")  # without --resume it starts over
    assert seen.count("finished") == 3


def test_an_existing_folder_is_not_overwritten_unasked(model, text, tmp_path):
    make(model, text, tmp_path / "out", "rtn-int4")
    with pytest.raises(OptionError, match="--overwrite"):
        make(model, text, tmp_path / "out", "rtn-int8")
    make(model, text, tmp_path / "out", "rtn-int8", overwrite=True)
    assert Checkpoint(tmp_path / "out").linear("model.layers.0.mlp.up_proj").bits == 8


def test_a_preset_is_quantized_for_timing(tmp_path):
    summary = quantize("preset:smollm2-135m", "rtn-int4", tmp_path / "out", device="cpu", blocks=1)
    assert not summary.finished and not (tmp_path / "out").exists() and len(summary.layers) == 7

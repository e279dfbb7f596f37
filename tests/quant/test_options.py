"""The options of `flyweight.quantize`: given as an object or one by one, never silently dropped."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import flyweight
from flyweight.errors import OptionError
from flyweight.quant.options import Options
from flyweight.quant.recipe import Recipe

QUANT = Path(flyweight.__file__).parent / "quant"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_misspelled_option_names_the_one_that_was_meant(tmp_path):
    with pytest.raises(OptionError, match=r"unknown option 'sample'; did you mean 'samples'\?"):
        flyweight.quantize("preset:smollm2-135m", "rtn-int4", tmp_path / "out", sample=4)
    assert not (tmp_path / "out").exists()


def test_single_options_change_those_of_the_object():
    options = Options(samples=3, seed=7).changed({"seed": 8, "dtype": "bfloat16"})
    assert (options.samples, options.seed, options.dtype) == (3, 8, "bfloat16")


def test_options_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().seed = 1


def test_a_dtype_that_cannot_calculate_is_refused():
    with pytest.raises(OptionError, match="float32, float16 or bfloat16"):
        Options(dtype="int8")


def test_a_gpu_takes_more_and_longer_samples_unless_told_otherwise():
    for options, device, expected in (
        (Options(), CPU, (16, 512, 1)),
        (Options(), GPU, (128, 2048, 8)),
        (Options(samples=2, length=32, batch=4), GPU, (2, 32, 4)),
    ):
        found = (
            options.sample_count(device),
            options.sample_length(device),
            options.batch_size(device),
        )
        assert found == expected


def test_a_recipe_stands_before_a_scheme(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "rtn-int8"\n')
    assert Options().chosen_recipe("rtn-int4").name == "rtn-int4"
    assert Options(recipe=tmp_path / "mine.toml").chosen_recipe("rtn-int4").layer.bits == 8
    own = Recipe.from_dict({"name": "own", "bits": 3}, "own")
    assert Options(recipe=own).chosen_recipe("rtn-int4") is own


def test_an_options_object_quantizes_as_the_same_options_one_by_one(tmp_path):
    options = Options(device="cpu", blocks=1)
    whole = flyweight.quantize("preset:smollm2-135m", "rtn-int4", tmp_path / "a", options)
    single = flyweight.quantize(
        "preset:smollm2-135m", "rtn-int4", tmp_path / "b", device="cpu", blocks=1
    )
    assert whole.layers == single.layers and len(whole.layers) == 7 and not whole.finished


def test_no_function_takes_more_than_eight_parameters():
    """But the kernels themselves: the arguments of a launch cannot be an object."""
    for path in sorted(QUANT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not any(
                "jit" in ast.unparse(one) for one in node.decorator_list
            ):
                names = [
                    one.arg
                    for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                ]
                assert len([name for name in names if name not in ("self", "cls")]) <= 8, (
                    f"{path.name}: {node.name}"
                )

"""Recipes: named, from a file, by layer pattern; a mistake names what was probably meant."""

import pytest

from flyweight.errors import OptionError
from flyweight.quant.recipe import Layer, Recipe, find, load, named

WANTED = (
    "gptq-int3",
    "gptq-int4",
    "gptq-int8",
    "awq-int4",
    "w8a16-awq",
    "w8a16-smooth-awq",
    "w8a16-sparse-awq",
    "w8a8-smooth",
    "w8a8-smooth-gptq",
    "w8a8-sparse-smooth-gptq",
    "w4a16-sparse-gptq",
    "vptq-4bit",
    "vptq-3bit",
    "vptq-2bit",
    "fp8",
    "int4-best",
)


@pytest.mark.parametrize("name", WANTED)
def test_every_promised_scheme_is_there_and_explained(name):
    recipe = find(name)
    assert recipe.name == name and len(recipe.summary) > 20 and recipe.engines


@pytest.mark.parametrize("name", [*named(), "vptq:v8-k65536-256"])
def test_a_recipe_survives_being_written_down(name):
    recipe = find(name)
    assert Recipe.from_dict(recipe.to_dict(), "a file") == recipe


def test_vptq_names_say_the_shape():
    layer = find("vptq:v6-k4096-64-o1.5").layer
    assert (layer.vector_length, layer.centroids, layer.residual_centroids, layer.outliers) == (
        6,
        4096,
        64,
        0.015,
    )
    with pytest.raises(OptionError, match="vptq:v8-k65536-256"):
        find("vptq:8x65536")


def test_only_recipes_that_use_a_text_ask_for_one():
    assert {name for name, recipe in named().items() if not recipe.calibrated} == {
        "rtn-int4",
        "rtn-int8",
        "fp8",
    }


def test_lines_change_what_they_match_and_the_last_one_wins(tmp_path):
    (tmp_path / "mixed.toml").write_text("""
        base = "gptq-int4"
        [[layers]]
        match = "*.mlp.*"
        bits = 3
        [[layers]]
        match = "*.layers.0.mlp.down_proj"
        bits = 8
        group_size = -1
        [[layers]]
        match = "lm_head"
        solver = "rtn"
        """)
    recipe = load(tmp_path / "mixed.toml")
    assert recipe.name == "mixed"
    assert recipe.layer_for("model.layers.0.self_attn.q_proj").bits == 4
    assert recipe.layer_for("model.layers.1.mlp.down_proj").bits == 3
    down = recipe.layer_for("model.layers.0.mlp.down_proj")
    assert (down.bits, down.group_size, down.solver) == (8, -1, "gptq")
    assert recipe.layer_for("lm_head").solver == "rtn"
    assert find("gptq-int4").layer_for("lm_head").solver == "keep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitz = 4", "unknown key 'bitz'; did you mean 'bits'"),
        ("solver = 'gtpq'", "unknown solver 'gtpq'; did you mean 'gptq'"),
        ("ranges = 'importence'", "did you mean 'importance'"),
        ("bits = 'four'", "bits is 'four', a int is wanted"),
        ("symmetric = 1", "symmetric is 1, a bool is wanted"),
        ("bits = 9", "bits must be 2 to 8"),
        ("group_size = 0", "group_size must be positive"),
        ("smooth = 'always'", "smooth is a number, "),
        ("base = 'w8a8-smooth'\nsmooth = 'search'", 'int8 activations take "balance"'),
        ("activations = 'int8'", "int8 activations go with symmetric 8-bit weights"),
        ("base = 'gptq-int44'", "unknown scheme 'gptq-int44'; did you mean 'gptq-int4'"),
        ("[[layers]]\nbits = 4", "needs `match`"),
        ("[[layers]]\nmatch = '*'\nbit = 4", "unknown key 'bit'; did you mean 'bits'"),
        ("= 3", "not a readable TOML file"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        load(path)
    assert message in str(caught.value) and "mine.toml" in str(caught.value)


def test_unknown_schemes_and_files_are_refused(tmp_path):
    with pytest.raises(OptionError, match="did you mean 'awq-int4'"):
        find("awq-int-4")
    with pytest.raises(OptionError, match="no such file"):
        load(tmp_path / "nowhere.toml")


def test_group_sizes_pass_through_the_fit_wherever_they_stand():
    recipe = Recipe(
        "r",
        Layer(group_size=128),
        (("*.down_proj", {"group_size": 32}), ("*.up_proj", {"bits": 8})),
    )
    fitted = recipe.with_group_size(lambda size: size // 2)
    assert (
        fitted.layer.group_size == 64
        and fitted.lines[0][1]["group_size"] == 16
        and fitted.lines[1][1] == {"bits": 8}
    )


def test_a_line_can_name_the_last_block_of_a_model_of_any_depth():
    recipe = Recipe.from_dict(
        {"base": "gptq-int3", "layers": [{"match": "model.layers.{last}.*", "bits": 8}]}, "mine"
    ).with_last_block(29)
    names = [f"model.layers.{i}.mlp.up_proj" for i in (2, 9, 29)]
    assert [recipe.layer_for(name).bits for name in names] == [3, 3, 8]

"""`quantize --shards N` makes weights that N GPUs can divide."""

import pytest
import torch

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import OptionError
from flyweight.models.config import ModelConfig
from flyweight.models.presets import preset_config
from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.quant import sharding
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import find


def config(**changes):
    return ModelConfig.from_dict(preset_config("tiny") | changes)


def test_widths_of_what_is_cut_by_inputs():
    """down has 512 inputs, o and qkv 256: of two GPUs each has 256 and 128."""
    assert sharding.linear_widths(config()) == [256, 512]
    assert sharding.linear_widths(config(), 2) == [128, 256, 512]
    assert sharding.linear_widths(config(), 8) == [32, 64, 256, 512]
    experts = ModelConfig.from_dict(preset_config("tiny-moe") | dict(moe_intermediate_size=320))
    assert 320 // 4 in sharding.linear_widths(experts, 4)


def test_what_cannot_be_divided_is_refused_before_the_work():
    with pytest.raises(OptionError, match=r"o_proj has 256 inputs, which 3 GPUs"):
        sharding.linear_widths(config(), 3)
    with pytest.raises(OptionError, match=r"vectors of 6 for each GPU"):
        sharding.check_vectors(config(), find("vptq:v6-k256"), 2)
    sharding.check_vectors(config(), find("vptq:v8-k256"), 4)
    with pytest.raises(OptionError, match=r"no codebook for 2 bits fits a layer of 8 × 16"):
        small = config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
        sharding.check_vectors(small, find("vptq-2bit"), 1)


def test_widths_that_two_of_four_cannot_be_kept_of_are_refused_before_the_work():
    odd = config(intermediate_size=129)
    with pytest.raises(OptionError, match=r"multiple of four inputs; this model has some of 129"):
        sharding.check_pruning(odd, find("w8a16-sparse-awq"))
    sharding.check_pruning(odd, find("gptq-int4"))
    sharding.check_pruning(config(), find("w8a16-sparse-awq"))


def test_a_folder_that_was_made_for_ranks_can_be_cut(tmp_path):
    """Groups of 128 would cross the border of o_proj's 64 inputs a rank."""
    quantize("preset:tiny", "rtn-int4", tmp_path / "out", shards=4, blocks=None)
    made = Checkpoint(tmp_path / "out")
    for name, cut in (("self_attn.o_proj", inputs_of), ("self_attn.q_proj", outputs_of)):
        whole = made.linear(f"model.layers.0.{name}")
        parts = [cut(whole, rank, 4, where=name) for rank in range(4)]
        axis = 1 if cut is inputs_of else 0
        both = torch.cat([part.dequantize() for part in parts], axis)
        assert torch.equal(both, whole.dequantize())

"""Keys with channels of one size: the same model, and a cache of 8-bit codes that loses less of
it."""

import pytest
import torch
from tiny_configs import LETTERS

from flyweight.kv_format import FP8, INT8
from flyweight.models.balanced_keys import BalancedKeys, balance_keys, balancing_exponents
from flyweight.models.decoder import Decoder
from flyweight.models.kv_scheme import KVScheme
from flyweight.models.presets import PresetWeights
from flyweight.tensors import KINDS, scale_rows

SIZES = LETTERS | dict(num_hidden_layers=2)
QWEN2 = SIZES | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
QWEN3 = SIZES | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
TOKENS = (torch.arange(48) * 7 % 96)[None]


class Loud:
    """Weights whose keys have loud channels, as the biases of Qwen2.5 and norms of Qwen3 make
    them."""

    def __init__(self, config, scheme="fp32"):
        self.inner = PresetWeights(config, scheme)
        self.config = self.inner.config

    def has(self, name):
        return self.inner.has(name)

    def linear(self, prefix):
        return self.inner.linear(prefix)

    def tensor(self, name):
        found = self.inner.tensor(name).clone()
        if name.endswith("k_proj.bias"):
            found[::8] = 12.0
        if name.endswith("k_norm.weight"):
            found[::8] = 12.0
        if name.endswith("q_norm.weight"):
            found *= 0.5
        return found

    def check_used(self):
        pass


def logits(weights, format=None):
    decoder = Decoder.load(weights, device="cpu", dtype=torch.float32, exact=True)
    decoder.kv_scheme = KVScheme(format)
    return decoder.forward_whole(TOKENS)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [(QWEN2, "fp32"), (QWEN2, "int4"), (QWEN3, "fp32")],
    ids=["qwen2", "qwen2-int4", "qwen3"],
)
def test_a_balanced_model_is_the_same_and_loses_less_to_8_bit_keys(config, scheme):
    loud = Loud(config, scheme)
    plain = logits(loud)
    balanced = balance_keys(loud, KVScheme(INT8))
    torch.testing.assert_close(logits(balanced), plain, rtol=1e-4, atol=1e-4)
    lost, kept = ((logits(one, INT8) - plain).norm() for one in (loud, balanced))
    assert kept < lost / 1.5


def test_codes_that_are_floats_or_have_fixed_scales_need_no_balance():
    loud = Loud(QWEN2)
    assert balance_keys(loud, KVScheme()) is balance_keys(loud, KVScheme(FP8)) is loud
    assert balance_keys(loud, KVScheme(INT8, ((1.0, 1.0),) * 2)) is loud


def test_two_channels_that_rope_turns_into_each_other_have_one_exponent():
    sizes = torch.tensor([[1.0, 256.0, 1.0, 256.0, 4.0, 1e-30]])
    exponents = balancing_exponents(sizes, rotary=4)
    assert exponents[0, :2].tolist() == exponents[0, 2:4].tolist()
    assert (exponents[0, 0] - exponents[0, 1]).item() == 6
    assert (exponents[0, 5] - exponents[0, 1]).item() == 8, "the most there is"


@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_take_powers_of_two_exactly_or_say_that_they_cannot(kind):
    tensor = KINDS[kind].random((64, 256), seed=1)
    factors = torch.exp2(torch.arange(64) % 5 - 2.0)
    scaled = scale_rows(tensor, factors)
    if scaled is None:
        assert kind in ("vptq", "mxfp4", "nvfp4")
        return
    assert type(scaled) is type(tensor) and scaled.nbytes == tensor.nbytes
    assert torch.equal(scaled.dequantize(), tensor.dequantize() * factors[:, None])


def test_a_layer_of_weights_without_scales_of_rows_stays_as_it_is():
    loud = Loud(QWEN2, "mxfp4")
    balanced = BalancedKeys(loud)
    prefix = "model.layers.0.self_attn.k_proj"
    assert torch.equal(balanced.linear(prefix).dequantize(), loud.linear(prefix).dequantize())
    assert torch.equal(balanced.tensor(f"{prefix}.bias"), loud.tensor(f"{prefix}.bias"))

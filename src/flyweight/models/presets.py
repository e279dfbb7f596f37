"""Architecture numbers of well-known models, and random weights in their shapes: speed can be
measured without a download.

Weights are made straight on the device in their final format. Each tensor is seeded from its own
name, so the bytes depend on (seed, name, device kind) and not on the order of loading.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.models import families
from flyweight.models.config import ModelConfig, sizes
from flyweight.models.plan import AttentionPlan, ExpertsPlan, LayerPlan
from flyweight.models.standard import plan_of
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    NvFloat4,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
    VectorQuant,
)

QWEN = dict(
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=32768,
    dtype="bfloat16",
    bos_token_id=151643,
    eos_token_id=151645,
    vocab_size=152064,
    tie_word_embeddings=False,
)
QWEN2 = dict(QWEN, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
# of the model cards
YARN = dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768))
QWEN3 = dict(
    QWEN,
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    max_position_embeddings=40960,
    head_dim=128,
    vocab_size=151936,
    num_key_value_heads=8,
)
LLAMA31 = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    max_position_embeddings=131072,
    dtype="bfloat16",
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    vocab_size=128256,
    tie_word_embeddings=False,
    num_key_value_heads=8,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": QWEN2 | sizes(896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2-1.5b": QWEN2 | sizes(1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2-7b": QWEN2 | sizes(3584, 18944, 28, 28, 4),
    # as its model card has it for 131,072 tokens
    "qwen2-7b-yarn": QWEN2
    | sizes(
        3584,
        18944,
        28,
        28,
        4,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "qwen2-72b": QWEN2 | sizes(8192, 29568, 80, 64, 8),
    "qwen2-72b-yarn": QWEN2 | YARN | sizes(8192, 29568, 80, 64, 8),
    "qwen2-57b-a14b": QWEN2
    | sizes(
        3584,
        18944,
        28,
        28,
        4,
        model_type="qwen2_moe",
        architectures=["Qwen2MoeForCausalLM"],
        vocab_size=151936,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        norm_topk_prob=False,
        decoder_sparse_step=1,
    ),
    "qwen3-30b-a3b": QWEN3
    | sizes(
        2048,
        6144,
        48,
        32,
        4,
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "qwen1.5-32b": QWEN2 | sizes(5120, 27392, 64, 40, 8),
    "qwen3-0.6b": QWEN3 | sizes(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": QWEN3 | sizes(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": QWEN3 | sizes(4096, 12288, 36, 32, 8),
    # for 131,072 tokens
    "qwen3-8b-yarn": QWEN3 | YARN | sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": QWEN3 | sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": QWEN3 | sizes(5120, 25600, 64, 64, 8),
    "llama-3.1-8b": LLAMA31 | sizes(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": LLAMA31 | sizes(8192, 28672, 80, 64, 8),
    "smollm2-135m": dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        vocab_size=49152,
        tie_word_embeddings=True,
        **sizes(576, 1536, 30, 9, 3),
    ),
}
# For trying a command out: of no model, as small as every scheme allows.
_tiny = dict(vocab_size=16384, bos_token_id=0, eos_token_id=1)
PRESETS["tiny"] = PRESETS["qwen3-0.6b"] | sizes(256, 512, 2, 4, 2, head_dim=64, **_tiny)
PRESETS["tiny-moe"] = PRESETS["qwen2-57b-a14b"] | sizes(
    256,
    512,
    2,
    4,
    2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=512,
    **_tiny,
)
PRESETS |= families.PRESETS
# Of models with experts only these, as gpt-oss's own files.
OF_EXPERTS = ("mxfp4",)
KEPT = ("lm_head", "model.embed_tokens")  # in the 16 bits of the config
FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Make = Callable[..., QuantTensor]  # (shape, seed, device, dtype=…)


def _grouped(bits: int, *, symmetric: bool = False, sparse: bool = False) -> Make:
    def make(
        shape: tuple[int, int], seed: int, device: torch.device | str, **options: Any
    ) -> QuantTensor:
        # Hidden sizes such as 576 are no multiple of 128.
        options |= dict(
            bits=bits,
            symmetric=symmetric,
            group_size=next(g for g in (128, 64, 32, -1) if shape[1] % g == 0),
        )
        return (
            Sparse24.random(shape, seed, device, inner=IntGroup, **options)
            if sparse
            else IntGroup.random(shape, seed, device, **options)
        )

    return make


def _act_order(
    shape: tuple[int, int], seed: int, device: torch.device | str, **options: Any
) -> QuantTensor:
    """4 bits in groups of scattered inputs. Linears of one width share their order, as those that
    read one input do in GPTQ's files.
    """
    made = IntGroup.random(shape, seed, device, bits=4, **options)
    generator = torch.Generator(device=device).manual_seed(shape[1])
    order = torch.rand(shape[1], generator=generator, device=device).argsort()
    groups = torch.arange(shape[1], device=device) // made.group_size
    scattered = torch.empty_like(groups).scatter_(0, order, groups)
    return dataclasses.replace(made, g_idx=scattered.int())


def _blocks(**options: Any) -> Make:
    """A type of GGUF; rows that are no multiple of 256 have the same codes without sub-scales."""

    def make(
        shape: tuple[int, int], seed: int, device: torch.device | str, **_: Any
    ) -> QuantTensor:
        groups = 256 // options.get("group_size", 32)
        own = dict(groups_of_block=groups if shape[1] % 256 == 0 else 1)
        return IntBlock.random(shape, seed, device, **(options | own))

    return make


SCHEMES: dict[str, Make] = {
    **dict.fromkeys(FLOATS, Plain.random),
    "int4": _grouped(4),
    "int4-sym": _grouped(4, symmetric=True),
    "int4-act-order": _act_order,
    "int3": _grouped(3),
    "int8": _grouped(8),
    "w8a16": _grouped(8, symmetric=True),
    "w8a8": Int8Channel.random,
    "fp8": Float8.random,
    "fp8-block": functools.partial(Float8.random, block=128),  # as Qwen's and DeepSeek's own files
    "mxfp4": Float4.random,
    "nvfp4": NvFloat4.random,
    "q4_k": _blocks(bits=4),  # as GGUF's files
    "q5_k": _blocks(bits=5),
    "q6_k": _blocks(bits=6, group_size=16, mins=False, sub_bits=8),
    "trellis2": functools.partial(Trellis.random, bits=2),
    "trellis3": functools.partial(Trellis.random, bits=3),
    "vptq": VectorQuant.random,  # codebooks of 8192 + 256, vectors of 8
    "sparse-int4": _grouped(4, symmetric=True, sparse=True),
    "sparse-w8a16": _grouped(8, symmetric=True, sparse=True),
    "sparse-w8a8": Sparse24.random,
}


def preset_config(name: str) -> dict[str, Any]:
    """A Hugging Face config dict of one's own."""
    if name not in PRESETS:
        raise OptionError(unknown("preset", name, PRESETS))
    return copy.deepcopy(PRESETS[name])


class PresetWeights:
    """Random weights behind the reader's interface. Embeddings, head, norms and biases stay plain
    in every scheme.
    """

    def __init__(
        self,
        name: str | dict[str, Any],
        scheme: str = "bf16",
        seed: int = 0,
        *,
        device: torch.device | str = "cpu",
    ):
        if scheme not in SCHEMES:
            raise OptionError(unknown("scheme", scheme, SCHEMES))
        self.config = preset_config(name) if isinstance(name, str) else copy.deepcopy(name)
        if scheme in FLOATS:
            self.config["dtype"] = FLOATS[scheme]
        self.scheme = scheme
        self.seed = seed
        self.device = device
        parsed = ModelConfig.from_dict(self.config)
        self.spares_others = scheme in OF_EXPERTS and parsed.moe is not None
        self.dtype = parsed.dtype
        self.shapes = tensor_shapes(parsed)
        self.plus_one = plus_one_norms(parsed)

    def names(self) -> list[str]:
        return list(self.shapes)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> Tensor:
        shape = self._shape(name)
        seed = self._seed(name)
        if len(shape) == 2:
            return Plain.random(shape, seed, self.device, dtype=self.dtype).weight
        generator = torch.Generator(device=self.device).manual_seed(seed)
        noise = torch.randn(shape, generator=generator, device=self.device) * 0.1
        centred = name.endswith("norm.weight") and name not in self.plus_one
        return (noise + 1 if centred else noise).to(self.dtype)

    def linear(self, prefix: str) -> QuantTensor:
        shape = self._shape(prefix + ".weight")
        spared = self.spares_others and ".experts." not in prefix
        make = Plain.random if prefix in KEPT or spared else SCHEMES[self.scheme]
        return make(shape, self._seed(prefix + ".weight"), self.device, dtype=self.dtype)

    def check_used(self, ignore: Iterable[str] = (), *, within: str = "") -> None:
        """Nothing can be left over: tensors are made when asked for."""

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise OptionError(unknown("tensor", name, self.shapes))
        return self.shapes[name]

    def _seed(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:7], "little")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of an unquantized checkpoint, experts one by one."""
    plan = plan_of(config)
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in plan.layers:
        shapes |= {layer.prefix + name: shape for name, shape in layer_shapes(layer).items()}
    shapes[f"{plan.norm.name}.weight"] = (config.hidden_size,)
    return shapes if config.tied_embeddings else shapes | {"lm_head.weight": table}


def plus_one_norms(config: ModelConfig) -> set[str]:
    """Weights that are nearly 0 where those of other norms are nearly 1."""
    plan = plan_of(config)
    norms = [(plan.norm, "")]
    for layer in plan.layers:
        heads = (layer.attention.query_norm, layer.attention.key_norm)
        if layer.delta is not None:
            heads = (layer.delta.norm, None)
        norms += [(norm, layer.prefix) for norm in (*layer.norms, *heads) if norm is not None]
    return {f"{prefix}{norm.name}.weight" for norm, prefix in norms if norm.plus_one}


def attention_shapes(attention: AttentionPlan) -> dict[str, tuple[int, ...]]:
    """Norms of queries and keys, and sinks."""
    found: dict[str, tuple[int, ...]] = {}
    if attention.latent is not None:
        found |= {f"{norm.name}.weight": (width,) for norm, width in attention.latent.norms}
    for norm, heads in (
        (attention.query_norm, attention.heads),
        (attention.key_norm, attention.kv_heads),
    ):
        width = attention.head_dim * (heads if attention.whole_norms else 1)
        found |= {} if norm is None else {f"{norm.name}.weight": (width,)}
    if attention.sinks is not None:
        found[attention.sinks] = (attention.heads,)
    return found


def layer_shapes(layer: LayerPlan) -> dict[str, tuple[int, ...]]:
    attention = layer.attention
    mlp = layer.mlp
    found: dict[str, tuple[int, ...]] = {
        f"{norm.name}.weight": (layer.hidden_size,) for norm in layer.norms
    }
    found |= attention_shapes(attention) if layer.delta is None else layer.delta.tensors
    if isinstance(mlp, ExpertsPlan):
        found[mlp.router.weight] = (mlp.router.experts, layer.hidden_size)
        found |= {} if mlp.router.bias is None else {mlp.router.bias: (mlp.router.experts,)}
        found |= {} if mlp.shared_gate is None else {mlp.shared_gate: (1, layer.hidden_size)}
    for group in layer.groups:
        for linear, size in zip(group.linears, group.sizes, strict=True):
            found[f"{linear}.weight"] = (size, group.in_features)
            found |= {f"{linear}.bias": (size,)} if group.bias else {}
    return found

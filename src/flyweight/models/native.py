"""A checkpoint as the native CPU executor (kernels/native/) takes it.

One layer at a time is read and packed, so that a load needs little more memory than its result.
The result is kept in the cache (checkpoint/prepared.py): the next start reads it as it lies.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flyweight.checkpoint import prepared
from flyweight.checkpoint.mapped import forget_pages
from flyweight.errors import UnsupportedError
from flyweight.kernels.native import kept, library
from flyweight.kernels.native.executor import Layer, NativeDecoder, Parts
from flyweight.kernels.native.weight import Weight, pack
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import check_tied
from flyweight.models.layers import EMBEDDING, Weights, check_shape, load_tensor, read_embedding
from flyweight.models.plan import MlpPlan
from flyweight.models.rope import rope_tables
from flyweight.models.standard import plan_of, standard_plan
from flyweight.tensors import IntGroup, Plain, QuantTensor

HEAD_GROUP = 32  # inputs that share a scale of a head rounded to 8 bits


def why_not(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """None, or why a model with this config, asked for in this type, is run by torch on a CPU."""
    if dtype != torch.float32:
        return f"they compute in float32, not in {str(dtype).removeprefix('torch.')}"
    return unsupported_reason(config)


def unsupported_reason(config: ModelConfig) -> str | None:
    """None, or why the native executor cannot run this model here."""
    plan = plan_of(config)
    if any(not isinstance(layer.mlp, MlpPlan) for layer in plan.layers):
        return "they do not run mixtures of experts"
    if plan != standard_plan(config) or config.activation != "silu":
        return f"they do not know the layers of {config.model_type}"
    if config.head_dim % 8 or config.hidden_size % 8:
        return f"head_dim {config.head_dim} or hidden_size {config.hidden_size} is no multiple of 8"
    return library.why_not()


def describe() -> str:
    """For people: what runs, and with which instructions."""
    return f"native kernels ({library.load().instructions().decode()})"


def load(weights: Weights, *, exact: bool = False, head_bits: int | None = None) -> NativeDecoder:
    """A decoder that the engine can run; `config` and `nbytes` are what the rest of the package
    asks of one.
    """
    parts = prepared_parts(weights, exact=exact, head_bits=head_bits)
    # attention reads keys and values in 16 bits as fast as in 32, and from half the memory
    decoder = NativeDecoder(parts, cache_dtype=torch.float32 if exact else torch.float16)
    decoder.config = ModelConfig.from_dict(weights.config)
    return decoder


def prepared_parts(weights: Weights, *, exact: bool, head_bits: int | None) -> Parts:
    """As an earlier start has left them in the cache, else read and packed, and left there for the
    next. Only files have a fingerprint: what is made up in memory is packed every time.
    """
    fingerprint = getattr(weights, "fingerprint", None)
    if fingerprint is None or not prepared.limit_bytes():
        return read_parts(weights, exact=exact, head_bits=head_bits)
    circumstances = [fingerprint, library.loaded_name(), code_state(), f"{exact} {head_bits}"]
    path = prepared.file_of(weights.folder, circumstances)  # type: ignore[attr-defined]
    if found := prepared.read(path):
        return kept.restore(*found)
    parts = read_parts(weights, exact=exact, head_bits=head_bits)
    tensors: list[Tensor] = []
    prepared.write(path, kept.describe(parts, tensors), tensors)
    return parts


def code_state() -> str:
    """Size and time of the files of ours that decide what packed weights look like."""
    package = Path(__file__).parents[1]
    found = [package / "models" / "native.py", package / "models" / "narrow_head.py"]
    for room in ("checkpoint", "tensors", "kernels/native"):
        found += sorted((package / room).rglob("*.py"))
    states = [(path.name, path.stat()) for path in found]
    return " ".join(f"{name}:{state.st_size}:{state.st_mtime_ns}" for name, state in states)


def read_parts(weights: Weights, *, exact: bool = False, head_bits: int | None = None) -> Parts:
    """`head_bits` 8 rounds a head of floats (and with it a tied embedding) to 8 bits; None keeps it
    as it is.
    """
    config = ModelConfig.from_dict(weights.config)
    if reason := unsupported_reason(config):
        raise UnsupportedError(f"the CPU's native kernels cannot run this model: {reason}")
    if head_bits not in (None, 8):
        raise UnsupportedError(f"a head of {head_bits} bits is not supported; 8 or as it is")
    embedding = read_embedding(weights)
    check_shape(EMBEDDING, embedding.shape, (config.vocab_size, config.hidden_size))
    tied = config.tied_embeddings
    if tied:
        check_tied(weights, embedding)
    head = pack_head(embedding if tied else weights.linear("lm_head"), exact=exact, bits=head_bits)
    forget_pages()
    layers = []
    for index in range(config.layers):
        layers.append(read_layer(weights, config, index, exact=exact))
        forget_pages()
    cos, sin = rope_tables(config)
    parts = Parts(
        layers=layers,
        head=head,
        table=None if tied else pack_table(embedding),
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        final_norm=read_vector(weights, "model.norm.weight", config.hidden_size),
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rotary=config.rope.rotary_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.epsilon,
        scale=config.attention_scale,
    )
    weights.check_used()
    return parts


def read_layer(weights: Weights, config: ModelConfig, index: int, *, exact: bool) -> Layer:
    prefix = f"model.layers.{index}."
    hidden = config.hidden_size
    size = config.head_dim

    def linear(name: str, outputs: int, inputs: int, biased: bool) -> Weight:
        return read_linear(weights, prefix + name, (outputs, inputs), exact=exact, biased=biased)

    def norm(name: str, width: int) -> Tensor:
        return read_vector(weights, f"{prefix}{name}.weight", width)

    return Layer(
        qkv=[
            linear("self_attn.q_proj", config.heads * size, hidden, config.qkv_bias),
            linear("self_attn.k_proj", config.kv_heads * size, hidden, config.qkv_bias),
            linear("self_attn.v_proj", config.kv_heads * size, hidden, config.qkv_bias),
        ],
        o=linear("self_attn.o_proj", hidden, config.heads * size, config.o_bias),
        gate=linear("mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias),
        up=linear("mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias),
        down=linear("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
        input_norm=norm("input_layernorm", hidden),
        post_norm=norm("post_attention_layernorm", hidden),
        query_norm=norm("self_attn.q_norm", size) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", size) if config.qk_norm else None,
        window=config.windows[index] or 0,
    )


def read_linear(
    weights: Weights, name: str, shape: tuple[int, int], *, exact: bool, biased: bool = False
) -> Weight:
    tensor = weights.linear(name)
    check_shape(name, tensor.shape, shape)
    # used whether or not the config promises one, as everywhere
    given = biased or weights.has(f"{name}.bias")
    bias = read_vector(weights, f"{name}.bias", shape[0]) if given else None
    return pack(tensor, exact=exact, bias=bias)


def read_vector(weights: Weights, name: str, width: int) -> Tensor:
    return load_tensor(weights, name, (width,), device="cpu", dtype=torch.float32).contiguous()


def pack_head(head: QuantTensor, *, exact: bool, bits: int | None) -> Weight:
    if bits is not None and isinstance(head, Plain):
        head = round_to_8_bits(head.weight)
    return pack(head, exact=exact)


def pack_table(embedding: QuantTensor) -> Tensor | Weight:
    """What rows are looked up in: floats as they lie, codes in the kernels' layout."""
    return embedding.weight.contiguous() if isinstance(embedding, Plain) else pack(embedding)


def round_to_8_bits(weight: Tensor, group: int = HEAD_GROUP) -> IntGroup:
    """To the nearest of 255 levels in each group of inputs, as GGUF's Q8_0; in parts, since a head
    is large.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16)
    for begin in range(0, outputs, 1024):
        rows = slice(begin, begin + 1024)
        grouped = weight[rows].float().unflatten(1, (-1, group))
        scales[rows] = grouped.abs().amax(-1) / 127
        inverse = 1 / scales[rows].float().clamp(min=1e-12)
        codes[rows] = (
            grouped.mul_(inverse[..., None]).round_().clamp_(-127, 127).add_(128).flatten(1)
        )
    return IntGroup(codes.view(torch.int32), scales, None, 8, group, inputs)

"""EAGLE-3 heads as they are published (`LlamaForCausalLMEagle3`), and random ones.

    fc.weight              [hidden, 3 · model's hidden]  of the states before layers 2, n / 2, n − 3
    midlayer.input_layernorm     of embeddings           (`layers.0.` in the speculators layout)
    midlayer.hidden_norm         of h
    midlayer.self_attn.{q,k,v}_proj  [.., 2 · hidden], embeddings first
    midlayer.{o_proj, post_attention_layernorm, mlp}     as in a Llama
    norm, lm_head          of the head's own, smaller vocabulary
    d2t                    id of the model − id of the head;  t2d: which ids the head has (not used)
    embed_tokens           the model's own, sometimes left out: never read

The names are those of SafeAILab/EAGLE, vLLM and SGLang. `eagle_aux_hidden_state_layer_ids` in
config.json names other layers, `norm_before_residual` another order.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flyweight.errors import CheckpointError
from flyweight.kernels.linear.fused import Norm
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import HEAD, Decoder
from flyweight.models.heads.head import LAYER, DraftHead, HeadWeights, Pair
from flyweight.models.layer import Block
from flyweight.models.layers import Linear, Weights, load_tensor
from flyweight.models.plan import Group
from flyweight.tensors import Plain, QuantTensor
from flyweight.values import known

PROJECTIONS = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv")
RANDOM = "random"
SPARE = 64  # places behind the context, where guesses may lie
RANDOM_VOCABULARY = 32000


def default_places(layers: int) -> tuple[int, int, int]:
    return 2, layers // 2, layers - 3


def is_eagle3(config: dict[str, Any]) -> bool:
    names = [str(name) for name in config.get("architectures") or ()]
    kind = config.get("speculators_model_type")
    return kind == "eagle3" or any("Eagle3" in name for name in names)


def layer_config(config: dict[str, Any], context: int) -> dict[str, Any]:
    """That of a Llama with one layer, and as many positions as the model has."""
    inner = dict(config.get("transformer_layer_config") or config)
    inner.setdefault("model_type", "llama")
    inner["num_hidden_layers"] = 1
    inner["max_position_embeddings"] = context + SPARE
    return inner


def load(weights: Weights, target: Decoder, *, bits: int | None = None) -> DraftHead:
    given = weights.config
    if not is_eagle3(given):
        where = getattr(weights, "folder", "this model")
        raise CheckpointError(
            f"{where}: not an EAGLE-3 head: architectures in its config.json names none"
        )
    context = target.config.context_length
    data = layer_config(given, context)
    config = ModelConfig.from_dict(data)
    device, dtype = target.device, target.dtype
    if config.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"the head is {config.hidden_size} wide and its model {target.config.hidden_size}: "
            f"it was made for another model"
        )
    old = weights.has("midlayer.hidden_norm.weight")
    named = HeadWeights(
        weights, data, _renamer("midlayer." if old else "layers.0."), cut=PROJECTIONS, bits=bits
    )
    block = Block.load(named, config, 0, device=device, dtype=dtype)
    hidden = config.hidden_size
    epsilon = config.epsilon

    def norm(name: str) -> Norm:
        stored = load_tensor(weights, f"{name}.weight", (hidden,), device=device, dtype=dtype)
        return Norm(stored, epsilon)

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        group = Group(name, "", (name,), (outputs,), inputs)
        return Linear.load(named, "", group, device=device, dtype=dtype)

    of_embeddings = Linear.load(
        named.of_embeddings(), LAYER, block.plan.qkv, device=device, dtype=dtype
    )
    layer = "midlayer" if old else "layers.0"
    pair = Pair(block.qkv, of_embeddings, norm(f"{layer}.input_layernorm"))
    block.linears[block.plan.qkv.name] = block.qkv = pair  # type: ignore[assignment]
    hidden_norm = block.norms["input_layernorm"]
    before = bool(given.get("norm_before_residual"))
    if before:  # then nothing is left to be normed in front of q, k and v
        block.plan = replace(block.plan, before_attention=None)
    places = _places(given, target.config.layers)
    vocabulary = int(given.get("draft_vocab_size") or data["vocab_size"])
    head = DraftHead(
        config,
        places=places,
        begin_with=linear("fc", hidden, len(places) * target.config.hidden_size),
        block=block,
        pair=pair,
        norm=norm("norm"),
        head=linear(HEAD, vocabulary, hidden),
        embedding=target.embedding,
        device=device,
        dtype=dtype,
        hidden_norm=hidden_norm,
        norms_residual=before,
        to_model=_to_model(weights, vocabulary, target),
    )
    for name in ("t2d", "embed_tokens.weight"):
        if weights.has(name):
            weights.tensor(name)
    weights.check_used()
    return head


def _renamer(layer: str) -> Any:
    def rename(name: str) -> str:
        if not name.startswith(LAYER):
            return name
        own = name.removeprefix(LAYER)
        return layer + own.replace("input_layernorm", "hidden_norm")

    return rename


def _places(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """config.json names layers by what they get, as vLLM does."""
    given = config.get("eagle_aux_hidden_state_layer_ids") or (
        config.get("eagle_config") or {}
    ).get("eagle_aux_hidden_state_layer_ids")
    places = tuple(int(place) for place in given) if given else default_places(layers)
    if not all(0 <= place <= layers for place in places):
        raise CheckpointError(
            f"config.json: hidden states of layers {list(places)} of a model with {layers}"
        )
    return places


def _to_model(weights: Weights, vocabulary: int, target: Decoder) -> Tensor | None:
    if not weights.has("d2t"):
        if vocabulary != target.config.vocab_size:
            raise CheckpointError(
                f"the head knows {vocabulary:,} tokens, its model {target.config.vocab_size:,}, "
                f"and d2t, which says which they are, is missing"
            )
        return None
    offsets = weights.tensor("d2t").to(target.device).long()
    ids = torch.arange(vocabulary, device=target.device) + offsets
    outside = (ids < 0) | (ids >= target.config.vocab_size)
    if known(outside.any(), otherwise=False):
        raise CheckpointError("d2t names tokens that the model does not have")
    return ids


class RandomHead:
    """Random weights in the shape of a model's EAGLE-3 head: for speed, never for acceptance."""

    def __init__(self, target: Decoder, vocabulary: int = RANDOM_VOCABULARY, seed: int = 0):
        config = target.config
        hidden = config.hidden_size
        self.device = target.device
        self.dtype = target.dtype
        self.seed = seed
        vocabulary = min(vocabulary, config.vocab_size)
        self.config: dict[str, Any] = dict(
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            hidden_act="silu",
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            draft_vocab_size=vocabulary,
            rms_norm_eps=config.epsilon,
            rope_theta=config.rope.theta,
            max_position_embeddings=config.context_length,
            dtype=str(target.dtype).removeprefix("torch."),
        )
        if config.layers < 6:  # the usual three layers are not there
            thirds = [(i + 1) * config.layers // 3 for i in range(3)]
            self.config["eagle_aux_hidden_state_layer_ids"] = thirds
        self.shapes = shapes(self.config, target.config.hidden_size)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name in ("d2t", "t2d"):
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        if len(shape) == 2:
            return Plain.random(shape, seed, self.device, dtype=self.dtype).weight
        return torch.ones(shape, dtype=self.dtype, device=self.device)

    def linear(self, prefix: str) -> QuantTensor:
        return Plain(self.tensor(f"{prefix}.weight"))

    def check_used(self) -> None:
        """Nothing can be left over."""


def shapes(config: dict[str, Any], target_hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head with such a config."""
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    query = config["num_attention_heads"] * size
    key = config["num_key_value_heads"] * size
    vocabulary = config["draft_vocab_size"]
    layer = {
        "self_attn.q_proj": (query, 2 * hidden),
        "self_attn.k_proj": (key, 2 * hidden),
        "self_attn.v_proj": (key, 2 * hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {
        f"midlayer.{name}.weight": shape for name, shape in layer.items()
    }
    return found | {
        "fc.weight": (hidden, 3 * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        "d2t": (vocabulary,),
        "t2d": (config["vocab_size"],),
    }

"""Heads inside of a model's own files, which predict a second token (multi-token prediction).

    Qwen3-Next and later          DeepSeek-V3, GLM-4.5 (one layer behind the last, n)
    mtp.pre_fc_norm_embedding     model.layers.n.enorm
    mtp.pre_fc_norm_hidden        model.layers.n.hnorm
    mtp.fc  [hidden, 2 · hidden]  model.layers.n.eh_proj      embeddings first
    mtp.layers.0.*                model.layers.n.*            a layer like the model's others
    mtp.norm                      model.layers.n.shared_head.norm

Embedding and head are the model's own. The first h is what the model's final norm gives; later ones
are those of the layer, with Qwen's behind `mtp.norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.kernels.linear.fused import Norm
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.heads.head import LAYER, DraftHead, HeadWeights, Pair
from flyweight.models.layer import Block
from flyweight.models.layers import Linear, Weights, load_tensor
from flyweight.models.plan import Group
from flyweight.models.standard import plan_of


@dataclass(frozen=True)
class Layout:
    """Where the parts of such a head are."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    mix: str
    norm: str
    norms_result: bool


def layout_of(weights: Weights, layers: int) -> Layout:
    if weights.has("mtp.fc.weight"):
        return Layout(
            layer="mtp.layers.0.",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            mix="mtp.fc",
            norm="mtp.norm",
            norms_result=True,
        )
    layer = f"model.layers.{layers}."
    if weights.has(f"{layer}eh_proj.weight"):
        return Layout(
            layer=layer,
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            mix=f"{layer}eh_proj",
            norm=f"{layer}shared_head.norm",
            norms_result=False,
        )
    raise CheckpointError(
        "this model has no head of its own that guesses (no mtp.fc, no layer behind the last); "
        "use ngram, model:NAME or eagle3:NAME"
    )


def layer_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """That of the model with its last layer alone: full attention, experts where it has any."""
    found = dict(config) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if "layer_types" in found:
        found["layer_types"] = ["full_attention"]
    if "first_k_dense_replace" in found:
        found["first_k_dense_replace"] = 0
    return found


def load(weights: Weights, target: Decoder, *, bits: int | None = None) -> DraftHead:
    layout = layout_of(weights, target.config.layers)
    data = layer_config(weights.config, target.config.layers)
    config = ModelConfig.from_dict(data)
    if plan_of(config).layers[0].attention.latent is not None:
        raise UnsupportedError(
            "the head in this model's files has latent attention, which heads cannot run yet; use "
            "ngram, model:NAME or eagle3:NAME"
        )
    device, dtype = target.device, target.dtype
    hidden = config.hidden_size

    def rename(name: str) -> str:
        return layout.layer + name.removeprefix(LAYER) if name.startswith(LAYER) else name

    named = HeadWeights(weights, data, rename, cut=(layout.mix,), bits=bits)
    block = Block.load(named, config, 0, device=device, dtype=dtype)
    plus_one = plan_of(config).norm.plus_one

    def norm(name: str) -> Norm:
        stored = load_tensor(weights, f"{name}.weight", (hidden,), device=device, dtype=dtype)
        return Norm(stored, config.epsilon, plus_one)

    group = Group("mix", "", (layout.mix,), (hidden,), hidden)
    halves = [
        Linear.load(half, "", group, device=device, dtype=dtype)
        for half in (named, named.of_embeddings())
    ]
    return DraftHead(
        config,
        places=(target.config.layers,),
        begin_with=target.norm,
        block=block,
        pair=Pair(halves[0], halves[1], norm(layout.embedding_norm)),
        norm=norm(layout.norm),
        head=target.head,
        embedding=target.embedding,
        device=device,
        dtype=dtype,
        mixes=True,
        hidden_norm=norm(layout.hidden_norm),
        norms_result=layout.norms_result,
    )

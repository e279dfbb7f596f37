"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from flyweight.checkpoint.gguf_families import BY_TYPE, FAMILIES, OUTER

CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN = 3, 4, 5, 6, 2
ARCHITECTURES = {
    kind: name for name, family in FAMILIES.items() for kind in (family.model_type, *family.also)
}


def gguf_name(name: str, model_type: str) -> str:
    family = BY_TYPE[model_type]
    names = {new: old for old, new in (OUTER | family.parts | family.experts | family.some).items()}
    whole = {new: old for old, new in family.whole.items()}
    stem, _, kind = name.rpartition(".")
    if name.startswith("model.layers."):
        _, _, layer, inside = name.split(".", 3)
        if inside in whole:
            return f"blk.{layer}.{whole[inside]}"
        return f"blk.{layer}.{names[inside.rpartition('.')[0]]}.{kind}"
    return f"{names[stem]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def byte_level_vocabulary(
    words=("he", "ll", "hell", "Ġw", "or"),
) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: two specials, the 256 bytes, a few merges, one user-defined token
    and fillers."""
    merges = ["h e", "l l", "he ll", "Ġ w", "o r"]
    tokens = ["<|end|>", "<|start|>", *sorted(ByteLevel.alphabet()), *words, "<think>", "[PAD0]"]
    types = [CONTROL, CONTROL, *[1] * (256 + len(words)), USER_DEFINED, UNUSED]
    return tokens, types, merges


def write_gguf(
    path: Path,
    model,
    *,
    quantize: gguf.GGMLQuantizationType | None = None,
    pre: str = "qwen2",
    skip=(),
    extra=None,
    **fields,
) -> Path:
    """A transformers model of a tiny config as a GGUF file; `quantize` applies to the matrices,
    `fields` to the metadata."""
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    guessing = fields.get(
        f"{ARCHITECTURES[kind]}__nextn_predict_layers", 0
    )  # further layers that guess tokens
    writer.add_block_count(config.num_hidden_layers + guessing)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    latent = BY_TYPE[kind].latent
    writer.add_head_count_kv(1 if latent else config.num_key_value_heads)
    if not latent:
        writer.add_key_length(config.head_dim or config.hidden_size // config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, pre)
    for name, value in fields.items():
        key = name.replace("__", ".")
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    add_tensors(writer, model, quantize, skip=skip, extra=extra or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens, types, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")


def add_tensors(writer: gguf.GGUFWriter, model, quantize, *, skip, extra) -> None:
    config = model.config
    family = BY_TYPE[config.model_type]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in cut_up(experts_together(model.state_dict()), config).items():
        new = gguf_name(name, config.model_type)
        if name in tied or new in skip:
            continue
        values = tensor.float().numpy()
        if family.turned and ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if family.turned and ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        if family.raised and name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        if (
            quantize is not None
            and values.ndim > 1
            and not any(part in new for part in ("gate_inp", "conv1d", "exps.bias"))
        ):
            writer.add_tensor(new, gguf.quantize(values, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(new, np.ascontiguousarray(values))
    for name, values in extra.items():
        writer.add_tensor(name, values)


def experts_together(state):
    """All gates, ups and downs of a layer as tensors of three dimensions, as GGUF files have
    them."""
    found = {}
    turned = any(
        name.endswith("experts.gate_up_proj_bias") for name in state
    )  # gpt-oss: gate and up by turns
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last.endswith("_proj_bias"):
            parts = (
                {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
                if last.startswith("gate")
                else {"down_proj": tensor}
            )
            found |= {f"{stem}.{{}}.{part}.bias": values for part, values in parts.items()}
        elif turned and name.endswith("experts.gate_up_proj"):
            rows = tensor.transpose(1, 2)
            found |= {
                f"{stem}.{{}}.gate_proj.weight": rows[:, ::2],
                f"{stem}.{{}}.up_proj.weight": rows[:, 1::2],
            }
        elif turned and name.endswith("experts.down_proj"):
            found[f"{stem}.{{}}.down_proj.weight"] = tensor.transpose(1, 2)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}{{}}.gate_proj.weight": gate, f"{stem}{{}}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[name.replace("experts.down_proj", "experts.{}.down_proj.weight")] = tensor
        else:
            found[name] = tensor
    return found


def cut_up(state, config):
    """What llama.cpp's converter makes of latent attention and of layers with a state."""
    found = {}
    for name, tensor in state.items():
        stem = name.rpartition(".")[0].rpartition(".")[0]
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            found |= {
                f"{stem}.k_b_proj.weight": keys.transpose(1, 2),
                f"{stem}.v_b_proj.weight": values,
            }
        elif name.endswith("in_proj_qkvz.weight"):
            heads, key = config.linear_num_key_heads, config.linear_key_head_dim
            values = config.linear_num_value_heads // heads * config.linear_value_head_dim
            q, k, v, z = (
                part.flatten(0, 1)
                for part in tensor.view(heads, -1, tensor.shape[-1]).split(
                    [key, key, values, values], 1
                )
            )
            found |= {
                f"{stem}.in_proj_qkv.weight": torch.cat([q, k, v]),
                f"{stem}.in_proj_z.weight": z,
            }
        elif name.endswith("A_log"):
            found[name] = -tensor.exp()
        else:
            found[name] = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    return value_heads_tiled(found, config) if BY_TYPE[config.model_type].tiled else found


def value_heads_tiled(state, config):
    """As llama.cpp's converter has those of Qwen3.5: the first of every key head, then the second
    of every one."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def tiled(tensor, length):
        return tensor.unflatten(0, (keys, -1, length)).transpose(0, 1).flatten(0, 2)

    found = {}
    for name, tensor in state.items():
        if name.endswith(("linear_attn.in_proj_qkv.weight", "conv1d.weight")):
            tensor = torch.cat([tensor[:before], tiled(tensor[before:], size)])
        elif name.endswith("linear_attn.in_proj_z.weight"):
            tensor = tiled(tensor, size)
        elif name.endswith(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
            tensor = tiled(tensor, 1)
        elif name.endswith("linear_attn.out_proj.weight"):
            tensor = tiled(tensor.T, size).T
        found[name] = tensor
    return found


def tiny_model(family: str, *, tied: bool = True, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=265,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
    )
    config = AutoConfig.for_model(family, tie_word_embeddings=tied, **(sizes | options))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in (
        model.parameters()
    ):  # biases start as zeros and norms as ones: neither would tell a mistake
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.1)
    return model

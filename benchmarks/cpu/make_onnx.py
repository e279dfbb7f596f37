"""A folder of ours as the graph that ONNX Runtime runs: the contender of engine_vs_peers.py.

    python benchmarks/cpu/make_onnx.py out/int4 int4.onnx

Llama-like models with int4 weights in groups, symmetric. The graph is the one that ONNX Runtime's
own exporters make: MatMulNBits with x in 8 bits (accuracy_level 4), GroupQueryAttention with rope
inside and its cache in place, norms fused with the residual. The very codes and scales of the
folder are written; the head, which is tied to the embedding, is rounded to 8 bits in groups of 32,
as in the other contenders, and shared with the table's lookup. Needs `onnx` beside flyweight.
"""

from __future__ import annotations

import sys

import numpy
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.config import ModelConfig
from flyweight.models.rope import rope_tables
from flyweight.tensors import IntGroup

HEAD_GROUP = 32
CONTEXT = 2048  # tokens, as in engine_vs_peers.py
MICROSOFT = "com.microsoft"


class Graph:
    def __init__(self, folder: str) -> None:
        self.weights = Checkpoint(folder)
        self.config = ModelConfig.from_dict(self.weights.config)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def constant(self, name: str, value: torch.Tensor | numpy.ndarray) -> str:
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        self.tensors.append(numpy_helper.from_array(numpy.ascontiguousarray(array), name))
        return name

    def add(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **given):
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **given))
        return outputs[0]

    def product(self, x: str, name: str, codes: torch.Tensor, scales: torch.Tensor, **given) -> str:
        """codes [out, groups, bytes of a group]"""
        inputs = [x, self.constant(f"{name}.codes", codes), self.constant(f"{name}.scales", scales)]
        outputs = [f"{name}.out"]
        return self.add("MatMulNBits", inputs, outputs, MICROSOFT, accuracy_level=4, **given)

    def linear(self, x: str, name: str, parts: list[str]) -> str:
        """Siblings as one product, their rows one after the other."""
        tensors = [self.weights.linear(part) for part in parts]
        assert all(isinstance(t, IntGroup) and t.bits == 4 and t.zeros is None for t in tensors)
        size = tensors[0].group_size
        codes = torch.cat([t.integers() for t in tensors]).add(8).to(torch.uint8)
        scales = torch.cat([t.scales for t in tensors]).float()
        pairs = codes.unflatten(1, (-1, size // 2, 2))
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        shape = dict(N=codes.shape[0], K=codes.shape[1], bits=4, block_size=size)
        y = self.product(x, name, packed, scales.flatten(), **shape)
        biases = [f"{part}.bias" for part in parts]
        if self.weights.has(biases[0]):
            bias = torch.cat([self.weights.tensor(bias).float() for bias in biases])
            y = self.add("Add", [y, self.constant(f"{name}.bias", bias)], [f"{name}.biased"])
        return y

    def norm_weight(self, name: str) -> str:
        return self.constant(name, self.weights.tensor(f"{name}.weight").float())

    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding in 8 bits: codes [vocab, groups, 32] and scales [vocab, groups]."""
        values = self.weights.tensor("model.embed_tokens.weight").float()
        pieces = values.unflatten(1, (-1, HEAD_GROUP))
        scales = pieces.abs().amax(-1).clamp(min=1e-12) / 127
        codes = (pieces / scales[..., None]).round() + 128
        return codes.to(torch.uint8), scales

    def embed(self) -> str:
        codes, scales = self.table()
        self.constant("head.codes", codes)
        self.constant("head.scales", scales)
        self.constant("within a group", numpy.array([-1], numpy.int64))
        self.constant("middle", numpy.float32(128))
        self.constant("hidden shape", numpy.array([0, 0, self.config.hidden_size], numpy.int64))
        self.add("Gather", ["head.codes", "tokens"], ["bytes"])
        self.add("Gather", ["head.scales", "tokens"], ["group steps"])
        self.add("Unsqueeze", ["group steps", "within a group"], ["steps"])
        self.add("Cast", ["bytes"], ["numbers"], to=TensorProto.FLOAT)
        self.add("Sub", ["numbers", "middle"], ["centred"])
        self.add("Mul", ["centred", "steps"], ["scaled"])
        return self.add("Reshape", ["scaled", "hidden shape"], ["embedded"])

    def head(self, x: str) -> str:
        config = self.config
        shape = dict(N=config.vocab_size, K=config.hidden_size, bits=8, block_size=HEAD_GROUP)
        inputs = [x, "head.codes", "head.scales"]
        return self.add("MatMulNBits", inputs, ["logits"], MICROSOFT, accuracy_level=4, **shape)

    def layer(self, hidden: str, normed: str, index: int, next_norm: str) -> tuple[str, str]:
        """(hidden, normed) after a layer; its last residual is added by the norm of the next."""
        name = f"model.layers.{index}"
        config = self.config
        names = [f"{name}.self_attn.{one}_proj" for one in "qkv"]
        qkv = self.linear(normed, f"{name}.qkv", names)
        inputs = [qkv, "", "", f"past_key.{index}", f"past_value.{index}", "last", "total"]
        outputs = [f"{name}.mixed", f"key.{index}", f"value.{index}"]
        heads = dict(num_heads=config.heads, kv_num_heads=config.kv_heads)
        mixed = self.add(
            "GroupQueryAttention",
            [*inputs, "cos", "sin"],
            outputs,
            MICROSOFT,
            do_rotary=1,
            scale=config.attention_scale,
            **heads,
        )
        y = self.linear(mixed, f"{name}.o", [f"{name}.self_attn.o_proj"])
        hidden, normed = self.add_normed(hidden, y, f"{name}.post_attention_layernorm")
        gate = self.linear(normed, f"{name}.gate", [f"{name}.mlp.gate_proj"])
        up = self.linear(normed, f"{name}.up", [f"{name}.mlp.up_proj"])
        self.add("Sigmoid", [gate], [f"{name}.sigmoid"])
        self.add("Mul", [gate, f"{name}.sigmoid"], [f"{name}.silu"])
        self.add("Mul", [f"{name}.silu", up], [f"{name}.gated"])
        y = self.linear(f"{name}.gated", f"{name}.down", [f"{name}.mlp.down_proj"])
        return self.add_normed(hidden, y, next_norm)

    def add_normed(self, hidden: str, y: str, norm: str) -> tuple[str, str]:
        inputs = [hidden, y, self.norm_weight(norm)]
        outputs = [f"{norm}.normed", "", "", f"{norm}.sum"]
        kind = "SkipSimplifiedLayerNormalization"
        self.add(kind, inputs, outputs, MICROSOFT, epsilon=self.config.epsilon)
        return f"{norm}.sum", f"{norm}.normed"

    def build(self) -> onnx.ModelProto:
        config = self.config
        assert config.tied_embeddings and not config.qk_norm
        cos, sin = rope_tables(config)
        self.constant("cos", cos[:CONTEXT].float())
        self.constant("sin", sin[:CONTEXT].float())
        hidden = self.embed()
        first = "model.layers.0.input_layernorm"
        inputs = [hidden, self.norm_weight(first)]
        options = dict(epsilon=config.epsilon, axis=-1, stash_type=1)
        normed = self.add("SimplifiedLayerNormalization", inputs, ["normed"], **options)
        for index in range(config.layers):
            last = index == config.layers - 1
            after = "model.norm" if last else f"model.layers.{index + 1}.input_layernorm"
            hidden, normed = self.layer(hidden, normed, index, after)
        self.constant("end", numpy.array([-1], numpy.int64))
        self.head(self.add("Gather", [normed, "end"], ["ends"], axis=1))
        return self.model()

    def model(self) -> onnx.ModelProto:
        config = self.config
        cache = ["batch", config.kv_heads, "room", config.head_dim]
        inputs = [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "count"]),
            helper.make_tensor_value_info("last", TensorProto.INT32, ["batch"]),
            helper.make_tensor_value_info("total", TensorProto.INT32, []),
        ]
        logits = ["batch", 1, config.vocab_size]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits)]
        for index in range(config.layers):
            for side in ("key", "value"):
                for names, past in ((inputs, "past_"), (outputs, "")):
                    name = f"{past}{side}.{index}"
                    names.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, cache))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.tensors)
        operators = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=operators, ir_version=9)


def main() -> None:
    folder, output = sys.argv[1:]
    onnx.save(Graph(folder).build(), output)


if __name__ == "__main__":
    main()

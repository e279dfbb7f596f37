"""Damaged folders through the reader: a FlyweightError or a weight, never a crash, never a huge
allocation.

`FLYWEIGHT_FUZZ=10000` runs as many mutations; the plain suite runs a few hundred. A failure prints
its seed.
"""

import copy
import json
import os
import random
import resource
import warnings

import pytest
import torch
from safetensors.torch import save

from flyweight.checkpoint import Checkpoint, formats
from flyweight.checkpoint.convert import quantized_modules
from flyweight.errors import FlyweightError
from flyweight.tensors import Float8, Int8Channel, IntGroup, Trellis, VectorQuant

ROUNDS = int(os.environ.get("FLYWEIGHT_FUZZ", "400"))
PREFIX = "model.layers.0.mlp.down_proj"
MODELS = [
    (
        "gptq",
        IntGroup.random(
            (16, 64), group_size=32, symmetric=True, act_order=True, dtype=torch.float16
        ),
    ),
    ("gptq_v2", IntGroup.random((16, 64), bits=8, group_size=32, dtype=torch.float16)),
    ("awq", IntGroup.random((16, 64), group_size=32, dtype=torch.float16)),
    ("compressed-tensors", IntGroup.random((16, 64), group_size=32)),
    ("compressed-tensors", IntGroup.random((16, 64), bits=3, group_size=32, symmetric=True)),
    ("compressed-tensors", Int8Channel.random((16, 64))),
    ("compressed-tensors", Float8.random((16, 64))),
    ("fp8", Float8(Float8.random((16, 64)).weight, torch.ones(1, 1), "token")),
    ("trellis", Trellis.random((16, 64))),
    (
        "vptq",
        VectorQuant.random(
            (16, 64), main=16, residual=4, groups=2, outliers=4, outlier_centroids=8, permute=True
        ),
    ),
]
ODD = [
    None,
    -1,
    0,
    1,
    3,
    5,
    2**31,
    2**63,
    10**30,
    -7,
    0.5,
    "",
    "x",
    "4",
    "Linear",
    "re:(",
    "re:.*",
    [],
    {},
    [0],
    [128, 128],
    [1, -1],
    True,
    False,
    {"a": 1},
    "group",
    "channel",
    "block",
    "gptq",
    "awq",
    "pack-quantized",
    "int-quantized",
]
DTYPES = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
]


def base(number):
    name, tensor = MODELS[number]
    form = formats.named(name)
    tensors = {key: part.clone() for key, part in form.write(PREFIX, tensor).items()} | {
        "model.norm.weight": torch.ones(64)
    }
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "quantization_config": form.config({PREFIX: tensor}, ignore=["lm_head"]),
    }
    return tensors, config


def change_config(random, tensors, config):
    """Any value of the config, however deep, replaced or removed."""
    spots = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            spots.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(config)
    for _ in range(random.randint(1, 3)):
        node, key = random.choice(spots)
        if isinstance(node, dict) and random.random() < 0.2:
            node.pop(key, None)
        else:
            node[key] = copy.deepcopy(random.choice(ODD))


def change_tensor(random, tensors, config):
    """A tensor dropped, renamed, of another dtype or shape, or with other bytes."""
    name = random.choice(list(tensors))
    tensor = torch.atleast_1d(tensors.pop(name))
    action = random.choice(["drop", "rename", "dtype", "shape", "values", "pad", "wide"])
    if action == "rename":
        tensors[name + random.choice(["x", ".weight", "_scale"])] = tensor
    elif action == "dtype":
        tensors[name] = torch.zeros(tensor.shape, dtype=random.choice(DTYPES))
    elif action == "shape":
        flat = tensor.flatten()
        tensors[name] = random.choice(
            [
                flat,
                tensor[None],
                tensor[:0],
                tensor[..., :-1].contiguous(),
                tensor.T.contiguous() if tensor.ndim == 2 else flat,
                flat[:1],
                flat[0],
            ]
        )
    elif action == "pad":
        tensors[name] = torch.cat([tensor, tensor])
    elif action == "wide":
        tensors[name] = torch.full_like(tensor, 1).to(torch.int64) * random.choice(
            [2**62, -(2**62), 2**31, -1]
        )
    elif action == "values":
        raw = (
            bytearray(tensor.contiguous().view(torch.uint8).flatten().numpy().tobytes())
            if tensor.numel()
            else bytearray()
        )
        for _ in range(random.randint(1, 8)):
            if raw:
                raw[random.randrange(len(raw))] = random.randrange(256)
        tensors[name] = (
            torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
            if raw
            else tensor
        )


def change_bytes(random, data):
    """The file cut off, its header changed, or bytes flipped anywhere."""
    length = int.from_bytes(data[:8], "little")
    action = random.choice(["cut", "length", "flip", "header", "header", "header"])
    if action == "cut":
        return data[: random.randrange(len(data))]
    if action == "length":
        return (
            random.choice([0, 1, length - 1, length + 1, 2**40, 2**63]).to_bytes(8, "little")
            + data[8:]
        )
    if action == "flip":
        changed = bytearray(data)
        for _ in range(random.randint(1, 6)):
            changed[random.randrange(8 + length if random.random() < 0.7 else len(data))] ^= (
                1 << random.randrange(8)
            )
        return bytes(changed)
    header = json.loads(data[8 : 8 + length])
    entry = header[random.choice([key for key in header if key != "__metadata__"])]
    key = random.choice(["dtype", "shape", "data_offsets"])
    entry[key] = random.choice(
        [["F16"], "F32", "I64", "BOOL", "F8_E5M2", "X9", None]
        if key == "dtype"
        else [[2**40], [2**31, 2**31], [-1, 4], [0], [], None, [1.5], ["a"], [10**25]]
        if key == "shape"
        else [[0, 2**50], [2**50, 0], [-8, 8], [5, 4], [0], None, ["0", "8"]]
    )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize(
    "number", range(len(MODELS)), ids=[f"{i}-{name}" for i, (name, _) in enumerate(MODELS)]
)
def test_damaged_folders_are_clean_errors(number, tmp_path):
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    rounds = -(-ROUNDS // len(MODELS))
    for seed in range(rounds):
        chance = random.Random(f"{number}/{seed}")
        tensors, config = base(number)
        for _ in range(chance.randint(1, 2)):
            chance.choice([change_config, change_tensor])(chance, tensors, config)
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        if chance.random() < 0.4:
            data = change_bytes(chance, data)
        (tmp_path / "model.safetensors").write_bytes(data)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoint = Checkpoint(tmp_path)
                for prefix in {*quantized_modules(checkpoint), PREFIX}:
                    checkpoint.linear(prefix).dequantize()
        except FlyweightError as error:
            assert str(error) and "\n" not in str(error), f"seed {seed}"
            refused += 1
        except Exception as error:
            raise AssertionError(
                f"model {number}, seed {seed}: {type(error).__name__}: {error}"
            ) from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    assert grown < 300, f"{grown:.0f} MB more than before"
    assert refused > rounds / 3  # the mutations do bite

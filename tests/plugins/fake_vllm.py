"""The few names of vLLM that the plug-in touches, for tests without vLLM: a table of kernels, their
base classes and a platform.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType, SimpleNamespace

import torch


class PlatformEnum(Enum):
    CUDA = auto()
    CPU = auto()


@dataclass(frozen=True)
class ScalarType:
    bits: int
    bias: int = 0
    signed: bool = False

    @property
    def size_bits(self):
        return self.bits

    def is_integer(self):
        return True

    def has_bias(self):
        return self.bias != 0


UINT4 = ScalarType(4)
UINT4B8 = ScalarType(4, 8)
UINT8B128 = ScalarType(8, 128)


@dataclass
class LayerConfig:
    """vLLM's MPLinearLayerConfig."""

    partition_weight_shape: tuple[int, int]  # [in, out]
    weight_type: ScalarType = UINT4B8
    act_type: torch.dtype = torch.float32
    group_size: int = 64
    zero_points: bool = False
    out_type: torch.dtype | None = None


class MPLinearKernel:
    def __init__(self, c, w_q_param_name, w_s_param_name, w_zp_param_name=None):
        self.config = c
        self.w_q_name = w_q_param_name
        self.w_s_name = w_s_param_name
        self.w_zp_name = w_zp_param_name

    def _get_weight_params(self, layer):
        names = (self.w_q_name, self.w_s_name, self.w_zp_name or "")
        return tuple(getattr(layer, name, None) for name in names)


class TheirKernel(MPLinearKernel):
    """Takes everything, and marks the layers that it got."""

    @classmethod
    def get_min_capability(cls):
        return 75

    @classmethod
    def can_implement(cls, c):
        return True, None

    def process_weights_after_loading(self, layer):
        layer.theirs = True

    def apply_weights(self, layer, x, bias=None):
        return "theirs"


class ScaledKernel:
    def __init__(self, c, layer_param_names):
        self.config = c
        self.layer_param_names = layer_param_names

    def _get_layer_params(self, layer):
        return tuple(getattr(layer, name, None) for name in self.layer_param_names)


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}


class UnquantizedLinearMethod:
    pass


class LinearBase(torch.nn.Module):
    """A layer, and which rank's it is."""

    def __init__(self, rank=0, ranks=1):
        super().__init__()
        self.tp_rank = rank
        self.tp_size = ranks
        self.bias = None


class ParallelLMHead(torch.nn.Module):
    pass


class RoutedExperts(torch.nn.Module):
    """The experts of a layer, and which rank's; `places`: of each, with expert parallelism."""

    def __init__(self, count, chosen, rank=0, ranks=1, places=None, activation="silu"):
        super().__init__()
        self.moe_config = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.global_num_experts = count
        self.top_k = chosen
        self.activation = SimpleNamespace(value=activation)
        self.expert_map = places
        self.apply_router_weight_on_input = False
        self.ckpt_gate_proj_name = "gate_proj"
        self.ckpt_up_proj_name = "up_proj"
        self.ckpt_down_proj_name = "down_proj"


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe


class SharedExpertsOrder(Enum):
    MK_INTERNAL_OVERLAPPED = 2


def fill_formats(tree):
    layers = "vllm.model_executor.layers"
    registered = {}
    quantization = tree[f"{layers}.quantization"]
    quantization.registered = registered
    quantization.register_quantization_config = lambda name: (
        lambda kind: registered.setdefault(name, kind)
    )
    tree[f"{layers}.quantization.base_config"].QuantizationConfig = QuantizationConfig
    tree[f"{layers}.linear"].LinearBase = LinearBase
    tree[f"{layers}.linear"].LinearMethodBase = object
    tree[f"{layers}.linear"].UnquantizedLinearMethod = UnquantizedLinearMethod
    tree[f"{layers}.vocab_parallel_embedding"].ParallelLMHead = ParallelLMHead
    experts = f"{layers}.fused_moe"
    tree[experts].RoutedExperts = RoutedExperts
    tree[f"{experts}.fused_moe_method_base"].FusedMoEMethodBase = FusedMoEMethodBase
    tree[f"{experts}.runner.shared_experts"].SharedExpertsOrder = SharedExpertsOrder


def install(monkeypatch, version="0.33.0", *, cpu=True):
    """The tree in sys.modules; the module with the tables."""
    tree = {
        name: ModuleType(name)
        for name in (
            "vllm",
            "vllm.logger",
            "vllm.platforms",
            "vllm.model_executor",
            "vllm.model_executor.kernels",
            "vllm.model_executor.kernels.linear",
            "vllm.model_executor.layers",
            "vllm.model_executor.layers.fused_moe",
            "vllm.model_executor.layers.fused_moe.fused_moe_method_base",
            "vllm.model_executor.layers.fused_moe.runner",
            "vllm.model_executor.layers.fused_moe.runner.shared_experts",
            "vllm.model_executor.layers.linear",
            "vllm.model_executor.layers.quantization",
            "vllm.model_executor.layers.quantization.base_config",
            "vllm.model_executor.layers.vocab_parallel_embedding",
        )
    }
    tree["vllm"].__version__ = version
    tree["vllm.logger"].init_logger = logging.getLogger
    tree["vllm.platforms"].PlatformEnum = PlatformEnum
    tree["vllm.platforms"].current_platform = SimpleNamespace(
        is_cpu=lambda: cpu,
        get_device_capability=lambda: None,
        _enum=PlatformEnum.CPU if cpu else PlatformEnum.CUDA,
    )
    linear = tree["vllm.model_executor.kernels.linear"]
    linear.MPLinearKernel = MPLinearKernel
    linear.Int8ScaledMMLinearKernel = ScaledKernel
    linear.FP8ScaledMMLinearKernel = ScaledKernel
    linear._POSSIBLE_KERNELS = {
        PlatformEnum.CUDA: [TheirKernel],
        PlatformEnum.CPU: [TheirKernel],
    }
    linear._POSSIBLE_INT8_KERNELS = {PlatformEnum.CUDA: []}
    linear._POSSIBLE_FP8_KERNELS = {PlatformEnum.CUDA: []}
    fill_formats(tree)
    for name, module in tree.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(tree[parent], last, module)
    for name in ("kernels", "formats", "experts"):  # they hold classes of the tree before
        monkeypatch.delitem(sys.modules, f"flyweight.plugins.vllm.{name}", raising=False)
    return linear

"""Kernels for checkpoints that vLLM reads itself: AWQ, GPTQ and compressed-tensors.

vLLM asks the classes of a table in order, by shape (`can_implement`), creates and loads its own
parameters, and then hands the layer to the class that has said yes
(`process_weights_after_loading`). Ours read the loaded parameters as a QuantTensor, lay that out
once for our kernels, and let go of the originals. Should that fail for one layer, the next class of
the table gets it untouched, and one line says so. A layer is applied by one op (plugins/op.py);
activation and residual stay with vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.platforms import current_platform

from flyweight.errors import UnsupportedError
from flyweight.plugins import layouts, limits
from flyweight.plugins.layer import Taken, let_go, take
from flyweight.plugins.limits import Wanted
from flyweight.tensors import QuantTensor

logger = init_logger("vllm.flyweight")


def told_once(text: str, *values: Any) -> None:
    """vLLM's loggers have `info_once`; those of other trees may not."""
    getattr(logger, "info_once", logger.info)(text, *values)


def decline(wanted: Wanted, reason: str) -> tuple[bool, str]:
    told_once("Flyweight leaves %s to vLLM: %s", wanted.name, reason)
    return False, reason


def capability_suffices(kernel: Any, capability: Any) -> bool:
    return capability is None or kernel.get_min_capability() <= 10 * capability[0] + capability[1]


def unsigned(kind: Any, *, zero_points: bool) -> bool:
    """Codes from 0 on, with stored zero points or the middle for one."""
    return kind.is_integer() and not kind.signed and (zero_points or kind.has_bias())


class Chosen:
    """What all of ours do once vLLM has chosen them: the layer becomes a linear of ours."""

    other: Any = None  # vLLM's kernel, where ours could not take the loaded weight
    taken: Taken

    def take(self, layer: torch.nn.Module, tensor: QuantTensor, *, dtype: torch.dtype) -> None:
        self.taken = take(layer, [tensor], dtype=dtype, device=tensor.device)

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if self.other is not None:
            return self.other.apply_weights(layer, x, bias)
        return self.taken.multiply(layer, x, bias)


class FlyweightLinearKernel(Chosen, MPLinearKernel):
    """Integers of 4 or 8 bits, 16-bit activations."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # `limits` says more about a GPU that is too old than a number can

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        inputs, outputs = c.partition_weight_shape
        bits = c.weight_type.size_bits
        wanted = Wanted(
            limits.MIXED.get(bits, f"int{bits}"), outputs, inputs, c.group_size, c.act_type
        )
        if bits not in limits.MIXED or not unsigned(c.weight_type, zero_points=c.zero_points):
            return decline(wanted, f"weights of type {c.weight_type}")
        if not c.act_type.is_floating_point or c.act_type.itemsize == 1:
            return decline(wanted, f"activations in {c.act_type}")
        if c.out_type not in (None, c.act_type):
            return decline(wanted, f"results in {c.out_type}")
        if getattr(c, "has_g_idx", False):
            return decline(wanted, "inputs in another order (act-order)")
        if c.group_size > 0 and inputs % c.group_size:
            return decline(wanted, f"a group of {c.group_size} crosses the border of two ranks")
        device = None if current_platform.is_cpu() else limits.current_gpu()
        reason = limits.unsupported_reason(wanted, device)
        return (True, None) if reason is None else decline(wanted, reason)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        c = self.config
        bits = c.weight_type.size_bits
        codes, scales, zeros = self._get_weight_params(layer)[:3]
        try:
            tensor = layouts.integers(
                codes,
                scales,
                zeros if c.zero_points else None,
                bits=bits,
                group=c.group_size,
                inputs=c.partition_weight_shape[0],
            )
            self.take(layer, tensor, dtype=c.act_type)
        except Exception as error:  # whatever it is: vLLM has a kernel for this layer, too
            self.other = self._next_kernel(error)
            self.other.process_weights_after_loading(layer)
            return
        let_go(layer, self.w_q_name, self.w_s_name, self.w_zp_name)

    def _next_kernel(self, error: Exception) -> MPLinearKernel:
        from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS

        capability = current_platform.get_device_capability()
        for kernel in _POSSIBLE_KERNELS[current_platform._enum]:
            if kernel is type(self) or not capability_suffices(kernel, capability):
                continue
            if kernel.can_implement(self.config)[0]:
                logger.warning("Flyweight leaves a layer to %s: %s", kernel.__name__, error)
                return kernel(self.config, self.w_q_name, self.w_s_name, self.w_zp_name)
        raise error


class Scaled(Chosen):
    """Kernels whose class vLLM chooses before it knows the shape: a weight that ours does not take
    goes to the next class when it is loaded.
    """

    table: str = ""  # of vLLM's kernels of this kind
    config: Any
    layer_param_names: Any

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        device = None if current_platform.is_cpu() else limits.current_gpu()
        if device is None:
            return False, "a GPU is needed"
        reason = limits._gpu_reason(device)
        return reason is None, reason

    def read(self, layer: Any) -> tuple[Wanted, QuantTensor]:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        try:
            wanted, tensor = self.read(layer)
            reason = limits.unsupported_reason(wanted, limits.current_gpu())
            if reason is not None:
                raise UnsupportedError(f"{wanted.name}: {reason}")
            self.take(layer, tensor, dtype=wanted.dtype)
        except Exception as error:
            self.other = self._next_kernel(error)
            self.other.process_weights_after_loading(layer)
            return
        let_go(layer, *self.layer_param_names[:2])

    def _next_kernel(self, error: Exception) -> Any:
        from vllm.model_executor.kernels import linear

        for kernel in getattr(linear, self.table)[current_platform._enum]:
            if kernel is type(self) or not kernel.is_supported()[0]:
                continue
            if kernel.can_implement(self.config)[0]:
                told_once("Flyweight leaves a layer to %s: %s", kernel.__name__, error)
                return kernel(self.config, self.layer_param_names)
        raise error


class FlyweightInt8Kernel(Scaled, Int8ScaledMMLinearKernel):
    """int8 weights and activations, rounded by rows at run time or by one scale known before."""

    table = "_POSSIBLE_INT8_KERNELS"

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if not c.input_symmetric:
            return False, "activations with a zero point"
        return True, None

    def read(self, layer: Any) -> tuple[Wanted, QuantTensor]:
        weight, scales, input_scale = self._get_layer_params(layer)[:3]
        widths = layer.logical_widths
        if not self.config.is_channelwise and len(widths) > 1:  # a scale for each part of it
            scales = scales.data.repeat_interleave(
                torch.tensor(widths, device=scales.device), output_size=sum(widths)
            )
        static = input_scale.data.max().view(1) if self.config.is_static_input_scheme else None
        tensor = layouts.channels(weight.data, scales.data, static)
        return Wanted("w8a8", *tensor.matrix_shape, dtype=layer.params_dtype), tensor


class FlyweightFp8Kernel(Scaled, FP8ScaledMMLinearKernel):
    """float8 weights and activations."""

    table = "_POSSIBLE_FP8_KERNELS"

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        scale = c.activation_quant_key.scale
        weight = c.weight_quant_key.scale.group_shape
        if not (scale.static or scale.group_shape.is_per_token()):
            return False, "activations with one scale for all rows, made at run time"
        if scale.static and not scale.group_shape.is_per_tensor():
            return False, "activations with several scales known before"
        if not (weight.is_per_tensor() or weight.is_per_channel() or weight.is_per_token()):
            return False, "weights with scales for blocks"
        return True, None

    def read(self, layer: Any) -> tuple[Wanted, QuantTensor]:
        weight, scales, input_scale, bound = self._get_layer_params(layer)
        if bound is not None:
            raise UnsupportedError("activations with an upper bound of their scale")
        static = input_scale.data.max().view(1) if input_scale is not None else None
        tensor = layouts.float8(weight.data.t(), scales.data, static)  # vLLM has turned it round
        return Wanted("fp8", *tensor.matrix_shape, dtype=self.config.input_dtype), tensor

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        raise AssertionError("apply_weights does it all")

"""vLLM: in process (its `LLM`, stepped here so that every token has a time) or as its own server.

A preset becomes a folder with nothing but a config.json, which vLLM fills with its dummy loader.
That leaves integer tensors as they were allocated, mostly zeros, on which matrix units draw less
power and so run faster at a GPU's power limit: in process a loader of ours makes them random.
`gptq` finds no quantized tensors and runs unquantized: that scheme is not offered.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from flyweight import garbage
from flyweight.backends.base import WARM_OUTPUT, EngineOptions, Limits, need
from flyweight.backends.servers import Server, flags
from flyweight.clock import Answer, Chunk, Run, clock
from flyweight.errors import UnsupportedError
from flyweight.plugins import vllm as plugin


def weights(bits: int, kind: str = "int", *, strategy: str = "group") -> dict[str, Any]:
    spec = dict(num_bits=bits, type=kind, symmetric=True, strategy=strategy, dynamic=False)
    return dict(spec, group_size=128) if strategy == "group" else spec


def compressed(form: str, weight: dict[str, Any], activation: str | None = None) -> dict[str, Any]:
    inputs = activation and dict(
        num_bits=8, type=activation, symmetric=True, strategy="token", dynamic=True
    )
    group = dict(
        targets=["Linear"], weights=weight, input_activations=inputs, output_activations=None
    )
    return dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": group},
    )


SCHEMES: dict[str, dict[str, Any] | None] = {  # scheme of a preset → quantization_config
    "bf16": None,
    "fp16": None,
    "fp32": None,
    "int4": dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
    "int4-sym": compressed("pack-quantized", weights(4)),
    "w8a16": compressed("pack-quantized", weights(8)),
    "w8a8": compressed("int-quantized", weights(8, strategy="channel"), "int"),
    "fp8": compressed("float-quantized", weights(8, "float", strategy="channel"), "float"),
    "fp8-block": dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]
    ),
    # experts alone, as gpt-oss's own files
    "mxfp4": dict(
        quant_method="mxfp4",
        modules_to_not_convert=[
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    ),
}


def model_folder(model: str) -> tuple[str, dict[str, Any]]:
    """(what vLLM is given, more arguments for it)"""
    if not model.startswith("preset:"):
        from flyweight.checkpoint.hub import resolve

        return str(resolve(model, dtype="float16")), {}
    from flyweight.models.presets import FLOATS, preset_config

    _, preset, *scheme = model.split(":")
    name = scheme[0] if scheme else "bf16"
    if name not in SCHEMES:
        raise UnsupportedError(
            f"vLLM has no dummy weights of scheme {name!r}; known: {', '.join(SCHEMES)}"
        )
    config = preset_config(preset)
    if (quantization := SCHEMES[name]) is not None:
        config["quantization_config"] = quantization | (
            {"group_size": group_of(config)} if name == "int4" else {}
        )
    wide = name == "int4" and config["model_type"] in NO_FLOAT16
    config["dtype"] = (
        {"int4": "float16", **FLOATS}.get(name, config["dtype"]) if not wide else config["dtype"]
    )
    config["torch_dtype"] = config["dtype"]
    folder = tempfile.mkdtemp(prefix="flyweight-vllm-")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder, {"load_format": "dummy", "skip_tokenizer_init": True}


# which vLLM refuses to run in it; AWQ's own files are in float16
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def group_of(config: dict[str, Any]) -> int:
    """Inputs that share a scale: vLLM's AWQ knows one number for all linears."""
    widths = [config[name] for name in WIDTHS if config.get(name)]
    return next(group for group in (128, 64, 32) if all(width % group == 0 for width in widths))


def arguments(options: EngineOptions, limits: Limits) -> dict[str, Any]:
    """A pass is no larger than all that can be asked at once: vLLM tries its largest one at the
    start, and beyond that reads positions that do not exist.
    """
    given = dict(dtype=options.dtype, quantization=options.quantization)
    return (
        dict(
            max_model_len=limits.context,
            max_num_seqs=limits.batch,
            tensor_parallel_size=options.tensor_parallel,
            enable_prefix_caching=False,
            max_num_batched_tokens=min(16640, limits.batch * limits.context),
            **{name: value for name, value in given.items() if value is not None},
        )
        | options.extra
    )


# names of tensors of integers end so
CODES = ("qweight", "qzeros", "weight_packed", "weight_zero_point", "weight")
RANDOM = "flyweight-random"  # vLLM's load_format of a preset, in process


def make_codes_random(model: Any) -> None:
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(CODES) and not (parameter.is_floating_point() or parameter.is_complex()):
            limits = torch.iinfo(parameter.dtype)
            parameter.data.random_(limits.min, limits.max)


def register_random_loader() -> None:
    """vLLM's dummy loader leaves words of codes as they were allocated, mostly zeros. They are made
    random before a kernel lays them out: of zeros ours would find that two of four are none, and
    choose the kernels for that.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            make_codes_random(model)

    register_model_loader(RANDOM)(RandomLoader)


def set_parts(parts: str | None) -> None:
    """What of our plug-in processes register that are started from now on."""
    if parts is not None:
        os.environ[plugin.SETTING] = parts
    elif os.environ.get(plugin.SETTING) == "off":
        del os.environ[plugin.SETTING]


class Vllm:
    name: str = "vllm"
    sized: ClassVar[bool] = False
    warm_output: ClassVar[int | None] = WARM_OUTPUT
    temperature: float = 0
    # of our plug-in, for all processes; None: as the user has set it
    parts: ClassVar[str | None] = "off"

    def __init__(self, model: str, options: EngineOptions):
        set_parts(self.parts)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        several = options.tensor_parallel > 1
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if several else "0")
        if several:  # to ask them which kernels they have, we send them a function
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        need("vllm")
        self.model, self.options = model, options
        self.kv_dtype: str | None = None
        self.inner: Any = None
        self.linear_kernels: dict[str, int] | None = None  # class → linears of one GPU

    def start(self, limits: Limits) -> None:
        if self.inner is not None:
            return
        import vllm

        self.plug_in()
        folder, more = model_folder(self.model)
        alone = self.options.tensor_parallel == 1  # else the weights are in other processes
        if more and alone:
            register_random_loader()
            more |= {"load_format": RANDOM}
        self.inner = vllm.LLM(
            model=folder, disable_log_stats=True, **more, **arguments(self.options, limits)
        )
        self.linear_kernels = self.inner.apply_model(plugin.kernels_of)[0]
        self.kv_dtype = str(self.inner.llm_engine.model_config.dtype).removeprefix("torch.")
        self.tokens = 0

    def plug_in(self) -> None:
        """Nothing of ours: rows of this backend are what vLLM does by itself."""
        plugin.withdraw()

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        """What `LLM.generate` does, with a look at the clock after every step."""
        from vllm import SamplingParams

        engine = self.inner.llm_engine
        choice = {"temperature": self.temperature} | self.options.sampling
        params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, **choice)
        names = [f"{self.tokens}-{i}" for i in range(len(prompts))]
        self.tokens += 1
        chunks: dict[str, list[Chunk]] = {name: [] for name in names}
        ids: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        begin = clock()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            outputs, now = engine.step(), clock()
            for one in outputs:
                found, name = tuple(one.outputs[0].token_ids), external(one.request_id, ids)
                if len(found) > len(ids[name]):
                    chunks[name].append((now, len(found) - len(ids[name])))
                    ids[name] = found
        end = clock()
        return Run(
            begin, end, tuple(Answer(begin, tuple(chunks[name]), ids[name]) for name in names)
        )

    def memory(self) -> dict[str, float | None]:
        import torch

        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {"device_gb": (total - free) / 1e9}

    def stop(self) -> None:
        self.inner = None
        garbage.release()


def external(request: str, known: dict[str, Any]) -> str:
    """Newer versions put a suffix of their own behind the id they were given."""
    return request if request in known else request.rsplit("-", 1)[0]


class VllmPlugin(Vllm):
    """The same engine with our kernels and formats in it."""

    name = "vllm-plugin"
    parts: ClassVar[str | None] = None

    def plug_in(self) -> None:
        """Also where this package is not installed and vLLM finds no entry point of it."""
        plugin.register()


class VllmServer(Server):
    name = "vllm-server"
    package = "vllm"

    def __init__(self, model: str, options: EngineOptions):
        set_parts("off")
        super().__init__(model, options)

    def command(self, folder: str, limits: Limits, port: int) -> list[str]:
        return serve_command(folder, self.options, limits=limits, port=port)


def serve_command(
    model: str, options: EngineOptions, *, limits: Limits | None = None, port: int = 8000
) -> list[str]:
    """vLLM's server on the same folder with the right arguments; without limits it
    chooses its own.
    """
    folder, more = model_folder(model)
    chosen = (
        arguments(options, limits)
        if limits
        else {"tensor_parallel_size": options.tensor_parallel, **options.extra}
        | {
            name: value
            for name, value in (("dtype", options.dtype), ("quantization", options.quantization))
            if value
        }
    )
    given = {name.replace("_", "-"): value for name, value in (more | chosen).items()}
    if given.pop("enable-prefix-caching", None) is False:
        given["no-enable-prefix-caching"] = True
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        *flags(given | {"port": port}),
    ]

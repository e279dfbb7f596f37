"""Hugging Face transformers: `generate`, eager or with a static cache and torch.compile, any
quantization it can load.

Token times come from a stopping criterion that never stops: it is called after every step. A preset
is the same random weights that the native engine makes of that name, so that the two can be
compared token by token; a quantized one is written as AWQ or GPTQ files, which transformers loads
with whatever package and kernel it finds, or says what it lacks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from flyweight import garbage
from flyweight.backends.base import EngineOptions, Limits, need
from flyweight.backends.memory import Meter
from flyweight.clock import Answer, Run, clock
from flyweight.device import pick_device
from flyweight.errors import MissingPackageError, OptionError, UnsupportedError

FILES = {"int4": "awq", "int4-sym": "gptq", "w8a16": "gptq"}  # scheme of a preset → file format


class Transformers:
    name: str = "transformers"
    sized: ClassVar[bool] = True  # its cache grows with the text
    # nothing is compiled, and a token takes as long as ten of other engines
    warm_output: ClassVar[int | None] = 16
    compiled: ClassVar[bool] = False

    def __init__(self, model: str, options: EngineOptions):
        need("transformers")
        if options.quantization:
            raise OptionError(
                "transformers takes the quantization from the model; --quantization "
                "is for vllm, sglang"
            )
        if options.sampling:
            raise UnsupportedError(
                "transformers is measured with greedy tokens only; leave out "
                "--sampling, or its backend"
            )
        self.model, self.options = model, options
        self.kv_dtype: str | None = None
        self.inner: Any = None

    def start(self, limits: Limits) -> None:
        self.limits = limits
        if self.inner is not None:
            return
        import torch

        from flyweight.engine.loading import choose_dtype

        self.device = pick_device(self.options.device)
        self.meter = Meter(self.device)
        self.meter.begin()
        self.inner = self._load(
            lambda config: choose_dtype(self.options.dtype, config, self.device)
        ).eval()
        self.inner.generation_config.eos_token_id = None
        self.kv_dtype = str(self.inner.dtype).removeprefix("torch.")
        self.wait = (
            (lambda: torch.cuda.synchronize(self.device))
            if self.device.type == "cuda"
            else (lambda: None)
        )
        self.meter.end()
        garbage.settle()

    def _load(self, dtype: Any) -> Any:
        if not self.model.startswith("preset:"):
            from flyweight.checkpoint.hub import resolve

            return self._from_folder(resolve(self.model, dtype="float16"), dtype)  # of a GGUF file
        from flyweight.models.presets import FLOATS

        if (scheme := scheme_of(self.model)) in FLOATS:
            return self._from_numbers(scheme, dtype)
        return self._from_files(scheme, dtype)

    def _from_numbers(self, scheme: str, dtype: Any) -> Any:
        """A preset that is not quantized: its numbers go into a model made by its configuration."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from flyweight.models.presets import PresetWeights

        weights = PresetWeights(self.model.split(":")[1], scheme, device=self.device)
        settings = {name: value for name, value in weights.config.items() if name != "model_type"}
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(weights.config["model_type"], **settings),
                dtype=dtype(weights.config),
            )
        fill(model, weights)
        return model

    def _from_files(self, scheme: str, dtype: Any) -> Any:
        """A quantized preset goes through the files that transformers has a loader for."""
        from flyweight.models.random_folder import write_preset

        if scheme not in FILES:
            raise UnsupportedError(
                f"transformers is given no {scheme} files here: they are written of "
                f"{', '.join(FILES)}"
            )
        with tempfile.TemporaryDirectory() as place:
            # one small layer first: what a loader lacks, it says of that, too
            tiny = write_preset(f"preset:tiny:{scheme}", Path(place, "tiny"), format=FILES[scheme])
            self._from_folder(tiny, dtype)
            folder = Path(place, "model")
            write_preset(self.model, folder, format=FILES[scheme], device=str(self.device))
            return self._from_folder(folder, dtype)

    def _from_folder(self, folder: Path, dtype: Any) -> Any:
        from transformers import AutoModelForCausalLM

        from flyweight.checkpoint.folder import read_json

        try:
            return AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype(read_json(folder / "config.json")),
                device_map=self.device,
                **self.options.extra,
            )
        except ImportError as error:
            raise MissingPackageError(
                f"transformers cannot load {self.model} without another package "
                f"({str(error).strip().splitlines()[0]})"
            ) from error

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        """Prompts of one length: there is nothing to pad."""
        import torch

        steps: list[float] = []

        def watch(tokens: Any, scores: Any, **_: object) -> Any:
            self.wait()
            steps.append(clock())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        cache = {"cache_implementation": "static"} if self.compiled else {}
        self.meter.begin()
        begin = clock()
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        with torch.inference_mode():
            found = self.inner.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output,
                min_new_tokens=output,
                pad_token_id=0,
                stopping_criteria=[watch],
                **cache,
            )
        answers = found[:, ids.shape[1] :].tolist()
        end = clock()
        self.meter.end()
        chunks = tuple((when, 1) for when in steps)
        return Run(begin, end, tuple(Answer(begin, chunks, tuple(tokens)) for tokens in answers))

    def memory(self) -> dict[str, float | None]:
        parts = {
            tensor.data_ptr(): tensor.nbytes
            for tensor in [*self.inner.parameters(), *self.inner.buffers()]
        }
        return self.meter.fields() | {"weights_gb": sum(parts.values()) / 1e9}

    def stop(self) -> None:
        if self.inner is not None:
            self.inner = None
            garbage.release()
            self.meter.forget()


class TransformersCompiled(Transformers):
    name = "transformers-compiled"
    warm_output = None  # the length of the static cache is compiled in
    compiled = True


def scheme_of(preset: str) -> str:
    _, _, *scheme = preset.split(":")
    return scheme[0] if scheme else "bf16"


def fill(model: Any, weights: Any) -> None:
    """Every parameter from the source of that name, tied ones once."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name))

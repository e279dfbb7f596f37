"""From a model to a smaller model folder: what `flyweight quantize` and `flyweight.quantize` do.

Blocks are made one by one into `.OUT.work` (see calibrate.py), then assembled in the file format that most engines
read. OUT appears whole or not at all. Everything needed to make it again is in OUT/flyweight.json, which has no dates
or durations in it: the same command gives the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight import __version__
from flyweight.checkpoint import formats
from flyweight.checkpoint.formats.base import dense_of
from flyweight.checkpoint.hub import resolve
from flyweight.checkpoint.reader import Checkpoint, read_json
from flyweight.checkpoint.writer import CheckpointWriter, recover, write_json
from flyweight.device import pick_device
from flyweight.errors import OptionError, ResourceError
from flyweight.kernels.dispatch import decoder_ops
from flyweight.models.config import ModelConfig
from flyweight.models.moe import ROUTER, SHARED_GATE, members
from flyweight.models.presets import PresetWeights
from flyweight.models.rope import rope_tables
from flyweight.quant import recipe as recipes
from flyweight.quant.cache import Budget
from flyweight.quant.calibrate import FEWEST_TOKENS, Listener, Loop, block_name, memory_errors, reproducible, tuned_name
from flyweight.quant.calibration import BUILT_IN, Samples, draw_samples, read_text
from flyweight.quant.grid import fit_group_size
from flyweight.quant.identity import newest, weights_digest
from flyweight.quant.recipe import Recipe
from flyweight.quant.solve import solve_group
from flyweight.quant.statistics import Statistics, layer_error
from flyweight.quant.store import BlockStore, FinishedBlock
from flyweight.quant.subject import encode
from flyweight.tensors import QuantTensor

NOTE = "flyweight.json"
SHARD_BYTES = 1 << 30  # the host holds a shard twice while it is written


@dataclass(frozen=True)
class Summary:
    """What came out. `layers` has the relative output error and the bits of every linear."""

    output: Path
    scheme: str
    format: str
    bits_per_weight: float  # of the quantized linears, scales and books included
    bytes_before: int
    bytes_after: int
    layers: dict[str, dict[str, float]]
    seconds: float
    tokens: int
    peak_gpu_gb: float = 0.0
    finished: bool = True
    notes: tuple[str, ...] = field(default=())

    @property
    def mean_error(self) -> float:
        return sum(layer["error"] for layer in self.layers.values()) / max(len(self.layers), 1)

    @property
    def worst(self) -> tuple[str, float]:
        name = max(self.layers, key=lambda key: self.layers[key]["error"])
        return name, self.layers[name]["error"]


def quantize(model: str | Path, scheme: str = "gptq-int4", output: str | Path = "", *, recipe: Recipe | str | Path | None = None,
             calibration: str | Samples = BUILT_IN, samples: int | None = None, length: int | None = None, seed: int = 0,
             resume: bool = False, overwrite: bool = False, format: str | None = None, device: str | None = None,
             dtype: str | None = None, batch: int | None = None, cache_gb: float = 4.0, blocks: int | None = None,
             listen: Listener = lambda event: None) -> Summary:
    """Quantize `model` by a named scheme (or a recipe of one's own) into the folder `output`.

    `calibration` is a text (see `read_text`) to draw `samples` windows of `length` tokens from, or the windows themselves.
    `blocks` stops after so many decoder blocks, to time a model; nothing is written then but the finished blocks.
    """
    started = time.perf_counter()
    if not output:
        raise OptionError("quantize needs an output folder: -o OUT")
    form = formats.named(format) if format else None  # an unknown name must not show after an hour of calibration
    place = pick_device(device)
    chosen = recipe if isinstance(recipe, Recipe) else recipes.load(Path(recipe)) if recipe else recipes.find(scheme)
    job = Job(model, chosen, Path(output).absolute(), device=place, dtype=dtype, seed=seed)
    on_gpu = place.type == "cuda"
    text = job.samples(calibration, samples or (128 if on_gpu else 16), length or (2048 if on_gpu else 512))
    fingerprint = job.fingerprint(text, format)
    recover(job.output)  # now: what an interrupted run has left would otherwise show after hours
    if resume and (done := job.already_finished(fingerprint)) is not None:
        return done
    if job.output.is_file():
        raise OptionError(f"{job.output} is a file; choose another name for the folder")
    if job.output.exists() and not overwrite and any(job.output.iterdir()):
        raise OptionError(f"{job.output} exists already; pass --overwrite or choose another folder")
    store = BlockStore(job.output, fingerprint, resume=resume, files=getattr(job.source, "files", ()))
    written = False
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    try:
        with reproducible(fast=job.dtype != torch.float32):
            budget = Budget(device_bytes=(3 << 30) if on_gpu else 0, host_bytes=int(cache_gb * 2**30))
            finished = job.make(store, text, form, budget=budget, batch=batch or (8 if on_gpu else 1), blocks=blocks,
                                listen=listen)
            complete = len(finished) > job.config.layers
            if complete:
                name = format or formats.default_of(tensor for part in finished for tensor in part.linears.values())
                job.assemble(store, finished, formats.named(name), fingerprint, overwrite=overwrite)
                written = True
            else:
                name = "unfinished"
    except ResourceError as error:
        if "--resume" in str(error):
            raise
        raise ResourceError(f"{error}; finished blocks are kept: run again with --resume") from error
    finally:
        store.close(remove=written)
    peak = torch.cuda.max_memory_allocated(place) / 1e9 if on_gpu else 0.0
    return job.summarize(finished, name, seconds=time.perf_counter() - started, tokens=0 if text is None else text.tokens.numel(),
                         peak=peak, complete=complete)


class Job:
    """One model, one recipe, one output."""

    def __init__(self, model: str | Path, recipe: Recipe, output: Path, *, device: torch.device, dtype: str | None,
                 seed: int) -> None:
        self.model, self.output, self.device, self.seed = str(model), output, device, seed
        if self.model.startswith("preset:"):
            self.source: Any = PresetWeights(self.model.removeprefix("preset:"), device=device)
        else:
            self.source = Checkpoint(resolve(model))
        self.config = ModelConfig.from_dict(self.source.config)
        if dtype not in (None, "float32", "float16", "bfloat16"):
            raise OptionError(f"--dtype is float32, float16 or bfloat16, not {dtype!r}")
        self.stored = self.source.tensor("model.norm.weight").dtype
        # Without a GPU only float32 is fast.
        self.dtype = getattr(torch, dtype) if dtype else torch.float32 if device.type == "cpu" else self.stored
        moe = self.config.moe
        middle = [self.config.intermediate_size] if moe is None or moe.dense_layers else []
        widths = sorted({self.config.hidden_size, self.config.heads * self.config.head_dim, *middle,
                         *([width for _, width in members(moe)] if moe else [])})
        self.recipe = recipe.with_group_size(lambda size: size if size == -1 else fit_group_size(size, widths))

    def samples(self, source: str | Samples, count: int, length: int) -> Samples | None:
        if not self.recipe.calibrated:
            return None
        if isinstance(source, Samples):
            return source
        length = min(length, self.config.context_length)
        if isinstance(self.source, PresetWeights):  # random weights: any tokens will do
            generator = torch.Generator().manual_seed(self.seed)
            return Samples(torch.randint(self.config.vocab_size, (count, length), generator=generator), "random", self.seed)
        text = read_text(source)
        if not text.strip():
            raise OptionError(f"--calibration {source}: the text is empty")
        ids, bos = encode(self.source.tokenizer(), text)
        return draw_samples(ids, count=count, length=length, seed=self.seed, source=source, bos=bos)

    def fingerprint(self, samples: Samples | None, format: str | None) -> dict[str, Any]:
        """What the output depends on. The file name alone says nothing of a model: sizes and a sample of bytes do."""
        return {"flyweight": __version__, "model": self.model, "weights": weights_digest(self.source),
                "recipe": self.recipe.to_dict(), "calibration": None if samples is None else samples.facts(), "seed": self.seed,
                "format": format, "device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}

    def already_finished(self, fingerprint: dict[str, Any]) -> Summary | None:
        """A run that was cut off after its last rename has nothing left to do but to clean up."""
        facts = read_json(self.output / NOTE) if (self.output / NOTE).exists() else {}
        if any(facts.get(key) != value for key, value in fingerprint.items()):
            return None
        if newest(getattr(self.source, "files", ())) > (self.output / NOTE).stat().st_mtime_ns:
            return None  # written since: a digest of slices may not show what has changed
        BlockStore(self.output, fingerprint, resume=False).close(remove=True)
        after = Checkpoint(self.output).nbytes
        return Summary(self.output, self.recipe.name, facts["written_as"], facts["bits_per_weight"], self.source.nbytes, after,
                       facts["layers"], 0.0, 0, notes=("nothing was left to do",))

    # -- making -----------------------------------------------------------------------------------------------

    def make(self, store: BlockStore, samples: Samples | None, form: formats.Format | None, *, budget: Budget, batch: int,
             blocks: int | None, listen: Listener) -> list[FinishedBlock]:
        """All blocks, and the head as the last entry unless `blocks` stops before."""

        def accept(name: str, tensor: QuantTensor) -> None:  # what cannot be written shows in the first block, not after the last
            dense = dense_of(tensor)
            (form or formats.named(formats.default_for(dense))).expect(name, dense)

        loop = Loop(self.source, self.recipe, store, config=self.config, tables=rope_tables(self.config, self.device),
                    ops=decoder_ops(self.device), device=self.device, dtype=self.dtype, stored=self.stored, seed=self.seed,
                    budget=budget, accept=accept, listen=listen)
        embedding = self.source.tensor("model.embed_tokens.weight").cpu() if samples is not None else None
        if samples is not None and embedding is not None:
            loop.begin(samples.tokens, embedding, batch=batch)
        count = min(self.config.layers, blocks or self.config.layers)
        done = loop.run(count)
        if count == self.config.layers:
            if self.recipe.tune_steps and samples is not None and embedding is not None:
                with memory_errors("tuning"):
                    loop.tune(samples.tokens, embedding)
            with memory_errors("lm_head"):
                done.append(self.head(loop, store))
        loop.hidden.close()
        if loop.original is not None:
            loop.original.close()
        return done

    def head(self, loop: Loop, store: BlockStore) -> FinishedBlock:
        """lm_head, quantized only where the recipe names it; the last block's output through the final norm is its input."""
        layer = self.recipe.layer_for("lm_head")
        if layer.solver == "keep":
            return FinishedBlock()
        if not store.has("head"):
            name = "model.embed_tokens" if self.config.tied_embeddings else "lm_head"
            weight = self.source.linear(name).to(self.device).dequantize()
            statistics = None
            if layer.needs_statistics:
                statistics = Statistics(weight.shape[1], self.device)
                norm = self.source.tensor("model.norm.weight").to(self.device, self.dtype)
                for hidden in loop.hidden:
                    statistics.add(loop.ops.rms_norm(hidden, norm, self.config.epsilon))
                statistics.check("lm_head")
            tensor = solve_group([weight], [layer], statistics, dtype=self.stored, seed=self.seed)[0]
            error = layer_error(weight, tensor.dequantize(), statistics.hessian if statistics else None)
            report = {"layers": {"lm_head": {"error": error, "bits_per_weight": tensor.bits_per_weight}}}
            store.save("head", FinishedBlock({"lm_head": tensor}, {}, report))
        return store.load("head")

    # -- writing ----------------------------------------------------------------------------------------------

    def assemble(self, store: BlockStore, finished: list[FinishedBlock], form: formats.Format, fingerprint: dict[str, Any], *,
                 overwrite: bool) -> None:
        config = dict(self.source.config)
        layers = self.layer_tensors(finished)
        quantized = {name: tensor for name, tensor in layers.items() if tensor.kind != "plain"}
        ignore = [name for name in [*layers, *self.routers(), "lm_head"] if name not in quantized]
        config["quantization_config"] = form.config(quantized, ignore=dict.fromkeys(ignore))
        if "lm_head" in quantized:
            config["tie_word_embeddings"] = False
        if self.recipe.embeddings != "keep":
            config.pop("torch_dtype", None)
            config["dtype"] = self.recipe.embeddings
        with CheckpointWriter(self.output, SHARD_BYTES, overwrite=overwrite) as writer:
            for name, tensor in self.tensors(store, finished, form):
                writer.add(name, tensor)
            writer.flush()
            tuned = {"tuned": store.load(tuned_name(0)).report} if self.recipe.tune_steps else {}
            write_json(writer.staging / NOTE, fingerprint | tuned | {
                "written_as": form.name, "bits_per_weight": bits_per_weight(quantized.values()), "layers": reports(finished),
                "transforms": {f"model.layers.{i}": {key: part.report[key] for key in ("scales", "learned") if key in part.report}
                               for i, part in enumerate(finished[:-1])}})
            writer.finish(config, source=getattr(self.source, "folder", None))

    def tensors(self, store: BlockStore, finished: list[FinishedBlock], form: formats.Format) -> Iterable[tuple[str, Tensor]]:
        """Every tensor of the new model in the order of the old one's parts: embedding, blocks, final norm, head."""
        other = None if self.recipe.embeddings == "keep" else getattr(torch, self.recipe.embeddings)

        def kept(tensor: Tensor) -> Tensor:
            return tensor if other is None else tensor.to(other)

        yield "model.embed_tokens.weight", kept(self.source.tensor("model.embed_tokens.weight"))
        for index in range(self.config.layers):
            name = tuned_name(index) if self.recipe.tune_steps else block_name(index)
            block, prefix = store.load(name), f"model.layers.{index}."
            for name, tensor in block.linears.items():
                yield from form.write(prefix + name, tensor).items()
            for name, value in block.tensors.items():
                yield prefix + name, kept(value)
        yield "model.norm.weight", kept(self.source.tensor("model.norm.weight"))
        if finished[-1].linears:
            yield from form.write("lm_head", store.load("head").linears["lm_head"]).items()
        elif not self.config.tied_embeddings:
            yield "lm_head.weight", kept(self.source.tensor("lm_head.weight"))

    def layer_tensors(self, finished: list[FinishedBlock]) -> dict[str, QuantTensor]:
        found: dict[str, QuantTensor] = {}
        for index, part in enumerate(finished):
            prefix = f"model.layers.{index}." if index < self.config.layers else ""
            found |= {prefix + name: tensor for name, tensor in part.linears.items()}
        return found

    def routers(self) -> list[str]:
        """Linears to other engines, and never quantized."""
        if self.config.moe is None:
            return []
        gates = [ROUTER, *([SHARED_GATE] if self.config.moe.shared_intermediate_size else [])]
        return [f"model.layers.{index}.{gate.removesuffix('.weight')}" for index in range(self.config.layers)
                if index not in self.config.moe.dense_layers for gate in gates]

    def summarize(self, finished: list[FinishedBlock], form: str, *, seconds: float, tokens: int, peak: float,
                  complete: bool) -> Summary:
        quantized = [t for t in self.layer_tensors(finished).values() if t.kind != "plain"]
        before = getattr(self.source, "nbytes", 0)
        after = Checkpoint(self.output).nbytes if complete else 0
        layers = reports(finished)
        return Summary(self.output, self.recipe.name, form, bits_per_weight(quantized), before, after, layers, seconds,
                       tokens, peak, complete, notes=expert_notes(layers))


def reports(finished: list[FinishedBlock]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for index, part in enumerate(finished):
        for name, figures in part.report.get("layers", {}).items():
            found[name if name == "lm_head" else f"model.layers.{index}.{name}"] = figures
    return found


def expert_notes(layers: dict[str, dict[str, float]]) -> tuple[str, ...]:
    """How many experts' linears had too few tokens to be calibrated on."""
    seen = [figures["tokens"] for figures in layers.values() if "tokens" in figures]
    few = sum(tokens < FEWEST_TOKENS for tokens in seen)
    text = f"{few} of {len(seen)} expert linears saw fewer than {FEWEST_TOKENS} calibration tokens and were rounded to nearest"
    return (text,) if few else ()


def bits_per_weight(tensors: Iterable[QuantTensor]) -> float:
    bits = weights = 0
    for tensor in tensors:
        bits += 8 * tensor.nbytes
        weights += tensor.shape[0] * tensor.shape[1]
    return bits / max(weights, 1)

"""From a model to a smaller model folder: what `flyweight quantize` and `flyweight.quantize` do.

Blocks are made one by one into `.OUT.work` (see calibrate.py), then assembled in the file format
that most engines read. OUT appears whole or not at all. Everything needed to make it again is in
OUT/flyweight.json, which has no dates or durations in it: the same command gives the same bytes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from flyweight import __version__
from flyweight.checkpoint import formats
from flyweight.checkpoint.folder import read_json
from flyweight.checkpoint.formats.base import dense_of
from flyweight.checkpoint.hub import resolve
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.target import check_target, place_of
from flyweight.checkpoint.writer import recover
from flyweight.device import pick_device
from flyweight.engine.memory import available_memory
from flyweight.errors import OptionError, ResourceError
from flyweight.kernels.linear.fused import Norm
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import HEAD, check_tied
from flyweight.models.layers import EMBEDDING, check_shape
from flyweight.models.presets import PresetWeights
from flyweight.models.standard import plan_of
from flyweight.quant import sharding
from flyweight.quant.assemble import NOTE, Assembly
from flyweight.quant.calibrate import Loop
from flyweight.quant.calibration import Samples, draw_samples, read_text
from flyweight.quant.grid import fit_group_size
from flyweight.quant.guards import memory_errors, reproducible
from flyweight.quant.identity import newest, weights_digest
from flyweight.quant.options import Options, Setting
from flyweight.quant.own_text import with_own_text
from flyweight.quant.recipe import Recipe
from flyweight.quant.rotated import Rotated, can_rotate
from flyweight.quant.solve import solve_group
from flyweight.quant.statistics import Statistics, layer_error
from flyweight.quant.store import BlockStore, FinishedBlock
from flyweight.quant.subject import tokens_of
from flyweight.quant.summary import (
    Summary,
    bits_per_weight,
    expert_notes,
    layer_figures,
    layer_tensors,
)
from flyweight.quant.tune import HELD, HELD_MOVING
from flyweight.tensors import Plain, QuantTensor


def quantize(
    model: str | Path,
    scheme: str = "gptq-int4",
    output: str | Path = "",
    options: Options | None = None,
    **changes: Any,
) -> Summary:
    """Quantize `model` by a named scheme (or a recipe of one's own) into the folder `output`.

    Everything else is a field of `Options`, given as such or one by one: `quantize("m", output="o",
    samples=64)`.
    """
    started = time.perf_counter()
    options = (options or Options()).changed(changes)
    if not output:
        raise OptionError("quantize needs an output folder: -o OUT")
    if options.format:
        formats.named(options.format)  # an unknown name must not show after an hour of calibration
    job = Job(model, options.chosen_recipe(scheme), place_of(output), options)
    job.check_tuning()
    samples = job.samples()
    fingerprint = job.fingerprint(samples)
    recover(job.output)  # now: what an interrupted run has left would otherwise show after hours
    if options.resume and (done := job.already_finished(fingerprint)) is not None:
        return done
    job.check_output()
    job.check_source()
    files = getattr(job.source, "files", ())
    store = BlockStore(job.output, fingerprint, resume=options.resume, files=files)
    on_gpu = job.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(job.device)
    form = None
    try:
        with reproducible(fast=job.dtype != torch.float32):
            finished = job.make(store, samples)
            if len(finished) > job.config.layers:
                form = job.assemble(store, finished, fingerprint)
    except ResourceError as error:
        if "--resume" in str(error):
            raise
        raise ResourceError(
            f"{error}; finished blocks are kept: run again with --resume"
        ) from error
    finally:
        store.close(remove=form is not None)
    layers = layer_figures(finished)
    tensors = [tensor for tensor in layer_tensors(finished).values() if tensor.kind != "plain"]
    return Summary(
        output=job.output,
        scheme=job.recipe.name,
        format=form or "unfinished",
        bits_per_weight=bits_per_weight(tensors),
        bytes_before=getattr(job.source, "nbytes", 0),
        bytes_after=Checkpoint(job.output).nbytes if form else 0,
        layers=layers,
        seconds=time.perf_counter() - started,
        tokens=0 if samples is None else samples.tokens.numel(),
        peak_gpu_gb=torch.cuda.max_memory_allocated(job.device) / 1e9 if on_gpu else 0.0,
        finished=form is not None,
        notes=expert_notes(layers),
    )


class Job:
    """One model, one recipe, one output."""

    def __init__(self, model: str | Path, recipe: Recipe, output: Path, options: Options) -> None:
        self.model = str(model)
        self.output = output
        self.options = options
        self.device = pick_device(options.device)
        if self.model.startswith("preset:"):
            preset = self.model.removeprefix("preset:")
            self.original: Any = PresetWeights(preset, device=self.device)
        else:
            self.original = Checkpoint(resolve(model))
        self.source = self.rotated() if recipe.rotate else self.original
        self.config = ModelConfig.from_dict(self.source.config)
        self.stored = self.source.tensor("model.norm.weight").dtype
        self.dtype = self.stored
        if options.dtype:
            self.dtype = getattr(torch, options.dtype)
        elif self.device.type == "cpu":
            self.dtype = torch.float32  # without a GPU only float32 is fast
        widths = sharding.linear_widths(self.config, options.shards)
        self.recipe = recipe.with_last_block(self.config.layers - 1).with_group_size(
            lambda size: size if size == -1 else fit_group_size(size, widths)
        )
        sharding.check_pruning(self.config, self.recipe)
        sharding.check_vectors(self.config, self.recipe, options.shards)

    def rotated(self) -> Any:
        """The source in another basis, where its layers allow it."""
        if not can_rotate(ModelConfig.from_dict(self.original.config)):
            return self.original
        return Rotated(self.original, device=self.device)

    def check_source(self) -> None:
        """What does not fit the config, or has no place in the result, shows before the work; of
        the layers it shows as each is read.
        """
        if not isinstance(self.original, Checkpoint):
            return  # random weights are made to fit
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        embedding = self.original.tensor(f"{EMBEDDING}.weight")
        check_shape(EMBEDDING, embedding.shape, vocabulary)
        if ModelConfig.from_dict(self.original.config).tied_embeddings:
            check_tied(self.original, Plain(embedding))
        else:
            check_shape(HEAD, self.original.tensor(f"{HEAD}.weight").shape, vocabulary)
        layers = (f"model.layers.{index}.*" for index in range(self.config.layers))
        self.original.check_used(layers)

    def check_tuning(self) -> None:
        """That the whole model has room where it is tuned shows before its blocks are solved."""
        recipe = self.recipe
        if not recipe.tune_steps:
            return
        groups = [group for layer in plan_of(self.config).layers for group in layer.groups]
        weights = sum(sum(group.sizes) * group.in_features for group in groups)
        on_gpu = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else available_memory()
        needed = weights * (HELD_MOVING if recipe.tune_rounding else HELD)
        if needed <= free:
            return
        less = f", or a recipe with tune_rounding = 0 ({weights * HELD / 1e9:.1f} GB)"
        raise ResourceError(
            f"{recipe.name} tunes the whole model, which takes {needed / 1e9:.1f} GB of memory; "
            f"{free / 1e9:.1f} GB of {self.device} are free. Take another device"
            f"{less if recipe.tune_rounding and weights * HELD <= free else ''}, or tune_steps = 0"
        )

    def check_output(self) -> None:
        source = getattr(self.source, "folder", None)
        check_target(self.output, overwrite=self.options.overwrite, source=source)

    def samples(self) -> Samples | None:
        """Calibration windows, or None where the recipe needs no text."""
        if not self.recipe.calibrated:
            return None
        samples = self.text_samples()
        share, tuning = self.recipe.own_shares
        if not share + tuning or isinstance(self.original, PresetWeights):
            return samples
        folder = self.source.folder
        with memory_errors("own text"):
            return with_own_text(samples, folder, share=share, device=self.device, tuning=tuning)

    def text_samples(self) -> Samples:
        """Windows of the calibration text, or those that were given."""
        source = self.options.calibration
        seed = self.options.seed
        if isinstance(source, Samples):
            return source
        count = self.options.sample_count(self.device)
        length = min(self.options.sample_length(self.device), self.config.context_length)
        if isinstance(self.original, PresetWeights):  # random weights: any tokens will do
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(self.config.vocab_size, (count, length), generator=generator)
            return Samples(tokens, "random", seed)
        text = read_text(source)
        if not text.strip():
            raise OptionError(f"--calibration {source}: the text is empty")
        ids, bos = tokens_of(self.source, text)
        return draw_samples(ids, count=count, length=length, seed=seed, source=source, bos=bos)

    def fingerprint(self, samples: Samples | None) -> dict[str, Any]:
        """What the output depends on. The file name alone says nothing of a model: sizes and a
        sample of bytes do.
        """
        return {
            "flyweight": __version__,
            "model": self.model,
            "weights": weights_digest(self.source),
            "recipe": self.recipe.to_dict(),
            "calibration": None if samples is None else samples.facts(),
            "seed": self.options.seed,
            "format": self.options.format,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def already_finished(self, fingerprint: dict[str, Any]) -> Summary | None:
        """A run that was cut off after its last rename has nothing left to do but to clean up."""
        facts = read_json(self.output / NOTE) if (self.output / NOTE).exists() else {}
        if any(facts.get(key) != value for key, value in fingerprint.items()):
            return None
        if newest(getattr(self.source, "files", ())) > (self.output / NOTE).stat().st_mtime_ns:
            return None  # written since: a digest of slices may not show what has changed
        BlockStore(self.output, fingerprint, resume=False).close(remove=True)
        return Summary(
            output=self.output,
            scheme=self.recipe.name,
            format=facts["written_as"],
            bits_per_weight=facts["bits_per_weight"],
            bytes_before=self.source.nbytes,
            bytes_after=Checkpoint(self.output).nbytes,
            layers=facts["layers"],
            seconds=0.0,
            tokens=0,
            notes=("nothing was left to do",),
        )

    def make(self, store: BlockStore, samples: Samples | None) -> list[FinishedBlock]:
        """All blocks, and the head as the last entry unless `blocks` stops before."""
        setting = Setting(
            config=self.config,
            device=self.device,
            dtype=self.dtype,
            stored=self.stored,
            seed=self.options.seed,
            budget=self.options.budget(self.device),
            listen=self.options.listen,
        )
        loop = Loop(self.source, self.recipe, store, setting, self.accept)
        embedding = None
        if samples is not None:
            embedding = self.source.tensor("model.embed_tokens.weight").cpu()
            batch = self.options.batch_size(self.device)
            loop.begin(samples.tokens, embedding, batch=batch, tuning=samples.tuning)
        count = min(self.config.layers, self.options.blocks or self.config.layers)
        done = loop.run(count)
        if count == self.config.layers:
            if self.recipe.tune_steps and samples is not None and embedding is not None:
                with memory_errors("tuning"):
                    loop.tune(samples.tokens, embedding)
            with memory_errors("lm_head"):
                done.append(self.head(loop, store))
        loop.close()
        return done

    def accept(self, name: str, tensor: QuantTensor) -> None:
        """What cannot be written shows in the first block, not after the last."""
        dense = dense_of(tensor)
        form = formats.named(self.options.format or formats.default_for(dense))
        form.expect(name, dense)

    def head(self, loop: Loop, store: BlockStore) -> FinishedBlock:
        """lm_head, quantized only where the recipe names it; the last block's output through the
        final norm is its input.
        """
        layer = self.recipe.layer_for("lm_head")
        if layer.solver == "keep":
            return FinishedBlock()
        if not store.has("head"):
            name = "model.embed_tokens" if self.config.tied_embeddings else "lm_head"
            weight = self.source.linear(name).to(self.device).dequantize()
            statistics = None
            if layer.needs_statistics:
                statistics = self.head_statistics(loop, weight.shape[1])
            solved = solve_group(
                [weight], [layer], statistics, dtype=self.stored, seed=self.options.seed
            )
            tensor = solved[0]
            error = layer_error(
                weight, tensor.dequantize(), statistics.hessian if statistics else None
            )
            figures = {"error": error, "bits_per_weight": tensor.bits_per_weight}
            report = {"layers": {"lm_head": figures}}
            store.save("head", FinishedBlock({"lm_head": tensor}, {}, report))
        return store.load("head")

    def head_statistics(self, loop: Loop, columns: int) -> Statistics:
        statistics = Statistics(columns, self.device)
        weight = self.source.tensor("model.norm.weight").to(self.device, self.dtype)
        norm = Norm(weight, self.config.epsilon, plan_of(self.config).norm.plus_one)
        for hidden in loop.hidden:
            statistics.add(loop.ops.normalize(hidden, norm))
        statistics.check("lm_head")
        return statistics

    def assemble(
        self, store: BlockStore, finished: list[FinishedBlock], fingerprint: dict[str, Any]
    ) -> str:
        """Write the model; returns the name of its file format."""
        tensors = (tensor for part in finished for tensor in part.linears.values())
        name = self.options.format or formats.default_of(tensors)
        assembly = Assembly(self.source, self.config, self.recipe, store, finished)
        overwrite = self.options.overwrite
        assembly.write(self.output, formats.named(name), fingerprint, overwrite=overwrite)
        return name

"""A whole decoder: embedding, layers, final norm and head, loaded from any checkpoint of a known
family.

Each layer loads alone (`layer.Block`), so that a quantizer can keep just one in memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import Batch, KVStorage
from flyweight.errors import CheckpointError, OptionError
from flyweight.kernels.dispatch import decoder_ops
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.prompts import fits_beside
from flyweight.kernels.offload import Offload, spread
from flyweight.kernels.workspace import Workspace
from flyweight.models.adapters import Adapters, link
from flyweight.models.attention import Paged, Plans, Whole
from flyweight.models.config import ModelConfig
from flyweight.models.kv_scheme import KVScheme
from flyweight.models.layer import Block, Stage
from flyweight.models.layers import (
    EMBEDDING,
    Embedding,
    Linear,
    Weights,
    check_shape,
    load_tensor,
    read_embedding,
)
from flyweight.models.moe import Experts
from flyweight.models.plan import ROPE, Group
from flyweight.models.rope import all_tables, long_border, long_rows
from flyweight.models.standard import plan_of
from flyweight.models.taps import Taps
from flyweight.tensors import Plain, QuantTensor

HEAD = "lm_head"
LOGIT_MULTIPLE = 16


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding,
        blocks: list[Block],
        norm: Norm,
        head: Linear,
        device: torch.device,
        dtype: torch.dtype,
        offload: Offload | None = None,
    ):
        self.adapters: Adapters | None = None
        self.taps: Taps | None = None  # hidden states that a drafting head wants
        self.kept_bytes = 0  # of 8-bit codes for prompts, beside the weights
        self.config = config
        self.offload = offload
        self.device = device
        self.dtype = dtype
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.kv_scheme = KVScheme()  # of whole sequences; caches know their own
        self.ropes = all_tables(config, device)
        self.ops = decoder_ops(device)
        self.workspace = Workspace(device, shared_device=True)

    @classmethod
    def load(
        cls,
        weights: Weights,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        exact: bool = False,
        layers: Iterable[int] | None = None,
        offload: int = 0,
        adapters: Adapters | None = None,
    ) -> Decoder:
        """`layers` loads those blocks alone (none: embedding, final norm and head), and leaves out
        the check for extras. `offload`: so many blocks lie in the host's memory.
        """
        config = ModelConfig.from_dict(weights.config)
        device = torch.device(device)
        plan = plan_of(config)
        vocab = config.vocab_size
        hidden = config.hidden_size
        stored = read_embedding(weights).to(device)
        check_shape(EMBEDDING, stored.shape, (vocab, hidden))
        if isinstance(stored, Plain):
            stored = Plain(stored.weight.to(dtype))
        host = Offload(device) if offload else None
        moved = spread(min(offload, config.layers), config.layers)
        blocks = []
        for index in range(config.layers) if layers is None else layers:
            block = Block.load(
                weights, config, index, exact=exact, device=device, dtype=dtype, adapters=adapters
            )
            if block.latent is not None and layers is None:
                block.latent.prepare()
            if host is not None and index in moved:
                host.take(index, block, sum(one.nbytes for one in block.linears.values()))
            blocks.append(block)
        if host is not None:
            host.finish()
        weight = load_tensor(
            weights, f"{plan.norm.name}.weight", (hidden,), device=device, dtype=dtype
        )
        if config.tied_embeddings:
            check_tied(weights, stored)
        if vocab % 8 and device.type == "cuda":
            head = _filled_head(weights, stored, config, device=device, dtype=dtype, exact=exact)
        elif config.tied_embeddings:
            head = Linear([stored], names=(HEAD,), dtype=dtype, exact=exact)
        else:
            group = Group(HEAD, plan.norm.name, (HEAD,), (vocab,), hidden)
            head = Linear.load(weights, "", group, device=device, dtype=dtype, exact=exact)
        if layers is None:
            weights.check_used()
        decoder = cls(
            config,
            embedding=Embedding(
                stored.weight if isinstance(stored, Plain) else stored,
                plan.embedding_scale,
                dtype=dtype,
                head=head if config.tied_embeddings else None,
            ),
            blocks=blocks,
            norm=Norm(weight, config.epsilon, plan.norm.plus_one),
            head=head,
            device=device,
            dtype=dtype,
            offload=host,
        )
        decoder.adapters = adapters
        link([linear.delta for block in blocks for linear in block.linears.values()])
        return decoder

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin of a model with one rope table."""
        return self.ropes[ROPE]

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values, unless somebody asks for another."""
        return self.dtype

    def narrow_prompts(self, kind: str) -> None:
        """From now on passes of many rows multiply 8-bit codes, where weights have 4 bits."""
        linears = [linear for block in self.blocks for linear in block.linears.values()]
        taken = [linear.fused.narrow_prompts(kind) for linear in linears]
        nbytes = sum(linear.fused.prompt_bytes for linear in linears)
        self.kept_bytes = nbytes if fits_beside(nbytes, self.device) else 0
        if self.kept_bytes:
            for linear in linears:
                linear.fused.keep_prompts()
        if not any(taken):
            raise OptionError(
                f"prompt_dtype {kind} is for models with 4-bit weights, on a CPU or a Hopper GPU "
                f"(H100, H200), and nothing here could be multiplied so: leave it out"
            )

    @property
    def nbytes(self) -> int:
        """Of all weights as laid out for the kernels; a head tied to the embedding counts where it
        has a copy of its own.
        """
        linears = [linear for block in self.blocks for linear in block.linears.values()]
        shared = self.config.tied_embeddings and self.device.type == "cpu"
        head = 0 if shared else self.head.nbytes
        latents = sum(block.latent.nbytes for block in self.blocks if block.latent is not None)
        weights = sum(linear.nbytes for linear in linears) + self.kept_bytes
        return weights + latents + self.embedding.nbytes + head

    @property
    def step_nbytes(self) -> int:
        """Of the weights that a decode step of one sequence reads; see flyweight/limit.py."""
        moe = self.config.moe
        share = moe.experts_per_token / moe.experts if moe else 1.0
        total = float(self.head.nbytes)
        for block in self.blocks:
            latent = block.latent
            for group in block.groups:
                linear = block.linears[group.name]
                inside = latent is not None and linear is latent.kv_b
                nbytes = latent.nbytes if latent is not None and inside else linear.nbytes
                total += nbytes * (share if group.routed else 1.0)
            if isinstance(block.mlp, Experts):
                total += block.mlp.router_nbytes
        return int(total)

    @property
    def state_nbytes(self) -> int:
        """What a decode step of one sequence reads of the states of its layers, and writes back."""
        states = (block.delta.shape.state for block in self.blocks if block.delta is not None)
        return 2 * sum(state.nbytes(self.dtype) for state in states)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Kernels in here take this model's buffers, and its device: a loaded model is of one
        engine, and of one stream.
        """
        guarded = self.device.type == "cuda" and not gpu.is_pretended()
        with (
            self.workspace,
            torch.cuda.device(self.device) if guarded else contextlib.nullcontext(),
        ):
            yield

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[KVStorage]) -> Tensor:
        """Float32 logits [outputs, vocab] of the tokens in batch.output_rows; caches by layer."""
        rows = None if len(batch.output_rows) == len(batch.tokens) else batch.output_rows
        if long_border(self.config) is not None:
            batch = self._long_prompts(batch)
        stage = Paged(batch, caches, self.ropes, self.ops)
        return self.logits(self._run(self.embedding(batch.tokens), stage, rows))

    def _long_prompts(self, batch: Batch) -> Batch:
        """Positions of sequences beyond the trained length as rows of the tables' second half, for
        callers who have not seen to it: the engine has, since a chunk may be shorter than that.
        """
        rows = [long_rows(self.config, length) for length in batch.kv_lengths]
        counts = [end - begin for begin, end in itertools.pairwise(batch.query_starts)]
        device = batch.positions.device
        added = torch.tensor(rows).repeat_interleave(torch.tensor(counts)).to(device)
        within = batch.positions < self.config.context_length
        return replace(batch, positions=batch.positions + added * within)

    @torch.inference_mode()
    def hidden(
        self, batch: Batch, caches: Sequence[KVStorage], plans: Plans | None = None
    ) -> Tensor:
        """What the last block gives for every token. `plans`: made before, or to be kept for the
        next batch of this shape.
        """
        return self._run(
            self.embedding(batch.tokens), Paged(batch, caches, self.ropes, self.ops, plans)
        )

    @torch.inference_mode()
    def forward_whole(self, tokens: Tensor) -> Tensor:
        """Float32 logits [batch, tokens, vocab] of whole sequences [batch, tokens], without a
        cache.
        """
        return self.logits(self._run(self.embedding(tokens), self.whole(tokens.shape[1])))

    def whole(self, tokens: int) -> Whole:
        """The stage of cacheless sequences of so many tokens, for `Block.forward`."""
        if tokens > self.config.context_length:
            raise ValueError(
                f"{tokens} tokens are more than the context of {self.config.context_length}"
            )
        first = long_rows(self.config, tokens)
        return Whole(tokens, self.ropes, self.ops, scheme=self.kv_scheme, first=first)

    def _run(self, hidden: Tensor, stage: Stage, rows: Tensor | None = None) -> Tensor:
        """Of the last block only `rows` need more than their keys and values: a prompt has one
        token to go on from.
        """
        taps = self.taps
        with self.active():
            if taps is None:
                for block in self.in_turn():
                    wanted = rows if block is self.blocks[-1] else None
                    hidden = block.run(hidden, stage, rows=wanted, in_place=True)
                return hidden
            taps.begin(hidden)
            for block in self.in_turn():
                taps.take(block.index, hidden)
                hidden = block.run(hidden, stage, in_place=True)
            taps.take(len(self.blocks), hidden)
            return hidden if rows is None else hidden[rows]

    def in_turn(self) -> Iterable[Block]:
        """The blocks one by one, each when its weights are on the device."""
        return self.blocks if self.offload is None else self.offload.in_turn(self.blocks)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of what the last block gives, float32."""
        # chunks of prompts alone: nobody wants logits, and kernels cannot be launched for no rows
        if not hidden.numel():
            return torch.empty(*hidden.shape[:-1], self.config.vocab_size, device=hidden.device)
        with self.active():
            logits = self.head(self.ops.normalize(hidden, self.norm))
            return self.shape_logits(logits[..., : self.config.vocab_size].float())

    def shape_logits(self, logits: Tensor) -> Tensor:
        """The plan's scale and soft-cap, if it has any."""
        return plan_of(self.config).shape_logits(logits)


def _filled_head(
    weights: Weights,
    embedding: QuantTensor,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
) -> Linear:
    """The head in 16 bits, its outputs filled up to a multiple that a GPU's kernels read at once;
    the rows added are of zeros and −∞, so that nobody ever chooses them.
    """
    stored = embedding if config.tied_embeddings else weights.linear(HEAD)
    weight = stored.to(device).dequantize(dtype)
    missing = -len(weight) % LOGIT_MULTIPLE
    weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    bias = torch.zeros(len(weight), dtype=dtype, device=device)
    bias[-missing:] = -torch.inf
    return Linear([Plain(weight)], bias, names=(HEAD,), dtype=dtype, exact=exact)


def check_tied(weights: Weights, embedding: QuantTensor) -> None:
    """Some tools write the tied head a second time: harmless where it is the same."""
    if not weights.has(f"{HEAD}.weight"):
        return
    table = embedding.dequantize()
    if not torch.equal(weights.tensor(f"{HEAD}.weight").to(table), table):
        raise CheckpointError(
            "lm_head.weight differs from model.embed_tokens.weight, but config.json ties them"
        )

"""LLM: a model, loaded and ready to answer. `generate` for many prompts, `chat` and `stream` for
one at a time.

Here is what has to be there before the first answer, in the order in which it is made: weights, who
guesses, the plan of the memory, the engine. prompts.py then reads prompts, and driver.py drives the
engine's steps.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from flyweight import shortage
from flyweight.device import pick_device
from flyweight.engine.core import Engine
from flyweight.engine.driver import Driver
from flyweight.engine.keywords import checked, takes_fields_of
from flyweight.engine.limits import Limits
from flyweight.engine.loading import (
    choose_dtype,
    end_ids,
    load_decoder,
    open_model,
    sampling_defaults,
)
from flyweight.engine.memory import CacheShape, Memory
from flyweight.engine.memory_plan import plan_for
from flyweight.engine.pace import Pace
from flyweight.engine.prompts import (
    Prepared,
    Prompt,
    PromptReader,
    adapter_of_each,
    as_prompts,
    check_served,
    params_of_each,
)
from flyweight.engine.request import Chunk, Output, Request, SamplingOptions, SamplingParams
from flyweight.engine.speculation.head import HeadDrafter
from flyweight.engine.speculation.loading import (
    Target,
    load_drafter,
    load_head,
    refuse_speculation,
)
from flyweight.engine.speculation.option import Speculation
from flyweight.engine.speculation.plain_step import try_step
from flyweight.engine.speculation.speculator import speculator_of
from flyweight.engine.stream import Stream
from flyweight.engine.tokenizer import Message
from flyweight.engine.warm_up import capture_all, first_requests
from flyweight.engine.work import long_prompts
from flyweight.errors import OptionError
from flyweight.kernels.linear.prompts import check_prompt_dtype
from flyweight.models.adapters import Adapters
from flyweight.models.balanced_keys import balance_keys
from flyweight.models.config import ModelConfig
from flyweight.models.kv_scheme import choose_kv_scheme
from flyweight.models.narrow_books import narrow_books
from flyweight.models.narrow_head import narrow_head
from flyweight.models.standard import plan_of

if TYPE_CHECKING:
    from flyweight.models.decoder import Decoder

# of prompts, between two steps of a server's answers on a GPU: a pass of fewer takes hardly less
# for each token, and one of more is a gap that readers notice (docs/serve.md has what was measured)
TURN_TOKENS = 512


@checked("option of LLM", OptionError)
class LLM:
    """`LLM("smollm2-135m").generate("Once upon a time")[0].text`

    model              a folder, a name or hub id, or `preset:NAME[:SCHEME]` (random weights, no
                       tokenizer: token ids only)
    dtype              float32 on a CPU and the config's own type on a GPU, unless given
    memory_fraction    of the memory for the KV cache: 0.25 of what is free on a CPU, 0.9 of the
                       device on a GPU
    prompt_tokens_beside  of prompts, most tokens in one step beside answers that wait for it, or
                       between two steps of answers: fewer make the gaps between tokens smaller, and
                       first tokens later. None: 4,096, of a server in turns 512; CPU: 512, and of a
                       server fewer, by the time they take
    turns              a server's answers and prompts on a GPU in steps of their own, in turns
                       (scheduler.py); None: where passes are captured and nobody guesses
    exact              no kernels that compute anything but the product with the dequantized weight
    decoder            the model's own, where another LLM has loaded it already
    head               int8 or int4: the head in so few bits, rounded as it is loaded; None: as the
                       folder asks for, else as stored
    vptq_books         int8: codebooks of VPTQ in bytes where a kernel reads them; None, stored: as
                       the files have them
    native             on a CPU: kernels in C that read weights in the bits of their file, whole
                       steps in one call; None: where they can (`executor` says which runs, and
                       why), False: torch, True: nothing else
    offload            on a GPU: so many layers lie in the host's memory and come over the bus for
                       each step
    speculate          ngram, model:NAME, eagle3:NAME, mtp or auto: guess tokens and check several
                       in one step (docs/speculation.md); off
    kv_dtype           of the KV cache: fp8 or int8 (half the memory), model (the type of
                       activations), or auto: as the model's own files ask for, which is what
                       happens if nothing is given
    prompt_dtype       int8 or fp8: steps of more than 256 tokens multiply 4-bit weights in 8 bits,
                       faster and less exactly
    adapters           LoRA adapters of PEFT, {name: folder}: `generate(..., adapter=name)` answers
                       with one
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_model_len: int | None = None,
        memory_fraction: float | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        blocks: int | None = None,
        prefix_cache: bool = True,
        seed: int = 0,
        exact: bool = False,
        decoder: Decoder | None = None,
        head: str | None = None,
        vptq_books: str | None = None,
        native: bool | None = None,
        offload: int = 0,
        prompt_tokens_beside: int | None = None,
        turns: bool | None = None,
        kv_dtype: str | None = None,
        speculate: str | None = None,
        prompt_dtype: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ):
        self.name = str(model)
        wanted = Speculation.parse(speculate)
        self.device = pick_device(device)
        refuse_together(
            wanted, self.device, prompt_dtype=prompt_dtype, offload=offload, turns=turns
        )
        self.weights, self.tokenizer = open_model(self.name, self.device)
        self.dtype = choose_dtype(dtype, self.weights.config, self.device)
        config = ModelConfig.from_dict(self.weights.config)
        if config.state_layers:
            refuse_speculation(wanted, self.name)
        scheme = choose_kv_scheme(kv_dtype, self.weights, config)
        self.decoder: Any = decoder
        self.executor = "the decoder that was given"
        if decoder is None:
            served = narrow_head(self.weights, head)
            if not adapters:  # what they add to queries and keys is not balanced
                served = balance_keys(served, scheme)
            served = narrow_books(served, vptq_books, self.device)
            with shortage.told(f"{model}: its weights do not fit"):
                self.decoder, self.executor = load_decoder(
                    served,
                    self.device,
                    self.dtype,
                    exact=exact,
                    native=native,
                    offload=offload,
                    adapters=self._read_adapters(adapters),
                    eight_bit_prompts=prompt_dtype is not None,
                    tapped=wanted.is_head,
                )
        if prompt_dtype is not None:
            self.decoder.narrow_prompts(prompt_dtype)
        self.config = self.decoder.config
        limits = Limits.of(
            self.config,
            self.device.type,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prompt_tokens_beside=prompt_tokens_beside,
            block_size=block_size,
        )
        generation = getattr(self.weights, "generation_config", {})
        self.sampling_defaults = sampling_defaults(generation)
        cached = self.decoder.cache_dtype if dtype is None else self.dtype
        shape = CacheShape.of(self.config, cached, scheme.format, scheme.scales)
        guessing = load_head(wanted, self.weights, self.decoder) if wanted.is_head else None
        shape = replace(shape, beside=guessing.token_bytes if guessing is not None else 0)
        self.kv_dtype = shape.dtype_name
        drafter = load_drafter(
            wanted,
            Target(self.name, self.tokenizer, self.config.vocab_size, self.device, self.dtype),
            context=limits.context,
            sequences=limits.sequences,
            block_size=block_size,
        )
        self._memory = plan_for(
            self.decoder,
            shape,
            limits,
            name=self.name,
            device=self.device,
            drafter=drafter,
            guessed=drafter is not None or guessing is not None,
            blocks=blocks,
            memory_fraction=memory_fraction,
        )
        self.engine = Engine(
            self.decoder,
            shape,
            vocabulary=self.config.vocab_size,
            device=self.device,
            max_model_len=limits.context,
            blocks=self._memory.kv_tokens // block_size,
            block_size=block_size,
            max_num_seqs=limits.sequences,
            prefix_cache=prefix_cache,
            seed=seed,
            max_num_batched_tokens=limits.tokens,
            prompt_tokens_beside=limits.prompt_tokens,
            decode=self.tokenizer.decode if self.tokenizer else None,
            end_ids=end_ids(self.config.eos_ids, generation, self.tokenizer),
            state_slots=self._memory.state_slots,
        )
        self.beside = prompt_tokens_beside
        self.turns = turns
        self.guesses = wanted.kind != "off"
        self._prepare_prompts()
        if guessing is not None:
            assert wanted.guesses is not None
            drafter = HeadDrafter(
                guessing,
                self.engine.runner,
                guesses=wanted.guesses,
                varied=wanted.while_it_pays,
            )
        if drafter is not None:
            self.engine.speculator = speculator_of(
                drafter,
                wanted.guesses,
                while_it_pays=wanted.while_it_pays,
                try_out=functools.partial(try_step, self.engine.runner),
            )
        self.driver = Driver(self.engine)

    def _prepare_prompts(self) -> None:
        """Who reads prompts, and what the engine has to know of this model's."""
        engine = self.engine
        engine.may_grow = engine.max_model_len < self.config.context_length
        self.prompts = PromptReader(
            self.name,
            self.tokenizer,
            self.sampling_defaults,
            context=engine.max_model_len,
            may_grow=engine.may_grow,
        )
        engine.answers.independent_tokens = (
            self.tokenizer is not None and self.tokenizer.bytes is not None
        )
        engine.scheduler.long_prompts = long_prompts(self.config)

    def pace_prompts(self) -> None:
        """From now on readers wait between tokens: on a CPU, where passes are slow, prompts beside
        their answers are bounded by time, unless by a given number; on a GPU they take turns with
        answers.
        """
        scheduler = self.engine.scheduler
        if self.engine.runner.passes is not None:
            self.engine.runner.passes.patient = True
        by_time = self.beside is None and self.device.type == "cpu"
        scheduler.pace = Pace() if by_time else None
        scheduler.turn_tokens = (self.beside or TURN_TOKENS) if self.takes_turns else None

    @property
    def takes_turns(self) -> bool:
        """Whether a server's answers and prompts run in steps of their own."""
        passes = self.engine.runner.passes
        captured = passes is not None and not passes.alone
        if self.turns and not captured:
            raise OptionError(
                "turns: parts of prompts are not captured of this model; leave it out"
            )
        return captured and self.turns is not False and not self.guesses

    def _read_adapters(self, folders: Mapping[str, str | Path] | None) -> Adapters | None:
        return (
            Adapters.read(folders, plan_of(ModelConfig.from_dict(self.weights.config)))
            if folders
            else None
        )

    def memory(self) -> Memory:
        """Where the memory goes, as planned at the start."""
        return self._memory

    def warm_up(self) -> None:
        """Compile, capture and allocate now, so that no request waits for it."""
        capture_all(self.engine, beside_answers=self.takes_turns)
        self.generate(*first_requests(self.engine))
        self.engine.pool.forget()

    @takes_fields_of(SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Output]:
        """Answer all prompts, in their order.

        How tokens are chosen is told by keywords (`max_tokens=5, temperature=0`) or by `params`:
        one SamplingParams for all prompts, or one for each. A max_tokens that is given must fit
        into the context; without one an answer has up to 256 tokens, fewer where the context ends.
        `chat_template_kwargs` are the chat template's own; `adapter` names one of those loaded, for
        all prompts or, in a list, for each.
        """
        items = as_prompts(prompts)
        each = params_of_each(params, sampling, len(items))
        names = adapter_of_each(adapter, len(items))
        prepared = [
            self.prompts.prepare(item, one, sampling, chat_template_kwargs, name)
            for item, one, name in zip(items, each, names, strict=True)
        ]
        submitted: list[list[Request]] = []
        try:
            for one in prepared:
                submitted.append(self.engine.submit(one.tokens, one.params, adapter=one.adapter))
            self.driver.run(submitted, progress=progress)
            for request in (request for requests in submitted for request in requests):
                check_served(request.finish_reason, request.stop_reason)
        finally:  # Ctrl-C or a failure: leave nothing behind in the engine
            self.engine.cancel(request for requests in submitted for request in requests)
        return [
            Output.of(one.text, one.tokens, requests)
            for one, requests in zip(prepared, submitted, strict=True)
        ]

    @takes_fields_of(SamplingParams)
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Output:
        """The next message of a conversation; `chat_template_kwargs={"enable_thinking": False}`
        and the like go to the chat template."""
        outputs = self.generate(
            [messages],
            params,
            chat_template_kwargs=chat_template_kwargs,
            adapter=adapter,
            **sampling,
        )
        return outputs[0]

    @takes_fields_of(SamplingParams)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """One prompt, chunk by chunk, by `for` or by `async for`. Leaving the loop cancels the
        rest.
        """
        prepared = self.prompts.prepare(prompt, params, sampling, chat_template_kwargs, adapter)
        return Stream(prepared, self.driver)

    @takes_fields_of(SamplingParams)
    def iterate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Chunk, None, None]:
        """As `stream`, as a plain generator."""
        return self.driver.chunks(
            self.prompts.prepare(prompt, params, sampling, chat_template_kwargs, adapter), []
        )

    def room(self, prompt: Prompt, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> int:
        """Tokens that the context holds beyond this prompt; 0 where the prompt alone is
        too long.
        """
        _, tokens = self.prompts.encode(prompt, chat_template_kwargs)
        return max(0, self.engine.max_model_len - len(tokens))

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """A prompt of any kind as token ids, with complete parameters."""
        return self.prompts.prepare(prompt, params, {}, chat_template_kwargs)


def refuse_together(
    wanted: Speculation,
    device: torch.device,
    *,
    prompt_dtype: str | None,
    offload: int,
    turns: bool | None,
) -> None:
    """Options that exclude each other."""
    if prompt_dtype is not None:
        check_prompt_dtype(prompt_dtype)
        if offload:
            raise OptionError(
                "prompt_dtype needs all weights on the GPU: leave it out, or leave out offload"
            )
    if turns and (device.type == "cpu" or wanted.kind != "off"):
        raise OptionError(
            "turns is for a GPU without speculation: leave it out, or leave out speculate"
        )

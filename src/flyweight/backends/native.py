"""This package's own engine, in process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from flyweight import garbage
from flyweight.backends.base import PAGE, WARM_OUTPUT, EngineOptions, Limits
from flyweight.backends.memory import Meter
from flyweight.clock import Answer, Run, clock
from flyweight.device import pick_device
from flyweight.errors import OptionError, UnsupportedError, unknown

if TYPE_CHECKING:
    import torch

    from flyweight.engine.llm import LLM
    from flyweight.models.decoder import Decoder


class Native:
    name: str = "native"
    sized: ClassVar[bool] = True
    warm_output: ClassVar[int | None] = WARM_OUTPUT

    def __init__(self, model: str, options: EngineOptions):
        if options.tensor_parallel > 1:
            raise UnsupportedError(
                "the native engine runs on one GPU; for more: --backend vllm --tensor-parallel "
                f"{options.tensor_parallel}"
            )
        if options.quantization:
            raise UnsupportedError(
                "the native engine takes the quantization from the model; "
                "--quantization is for vllm, sglang"
            )
        from flyweight.engine.llm import LLM

        known = inspect.signature(LLM).parameters.keys() - {"model"}
        for name in options.extra.keys() - known:
            raise OptionError(unknown("option of the native engine", name, known))
        self.model, self.options = model, options
        self.kv_dtype: str | None = None
        self.llm: LLM | None = None
        self.limits: Limits | None = None

    def start(self, limits: Limits) -> None:
        if self.llm is not None and self.limits == limits:
            return
        from flyweight.engine.llm import LLM

        device = pick_device(self.options.device)
        decoder = self._keep_decoder(device)
        self.meter.begin()
        settings = dict(
            device=device,
            dtype=self.options.dtype,
            max_model_len=limits.context,
            max_num_seqs=limits.batch,
            blocks=limits.tokens and limits.tokens // PAGE,
            block_size=PAGE,
            prefix_cache=False,
            decoder=decoder,
        )
        self.llm = LLM(self.model, **(settings | self.options.extra))
        self.meter.end()
        garbage.settle()
        self.limits, self.kv_dtype = limits, self.llm.kv_dtype

    def _keep_decoder(self, device: torch.device) -> Decoder | None:
        """Of an engine for other limits only the weights are kept, and counted on."""
        if self.llm is None:
            self.meter = Meter(device)
            return None
        self.meter.begin()
        decoder, self.llm = self.llm.decoder, None
        garbage.release()
        self.meter.end()
        return decoder

    def choices(
        self, prompts: Sequence[Sequence[int]], output: int
    ) -> tuple[list[tuple[int, ...]], list[list[float]]]:
        """Greedy answers, and by how much the chosen tokens' logprobs are above the second best."""
        from flyweight.engine.request import SamplingParams

        assert self.llm is not None, "start comes first"
        params = SamplingParams(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, logprobs=2
        )
        done = [result.completions[0] for result in self.llm.generate(list(prompts), params)]
        gaps = [
            [max(one.top.values()) - min(one.top.values()) for one in answer.logprobs or ()]
            for answer in done
        ]
        return [tuple(one.token_ids) for one in done], gaps

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        from flyweight.engine.request import SamplingParams

        assert self.llm is not None, "start comes first"
        params = SamplingParams(
            max_tokens=output, min_tokens=output, ignore_eos=True, **self.options.choice
        )
        if (speculator := self.llm.engine.speculator) is not None:
            speculator.restart()
        self.meter.begin()
        begin = clock()
        outputs = self.llm.generate(list(prompts), params)
        end = clock()
        self.meter.end()
        done = [result.completions[0] for result in outputs]
        return Run(
            begin,
            end,
            tuple(Answer(begin, tuple(one.timing.chunks), tuple(one.token_ids)) for one in done),
        )

    def speculation(self) -> dict[str, float]:
        """Of the latest `generate`: how many guesses were right, and what guessing cost; empty
        where nobody guesses.
        """
        assert self.llm is not None, "start comes first"
        speculator = self.llm.engine.speculator
        return {} if speculator is None else speculator.figures()

    def memory(self) -> dict[str, float | None]:
        assert self.llm is not None, "start comes first"
        decoder, caches = self.llm.decoder, self.llm.engine.runner.caches
        return self.meter.fields() | {
            "weights_gb": decoder.nbytes / 1e9,
            "kv_gb": sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) / 1e9,
        }

    def read_bytes(self) -> int:
        """Of weights in one decode step of one sequence."""
        assert self.llm is not None, "start comes first"
        return self.llm.decoder.step_nbytes

    def stop(self) -> None:
        if self.llm is not None:
            self.llm = None
            garbage.release()
            self.meter.forget()

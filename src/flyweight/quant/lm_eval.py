"""Tasks of lm-eval on a Flyweight model: `pip install flyweight[lm-eval]`, then

    from flyweight.quant.lm_eval import evaluate_tasks
    evaluate_tasks("./out", ["hellaswag", "arc_easy"], limit=200)

Scoring is the exact forward pass that `flyweight eval` uses; generation goes through the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flyweight.errors import MissingPackageError


def score_continuation(
    decoder: Any, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """(log-likelihood of the continuation, whether greedy decoding would have given it). The
    context must not be empty.
    """
    longest = decoder.config.context_length
    ids = [*context, *continuation][-longest:]
    count = min(len(continuation), len(ids) - 1)
    tokens = torch.tensor([ids], device=decoder.device)
    rows = torch.log_softmax(decoder.forward_whole(tokens)[0, -count - 1 : -1].float(), -1)
    wanted = tokens[0, -count:]
    return float(rows.gather(1, wanted[:, None]).sum(dtype=torch.float64)), bool(
        (rows.argmax(1) == wanted).all()
    )


def evaluate_tasks(
    model: str,
    tasks: Iterable[str],
    *,
    limit: int | None = None,
    folder: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """lm-eval's results by task; `folder` holds task files of one's own."""
    try:
        import lm_eval
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingPackageError("tasks need lm-eval: pip install 'flyweight[lm-eval]'") from None
    from flyweight import LLM, SamplingParams
    from flyweight.quant.subject import load_subject

    subject = load_subject(model, "a", device=device, dtype=dtype)
    tokenizer = subject.checkpoint.tokenizer()

    class Adapter(TemplateLM):  # type: ignore[misc, valid-type]
        engine: Any = None

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.bos_token_id if subject.bos is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return tokenizer.encode(string, add_special_tokens=False)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [
                score_continuation(subject.decoder, context, continuation)
                for _, context, continuation in requests
            ]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return [
                score_continuation(
                    subject.decoder, [self.prefix_token_id], self.tok_encode(request.args[0])
                )[0]
                for request in requests
            ]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            self.engine = self.engine or LLM(model, device=device, dtype=dtype)
            answers = []
            for request in requests:
                prompt, options = request.args
                stop = options.get("until") or ()
                longest = max(1, min(options.get("max_gen_toks", 256), self.engine.room(prompt)))
                params = SamplingParams(max_tokens=longest, temperature=0, stop=stop)
                answers.append(self.engine.generate([prompt], params)[0].text)
            return answers

    found = lm_eval.simple_evaluate(
        Adapter(), tasks=list(tasks), limit=limit, task_manager=TaskManager(include_path=folder)
    )
    return found["results"]

"""What a step of several rows of one sequence costs against a step of one, and how fast answers come if guesses are right.

    python benchmarks/workshop/speculation_steps.py [--model qwen3-8b] [--scheme int4] [--context 1024]

Prints JSON lines. Weights are random. `forced` rows: the guesses are the model's own earlier answer, so that all are accepted;
drafting costs nothing there, which the row says.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from flyweight.batch import KVStorage
from flyweight.engine.core import Engine
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows
from flyweight.engine.scheduler import Work
from flyweight.engine.speculation.lengths import Fixed
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.engine.speculation.speculator import Speculator
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=192, ignore_eos=True).with_defaults({})


def milliseconds(work, repeats: int = 40, rounds: int = 5) -> float:
    """The median over rounds of the mean over repeats."""
    for _ in range(5):
        work()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / repeats)
    return sorted(found)[rounds // 2]


@torch.inference_mode()
def step_costs(decoder: Decoder, context: int) -> dict[str, float]:
    config, device = decoder.config, decoder.device
    pages = context // PAGE + 2
    caches = [KVStorage.zeros((8 * pages, PAGE, config.kv_heads, config.head_dim), decoder.dtype, device)
              for _ in range(config.layers)]
    rows = Rows(8, pages=pages, vocabulary=config.vocab_size, device=device)
    requests = [Request(i, [5] * context, GREEDY, seed=0, limit=context + 16, blocks=[*range(i * pages, (i + 1) * pages)])
                for i in range(8)]
    rows.enter(requests)
    rows.extend()
    rows.lengths.fill_(context)
    graphs = DecodeGraphs(decoder, caches, rows)
    shared = SharedRows(rows)
    steps = DecodeGraphs(decoder, caches, shared)
    found = {}
    for count in (1, 4, 8):
        rows.lengths.zero_()
        rows.lengths[:count] = context
        found[f"sequences_{count}"] = milliseconds(lambda n=count: graphs.logits(n))
    for count in (1, 2, 4, 8):
        number = shared.fill([Work(requests[0], context - 1, count, True, (7,) * (count - 1))])
        found[f"rows_{count}"] = milliseconds(lambda n=number: steps.logits(n))
    return {name: round(value, 4) for name, value in found.items()}


class Answers:
    """Guesses what the answer was before."""

    def __init__(self, text: list[int]):
        self.text = text

    def promising(self, request: Request) -> bool:
        return True

    def propose(self, requests, most):
        return {request.number: self.text[len(request.tokens) : len(request.tokens) + most[request.number]]
                for request in requests if self.text[: len(request.tokens)] == request.tokens}

    def observe(self, request, drafts, accepted) -> None:
        pass

    def forget(self, request) -> None:
        pass


def speed(engine: Engine, prompt: list[int]) -> tuple[float, Request]:
    """Tokens a second after the first, of the second of two runs."""
    for _ in range(2):
        (request,) = engine.submit(prompt, GREEDY)
        while engine.busy:
            engine.step()
        torch.cuda.synchronize()
    begin, end = request.chunks[0][0], request.chunks[-1][0]
    return (request.generated - 1) / (end - begin), request


def answers(decoder: Decoder, context: int) -> list[dict[str, object]]:
    config = decoder.config
    shape = CacheShape(config.layers, config.kv_heads, config.head_dim, decoder.dtype)
    engine = Engine(decoder, shape, vocabulary=config.vocab_size, device=decoder.device, max_model_len=context + 256,
                    blocks=(context + 256) // PAGE * 2, block_size=PAGE, max_num_seqs=8, max_num_batched_tokens=2048)
    prompt = torch.randint(10, 5000, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, request = speed(engine, prompt)
    rows: list[dict[str, object]] = [{"forced": False, "guesses": 0, "tok_s": round(plain, 1)}]
    for guesses in (3, 7):
        engine.speculator = speculator = Speculator(Answers(request.tokens), Fixed(guesses))
        found, again = speed(engine, prompt)
        rows.append({"forced": True, "guesses": guesses, "tok_s": round(found, 1), "drafter_ms": 0,
                     "accepted": speculator.accepted, "drafted": speculator.drafted, "steps": speculator.steps,
                     "same_answer": again.tokens == request.tokens})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    begin = time.perf_counter()
    decoder = Decoder.load(PresetWeights(options.model, options.scheme, device=device), device=device, dtype=torch.bfloat16)
    facts = {"model": options.model, "scheme": options.scheme, "context": options.context,
             "gpu": torch.cuda.get_device_name(0), "load_s": round(time.perf_counter() - begin, 1)}
    costs = step_costs(decoder, options.context)
    ratios = {f"rows_{count}_over_1": round(costs[f"rows_{count}"] / costs["sequences_1"], 3) for count in (4, 8)}
    print(json.dumps(facts | {"what": "step_ms"} | costs | ratios), flush=True)
    for row in answers(decoder, options.context):
        print(json.dumps(facts | {"what": "answer"} | row), flush=True)


if __name__ == "__main__":
    main()

"""Flyweight and transformers side by side on one CPU: the same model, type, threads and work,
taking turns.

    python benchmarks/cpu/engine_vs_transformers.py [--model smollm2-135m] [--rounds 5]

Workloads, greedy, end-of-text ignored, fresh random token ids each round:

    prefill      one prompt of 256 tokens, one token out: input tokens / time to that token
    decode-1     one prompt of 64 tokens, 32 tokens out
    decode-8     eight of them at once
    stream-8     24 requests of very different lengths, at most eight at a time. transformers runs
                 them as its users do: batches of eight, padded on the left, each until its longest
                 answer is done. Flyweight runs them with continuous batching. Only the tokens that
                 were asked for count.

Both compute in float32. transformers holds the weights in float32; Flyweight holds those that 16
bits hold exactly in 16 bits (here all of them: the checkpoint is float16) and widens them inside
the matmul, so that it reads half the bytes.

Decode rate = tokens between the first and the last step of the batch / the time between them
(prefill not counted); for stream-8, where prefill and decode mix, tokens asked for / wall time.
Every round runs each workload with both, the short ones several times, the order of the two
changing from turn to turn; tables show medians, and a ratio is the median of the turns' ratios. The
ratio of CPU time (whole run, prefill included) stands beside it: on a machine with other work it is
the steadier one. Writes engine_vs_transformers.jsonl (raw rows) and .md (the table) beside this
file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flyweight import LLM, SamplingParams
from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.hub import resolve

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Workload:
    name: str
    batch: int
    requests: tuple[tuple[int, int], ...]  # (input, output) tokens
    turns: int = 1  # in each round


def mixed_lengths(count: int) -> tuple[tuple[int, int], ...]:
    """Answers from 4 to 96 tokens, most of them short, as in real traffic."""
    chance = random.Random(0)
    return tuple(
        (chance.randint(8, 48), min(96, 4 + int(chance.expovariate(1 / 20)))) for _ in range(count)
    )


WORKLOADS = (
    Workload("prefill", 1, ((256, 1),), turns=3),
    Workload("decode-1", 1, ((64, 32),), turns=3),
    Workload("decode-8", 8, ((64, 32),) * 8, turns=2),
    Workload("stream-8", 8, mixed_lengths(24)),
)


@dataclass(frozen=True)
class Measured:
    """Times of one run in seconds from its start; `steps` is when each decoding step of a uniform
    batch ended.
    """

    total: float
    # what the process used, all threads: tells a slow run from one that had to wait for the
    # processor
    cpu: float
    steps: list[float]


class Flyweight:
    name = "flyweight"

    def __init__(self, folder: Path):
        self.model = LLM(
            folder,
            dtype="float32",
            device="cpu",
            prefix_cache=False,
            max_num_seqs=8,
            max_model_len=1024,
        )

    def weight_bytes(self) -> int:
        """Of the linears and the head, as laid out for their kernels, and of the embedding."""
        decoder = self.model.decoder
        linears = [linear for block in decoder.blocks for linear in block.linears.values()]
        return (
            sum(linear.nbytes for linear in (*linears, decoder.head))
            + decoder.embedding.weight.nbytes
        )

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        params = [
            SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
            for _, out in workload.requests
        ]
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = self.model.generate(prompts, params)
        total, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert [len(output.token_ids) for output in outputs] == [
            out for _, out in workload.requests
        ]
        last_to_start = max(outputs, key=lambda output: output.completions[0].timing.first_token)
        return Measured(
            total, cpu, [when - begin for when, _ in last_to_start.completions[0].timing.chunks]
        )


class Transformers:
    name = "transformers"

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.times: list[float] = []

    def weight_bytes(self) -> int:
        # a tied head counts once
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def watch(self, tokens: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """A stopping criterion that never stops: it is called after every step."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)

    @torch.inference_mode()
    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        self.times, begin, cpu = [], time.perf_counter(), time.process_time()
        for start in range(0, len(prompts), workload.batch):
            part = prompts[start : start + workload.batch]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor(
                [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part]
            )
            longest = max(out for _, out in workload.requests[start : start + workload.batch])
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                pad_token_id=0,
                stopping_criteria=[self.watch],
            )
        total, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return Measured(total, cpu, [when - begin for when in self.times])


def fields(workload: Workload, measured: Measured) -> dict[str, float | int | str | None]:
    inputs, outputs = (sum(column) for column in zip(*workload.requests, strict=True))
    uniform = len(set(workload.requests)) == 1
    steps = measured.steps
    decoding = uniform and len(steps) > 1
    return dict(
        workload=workload.name,
        batch=workload.batch,
        prompts=len(workload.requests),
        input=workload.requests[0][0] if uniform else inputs,
        output=workload.requests[0][1] if uniform else outputs,
        latency_s=measured.total,
        cpu_s=measured.cpu,
        ttft_ms_last=1e3 * steps[0] if uniform else None,
        decode_tok_s=workload.batch * (len(steps) - 1) / (steps[-1] - steps[0])
        if decoding
        else None,
        input_tok_s=inputs / steps[0] if uniform else None,
        output_tok_s=outputs / measured.total,
        overall_tok_s=(inputs + outputs) / measured.total,
    )


HEADLINE = {
    "prefill": "input_tok_s",
    "decode-1": "decode_tok_s",
    "decode-8": "decode_tok_s",
    "stream-8": "output_tok_s",
}


def table(rows: list[dict], environment: dict) -> str:
    sizes = {row["backend"]: 1e3 * row["size_gb"] for row in rows}
    rounds = len(rows) // sum(2 * workload.turns for workload in WORKLOADS)
    lines = [
        f"{environment['device']}, {environment['threads']} threads, float32, torch "
        f"{environment['torch']}, transformers {environment['packages']['transformers']}. Tokens "
        f"per second, medians of {rounds} rounds (least to most). Weights in memory: transformers "
        f"{sizes['transformers']:.0f} MB, Flyweight {sizes['flyweight']:.0f} MB.",
        "",
        "| workload | transformers | Flyweight | ratio | ratio of CPU time |",
        "|---|---|---|---|---|",
    ]
    for name, field in HEADLINE.items():
        theirs, ours = (
            [row for row in rows if row["workload"] == name and row["backend"] == backend]
            for backend in ("transformers", "flyweight")
        )
        pairs = list(zip(theirs, ours, strict=True))
        ratios = [
            f"{statistics.median(values):.2f} ×"
            for values in (
                [our[field] / their[field] for their, our in pairs],
                [their["cpu_s"] / our["cpu_s"] for their, our in pairs],
            )
        ]
        rates = [[row[field] for row in found] for found in (theirs, ours)]
        cells = [
            f"{statistics.median(item):.1f} ({min(item):.1f} to {max(item):.1f})" for item in rates
        ]
        lines.append(f"| {' | '.join([name, *cells, *ratios])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = resolve(options.model, dtype="float16")
    backends = [Transformers(folder), Flyweight(folder)]
    vocabulary = backends[1].model.config.vocab_size
    checkpoint = backends[1].model.weights
    about = dict(
        model=options.model,
        checkpoint=checkpoint.hash(),
        weights="trained",
        scheme="fp32",
        kv_dtype="float32",
    )
    sizes = {backend.name: round(backend.weight_bytes() / 1e9, 4) for backend in backends}
    environment = environment_row()
    chance, rows = random.Random(1), []
    for repeat in range(-1, options.rounds):  # round −1 warms up and is thrown away
        for workload, turn in [(each, turn) for each in WORKLOADS for turn in range(each.turns)]:
            prompts = [
                [chance.randrange(100, vocabulary) for _ in range(length)]
                for length, _ in workload.requests
            ]
            for backend in backends if (repeat + turn) % 2 else reversed(backends):
                measured = backend.run(workload, prompts)
                if repeat >= 0:
                    rows.append(
                        make_row(
                            "latency",
                            environment["id"],
                            backend=backend.name,
                            **about,
                            repeat=repeat * workload.turns + turn,
                            size_gb=sizes[backend.name],
                            **fields(workload, measured),
                        )
                    )
        print(f"round {repeat + 1} of {options.rounds}", flush=True)
    (HERE / "engine_vs_transformers.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [environment, *rows])
    )
    (HERE / "engine_vs_transformers.md").write_text(table(rows, environment) + "\n")
    print(table(rows, environment))


if __name__ == "__main__":
    main()

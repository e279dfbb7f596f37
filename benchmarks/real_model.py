"""Is the engine right on a GPU, on real weights? Three checks, a row each, with the cases counted.

    python benchmarks/real_model.py OUT.jsonl --model smollm2-135m --text valid.txt [--checks logits
        served storm]

Finished rows of OUT.jsonl are not made again.

logits   every format: 512 positions of the text, teacher-forced, most in one prefill pass and the
         last as captured decode steps, against the CPU in float32 with dequantized weights: the
         mean relative error of a position's logits is below a bound, and another token is likeliest
         only where its logprob is within a gap of the best.
served   greedy answers alone against the same requests together, in chunks, preempted, not
         captured, …: two answers may part only where the other's token is within GAP of the best,
         because kernels differ by the number of rows.
storm    a thousand random requests (lengths, sampling, cancels, stops) in a KV cache too small for
         them: every request ends, every block comes back, and every token is the best after the
         tokens before it, or within GAP.

Where activations are rounded too, no two ways of computing give the same logits: attention sums in
another order beside other rows, the last bit of an activation turns into a whole step of int8 or
e4m3, one step into many in the next layer. After thirty layers two such runs are as far apart as
rounded and unrounded activations are (measured on a CPU, with activations that were rounded to
float16 first and ones that were not). So the bounds of these formats are measured: twice the effect
of the rounding, the same weights with activations rounded and not, because both runs have it. For
logits that is the mean error; for the gap it is how far the two best tokens move against each other
at all but one in a hundred positions. A row of the wrong request, or a lost page, gives tokens that
are not among the best at all.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engine"))
from gpu_models import WAYS, both_ways, forced, gap_where_parted, make_engine, params, run

from flyweight.bench.cases import attempt
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.checkpoint.hub import resolve
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.streamed import Streamed
from flyweight.clock import clock
from flyweight.engine.sampling import gumbel_noise
from flyweight.models.decoder import Decoder
from flyweight.models.layers import Weights
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe
from flyweight.quant.subject import encode
from flyweight.tensors import Plain, QuantTensor

GAP = 0.1  # natural log
POSITIONS, DECODED = 512, 64
# name → (recipe or scheme, file format). All but bf16 compute in float16.
FORMATS: dict[str, tuple[dict[str, Any] | str | None, str | None]] = {
    "bf16": (None, None),
    "fp16": (None, None),
    "gptq-int4": ({"bits": 4}, "gptq"),
    "awq-int4": ({"bits": 4, "symmetric": False}, "awq"),
    "w8a16": ({"bits": 8}, "compressed-tensors"),
    "w8a8": ({"bits": 8, "group_size": -1, "activations": "int8"}, "compressed-tensors"),
    "w8a8-smooth": ("w8a8-smooth", None),
    "fp8": ({"solver": "fp8"}, "compressed-tensors"),
    "w4a16-2:4": ("w4a16-sparse-gptq", None),
    "w8a8-2:4": ("w8a8-sparse-smooth-gptq", None),
    "vptq": ("vptq:v8-k256-256", None),
}
# mean relative error, and gap where another token is likeliest; float16 has three bits more
BOUNDS = {"bf16": (0.05, 0.5)}
ROUNDED = ("w8a8", "w8a8-smooth", "fp8", "w8a8-2:4")  # activations, too
SERVED = ("awq-int4", "w8a8-smooth")


class Unrounded:
    """The weights of a format, with activations as they are."""

    def __init__(self, weights: Weights):
        self.weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def linear(self, prefix: str) -> QuantTensor:
        return Plain(self.weights.linear(prefix).dequantize())


class Checks:
    def __init__(self, model: str, text: Path, work: Path, device: str):
        self.model, self.work, self.device = (
            resolve(model, dtype="float16"),
            work,
            torch.device(device),
        )
        self.ids = encode(Checkpoint(self.model).tokenizer(), text.read_text(encoding="utf-8"))[0]
        self.tokens = torch.tensor(self.ids[:POSITIONS])

    def folder(self, name: str) -> Path:
        recipe, form = FORMATS[name]
        folder = self.work / name.replace(":", "-")
        if recipe is None:
            return self.model
        if not folder.exists():
            options: dict[str, Any] = dict(output=folder, format=form, device=str(self.device))
            if isinstance(recipe, str):
                quantize(self.model, recipe, samples=4, length=256, **options)
            else:
                quantize(
                    self.model,
                    recipe=Recipe.from_dict({"name": name, "solver": "rtn"} | recipe, name),
                    **options,
                )
        return folder

    def load(
        self, name: str, device: torch.device, dtype: torch.dtype, *, exact: bool = False
    ) -> Decoder:
        return Decoder.load(
            Streamed(Checkpoint(self.folder(name)), device), device=device, dtype=dtype, exact=exact
        )

    def logits(self, name: str) -> dict[str, Any]:
        want = self.on_cpu(name)
        decoder = self.load(name, self.device, torch.bfloat16 if name == "bf16" else torch.float16)
        got = torch.cat([*forced(decoder, self.tokens, DECODED)]).float().cpu()
        error, logs = relative(got, want), want.log_softmax(-1)
        parted = got.argmax(-1) != want.argmax(-1)
        worst = float((logs.amax(-1) - logs.gather(1, got.argmax(-1)[:, None])[:, 0]).max())
        bound, gap = self.bounds(name)
        means = {
            "error_prefill": float(error[:-DECODED].mean()),
            "error_decode": float(error[-DECODED:].mean()),
        }
        return {
            "kernel": decoder.blocks[0].linears["down"].fused.kernel,
            "positions": POSITIONS,
            "bound": bound,
            "gap_bound": gap,
            **means,
            "error_most": float(error.max()),
            "same_argmax": int((~parted).sum()),
            "largest_gap_at_difference": worst,
            "agrees": max(means.values()) < bound and worst < gap,
        }

    @functools.cache  # noqa: B019 (one object)
    def on_cpu(self, name: str, *, rounded: bool = True) -> torch.Tensor:
        weights = Streamed(Checkpoint(self.folder(name)), torch.device("cpu"))
        decoder = Decoder.load(
            weights if rounded else Unrounded(weights),
            device="cpu",
            dtype=torch.float32,
            exact=True,
        )
        return decoder.forward_whole(self.tokens[None])[0]

    def bounds(self, name: str) -> tuple[float, float]:
        """Of a position's mean error, and of the gap to the best where tokens differ."""
        if name not in ROUNDED:
            return BOUNDS.get(name, (0.02, GAP))
        rounded, plain = self.on_cpu(name), self.on_cpu(name, rounded=False)
        two = rounded.topk(2).indices
        moved = (rounded - plain).gather(1, two).diff(dim=1).abs()
        return 2 * float(relative(rounded, plain).mean()), 2 * float(moved.quantile(0.99))

    def served(self, name: str, way: str) -> dict[str, Any]:
        asked = [self.ids[i * 300 : i * 300 + 20 + 17 * i] for i in range(16)]
        alone, together = both_ways(self.load(name, self.device, torch.float16), asked, way)
        bound = self.bounds(name)[1]
        gaps = [
            gap
            for pair in zip(alone, together, strict=True)
            if (gap := gap_where_parted(*pair)) is not None
        ]
        return {
            "setting": way,
            "requests": len(asked),
            "tokens": sum(one.generated for one in together),
            "bound": bound,
            "parted": len(gaps),
            "largest_gap_at_difference": max(gaps, default=0.0),
            "preempted": sum(one.preemptions for one in together),
            "agrees": all(gap < bound for gap in gaps),
        }

    def storm(self, name: str, requests: int = 1000) -> dict[str, Any]:
        chance, decoder = random.Random(1), self.load(name, self.device, torch.float16)
        engine = make_engine(
            decoder,
            blocks=40,
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            prefix_cache=True,
            end_ids=self.ids[:2],
        )
        asked = []
        for number in range(requests):
            at, length = chance.randrange(len(self.ids) - 200), chance.randrange(1, 120)
            options = params(
                max_tokens=chance.randrange(1, 40),
                temperature=chance.choice([0, 0, 0.7, 1.5]),
                seed=number,
                ignore_eos=chance.random() < 0.5,
                stop_token_ids=chance.sample(self.ids[:200], 2),
            )
            asked += engine.submit(self.ids[at : at + length], options)
            for _ in range(chance.randrange(4)):
                engine.step()
            if number % 9 == 0:
                engine.cancel([chance.choice(asked[-12:])])
        run(engine, asked)  # asserts that every block came back
        exact = self.load(name, self.device, torch.float32, exact=True)
        gaps = [gap for request in asked for gap in gaps_of(exact, request)]
        reasons = [str(request.finish_reason) for request in asked]
        return {
            "requests": len(asked),
            "tokens": len(gaps),
            "not_the_best": sum(gap > 0 for gap in gaps),
            "bound": GAP,
            "largest_gap_at_difference": max(gaps),
            "preempted": sum(request.preemptions for request in asked),
            "ended": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
            "agrees": max(gaps) < GAP and all(request.finished for request in asked),
        }


def relative(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@torch.inference_mode()
def gaps_of(exact: Decoder, request: Any) -> list[float]:
    """By how much each token of an answer is below the best after the tokens before it."""
    prompt, answer = request.prompt, request.tokens[len(request.prompt) :]
    if not answer:
        return []
    device = exact.device
    scores = exact.forward_whole(torch.tensor([request.tokens[:-1]], device=device))[
        0, len(prompt) - 1 :
    ].float()
    if request.params.temperature:
        positions = torch.arange(len(prompt), len(request.tokens), device=device)
        seeds = torch.full_like(positions, request.seed)
        noise = gumbel_noise(seeds, positions, torch.arange(scores.shape[1], device=device))
        scores = scores / request.params.temperature + noise
    chosen = scores.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]
    return (scores.amax(-1) - chosen).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--checks",
        nargs="+",
        default=["logits", "served", "storm"],
        choices=["logits", "served", "storm"],
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("real-model.work"))
    options = parser.parse_args()
    checks, file = (
        Checks(options.model, options.text, options.work, options.device),
        ResultFile(options.out),
    )
    environment = environment_row(options.device)
    file.append([environment])
    work: list[tuple[str, str, str | None, Callable[[], dict[str, Any]]]] = []
    if "served" in options.checks:
        work += [
            ("served", name, way, lambda name=name, way=way: checks.served(name, way))
            for name in SERVED
            for way in WAYS
        ]
    if "storm" in options.checks:
        work.append(("storm", "awq-int4", None, lambda: checks.storm("awq-int4", options.requests)))
    if "logits" in options.checks:
        work += [
            ("logits", name, None, lambda name=name: checks.logits(name))
            for name in options.formats
        ]
    failed = 0
    for check, name, way, measure in work:
        if file.finished("quality", check=check, scheme=name, setting=way):
            continue
        begin = clock()
        found, fault = attempt(measure)
        checkpoint = Checkpoint(checks.folder(name)).hash() if found else None
        fields = {
            "check": check,
            "model": Path(options.model).stem,
            "scheme": name,
            "checkpoint": checkpoint,
            "weights": "trained",
            "tool": "flyweight",
            "text": options.text.name,
            "seconds": clock() - begin,
        }
        file.append(
            [make_row("quality", environment["id"], **rounded(fields | (found or fault or {})))]
        )
        failed += not (found or {}).get("agrees")
        print(check, name, found or fault, f"{fields['seconds']:.1f} s", flush=True)
    sys.exit(f"{failed} of {len(work)} checks do not agree" if failed else 0)


if __name__ == "__main__":
    main()

"""The check of greedy tokens: what it is of, that it fails a wrong kernel, and that a file without
it is completed."""

import dataclasses
import importlib.machinery
import json
import weakref

import pytest
import torch
from tiny_preset import CONFIG, add_tiny

from flyweight import cli, machine
from flyweight.backends import base
from flyweight.backends.base import EngineOptions, Limits
from flyweight.bench import check, drawn, exact
from flyweight.bench.cases import Case
from flyweight.bench.exact import Reference
from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import make_row
from flyweight.kernels import cpu
from flyweight.kernels.native.executor import NativeDecoder
from flyweight.kernels.sample_reference import Filters
from flyweight.models import presets
from flyweight.models.decoder import Block, Decoder
from flyweight.models.presets import PresetWeights
from flyweight.models.random_folder import write_preset
from flyweight.report.read import read
from flyweight.report.rows import read_jsonl
from flyweight.report.view import View

SPEED = ("speed", "--input", 4, "--input", 24, "--output", 4, "--repeats", 1)
THROUGHPUT = ("throughput", "--prompts", 2, "--input", 8, "--output", 4, "--repeats", 1)
SERVE = ("serve", "--requests", 2, "--input", 8, "--output", 4, "--warm-up", 1)
WEIGHTS = "the same weights, dequantized"


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    """Run `flyweight bench …`: the rows in its file, stderr."""
    add_tiny(monkeypatch)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 14)
    out = tmp_path / "result.jsonl"

    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as exit:
            cli.main(["bench", *map(str, arguments), "--out", str(out), "--device", "cpu"])
        error = capsys.readouterr().err
        assert exit.value.code == code, error
        return list(read_jsonl(out).rows), error

    run.out = out
    return run


def break_kernels(monkeypatch):
    """Those of the engine, not the plain products that it is compared with."""
    choose = cpu.choose

    def broken(tensor, *, exact):
        found = choose(tensor, exact=exact)
        return found if exact else found._replace(run=lambda x: found.run(x).roll(1, -1))

    monkeypatch.setattr(cpu, "choose", broken)
    forward = NativeDecoder.forward
    monkeypatch.setattr(
        NativeDecoder, "forward", lambda *arguments: forward(*arguments).roll(1, -1)
    )


@pytest.mark.parametrize("arguments", [SPEED, THROUGHPUT, SERVE])
def test_every_speed_has_its_agreement_and_a_wrong_kernel_shows(bench, monkeypatch, arguments):
    rows, _ = bench(*arguments, "preset:tiny:int4")
    assert all(row["agreement_clear"] == 1.0 and row["agreement_with"] == WEIGHTS for row in rows)
    bench.out.unlink()
    break_kernels(monkeypatch)
    rows, error = bench(*arguments, "preset:tiny:int4", code=1)
    assert all(row["status"] == "failed" and row["check_loss"] > row["check_bound"] for row in rows)
    assert "wrong tokens" in rows[0]["reason"] and "marked as failed" in error
    assert all(
        not View(read([bench.out])).records(name) for name in ("speed", "throughput", "serve")
    ), "in no table"


def spoil_one_scale(tensor):
    """Sixteen times what it was, of one output: a kernel that reads past a group does so."""
    scales = tensor.scales.clone()
    scales[1] *= 16
    return dataclasses.replace(tensor, scales=scales)


@pytest.mark.parametrize("scheme", ["int4", "w8a8", "fp8"])
def test_a_scale_that_an_engine_reads_wrongly_fails_its_run(bench, monkeypatch, scheme):
    monkeypatch.setattr(
        "flyweight.models.native.why_not", lambda *_: "torch's kernels are looked at here"
    )
    monkeypatch.setattr("flyweight.kernels.dispatch._in_c", False)
    choose, latency = (
        cpu.choose,
        ("latency", "--batch", 4, "--input", 8, "--output", 12, "--repeats", 1),
    )
    rows, _ = bench(*latency, f"preset:tiny:{scheme}")
    assert rows[0]["status"] == "ok" and rows[0]["check_loss"] <= rows[0]["check_bound"]
    bench.out.unlink()
    monkeypatch.setattr(
        cpu,
        "choose",
        lambda tensor, *, exact: choose(
            tensor if exact or not hasattr(tensor, "scales") else spoil_one_scale(tensor),
            exact=exact,
        ),
    )
    rows, _ = bench(*latency, f"preset:tiny:{scheme}", code=1)
    assert [row["status"] for row in rows] == ["failed"] and rows[0]["check_loss"] > rows[0][
        "check_bound"
    ]


def test_the_answers_judged_are_those_of_the_run_at_the_end_of_its_own_contexts(bench, monkeypatch):
    asked, logits = [], Reference.logits
    monkeypatch.setattr(
        Reference,
        "logits",
        lambda self, sequences, positions: (
            asked.append((len(sequences), len(sequences[0]), list(positions)))
            or logits(self, sequences, positions)
        ),
    )
    bench(
        "latency", "preset:tiny:int4", "--batch", 5, "--input", 40, "--output", 20, "--repeats", 2
    )
    assert asked == [(5, 60, [39, *range(52, 59)])], (
        "the first token and the last seven, once for both runs"
    )
    monkeypatch.setitem(check.REFERENCE_TOKENS, "cpu", 180)
    bench(
        "latency", "preset:tiny:int4", "--batch", 7, "--input", 40, "--output", 20, "--repeats", 1
    )
    assert asked[1][:2] == (3, 60), (
        "what the reference would take too long for is spread over the batch"
    )
    assert (
        check.spread(7, 3) == [0, 3, 6]
        and check.spread(4, 8) == [0, 1, 2, 3]
        and check.spread(9, 1) == [8]
    )


@pytest.mark.parametrize(
    "sampling", ["top_k=3,temperature=0.7", "temperature=0.1", "top_p=0.5", "min_p=0.3"]
)
def test_tokens_that_are_drawn_are_held_against_their_distribution(bench, monkeypatch, sampling):
    drawn = (
        "latency",
        "preset:tiny:int4",
        "--batch",
        8,
        "--input",
        8,
        "--output",
        24,
        "--repeats",
        1,
        "--sampling",
        sampling,
    )
    rows, _ = bench(*drawn)
    assert (
        rows[0]["status"] == "ok"
        and rows[0]["check_loss"] <= rows[0]["check_bound"]
        and rows[0]["agreement"] is None
    )
    assert (
        abs(rows[0]["check_surprise"]) <= rows[0]["check_surprise_bound"]
        and rows[0]["check_sequences"] == 8
    )
    bench.out.unlink()
    break_kernels(monkeypatch)
    rows, error = bench(*drawn, code=1)
    assert (
        rows[0]["status"] == "failed"
        and "wrong tokens" in rows[0]["reason"]
        and "marked as failed" in error
    )


def test_penalties_are_not_judged_and_the_row_says_so(bench):
    rows, _ = bench(
        "latency",
        "preset:tiny:fp32",
        "--batch",
        1,
        "--input",
        8,
        "--output",
        4,
        "--repeats",
        1,
        "--sampling",
        "presence_penalty=0.5",
    )
    assert rows[0]["status"] == "ok" and rows[0]["check_with"].startswith("nothing: penalties")


@pytest.mark.parametrize(
    ("asked", "used", "right"), [(1.0, 1.0, True), (1.0, 0.6, False), (0.7, 1.0, False)]
)
def test_draws_at_another_temperature_are_noticed(asked, used, right):
    logits = 2 * torch.randn(16, 16, 500, generator=torch.Generator().manual_seed(1))
    draw = torch.distributions.Categorical(logits=logits / used)
    torch.manual_seed(2)
    found = check.Verdict(drawn.judge(draw.sample(), logits, Filters(temperature=asked), 0.02))
    assert (found.missed is None) is right and found.fields["check_loss"] == 0
    assert check.Verdict(drawn.judge(draw.sample(), logits * torch.nan, Filters(), 0.02)).missed


def test_a_long_context_by_yarn_is_judged_by_its_own_rotation(bench, monkeypatch):
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    monkeypatch.setitem(presets.PRESETS, "tiny-yarn", CONFIG | dict(rope_scaling=yarn))
    rows, _ = bench("speed", "preset:tiny-yarn:int4", "--input", 96, "--output", 8, "--repeats", 1)
    assert rows[0]["check_loss"] <= rows[0]["check_bound"] and rows[0]["check_sequences"] == 1


def test_more_rounding_allows_more_and_never_a_random_token(monkeypatch):
    add_tiny(monkeypatch)
    bounds = []
    for scheme in ("fp32", "int4", "vptq", "w8a8", "fp8"):
        reference = Reference.open(f"preset:tiny:{scheme}", device=torch.device("cpu"), dtype=None)
        logits, meter = reference.logits([[1, 2, 3, 4, 5, 6]], [4, 5])
        bounds.append(reference.noise(meter, "float32"))
        best = logits.argmax(-1)
        assert check.Verdict.of(best, logits, bounds[-1]).missed is None
        assert "wrong tokens" in check.Verdict.of((best + 7) % 90, logits, bounds[-1]).missed
        assert check.Verdict.of(best, logits * torch.nan, bounds[-1]).missed
    assert bounds == sorted(bounds)


def test_the_reference_rounds_activations_as_the_format_says(monkeypatch):
    add_tiny(monkeypatch)
    reference = Reference.open("preset:tiny:fp8", device=torch.device("cpu"), dtype="float32")
    sequences = [[1, 2, 3, 4]]
    rounded, meter = reference.logits(sequences, [3])
    assert meter.kinds == {"fp8"} and 0.02 < meter.inputs < 0.035
    monkeypatch.setattr(exact.ByReference, "quantize_input", lambda self, x: x)
    plain, _ = reference.logits(sequences, [3])
    assert (rounded - plain).std() > 0.005 * plain.std()


def test_a_file_made_without_checks_gets_a_row_for_each_case_and_nothing_is_timed_again(bench):
    models = ("preset:tiny:fp32", "preset:tiny:int4")
    for arguments in (SPEED, THROUGHPUT):
        timed, _ = bench(*arguments, *models, "--no-check")
    assert not any("agreement" in row for row in timed)
    rows, error = bench(*SPEED, *models)
    assert rows[: len(timed)] == timed and "warming" not in error
    assert [
        (row["bench"], row["scheme"], row["agreement_clear"]) for row in rows[len(timed) :]
    ] == [("agreement", "fp32", 1.0), ("agreement", "int4", 1.0)]
    found = read_jsonl(bench.out)
    machine = found.environments[rows[-1]["environment"]]
    assert (
        machine["id"] not in {row["environment"] for row in timed}
        and {"command", "commit"} <= machine.keys()
    )
    lines = bench.out.read_text()
    for arguments in (SPEED, THROUGHPUT):  # one check of a case is enough for all of its speeds
        _, error = bench(*arguments, *models)
        assert "loading" not in error and bench.out.read_text() == lines


def test_a_served_case_is_completed_too(bench):
    timed, _ = bench(*SERVE, "preset:tiny:int4", "--no-check")
    rows, _ = bench(*SERVE, "preset:tiny:int4")
    assert (
        rows[:1] == timed
        and rows[1]["bench"] == "agreement"
        and rows[1]["agreement_clear"] == 1.0
        and len(rows) == 2
    )
    assert bench(*SERVE, "preset:tiny:int4")[0] == rows


def test_a_case_of_which_runs_are_missing_tells_in_their_rows(bench):
    bench(
        "latency",
        "preset:tiny:fp32",
        "--batch",
        1,
        "--input",
        8,
        "--output",
        4,
        "--repeats",
        1,
        "--no-check",
    )
    rows, _ = bench(
        "latency", "preset:tiny:fp32", "--batch", 1, "--input", 8, "--output", 4, "--repeats", 2
    )
    assert [(row["bench"], row.get("agreement")) for row in rows] == [
        ("latency", None),
        ("latency", 1.0),
    ]


@pytest.mark.parametrize(
    "arguments",
    [SPEED, SERVE, ("latency", "--batch", 1, "--input", 8, "--output", 4, "--repeats", 1)],
)
def test_the_same_weights_are_compared_with_the_baseline_which_is_started_for_it(
    bench, tmp_path, arguments
):
    folder = write_preset("preset:tiny:fp32", tmp_path / "model")
    models = (f"first={folder}", f"second={folder}")
    bench(*arguments, *models, "--no-check")
    lines = bench.out.read_text().splitlines()
    kept = [line for line in lines if '"first"' not in line] + [
        json.dumps(json.loads(line) | {"agreement_with": "kept"})
        for line in lines
        if '"first"' in line
    ]
    bench.out.write_text("\n".join(kept) + "\n")
    rows, error = bench(*arguments, *models)
    assert (
        rows[-1]["scheme"] == "second"
        and rows[-1]["agreement"] == 1.0
        and "first on native" in rows[-1]["agreement_with"]
    )
    assert [row["bench"] for row in rows].count("agreement") == 1 and "loading tiny first" in error


def test_an_only_model_of_its_own_weights_is_the_baseline_and_is_not_started_to_say_so(
    bench, tmp_path
):
    folder = write_preset("preset:tiny:fp32", tmp_path / "model")
    bench(*THROUGHPUT, folder, "--no-check")
    rows, error = bench(*THROUGHPUT, folder)
    assert (
        rows[-1]["agreement"] is None
        and rows[-1]["agreement_with"] == "it is the baseline"
        and "loading" not in error
    )


def test_an_engine_that_draws_its_own_weights_is_not_started_for_a_check(bench, monkeypatch):
    monkeypatch.setattr(
        base.importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None)
    )
    case = {
        "model": "tiny",
        "scheme": "int4",
        "checkpoint": "random:0",
        "backend": "vllm",
        "gpus": 1,
    }
    row = make_row(
        "throughput",
        None,
        **case,
        prompts=2,
        input=8,
        output=4,
        repeat=1,
        total_tok_s=1.0,
        latency_s=1.0,
    )
    bench.out.write_text(json.dumps(row) + "\n")
    rows, error = bench(*THROUGHPUT, "preset:tiny:int4", "--backend", "vllm")
    assert [row["bench"] for row in rows] == ["throughput", "agreement"] and "loading" not in error
    assert (
        rows[1]["agreement"] is None
        and rows[1]["agreement_with"] == "nothing: random weights of its own"
    )


def test_a_check_that_failed_is_told_and_made_up_for(bench, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("CUDA out of memory: too much")

    with monkeypatch.context() as patch:
        patch.setattr(Reference, "logits", fail)
        rows, _ = bench(*THROUGHPUT, "preset:tiny:fp32")
        assert (
            rows[0]["status"] == "ok"
            and rows[0]["agreement_with"].startswith("failed: ")
            and "too much" in str(rows[0])
        )
        rows, _ = bench(*THROUGHPUT, "preset:tiny:fp32")
        assert [row["status"] for row in rows] == ["ok", "failed"] and "too much" in rows[1][
            "reason"
        ]
    rows, _ = bench(*THROUGHPUT, "preset:tiny:fp32")
    assert [(row["bench"], row.get("agreement")) for row in rows[2:]] == [("agreement", 1.0)]


@pytest.mark.parametrize(
    "model",
    ["preset:tiny-moe:int4-sym", "preset:tiny-moe:bf16", "preset:tiny:w8a8", "preset:tiny:fp8"],
)
def test_the_weights_one_block_at_a_time_give_what_all_at_once_give(model, monkeypatch):
    load, alive = Block.load, []

    def watched(*args, **options):
        assert not any(reference() for reference in alive), "the block before is still there"
        block = load(*args, **options)
        alive.append(weakref.ref(block))
        return block

    _, preset, scheme = model.split(":")
    cpu_device, sequences = (
        torch.device("cpu"),
        torch.randint(0, 16384, (2, 12), generator=torch.Generator().manual_seed(1)),
    )
    whole = Decoder.load(
        PresetWeights(preset, scheme), device=cpu_device, dtype=torch.float32, exact=True
    )
    monkeypatch.setattr(Block, "load", watched)
    monkeypatch.setattr(exact, "AT_ONCE", 5)  # fewer than a sequence has
    reference = Reference.open(model, device=cpu_device, dtype="float32")
    found, meter = reference.logits(sequences.tolist(), [0, 10, 11])
    assert len(alive) == whole.config.layers
    expected = whole.forward_whole(sequences)[:, [0, 10, 11]]
    if not meter.products:
        torch.testing.assert_close(found, expected)
    # sums of another number of rows may differ in their last bit, and an activation then rounds to
    # another code
    assert (found - expected).std() < reference.noise(meter, "float32") * expected.std()


def test_an_engine_that_hides_its_tokens_is_not_compared():
    class Silent:
        def generate(self, prompts, output):
            from flyweight.clock import Answer, Run

            return Run(0.0, 1.0, tuple(Answer(0.0, ((1.0, output),), ()) for _ in prompts))

    with pytest.raises(check.ResultError, match="does not tell the ids"):
        check.answers(Silent(), [[1, 2]], 3)


def test_the_report_shows_it_beside_the_speeds_that_lack_it(bench, tmp_path):
    bench(*SPEED, "preset:tiny:int4", "--no-check")
    bench(*THROUGHPUT, "preset:tiny:int4", "--no-check")
    bench(*SERVE, "preset:tiny:int4", "--no-check")
    bench(*SPEED, "preset:tiny:int4")
    bench(*THROUGHPUT, "preset:tiny:fp32")
    view = View(read([bench.out]))
    for name in ("speed", "throughput", "serve"):
        record = view.records(name)[0]
        assert (
            record["agreement_clear"] == 1.0
            and record["agreement_with"] == f"{WEIGHTS}, checked apart"
        )
    assert view.records("throughput")[1]["agreement_with"] == WEIGHTS, "its own row's wins"
    for ending in ("md", "rst", "html"):
        path = tmp_path / f"report.{ending}"
        with pytest.raises(SystemExit):
            cli.main(["report", str(bench.out), "-o", str(path), "--no-figures"])
        text = path.read_text()
        assert text.count("checked apart") == 4 and "Same tokens" in text


def test_an_agreement_of_other_weights_or_another_device_is_not_borrowed(bench):
    bench(*THROUGHPUT, "preset:tiny:int4", "--no-check")
    bench(*THROUGHPUT, "preset:tiny:int4")
    lines = [json.loads(line) for line in bench.out.read_text().splitlines()]

    def with_change(**change):
        bench.out.write_text(
            "".join(
                json.dumps(row | (change if row["bench"] == "agreement" else {})) + "\n"
                for row in lines
            )
        )
        return View(read([bench.out])).records("throughput")[0].get("agreement")

    assert with_change() == 1.0
    assert (
        with_change(checkpoint="random:1")
        is with_change(backend="vllm")
        is with_change(environment=None)
        is None
    )


def test_native_in_half_precision_is_compared_in_half_precision(monkeypatch):
    add_tiny(monkeypatch)
    monkeypatch.setattr("flyweight.cpu.slowdown", lambda dtype: 1.0)  # whatever this CPU can do
    backend = base.create(
        "native", "preset:tiny:fp32", EngineOptions(device="cpu", dtype="bfloat16")
    )
    backend.start(Limits(2, 12, None))
    asked, opened = [], Reference.open
    monkeypatch.setattr(
        Reference,
        "open",
        lambda *args, **options: asked.append(options["dtype"]) or opened(*args, **options),
    )
    case = Case(facts_of(Variant("preset:tiny:fp32")), backend, "native", model="preset:tiny:fp32")
    prompts = [[1, 2, 3]]
    check.check_tokens(
        case, prompts, check.answers(backend, prompts, 4), device=torch.device("cpu")
    )
    assert asked == ["bfloat16"]

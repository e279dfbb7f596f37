"""Sweeps of tiny models on this machine's CPU: which rows they leave, and what they do when started
again."""

import json

import pytest
import transformers
from tiny_preset import CONFIG, add_tiny

from flyweight import cli, machine
from flyweight.backends import base
from flyweight.bench.facts import Variant, comparable, facts_of
from flyweight.bench.sweep import Sweep
from flyweight.models import presets
from flyweight.report.read import read
from flyweight.report.rows import read_jsonl


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    add_tiny(monkeypatch)
    monkeypatch.setitem(
        machine.COPY_BYTES, "cpu", 1 << 14
    )  # one thread copies it: the bandwidth matters to nobody here


@pytest.fixture
def bench(tmp_path, capsys):
    """Run `flyweight bench …`: exit code, the rows in its file, stderr."""
    out = tmp_path / "result.jsonl"

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main(["bench", *map(str, arguments), "--out", str(out), "--device", "cpu"])
        error = capsys.readouterr().err
        return exit.value.code, list(read_jsonl(out).rows) if out.exists() else [], error

    run.out = out
    return run


SHAPE = ("--batch", 2, "--input", 8, "--output", 6)


def test_latency_rows_have_the_fields_and_figures_of_the_schema(bench):
    code, rows, _ = bench("latency", "preset:tiny:fp32", "preset:tiny:w8a8", *SHAPE, "--repeats", 3)
    assert code == 0 and len(rows) == 6 and len({row["run_id"] for row in rows}) == 6
    for row in rows:
        assert row["status"] == "ok" and (row["batch"], row["input"], row["output"]) == (2, 8, 6)
        assert (row["model"], row["checkpoint"], row["weights"], row["backend"]) == (
            "tiny",
            "random:0",
            "random",
            "native",
        )
        assert 0 < row["ttft_ms"] <= row["ttft_ms_last"] < 1e3 * row["latency_s"] and row[
            "kv_dtype"
        ] in ("float32", "float16")
        assert row["decode_tok_s"] * row["tpot_ms"] == pytest.approx(2e3, rel=1e-4)
        assert row["overall_tok_s"] == pytest.approx(2 * 14 / row["latency_s"], rel=1e-4)
        assert row["share_of_limit"] == pytest.approx(
            row["decode_tok_s"] / row["limit_tok_s"], rel=1e-4
        )
        assert row["outlier"] in (True, False) and row["weights_gb"] > 0 and row["kv_gb"] > 0
        assert row["start_s"] > 0
    assert {row["repeat"] for row in rows} == {1, 2, 3}
    assert [row["scheme"] for row in rows] == ["fp32", "w8a8", "w8a8", "fp32", "fp32", "w8a8"], (
        "they take turns"
    )
    assert rows[0]["bits_per_weight"] == 32 and 8 < rows[1]["bits_per_weight"] < 10
    machine = read_jsonl(bench.out).environments[rows[0]["environment"]]
    assert machine["copy_gb_s"] > 0 and machine["command"] and machine["torch"]


def test_sampled_runs_have_rows_of_their_own_that_say_so(bench):
    asked = ("latency", "preset:tiny:fp32", *SHAPE, "--repeats", 1)
    for sampling in ((), ("--sampling", "top_k=5, top_p=0.9"), ("--sampling", "top_k=5,top_p=0.9")):
        code, rows, _ = bench(*asked, *sampling, "--no-check" if not sampling else "--check")
        assert code == 0
    assert [row.get("sampling") for row in rows] == [None, "temperature=1.0,top_k=5,top_p=0.9"], (
        "the third was there"
    )
    assert (
        rows[1]["backend"] == "native (temperature=1.0, top_k=5, top_p=0.9)"
        and rows[1]["status"] == "ok"
    )
    for wrong, message in (
        ("topk=5", "top_k"),
        ("top_p=much", "top_p=NUMBER"),
        ("top_p=7", "between"),
    ):
        code, _, error = bench(*asked, "--sampling", wrong)
        assert code == 2 and message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        ("a folder", "a text file is wanted"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    bench, tmp_path, content, message
):
    path = tmp_path / "asked.txt"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    code, _, error = bench("latency", "preset:tiny:fp32", *SHAPE, "--text", path)
    assert code == 2 and f"--text {path}: " in error and message in error
    assert len(error.strip().splitlines()) == 1 and not bench.out.exists()


def test_guesses_that_no_step_takes_are_refused_before_a_model_is_loaded(bench):
    code, _, error = bench("latency", "preset:tiny:fp32", *SHAPE, "--speculate", "ngram:99")
    assert code == 2 and "1 to 15 guesses, not 99" in error and not bench.out.exists()


def test_a_finished_row_is_never_run_twice(bench):
    bench("latency", "preset:tiny:fp32", *SHAPE, "--repeats", 2, "--no-check")
    lines = bench.out.read_text().splitlines()
    code, _, error = bench("latency", "preset:tiny:fp32", *SHAPE, "--repeats", 2, "--no-check")
    assert code == 0 and bench.out.read_text().splitlines() == lines and "loading" not in error
    bench.out.write_text("\n".join(lines[:-1]) + "\n")  # as if it had been cut off
    _, rows, _ = bench("latency", "preset:tiny:fp32", *SHAPE, "--repeats", 2, "--no-check")
    assert [row["repeat"] for row in rows] == [1, 2] and rows[0] == json.loads(lines[1])


def test_a_row_is_in_the_file_before_the_next_workload_begins(bench, monkeypatch):
    before = []
    warm = Sweep.warm

    def watched(self, case, workload):
        before.append(bench.out.read_text().count("latency_s") if bench.out.exists() else 0)
        if len(before) == 3:
            raise KeyboardInterrupt
        return warm(self, case, workload)

    monkeypatch.setattr(Sweep, "warm", watched)
    shapes = ("--input", 4, "--input", 6, "--input", 8, "--output", 3)
    code, _, _ = bench("speed", "preset:tiny:fp32", *shapes, "--repeats", 1, "--no-check")
    assert before == [0, 1, 2] and code == 130
    rows = [json.loads(line) for line in bench.out.read_text().splitlines()]
    assert [row.get("input") for row in rows] == [None, 4, 6], "of the run that was cut off"


def test_random_weights_are_checked_against_themselves_dequantized(bench):
    _, rows, _ = bench("latency", "preset:tiny:fp32", "preset:tiny:int4", *SHAPE, "--repeats", 1)
    for row in rows:
        assert row["agreement_with"] == "the same weights, dequantized"
        assert row["agreement"] >= 0.8 and row["check_loss"] <= row["check_bound"], (
            "a near tie may fall either way"
        )
        assert (
            row["agreement_clear"] == 1.0
            and 0 < row["agreement_clear_tokens"] <= row["agreement_tokens"]
        )
    assert rows[0]["agreement"] == 1.0 and rows[0]["check_loss"] == 0, (
        "float32 weights are what they are"
    )


def test_two_variants_of_the_same_random_weights_are_each_checked(bench):
    _, rows, error = bench(
        "latency", "a=preset:tiny:int4", "b=preset:tiny:int4", *SHAPE, "--repeats", 1
    )
    assert [row["agreement_clear"] for row in rows] == [1.0, 1.0] and error.count("checking") == 2


def test_a_longer_input_makes_a_new_cache_and_keeps_the_weights(bench, monkeypatch):
    from flyweight.engine import llm

    load, loads = llm.load_decoder, []
    monkeypatch.setattr(
        llm,
        "load_decoder",
        lambda *args, **options: loads.append(options) or load(*args, **options),
    )
    _, rows, _ = bench(
        "speed",
        "preset:tiny:fp32",
        "--input",
        4,
        "--input",
        24,
        "--output",
        4,
        "--repeats",
        1,
        "--no-check",
    )
    assert len(loads) == 1 and rows[0]["kv_gb"] < rows[1]["kv_gb"]


def test_transformers_runs_the_same_random_weights_and_chooses_the_same_tokens(bench):
    code, rows, _ = bench(
        "latency",
        "preset:tiny:fp32",
        "--backend",
        "native",
        "--backend",
        "transformers",
        *SHAPE,
        "--repeats",
        1,
    )
    ours, theirs = rows
    assert code == 0 and (ours["backend"], theirs["backend"]) == ("native", "transformers")
    assert theirs["agreement"] >= 0.95 and theirs["agreement_with"] == "tiny fp32 on native"
    assert theirs["weights_gb"] == pytest.approx(ours["weights_gb"], rel=0.02)


@pytest.fixture
def half(monkeypatch):
    """AWQ and GPTQ files hold scales in float16."""
    monkeypatch.setitem(presets.PRESETS, "tiny", CONFIG | dict(dtype="bfloat16"))


def test_what_an_engine_cannot_load_is_skipped_with_the_reason_and_not_tried_again(
    bench, half, monkeypatch
):
    read = []

    def from_pretrained(folder, **_):
        read.append(
            json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
        )
        raise ImportError("Loading an AWQ model requires a package.\nInstall it.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    arguments = (
        "latency",
        "preset:tiny:int4",
        "--backend",
        "transformers",
        *SHAPE,
        "--repeats",
        2,
        "--no-check",
    )
    code, rows, _ = bench(*arguments)
    assert code == 1 and [row["status"] for row in rows] == ["skipped"]
    assert rows[0]["reason"].endswith(
        "without another package (Loading an AWQ model requires a package.)"
    )
    assert read == ["awq"], "the whole model is not written for a loader that is not there"
    assert bench(*arguments)[1] == rows
    _, rows, _ = bench("latency", "preset:tiny:vptq", *arguments[2:])
    assert rows[-1]["reason"].startswith("transformers is given no vptq files here")


def test_transformers_reads_a_quantized_preset_from_files(bench, half, monkeypatch):
    folders = []

    def from_pretrained(folder, **options):  # the package that its own loader asks for is not here
        config = json.loads((folder / "config.json").read_text())
        folders.append((config["quantization_config"]["bits"], config["hidden_size"]))
        config.pop("quantization_config")
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    code, rows, error = bench(
        "latency",
        "preset:tiny:w8a16",
        "--backend",
        "transformers",
        *SHAPE,
        "--repeats",
        1,
        "--no-check",
    )
    assert code == 0 and rows[0]["status"] == "ok" and [bits for bits, _ in folders] == [8, 8], (
        error
    )


def test_work_beyond_the_context_is_skipped_and_the_rest_is_measured(bench):
    _, rows, _ = bench(
        "speed",
        "preset:tiny:fp32",
        "--input",
        1,
        "--input",
        500,
        "--output",
        4,
        "--repeats",
        1,
        "--no-check",
    )
    assert [(row["input"], row["status"]) for row in rows] == [(1, "ok"), (500, "skipped")]
    assert "more than the model's context of 128" in rows[1]["reason"]


def test_a_failing_run_is_a_row_and_the_sweep_goes_on(bench, monkeypatch):
    from flyweight.backends.native import Native

    original = Native.generate

    def generate(self, prompts, output):
        if len(prompts) == 3:
            raise RuntimeError("CUDA out of memory: too much")
        return original(self, prompts, output)

    monkeypatch.setattr(Native, "generate", generate)
    code, rows, _ = bench(
        "throughput",
        "preset:tiny:fp32",
        "--prompts",
        3,
        "--prompts",
        2,
        "--input",
        8,
        "--output",
        4,
        "--repeats",
        1,
        "--no-check",
    )
    assert code == 0 and [(row["prompts"], row["status"]) for row in rows] == [
        (3, "oom"),
        (2, "ok"),
    ]


def test_speed_counts_both_ways(bench):
    _, rows, _ = bench(
        "speed",
        "preset:tiny:fp32",
        "preset:tiny:int4",
        "--input",
        1,
        "--input",
        24,
        "--output",
        8,
        "--repeats",
        1,
    )
    assert [(row["scheme"], row["input"]) for row in rows] == [
        ("fp32", 1),
        ("fp32", 24),
        ("int4", 1),
        ("int4", 24),
    ]
    for row in rows:
        assert (
            row["output_tok_s"] == pytest.approx(8 / row["latency_s"], rel=1e-4)
            and row["decode_tok_s"] > 0
        )
        assert row["gpus"] == 1 and row["agreement"] == 1.0
    assert rows[1]["kv_gb"] > rows[0]["kv_gb"], (
        "the check is of the run's own tokens, and needs no room"
    )
    _, rows, _ = bench(
        "speed",
        "preset:tiny:fp16",
        "--input",
        1,
        "--input",
        64,
        "--output",
        8,
        "--repeats",
        1,
        "--no-check",
    )
    assert rows[-1]["kv_gb"] > rows[-2]["kv_gb"], "the cache is that of the length"


def test_throughput_counts_requests_and_tokens(bench):
    _, rows, _ = bench(
        "throughput",
        "preset:tiny:fp32",
        "--prompts",
        6,
        "--input",
        8,
        "--output",
        4,
        "--sequences",
        2,
        "--repeats",
        2,
        "--option",
        "blocks=64",
    )
    for row in rows:
        assert row["qps"] == pytest.approx(6 / row["latency_s"], rel=1e-4)
        assert row["total_tok_s"] == pytest.approx(6 * 12 / row["latency_s"], rel=1e-4)
        assert row["backend"] == "native (blocks=64)"


def test_the_report_reads_what_the_benches_write(bench):
    bench("latency", "original=preset:tiny:fp32", "w8a8=preset:tiny:w8a8", *SHAPE, "--repeats", 3)
    bench("speed", "preset:tiny:fp32", "--input", 4, "--output", 4, "--repeats", 1)
    bench(
        "throughput",
        "preset:tiny:fp32",
        "--prompts",
        2,
        "--input",
        4,
        "--output",
        4,
        "--repeats",
        1,
    )
    results = read([bench.out])
    assert {row["bench"] for row in results.rows} == {"latency", "speed", "throughput"}
    cli_report = bench.out.with_suffix(".md")
    with pytest.raises(SystemExit) as exit:
        cli.main(["report", str(bench.out), "-o", str(cli_report)])
    text = cli_report.read_text()
    assert exit.value.code == 0 and "batch_size=2, input_len=8" in text and "over original" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "preset:tiny", "--workload", "interactve"], "did you mean 'interactive'?"),
        (["latency", "preset:tiny", "--batch", "2"], "needs --batch, --input and --output"),
        (
            ["latency", "preset:tiny", "--backend", "natve"],
            "unknown backend 'natve'; did you mean 'native'?",
        ),
        (["latency", "preset:tiny", "preset:tiny"], "two variants would be called 'bf16'"),
        (["latency", "=preset:tiny"], "NAME=MODEL"),
        (["latency", "preset:tiny", "--option", "blocks"], "KEY=VALUE"),
        (
            ["latency", "preset:tiny", "--tensor-parallel", "2"],
            "--backend vllm --tensor-parallel 2",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(bench, arguments, message):
    code, rows, error = bench(*arguments)
    assert code == 2 and rows == [] and message in error


@pytest.mark.parametrize("name", ["vllm", "vllm-server", "sglang"])
def test_an_engine_that_is_not_installed_says_how_to_get_it(bench, monkeypatch, name):
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda module: None)
    code, _, error = bench("latency", "preset:tiny", "--backend", name, *SHAPE)
    assert code == 2 and "is not installed" in error and "pip install" in error


def test_facts_tell_sizes_and_what_can_be_compared(tmp_path):
    full, int4 = facts_of(Variant("preset:tiny:fp32")), facts_of(Variant("preset:tiny:int4"))
    assert full.size_gb > int4.size_gb and not comparable(full, int4) and comparable(full, full)
    limit = full.decode_limit(batch=1, input=10, output=1, kv_dtype="float32", copy_gb_s=1.0)
    assert limit == pytest.approx(1e9 / (full.step_bytes + 11 * 2 * 2 * 2 * 8 * 4))
    assert facts_of(Variant("preset:tiny:fp32", "mine")).scheme == "mine"


def test_the_facts_of_a_gpu_are_asked_for_at_once(monkeypatch):
    from flyweight.bench import environment

    asked = []
    monkeypatch.setattr(
        environment,
        "nvidia",
        lambda query: (
            asked.append(query) or "580.95.05, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700.00 W"
        ),
    )
    assert environment.gpu_facts() == {
        "driver": "580.95.05",
        "clocks": "1980 MHz, 3201 MHz",
        "clocks_most": "1980 MHz, 3201 MHz",
        "power_limit": "700.00 W",
    }
    assert len(asked) == 1
    monkeypatch.setattr(environment, "nvidia", lambda query: None)
    assert set(environment.gpu_facts().values()) == {None}


@pytest.mark.parametrize("told, percent", [("97 %", 97), ("0 %", 0), ("[N/A]", None), (None, None)])
def test_whoever_else_keeps_the_gpu_busy_is_noticed(told, percent, monkeypatch, capsys):
    from flyweight.bench import environment

    monkeypatch.setattr(environment, "nvidia", lambda query: told)
    assert environment.facts(measure_bandwidth=False)["busy"] == percent
    assert ("97 % busy" in capsys.readouterr().err) == (percent == 97)


@pytest.mark.parametrize(
    "word, told",
    [
        ("/usr/lib/flyweight", "flyweight"),
        ("--out=/a/b.jsonl", "--out=b.jsonl"),
        ("awq=/models/qwen", "awq=qwen"),
        ("out/b.jsonl", "out/b.jsonl"),
        ("--seed", "--seed"),
    ],
)
def test_a_row_tells_the_command_without_the_folders_of_this_machine(word, told):
    from flyweight.bench import environment

    assert environment.without_folder(word) == told

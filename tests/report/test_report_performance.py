"""The native engine's rows beside vLLM's, cell by cell."""

from flyweight.report.performance import limits
from flyweight.report.rows import Results


def row(backend, scheme, decode, *, input=256, number=[0], **more):  # noqa: B006 (a counter)
    number[0] += 1
    return {
        "bench": "latency",
        "run_id": str(number[0]),
        "status": "ok",
        "environment": "e",
        "backend": backend,
        "model": "m",
        "scheme": scheme,
        "checkpoint": f"random:{backend}",
        "workload": "decode_bound",
        "batch": 1,
        "input": input,
        "output": 64,
        "latency_s": 1.0,
        "decode_tok_s": decode,
        "ttft_ms_last": 20.0,
        "overall_tok_s": 300.0,
        **more,
    }


def table_of(*rows):
    blocks = limits(Results(rows, {"e": {"device": "a GPU"}}))
    return blocks[2] if blocks else None


def test_kinds_of_weight_are_joined_whatever_the_engines_call_them():
    table = table_of(
        row("native", "int4", 600.0, limit_tok_s=800.0, share_of_limit=0.75),
        row("vllm", "awq4", 200.0),
        row("native", "w8a8_smooth_gptq", 500.0),
        row("vllm", "bf16", 150.0),
    )
    first, second = table.rows
    assert first[:8] == ("decode_bound", "int4", "600.0", "200.0", "3.00", "800", "75%", "20.0")
    assert second[1:5] == ("w8a8_smooth_gptq", "500.0", "–", "–"), "vLLM has no row of that kind"


def test_of_several_settings_the_fastest_counts():
    slow = row("vllm (no compiler)", "awq4", 100.0, latency_s=2.0)
    for rows in ((slow, row("vllm", "awq4", 200.0)), (row("vllm", "awq4", 200.0), slow)):
        assert table_of(row("native", "int4", 600.0), *rows).rows[0][2:4] == ("600.0", "200.0")


def test_other_work_is_never_joined():
    assert (
        table_of(row("native", "int4", 600.0), row("vllm", "awq4", 200.0, input=128)).headers.count(
            "vLLM"
        )
        == 0
    )


def test_there_is_no_table_without_our_own_rows():
    assert table_of(row("vllm", "awq4", 200.0)) is None


def test_what_is_slower_than_bf16_is_named():
    rows = (
        row("native", "bf16", 300.0),
        row("native", "int4", 600.0, latency_s=0.5),
        row("native", "vptq", 100.0, latency_s=3.0),
    )
    told = limits(Results(rows, {"e": {"device": "a GPU"}}))[3].text
    assert told == "Slower than bf16: vptq on decode_bound (3.00 × the time)."
    assert limits(Results(rows[:2], {"e": {"device": "a GPU"}}))[3].text.startswith(
        "No variant takes longer"
    )

"""How fast the native engine is beside vLLM and beside the memory's limit, and where the time of a
decode step goes.

Rows of two engines are joined where model, device, work and kind of weight are the same; what each
engine calls that kind is in KINDS. Both tables are made of whatever rows there are.
"""

from __future__ import annotations

import math
from typing import Any

from flyweight.report.blocks import Block, Column, Heading, Paragraph, make_table
from flyweight.report.records import Record, make_record
from flyweight.report.rows import Results, group

OWN, PEER = "native", "vllm"
KINDS = {  # scheme → the kind of weight that is multiplied with, where its name is another
    "original": "bf16",
    "awq4": "int4",
    "awq": "int4",
    "gptq-int4": "int4-sym",
    "gptq-int8": "w8a16",
    "w8a16_awq": "w8a16",
    "w8a16_smooth_awq": "w8a16",
    "w8a8_smooth_ptq": "w8a8",
    "w8a8_smooth_gptq": "w8a8",
}
BANDWIDTH = (
    Column("the limit", "limit_tok_s", ".0f", optional=True),
    Column("share of the limit", "share_of_limit", ".0%", optional=True),
)


def compared(
    name: str,
    field: str,
    form: str,
    ratio: tuple[str, str] | None = None,
    *,
    optional: bool = False,
) -> list[Column]:
    """Our figure, vLLM's, and the `ratio` (title, field) of both where there is one."""
    peer = Column("vLLM", f"peer_{field}", form, optional=True)
    ratios = [Column(ratio[0], ratio[1], ".2f", optional=True)] if ratio else []
    return [Column(name, field, form, optional=optional), peer, *ratios]


LIMITS = (
    Column("Workload", "work"),
    Column("Variant", "label"),
    *compared("Decode (tok/s)", "decode_tok_s", ".1f", ("× vLLM", "decode_ratio")),
    *BANDWIDTH,
    *compared("TTFT, last (ms)", "ttft_ms_last", ".1f", ("÷ vLLM", "ttft_ratio")),
    *compared("Overall (tok/s)", "overall_tok_s", ".0f", ("× vLLM", "overall_ratio")),
)
LENGTHS = (
    Column("Input", "input"),
    Column("Variant", "label"),
    *compared("Prefill included (tok/s)", "output_tok_s", ".1f", ("× vLLM", "output_ratio")),
    Column("Decode only (tok/s)", "decode_tok_s", ".1f", optional=True),
    *BANDWIDTH,
    *compared("TTFT (ms)", "ttft_ms_last", ".1f", optional=True),
)
RATIOS = {
    "decode_ratio": "decode_tok_s",
    "ttft_ratio": "ttft_ms_last",
    "overall_ratio": "overall_tok_s",
    "output_ratio": "output_tok_s",
}
STEP = (
    Column("Model", "model"),
    Column("Variant", "scheme"),
    Column("Batch", "batch"),
    Column("step", "step", ".0f"),
    Column("linears", "linears", ".0f", absent="0"),
    Column("qkv with attention", "qkv with attention", ".0f", optional=True),
    Column("attention", "attention", ".0f", optional=True),
    Column("lm_head", "lm_head", ".0f", absent="0"),
    Column("other kernels", "other kernels", ".0f", absent="0"),
    Column("gaps", "gaps", ".0f", absent="0"),
    Column("kernels", "kernels"),
    Column("host, beside them", "host", ".0f"),
)


def kind_of(record: Record) -> str:
    name = str(record["scheme"])
    return KINDS.get(name.lower(), name.lower())


def beside(results: Results, bench: str) -> list[Record]:
    """The native engine's records, each with the peer's figures of the same cell: those of its
    fastest settings.
    """
    records = [make_record(one) for one in group(results, results.of(bench))]

    def cell(record: Record) -> tuple[Any, ...]:
        return kind_of(record), *(
            record.get(name) for name in ("model", "device_name", "batch", "input", "output")
        )

    peers: dict[tuple[Any, ...], Record] = {}
    for record in (one for one in records if str(one["backend"]).startswith(PEER)):
        peers[cell(record)] = min(
            record,
            peers.get(cell(record), record),
            key=lambda one: one.get("latency_s") or math.inf,
        )
    ours = [
        record
        for record in records
        if str(record["backend"]).startswith(OWN) and record.get("decode_tok_s")
    ]
    for record in ours:
        peer = peers.get(cell(record), {})
        record["label"] = record["scheme"] + (
            f", {record['kv_dtype']}" if record.get("kv_dtype") == "float16" else ""
        )
        record["work"] = record.get("workload") or "unnamed"
        for name, metric in RATIOS.items():
            record[f"peer_{metric}"] = peer.get(metric)
            if record.get(metric) and peer.get(metric):
                record[name] = record[metric] / peer[metric]
    return ours


def limits(results: Results) -> list[Block]:
    blocks: list[Block] = []
    for bench, columns, text in (
        ("latency", LIMITS, "by workload"),
        ("speed", LENGTHS, "one prompt by input length"),
    ):
        parts: dict[tuple[Any, Any], list[Record]] = {}
        for record in beside(results, bench):
            parts.setdefault((record["model"], record["device_name"]), []).append(record)
        for (model, device), records in parts.items():
            places = list(dict.fromkeys((one["work"], one["input"]) for one in records))
            records.sort(key=lambda one: places.index((one["work"], one["input"])))
            blocks.append(make_table(f"{model} on {device}, {text}", columns, records))
            if bench == "latency":
                blocks += slower_than_bf16(records)
    peers = any(
        str(row["backend"]).startswith(PEER)
        for bench in ("latency", "speed")
        for row in results.of(bench)
    )
    return (
        [
            Heading("Beside vLLM and the limit" if peers else "Beside the memory's limit"),
            Paragraph(
                "The limit is the rate at which the weights and the KV cache of the mean context "
                "could be read at the measured copy bandwidth, once a step; reading alone is a few "
                "percent faster than copying, so shares just over 100 % occur."
            ),
            *blocks,
        ]
        if blocks
        else []
    )


def slower_than_bf16(records: list[Record]) -> list[Block]:
    """Quantized and slower is the one thing that must not be: which variants are, by the time of
    the whole batch.
    """
    plain = {one["work"]: one["latency_s"] for one in records if kind_of(one) == "bf16"}
    others = [one for one in records if kind_of(one) != "bf16" and one["work"] in plain]
    slow = [
        f"{one['label']} on {one['work']} ({one['latency_s'] / plain[one['work']]:.2f} × the time)"
        for one in others
        if one["latency_s"] > plain[one["work"]]
    ]
    if not others:
        return []
    return [
        Paragraph(
            f"Slower than bf16: {'; '.join(slow)}."
            if slow
            else "No variant takes longer than bf16 on any of these workloads."
        )
    ]


def step_table(results: Results) -> list[Block]:
    """One line for each model, scheme and batch, microseconds of one step."""
    lines: dict[tuple[Any, ...], Record] = {}
    for row in (row for row in results.of("profile") if row.get("level") == "part"):
        key = (
            results.device(row),
            *(row.get(name) for name in ("model", "scheme", "kv_dtype", "batch", "input")),
        )
        line = lines.setdefault(
            key,
            {
                **{name: row.get(name) for name in ("model", "scheme", "batch", "input")},
                "kernels": 0,
            },
        )
        line[row["operator"]] = row["self_us"]
        line["kernels"] += (
            row["calls"]
            if row["kind"] == "device" and row["operator"] not in ("step", "gaps")
            else 0
        )
    tables = [
        make_table(
            f"One decode step on {device}, microseconds",
            STEP,
            [line for key, line in lines.items() if key[0] == device],
        )
        for device in dict.fromkeys(key[0] for key in lines)
    ]
    return (
        [
            Heading("Where a decode step's time goes"),
            *tables,
            Paragraph(
                "`step` is the wall clock of the engine; the parts are from a recording, each "
                "kernel charged with the time by which it is the last to end, because launches "
                "overlap. The host works beside the device: it is in the way only where it takes "
                "longer than the step."
            ),
        ]
        if tables
        else []
    )

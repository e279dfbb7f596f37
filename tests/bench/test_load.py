"""Load on made-up time: arrivals, queues, failures and what becomes of them in the figures, all
known beforehand."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from virtual_server import Script, run_virtual, with_server

from flyweight.backends.openai import Endpoint, Event, Reply
from flyweight.bench.arrivals import bursts, read_trace
from flyweight.bench.datasets import (
    Conversation,
    RandomIds,
    Turn,
    from_trace,
    read_conversations,
    schedule,
)
from flyweight.bench.load import run_load
from flyweight.bench.serving import Objective, figures, find_max_rate, sample
from flyweight.errors import OptionError


def drive(script, conversations, **options):
    async def use(url):
        endpoint = Endpoint(url, "mock")
        records = await run_load(endpoint, conversations, **options)
        endpoint.client.close()
        return records

    return with_server(script, use)


def talks(count, *, output=5, arrivals=None):
    found = [Conversation((Turn((1, 2, 3), output),)) for _ in range(count)]
    return found if arrivals is None else schedule(found, arrivals)


def test_open_loop_requests_are_due_at_their_times_whatever_the_server_does():
    records = drive(Script(first=1.0, gap=0.5, slots=1), talks(3, arrivals=[0.0, 0.25, 4.0]))
    by_index = sorted(records, key=lambda record: record.index)
    # 3 s of service each, one at a time: the second waits from 0.25 to 3.0, the third from 4.0 to
    # 6.0
    assert [record.answer.ttft for record in by_index] == pytest.approx([1.0, 3.75, 3.0], abs=1e-6)
    assert [record.answer.tpot for record in by_index] == pytest.approx([0.5] * 3, abs=1e-6)
    found = figures(records, Objective(ttft=3100))
    assert found["duration_s"] == pytest.approx(9.0, abs=1e-5) and found[
        "goodput_s"
    ] == pytest.approx(2 / 9, abs=1e-5)
    assert found["achieved_rate"] == pytest.approx(0.5) and found["client_lag_ms"] == 0
    assert (
        found["count_source"] == "token_ids"
        and found["output_tokens"] == 15
        and found["input_tokens"] == 9
    )
    assert found["tpot_ms"]["p50"] == pytest.approx(500, rel=1e-5) and "p99" not in found["ttft_ms"]
    assert found["mean_concurrency"] == pytest.approx((3.0 + 5.75 + 5.0) / 9.0, abs=1e-5)


def test_a_closed_loop_keeps_so_many_going():
    records = drive(Script(first=1.0, gap=0.0), talks(6), concurrency=2)
    assert figures(records, Objective())["duration_s"] == pytest.approx(3.0, abs=1e-5)
    assert all(record.answer.ttft == pytest.approx(1.0, abs=1e-6) for record in records)


def test_a_cap_beside_a_rate_shows_as_lag_and_ttft_still_counts_from_the_arrival():
    records = sorted(
        drive(Script(first=1.0, gap=0.0), talks(2, arrivals=[0.0, 0.0]), concurrency=1),
        key=lambda one: one.index,
    )
    assert records[1].lag == pytest.approx(1.0, abs=1e-6) and records[
        1
    ].answer.ttft == pytest.approx(2.0, abs=1e-6)
    assert records[1].answer.ttft_sent == pytest.approx(1.0, abs=1e-6)


def test_turns_follow_one_another_with_all_that_was_said():
    script = Script(first=1.0, gap=0.0)
    records = drive(script, [Conversation((Turn((7, 8), 2), Turn((9,), 2)))])
    assert [body["prompt"] for _, body in script.bodies] == [[7, 8], [7, 8, 0, 1, 9]]
    assert [record.turn for record in records] == [0, 1] and records[
        1
    ].answer.ttft == pytest.approx(1.0, abs=1e-6)
    drive(script, [Conversation((Turn("hi", 2), Turn("and?", 2)))])
    path, body = script.bodies[-1]
    assert "chat" in path and [message["role"] for message in body["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


def test_failures_are_counted_by_kind_and_never_good():
    records = drive(Script(first=0.1, gap=0.0, refuse=[2]), talks(4), concurrency=1)
    found = figures(records, Objective(ttft=1000))
    assert found["flags"] == ["the first failure (http 503): HTTP 503: busy"]
    assert (
        found["failed"] == {"http 503": 1} and found["completed"] == 3 and found["attained"] == 0.75
    )
    assert figures(drive(Script(first=99.0), talks(2), concurrency=2, timeout=5.0), Objective())[
        "failed"
    ] == {"timeout": 2}


def test_a_raw_row_has_the_names_of_the_schema():
    record = drive(Script(first=0.25, gap=0.5), talks(1), concurrency=1)[0]
    row = sample(record, record.answer.arrival)
    assert (row["ttft_ms"], row["tpot_ms"], row["e2e_s"]) == pytest.approx(
        (250, 500, 2.25), rel=1e-4
    )
    assert row["chunks"][0] == [pytest.approx(0.25, abs=1e-5), 1] and row["output"] == 5


def test_an_engine_in_process_is_asked_the_same_way():
    class Engine:
        async def ask(self, prompt, output):
            import asyncio

            now = asyncio.get_running_loop().time
            reply = Reply(now())
            for token in range(output):
                await asyncio.sleep(0.5)
                reply.events.append(Event(now(), "", (token,)))
            return reply

    records = run_virtual(run_load(Engine(), talks(2, output=3), concurrency=2))
    assert [record.answer.ttft for record in records] == pytest.approx([0.5, 0.5]) and records[
        0
    ].source == "token_ids"


def test_arrivals_have_their_rate_and_their_seed():
    times = bursts(4000, 8.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.05) and bursts(5, 8.0, seed=1) == times[:5] != bursts(
        5, 8.0, seed=2
    )
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15), (
        "as exponential gaps have"
    )
    groups = bursts(4000, 8.0, size=4, seed=1)
    assert groups[0] == groups[3] != groups[4] and groups[-1] == pytest.approx(500, rel=0.1)


def test_traces_are_read_scaled_and_share_what_they_shared(tmp_path):
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    one, two = read_trace(azure, scale=2.0)
    assert (one.time, one.input, one.output) == (0.0, 374, 44) and two.time == pytest.approx(2.0)
    mooncake.write_text(
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]}\n'
    )
    talks = from_trace(read_trace(mooncake), vocabulary=1000)
    first, second = (talk.turns[0].prompt for talk in talks)
    assert [talk.arrival for talk in talks] == [0.0, 2.0] and (len(first), len(second)) == (
        700,
        600,
    )
    assert first[:512] == second[:512] and first[512:600] != second[512:600]
    assert len(read_trace(mooncake, count=1)) == 1
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    with pytest.raises(OptionError, match="neither an Azure CSV nor a Mooncake"):
        read_trace(bad)
    with pytest.raises(OptionError, match="no such file"):
        read_trace(tmp_path / "none")


def test_datasets_are_what_people_have(tmp_path):
    mt, share = tmp_path / "mt.jsonl", tmp_path / "share.json"
    mt.write_text('{"question_id": 81, "turns": ["Write.", "Rewrite."]}\n')
    share.write_text(
        '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, '
        '{"messages": []}]'
    )
    assert [turn.prompt for turn in read_conversations(mt, output=9)[0].turns] == [
        "Write.",
        "Rewrite.",
    ]
    assert len(read_conversations(mt, output=9, count=5)) == 5
    assert [talk.turns for talk in read_conversations(share, output=9)] == [(Turn("a", 9),)]
    with pytest.raises(OptionError, match="no line has conversations"):
        share.write_text('[{"text": "x"}]')
        read_conversations(share, output=9)
    talks = RandomIds(500, 20, 10, spread=0.5, prefix=6, turns=2, seed=3).make(50)
    assert talks == RandomIds(500, 20, 10, spread=0.5, prefix=6, turns=2, seed=3).make(50)
    assert {talk.turns[0].prompt[:6] for talk in talks} == {talks[0].turns[0].prompt[:6]} and len(
        talks[0].turns
    ) == 2
    lengths = [len(talk.turns[1].prompt) for talk in talks]
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(set(lengths)) > 5


def test_the_highest_rate_is_found_to_five_per_cent():
    tried = []

    def attained(rate):
        tried.append(rate)
        return 1.0 if rate <= 11.3 else 0.5

    best = find_max_rate(attained, wanted=0.9, start=1.0)
    assert 11.3 / 1.05 <= best <= 11.3 and len(tried) <= 12
    assert find_max_rate(lambda rate: 0.0, wanted=0.9, start=1.0, most_runs=4) is None


def test_objectives_are_read_strictly():
    assert Objective.parse(["ttft=500ms", "tpot=50"]).as_field() == {
        "ttft_ms": 500.0,
        "tpot_ms": 50.0,
    }
    with pytest.raises(OptionError, match="did you mean 'ttft'"):
        Objective.parse(["tftt=1"])
    with pytest.raises(OptionError, match="milliseconds are wanted"):
        Objective.parse(["ttft=fast"])


def test_the_client_imports_nothing_heavy():
    code = (
        "import sys, flyweight.bench.load; "
        "print([m for m in ('torch', 'transformers', 'httpx') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )

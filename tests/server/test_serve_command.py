"""`flyweight serve` as a process of its own: start-up, signals, and what it hands over to other
engines."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tiny_server import DEADLINE, START, wait_for

from flyweight.cli import main
from flyweight.commands import serve as serve_command
from flyweight.commands.serve import served_as
from flyweight.errors import OptionError, UnsupportedError
from flyweight.server import handover
from flyweight.server.logs import TextFormatter, one_word
from flyweight.server.run import listen

ENDLESS = dict(prompt="hello", temperature=0, ignore_eos=True, stream=True)


@pytest.fixture(autouse=True)
def log_handlers():
    """As they were: a command that is called in this process writes to a stream that ends with its
    test."""
    loggers = [logging.getLogger(name) for name in ("flyweight.server", "uvicorn")]
    before = [(one, one.handlers, one.propagate) for one in loggers]
    yield
    for one, handlers, propagate in before:
        one.handlers, one.propagate = handlers, propagate


class Process:
    """The command, and the events of its log as they come."""

    def __init__(self, *arguments):
        command = [
            sys.executable,
            "-m",
            "flyweight.cli",
            "serve",
            *map(str, arguments),
            "--port",
            "0",
            "--log-format",
            "json",
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "FLYWEIGHT_API_KEY": "from-the-environment",
        }
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines, self.events = [], {}
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a warning is no event
                event = json.loads(line)
                self.events[event["event"]] = event

    def wait(self, name):
        """Until the event is logged, or never will be: the log ends with the last of the two
        processes."""
        wait_for(lambda: name in self.events or not self.reader.is_alive(), name, seconds=START)
        assert name in self.events, "".join(self.lines)
        return self.events[name]

    @contextlib.contextmanager
    def asked(self, **body):
        """A request that the server has taken and the engine, which stands still, cannot answer
        yet: its future answer."""
        engine, url = (
            self.wait("engine_ready")["pid"],
            f"http://127.0.0.1:{self.wait('listening')['port']}",
        )
        os.kill(engine, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(
                httpx.post,
                f"{url}/v1/completions",
                json=ENDLESS | body,
                timeout=DEADLINE,
                headers={"authorization": "Bearer from-the-environment"},
            )
            wait_for(
                lambda: (
                    "samples_in_flight 1.0" in httpx.get(f"{url}/metrics", timeout=DEADLINE).text
                ),
                "the request",
            )
            try:
                yield answer, engine
            finally:  # it must not stand still for ever, whatever failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGCONT)


@pytest.fixture(scope="module")
def processes(tiny_folder):
    """Both at once, as most of a start is waiting for imports."""
    found = {"drained": Process(tiny_folder), "impatient": Process(tiny_folder)}
    yield found
    for one in found.values():
        one.process.kill()
        one.process.wait()


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_start_up_tells_the_memory_budget(processes):
    ready = processes["drained"].wait("engine_ready")
    assert (
        ready["kv_tokens"] > 0
        and ready["kv_gb"] > 0
        and ready["weight_gb"] >= 0
        and ready["context"] == 4096
    )
    listening = processes["drained"].wait("listening")
    assert listening["model"] == "tiny" and listening["api_key"] == "needed"
    assert "from-the-environment" not in "".join(processes["drained"].lines)


def test_sigterm_finishes_what_is_in_flight_and_then_exits(processes):
    server = processes["drained"]
    with server.asked(max_tokens=400) as (answer, engine):
        server.process.send_signal(signal.SIGTERM)
        assert server.wait("draining")["in_flight"] == 1
        os.kill(engine, signal.SIGCONT)
        events = [line for line in answer.result().text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and len(events) == 401
    assert server.process.wait(timeout=DEADLINE) == 0
    wait_for(lambda: gone(engine), "the engine to end")
    server.wait("stopped")


def test_a_second_sigterm_exits_at_once(processes):
    server = processes["impatient"]
    with server.asked(max_tokens=4000) as (answer, engine):  # which will not come
        server.process.send_signal(signal.SIGTERM)
        server.wait("draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=DEADLINE) == 128 + signal.SIGTERM
        assert isinstance(answer.exception(), httpx.HTTPError)
    wait_for(lambda: gone(engine), "the engine to end")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log-format", "xml"], "unknown log format 'xml'"),
        (["--api-key", ""], "--api-key is empty"),
        (["--backend", "vlm"], "unknown backend 'vlm'; did you mean 'vllm'?"),
        (["--backend", "vllm", "--strict"], "--strict is an option of the native server"),
        (
            ["--tensor-parallel", "2"],
            "are for --backend vllm or sglang: the native engine runs on one GPU",
        ),
        (
            ["--host", "192.0.2.1"],
            "cannot listen on 192.0.2.1:8000",
        ),  # an address that no machine has
    ],
)
def test_wrong_options_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["serve", "no-such-model/at-all", *arguments])
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and message in error and "\n" not in error


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False)],
)
def test_a_server_that_everybody_may_use_says_so(monkeypatch, capsys, host, keys, warned):
    monkeypatch.setattr("flyweight.server.run.listen", lambda *_: listen("127.0.0.1", 0))
    monkeypatch.setattr(
        "flyweight.server.run.Server",
        lambda settings, listener, tokenizer, others: type(
            "Server", (), {"run_all": lambda self: listener.close()}
        )(),
    )
    serve_command.run(
        ["preset:tiny"], {}, host=host, port=0, log_format="text", api_keys=keys, names=()
    )
    assert ("WARNING no_api_key" in capsys.readouterr().err) is warned


def test_vllm_gets_equivalent_arguments():
    argv, environment = handover.command(
        "vllm",
        "Qwen/Qwen3-8B",
        host="0.0.0.0",
        port=81,
        names=("a", "b"),
        keys=("k",),
        max_model_len=4096,
        memory_fraction=0.8,
        max_num_seqs=64,
        max_num_batched_tokens=None,
        dtype="bfloat16",
        prefix_cache=False,
        tensor_parallel=4,
        quantization="awq_marlin",
    )
    assert argv == [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "Qwen/Qwen3-8B",
        "--host",
        "0.0.0.0",
        "--port",
        "81",
        "--max-model-len",
        "4096",
        "--gpu-memory-utilization",
        "0.8",
        "--max-num-seqs",
        "64",
        "--dtype",
        "bfloat16",
        "--tensor-parallel-size",
        "4",
        "--quantization",
        "awq_marlin",
        "--served-model-name",
        "a",
        "b",
        "--no-enable-prefix-caching",
    ]
    assert environment == {"VLLM_API_KEY": "k"}


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (
            "vllm",
            [
                "--tensor-parallel-size",
                "2",
                "--pipeline-parallel-size",
                "2",
                "--data-parallel-size",
                "4",
            ],
        ),
        ("sglang", ["--tp-size", "2", "--pp-size", "2", "--dp-size", "4"]),
    ],
)
def test_several_gpus_and_nodes(backend, words):
    argv, _ = handover.command(
        backend,
        "m",
        tensor_parallel=2,
        pipeline_parallel=2,
        data_parallel=4,
        engine_arguments=("--nnodes=2", "--node-rank=0"),
    )
    assert argv[4:] == [*words, "--nnodes=2", "--node-rank=0"]


def test_one_gpu_says_which_engine_has_more(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "m", "--pipeline-parallel", "2"])
    assert end.value.code == 2 and "--backend vllm" in capsys.readouterr().err


def test_sglang_gets_equivalent_arguments():
    argv, environment = handover.command(
        "sglang",
        "m",
        host="::1",
        port=80,
        names=("a",),
        keys=("k",),
        max_model_len=10,
        memory_fraction=0.5,
        max_num_seqs=2,
        max_num_batched_tokens=9,
        dtype=None,
        tensor_parallel=2,
    )
    assert argv == [
        "-m",
        "sglang.launch_server",
        "--model-path",
        "m",
        "--host",
        "::1",
        "--port",
        "80",
        "--context-length",
        "10",
        "--mem-fraction-static",
        "0.5",
        "--max-running-requests",
        "2",
        "--chunked-prefill-size",
        "9",
        "--tp-size",
        "2",
        "--served-model-name",
        "a",
        "--api-key",
        "k",
    ]
    assert environment == {}


def test_what_cannot_be_handed_over_is_refused():
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        handover.command("vllm", "m", device="cpu")
    with pytest.raises(UnsupportedError, match="one API key"):
        handover.command("vllm", "m", keys=("a", "b"))
    with pytest.raises(OptionError, match="unknown backend"):
        handover.command("tgi", "m")
    assert set(handover.OPTIONS["vllm"]) == set(handover.OPTIONS["sglang"])


def test_the_process_becomes_the_other_server(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(handover.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
    with pytest.raises(SystemExit) as end:
        main(["serve", "Qwen/Qwen3-8B", "--backend", "sglang", "--port", "9"])
    assert not end.value.code and became[0][1][1:4] == [
        "-m",
        "sglang.launch_server",
        "--model-path",
    ]
    assert "Flyweight's kernels and formats: SGLang is not installed" in capsys.readouterr().err


def test_names_show_no_folders():
    assert (
        served_as("smollm2-135m") == "smollm2-135m"
        and served_as("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    )
    assert served_as("/data/models/mine/") == "mine" and served_as("./here/x.gguf") == "x.gguf"


def test_log_lines_stay_one_line():
    record = logging.LogRecord("flyweight.server", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": "/v1/x", "error": 'two\nlines = "bad"', "nothing": None}
    line = TextFormatter().format(record)
    assert "\n" not in line and line.endswith(
        'INFO request path=/v1/x error="two\\nlines = \\"bad\\""'
    )
    assert one_word("") == '""'

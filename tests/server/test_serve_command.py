"""`flyweight serve` as a process of its own: start-up, signals, and what it hands over to other engines."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from tiny_server import DEADLINE, wait_for

from flyweight.cli import main
from flyweight.commands.serve import served_as
from flyweight.errors import OptionError, UnsupportedError
from flyweight.server import handover
from flyweight.server.logs import TextFormatter, one_word

ENDLESS = dict(prompt="hello", temperature=0, ignore_eos=True, stream=True)


@pytest.fixture(autouse=True)
def log_handlers():
    """As they were: a command that is called in this process writes to a stream that ends with its test."""
    loggers = [logging.getLogger(name) for name in ("flyweight.server", "uvicorn")]
    before = [(one, one.handlers, one.propagate) for one in loggers]
    yield
    for one, handlers, propagate in before:
        one.handlers, one.propagate = handlers, propagate


class Process:
    """The command, and the events of its log as they come."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "flyweight.cli", "serve", *map(str, arguments), "--port", "0", "--log-format", "json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "FLYWEIGHT_API_KEY": "from-the-environment"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines, self.events = [], {}
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                self.events[event["event"]] = event

    def wait(self, name):
        wait_for(lambda: name in self.events or self.process.poll() is not None, name)
        assert name in self.events, "".join(self.lines)
        return self.events[name]

    def stream(self, **body):
        url = f"http://127.0.0.1:{self.wait('listening')['port']}/v1/completions"
        return httpx.stream("POST", url, json=ENDLESS | body, headers={"authorization": "Bearer from-the-environment"},
                            timeout=DEADLINE)


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
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return open(f"/proc/{pid}/stat").read().split()[2] == "Z" if os.path.exists(f"/proc/{pid}/stat") else True


def test_start_up_tells_the_memory_budget(processes):
    ready = processes["drained"].wait("engine_ready")
    assert ready["kv_tokens"] > 0 and ready["kv_gb"] > 0 and ready["weight_gb"] >= 0 and ready["context"] == 4096
    listening = processes["drained"].wait("listening")
    assert listening["model"] == "tiny" and listening["api_key"] == "needed"
    assert "from-the-environment" not in "".join(processes["drained"].lines)


def test_sigterm_finishes_what_is_in_flight_and_then_exits(processes):
    server = processes["drained"]
    server.wait("engine_ready")
    with server.stream(max_tokens=400) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait("draining")["in_flight"] == 1
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and len(rest) == 400
    assert server.process.wait(timeout=DEADLINE) == 0
    wait_for(lambda: gone(server.events["engine_ready"]["pid"]), "the engine to end")
    wait_for(lambda: "stopped" in server.events, "the last line")


def test_a_second_sigterm_exits_at_once(processes):
    server = processes["impatient"]
    engine = server.wait("engine_ready")["pid"]
    with server.stream(max_tokens=4000) as stream, contextlib.suppress(httpx.HTTPError):
        lines = stream.iter_lines()  # the connection closes with this iterator
        next(lines)
        os.kill(engine, signal.SIGSTOP)  # an answer that will not come by itself
        server.process.send_signal(signal.SIGTERM)
        server.wait("draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=DEADLINE) == 128 + signal.SIGTERM
    wait_for(lambda: gone(engine), "the engine to end")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--log-format", "xml"], "unknown log format 'xml'"), (["--api-key", ""], "--api-key is empty"),
    (["--backend", "vlm"], "unknown backend 'vlm'; did you mean 'vllm'?"),
    (["--backend", "vllm", "--strict"], "--strict is an option of the native server"),
    (["--tensor-parallel", "2"], "are for --backend vllm or sglang: the native engine runs on one GPU"),
    (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
])
def test_wrong_options_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["serve", "no-such-model/at-all", *arguments])
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and message in error and "\n" not in error


def test_vllm_gets_equivalent_arguments():
    argv, environment = handover.command(
        "vllm", "Qwen/Qwen3-8B", host="0.0.0.0", port=81, names=("a", "b"), keys=("k",), max_model_len=4096, memory_fraction=0.8,
        max_num_seqs=64, max_num_batched_tokens=None, dtype="bfloat16", prefix_cache=False, tensor_parallel=4,
        quantization="awq_marlin")
    assert argv == ["-m", "vllm.entrypoints.openai.api_server", "--model", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "81",
                    "--max-model-len", "4096", "--gpu-memory-utilization", "0.8", "--max-num-seqs", "64", "--dtype", "bfloat16",
                    "--tensor-parallel-size", "4", "--quantization", "awq_marlin", "--served-model-name", "a", "b",
                    "--no-enable-prefix-caching"]
    assert environment == {"VLLM_API_KEY": "k"}


def test_sglang_gets_equivalent_arguments():
    argv, environment = handover.command("sglang", "m", host="::1", port=80, names=("a",), keys=("k",), max_model_len=10,
                                         memory_fraction=0.5, max_num_seqs=2, max_num_batched_tokens=9, dtype=None,
                                         tensor_parallel=2)
    assert argv == ["-m", "sglang.launch_server", "--model-path", "m", "--host", "::1", "--port", "80", "--context-length", "10",
                    "--mem-fraction-static", "0.5", "--max-running-requests", "2", "--chunked-prefill-size", "9",
                    "--tp-size", "2", "--served-model-name", "a", "--api-key", "k"]
    assert environment == {}


def test_what_cannot_be_handed_over_is_refused():
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        handover.command("vllm", "m", device="cpu")
    with pytest.raises(UnsupportedError, match="one API key"):
        handover.command("vllm", "m", keys=("a", "b"))
    with pytest.raises(OptionError, match="unknown backend"):
        handover.command("tgi", "m")
    assert set(handover.OPTIONS["vllm"]) == set(handover.OPTIONS["sglang"])


def test_the_process_becomes_the_other_server(monkeypatch):
    became = []
    monkeypatch.setattr(handover.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
    with pytest.raises(SystemExit) as end:
        main(["serve", "Qwen/Qwen3-8B", "--backend", "sglang", "--port", "9"])
    assert not end.value.code and became[0][1][1:4] == ["-m", "sglang.launch_server", "--model-path"]


def test_names_show_no_folders():
    assert served_as("smollm2-135m") == "smollm2-135m" and served_as("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert served_as("/data/models/mine/") == "mine" and served_as("./here/x.gguf") == "x.gguf"


def test_log_lines_stay_one_line():
    record = logging.LogRecord("flyweight.server", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": "/v1/x", "error": "two\nlines = \"bad\"", "nothing": None}
    line = TextFormatter().format(record)
    assert "\n" not in line and line.endswith('INFO request path=/v1/x error="two\\nlines = \\"bad\\""')
    assert one_word("") == '""'

"""Published coding agents against our server, with a script in the model's place: is every call
parsed, over twenty turns?

    python benchmarks/serve_agents.py --mini mini --qwen qwen --aider aider [-o
        benchmarks/cpu/serve_agents.jsonl]

Each agent is a command line, so that it can live in an environment of its own. The model is a
script that writes calls as Qwen does: nineteen calls that each append a line to a file, one that
says it is done. It sees in the prompt how many results have come back, and answers with the next
call, so an agent that loses one call or one result stops here. What is checked: the agent ends
well, the file has every line in its order, and the grammar of its tools lets the call through.
aider calls no tools: it is asked for an edit in its own format, over streams.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "server"))

from tiny_server import ScriptedEngine, serving
from tool_models import fits, make_family

from flyweight.bench.rows import ResultFile, environment_row, make_row

TURNS = 20
LINES = [f"line {turn}" for turn in range(1, TURNS)]
RESULT = "<tool_response>\n"
TASK = "Append the lines to notes.txt, one at a time."
EDIT = "notes.txt\n```\n<<<<<<< SEARCH\n=======\n" + "\n".join(LINES) + "\n>>>>>>> REPLACE\n```\n"
LIMIT = 150  # seconds for one agent


def call(name: str, arguments: dict) -> str:
    return (
        f"On it.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    )


class Agent(ScriptedEngine):
    """Says the next thing by how many results stand in the prompt; `answer` is the agent's own way
    to run a command.
    """

    turns: ClassVar[list[int]] = []  # results in the prompt of each request

    def start(self) -> None:
        super().start()
        self.facts["max_model_len"] = 10**7  # one token a byte: an agent's instructions are long

    def _send(self, command) -> None:
        if hasattr(command, "prompt"):
            words = bytes(token for token in command.prompt if token < 256).decode(errors="replace")
            turn = words.count(RESULT)
            self.turns.append(turn)
            self.answers = {"": self.answer(turn, words)}
        super()._send(command)


def bash(name: str, done: str | None):
    def answer(self, turn: int, words: str) -> str:
        if turn < len(LINES):
            command = {"command": f"echo '{LINES[turn]}' >> notes.txt && cat notes.txt"}
            return call(name, command | ({"description": "append a line"} if done is None else {}))
        return "All lines are there." if done is None else call(name, {"command": done})

    return answer


def edit(self, turn: int, words: str) -> str:
    return EDIT


def mini(command: list[str], url: str) -> tuple[list[str], dict[str, str]]:
    return [*command, "-m", "openai/tiny", "-t", TASK, "-y", "--exit-immediately"], {
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
    }


def qwen(command: list[str], url: str) -> tuple[list[str], dict[str, str]]:
    return [*command, "--auth-type", "openai", "--model", "tiny", "--yolo", "-p", TASK], {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "tiny",
    }


def aider(command: list[str], url: str) -> tuple[list[str], dict[str, str]]:
    Path("notes.txt").touch()
    return [
        *command,
        "--model",
        "openai/tiny",
        "--no-git",
        "--yes",
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-analytics",
        "--edit-format",
        "diff",
        "--message",
        TASK,
        "notes.txt",
    ], {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}


AGENTS = {  # name → (its command line, what the script answers)
    "mini": (mini, bash("bash", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    "qwen": (qwen, bash("run_shell_command", None)),
    "aider": (aider, edit),
}


def count_streams(service) -> list[bool]:
    """Whether each request that is still to come wants a stream."""
    streams: list[bool] = []
    original = service.run

    async def counted(request, body, *arguments, **options):
        streams.append(bool(body.stream))
        return await original(request, body, *arguments, **options)

    service.run = counted
    return streams


def grammar_fits(engine, tokenizer) -> bool | None:
    """The real engine would have been held to it; None: the agent gave no tools."""
    asked = [command for command in engine.submitted if command.schema]
    return fits(tokenizer, asked[0].schema, engine.answer(None, 0, "")) if asked else None


def run(name: str, command: str, folder: Path) -> dict:
    arguments, answer = AGENTS[name]
    engine = type("Engine", (Agent,), {"answer": answer, "turns": [], "submitted": []})
    work = folder / name
    work.mkdir()
    os.chdir(work)
    with serving(folder / "model", engine_class=engine, max_body=64 << 20) as running:
        streams = count_streams(running.service)
        argv, environment = arguments(shlex.split(command), running.url)
        home = {"HOME": str(work), "XDG_CONFIG_HOME": str(work), "XDG_DATA_HOME": str(work)}
        with (folder / f"{name}.log").open("w") as log:
            agent = subprocess.Popen(
                argv,
                cwd=work,
                env=os.environ | home | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = agent.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(agent.pid, signal.SIGKILL)
    notes = (work / "notes.txt").read_text().split("\n") if (work / "notes.txt").exists() else []
    wanted = list(range(len(LINES) + 1))
    row = {
        "agent": name,
        "exit_code": code,
        "requests": len(engine.turns),
        "streams": sum(streams),
        "turns": sorted(set(engine.turns)) == wanted if name != "aider" else None,
        "lines": [line for line in notes if line] == LINES,
        "grammar": grammar_fits(engine, running.service.prompts.tokenizer.inner),
    }
    if code != 0 or not row["lines"]:
        print((folder / f"{name}.log").read_text()[-3000:], engine.turns, notes, file=sys.stderr)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in AGENTS:
        parser.add_argument(f"--{name}", metavar="COMMAND", help="how to start it")
    parser.add_argument(
        "-o", "--output", type=Path, help="where rows are written; else they are only printed"
    )
    given = vars(parser.parse_args())
    output = given.pop("output")
    output = output and output.absolute()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_family("qwen", folder / "model")
        rows = [run(name, command, folder) for name, command in given.items() if command]
        os.chdir("/")
    for row in rows:
        print(json.dumps(row))
    if output:
        environment = environment_row("cpu")
        found = [make_row("agents", environment["id"], **row) for row in rows]
        ResultFile(output).append([environment, *found])
    sys.exit(
        any(
            row["exit_code"] != 0 or not row["lines"] or False in (row["turns"], row["grammar"])
            for row in rows
        )
    )


if __name__ == "__main__":
    main()

"""`flyweight chat`: a conversation that remembers, its commands, and the terminal it runs in."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted import Scripted

from flyweight.commands.chat import answer, chat
from flyweight.commands.conversation import COMMANDS, SETTINGS, Conversation
from flyweight.commands.stopping import interruptible
from flyweight.commands.word_wrap import WordWrap
from flyweight.engine.request import SamplingParams

DEADLINE = 60  # seconds for a terminal to show what it must: reached only where it never does


@pytest.fixture
def conversation():
    return Conversation(SamplingParams(max_tokens=9, temperature=0.5))


def test_ctrl_c_stops_the_answer_and_keeps_what_came(capsys, conversation):
    model, before = Scripted(interrupt_at=1), signal.getsignal(signal.SIGINT)
    assert answer(model, conversation, {}) == "one two "
    assert model.closed and signal.getsignal(signal.SIGINT) is before
    assert "stopped" in capsys.readouterr().err


def test_ctrl_c_outside_an_answer_and_the_second_one_inside_are_ordinary_ones():
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it
    with interruptible():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_an_answer_near_the_end_of_the_context_is_shorter_not_refused(capsys, conversation):
    model = Scripted(room=4)
    answer(model, conversation, {})
    assert model.seen[0][1].max_tokens == 4
    assert "max_tokens reached" in capsys.readouterr().err


def talk(monkeypatch, model, lines):
    answers = iter([*lines, EOFError])

    def ask(_=""):
        line = next(answers)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("flyweight.commands.chat.load", lambda *_, **__: model)
    chat(
        "any",
        system="Be brief.",
        max_tokens=9,
        temperature=None,
        top_p=None,
        seed=None,
        think=False,
        device=None,
        dtype=None,
        max_model_len=None,
        memory_fraction=None,
    )


def test_a_conversation_remembers_and_forgets(monkeypatch, capsys):
    model = Scripted()
    talk(monkeypatch, model, ["first", KeyboardInterrupt, "second", "/reset", "third"])
    roles = [[message["role"] for message in messages] for messages, _, _ in model.seen]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    messages, params, template = model.seen[1]
    assert messages[2]["content"] == "one two three four"
    assert (params.temperature, params.top_p, template) == (0.6, 0.95, {"enable_thinking": False})
    assert "4 messages forgotten" in capsys.readouterr().err


def test_three_quotes_hold_a_message_of_several_lines_even_one_that_looks_like_a_command(
    monkeypatch,
):
    model = Scripted()
    talk(monkeypatch, model, ['"""/reset', "", "  two", 'three"""', "after"])
    assert model.seen[0][0][-1]["content"] == "/reset\n\n  two\nthree"
    assert len(model.seen[1][0]) == 4


def test_settings_reach_the_next_answer(monkeypatch, capsys):
    model = Scripted()
    talk(monkeypatch, model, ["/set temperature 0.25", "/set stop \\n\\n", "/system Be long.", "x"])
    messages, params, _ = model.seen[0]
    assert (params.temperature, params.stop, messages[0]["content"]) == (
        0.25,
        ("\n\n",),
        "Be long.",
    )
    said = capsys.readouterr().err
    assert "temperature is now 0.25" in said and "the model is now told: Be long." in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 1", "unknown setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "temperature must be a number, not 'hot'"),
        ("/set temperature -1", "temperature must lie between 0 and 100, not -1"),
        ("/set temperature", "temperature = 0.5"),
        ("/set top_p none", "top_p is now none"),
        ("/set max_tokens=12", "max_tokens is now 12"),
        ("/rest", "unknown command '/rest'; did you mean '/reset'?"),
        ("/save", "/save needs a file, such as /save talk.json"),
        ("/load nowhere.json", "nowhere.json: no such file"),
        ("/system", "told nothing"),
        ("/reset", "0 messages forgotten"),
    ],
)
def test_every_command_says_what_it_did_or_what_is_wrong(conversation, line, said):
    assert said in conversation.command(line)


def test_help_names_every_command_and_set_every_setting(conversation):
    assert all(name in conversation.command("/help") for name in COMMANDS)
    assert [line.split(" = ")[0] for line in conversation.command("/set").splitlines()] == list(
        SETTINGS
    )


def test_what_is_saved_can_be_loaded(conversation, tmp_path):
    conversation.command("/system Be brief.")
    conversation.command("/set seed 7")
    conversation.add("user", "héllo")
    conversation.add("assistant", "hi")
    path = tmp_path / "talk.json"
    assert conversation.command(f"/save {path}") == f"3 messages written to {path}"
    other = Conversation(SamplingParams())
    assert other.command(f"/load {path}") == f"3 messages read from {path}"
    assert (other.messages, other.params.seed) == (conversation.messages, 7)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"messages": [{"role": "user"}]}', '{"messages": "x"}', "\x00"]
)
def test_a_file_that_is_no_conversation_changes_nothing(conversation, tmp_path, text):
    path = tmp_path / "talk.json"
    path.write_text(text)
    conversation.add("user", "kept")
    assert "not a saved conversation" in conversation.command(f"/load {path}")
    assert conversation.messages == [{"role": "user", "content": "kept"}]


def wrapped(width, *pieces):
    wrap = WordWrap(width)
    return "".join(map(wrap.add, pieces)) + wrap.finish()


def test_words_are_kept_whole_however_they_arrive():
    text = "the quick brown fox jumps over the lazy dog"
    for size in (1, 2, 5, len(text)):
        lines = wrapped(
            10, *(text[at : at + size] for at in range(0, len(text), size))
        ).splitlines()
        assert [line.strip() for line in lines] == [
            "the quick",
            "brown fox",
            "jumps over",
            "the lazy",
            "dog",
        ]
        assert all(len(line) <= 10 for line in lines)


def test_code_and_words_longer_than_a_line_are_left_as_they_are():
    code = "see:\n```\nfor item in something: print(item)\n```\nand then more"
    assert wrapped(10, code).startswith(
        "see:\n```\nfor item in something: print(item)\n```\nand then\u0020\nmore"
    )
    assert wrapped(4, "abcdefghij") == "abcdefghij"
    assert wrapped(6, "漢字 漢字").splitlines() == ["漢字 ", "漢字"]  # two columns each
    assert WordWrap(None).add("no terminal, no waiting") == "no terminal, no waiting"


class Terminal:
    """The chat in a real terminal (a pty), with readline."""

    def __init__(self, home):
        program = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import flyweight.commands.chat as verb\nfrom scripted import Scripted\n"
            "from flyweight.engine.request import Chunk\n"
            "class Echo(Scripted):\n"
            "    def stream(self, messages, *_, **__):\n"
            "        self.words = ['heard ' + repr(messages[-1]['content'])]\n"
            "        return super().stream(messages)\n"
            "verb.load = lambda *_, **__: Echo()\n"
            "from flyweight.cli import main\nmain(['chat', 'any'])\n"
        )
        self.master, slave = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "FLYWEIGHT_CACHE": str(home),
            "INPUTRC": "/dev/null",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def see(self, text):
        """Read until the terminal shows it."""
        end = time.monotonic() + DEADLINE
        while text not in self.shown:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], (
                f"{text!r} is not in {self.shown!r}"
            )
            try:
                self.shown += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"{text!r} is not in {self.shown!r}") from None
        self.shown = self.shown.partition(text)[2]

    def type(self, keys):
        os.write(self.master, keys.encode())

    def leave(self):
        self.type("\x04")
        assert self.process.wait(DEADLINE) == 0
        os.close(self.master)


def test_lines_can_be_edited_completed_pasted_and_found_again(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.see("> ")
    terminal.type("worlx\x7fd\x01hello \n")  # backspace, then to the beginning of the line
    terminal.see("heard 'hello world'")
    terminal.see("> ")
    terminal.type("/re\t\n")
    terminal.see("messages forgotten")
    terminal.see("> ")
    terminal.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")  # as a terminal sends what is pasted
    terminal.see(r"heard 'one\ntwo\nthree'")
    terminal.see("> ")
    terminal.leave()
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
    again = Terminal(tmp_path)
    again.see("> ")
    again.type("\x12hello\r")  # Ctrl-R looks for it in the history
    again.see("heard 'hello world'")
    again.see("> ")
    again.leave()

"""An LLM whose answer is written down, so that verbs can be tested without a model."""

import signal

from flyweight.engine.request import Chunk, Completion, Output, Timing

WORDS = ["one ", "two ", "three ", "four"]


class ScriptedStream:
    """Chunks of one answer; a signal arrives before the one at `interrupt_at`."""

    def __init__(self, model, params):
        self.model = model
        self.params = params
        self.made = 0

    def __iter__(self):
        for word in self.model.words:
            if self.made == self.model.interrupt_at:
                signal.raise_signal(self.model.signal)
            self.made += 1
            yield Chunk(0, word, [self.made])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.model.closed = True

    @property
    def output(self):
        whole = self.made == len(self.model.words)
        text = "".join(self.model.words[: self.made])
        done = Completion(
            0,
            text,
            list(range(self.made)),
            "stop" if whole else "cancelled",
            None,
            None,
            Timing(0.0, ()),
            0,
        )
        return Output("prompt", [1], [done])


class Scripted:
    def __init__(self, words=WORDS, *, interrupt_at=None, signal=signal.SIGINT, room=1000):
        self.words = words
        self.interrupt_at = interrupt_at
        self.signal = signal
        self.left = room
        self.closed = False
        self.seen = []
        self.sampling_defaults = {"temperature": 0.6}

    def room(self, prompt, *, chat_template_kwargs=None):
        return self.left

    def stream(self, prompt, params=None, *, chat_template_kwargs=None, **sampling):
        asked = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        self.seen.append((asked, params or sampling, chat_template_kwargs))
        return ScriptedStream(self, params)

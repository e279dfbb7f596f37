"""Measured numbers that a test wants otherwise, such as switches of `tuned/*.toml`."""

from dataclasses import replace

from flyweight.kernels import tuned


def retune(monkeypatch, *, formats=None, **steps):
    """Other numbers for every GPU: of steps, and of formats by their names. Choices that are kept
    by shape stay as they were.
    """
    real = tuned.of

    def of(gpu):
        found = real(gpu)
        changed = {
            name: replace(numbers, **(formats or {}).get(name, {}))
            for name, numbers in found.formats.items()
        }
        return replace(found, steps=replace(found.steps, **steps), formats=changed)

    monkeypatch.setattr(tuned, "of", of)

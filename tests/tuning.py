"""Measured numbers that a test wants otherwise, such as switches of `tuned/*.toml`."""

from dataclasses import replace

from flyweight.kernels import tuned


def retune(monkeypatch, *, formats=None, gemv=None, **steps):
    """Other numbers for every GPU: of steps, gemv, and of formats by their names. Choices that are
    kept by shape stay as they were.
    """
    real = tuned.of

    def of(gpu):
        found = real(gpu)
        changed = {
            name: replace(numbers, **(formats or {}).get(name, {}))
            for name, numbers in found.formats.items()
        }
        few = replace(found.gemv, **(gemv or {}))
        return replace(found, steps=replace(found.steps, **steps), gemv=few, formats=changed)

    monkeypatch.setattr(tuned, "of", of)

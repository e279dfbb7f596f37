"""Heads that guess: a layer behind a model reads its hidden states and says what may come next.

`head.py` is the program, `eagle3.py` and `mtp.py` read what is published: one file a layout.
"""

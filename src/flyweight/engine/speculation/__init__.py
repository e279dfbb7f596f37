"""Several tokens a step: a drafter guesses what comes next, the model checks all guesses at once.

A drafter (`drafter.py`; `ngram.py`, `model.py`) proposes, `lengths.py` says how many guesses pay,
the scheduler makes rows of them, and `verify.py` keeps those that the model would have chosen
itself. `loading.py` opens who guesses, `speculator.py` holds the parts together.
"""

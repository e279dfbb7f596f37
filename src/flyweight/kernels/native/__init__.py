"""The CPU's own kernels: C compiled on first use, weights in the bits of their files, one call a
step.

    compiler.py    which C compiler there is, and what this processor can do
    library.py     sources → shared library, kept in the cache; its functions and threads
    weight.py      QuantTensor → the layout that the kernels read
    linear.py      y = x Wᵀ as a call
    rounding.py    weights → codes, for the solvers of quant/
    (models/native.py makes a checkpoint what the executor runs)
    executor.py    whole steps of a decoder: NativeDecoder
    rows.py        decode steps of the running sequences, without a batch to be packed
    source/        the C: vectors*.h (processors), team (threads), input (x), product* (kernels),
                   attention, decoder, rows
"""

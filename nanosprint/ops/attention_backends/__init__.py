"""The ways to compute `nanosprint.ops.attention`, one module each, with what they share.

`contract.py` says what all of them compute, `reference.py` writes it out; `sdpa.py`, `flex.py`, `fa2.py`, `fa3.py`,
`fa4.py` and `windowed.py` (our own, called "triton") are fast. `varlen.py` turns a pair of kernels into a
`torch.library` operator, `table.py` says which back end can do what, `probe.py` checks one against the reference,
`measure.py` times it at the calls that a model makes, `select.py` finds the fastest, `outcome.py` keeps what it found.
"""

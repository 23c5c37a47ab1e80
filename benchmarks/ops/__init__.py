"""Every operator of our own at the record's shapes, in one table: `python -m benchmarks.ops`.

`case.py` says what a row needs. The modules beside it register operators: `attention.py` (positions, attention,
composed maps), `head.py` (loss, FP8 products and copies), `mlp.py`, `tables.py` (look-ups, Adam), `matrices.py`
(symmetric products, Polar Express, Muon). `measure.py` checks and times, `table.py` prints. To add an operator, write a
function of `Sizes` that yields its cases and name it in its module's OPERATORS.
"""

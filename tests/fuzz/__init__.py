"""Fuzzing of every parser: inputs from anywhere give right values or a typed error, in little time and memory.

`make fuzz` runs all targets under atheris, which keeps inputs that reach new lines. `targets.py` holds the targets and
what they must not do, `mutations.py` the edits that keep checksums and lengths whole, so that inputs reach what lies
behind them. `tests/robustness/test_fuzz_corpus.py` runs the saved inputs in every run of the tests.
"""

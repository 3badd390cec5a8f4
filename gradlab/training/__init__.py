"""The reference training program: a workload on this machine's ranks, plain, recorded or compressed.

`launch` starts the ranks under torchrun, `emulate` plays them in one process; both return the run's report.
"""

"""Autotuning: chooses the Schedule of each kernel for one machine; never a bit of a result.

A Schedule holds only numbers that cannot change a sum's order (DESIGN I2), so tuning is a search
over speed alone: enumerate a kernel's space, build, check that all schedules agree bitwise,
measure, and write the winners into ``deepinfer/targets/<target>/schedules.json``. The compiler
reads that file; it never tunes. The command is ``deepinfer-tune``.

    space.py      problems: kernels to tune, the row counts to tune them at, their schedules
    keys.py       what a build and a measurement depend on, and the machine
    worker.py     the child process that compiles, checks bits and times; native.cc is its clock
    inputs.py     arrays to run a kernel on; building.py its libraries; stand.py runs them
    measure.py    the runner: child processes with time-outs, one machine-wide lock for timing
    stats.py      medians, noise, who wins
    effort.py     how much to measure
    search.py     halving and exhaustive search of one kernel, resumable at every measurement
    session.py    a run over many kernels: budget, interruption, progress
    store.py      the database: content-addressed rows; transfer.py exports, merges and collects
    model.py      what a schedule should take, labelled *modelled*; modelling.py without a device
    ranking.py    which schedules halving visits: the model's best and earlier winners
    results.py    what the rows say: landscape, duel, verdict
    shipping.py   writes schedules.json; verify.py gates and times what stands there
    report.py     text and HTML
"""

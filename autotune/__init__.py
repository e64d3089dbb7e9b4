"""Autotuning: chooses the Schedule of each kernel for one machine; never a bit of a result.

A Schedule holds only numbers that cannot change a sum's order (DESIGN I2), so tuning is a search
over speed alone: enumerate a kernel's space, build, check that all schedules agree bitwise,
measure, and store the winner in ``deepinfer/targets/<target>/schedules.json``. The compiler reads
that file; it never tunes. Nothing is here yet: kernels run with the default schedule of their
space.
"""

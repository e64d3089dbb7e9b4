"""Functional emulator of the CUDA text that TileLang emits for sm_100a; nothing runs on a GPU.

The text is compiled by g++ against ``device/`` (a closed list of ``tl::`` and CUDA names) with
``-fsanitize=thread``, and linked to ``runtime/`` instead of that sanitizer's library, so every
access of device code reaches a happens-before checker. CUDA threads are fibers of one OS thread.
TMA, mbarriers, tcgen05 and TMEM follow our reading of the PTX model. What it can show: that a
kernel, on the shapes tested, agrees with its reference under several schedules and that the
checker reports no race, deadlock, out-of-bounds or uninitialised access. What it can not: that the
kernel runs on Blackwell, its bits there, or its speed.
"""

"""A functional model of Ascend 950 for the AscendC text that TileLang emits.

It runs a kernel's cores on one CPU thread under several schedules of their pipes, and reports
accesses that no event, flag or barrier orders, thread races inside vector functions, bad event ids,
unmatched flags, deadlocks, alignment and bounds. Its semantics come from public documentation and
from TileLang's own use of the C API: it shows that a kernel is consistent with them, not how the
chip behaves. In particular the order of the cube unit's sums and the bits of exp, of division and
of square roots are the host's.

Not modelled: time, depths of queues, bank conflicts, registers, caches of global memory (a write
there after another core's read is not seen either), and SIMD vector functions.
"""

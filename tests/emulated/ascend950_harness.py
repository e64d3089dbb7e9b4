"""The checks of ascend950's kernels in its emulator."""

from deepinfer.targets.ascend950.target import TARGET
from deepinfer.testing.emulators.ascend950.driver import SCHEDULES, Emulation
from tests.emulated.harness import Array, Case, Compare, Harness, bits, same_bits

__all__ = ["Array", "Case", "Compare", "bits", "caught", "check", "emulate", "fault", "same_bits"]

_HARNESS = Harness(TARGET, Emulation, SCHEDULES)
emulate, check, caught, fault = (_HARNESS.emulate, _HARNESS.check, _HARNESS.caught,
                                 _HARNESS.fault)

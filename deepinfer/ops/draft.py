"""The sequential part of the DSpark draft: one step of a block of drafted tokens."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, op
from deepinfer.numerics.functions import sigmoid

Array = NDArray[Any]


@op("u:f32[R*block,V], bias:f32[R,V] -> y:f32[R,V]", order=ELEMENTWISE)
def draft_logits(u: Array, bias: Array, *, step: int, block: int) -> Array:
    """The logits of one step: y[r] = u[r*block + step] + bias[r].

    Args:
        u: head logits of all rows of the draft blocks. bias: Markov logits given the token before.
        step: which row of each block. block: rows per block.
    Source: spec §5.3.
    """
    return u[step::block] + bias


@op("x:bf16[Z,C] -> y:bf16[Z/block,C]", order=ELEMENTWISE)
def take_step(x: Array, *, step: int, block: int) -> Array:
    """One row of each draft block: y[r] = x[r*block + step].

    Args:
        x: rows, Z = requests * block. step: which row of each block. block: rows per block.
    Source: spec §5.3.
    """
    return x[step::block]


@op("z:f32[R,1], temperatures:f32[B] -> c:f32[R]", order=ELEMENTWISE)
def confidence(z: Array, temperatures: Array, *, step: int) -> Array:
    """How likely the draft of a step is to be accepted: c = sigmoid(z / temperature of the step).

    Args:
        z: confidence logits. temperatures: calibration, one per step of a block. step: which one.
    Source: spec §5.3, §5.5 "STS".
    """
    return sigmoid(z[:, 0] / temperatures[step])

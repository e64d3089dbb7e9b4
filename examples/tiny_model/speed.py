"""Compile the elementwise-heavy pieces of the training forward: about twice the speed on a CPU.

Hyper-connections and masked softmaxes move far more memory than they compute; `torch.compile`
fuses each of them into a few loops. The values stay those of the plain functions up to rounding.
"""

import attention
import layers
import model
import torch
from torch import Tensor


def compile_pieces() -> None:
    """Replace the pieces in their modules, for the whole process. Needs a C++ compiler."""
    torch._dynamo.config.cache_size_limit = 64  # one entry per shape and gradient mode
    mix = torch.compile(layers.HyperMix.forward, dynamic=False)
    spread = torch.compile(layers.spread, dynamic=False)

    # Rows are flattened, so that one compilation serves every split of a step into texts.
    def flat_mix(self: layers.HyperMix, streams: Tensor) -> tuple[Tensor, ...]:
        lead = streams.shape[:-2]
        return tuple(x.unflatten(0, lead) for x in mix(self, streams.flatten(0, -3)))

    def flat_spread(y: Tensor, streams: Tensor, post: Tensor, matrix: Tensor, precision) -> Tensor:
        rows = [x.flatten(0, 1) for x in (y, streams, post, matrix)]
        return spread(*rows, precision).unflatten(0, y.shape[:-1])

    layers.HyperMix.forward = flat_mix
    model.spread = flat_spread
    attention.banded_attention = torch.compile(attention.banded_attention, dynamic=False)

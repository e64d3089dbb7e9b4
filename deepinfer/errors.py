"""The errors a user can meet: each says what is wrong, where, and what to do next."""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of all DeepInfer errors.

    Args:
        what: what is wrong, with the actual and the expected value.
        where: file, tensor, node, pass or field concerned.
        next: what the reader should do.
    """

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        self.what, self.where, self.next = what, where, next
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if next:
            lines.append(f"  next:  {next}")
        super().__init__("\n".join(lines))


class CheckpointError(DeepInferError):
    """A checkpoint, config.json or tokenizer.json that cannot be used."""


class IRError(DeepInferError):
    """A graph that breaks a rule of the IR."""


class PassError(DeepInferError):
    """A pass that failed, with the pass, the node and its location."""


class TargetError(DeepInferError):
    """A target that does not exist or cannot be used on this machine."""


class NoKernelError(DeepInferError):
    """An op that has no kernel on a target."""


class ToolchainError(DeepInferError):
    """A compiler or library that is missing or failed."""


class ProgramError(DeepInferError):
    """A Program that is damaged or does not fit what it is used with."""


class RequestError(DeepInferError):
    """A request that cannot be served; it ends that request only."""


class DeterminismError(DeepInferError):
    """Two runs that had to agree bitwise and did not."""

from tests.ir.conftest import own_ops

__all__ = ["own_ops"]

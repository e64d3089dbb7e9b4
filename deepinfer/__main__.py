"""``python -m deepinfer``: the same as the ``deepinfer`` command."""

from __future__ import annotations

import sys

from deepinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())

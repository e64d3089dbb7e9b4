"""``python -m autotune`` is ``deepinfer-tune``."""

from autotune.cli import main

raise SystemExit(main())

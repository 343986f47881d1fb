"""``python -m deploy.cli``: the ``tandem`` command."""

from __future__ import annotations

import sys

from deploy.cli.main import main

sys.exit(main())

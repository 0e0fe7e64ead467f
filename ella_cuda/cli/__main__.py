"""``python -m ella_cuda.cli``: the command, without its entry point."""

import sys

from ella_cuda.cli import main

sys.exit(main())

"""``python -m ella_cuda.cli``: the command, without its entry point.

Python has then imported the package, and with it torch, before any code of the command runs. Where torch should have been told of threads
before, Python starts anew.
"""

import os
import sys

import ella_cuda_command

chosen = ella_cuda_command.choose_threads()
os.environ.update(chosen)
if chosen.keys() - {ella_cuda_command.NOTE}:
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
sys.exit(ella_cuda_command.main())

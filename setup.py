"""Builds the one extension module ella_cuda._C; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not have the project's folder on the path

import build_config  # noqa: E402

setup(**build_config.setup_arguments(ROOT))

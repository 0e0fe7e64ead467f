"""Experiments on the evidence of linearised networks: at the network's weights, and at the linear model's mode.

Source: Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning", ICML 2022.
"""

from ella_cuda.experiments.linearised.folder import TABLE, is_study_folder, read_studies, save_parts
from ella_cuda.experiments.linearised.parts import PARTS, plan_studies
from ella_cuda.experiments.linearised.run import require_study_data, run_studies
from ella_cuda.experiments.linearised.study import Study

__all__ = [
    "PARTS",
    "TABLE",
    "Study",
    "is_study_folder",
    "plan_studies",
    "read_studies",
    "require_study_data",
    "run_studies",
    "save_parts",
]

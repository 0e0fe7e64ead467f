"""Experiments in parts: studies that are resumed where they stopped, and tables and pictures of what they found."""

from ella_cuda.papers.studies.experiment import Experiment, experiment_of, require_study_data
from ella_cuda.papers.studies.study import Part, Study, Work, share

__all__ = ["Experiment", "Part", "Study", "Work", "experiment_of", "require_study_data", "share"]

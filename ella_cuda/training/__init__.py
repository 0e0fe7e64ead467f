"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on the prior precisions."""

from ella_cuda.training.loop import Evaluation, Objective, marglik_training
from ella_cuda.training.prior import PriorStructure

__all__ = ["Evaluation", "Objective", "PriorStructure", "marglik_training"]

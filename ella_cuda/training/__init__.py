"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on the prior precisions."""

from ella_cuda.training.loop import Evaluation, marglik_training

__all__ = ["Evaluation", "marglik_training"]

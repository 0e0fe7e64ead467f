"""Training of weights and hyperparameters together: MAP steps on the weights, evidence steps on what learners learn."""

from ella_cuda.laplace.prior_structure import PriorStructure
from ella_cuda.training.arguments import Objective
from ella_cuda.training.class_batches import ClassBatches
from ella_cuda.training.evidence_callback import EvidenceCallback
from ella_cuda.training.learners import BufferLearner, HyperOptimizer, Learner
from ella_cuda.training.trainer import Evaluation, MarglikTrainer, marglik_training

__all__ = [
    "BufferLearner",
    "ClassBatches",
    "Evaluation",
    "EvidenceCallback",
    "HyperOptimizer",
    "Learner",
    "MarglikTrainer",
    "Objective",
    "PriorStructure",
    "marglik_training",
]

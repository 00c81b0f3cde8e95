"""Drop-in Keras components that make training faster, measure what they did, and never change what is learnt."""

from .callbacks import GPUMemoryGrowth, StepProfiler, ThroughputLogger
from .diagnosis import Diagnosis, diagnose
from .distribution import strategy
from .model import SpeedupModel, SpeedupSequential, speedup
from .pipeline import DataPipeline, Finding, lint
from .precision import set_precision
from .report import SpeedupReport
from .runtime import configure

__all__ = [
    "DataPipeline",
    "Diagnosis",
    "Finding",
    "GPUMemoryGrowth",
    "SpeedupModel",
    "SpeedupReport",
    "SpeedupSequential",
    "StepProfiler",
    "ThroughputLogger",
    "configure",
    "diagnose",
    "lint",
    "set_precision",
    "speedup",
    "strategy",
]

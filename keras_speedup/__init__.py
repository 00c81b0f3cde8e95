"""Drop-in Keras components that make training faster, measure what they did, and never change what is learnt."""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from .callbacks import GPUMemoryGrowth, StepProfiler, ThroughputLogger
from .diagnosis import Diagnosis, diagnose
from .distribution import strategy
from .model import SpeedupModel, SpeedupSequential, speedup
from .pipeline import DataPipeline, Finding, lint
from .precision import set_precision
from .report import SpeedupReport
from .runtime import configure

try:
    __version__ = _version("keras-speedup")
except _NotInstalled:  # run from a checkout that is not installed
    __version__ = "0"

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

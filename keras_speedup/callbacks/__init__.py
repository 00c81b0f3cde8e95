"""Callbacks: throughput, memory, profile."""

from .memory import GPUMemoryGrowth
from .profiler import StepProfiler
from .throughput import ThroughputLogger

__all__ = ["GPUMemoryGrowth", "StepProfiler", "ThroughputLogger"]

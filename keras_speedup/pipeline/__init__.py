"""The layer, its sources and stages, and lint."""

from .layer import DataPipeline
from .lint import Finding, lint

__all__ = ["DataPipeline", "Finding", "lint"]

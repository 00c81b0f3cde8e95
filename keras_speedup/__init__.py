"""Drop-in Keras components that make training faster, measure what they did, and never change what is learnt."""

from .model import SpeedupModel, SpeedupSequential, speedup
from .report import SpeedupReport

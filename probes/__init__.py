"""Probes: is the memory used, and did it hurt? Each module measures one thing; `run_probes` runs them all over all arms."""

from engram_graft.probes.arms import ARMS, arms_of
from engram_graft.probes.probe import Probe, Subject
from engram_graft.probes.suite import PROBES, run_probes

__all__ = ["ARMS", "PROBES", "Probe", "Subject", "arms_of", "run_probes"]

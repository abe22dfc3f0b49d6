"""Probes: is the memory used, and did it hurt? Each module measures one thing; `run_probes` runs them all over all arms."""

from engram_graft.probes.arms import ARMS, arms_of
from engram_graft.probes.controls import CONTROLS, run_controls
from engram_graft.probes.probe import Probe, Subject
from engram_graft.probes.suite import PROBES, conclude, pick_probes, run_probes

__all__ = ["ARMS", "CONTROLS", "PROBES", "Probe", "Subject", "arms_of", "conclude", "pick_probes", "run_controls", "run_probes"]

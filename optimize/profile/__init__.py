"""Where one run of a model spends its time: costs from the graph, times from the runtime, joined by module names.

``memory`` reads shapes; ``machine`` measures what this machine can do and ``roofline`` compares; ``kernels`` runs a
target's probe; ``profiling`` and ``artifacts`` put it together for a program and for a file.
"""

from __future__ import annotations

from optimize.costs import Costs, NodeCost, program_costs
from optimize.profile.artifacts import profile_file
from optimize.profile.machine import MachineLimits, measure_limits
from optimize.profile.memory import LiveMemory, live_memory
from optimize.profile.profiling import profile_program
from optimize.profile.result import KernelProfile, Profile
from optimize.profile.trace import chrome_trace, write_trace

__all__ = [
    "Costs",
    "KernelProfile",
    "LiveMemory",
    "MachineLimits",
    "NodeCost",
    "Profile",
    "chrome_trace",
    "live_memory",
    "measure_limits",
    "profile_file",
    "profile_program",
    "program_costs",
    "write_trace",
]

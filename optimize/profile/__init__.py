"""Where one run of a model spends its time: costs from the graph, times from the runtime, joined by module names.

``memory`` reads shapes, ``machine`` measures what this machine can do, ``kernels`` runs a target's probe;
``profiling`` and ``artifacts`` put it together for a program and for a file.
"""

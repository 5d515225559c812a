"""A training job, made ready: what the command line and the Trainer share.

    Experiment, Cluster -> Chain (intake) -> Plan (plans) -> Engine (machine) -> loop

``platform`` stands before all of it, where JAX has not started yet.
"""

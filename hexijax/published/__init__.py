"""Reads measurements that other groups published, into this project's own terms.

    JSON files of a folder -> Chain, DeviceProfile, LinkProfile, Cluster, Plan

For checking predictions against clusters nobody here owns. One module a source:
``sailor`` (layer times, links, measured plans), ``cephalo`` (layer latencies and best
splits), ``hexiscale`` (clusters of published cases). Records are read as they are, with
their doubts; what is cleaned is said where it is done. Nothing is fitted. No JAX.
"""

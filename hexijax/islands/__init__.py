"""Islands: the JAX clients of one job, each following its own part of one Program.

rendezvous -> World -> Engine(carrier=...) -> what crosses goes by transfer
"""

"""Equal cards made unlike, and what the planner and the runtime make of them.

    slowing -> alone -> plans -> running -> bench_emulated's file

``experiments.bench_emulated`` drives it; each part runs in a process of its own.
"""

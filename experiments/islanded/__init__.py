"""Islands on one host: cards and CPU, two cards, paths between them, slow links.

    settings -> process (an island, or alone): training, paths -> bench_islands' file

``experiments.bench_islands`` drives it.
"""

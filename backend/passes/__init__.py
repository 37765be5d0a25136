"""Graph rewrites between export and serialization, on the neutral graph.

A pass takes a graph and returns one that computes the same. Fused nodes carry the `origin` of all the nodes that they
replace; a pattern is rewritten only when the fused operator accepts it, so that the parts are judged one by one
otherwise. The partitioner and preprocess run the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.graph import Graph

Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = ()


def run(graph: Graph) -> Graph:
    for rewrite in PASSES:
        graph = rewrite(graph)
    return graph

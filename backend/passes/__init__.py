"""Graph rewrites between export and serialization, on the neutral graph.

A pass takes a graph and returns one that computes the same. Fused nodes carry the `origin` of all the nodes that they
replace; a pattern is rewritten only when the fused operator accepts it, so that the parts are judged one by one
otherwise. The partitioner and preprocess run the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.graph import Graph
from backend.passes.attention import fuse_attention, group_heads
from backend.passes.cache import fuse_rope_cache
from backend.passes.gated import fuse_swiglu
from backend.passes.linears import join_linears
from backend.passes.norms import fuse_rms_norm, fuse_silu
from backend.passes.quantized import fuse_quantized
from backend.passes.rope import fuse_rope
from backend.passes.simplify import inline_scalars, remove_no_ops

Pass = Callable[[Graph], Graph]
# Patterns are matched on graphs without no-ops and with numbers in place.
PASSES: tuple[Pass, ...] = (
    inline_scalars,
    remove_no_ops,
    fuse_quantized,
    join_linears,
    fuse_attention,
    group_heads,
    fuse_rms_norm,
    fuse_silu,
    fuse_swiglu,
    fuse_rope,
    fuse_rope_cache,
)


def run(graph: Graph) -> Graph:
    for rewrite in PASSES:
        graph = rewrite(graph)
    return graph

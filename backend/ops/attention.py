"""scaled_dot_product_attention, whole: no buffer of scores, no repeated keys, no copies of permuted operands.

Many queries go through `attention_wide` on a GPU and `attention` elsewhere (tiles with running softmax), up to 8
through `attention_few`, which is parallel over keys and drops those that a bool mask or causality hides;
`attention_merge` puts together what was found in spans of the keys. Few queries in each of many small windows are the
tiles' on a GPU. Heads of very many elements with few keys (attention between channels) are two products and a softmax
between them: their scores are few, and a product can split its depth. On processors, that is so for whatever hides no
keys, and for many queries under causality (`backend.ops.attention_products`).

A query that sees no key gives 0, as in torch; in `zoo.sdpa`, which stands for a softmax that a model spells out
(`backend.passes.attention`), it gives NaN, as that does. With few queries, what a hidden key holds does not matter;
with many, that holds for a tile of keys (at most 64, counted from 0) that is hidden from a tile of queries, and a NaN
elsewhere comes back as 0 × NaN, as in torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops import attention_products, lanes
from backend.ops.matmul import Operand, in_memory
from backend.ops.registry import BOOL, FLOATS, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.capabilities import Capabilities
from backend.runtime.dispatch import Vector
from backend.runtime.tensor import Tensor
from backend.runtime.value import Value

MAX_RANK = 4
FEW_QUERIES = 8
FEW_KEYS = 128  # of a window: one or two steps of a tile
SPANS = (64, 256)  # keys a workgroup of attention_few looks at
BUSY = 1024  # workgroups below which a GPU gets the shorter span
WIDE = (
    512  # elements of a head above which the columns of v are too many for one workgroup, and each has its own scores
)
BLOCK = 32  # columns of v a workgroup of attention keeps per block, at most 4 blocks
MOST_STEPS = 16  # of a score that are written out
MOST_SPANS = 16  # that share out the keys of a tile of queries
MOST_COLUMNS = 128  # of v that a workgroup of attention_wide keeps


@dataclass(frozen=True)
class Job:
    """What all ways of computing an attention need: the operands as strides, and the axes they are read along."""

    shape: tuple[int, ...]
    dtype: str
    pairs: int  # of batch and head
    sides: dict[str, Operand]
    vec: dict[str, str]
    reads: dict[str, Tensor | Vector]
    params: dict[str, Any]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Few:
    """A workgroup of `attention_few`, in which SPLIT invocations make one score, and of `attention_merge` behind it.

    A GPU waits for its memory most of the time: many invocations ask for what they need at once. A processor does one
    thing after the other, and leaves out what is hidden."""

    SPLIT: int
    COLUMNS: int
    SLICES: int
    AT_ONCE: int

    def steps(self, depth: int) -> int:
        """Reads of vec4 for a score, written out, or 0 for a loop."""
        steps, rest = divmod(depth, 4 * self.SPLIT)
        return steps if self.SPLIT > 1 and not rest and steps <= MOST_STEPS else 0


ON_GPU = Few(SPLIT=4, COLUMNS=32, SLICES=8, AT_ONCE=8)
ON_PROCESSOR = Few(SPLIT=1, COLUMNS=64, SLICES=1, AT_ONCE=1)


@dataclass(frozen=True)
class Tile:
    """A workgroup of `attention_wide`: TX × TY invocations (powers of two, TX ≥ 4), each with RM queries and 4 RN keys;
    KT elements of a head are staged at a time, then KV keys' values, both multiples of 4. TY RM is a multiple of TX.

    busy: workgroups that keep a large GPU busy, between which keys are shared out where queries make fewer."""

    TX: int
    TY: int
    RM: int
    RN: int
    KT: int
    KV: int
    AHEAD: bool = True  # fetches while it multiplies
    busy: int = field(default=512, compare=False)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Of the kernel."""
        return {name: value for name, value in asdict(self).items() if name.isupper()}

    @property
    def queries(self) -> int:
        return self.TY * self.RM

    @property
    def keys(self) -> int:
        return 4 * self.TX * self.RN

    def iterations(self, depth: int) -> int:
        """Of all loops of a step."""
        return -(-depth // self.KT) * (1 + self.KT // 4) + self.keys // self.KV * (1 + self.KV // 4) + 4

    def blocks(self, columns: int) -> int:
        """RC: quads of columns of v an invocation keeps."""
        return -(-columns // (4 * self.TX))

    def bytes(self, columns: int) -> int:
        """Of workgroup memory, as `attention_wide.wgsl` lays it out."""
        wide, quads, lanes = self.TX * self.blocks(columns), self.KT // 4, max(self.TX, self.TY)
        weights = self.queries * -(-self.keys // self.KT)
        rows = max(self.queries + self.keys, weights, -(-self.TY * wide // quads))
        return 16 * (1 + -(-rows // lanes) * lanes * (quads + 1) + self.KV * wide + self.queries * self.TX // 4)

    def fits(self, columns: int, can: Capabilities) -> bool:
        return can.max_invocations >= self.TX * self.TY and self.bytes(columns) <= can.max_workgroup_bytes


HIGH = Tile(8, 32, 4, 2, 32, 16, busy=120)  # 128 queries × 64 keys, in 45 KiB up to 64 columns
FLAT = Tile(8, 16, 2, 2, 32, 16, busy=256)  # 32 × 64
DEEP = Tile(8, 16, 2, 1, 32, 16, busy=264)  # 32 × 32 by long parts of a head
SMALL = Tile(8, 16, 2, 1, 16, 8)  # 32 × 32, in 16 KiB
TILES = (HIGH, FLAT, DEEP, SMALL)


def _accepts(call: Call) -> str | None:
    query, key, value, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    if call.get("dropout_p", 0.0) != 0.0:
        return "attention: dropout is for training"
    scale = call.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        return "attention: the scale is not a number"
    specs: list[TensorSpec] = [query, key, value]
    for spec in specs:
        if spec.dtype not in FLOATS or spec.dtype != query.dtype:
            return f"attention: no kernel for {spec.dtype}"
        if not 2 <= spec.rank <= MAX_RANK:
            return f"attention: rank {spec.rank}, kernels take 2 to {MAX_RANK}"
    if query.shape[-1] == 0:
        return "attention: head dim 0"
    for spec in (key, value) if call.get("enable_gqa") else ():
        heads = [s.shape[-3] if s.rank >= 3 else 1 for s in (query, spec)]
        if not all(isinstance(count, int) for count in heads):
            return "attention: grouped heads of unknown number"
        if heads[1] == 0 or heads[0] % heads[1]:
            return f"attention: {heads[0]} query heads over {heads[1]}"
    if mask is not None:
        if mask.dtype not in FLOATS + BOOL:
            return f"attention: no kernel for a mask of {mask.dtype}"
        if not 2 <= mask.rank <= call.outputs[0].rank:
            return f"attention: a mask of rank {mask.rank}"
        if call.get("is_causal"):
            return "attention: a mask besides is_causal"
    return None


def _lower(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    query, key, value = call["query"], call["key"], call["value"]
    queries, depth = query.shape[-2:]
    keys, width = key.shape[-2], out.shape[-1]
    if math.prod(out.shape) == 0 or keys == 0:
        return values.scalar(0.0, out.dtype, out.shape)
    batch, heads = (1, 1, *out.shape[:-2])[-2:]
    scale = call.get("scale")
    scale = float(1.0 / math.sqrt(depth) if scale is None else scale)
    is_plain = call.get("attn_mask") is None and not call.get("is_causal") and not call.get("enable_gqa")
    if is_plain and max(depth, width) > WIDE and keys <= max(depth, width):
        return attention_products.attend(query, key, value, scale, out.dtype, b)
    hides_few = bool(call.get("is_causal")) and queries <= FEW_QUERIES
    if call.get("attn_mask") is None and not hides_few and lanes.usable(b) and not usable(b):
        return attention_products.in_blocks(
            query, key, value, scale, bool(call.get("is_causal")), tuple(out.shape), out.dtype, b
        )
    params: dict[str, Any] = {
        "heads": heads, "queries": queries, "keys": keys, "depth": depth, "values": width,
        "scale": scale,
        "empty": math.nan if call.op == "zoo.sdpa" else 0.0,
    }  # fmt: skip
    q, k, v = (in_memory(x, b) for x in (query, key, value))
    sides = {"q": _side(q, -2, -1), "k": _side(k, -2, -1), "v": _side(v, -1, -2)}
    for name, side in sides.items():
        own = (1, *side.tensor.shape)[-3]
        params |= {f"{name}_start": side.tensor.offset, f"{name}_batch": side.batch[0], f"{name}_head": side.batch[1]}
        params |= {f"{name}_outer": side.outer, f"{name}_k": side.depth}
        if name != "q":
            params[f"{name}_repeat"] = max(1, heads // own)
    constants: dict[str, Any] = {"causal": bool(call.get("is_causal")), "mask": ""}
    reads: dict[str, Tensor | Vector] = {}
    if call.get("attn_mask") is not None:
        mask = in_memory(call["attn_mask"], b)
        steps = [0, 0, *(0 if n == 1 else s for n, s in zip(mask.shape, mask.strides, strict=True))]
        names = ("mask_batch", "mask_head", "mask_query", "mask_key")
        params |= {"mask_start": mask.offset, **dict(zip(names, steps[-4:], strict=True))}
        constants["mask"] = "bool" if mask.dtype == "bool" else "float"
        reads["mask"] = mask
    vec = {
        "q": sides["q"].vector_axis(queries, depth),
        "k": sides["k"].vector_axis(keys, depth),
        "v": sides["v"].vector_axis(width, keys),
    }
    job = Job(tuple(out.shape), out.dtype, batch * heads, sides, vec, reads, params, constants)
    if queries <= FEW_QUERIES and not _are_windows(job, b):
        return _launch_few(job, b)
    tile = choose(job, b) if usable(b) or _is_long(job, b) else None
    return _launch_many(job, b) if tile is None else _launch_wide(tile, job, b)


def _side(tensor: Tensor, outer: int, depth: int) -> Operand:
    """(batch, head) strides, 0 where there is one for all; the position and element axes as a product has them."""
    steps = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
    batch = (0, 0, *steps[:-2])[-2:]
    return Operand(tensor, batch, tensor.strides[outer], tensor.strides[depth])


def _is_long(job: Job, b: Builder) -> bool:
    """Whether the loops of attention.wgsl, which shares no keys out, would be more than the device makes."""
    most = b.capabilities.most_iterations
    return most is not None and -(-job.params["keys"] // 32) * (33 * -(-job.params["depth"] // 32) + 64) > most


def _launch_many(job: Job, b: Builder) -> Value:
    blocks = -(-job.params["values"] // BLOCK)
    chunks = -(-blocks // 4)
    q_tiles = -(-job.params["queries"] // 32)
    v_fast = job.vec["v"] or ("outer" if job.sides["v"].outer == 1 else "k")
    axes = {f"{name}_vec": axis for name, axis in job.vec.items()}
    return _by_position(
        job,
        b,
        "attention",
        reads=job.reads | {name: side.read(bool(job.vec[name])) for name, side in job.sides.items()},
        groups=job.pairs * q_tiles * chunks,
        params=job.params | {"chunks": chunks, "q_tiles": q_tiles},
        constants=job.constants | axes | {"BLOCKS": -(-blocks // chunks), "v_fast": v_fast},
    )


def usable(b: Builder) -> bool:
    """On a processor, steps as large as those of `attention_wide` gain nothing."""
    return not b.capabilities.on_processor


def choose_few(b: Builder) -> Few:
    return ON_PROCESSOR if b.capabilities.on_processor else ON_GPU


def choose(job: Job, b: Builder) -> Tile | None:
    """The tile that was fastest, or nearly, for 14 attentions of the models on an NVIDIA H200; the next smaller one
    where a device has no room for it, and None where none fits."""
    columns, queries = min(job.params["values"], MOST_COLUMNS), job.params["queries"]
    high = -(-queries // HIGH.queries)
    if job.pairs * high >= HIGH.busy and high * HIGH.queries <= 1.125 * queries:
        wanted = HIGH
    elif job.params["depth"] <= 64:
        wanted = SMALL
    else:
        wanted = FLAT if queries >= 256 else DEEP
    return next((tile for tile in TILES[TILES.index(wanted) :] if tile.fits(columns, b.capabilities)), None)


def _launch_wide(tile: Tile, job: Job, b: Builder) -> Value:
    queries, keys, width = (job.params[name] for name in ("queries", "keys", "values"))
    chunks = -(-width // MOST_COLUMNS)
    q_tiles = -(-queries // tile.queries)
    steps = -(-keys // tile.keys)
    spans = min(-(-tile.busy // (job.pairs * q_tiles * chunks)), MOST_SPANS, steps)
    most = b.capabilities.most_iterations
    if most is not None:
        spans = max(spans, -(-steps * tile.iterations(job.params["depth"]) // most))
    reads = dict(job.reads)
    params = job.params | {"chunks": chunks, "q_tiles": q_tiles, "spans": spans}
    constants = job.constants | tile.constants | {"RC": tile.blocks(-(-width // chunks))}
    constants |= {"ONE": spans == 1, "SEEN": False}
    for name, axis in (("q", "k"), ("k", "k"), ("v", "outer")):
        side = job.sides[name]
        constants |= {
            f"{name}_vec": job.vec[name] == axis,
            f"{name}_along": (side.depth if axis == "k" else side.outer) == 1,
        }
        reads[name] = side.read(job.vec[name] == axis)
    if job.constants["mask"] and steps > 1:
        seen, strides = _seen(tile, job, b)
        reads["seen"] = seen
        params |= strides
        constants["SEEN"] = True
    groups = job.pairs * q_tiles * spans * chunks
    if spans == 1:
        return _by_position(job, b, "attention_wide", reads=reads, groups=groups, params=params, constants=constants)
    rows = job.pairs * queries
    found = {"sums": b.temp((rows, spans, width), "float32"), "stats": b.temp((rows, spans, 2), "float32")}
    b.launch_into("attention_wide", targets=found, reads=reads, groups=groups, params=params, constants=constants)
    return _merge("attention_merge_few" if spans <= MOST_SPANS else "attention_merge", found, rows, spans, job, b)


def _seen(tile: Tile, job: Job, b: Builder) -> tuple[Tensor, dict[str, int]]:
    """What the mask leaves of each tile and step, and its strides; layers that share a mask share it."""
    mask = job.reads["mask"]
    assert isinstance(mask, Tensor)
    own = {name: job.params[f"mask_{name}"] != 0 for name in ("batch", "head", "query")}
    heads = job.params["heads"] if own["head"] else 1
    batches = job.pairs // job.params["heads"] if own["batch"] else 1
    queries = job.params["queries"] if own["query"] else 1
    tiles = -(-queries // tile.queries)
    steps = -(-job.params["keys"] // tile.keys)
    strides = {"seen_batch": own["batch"] * heads * tiles * steps, "seen_head": own["head"] * tiles * steps}
    strides["seen_tile"] = own["query"] * steps
    params = {name: value for name, value in job.params.items() if name.startswith("mask_")}
    params |= {"heads": heads, "tiles": tiles, "steps": steps, "queries": queries, "keys": job.params["keys"]}
    shape = (batches, heads, tiles, steps)
    key = ("attention_seen", mask.buffer, tuple(params.items()), shape, tile)
    seen = b.shared.get(key)
    if seen is None:
        seen = b.temp(shape, "int32")
        constants = {"M": tile.queries, "N": tile.keys, "mask": job.constants["mask"]}
        groups = math.prod(shape)
        b.launch_into(
            "attention_seen",
            targets={"seen": seen},
            reads={"mask": mask},
            groups=groups,
            params=params,
            constants=constants,
        )
        if mask.buffer.kind != "state":  # which another step may write
            b.shared[key] = seen
    return seen, strides


def _by_position(job: Job, b: Builder, template: str, **launch: Any) -> Value:
    """A kernel that writes [batch, queries, heads, values], heads side by side, as the product behind reads them."""
    heads, queries, width = (job.params[name] for name in ("heads", "queries", "values"))
    if heads == 1 or queries == 1:  # the same order as the result's own
        return b.launch(template, shape=job.shape, dtype=job.dtype, **launch)
    result = b.launch(template, shape=(job.pairs // heads, queries, heads, width), dtype=job.dtype, **launch)
    return b.reshape(values.permute(b.movable(result), (0, 2, 1, 3)), job.shape)


def _span(rows: int, keys: int, b: Builder) -> int:
    """A processor, and a GPU that is busy anyway, get the longer span: fewer results to put together."""
    short, long = SPANS
    few = keys > short and rows * -(-keys // long) < BUSY
    return short if few and not b.capabilities.on_processor else long


def _are_windows(job: Job, b: Builder) -> bool:
    """Whether there are many of them, on a GPU, each with few keys, of which none is hidden: a workgroup of its own for
    each query then costs more than what `attention_wide` leaves idle."""
    hidden = bool(job.constants["mask"]) or job.constants["causal"]
    return usable(b) and not hidden and job.pairs >= BUSY and job.params["keys"] <= FEW_KEYS


def _launch_few(job: Job, b: Builder) -> Value:
    rows, width = job.pairs * job.params["queries"], job.params["values"]
    lanes = next(n for n in (4, 8, 16, 32, 64) if 4 * n >= width or n == 64)
    chunks = -(-width // (4 * lanes))
    span = _span(rows * chunks, job.params["keys"], b)
    spans = -(-job.params["keys"] // span)
    wide = {"q": job.vec["q"] == "k" and job.vec["k"] == "k", "v": job.vec["v"] == "outer"}
    wide["k"] = wide["q"]
    reads = job.reads | {name: side.read(wide[name]) for name, side in job.sides.items()}
    params = job.params | {"spans": spans, "chunks": chunks}
    few = choose_few(b)
    constants = job.constants | {"width": 4 if wide["q"] else 1, "v_vec": wide["v"], "LANES": lanes, "EACH": span // 64}
    constants |= {"ONE": spans == 1, "SPLIT": few.SPLIT, "STEPS": few.steps(job.params["depth"])}
    groups = rows * chunks * spans
    if spans == 1:
        return _by_position(job, b, "attention_few", reads=reads, groups=groups, params=params, constants=constants)
    sums, stats = b.temp((rows, spans, width), "float32"), b.temp((rows, spans, 2), "float32")
    found = {"sums": sums, "stats": stats}
    b.launch_into("attention_few", targets=found, reads=reads, groups=groups, params=params, constants=constants)
    return _merge("attention_merge", found, rows, spans, job, b)


def _merge(template: str, found: dict[str, Tensor], rows: int, spans: int, job: Job, b: Builder) -> Value:
    width = job.params["values"]
    params = {name: job.params[name] for name in ("heads", "queries", "values", "empty")}
    constants: dict[str, int]
    if template == "attention_merge":
        few = choose_few(b)
        constants = {"COLUMNS": few.COLUMNS, "SLICES": few.SLICES, "AT_ONCE": few.AT_ONCE}
        params |= {"spans": spans, "chunks": -(-width // constants["COLUMNS"])}
        groups = rows * params["chunks"]
    else:
        constants = {"SPANS": spans}
        params["count"] = rows * width
        groups = -(-rows * width // 64)
    return _by_position(job, b, template, reads=found, groups=groups, params=params, constants=constants)


register("aten.scaled_dot_product_attention.default", accepts=_accepts, lower=_lower, preserve=True)
register("zoo.sdpa", accepts=_accepts, lower=_lower)

// What a mask leaves of each tile of M queries x N keys, for attention_wide: 0 nothing, 1 a part, 2 all.
//
// reads   mask   bool (false hides a key) or float (-inf hides, 0 leaves as is), through strides, 0 where it repeats
// writes  seen   int32, row-major [batches, heads, tiles, steps], sizes 1 where the mask repeats
// params  heads, tiles, steps; queries (1 where the mask repeats), keys; mask_start and strides
// groups  batches * heads * tiles * steps

var<workgroup> found: atomic<u32>; // 1: something is hidden or altered, 2: something is visible

{{ entry(64) }}
  let step = group % p.steps;
  let tile = group / p.steps % p.tiles;
  let pair = group / (p.steps * p.tiles);
  let key0 = step * {{ N }}u;
  let row0 = tile * {{ M }}u;
  let base = p.mask_start + pair / p.heads * p.mask_batch + pair % p.heads * p.mask_head;
  let rows = min({{ M }}u, p.queries - row0);
  let keys = min({{ N }}u, p.keys - key0);
  var bits = 0u;
  for (var e = lid; e < rows * {{ N }}u; e += 64u) { // without a branch, so that reads do not wait for each other
    let key = e % {{ N }}u;
    let at = base + (row0 + e / {{ N }}u) * p.mask_query + (key0 + min(key, keys - 1u)) * p.mask_key;
{% if mask == "bool" %}
    bits |= select(1u, 2u, load_mask(at));
{% else %}
    let here = bitcast<u32>(load_mask(at));
    bits |= select(select(3u, 2u, (here & 0x7fffffffu) == 0u), 1u, here == 0xff800000u);
{% endif %}
  }
  if (lid == 0u) { atomicStore(&found, 0u); }
  workgroupBarrier();
  atomicOr(&found, bits);
  workgroupBarrier();
  if (lid == 0u) {
    let all = atomicLoad(&found);
    store_seen(group, select(select(1, 2, all == 2u), 0, all == 1u));
  }
}

// The first `kept` elements of each sorted row, with their indices: topk and sort, by rank.
//
// An element's place is the number of elements that go before it; equal ones keep their order. Quadratic in n, but
// without a limit on n and without a pass per bit: meant for short rows.
//
// reads      x                 [outer, n, inner], by row-major index, ceil(n / workgroup) + 1 times
// writes     values, indices   [outer, kept, inner]; those that are in `writes`
// params     n, inner, kept, tiles = ceil(n / workgroup)
// constants  workgroup; descending, type (f32 or i32), writes
// groups     rows * tiles

{% from "key.wgsl" import key_function with context %}
{{ key_function(type, not descending, false) }}
var<workgroup> keys: array<i32, {{ workgroup }}>;

{{ entry(workgroup) }}
  let row = group / p.tiles;
  let mine = (group % p.tiles) * {{ workgroup }}u + lid;
  let outer = row / p.inner;
  let base = outer * p.n * p.inner + row % p.inner;
  let value = load_x(base + min(mine, p.n - 1u) * p.inner);
  let key = key_of(value);
  var rank = 0u;
  for (var tile = 0u; tile < p.n; tile += {{ workgroup }}u) {
    let loaded = min(tile + lid, p.n - 1u);
    keys[lid] = key_of(load_x(base + loaded * p.inner));
    workgroupBarrier();
    let count = min({{ workgroup }}u, p.n - tile);
    for (var j = 0u; j < count; j++) {
      let other = keys[j];
      rank += select(0u, 1u, other > key || (other == key && tile + j < mine));
    }
    workgroupBarrier();
  }
  if (mine < p.n && rank < p.kept) {
    let at = (outer * p.kept + rank) * p.inner + row % p.inner;
{% if "values" in writes %}
    store_values(at, value);
{% endif %}
{% if "indices" in writes %}
    store_indices(at, i32(mine));
{% endif %}
  }
}

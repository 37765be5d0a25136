// The first `kept` elements of each sorted row, with their indices: topk and sort, by rank.
//
// An element's place is the number of elements that go before it; equal ones keep their order. Quadratic in n, but
// without a limit on n and without a pass per bit: meant for short rows.
//
// reads      x                 [outer, length, inner], by row-major index, ceil(n / workgroup) + 1 times
//            at                (`block`) [outer, n / block, inner]: the blocks of each row that are looked into
// writes     values, indices   [outer, kept, inner]; those that are in `writes`
// params     n: elements of a row that are looked at, length: all of them; inner, kept, tiles = ceil(n / workgroup)
// constants  workgroup; descending, type (f32 or i32), writes; block: neighbours that are a block, 0: all are looked at
// groups     rows * tiles

{% from "key.wgsl" import key_function with context %}
{{ key_function(type, not descending, false) }}
var<workgroup> keys: array<i32, {{ workgroup }}>;
{% if block %}
var<workgroup> places: array<u32, {{ workgroup }}>;
{% endif %}
{# where in its row the j-th element to look at is #}
{% macro place(j) -%}
{% if block -%}
u32(load_at((outer * (p.n / {{ block }}u) + {{ j }} / {{ block }}u) * p.inner + row % p.inner)) * {{ block }}u + {{ j }} % {{ block }}u
{%- else -%}
{{ j }}
{%- endif %}
{%- endmacro %}

{{ entry(workgroup) }}
  let row = group / p.tiles;
  let mine = (group % p.tiles) * {{ workgroup }}u + lid;
  let outer = row / p.inner;
  let base = outer * p.length * p.inner + row % p.inner;
  let last = p.length - 1u;
  let asked = min(mine, p.n - 1u);
  let here = {{ place("asked") }};
  let value = load_x(base + min(here, last) * p.inner);
  let key = key_of(value);
  var rank = 0u;
  for (var tile = 0u; tile < p.n; tile += {{ workgroup }}u) {
    let loaded = min(tile + lid, p.n - 1u);
    let there = {{ place("loaded") }};
    keys[lid] = key_of(load_x(base + min(there, last) * p.inner));
{% if block %}
    // The last block of a row may be a part: what is behind the row's end goes before nothing.
    places[lid] = there;
    if (there > last) { keys[lid] = -2147483647 - 1; }
{% endif %}
    workgroupBarrier();
    let count = min({{ workgroup }}u, p.n - tile);
    for (var j = 0u; j < count; j++) {
      let other = keys[j];
      let is_first = {{ "places[j] < here" if block else "tile + j < mine" }};
      rank += select(0u, 1u, other > key || (other == key && is_first));
    }
    workgroupBarrier();
  }
  if (mine < p.n && here <= last && rank < p.kept) {
    let at = (outer * p.kept + rank) * p.inner + row % p.inner;
{% if "values" in writes %}
    store_values(at, value);
{% endif %}
{% if "indices" in writes %}
    store_indices(at, i32(here));
{% endif %}
  }
}

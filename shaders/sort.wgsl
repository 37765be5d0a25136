// The first `kept` elements of each sorted row, with their indices: topk and sort, by rank.
//
// An element's place is the number of elements that go before it; equal ones keep their order. Quadratic in n, but
// without a limit on n and without a pass per bit: meant for short rows, or few blocks of a long one.
//
// reads      x                 [outer, length, inner], by row-major index, n / workgroup + 1 times
//            at                (`block`) [outer, n / block, inner]: the blocks of each row that are looked into
// writes     values, indices   [outer, kept, inner]; those that are in `writes`
// params     n: elements of a row that are looked at, length: all of them; inner, kept, tiles = ceil(n / workgroup)
// constants  workgroup; descending, type (f32 or i32), writes; block: neighbours that are a block, 0: all are looked at
// groups     rows * tiles

{% from "key.wgsl" import key_function with context %}
{{ key_function(type, not descending, false) }}
{# Compared four at a time, and as many fours in one turn of the loop. #}
{% set turn = 4 %}
var<workgroup> keys: array<vec4<i32>, {{ workgroup }}>;
{% if block %}
var<workgroup> places: array<vec4<u32>, {{ workgroup }}>;
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
  var before = vec4<u32>();
  for (var tile = 0u; tile < p.n; tile += {{ 4 * workgroup }}u) {
    let first = tile + 4u * lid;
{% for u in range(4) %}
    let j{{ u }} = min(first + {{ u }}u, p.n - 1u);
    let there{{ u }} = {{ place("j%d" % u) }};
    // What is behind the row's end, which is in its last block too, goes before nothing.
    let inside{{ u }} = first + {{ u }}u < p.n && there{{ u }} <= last;
    let key{{ u }} = select(-2147483647 - 1, key_of(load_x(base + min(there{{ u }}, last) * p.inner)), inside{{ u }});
{% if block %}
    let place{{ u }} = select(0xffffffffu, there{{ u }}, inside{{ u }});
{% endif %}
{% endfor %}
    keys[lid] = vec4<i32>(key0, key1, key2, key3);
{% if block %}
    places[lid] = vec4<u32>(place0, place1, place2, place3);
{% endif %}
    workgroupBarrier();
    let count = min({{ workgroup }}u, (p.n - tile + 3u) / 4u);
    for (var j = 0u; j < count; j += {{ turn }}u) {
{% for u in range(turn) %}
      let others{{ u }} = keys[j + {{ u }}u];
      let where{{ u }} = {{ "places[j + %du]" % u if block else "tile + 4u * j + vec4<u32>(%du, %du, %du, %du)" % (4 * u, 4 * u + 1, 4 * u + 2, 4 * u + 3) }};
{% endfor %}
{% for u in range(turn) %}
      let ahead{{ u }} = (others{{ u }} > vec4(key)) | ((others{{ u }} == vec4(key)) & (where{{ u }} < vec4(here)));
      before += select(vec4<u32>(), vec4<u32>(1u), ahead{{ u }});
{% endfor %}
    }
    workgroupBarrier();
  }
  let rank = before.x + before.y + before.z + before.w;
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

// The key of the element of each block of a row that goes first when the row is sorted (see sort.wgsl).
//
// reads      x     [outer, n, inner], by row-major index, once
// writes     out   i32 [outer, blocks, inner]
// params     n, inner, blocks = ceil(n / block), count = outer * blocks * inner
// constants  workgroup; descending, type (f32 or i32), block: neighbours that are a block, a multiple of 4
// groups     ceil(count / workgroup)

{% from "key.wgsl" import key_function with context %}
{{ key_function(type, not descending, false) }}
{{ entry(workgroup) }}
  let at = group * {{ workgroup }}u + lid;
  if (at >= p.count) { return; }
  let inner = at % p.inner;
  let outer = at / (p.inner * p.blocks);
  let first = (at / p.inner) % p.blocks * {{ block }}u;
  let base = outer * p.n * p.inner + inner;
  var best = -2147483647 - 1;
  for (var k = first; k < min(first + {{ block }}u, p.n); k += 4u) {
{% for u in range(4) %}
    let key{{ u }} = key_of(load_x(base + min(k + {{ u }}u, p.n - 1u) * p.inner));
{% endfor %}
    best = max(max(best, max(key0, key1)), max(key2, key3));
  }
  store(at, best);
}

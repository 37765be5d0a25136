// Where the maximum or minimum of a row is, and what: argmax, argmin, max.dim, min.dim.
//
// reads      x        [outer, n, inner], by row-major index; n > 0
// writes     out      index a row (`pair` false), or values and indices
// params     those of rows.wgsl
// constants  those of rows.wgsl; lowest, type (f32 or i32), pair
//
// The first of equal elements wins, NaN beats everything, as in torch. Floats are compared by an integer key: no
// infinity stands for "nothing yet", and no driver can fold a NaN test away.

{% from "rows.wgsl" import place, tree with context %}
{% from "key.wgsl" import key_function with context %}
{{ key_function(type, lowest, true) }}
struct Best { key: i32, at: u32 }
fn better(a: Best, b: Best) -> Best {
  if (b.key > a.key || (b.key == a.key && b.at < a.at)) { return b; }
  return a;
}
var<workgroup> pool: array<Best, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place() }}
  let first = min(lane, p.n - 1u);
  var best = Best(key_of(load_x(base + first * step)), first);
  for (var k = lane + {{ lanes }}u; k < p.n; k += {{ lanes }}u) {
    best = better(best, Best(key_of(load_x(base + k * step)), k));
  }
{{ tree("pool", "best", "winner", "better") }}
  if (live && lane == 0u) {
{% if pair %}
    store_values(row, load_x(base + winner.at * step));
    store_indices(row, i32(winner.at));
{% else %}
    store(row, i32(winner.at));
{% endif %}
  }
}

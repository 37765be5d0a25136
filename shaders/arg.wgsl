// Where the maximum or minimum of a row is, and what: argmax, argmin, max.dim, min.dim.
//
// reads      x        [outer, n, inner], by row-major index; n > 0
//            at       (`second`) what counts as the index of each element of x: the winners of chunks
// writes     out      index a row (`pair` false), or values and indices
// params     those of rows.wgsl; chunk, splits with `split`
// constants  those of rows.wgsl; lowest, type (f32 or i32), pair, split, second
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
{{ place(split) }}
  let first = min(lane, n - 1u);
  var best = Best(key_of(load_x(base + first * step)), first);
  var k = lane + {{ lanes }}u;
  for (; k + {{ 3 * lanes }}u < n; k += {{ 4 * lanes }}u) {
    let at = base + k * step;
{% for u in range(4) %}
    let b{{ u }} = Best(key_of(load_x(at + {{ u * lanes }}u * step)), k + {{ u * lanes }}u);
{% endfor %}
    best = better(best, better(better(b0, b1), better(b2, b3)));
  }
  for (; k < n; k += {{ lanes }}u) { best = better(best, Best(key_of(load_x(base + k * step)), k)); }
{{ tree("pool", "best", "winner", "better", true) }}
  if (live && lane == 0u) {
{% if second %}
    let index = load_at(base + winner.at * step);
{% else %}
    let index = i32(winner.at{{ " + start" if split else "" }});
{% endif %}
{% if pair %}
    store_values(row, load_x(base + winner.at * step));
    store_indices(row, index);
{% else %}
    store(row, index);
{% endif %}
  }
}

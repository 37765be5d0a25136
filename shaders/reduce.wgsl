// One number a row: sum, mean, prod, max or min. f32 max and min pass NaN on.
//
// reads      x     [outer, n, inner], by row-major index
// writes     out   a number a row; with `split`, a number for each of `splits` chunks of each row: [outer, splits, inner]
// params     those of rows.wgsl; divisor for mean; chunk, splits with `split`
// constants  those of rows.wgsl; op, type (f32 or i32), split
//
// Lanes with nothing to do hold the identity of sum and prod, and for max and min the row's last element.

{% from "rows.wgsl" import place, tree with context %}
{% set sums = op in ("sum", "mean") %}
fn merge(a: {{ type }}, b: {{ type }}) -> {{ type }} {
{% if sums %}
  return a + b;
{% elif op == "prod" %}
  return a * b;
{% else %}
  return {{ op }}{{ "_nan" if type == "f32" else "" }}(a, b);
{% endif %}
}
var<workgroup> pool: array<{{ type }}, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place(split) }}
  var k = lane;
{% if sums or op == "prod" %}
  var acc = {{ type }}({{ 0 if sums else 1 }});
{% else %}
  var acc = load_x(base + min(k, n - 1u) * step);
  k += {{ lanes }}u;
{% endif %}
  for (; k + {{ 3 * lanes }}u < n; k += {{ 4 * lanes }}u) {
    let at = base + k * step;
    let ab = merge(load_x(at), load_x(at + {{ lanes }}u * step));
    let cd = merge(load_x(at + {{ 2 * lanes }}u * step), load_x(at + {{ 3 * lanes }}u * step));
    acc = merge(acc, merge(ab, cd));
  }
  for (; k < n; k += {{ lanes }}u) { acc = merge(acc, load_x(base + k * step)); }
{{ tree("pool", "acc", "whole", "merge", true) }}
  if (live && lane == 0u) {
{% if op == "mean" %}
    store(row, whole / p.divisor);
{% else %}
    store(row, whole);
{% endif %}
  }
}

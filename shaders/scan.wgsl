// Running sum or product along one axis.
//
// reads      x     [outer, n, inner], by row-major index, twice
// writes     out   as x
// params     those of rows.wgsl; segment = ceil(n / lanes)
// constants  those of rows.wgsl; op (sum, prod), type (f32 or i32)
//
// Each lane takes a segment of the row: it first reduces it, then starts from what the lanes before it found.

{% from "rows.wgsl" import place with context %}
{% set sign = "+" if op == "sum" else "*" %}
{% set unit = type ~ ("(0)" if op == "sum" else "(1)") %}
{% set stride = workgroup // lanes if minor else 1 %}
var<workgroup> pool: array<{{ type }}, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place() }}
  let start = lane * p.segment;
  let end = min(start + p.segment, p.n);
  var acc = {{ unit }};
{% if lanes > 1 %}
  for (var k = start; k < end; k++) { acc = acc {{ sign }} load_x(base + k * step); }
  pool[lid] = acc;
  workgroupBarrier();
  acc = {{ unit }};
  let first = lid - lane * {{ stride }}u;
  for (var l = 0u; l < lane; l++) { acc = acc {{ sign }} pool[first + l * {{ stride }}u]; }
{% endif %}
  if (!live) { return; }
  for (var k = start; k < end; k++) {
    acc = acc {{ sign }} load_x(base + k * step);
    store(base + k * step, acc);
  }
}

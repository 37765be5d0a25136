// Not a kernel: pieces for the kernels that work along one axis (reduce, arg, moments, softmax, norm, scan).
//
// The tensor is [outer, n, inner] in row-major order and a row is the n elements at one (outer, inner). A workgroup
// takes workgroup / lanes rows, `lanes` invocations a row. With inner > 1 (`minor`) neighbouring invocations take
// neighbouring rows, otherwise neighbouring elements of one row, so that loads coalesce in both cases.
//
// constants  workgroup, lanes (a power of two that divides it), minor; flat: reductions take few barriers, not few additions
// params     rows = outer * inner, n, inner
// groups     ceil(rows / (workgroup / lanes))

{# Defines lane, row, live, n, base and step: element k < n of the row is at base + k * step. Invocations past the last row
   redo that row and must not store: barriers stay uniform, and no load leaves the buffer.
   With `split` every `chunk` elements of a row are a row of their own (params chunk, splits; rows counts them all), in the
   order [outer, splits, inner], and the row's element 0 is element `start` of the whole. #}
{% macro place(split=false) %}
{% set rows = workgroup // lanes %}
{% if lanes == 1 %}
  let lane = 0u;
  let wanted = group * {{ workgroup }}u + lid;
{% elif minor %}
  let lane = lid / {{ rows }}u;
  let wanted = group * {{ rows }}u + lid % {{ rows }}u;
{% else %}
  let lane = lid % {{ lanes }}u;
  let wanted = group * {{ rows }}u + lid / {{ lanes }}u;
{% endif %}
  let live = wanted < p.rows;
  let row = min(wanted, p.rows - 1u);
{% if split %}
  let chunk = (row / p.inner) % p.splits;
  let start = chunk * p.chunk;
  let n = min(p.chunk, p.n - start);
  let step = p.inner;
  let base = ((row / p.inner / p.splits) * p.n + start) * p.inner + row % p.inner;
{% elif minor %}
  let n = p.n;
  let step = p.inner;
  let base = (row / p.inner) * p.n * p.inner + row % p.inner;
{% else %}
  let n = p.n;
  let step = 1u;
  let base = row * p.n;
{% endif %}
{% endmacro %}

{# Reduces `value` over the lanes of each row: afterwards `result` is merge(...) of all of them, in every lane.
   `pool` is a workgroup array of `workgroup` elements, free for reuse afterwards; with `last` it is not used again, which
   `flat` makes use of. The order is fixed. #}
{% macro tree(pool, value, result, merge, last=false) %}
{% set stride = workgroup // lanes if minor else 1 %}
{% if lanes == 1 %}
  let {{ result }} = {{ value }};
{% elif flat %}
  // On a processor a barrier costs as much as dozens of additions: every lane merges what is left of at most 8 sums.
{% set first = "lid % " ~ (workgroup // lanes) ~ "u" if minor else "lid - lane" %}
{% set left = 8 if lanes > 8 else lanes %}
  {{ pool }}[lid] = {{ value }};
  workgroupBarrier();
{% if lanes > 8 %}
  if (lane < 8u) {
    var own = {{ pool }}[lid];
    for (var i = 1u; i < {{ lanes // 8 }}u; i++) { own = {{ merge }}(own, {{ pool }}[lid + i * {{ 8 * stride }}u]); }
    {{ pool }}[lid] = own;
  }
  workgroupBarrier();
{% endif %}
  var {{ result }} = {{ pool }}[{{ first }}];
{% for i in range(1, left) %}
  {{ result }} = {{ merge }}({{ result }}, {{ pool }}[{{ first }} + {{ i * stride }}u]);
{% endfor %}
{% if not last %}
  workgroupBarrier();
{% endif %}
{% else %}
  {{ pool }}[lid] = {{ value }};
  workgroupBarrier();
{% for power in range(15) if 2 ** power < lanes %}
{% set half = lanes // 2 ** (power + 1) %}
  if (lane < {{ half }}u) { {{ pool }}[lid] = {{ merge }}({{ pool }}[lid], {{ pool }}[lid + {{ half * stride }}u]); }
  workgroupBarrier();
{% endfor %}
  let {{ result }} = {{ pool }}[{{ "lid % " ~ (workgroup // lanes) ~ "u" if minor else "lid - lane" }}];
  workgroupBarrier();
{% endif %}
{% endmacro %}

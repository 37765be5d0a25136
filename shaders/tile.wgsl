{# Macros shared by the kernels that stage operands through workgroup memory (gemm.wgsl, attention.wgsl), and by the gemv kernels.

   stage(name, at, depth, outer, first, k0, vec, kt, quads, slot, scalar)
     64 invocations copy a tile of kt x 4*quads elements of an operand, each a block of 4 x 4, to
     tile[slot + k * (quads + 1) + quad]: a vec4 along the operand's outer axis. at: WGSL expression of the element of
     (0, 0); p.<name>_outer and p.<name>_k are its strides; depth and outer its extents. vec: "k" or "outer", the axis that
     is read four elements at a time, or "" (then `fast` says which axis neighbouring invocations follow).
     Coordinates are clamped, so no load needs a branch; what lies beyond depth is staged as 0 (0 x inf is NaN), what lies
     beyond outer is garbage that nobody stores. The row pitch of quads + 1 spreads workgroup memory's banks. #}
{% macro stage(name, at, depth, outer, first, k0, vec, fast, kt, quads, slot, scalar) %}
  {
{% if fast == "k" %}
    let kq = lid % {{ kt // 4 }}u; let oq = lid / {{ kt // 4 }}u;
{% else %}
    let oq = lid % {{ quads }}u; let kq = lid / {{ quads }}u;
{% endif %}
    let k = {{ k0 }} + kq * 4u;
    let o = {{ first }} + oq * 4u;
    let slot = {{ slot }} + kq * {{ 4 * (quads + 1) }}u + oq;
{% if vec == "k" %}
    let row = {{ at }} + min(k, {{ depth }} - 4u);
{% for j in range(4) %}
    let r{{ j }} = load4_{{ name }}((row + min(o + {{ j }}u, {{ outer }} - 1u) * p.{{ name }}_outer) / 4u);
{% endfor %}
    let inside = k < {{ depth }};
{% for i in range(4) %}
    tile[slot + {{ i * (quads + 1) }}u] = select(vec4<{{ scalar }}>(), vec4<{{ scalar }}>(r0[{{ i }}], r1[{{ i }}], r2[{{ i }}], r3[{{ i }}]), inside);
{% endfor %}
{% elif vec == "outer" %}
    let column = {{ at }} + min(o, {{ outer }} - 4u);
{% for i in range(4) %}
    let c{{ i }} = load4_{{ name }}((column + min(k + {{ i }}u, {{ depth }} - 1u) * p.{{ name }}_k) / 4u);
    tile[slot + {{ i * (quads + 1) }}u] = select(vec4<{{ scalar }}>(), c{{ i }}, k + {{ i }}u < {{ depth }});
{% endfor %}
{% else %}
{% for j in range(4) %}
    let o{{ j }} = {{ at }} + min(o + {{ j }}u, {{ outer }} - 1u) * p.{{ name }}_outer;
{% endfor %}
{% for i in range(4) %}
    let k{{ i }} = min(k + {{ i }}u, {{ depth }} - 1u) * p.{{ name }}_k;
    let c{{ i }} = vec4<{{ scalar }}>(load_{{ name }}(o0 + k{{ i }}), load_{{ name }}(o1 + k{{ i }}), load_{{ name }}(o2 + k{{ i }}), load_{{ name }}(o3 + k{{ i }}));
    tile[slot + {{ i * (quads + 1) }}u] = select(vec4<{{ scalar }}>(), c{{ i }}, k + {{ i }}u < {{ depth }});
{% endfor %}
{% endif %}
  }
{% endmacro %}
{#   batch_offsets(batch_dims): defines a_base and b_base for the number `batch` (row-major over p.batch_<d>). #}
{% macro batch_offsets(batch_dims) %}
  var a_base = p.a_start;
  var b_base = p.b_start;
{% if batch_dims %}
  var rest = batch;
{% for d in range(batch_dims - 1, -1, -1) %}
  { let at = {{ "rest" if d == 0 else "rest %% p.batch_%d" % d }}; a_base += at * p.a_batch_{{ d }}; b_base += at * p.b_batch_{{ d }}; }
{% if d %}
  rest /= p.batch_{{ d }};
{% endif %}
{% endfor %}
{% endif %}
{% endmacro %}
{#   finish_gemv(ROWS): adds up s0 … of 64 invocations through workgroup array `partial`, 4 columns from n on; opens a block
     for invocations with a result, where (m, n + c) has `sum`. #}
{% macro finish_gemv(ROWS) %}
{% for m in range(ROWS) %}
  partial[{{ 64 * m }}u + lid] = s{{ m }};
{% endfor %}
  workgroupBarrier();
  // 64 partial sums a row: eights first, each added up in the place of its first, then the eight.
  for (var e = lid; e < {{ 8 * ROWS }}u; e += 64u) {
    var sum = partial[e * 8u];
    for (var i = 1u; i < 8u; i++) { sum += partial[e * 8u + i]; }
    partial[e * 8u] = sum;
  }
  workgroupBarrier();
  let m = lid / 4u;
  let c = lid % 4u;
  if (m < p.rows && n + c < p.cols) {
    var sum = partial[m * 64u][c];
    for (var i = 1u; i < 8u; i++) { sum += partial[m * 64u + i * 8u][c]; }
{% endmacro %}

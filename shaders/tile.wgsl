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
{#   eights(pool, ROWS, WORKERS): of WORKERS partial sums a row, each eight is added up in the place of its first; what is
     left is the sum of elements 0, 8, 16 … of the row. #}
{% macro eights(pool, ROWS, WORKERS) %}
  workgroupBarrier();
  for (var e = lid; e < {{ WORKERS // 8 * ROWS }}u; e += {{ WORKERS }}u) {
    var sum = {{ pool }}[e * 8u];
    for (var i = 1u; i < 8u; i++) { sum += {{ pool }}[e * 8u + i]; }
    {{ pool }}[e * 8u] = sum;
  }
  workgroupBarrier();
{% endmacro %}
{#   walk(WORKERS, width, STEPS, j): opens a block of the walk of the invocations along p.depth, `width` elements each a
     step, at `k`: the whole walk as a loop where STEPS is 0, else step j of STEPS, to be written out so that no read waits
     for another. #}
{% macro walk(WORKERS, width, STEPS, j) %}
{% if STEPS %}
  {
    let k = lid * {{ width }}u + {{ j * WORKERS * width }}u;
{%- else %}
  for (var k = lid * {{ width }}u; k < p.depth; k += {{ WORKERS * width }}u) {
{%- endif %}
{% endmacro %}
{#   The norm that a gemv kernel does for its own rows (backend/ops/gemv.py), in the manner of norm.wgsl. Rows are read by
     load4_a from a<m> on, k walks p.depth by WORKERS invocations of `width`; the constants norm ("", "rms", "layer"),
     norm_weight and norm_bias are passed on because imported macros do not see them.

     norm_pool(ROWS, norm, WORKERS)            the workgroup memory for it, in module scope
     norm_before(ROWS, norm, WORKERS, STEPS)   before the walk over k; STEPS as in `walk` for a width of 4
     norm_factors(at, norm …)                  at each place: factors of the elements from k on, as factor and shift
     norm_rows(x, m, norm …)                   vec4 variable x, row m, becomes what goes into the product
     norm_after(ROWS, norm, WORKERS)           after the walk, s<m> hold the partial products #}
{% macro norm_pool(ROWS, norm, WORKERS) %}
{% if norm %}
var<workgroup> pool: array<f32, {{ WORKERS * ROWS }}>;
{% endif %}
{% endmacro %}
{% macro totals(ROWS, value, result, WORKERS) %}
{% for m in range(ROWS) %}
  pool[{{ WORKERS * m }}u + lid] = {{ value }}{{ m }};
{% endfor %}
{{ eights("pool", ROWS, WORKERS) }}
{% for m in range(ROWS) %}
  var {{ result }}{{ m }} = pool[{{ WORKERS * m }}u];
  for (var i = 8u; i < {{ WORKERS }}u; i += 8u) { {{ result }}{{ m }} += pool[{{ WORKERS * m }}u + i]; }
{% endfor %}
  workgroupBarrier();
{% endmacro %}
{% macro norm_before(ROWS, norm, WORKERS, STEPS) %}
{% if norm == "rms" %}
{% for m in range(ROWS) %}
  var square{{ m }} = 0.0;
{% endfor %}
{% elif norm == "layer" %}
  let ones = vec4<f32>(1.0);
{% for m in range(ROWS) %}
  var first{{ m }} = 0.0;
  var second{{ m }} = 0.0;
  var third{{ m }} = 0.0;
{% endfor %}
{% for j in range(STEPS or 1) %}
{{ walk(WORKERS, 4, STEPS, j) }}
{% for m in range(ROWS) %}
    first{{ m }} += dot(load4_a((a{{ m }} + k) / 4u), ones);
{% endfor %}
  }
{% endfor %}
{{ totals(ROWS, "first", "sum", WORKERS) }}
{% for m in range(ROWS) %}
  let rough{{ m }} = sum{{ m }} / f32(p.depth);
{% endfor %}
{% for j in range(STEPS or 1) %}
{{ walk(WORKERS, 4, STEPS, j) }}
{% for m in range(ROWS) %}
    let x{{ m }} = load4_a((a{{ m }} + k) / 4u) - rough{{ m }};
    second{{ m }} += dot(x{{ m }}, ones);
    third{{ m }} += dot(x{{ m }}, x{{ m }});
{% endfor %}
  }
{% endfor %}
{{ totals(ROWS, "second", "deviation", WORKERS) }}
{{ totals(ROWS, "third", "square", WORKERS) }}
{% for m in range(ROWS) %}
  let off{{ m }} = deviation{{ m }} / f32(p.depth);
  let rstd{{ m }} = 1.0 / sqrt(max_nan(square{{ m }} / f32(p.depth) - off{{ m }} * off{{ m }}, 0.0) + p.eps);
{% endfor %}
{% endif %}
{% endmacro %}
{% macro norm_factors(at, part, norm, norm_weight, norm_bias) %}
{% if norm and norm_weight %}
    let factor{{ part }} = load4_norm_weight((p.norm_weight_start + {{ at }}) / 4u);
{% endif %}
{% if norm and norm_bias %}
    let shift{{ part }} = load4_norm_bias((p.norm_bias_start + {{ at }}) / 4u);
{% endif %}
{% endmacro %}
{% macro norm_rows(x, m, part, norm, norm_weight, norm_bias) %}
{% if norm == "rms" %}
      square{{ m }} += dot({{ x }}, {{ x }});
{% elif norm == "layer" %}
      {{ x }} = (({{ x }} - rough{{ m }}) - off{{ m }}) * rstd{{ m }};
{% endif %}
{% if norm and norm_weight %}
      {{ x }} *= factor{{ part }};
{% endif %}
{% if norm and norm_bias %}
      {{ x }} += shift{{ part }};
{% endif %}
{% endmacro %}
{% macro norm_after(ROWS, norm, WORKERS) %}
{% if norm == "rms" %}
{{ totals(ROWS, "square", "squares", WORKERS) }}
{% for m in range(ROWS) %}
  s{{ m }} *= 1.0 / sqrt(squares{{ m }} / f32(p.depth) + p.eps);
{% endfor %}
{% endif %}
{% endmacro %}
{#   finish_gemv(ROWS, WORKERS, QUADS): adds up s0 … of all invocations through workgroup array `partial`; s<m + ROWS q> are
     of row m and the columns from n + 4 q on. Opens a block for invocations with a result, where (m, n + c) has `sum`. #}
{% macro finish_gemv(ROWS, WORKERS, QUADS=1) %}
{% for r in range(ROWS * QUADS) %}
  partial[{{ WORKERS * r }}u + lid] = s{{ r }};
{% endfor %}
{{ eights("partial", ROWS * QUADS, WORKERS) }}
  let r = lid / 4u;
  let m = r % {{ ROWS }}u;
  let c = r / {{ ROWS }}u * 4u + lid % 4u;
  if (r < {{ ROWS * QUADS }}u && m < p.rows && n + c < p.cols) {
    var sum = partial[r * {{ WORKERS }}u][lid % 4u];
    for (var i = 8u; i < {{ WORKERS }}u; i += 8u) { sum += partial[r * {{ WORKERS }}u + i][lid % 4u]; }
{% endmacro %}

// Matrix product by tiles: each of 64 invocations holds a block of T x T results in registers.
//
// reads   a, b  raw: element (batch, m, k) of a at a_start + its batch strides + m * a_outer + k * a_k, b alike with n;
//               load4 where a_vec / b_vec name the axis that is contiguous and aligned
//         with b_bits, b is quantized: b, scale and zero as codes.wgsl says, one matrix for all (batch = 1)
// writes  out   [batch, rows, cols], row-major; sums are f32 (i32 for integers) whatever the storage
// params  rows, cols, depth > 0, tiles_m, tiles_n, strides as above, batch_<d> and a_batch_<d>, b_batch_<d>
// groups  batch * tiles_m * tiles_n
//
// Tile 64 x 64 x 16 (T = 8) or 32 x 32 x 32 (T = 4). Operands pass through workgroup memory as vec4s along m or n.
{% import "tile.wgsl" as t %}
{% import "codes.wgsl" as q %}
{% set quads = 2 * T %}
{% set kt = 128 // T %}
{% set vector = "vec4<" ~ scalar ~ ">" %}

var<workgroup> tile: array<{{ vector }}, {{ 2 * kt * (quads + 1) }}>;

{{ entry(64) }}
  let tile_n = group % p.tiles_n;
  let tile_m = (group / p.tiles_n) % p.tiles_m;
  let batch = group / (p.tiles_n * p.tiles_m);
{{ t.batch_offsets(batch_dims) }}
  let first_m = tile_m * {{ 8 * T }}u;
  let first_n = tile_n * {{ 8 * T }}u;
  let tx = lid % 8u;
  let ty = lid / 8u;
{% for r in range(T) %}{% for c in range(T // 4) %}
  var s{{ r }}_{{ c }} = {{ vector }}();
{% endfor %}{% endfor %}
  for (var k0 = 0u; k0 < p.depth; k0 += {{ kt }}u) {
{{ t.stage("a", "a_base", "p.depth", "p.rows", "first_m", "k0", a_vec, a_fast, kt, quads, "0u", scalar) }}
{% if b_bits %}
{{ q.stage("first_n", "k0", kt, quads, (kt * (quads + 1)) ~ "u", b_bits, has_zero) }}
{% else %}
{{ t.stage("b", "b_base", "p.depth", "p.cols", "first_n", "k0", b_vec, b_fast, kt, quads, (kt * (quads + 1)) ~ "u", scalar) }}
{% endif %}
    workgroupBarrier();
    for (var k = 0u; k < {{ kt }}u; k++) {
      let row = k * {{ quads + 1 }}u;
{% for c in range(T // 4) %}
      let a{{ c }} = tile[row + ty + {{ 8 * c }}u];
      let b{{ c }} = tile[{{ kt * (quads + 1) }}u + row + tx + {{ 8 * c }}u];
{% endfor %}
{% for r in range(T) %}{% for c in range(T // 4) %}
      s{{ r }}_{{ c }} += a{{ r // 4 }}[{{ r % 4 }}] * b{{ c }};
{% endfor %}{% endfor %}
    }
    workgroupBarrier();
  }
  // Results leave through workgroup memory: neighbouring invocations store neighbouring elements, and the store, with
  // all that was fused into it, is compiled once a phase.
{% for phase in range(T // 4) %}
{% for j in range(4) %}{% for c in range(T // 4) %}
  tile[(ty * 4u + {{ j }}u) * {{ quads }}u + tx + {{ 8 * c }}u] = s{{ 4 * phase + j }}_{{ c }};
{% endfor %}{% endfor %}
  workgroupBarrier();
  for (var e = lid; e < {{ 32 * 8 * T }}u; e += 64u) {
    let m = first_m + {{ 32 * phase }}u + e / {{ 8 * T }}u;
    let n = first_n + e % {{ 8 * T }}u;
    if (m < p.rows && n < p.cols) { store((batch * p.rows + m) * p.cols + n, tile[e / 4u][e % 4u]); }
  }
{% if not loop.last %}
  workgroupBarrier();
{% endif %}
{% endfor %}
}

// Convolution as a matrix product by tiles, [O, depth] x [depth, N * positions], the second never built in memory.
//
// reads   weight  raw: row-major [O, depth] from a_start, load4 where a_vec is "k". depth is C * kernel_h * kernel_w in
//                 the weight's own order, or kernel_h * kernel_w * C with TAPS_FIRST (C divisible by 4)
//         x       raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
// writes  out     [N, O, positions], row-major; positions = out_h * out_w; sums are f32
// params  out_c, in_c: a group's channels; sets (groups); count = N * positions; depth; weight_outer = depth, weight_k = 1
//         chunk: the part of depth, a multiple of 128 / T, that one group sums; with several, out has them all in front
// groups  splits * sets * tiles_m * tiles_n: tiles of 8T channels x 8T positions
// constants  RUN: so much of depth, a multiple of 128 / T, is added in a row, then its sum to those before; 0: all of it
//
// The tiles are those of gemm.wgsl. Each invocation stages 4 positions (the same ones throughout) x 4 taps of x.
{% import "tile.wgsl" as t %}
{% set quads = 2 * T %}
{% set kt = 128 // T %}
{% set half = kt * (quads + 1) %}

var<workgroup> tile: array<vec4<f32>, {{ 2 * half }}>;

{{ entry(64) }}
  let tile_n = group % p.tiles_n;
  let tile_m = (group / p.tiles_n) % p.tiles_m;
  let part = group / (p.tiles_n * p.tiles_m) % p.sets;
  let split = group / (p.tiles_n * p.tiles_m * p.sets);
  let a_base = p.a_start + part * p.out_c * p.depth;
  let first_m = tile_m * {{ 8 * T }}u;
  let first_n = tile_n * {{ 8 * T }}u;
  let tx = lid % 8u;
  let ty = lid / 8u;
  let quad = lid % {{ quads }}u;
  let kq = lid / {{ quads }}u;
  let taps = p.kernel_h * p.kernel_w;
  let x_base = p.x_start + part * p.in_c * p.x_c;
{% for j in range(4) %}
  let q{{ j }} = min(first_n + quad * 4u + {{ j }}u, p.count - 1u);
  let base{{ j }} = x_base + (q{{ j }} / p.positions) * p.x_n;
{% if flat %}
  let x0_{{ j }} = (q{{ j }} % p.positions) * p.stride_w - p.pad_w;
{% else %}
  let y0_{{ j }} = (q{{ j }} % p.positions) / p.out_w * p.stride_h - p.pad_h;
  let x0_{{ j }} = (q{{ j }} % p.positions) % p.out_w * p.stride_w - p.pad_w;
{% endif %}
{% endfor %}
{% for r in range(T) %}{% for c in range(T // 4) %}
  var s{{ r }}_{{ c }} = vec4<f32>();
{% if RUN %}
  var sum{{ r }}_{{ c }} = vec4<f32>();
{% endif %}
{% endfor %}{% endfor %}
{# The coordinates of tap `tap` for position j, and whether they are inside; in front of the input they wrap to huge. #}
{% macro locate(tap, channel, limit) %}
{% if flat %}
    let dx = {{ tap }} * p.dil_w;
{% else %}
    let dy = {{ tap }} / p.kernel_w * p.dil_h;
    let dx = {{ tap }} % p.kernel_w * p.dil_w;
{% endif %}
{% for j in range(4) %}
    let x{{ j }} = x0_{{ j }} + dx;
{% if flat %}
    let in{{ j }} = {{ limit }} && x{{ j }} < p.in_w;
    let at{{ j }} = select(x_base, base{{ j }} + {{ channel }} * p.x_c + x{{ j }} * p.x_w, in{{ j }});
{% else %}
    let y{{ j }} = y0_{{ j }} + dy;
    let in{{ j }} = {{ limit }} && y{{ j }} < p.in_h && x{{ j }} < p.in_w;
    let at{{ j }} = select(x_base, base{{ j }} + {{ channel }} * p.x_c + y{{ j }} * p.x_h + x{{ j }} * p.x_w, in{{ j }});
{% endif %}
{% endfor %}
    let inside = vec4<bool>(in0, in1, in2, in3);
{% endmacro %}
  let k_end = min(p.depth, (split + 1u) * p.chunk);
{% if RUN %}
  for (var from_k = split * p.chunk; from_k < k_end; from_k += {{ RUN }}u) {
  for (var k0 = from_k; k0 < min(k_end, from_k + {{ RUN }}u); k0 += {{ kt }}u) {
{% else %}
  for (var k0 = split * p.chunk; k0 < k_end; k0 += {{ kt }}u) {
{% endif %}
{{ t.stage("weight", "a_base", "p.depth", "p.out_c", "first_m", "k0", a_vec, "k", kt, quads, "0u", "f32") }}
    let k = k0 + kq * 4u;
    let slot = {{ half }}u + kq * {{ 4 * (quads + 1) }}u + quad;
{% if TAPS_FIRST %}
    let tap = k / p.in_c;
    let channel = k % p.in_c;
{{ locate("tap", "channel", "k < p.depth") }}
{% for i in range(4) %}
    let v{{ i }} = vec4<f32>({% for j in range(4) %}load_x(at{{ j }} + {{ i }}u * p.x_c){{ ", " if j < 3 }}{% endfor %});
    tile[slot + {{ i * (quads + 1) }}u] = select(vec4<f32>(), v{{ i }}, inside);
{% endfor %}
{% else %}
{% for i in range(4) %}
    {
    let channel = (k + {{ i }}u) / taps;
    let tap = (k + {{ i }}u) % taps;
{{ locate("tap", "channel", "k + %du < p.depth" % i) }}
    let v = vec4<f32>(load_x(at0), load_x(at1), load_x(at2), load_x(at3));
    tile[slot + {{ i * (quads + 1) }}u] = select(vec4<f32>(), v, inside);
    }
{% endfor %}
{% endif %}
    workgroupBarrier();
    for (var kk = 0u; kk < {{ kt }}u; kk++) {
      let row = kk * {{ quads + 1 }}u;
{% for c in range(T // 4) %}
      let a{{ c }} = tile[row + ty + {{ 8 * c }}u];
      let b{{ c }} = tile[{{ half }}u + row + tx + {{ 8 * c }}u];
{% endfor %}
{% for r in range(T) %}{% for c in range(T // 4) %}
      s{{ r }}_{{ c }} = fma(vec4<f32>(a{{ r // 4 }}[{{ r % 4 }}]), b{{ c }}, s{{ r }}_{{ c }});
{% endfor %}{% endfor %}
    }
    workgroupBarrier();
  }
{% if RUN %}
{% for r in range(T) %}{% for c in range(T // 4) %}
  sum{{ r }}_{{ c }} += s{{ r }}_{{ c }};
  s{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}{% endfor %}
  }
{% for r in range(T) %}{% for c in range(T // 4) %}
  s{{ r }}_{{ c }} = sum{{ r }}_{{ c }};
{% endfor %}{% endfor %}
{% endif %}
  // Results leave through workgroup memory, as in gemm.wgsl.
{% for phase in range(T // 4) %}
{% for j in range(4) %}{% for c in range(T // 4) %}
  tile[(ty * 4u + {{ j }}u) * {{ quads }}u + tx + {{ 8 * c }}u] = s{{ 4 * phase + j }}_{{ c }};
{% endfor %}{% endfor %}
  workgroupBarrier();
  for (var e = lid; e < {{ 32 * 8 * T }}u; e += 64u) {
    let m = first_m + {{ 32 * phase }}u + e / {{ 8 * T }}u;
    let q = first_n + e % {{ 8 * T }}u;
    if (m < p.out_c && q < p.count) {
      let channel = ((split * p.batch + q / p.positions) * p.sets + part) * p.out_c + m;
      store(channel * p.positions + q % p.positions, tile[e / 4u][e % 4u]);
    }
  }
{% if not loop.last %}
  workgroupBarrier();
{% endif %}
{% endfor %}
}

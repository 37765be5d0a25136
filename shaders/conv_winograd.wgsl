// Convolution by kernels of 3 x 3, stride 1, as Winograd's F(2 x 2, 3 x 3): 16 products where 36 are due. A tile is 2 x 2
// results of one channel; its 4 x 4 inputs d and the kernel g become 16 points each, whose products are summed over the
// channels by 16 matrix products side by side, and turned back: Y = A' [(G g G') * (B' d B)] A.
//
// reads   x        raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
//         u        load4 of what winograd_weights.wgsl makes, [C, 16, wide]
// writes  out      [splits, N, O, out_h, out_w], row-major; sums are f32
// params  in_c = C, out_c = O, images = N; wide: O rounded up to 4; tiles_w: of a row of tiles; tiles_hw: of a picture
//         tiles_m, tiles_n: blocks of 4 TY RM channels and of 4 TX RN tiles; chunk: the channels that one group sums, a
//         multiple of KT; with several, out has them all in front
// groups  splits * tiles_m * tiles_n
//
// TX x TY invocations a point, each with 4 RM channels x 4 RN tiles. A step is KT channels deep; its inputs are turned
// into points on their way to workgroup memory.
// TX divides KT RM, and TY TX RN <= KT (TY RM + TX RN): all fetch as many kernels, and a row of results fits where they
// were.
// A result depends on the 9 inputs that it sees and no other, bit for bit: an outer input of a patch goes to outer points
// alone. But points subtract, and an infinity less itself is NaN: what comes out infinite or NaN is summed again directly,
// from kernels that u gives back.
{% set threads = 16 * TX * TY %}
{% set qm = TY * RM %}
{% set qn = TX * RN %}
{% set pitch = 16 * (qm + qn) %}
{% set kernels = KT * 16 * qm %}
{% set patches = KT * 4 * qn %}
{% set fetches = kernels // threads %}
{% set turns = (patches + threads - 1) // threads %}
{# Rows of a quad of channels that leave through workgroup memory together. #}
{% set band = 4 if 64 * TY * qn <= KT * pitch else 2 if 32 * TY * qn <= KT * pitch else 1 %}
{# Quad i * lanes + t of a point: where there are 4 lanes, pairs of points are mixed, so that neighbouring invocations
   meet all banks, whether they follow the points or the quads. #}
{% macro slot(point, i, t, lanes, regs) %}
{{ "%s / 2u * %du + %s * 8u + ((%s + %s) & 1u) * 4u + %s" % (point, 8 * regs, i, point, i, t) if lanes == 4 else "%s * %du + %s * %du + %s" % (point, lanes * regs, i, lanes, t) }}
{%- endmacro %}

var<workgroup> tile: array<array<vec4<f32>, {{ pitch }}>, {{ KT }}>;

fn u_at(c: u32, point: u32, o: u32) -> f32 {
  let i = (c * 16u + point) * p.wide + o;
  return load4_u(i / 4u)[i % 4u];
}
// Tap (ky, kx) of the kernel: of points 0 to 3 along an axis, 0 and 3 are taps 0 and 2, and tap 1 is 1 less 2.
fn tap(c: u32, o: u32, ky: u32, kx: u32) -> f32 {
  let first = (ky + ky / 2u) * 4u + kx + kx / 2u;
  var w = u_at(c, first, o);
  if (kx == 1u) { w -= u_at(c, first + 1u, o); }
  if (ky == 1u) {
    var below = u_at(c, first + 4u, o);
    if (kx == 1u) { below -= u_at(c, first + 5u, o); }
    w -= below;
  }
  return w;
}
fn direct(n: u32, o: u32, oy: u32, ox: u32, begin: u32, end: u32) -> f32 {
  var sum = 0.0;
  for (var c = begin; c < end; c++) {
    for (var k = 0u; k < 9u; k++) {
      let y = oy + k / 3u - p.pad_h;
      let x = ox + k % 3u - p.pad_w;
      if (y < p.in_h && x < p.in_w) {
        sum += load_x(p.x_start + n * p.x_n + c * p.x_c + y * p.x_h + x * p.x_w) * tap(c, o, k / 3u, k % 3u);
      }
    }
  }
  return sum;
}

{{ entry(threads) }}
  let tile_m = group % p.tiles_m;
  let tile_n = group / p.tiles_m % p.tiles_n;
  let split = group / (p.tiles_m * p.tiles_n);
  let first_m = tile_m * {{ 4 * qm }}u;
  let first_n = tile_n * {{ 4 * qn }}u;
  let quads = p.wide / 4u;
  let point = lid / {{ TX * TY }}u;
  let tx = lid % {{ TX }}u;
  let ty = lid / {{ TX }}u % {{ TY }}u;
{% for i in range(RM) %}
  let slot_a{{ i }} = {{ slot("point", "%du" % i, "ty", TY, RM) }};
{% endfor %}
{% for i in range(RN) %}
  let slot_b{{ i }} = {{ 16 * qm }}u + {{ slot("point", "%du" % i, "tx", TX, RN) }};
{% endfor %}
{% for s in range(fetches) %}
  let kernel{{ s }} = lid + {{ s * threads }}u;
  let kernel_at{{ s }} = kernel{{ s }} / {{ qm }}u * quads + first_m / 4u + kernel{{ s }} % {{ qm }}u;
{% endfor %}
{% for s in range(turns) %}
  let patch{{ s }} = lid + {{ s * threads }}u;
  let at{{ s }} = min(first_n + patch{{ s }} % {{ 4 * qn }}u, p.images * p.tiles_hw - 1u);
  let base{{ s }} = p.x_start + at{{ s }} / p.tiles_hw * p.x_n;
{% for i in range(4) %}
  // In front of the picture these wrap to huge numbers, which are not inside either.
  let row{{ s }}_{{ i }} = at{{ s }} % p.tiles_hw / p.tiles_w * 2u + {{ i }}u - p.pad_h;
  let column{{ s }}_{{ i }} = at{{ s }} % p.tiles_w * 2u + {{ i }}u - p.pad_w;
  let top{{ s }}_{{ i }} = row{{ s }}_{{ i }} < p.in_h;
  let y{{ s }}_{{ i }} = min(row{{ s }}_{{ i }}, p.in_h - 1u) * p.x_h;
  let x{{ s }}_{{ i }} = min(column{{ s }}_{{ i }}, p.in_w - 1u) * p.x_w;
{% endfor %}
  let in{{ s }} = vec4<bool>({% for j in range(4) %}column{{ s }}_{{ j }} < p.in_w{{ ", " if j < 3 }}{% endfor %});
{% endfor %}
  let begin = split * p.chunk;
  let end = min(p.in_c, begin + p.chunk);
{% for r in range(4 * RM) %}{% for c in range(RN) %}
  var s{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}{% endfor %}
  for (var k0 = begin; k0 < end; k0 += {{ KT }}u) {
    // All loads are under way before the first is waited for.
{% for s in range(fetches) %}
    let f{{ s }} = load4_u(min(k0 * 16u * quads + kernel_at{{ s }}, p.in_c * 16u * quads - 1u));
{% endfor %}
{% for s in range(turns) %}
    let k{{ s }} = k0 + patch{{ s }} / {{ 4 * qn }}u;
    let plane{{ s }} = base{{ s }} + min(k{{ s }}, p.in_c - 1u) * p.x_c;
{% for i in range(4) %}
    let all{{ s }}_{{ i }} = vec4<f32>({% for j in range(4) %}load_x(plane{{ s }} + y{{ s }}_{{ i }} + x{{ s }}_{{ j }}){{ ", " if j < 3 }}{% endfor %});
    let d{{ s }}_{{ i }} = select(vec4<f32>(), all{{ s }}_{{ i }}, in{{ s }} & vec4<bool>(k{{ s }} < end && top{{ s }}_{{ i }}));
{% endfor %}
{% endfor %}
{% for s in range(fetches) %}
    {
      let q = kernel{{ s }} % {{ qm }}u;
      let to = kernel{{ s }} / {{ qm }}u % 16u;
      tile[kernel{{ s }} / {{ 16 * qm }}u][{{ slot("to", "(q / %du)" % TY, "q %% %du" % TY, TY, RM) }}] = f{{ s }};
    }
{% endfor %}
{% for s in range(turns) %}
    {{ "if (patch%d < %du) " % (s, patches) if (s + 1) * threads > patches }}{
      let k = patch{{ s }} / {{ 4 * qn }}u;
      let t = patch{{ s }} % {{ 4 * qn }}u;
      let q = t / 4u;
      let r0 = d{{ s }}_0 - d{{ s }}_2;
      let r1 = d{{ s }}_1 + d{{ s }}_2;
      let r2 = d{{ s }}_2 - d{{ s }}_1;
      let r3 = d{{ s }}_1 - d{{ s }}_3;
{% for i in range(4) %}{% for j in range(4) %}
      tile[k][{{ slot("%du" % (4 * i + j), "(q / %du)" % TX, "q %% %du" % TX, TX, RN) }} + {{ 16 * qm }}u][t % 4u] = {{ ["r%d.x - r%d.z", "r%d.y + r%d.z", "r%d.z - r%d.y", "r%d.y - r%d.w"][j] % (i, i) }};
{% endfor %}{% endfor %}
    }
{% endfor %}
    workgroupBarrier();
{% for k in range(KT) %}
    {
{% for i in range(RM) %}
      let a{{ i }} = tile[{{ k }}][slot_a{{ i }}];
{% endfor %}
{% for c in range(RN) %}
      let b{{ c }} = tile[{{ k }}][slot_b{{ c }}];
{% endfor %}
{% for r in range(4 * RM) %}{% for c in range(RN) %}
      s{{ r }}_{{ c }} = fma(vec4<f32>(a{{ r // 4 }}[{{ r % 4 }}]), b{{ c }}, s{{ r }}_{{ c }});
{% endfor %}{% endfor %}
    }
{% endfor %}
    workgroupBarrier();
  }
{% macro cell(at) %}tile[({{ at }}) / {{ pitch }}u][({{ at }}) % {{ pitch }}u]{% endmacro %}
  // The 16 points of a tile meet in workgroup memory; an invocation makes one column of 2 results, so that neighbouring
  // ones store neighbouring results.
{% for i in range(RM) %}{% for j0 in range(0, 4, band) %}
{% for j in range(band) %}{% for c in range(RN) %}
  { let at = (point * {{ band * TY }}u + ty * {{ band }}u + {{ j }}u) * {{ qn }}u + tx + {{ TX * c }}u; {{ cell("at") }} = s{{ 4 * i + j0 + j }}_{{ c }}; }
{% endfor %}{% endfor %}
  workgroupBarrier();
  for (var e = lid; e < {{ band * TY * 8 * qn }}u; e += {{ threads }}u) {
    let right = e % 2u == 1u;
    let t = e / 2u % {{ 4 * qn }}u;
    let row = e / {{ 8 * qn }}u;
    let o = first_m + {{ 4 * TY * i + j0 }}u + row / {{ band }}u * 4u + row % {{ band }}u;
    let here = first_n + t;
    let n = here / p.tiles_hw;
    let oy = here % p.tiles_hw / p.tiles_w * 2u;
    let ox = here % p.tiles_w * 2u + e % 2u;
    if (o < p.out_c && n < p.images && ox < p.out_w) {
{% for y in range(4) %}
      let outer{{ y }} = select({{ 4 * y }}u, {{ 4 * y + 3 }}u, right) * {{ band * TY * qn }}u + row * {{ qn }}u + t / 4u;
      let left{{ y }} = {{ (4 * y + 1) * band * TY * qn }}u + row * {{ qn }}u + t / 4u;
      let next{{ y }} = {{ (4 * y + 2) * band * TY * qn }}u + row * {{ qn }}u + t / 4u;
      let p{{ y }} = {{ cell("outer%d" % y) }}[t % 4u];
      let q{{ y }} = {{ cell("left%d" % y) }}[t % 4u];
      let r{{ y }} = {{ cell("next%d" % y) }}[t % 4u];
      let m{{ y }} = select(q{{ y }} + r{{ y }} + p{{ y }}, q{{ y }} - r{{ y }} - p{{ y }}, right);
{% endfor %}
      var v = m0 + m1 + m2;
      for (var y = oy; y < min(oy + 2u, p.out_h); y++) {
        if (is_nan(v) || is_inf(v)) { v = direct(n, o, y, ox, begin, end); }
        store((((split * p.images + n) * p.out_c + o) * p.out_h + y) * p.out_w + ox, v);
        v = m1 - m2 - m3;
      }
    }
  }
{% if not (i == RM - 1 and j0 + band == 4) %}
  workgroupBarrier();
{% endif %}
{% endfor %}{% endfor %}
}

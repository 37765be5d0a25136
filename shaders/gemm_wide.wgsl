// Matrix product, or convolution as one, for GPUs by large tiles: an invocation holds 4 RM x 4 RN results in registers.
//
// reads   a     raw: element (batch, m, k) at a_start + its batch strides + m * a_outer + k * a_k; load4 where a_vec names
//               the axis that is contiguous and aligned. With CONV, a group's weights as in conv_tile.wgsl
//         b     the same with n for m (not CONV); with b_bits, b is quantized: b, scale and zero as codes.wgsl says, one
//               matrix for all batches
//         x     raw: [N, C, H, W] through strides, as in conv_tile.wgsl (CONV): b is its patches, never built in memory
//         norm_weight  by vec4, depth elements from norm_weight_start on (with norm and norm_weight)
// writes  out   [splits, batches, rows, cols], row-major, or [splits, N, O, positions]; sums are f32 whatever the storage
// params  rows, cols, depth > 0, tiles_m, tiles_n, batches, strides as above, batch_<d> and a_batch_<d>, b_batch_<d>
//         chunk: the part of depth, a multiple of KT * SLICES, that one group sums; with several, out has them all in front
//         CONV: batches = groups, rows = a group's output channels, cols = N * positions, images = N; see conv_tile.wgsl
// groups  splits * batches * tiles_m * tiles_n
//
// A tile is 4 TY RM x 4 TX RN. A step is KT deep: invocations fetch blocks of 4 x 4 into registers while the step before
// is multiplied from workgroup memory. With BUFFERS = 2 a step has one barrier; with 1 it has two and half the memory, so
// more groups run side by side. The loop over k is unrolled, with k a constant index: the bounds check of the other index
// is then the same for all, and made once.
// SLICES: TX * TY invocations each sum a tile of their own, taking turns at the steps; their sums are added, in order, on
// the way out: what is short of groups needs no second dispatch to add up parts.
// norm: a is the input of an RMSNorm with p.eps, which is done here: a_vec "k", not CONV, one batch. Whoever fetches a block
// adds up its squares; the sums scale each row's results, which is the same as scaling its elements first. With norm_apart,
// for several splits, they are only written, to squares [splits, rows], and results are left unscaled. Where the squares
// of a row overflow, results are 0, as the norm's own kernel gives, or NaN if the product overflows too.
// GATED, not CONV: of columns n and p.half + n = cols / 2 + n, silu(first) * second is written, p.half columns: a tile holds
// half its columns of each. Where b_vec is "outer", half is divisible by 4.
// vectors: four neighbours of a row of out (a column block of cols, half or positions, which 4 divides) are stored at once.
// TAPS_FIRST: depth is kernel_h * kernel_w * C with C divisible by 4. FLAT: one row, and kernels of one row.
{% import "tile.wgsl" as t %}
{% import "codes.wgsl" as q %}
{% set threads = TX * TY %}
{% set qm = TY * RM %}
{% set qn = TX * RN %}
{% set blocks_a = qm * KT // 4 %}
{% set blocks = (qm + qn) * KT // 4 %}
{% set turns = (blocks + threads - 1) // threads %}
{% set wide_n = 2 * qn if GATED else 4 * qn %}
{% set capacity = BUFFERS * KT * (qm + qn) %}
{% set stride = KT * SLICES %}
{% set own_k = " + slice * %du" % KT if SLICES > 1 else "" %}
{# Rows of a quad that leave through workgroup memory together. #}
{% set band = 4 if 4 * TY * qn <= capacity else 2 if 2 * TY * qn <= capacity else 1 %}
{# Vectors of a band, and how many of them an invocation has under way at a time. #}
{% set stores = TY * band * wide_n // 4 %}
{% set rounds = stores // (threads * SLICES) %}
{% set unrolled = 4 if rounds and rounds % 4 == 0 else 2 if rounds and rounds % 2 == 0 else 1 %}

var<workgroup> tile: array<array<array<array<vec4<f32>, {{ qm + qn }}>, {{ KT }}>, {{ BUFFERS }}>, {{ SLICES }}>;

{% macro fetch_one(s, name, vec) %}
{% set outer = "p.rows" if name == "a" else "p.cols" %}
{% if vec == "codes" %}
      // What lies between depth and the end of a word of codes is finite, and meets zeros of a.
      let from_k = min(k, (p.depth - 1u) / 4u * 4u);
      let g = from_k / p.group;
{% for j in range(4) %}
      let n{{ j }} = min(o{{ s }} + {{ j }}u, p.cols - 1u);
      let g{{ j }} = n{{ j }} * p.scales + g;
      r{{ s }}_{{ j }} = ({{ q.four("n%d * p.words" % j, "from_k", b_bits) }} - {{ q.zero("g%d" % j, b_bits, has_zero) }}) * load_scale(g{{ j }});
{% endfor %}
{% elif vec == "k" %}
{% if name == "a" and norm_weight %}
      factor{{ s }} = load4_norm_weight((p.norm_weight_start + min(k, p.depth - 4u)) / 4u);
{% endif %}
      let row = {{ name }}_base + min(k, p.depth - 4u);
{% for j in range(4) %}
      r{{ s }}_{{ j }} = load4_{{ name }}((row + min(o{{ s }} + {{ j }}u, {{ outer }} - 1u) * p.{{ name }}_outer) / 4u);
{% endfor %}
{% elif vec == "outer" %}
      let column = {{ name }}_base + min(o{{ s }}, {{ outer }} - 4u);
{% for i in range(4) %}
      r{{ s }}_{{ i }} = load4_{{ name }}((column + min(k + {{ i }}u, p.depth - 1u) * p.{{ name }}_k) / 4u);
{% endfor %}
{% else %}
{% for j in range(4) %}
      let at{{ j }} = {{ name }}_base + min(o{{ s }} + {{ j }}u, {{ outer }} - 1u) * p.{{ name }}_outer;
{% endfor %}
{% for i in range(4) %}
      let down{{ i }} = min(k + {{ i }}u, p.depth - 1u) * p.{{ name }}_k;
      r{{ s }}_{{ i }} = vec4<f32>(load_{{ name }}(at0 + down{{ i }}), load_{{ name }}(at1 + down{{ i }}), load_{{ name }}(at2 + down{{ i }}), load_{{ name }}(at3 + down{{ i }}));
{% endfor %}
{% endif %}
{% endmacro %}
{# The coordinates of tap `tap` for position j, and whether they are inside; in front of the input they wrap to huge. #}
{% macro locate(s, tap, channel, limit) %}
{% if FLAT %}
      let dx = {{ tap }} * p.dil_w;
{% else %}
      let dy = {{ tap }} / p.kernel_w * p.dil_h;
      let dx = {{ tap }} % p.kernel_w * p.dil_w;
{% endif %}
{% for j in range(4) %}
      let x{{ j }} = x{{ s }}_{{ j }} + dx;
{% if FLAT %}
      let in{{ j }} = {{ limit }} && x{{ j }} < p.in_w;
      let at{{ j }} = select(p.x_start, base{{ s }}_{{ j }} + {{ channel }} * p.x_c + x{{ j }} * p.x_w, in{{ j }});
{% else %}
      let y{{ j }} = y{{ s }}_{{ j }} + dy;
      let in{{ j }} = {{ limit }} && y{{ j }} < p.in_h && x{{ j }} < p.in_w;
      let at{{ j }} = select(p.x_start, base{{ s }}_{{ j }} + {{ channel }} * p.x_c + y{{ j }} * p.x_h + x{{ j }} * p.x_w, in{{ j }});
{% endif %}
{% endfor %}
      let inside = vec4<bool>(in0, in1, in2, in3);
{% endmacro %}
{% macro fetch_patch(s) %}
{% if TAPS_FIRST %}
      let tap = k / p.in_c;
      let channel = k % p.in_c;
{{ locate(s, "tap", "channel", "k < end") }}
      // Four channels on lie inside when the first does: k, in_c and end are multiples of 4.
{% for i in range(4) %}
      r{{ s }}_{{ i }} = select(vec4<f32>(), vec4<f32>({% for j in range(4) %}load_x(at{{ j }} + select(0u, {{ i }}u * p.x_c, in{{ j }})){{ ", " if j < 3 }}{% endfor %}), inside);
{% endfor %}
{% else %}
{% for i in range(4) %}
      {
      let channel = (k + {{ i }}u) / (p.kernel_h * p.kernel_w);
      let tap = (k + {{ i }}u) % (p.kernel_h * p.kernel_w);
{{ locate(s, "tap", "channel", "k + %du < end" % i) }}
      r{{ s }}_{{ i }} = select(vec4<f32>(), vec4<f32>(load_x(at0), load_x(at1), load_x(at2), load_x(at3)), inside);
      }
{% endfor %}
{% endif %}
{% endmacro %}
{% macro place_one(s, vec, buffer, normed=false) %}
{% if normed %}
      squares{{ s }} += select(vec4<f32>(), vec4<f32>({% for j in range(4) %}dot(r{{ s }}_{{ j }}, r{{ s }}_{{ j }}){{ ", " if j < 3 }}{% endfor %}), k < end);
{% if norm_weight %}
{% for j in range(4) %}
      r{{ s }}_{{ j }} *= factor{{ s }};
{% endfor %}
{% endif %}
{% endif %}
{% for i in range(4) %}
      tile[slice][{{ buffer }}][kq{{ s }} * 4u + {{ i }}u][slot{{ s }}] = select(vec4<f32>(), {{ "vec4<f32>(r%d_0[%d], r%d_1[%d], r%d_2[%d], r%d_3[%d])" % (s, i, s, i, s, i, s, i) if vec in ("k", "codes") else "r%d_%d" % (s, i) }}, k{{ "" if vec in ("k", "codes") else " + %du" % i }} < end);
{% endfor %}
{% endmacro %}
{# For turn s, `body(name)` of the operand that the invocation's block belongs to. #}
{% macro each(s, first, second) %}
{% if (s + 1) * threads <= blocks_a %}
    {
{{ first }}
    }
{% elif s * threads >= blocks_a and (s + 1) * threads <= blocks %}
    {
{{ second }}
    }
{% else %}
    {{ "if (is_a%d) {" % s if s * threads < blocks_a else "{" }}
{% if s * threads < blocks_a %}
{{ first }}
    } else {{ "if (own + %du < %du) " % (s * threads, blocks) if (s + 1) * threads > blocks else "" }}{
{{ second }}
    }
{% else %}
    if (own + {{ s * threads }}u < {{ blocks }}u) {
{{ second }}
    }
    }
{% endif %}
{% endif %}
{% endmacro %}
{% macro fetch(step) %}
{% for s in range(turns) %}
  {
    let k = {{ step }} + kq{{ s }} * 4u;
{{ each(s, fetch_one(s, "a", a_vec), fetch_patch(s) if CONV else fetch_one(s, "b", b_vec)) }}
  }
{% endfor %}
{% endmacro %}
{% macro place(step, buffer) %}
{% for s in range(turns) %}
  {
    let k = {{ step }} + kq{{ s }} * 4u;
{{ each(s, place_one(s, a_vec, buffer, norm), place_one(s, b_vec, buffer)) }}
  }
{% endfor %}
{% endmacro %}

{# One step from workgroup memory. #}
{% macro multiply(now) %}
{% for k in range(KT) %}
    {
{% for i in range(RM) %}
      let a{{ i }} = tile[slice][{{ now }}][{{ k }}][ty + {{ TY * i }}u];
{% endfor %}
{% for c in range(RN) %}
      let b{{ c }} = tile[slice][{{ now }}][{{ k }}][tx + {{ qm + TX * c }}u];
{% endfor %}
{% for r in range(4 * RM) %}{% for c in range(RN) %}
      s{{ r }}_{{ c }} += a{{ r // 4 }}[{{ r % 4 }}] * b{{ c }};
{% endfor %}{% endfor %}
    }
{% endfor %}
{% endmacro %}
{# Element `at` of a slice's workgroup memory as one row. #}
{% macro flat(slice, at) %}
tile[{{ slice }}][{{ at }} / {{ KT * (qm + qn) }}u][{{ at }} / {{ qm + qn }}u % {{ KT }}u][{{ at }} % {{ qm + qn }}u]
{%- endmacro %}
{# The sum of it, or of one of its elements, over all slices. #}
{% macro summed(at, element="") %}
{% for slice in range(SLICES) %}{{ " + " if slice else "" }}{{ flat(slice ~ "u", at) }}{{ element }}{% endfor %}
{%- endmacro %}
{# Where in `out` row m and column n are. #}
{% macro destination(u) %}
{% if CONV %}
      let channel{{ u }} = ((split * p.images + n{{ u }} / p.positions) * p.batches + batch) * p.rows + m{{ u }};
      let to{{ u }} = channel{{ u }} * p.positions + n{{ u }} % p.positions;
{% else %}
      let to{{ u }} = ((split * p.batches + batch) * p.rows + m{{ u }}) * p.{{ "half" if GATED else "cols" }} + n{{ u }};
{% endif %}
{% endmacro %}

{{ entry(threads * SLICES) }}
{% if SLICES > 1 %}
  let slice = lid / {{ threads }}u;
  let own = lid % {{ threads }}u;
{% else %}
  const slice = 0u;
  let own = lid;
{% endif %}
  let tile_n = group % p.tiles_n;
  let tile_m = (group / p.tiles_n) % p.tiles_m;
  let batch = (group / (p.tiles_n * p.tiles_m)) % p.batches;
  let split = group / (p.tiles_n * p.tiles_m * p.batches);
{% if CONV %}
  let a_base = p.a_start + batch * p.rows * p.depth;
{% else %}
{{ t.batch_offsets(batch_dims) }}
{% endif %}
  let first_m = tile_m * {{ 4 * qm }}u;
  let first_n = tile_n * {{ wide_n }}u;
  // 32 neighbouring invocations read few distinct vec4s of a tile: 8 of b and 4 of a.
  let warp = own / 32u;
  let tx = own % 8u + 8u * (warp % {{ TX // 8 }}u);
  let ty = (own / 8u) % 4u + 4u * (warp / {{ TX // 8 }}u);
{% for s in range(turns) %}
  let is_a{{ s }} = own + {{ s * threads }}u < {{ blocks_a }}u;
  let n{{ s }} = own + {{ s * threads }}u - select({{ blocks_a }}u, 0u, is_a{{ s }});
  let fast{{ s }} = select({{ "true" if b_fast == "k" else "false" }}, {{ "true" if a_fast == "k" else "false" }}, is_a{{ s }});
  let across{{ s }} = select({{ qn }}u, {{ qm }}u, is_a{{ s }});
  let kq{{ s }} = select(n{{ s }} / across{{ s }}, n{{ s }} % {{ KT // 4 }}u, fast{{ s }});
  let oq{{ s }} = select(n{{ s }} % across{{ s }}, n{{ s }} / {{ KT // 4 }}u, fast{{ s }});
  let o{{ s }} = select(first_n, first_m, is_a{{ s }}) + oq{{ s }} * 4u{% if GATED %} + select(0u, p.half - {{ wide_n }}u, !is_a{{ s }} && oq{{ s }} >= {{ qn // 2 }}u){% endif %};
  let slot{{ s }} = oq{{ s }} + select({{ qm }}u, 0u, is_a{{ s }});
{% if norm and s * threads < blocks_a %}
  var squares{{ s }} = vec4<f32>();
{% if norm_weight %}
  var factor{{ s }}: vec4<f32>;
{% endif %}
{% endif %}
{% for j in range(4) %}
  var r{{ s }}_{{ j }}: vec4<f32>;
{% if CONV and (s + 1) * threads > blocks_a %}
  let q{{ s }}_{{ j }} = min(o{{ s }} + {{ j }}u, p.cols - 1u);
  let base{{ s }}_{{ j }} = p.x_start + batch * p.in_c * p.x_c + (q{{ s }}_{{ j }} / p.positions) * p.x_n;
{% if FLAT %}
  let x{{ s }}_{{ j }} = (q{{ s }}_{{ j }} % p.positions) * p.stride_w - p.pad_w;
{% else %}
  let y{{ s }}_{{ j }} = (q{{ s }}_{{ j }} % p.positions) / p.out_w * p.stride_h - p.pad_h;
  let x{{ s }}_{{ j }} = (q{{ s }}_{{ j }} % p.positions) % p.out_w * p.stride_w - p.pad_w;
{% endif %}
{% endif %}
{% endfor %}
{% endfor %}
  let begin = split * p.chunk;
  let end = min(p.depth, begin + p.chunk);
{% for r in range(4 * RM) %}{% for c in range(RN) %}
  var s{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}{% endfor %}
{{ fetch("begin" ~ own_k) }}
{% if BUFFERS == 2 %}
{{ place("begin" ~ own_k, "0u") }}
  workgroupBarrier();
  var now = 0u;
{% endif %}
  for (var k0 = begin; k0 < end; k0 += {{ stride }}u) {
    let next = k0 + {{ stride }}u;
{% if BUFFERS == 1 %}
{{ place("k0" ~ own_k, "0u") }}
    workgroupBarrier();
{% endif %}
    if (next < end) {
{{ fetch("next" ~ own_k) }}
    }
{{ multiply("now" if BUFFERS == 2 else "0u") }}
{% if BUFFERS == 2 %}
    now = 1u - now;
    if (next < end) {
{{ place("next" ~ own_k, "now") }}
    }
{% endif %}
    workgroupBarrier();
  }
{% if norm %}
  // A row's squares are in the hands of those who fetched its parts: of KT / 4 invocations in each slice.
{% for s in range(turns) if s * threads < blocks_a %}
  {{ "if (is_a%d) { " % s if (s + 1) * threads > blocks_a else "{ " }}tile[slice][0][kq{{ s }}][oq{{ s }}] = squares{{ s }}; }
{% endfor %}
  workgroupBarrier();
{% for i in range(RM) %}
  var sum{{ i }} = vec4<f32>();
{% for slice in range(SLICES) %}{% for kq in range(KT // 4) %}
  sum{{ i }} += tile[{{ slice }}][0][{{ kq }}][ty + {{ TY * i }}u];
{% endfor %}{% endfor %}
{% if norm_apart %}
{% for r in range(4) %}
  { let m = first_m + (ty + {{ TY * i }}u) * 4u + {{ r }}u; if (tile_n == 0u && slice == 0u && tx == 0u && m < p.rows) { store_squares(split * p.rows + m, sum{{ i }}[{{ r }}]); } }
{% endfor %}
{% else %}
  let scale{{ i }} = 1.0 / sqrt(sum{{ i }} / f32(p.depth) + p.eps);
{% for r in range(4) %}{% for c in range(RN) %}
  s{{ 4 * i + r }}_{{ c }} *= scale{{ i }}[{{ r }}];
{% endfor %}{% endfor %}
{% endif %}
{% endfor %}
  workgroupBarrier();
{% endif %}
  // Results leave through workgroup memory: neighbouring invocations store neighbouring elements.
{% for i in range(RM) %}{% for j0 in range(0, 4, band) %}
{% for j in range(band) %}{% for c in range(RN) %}
{% set at = "(ty * %du + %du) * %du + tx + %du" % (band, j, qn, TX * c) %}
  { let at = {{ at }}; {{ flat("slice", "at") }} = s{{ 4 * i + j0 + j }}_{{ c }}; }
{% endfor %}{% endfor %}
  workgroupBarrier();
{% if vectors %}
  for (var first = lid; first < {{ stores }}u; first += {{ threads * SLICES * unrolled }}u) {
{% for u in range(unrolled) %}
    let e{{ u }} = first + {{ u * threads * SLICES }}u;
    let row{{ u }} = e{{ u }} / {{ wide_n // 4 }}u;
    let m{{ u }} = first_m + {{ 4 * TY * i + j0 }}u + row{{ u }} / {{ band }}u * 4u + row{{ u }} % {{ band }}u;
    let n{{ u }} = first_n + e{{ u }} % {{ wide_n // 4 }}u * 4u;
{{ destination(u) }}
{% if GATED %}
    let at{{ u }} = row{{ u }} * {{ qn }}u + e{{ u }} % {{ wide_n // 4 }}u;
    let up{{ u }} = at{{ u }} + {{ qn // 2 }}u;
    let gate{{ u }} = {{ summed("at%d" % u) }};
    let open{{ u }} = vec4<f32>({% for c in "xyzw" %}silu(gate{{ u }}.{{ c }}){{ ", " if not loop.last }}{% endfor %});
    let v{{ u }} = finish4(to{{ u }} / 4u, open{{ u }} * ({{ summed("up%d" % u) }}));
{% else %}
    let v{{ u }} = finish4(to{{ u }} / 4u, {{ summed("e%d" % u) }});
{% endif %}
{% endfor %}
{% for u in range(unrolled) %}
    if (m{{ u }} < p.rows && n{{ u }} < p.{{ "half" if GATED else "cols" }}) { put4(to{{ u }} / 4u, v{{ u }}); }
{% endfor %}
  }
{% else %}
  for (var e = lid; e < {{ TY * band * wide_n }}u; e += {{ threads * SLICES }}u) {
    let row = e / {{ wide_n }}u;
    let m = first_m + {{ 4 * TY * i + j0 }}u + row / {{ band }}u * 4u + row % {{ band }}u;
    let n = first_n + e % {{ wide_n }}u;
    let at = {{ "row * %du + e %% %du / 4u" % (qn, wide_n) if GATED else "e / 4u" }};
    if (m < p.rows && n < p.{{ "half" if GATED else "cols" }}) {
{{ destination("") }}
{% if GATED %}
      let up = at + {{ qn // 2 }}u;
      store(to, silu({{ summed("at", "[e % 4u]") }}) * ({{ summed("up", "[e % 4u]") }}));
{% else %}
      store(to, {{ summed("at", "[e % 4u]") }});
{% endif %}
    }
  }
{% endif %}
{% if not (i == RM - 1 and j0 + band == 4) %}
  workgroupBarrier();
{% endif %}
{% endfor %}{% endfor %}
}

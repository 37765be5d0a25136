{# Not a kernel: reads weights of packed codes (layout: backend/quantization.py) for gemv_codes.wgsl, gemm.wgsl and
   embedding_codes.wgsl. The only place that knows the bits.

   reads   b      raw: packed words, p.words a row
           scale  raw: [rows, p.scales], one for p.group codes
           zero   raw, with `has_zero`: zero points like the scales
   `bits` and `has_zero` are the kernel's constants, passed on because imported macros do not see them. #}

{# The codes of k … k + 3 (k a multiple of 4) of the row that starts at word `row`, less a fixed offset, as vec4<f32>. #}
{% macro four(row, k, bits) -%}
{% if bits == 4 -%}
vec4<f32>(unpack4xU8((bitcast<u32>(load_b({{ row }} + ({{ k }}) / 8u)) >> (({{ k }}) & 4u)) & 0x0f0f0f0fu))
{%- else -%}
vec4<f32>(unpack4xI8(bitcast<u32>(load_b({{ row }} + ({{ k }}) / 4u))))
{%- endif %}
{%- endmacro %}

{# What to take from the codes above, as f32; `at` is the index of the group's scale. #}
{% macro zero(at, bits, has_zero) -%}
{% set offset = 8 if bits == 4 else 0 -%}
{{ "f32(load_zero(%s) + %d)" % (at, offset) if has_zero else "%d.0" % offset }}
{%- endmacro %}

{# The same for gemv_codes.wgsl, of a word that was read already, without conversions from integers, which a GPU makes at a
   quarter of its rate: a field of bits that is put into the mantissa of 2^23 as it lies there adds itself times a power of
   two. Part 1 is the upper half of each byte of eight codes.

   halves(name, word)             defines name and name_high, the word as `lifted` takes it and its upper half
   lifted(name, part, bits)       2^23 + (code + offset) * steps of four codes, as vec4<f32>
   base(zero, part, bits)         what to take from that: 2^23 + (zero + offset) * steps, exact; zero as above
   steps(part, bits, inverse)     the powers of two, or what the codes' factors are multiplied by instead #}
{% macro halves(name, word, bits) %}
    let {{ name }} = {{ word }}{{ " ^ 0x80808080u" if bits == 8 }};
    let {{ name }}_high = {{ name }} >> 16u;
{%- endmacro %}
{% macro lifted(name, part, bits) -%}
{% set fields = "0xffu, 0xff00u" if bits == 8 else "0xf0u, 0xf000u" if part else "0xfu, 0xf00u" -%}
bitcast<vec4<f32>>((vec4<u32>({{ name }}, {{ name }}, {{ name }}_high, {{ name }}_high) & vec4<u32>({{ fields }}, {{ fields }})) | vec4<u32>(0x4b000000u))
{%- endmacro %}
{% macro steps(part, bits, inverse) -%}
{% set low = 16.0 if part else 1.0 -%}
{% set high = 256 * low -%}
{% set pair = "%s, %s" % ((1 / low, 1 / high) if inverse else (low, high)) -%}
vec4<f32>({{ pair }}, {{ pair }})
{%- endmacro %}
{% macro base(zero, part, bits) -%}
vec4<f32>(8388608.0) + {{ "(%s + 128.0)" % zero if bits == 8 else zero }} * {{ steps(part, bits, False) }}
{%- endmacro %}

{# For gemm.wgsl, in the manner of `stage` in tile.wgsl: a block of 4 x 4 weights to tile[slot + k * (quads + 1) + quad].
   Beyond depth lies padding, which is finite, and meets zeros of the other operand. #}
{% macro stage(first, k0, kt, quads, slot, bits, has_zero) %}
  {
    let kq = lid % {{ kt // 4 }}u; let oq = lid / {{ kt // 4 }}u;
    let k = {{ k0 }} + kq * 4u;
    let o = {{ first }} + oq * 4u;
    let slot = {{ slot }} + kq * {{ 4 * (quads + 1) }}u + oq;
    let g = min(k, p.depth - 1u) / p.group;
{% for j in range(4) %}
    let o{{ j }} = min(o + {{ j }}u, p.cols - 1u);
    let g{{ j }} = o{{ j }} * p.scales + g;
    let w{{ j }} = ({{ four("o%d * p.words" % j, "k", bits) }} - {{ zero("g%d" % j, bits, has_zero) }}) * load_scale(g{{ j }});
{% endfor %}
{% for i in range(4) %}
    tile[slot + {{ i * (quads + 1) }}u] = vec4<f32>(w0[{{ i }}], w1[{{ i }}], w2[{{ i }}], w3[{{ i }}]);
{% endfor %}
  }
{% endmacro %}

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

{# The same of a word that was read already; part 1 is the upper half of a word of eight codes. #}
{% macro of_word(word, part, bits) -%}
{% if bits == 4 -%}
vec4<f32>(unpack4xU8(({{ word }}{{ " >> 4u" if part else "" }}) & 0x0f0f0f0fu))
{%- else -%}
vec4<f32>(unpack4xI8({{ word }}))
{%- endif %}
{%- endmacro %}

{# What to take from the codes above, as f32; `at` is the index of the group's scale. #}
{% macro zero(at, bits, has_zero) -%}
{% set offset = 8 if bits == 4 else 0 -%}
{{ "f32(load_zero(%s) + %d)" % (at, offset) if has_zero else "%d.0" % offset }}
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

// What an attention step does between its first product and its scores: queries and keys normed (RMS) and rotated, keys
// and values put into their caches at the positions of `index`.
//
// reads      x       [batch, positions, heads + 2 kv_heads, n]: queries, keys, values
//            weight  (weight) factor after the norm, [heads + kv_heads, n]
//            cos, sin  [positions, n]
//            index   [positions]: where on the caches' axis; negative: not written
// writes     query [batch, positions, heads, n]; keys, values: caches [batch, kv_heads, capacity, n]
// params     those of rows.wgsl (rows: of x); positions, heads, kv_heads, capacity, eps
// constants  those of rows.wgsl; norm, weight, interleaved (pairs are neighbours, not halves); held: pairs a lane keeps in
//            registers, so that x is read once, 0 for any number
//
// A row is one head at one position; each lane takes pairs of elements that are rotated with each other.

{% from "rows.wgsl" import place, tree with context %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
var<workgroup> pool: array<f32, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place() }}
  let all = p.heads + 2u * p.kv_heads;
  let head = row % all;
  let s = row / all % p.positions;
  let outer = row / all / p.positions;
  let pairs = n / 2u;
{# Where the two of a pair are in a row. #}
{% macro ends(pair) %}
{% if interleaved %}
    let a = 2u * {{ pair }};
    let b = a + 1u;
{% else %}
    let a = {{ pair }};
    let b = {{ pair }} + pairs;
{% endif %}
{% endmacro %}
{% for h in range(held) %}
  var x{{ h }}: vec2<f32>;
  let in{{ h }} = lane + {{ h * lanes }}u < pairs;
  {
    let pair = min(lane + {{ h * lanes }}u, pairs - 1u);
{{ ends("pair") }}
    x{{ h }} = vec2<f32>(load_x(base + a), load_x(base + b));
  }
{% endfor %}
{% if norm %}
  var partial = 0.0;
{% for h in range(held) %}
  partial += select(0.0, dot(x{{ h }}, x{{ h }}), in{{ h }});
{% endfor %}
{% if not held %}
  for (var k = lane; k < n; k += {{ lanes }}u) {
    let x = load_x(base + k);
    partial += x * x;
  }
{% endif %}
{{ tree("pool", "partial", "squares", "add", true) }}
  let rstd = 1.0 / sqrt(squares / f32(n) + p.eps);
{% endif %}
  if (!live) { return; }
  let turns = head < p.heads + p.kv_heads;
  var to = 0u;
  if (head >= p.heads) {
    let at = load_index(s);
    if (at < 0) { return; }
    let kv = (head - p.heads) % p.kv_heads;
    to = ((outer * p.kv_heads + kv) * p.capacity + u32(at)) * n;
  } else {
    to = ((outer * p.positions + s) * p.heads + head) * n;
  }
{% macro turn(x) %}
    var first = {{ x }}.x;
    var second = {{ x }}.y;
    if (turns) {
{% if norm %}
      first *= rstd;
      second *= rstd;
{% endif %}
{% if weight %}
      first *= load_weight(head * n + a);
      second *= load_weight(head * n + b);
{% endif %}
      let turned = first * load_cos(s * n + a) - second * load_sin(s * n + a);
      second = second * load_cos(s * n + b) + first * load_sin(s * n + b);
      first = turned;
    }
    if (head < p.heads) {
      store_query(to + a, first);
      store_query(to + b, second);
    } else if (turns) {
      store_keys(to + a, first);
      store_keys(to + b, second);
    } else {
      store_values(to + a, first);
      store_values(to + b, second);
    }
{% endmacro %}
{% for h in range(held) %}
  if (in{{ h }}) {
    let pair = lane + {{ h * lanes }}u;
{{ ends("pair") }}
{{ turn("x%d" % h) }}
  }
{% endfor %}
{% if not held %}
  for (var pair = lane; pair < pairs; pair += {{ lanes }}u) {
{{ ends("pair") }}
    let x = vec2<f32>(load_x(base + a), load_x(base + b));
{{ turn("x") }}
  }
{% endif %}
}

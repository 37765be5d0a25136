// Elements added at positions of one axis that are data; every result looks through all positions, so that the order of
// additions is fixed and no atomics are needed.
//
// reads   x      [outer, size, inner] by row-major index
//         index  [n] positions; what is not in 0 … size - 1 is not added
//         new    [outer, n, inner] by row-major index
// writes  out    [outer, size, inner], count elements, summed as type: f32 or i32
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  let c = i % p.inner;
  let position = i32(i / p.inner % p.size);
  let row = i / (p.inner * p.size) * p.n;
  var sum = {{ type }}(load_x(i));
  for (var j = 0u; j < p.n; j++) {
    if (load_index(j) == position) { sum += {{ type }}(load_new((row + j) * p.inner + c)); }
  }
  store(i, sum);
}

// Elements picked along one axis by positions that are data.
//
// reads   x      [outer, size, inner] by row-major index
//         index  positions in 0 … size - 1, one an element of the output
// writes  out    [outer, length, inner], count elements
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  let o = i / p.out_row;
  let c = i % p.inner;
  store(i, load_x((o * p.size + u32(load_index(i))) * p.inner + c));
}

// Which instance of rows16 a matrix and its activations need; included once per instruction set.

template <int PLANES>
static void linear_of(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                      bool add, int from, int to) {
  switch (m.bits * 4 + (m.subblocks - 1) * 2 + m.minima) {
    case 16: return rows16<4, 1, false, PLANES>(m, x, tokens, out, stride, add, from, to);
    case 17: return rows16<4, 1, true, PLANES>(m, x, tokens, out, stride, add, from, to);
    case 20: return rows16<5, 1, false, PLANES>(m, x, tokens, out, stride, add, from, to);
    case 21: return rows16<5, 1, true, PLANES>(m, x, tokens, out, stride, add, from, to);
    case 26: return rows16<6, 2, false, PLANES>(m, x, tokens, out, stride, add, from, to);
    case 32: return rows16<8, 1, false, PLANES>(m, x, tokens, out, stride, add, from, to);
  }
}

static void linear(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                   bool add, int from, int to) {
  if (x.planes == 2) return linear_of<2>(m, x, tokens, out, stride, add, from, to);
  linear_of<1>(m, x, tokens, out, stride, add, from, to);
}

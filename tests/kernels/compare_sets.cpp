// Every instruction set of the processor it runs on against plain loops, on made-up numbers; prints
// a line per set and fails where linear maps differ in a bit or anything else by more than rounding.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "native.h"

using namespace native;

static uint32_t state = 1;

static uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }

static float number() { return (float)(int32_t)(next() & 0xffff) / 32768.0f - 1.0f; }

struct Form {
  int bits, subblocks, minima, zero;
};

static const Form kForms[] = {{4, 1, 0, 8},  {4, 1, 1, 0},  {5, 1, 0, 16},
                              {5, 1, 1, 0}, {6, 2, 0, 32}, {8, 1, 0, 128}};

static int failures = 0;

static void expect(bool fine, const char* set, const char* what) {
  if (fine) return;
  std::printf("%s: %s differs\n", set, what);
  failures++;
}

static void linear_maps(const char* set, const Kernels& kernels) {
  constexpr int kOutputs = 40, kInputs = 96, kTokens = 15, kStride = 48;
  const Kernels& plain = generic_kernels();
  for (const Form& form : kForms)
    for (int planes = 1; planes <= 2; planes++) {
      Matrix m = {nullptr, nullptr, kOutputs, kInputs, form.bits, form.subblocks, form.minima,
                  form.zero};
      const size_t bytes = block_bytes(m), all = 3 * (kInputs / kBlock) * bytes;
      std::vector<uint8_t> data(all + 8192);
      for (size_t i = 0; i < all; i++) data[i] = (uint8_t)next();
      for (size_t at = 0; at < all; at += bytes)  // scales and minima: halves of about 2^-4
        for (int i = 0; i < 16 * (form.subblocks + form.minima); i++) {
          const uint16_t half = (uint16_t)(0x2c00 | (next() & 0x83ff));
          std::memcpy(&data[at + 2 * i], &half, 2);
        }
      std::vector<float> bias(kStride), x(kTokens * kInputs), scale(kTokens * 3), whole(kTokens * 3),
          halves(kTokens * 6);
      for (float& b : bias) b = number();
      for (float& v : x) v = number();
      for (int i = 0; i < kInputs; i++) x[kInputs + i] = i % 2 ? -1.0f : 1.0f;  // largest codes
      m.data = data.data();
      m.bias = bias.data();
      std::vector<int8_t> q(kTokens * kInputs * planes);
      for (int n : {1, 2, 3, 7, kTokens}) {
        const Codes codes = {q.data(), scale.data(), whole.data(), halves.data(), kInputs, n, planes};
        for (int t = 0; t < n; t++) plain.quantise(&x[t * kInputs], codes, t);
        const std::vector<int8_t> meant(q);
        for (int t = 0; t < n; t++) kernels.quantise(&x[t * kInputs], codes, t);
        expect(meant == q, set, "quantise");
        std::vector<float> wanted(n * kStride, 0.5f), found(n * kStride, 0.5f);
        const bool add = n % 2;
        plain.linear(m, codes, n, wanted.data(), kStride, add, 0, 3);
        kernels.linear(m, codes, n, found.data(), kStride, add, 0, 2);
        kernels.linear(m, codes, n, found.data(), kStride, add, 2, 3);
        for (int t = 0; t < n; t++)
          expect(!std::memcmp(&wanted[t * kStride], &found[t * kStride], kOutputs * 4), set, "linear");
      }
    }
}

static bool close(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); i++)
    if (!(std::fabs(a[i] - b[i]) <= 1e-5f * (1.0f + std::fabs(a[i])))) return false;
  return true;
}

static std::vector<float> numbers(int count, float size) {
  std::vector<float> made(count);
  for (float& v : made) v = size * number();
  return made;
}

static void rest(const char* set, const Kernels& kernels) {
  constexpr int kSize = 96, kDim = 64, kGroup = 3, kKeys = 70, kHeld = (kDim + 4) / 2;
  const Kernels& plain = generic_kernels();
  const std::vector<float> x = numbers(kSize, 4.0f), weight = numbers(kSize, 1.0f);
  std::vector<float> a(kSize), b(kSize);
  plain.norm(x.data(), weight.data(), 1e-5f, kSize, a.data());
  kernels.norm(x.data(), weight.data(), 1e-5f, kSize, b.data());
  expect(close(a, b), set, "norm");
  for (int kind = 0; kind < 3; kind++) {
    a = b = x;
    plain.gate(a.data(), weight.data(), kSize, kind);
    kernels.gate(b.data(), weight.data(), kSize, kind);
    expect(close(a, b), set, "gate");
  }
  a = b = x;
  plain.rotate(a.data(), weight.data(), kDim);
  kernels.rotate(b.data(), weight.data(), kDim);
  expect(close(a, b), set, "rotate");
  std::vector<float> k = numbers(kKeys * kDim, 1.0f), q = numbers(kGroup * kDim, 1.0f);
  k[5] = 3e-6f, k[6] = 1e6f;  // of the smallest halves, and too large for one
  std::vector<uint16_t> held(k.size()), same(k.size());
  plain.halves(k.data(), kKeys * kDim, held.data());
  kernels.halves(k.data(), kKeys * kDim, same.data());
  expect(held == same, set, "halves");
  held[6] = 0;
  int64_t slots[kKeys], own[2] = {kKeys - 2, kKeys - 1};
  for (int i = 0; i < kKeys; i++) slots[i] = i * 7 % (kKeys - 2);
  const int size = kGroup * (kDim + 2);
  std::vector<float> sums(2 * size), others(2 * size);
  Heads heads = {held.data(), held.data(), kDim, kGroup, kDim, 0.0f, 2, kKeys - 2, 0};
  const auto attend = [&](const Kernels& by, std::vector<float>& out) {
    for (int n = 0; n < 2; n++) {
      heads.q[n] = q.data();
      heads.keys[n] = {slots, own + n, 0, kKeys - 2, kKeys - 1};
      heads.to[n] = kKeys - 1;
      heads.out[n] = &out[n * size];
    }
    by.attend(heads);
    std::vector<float> mean(kGroup * kDim);
    by.merge(out.data(), 2, size, kGroup, kDim, mean.data());
    out.insert(out.end(), mean.begin(), mean.end());
  };
  attend(plain, sums);
  attend(kernels, others);
  expect(close(sums, others), set, "attend");
  std::vector<uint16_t> codes(kKeys * kHeld), others_codes(kKeys * kHeld);
  for (int i = 0; i < kKeys; i++) {
    plain.eights(&k[i * kDim], kDim, (int8_t*)&codes[i * kHeld]);
    kernels.eights(&k[i * kDim], kDim, (int8_t*)&others_codes[i * kHeld]);
  }
  expect(codes == others_codes, set, "eights");
  heads.k = heads.v = codes.data();
  heads.stride = kHeld;
  heads.eight = 1;
  sums.assign(2 * size, 0.0f), others.assign(2 * size, 0.0f);
  attend(plain, sums);
  attend(kernels, others);
  expect(close(sums, others), set, "attend to codes");
  int32_t first[4], second[4];
  std::vector<float> scores(4), found(4);
  for (float temperature : {0.0f, 0.7f}) {
    a = b = x;
    const Draw draw = {temperature, 0x123456789abcdefull, nullptr};
    plain.pick(a.data(), kSize, draw, 4, first, scores.data());
    kernels.pick(b.data(), kSize, draw, 4, second, found.data());
    expect(!std::memcmp(first, second, sizeof first) && close(scores, found), set, "pick");
  }
}

int main() {
  const char* sets[] = {"avx512", "avx2", "i8mm", "dotprod", "neon"};
  for (const char* set : sets) {
    const Kernels* kernels = kernels_of(set);
    if (!kernels) continue;
    linear_maps(set, *kernels);
    rest(set, *kernels);
    std::printf("%s compared\n", set);
  }
  return failures != 0;
}

// Which instruction sets this processor has, and the kernels made for them.
#include <cstring>

#include "native.h"

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace native {

struct Choice {
  const char* name;
  const Kernels* kernels;  // null: not on this processor
};

#if defined(__x86_64__)
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits of the kernel's interface, which old headers don't name.
static bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }

static bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); }
#elif defined(__aarch64__)
static bool told(const char* name) {
#if defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
#else
  return name == nullptr;
#endif
}

static bool has_dotprod() { return told("hw.optional.arm.FEAT_DotProd"); }

static bool has_i8mm() { return has_dotprod() && told("hw.optional.arm.FEAT_I8MM"); }
#endif

// The best first.
static const Choice* choices(int* count) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const Choice all[] = {
      {"avx512", has_avx512() ? &avx512_kernels() : nullptr},
      {"avx2", has_avx2() ? &avx2_kernels() : nullptr},
      {"generic", &generic_kernels()},
  };
#elif defined(__aarch64__)
  static const Choice all[] = {
      {"i8mm", has_i8mm() ? i8mm_kernels() : nullptr},
      {"dotprod", has_dotprod() ? dotprod_kernels() : nullptr},
      {"neon", &neon_kernels()},
      {"generic", &generic_kernels()},
  };
#else
  static const Choice all[] = {{"generic", &generic_kernels()}};
#endif
  *count = (int)(sizeof all / sizeof *all);
  return all;
}

static const Choice* chosen(const char* name) {
  int count;
  const Choice* all = choices(&count);
  for (int i = 0; i < count; i++)
    if (all[i].kernels && (!std::strcmp(name, "auto") || !std::strcmp(name, all[i].name)))
      return all + i;
  return nullptr;
}

const Kernels* kernels_of(const char* name) {
  const Choice* found = chosen(name);
  return found ? found->kernels : nullptr;
}

const char* name_of(const char* name) {
  const Choice* found = chosen(name);
  return found ? found->name : "";
}

}  // namespace native

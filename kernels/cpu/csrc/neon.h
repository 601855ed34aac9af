// Which newer integer products of AArch64 this compiler can make. GCC and a clang of 16 or later let
// single functions use them; an older clang only a whole file, by its flags.
#pragma once
#include <arm_neon.h>

#if !defined(__clang__)
#define SPEC_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#define SPEC_MATRIX __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#elif __clang_major__ >= 16
#define SPEC_DOT __attribute__((target("dotprod")))
#define SPEC_MATRIX __attribute__((target("dotprod,i8mm")))
#else
#if defined(__ARM_FEATURE_DOTPROD)
#define SPEC_DOT
#endif
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
#define SPEC_MATRIX
#endif
#endif

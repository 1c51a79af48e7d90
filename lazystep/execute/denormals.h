// Whether a thread takes very small numbers for zero. torch can set that, and can't tell it.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace lazystep {

inline bool flushes_denormals() {
#if defined(__SSE2__)
  return _MM_GET_FLUSH_ZERO_MODE() == _MM_FLUSH_ZERO_ON;
#elif defined(__aarch64__)
  uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return (control >> 24 & 1) != 0;
#else
  return false;
#endif
}

}  // namespace lazystep

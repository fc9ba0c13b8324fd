// XLA's element types as ours.
#pragma once

#include "elements.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged {

// Sets `*out` and returns whether the kernels have the type.
inline bool element_type_of(ffi::DataType type, ElementType* out) {
  switch (type) {
    case ffi::F32: *out = ElementType::kFloat32; return true;
    case ffi::BF16: *out = ElementType::kBfloat16; return true;
    case ffi::F8E4M3FN: *out = ElementType::kFloat8E4M3; return true;
    case ffi::F8E5M2: *out = ElementType::kFloat8E5M2; return true;
    default: return false;
  }
}

}  // namespace paged

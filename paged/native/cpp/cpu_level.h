// Which instructions the CPU has, as levels: each includes those below it.
#pragma once

#include "linear.h"

namespace paged {

constexpr int kPortable = 0, kAvx2 = 1, kAvx512Bf16 = 2;

// The highest level of this CPU.
int best_level();

// The kernels of a level, or null if this CPU lacks it.
const LinearKernels* linear_kernels(int level);

}  // namespace paged

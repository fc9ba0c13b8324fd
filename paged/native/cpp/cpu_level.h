// Which instructions the CPU has, as levels: each includes those below it.
#pragma once

#include "attention.h"
#include "kv_write.h"
#include "linear.h"

namespace paged {

constexpr int kPortable = 0, kAvx2 = 1, kAvx512Bf16 = 2;

// The highest level of this CPU.
int best_level();

// The kernels of a level, or null if this CPU lacks it.
const LinearKernels* linear_kernels(int level);

// The attention of a level; without functions if this CPU lacks it.
AttentionKernel attention_kernel(int level);

// What writes to the cache at a level, or null if this CPU lacks it.
KvWriteFunction kv_write_function(int level);

}  // namespace paged

// Random numbers of the virtual device: a seed and an offset, as CUDA's Philox generator keeps them.
#pragma once
#include <ATen/core/Generator.h>

namespace prism {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The next generator that torch asks for is the default one of this device (how Python gets hold of it).
void hand_out_default_generator(int device);
// Takes the numbers of one launch without producing them.
void advance_generator(const std::optional<at::Generator>& generator);

// A CPU generator that continues `generator` (the current device's default when undefined) from its offset,
// and advances the offset as a kernel launch would.
at::Generator cpu_generator(const std::optional<at::Generator>& generator);

}  // namespace prism

// Registration of the backend with torch's dispatcher.
#pragma once

namespace prism {

// Overrides DispatchKey::CUDA for every operator that has a CUDA kernel in a CUDA build of this torch, so that
// composite operators decompose here as they do there. Call once, before torch is used.
void register_kernels();
void register_attention();

}  // namespace prism

// The native mode: a CUDA build of torch whose own guard, streams, generators and caching allocator run on the virtual
// runtime.
#pragma once

namespace prism {

// While one is alive, what the thread asks the runtime for is not recorded: torch's bookkeeping, not the script's.
class Unheard {
 public:
  Unheard() { ++depth(); }
  ~Unheard() { --depth(); }
  Unheard(const Unheard&) = delete;
  Unheard& operator=(const Unheard&) = delete;
  static bool here() { return depth() > 0; }

 private:
  static int& depth();
};

void listen_to_runtime();

// Takes hold of torch's caching allocator, before ours is put in front of it.
void adopt_caching_allocator();

}  // namespace prism

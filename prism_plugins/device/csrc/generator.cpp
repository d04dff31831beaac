#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace prism {
namespace {

constexpr uint64_t kOffsetPerLaunch = 4;

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

void advance_generator(const std::optional<at::Generator>& generator) {
  at::Generator g = generator && generator->defined() ? *generator : default_generator(-1);
  if (!g.device().is_cuda()) return;
  std::lock_guard<std::mutex> guard(g.mutex());
  auto* impl = g.unsafeGetGeneratorImpl();
  impl->set_offset(impl->get_offset() + kOffsetPerLaunch);
}

at::Generator cpu_generator(const std::optional<at::Generator>& generator) {
  at::Generator g = generator && generator->defined() ? *generator : default_generator(-1);
  if (g.device().is_cpu()) return g;
  std::lock_guard<std::mutex> guard(g.mutex());
  uint64_t offset = g.unsafeGetGeneratorImpl()->get_offset();
  g.unsafeGetGeneratorImpl()->set_offset(offset + kOffsetPerLaunch);
  return at::detail::createCPUGenerator(mix(g.current_seed() ^ mix(offset)));
}

}  // namespace prism

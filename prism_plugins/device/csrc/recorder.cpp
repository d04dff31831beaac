#include "recorder.h"

#include "config.h"

namespace prism {

Config& config() {
  static Config c;
  return c;
}

Recorder& Recorder::get() {
  static auto* r = new Recorder();  // leaked: tensors may die after static destruction
  return *r;
}

Counters& counters() {
  static auto* c = new Counters();
  return *c;
}

void Recorder::start() {
  std::lock_guard<SpinLock> guard(lock_);
  events_.clear();
  if (events_.capacity() == 0) events_.reserve(1 << 16);
  ++session_;
  on_ = true;
}

uint32_t Recorder::intern(std::string json) {
  std::lock_guard<std::mutex> guard(signatures_mutex_);
  auto [it, fresh] = ids_.emplace(std::move(json), static_cast<uint32_t>(signatures_.size()));
  if (fresh) signatures_.push_back(it->first);
  return it->second;
}

size_t Recorder::num_signatures() {
  std::lock_guard<std::mutex> guard(signatures_mutex_);
  return signatures_.size();
}

std::string Recorder::signature(uint32_t id) {
  std::lock_guard<std::mutex> guard(signatures_mutex_);
  return signatures_.at(id);
}

}  // namespace prism

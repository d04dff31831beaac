// What recording costs, from a sample of the ops.
#pragma once
#include <algorithm>
#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "recorder.h"

namespace prism {

// The last samples of what recording an op takes, ns. A median of them is not fooled by a thread that lost its core.
class RecordTimes {
 public:
  void add(int64_t ns) {
    std::lock_guard<SpinLock> guard(lock_);
    samples_[count_++ % kKept] = ns;
  }
  std::pair<int64_t, int64_t> count_and_median() {
    std::lock_guard<SpinLock> guard(lock_);
    size_t n = std::min<size_t>(count_, kKept);
    if (n == 0) return {0, 0};
    std::vector<int64_t> sorted(samples_.begin(), samples_.begin() + n);
    std::nth_element(sorted.begin(), sorted.begin() + n / 2, sorted.end());
    return {static_cast<int64_t>(count_), sorted[n / 2]};
  }

 private:
  static constexpr size_t kKept = 4096;
  SpinLock lock_;
  std::array<int64_t, kKept> samples_;
  size_t count_ = 0;
};
inline RecordTimes& record_times() {
  static auto* t = new RecordTimes();
  return *t;
}

// Timing every record would cost more than recording: one in 64 is timed.
class SampledTimer {
 public:
  SampledTimer() {
    thread_local uint32_t turn = 0;
    if (Recorder::get().on() && (turn++ & 63) == 0) start_ = now_ns();
  }
  ~SampledTimer() {
    if (start_) record_times().add(now_ns() - start_);
  }

 private:
  int64_t start_ = 0;
};

}  // namespace prism

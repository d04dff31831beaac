// The event stream of an iteration, the table of op signatures, and counters of what was not computed.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace prism {

// Values are those of prism_plugins/program/model.py: EventKind, EventFlag.
enum class EventKind : uint8_t {
  kKernel = 0, kComm, kWorkWait, kEventRecord, kEventWait, kEventSync, kStreamSync, kDeviceSync,
  kAlloc, kFree, kPhaseBegin, kPhaseEnd, kHost,
};
constexpr uint8_t kFlagAsync = 1;
constexpr uint8_t kFlagSynthesized = 2;

struct Event {
  uint8_t kind;
  uint8_t flags;
  uint16_t stream;
  uint32_t ref;
  int64_t value;
};
static_assert(sizeof(Event) == 16);

// A lock that is nearly always free: the main thread and autograd's device thread take turns.
class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

class Recorder {
 public:
  static Recorder& get();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void start();
  void stop() { on_ = false; }
  // Number of start() calls so far: tells events recorded in this iteration from older ones.
  uint32_t session() const { return session_; }

  void add(EventKind kind, uint32_t stream, uint32_t ref, int64_t value = 0, uint8_t flags = 0) {
    if (!on()) return;
    std::lock_guard<SpinLock> guard(lock_);
    events_.push_back({static_cast<uint8_t>(kind), flags, static_cast<uint16_t>(stream), ref, value});
  }
  const std::vector<Event>& events() const { return events_; }

  // Id of an op signature, given as the JSON of program.model.OpSignature.
  uint32_t intern(std::string json);
  size_t num_signatures();
  std::string signature(uint32_t id);

 private:
  std::atomic<bool> on_{false};
  std::atomic<uint32_t> session_{0};
  SpinLock lock_;
  std::vector<Event> events_;
  std::mutex signatures_mutex_;
  std::unordered_map<std::string, uint32_t> ids_;
  std::vector<std::string> signatures_;
};

// Things the user must be told about, by name.
class Tally {
 public:
  void count(const std::string& name) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++counts_[name];
  }
  std::map<std::string, int64_t> snapshot() {
    std::lock_guard<std::mutex> guard(mutex_);
    return counts_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

struct Counters {
  std::atomic<int64_t> ops{0};             // device ops seen, recorded or not
  std::atomic<int64_t> computed{0};        // of these: computed on the CPU
  std::atomic<int64_t> cache_hits{0};
  std::atomic<int64_t> cache_misses{0};
  std::atomic<int64_t> delayed_reuse{0};   // frees that record_stream would have delayed
  Tally synthesized_reads;                 // read-backs of synthesized values, by op and dtype
  Tally no_cpu_kernel;                     // all inputs real, but the CPU has no such kernel: synthesized
  Tally no_meta_kernel;                    // mutates its arguments only, shapes taken as unchanged
};
Counters& counters();

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace prism

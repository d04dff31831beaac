// The inner loop of the simulation's machine (process.py), for jobs of millions of items. The same sums and maxima in the
// same order for each number as Machine._run_in_python, so that results are equal to the bit. Uses nothing but the standard
// library and is called through ctypes (native.py).

#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace {

// Item codes of process.py.
enum Code : uint8_t { kSync, kAsync, kWait, kSet, kBase, kEnd, kSyncBatch, kAsyncBatch, kHost };

struct Items {
  const uint8_t* code;
  const double* run;
  const double* issue;
  const double* host;
  const int64_t* slot;
  const int64_t* previous;
  // Further slots of item i: more[more_begin[i]] to more[more_begin[i + 1] - 1].
  const int64_t* more_begin;
  const int64_t* more;
};

// Who waits for a slot: a process, a batch (its slot) of which the slot is a part, or an asynchronous item that came at a time.
struct Waiter {
  enum Kind : uint8_t { kProcess, kBatch, kItem } kind;
  int64_t id;
  double at;
  int64_t next;
};

class Machine {
 public:
  Machine(int64_t num_processes, int64_t num_slots, const int64_t* begin, const Items& items, const double* duration,
          int64_t* missing, double* value, double* trace)
      : begin_(begin),
        items_(items),
        duration_(duration),
        missing_(missing),
        value_(value),
        trace_(trace),
        index_(begin, begin + num_processes),
        now_(num_processes, 0.0),
        base_(num_processes, 0.0),
        waits_for_(num_processes, -1),
        arrival_(num_slots, -std::numeric_limits<double>::infinity()),
        first_waiter_(num_slots, -1) {
    ready_.reserve(num_processes);
    for (int64_t p = 0; p < num_processes; ++p) ready_.push_back(p);
  }

  // Advances everything; returns how many processes came to their end.
  int64_t run() {
    for (size_t i = 0; i < ready_.size(); ++i) {
      advance(ready_[i]);
      if (i > 4096 && 2 * i > ready_.size()) {  // forget those that were done
        ready_.erase(ready_.begin(), ready_.begin() + static_cast<int64_t>(i) + 1);
        i = static_cast<size_t>(-1);
      }
    }
    int64_t finished = 0;
    for (size_t p = 0; p < index_.size(); ++p) finished += index_[p] == begin_[p + 1];
    return finished;
  }

 private:
  bool known(int64_t slot) const { return !std::isnan(value_[slot]); }

  void wait(int64_t slot, Waiter::Kind kind, int64_t id, double at) {
    int64_t w = free_;
    if (w >= 0) {
      free_ = pool_[w].next;
    } else {
      w = static_cast<int64_t>(pool_.size());
      pool_.emplace_back();
    }
    pool_[w] = {kind, id, at, first_waiter_[slot]};
    first_waiter_[slot] = w;
  }

  void settle(int64_t slot, double end) {
    value_[slot] = end;
    if (first_waiter_[slot] >= 0) resolved_.push_back(slot);
  }

  void arrive(int64_t slot, double at) {
    if (at > arrival_[slot]) arrival_[slot] = at;
    if (--missing_[slot] == 0) settle(slot, arrival_[slot] + duration_[slot]);
  }

  // The kernel of a batch starts at a time; it ends when its last part does.
  void arrive_batch(int64_t item, double at) {
    const int64_t slot = items_.slot[item];
    const int64_t first = items_.more_begin[item], last = items_.more_begin[item + 1];
    for (int64_t i = first; i < last; ++i) arrive(items_.more[i], at);
    arrival_[slot] = at;
    missing_[slot] = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t part = items_.more[i];
      if (!known(part)) {
        ++missing_[slot];
        wait(part, Waiter::kBatch, slot, 0.0);
      } else if (value_[part] > arrival_[slot]) {
        arrival_[slot] = value_[part];
      }
    }
    if (missing_[slot] == 0) settle(slot, arrival_[slot]);
  }

  void arrive_item(int64_t item, double at) {
    if (items_.code[item] == kAsyncBatch) {
      arrive_batch(item, at);
    } else {
      arrive(items_.slot[item], at);
    }
  }

  // Tells those who wait for slots that got their times.
  void wake() {
    while (!resolved_.empty()) {
      const int64_t slot = resolved_.back();
      resolved_.pop_back();
      const double end = value_[slot];
      int64_t w = first_waiter_[slot];
      first_waiter_[slot] = -1;
      while (w >= 0) {
        const Waiter waiter = pool_[w];
        pool_[w].next = free_;
        free_ = w;
        w = waiter.next;
        switch (waiter.kind) {
          case Waiter::kProcess:
            ready_.push_back(waiter.id);
            break;
          case Waiter::kBatch:
            if (end > arrival_[waiter.id]) arrival_[waiter.id] = end;
            if (--missing_[waiter.id] == 0) settle(waiter.id, arrival_[waiter.id]);
            break;
          case Waiter::kItem:
            arrive_item(waiter.id, waiter.at > end ? waiter.at : end);
            break;
        }
      }
    }
  }

  void block(int64_t p, int64_t slot, int64_t index, double now, double base) {
    index_[p] = index;
    now_[p] = now;
    base_[p] = base;
    wait(slot, Waiter::kProcess, p, 0.0);
  }

  void advance(int64_t p) {
    int64_t i = index_[p];
    double now = now_[p], base = base_[p];
    if (waits_for_[p] >= 0) {
      const double end = value_[waits_for_[p]];
      if (end > now) now = end;
      trace_[i - 1] = now;
      waits_for_[p] = -1;
    }
    const int64_t stop = begin_[p + 1];
    for (; i < stop; ++i) {
      const int64_t slot = items_.slot[i], previous = items_.previous[i];
      const double was = now;
      now += items_.run[i];
      const double issued = base + items_.issue[i];
      if (issued > now) now = issued;
      switch (items_.code[i]) {
        case kSync:
        case kSyncBatch:
          if (previous >= 0) {
            if (!known(previous)) return block(p, previous, i, was, base);
            if (value_[previous] > now) now = value_[previous];
          }
          if (items_.code[i] == kSync) {
            arrive(slot, now);
          } else {
            arrive_batch(i, now);
          }
          wake();
          if (!known(slot)) {
            waits_for_[p] = slot;
            return block(p, slot, i + 1, now, base);
          }
          now = value_[slot];
          break;
        case kAsync:
        case kAsyncBatch: {
          double at = base + items_.host[i];
          if (now > at) at = now;
          if (previous >= 0 && !known(previous)) {
            wait(previous, Waiter::kItem, i, at);
            break;
          }
          if (previous >= 0 && value_[previous] > at) at = value_[previous];
          arrive_item(i, at);
          wake();
          break;
        }
        case kWait:
          if (!known(slot)) {
            waits_for_[p] = slot;
            return block(p, slot, i + 1, now, base);
          }
          if (value_[slot] > now) now = value_[slot];
          break;
        case kBase:
          if (!known(slot)) return block(p, slot, i, was, base);
          base = value_[slot];
          break;
        case kHost: {
          double until = base + items_.host[i];
          for (int64_t k = items_.more_begin[i]; k < items_.more_begin[i + 1]; ++k) {
            const int64_t needed = items_.more[k];
            if (!known(needed)) return block(p, needed, i, was, base);
            if (value_[needed] > until) until = value_[needed];
          }
          base = until - items_.host[i];
          settle(slot, base);
          wake();
          break;
        }
        default:  // kSet
          if (slot >= 0) {
            settle(slot, now);
            wake();
          }
      }
      trace_[i] = now;
    }
    index_[p] = stop;
  }

  const int64_t* begin_;
  Items items_;
  const double* duration_;
  int64_t* missing_;
  double* value_;
  double* trace_;
  std::vector<int64_t> index_;
  std::vector<double> now_, base_;
  std::vector<int64_t> waits_for_;
  std::vector<double> arrival_;
  std::vector<int64_t> first_waiter_;
  std::vector<Waiter> pool_;
  int64_t free_ = -1;
  std::vector<int64_t> ready_, resolved_;
};

}  // namespace

// Runs processes whose items are [begin[p], begin[p + 1]). value: NaN for times that nobody computed; trace: a process's time
// after each item. Returns how many processes came to their end; -1 without memory.
extern "C" __attribute__((visibility("default"))) int64_t prism_run_machine(
    int64_t num_processes, int64_t num_slots, const int64_t* begin, const uint8_t* code, const double* run,
    const double* issue, const double* host, const int64_t* slot, const int64_t* previous, const int64_t* more_begin,
    const int64_t* more, const double* duration, int64_t* missing, double* value, double* trace) {
  try {
    const Items items{code, run, issue, host, slot, previous, more_begin, more};
    return Machine(num_processes, num_slots, begin, items, duration, missing, value, trace).run();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// The generators of the virtual device. CPU builds of torch only: a CUDA build has its own.
#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "config.h"
#include "generator.h"
#include "streams.h"

namespace prism {
namespace {

class VirtualGenerator final : public c10::GeneratorImpl {
 public:
  explicit VirtualGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  // 16 bytes, seed and offset, as CUDAGeneratorImpl.
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto* p = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, p, 8);
    offset_ = 0;
    if (state.numel() == 16) std::memcpy(&offset_, p + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(t.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<uint8_t*>(t.data_ptr()) + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    seed_ = other->current_seed();
    offset_ = other->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }

 private:
  VirtualGenerator* clone_impl() const override {
    auto* g = new VirtualGenerator(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

std::atomic<int> hand_out{-1};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* v = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) v->push_back(at::make_generator<VirtualGenerator>(i));
    return v;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  int wanted = hand_out.exchange(-1);
  if (wanted >= 0) return default_generator(wanted);
  return at::make_generator<VirtualGenerator>(device < 0 ? current_device() : device);
}

void hand_out_default_generator(int device) { hand_out = device; }

}  // namespace prism

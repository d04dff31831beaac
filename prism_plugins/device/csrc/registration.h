// Registering kernels with torch's dispatcher for good.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace prism {

inline void keep(c10::RegistrationHandleRAII handle) {
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>();
  handles->push_back(std::move(handle));
}

inline c10::OperatorName parse_name(const std::string& full) {
  auto dot = full.find('.');
  if (dot == std::string::npos) return {full, ""};
  return {full.substr(0, dot), full.substr(dot + 1)};
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

template <class F>
void register_by_hand(const char* full, F* kernel, c10::DispatchKey key = c10::DispatchKey::CUDA) {
  keep(c10::Dispatcher::singleton().registerImpl(parse_name(full), key,
                                                 c10::KernelFunction::makeFromUnboxedRuntimeFunction(kernel),
                                                 std::nullopt, nullptr, "prism"));
}

}  // namespace prism

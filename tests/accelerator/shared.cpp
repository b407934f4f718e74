// NCCL's rules for ranks that share one real GPU, which NCCL itself refuses: nccl.cpp on top, gloo underneath, and real
// streams, kernels and memory. A collective's bytes go through the host. A stream that waits for one makes the host wait.
#include "pretend.h"
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

void bind_nccl(pybind11::module_& m);

namespace pretend {

Settings settings;
Counts counts;

namespace {
constexpr auto kCuda = c10::DeviceType::CUDA;

// What has been given to a stream when this is made.
struct Queued final : Pending {
  explicit Queued(int device) : event(kCuda) {
    const c10::impl::VirtualGuardImpl cuda(kCuda);
    event.record(cuda.getStream({kCuda, (c10::DeviceIndex)device}));
  }
  void block() override { event.synchronize(); }
  c10::Event event;
};
}  // namespace

int current_device() { return c10::impl::VirtualGuardImpl(kCuda).getDevice().index(); }

void stream_waits_for(int, std::shared_ptr<Pending> pending) { pending->block(); }

std::vector<std::shared_ptr<Pending>> waited_for(int device) { return {std::make_shared<Queued>(device)}; }

at::Tensor to_host(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor.contiguous().cpu();
}

void from_host(const at::Tensor& tensor, const at::Tensor& host) {
  if (!tensor.numel()) return;
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor to = tensor;
  to.copy_(host.view(tensor.sizes()));
}

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [](bool eager, double deadlock_s) {
    pretend::settings.eager = eager;
    pretend::settings.deadlock_s = deadlock_s;
  });
  bind_nccl(m);
}

// Operations of the pretend device: those of the CPU, over the same memory. Its random numbers, and its place in torch.
#include "pretend.h"
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unordered_map>

namespace pretend {
namespace {

using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using Sizes = c10::IntArrayRef;
template <class T>
using Maybe = std::optional<T>;

// ── random numbers: a seed and an offset, as on a GPU ──
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({DeviceType::CUDA, device}, DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == 16, "RNG state must be a torch.ByteTensor of 16 bytes");
    auto* numbers = (const uint64_t*)state.data();
    seed_ = numbers[0], offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* numbers = (uint64_t*)state.data_ptr();
    numbers[0] = seed_, numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};

at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < settings.devices; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(device < 0 ? current_device() : device);
}

// Sets the CPU's generator for one kernel, by the next offset of the device's, and puts it back.
class Draw {
 public:
  explicit Draw(at::Generator& of) : cpu_(at::detail::getDefaultCPUGenerator()) {
    auto* generator = static_cast<Generator*>(of.unsafeGetGeneratorImpl());
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    before_ = cpu_.get_state();
    cpu_.set_current_seed(generator->seed_ * 0x9E3779B97F4A7C15ull + generator->offset_ + 1);
    generator->offset_ += 4;
  }
  ~Draw() {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

// ── tensors over the same memory ──
class OnDevice {  // switches the current device
 public:
  explicit OnDevice(Device device) : before_(guard_.exchangeDevice(with_index(device))) {}
  ~OnDevice() { guard_.setDevice(before_); }

 private:
  c10::impl::VirtualGuardImpl guard_{DeviceType::CUDA};
  Device before_;
};

using Storages = std::unordered_map<StorageImpl*, c10::Storage>;  // of the device's tensors, and of their aliases

at::Tensor with_geometry(at::Tensor made, const at::Tensor& like, int64_t offset) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return made;
}

at::Tensor view_of(const at::Tensor& self, Sizes size, Sizes stride, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return view;
}

// A CPU tensor over the memory of one of the device; aliases share storages as the tensors do.
at::Tensor alias(const at::Tensor& tensor, Storages& storages, Unlocked& memory) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto it = storages.find(impl);
  if (it == storages.end()) {
    void* address = impl->mutable_data();
    memory.add(address);
    it = storages.emplace(impl, c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), impl->nbytes(), c10::DataPtr(address, Device(c10::kCPU)),
        c10::GetCPUAllocator(), true)).first;
  }
  DispatchKeySet keys(DispatchKey::CPU);
  if (tensor.is_conj()) keys = keys | DispatchKeySet(DispatchKey::Conjugate);
  if (tensor.is_neg()) keys = keys | DispatchKeySet(DispatchKey::Negative);
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(it->second), keys, tensor.dtype());
  return with_geometry(std::move(made), tensor, tensor.storage_offset());
}

// An uninitialized tensor of the device, with the sizes and strides of another.
at::Tensor allocated(const at::Tensor& like, Device device) {
  OnDevice on(device);
  int64_t elements = like.numel() ? 1 : 0;
  if (elements)
    for (int dim = 0; dim < like.dim(); dim++) elements += (like.size(dim) - 1) * like.stride(dim);
  c10::Storage storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), elements * like.dtype().itemsize(), device_allocator(), true));
  return with_geometry(at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CUDA), like.dtype()), like, 0);
}

void resize_storage(StorageImpl* storage, size_t bytes) {
  OnDevice on(storage->device());
  auto data = device_allocator()->allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes()))
    device_allocator()->copy_data(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

bool is_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

struct BelowAutograd {
  c10::InferenceMode off{false};
  c10::impl::ExcludeDispatchKeyGuard exclude{c10::autograd_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
};

// ── any operation: the CPU's, over aliases of its arguments ──
class Kernel {
 public:
  Kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    counts.kernels++;
    before_kernel();
    const auto arguments = op_.schema().arguments().size();
    for (auto i = stack_.size() - arguments; i < stack_.size(); i++) stack_[i] = unwrapped(stack_[i]);
    refuse_two_devices();
    bool draws = false;
    for (auto& tag : op_.getTags()) draws |= tag == at::Tag::nondeterministic_seeded;
    if (draws) {
      Draw drawing(generator_ ? *generator_ : default_generator(device_ ? device_->index() : -1));
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    } else {
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    }
    for (auto& [tensor, made] : arguments_) keep_resized(tensor, made);
    for (auto i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); i++) stack_[i] = wrapped(stack_[i]);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  Storages storages_;
  Unlocked memory_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arguments_;  // of the device, and their aliases
  Maybe<Device> device_;
  Maybe<at::Generator> generator_;
  bool has_host_argument_ = false;

  at::Tensor unwrapped_tensor(const at::Tensor& tensor) {
    if (!is_device(tensor)) {
      has_host_argument_ |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;  // numbers may be on the CPU
      return tensor;
    }
    if (!device_ || tensor.dim() > 0) {
      TORCH_CHECK(!device_ || *device_ == tensor.device() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                  tensor.device(), "! (", op_.schema().name(), ")");
      device_ = tensor.device();
    }
    auto made = alias(tensor, storages_, memory_);
    arguments_.emplace_back(tensor, made);
    return made;
  }

  c10::IValue unwrapped(const c10::IValue& value) {
    if (value.isTensor()) return unwrapped_tensor(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(unwrapped_tensor(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<Maybe<at::Tensor>> list;
      for (const Maybe<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? Maybe<at::Tensor>(unwrapped_tensor(*tensor)) : tensor);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = value.toDevice();
      return Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator_ = value.toGenerator();
      return {};
    }
    return value;
  }

  void refuse_two_devices() const {
    const auto& name = op_.schema().name();
    if (!has_host_argument_ || !device_ || name.find("foreach_copy") != name.npos || name.find("index") != name.npos)
      return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and cpu! (", name, ")");
  }

  void keep_resized(const at::Tensor& tensor, const at::Tensor& made) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto& of_alias = storages_.at(storage);
    if (of_alias && of_alias.unsafeGetStorageImpl()->data() != storage->data()) {
      OnDevice on(tensor.device());
      auto data = device_allocator()->allocate(of_alias.nbytes());
      device_allocator()->copy_data(data.get(), of_alias.unsafeGetStorageImpl()->data(), of_alias.nbytes());
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(of_alias.nbytes());
      of_alias = c10::Storage();
    }
    if (made.sizes() != tensor.sizes() || made.strides() != tensor.strides())
      with_geometry(tensor, made, made.storage_offset());
  }

  at::Tensor wrapped_tensor(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [tensor, made] : arguments_)
      if (made.is_same(result)) return tensor;
    for (auto& [tensor, made] : arguments_) {
      auto& of_alias = storages_.at(tensor.storage().unsafeGetStorageImpl());
      if (!of_alias || result.storage().unsafeGetStorageImpl() != of_alias.unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), result.dtype());
      with_geometry(view, result, result.storage_offset());
      if (result.is_complex()) view._set_conj(result.is_conj());
      view._set_neg(result.is_neg());
      return view;
    }
    auto made = allocated(result, device_ ? *device_ : Device(DeviceType::CUDA));
    if (result.numel()) {
      Storages storages;
      Unlocked memory;
      BelowAutograd below;
      alias(made, storages, memory).copy_(result);
    }
    return made;
  }

  c10::IValue wrapped(const c10::IValue& value) {
    if (value.isTensor()) return wrapped_tensor(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(wrapped_tensor(tensor));
    return list;
  }
};

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Kernel(op, *stack).run(); }

// ── operations that make, move or look at memory ──
at::Tensor empty_strided(Sizes size, Sizes stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                         Maybe<Device> device, Maybe<bool>) {
  const at::Tensor like = at::detail::empty_strided_meta(size, stride, dtype.value_or(c10::get_default_dtype_as_scalartype()));
  return allocated(like, device.value_or(Device(DeviceType::CUDA)));
}

at::Tensor empty(Sizes size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<Device> device, Maybe<bool> pinned,
                 Maybe<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const at::Tensor like = at::detail::empty_meta(size, dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
  return allocated(like, device.value_or(Device(DeviceType::CUDA)));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_meta() || !self.numel()) return self;
  before_kernel();
  counts.kernels++;
  Storages storages;
  Unlocked memory;
  BelowAutograd below;
  const auto from = is_device(source) ? alias(source, storages, memory) : source;
  if (is_device(self)) {
    if (!is_device(source)) {
      counts.copies_to_device++;
      if (!non_blocking || !source.is_pinned()) counts.host_waits++;
    }
    alias(self, storages, memory).copy_(from);
    return self;
  }
  counts.copies_to_host++;
  const int device = source.device().index();
  if (non_blocking && is_pinned(self.data_ptr()) && self.is_non_overlapping_and_dense()) {
    auto value = at::empty_strided(self.sizes(), self.strides(), self.options());
    value.copy_(from);
    arrive_later(self, value, device);
    return self;
  }
  wait_for_current_stream(device);
  self.copy_(from);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

at::Scalar local_scalar(const at::Tensor& self) {
  before_kernel();
  counts.kernels++;
  wait_for_current_stream(self.device().index());
  Storages storages;
  Unlocked memory;
  BelowAutograd below;
  return at::_local_scalar_dense(alias(self, storages, memory));
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset, Sizes size, Sizes stride) {
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.empty() && !size.empty()) {
    strides.resize(size.size());
    int64_t step = 1;
    for (int dim = (int)size.size() - 1; dim >= 0; dim--) strides[dim] = step, step *= std::max<int64_t>(size[dim], 1);
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& to) {
  return set_storage(self, to.storage(), to.storage_offset(), to.sizes(), to.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, allocated(at::detail::empty_meta({0}, self.scalar_type()), self.device()));
}

const at::Tensor& resize_(const at::Tensor& self, Sizes size, Maybe<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  const at::Tensor like = at::detail::empty_meta(size, self.scalar_type());
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t bytes = (like.numel() + self.storage_offset()) * self.dtype().itemsize();
  if (storage->nbytes() < bytes) resize_storage(storage, bytes);
  with_geometry(self, like, self.storage_offset());
  return self;
}

at::Tensor view(const at::Tensor& self, Sizes size) {
  const auto sizes = at::infer_size(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(stride, "view size is not compatible with input tensor's size and stride (at least one dimension spans "
                      "across two contiguous subspaces). Use .reshape(...) instead.");
  return view_of(self, sizes, *stride, self.storage_offset());
}

at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride, Maybe<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return view_of(self, size, stride, self.storage_offset());
}

void record_stream(at::Tensor&, c10::Stream) {}

// The CPU's flash attention keeps state that the fused operation of CUDA does not have.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Maybe<at::Tensor>& mask,
                     double dropout, bool causal, Maybe<double> scale, bool gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, std::nullopt, scale, gqa));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize_);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("record_stream", &record_stream);
  m.impl("scaled_dot_product_attention", &attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attention); }

// ── the device's place in torch ──
struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return settings.devices; }
  int getNumGPUs() const override { return settings.devices; }
  c10::DeviceIndex current_device() const override { return pretend::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return pretend::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = pretend::current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, (c10::DeviceIndex)pretend::current_device()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? pretend::current_device() : device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { wait_for_device(device); }
};

// torch keeps the hooks of a build without CUDA from its first look at them: these take their place in memory.
void take_the_place_of_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "hooks have no members");
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}

}  // namespace

at::Tensor to_host(const at::Tensor& tensor) {
  if (!is_device(tensor)) return tensor;
  at::NoGradGuard no_grad;
  Storages storages;
  Unlocked memory;
  BelowAutograd below;
  return alias(tensor, storages, memory).clone(at::MemoryFormat::Contiguous);
}

void from_host(const at::Tensor& tensor, const at::Tensor& host) {
  if (!tensor.numel()) return;
  at::NoGradGuard no_grad;
  Storages storages;
  Unlocked memory;
  BelowAutograd below;
  alias(tensor, storages, memory).copy_(host.view(tensor.sizes()));
}

}  // namespace pretend

void bind_nccl(pybind11::module_& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  m.def("begin", [](int devices, bool guarded, bool eager, double deadlock_s) {
    settings = {devices, guarded, eager, deadlock_s};
    c10::SetAllocator(DeviceType::CUDA, device_allocator(), 100);
    take_the_place_of_hooks();
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("set_device", &set_current_device);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("current_device", &pretend::current_device);
  m.def("device_count", [] { return settings.devices; });
  m.def("resize_storage", [](const c10::Storage& storage, size_t bytes) {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  });
  m.def("synchronize", [](int device) {
    pybind11::gil_scoped_release release;
    wait_for_device(device);
  });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"kernels", counts.kernels}, {"copies_to_host", counts.copies_to_host},
        {"copies_to_device", counts.copies_to_device}, {"host_waits", counts.host_waits},
        {"allocated", counts.allocated}, {"peak", counts.peak}, {"pinned", counts.pinned}};
  });
  m.def("reset_peak", [] { counts.peak = counts.allocated.load(); });
  bind_nccl(m);
}

// Devices, streams and events of the pretend device.
//
// A kernel runs when it is launched. What is late are copies to pinned memory, whose bytes are poison until the host waits
// for their stream, for an event that was recorded after them, or for the device; and what the streams wait for, the
// collectives.
#include "pretend.h"
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
#include <map>
#include <mutex>

namespace pretend {
namespace {

constexpr int kMostDevices = 16;
constexpr int kPoison = 0xAB;
constexpr uint64_t kAll = UINT64_MAX;

thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId current_streams[kMostDevices] = {0};

struct LateCopy {
  uint64_t number;
  at::Tensor host, value;
};
struct StreamState {
  uint64_t copies = 0;
  std::vector<LateCopy> late;
  std::vector<std::shared_ptr<Pending>> waits_for;
};
using StreamKey = std::pair<int, c10::StreamId>;  // device, stream
std::mutex mutex;
std::map<StreamKey, StreamState> streams;
std::atomic<int64_t> next_stream{1};

StreamKey current_key(int device) { return {device, current_streams[device]}; }

void block_on(const std::vector<std::shared_ptr<Pending>>& all) {
  for (auto& pending : all) pending->block();
}

// Wait for what a stream waits for, then let its copies arrive, up to one.
void deliver(const StreamKey& key, uint64_t last) {
  std::vector<LateCopy> now, later;
  std::vector<std::shared_ptr<Pending>> waits_for;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& stream = streams[key];
    waits_for.swap(stream.waits_for);
    for (auto& copy : stream.late) (copy.number <= last ? now : later).push_back(copy);
    stream.late.swap(later);
  }
  block_on(waits_for);
  c10::InferenceMode off(false);
  for (auto& copy : now) memcpy(copy.host.data_ptr(), copy.value.data_ptr(), copy.value.nbytes());
}

struct Event {
  StreamKey key;
  uint64_t copies;
  std::vector<std::shared_ptr<Pending>> waits_for;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  static StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static c10::Stream stream(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return settings.devices; }
  c10::Device getDevice() const override { return {static_type, current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return stream(device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(with_index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(with_index(device), next_stream++); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_streams[with_index(to.device()).index()] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream of) const override { return (void*)(uintptr_t)of.id(); }
  bool queryStream(const c10::Stream& of) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto& state = streams[key_of(of)];
    return state.late.empty() && state.waits_for.empty();
  }
  void synchronizeStream(const c10::Stream& of) const override {
    counts.host_waits++;
    deliver(key_of(of), kAll);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(device); }

  void record(void** event, const c10::Stream& of, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    std::lock_guard<std::mutex> lock(mutex);
    auto& state = streams[key_of(of)];
    *(Event*)*event = {key_of(of), state.copies, state.waits_for};
  }
  void block(void* event, const c10::Stream& of) const override {
    if (!event) return;
    std::lock_guard<std::mutex> lock(mutex);
    auto& waits_for = streams[key_of(of)].waits_for;
    auto& more = ((Event*)event)->waits_for;
    waits_for.insert(waits_for.end(), more.begin(), more.end());
  }
  // Code that asks without waiting is told "done" when it is: then there is nothing that it could have missed.
  bool queryEvent(void* event) const override {
    complete(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    counts.host_waits++;
    complete(event);
  }
  static void complete(void* event) {
    if (!event) return;
    auto* recorded = (Event*)event;
    block_on(recorded->waits_for);
    deliver(recorded->key, recorded->copies);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

int current_device() { return current; }

void set_current_device(int device) {
  TORCH_CHECK(device < settings.devices, "CUDA error: invalid device ordinal ", device);
  if (device >= 0) current = device;
}

c10::Device with_index(c10::Device device) {
  return {c10::DeviceType::CUDA, device.index() < 0 ? current : device.index()};
}

void stream_waits_for(int device, std::shared_ptr<Pending> pending) {
  std::lock_guard<std::mutex> lock(mutex);
  streams[current_key(device)].waits_for.push_back(std::move(pending));
}

std::vector<std::shared_ptr<Pending>> waited_for(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return streams[current_key(device)].waits_for;
}

// On a GPU the device would wait; here the host does, and counts nothing.
void before_kernel() {
  std::vector<std::shared_ptr<Pending>> waits_for;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = streams.find(current_key(current));
    if (it == streams.end()) return;
    waits_for.swap(it->second.waits_for);
  }
  block_on(waits_for);
}

void arrive_later(const at::Tensor& host, const at::Tensor& value, int device) {
  memset(host.data_ptr(), kPoison, host.nbytes());
  std::lock_guard<std::mutex> lock(mutex);
  auto& stream = streams[current_key(device)];
  stream.late.push_back({++stream.copies, host, value});
}

void wait_for_current_stream(int device) {
  counts.host_waits++;
  deliver(current_key(device), kAll);
}

void wait_for_device(int device) {
  counts.host_waits++;
  std::vector<StreamKey> keys;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [key, state] : streams)
      if (key.first == device) keys.push_back(key);
  }
  for (auto& key : keys) deliver(key, kAll);
}

}  // namespace pretend

// Memory of the pretend device, in pages that only kernels may touch, and pinned memory of the host.
#include "pretend.h"
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace pretend {

Settings settings;
Counts counts;

namespace {

constexpr size_t kPage = 4096;
constexpr int kUninitialized = 0xFF;  // NaN in every floating dtype

struct Block {
  size_t bytes;
  int unlocked;  // how many kernels use it now
};
std::mutex mutex;
std::map<char*, Block> blocks;  // by their first byte

// Return the block that has an address, or the end. The caller holds the mutex.
std::map<char*, Block>::iterator block_of(const void* address) {
  auto it = blocks.upper_bound((char*)address);
  if (it == blocks.begin()) return blocks.end();
  --it;
  return (char*)address < it->first + it->second.bytes ? it : blocks.end();
}

void change_users(void* address, int by) {
  if (!address || !settings.guarded) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = block_of(address);
  if (it == blocks.end()) return;
  auto& [first, block] = *it;
  const bool was_open = block.unlocked > 0;
  block.unlocked += by;
  const bool is_open = block.unlocked > 0;
  if (was_open != is_open) mprotect(first, block.bytes, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void release(void* address) {
  if (!address) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = blocks.find((char*)address);
  if (it == blocks.end()) return;
  counts.allocated -= it->second.bytes;
  munmap(address, it->second.bytes);
  blocks.erase(it);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CUDA, current_device());
    if (!bytes) return {nullptr, nullptr, &release, device};
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    void* address = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "CUDA out of memory (pretend)");
    memset(address, kUninitialized, bytes);
    if (settings.guarded) mprotect(address, whole, PROT_NONE);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[(char*)address] = {whole, 0};
    const int64_t now = counts.allocated += whole;
    if (now > counts.peak) counts.peak = now;
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    Unlocked memory;
    memory.add(to);
    memory.add(const_cast<void*>(from));
    memcpy(to, from, bytes);
  }
};

// Like torch's caching allocator of pinned memory: sizes are powers of two, and what is freed is kept for later.
std::mutex pinned_mutex;
std::map<char*, size_t> pinned_blocks;
std::multimap<size_t, char*> pinned_free;

void release_pinned(void* address) {
  if (!address) return;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned_blocks.find((char*)address);
  pinned_free.emplace(it->second, it->first);
  pinned_blocks.erase(it);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device host(c10::kCPU);
    if (!bytes) return {nullptr, nullptr, &release_pinned, host};
    size_t size = 1;
    while (size < bytes) size *= 2;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    void* address = nullptr;
    if (auto it = pinned_free.find(size); it != pinned_free.end()) {
      address = it->second;
      pinned_free.erase(it);
    } else {
      TORCH_CHECK(!posix_memalign(&address, kPage, size), "the host is out of memory");
      counts.pinned += size;
    }
    pinned_blocks[(char*)address] = size;
    return {address, address, &release_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

void register_host(size_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_blocks[(char*)address] = bytes;
  counts.pinned += bytes;
}

void unregister_host(size_t address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned_blocks.find((char*)address);
  counts.pinned -= it->second;
  pinned_blocks.erase(it);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned_blocks.upper_bound((char*)address);
  if (it == pinned_blocks.begin()) return false;
  --it;
  return (char*)address < it->first + it->second;
}

void Unlocked::add(void* address) {
  if (!address) return;
  change_users(address, 1);
  addresses_.push_back(address);
}

Unlocked::~Unlocked() {
  for (void* address : addresses_) change_users(address, -1);
}

}  // namespace pretend

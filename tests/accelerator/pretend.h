// A pretend "cuda" device and a pretend "nccl" backend for a build of torch without CUDA.
//
// What code does wrong on a GPU, it does wrong here: it reads device memory from the host, looks at a copy before it has
// arrived, mixes up messages, waits in a circle. Numbers are those of the CPU. Nothing here is fast, and nothing runs at
// the same time as the host, but for the collectives.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace pretend {

// ── settings and counts ──
struct Settings {
  int devices = 2;           // how many GPUs this process sees
  bool guarded = true;       // device memory cannot be read or written by the host
  bool eager = true;         // one communicator for collectives and messages; false: one more for each pair of ranks
  double deadlock_s = 20;    // the process ends with status 86 when an operation has run so long
};
extern Settings settings;

struct Counts {
  std::atomic<int64_t> kernels{0};          // operations on the device, copies included
  std::atomic<int64_t> copies_to_host{0};
  std::atomic<int64_t> copies_to_device{0};
  std::atomic<int64_t> host_waits{0};       // times the host waited for the device
  std::atomic<int64_t> allocated{0}, peak{0};
  std::atomic<int64_t> pinned{0};           // host memory that the allocator of pinned memory holds, with what it keeps
};
extern Counts counts;

// ── memory ──
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void register_host(size_t address, size_t bytes);  // as cudaHostRegister does
void unregister_host(size_t address);

// Device memory that is accessible while this lives, as it is to a kernel.
class Unlocked {
 public:
  void add(void* address);
  ~Unlocked();

 private:
  std::vector<void*> addresses_;
};

// ── devices and streams ──
int current_device();
void set_current_device(int device);
c10::Device with_index(c10::Device device);  // the current device, where no number is given

// Something that a stream waits for, such as a collective. ``block`` returns when it has ended, or throws its error.
struct Pending {
  virtual ~Pending() = default;
  virtual void block() = 0;
};
void stream_waits_for(int device, std::shared_ptr<Pending> pending);  // the current stream of the device
std::vector<std::shared_ptr<Pending>> waited_for(int device);         // by its current stream
void before_kernel();  // the current stream of the current device gets what it waits for
// A copy to pinned memory, which arrives when somebody waits for the stream.
void arrive_later(const at::Tensor& host, const at::Tensor& value, int device);
void wait_for_current_stream(int device);
void wait_for_device(int device);

// ── tensors ──
at::Tensor to_host(const at::Tensor& tensor);                        // contiguous; neither counted nor waited for
void from_host(const at::Tensor& tensor, const at::Tensor& host);

}  // namespace pretend

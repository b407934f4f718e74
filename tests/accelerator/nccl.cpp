// A pretend NCCL: gloo underneath, NCCL's rules above.
//
// It takes tensors of the device alone. A communicator runs its operations one after the other in the order in which they
// were posted, messages included, whatever their tags; a send ends when its receiver has come. Ranks that meet with other
// operations, or with messages of other sizes, are an error that says what each rank wanted, where NCCL would hang or mix up
// bytes. ``wait()`` has the stream wait, not the host; with a timeout the host, and when it runs out the communicator is
// aborted. That a peer has died is not noticed. An operation that does not end within ``settings.deadlock_s`` ends the
// process, after all queues have been printed.
#include "pretend.h"
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace {
using namespace pretend;
using at::Tensor;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;

constexpr int kDeadlock = 86;
int rank_of_process = -1;

// ── one communicator: a queue, and the thread that works it off ──
class Ending final : public Pending {
 public:
  void end(std::string error = "", bool aborted = false) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ended_) return;
      ended_ = true, error_ = std::move(error), aborted_ = aborted;
    }
    changed_.notify_all();
  }
  bool ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_;
  }
  const std::string& error() const { return error_; }
  void check() const {
    if (!error_.empty()) C10_THROW_ERROR(DistBackendError, error_);
  }
  void block() override {
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (PyGILState_Check()) without_gil.emplace();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_; });
    if (!aborted_) check();  // else the stream goes on, with what happens to be in memory
  }
  bool block_for(std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, most, [&] { return ended_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false, aborted_ = false;
  std::string error_;
};

struct Operation {
  std::string name;
  std::function<void()> run;
  std::vector<std::shared_ptr<Pending>> after;  // what the stream waited for when it was posted
  std::shared_ptr<Ending> ending = std::make_shared<Ending>();
  Clock::time_point began{};
};

class Communicator {  // lives as long as the process, as its thread does
 public:
  explicit Communicator(std::string name) : name_(std::move(name)) {
    std::lock_guard<std::mutex> lock(all_mutex);
    all.push_back(this);
    std::thread([this] { work(); }).detach();
  }

  void post(std::shared_ptr<Operation> operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted_.empty()) C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted: " + aborted_);
    operations_.push_back(std::move(operation));
    posted_++;
    changed_.notify_all();
  }

  // What is queued fails, and what is posted from now on.
  void abort(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = why;
    for (auto& operation : operations_) operation->ending->end("NCCL communicator was aborted: " + why, true);
    operations_.clear();
  }

  static void print_all(std::ostream& out) {
    std::lock_guard<std::mutex> all_lock(all_mutex);
    for (auto* each : all) {
      std::lock_guard<std::mutex> lock(each->mutex_);
      if (each->operations_.empty()) continue;
      out << "[pretend nccl] rank " << rank_of_process << " communicator " << each->name_ << " (" << each->posted_
          << " so far):";
      size_t shown = 0;
      for (auto& operation : each->operations_) {
        if (shown++ == 12) break;
        out << (shown == 1 ? " running " : " queued ") << operation->name << ";";
      }
      if (each->operations_.size() > 12) out << " and " << each->operations_.size() - 12 << " more";
      out << "\n";
    }
  }

  static bool any_stuck() {
    std::lock_guard<std::mutex> all_lock(all_mutex);
    const auto long_ago = Clock::now() - std::chrono::milliseconds((int64_t)(settings.deadlock_s * 1000));
    for (auto* each : all) {
      std::lock_guard<std::mutex> lock(each->mutex_);
      if (!each->operations_.empty() && each->operations_.front()->began != Clock::time_point{} &&
          each->operations_.front()->began < long_ago)
        return true;
    }
    return false;
  }

 private:
  static inline std::mutex all_mutex;
  static inline std::vector<Communicator*> all;
  std::string name_, aborted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> operations_;
  int64_t posted_ = 0;

  void work() {
    for (;;) {
      std::shared_ptr<Operation> operation;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !operations_.empty(); });
        operation = operations_.front();
        operation->began = Clock::now();
      }
      std::string error;
      try {
        for (auto& pending : operation->after) pending->block();
        operation->run();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
      const bool is_death = error.find("onnection closed") != error.npos || error.find("onnection reset") != error.npos;
      if (is_death) operation->ending->block_for(std::chrono::hours(1));  // until it is aborted
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!operations_.empty() && operations_.front() == operation) operations_.pop_front();  // or it was aborted
      }
      operation->ending->end(error);
    }
  }
};

void watch_for_deadlocks() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([] {
      while (!Communicator::any_stuck()) std::this_thread::sleep_for(std::chrono::milliseconds(500));
      std::ostringstream text;
      text << "[pretend nccl] DEADLOCK on rank " << rank_of_process << ": an operation has run for "
           << settings.deadlock_s << " s\n";
      Communicator::print_all(text);
      std::cerr << text.str() << std::flush;
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // other ranks print theirs
      _exit(kDeadlock);
    }).detach();
  });
}

struct Posted final : c10d::Work {
  std::shared_ptr<Operation> operation;
  Communicator* communicator;
  Tensors outputs;
  int device;

  Posted(std::shared_ptr<Operation> o, Communicator* c, Tensors out, int on)
      : operation(std::move(o)), communicator(c), outputs(std::move(out)), device(on) {}
  bool isCompleted() override { return operation->ending->ended(); }
  bool isSuccess() const override { return operation->ending->error().empty(); }
  Tensors result() override { return outputs; }
  void synchronize() override { stream_waits_for(device, operation->ending); }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout == kNoTimeout) {
      if (operation->name == "barrier") operation->ending->block();  // the one for which the host waits
      if (isCompleted()) operation->ending->check();
      return true;
    }
    if (!operation->ending->block_for(timeout)) {
      const auto error = "[pretend nccl] Watchdog caught collective operation timeout: " + operation->name + " ran for " +
                         std::to_string(timeout.count()) + " milliseconds before timing out.";
      communicator->abort(error);
      C10_THROW_ERROR(DistBackendError, error);
    }
    operation->ending->check();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    operation->ending->block();
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

// ── a process group ──
Tensor flat_on_host(const Tensor& tensor) { return to_host(tensor).reshape({-1}); }
Tensor as_bytes(const Tensor& flat) { return flat.contiguous().view(at::kByte); }

void require_usable(const Tensor& tensor, const char* operation) {
  static const std::set<at::ScalarType> known{at::kChar, at::kByte, at::kBool, at::kInt, at::kLong, at::kHalf,
                                              at::kBFloat16, at::kFloat, at::kDouble, at::kFloat8_e5m2,
                                              at::kFloat8_e4m3fn};
  TORCH_CHECK(tensor.is_cuda(), operation, ": Tensors must be CUDA and dense");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), operation, ": Tensors must be contiguous");
  TORCH_CHECK_TYPE(known.count(tensor.scalar_type()),
                   "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
}

std::string described(const char* operation, const Tensor& tensor) {
  std::ostringstream text;
  text << operation << "(" << tensor.numel() << " x " << tensor.scalar_type() << ")";
  return text.str();
}

class PretendNccl : public c10d::Backend {
 public:
  using MakePair = std::function<Gloo(int)>;

  PretendNccl(Gloo gloo, int rank, int size, std::string name, MakePair make_pair)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)),
        main_(new Communicator(name_)), make_pair_(std::move(make_pair)) {
    watch_for_deadlocks();
  }
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return posted_; }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {
    main_->abort("abort() was called");
    for (auto& [peer, pair] : pairs_) pair.communicator->abort("abort() was called");
  }

  // ── collectives ──
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return each("allreduce", tensors, [=, this](const std::string& name, const Tensor& tensor) {
      meet(name, tensor.nbytes(), 1000 + (int)options.reduceOp.op_);
      from_host(tensor, reduced(flat_on_host(tensor), options.reduceOp));
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return each("broadcast", tensors, [=, this](const std::string& name, const Tensor& tensor) {
      meet(name, tensor.nbytes(), options.rootRank);
      auto bytes = as_bytes(flat_on_host(tensor));
      broadcast_on_host(bytes, options.rootRank);
      from_host(tensor, bytes.view(tensor.scalar_type()));
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return each("reduce", tensors, [=, this](const std::string& name, const Tensor& tensor) {
      meet(name, tensor.nbytes(), options.rootRank);
      const auto sum = reduced(flat_on_host(tensor), options.reduceOp);
      if (getRank() == options.rootRank) from_host(tensor, sum);
    });
  }
  Work _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    require_usable(input, "_allgather_base");
    require_usable(output, "_allgather_base");
    TORCH_CHECK(input.numel() * getSize() == output.numel(),
                "output tensor size must be equal to world_size times input tensor size");
    TORCH_CHECK(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    const auto name = described("allgather", input);
    return post(name, {input}, {output}, [=, this] {
      meet(name, input.nbytes(), -2);
      from_host(output, gathered(to_host(input)));
    });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const auto to = outputs[0];
    const auto input = inputs[0];
    require_usable(input, "allgather");
    for (auto& output : to) require_usable(output, "allgather");
    const auto name = described("allgather", input);
    return post(name, inputs, to, [=, this] {
      meet(name, input.nbytes(), -2);
      scatter_rows(gathered(to_host(input)), to);
    });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const auto from = inputs, to = outputs;
    const auto name = described("allgather_coalesced", inputs[0]);
    return post(name, inputs, outputs, [=, this] {
      for (size_t i = 0; i < from.size(); i++) {
        meet(name, from[i].nbytes(), -2);
        from_host(to[i], gathered(to_host(from[i])));
      }
    });
  }
  Work _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    require_usable(input, "_reduce_scatter_base");
    require_usable(output, "_reduce_scatter_base");
    const auto name = described("reduce_scatter", input);
    return post(name, {input}, {output}, [=, this] {
      meet(name, input.nbytes(), 2000 + (int)options.reduceOp.op_);
      keep_own_rows(reduced(flat_on_host(input), options.reduceOp), output);
    });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    Work last;
    for (size_t i = 0; i < inputs.size(); i++) last = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last;
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    const auto from = inputs[0];
    const auto output = outputs[0];
    const auto name = described("reduce_scatter", from[0]);
    return post(name, from, outputs, [=, this] {
      meet(name, from[0].nbytes(), 2000 + (int)options.reduceOp.op_);
      keep_own_rows(reduced(joined(from), options.reduceOp), output);
    });
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto to = outputs.empty() ? Tensors() : outputs[0];
    const auto input = inputs[0];
    const auto name = described("gather", input);
    return post(name, inputs, to, [=, this] {
      meet(name, input.nbytes(), options.rootRank);
      const auto all = gathered(to_host(input));
      if (getRank() == options.rootRank) scatter_rows(all, to);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto output = outputs[0];
    const auto from = inputs.empty() ? Tensors() : inputs[0];
    const auto name = described("scatter", output);
    return post(name, from, outputs, [=, this] {
      meet(name, output.nbytes(), options.rootRank);
      auto all = getRank() == options.rootRank
                     ? joined(from)
                     : at::empty({output.numel() * getSize()}, output.options().device(at::kCPU));
      auto bytes = as_bytes(all);
      broadcast_on_host(bytes, options.rootRank);
      keep_own_rows(bytes.view(output.scalar_type()), output);
    });
  }
  Work alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    const auto to = output, from = input;
    const auto name = described("alltoall", input);
    return post(name, {input}, {output}, [=, this, out = output_sizes, in = input_sizes]() mutable {
      meet(name, -1, -7);
      auto host = to_host(from), result = at::empty(to.sizes(), to.options().device(at::kCPU));
      gloo_->alltoall_base(result, host, out, in, {})->wait();
      from_host(to, result);
    });
  }
  Work barrier(const c10d::BarrierOptions&) override {
    return post("barrier", {}, {}, [=, this] { meet("barrier", 0, -3); });
  }

  // ── messages ──
  Work send(Tensors& tensors, int peer, int) override {
    const auto tensor = tensors[0];
    require_usable(tensor, "send");
    if (grouped_) return add_to_group(tensor, peer, true);
    const auto pair = pair_with(peer);
    return post_to(pair.communicator, described("send", tensor) + " to " + std::to_string(peer), tensors, {},
                   [=, this] { send_now(pair, tensor, 100, true); });
  }
  Work recv(Tensors& tensors, int peer, int) override {
    const auto tensor = tensors[0];
    require_usable(tensor, "recv");
    if (grouped_) return add_to_group(tensor, peer, false);
    const auto pair = pair_with(peer);
    return post_to(pair.communicator, described("recv", tensor) + " from " + std::to_string(peer), {}, tensors,
                   [=, this] { receive_now(pair, tensor, 100, true); });
  }
  void startCoalescing() override { grouped_.emplace(); }
  // All of a group at once: its sends do not wait for its receives.
  Work endCoalescing() override {
    auto group = std::move(*grouped_);
    grouped_.reset();
    const int device = group.device;
    auto name = "group[" + group.names + "]";
    return post_on(device, main_, name, group.outputs, [=, this] {
      for (auto& run : group.collectives) run();
      std::vector<std::thread> sends;
      std::vector<std::string> errors(group.messages.size());
      for (size_t i = 0; i < group.messages.size(); i++) {
        auto& [tensor, peer, is_send] = group.messages[i];
        if (!is_send) continue;
        sends.emplace_back([&, i] {
          try {
            send_now({main_, gloo_, group.messages[i].peer}, group.messages[i].tensor, 200, false);
          } catch (const std::exception& raised) {
            errors[i] = raised.what();
          }
        });
      }
      std::string error;
      try {
        for (auto& [tensor, peer, is_send] : group.messages)
          if (!is_send) receive_now({main_, gloo_, peer}, tensor, 200, false);
      } catch (const std::exception& raised) {
        error = raised.what();
      }
      for (auto& each : sends) each.join();
      for (auto& each : errors) error = error.empty() ? each : error;
      if (!error.empty()) C10_THROW_ERROR(DistBackendError, error);
    });
  }

  int64_t posted() const { return posted_; }

 private:
  struct Pair {
    Communicator* communicator;
    Gloo gloo;
    int peer;  // its rank in that group of gloo
  };
  struct Message {
    Tensor tensor;
    int peer;
    bool is_send;
  };
  struct Group {
    std::vector<Message> messages;
    std::vector<std::function<void()>> collectives;
    Tensors outputs;
    std::string names;
    int device = current_device();
  };
  Gloo gloo_;
  std::string name_;
  Communicator* main_;
  MakePair make_pair_;
  std::map<int, Pair> pairs_;
  std::optional<Group> grouped_;
  int64_t posted_ = 0;

  Work post(std::string name, const Tensors& inputs, const Tensors& outputs, std::function<void()> run) {
    if (!grouped_) return post_to(main_, std::move(name), inputs, outputs, std::move(run));
    posted_++;
    grouped_->names += name + ",";
    grouped_->collectives.push_back(std::move(run));
    grouped_->outputs.insert(grouped_->outputs.end(), outputs.begin(), outputs.end());
    grouped_->device = device_of(inputs, outputs);
    return nullptr;
  }
  static int device_of(const Tensors& inputs, const Tensors& outputs) {
    return !inputs.empty() ? inputs[0].device().index() : !outputs.empty() ? outputs[0].device().index() : current_device();
  }
  Work post_to(Communicator* to, std::string name, const Tensors& inputs, const Tensors& outputs,
               std::function<void()> run) {
    return post_on(device_of(inputs, outputs), to, std::move(name), outputs,
                   [run = std::move(run), inputs, outputs] { run(); });  // which keeps the tensors
  }
  Work post_on(int device, Communicator* to, std::string name, const Tensors& outputs, std::function<void()> run) {
    posted_++;
    auto operation = std::make_shared<Operation>();
    operation->name = std::move(name);
    operation->run = std::move(run);
    operation->after = waited_for(device);
    to->post(operation);
    return c10::make_intrusive<Posted>(operation, to, outputs, device);
  }
  template <class Run>
  Work each(const char* operation, const Tensors& tensors, Run run) {
    for (auto& tensor : tensors) require_usable(tensor, operation);
    const auto name = described(operation, tensors[0]);
    return post(name, tensors, tensors, [=] {
      for (auto& tensor : tensors) run(name, tensor);
    });
  }

  // Ranks tell each other what they are about to do, and fail if that differs.
  void meet(const std::string& what, int64_t bytes, int64_t kind) {
    constexpr int64_t kWords = 64, kText = 3;
    const auto length = std::min<size_t>(what.size(), (kWords - kText) * sizeof(int64_t));
    auto own = at::zeros({kWords}, at::kLong);
    auto* words = own.data_ptr<int64_t>();
    words[0] = bytes, words[1] = kind, words[2] = length;
    memcpy(words + kText, what.data(), length);
    const auto all = gathered(own);
    const auto* of = all.data_ptr<int64_t>();
    bool differ = false;
    for (int rank = 0; rank < getSize(); rank++)
      differ |= of[kWords * rank] != bytes || of[kWords * rank + 1] != kind;
    if (!differ) return;
    std::ostringstream text;
    text << "[pretend nccl] MIX-UP on communicator " << name_ << ", where NCCL would hang or mix bytes:";
    for (int rank = 0; rank < getSize(); rank++)
      text << " rank " << rank << " " << std::string((const char*)(of + kWords * rank + kText), of[kWords * rank + 2]) << ";";
    fail(text.str());
  }
  static void fail(const std::string& text) {
    std::cerr << text + "\n" << std::flush;
    C10_THROW_ERROR(DistBackendError, text);
  }

  Tensor gathered(const Tensor& host) {
    auto bytes = as_bytes(host.reshape({-1}));
    if (getSize() == 1) return host.reshape({-1});
    auto all = at::empty({bytes.numel() * getSize()}, at::kByte);
    if (all.numel()) gloo_->_allgather_base(all, bytes)->wait();
    return all.view(host.scalar_type());
  }
  void broadcast_on_host(Tensor& bytes, int64_t root) {
    if (getSize() == 1) return;
    Tensors tensors{bytes};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    gloo_->broadcast(tensors, options)->wait();
  }
  Tensor reduced(Tensor host, const c10d::ReduceOp& op) {
    auto kind = op;
    double factor = 1;
    if (op.op_ == c10d::ReduceOp::AVG) kind = c10d::ReduceOp::SUM, factor = 1.0 / getSize();
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      kind = c10d::ReduceOp::SUM;
      factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get())->double_factor;
    }
    TORCH_CHECK(op.op_ != c10d::ReduceOp::BAND && op.op_ != c10d::ReduceOp::BOR && op.op_ != c10d::ReduceOp::BXOR,
                "Cannot use ReduceOp.BAND/BOR/BXOR with NCCL");
    const auto dtype = host.scalar_type();
    if (dtype == at::kBFloat16 || dtype == at::kHalf) host = host.to(at::kFloat);  // one rounding, at the end
    if (dtype == at::kBool) host = host.to(at::kByte);
    if (getSize() > 1) {
      Tensors tensors{host};
      c10d::AllreduceOptions options;
      options.reduceOp = kind;
      gloo_->allreduce(tensors, options)->wait();
    }
    if (factor != 1) host = host.is_floating_point() ? host * factor : at::floor(host * factor).to(host.scalar_type());
    return dtype == at::kBool ? host.ne(0) : host.to(dtype);
  }
  static Tensor joined(const Tensors& tensors) {
    Tensors flat;
    for (auto& tensor : tensors) flat.push_back(flat_on_host(tensor));
    return at::cat(flat);
  }
  void scatter_rows(const Tensor& all, const Tensors& to) {
    for (int rank = 0; rank < getSize(); rank++) from_host(to[rank], all.narrow(0, rank * to[rank].numel(), to[rank].numel()));
  }
  void keep_own_rows(const Tensor& all, const Tensor& to) {
    from_host(to, all.narrow(0, getRank() * to.numel(), to.numel()));
  }

  Pair pair_with(int peer) {
    if (settings.eager) return {main_, gloo_, peer};
    auto it = pairs_.find(peer);
    if (it == pairs_.end()) {
      const auto [low, high] = std::minmax(getRank(), peer);
      auto communicator = new Communicator(name_ + " pair " + std::to_string(low) + "-" + std::to_string(high));
      it = pairs_.emplace(peer, Pair{communicator, make_pair_(peer), peer < getRank() ? 0 : 1}).first;
    }
    return it->second;
  }
  Work add_to_group(const Tensor& tensor, int peer, bool is_send) {
    grouped_->messages.push_back({tensor, peer, is_send});
    grouped_->names += described(is_send ? "send" : "recv", tensor) + (is_send ? " to " : " from ") + std::to_string(peer) + ",";
    grouped_->device = tensor.device().index();
    if (!is_send) grouped_->outputs.push_back(tensor);
    return nullptr;
  }
  // A message is its size, its bytes, and, if the sender waits for the receiver, an answer.
  static void send_now(const Pair& pair, const Tensor& tensor, int tag, bool answered) {
    auto bytes = as_bytes(flat_on_host(tensor));
    Tensors size{at::full({1}, (int64_t)bytes.numel(), at::kLong)}, data{bytes}, answer{at::zeros({1}, at::kLong)};
    pair.gloo->send(size, pair.peer, tag)->wait();
    if (bytes.numel()) pair.gloo->send(data, pair.peer, tag + 1)->wait();
    if (answered) pair.gloo->recv(answer, pair.peer, tag + 2)->wait();
  }
  void receive_now(const Pair& pair, const Tensor& tensor, int tag, bool answered) {
    Tensors size{at::zeros({1}, at::kLong)}, answer{at::zeros({1}, at::kLong)};
    pair.gloo->recv(size, pair.peer, tag)->wait();
    const auto bytes = size[0].item<int64_t>();
    Tensors data{at::empty({bytes}, at::kByte)};
    if (bytes) pair.gloo->recv(data, pair.peer, tag + 1)->wait();
    if (answered) pair.gloo->send(answer, pair.peer, tag + 2)->wait();
    if (bytes != (int64_t)tensor.nbytes())
      fail("[pretend nccl] MIX-UP on rank " + std::to_string(getRank()) + " of " + name_ + ": a receive of " +
           std::to_string(tensor.nbytes()) + " bytes got the next message in order, of " + std::to_string(bytes) +
           " bytes (NCCL would hang or mix bytes)");
    from_host(tensor, data[0].view(tensor.scalar_type()));
  }
};
}  // namespace

void bind_nccl(pybind11::module_& m) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");
  py::class_<PretendNccl, c10::intrusive_ptr<PretendNccl>, c10d::Backend>(m, "PretendNccl")
      .def(py::init([](Gloo gloo, int rank, int size, std::string name, py::function make_pair) {
        auto* kept = new py::function(make_pair);  // as long as the process
        return c10::make_intrusive<PretendNccl>(gloo, rank, size, name, [kept](int peer) {
          py::gil_scoped_acquire gil;
          return (*kept)(peer).cast<Gloo>();
        });
      }))
      .def_property_readonly("posted", &PretendNccl::posted);
  m.def("set_rank", [](int rank) { rank_of_process = rank; });
  m.def("queues", [] {
    std::ostringstream text;
    Communicator::print_all(text);
    return text.str();
  });
}

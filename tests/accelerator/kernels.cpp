// A device of torch's kind "privateuse1" whose memory is the host's and whose kernels are the CPU's. Tensors
// there are apart from CPU tensors as on any accelerator: an operator that gets both raises. `streams.h` finds
// what streams do to each other.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 4;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held{0}, peak{0};

// ---------------------------------------------------------------- memory

void release(void* data) {
  held -= static_cast<int64_t>(malloc_usable_size(data));
  streams::release(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes != 0) {
      TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "no memory");
      streams::allocated(data, bytes);
      int64_t now = held += static_cast<int64_t>(malloc_usable_size(data));
      int64_t most = peak;
      while (now > most && !peak.compare_exchange_weak(most, now)) {
      }
    }
    return {data, data, &release, c10::Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

// Memory of the host that copies need not wait for.
std::mutex pinned_lock;
std::map<uintptr_t, uintptr_t> pinned;  // first address of each, and the one after its last

void unpin(void* data) {
  std::lock_guard guard(pinned_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(data));
  std::free(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes != 0) {
      TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "no memory");
      std::lock_guard guard(pinned_lock);
      auto low = reinterpret_cast<uintptr_t>(data);
      pinned[low] = low + bytes;
    }
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Pinned pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard guard(pinned_lock);
  auto found = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  return found != pinned.begin() && reinterpret_cast<uintptr_t>(data) < (--found)->second;
}

// ---------------------------------------------------------------- devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(KIND, current);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "invalid device ordinal ", int(device.index()));
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams::current);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    streams::current = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void synchronizeDevice(c10::DeviceIndex) const override { device_synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int at = 0; at < DEVICES; ++at) made.push_back(at::make_generator<at::CPUGeneratorImpl>());
      return made;
    }();
    return all[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory.allocate(bytes);
    if (bytes != 0 && storage.nbytes() != 0)  // as work of the stream, but nothing here grows what has values
      std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------- operators

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// A CPU tensor of the same elements.
at::Tensor on_host(const at::Tensor& x) {
  if (!x.is_privateuseone()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions(x.scalar_type()));
}

// The bytes that a tensor spans.
size_t span(const at::Tensor& x) {
  if (x.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  return (last + 1) * x.element_size();
}

void use(const at::Tensor& x, bool writes, const std::string& by) {
  if (x.defined() && x.is_privateuseone())
    streams::use(x.const_data_ptr(), span(x), writes, x.is_floating_point(), by);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool async) {
  at::Tensor source = on_host(from), target = on_host(to);
  if (streams::unobserved) return target.copy_(source), to;
  streams::begin();
  use(from, false, "a copy");
  use(to, true, "a copy");
  bool crosses = from.is_privateuseone() != to.is_privateuseone();
  const at::Tensor& far = from.is_privateuseone() ? to : from;
  if (crosses && async && from.scalar_type() == to.scalar_type() && is_pinned(far.const_data_ptr())) {
    // the host's tensor is held: pinned memory is not used again before such copies are done
    streams::defer([source, target] { target.copy_(source); });
    if (target.is_floating_point()) target.fill_(std::numeric_limits<double>::quiet_NaN());
    return to;
  }
  target.copy_(source);
  if (crosses && !async) streams::host_waits(streams::of(streams::current));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& x) {
  streams::begin();
  use(x, false, "item");
  streams::host_waits(streams::of(streams::current));
  return on_host(x).item();
}

at::Tensor& set_storage(
    at::Tensor& x, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return x;
}

void record_stream(at::Tensor& x, at::Stream stream) {
  if (x.is_privateuseone()) streams::record(x.const_data_ptr(), stream.id());
}

void check(const std::string& name, const at::Tensor& x) {
  // other accelerators take index tensors of the host too, and single numbers anywhere
  static const std::set<std::string> mixed{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
  TORCH_CHECK(
      !x.defined() || x.is_privateuseone() || x.dim() == 0 || mixed.count(name) != 0,
      "expected all tensors on one device, but ", name, " got one of the host's: ", x.sizes());
}

// All tensors among values.
std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isList())
    for (const c10::IValue& one : value.toListRef())
      if (one.isTensor()) found.push_back(one.toTensor());
  return found;
}

void by_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const auto& arguments = op.schema().arguments();
  auto values = torch::jit::last(*stack, arguments.size());
  for (const auto& value : values)
    for (const at::Tensor& x : tensors_of(value)) check(name, x);
  if (streams::unobserved) return at::native::cpu_fallback(op, stack);
  streams::begin();
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    for (const at::Tensor& x : tensors_of(values[at])) use(x, alias != nullptr && alias->isWrite(), name);
  }
  streams::unobserved = true;  // the copies of the fallback are no work of their own
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    streams::unobserved = false;
    throw;
  }
  streams::unobserved = false;
  for (const auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    for (const at::Tensor& x : tensors_of(value)) use(x, true, name);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &at::native::resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

} // namespace

extern "C" {
void start() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int device() { return current; }
void set_device(int index) { Guard().setDevice({KIND, static_cast<c10::DeviceIndex>(index)}); }
void use_by_library(void* data, int64_t bytes, int writes, int floating, const char* by) {
  streams::begin();
  streams::use(data, bytes, writes != 0, floating != 0, by);
}
int64_t most_held() { return peak; }
void restart() { peak = held.load(); }
}

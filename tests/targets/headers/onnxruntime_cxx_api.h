// ONNX Runtime's C++ interface (https://onnxruntime.ai/docs/api/c/), as far as the programs of reports and pages use it:
// its Python package has the library and no headers. Names and types are the documented ones; what is called is the table
// of functions of the C interface, to whose end releases only add, so that a function's place never changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

enum OrtAllocatorType { OrtDeviceAllocator = 0, OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeCPU = -1, OrtMemTypeDefault = 0 };

namespace Ort {
namespace c {

using Function = void (*)();
struct Base {
  const Function* (*get_api)(uint32_t version);
  const char* (*get_version)();
};
extern "C" const Base* OrtGetApiBase();

enum Place {
  GetErrorMessage = 2,
  CreateEnv = 3,
  CreateSession = 7,
  Run = 9,
  CreateSessionOptions = 10,
  SetIntraOpNumThreads = 24,
  SessionGetInputName = 36,
  SessionGetOutputName = 37,
  CreateRunOptions = 39,
  CreateTensorWithDataAsOrtValue = 49,
  GetTensorMutableData = 51,
  GetTensorShapeElementCount = 64,
  GetTensorTypeAndShape = 65,
  CreateCpuMemoryInfo = 69,
  AllocatorFree = 76,
  GetAllocatorWithDefaultOptions = 78,
  ReleaseEnv = 92,
  ReleaseMemoryInfo = 94,
  ReleaseSession = 95,
  ReleaseValue = 96,
  ReleaseRunOptions = 97,
  ReleaseTensorTypeAndShapeInfo = 99,
  ReleaseSessionOptions = 100,
};

// The oldest version of the table that has all of these.
inline Function function(Place place) { return OrtGetApiBase()->get_api(1)[place]; }

template <typename... Arguments>
void call(Place place, Arguments... arguments) {
  void* status = reinterpret_cast<void* (*)(Arguments...)>(function(place))(arguments...);
  if (status) throw std::runtime_error(reinterpret_cast<const char* (*)(void*)>(function(GetErrorMessage))(status));
}

template <Place release>
struct Handle {
  void* held = nullptr;
  Handle() = default;
  Handle(Handle&& other) : held(std::exchange(other.held, nullptr)) {}
  ~Handle() {
    if (held) reinterpret_cast<void (*)(void*)>(function(release))(held);
  }
};

static_assert(sizeof(Handle<ReleaseValue>) == sizeof(void*), "an array of handles is one of pointers");

template <typename T>
constexpr int element_type();
template <>
constexpr int element_type<float>() { return 1; }
template <>
constexpr int element_type<int32_t>() { return 6; }
template <>
constexpr int element_type<int64_t>() { return 7; }

}  // namespace c

struct Env : c::Handle<c::ReleaseEnv> {
  Env() { c::call(c::CreateEnv, /*warning*/ 2, "", &held); }
};

struct SessionOptions : c::Handle<c::ReleaseSessionOptions> {
  SessionOptions() { c::call(c::CreateSessionOptions, &held); }
  SessionOptions& SetIntraOpNumThreads(int intra_op_num_threads) {
    c::call(c::SetIntraOpNumThreads, held, intra_op_num_threads);
    return *this;
  }
};

struct RunOptions : c::Handle<c::ReleaseRunOptions> {
  explicit RunOptions(std::nullptr_t) {}
  RunOptions() { c::call(c::CreateRunOptions, &held); }
};

struct MemoryInfo : c::Handle<c::ReleaseMemoryInfo> {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType mem_type) {
    MemoryInfo made;
    c::call(c::CreateCpuMemoryInfo, type, mem_type, &made.held);
    return made;
  }
};

struct AllocatorWithDefaultOptions {
  void* held = nullptr;
  AllocatorWithDefaultOptions() { c::call(c::GetAllocatorWithDefaultOptions, &held); }
};

struct AllocatedFree {
  void* allocator;
  void operator()(void* text) const { c::call(c::AllocatorFree, allocator, text); }
};
using AllocatedStringPtr = std::unique_ptr<char, AllocatedFree>;

struct TensorTypeAndShapeInfo : c::Handle<c::ReleaseTensorTypeAndShapeInfo> {
  size_t GetElementCount() const {
    size_t count = 0;
    c::call(c::GetTensorShapeElementCount, held, &count);
    return count;
  }
};

struct Value : c::Handle<c::ReleaseValue> {
  template <typename T>
  static Value CreateTensor(const MemoryInfo& info, T* data, size_t count, const int64_t* shape, size_t shape_len) {
    Value made;
    c::call(c::CreateTensorWithDataAsOrtValue, info.held, static_cast<void*>(data), count * sizeof(T), shape, shape_len,
            c::element_type<T>(), &made.held);
    return made;
  }
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const {
    TensorTypeAndShapeInfo made;
    c::call(c::GetTensorTypeAndShape, held, &made.held);
    return made;
  }
  template <typename T>
  const T* GetTensorData() const {
    void* data = nullptr;
    c::call(c::GetTensorMutableData, held, &data);
    return static_cast<const T*>(data);
  }
};

struct Session : c::Handle<c::ReleaseSession> {
  Session(const Env& env, const char* model_path, const SessionOptions& options) {
    c::call(c::CreateSession, env.held, model_path, options.held, &held);
  }
  AllocatedStringPtr GetInputNameAllocated(size_t index, const AllocatorWithDefaultOptions& allocator) const {
    return name(c::SessionGetInputName, index, allocator);
  }
  AllocatedStringPtr GetOutputNameAllocated(size_t index, const AllocatorWithDefaultOptions& allocator) const {
    return name(c::SessionGetOutputName, index, allocator);
  }
  std::vector<Value> Run(const RunOptions& run_options, const char* const* input_names, const Value* input_values,
                         size_t input_count, const char* const* output_names, size_t output_count) {
    std::vector<Value> found(output_count);
    c::call(c::Run, held, run_options.held, input_names, reinterpret_cast<const void* const*>(input_values),
            input_count, output_names, output_count, reinterpret_cast<void**>(found.data()));
    return found;
  }

 private:
  AllocatedStringPtr name(c::Place place, size_t index, const AllocatorWithDefaultOptions& allocator) const {
    char* text = nullptr;
    c::call(place, held, index, allocator.held, &text);
    return {text, AllocatedFree{allocator.held}};
  }
};

}  // namespace Ort

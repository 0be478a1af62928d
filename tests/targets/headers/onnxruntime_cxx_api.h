// Declarations of ONNX Runtime's C++ interface (https://onnxruntime.ai/docs/api/c/), as far as a report's program
// uses it: its Python package brings no headers. They are enough to check a program's syntax and types, not to link it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

enum OrtAllocatorType { OrtDeviceAllocator, OrtArenaAllocator };
enum OrtMemType { OrtMemTypeCPU, OrtMemTypeDefault };

namespace Ort {

struct Env {
  Env();
};

struct SessionOptions {
  SessionOptions();
};

struct RunOptions {
  RunOptions();
};

struct MemoryInfo {
  static MemoryInfo CreateCpu(OrtAllocatorType type, OrtMemType mem_type);
};

struct TensorTypeAndShapeInfo {
  size_t GetElementCount() const;
};

struct Value {
  Value(Value&&) = default;
  Value(const Value&) = delete;
  template <typename T>
  static Value CreateTensor(const MemoryInfo& info, T* data, size_t count, const int64_t* shape, size_t shape_len);
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
};

struct Session {
  Session(const Env& env, const char* model_path, const SessionOptions& options);
  std::vector<Value> Run(const RunOptions& run_options, const char* const* input_names, const Value* input_values,
                         size_t input_count, const char* const* output_names, size_t output_count);
};

}  // namespace Ort

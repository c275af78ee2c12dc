// A tensor's bytes as they were at one moment: without autograd history, and
// with the version they had.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <string>

namespace lowtide::base {

// `tensor` without its autograd history, on the same storage and version
// counter.
at::Tensor without_history(const at::Tensor& tensor);

// `tensor`'s bytes as a plain strided tensor of another geometry and dtype,
// without history, on the same version counter.
at::Tensor over_bytes(const at::Tensor& tensor, at::ScalarType dtype,
                      at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::int64_t offset);

// A version counter and where it stood.
class SeenVersion {
 public:
  explicit SeenVersion(const at::Tensor& tensor);
  // Tensors made in inference mode have no counter and never change.
  bool changed() const;
  std::uint32_t seen() const { return version_; }
  std::uint32_t now() const;
  void see_again() { version_ = now(); }
  // Throws the lowtide::Error of `who`, who expected `what` at the version that
  // was seen; `as_seen`: when that was.
  [[noreturn]] void throw_modified(const std::string& who,
                                   const std::string& what,
                                   const std::string& as_seen,
                                   const std::string& next_step) const;

 private:
  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
};

}  // namespace lowtide::base

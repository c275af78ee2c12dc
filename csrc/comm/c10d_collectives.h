// Collectives over a c10d process group: gloo, nccl, fake or any other backend
// with the coalesced calls.  NCCL's run on a wire (wire.h), others where their
// backend puts them.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "comm/borrowed_group.h"
#include "comm/collectives.h"

namespace lowtide::comm {

class Wire;

class C10dCollectives final : public Collectives {
 public:
  // For tensors on `device`.  Throws lowtide::InvalidArgument when the group
  // has no backend for its type.
  C10dCollectives(std::shared_ptr<BorrowedGroup> group, c10::Device device);
  ~C10dCollectives() override;

  std::int64_t rank() const override { return group_->rank(); }
  std::int64_t size() const override { return group_->size(); }
  std::string backend() const override { return backend_; }
  const std::shared_ptr<BorrowedGroup>& group() const { return group_; }

  std::unique_ptr<Pending> all_gather(std::vector<at::Tensor>& outs,
                                      std::vector<at::Tensor>& ins,
                                      const std::string& label) override;
  std::unique_ptr<Pending> reduce_scatter(at::Tensor& out, at::Tensor& in,
                                          Reduction reduction,
                                          const std::string& label) override;
  std::unique_ptr<Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      Reduction reduction, const std::string& label) override;
  std::unique_ptr<Pending> all_reduce(at::Tensor& tensor, Reduction reduction,
                                      const std::string& label) override;
  std::unique_ptr<Pending> all_to_all(at::Tensor& out, at::Tensor& in,
                                      const std::string& label) override;

  std::vector<std::int64_t> from_rank_zero(std::vector<std::int64_t> values,
                                           const std::string& label) override;

 private:
  class Work;
  template <typename Issue>
  void start_list(Work& work, Issue&& issue);
  // Whether the backend runs a call on a stream of its own, if any.
  bool async() const { return wire_ == nullptr; }

  std::shared_ptr<BorrowedGroup> group_;
  c10::Device device_;
  std::string backend_;
  std::shared_ptr<Wire> wire_;  // null but for NCCL
  bool gathers_lists_;          // see [Note: Lists on gloo]
  bool groups_lists_;           // see [Note: Lists on nccl2]
};

}  // namespace lowtide::comm

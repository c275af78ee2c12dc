// FSDP2's `AllGather` and `ReduceScatter` objects in place of a process group's
// own collectives.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/c10d_collectives.h"
#include "comm/collectives.h"
#include "comm/wire.h"

namespace lowtide::python {

// Everything goes to `base` but what an object is given for.  An object
// allocates one flat input and one flat output (`allocate`) and runs on them
// (`__call__`), under the GIL.  It may run on the current stream, which is a
// wire (wire.h) on a device with streams, or return a Work.
class CustomCollectives final : public comm::Collectives {
 public:
  CustomCollectives(std::shared_ptr<comm::C10dCollectives> base,
                    pybind11::object all_gather,
                    pybind11::object reduce_scatter);
  ~CustomCollectives() override;

  std::int64_t rank() const override { return base_->rank(); }
  std::int64_t size() const override { return base_->size(); }
  std::string backend() const override { return base_->backend(); }

  std::unique_ptr<comm::Pending> all_gather(std::vector<at::Tensor>& outs,
                                            std::vector<at::Tensor>& ins,
                                            const std::string& label) override;
  std::unique_ptr<comm::Pending> reduce_scatter(
      at::Tensor& out, at::Tensor& in, comm::Reduction reduction,
      const std::string& label) override;
  std::unique_ptr<comm::Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      comm::Reduction reduction, const std::string& label) override;
  std::unique_ptr<comm::Pending> all_reduce(at::Tensor& tensor,
                                            comm::Reduction reduction,
                                            const std::string& label) override;
  std::unique_ptr<comm::Pending> all_to_all(at::Tensor& out, at::Tensor& in,
                                            const std::string& label) override;
  std::vector<std::int64_t> from_rank_zero(std::vector<std::int64_t> values,
                                           const std::string& label) override;

 private:
  at::Tensor allocate(const pybind11::object& object, std::int64_t numel,
                      const at::Tensor& like) const;
  // Null on a device without streams.
  std::shared_ptr<comm::Wire> wire(const at::Tensor& like);

  std::shared_ptr<comm::C10dCollectives> base_;
  std::shared_ptr<comm::Wire> wire_;  // made when first used
  pybind11::object all_gather_;       // None: base's
  pybind11::object reduce_scatter_;   // None: base's
};

}  // namespace lowtide::python

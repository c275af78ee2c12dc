// One process stands for all ranks: collectives are computed from what a
// function says the other ranks would send, every call is recorded, and the
// ScriptedRuntime learns the edges a backend with streams (NCCL) would make:
//
//   issue     the wire waits for the current stream, reads the inputs and
//             writes the outputs
//   wait(), abandon()
//             the current stream waits for that point of the wire
//
// Results appear in the outputs when the call is waited for; until then the
// outputs are NaN, so that a missing wait also shows in the values.  Sums are
// the left fold over ranks r - 1, r - 2, ..., r + 1, r (r owns the slice),
// gloo's order.
//
// Not thread-safe.
#pragma once

#include <functional>
#include <optional>

#include "comm/collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::comm {

class RecordingCollectives final : public Collectives {
 public:
  // Which input of which rank is asked for.
  struct Request {
    Kind kind;
    std::string label;
    std::size_t index;  // in the list
    std::int64_t rank;
  };
  // What that rank passes where this one passes `mine`: same size and dtype.
  using Peer =
      std::function<at::Tensor(const Request& request, const at::Tensor& mine)>;

  struct Call {
    Kind kind = Kind::all_gather;
    std::string label;
    bool coalesced = true;  // false only for reduce_scatter
    Reduction reduction = Reduction::sum;
    at::ScalarType dtype = at::ScalarType::Undefined;
    std::vector<std::int64_t> full_bytes = {};  // of tensors with elements
    device::Stream issued_from = device::Stream::compute;
    device::EntryId start = 0;  // its entry on the wire
    std::optional<device::Stream> waited_from = {};
  };

  // Without `peer` all ranks pass what this one passes.
  RecordingCollectives(std::int64_t rank, std::int64_t size,
                       std::shared_ptr<device::ScriptedRuntime> runtime,
                       Peer peer = {});
  // Pending calls may outlive this object.
  ~RecordingCollectives() override;

  std::int64_t rank() const override;
  std::int64_t size() const override;
  std::string backend() const override { return "recording"; }

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

  // This process stands for rank 0 too: returns `values`.
  std::vector<std::int64_t> from_rank_zero(std::vector<std::int64_t> values,
                                           const std::string& label) override;

  // Oldest first.
  const std::vector<Call>& calls() const;

  // The next call of this kind and label fails in wait(), as when a peer dies.
  void fail_next(Kind kind, std::string label, std::string cause);

 private:
  class Work;
  struct State;
  std::unique_ptr<Pending> issue(Call call, const std::vector<at::Tensor>& outs,
                                 const std::vector<at::Tensor>& ins);

  std::shared_ptr<State> state_;
};

}  // namespace lowtide::comm

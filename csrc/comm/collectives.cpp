#include "comm/collectives.h"

#include "base/exception_text.h"
#include "comm/first_failure.h"

namespace lowtide::comm {

std::string failure_text(const std::string& cause, std::int64_t rank,
                         std::int64_t size) {
  const auto first = first_failure();
  return base::concat(base::on_rank(cause, rank, size),
                      first.empty() ? "" : "; ", first);
}

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::all_gather:
      return "all-gather";
    case Kind::reduce_scatter:
      return "reduce-scatter";
    case Kind::all_reduce:
      return "all-reduce";
    case Kind::broadcast:
      return "broadcast";
    case Kind::all_to_all:
      return "all-to-all";
  }
  LOWTIDE_INVARIANT(false, "a collective has a name");
}

Error collective_failed(Kind kind, const std::string& label,
                        const std::exception& cause, std::int64_t rank,
                        std::int64_t size) {
  return Error(base::error_text(
      label, base::concat("the ", kind_name(kind), " to finish on all ranks"),
      failure_text(base::concat("'", base::exception_text(cause), "'"), rank,
                   size),
      "Look at the log of the rank that failed first; then call "
      "lowtide.abort_step() or restart from the last checkpoint."));
}

void Collectives::count(Kind kind, std::int64_t full_bytes) {
  const std::int64_t trips = kind == Kind::all_reduce ? 2 : 1;
  Count& counter = counters_[static_cast<std::size_t>(kind)];
  counter.calls += 1;
  counter.wire_bytes += trips * (size() - 1) * full_bytes / size();
}

}  // namespace lowtide::comm

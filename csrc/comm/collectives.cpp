#include "comm/collectives.h"

#include <c10/util/Exception.h>

namespace lowtide::comm {
namespace {

std::string first_line(const std::exception& cause) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&cause);
  const std::string text = torch_error != nullptr
                               ? torch_error->what_without_backtrace()
                               : cause.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

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
      base::on_rank(base::concat("'", first_line(cause), "'"), rank, size),
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

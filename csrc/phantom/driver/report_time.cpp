// What programs ask of the dry driver's clock
// (lowtide/phantom/dry/timekeeper.py).
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "phantom/driver/timekeeper.h"
#include "phantom/time/exposure.h"
#include "phantom/time/figures.h"

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

using namespace lowtide::dry;

extern "C" {

struct lowtide_dry_span {
  std::int64_t kind;  // phantom::SpanKind
  std::int64_t stream;
  double begin, end, issued, flops, bytes;
  const char* name;
};

LOWTIDE_DRY_API int lowtide_dry_keeps_time() { return timekeeper().runs(); }
// False while time is kept already.
LOWTIDE_DRY_API int lowtide_dry_start_time(const double* figures,
                                           std::size_t count) {
  return timekeeper().start(lowtide::phantom::machine_of({figures, count}));
}
LOWTIDE_DRY_API void lowtide_dry_stop_time() { timekeeper().stop(); }
LOWTIDE_DRY_API void lowtide_dry_mark_phase(const char* name) {
  timekeeper().mark(name);
}
// A moment on the default stream, whose time can be asked for at any time.
LOWTIDE_DRY_API std::int64_t lowtide_dry_record_moment() {
  return timekeeper().probe();
}
LOWTIDE_DRY_API double lowtide_dry_time_of(std::int64_t moment) {
  auto* kept = timekeeper().kept();
  // Moments are numbered from 1 on; 0 is of no timeline.
  return kept == nullptr || moment == 0 ? 0 : kept->time_of(moment);
}

// The calling thread's operators: [Note: Time of operators].
LOWTIDE_DRY_API void lowtide_dry_enter_operator(const char* name) {
  timekeeper().enter(name);
}
LOWTIDE_DRY_API void lowtide_dry_leave_operator(double flops, double bytes,
                                                int rate, int is_attention) {
  timekeeper().leave({flops, bytes, static_cast<lowtide::phantom::Rate>(rate),
                      is_attention != 0});
}

// Of the timeline that ended last; valid until the next call.
LOWTIDE_DRY_API std::int64_t lowtide_dry_read_spans(
    const lowtide_dry_span** spans) {
  static std::vector<lowtide_dry_span> read;
  read.clear();
  if (const auto* kept = timekeeper().kept()) {
    for (const auto& span : kept->spans()) {
      read.push_back({static_cast<std::int64_t>(span.kind), span.stream,
                      span.begin, span.end, span.issued, span.flops, span.bytes,
                      span.name.data()});
    }
  }
  *spans = read.data();
  return static_cast<std::int64_t>(read.size());
}
// Names are in `names`, one behind the other, each with its zero.
LOWTIDE_DRY_API std::int64_t lowtide_dry_read_phases(const double** begins,
                                                     const char** names) {
  static std::vector<double> times;
  static std::string text;
  times.clear();
  text.clear();
  if (const auto* kept = timekeeper().kept()) {
    for (const auto& mark : kept->marks()) {
      times.push_back(mark.begin);
      text += mark.phase;
      text += '\0';
    }
  }
  *begins = times.data();
  *names = text.c_str();
  return static_cast<std::int64_t>(times.size());
}
// Seven figures, in the order of phantom::Usage.
LOWTIDE_DRY_API void lowtide_dry_usage(double begin, double end,
                                       std::int64_t compute, double* figures) {
  const auto* kept = timekeeper().kept();
  if (kept == nullptr) return;
  const auto found =
      lowtide::phantom::usage(kept->spans(), compute, begin, end);
  for (const double figure :
       {found.seconds, found.compute, found.other_kernels, found.communication,
        found.exposed, found.other_waits, found.idle}) {
    *figures++ = figure;
  }
}

}  // extern "C"

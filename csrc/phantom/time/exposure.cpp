#include "phantom/time/exposure.h"

#include <algorithm>
#include <utility>

namespace lowtide::phantom {
namespace {

using Interval = std::pair<double, double>;
using Intervals = std::vector<Interval>;

// Disjoint and in order.
Intervals united(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end());
  Intervals result;
  for (const auto& interval : intervals) {
    if (!result.empty() && interval.first <= result.back().second) {
      result.back().second = std::max(result.back().second, interval.second);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

double length(const Intervals& disjoint) {
  double total = 0;
  for (const auto& [begin, end] : disjoint) total += end - begin;
  return total;
}

// Both disjoint and in order.
double overlap(const Intervals& a, const Intervals& b) {
  double total = 0;
  auto x = a.begin();
  auto y = b.begin();
  while (x != a.end() && y != b.end()) {
    const double begin = std::max(x->first, y->first);
    const double end = std::min(x->second, y->second);
    if (end > begin) total += end - begin;
    (x->second < y->second ? x : y)++;
  }
  return total;
}

}  // namespace

Usage usage(const std::vector<Span>& spans, TimedStream compute, double begin,
            double end) {
  Intervals kernels, others, collectives, held_up;
  for (const Span& span : spans) {
    const Interval cut(std::max(span.begin, begin), std::min(span.end, end));
    if (cut.second <= cut.first) continue;
    const bool here = span.stream == compute;
    if (span.kind == SpanKind::kernel || span.kind == SpanKind::transfer) {
      (here ? kernels : others).push_back(cut);
    }
    if (span.kind == SpanKind::collective) {
      collectives.push_back(cut);
      if (here) held_up.push_back(cut);
    }
    if (span.kind == SpanKind::wait && here) held_up.push_back(cut);
  }
  collectives = united(std::move(collectives));
  held_up = united(std::move(held_up));
  Usage found;
  found.seconds = end - begin;
  found.compute = length(united(std::move(kernels)));
  found.other_kernels = length(united(std::move(others)));
  found.communication = length(collectives);
  found.exposed = overlap(collectives, held_up);
  found.other_waits = length(held_up) - found.exposed;
  found.idle = found.seconds - found.compute - length(held_up);
  return found;
}

}  // namespace lowtide::phantom

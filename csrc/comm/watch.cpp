#include "comm/watch.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <iomanip>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/check.h"
#include "comm/first_failure.h"

namespace lowtide::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr auto kBetweenLooks = 1s;
constexpr auto kBetweenQuestions = 5s;
constexpr milliseconds kMostPatience = 10s;  // no step waits for a peer so long
// A process that ends does not wait longer for the thread.
constexpr auto kLongestLook = 1s;

// By the wall's clock: waiting by the steady one asks for a newer C library
// than wheels may need.
std::chrono::system_clock::time_point after(milliseconds time) {
  return std::chrono::system_clock::now() + time;
}

std::string size_text(std::int64_t bytes) {
  constexpr std::int64_t kMega = 1'000'000;
  if (bytes < kMega / 10) return base::concat(bytes, " bytes");
  std::ostringstream out;
  out << std::fixed << std::setprecision(1)
      << static_cast<double>(bytes) / kMega << " MB";
  return out.str();
}

std::int64_t whole_seconds(IssuedCalls::Time::duration time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time).count();
}

std::string text_of(const Sight& sight, IssuedCalls::Time now,
                    const std::string& first_failure) {
  const auto group =
      sight.error.empty()
          ? base::concat("its group's timeout is ",
                         whole_seconds(sight.timeout), " s")
          : base::concat("its group has failed (", sight.error, ")");
  const auto first =
      first_failure.empty() ? "" : base::concat("; ", first_failure);
  if (!sight.call) {
    return base::error_text(
        "collectives", "a group without an error",
        base::concat(base::on_rank(sight.error, sight.rank, sight.size),
                     "; all that lowtide issued on it has finished", first),
        "Look at the log of the rank that failed first, and at other "
        "collectives on that group.");
  }
  const auto& call = *sight.call;
  const auto age =
      base::concat("it unfinished ", whole_seconds(now - call.issued),
                   " s after it was issued");
  return base::error_text(
      call.label,
      base::concat("the ", kind_name(call.kind), " of ", size_text(call.bytes),
                   " to finish on all ranks"),
      base::concat(
          base::on_rank(age, sight.rank, sight.size), "; ", call.behind,
          " more were issued behind it; ",
          call.maybe_earlier ? "an earlier one may be the first; " : "", group,
          first),
      "Look at the log of the rank that failed first, or where a rank is that "
      "has not come to it (py-spy dump).");
}

bool is_due(const Sight& sight, IssuedCalls::Time now) {
  return !sight.error.empty() ||
         (sight.call && now - sight.call->issued >= almost(sight.timeout));
}

class Watcher {
 public:
  void add(const std::shared_ptr<Watched>& watched) {
    const std::scoped_lock lock(mutex_);
    watched_.push_back(watched);
    if (runs_ || stopped_) return;
    runs_ = true;
    std::thread([this] { run(); }).detach();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    changed_.wait_until(lock, after(kLongestLook), [this] { return !runs_; });
  }

 private:
  void run() {
    prctl(PR_SET_NAME, "lowtide_watch");
    Complaints complaints(first_failure_aside);
    std::unique_lock lock(mutex_);
    while (!stopped_ && !watched_.empty()) {
      changed_.wait_until(lock, after(kBetweenLooks));
      if (stopped_) break;
      const auto all = held();
      lock.unlock();
      look_at(all, complaints);
      lock.lock();
    }
    runs_ = false;
    changed_.notify_all();
  }

  std::vector<std::shared_ptr<Watched>> held() {
    std::vector<std::shared_ptr<Watched>> all;
    std::erase_if(watched_, [&](const auto& weak) {
      auto one = weak.lock();
      if (one) all.push_back(std::move(one));
      return weak.expired();
    });
    return all;
  }

  static void look_at(const std::vector<std::shared_ptr<Watched>>& all,
                      Complaints& complaints) {
    const auto now = std::chrono::steady_clock::now();
    std::vector<Sight> sights;
    for (const auto& one : all) {
      if (auto sight = one->look(now)) sights.push_back(*std::move(sight));
    }
    for (const auto& line : complaints.about(std::move(sights), now)) {
      std::fputs((line + "\n").c_str(), stderr);
      std::fflush(stderr);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Watched>> watched_;
  bool runs_ = false;
  bool stopped_ = false;
};

// Never destroyed, as its thread may outlive what ends with the process.
Watcher& watcher() {
  static auto* const watcher = new Watcher();
  return *watcher;
}

// Ends the thread before libraries that it calls are gone.  A forked process
// has none.
class StopAtExit {
 public:
  ~StopAtExit() {
    if (getpid() == process_) watcher().stop();
  }

 private:
  const pid_t process_ = getpid();
};

}  // namespace

milliseconds patience(milliseconds timeout) {
  return std::min(kMostPatience, timeout / 4);
}

milliseconds almost(milliseconds timeout) {
  const auto before = std::clamp<milliseconds>(timeout / 10, 2s, 60s);
  return std::max(timeout - before, timeout / 2);
}

Complaints::Complaints(std::function<std::string()> first_failure)
    : ask_(std::move(first_failure)) {}

bool Complaints::hears_of_failure(Time now) {
  if (!failure_.empty() || (asked_ && now - *asked_ < kBetweenQuestions)) {
    return false;
  }
  asked_ = now;
  failure_ = ask_();
  return !failure_.empty();
}

std::vector<std::string> Complaints::about(std::vector<Sight> sights,
                                           Time now) {
  if (sights.empty()) return {};
  const bool heard = hears_of_failure(now);
  const bool due =
      std::any_of(sights.begin(), sights.end(),
                  [&](const Sight& sight) { return is_due(sight, now); });
  if (!heard && !due) return {};
  static constexpr auto kNone = IssuedCalls::Time::max();
  std::stable_sort(sights.begin(), sights.end(),
                   [](const Sight& one, const Sight& other) {
                     return (one.call ? one.call->issued : kNone) <
                            (other.call ? other.call->issued : kNone);
                   });
  std::vector<std::string> lines;
  for (const auto& sight : sights) {
    constexpr auto kNoCall = ~std::uint64_t{0};
    const auto number = sight.call ? sight.call->number : kNoCall;
    const bool is_new = said_.emplace(sight.communicator, number).second;
    if (is_new || (heard && sight.call)) {
      lines.push_back(text_of(sight, now, failure_));
    }
  }
  return lines;
}

void watch(const std::shared_ptr<Watched>& watched) {
  static const StopAtExit stop_at_exit;
  watcher().add(watched);
}

}  // namespace lowtide::comm

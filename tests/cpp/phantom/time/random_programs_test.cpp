// Whatever a program does, nothing happens before its causes, and when the
// simulation is asked changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "phantom/time/device_fixture.h"
#include "phantom/time/simulation.h"

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

constexpr int kNumStreams = 4, kNumCommunicators = 2, kNumPrograms = 300;

enum class Do : std::uint8_t {
  kernel,
  transfer,
  collective,
  record,
  wait,
  spend,
  synchronize_event,
  synchronize_stream,
  prioritize,
  mark,
};

struct Step {
  Do what = Do::spend;
  TimedStream stream = 0;
  double seconds = 0;
  std::int64_t number = 0;  // blocks, communicator, event, priority, direction
  CollectiveCost cost;
};

// Few figures, so that many things happen at the same time.
std::vector<Step> random_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int most) {
    return static_cast<int>(random() % static_cast<unsigned>(most));
  };
  std::vector<Step> program;
  std::int64_t num_events = 0;
  for (int i = 0; i < 60; ++i) {
    Step step;
    const int what = below(20);
    step.stream = below(kNumStreams);
    step.seconds = 0.5 * below(8);
    step.number = below(5) == 0 ? 0 : 50 << below(6);
    if (what < 6) {
      step.what = Do::kernel;
    } else if (what < 8) {
      step.what = Do::transfer;
      step.number = below(2);
    } else if (what < 11) {
      step.what = Do::collective;
      step.number = below(kNumCommunicators);
      step.cost.seconds = step.seconds;
      step.cost.channels = 10 * below(12);
      step.cost.traffic = step.seconds * 0.125 * below(4);
      step.cost.link = static_cast<Link>(below(3));
      step.cost.link_seconds = step.seconds * 0.5 * below(3);
    } else if (what < 13) {
      step.what = Do::record;
      ++num_events;
    } else if (what < 15) {
      step.what = Do::wait;
      step.number = below(static_cast<int>(num_events) + 1);
    } else if (what < 17) {
      step.what = Do::spend;
    } else if (what == 17) {
      step.what =
          below(2) == 0 ? Do::synchronize_event : Do::synchronize_stream;
      step.number = below(static_cast<int>(num_events) + 1);
    } else if (what == 18) {
      step.what = Do::prioritize;
      step.number = below(3) - 1;
    } else {
      step.what = Do::mark;
    }
    program.push_back(step);
  }
  return program;
}

Machine machine() {
  Machine m = round_machine();
  m.accelerator.kernel_floor = 0.25;
  m.accelerator.block_seconds = 0.75;
  return m;
}

// When the simulation is asked for times in between.
enum class Asked : std::uint8_t { never, of_each_event, after_each_step };

void play(const Step& step, Simulation& device, std::string_view name) {
  switch (step.what) {
    case Do::kernel: {
      const Ticket ticket = device.kernel(step.stream, name, step.number);
      const bool moves = step.number % 100 == 0;
      EXPECT_TRUE(device.tell(
          ticket, {.flops = step.seconds, .bytes = moves ? 0.75 : 0}));
      break;
    }
    case Do::transfer:
      device.transfer(step.stream, name, step.seconds,
                      static_cast<Direction>(step.number));
      break;
    case Do::collective:
      device.collective(step.stream, step.number, name, step.cost);
      break;
    case Do::record:
      device.record(step.stream);
      break;
    case Do::wait:
      device.wait(step.stream, step.number);
      break;
    case Do::spend:
      device.spend(step.seconds);
      break;
    case Do::synchronize_event:
      device.synchronize_event(step.number);
      break;
    case Do::synchronize_stream:
      device.synchronize_event(device.record(step.stream));
      break;
    case Do::prioritize:
      device.set_priority(step.stream, static_cast<int>(step.number));
      break;
    case Do::mark:
      device.mark(std::string(name), step.stream);
      break;
  }
}

Simulation played(const std::vector<Step>& program,
                  const std::vector<std::string>& names, Asked asked) {
  Simulation device(machine());
  EventNumber num_events = 0;
  for (std::size_t i = 0; i < program.size(); ++i) {
    const Do what = program[i].what;
    play(program[i], device, names[i]);
    const bool is_event = what == Do::record || what == Do::synchronize_stream;
    num_events += is_event ? 1 : 0;
    if (num_events > 0 && (asked == Asked::after_each_step ||
                           (asked == Asked::of_each_event && is_event))) {
      device.time_of(static_cast<EventNumber>(i) % num_events + 1);
    }
  }
  device.finish();
  return device;
}

// Stops at the first program that fails.
void for_each_program(
    const std::function<void(const std::vector<Step>&,
                             const std::vector<std::string>&)>& check) {
  for (unsigned seed = 0; seed < kNumPrograms; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto program = random_program(seed);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < program.size(); ++i) {
      names.push_back(std::to_string(i));
    }
    check(program, names);
    if (::testing::Test::HasFailure()) return;
  }
}

void expect_same(const Simulation& a, const Simulation& b) {
  EXPECT_EQ(a.host(), b.host());
  ASSERT_EQ(a.spans().size(), b.spans().size());
  for (std::size_t i = 0; i < a.spans().size(); ++i) {
    const Span &x = a.spans()[i], &y = b.spans()[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.stream, y.stream);
    EXPECT_EQ(x.begin, y.begin) << x.name;  // to the bit
    EXPECT_EQ(x.end, y.end) << x.name;
  }
  ASSERT_EQ(a.marks().size(), b.marks().size());
  for (std::size_t i = 0; i < a.marks().size(); ++i) {
    EXPECT_EQ(a.marks()[i].begin, b.marks()[i].begin);
    EXPECT_EQ(a.marks()[i].num_spans, b.marks()[i].num_spans);
  }
}

TEST(RandomProgramTest, AskingInBetweenChangesNothing) {
  for_each_program([](const auto& program, const auto& names) {
    const Simulation lazy = played(program, names, Asked::never);
    expect_same(lazy, played(program, names, Asked::of_each_event));
    expect_same(lazy, played(program, names, Asked::after_each_step));
  });
}

// Walks over a program that was played, in the order of its calls.
class Causes {
 public:
  Causes(Simulation& device, const std::vector<std::string>& names)
      : device_(device), names_(names) {
    for (const Span& span : device.spans()) {
      EXPECT_LE(span.begin, span.end);
      if (span.kind == SpanKind::wait) continue;
      EXPECT_TRUE(spans_.emplace(span.name, span).second) << span.name;
    }
  }

  void expect_after_its_causes(const Step& step, std::size_t place) {
    double& stream = reached_[step.stream];
    switch (step.what) {
      case Do::kernel:
      case Do::transfer:
      case Do::collective:
        stream = expect_runs(step, names_[place], stream);
        break;
      case Do::wait:
        if (step.number > 0) {
          stream = std::max(
              stream, happened_[static_cast<std::size_t>(step.number) - 1]);
        }
        break;
      case Do::record:
      case Do::synchronize_stream:
        happened_.push_back(
            device_.time_of(static_cast<EventNumber>(happened_.size()) + 1));
        EXPECT_GE(happened_.back(), stream);
        stream = happened_.back();
        break;
      case Do::mark: {
        const auto mark = std::ranges::find(device_.marks(), names_[place],
                                            &PhaseMark::phase);
        ASSERT_NE(mark, device_.marks().end());
        EXPECT_GE(mark->begin, stream);
        break;
      }
      case Do::spend:
      case Do::synchronize_event:
      case Do::prioritize:
        break;
    }
  }

  void expect_nothing_else() const { EXPECT_EQ(num_ran_, spans_.size()); }

 private:
  double expect_runs(const Step& step, const std::string& name, double stream) {
    constexpr double kRounding = 1e-9, kFloor = 0.25;
    const auto found = spans_.find(name);
    EXPECT_NE(found, spans_.end()) << name;
    if (found == spans_.end()) return stream;
    const Span& span = found->second;
    ++num_ran_;
    EXPECT_EQ(span.stream, step.stream);
    EXPECT_GE(span.begin, span.issued);
    EXPECT_GE(span.begin, stream);
    double least = step.seconds;
    if (step.what == Do::kernel) least = std::max(least, kFloor);
    if (step.what == Do::transfer) least = std::max(2 * least, kFloor);
    EXPECT_GE(span.end - span.begin, least - kRounding);
    if (step.what == Do::collective) {
      EXPECT_GE(span.begin, communicators_[step.number]);
      communicators_[step.number] = span.end;
    }
    return span.end;
  }

  Simulation& device_;
  const std::vector<std::string>& names_;
  std::map<std::string_view, Span> spans_;
  std::map<TimedStream, double> reached_;  // its calls so far are over
  std::map<std::int64_t, double> communicators_;
  std::vector<double> happened_;
  std::size_t num_ran_ = 0;
};

TEST(RandomProgramTest, NothingHappensBeforeItsCauses) {
  for_each_program([](const auto& program, const auto& names) {
    Simulation device = played(program, names, Asked::never);
    Causes causes(device, names);
    for (std::size_t i = 0; i < program.size(); ++i) {
      causes.expect_after_its_causes(program[i], i);
    }
    causes.expect_nothing_else();
  });
}

// Copies of one direction never overlap; streams do one thing at a time.
TEST(RandomProgramTest, NothingIsInTwoPlacesAtOnce) {
  for_each_program([](const auto& program, const auto& names) {
    const Simulation device = played(program, names, Asked::never);
    std::map<TimedStream, std::vector<Span>> streams;
    std::map<std::int64_t, std::vector<Span>> engines;
    for (const Span& span : device.spans()) {
      streams[span.stream].push_back(span);
      if (span.kind == SpanKind::transfer) {
        engines[program[std::stoul(std::string(span.name))].number].push_back(
            span);
      }
    }
    const auto expect_apart = [](std::vector<Span> spans) {
      std::ranges::stable_sort(spans, {}, [](const Span& span) {
        return std::pair(span.begin, span.end);
      });
      for (std::size_t i = 1; i < spans.size(); ++i) {
        EXPECT_GE(spans[i].begin, spans[i - 1].end);
      }
    };
    for (const auto& [stream, spans] : streams) expect_apart(spans);
    for (const auto& [engine, spans] : engines) expect_apart(spans);
  });
}

// Kernels that fill the device and nothing else: however they share it, it does
// a second's work in a second.
TEST(RandomProgramTest, SharingLosesNoTime) {
  for_each_program([](const auto& program, const auto& names) {
    Simulation device(round_machine());
    double work = 0;
    for (std::size_t i = 0; i < program.size(); ++i) {
      const Step& step = program[i];
      if (step.what != Do::kernel && step.what != Do::record &&
          step.what != Do::wait) {
        continue;
      }
      if (step.what != Do::kernel) {
        play(step, device, names[i]);
        continue;
      }
      work += step.seconds;
      EXPECT_TRUE(device.tell(device.kernel(step.stream, names[i], 0),
                              {.flops = step.seconds}));
    }
    device.finish();
    EXPECT_NEAR(device.host(), work, 1e-9);
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom

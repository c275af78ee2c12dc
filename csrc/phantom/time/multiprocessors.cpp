#include "phantom/time/multiprocessors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace lowtide::phantom {
namespace {

// Of divisions that ought to be even.
constexpr double kRounding = 1e-9;

double slower(double seconds, double share) {
  return seconds > 0 ? seconds / share : 0;
}

}  // namespace

Multiprocessors::Multiprocessors(const Accelerator& accelerator)
    : accelerator_(accelerator) {}

double Multiprocessors::Progress::left_at(Moment now) const {
  if (std::isinf(slowness)) return left;
  return std::max(0.0, (end - now) / slowness);
}

void Multiprocessors::Progress::change_rate(double slowness_from_now,
                                            Moment now) {
  if (slowness_from_now == slowness) return;  // the end stays exact
  left = left_at(now);
  slowness = slowness_from_now;
  end = std::isinf(slowness) ? kNever : now + left * slowness;
}

void Multiprocessors::begin(const Owner& owner, const Work& work,
                            std::int64_t blocks, Moment now) {
  const auto at_once = static_cast<double>(accelerator_.multiprocessors *
                                           accelerator_.resident_blocks);
  Kernel kernel;
  kernel.owner = owner;
  kernel.cost = kernel_cost(work, accelerator_);
  kernel.alone = kernel_seconds(work, accelerator_);
  kernel.left = kernel.alone;
  kernel.end = now + kernel.alone;
  if (blocks > 0) {
    const double waves = static_cast<double>(blocks) / at_once;
    kernel.share = std::min(1.0, waves);
    kernel.waves = std::ceil(waves);
  } else if (accelerator_.block_seconds > 0) {
    kernel.waves =
        std::max(1.0, std::ceil(kernel.alone / accelerator_.block_seconds));
  }
  kernels_.push_back(kernel);
  share_out(now);
  find_next(now);
}

void Multiprocessors::ask(const Owner& owner, const CollectiveCost& cost,
                          Moment now) {
  Waiting waiting{owner, cost, {}};
  waiting.cost.channels = std::min(cost.channels, accelerator_.multiprocessors);
  for (const Kernel& kernel : kernels_) {
    const double left = left_when_it_yields(kernel, owner, now);
    if (kernel.left_at(now) > left * (1 + kRounding)) {
      waiting.obstacles.push_back(
          {kernel.owner.number, left,
           kernel.share * granted_ *
               static_cast<double>(accelerator_.multiprocessors)});
    }
  }
  const auto behind = std::ranges::upper_bound(
      waiting_, owner.priority, {},
      [](const Waiting& other) { return other.owner.priority; });
  waiting_.insert(behind, std::move(waiting));
  let_begin(now);
  share_out(now);
  find_next(now);
}

double Multiprocessors::held() const {
  std::int64_t channels = 0;
  for (const Holder& holder : holders_) channels += holder.cost.channels;
  return static_cast<double>(channels);
}

double Multiprocessors::left_when_it_yields(const Kernel& kernel,
                                            const Owner& to, Moment now) const {
  const double last_wave = kernel.alone / kernel.waves;
  if (to.priority >= kernel.owner.priority) return last_wave;
  const double done = 1 - kernel.left_at(now) / kernel.alone;
  const double waves_done = std::floor(done * kernel.waves + kRounding);
  return std::max(last_wave,
                  kernel.alone * (1 - (waves_done + 1) / kernel.waves));
}

bool Multiprocessors::fits(const Waiting& waiting) const {
  if (waiting.cost.channels == 0) return true;
  double taken = held();
  for (const Obstacle& obstacle : waiting.obstacles) {
    taken += obstacle.multiprocessors;
  }
  return static_cast<double>(waiting.cost.channels) + taken <=
         static_cast<double>(accelerator_.multiprocessors) + kRounding;
}

void Multiprocessors::let_begin(Moment now) {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (!fits(*waiting)) {
      ++waiting;
      continue;
    }
    Holder holder;
    holder.owner = waiting->owner;
    holder.cost = waiting->cost;
    holder.alone = holder.left = holder.cost.seconds;
    holder.end = now + holder.alone;
    holders_.push_back(holder);
    begun_.push_back(holder.owner);
    waiting = waiting_.erase(waiting);
  }
}

void Multiprocessors::share_links(Moment now) {
  std::array<double, kNumLinks> filled{};
  const auto of = [&](const Holder& holder) -> double& {
    return filled[static_cast<std::size_t>(holder.cost.link)];
  };
  for (const Holder& holder : holders_) {
    if (holder.cost.link == Link::none || holder.alone <= 0) continue;
    of(holder) += std::min(1.0, holder.cost.link_seconds / holder.alone);
  }
  for (Holder& holder : holders_) {
    holder.change_rate(std::max(1.0, of(holder)), now);
  }
}

void Multiprocessors::share_out(Moment now) {
  share_links(now);
  const auto all = static_cast<double>(accelerator_.multiprocessors);
  const double free = std::max(0.0, 1 - held() / all);
  double wanted = 0;
  for (const Kernel& kernel : kernels_) wanted += kernel.share;
  granted_ = wanted > free ? free / wanted : 1;
  // Of the memory's bandwidth.
  double rest = 1;
  for (const Holder& holder : holders_) {
    if (holder.cost.traffic <= 0 || holder.alone <= 0) continue;
    rest -= holder.cost.traffic / (holder.alone * holder.slowness) /
            (accelerator_.memory_bandwidth * accelerator_.memory_efficiency);
  }
  rest = std::max(0.0, rest);
  double asked = 0;
  const auto seconds_of = [&](const Kernel& kernel) {
    return std::max({slower(kernel.cost.computing, granted_),
                     kernel.cost.moving, kernel.cost.floor});
  };
  for (const Kernel& kernel : kernels_) {
    if (kernel.cost.moving <= 0) continue;
    asked += kernel.cost.moving / seconds_of(kernel);
  }
  const double moved = asked > rest ? rest / asked : 1;
  for (Kernel& kernel : kernels_) {
    if (kernel.alone <= 0) continue;
    const double seconds = seconds_of(kernel);
    kernel.change_rate(
        (kernel.cost.moving > 0 ? seconds / moved : seconds) / kernel.alone,
        now);
  }
}

void Multiprocessors::find_next(Moment now) {
  next_ = {};
  const auto consider = [&](const Next& found) {
    if (found.time == kNever) return;
    if (std::pair(found.time, found.number) <
        std::pair(next_.time, next_.number)) {
      next_ = found;
    }
  };
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    consider({kernels_[i].end, kernels_[i].owner.number, What::kernel_ends, i});
  }
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    consider({holders_[i].end, holders_[i].owner.number, What::holder_ends, i});
  }
  for (std::size_t i = 0; i < waiting_.size(); ++i) {
    for (std::size_t j = 0; j < waiting_[i].obstacles.size(); ++j) {
      const Obstacle& obstacle = waiting_[i].obstacles[j];
      const auto kernel = std::ranges::find(
          kernels_, obstacle.number,
          [](const Kernel& running) { return running.owner.number; });
      if (std::isinf(kernel->slowness)) continue;
      const Moment yields = kernel->end - obstacle.left * kernel->slowness;
      consider({std::max(now, yields), waiting_[i].owner.number,
                What::obstacle_leaves, i, j});
    }
  }
}

bool Multiprocessors::happen(Owner& ended) {
  const Next next = next_;
  switch (next.what) {
    case What::kernel_ends:
      ended = kernels_[next.index].owner;
      kernels_.erase(kernels_.begin() +
                     static_cast<std::ptrdiff_t>(next.index));
      for (Waiting& waiting : waiting_) {
        std::erase_if(waiting.obstacles, [&](const Obstacle& obstacle) {
          return obstacle.number == ended.number;
        });
      }
      break;
    case What::holder_ends:
      ended = holders_[next.index].owner;
      holders_.erase(holders_.begin() +
                     static_cast<std::ptrdiff_t>(next.index));
      break;
    case What::obstacle_leaves: {
      // All that wait for this much of the kernel may begin, the most urgent
      // one first.
      const Obstacle gone = waiting_[next.index].obstacles[next.obstacle];
      for (Waiting& waiting : waiting_) {
        std::erase_if(waiting.obstacles, [&](const Obstacle& obstacle) {
          return obstacle.number == gone.number && obstacle.left >= gone.left;
        });
      }
      break;
    }
  }
  let_begin(next.time);
  share_out(next.time);
  find_next(next.time);
  return next.what != What::obstacle_leaves;
}

std::vector<Owner> Multiprocessors::begun() {
  return std::exchange(begun_, {});
}

}  // namespace lowtide::phantom

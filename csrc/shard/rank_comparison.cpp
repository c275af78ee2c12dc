#include "shard/rank_comparison.h"

#include <algorithm>
#include <memory>
#include <ranges>
#include <span>
#include <utility>

#include "base/check.h"
#include "comm/host_channel.h"
#include "shard/unit.h"

namespace lowtide::shard {
namespace {

constexpr std::size_t kEveryone = 0;  // the channel

}  // namespace

RankComparison::RankComparison(std::string root, const Units& units)
    : units_(units), log_(std::move(root), [this](std::int32_t number) {
        const auto* unit = units_[static_cast<std::size_t>(number)];
        return unit != nullptr ? unit->name() : std::string("deleted");
      }) {}

void RankComparison::begin(std::shared_ptr<comm::HostChannel> everyone) {
  settings_.assign(units_.size(), 0);
  frozen_.assign(units_.size(), 0);
  of_everyone_.assign(units_.size(), false);
  num_gradient_numbers_.assign(units_.size(), 0);
  if (!everyone) return;
  std::vector<std::int32_t> all;
  std::vector<std::shared_ptr<comm::HostChannel>> others;
  for (const auto* unit : living(units_)) {
    all.push_back(unit->number());
    const auto& own = unit->groups().host;
    of_everyone_[static_cast<std::size_t>(unit->number())] = own == everyone;
    if (own && own != everyone &&
        std::ranges::find(others, own) == others.end()) {
      others.push_back(own);
    }
  }
  log_.compare_over(std::move(everyone), std::move(all));
  for (auto& other : others) {
    std::vector<std::int32_t> numbers;
    for (const auto* unit : living(units_)) {
      if (unit->groups().host == other) numbers.push_back(unit->number());
    }
    log_.compare_over(std::move(other), std::move(numbers));
  }
}

void RankComparison::note_settings() {
  if (!compares()) return;
  for (const auto* unit : living(units_)) {
    const auto settings = mix(unit->settings().hash(), unit->rows().streams());
    auto& noted = settings_[static_cast<std::size_t>(unit->number())];
    if (std::exchange(noted, settings) != settings) {
      log_.note({StepNote::What::settings, unit->number(),
                 static_cast<std::int64_t>(settings >> 1)},
                base::concat(
                    unit->settings().text(),
                    unit->rows().streams() ? ", rows that are streamed" : ""));
    }
  }
}

void RankComparison::note_frozen() {
  if (!compares()) return;
  for (const auto* unit : living(units_)) {
    const auto frozen = unit->parameters().leaves().frozen_hash();
    auto& noted = frozen_[static_cast<std::size_t>(unit->number())];
    if (std::exchange(noted, frozen) != frozen) {
      log_.note({StepNote::What::trainable, unit->number(),
                 static_cast<std::int64_t>(frozen >> 1)},
                unit->parameters().leaves().frozen_text());
    }
  }
}

void RankComparison::ask() {
  if (!compares()) return;
  log_.post([this](auto channel, auto number) {
    return numbers_of(channel, number, false);
  });
}

void RankComparison::ask_who_has_gradients() {
  log_.post_again(
      [this](auto channel, auto number) {
        return numbers_of(channel, number, true);
      },
      [this](auto channel, auto number) {
        const auto* unit = units_[static_cast<std::size_t>(number)];
        return is_of(channel, number) && unit != nullptr &&
               unit->gradients().hosts_tell();
      });
}

bool RankComparison::is_of(std::size_t channel, std::int32_t number) const {
  return channel != kEveryone || of_everyone_[static_cast<std::size_t>(number)];
}

// A unit may die earlier on one rank than on another, whose numbers still
// travel.
StepLog::Numbers RankComparison::numbers_of(std::size_t channel,
                                            std::int32_t number, bool at_end) {
  const auto place = static_cast<std::size_t>(number);
  auto* unit = units_[place];
  StepLog::Numbers numbers;
  if (channel == kEveryone) {
    const auto own =
        unit != nullptr ? unit->numbers_to_compare() : OwnNumbers::Compared{};
    numbers.assign(own.begin(), own.end());
  }
  if (is_of(channel, number)) {
    auto& travel = num_gradient_numbers_[place];
    const auto gradients = unit != nullptr ? unit->who_has_gradients(at_end)
                                           : StepLog::Numbers(travel);
    travel = gradients.size();
    numbers.insert(numbers.end(), gradients.begin(), gradients.end());
  }
  return numbers;
}

void RankComparison::agreed(std::size_t channel, std::int32_t number,
                            const StepLog::Numbers& greatest) {
  auto* unit = units_[static_cast<std::size_t>(number)];
  if (unit == nullptr) return;
  auto rest = std::span(greatest);
  if (channel == kEveryone) {
    OwnNumbers::Compared of_all;
    std::copy_n(rest.begin(), of_all.size(), of_all.begin());
    unit->agree_on(of_all);
    rest = rest.subspan(of_all.size());
  }
  if (!rest.empty()) unit->hear_who_has_gradients(rest);
}

void RankComparison::require() {
  if (!compares()) {
    agree_without_comparison();
    return;
  }
  try {
    log_.require([this](auto channel, auto number, const auto& greatest) {
      agreed(channel, number, greatest);
    });
  } catch (...) {
    std::fill(settings_.begin(), settings_.end(), 0);
    std::fill(frozen_.begin(), frozen_.end(), 0);
    throw;
  }
}

void RankComparison::agree_without_comparison() {
  // Of a unit: over several ranks.
  const auto groups_of = [](const Unit& unit) {
    std::vector<comm::Collectives*> groups{
        unit.groups().gather.get(), unit.settings().reduction.replicas.get()};
    std::erase_if(groups, [](const comm::Collectives* ranks) {
      return ranks == nullptr || ranks->size() == 1 ||
             ranks->backend() == "fake";
    });
    return groups;
  };
  const bool alone = std::ranges::all_of(living(units_), [&](const Unit* unit) {
    return groups_of(*unit).empty();
  });
  for (auto* unit : living(units_)) {
    if (alone || !numbers_agreed_) {
      auto numbers = unit->numbers_to_compare();
      for (auto* ranks : groups_of(*unit)) {
        const auto first = ranks->from_rank_zero(
            {numbers.begin(), numbers.end()}, unit->name());
        std::copy(first.begin(), first.end(), numbers.begin());
      }
      unit->agree_on(numbers);
    }
    if (!alone) unit->agree_alone();
  }
  numbers_agreed_ = true;
}

}  // namespace lowtide::shard

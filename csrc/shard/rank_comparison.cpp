#include "shard/rank_comparison.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "comm/host_channel.h"
#include "shard/unit.h"

namespace lowtide::shard {

RankComparison::RankComparison(std::string root, const Units& units)
    : units_(units), log_(std::move(root), [this](std::int32_t number) {
        const auto* unit = units_[static_cast<std::size_t>(number)];
        return unit != nullptr ? unit->name() : std::string("deleted");
      }) {}

void RankComparison::begin() {
  settings_.assign(units_.size(), 0);
  frozen_.assign(units_.size(), 0);
  num_numbers_.assign(units_.size(), 0);
  std::vector<std::shared_ptr<comm::HostChannel>> channels;
  for (const auto* unit : living(units_)) {
    const auto& channel = unit->groups().host;
    if (channel && std::find(channels.begin(), channels.end(), channel) ==
                       channels.end()) {
      channels.push_back(channel);
    }
  }
  for (auto& channel : channels) {
    std::vector<std::int32_t> numbers;
    for (const auto* unit : living(units_)) {
      if (unit->groups().host != channel) continue;
      numbers.push_back(unit->number());
      numbers_of(unit->number(), false);
    }
    log_.compare_over(std::move(channel), std::move(numbers));
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
  log_.post([this](auto number) { return numbers_of(number, false); });
}

void RankComparison::ask_who_has_gradients() {
  log_.post_again([this](auto number) { return numbers_of(number, true); },
                  [this](auto number) {
                    const auto* unit = units_[static_cast<std::size_t>(number)];
                    return unit != nullptr && unit->gradients().hosts_tell();
                  });
}

// A unit may die earlier on one rank than on another, whose numbers still
// travel.
StepLog::Numbers RankComparison::numbers_of(std::int32_t number, bool at_end) {
  const auto place = static_cast<std::size_t>(number);
  auto* unit = units_[place];
  if (unit == nullptr) return StepLog::Numbers(num_numbers_[place]);
  auto numbers = unit->numbers_to_compare(at_end);
  num_numbers_[place] = numbers.size();
  return numbers;
}

void RankComparison::require() {
  if (!compares()) {
    agree_without_comparison();
    return;
  }
  try {
    log_.require([this](std::int32_t number, const StepLog::Numbers& greatest) {
      auto* unit = units_[static_cast<std::size_t>(number)];
      if (unit != nullptr) unit->agree_on(greatest);
    });
  } catch (...) {
    std::fill(settings_.begin(), settings_.end(), 0);
    std::fill(frozen_.begin(), frozen_.end(), 0);
    throw;
  }
}

void RankComparison::agree_without_comparison() {
  const auto several = [](const comm::Collectives& ranks) {
    return ranks.size() > 1 && ranks.backend() != "fake";
  };
  for (auto* unit : living(units_)) {
    auto& shards = *unit->groups().gather;
    const auto& replicas = unit->settings().reduction.replicas;
    const bool alone = !several(shards) && !(replicas && several(*replicas));
    if (alone || !numbers_agreed_) {
      auto numbers = unit->numbers_to_compare();
      if (!alone) {
        auto first = shards.from_rank_zero({numbers.begin(), numbers.end()},
                                           unit->name());
        if (replicas) {
          first = replicas->from_rank_zero(std::move(first), unit->name());
        }
        std::copy(first.begin(), first.end(), numbers.begin());
      }
      unit->agree_on(numbers);
    }
    if (!alone) unit->agree_alone();
  }
  numbers_agreed_ = true;
}

}  // namespace lowtide::shard

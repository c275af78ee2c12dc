#include "shard/step_log.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/check.h"

namespace lowtide::shard {
namespace {

constexpr std::ptrdiff_t kHashNumbers = 2;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

const std::string& line_or_none(const std::vector<std::string>& lines,
                                std::size_t i) {
  static const std::string none = "nothing more";
  return i < lines.size() ? lines[i] : none;
}

}  // namespace

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  std::uint64_t z = hash + 0x9e3779b97f4a7c15ULL + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

StepLog::StepLog(std::string root, NameOf name_of)
    : root_(std::move(root)), name_of_(std::move(name_of)) {}

void StepLog::compare_over(std::shared_ptr<comm::HostChannel> channel,
                           std::vector<std::int32_t> units) {
  channels_.push_back({std::move(channel), std::move(units)});
}

StepLog::Counts StepLog::counts(std::int32_t unit) const {
  const auto place = static_cast<std::size_t>(unit + 1);
  return place < counts_.size() ? counts_[place] : Counts{};
}

void StepLog::note(StepNote note, std::string in_words) {
  const auto place = static_cast<std::size_t>(note.unit + 1);
  if (place >= counts_.size()) counts_.resize(place + 1);
  ++counts_[place][static_cast<std::size_t>(note.what)];
  if (!compares()) return;
  if (!in_words.empty()) words_[notes_.size()] = std::move(in_words);
  hash_ = mix(hash_, static_cast<std::uint64_t>(note.what));
  hash_ = mix(hash_, static_cast<std::uint64_t>(note.unit));
  hash_ = mix(hash_, static_cast<std::uint64_t>(note.value));
  notes_.push_back(note);
}

void StepLog::post(const NumbersOf& numbers_of) {
  if (!compares() || notes_.size() == num_posted_) return;
  num_posted_ = notes_.size();
  post_over(0, numbers_of);
}

void StepLog::post_again(
    const NumbersOf& numbers_of,
    const std::function<bool(std::size_t channel, std::int32_t unit)>& asks) {
  for (std::size_t c = 0; c < channels_.size(); ++c) {
    if (std::ranges::any_of(channels_[c].units,
                            [&](auto unit) { return asks(c, unit); })) {
      post_over(c, numbers_of);
    }
  }
}

void StepLog::post_over(std::size_t channel, const NumbersOf& numbers_of) {
  // Equal on all ranks if the greatest is the least.
  const auto hash = static_cast<std::int64_t>(hash_ >> 1);
  Numbers numbers{hash, -hash};
  std::vector<std::size_t> num_numbers;
  for (const auto unit : channels_[channel].units) {
    const auto of_unit = numbers_of(channel, unit);
    numbers.insert(numbers.end(), of_unit.begin(), of_unit.end());
    num_numbers.push_back(of_unit.size());
  }
  posted_.push_back({channel, notes_.size(), std::move(num_numbers),
                     channels_[channel].ranks->maximum(std::move(numbers))});
}

void StepLog::require(
    const std::function<void(std::size_t channel, std::int32_t unit,
                             const Numbers& greatest)>& agreed) {
  std::size_t required = 0;
  while (!posted_.empty()) {
    const auto posted = std::move(posted_.front());
    posted_.pop_front();
    const auto& channel = channels_[posted.channel];
    const auto greatest = posted.maximum->wait();
    if (greatest[0] != -greatest[1]) {
      throw_difference(channel, posted.num_notes);
    }
    auto begin = greatest.begin() + kHashNumbers;
    for (std::size_t u = 0; u < channel.units.size(); ++u) {
      const auto end =
          begin + static_cast<std::ptrdiff_t>(posted.num_numbers[u]);
      agreed(posted.channel, channel.units[u], {begin, end});
      begin = end;
    }
    // What all ranks have seen.
    required = std::min(posted.num_notes, num_posted_);
  }
  notes_.erase(notes_.begin(),
               notes_.begin() + static_cast<std::ptrdiff_t>(required));
  std::map<std::size_t, std::string> later;
  for (auto word = words_.lower_bound(required); word != words_.end(); ++word) {
    later[word->first - required] = std::move(word->second);
  }
  words_ = std::move(later);
  num_posted_ -= required;
}

void StepLog::forget() {
  posted_.clear();
  notes_.clear();
  words_.clear();
  num_posted_ = 0;
  hash_ = 0;
}

std::string StepLog::text_of(std::size_t place) const {
  using What = StepNote::What;
  const auto& note = notes_[place];
  const auto name =
      base::concat("'", note.unit < 0 ? root_ : name_of_(note.unit), "'");
  const auto words = words_.find(place);
  const auto detail =
      words == words_.end() ? "" : base::concat(words->second, "; ");
  switch (note.what) {
    case What::forward:
      return base::concat("the end of a forward of ", name);
    case What::gather:
      return base::concat("the all-gather of unit ", name);
    case What::rows:
      return base::concat("the all-gather of rows of unit ", name);
    case What::reduce:
      return base::concat("the reduce-scatter of unit ", name, ", part ",
                          note.value);
    case What::sum:
      return base::concat("the all-reduce of unit ", name);
    case What::backward:
      return base::concat("the backward of unit ", name);
    case What::trainable:
      return base::concat("other trainable parameters in unit ", name, " (",
                          detail, std::hex, note.value, ")");
    case What::settings:
      return base::concat("other settings of unit ", name, " (", detail,
                          std::hex, note.value, ")");
  }
  return name;
}

void StepLog::throw_difference(const Channel& channel, std::size_t num_notes) {
  std::string mine;
  for (std::size_t i = 0; i < num_notes; ++i) {
    mine += text_of(i) + "\n";
  }
  std::vector<std::vector<std::string>> by_rank;
  for (const auto& text : channel.ranks->texts(mine)) {
    by_rank.push_back(lines_of(text));
  }
  forget();
  // Where ranks part first, and who parts there from rank 0.
  std::size_t place = static_cast<std::size_t>(-1);
  std::size_t other = 0;
  for (std::size_t r = 1; r < by_rank.size(); ++r) {
    const auto [here, there] =
        std::mismatch(by_rank[0].begin(), by_rank[0].end(), by_rank[r].begin(),
                      by_rank[r].end());
    const auto at = static_cast<std::size_t>(here - by_rank[0].begin());
    const bool same = here == by_rank[0].end() && there == by_rank[r].end();
    if (!same && at < place) {
      place = at;
      other = r;
    }
  }
  if (other == 0) {
    place = 0;  // they differ in something before these notes
  }
  throw Error(base::error_text(
      base::concat("step of '", root_, "'"),
      "every rank to run the same units in the same order, with the same "
      "trainable parameters and settings",
      base::on_rank(
          other == 0
              ? std::string("ranks that differ in an earlier step")
              : base::concat(line_or_none(by_rank[0], place), " on rank 0 and ",
                             line_or_none(by_rank[other], place), " on rank ",
                             other, ", call ", place + 1,
                             " since ranks were last compared"),
          channel.ranks->rank(), channel.ranks->size()),
      "Nothing of this step has reached `.grad`. Where ranks choose between "
      "modules by their data, shard the module around these as one unit."));
}

}  // namespace lowtide::shard

#include "phantom/driver/kept_bytes.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace lowtide::dry {
namespace {

constexpr std::size_t kMostOfFill = std::size_t{4} << 10;

using Lock = std::lock_guard<std::mutex>;

}  // namespace

// The first copy that reaches beyond `address`.
KeptBytes::Copies::const_iterator KeptBytes::first_of(Address address) const {
  auto found = copies_.upper_bound(address);
  if (found == copies_.begin()) return found;
  const auto before = std::prev(found);
  return before->first + before->second.bytes.size() > address ? before : found;
}

void KeptBytes::cut(Address first, std::size_t bytes) {
  const auto end = first + bytes;
  auto found = first_of(first);
  while (found != copies_.end() && found->first < end) {
    const auto start = found->first;
    auto old = std::move(copies_.extract(found++).mapped());
    by_age_.erase(old.age);
    total_ -= old.bytes.size();
    const auto stop = start + old.bytes.size();
    if (start < first) {
      add(start,
          {old.bytes.begin(),
           old.bytes.begin() + static_cast<std::ptrdiff_t>(first - start)});
    }
    if (stop > end) {
      add(end, {old.bytes.end() - static_cast<std::ptrdiff_t>(stop - end),
                old.bytes.end()});
      return;
    }
  }
}

void KeptBytes::add(Address to, std::vector<std::uint8_t> bytes) {
  total_ += bytes.size();
  by_age_[++last_age_] = to;
  copies_[to] = {std::move(bytes), last_age_};
}

void KeptBytes::write(Address to, const void* from, std::size_t bytes) {
  const Lock lock(mutex_);
  cut(to, bytes);
  if (bytes == 0 || bytes > kMostOfCopy) return;
  const auto* first = static_cast<const std::uint8_t*>(from);
  add(to, {first, first + bytes});
  while (total_ > kMost) {
    const auto oldest = copies_.find(by_age_.begin()->second);
    total_ -= oldest->second.bytes.size();
    copies_.erase(oldest);
    by_age_.erase(by_age_.begin());
  }
}

void KeptBytes::fill(Address to, int value, std::size_t bytes) {
  if (bytes > kMostOfFill) return forget(to, bytes);
  const std::vector<std::uint8_t> same(bytes, static_cast<std::uint8_t>(value));
  write(to, same.data(), bytes);
}

void KeptBytes::copy(Address to, Address from, std::size_t bytes) {
  const Lock lock(mutex_);
  std::vector<std::pair<std::size_t, std::vector<std::uint8_t>>> parts;
  const auto end = from + bytes;
  for (auto one = first_of(from); one != copies_.end() && one->first < end;
       ++one) {
    const auto& kept = one->second.bytes;
    const auto start = std::max(from, one->first);
    const auto stop = std::min(end, one->first + kept.size());
    const auto* data = kept.data() - one->first;
    parts.emplace_back(start - from,
                       std::vector<std::uint8_t>(data + start, data + stop));
  }
  cut(to, bytes);
  for (auto& [offset, part] : parts) add(to + offset, std::move(part));
}

void KeptBytes::read(void* to, Address from, std::size_t bytes) const {
  const Lock lock(mutex_);
  const auto end = from + bytes;
  for (auto one = first_of(from); one != copies_.end() && one->first < end;
       ++one) {
    const auto& kept = one->second.bytes;
    const auto start = std::max(from, one->first);
    const auto stop = std::min(end, one->first + kept.size());
    std::memcpy(static_cast<std::uint8_t*>(to) + (start - from),
                kept.data() + (start - one->first), stop - start);
  }
}

bool KeptBytes::known(Address first, std::size_t bytes) const {
  const Lock lock(mutex_);
  const auto end = first + bytes;
  for (auto one = first_of(first); first < end; ++one) {
    if (one == copies_.end() || one->first > first) return false;
    first = one->first + one->second.bytes.size();
  }
  return true;
}

bool KeptBytes::known_as_whole(Address first, std::size_t bytes) const {
  if (bytes == 0 || !known(first, bytes)) return false;
  const Lock lock(mutex_);
  const auto end = first + bytes;
  const auto last = std::prev(copies_.lower_bound(end));
  return copies_.contains(first) &&
         last->first + last->second.bytes.size() == end;
}

void KeptBytes::forget(Address first, std::size_t bytes) {
  const Lock lock(mutex_);
  cut(first, bytes);
}

std::size_t KeptBytes::total() const {
  const Lock lock(mutex_);
  return total_;
}

}  // namespace lowtide::dry

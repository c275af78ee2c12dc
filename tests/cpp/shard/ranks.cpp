#include "ranks.h"

#include <ATen/ATen.h>

#include <chrono>
#include <exception>
#include <thread>

#include "base/check.h"

namespace lowtide::shard {
namespace {

// So that run_ranks can tell a cause from its consequences.
class PeerLeft : public Error {
 public:
  using Error::Error;
};

}  // namespace

Exchange::Exchange(std::int64_t world_size)
    : brought_(static_cast<std::size_t>(world_size)),
      left_(static_cast<std::size_t>(world_size), false),
      hosts_(world_size) {}

void Exchange::bring(std::size_t rank, Input input) {
  const std::lock_guard lock(mutex_);
  brought_[rank].push_back(std::move(input));
  changed_.notify_all();
}

at::Tensor Exchange::meet(std::size_t rank, std::size_t other) {
  std::unique_lock lock(mutex_);
  const std::size_t place = brought_[rank].size() - 1;
  const std::string collective = brought_[rank][place].collective;
  changed_.wait_for(lock, std::chrono::minutes(1), [&] {
    return brought_[other].size() > place || left_[other];
  });
  if (brought_[other].size() <= place) {
    throw PeerLeft(base::concat("rank ", other, " did not join '", collective,
                                "' of rank ", rank));
  }
  const Input& input = brought_[other][place];
  if (input.collective != collective) {
    throw Error(base::concat("rank ", rank, " is in '", collective, "', rank ",
                             other, " in '", input.collective, "'"));
  }
  return input.values;
}

comm::RecordingCollectives::Peer Exchange::peer(std::int64_t rank) {
  const auto self = static_cast<std::size_t>(rank);
  return [this, self](const comm::RecordingCollectives::Request& request,
                      const at::Tensor& mine) {
    const auto other = static_cast<std::size_t>(request.rank);
    // Asked for the other ranks in turn: the first question brings a new one.
    if (other == (self == 0 ? 1 : 0)) {
      bring(self, {base::concat(comm::kind_name(request.kind), " ",
                                request.label, " ", request.index),
                   mine.clone()});
    }
    return meet(self, other);
  };
}

std::vector<std::int64_t> Exchange::broadcast(
    std::int64_t rank, const std::vector<std::int64_t>& values,
    const std::string& label) {
  const auto self = static_cast<std::size_t>(rank);
  bring(self, {base::concat("broadcast ", label), at::tensor(values)});
  const at::Tensor received = meet(self, 0);
  const auto* begin = received.const_data_ptr<std::int64_t>();
  return {begin, begin + received.numel()};
}

HostMeeting& Exchange::hosts(std::int64_t first, std::int64_t size) {
  const std::lock_guard lock(mutex_);
  return some_hosts_.try_emplace({first, size}, size).first->second;
}

void Exchange::leave(std::int64_t rank) {
  const std::lock_guard lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  changed_.notify_all();
}

void run_ranks(std::int64_t world_size,
               const std::function<void(Exchange& exchange, std::int64_t rank)>&
                   rank_main) {
  Exchange exchange(world_size);
  std::mutex mutex;
  std::exception_ptr cause;
  std::exception_ptr consequence;
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        rank_main(exchange, rank);
      } catch (const PeerLeft&) {
        const std::lock_guard lock(mutex);
        consequence = std::current_exception();
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!cause) cause = std::current_exception();
      }
      exchange.leave(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (cause) std::rethrow_exception(cause);
  if (consequence) std::rethrow_exception(consequence);
}

}  // namespace lowtide::shard

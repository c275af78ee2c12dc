#include "phantom/driver/exchanges.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "phantom/driver/collective_log.h"
#include "phantom/driver/device.h"

namespace lowtide::dry {
namespace {

struct Sent {
  const void* from = nullptr;
  std::size_t bytes = 0;
};
struct Received {
  int peer = 0;
  void* to = nullptr;
  std::size_t bytes = 0;
};
struct Exchange {
  int size = 0;
  std::map<int, Sent> sent;  // by peer
  std::vector<Received> received;
};

// The calling thread's, of the group that it is in, by communicator.
thread_local std::map<std::int64_t, Exchange> grouped;

Exchange& exchange_of(const Communicator& communicator) {
  auto& exchange = grouped[communicator.number];
  exchange.size = communicator.size;
  return exchange;
}

}  // namespace

void send_in_group(const Communicator& communicator, int peer, const void* from,
                   std::size_t bytes) {
  if (CollectiveLog::depth() == 0 || communicator.clique != 0) return;
  exchange_of(communicator).sent[peer] = {from, bytes};
}

void receive_in_group(const Communicator& communicator, int peer, void* to,
                      std::size_t bytes) {
  if (CollectiveLog::depth() == 0 || communicator.clique != 0) return;
  exchange_of(communicator).received.push_back({peer, to, bytes});
}

void bring_exchanges() {
  const auto exchanges = std::exchange(grouped, {});
  for (const auto& [number, exchange] : exchanges) {
    const auto all = static_cast<std::size_t>(exchange.size);
    if (exchange.sent.size() != all || exchange.received.size() != all) {
      continue;
    }
    for (const auto& [peer, to, bytes] : exchange.received) {
      const auto sent = exchange.sent.find(peer);
      if (sent != exchange.sent.end() && sent->second.bytes == bytes) {
        copy_bytes(to, sent->second.from, bytes);
      }
    }
  }
}

}  // namespace lowtide::dry

// One forward of a region: which operator made which autograd nodes, what each
// must send in backward, and what was sent.
//
// A call belongs to the region that is open in the calling thread (forward,
// recomputation), else to the smallest region that made the running node.  The
// operator is found by the node's sequence number.
//
// open .. end_operator: the forward's thread.  The rest: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/call_observer.h"
#include "comm/collectives.h"

namespace lowtide::spmd {

// A collective that must be there, or was not to be.
struct Finding {
  bool missing = false;  // else unexpected
  std::string kind;      // "all-reduce"
  std::string group;     // the process group's name, "" if unknown
  std::string value;     // "bfloat16[1, 128]"; "" if missing
  std::int64_t bytes = 0;
  std::string op;     // whose node sent it, or the node's name
  std::string where;  // "train.py:12", "" if unknown
};

class RegionRecord {
 public:
  RegionRecord();
  RegionRecord(const RegionRecord&) = delete;
  RegionRecord& operator=(const RegionRecord&) = delete;
  ~RegionRecord();

  void open();
  // Calls seen between open and close outside of operators.
  std::vector<Finding> close();

  void begin_operator(const std::string& name, const std::string& where);
  // The operator's backward sends one `kind` over `group`.
  void require(comm::Kind kind, const std::string& group);
  // Calls seen while it ran.
  std::vector<Finding> end_operator();

  // Whoever sends it: one `kind` over `group` in the backward that runs.
  void require_anywhere(comm::Kind kind, const std::string& group,
                        const std::string& value);

  // The operator and line of a node of this region, "" and "" between
  // operators, nothing for other nodes of the same thread.
  std::optional<std::pair<std::string, std::string>> place(
      std::uint64_t sequence);

  // What differs between needed and sent since the last settle: needed is what
  // executed operators require.
  std::vector<Finding> settle();

  // Kind -> calls and bytes of buffers, of all backwards so far.
  struct Sent {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };
  std::map<std::string, Sent> sent() const;

 private:
  friend class LiveRegions;
  struct Need {
    std::string kind;
    std::string group;
    std::string value;  // of needs without an operator
  };
  struct Operator {
    std::string name;
    std::string where;
    std::uint64_t begin = 0;  // sequence numbers of its nodes
    std::uint64_t end = 0;
    std::vector<Need> needs;
    bool executed = false;
  };
  struct Call {
    comm::ObservedCall call;
    const Operator* op;  // null between operators
  };

  bool contains(std::uint64_t thread, std::uint64_t sequence) const;
  Operator* operator_of(std::uint64_t sequence);
  Finding unexpected(const Call& seen) const;
  std::vector<Finding> take_forward_calls();

  std::uint64_t thread_ = 0;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  bool is_open_ = false;
  bool in_operator_ = false;
  std::vector<std::unique_ptr<Operator>> operators_;
  std::vector<Need> needs_anywhere_;
  std::vector<Call> forward_calls_;
  std::vector<Call> backward_calls_;
  std::map<std::string, Sent> sent_;
};

}  // namespace lowtide::spmd

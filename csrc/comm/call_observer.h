// Every collective this process issues, whoever issues it: lowtide, torch or
// another extension, from Python or C++, in forward or in an autograd node.
//
// [Note: Where calls are seen]
// A Python mode around forward sees nothing of backward and nothing inside an
// opaque operator.  RecordFunction sees both: a ProcessGroup's methods go
// through the dispatcher's c10d:: operators, and a call on a backend itself
// still makes a Work whose title is "<backend>:<collective>".  Backends whose
// works carry no title ("fake") are seen through their group only.
#pragma once

#include <cstdint>
#include <string>

namespace lowtide::comm {

struct ObservedCall {
  std::string kind;   // "all-reduce", "send", ... or torch's name if unknown
  std::string group;  // the process group's name, "" below a group
  std::string value;  // "bfloat16[1, 128]", or "2 tensors"
  std::int64_t bytes = 0;  // of the larger side's buffers
  std::string issuer;      // label of lowtide's own calls, "" for others
  // The autograd node that runs, where one does.
  bool in_backward = false;
  std::uint64_t node_thread = 0;    // where its forward ran
  std::uint64_t node_sequence = 0;  // rises with the forward's nodes
  std::string node_name;
};

// Told in the thread that issues; must not throw or issue collectives.
class CallListener {
 public:
  virtual ~CallListener() = default;
  virtual void collective(const ObservedCall& call) = 0;
  // An autograd node begins.
  virtual void node(std::uint64_t thread, std::uint64_t sequence) = 0;
};

// Listens while it lives; one at a time.  Every operator of the process costs
// more meanwhile, about a microsecond.
class Observation {
 public:
  explicit Observation(CallListener& listener);
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;
  ~Observation();

 private:
  std::uint64_t handle_;
};

// lowtide's own calls in this thread carry `label` while it lives.
class IssuedBy {
 public:
  explicit IssuedBy(const std::string& label);
  IssuedBy(const IssuedBy&) = delete;
  IssuedBy& operator=(const IssuedBy&) = delete;
  ~IssuedBy();

 private:
  const std::string* outer_;
};

}  // namespace lowtide::comm

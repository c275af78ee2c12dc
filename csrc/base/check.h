// Errors a user can meet.  Every message has the same four parts:
//
//   lowtide: <who>: expected <rule>, got <value>. <next step>
//
// `who` is the parameter, module path or setting concerned; callers that know
// the rank append "(rank r of w)" to `got` with `on_rank`.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowtide {

// Something went wrong while running: a peer died, a state was violated.
// Becomes RuntimeError in Python.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that can not be done.  Becomes ValueError.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace base {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "one, another"
std::string listed(const std::vector<std::string>& words);

std::string error_text(const std::string& who, const std::string& expected,
                       const std::string& got, const std::string& next_step);

// "<value> (rank r of w)"
std::string on_rank(const std::string& value, std::int64_t rank,
                    std::int64_t world_size);

}  // namespace base
}  // namespace lowtide

// An invariant of lowtide's own code: names the file and line, asks for a
// report.  Never used for what a user can cause.
#define LOWTIDE_INVARIANT(condition, what)                                  \
  do {                                                                      \
    if (!(condition)) {                                                     \
      throw ::lowtide::Error(::lowtide::base::concat(                       \
          "lowtide: internal invariant failed: ", (what), " (", #condition, \
          ", ", __FILE__, ":", __LINE__,                                    \
          "). Please report this with the output of `python -m lowtide "    \
          "env`."));                                                        \
    }                                                                       \
  } while (false)

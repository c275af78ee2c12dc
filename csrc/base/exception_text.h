// What an exception says, for an error of ours that names its place.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace lowtide::base {

// One line without torch's backtrace, never empty: the type, if there is no
// text.
std::string exception_text(const std::exception& error);

// For types that this library cannot know, such as torch's for errors of
// Python, whose what() is empty: their text, or nothing.  Asked first.
using ExceptionText = std::optional<std::string> (*)(const std::exception&);
void use_exception_text(ExceptionText text);

}  // namespace lowtide::base

#include "base/exception_text.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <atomic>
#include <cctype>
#include <typeinfo>

namespace lowtide::base {
namespace {

std::atomic<ExceptionText> text_of_others{nullptr};

std::string given_text(const std::exception& error) {
  if (const ExceptionText others = text_of_others.load()) {
    if (auto text = others(error)) {
      return *std::move(text);
    }
  }
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace()
                             : error.what();
}

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }

}  // namespace

std::string exception_text(const std::exception& error) {
  std::string line;
  for (const char c : given_text(error)) {
    if (!is_space(c)) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  if (!line.empty() && line.back() == ' ') {
    line.pop_back();
  }
  return line.empty() ? c10::demangle(typeid(error).name()) : line;
}

void use_exception_text(ExceptionText text) { text_of_others = text; }

}  // namespace lowtide::base

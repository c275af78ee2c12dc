// A PinnedPool's figures as Python reads them.
#pragma once

#include <pybind11/pybind11.h>

#include "memory/pinned_pool.h"

namespace lowtide::python {

inline pybind11::dict pool_figures(const memory::PinnedPool& pool) {
  using pybind11::literals::operator""_a;
  const auto figures = pool.figures();
  return pybind11::dict("cap_bytes"_a = pool.cap_bytes(),
                        "pinned_bytes"_a = figures.pinned_bytes,
                        "num_registrations"_a = figures.num_registrations,
                        "registration_ns"_a = figures.registration_ns,
                        "pageable_bytes"_a = figures.pageable_bytes,
                        "peak_pageable_bytes"_a = figures.peak_pageable_bytes);
}

}  // namespace lowtide::python

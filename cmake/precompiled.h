// What takes seconds to parse and most of csrc includes.  Files still include
// what they use: this header only makes that fast.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/graph_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <utility>

namespace lowtide::base {
namespace {

using torch::autograd::Engine;
using torch::autograd::Node;

// What a task's callbacks own.
struct End {
  explicit End(std::function<void()> otherwise)
      : raised(std::move(otherwise)) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    if (!over) raised();
  }
  std::function<void()> raised;
  bool over = false;
};

}  // namespace

std::int64_t current_graph_task() {
  return torch::autograd::get_current_graph_task_id();
}

bool graph_task_keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

bool in_graph_task(const Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(const_cast<Node*>(node)) > 0;
}

NodeUse use_in_graph_task(const Node* node) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) {
    return NodeUse::runs;
  }
  const auto found = info->find(const_cast<Node*>(node));
  if (found == info->end() || !found->second.should_execute()) {
    return NodeUse::unwanted;
  }
  const auto& captures = found->second.captures_;
  return captures != nullptr && !captures->empty() ? NodeUse::returned
                                                   : NodeUse::runs;
}

void at_end_of_graph_task(std::function<void()> ended,
                          std::function<void()> raised) {
  Engine::get_default_engine().queue_callback(
      [ended = std::move(ended),
       end = std::make_shared<End>(std::move(raised))] {
        ended();
        end->over = true;
      });
}

void when_graph_task_is_gone(std::function<void()> gone) {
  Engine::get_default_engine().queue_callback(
      [end = std::make_shared<End>(std::move(gone))] {});
}

}  // namespace lowtide::base

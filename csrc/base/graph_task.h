// The backward that runs on this thread: a task of autograd's engine.
#pragma once

#include <cstdint>
#include <functional>

namespace torch::autograd {
struct Node;
}

namespace lowtide::base {

std::int64_t current_graph_task();  // -1: none
inline bool in_backward() { return current_graph_task() != -1; }
// Whether the graph may be gone through again.
bool graph_task_keeps_graph();
// Whether `node` is in the graph that it goes through.  With
// torch.autograd.grad or backward(inputs=) not every node of it runs.
bool in_graph_task(const torch::autograd::Node* node);
// What is asked of a node in it: to run, to return the gradient it would get,
// or nothing.
enum class NodeUse : std::uint8_t { unwanted, runs, returned };
NodeUse use_in_graph_task(const torch::autograd::Node* node);

// [Note: When a backward raises]
// The engine calls nobody at the end of a task in which a node raised, but it
// destroys what would have been called: on any thread, whose current stream is
// not the backward's.

// Calls `ended` at the end of the task, on the thread that runs it; what it
// throws fails the backward.  If the backward raised, `ended` included, calls
// `raised` instead when the task is gone, which must not throw.
void at_end_of_graph_task(
    std::function<void()> ended, std::function<void()> raised = [] {});
// Calls `gone`, which must not throw, when the task is gone, however it ended.
void when_graph_task_is_gone(std::function<void()> gone);

}  // namespace lowtide::base

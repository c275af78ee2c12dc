// Bindings of csrc/spmd: types and rules by name, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "python/bindings.h"
#include "spmd/region_record.h"
#include "spmd/register_rule.h"
#include "spmd/replicas.h"
#include "spmd/rule_book.h"
#include "spmd/typed_collectives.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using comm::Collectives;
using spmd::Finding;
using spmd::RegionRecord;
using spmd::Rule;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Operands = std::vector<std::pair<std::string, bool>>;

spmd::Type type_of(const std::string& name) {
  const auto type = spmd::type_named(name);
  LOWTIDE_INVARIANT(type.has_value(), "a type's name");
  return *type;
}

spmd::Operation operation_of(const std::string& name) {
  const auto operation = spmd::operation_named(name);
  LOWTIDE_INVARIANT(operation.has_value(), "an operation's name");
  return *operation;
}

std::string name_of(std::optional<comm::Kind> kind) {
  return kind ? std::string(comm::kind_name(*kind)) : std::string();
}

comm::Kind kind_of(const std::string& name) {
  for (std::size_t i = 0; i < comm::kNumKinds; ++i) {
    const auto kind = static_cast<comm::Kind>(i);
    if (comm::kind_name(kind) == name) return kind;
  }
  LOWTIDE_INVARIANT(false, "a collective's name");
}

// (type or "", what was expected, what to do)
std::tuple<std::string, std::string, std::string> infer(
    const Rule& rule, const Operands& operands, const std::string& axis) {
  std::vector<spmd::Operand> inputs;
  for (const auto& [type, needs_gradient] : operands) {
    inputs.push_back({type_of(type), needs_gradient});
  }
  const spmd::Inference found = spmd::infer(rule, inputs);
  return {found.type ? std::string(spmd::type_name(*found.type)) : "",
          std::string(spmd::problem_text(found.problem)),
          spmd::remedy(found.problem, axis)};
}

Rule same_as(std::int64_t index) {
  if (index < 0) {
    throw InvalidArgument(
        base::error_text("SAME_AS", "the index of a tensor input, from 0",
                         std::to_string(index), "Pass 0 for the first."));
  }
  return spmd::SAME_AS(index);
}

void bind_rules(py::module_& module) {
  py::class_<Rule>(module, "ReplicationRule",
                   "How an operator's output type follows from its inputs'.")
      .def("__repr__", [](const Rule& rule) { return spmd::describe(rule); })
      .def("__eq__", [](const Rule& a, const Rule& b) { return a == b; })
      .def("__hash__",
           [](const Rule& rule) {
             return py::hash(py::str(spmd::describe(rule)));
           })
      .def_property_readonly("communicates",
                             [](const Rule& rule) {
                               return rule.kind == spmd::RuleKind::collective;
                             })
      .def_property_readonly("src",
                             [](const Rule& rule) {
                               return std::string(spmd::type_name(rule.src));
                             })
      .def_property_readonly("dst",
                             [](const Rule& rule) {
                               return std::string(spmd::type_name(rule.dst));
                             })
      .def_property_readonly("index",
                             [](const Rule& rule) { return rule.index; });
  module.attr("RULE_LOCAL") = spmd::LOCAL;
  module.attr("RULE_LINEAR") = spmd::LINEAR;
  module.attr("RULE_MULTILINEAR") = spmd::MULTILINEAR;
  module.def("rule_same_as", &same_as, py::arg("index"));
  module.def(
      "rule_collective",
      [](const std::string& src, const std::string& dst) {
        return spmd::COLLECTIVE(type_of(src), type_of(dst));
      },
      py::arg("src"), py::arg("dst"));
  module.def("register_rule", &spmd::register_rule, py::arg("op"),
             py::arg("rule"));
  module.def(
      "find_rule",
      [](const std::string& op) { return spmd::rule_book().find(op); },
      py::arg("op"));
  module.def("infer_type", &infer, py::arg("rule"), py::arg("operands"),
             py::arg("axis"));
}

void bind_transitions(py::module_& module) {
  module.def(
      "apply_transition",
      [](const at::Tensor& x, const std::string& operation,
         const std::string& src, const std::string& dst,
         std::shared_ptr<Collectives> axis, std::int64_t split,
         std::int64_t join) {
        const spmd::Step step{operation_of(operation), type_of(src),
                              type_of(dst)};
        const py::gil_scoped_release no_gil;
        return spmd::apply(x, step, std::move(axis), {split, join});
      },
      py::arg("x"), py::arg("operation"), py::arg("src"), py::arg("dst"),
      py::arg("axis"), py::kw_only(), py::arg("split"), py::arg("join"));
  module.def(
      "transition_backward",
      [](const std::string& operation, const std::string& src,
         const std::string& dst) {
        const spmd::Step back = spmd::transition(operation_of(operation),
                                                 type_of(src), type_of(dst))
                                    .backward;
        return name_of(spmd::wire_kind(back.operation));
      },
      py::arg("operation"), py::arg("src"), py::arg("dst"));
  module.def("transitions", [] {
    using Row = std::tuple<std::string, std::string, std::string>;
    std::vector<std::pair<Row, Row>> rows;
    const auto row = [](const spmd::Step& step) {
      return Row(spmd::operation_name(step.operation),
                 spmd::type_name(step.src), spmd::type_name(step.dst));
    };
    for (const spmd::Transition& each : spmd::kTransitions) {
      rows.emplace_back(row(each.forward), row(each.backward));
    }
    return rows;
  });
  module.def(
      "collective_backward",
      [](const std::string& src, const std::string& dst) {
        return name_of(spmd::backward_kind(type_of(src), type_of(dst)));
      },
      py::arg("src"), py::arg("dst"));
  module.def(
      "gradient_collective",
      [](const std::string& from, const std::string& to) {
        return name_of(spmd::gradient_kind(type_of(from), type_of(to)));
      },
      py::arg("from_type"), py::arg("to_type"));
}

void bind_record(py::module_& module) {
  py::class_<Finding>(module, "CollectiveFinding")
      .def_readonly("missing", &Finding::missing)
      .def_readonly("kind", &Finding::kind)
      .def_readonly("group", &Finding::group)
      .def_readonly("value", &Finding::value)
      .def_readonly("bytes", &Finding::bytes)
      .def_readonly("op", &Finding::op)
      .def_readonly("where", &Finding::where);
  py::class_<RegionRecord, std::shared_ptr<RegionRecord>>(
      module, "RegionRecord", "One forward of a region, and its backwards.")
      .def(py::init<>())
      .def("open", &RegionRecord::open)
      .def("close", &RegionRecord::close)
      .def("begin_operator", &RegionRecord::begin_operator, py::arg("name"),
           py::arg("where"))
      .def(
          "require",
          [](RegionRecord& record, const std::string& kind,
             const std::string& group) {
            record.require(kind_of(kind), group);
          },
          py::arg("kind"), py::arg("group"))
      .def("end_operator", &RegionRecord::end_operator)
      .def(
          "require_anywhere",
          [](RegionRecord& record, const std::string& kind,
             const std::string& group, const std::string& value) {
            record.require_anywhere(kind_of(kind), group, value);
          },
          py::arg("kind"), py::arg("group"), py::arg("value"))
      .def("place", &RegionRecord::place, py::arg("sequence"))
      .def("settle", &RegionRecord::settle)
      .def("sent", [](const RegionRecord& record) {
        py::dict result;
        for (const auto& [kind, sent] : record.sent()) {
          result[py::str(kind)] = py::make_tuple(sent.calls, sent.bytes);
        }
        return result;
      });
  module.def("digest", &base::digest, py::arg("tensor"), NoGil());
  module.def(
      "first_difference",
      [](Collectives& axis, const c10::Device& device,
         const std::vector<std::int64_t>& values)
          -> std::optional<std::pair<std::int64_t, std::vector<std::int64_t>>> {
        const py::gil_scoped_release no_gil;
        const auto found = spmd::first_difference(axis, device, values);
        if (!found) return std::nullopt;
        return std::pair(found->index, found->by_rank);
      },
      py::arg("axis"), py::arg("device"), py::arg("values"));
}

}  // namespace

void bind_spmd(py::module_& module) {
  bind_rules(module);
  bind_transitions(module);
  bind_record(module);
}

}  // namespace lowtide::python
